"""Upper bounds of the gain from siblings and lookups: steps of hypothetical drafters on the same images.

    python dev/frontier/bounds.py --model field --images 24 sjd-pac:window=32,drafter=siblings-everywhere,sites=8 ...

Drafters in addition to specbench's:

- `siblings-everywhere`: candidates for each of the first `sites` drafts, in one static tree, which covers every way to
  place siblings there. With `places` only that many drafts have candidates: the first drafts whose score is at least
  `least`. The score is the probability that all earlier drafts are accepted times the probability that this draft
  is rejected; both come from TV(p, q) of the previous step. A score depends only on earlier slots, so this is lossless.
  Columns of other drafts are fed and ignored, because tokens per step do not depend on them.
- `oracle-lookup`: if the tokens around a slot have changed, q is the p of the earlier slot of the image that overlaps
  most with the true p of this slot, if its overlap exceeds the overlap of q by `margin`. No lookup can do better.
- `known-p`: the true p replaces q for the first `lookups` drafts; only for the random field, like the oracle.

One line per decoder goes to bounds.jsonl, with target forwards of every image; existing lines are not measured again.
"""

import argparse
import json
import sys
import time
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from field_model import FieldModel  # noqa: E402 - found through the line above
from json_rows import read_rows  # noqa: E402 - likewise
from search import count_forwards, shown, spec_of, spread_requests, tokens_per_step  # noqa: E402 - likewise

from specbench.decoding.draft_tree import routes  # noqa: E402 - likewise
from specbench.decoding.drafters.jacobi import Jacobi  # noqa: E402
from specbench.decoding.drafters.lookup import LookupJacobi, around, common_mass  # noqa: E402
from specbench.decoding.drafters.token_init import Init  # noqa: E402
from specbench.decoding.interfaces import (  # noqa: E402
    Context,
    Proposal,
    Verification,
)
from specbench.decoding.noise import Stream  # noqa: E402
from specbench.decoding.sampling import draw, without  # noqa: E402
from specbench.models.catalog import find_model, load_model  # noqa: E402
from specbench.models.interface import Tree  # noqa: E402
from specbench.specs.components import DRAFTERS, Component  # noqa: E402
from specbench.specs.options import Option  # noqa: E402
from specbench.specs.run_spec import Sampling  # noqa: E402
from specbench.stats.intervals import ratio_of_totals  # noqa: E402
from specbench.system.version import __version__  # noqa: E402


class SiblingsEverywhere(Jacobi):
    """The Jacobi chain with `siblings` candidates for each of its first `sites` drafts."""

    def __init__(
        self,
        context: Context,
        init: Init,
        window: int,
        sites: int,
        siblings: int,
        depth: int,
        places: int,
        least: float,
    ):
        super().__init__(context, init, window)
        self._shape, self._places, self._least = (sites, siblings, depth), places, least
        self.columns = len(branches(window - 1, *self._shape).parents)
        self._overlap: Tensor | None = None
        """[B, D] 1 - TV(p, q) of the drafts of the previous step."""

    def observe(self, verification: Verification, positions: Tensor, shift: Tensor, keep_tail: bool) -> None:
        drafts = min(verification.p.shape[1], self._tested.shape[1])
        self._overlap = common_mass(verification.p[:, :drafts], self._tested[:, :drafts])
        super().observe(verification, positions, shift, keep_tail)

    def _expand(self, trunk: Proposal, committed: Tensor, step: Tensor) -> Proposal:
        sites, siblings, depth = self._shape
        drafts, count = trunk.tokens[:, 1:], trunk.tokens.shape[1] - 1
        tokens, positions, placed = [trunk.tokens], [trunk.positions], self._placed(len(drafts), sites)
        for site in range(min(sites, count)):
            q, token, deep = trunk.q[:, site], drafts[:, site], min(depth, count - site)
            for sibling in range(1, siblings):
                q, slot = without(q, token), committed[:, None] + site
                uniform = self._batch.noise.uniform(slot, Stream.SIBLING, step * siblings + sibling)
                token = draw(q, uniform.squeeze(1))
                # A copy of the draft is skipped, because its probability in q without earlier siblings is 0.
                tokens += [
                    torch.where(placed[:, site], token, drafts[:, site])[:, None],
                    drafts[:, site + 1 : site + deep],
                ]
                positions.append(trunk.positions[:, site + 1 : site + deep + 1])
        tree = branches(count, *self._shape)
        by_column = routes(tree, drafts.device).depth.clamp(max=max(count - 1, 0))
        q = trunk.q[:, by_column] if count else trunk.q
        return Proposal(torch.cat(tokens, 1), torch.cat(positions, 1), q, tree, self.columns, trunk.earlier)

    def _placed(self, rows: int, sites: int) -> Tensor:
        """[B, sites] whether a draft has candidates; the first draft always has candidates."""
        if self._overlap is None or self._places >= sites:
            return torch.ones(rows, sites, dtype=torch.bool)
        place, drafts = torch.arange(sites) + self._shift[:, None], self._overlap.shape[1]
        drafted = place < drafts
        accepted = torch.where(drafted, self._overlap.gather(1, place.clamp(max=drafts - 1)), 1.0)
        reached = torch.nn.functional.pad(accepted.cumprod(1)[:, :-1], (1, 0), value=1.0)
        chosen = drafted & (reached * (1 - accepted) >= self._least)
        chosen[:, 0] = True
        return chosen & (chosen.cumsum(1) <= self._places)


@lru_cache
def branches(drafts: int, sites: int, siblings: int, depth: int) -> Tree:
    """A trunk of `drafts` columns, and `siblings - 1` chains of at most `depth` from each of its first `sites`."""
    parents = list(range(-1, drafts))
    for site in range(min(sites, drafts)):
        for _ in range(siblings - 1):
            parents.append(site)
            parents.extend(range(len(parents) - 1, len(parents) + min(depth, drafts - site) - 2))
    return Tree(tuple(parents))


class OracleLookup(LookupJacobi):
    """Looked-up drafts that choose the slot of the lookup by the true p."""

    def __init__(self, context: Context, init: Init, margin: float, **options: int):
        super().__init__(context, init, **options)
        self._model, self._margin = context.model, margin

    def _look_up(self, committed: Tensor, positions: Tensor, step: Tensor, q: Tensor) -> Tensor:
        tokens, length, recorded = self._batch.tokens, len(self._free), []
        for draft in range(min(self._lookups, positions.shape[1])):
            slot = positions[:, draft : draft + 1]
            inside = slot.clamp(max=length - 1)
            p = self._model.logits(around(tokens, self._model.neighbours[inside] - 1)).softmax(-1)
            jacobi, seen = q[:, draft : draft + 1], self._neighbours[inside]
            changed = (around(tokens, seen) != around(self._fed, seen)).any(-1) | (slot >= self._drafted_to[:, None])
            p_there, overlap = self._best(p, committed)
            taken = changed & (overlap > common_mass(p, jacobi) + self._margin) & (slot < length)
            token = draw(p_there, self._batch.noise.uniform(slot, Stream.SIBLING, step))
            tokens.scatter_(1, slot, torch.where(taken, token, tokens.gather(1, slot)))
            recorded.append(torch.where(taken[..., None], p_there, jacobi))
        return torch.cat([*recorded, q[:, len(recorded) :]], dim=1)

    def _best(self, p: Tensor, committed: Tensor) -> tuple[Tensor, Tensor]:
        """The committed slot's distribution [B, 1, V] that overlaps most with p [B, 1, V], and the overlap [B, 1]."""
        history = self._history[:, : len(self._free)]
        overlap = torch.stack([common_mass(row, true) for row, true in zip(history, p, strict=True)])
        past = torch.arange(len(self._free)) < committed[:, None]
        best, source = torch.where(past, overlap, -1.0).max(1, keepdim=True)
        return history[self._rows, source], best


class KnownP(OracleLookup):
    """Drafts from the true p."""

    def _best(self, p: Tensor, committed: Tensor) -> tuple[Tensor, Tensor]:
        return p, torch.ones_like(p[..., 0])


_WINDOW, _SIBLINGS, _DEPTH = DRAFTERS["jacobi-tree"].options
_LOOKUPS = DRAFTERS["jacobi-lookup"].options
ADDED = {
    "siblings-everywhere": Component(
        "bounds:SiblingsEverywhere",
        "candidates for each of the first drafts",
        (
            *(_WINDOW, _SIBLINGS, _DEPTH),
            Option("sites", 8, "drafts with candidates, from the first"),
            Option("places", 65536, "drafts that have candidates at once"),
            Option("least", 0.1, "least probability that a draft is the first rejected one"),
        ),
    ),
    "oracle-lookup": Component(
        "bounds:OracleLookup", "the best of all lookups", (*_LOOKUPS, Option("margin", 0.25, "least gain of a lookup"))
    ),
    "known-p": Component(
        "bounds:KnownP", "drafts from the true p", (*_LOOKUPS, Option("margin", 0.0, "least gain of a draft"))
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("decoders", nargs="+", help="as in `specbench run --decoder`; the first one is the baseline")
    parser.add_argument("--model", default="shapes", choices=("shapes", "field"))
    parser.add_argument("--images", type=int, default=24, help="prompts, one image each")
    parser.add_argument("--out", type=Path, default=Path("results/frontier/bounds.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    DRAFTERS.update(ADDED)
    by_setting = {(row["decoder"], row["model"], row["images"]): row for row in read_rows(options.out)}
    field = options.model == FieldModel.name
    model = FieldModel() if field else load_model(options.model)
    sampling = Sampling(1.0) if field else find_model(options.model).sampling()
    rows: list[dict] = []
    for name in options.decoders:
        row = by_setting.get((name, options.model, options.images))
        if row is None:
            start = time.process_time()
            forwards = count_forwards(model, spread_requests(options.images), spec_of(name), sampling)
            row = {"decoder": name, "model": options.model, "images": options.images, "length": model.layout.length}
            row |= {"forwards": forwards, "cpu_s": round(time.process_time() - start, 1)}
            row |= {"weights_sha256": model.weights_sha256, "version": __version__}
            with options.out.open("a") as out:
                out.write(json.dumps(row) + "\n")
        rows.append(row)
        ratio = ratio_of_totals(rows[0]["forwards"], row["forwards"], range(options.images))
        print(f"{shown(tokens_per_step(row))}\t{shown(ratio)}\t{name}", flush=True)


if __name__ == "__main__":
    main()
