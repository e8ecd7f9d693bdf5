"""A metric whose values a test chooses: the mean pixel."""

from specbench.metrics import catalog
from specbench.metrics.base import PerImageMetric


class Brightness(PerImageMetric):
    name, summary, version = "brightness", "mean pixel", "1"

    def identity(self):
        return {"version": self.version}

    def accepts(self, category, meta):
        return True

    def features_of(self, sample):
        return {"value": float(sample.pixels.mean())}


def register(monkeypatch, name: str, place: str) -> None:
    """Make the metric of this module and class known by a name."""
    monkeypatch.setitem(catalog.METRICS, name, catalog.MetricEntry(place, "mean pixel"))
