"""How many images fit into memory at once, counted before anything is loaded. No torch here, except to ask a GPU.

    peak   = weights + batch x (cache + inputs + max(prefill, target, verify)), or while images are drawn
             weights + batch x (cache + inputs) + one picture's decoding (a batch's, where they are drawn together)

    weights  the model, image decoder and text encoder; a draft head; LANTERN's table of neighbours; `table_bytes`
    cache    rows x (prompt + stream slots + 2 x columns) x bytes per token, of all layers and a draft head's one
    inputs   rows x (prompt x embeddings and features [d] + stream slots x what the model adds to tokens there);
             a law [V] per stream slot and column for a rule that looks at all former ones of an image
    prefill  rows x prompt x a layer's activations
    target   columns x (rows x (a layer's activations and the last features [d]) + 2 laws: the last p and q)
    verify   columns x laws, see `laws_alive`
    picture  pixels x numbers per pixel x 4 bytes

A layer's activations, per row and column, are 4 x d (input, residual stream before and after attention, norm) and
3 x inner (the gate, what it multiplies, their product). Rows are two per image with guidance, else one. Columns are
those of the widest forward: a window, the nodes of a tree, the rows of an image. Laws are float32, the rest is in the
model's format. A prompt has `PROMPT` elements.

A draft head is taken for one layer of the target, a projection of 2d x d and a copy of the token table, since it may
not be on this disk yet.

Not in it: the cache of new prompts while a throughput run refills rows, arrays of numpy, text encoding, which is over
when the cache is made, and what kernels and libraries hold for themselves. Nor what compiled steps add, which has not
been measured: on a GPU the graphs captured have a pool of their own, which holds the activations and results of every
form (a power of two of columns, a number of blocks of cache): a `target` for each, less what torch lets them share.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from specbench.errors import SpecbenchError
from specbench.models.catalog import Model
from specbench.models.hub_model import BYTES
from specbench.specs.presets import DecoderSpec
from specbench.specs.run_spec import Sampling
from specbench.specs.tree_paths import node_paths

PROMPT = 256
"""Elements a prompt may have, by assumption; families take up to about 130."""
NEIGHBOURS = 1000
"""Entries per token in LANTERN's table of int32."""
TREES = 256
"""Trees whose tables a process keeps; see `specbench.decoding.draft_tree.routes`."""
MARGIN = 0.9
"""Share of the free memory that is planned with."""
MOST = 4096


@dataclass(frozen=True)
class Footprint:
    """Bytes: `weights` once; `cache`, `inputs` and `step`, the largest of prefill, target and verify, per image decoded
    together; `picture` per image drawn at once, which are all of a batch if `together`."""

    weights: int
    cache: int
    inputs: int
    step: int
    picture: int = 0
    together: bool = False

    @property
    def per_image(self) -> int:
        """Bytes of one image more in a large batch."""
        return self.cache + self.inputs + max(self.step, self.picture * self.together)

    def total(self, batch: int) -> int:
        drawn = batch if self.together else min(batch, 1)
        return self.weights + batch * (self.cache + self.inputs) + max(batch * self.step, drawn * self.picture)


def footprint(model: Model, decoder: DecoderSpec, sampling: Sampling, dtype: str) -> Footprint | None:
    """The memory of one decoder; None where the model has not been counted."""
    kv, size = model.kv_bytes(dtype), model.size
    if kv is None or size is None:
        return None
    layer, number, law = size.layer(model.layers, model.v_image), BYTES[dtype], 4 * model.v_image
    rows, columns = 1 if sampling.guidance == 1 else 2, most_columns(decoder, model)
    weights, width = model.fixed_bytes(dtype) + table_bytes(columns), layer.width * number
    if decoder.drafter == "eagle":
        kv += kv // model.layers
        weights += (layer.weights + 2 * layer.width**2 + model.table * layer.width) * number
    if decoder.verifier.startswith("lantern"):
        weights += 4 * model.v_image * min(NEIGHBOURS, model.v_image - 1)
    cache = rows * (PROMPT + model.stream + 2 * columns) * kv
    inputs = rows * (2 * PROMPT * width + model.stream * model.slot_numbers * number)
    if decoder.init.endswith("-sample"):
        inputs += (model.stream + columns) * law
    activations = 4 * width + 3 * layer.inner * number
    prefill = rows * PROMPT * activations
    target = columns * (rows * (activations + width) + 2 * law)
    verify = columns * (rows * width + laws_alive(decoder, sampling, model.stream > model.tokens) * law)
    picture = 4 * math.prod(model.resolution) * model.pixel_numbers
    return Footprint(weights, cache, inputs, max(prefill, target, verify), picture, model.renders_together)


def table_bytes(columns: int) -> int:
    """Tables of chains of every width up to `columns`: ancestors in float32, routes in int64."""
    return 12 * sum(width**2 for width in range(max(1, columns - TREES + 1), columns + 1))


def laws_alive(decoder: DecoderSpec, sampling: Sampling, forced: bool) -> int:
    """Distributions per column alive at once in the heaviest moment of a verification; `forced`: the grammar has slots
    that are. They are float32; int64 counts for two.

    The last p, q and the guided logits outlast it. Besides them there are the truncated logits and p; or p padded for
    the forced slots, their one-hots and p with both; or what one of these rules works with: top-p scales, sorts and
    sums up the logits, coupling takes q and the residual p - q before and after a check, a race hashes an address per
    token, grouping ranks p by integer keys. On a CPU, if not compiled, those of wide vocabularies have only the tokens
    left by top-k, and the last two are numpy's.
    """
    alone = decoder.drafter in ("none", "zipar")
    return 3 + max(
        3 if forced else 2,
        5 + (sampling.temperature != 1) if sampling.top_p < 1 else 0,  # [scaled,] ranked, order (2), sum, sum before
        4 if decoder.refine == "couple" and not alone else 0,  # p, q, p - q, checked
        7 if decoder.refine == "gumbel" or alone else 0,  # p, bits (2), shifted (2), masked (2)
        9 if decoder.verifier == "grouped" and not alone else 0,  # p, bits (2), keys (2), sorted (2), order (2)
    )


def most_columns(decoder: DecoderSpec, model: Model) -> int:
    """Columns of the widest forward."""
    options = dict(decoder.options)
    if "tree" in options:
        return 1 + len(node_paths(str(options["tree"])))
    if decoder.drafter == "zipar":
        height, width = model.resolution
        return math.isqrt(model.tokens * height // width)
    window = int(options.get("window", 1))
    return window + (int(options.get("siblings", 1)) - 1) * min(int(options.get("depth", 0)), window - 1)


def free_memory(device: str) -> int | None:
    """Bytes free on the device; None where nobody says."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(device)[0] if torch.cuda.is_available() else None
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def largest_batch(needs: Iterable[Footprint], free: int) -> int:
    """The most images at once for which every footprint fits; 0 where not even one does."""
    return min(max(0, bisect_right(range(2**31), MARGIN * free, key=need.total) - 1) for need in needs)


def settle_batch(
    batch: int | str, model: Model, decoders: Iterable[DecoderSpec], sampling: Sampling, dtype: str, device: str
) -> tuple[int, dict[str, object] | None]:
    """The batch to decode in, "auto" being the largest that fits, and the reckoning where there was one to make.

    Raises:
        SpecbenchError: the batch does not fit, or "auto" where sizes or the free memory are not known.
    """
    needs = [need for decoder in decoders if (need := footprint(model, decoder, sampling, dtype))]
    free = free_memory(device) if needs else None
    if batch == 1 or free is None:
        if batch == "auto":
            raise SpecbenchError(f"--batch auto: the memory that {model.name} needs here is not known", "--batch N")
        return int(batch), None
    most = largest_batch(needs, free)
    heaviest = max(needs, key=lambda need: need.per_image)
    drawing = "" if heaviest.together or not heaviest.picture else f" ({_gib(heaviest.picture)} to draw one)"
    if most < (1 if batch == "auto" else int(batch)):
        raise SpecbenchError(
            f"--batch {batch}: {_gib(heaviest.weights)} of weights and {_gib(heaviest.per_image)} per image{drawing} "
            f"do not fit into {MARGIN:.0%} of the {_gib(free)} free on {device}",
            f"--batch {most} fits" if most > 0 else "another device, or a smaller model",
        )
    chosen = min(most, MOST) if batch == "auto" else int(batch)
    return chosen, {"batch": chosen, "largest": most, "free": free, "margin": MARGIN} | asdict(heaviest)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
