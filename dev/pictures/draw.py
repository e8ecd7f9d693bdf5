"""python dev/pictures/draw.py [NAME ...]: draw every picture of README and docs, or the named pictures.

`make pictures` runs this. `PICTURES` names all pictures; a test compares it with the documents. The images of the
gallery are decoded first, with the current weights, into `build/pictures` (this takes minutes; a later call continues).
The screenshots of the HTML report need a Chromium.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import drawings
from PIL import Image

from specbench import api
from specbench.errors import MISSING_PREREQUISITE, SpecbenchError
from specbench.papers.field import field_figure
from specbench.reporting import report_rows
from specbench.reporting.demo import PICTURE
from specbench.reporting.figures import saved
from specbench.reporting.html import write_page
from specbench.reporting.picture_figures import write_pictures
from specbench.store.run_folders import find_runs

ROOT = Path(__file__).parents[2]
RUNS = Path("results/readme")
PACK = ROOT / RUNS / "runs.zip"
REFERENCE = Path("results/reference")
COLOURS = 256
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")

WINDOW = "window=16"
GALLERY = (
    *("ar", f"sjd:{WINDOW}", f"scd-mc:{WINDOW}", f"predictive:{WINDOW}", f"sjd++:tau=0.5,{WINDOW}"),
    *(f"gsd:G=10,d=inf,{WINDOW}", "eagle", "cool-sd", "zipar", "lantern"),
)
"""Decoders of the gallery, in its order."""
CAPTIONS = 5
"""Number of captions in the gallery."""


def demo_sheet(path: Path) -> None:
    """Images of the README's runs."""
    write_pictures({row.label: row.folder for row in report_rows(find_runs(PACK))}, path)


def gallery(path: Path) -> None:
    """Captions by some of the decoders; existing images are not decoded again."""
    settings = {"prompts": "shapes", "limit": CAPTIONS, "batch": CAPTIONS, "threads": 1, "mode": "throughput"}
    summary = api.run(decoder=list(GALLERY), out=str(ROOT / "build" / "pictures"), **settings)
    if problem := summary.problem():
        raise problem
    write_pictures({row.label: row.folder for row in report_rows(summary.folders)}, path)


def page_shot(path: Path) -> None:
    """Upper part of the HTML report of the README's runs.

    Raises:
        SpecbenchError: there is no Chromium.
    """
    chromium = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if chromium is None:
        raise SpecbenchError(
            "no Chromium here", "install one, for example: apt-get install chromium", MISSING_PREREQUISITE
        )
    with tempfile.TemporaryDirectory() as folder:
        page = write_page(find_runs(PACK), Path(folder) / "page.html")
        subprocess.run(
            [
                chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
                "--blink-settings=preferredColorScheme=1", "--virtual-time-budget=20000",
                f"--user-data-dir={folder}/profile", "--window-size=1280,1700", f"--screenshot={path}",
                page.as_uri(),
            ],
            check=True, capture_output=True, timeout=240,
        )  # fmt: skip
    Image.open(path).convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)


def headline(path: Path) -> None:
    """Speed-ups of the README's runs."""
    drawings.speedups(path, report_rows(find_runs(PACK)))


def field(path: Path) -> None:
    """Draw the printed latency ratios over the step ratios, with the ratios of the README's runs."""
    path.write_bytes(saved(field_figure(PACK, width="page"), "svg"))


def program(path: Path, command: tuple[str, ...]) -> None:
    """Run a program that draws the picture in the folder of the raw numbers."""
    subprocess.run([sys.executable, *command, str(path.parent)], check=True, cwd=ROOT)


BATCHES = ("batches", "entropy")
PICTURES: dict[Path, Callable[[Path], None]] = {
    RUNS / PICTURE: demo_sheet,
    RUNS / "speedups.svg": headline,
    Path("docs/assets/step.svg"): drawings.one_step,
    Path("docs/assets/field.svg"): field,
    Path("docs/assets/image.svg"): drawings.one_image,
    RUNS / "page-light.png": page_shot,
    Path("results/speed/steps.png"): partial(program, command=("dev/speed/plot.py", "--out")),
    Path("results/shapes-training/curve.png"): partial(program, command=("-m", "dev.shapes.curve", "--folder")),
    REFERENCE / "gallery.png": gallery,
    **{Path(f"results/batches/{name}.png"): partial(program, command=("dev/speed/batches.py",)) for name in BATCHES},
}
"""Drawing function of each picture, by its path in the repository."""


def main() -> int:
    """Draw the pictures. At the end, print the names of pictures that cannot be drawn on this machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(p.name for p in PICTURES)}")
    names = parser.parse_args().names
    if unknown := set(names) - {place.name for place in PICTURES}:
        parser.error(f"no picture is called {', '.join(sorted(unknown))}; see --help")
    problems = {}
    for place, draw in PICTURES.items():
        if names and place.name not in names:
            continue
        started = time.monotonic()
        try:
            draw(ROOT / place)
            print(f"{place} ({time.monotonic() - started:.0f} s)", flush=True)
        except SpecbenchError as error:
            problems[place] = error
    for place, error in problems.items():
        print(f"error: {place}: {error}", file=sys.stderr)
    return max((error.exit_code for error in problems.values()), default=0)


if __name__ == "__main__":
    sys.exit(main())
