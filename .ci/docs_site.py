"""Hooks of the site's generator: pages of the API from docstrings, and files of the checkout that the guides link to.

The guides are read on a code host as well, so their links are relative to the checkout. A link that leaves docs/ is
followed into the site: its target is added to it, under the same path.
"""

import inspect
import json
import os
import posixpath
import re
import subprocess
from pathlib import Path

from mkdocs.structure.files import File

import specbench
from specbench.system.version import __version__

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "specbench"
_LINK = re.compile(r"(\]\()((?:\.\./)*[\w./-]+?)(#[\w-]+)?(\))")


def on_config(config):
    """Put the pages of the API behind the guides; version and repository into the header."""
    modules = [{package: f"api/{package}.md"} for package in _packages()]
    next(group["Extend"] for group in config.nav if "Extend" in group).append({"All modules": modules})
    config.site_name = f"specbench {__version__}"
    origin = subprocess.run(["git", "remote", "get-url", "origin"], cwd=ROOT, capture_output=True, text=True).stdout
    if origin.startswith("https://") and "@" not in origin:  # of a clone; a checkout may have no remote
        config.repo_url, config.repo_name = origin.strip(), "repository"
    return config


def on_files(files, config):
    """Add a page for every package, and whatever the guides link to outside docs/."""
    files.append(File.generated(config, "README.md", abs_src_path=str(ROOT / "README.md")))
    files.append(File.generated(config, "notebook.md", content=_notebook_page(ROOT / "docs" / "notebook.ipynb")))
    for package in _packages():
        files.append(File.generated(config, f"api/{package}.md", content=_api_page(package)))
    queue = ["README.md", *(path for file in files if (ROOT / (path := f"docs/{file.src_uri}")).suffix == ".md")]
    while queue:
        path = queue.pop()
        if not (ROOT / path).is_file():
            continue
        for target in _targets(path):
            known = files.get_file_from_path(target.removeprefix("docs/"))
            if known and known.inclusion.is_excluded():  # an example
                known.inclusion = known.inclusion.NOT_IN_NAV
            if known or target.startswith("docs/"):
                continue
            added = File.generated(config, target, abs_src_path=str(ROOT / target))
            if target.endswith(".md"):
                added.inclusion = added.inclusion.NOT_IN_NAV
                queue.append(target)
            files.append(added)
    return files


def _notebook_page(path: Path) -> str:
    """The stored cells and outputs of a notebook as markdown."""
    shown = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        shown.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", "")})
            kind = next(kind for kind in ("image/png", "text/html", "text/plain") if kind in data)
            content = "".join(data[kind])
            image = f"![](data:image/png;base64,{content.strip()})"
            shown.append({"image/png": image, "text/html": f"<div>{content}</div>"}.get(kind, f"```\n{content}\n```"))
    return "\n\n".join(shown)


def on_page_markdown(markdown, page, config, files):
    """Turn links of the checkout into links of the site; the Python page gets its reference."""
    uri, markdown = page.file.src_uri, markdown.replace("(notebook.ipynb)", "(notebook.md)")
    if uri == "python.md":
        functions = (getattr(specbench, name) for name in sorted(specbench.__all__))
        shown = [f"::: {one.__module__}.{one.__qualname__}" for one in functions if inspect.isfunction(one)]
        markdown = "\n\n".join([markdown, *shown])
    path = uri if not (ROOT / "docs" / uri).is_file() else f"docs/{uri}"

    def rewritten(found: re.Match) -> str:
        target = _target(path, found[2])
        if target is None:
            return found[0]
        inside = target.removeprefix("docs/")
        relative = posixpath.relpath(inside, posixpath.dirname(uri) or ".")
        return f"{found[1]}{relative}{found[3] or ''}{found[4]}"

    return _LINK.sub(rewritten, markdown)


def _targets(path: str) -> set[str]:
    found = (_target(path, link[2]) for link in _LINK.finditer((ROOT / path).read_text()))
    return {target for target in found if target is not None}


def _target(path: str, link: str) -> str | None:
    """The file of the checkout that a link on the page `path` leads to; a folder's README."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    if (ROOT / target).is_dir() and (ROOT / target / "README.md").is_file():
        target = f"{target}/README.md"
    return target if (ROOT / target).is_file() else None


def _packages() -> list[str]:
    names = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    return [*names, "errors"]


def _api_page(package: str) -> str:
    folder = PACKAGE / package
    paths = sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{package}.py"]
    names = [os.fspath(path.relative_to(ROOT).with_suffix("")).replace(os.sep, ".") for path in paths]
    shown = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    behind_guides = "---\nsearch:\n  boost: 0.3\n---"
    return "\n\n".join([behind_guides, f"# specbench.{package}", *(f"::: {name}" for name in shown)]) + "\n"
