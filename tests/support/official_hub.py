"""A hub on the loopback with a checkpoint of every model under its official names: small in width and layers, with the
official vocabularies, grids and file names. `python official_hub.py FOLDER MODEL...` writes the checkpoints, in a
separate process because the vocabularies are constants of the writers."""

import functools
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from loopback_hub import Hub

from specbench.models.draft_head_files import PUBLISHED_HEADS
from specbench.models.hub_model import MODELS

INFO = {model.name: model for model in MODELS}
COMMIT = "c" * 40


def serve(hub: Hub, folder: Path, models: Sequence[str]) -> None:
    """Put the repositories of models on a hub; a pinned repository at its pinned commit."""
    from specbench.models.hub_downloads import REVISIONS

    env = {**os.environ, "OFFICIAL_VOCABULARIES": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, __file__, str(folder), *models], env=env, check=True)
    for repo in (path for owner in folder.iterdir() for path in owner.iterdir()):
        name = f"{repo.parent.name}/{repo.name}"
        hub.put(name, REVISIONS.get(name, COMMIT), repo)


def _write(folder: Path, model: str) -> None:
    """The repositories of a model: its own, and the repository of each companion with a folder of its name."""
    import torch
    from checkpoints import llamagen, write
    from draft_heads import write_head
    from safetensors.torch import save_file

    made = folder / "made"
    made.mkdir(parents=True)
    info = INFO[model]
    if info.classes:
        llamagen.write_by_class(made, info.source.files[0])
    else:
        written = write(model, made)
    if model == "liquid":  # whoever has no file of Meta's downloads the converted one
        converted = made / info.companions[0].folder_name
        converted.mkdir()
        tensors = torch.load(made / "chameleon" / "vqgan.ckpt", weights_only=True)["state_dict"]
        save_file(tensors, converted / "model.safetensors")
        shutil.rmtree(made / "chameleon")
    for source in info.companions:
        names = (source.folder_name, *source.folders)
        place = next((made / name for name in names if (made / name).is_dir()), made / names[0])
        target = folder / source.repo
        target.mkdir(parents=True, exist_ok=True)
        if place.is_dir():
            shutil.copytree(place, target, dirs_exist_ok=True)
            shutil.rmtree(place)
        else:
            for name in source.files:
                shutil.move(made / name, target / name)
    if (head := PUBLISHED_HEADS.get(model)) and model != "janus-7b":  # tests of draft heads write its head
        config = made / "config.json"
        words = json.loads(config.read_text())["vocab_size"] if config.exists() else len(written.output)
        write_head(folder / head.repo, model, words, written.output.shape[1])
    shutil.copytree(made, folder / info.source.repo, dirs_exist_ok=True)
    shutil.rmtree(made)


def serve_files(hub: Hub, folder: Path) -> None:
    """Put the networks of both protocols, PartiPrompts and COCO on a hub, in their publishers' formats."""
    import authors_formats as formats
    import calibrated
    import published
    from PIL import Image

    folder.mkdir()
    calibrated.save_inception(folder / "inception.pth")
    for name in ("ViT-B-16.pt", "ViT-B-32.pt"):
        formats.save_openai_clip(folder / name)
    formats.save_hpsv2(folder)
    formats.save_imagereward(folder / "ImageReward.pt")
    formats.save_vocabulary(folder / "vocab.txt")
    for name in ("parti", "coco"):
        published.write(name, folder)
    with zipfile.ZipFile(folder / "coco.zip", "w") as archive:
        for number, pixels in enumerate(calibrated.images(_REFERENCES, 80, 80)):
            with archive.open(f"val2017/{number:012d}.png", "w") as file:
                Image.fromarray(pixels).save(file, "png")
    hub.files |= {f"/files/{path.name}": path for path in folder.iterdir()}


_NETWORKS = {
    "inception": "inception.pth", "clip-b16": "ViT-B-16.pt", "clip-b32": "ViT-B-32.pt", "hpsv2-v2.1": "HPS.pt",
    "imagereward": "ImageReward.pt", "bert-vocabulary": "vocab.txt",
}  # fmt: skip
_REFERENCES = 3


def type_as_user(hub: Hub, *arguments: str) -> None:
    """Call the command line on a machine for which the files of a hub are the published ones; for a forked process."""
    import published

    from specbench.cli import main
    from specbench.metrics import preference, published_weights
    from specbench.metrics.openclip import import_open_clip
    from specbench.prompts import public
    from specbench.system.digests import digest_of
    from specbench.system.downloads import Remote

    base, files = f"{hub.address}/files", {path.rpartition("/")[2]: file for path, file in hub.files.items()}
    for name, file in _NETWORKS.items():
        if file in files:
            remote = Remote(f"{base}/{file}", digest_of(files[file]))
            published_weights.CHECKPOINTS[name] = published_weights.Checkpoint(file, remote, "test")
    load = functools.partial(preference.load_hpsv2, architecture="tiny-hps")

    def load_small(*arguments):
        import_open_clip().add_model_config(files["tiny-hps.json"])
        return load(*arguments)

    preference.load_hpsv2 = load_small
    small = public.public_sets() | {name: published.public_set(name, base) for name in ("parti", "coco")}
    zipped = files["coco.zip"]
    archive = Remote(f"{base}/coco.zip", digest_of(zipped), zipped.stat().st_size)
    small["coco"] = replace(small["coco"], images=public.PublishedImages(archive, _REFERENCES, "test"))
    public.public_sets = lambda: small
    main([*arguments])


if __name__ == "__main__":
    for name in sys.argv[2:]:
        _write(Path(sys.argv[1]), name)
