"""HTML report in a real browser: no console errors, all images present, no network access, untrusted text escaped."""

from __future__ import annotations

import http.server
import json
import re
import shutil
import subprocess
import threading
import warnings
from base64 import b64decode
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
import synthetic
from synthetic import AR, SJD, generation

from specbench.prompts import Prompt
from specbench.reporting import plots, render, report_rows
from specbench.reporting.html import write_page
from specbench.reporting.pareto import pareto
from specbench.store.run_folders import find_runs
from specbench.store.run_store import RunStore
from specbench.store.schema import base_row, failed_row, sample_row

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = (
    "<script>console.error('ran')</script>",
    '"><img src="http://127.0.0.1:PORT/x.png" onerror="console.error(1)">',
    "a | b \\input{/etc/passwd} =cmd()",
    "right \u202eto left\u202c $\\frac{1}{0}$ {{ 7 * 7 }}",
)
PROBE = """<!doctype html><body><script>
const found = [];
for (const width of [360, 1400]) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px;height:900px`;
  frame.onload = async () => {
    const page = frame.contentDocument, images = [...page.images];
    await Promise.all(images.map((image) => image.decode().catch(() => null)));
    const style = getComputedStyle(page.body);
    found.push({
      width, overflow: page.documentElement.scrollWidth - frame.clientWidth,
      images: images.length, missing: images.filter((image) => !image.naturalWidth).length,
      drawings: page.querySelectorAll("svg path").length, scripts: page.scripts.length,
      handlers: page.querySelectorAll("[onerror]").length, text: page.body.innerText,
      paper: style.backgroundColor, ink: style.color,
      line: getComputedStyle(page.querySelector("svg text") || page.body).fill,
    });
    if (found.length === 2) document.body.textContent = "FOUND" + btoa(encodeURIComponent(JSON.stringify(found)));
  };
  frame.src = "page.html";
  document.body.append(frame);
}
</script></body>"""


@pytest.fixture
def trap():
    """A server that notes whoever asks it for something."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1], asked
    server.shutdown()


def hostile_runs(out: Path, port: int) -> list[Path]:
    """AR and SJD with pictures; one image of SJD failed, with a message that is no better than the prompts."""
    for spec, make in ((AR, synthetic.ar), (SJD, synthetic.sjd)):
        with RunStore(out / spec.run_id).create(spec, synthetic.INVOCATION) as store:
            for number, (text, item) in enumerate(zip(HOSTILE, make(4), strict=True)):
                text = text.replace("PORT", str(port))
                base = base_row(Prompt(f"p{number}", text, "pets", {}), 0, 0, synthetic.INVOCATION["started_at"])
                item.forced = np.zeros(4, dtype=bool)
                item.image = np.full((3, 8, 8), 40 * number, dtype=np.uint8)
                row = sample_row(base, item, True)
                failed = spec is SJD and number == 3
                images = {} if failed else {row["image"]: item.image}
                store.append([failed_row(base, HOSTILE[0]) if failed else row], images)
    return find_runs(out)


def opened(folder: Path, dark: bool = False) -> tuple[list[dict], list[str]]:
    """What a browser sees of `page.html` in `folder`, narrow and wide, and what it says on its console."""
    (folder / "probe.html").write_text(PROBE)
    theme = ["--blink-settings=preferredColorScheme=0"] if dark else ["--blink-settings=preferredColorScheme=1"]
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr",
        "--disable-background-networking", "--allow-file-access-from-files", "--virtual-time-budget=8000", *theme,
        f"--user-data-dir={folder / 'profile'}", "--dump-dom", f"file://{folder / 'probe.html'}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    packed = re.search("FOUND([A-Za-z0-9+/=]+)", done.stdout)
    assert packed, done.stdout[-500:] + done.stderr[-500:]
    return sorted(json.loads(unquote(b64decode(packed[1]).decode())), key=lambda one: one["width"]), said


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, for example `apt-get install chromium`")


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_opens_without_network_or_complaint(tmp_path, trap, dark):
    port, asked = trap
    write_page(hostile_runs(tmp_path / "out", port), tmp_path / "page.html")
    views, said = opened(tmp_path, dark)
    assert said == [] and asked == []
    for view in views:
        assert view["images"] > 8 and view["missing"] == 0 and view["drawings"] > 20, view
        assert view["overflow"] <= 0, "the page itself never scrolls sideways"
        assert view["scripts"] == view["handlers"] == 0
        assert view["ink"] == view["line"] != view["paper"], "plots are in the page's ink"
        for text in HOSTILE:
            assert " ".join(text.replace("PORT", str(port)).split()) in view["text"]
        assert "failed: <script>" in view["text"]
    brightness = sum(map(int, re.findall(r"\d+", views[0]["paper"])))
    assert brightness < 150 if dark else brightness > 700


@needs_browser
def test_the_browser_would_have_complained(tmp_path, trap):
    """What the test above relies on: a page that does run scripts and load pictures is caught in both ways."""
    port, asked = trap
    body = HOSTILE[0] + f'<img src="http://127.0.0.1:{port}/x.png">'
    (tmp_path / "page.html").write_text(f"<!doctype html><body>{body}</body>")
    views, said = opened(tmp_path)
    assert any("ran" in line for line in said) and "/x.png" in asked and views[0]["missing"] == 1


def test_the_page_holds_everything_itself(tmp_path):
    text = write_page(hostile_runs(tmp_path / "out", 1), tmp_path / "page.html").read_text()
    sources = re.findall(r'(?:src|href|action|data)\s*=\s*["\']([^"\']{0,40})', re.sub(r"&[a-z#0-9]+;", "", text))
    assert sources and all(source.startswith(("data:image/", "#")) for source in sources)
    assert "url(http" not in text and "@import" not in text and "default-src 'none'" in text
    assert "49" not in re.findall(r"right .*?</bdi>", text)[0], "prompts are no templates"


def test_markdown_of_the_same_runs_is_inert(tmp_path):
    text = render(report_rows(hostile_runs(tmp_path, 1)))
    assert "<script>" not in text and "<img" not in text


def test_one_image_is_a_page_without_nan(tmp_path):
    synthetic.folder(tmp_path, AR, [generation(4, 40.0)])
    synthetic.folder(tmp_path, SJD, [generation(2, 20.0)])
    text = write_page(find_runs(tmp_path), tmp_path / "page.html").read_text()
    visible = re.sub(r"data:image/[^\"]*", "", text)
    assert not re.search(r"\bnan\b", visible, re.IGNORECASE) and "no image file" in visible


def test_a_plot_of_one_run_has_room_for_its_bar():
    spans = dict.fromkeys(("target", "draft", "verify", "host"), 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns where nothing is left for the axes
        assert plots.time_plot({"sjd": spans}).startswith("<svg")


def test_runs_without_images_are_a_page(tmp_path):
    synthetic.folder(tmp_path, SJD, [None, None])
    assert "failed: no luck" in write_page(find_runs(tmp_path), tmp_path / "page.html").read_text()


def test_the_command_prints_the_path(tmp_path, cli):
    hostile_runs(tmp_path / "out", 1)
    outcome = cli("report", "--out", tmp_path / "out", "--html", tmp_path / "sub" / "page.html")
    assert outcome.code == 0 and Path(outcome.out.strip()).read_text().startswith("<!doctype html>")
    nowhere = cli("report", "--out", tmp_path / "out", "--html", "/proc/page.html")
    assert nowhere.code != 0 and nowhere.err.startswith("error: cannot write /proc/page.html")


def test_dominated_runs_are_those_another_beats():
    def row(label, speedup, value):
        score = {"metric": "fid[x]", "fingerprint": "f", "value": value, "low": None, "high": None}
        return {"label": label, "run_id": label, "speedup": speedup, "speedup_low": None, "speedup_high": None,
                "scores": [score]}  # fmt: skip

    rows = [row("ar", 1.0, 20.0), row("slow", 0.8, 20.0), row("fast", 2.0, 25.0), row("worse", 1.9, 26.0),
            row("twin", 2.0, 25.0), row("unmeasured", None, 1.0)]  # fmt: skip
    found = {point.label: point.dominated_by for point in pareto(rows, "fid[x]", "f")}
    assert found == {"ar": None, "slow": "ar", "fast": None, "worse": "fast", "twin": None}
    higher = {point.label: point.dominated_by for point in pareto(
        [r | {"scores": [s | {"metric": "clip[x]"} for s in r["scores"]]} for r in rows], "clip[x]", "f")}  # fmt: skip
    assert higher["worse"] is None and higher["ar"] == "fast"
