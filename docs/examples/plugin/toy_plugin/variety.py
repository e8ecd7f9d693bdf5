"""A metric of a set of images: how much their mean brightness varies."""

import pyarrow as pa

from specbench.metrics.base import Metric, Score
from specbench.stats import Estimate


class Variety(Metric):
    name = "variety"
    summary = "standard deviation over images of their mean brightness"
    better = "lower"  # which values are better; by default "higher"
    columns = {"brightness": pa.float32()}  # noqa: RUF012  what `features` returns for each image, and is kept

    def identity(self):
        return {"brightness": "mean of red, green and blue"}

    def features(self, samples):
        return [{"brightness": float(sample.pixels.mean())} for sample in samples]

    def scores(self, statistics):
        """The overall score first. `statistics` is a data frame with prompt_id, sample, category and the columns."""
        value = float(statistics["brightness"].std())
        return [Score(self.name, Estimate(value, low=None, high=None), n=len(statistics))]
