"""Check the packages in dist/ before they are uploaded: `make release`.

Wheel and source distribution must contain only files of the checked-out commit, name one version everywhere, have a
README that an index can render, and name the licence of all their files. Each fault is one line and leads to exit
code 1. Without faults, the last lines say what to upload.
"""

import email
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from email.message import Message
from fnmatch import fnmatchcase
from pathlib import Path

from readme_renderer import markdown

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
RECORD = "specbench/system/build.json"
OWN = (
    "*.py",
    "*.toml",
    "*.jinja",
    "specbench/py.typed",
    RECORD,
    "specbench/_data/prompts/*.jsonl",
    "specbench/models/shapes/MODEL_CARD.md",
    "specbench/reporting/scripts/charts.js",
    "specbench/reporting/scripts/page.js",
)
"""Patterns of the project's own files in the wheel; their licence is LICENSE."""
LIBRARIES = "specbench/reporting/scripts/observable-plot.licences.txt"
NOTICES = (
    ("specbench/models/shapes/weights/*", "specbench/models/shapes/MODEL_CARD.md", "`weights/`.* Licence: Apache-2.0"),
    ("specbench/reporting/scripts/observable-plot.min.js", LIBRARIES, "^@observablehq/plot .*ISC"),
    (LIBRARIES, LIBRARIES, "^Copyright"),
)
"""All other files: their pattern, the file of the wheel that names their licence, and a pattern of the name."""
LIBRARY = re.compile(r"^(\S+ [\d.]+) \((\S+)\)\n\n(.*?)(?=\n-{70,}|\Z)", re.M | re.S)
FURTHER = {"d3-geo": "MIT"}
"""Licences of parts of a library that only the licence text mentions, not the licence's name."""


def package_contents() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Contents of the wheel and of the source distribution by path; the first folder of the latter is removed."""
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        installed = {name: archive.read(name) for name in archive.namelist()}
    with tarfile.open(sdist) as archive:
        members = [member for member in archive if member.isfile()]
        source = {member.name.partition("/")[2]: archive.extractfile(member).read() for member in members}
    return installed, source


def faults(installed: Mapping[str, bytes], source: Mapping[str, bytes]) -> Iterator[str]:
    """One line per fault."""
    info = next(name.partition("/")[0] for name in installed if ".dist-info/" in name)
    metadata = email.message_from_bytes(installed[f"{info}/METADATA"])
    yield from _wrong_versions(metadata, email.message_from_bytes(source["PKG-INFO"]))
    yield from _other_than_the_commit(installed, source)
    if markdown.render(metadata.get_payload()) is None or metadata["Description-Content-Type"] != "text/markdown":
        yield "README.md does not render as an index's page"
    if not metadata.get_all("Classifier"):
        yield "no classifiers"
    files = {name: content for name, content in installed.items() if not name.startswith(info)}
    yield from _unnamed_licences(files, metadata)
    carried = {f"{info}/licenses/{name}" for name in metadata.get_all("License-File", [])}
    if not {f"{info}/licenses/LICENSE", f"{info}/licenses/{LIBRARIES}"} <= carried & installed.keys():
        yield "the wheel's licenses/ lacks LICENSE or the plotting library's"


def _wrong_versions(*metadata: Message) -> Iterator[str]:
    heading = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    cited = re.search(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(), re.M)[1]
    versions = {"CHANGELOG.md": heading, "CITATION.cff": cited}
    versions |= {f"the {kind}": data["Version"] for kind, data in zip(("wheel", "sdist"), metadata, strict=True)}
    tags = _git("tag", "--points-at", "HEAD").split()
    versions |= {f"tag {tag}": tag.removeprefix("v") for tag in tags if re.fullmatch(r"v\d.*", tag)}
    if len(set(versions.values())) > 1:
        yield "versions differ: " + ", ".join(f"{where} has {version}" for where, version in versions.items())


def _other_than_the_commit(installed: Mapping[str, bytes], source: Mapping[str, bytes]) -> Iterator[str]:
    head = {"revision": _git("rev-parse", "HEAD").strip(), "dirty": False}
    for kind, content in (("wheel", installed), ("sdist", source)):
        if (recorded := json.loads(content[RECORD])) != head:
            changed = " with changes" if recorded["dirty"] else ""
            yield f"the {kind} is of {recorded['revision']}{changed}, not of the commit {head['revision']}"
    tracked = set(_git("ls-files").splitlines())
    if foreign := sorted(source.keys() - tracked - {RECORD, "PKG-INFO"}):
        yield f"the sdist has files that git does not know: {', '.join(foreign[:5])}"
    if missing := sorted(tracked - source.keys()):
        yield f"the sdist lacks {len(missing)} files of the commit: {', '.join(missing[:5])}"


def _unnamed_licences(installed: Mapping[str, bytes], metadata: Message) -> Iterator[str]:
    """Files whose licence no file of the wheel names, and libraries whose licence is missing in the metadata."""
    for name in installed:
        if any(fnmatchcase(name, pattern) for pattern in OWN):
            continue
        notice = next(((file, words) for pattern, file, words in NOTICES if fnmatchcase(name, pattern)), None)
        if notice is None or not re.search(notice[1], installed.get(notice[0], b"").decode(), re.M):
            yield f"no file of the wheel names the licence of {name}"
    expression = set(metadata["License-Expression"].split(" AND "))
    for library, licence, text in LIBRARY.findall(installed[LIBRARIES].decode()):
        further = FURTHER.get(library.split()[0])
        if missing := {licence, *([further] if further else [])} - expression:
            yield f"pyproject.toml's license lacks {', '.join(missing)} of {library}"
        if "Copyright" not in text:
            yield f"{LIBRARIES} has no licence text of {library}"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main() -> int:
    installed, source = package_contents()
    problems = list(faults(installed, source))
    for fault in problems:
        print(f"fault: {fault}", file=sys.stderr)
    if problems:
        return 1
    libraries = ", ".join(f"{name} ({licence})" for name, licence, _ in LIBRARY.findall(installed[LIBRARIES].decode()))
    print(f"carried, with licences named in the wheel: weights of shapes (Apache-2.0), {libraries}")
    relative = re.findall(r"\]\((?!https?:|#)([^)]+)\)", (ROOT / "README.md").read_text())
    print(f"README.md has {len(relative)} links into the repository, which an index's page does not resolve")
    version = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    print("Tag the commit and upload both files:")
    print(f"  git tag -a v{version} -m 'specbench {version}' && git push origin v{version}")
    for path in sorted(DIST.iterdir()):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"  dist/{path.name}  {path.stat().st_size / 1e6:.1f} MB  sha256 {digest}")
    print("  python -m twine upload dist/*")
    return 0


if __name__ == "__main__":
    sys.exit(main())
