"""External images: supported formats are read as RGB, others rejected by name; only requested images are scored."""

import json
import os
import unicodedata
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import authors_formats as formats
import numpy as np
import pytest
from brightness import Brightness, register
from PIL import Image
from refusals import refused

from specbench.cli import score, stored
from specbench.errors import SpecbenchError
from specbench.metrics import catalog as metric_catalog
from specbench.metrics import official_exchange, scoring
from specbench.metrics.base import Settings
from specbench.metrics.catalog import PROTOCOLS
from specbench.metrics.external_images import IMAGE_LAYOUTS, external_images, prompts_of_images
from specbench.metrics.reference import ReferenceImages
from specbench.prompts import Prompt, PromptSet, build_prompt_set, load_prompts
from specbench.store.schema import image_name
from specbench.system.images import read_picture

COLOR = np.zeros((4, 6, 3), dtype=np.uint8)
COLOR[:, 2:] = (200, 100, 50)


def saved(path: Path, image: Image.Image, **options) -> Path:
    image.save(path, **options)
    return path


def test_grey_palettes_and_opaque_pixels_become_their_colours_and_transparent_ones_are_refused(tmp_path):
    grey = np.arange(24, dtype=np.uint8).reshape(4, 6) * 10
    as_grey = read_picture(saved(tmp_path / "l.png", Image.fromarray(grey)))
    assert (as_grey == grey[..., None]).all() and as_grey.shape == (4, 6, 3)
    deep = read_picture(saved(tmp_path / "i16.png", Image.fromarray(grey.astype(np.uint16) * 257)))
    assert (deep == grey[..., None]).all(), "a plain conversion would cut everything above 255 to white"
    palette = Image.fromarray(COLOR).convert("P", palette=Image.Palette.ADAPTIVE)
    assert (read_picture(saved(tmp_path / "p.png", palette)) == COLOR).all()
    assert (read_picture(saved(tmp_path / "1.png", Image.fromarray(grey > 100))) == (grey > 100)[..., None] * 255).all()
    opaque = Image.fromarray(COLOR).convert("RGBA")
    assert (read_picture(saved(tmp_path / "rgba.png", opaque)) == COLOR).all()
    opaque.putpixel((1, 1), (0, 0, 0, 254))
    refused(r"clear\.png has transparent pixels", read_picture, saved(tmp_path / "clear.png", opaque))
    palette = Image.fromarray(COLOR).convert("P", palette=Image.Palette.ADAPTIVE)
    refused("transparent", read_picture, saved(tmp_path / "clear-p.png", palette, transparency=0))


@pytest.mark.parametrize("suffix", ["png", "webp"])
def test_an_animation_is_refused_and_not_taken_for_its_first_frame(tmp_path, suffix):
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    path = saved(tmp_path / f"x.{suffix}", frames[0], save_all=True, append_images=frames[1:])
    refused("is an animation of 2 frames", read_picture, path)


def test_scores_of_a_folder_with_the_longest_name_are_kept(drawn, prompts, tmp_path):
    images = external_images(drawn.rename(tmp_path / ("é" * 127)), load_prompts(prompts), tmp_path / "out")
    assert len(images.folder.name.encode()) < 255 and (images.folder / "scores").mkdir(parents=True) is None


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "text"])
@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_damaged_files_are_named(tmp_path, damage, suffix):
    path = tmp_path / f"x.{suffix}"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    whole = saved(path, Image.fromarray(noise)).read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes({"empty": b"", "truncated": whole[: len(whole) // 2], "text": b"hello"}[damage])
    refused(rf"x\.{suffix} is {'missing' if damage == 'missing' else 'damaged'}", read_picture, path)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": "cat", "text": "a cat"}, {"id": "dog-1", "text": "a dog"}, {"id": "x/y", "text": "a bird"}]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.fixture
def drawn(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name in ("cat-0.png", "cat-1.png", "dog-1-0.png", "dog-1_1.png"):
        saved(folder / name, Image.fromarray(COLOR))
    for sample in (0, 1):
        saved(folder / image_name("x/y", sample), Image.fromarray(COLOR))
    return folder


def pair(drawn: Path, prompts: Path):
    return external_images(drawn, load_prompts(prompts), drawn.parent / "out")


def test_names_that_are_not_utf_8_are_escaped_in_what_is_stored(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    folder.mkdir()
    (folder / "metadata.jsonl").write_text('{"file_name": "\\udcff.png", "text": "a cat"}')
    for name in (b"\xff.png", b"a.png"):
        Image.fromarray(COLOR).save(folder / os.fsdecode(name))
    images = external_images(folder, prompts_of_images(folder, None), tmp_path)
    assert images.name.startswith(r"caf\udce9-") and images.rows["started_at"][0].endswith(r"-\udcff.png")
    (folder / "metadata.jsonl").unlink()
    assert ReferenceImages(Settings(reference=folder)).identity["reference_n"] == "2"


def test_a_bare_id_is_the_first_sample_and_a_name_that_fits_two_prompts_is_refused(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"id": "cat", "text": "a cat"}')
    (tmp_path / "one").mkdir()
    saved(tmp_path / "one" / "cat.png", Image.fromarray(COLOR))
    assert pair(tmp_path / "one", tmp_path / "p.jsonl").rows["sample"].tolist() == [0]
    (tmp_path / "p.jsonl").write_text('{"id": "a", "text": "x"}\n{"id": "a-1", "text": "y"}')
    (tmp_path / "one" / "cat.png").rename(tmp_path / "one" / "a-1.png")
    refused("may belong to prompts 'a' and 'a-1'", pair, tmp_path / "one", tmp_path / "p.jsonl")


@pytest.mark.parametrize(("name", "problem"), [
    ("grid.png", r"grid\.png belongs to no prompt"), ("cat.png", "are both image 0 of prompt 'cat'"),
    ("notes.txt", r"notes\.txt is not an image"), ("cat-2.png", "has no image 2 of prompt 'dog-1'"),
])  # fmt: skip
def test_a_stray_file_is_refused_by_name(drawn, prompts, name, problem):
    saved(drawn / "tmp.png", Image.fromarray(COLOR)).rename(drawn / name)
    refused(problem, pair, drawn, prompts)


def test_a_folder_is_scored_from_the_command_line_and_only_changes_again(drawn, prompts, cli, tmp_path, monkeypatch):
    register(monkeypatch, "brightness", "brightness:Brightness")
    call = ("score", "--images", drawn, "--prompts", prompts, "--metric", "brightness", "--out", tmp_path / "out")
    call = (*call, "--json")
    outcome = cli(*call)
    (row,) = json.loads(outcome.out)
    assert outcome.code == 0 and row["value"] == pytest.approx(COLOR.mean()) and row["n"] == 6
    path = saved(drawn / "cat-0.bmp", Image.fromarray(COLOR))
    (drawn / "cat-0.png").unlink()
    assert cli(*call).code == 0
    before = path.stat()
    saved(path, Image.fromarray(COLOR[:, ::-1] // 2))  # of the same size, and as an archive with fixed times leaves it
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    images = pair(drawn, prompts)
    (again,) = scoring.score([replace(images, folder=tmp_path / "out" / images.name)], Brightness())
    assert (again.computed, again.reused) == (1, 5) and json.loads(cli(*call).out)[0]["value"] < row["value"]


def test_every_metric_can_be_made_and_says_what_it_needs():
    assert {name for names in PROTOCOLS.values() for name in names} <= set(metric_catalog.metric_names())
    for name, entry in metric_catalog.METRICS.items():
        metric = metric_catalog.metric(name)(Settings(batch=3))
        assert metric.name == name and metric.batch == 3 and entry.summary
        assert not (entry.bundled and metric.checkpoints), name


def test_doctor_says_what_a_metric_lacks_and_where_to_get_it(cli, monkeypatch, tmp_path):
    outcome = cli("doctor", "--metric", "imagereward", "--json")
    rows = [row for row in json.loads(outcome.out) if row["name"] == "metric imagereward"]
    assert outcome.code == 5 and len(rows) == 2 and all(row["fix"].startswith("specbench fetch ") for row in rows)
    (tmp_path / "weights").mkdir()
    formats.stand_in(monkeypatch, "bert-vocabulary", formats.save_vocabulary(tmp_path / "vocab.txt"))
    rows = json.loads(cli("doctor", "--metric", "imagereward", "--json").out)
    rows = [row for row in rows if "reward" in row["name"]]
    assert len(rows) == 1 and cli("doctor", "--metric", "shapes-detector").code == 0
    assert "did you mean 'imagereward'" in cli("doctor", "--metric", "imagerewart").err


CAPTIONS = ("a red circle", "a blue square, left of a dog-like cat", "a cat's hat")


def listed(folder: Path) -> PromptSet:
    rows = [Prompt(f"id{n}", text, meta={"annotation": 70 + 5 * n}) for n, text in enumerate(CAPTIONS)]
    return build_prompt_set("list", rows)


def written(folder: Path, *names: str) -> Path:
    """A folder in the layout of another program: pictures of increasing brightness, in the order of their names."""
    for level, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        saved(path, Image.new("RGB", (4, 4), (level, level, level)))
    return folder


def paired(folder: Path, layout: str | None = None, lines: list | None = None) -> dict:
    reporter = None if lines is None else SimpleNamespace(note=lines.append)
    rows = external_images(folder, listed(folder), folder.parent / "out", layout, reporter).rows
    return {(int(row.prompt_id[2:]), row.sample): row.path.relative_to(folder).as_posix() for row in rows.itertuples()}


RELEASED = {
    "LANTERN": ["prompt_0.png", "prompt_1.png", "prompt_2.png"], "SJD, PartiPrompts": ["0.png", "1.png", "2.png"],
    "SJD, COCO": ["70.png", "75.png", "80.png"], "lines from 1": ["1.jpg", "02.jpg", "3.jpg"],
    "GenEval": [f"{line:05d}/samples/{0:05d}.png" for line in range(3)],
    "T2I-CompBench": [f"samples/{text}_{10 * line:06d}.png" for line, text in enumerate(CAPTIONS)],
    "GSD": [f"Lumina-mGPT-7B-768-{text[:30]}-16-init-random-seedNone-img_topk2000.png" for text in CAPTIONS],
    "captions alone": [f"{text.replace(' ', '_')}.png" for text in CAPTIONS],
}  # fmt: skip


@pytest.mark.parametrize("program", RELEASED)
def test_folders_are_read_as_the_released_programs_write_them(tmp_path, program):
    lines = []
    packed = written(tmp_path / "images", *RELEASED[program], "__MACOSX/samples/._0.png", "._0.png", "Thumbs.png")
    (packed / "Thumbs.png").rename(packed / "Thumbs.db")
    assert paired(packed, lines=lines) == {(line, 0): name for line, name in enumerate(RELEASED[program])}
    assert ": 3 images, layout" in lines[0] and f"first pair: {RELEASED[program][0]} is 'a red circle'" in lines[0]


SPELT = [unicodedata.normalize(form, "un café à la crème, très chaud") for form in ("NFC", "NFD")]


@pytest.mark.parametrize("layout", ["ids", "captions", "starts", "dataset", "geneval"])
@pytest.mark.parametrize("listed", [0, 1])
def test_names_of_files_and_captions_compare_composed(tmp_path, layout, listed):
    """macOS decomposes the accents of file names; a list of prompts may have either form."""
    mine, theirs = SPELT[listed], SPELT[1 - listed]
    names = {
        "ids": f"{theirs}.png", "captions": f"{theirs}_000000.png",
        "starts": f"model-{unicodedata.normalize(('NFD', 'NFC')[listed], SPELT[0][:30])}-16-init-a-seed1-img_topk1.png",
        "dataset": f"{theirs}/{theirs}.png", "geneval": "00000/samples/0.png",
    }  # fmt: skip
    folder = written(tmp_path / "images", names[layout])
    if layout == "dataset":
        (folder / "metadata.jsonl").write_text(json.dumps({"file_name": f"{mine}/{mine}.png", "prompt": theirs}))
    if layout == "geneval":
        (folder / "00000" / "metadata.jsonl").write_text(json.dumps({"prompt": theirs}))
    prompts = build_prompt_set("list", [Prompt(mine if layout == "ids" else "id", mine)])
    assert [*external_images(folder, prompts, tmp_path / "out", layout).rows["path"]] == [folder / names[layout]]


def test_samples_are_in_the_order_of_their_numbers(tmp_path):
    names = [f"samples/{text}_{number}.png" for text in CAPTIONS for number in (9, 10, 11)]
    pairs = paired(written(tmp_path / "images", *names))
    assert [pairs[0, sample] for sample in range(3)] == names[:3]
    from_one = paired(written(tmp_path / "one", *(f"id{n}{mark}.png" for n in range(3) for mark in ("-1", "_2"))))
    assert (from_one[0, 1], from_one[0, 2], len(from_one)) == ("id0-1.png", "id0_2.png", 6)


def test_seeds_of_gsd_are_samples_and_captions_of_one_start_are_refused(tmp_path):
    def name(text: str, seed: int) -> str:
        return f"Lumina-mGPT-7B-768-{text[:30]}-16-init-random-seed{seed}-img_topk2000.png"

    folder = written(tmp_path / "images", *(name(text, seed) for text in CAPTIONS for seed in (200, 9)))
    assert [paired(folder)[1, sample] for sample in (0, 1)] == [name(CAPTIONS[1], 9), name(CAPTIONS[1], 200)]
    alike = build_prompt_set("list", [Prompt(str(n), CAPTIONS[1] + end) for n, end in enumerate(("", "s"))])
    refused("two captions would have the same file name", external_images, folder, alike, tmp_path / "out", "starts")


def test_captions_that_lantern_keeps_count_more_than_lines(tmp_path):
    folder = written(tmp_path / "images", "prompt_0.png", "prompt_1.png", "prompt_2.png")
    kept = {f"prompt_{n}": {"prompt": text, "latency": 1.0} for n, text in enumerate(CAPTIONS[::-1])}
    (folder / "global_statistics_0_10000.json").write_text(json.dumps(kept))
    (folder / "generation_configs.json").write_text("{}")
    assert paired(folder) == {(2 - n, 0): f"prompt_{n}.png" for n in range(3)}


def test_a_caption_of_geneval_that_is_not_the_lists_is_refused(tmp_path):
    folder = written(tmp_path / "images", *RELEASED["GenEval"])
    (folder / "00001" / "metadata.jsonl").write_text('{"prompt": "a dog"}')
    (folder / "00001" / "grid.png").write_bytes(b"")
    refused("another caption than line 00001", paired, folder, "geneval")


def test_two_layouts_that_pair_differently_are_refused_until_one_is_named(tmp_path):
    folder = written(tmp_path / "images", "0.png", "1.png", "2.png")
    prompts = build_prompt_set("numbers", [Prompt(str(n), text) for n, text in zip((2, 1, 0), CAPTIONS, strict=True)])
    with pytest.raises(SpecbenchError, match=r"two layouts, 'ids' and 'lines'.*--layout ids or --layout lines"):
        external_images(folder, prompts, tmp_path / "out")
    rows = external_images(folder, prompts, tmp_path / "out", "lines").rows
    assert dict(zip(rows["prompt"], (path.name for path in rows["path"]), strict=True))[CAPTIONS[0]] == "0.png"


def test_a_grid_is_four_images_if_it_is_named(tmp_path):
    folder = written(tmp_path / "images", "id0.png", "id1.png", "id2.png")
    saved(folder / "id1.png", Image.fromarray(np.arange(4, dtype=np.uint8).repeat(3).reshape(2, 2, 3)))
    assert len(paired(folder)) == 3
    images = external_images(folder, listed(folder), tmp_path / "out", "grids")
    corners = [images.read(row)[0, 0, 0] for row in images.rows.itertuples() if row.prompt_id == "id1"]
    assert corners == [0, 1, 2, 3]


def test_a_folder_of_a_released_layout_is_scored(tmp_path, cli):
    (tmp_path / "p.txt").write_text("a red circle\na blue square\n")
    folder = written(tmp_path / "images", "prompt_0.png", "prompt_1.png")
    for path in folder.iterdir():
        saved(path, Image.new("RGB", (64, 64)))
    line = f"score --images {folder} --prompts {tmp_path / 'p.txt'} --bundled-only --out {tmp_path / 'out'}"
    outcome = cli(*line.split())
    assert outcome.code == 0 and "layout lines" in outcome.err and "shapes-clip" in outcome.out, outcome
    saved(folder / "prompt_0.png", Image.new("RGB", (64, 32)))
    cli(*line.split()).refused("reads images of 64 x 64 pixels, not of 64 x 32")
    (tmp_path / "p.txt").write_text("a cat\na dog\n")
    cli(*line.split()).refused("no score: these metrics need reference images for these prompts")
    (tmp_path / "p.txt").write_text("a cat\na dog\na bird\n")
    cli(*line.split()).refused("has no image 0 of 'a bird'", "name a file of only the other prompts: --prompts FILE")
    (tmp_path / "p.txt").write_text("a cat\n")
    assert "prompt_1.png belongs to no prompt: the list has 1 lines" in cli(*line.split()).err


DATASETS = {
    "metadata.jsonl": '{"file_name": "b.png", "prompt": "a cat"}\n{"file_name": "a.png", "prompt": "a dog"}\n'
    '{"file_name": "c/d.png", "prompt": "a cat"}\n',
    "train/metadata.csv": "file_name,text\nb.png,a cat\na.png,a dog\nc/d.png,a cat\n",
}


@pytest.mark.parametrize("name", DATASETS)
def test_a_dataset_of_hugging_face_names_its_own_prompts(tmp_path, name):
    written((tmp_path / "images" / name).parent, "a.png", "b.png", "c/d.png", "not-listed.png")
    (tmp_path / "images" / name).write_text(DATASETS[name])
    prompts = prompts_of_images(tmp_path / "images", None)
    assert [prompt.text for prompt in prompts.prompts] == ["a cat", "a dog"]
    rows = external_images(tmp_path / "images", prompts, tmp_path / "out").rows
    assert {(row.prompt, row.sample): row.path.name for row in rows.itertuples()} == {
        ("a cat", 0): "b.png", ("a cat", 1): "d.png", ("a dog", 0): "a.png",
    }  # fmt: skip
    named = build_prompt_set("own", [Prompt("x", "a dog"), Prompt("y", "a cat")])
    assert set(external_images(tmp_path / "images", named, tmp_path / "out").rows["prompt_id"]) == {"x", "y"}
    (tmp_path / "images" / name).write_text(DATASETS[name].replace("c/d.png", "../d.png"))
    refused(r"'\.\./d\.png' is not the file_name", external_images, tmp_path / "images", named, tmp_path / "out")


@pytest.mark.slow  # decodes
def test_an_exported_dataset_is_scored_as_its_run_is(tmp_path, cli):
    assert cli("run", "--decoder", "ar", "--limit", "2", "--baseline", "0", "--out", tmp_path / "r").code == 0
    (made,) = (tmp_path / "r").iterdir()
    assert cli("export", "dataset", made, "--to", tmp_path / "d").code == 0
    options = "--metric", "shapes-detector", "--json", "--out"
    run = json.loads(cli("score", *options, tmp_path / "r").out)
    folder = json.loads(cli("score", "--images", tmp_path / "d", *options, tmp_path / "o").out)
    values = [{row["metric"]: (row["value"], row["n"]) for row in rows} for rows in (run, folder)]
    assert values[0]["shapes-detector"] == values[1]["shapes-detector"] and values[0]["shapes-detector"][1] == 2


def test_the_command_line_offers_every_layout():
    assert list(score._LAYOUTS) == list(IMAGE_LAYOUTS) and list(stored._LAYOUTS) == list(official_exchange._LAYOUTS)
