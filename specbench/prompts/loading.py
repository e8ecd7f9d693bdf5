"""Load a prompt set by name (shipped, public, plug-in) or from a file."""

import os
import random
from pathlib import Path

from specbench import names
from specbench.errors import SpecbenchError, unknown_name
from specbench.prompts import public
from specbench.prompts.prompt_set import Prompt, PromptSet, build_prompt_set
from specbench.prompts.readers import read_file, read_stdin
from specbench.system import console, plugins
from specbench.system.downloads import Progress, fetch_all, offline
from specbench.system.files import data_folder

LABELS, _LABEL_SEED = "imagenet", 0  # Name of the set of class labels, and the seed for drawing them


def prompt_set_names() -> list[str]:
    """List the names of all prompt sets, including public sets that are not downloaded yet."""
    return sorted({*_shipped(), *plugins.plugins("prompts"), *public.public_names(), LABELS})


def set_name(typed: str) -> str:
    """Resolve a typed name of a prompt set; other texts, and names of existing files, are returned unchanged."""
    if typed in prompt_set_names() or os.path.exists(typed):
        return typed
    if names.folded(typed).startswith("mjhq"):
        what = "prompt set MJHQ-30K cannot be downloaded by specbench: its publisher gives no digest to verify it"
        raise SpecbenchError(what, "download its file meta_data.json yourself, and use --prompts meta_data.json")
    valid, sets = prompt_set_names(), public.public_sets()
    facts = {name: [sets[name].summary.partition(":")[0]] for name in valid if name in sets}
    whole, slash, part = typed.partition("/")
    base = next(iter(names.fitting(whole, (name for name in valid if "/" not in name), "prompt set", facts)), whole)
    page = [name for name in facts if sets[name].page.lower().endswith(f"/{typed.lower()}")]
    if len(page) > 1 and base == whole and not all(name.startswith(page[0]) for name in page):
        raise SpecbenchError(f"'{typed}' may mean {len(page)} prompt sets", f"use one of: {', '.join(page)}")
    if page:
        return page[0]
    return next(iter(names.fitting(f"{base}{slash}{part}", valid, "prompt set")), base if not slash else typed)


def downloadable(name: str) -> public.PublicSet:
    """Find a public prompt set by name."""
    name = set_name(name)
    if name not in public.public_names():
        if name in prompt_set_names():
            raise SpecbenchError(f"prompts '{name}' need no download", f"specbench prompts show {name}")
        raise unknown_name("public prompt set", name, public.public_names())
    return public.find(name)[0]


def fetch_prompts(
    name: str,
    images: bool = False,
    source: str | Path | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Download a public prompt set and verify it (`specbench fetch NAME --from COPY`).

    Args:
        name: one of the public sets of `specbench list prompts`.
        images: download the reference images of the set instead.
        source: a local copy to import instead of downloading.
        offline: download nothing.
        progress: called with the bytes received and the total bytes (None if unknown).

    Returns:
        The folder of the files.

    Raises:
        SpecbenchError: no such set, a set that needs no download, or files that differ from the published files.
    """
    chosen = downloadable(name)
    source = Path(source) if source else None
    if images:
        return public.fetch_images(chosen, progress, offline, source)
    folder = public.fetch_set(chosen, progress, offline) if source is None else public.adopt_set(chosen, source)
    public.read_set(chosen)
    return folder


def fetched_prompts(name_or_path: str | Path, column: str | None = None) -> PromptSet:
    """Call `load_prompts`, after downloading a public set if it is missing."""
    if not offline():
        fetch_all(public.missing_set(set_name(str(name_or_path))))
    return load_prompts(name_or_path, column)


def load_prompts(name_or_path: str | Path, column: str | None = None) -> PromptSet:
    """Load a prompt set by name, from a file in the format of its suffix, from stdin ("-"), or from a file whose path
    is the Python object "package.module:NAME". `column`: the column of a file that holds the texts."""
    name = set_name(str(name_or_path))
    if column and name in prompt_set_names():
        raise SpecbenchError(f"--prompt-column {column}: '{name}' is a prompt set, whose columns are known", "omit it")
    if name in _shipped():
        return build_prompt_set(name, read_file(_shipped()[name]))
    if name == LABELS:
        return build_prompt_set(name, class_labels())
    if name in plugins.plugins("prompts"):
        target = plugins.load_object(plugins.plugins("prompts")[name].value, f"prompt set {name}")
        return build_prompt_set(name, read_file(_path_of(target, name)))
    if name in public.public_names():
        return build_prompt_set(name, public.read(name))
    if name == "-":
        return build_prompt_set(name, read_stdin())
    path = Path(name)
    if not os.path.exists(path):  # Path.exists raises an error for long names or NUL
        if plugins.is_reference(name):
            return build_prompt_set(name, read_file(_path_of(plugins.load_user_object(name, "prompt set"), name)))
        if any(character.isspace() for character in name.strip()) and not path.suffix:
            what = f"'{name}' is neither a prompt set nor a file; is it a caption?"
            raise SpecbenchError(what, "write captions into a text file, one per line: --prompts mine.txt")
        if parts := [name for name in public.public_names() if name.startswith(f"{path.parts[0]}/")]:
            raise unknown_name("prompt set", name, parts)
        if path.parts[1:] and not path.suffix and path.parts[0] in _shipped():
            category = f"for a category: --prompts {path.parts[0]} --category {name.partition('/')[2]}"
            raise SpecbenchError(f"unknown prompt set '{name}'", category)
        if path.suffix or len(path.parts) > 1:
            raise SpecbenchError(f"prompt file '{name}' does not exist", "name a file or a set: specbench list prompts")
        raise unknown_name("prompt set", name, prompt_set_names())
    if of := next((entry for entry in public.public_sets().values() if path.name in entry.files), None):
        get = f"specbench fetch {of.name} --from {path if len(of.files) == 1 else path.parent}"
        better = f"to use its categories and metadata: {get}, then --prompts {of.name}"
        console.say(f"{path.name} is a file of {of.name}: {better}")
    read = build_prompt_set(name, read_file(path, column))
    if repeated := len(read.prompts) - len({prompt.text for prompt in read.prompts}):
        advice = "intervals count each id as a separate prompt; for several images of a caption: --samples N"
        console.say(f"{path.name}: {console.counted(repeated, 'prompt')} with another prompt's caption: {advice}")
    return read


def class_labels() -> list[Prompt]:
    """Draw 50,000 independent labels of 1000 classes, so that classes are not equally frequent, as in LlamaGen's
    `sample_c2i_ddp.py` for FID-50k (but with another generator)."""
    draw = random.Random(_LABEL_SEED).random
    labels = [int(1000 * draw()) for _ in range(50_000)]
    return [Prompt(f"{number:05d}", str(label), meta={"class": label}) for number, label in enumerate(labels)]


def _shipped() -> dict[str, Path]:
    return {path.stem: path for path in sorted(data_folder("prompts").glob("*.jsonl"))}


def _path_of(target: object, name: str) -> Path:
    """Return the file of a plug-in's prompt set: `target`, or the result of the function `target`."""
    with plugins.naming_plugin("prompt set", name, getattr(target, "__module__", "")):
        place = target() if callable(target) else target
    if not isinstance(place, str | os.PathLike):
        raise SpecbenchError(f"prompt set '{name}' is a {type(place).__name__}, not the path of a file")
    return Path(place)
