"""A metric: standard deviation of an image's brightness."""

import numpy as np

from specbench.metrics.base import PerImageMetric


class Contrast(PerImageMetric):
    name = "contrast"
    summary = "standard deviation of brightness, 0 to 127.5, mean over images"

    def identity(self):
        """Whatever can change a value. Scores of different identities are never compared."""
        return {"weights of red, green, blue": "0.299, 0.587, 0.114"}

    def features(self, samples):
        """One dict per image; `samples[i].pixels` is uint8 [H, W, 3], `.prompt` and `.meta` are its prompt."""
        return [{"value": float(np.std(sample.pixels @ [0.299, 0.587, 0.114]))} for sample in samples]
