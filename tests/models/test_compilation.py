"""Compiled steps: same tokens as eager steps, compiled before timing starts; `test_losslessness.py` audits them."""

import inspect
import itertools
import re
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import tiny
import tiny_llama
import torch
from compilable import LACKING, needs_compiler
from refusals import refused
from torch._inductor.utils import run_and_get_code

from specbench.decoding import sampling
from specbench.decoding.continuous_batching import decode_each
from specbench.decoding.loop import decode
from specbench.errors import CompileError
from specbench.models.network_sizes import whole_blocks
from specbench.models.transformer import compilation, packaged_forward
from specbench.models.transformer import forward as forward_module
from specbench.models.transformer.compilation import call_eager, graph_bytes
from specbench.models.transformer.compiled_forward import CompiledStep, nest_layers, unnest_layers
from specbench.models.transformer.forward import run_step
from specbench.models.transformer.kv_cache import PARTS, whole_parts
from specbench.models.transformer.model import TransformerSession
from specbench.models.transformer.packaged_forward import PackagedStep
from specbench.prompts import Request
from specbench.reporting.comparability import configuration, mismatched_fields
from specbench.runs import compiler, plan
from specbench.runs.preparation import generate_images
from specbench.runs.settings import merge, run_settings
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling
from specbench.store.run_info import RunInfo

SAMPLING = Sampling(guidance=2.0, temperature=0.9, top_k=4)
DECODERS = [
    resolve("ar"), resolve("sjd", {"window": 3}), resolve("gsd", {"window": 4, "G": 3}),
    resolve("eagle", {"tree": "0 1 00 01"}), resolve("vertical", {"window": 4, "siblings": 1}),
]  # fmt: skip
REQUESTS = [Request(text, text, sample) for text in ("a fox", "two red hens") for sample in range(6)]


class Tiny(tiny_llama.Tiny):
    """With a draft head whose drafts depend on what it remembers."""

    def own_head(self):
        head = super().own_head()
        for name, weight in head.named_parameters():
            if "embed" not in name:
                weight.data.mul_(8)
        return head


@pytest.fixture(scope="module")
def eager():
    return Tiny()


@pytest.fixture(scope="module")
def compiled():
    model = Tiny()
    model.compile()
    return model


def tokens(model, decoder, requests):
    """[B, N + 1]: tokens of each image, and its forwards."""
    images = decode(model, requests, decoder, SAMPLING, seed=3, render=False)
    return np.stack([(*image.tokens, image.nfe) for image in images])


def with_fixed_shapes(model):
    """The model with steps that are compiled as on a GPU."""
    model.compile()
    model._compiled_steps = {SAMPLING.guidance: CompiledStep(model, SAMPLING.guidance, {})}
    return model


@needs_compiler
@pytest.mark.slow
def test_same_tokens_under_the_same_noise_and_nothing_compiled_twice(eager, compiled, monkeypatch):
    monkeypatch.setattr(sampling, "WIDE", 0)  # as for wide vocabularies: eager steps look at the kept tokens alone
    torch._dynamo.utils.counters.clear()
    for decoder in DECODERS:
        np.testing.assert_array_equal(tokens(compiled, decoder, REQUESTS), tokens(eager, decoder, REQUESTS))
    step, *rules = compiled.compiled
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert step.forms == 3  # a lone column, a window, a tree
    assert [rule.forms for rule in rules] == [1, 2, 2, 2, 2]  # verification and, but for ar, drafting
    assert graphs == 9  # nothing of the forward
    assert all(part.seconds > 0 for part in compiled.compiled)
    longer, shorter = ([Request(text, text, n) for n in range(12)] for text in ("much longer than before", "."))
    for requests, decoder in itertools.product([longer, shorter, longer[:6] + shorter[:6]], DECODERS):
        np.testing.assert_array_equal(tokens(compiled, decoder, requests), tokens(eager, decoder, requests))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert step.forms == 3


@needs_compiler
@pytest.mark.slow
def test_refilled_rows_are_compiled_for_once(eager, compiled):
    """Also if the rows end together, in steps narrower than the others, and the last ones alone."""
    made = []
    for model in (eager, compiled):
        outcomes = decode_each(model, REQUESTS[:9], 2, DECODERS[2], SAMPLING, seed=3)
        made.append({request: (*image.tokens, image.nfe) for request, image in outcomes})
    assert made[0] == made[1]
    assert compiled.compiled[-1].forms == 2


class Steeper(Tiny):
    """The same tensors in another network, whose head takes any number format."""

    def head(self, hidden):
        return 3 * (hidden.to(self.matrix.dtype) @ self.matrix)


@needs_compiler
@pytest.mark.slow
def test_models_of_one_process_share_no_compiled_code(eager, compiled):
    """The guards that would distinguish them are left out: they take longer than the step of a small model."""
    steeper, plain = Steeper(), Steeper()
    steeper.compile()
    requests = REQUESTS
    expected = tokens(plain, DECODERS[0], requests), tokens(eager, DECODERS[0], requests)
    assert (expected[0] != expected[1]).any()
    for _ in range(2):
        for model, same in zip((steeper, compiled), expected, strict=True):
            np.testing.assert_array_equal(tokens(model, DECODERS[0], requests), same)
    assert steeper.compiled[0].forms == 1


@needs_compiler
@pytest.mark.slow
def test_a_compiled_model_may_be_changed_in_place():
    """Other values need no other code; another number format does, also if no argument of the step shows it."""
    model, plain = Steeper(), Steeper()
    model.compile()
    forms = []
    for change in (
        lambda m: None,
        lambda m: m.backbone.norm.weight.mul_(-1),
        lambda m: setattr(m, "matrix", m.matrix + 0.1 * m.matrix.flip(0)),
        lambda m: setattr(m, "matrix", m.matrix.double()),
    ):
        change(model)
        change(plain)
        np.testing.assert_array_equal(tokens(model, DECODERS[0], REQUESTS), tokens(plain, DECODERS[0], REQUESTS))
        forms.append(model.compiled[0].forms)
    assert forms == [1, 1, 1, 2]


def test_fixed_shapes_fill_windows_up_and_change_nothing(eager, monkeypatch):
    """As captured graphs need it, without the graphs: all windows of a session are its widest, padded."""
    widths = set()

    def noted(function, **_):
        watch = lambda buffers, fed: widths.add(fed.tokens.shape[1]) or function(buffers, fed)  # noqa: E731
        return watch if function.__name__ == "step" else function

    monkeypatch.setattr(torch, "compile", noted)
    model = with_fixed_shapes(Tiny())
    for decoder in DECODERS:
        np.testing.assert_array_equal(tokens(model, decoder, REQUESTS), tokens(eager, decoder, REQUESTS))
    assert widths == {1, 4, 8}


@needs_compiler
@pytest.mark.slow
def test_fixed_shapes_are_compiled_once_for_all_parts_of_the_cache(eager, monkeypatch):
    """On a GPU every part is captured, but a network of many layers takes half a minute to compile."""
    read = set()
    monkeypatch.setattr(TransformerSession, "_room", lambda session, slots: -(-slots // 16) * 16)

    def readable(session, end):
        read.add(whole_parts(end, len(session._index)))
        return whole_parts(end, len(session._index))

    monkeypatch.setattr(TransformerSession, "_readable", readable)
    model = with_fixed_shapes(Tiny())
    for decoder, forms in zip(DECODERS[:3], (1, 3, 3), strict=True):
        read.clear()
        np.testing.assert_array_equal(tokens(model, decoder, REQUESTS), tokens(eager, decoder, REQUESTS))
        assert len(read) > 1
        assert model.compiled[0].forms == forms  # a lone column, a prefill next to an existing cache, a window


@needs_compiler
@pytest.mark.slow
def test_a_compiled_prefill_of_any_length_is_one_form(eager, monkeypatch):
    monkeypatch.setattr(TransformerSession, "_room", lambda session, slots: -(-slots // 32) * 32)
    model, requests = Tiny(), [Request(text, "p", n) for n, text in enumerate(("a", "two hens", "a fox in the snow"))]
    model.compile()
    model.call_for = lambda *_: call_eager
    monkeypatch.setattr(CompiledStep, "__call__", lambda step, cache, inputs, most: _run_eager(step, cache, inputs))
    for request in requests:
        np.testing.assert_array_equal(tokens(model, DECODERS[0], [request]), tokens(eager, DECODERS[0], [request]))
    assert model.compiled[0].forms == 1


def _run_eager(step, cache, inputs):
    cache.place(inputs.slots, inputs.index.shape[0])
    return run_step(step._model, step._guidance, cache, inputs)


@torch.inference_mode()
def test_sessions_of_a_shape_share_one_cache_and_nothing_that_is_in_it(eager, monkeypatch):
    """Captured graphs write to the addresses of the cache, and read further inputs of every step at unchanged
    addresses."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    model, caches, constants = with_fixed_shapes(Tiny()), [], []
    begin = tiny_llama.TransformerModel.begin

    def noted(*args):
        session = begin(model, *args)
        caches.append(session._cache)
        constants.append([session._last, session._shift, session._start, session._index, *session._prefix.state])
        return session

    monkeypatch.setattr(model, "begin", noted)
    for decoder in DECODERS[:2]:
        for request in REQUESTS[:2]:
            np.testing.assert_array_equal(tokens(model, decoder, [request]), tokens(eager, decoder, [request]))
            for keys, values in caches[-1].buffers():
                keys.fill_(torch.nan)
                values.fill_(torch.nan)
            for constant in constants[-1]:
                constant.fill_(-1)
    read = [[*(constant.data_ptr() for constant in constants_of)] for constants_of in constants]
    addresses = [[cache.buffers()[0][0].data_ptr(), *pointers] for cache, pointers in zip(caches, read, strict=True)]
    assert addresses[0] == addresses[1] and addresses[2] == addresses[3]
    assert not set(addresses[0]) & set(addresses[2])


def test_a_gpu_reads_little_more_than_it_needs_in_few_shapes():
    for capacity in (whole_blocks(slots) for slots in range(1, 3000, 37)):
        read = [whole_parts(end, capacity) for end in range(1, capacity + 1)]
        assert len(set(read)) == PARTS and read[-1] == capacity
        assert all(0 <= slots - end < capacity / PARTS for end, slots in enumerate(read, start=1))


def test_what_a_view_compiles_is_listed_once():
    model = Tiny()
    model.compile()
    view = model.tapped((0,))
    view.call_for("rules", 2)
    assert len(view.compiled) == len(model.compiled) == 1


def test_graphs_are_distinguished_from_other_memory_if_the_allocator_records_it(monkeypatch):
    pools = {(0, 0): 700, (0, 1): 30, (5, 0): 4}
    segments = [{"total_size": size, "segment_pool_id": pool} for pool, size in pools.items()]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert graph_bytes() == 34
    unsupported = RuntimeError("cudaMallocAsync does not yet support snapshot")
    monkeypatch.setattr(torch.cuda, "memory_snapshot", Mock(side_effect=unsupported))
    assert graph_bytes() is None


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("directly", [True, False])
def test_nested_layers_are_compiled_once_and_change_nothing(directly, monkeypatch):
    """On a GPU, where layers are nested; `directly` as `run_layer`, else as the forward of transformers' layer."""
    monkeypatch.setattr(forward_module, "runs_directly", lambda *_: directly)
    model = Tiny(layers=4)
    want = tokens(model, DECODERS[1], REQUESTS)
    with_fixed_shapes(model).call_for = lambda *_: call_eager
    nest_layers(model.backbone)
    got, texts = run_and_get_code(tokens, model, DECODERS[1], REQUESTS)
    np.testing.assert_array_equal(got, want)
    for text in texts:
        assert len(re.findall(r"def \w*subgraph\w*\(", text)) == 1  # of four layers
        assert len(re.findall(r"= \w*subgraph_0\(", text)) == 4


def test_layers_that_cannot_be_nested_are_compiled_each(eager, monkeypatch):
    def only_without_regions(function, **_):
        def call(*args):
            if "run_layer" in model.backbone.__dict__:
                raise torch._dynamo.exc.TorchDynamoException("regions are not supported")
            return function(*args)

        return call

    monkeypatch.setattr(torch, "compile", only_without_regions)
    model = with_fixed_shapes(Tiny())
    model.call_for = lambda *_: call_eager
    nest_layers(model.backbone)
    np.testing.assert_array_equal(tokens(model, DECODERS[0], REQUESTS), tokens(eager, DECODERS[0], REQUESTS))
    assert not unnest_layers(model.backbone)


def test_processors_with_other_vectors_share_no_compiled_code(monkeypatch):
    """Inductor finds the code of 16 numbers at once for the same graph, and compiles it for vectors of 8."""
    folders = set()
    for capability in ("AVX2", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        folders.add(compilation.compiled_folder())
    assert len(folders) == 2


@pytest.mark.parametrize("on_gpu", [True, False])
def test_what_cannot_be_compiled_is_said_in_one_line(on_gpu, monkeypatch):
    def broken(*args, **_):
        raise torch._dynamo.exc.TorchDynamoException("no such luck\nat line 1")

    monkeypatch.setattr(torch, "compile", lambda function, **_: broken)
    monkeypatch.setattr(torch.export, "export", broken)
    model = Tiny()
    with_fixed_shapes(model) if on_gpu else model.compile()
    error = refused("no such luck", decode, model, REQUESTS[:1], DECODERS[0], SAMPLING, seed=0, render=False)
    assert "\n" not in error.what and error.exit_code == 5


@pytest.mark.parametrize(("mode", "device", "lacking", "compiled", "noted"), [
    ("auto", "cuda:1", None, True, False), ("auto", "cuda", "no triton", False, True),
    ("auto", "cpu", None, False, False), ("on", "cpu", None, True, False), ("on", "cpu", "no g++", False, True),
    ("off", "cuda", None, False, False),
])  # fmt: skip
def test_auto_compiles_if_it_helps_and_says_so_if_it_cannot(mode, device, lacking, compiled, noted, monkeypatch):
    monkeypatch.setattr(compiler, "missing", lambda device: lacking)
    made = plan.make_plan(merge(run_settings(), {"compile": mode, "device": device, "decoder": "ar", "limit": 4}))
    assert bool(made.compute.compiled) == compiled
    assert bool(made.notes) == noted
    if noted:
        assert lacking in made.notes[0] and "\n" not in made.notes[0]


def test_compiled_and_uncompiled_runs_are_not_compared():
    on, off = (plan.make_plan(merge(run_settings(), {"decoder": "ar", "compile": mode})) for mode in ("on", "off"))
    specs = [made.spec(made.decoders[0].spec, "0" * 64) for made in (on, off)]
    assert [bool(spec.compiled) for spec in specs] == [LACKING is None, False]
    if LACKING is None:
        infos = [*map(RunInfo, specs)]
        assert mismatched_fields(*infos) == {"compiled": "compiled (yes, AR no)"}
        assert not mismatched_fields(*infos, any_configuration=True)
        assert configuration(infos[0]).endswith(", compiled")
        assert specs[0].run_id != specs[1].run_id


@pytest.mark.parametrize("when", ["at once", pytest.param("in an image", marks=pytest.mark.slow)])
def test_auto_goes_on_eagerly_when_a_step_cannot_be_compiled(when, monkeypatch, tmp_path, cli):
    """One line names the cause; the same command with "on" ends."""
    monkeypatch.setattr("specbench.runs.plan.compiler.worth_compiling", lambda *_: (True, None))
    monkeypatch.setattr(compiler, "missing", lambda device: None)
    monkeypatch.setattr("specbench.models.transformer.compilation.keep_compiled", lambda: None)

    def broken(function, **_):
        def call(*args):
            if when == "in an image" and "warm_up" in {frame.function for frame in inspect.stack(0)}:
                return function(*args)
            exec("raise OSError(28, 'No space left on device')", {"__name__": "torch._dynamo.convert_frame"})

        return call

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(PackagedStep, "__call__", lambda step, cache, inputs, most: _run_eager(step, cache, inputs))
    line = ("run", "--decoder", "ar", "--limit", "1", "--threads", "1", "--out", tmp_path)
    outcome = cli(*line)
    [said] = [text for text in outcome.err.splitlines() if "compiled here" in text]
    assert outcome.code == 0 and said.endswith("No space left on device; running eagerly"), outcome.err
    assert len([*tmp_path.glob("*/images/*.png")]) == 1
    assert cli("report", "--out", tmp_path).code == 0
    cli(*line, "--compile", "on").refused("(use --compile off)", code=5)
    assert generate_images(["a red circle"], merge(run_settings(), {"decoder": "ar"}))


def test_an_error_of_the_system_in_a_compiled_function_is_no_failed_compilation(monkeypatch):
    """An error raised while torch compiles is a failed compilation."""
    fail = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(torch, "compile", lambda function, **_: fail)
    with pytest.raises(OSError, match="No space left"):
        compilation.Compiled(lambda x: x + 1, False, {})()
    monkeypatch.undo()
    monkeypatch.setattr(torch._dynamo.convert_frame, "transform_code_object", fail)
    with pytest.raises(CompileError, match=r"a step cannot be compiled here.*No space left"):
        compilation.Compiled(lambda x: x + 1, False, {})(torch.ones(2))


def test_the_cause_of_a_failed_compilation_is_the_compilers_first_error():
    text = "CppCompileError: C++ compile error\n\nCommand:\ng++ a\n\nOutput:\nIn a\n/usr/bin/ld: cannot find a.cpp\n"
    told = compilation.compile_error(OSError(text)).what
    assert told.endswith("here: CppCompileError: C++ compile error: /usr/bin/ld: cannot find a.cpp")


@needs_compiler
@pytest.mark.slow
def test_a_network_that_is_made_again_of_the_same_files_is_not_exported_again(monkeypatch, tmp_path):
    monkeypatch.setattr(packaged_forward, "compiled_folder", lambda: tmp_path)
    exported = []
    export = packaged_forward._export
    monkeypatch.setattr(packaged_forward, "_export", lambda *given: exported.append(given) or export(*given))

    def made(files, model):
        model.made_of = files
        model.compile()
        return tokens(model, DECODERS[0], REQUESTS[:1]), len(exported)

    expected = tokens(Steeper(), DECODERS[0], REQUESTS[:1])
    for files, exports in (("a", 1), ("a", 1), ("b", 2), (None, 3), ("a", 3)):
        found, count = made(files, Steeper())
        np.testing.assert_array_equal(found, expected)
        assert count == exports, files
    wider = Steeper()
    wider.matrix = wider.matrix.double()
    assert made("a", wider)[1] == 4, "other number formats are other code"
    (tapped := Steeper()).taps = (0,)
    assert made("a", tapped)[1] == 5, "and so are features of more layers"
    for note in tmp_path.glob("*.txt"):
        note.write_text("../elsewhere.so")
    assert made("a", Steeper())[1] == 6


def test_auto_pays_for_few_images_once_the_code_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "missing", lambda device: None)
    spec = replace(tiny.spec("ar"), model="shapes", sampling=SAMPLING)
    key = compiler.code_key("shapes", "float32", 1, 1, SAMPLING.guidance, resolve("ar"))
    of_eight = [], 6, 8 * 2 * 256
    assert compiler.worth_compiling(*of_eight, [key]) == (False, None)
    folder = tmp_path / "code"
    folder.mkdir()
    with monkeypatch.context() as compiling:  # compiling sets the variable
        compiling.setenv(compiler.COMPILED, str(folder))
        compiler.remember_compiled([replace(spec, device="cuda")])
        assert compiler.worth_compiling(*of_eight, [key]) == (False, None), "code of a GPU"
        compiler.remember_compiled([spec])
    monkeypatch.delenv(compiler.COMPILED, raising=False)
    worth, note = compiler.worth_compiling(*of_eight, [key])
    assert worth and "saves about 4.9 s and costs about 3.0 s" in note
    assert compiler.worth_compiling(*of_eight, [key, "another"]) == (False, None)
    monkeypatch.setenv(compiler.COMPILED, str(tmp_path))
    assert compiler.worth_compiling(*of_eight, [key]) == (False, None), "another folder is named"
    monkeypatch.delenv(compiler.COMPILED)
    folder.rmdir()
    assert compiler.worth_compiling(*of_eight, [key]) == (False, None), "the code was deleted"
