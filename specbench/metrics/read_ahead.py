"""Load images by threads, ahead of the network that sees them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from specbench.system.limits import available_cores

T, R = TypeVar("T"), TypeVar("R")
BATCHES_AHEAD = 2
MOST_AHEAD = 256
"""Items, for batches that are large themselves: an image of 1024 x 1024 with its network's input takes 4 MB."""
MOST_THREADS = 32


def read_ahead(load: Callable[[T], R], items: Sequence[T], batch: int) -> Iterator[list[R]]:
    """Iterate over `load(item)` of all items, in order, in lists of `batch`.

    Threads load the next two batches while one is in use: reading, decoding and resizing release the interpreter lock.
    The first item is loaded by the caller's thread, so that what `load` makes once (a network whose input size it
    asks for) is made once. An error of `load` is raised where its item would come.
    """
    if not items:
        return
    import torch  # not where everything is scored

    threads, rest, ahead = torch.get_num_threads(), iter(items[1:]), min(BATCHES_AHEAD * batch, MOST_AHEAD)
    loaded = [load(items[0])]
    # One thread of torch each: the images are what is spread over the cores.
    with ThreadPoolExecutor(min(MOST_THREADS, available_cores()), "read", torch.set_num_threads, (1,)) as pool:
        waiting: deque[Future[R]] = deque(pool.submit(load, item) for item in islice(rest, ahead))
        try:
            while waiting:
                if len(loaded) == batch:
                    yield loaded
                    loaded = []
                loaded.append(waiting.popleft().result())
                waiting.extend(pool.submit(load, item) for item in islice(rest, 1))
            yield loaded
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)  # threads that start later take the number that was set last
