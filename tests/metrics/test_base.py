"""Images are read by threads while the network works: in order, not too many at once, errors in their place."""

import threading
from pathlib import Path

import pytest
import torch
from brightness import Brightness
from refusals import refused

from specbench.metrics.base import BATCHES_AHEAD, Settings, made_score, read_ahead


@pytest.mark.parametrize("identity", [{"threshold": 0.5}, {"file": Path("net.pt")}, {1: "network"}])
def test_an_identity_that_cannot_be_stored_as_texts_is_refused(identity, monkeypatch):
    monkeypatch.setattr(Brightness, "identity", lambda self: identity)
    refused(r"identity\(\) must map texts to texts", made_score, Brightness(Settings()))


def test_items_and_errors_come_in_order_and_the_last_batch_is_short():
    assert list(read_ahead(lambda number: number * number, range(7), 3)) == [[0, 1, 4], [9, 16, 25], [36]]
    assert list(read_ahead(str, range(4), 2)) == [["0", "1"], ["2", "3"]]
    assert list(read_ahead(str, [5], 4)) == [["5"]] and list(read_ahead(str, [], 4)) == []

    def load(number: int) -> int:
        if number == 5:
            raise ValueError("damaged")
        return number

    batches = read_ahead(load, range(20), 2)
    assert [next(batches), next(batches)] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="damaged"):
        next(batches)


def test_threads_read_ahead_while_a_batch_is_in_use_and_no_further():
    read, two_batches = [], threading.Event()

    def load(number: int) -> int:
        read.append(number)
        if len(read) == (1 + BATCHES_AHEAD) * 4:
            two_batches.set()
        return threading.get_ident()

    batches = read_ahead(load, range(100), 4)
    first = next(batches)
    assert two_batches.wait(20), "nobody read while the first batch was in use"
    assert first[0] == threading.get_ident() and threading.get_ident() not in first[1:]
    assert len(read) <= (1 + BATCHES_AHEAD) * 4
    batches.close()
    assert len(read) < 100


def test_readers_use_one_thread_of_torch_each_and_leave_the_others_alone():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        (counts,) = read_ahead(lambda _: torch.get_num_threads(), range(6), 6)
        assert counts[0] == 2 and set(counts[1:]) == {1}
        late = []
        thread = threading.Thread(target=lambda: late.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert late == [2] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
