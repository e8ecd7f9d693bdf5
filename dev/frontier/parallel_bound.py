"""Bound for two-dimensional drafts that do not depend on earlier drafts: the acceptance of the best q for such a draft.

    python dev/frontier/parallel_bound.py > results/ssd/bound.json

A row is drafted all at once from all committed tokens, as SSD's heads do. The best q of a draft some slots ahead is
then the mean of the target's p over the tokens in between, as the target draws them. It is estimated with `paths`
continuations of the target from the middle of a row, and compared with the p of other continuations: 1 - TV(p, q) is
the acceptance of an oracle that knows the target but not the tokens in between. Half of the paths give q, the others
test it, so the noise of q makes the estimate too low; `split` uses a quarter of the paths for q to show this effect.
`chain` is the mean number of tokens per step of a window of that many drafts, discarded after a rejection.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from search import spread_requests  # noqa: E402 - found through the line above

from specbench.decoding.loop import decode  # noqa: E402 - likewise
from specbench.decoding.sampling import Target, draw  # noqa: E402
from specbench.models.catalog import find_model, load_model  # noqa: E402
from specbench.specs.presets import resolve  # noqa: E402


@torch.inference_mode()
def acceptances(images: int, paths: int, reach: int, starts: list[int]) -> tuple[Tensor, Tensor]:
    """1 - TV(p, q) [images * starts, reach] by distance, with q from half of the paths, and from a quarter."""
    model, sampling = load_model("shapes"), find_model("shapes").sampling()
    target, draws = Target(model.layout, sampling, model.device), torch.Generator().manual_seed(0)
    accepted, split = [], []
    requests = spread_requests(images)
    for request, row in zip(requests, decode(model, requests, resolve("ar"), sampling, 0, render=False), strict=True):
        for start in starts:
            session = model.begin(model.encode([request.text] * paths), sampling.guidance, start + 1)
            tokens = torch.from_numpy(row.tokens[:start]).long().expand(paths, -1)
            fed = torch.nn.functional.pad(tokens, (1, 0))
            logits = session.forward(fed, torch.arange(start + 1).expand(paths, -1))[:, -1:]
            of_site, quarter = [], []
            for slot in range(start, start + reach):
                p = target(logits, torch.full((paths, 1), slot))
                mean, small, tested = p[: paths // 2].mean(0), p[: paths // 4].mean(0), p[paths // 2 :]
                of_site.append(torch.minimum(tested, mean).sum(-1).mean())
                quarter.append(torch.minimum(tested, small).sum(-1).mean())
                token = draw(p, torch.rand(paths, 1, generator=draws, dtype=torch.float64))
                logits = session.forward(token, torch.full((paths, 1), slot + 1))
            accepted.append(torch.stack(of_site))
            split.append(torch.stack(quarter))
        print(f"{request.prompt_id}: done", file=sys.stderr)
    return torch.stack(accepted), torch.stack(split)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--paths", type=int, default=48, help="continuations from each start")
    parser.add_argument("--reach", type=int, default=12, help="drafts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    starts = [66, 130, 194]
    accepted, split = acceptances(options.images, options.paths, options.reach, starts)
    mean = accepted.mean(0)
    chain = 1 + mean.cumprod(0).cumsum(0)
    rows = {"images": options.images, "paths": options.paths, "starts": starts}
    tables = {"acceptance": mean, "split": split.mean(0), "chain": chain}
    print(json.dumps(rows | {name: [round(x, 4) for x in table.tolist()] for name, table in tables.items()}, indent=1))


if __name__ == "__main__":
    main()
