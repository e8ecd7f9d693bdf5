"""A KV cache of a few image rows: whole images beside a transformer in lists, its limits, and what it refuses."""

import pytest
import torch

from specbench.checks.audit_settings import AuditSetting
from specbench.checks.divergence import AUDIT_LEVEL, p_value
from specbench.checks.enumerable_model import EnumerableModel, EnumerableTransformer
from specbench.checks.losslessness import observe
from specbench.decoding.loop import begin, decode
from specbench.decoding.noise import Noise, Stream, row_key
from specbench.decoding.sampling import Target
from specbench.decoding.timing import Spans
from specbench.errors import SpecbenchError
from specbench.models.interface import TokenLayout
from specbench.models.transformer.line_session import attention_received
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

GUIDED = Sampling(2.0, 1.3)
REQUESTS = [Request(text, text) for text in ("a", "bb")]
CASES = {
    "row ends": (TokenLayout.with_row_ends(8, 2, 4), (1, 1, 1)),
    "plain": (TokenLayout.plain(8, 4, 5), (1, 2, 1)),
    "no anchors": (TokenLayout.plain(7, 3, 5), (0, 1, 2)),
    "no middle": (TokenLayout.plain(7, 3, 5), (1, 0, 1)),
}


def spec(anchors, middle, recent):
    return resolve("linear-kv", {"anchor-rows": anchors, "middle-rows": middle, "recent-rows": recent})


class Row:
    """One row of a Llama, token by token; each head of each layer has its own list of (element, key, value)."""

    def __init__(self, model, embeds, lines, width):
        self.model, self.net, self.lines, self.width = model, model.backbone, lines, width
        self.prompt, self.count = len(embeds), 0
        heads = self.net.config.num_attention_heads
        self.cache = [[[] for _ in range(heads)] for _ in self.net.layers]
        self.seen = [[{} for _ in range(heads)] for _ in self.net.layers]
        for embed in embeds:
            self.hidden = self.feed(embed)

    def feed(self, embed):
        place = self.count
        cosine, sine = (x[0, 0] for x in self.net.rotary_emb(embed[None, None], torch.tensor([[place]])))

        def turned(head):
            first, second = head.chunk(2)
            return head * cosine + torch.cat([-second, first]) * sine

        for layer, cache, seen in zip(self.net.layers, self.cache, self.seen, strict=True):
            attention, normed, found = layer.self_attn, layer.input_layernorm(embed), []
            q, k, v = (
                part(normed).view(len(cache), -1) for part in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            for head, held in enumerate(cache):
                held.append((place, turned(k[head]), v[head]))
                scores = torch.stack([turned(q[head]) @ key for _, key, _ in held]) * attention.scaling
                weights = scores.softmax(0)
                found.append(sum(weight * value for weight, (_, _, value) in zip(weights, held, strict=True)))
                for weight, (element, _, _) in zip(weights.tolist(), held, strict=True):
                    seen[head].setdefault(element, []).append(weight)
            embed = embed + attention.o_proj(torch.cat(found))
            embed = embed + layer.mlp(layer.post_attention_layernorm(embed))
        self.count += 1
        complete, rest = divmod(self.count - self.prompt, self.width)
        if rest == 0 and complete > sum(self.lines):
            self.evict(complete)
        return self.net.norm(embed)

    def evict(self, complete):
        """Drop one line's worth of entries between the anchors and the last lines."""
        anchors, middle, recent = self.lines
        start = self.prompt + anchors * self.width
        end = self.prompt + (complete - recent) * self.width
        for cache, seen in zip(self.cache, self.seen, strict=True):
            for held, received in zip(cache, seen, strict=True):
                worth = {place: sum(received[place][-self.width :]) for place, _, _ in held if start <= place < end}
                best = sorted(worth, key=worth.get)[len(worth) - middle * self.width :]
                held[:] = [entry for entry in held if not start <= entry[0] < end or entry[0] in best]


def slow_image(model, text, lines):
    layout, noise = model.layout, Noise([row_key(0, text, 0)], model.layout.vocab)
    target, width = Target(layout, GUIDED, model.device), layout.length // layout.height
    rows = [Row(model, embeds, lines, width) for embeds in model.encode([text]).embeds]
    tokens, logs = [], []
    for slot in range(layout.length):
        with_caption, without = (model.head(row.hidden) for row in rows)
        logits = without + GUIDED.guidance * (with_caption - without)
        p = target(logits[None, None], torch.tensor([[slot]]))
        tokens.append(int(noise.run_race(p, torch.tensor([[slot]]), Stream.TOKEN)[0, 0]))
        logs.append(float(p[0, 0, tokens[-1]].log()))
        for row in rows:
            row.hidden = row.feed(model.backbone.embed_tokens.weight[tokens[-1]])
    return tokens, logs


@torch.inference_mode()
@pytest.mark.parametrize(("layout", "lines"), CASES.values(), ids=CASES)
def test_images_are_those_of_a_transformer_in_lists(layout, lines):
    model = EnumerableTransformer(layout, ("a", "bb"))
    found = decode(model, REQUESTS, spec(*lines), GUIDED, 0, render=False)
    for row, text in zip(found, ("a", "bb"), strict=True):
        tokens, logs = slow_image(model, text, lines)
        assert row.tokens.tolist() == tokens
        assert row.logp == pytest.approx(logs, abs=1e-4)
        whole, _ = slow_image(model, text, (0, 0, layout.height))
        assert whole == decode(model, [Request(text, text)], resolve("ar"), GUIDED, 0, render=False)[0].tokens.tolist()


def test_a_cache_of_all_rows_gives_the_images_of_ar_and_a_small_one_another_distribution():
    model = EnumerableTransformer(TokenLayout.plain(5, 3, 5), ("a", "bb"))
    one, other = (decode(model, REQUESTS, one, GUIDED, 0, render=False) for one in (resolve("ar"), spec(1, 1, 3)))
    assert all(a.tokens.tolist() == b.tokens.tolist() for a, b in zip(one, other, strict=True))
    setting = AuditSetting("4x2 of 2", TokenLayout.plain(4, 2, 2), Sampling(2.0), model="transformer")
    found = [p_value(observe(setting, spec(*lines), 8_000, seed=0)) for lines in ((0, 0, 1), (1, 1, 2))]
    assert found[0] < AUDIT_LEVEL < found[1]


@torch.inference_mode()
def test_buffers_hold_the_prompt_the_kept_rows_and_the_one_in_work():
    model = EnumerableTransformer(TokenLayout.plain(9, 4, 5), ("a",))
    loop = begin(model, REQUESTS[:1], spec(1, 1, 2), GUIDED, 0, Spans(model.device), False, False)
    for _ in loop.run():
        pass
    prompt, extra = 2, 2  # two columns of slack, as every session has
    assert {keys.shape[2] for keys, _ in loop.session._cache.buffers()} == {prompt + 5 * 4 + extra}


@torch.inference_mode()
def test_an_image_does_not_depend_on_the_batch_it_is_decoded_in():
    model = EnumerableTransformer(TokenLayout.plain(8, 3, 5), ("a", "bb"))
    requests = [Request("a" if sample % 2 else "bb", "prompt", sample) for sample in range(6)]
    together = decode(model, requests, spec(1, 1, 1), GUIDED, 0, render=False)
    alone = [decode(model, [request], spec(1, 1, 1), GUIDED, 0, render=False)[0] for request in requests]
    assert all(a.tokens.tolist() == b.tokens.tolist() for a, b in zip(together, alone, strict=True))


def test_attention_of_grouped_heads_is_that_of_repeated_keys():
    draw = torch.Generator().manual_seed(0)
    queries, keys = (torch.randn(2, heads, 3, 4, generator=draw) for heads in (6, 2))
    slots = torch.tensor([[0, 1, 2]]).expand(2, -1)
    repeated = attention_received(queries, keys.repeat_interleave(3, 1), slots)
    assert torch.allclose(attention_received(queries, keys, slots), repeated.unflatten(1, (2, 3)).sum(2))
    assert torch.allclose(repeated.sum(-1), torch.tensor(3.0))


def test_bad_options_and_models_are_refused_in_one_line(cli):
    refused = cli("run", "--decoder", "linear-kv:recent-rows=0", "--limit", "1")
    assert refused.code == 2 and "recent-rows" in refused.err and "Traceback" not in refused.err
    with pytest.raises(SpecbenchError, match="does not fit"):
        decode(EnumerableModel(TokenLayout.plain(2, 2, 2)), [Request("", "")], resolve("linear-kv"), GUIDED, 0)
