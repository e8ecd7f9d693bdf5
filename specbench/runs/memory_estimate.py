"""Memory estimate and largest batch, computed before loading. Imports torch only to query a GPU.

    peak   = weights + batch x (cache + inputs + max(prefill, target, verify)), or while images are drawn
             weights + batch x (cache + inputs) + decoding of one picture (of a batch, if they are drawn together)

    weights  the model, image decoder and text encoder; a draft head (`HEAD_SIZES`); LANTERN's table of neighbours;
             `table_bytes`
    cache    rows x (prompt + stream slots + 2 x columns) x bytes per token, for all layers and the draft head's layers;
             on a GPU, the prompt and the total are rounded up to whole blocks
    inputs   rows x (prompt x embeddings and features [d] + stream slots x numbers that the model adds per token);
             a distribution [V] per stream slot and column for an init that samples from earlier ones, and one per
             stream slot for drafts in several image rows
    prefill  rows x prompt x a layer's activations
    target   columns x (rows x (a layer's activations and the last features [d]) + 2 distributions: the last p and q)
    verify   columns x distributions, see `distributions_alive`
    picture  pixels x numbers per pixel x 4 bytes

A layer's activations, per row and column, are 4 x d (input, residual stream before and after attention, norm) and 3 x
inner (gate, up projection, their product). Rows are two per image with guidance, else one. Columns are counted
in the widest forward: a window, the nodes of a tree, the rows of an image. Distributions are float32, the rest is in
the model's dtype. A prompt has `ASSUMED_PROMPT_TOKENS` elements.

Not included: the cache of new prompts while a throughput run refills rows, numpy arrays, kernels and libraries, and the
memory pool of captured graphs on a GPU (up to one `target` for each form).
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from specbench.errors import SpecbenchError
from specbench.models.facts import BYTES, ModelFacts
from specbench.models.network_sizes import HEAD_SIZES, whole_blocks
from specbench.runs.decoder_args import with_window
from specbench.specs.components import columns_fed
from specbench.specs.presets import DecoderSpec, resolve
from specbench.specs.run_spec import Sampling
from specbench.system.limits import available_memory

ASSUMED_PROMPT_TOKENS = 256  # Assumed prompt length in elements; prompts of the model families have up to about 130
NEIGHBOURS = 1000  # Entries (int32) per token in LANTERN's table of neighbours
TREES = 256  # Number of trees whose tables are cached; see `specbench.decoding.draft_tree.routes`
MARGIN = 0.9  # Share of the free memory that may be used
_MOST = 4096
WINDOWS = (2, 4, 8, 16, 32, 64, 96, 128)  # Windows that `--window auto` tries


@dataclass(frozen=True)
class Footprint:
    """Memory in bytes: `weights` once; `cache`, `inputs` and `step` (the largest of prefill, target, verify) per image
    of the batch; `picture` for the image that is rendered, or if `together`, per image of the batch."""

    weights: int
    cache: int
    inputs: int
    step: int
    picture: int = 0
    together: bool = False

    @property
    def per_image(self) -> int:
        """Additional bytes per image in a large batch."""
        return self.cache + self.inputs + max(self.step, self.picture * self.together)

    def total(self, batch: int) -> int:
        drawn = batch if self.together else min(batch, 1)
        return self.weights + batch * (self.cache + self.inputs) + max(batch * self.step, drawn * self.picture)


def footprint(
    model: ModelFacts, decoder: DecoderSpec, sampling: Sampling, dtype: str, device: str = "cpu"
) -> Footprint | None:
    """Memory of one decoder; None if the sizes of the model are unknown."""
    kv, network = model.kv_bytes(dtype), model.network
    if kv is None or network is None:
        return None
    number, distribution, memory = BYTES[dtype], 4 * model.v_image, _needs(decoder)
    rows, columns = 1 if sampling.guidance == 1 else 2, most_columns(decoder, model)
    weights, width = model.fixed_bytes(dtype), network.width * number
    weights += table_bytes(columns) * memory["tables"]
    if head := HEAD_SIZES.get(decoder.head_kind):
        kv += head.cached_layers * (kv // network.layers)
        weights += head.weights(network) * number
    weights += 4 * model.v_image * min(NEIGHBOURS, model.v_image - 1) * memory["neighbours"]
    slots = ASSUMED_PROMPT_TOKENS + model.stream + 2 * columns
    if device != "cpu":
        slots = whole_blocks(whole_blocks(ASSUMED_PROMPT_TOKENS) + model.stream + 2 * columns)
    cache = rows * slots * kv
    inputs = rows * (2 * ASSUMED_PROMPT_TOKENS * width + model.stream * model.slot_numbers * number)
    inputs += (model.stream + columns) * distribution * bool(memory["slot_distributions"])
    inputs += rows * (model.stream + columns) * width * memory["slot_features"]
    inputs += (model.stream + 1) * distribution * memory["slot_drafts"]
    activations = 4 * width + 3 * network.inner * number
    prefill = rows * ASSUMED_PROMPT_TOKENS * activations
    target = columns * (rows * (activations + width) + 2 * distribution)
    verify = columns * (
        rows * width + distributions_alive(decoder, sampling, model.stream > model.tokens) * distribution
    )
    picture = 4 * math.prod(model.resolution) * model.pixel_numbers
    return Footprint(weights, cache, inputs, max(prefill, target, verify), picture, model.renders_together)


def _needs(decoder: DecoderSpec) -> Counter[str]:
    """Sum the memory needs that the decoder's components declare, for each kind of memory."""
    return sum((Counter(part.memory) for part in decoder.components), Counter())


def single_image_bytes(model: ModelFacts) -> int | None:
    """Return the memory for decoding one image with AR and the model's sampling and dtype; None if unknown."""
    need = footprint(model, resolve("ar"), model.sampling(), model.dtype)
    return need.total(1) if need else None


def table_bytes(columns: int) -> int:
    """Return the bytes of all tables of draft trees with up to `columns` nodes (ancestors, siblings, routes)."""
    return 16 * sum(width**2 for width in range(max(1, columns - TREES + 1), columns + 1))


def distributions_alive(decoder: DecoderSpec, sampling: Sampling, forced: bool) -> int:
    """Return the peak number of float32 distributions per column during verification; an int64 tensor counts as two.
    `forced`: whether the grammar forces slots. At the peak there are the last p, q and guided logits, the tensors that
    components keep, and the largest of: truncated logits and p; with forced slots, padded p, one-hots and combined p;
    temporaries of top-p (scaled, sorted and summed logits); temporaries of components."""
    drawing = 3 if forced else 2
    # scaled (if temperature is not 1), sorted, order (int64: 2), cumulative sum, previous sum
    top_p = 5 + (sampling.temperature != 1) if sampling.top_p < 1 else 0
    temporary = max(drawing, top_p, *(part.memory.get("temporary", 0) for part in decoder.components))
    return 3 + _needs(decoder)["kept"] + temporary


def most_columns(decoder: DecoderSpec, model: ModelFacts) -> int:
    """Return the columns of the widest forward: one window, or a window in every image row."""
    columns = columns_fed(decoder.options)
    return columns * _image_rows(model) if _needs(decoder)["image_rows"] else columns


def usual_columns(decoder: DecoderSpec, model: ModelFacts) -> int:
    """Return the columns of a forward in the middle of an image. Decoders of several image rows feed only active rows:
    if rows progress at equal rates, all rows that start before the first active row is complete."""
    if not _needs(decoder)["image_rows"]:
        return columns_fed(decoder.options)
    rows = _image_rows(model)
    width = model.tokens // rows
    active = math.ceil(width / min(width, int(decoder.options["rows-window"])))
    return min(rows, active) * min(width, columns_fed(decoder.options))


def _image_rows(model: ModelFacts) -> int:
    height, width = model.resolution
    return math.isqrt(model.tokens * height // width)


def free_memory(device: str) -> int | None:
    """Free bytes on the device; None if unknown."""
    if device.startswith("cuda"):
        import torch  # takes seconds

        return torch.cuda.mem_get_info(device)[0] if torch.cuda.is_available() else None
    return available_memory()


def largest_batch(needs: Iterable[Footprint], free: int) -> int:
    """Largest batch for which every footprint fits; 0 if not even one image does."""
    return min(max(0, bisect_right(range(2**31), MARGIN * free, key=need.total) - 1) for need in needs)


def fitting_windows(
    model: ModelFacts, decoder: DecoderSpec, sampling: Sampling, dtype: str, device: str
) -> tuple[int, ...]:
    """Return the `WINDOWS`, ascending, that are no wider than an image of the model and with which one image fits."""
    windows = [window for window in WINDOWS if window <= max(WINDOWS[0], model.stream)]
    free = free_memory(device)
    needs = {window: footprint(model, with_window(decoder, window), sampling, dtype, device) for window in windows}
    fitting = [window for window, need in needs.items() if need is None or free is None or largest_batch([need], free)]
    if not fitting:
        what = f"--window auto: a window of {windows[0]} does not fit into the {_gib(free or 0)} free on {device}"
        raise SpecbenchError(what, "use --dtype int8wo, another device, or a smaller model")
    return tuple(fitting)


def settle_batch(
    batch: int | str, model: ModelFacts, decoders: Iterable[DecoderSpec], sampling: Sampling, dtype: str, device: str
) -> tuple[int, dict[str, object] | None]:
    """Resolve the batch size ("auto": the largest that fits); also return the memory estimate, if any."""
    if batch == 1:
        return 1, None
    needs = [need for decoder in decoders if (need := footprint(model, decoder, sampling, dtype, device))]
    free = free_memory(device) if needs else None
    if free is None:
        if batch == "auto":
            raise SpecbenchError(f"--batch auto: the memory use of {model.name} is unknown", "give a number: --batch N")
        return int(batch), None
    most = largest_batch(needs, free)
    heaviest = max(needs, key=lambda need: need.per_image)
    drawing = "" if heaviest.together or not heaviest.picture else f" ({_gib(heaviest.picture)} to render one)"
    if most < (1 if batch == "auto" else int(batch)):
        raise SpecbenchError(
            f"--batch {batch}: {_gib(heaviest.weights)} of weights and {_gib(heaviest.per_image)} per image{drawing} "
            f"do not fit into {MARGIN:.0%} of the {_gib(free)} free on {device}",
            f"use --batch {most}" if most > 0 else "use --dtype int8wo, another device, or a smaller model",
        )
    chosen = min(most, _MOST) if batch == "auto" else int(batch)
    return chosen, {"batch": chosen, "largest": most, "free": free, "margin": MARGIN} | asdict(heaviest)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
