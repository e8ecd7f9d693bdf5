"""Windows of drafts of two rows, which accept different numbers of drafts."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

PLAN = ((1, (1, 1)), (6, (2, 5)), (6, (6, 1)), (8, (3, 7)), (3, (1, 3)), (2, (2, 1)))


def ragged_windows(
    forward: Callable[[Tensor, Tensor], Tensor], words: int, plan=PLAN, forced: Sequence[int] = ()
) -> Iterator[tuple[int, list[int], list[int], Tensor]]:
    """Feed `forward` windows of random drafts; `plan`: the width of each, and how many tokens each row then commits.
    Yield by row and window its number, the tokens committed before, the drafts, and what the forward gives."""
    generator, committed = torch.Generator().manual_seed(2), [[], []]
    forced = [*forced, *[-1] * 100]
    for width, accepted in plan:
        windows = torch.randint(words, (2, width), generator=generator)
        starts = torch.tensor([len(row) for row in committed])
        for row, stream in enumerate(committed):
            for column in range(1, width):
                if (token := forced[len(stream) + column - 1]) >= 0:
                    windows[row, column] = token
            if stream:
                windows[row, 0] = stream[-1]
        found = forward(windows, starts[:, None] + torch.arange(width))
        for row, stream in enumerate(committed):
            drafts = windows[row, 1:].tolist()
            yield row, [*stream], drafts, found[row]
            stream += [*drafts, max(forced[len(stream) + width - 1], 0)][: accepted[row]]
