"""Time of a compiled step of `shapes` by part: the forward's library, and products, attention and cache alone."""

import statistics
import time
from collections.abc import Callable

import torch
from timing import CAPTION, timed_decode

from specbench.models.catalog import load_model
from specbench.models.transformer.kv_cache import PositionCache
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling
from specbench.system.matrix_products import product

COLUMNS, CALLS = {1: "ar", 16: "sjd"}, 200
_READ = 160  # Cache slots that attention reads, as in the middle of an image


@torch.inference_mode()
def bench_parts(sampling: Sampling, rounds: int) -> tuple[list[dict], list[str]]:
    """Milliseconds of each part of a step with one column (AR) and with 16 (SJD), medians of calls, by round."""
    model = load_model("shapes")
    model.compile()
    rows = []
    for columns, decoder in COLUMNS.items():
        spec = resolve(decoder, {} if columns == 1 else {"window": columns})
        timed_decode(model, spec, sampling, 0)
        session = model.begin(model.encode([CAPTION]), sampling.guidance, columns)
        positions = torch.arange(120, 120 + columns)[None]
        tokens = torch.zeros_like(positions)
        session.forward(tokens, positions)
        libraries = model.compiled_step(sampling.guidance)._runners
        key = next(key for key in libraries if key[1] == (columns == 1))
        noting = libraries[key] = _Noting(libraries[key])
        session.forward(tokens, positions)
        libraries[key] = noting._library
        parts = {
            "forward": lambda s=session, t=tokens, p=positions: s.forward(t, p),
            "its library": noting.again,
            "products alone": _compiled(_products, model, columns),
            "attention alone": _compiled(_attention, model, columns),
            "cache alone": _compiled(_writes, model, columns),
        }
        for part in parts.values():
            part()
        for turn in range(rounds):
            image = timed_decode(model, spec, sampling, turn)
            times = {"step": image["wall_ms"] / image["nfe"]}
            times |= {name: image["spans_ms"][name] / image["nfe"] for name in ("draft", "target", "verify", "host")}
            times |= {name: _median_ms(part) for name, part in parts.items()}
            rows += [{"columns": columns, "round": turn, "part": name, "ms": ms} for name, ms in times.items()]
    capability = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    lines = [f"{capability}; milliseconds: columns 1, columns 16"]
    for name in dict.fromkeys(row["part"] for row in rows):
        shown = (
            statistics.median(row["ms"] for row in rows if (row["part"], row["columns"]) == (name, columns))
            for columns in COLUMNS
        )
        lines.append(f"{name}: {', '.join(f'{ms:.3f}' for ms in shown)}")
    return rows, lines


class _Noting:
    """A library that records the arguments of its calls."""

    def __init__(self, library: object):
        self._library = library

    def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        self.again = lambda: self._library.run(tensors)
        return self.again()


def _median_ms(call: Callable[[], object]) -> float:
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def _compiled(part: Callable, model: object, columns: int) -> Callable[[], object]:
    """`part`, compiled like the steps of a decoder."""
    function, arguments = part(model, columns)
    compiled = torch.compile(function, fullgraph=True, options={"cpp_wrapper": True})
    return lambda: compiled(*arguments)


def _products(model, columns: int) -> tuple[Callable, tuple]:
    """All products of the network with `columns` columns of two rows."""
    weights = [layer.weight for layer in model.backbone.modules() if isinstance(layer, torch.nn.Linear)]
    weights.append(model._network.head.weight)
    hidden = {width: torch.randn(2, columns, width) for width in {weight.shape[1] for weight in weights}}
    return lambda weights, hidden: [product(hidden[weight.shape[1]], weight) for weight in weights], (weights, hidden)


def _attention(model, columns: int) -> tuple[Callable, tuple]:
    config = model.backbone.config
    heads, width = config.num_attention_heads, config.head_dim
    query, cache = torch.randn(2, heads, columns, width), torch.randn(2, 2, heads, _READ, width)
    mask = torch.ones(2, 1, columns, _READ, dtype=torch.bool)

    def attend(query: torch.Tensor, cache: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for _ in range(config.num_hidden_layers):
            query = torch.nn.functional.scaled_dot_product_attention(query, *cache, mask)
        return query

    return attend, (query, cache, mask)


def _writes(model, columns: int) -> tuple[Callable, tuple]:
    config = model.backbone.config
    shape = 2, config.num_attention_heads, 304, config.head_dim
    buffers = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(config.num_hidden_layers)]
    new, slots = torch.randn(*shape[:2], columns, shape[3]), torch.arange(120, 120 + columns).expand(2, -1).contiguous()

    def write(buffers: list, new: torch.Tensor, slots: torch.Tensor) -> None:
        cache = PositionCache(len(buffers), 304, buffers)
        cache.place(slots, _READ)
        for layer in cache.layers:
            layer.update(new, new)

    return write, (buffers, new, slots)
