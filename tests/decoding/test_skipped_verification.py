"""VVS: whole images against a slow decoder with full forwards and no cache, and the limit without skips."""

import pytest
import torch

from specbench.checks.enumerable_model import EnumerableTransformer
from specbench.decoding.draft_tree import parse_tree
from specbench.decoding.loop import decode
from specbench.decoding.noise import Noise, Stream, row_key
from specbench.decoding.sampling import Target
from specbench.models.interface import TokenLayout
from specbench.models.transformer.kv_cache import PositionCache
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

GUIDED = Sampling(2.0, 1.3)
ROW_ENDS = TokenLayout.with_row_ends(5, 4, 4)
CASES = {
    "chain, row ends": ("chain", ROW_ENDS, 2),
    "paths of 1 and 4, row ends": ("0 1 00 000 0000", ROW_ENDS, 3),
    "paths of 1 and 4": ("0 1 00 000 0000", TokenLayout.plain(3, 7, 5), 2),
    "siblings": ("0 1 2 00 01 10 000 001", TokenLayout.plain(3, 7, 5), 2),
}


class Slow:
    """One image decoded in lists, sibling after sibling, every forward of target and head from the start."""

    def __init__(self, model, text, tree, interval):
        self.model, self.text, self.interval = model, text, interval
        self.paths = parse_paths(tree)
        self.leaves = [path for path in self.paths if not any(other[:-1] == path for other in self.paths if other)]
        self.most = sum(map(len, self.leaves)) // len(self.leaves)
        self.head, self.layout = model.own_head(), model.layout
        self.noise = Noise([row_key(0, text, 0)], model.layout.vocab)
        self.target = Target(model.layout, GUIDED, model.device)
        self.prefix = model.encode([text])
        self.prompt = [(len(embeds), ids) for embeds, (ids, _) in zip(self.prefix.embeds, self.states([]), strict=True)]

    def states(self, tokens):
        """For the conditional and unconditional row: hidden states of the prompt, then of each slot's prediction."""
        embed, states = self.model.backbone.embed_tokens, []
        for start in self.prefix.embeds:
            fed = torch.cat([start, embed(torch.tensor(tokens).long())])[None]
            hidden = self.model.backbone(inputs_embeds=fed, use_cache=False).last_hidden_state[0]
            states.append((hidden[: len(start) - 1], hidden[len(start) - 1 :]))
        return states

    def distribution(self, pair, slot):
        with_caption, without = map(self.model.head, pair)
        logits = without + GUIDED.guidance * (with_caption - without)
        return self.target(logits[None, None], torch.tensor([[slot]]))[0, 0]

    def number(self, stream, slot, step):
        return self.noise.uniform(torch.tensor([[slot]]), stream, torch.tensor([[step]]))[0, 0]

    def raced(self, weights, stream, slot, step):
        return int(
            self.noise.run_race(weights[None, None], torch.tensor([[slot]]), stream, torch.tensor([[step]]))[0, 0]
        )

    def guess(self, committed, fed, drafts):
        """The head's features after the tokens `committed`, whose features are `fed`, and then its own `drafts`."""
        guesses = []
        for row, (length, before) in enumerate(self.prompt):
            ids = self.prefix.ids[row, 1:length].tolist() + committed + drafts
            features = [*before, *(pair[row] for pair in fed)]
            while len(features) <= len(ids):
                fed_ids = ids[: len(features)]
                slots = torch.arange(len(fed_ids))[None]
                cache = PositionCache(1, len(fed_ids))
                cache.place(slots, len(fed_ids))
                mask = torch.ones(len(fed_ids), len(fed_ids)).tril().bool()[None, None]
                inputs = torch.tensor([fed_ids]), torch.stack(features)[None]
                features.append(self.head.extrapolate(*inputs, self.head.rotary(slots), mask, cache)[0, -1])
            guesses.append(features[-1])
        return guesses

    def tree(self, committed, fed, step):
        """Drafted tokens by path, and the q of the children of each inner node."""
        tokens, proposed = {"": committed[-1]}, {}
        for column, path in enumerate(self.paths):
            children = [child for child in self.paths if child[:-1] == path and child]
            if children:
                drafts = [tokens[path[: depth + 1]] for depth in range(len(path))]
                slot = len(committed) + len(path)
                q = self.distribution(self.guess(committed, fed, drafts), slot)
                draw = torch.tensor([[step * len(self.paths) + column]])
                race = self.noise.race(torch.tensor([[slot]]), Stream.SIBLING, draw)[0, 0]
                order = (q / race).topk(len(children)).indices.tolist()
                tokens |= dict(zip(children, order, strict=True))
                proposed[path] = q
        return tokens, proposed

    def verify(self, committed, tokens, proposed, step):
        """Tokens that one target forward commits."""
        path, accepted = "", []
        while True:
            slot = len(committed) + len(accepted)
            p = self.distribution([row[1][slot] for row in self.states(committed + accepted)], slot)
            children, q = [child for child in self.paths if child[:-1] == path and child], proposed.get(path)
            rest = p
            for child in children:
                trunk, depth = not child.strip("0"), [sibling for sibling in self.paths if len(sibling) == len(child)]
                coin = step if trunk else step * len(self.paths) + depth.index(child)
                stream = Stream.COIN if trunk else Stream.SIBLING_COIN
                token = tokens[child]
                if not q[token] > 0:
                    continue
                if self.number(stream, slot, coin) < rest[token] / q[token]:
                    break
                rest = (rest - q).clamp(min=0)
                rest, q = rest / rest.sum(), q.clone()
                q[token] = 0
                q /= q.sum().clamp(min=torch.finfo(q.dtype).tiny)
            else:
                return [*accepted, self.raced(rest, *((Stream.RESIDUAL, slot, step) if children else (0, slot, 0)))]
            path, accepted = child, [*accepted, token]

    def skipped(self, committed, tokens, step):
        """Tokens of a random path, as many as paths have on average."""
        leaf = self.leaves[int(self.number(Stream.FRESH, len(committed), step) * len(self.leaves))]
        return [tokens[leaf[: depth + 1]] for depth in range(min(self.most, len(leaf)))]

    def image(self):
        length, forwards, number = self.layout.length, 1, 0
        fed = [[row[1][0] for row in self.states([])]]
        committed = [self.raced(self.distribution(fed[0], 0), 0, 0, 0)]
        while len(committed) < length:
            forwards += 1
            tokens, proposed = self.tree(committed, fed, forwards)
            if number % self.interval == 1 and number >= 6:
                taken = self.skipped(committed, tokens, forwards)[: length - len(committed)]
                true = self.states(committed)
                old = [[row[1][slot] for row in true] for slot in range(1, len(committed))]
                old = old[-len(taken) :] if len(taken) <= len(old) else old + old[-1:] * len(taken)
                committed, fed, number = committed + taken, fed + old[: len(taken)], number + 1
                if len(committed) == length:
                    break
                tokens, proposed = self.tree(committed, fed, forwards)
            taken = self.verify(committed, tokens, proposed, forwards)[: length - len(committed)]
            true = self.states(committed + taken)
            fed += [[row[1][slot] for row in true] for slot in range(len(committed), len(committed) + len(taken))]
            committed, number = committed + taken, number + 1
        return committed, forwards


def mild(layout):
    """A model whose draft head has several likely tokens."""
    model = EnumerableTransformer(layout, ("a", "bb"))
    head = model.own_head()
    for name, weight in head.named_parameters():
        if "embed" not in name:
            weight.data.mul_(0.4)
    model.own_head = lambda: head
    return model


def parse_paths(text):
    tree, paths = parse_tree(text), [""]
    for column, parent in enumerate(tree.parents[1:], start=1):
        paths.append(paths[parent] + str(tree.parents[1:column].count(parent)))
    return paths


@torch.inference_mode()
@pytest.mark.parametrize(("tree", "layout", "interval"), CASES.values(), ids=CASES)
def test_images_match_a_slow_decoder(tree, layout, interval):
    model = mild(layout)
    spec = resolve("vvs", {"tree": tree, "interval": interval})
    images = decode(model, [Request(text, text) for text in ("a", "bb")], spec, GUIDED, 0, render=False)
    for text, row in zip(("a", "bb"), images, strict=True):
        tokens, forwards = Slow(model, text, tree, interval).image()
        assert row.tokens.tolist() == tokens
        assert row.nfe == forwards == row.committed_step.max()
        assert (row.uniforms["u_id"] > 0).all()
