"""Draw the pictures that the README and docs show from the runs committed under `results/readme`.

`make pictures` runs this: the contact sheet of the README, the HTML report, and screenshots of it, light and dark, for
which a Chromium must be installed. The other pictures are drawn by what measures them: `make speed` and
`dev/reference/collect.py`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from specbench.reporting import report_rows
from specbench.reporting.contact_sheet import contact_sheet
from specbench.reporting.demo import PICTURE
from specbench.reporting.html import write_page
from specbench.store.run_folders import find_runs

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "results" / "readme"
SHOTS = {"page-light.png": (1280, 1700, False), "page-dark.png": (390, 1700, True)}
"""Width and height in pixels, and whether it is dark."""
WITHOUT_TABLES = "<style>main > section > :not(h2, .answer, .figures, .gallery) { display: none }</style></head>"
COLOURS = 256


def main() -> int:
    rows = report_rows(find_runs(RUNS))
    contact_sheet([Path(row["folder"]) for row in rows], RUNS / PICTURE)
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        print("error: no Chromium for the screenshots: install one, for example `apt-get install chromium`")
        return 5
    with tempfile.TemporaryDirectory() as folder:
        page = write_page(find_runs(RUNS), Path(folder) / "page.html")
        page.write_text(page.read_text(encoding="utf-8").replace("</head>", WITHOUT_TABLES, 1), encoding="utf-8")
        for name, (width, height, dark) in SHOTS.items():
            _shoot(chromium, page, RUNS / name, width, height, dark)
    return 0


def _shoot(chromium: str, page: Path, to: Path, width: int, height: int, dark: bool) -> None:
    """Photograph the upper part of a page."""
    subprocess.run(
        [
            chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--virtual-time-budget=20000",
            f"--user-data-dir={page.parent / 'profile'}", f"--window-size={width},{height}", f"--screenshot={to}",
            page.as_uri(),
        ],
        check=True, capture_output=True, timeout=240,
    )  # fmt: skip
    Image.open(to).convert("RGB").quantize(COLOURS).save(to, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
