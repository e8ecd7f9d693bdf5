"""Names, options and commands as papers, hubs and other programs write them: read, or refused without a wrong
guess. It concerns several modules: `specbench.names`, and the catalogues whose names and facts it is asked about."""

import shlex

import pytest
from refusals import refused

from specbench.metrics.catalog import metric_name, require_metric
from specbench.models.catalog import model_name, models
from specbench.names import folded, guess
from specbench.papers.table_files import load_table, table_names
from specbench.prompts import load_prompts, prompt_set_names, set_name
from specbench.runs.settings import merge, run_settings
from specbench.specs.presets import PRESETS, resolve

MODELS = {
    "lumina": "lumina-mgpt, Lumina_mGPT, Lumina-mGPT-7B, Alpha-VLLM/Lumina-mGPT-7B-768, LUMINA",
    "lumina-512": "Lumina-mGPT-7B-512, Alpha-VLLM/Lumina-mGPT-7B-512", "lumina-1024": "LuminamGPT-1024",
    "lumina-34b": "Lumina-mGPT-34B", "lumina2": "Lumina-mGPT 2.0, Lumina-mGPT2, Alpha-VLLM/Lumina-mGPT-2.0, lumina-2",
    "anole": "Anole-7b-v0.1, GAIR/Anole-7b-v0.1, leloy/Anole-7b-v0.1-hf",
    "janus": "Janus-Pro-1B, deepseek-ai/Janus-Pro-1B, Janus-Pro",
    "janus-7b": "Janus-Pro-7B, deepseek-community/Janus-Pro-7B, janus_pro_7b", "simplear": "SimpleAR-0.5B, SimpleAR",
    "tar-7b": "Tar-7B, csuhan/Tar-7B-v0.1", "liquid": "Liquid-7B, Junfeng5/Liquid_V1_7B",
    "glm-image": "zai-org/GLM-Image, GLMImage", "x-omni": "X-Omni/X-Omni-En, XOmni, xomni",
    "emu3": "BAAI/Emu3-Gen-hf, BAAI/Emu3-Gen, Emu3-8B", "emu3.5": "emu3_5, BAAI/Emu3.5-Image, Emu3.5-34B",
    "llamagen": "LlamaGen", "llamagen-512": "LlamaGen-XL-512", "llamagen-c2i-3b": "LlamaGen-3B",
    "llamagen-c2i-xxl": "LlamaGen-XXL",
}  # fmt: skip
DECODERS = {
    "ar": "autoregressive, vanilla, AR, next-token prediction, Auto-Regressive Decoding, AR decoding",
    "sjd": "SJD, Speculative Jacobi Decoding, speculative_jacobi",
    "sjd++": "SJD++, sjd-plus-plus, sjdpp, SJD_PP, Speculative Jacobi Decoding++",
    "gsd": "GSD, Grouped Speculative Decoding, grouped speculative", "eagle": "EAGLE, eagle1, EAGLE-1, eagle_v1",
    "scd-mc": "SCD (MC), Speculative Coupled Decoding", "lantern": "LANTERN", "lantern++": "lantern-pp, LANTERN++",
    "cool-sd": "Cool-SD, coolsd, cool_sd", "zipar": "ZipAR, zip-ar", "sjd-pac": "SJD-PAC",
    "pathexplore": "PathSpec, 2606.10492",
}  # fmt: skip
METRICS = {
    "clip": "CLIP, clip-score, CLIPScore", "clip[l14]": "CLIP ViT-L-14, CLIP-L/14",
    "clip[b32]": "CLIP ViT-B/32, CLIP[B32], clip-b32, CLIP (ViT-B/32), CLIP B/32",
    "fid": "FID, Fid, Fréchet Inception Distance", "hpsv2": "HPS v2, HPSv2, hps", "hpsv2[v2.1]": "HPSv2.1",
    "imagereward": "ImageReward, image_reward, ImageReward-v1.0", "pickscore": "PickScore, pick-score, PickScore_v1",
    "compbench": "T2I-CompBench++, T2I-CompBench", "inception-score": "IS, Inception Score", "kid": "KID",
}  # fmt: skip
PROMPTS = {
    "coco-train": "COCO2017 train, MS-COCO train, coco_train2017, captions_train2017",
    "coco": "COCO2017, MS-COCO, mscoco, coco_val2017, COCO 2017 val, MS COCO 2017 validation, captions_val2017",
    "parti": "PartiPrompts, partiprompt, P2, P2 prompts, nateraw/parti-prompts", "parti/Arts": "PartiPrompts/arts",
    "parti/Food & Beverage": "parti/food-and-beverage", "geneval": "GenEval, djghosh13/geneval",
    "geneval2": "Geneval2, GenEval 2, GenEval v2", "t2i-compbench": "T2I-CompBench, T2I-CompBench++",
    "t2i-compbench/color": "t2i_compbench/color", "dpg-bench": "DPGBench, DPG, Dense Prompt Graph",
    "oneig": "OneIG, OneIG-Bench, OneIG-Benchmark", "longtext-bench": "LongText-Bench, LongText",
    "cvtg-2k": "CVTG-2K, CVTG", "wise-verified": "WISE_Verified, WISE (verified)",
    "wise-legacy": "WISE_legacy, WISE (legacy)", "tiif": "TIIF-Bench", "coco-30k": "COCO 30K",
    "imagenet": "ImageNet-1k, ILSVRC2012",
}  # fmt: skip
TABLES = {
    "sjd-1": "SJD Table 1, sjd:1, sjd_table_1, arXiv 2410.01699 table 1", "sjdpp-fig5": "SJD++ fig. 5",
    "gsd-fig10": "GSD Figure 10, gsd-fig-10", "cool-sd-2": "CoolSD-2",
}  # fmt: skip
READERS = {
    "model": (model_name, MODELS), "decoder": (lambda typed: resolve(typed).name, DECODERS),
    "metric": (metric_name, METRICS), "prompts": (set_name, PROMPTS),
    "table": (lambda typed: load_table(typed).name, TABLES),
}  # fmt: skip
LISTED = [(kind, names.items()) for kind, (_, names) in READERS.items()]
MEANT = [(kind, typed, name) for kind, items in LISTED for name, all_typed in items for typed in all_typed.split(", ")]


@pytest.mark.parametrize(("kind", "typed", "name"), MEANT)
def test_a_published_name_matches_the_catalogue(kind, typed, name):
    assert READERS[kind][0](typed) == name


STRANGERS = {
    model_name: "Infinity-2B, Janus-1.3B, JanusFlow-1.3B, Lumina-Image-2.0, Chameleon-7B, Show-o, SDXL, all, Emu2",
    resolve: "medusa, EAGLE-2, eagle4, MuLo-SD, sd, speculative decoding, all, greedy, lookahead",
    require_metric: "LPIPS, SSIM, CLIP-T, CLIP-I, BLIP, DINO, MPS, DreamSim, all", load_table: "eagle-1, gsd-11, all",
    load_prompts: "DrawBench, coco2014, HPDv2, all",
}  # fmt: skip


@pytest.mark.parametrize(
    ("read", "typed"), [(read, typed) for read, listed in STRANGERS.items() for typed in listed.split(", ")]
)
def test_at_a_name_of_something_else_nothing_is_guessed(read, typed):
    text = str(error := refused("", read, typed))
    assert ("did you mean" not in text and "specbench list" in error.try_this) or "-1" in text


def test_a_users_checkpoint_gets_advice_and_an_ambiguous_name_is_refused_with_all_candidates():
    refused("--model NAME --weights me/mine", model_name, "me/mine")
    refused("--model janus-7b --weights me/Janus-Pro-7B", model_name, "me/Janus-Pro-7B")
    assert refused("is ambiguous", model_name, "LlamaGen-XL").try_this == "name one of: llamagen, llamagen-c2i-xl"


def test_settings_hold_the_names_of_the_catalogues_of_which_no_two_are_spelt_alike():
    flags = {"Model": "Alpha-VLLM/Lumina-mGPT-7B-768", "prompts": "PartiPrompts", "precision": "torch.bfloat16"}
    values = merge(run_settings(), flags | {"image_size": "512", "device": "CPU"}, env={})
    named = values.model, values.prompts, values.dtype, values.size, values.device
    assert named == ("lumina", "parti", "bfloat16", "512x512", "cpu")
    for names in (PRESETS, models(), prompt_set_names(), table_names()):
        assert len({folded(name) for name in names}) == len(list(names))
        assert not [name for name in names if guess(name, names) != name]


TAKEN = {
    "--batch_size 2": ("batch", 2), "--output-dir x": ("out", "x"), "--guidance_scale 3": ("cfg", 3.0),
    "--cfg-scale=3": ("cfg", 3.0), "--topk 5": ("top-k", 5), "--top_k 5": ("top-k", 5),
    "--temp 0.5": ("temperature", 0.5), "--dtype fp16": ("dtype", "float16"), "--window-size 24": ("window", 24),
    "--num_workers 2": ("workers", 2), "--prompts_path x.txt": ("prompts", "x.txt"),
    "--dataset-name coco": ("prompts", "coco"), "--image_top_k 5": ("top-k", 5), "--draft-len 5": ("window", 5),
}  # fmt: skip


@pytest.mark.parametrize(("typed", "meant"), TAKEN.items())
def test_an_option_of_another_program_is_taken(typed, meant, monkeypatch, cli):
    seen = {}
    monkeypatch.setattr("specbench.cli.run._read", lambda values, config: seen.update(values) or {}["stop"])
    cli("run", *typed.split())
    name, value = meant
    (setting,) = run_settings({name})
    assert setting.parse(seen[name]) in (value, str(value))


ANSWERED = {
    "-o x": "--out", "-n 8": "--limit 8", "--fp16": "--dtype float16", "--gpus 2": "--workers",
    '--prompt "a red square"': "--prompts FILE", "--num_images_per_prompt 2": "--samples",
    "--num-images 8": "--samples", "--num-prompts 3": "--limit", "--seeds 1,2,3": "--sweep seed=1,2,3",
    "--max_num_new_tokens 16": "--window", "--checkpoint DIR": "--weights", "--drafter-path DIR": "--head",
    "--resume": "stored images are always kept", "--output json": "--out", "--metrics clip": "specbench score",
    "--to x.md": "specbench", "--max-tokens 10": "its number of tokens", "--config_path x": "--config x",
    "--vq_model x": "--weights", "--model-dir x": "--weights", "--assistant-model x": "--head",
    "--frobnicate": "--help all",
}  # fmt: skip
COMMANDS = {
    "ls": "specbench list", "models": "specbench list models", "model list": "specbench list models",
    "list-models": "specbench list models", "datasets": "specbench list prompts",
    "list benchmarks": "specbench list tables", "prompts list": "specbench list prompts", "eval": "specbench score",
    "evaluate": "specbench score", "generate": "specbench run", "plot": "specbench figure", "html": "specbench report",
}  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "advice"), [*COMMANDS.items(), *((f"run {typed}", advice) for typed, advice in ANSWERED.items())]
)
def test_what_needs_other_words_is_answered_with_them(typed, advice, cli):
    outcome = cli(*shlex.split(typed))
    outcome.refused(advice, alone=True)
    assert "did you mean" not in outcome.err


@pytest.mark.parametrize("typed", ["help", "help run", "version", "list Model", "List models"])
def test_a_command_that_is_an_option_here_works(typed, cli):
    outcome = cli(*typed.split())
    assert outcome.code == 0 and outcome.out and not outcome.err
