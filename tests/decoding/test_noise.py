"""Random numbers depend on their address alone: not on the batch, nor on what was hashed together or ahead."""

from types import SimpleNamespace

import pytest
import torch

from specbench.decoding import noise as addressed
from specbench.decoding.noise import AHEAD, SLOTS_AHEAD, Noise, Stream

VOCAB, WINDOW = 32, 4
STREAMS = Stream.FRESH, Stream.COIN, Stream.REDRAW


def column(number: int, rows: int) -> torch.Tensor:
    return torch.full((rows, 1), number)


def walk():
    """(draw, first slot) of a decode: in small steps, over the end of the numbers hashed ahead, back, and far ahead."""
    slot = 0
    for draw in range(1, 2 * AHEAD):
        yield draw, slot
        slot += draw % 4
    yield from ((2, 0), (3, SLOTS_AHEAD), (4, SLOTS_AHEAD + 1), (AHEAD + 4, 5), (400, 1000))


def test_a_lone_image_has_the_numbers_it_has_in_a_batch():
    alone, beside = Noise([-7], VOCAB), Noise([-7, 11], VOCAB)
    for draw, slot in walk():
        positions = torch.arange(slot, slot + WINDOW)[None]
        single, both = column(draw, 1), column(draw, 2)
        alone.hash_together(positions, STREAMS, single)
        for stream in STREAMS:
            plain = beside.uniform(positions.repeat(2, 1), stream, both)
            assert torch.equal(alone.uniform(positions, stream, single), plain[:1])
            assert torch.equal(alone.uniform(positions[:, :-1], stream, single), plain[:1, :-1])
        last = positions[:, -1:]
        race = beside.race(last.repeat(2, 1), Stream.RESIDUAL, both)
        assert torch.equal(alone.race(last, column(int(Stream.RESIDUAL), 1), single), race[:1])


@pytest.mark.parametrize("rows", [1, 2])
def test_a_gpu_hashes_the_streams_of_a_step_together(rows, monkeypatch):
    keys, positions, draw = [-7, 11][:rows], torch.arange(5, 5 + WINDOW).repeat(rows, 1), column(3, rows)
    plain = {stream: Noise(keys, VOCAB).uniform(positions, stream, draw) for stream in STREAMS}
    # Numbers on this CPU, branches and operations of a GPU.
    noise = Noise(keys, VOCAB)
    noise._device = SimpleNamespace(type="cuda")
    monkeypatch.setattr(addressed, "_column_of", lambda streams, device: torch.tensor(streams)[:, None, None])
    noise.hash_together(positions, STREAMS, draw)
    monkeypatch.setattr(addressed, "_mix", None)  # nothing is hashed from here on
    for stream in STREAMS:
        assert torch.equal(noise.uniform(positions, stream, draw), plain[stream])
        assert torch.equal(noise.uniform(positions[:, :-1], stream, draw), plain[stream][:, :-1])


def test_other_streams_and_other_images_are_not_taken_from_what_was_hashed_ahead():
    noise, positions, draw = Noise([3], VOCAB), torch.arange(WINDOW)[None], column(1, 1)
    noise.hash_together(positions, STREAMS, draw)
    noise.hash_together(positions, STREAMS[::-1], draw)
    assert torch.equal(noise.uniform(positions, Stream.COIN, draw), Noise([3], VOCAB).uniform(positions, 1, 1))
    noise.hash_together(positions, STREAMS, draw)
    noise.rekey(torch.tensor([0]), [4])
    noise.hash_together(positions, STREAMS, draw)
    assert torch.equal(noise.uniform(positions, Stream.COIN, draw), Noise([4], VOCAB).uniform(positions, 1, 1))


def test_the_noise_that_breaks_ties_is_used_for_nothing_else():
    noise, slots = Noise([5], 4), torch.arange(50)[None]
    for stream in Stream:
        for number in range(40):
            assert not (noise.uniform(slots, stream, number) == noise.tie_break(slots)).any()
