"""Training data of a draft head: token streams of a target model with the target's features."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specbench.errors import SpecbenchError
from specbench.models.facts import typed_name
from specbench.models.interface import FeatureSession
from specbench.models.transformer.model import TransformerModel
from specbench.store.run_folders import find_run
from specbench.system.torch_state import PinnedTorch

_CHUNK = 16


def check_counts(**counts: int) -> None:
    """Reject numbers below 1; the keywords are the names of the flags."""
    for name, value in counts.items():
        if value < 1:
            raise SpecbenchError(f"--{name} {value}: must be at least 1")


@dataclass(frozen=True)
class Corpus:
    """Images as token streams of the target, one row each."""

    texts: tuple[str, ...]  # captions
    tokens: Tensor  # [n, N] stream tokens


def corpus(model: TransformerModel, count: int, seed: int, folder: Path | None) -> Corpus:
    """Load `count` images from run folder `folder`, else from the model's training data."""
    if folder is None:
        images = model.draft_data(count, seed)
        if images is None:
            raise SpecbenchError(
                f"model '{model.name}' has no training images for a draft head",
                f"pass a run folder with --data, made by: specbench run --model {typed_name(model.name)} --decoder ar",
            )
        texts, streams = images
        return Corpus(tuple(texts), streams)
    from specbench.store.run_store import RunStore  # imports pyarrow, not needed for existing heads
    from specbench.store.schema import RowStatus

    store = RunStore(find_run(folder.parent, str(folder)))
    rows = store.samples(["prompt", "tokens", "status"])
    rows = rows[rows["status"] == RowStatus.OK].head(count)
    tokens = torch.tensor(np.stack(rows["tokens"].tolist())) if len(rows) else torch.zeros(0, 0)
    if len(rows) < count or tokens.shape[1] != model.layout.length or int(tokens.max()) >= model.layout.vocab:
        what = f"--data {folder} has {len(rows)} images of {tokens.shape[1]} tokens"
        raise SpecbenchError(what, f"required: {count} images of {model.layout.length} tokens")
    return Corpus(tuple(rows["prompt"]), tokens.long())


@dataclass(frozen=True)
class Examples:
    """Sequences of at most E elements: first the prompt's elements, then the stream's elements."""

    ids: Tensor  # [n, E + 1] ids in the head's token table
    features: Tensor  # [n, E, d] float16; features[t] depends on ids[: t + 1] and predicts ids[t + 1]
    prompt: Tensor  # [n] prompt elements P; the image's first token is ids[P]
    length: Tensor  # [n] number of valid features


@PinnedTorch()
def examples(model: TransformerModel, images: Corpus, unconditional: Tensor) -> Examples:
    """Compute teacher-forced features; rows with `unconditional` [n] True have no caption."""
    rows = len(images.texts)
    prefix = model.encode(images.texts)
    chosen = [row + rows * int(unconditional[row]) for row in range(rows)]
    session = model.begin(prefix.take(chosen + chosen), 1.0, model.layout.length)
    prompts, features = session.draft_prompt(), teacher_forced(session, images.tokens)
    lengths = prompts.lengths.tolist()
    if prompts.features is not None:
        pieces = zip(prompts.features, features, lengths, strict=True)
        features = [torch.cat([prompt[: length - 1], stream]) for prompt, stream, length in pieces]
    words: Tensor = prompts.ids
    pieces = zip(words, model.table_ids(images.tokens), lengths, strict=True)
    ids = [torch.cat([prompt[:length], stream]) for prompt, stream, length in pieces]
    pad = torch.nn.utils.rnn.pad_sequence
    length = torch.tensor([len(row) for row in features])
    return Examples(pad(ids, True).cpu(), pad(list(features), True).half().cpu(), prompts.lengths.cpu(), length)


def teacher_forced(session: FeatureSession, tokens: Tensor) -> Tensor:
    """Return the features [R, N, d] that predict `tokens` [B, N], each given all earlier tokens."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    session.forward(torch.nn.functional.pad(tokens[:, :-1], (1, 0)), positions)
    return session.features


class FeatureStore:
    """Examples in chunk files of a folder, so that an interrupted computation can continue."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._loaded: dict[int, Examples] = {}

    def compute(
        self, model: TransformerModel, images: Corpus, null: float, seed: int, tell: Callable[[int], object]
    ) -> None:
        """Compute the missing chunks, with a callback after each. A share `null` of the images has no caption."""
        self._folder.mkdir(parents=True, exist_ok=True)
        draw = torch.Generator().manual_seed(seed)
        unconditional = torch.rand(len(images.texts), generator=draw) < null
        for start in range(0, len(images.texts), _CHUNK):
            path = self._path(start // _CHUNK)
            if not path.is_file():
                part = slice(start, start + _CHUNK)
                piece = Corpus(images.texts[part], images.tokens[part].to(model.device))
                torch.save(vars(examples(model, piece, unconditional[part])), path.with_suffix(".part"))
                path.with_suffix(".part").rename(path)
            tell(min(start + _CHUNK, len(images.texts)))

    def rows(self, indices: list[int]) -> Examples:
        """Load the examples of some rows, with float16 features, padded to the longest row."""
        picked, pad = [], torch.nn.utils.rnn.pad_sequence
        for chunk, row in (divmod(index, _CHUNK) for index in indices):
            if chunk not in self._loaded:
                self._loaded[chunk] = Examples(**torch.load(self._path(chunk), weights_only=True, mmap=True))
            of = self._loaded[chunk]
            size = int(of.length[row])
            picked.append((of.ids[row, : size + 1], of.features[row, :size], of.prompt[row], of.length[row]))
        ids, features, prompt, length = zip(*picked, strict=True)
        return Examples(pad(ids, True), pad(features, True), torch.stack(prompt), torch.stack(length))

    def _path(self, chunk: int) -> Path:
        return self._folder / f"{chunk:06d}.pt"
