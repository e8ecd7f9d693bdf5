"""HTML report in a real browser: no console errors, all images present, no network access, untrusted text escaped."""

import http.server
import json
import queue
import re
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import synthetic
from served import serving
from synthetic import AR, SJD, bare_row, generation

from specbench.papers.html_page import tables_page
from specbench.papers.join import join
from specbench.papers.table_files import load_table
from specbench.prompts import Request
from specbench.reporting.html import breakable, write_page
from specbench.reporting.marks import marks_of
from specbench.reporting.plot_data import pareto, sweeps
from specbench.reporting.row import OverAR, ShownScore
from specbench.specs.options import Options
from specbench.specs.presets import PRESETS
from specbench.stats import Estimate
from specbench.store.run_folders import find_runs
from specbench.store.run_store import RunStore
from specbench.store.schema import base_row, failed_row, sample_row

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = (
    "<script>console.error('ran')</script>", '"><img src="http://127.0.0.1:PORT/x.png" onerror="console.error(1)">',
    "a | b \\input{/etc/passwd} =cmd()", "right \u202eto left\u202c $\\frac{1}{0}$ {{ 7 * 7 }}",
)  # fmt: skip
PROBE = """<!doctype html><body><script>
const found = [];
const frames = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
const press = (page, target, key) =>
  target.dispatchEvent(new page.defaultView.KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
async function used(page) {
  const viewer = page.querySelector("dialog"), all = [...page.querySelectorAll(".pictures .frame")];
  if (!viewer || !all.length) return null;
  const title = () => viewer.querySelector("h4").textContent;
  all[0].click();
  const seen = { opened: viewer.open, first: title() };
  press(page, viewer, "ArrowRight");
  seen.second = title();
  press(page, viewer, "ArrowDown");
  seen.lower = [title(), viewer.querySelector(".prompt").textContent];
  press(page, viewer, "o");
  const over = viewer.querySelector(".stage .difference");
  seen.overlay = over && getComputedStyle(over).display + " " + getComputedStyle(over).mixBlendMode;
  viewer.close();
  const select = page.querySelector(".gallery select");
  select.value = select.options[1].value;
  select.dispatchEvent(new page.defaultView.Event("change"));
  seen.left = [...page.querySelectorAll(".gallery .prompt-row")].filter((row) => row.checkVisibility()).length;
  select.value = "";
  select.dispatchEvent(new page.defaultView.Event("change"));
  const table = page.querySelector("table.sortable"), heads = [...table.tHead.rows[0].cells];
  const speed = heads.find((head) => head.textContent.startsWith("speed-up"));
  speed.querySelector("button").click();
  seen.sorted = speed.ariaSort + " " + table.tBodies[0].rows[0].cells[0].textContent.trim();
  const rest = page.querySelector(".contents a");
  rest.click();
  seen.unfolded = page.querySelector(rest.hash).open;
  const names = [...page.querySelectorAll("[data-chart] svg [aria-label=text]")];
  const after = Node.DOCUMENT_POSITION_FOLLOWING;
  seen.covered = names.filter((name) =>
    name.parentNode.querySelector("[aria-label=dot]").compareDocumentPosition(name) & after).length;
  const dot = [...page.querySelectorAll("[data-chart] svg [aria-label=dot] :is(circle, path)")][0];
  const box = dot.getBoundingClientRect();
  const place = { clientX: box.x + box.width / 2, clientY: box.y + box.height / 2, bubbles: true };
  for (const kind of ["pointerenter", "pointermove"])
    dot.ownerSVGElement.dispatchEvent(new page.defaultView.PointerEvent(kind, place));
  await frames();
  seen.tip = [...page.querySelectorAll("[aria-label=tip]")].map((tip) => tip.textContent).join("");
  for (const cell of page.querySelectorAll(".headline td > div")) cell.style.width = "12em";
  seen.track = Math.min(...[...page.querySelectorAll(".track")].map((track) => track.clientWidth));
  return seen;
}
for (const width of [390, 1280]) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px;height:900px`;
  frame.onload = async () => {
    const page = frame.contentDocument, images = [...page.images];
    await Promise.all(images.map((image) => image.decode().catch(() => null)));
    await frames();
    const style = getComputedStyle(page.body);
    found.push({
      width, overflow: page.documentElement.scrollWidth - frame.clientWidth,
      images: images.length, missing: images.filter((image) => !image.naturalWidth).length,
      charts: page.querySelectorAll("[data-chart]").length,
      drawings: [...page.querySelectorAll("[data-chart]")].filter((place) => place.querySelector("svg path")).length,
      scripts: page.scripts.length, handlers: page.querySelectorAll("[onerror]").length, text: page.body.innerText,
      paper: style.backgroundColor, ink: style.color,
      line: getComputedStyle(page.querySelector("[data-chart] svg") || page.body).color, used: await used(page),
    });
    if (found.length === 2) fetch("REPORT", { method: "POST", mode: "no-cors", body: JSON.stringify(found) });
  };
  frame.src = "page.html";
  document.body.append(frame);
}
</script></body>"""


@contextmanager
def server(answered):
    """A server on this machine that hands every request's path and body to `answered`; its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            answered(self.path, self.rfile.read(int(self.headers.get("Content-Length") or 0)))
            self.send_error(404)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    with serving(Handler) as address:
        yield int(address.rpartition(":")[2])


@pytest.fixture
def trap():
    """A server that notes whoever asks it for something."""
    asked = []
    with server(lambda path, _: asked.append(path)) as port:
        yield port, asked


def hostile_runs(out: Path, port: int) -> list[Path]:
    """AR and SJD with pictures; one image of SJD failed, with a message that is no better than the prompts."""
    for spec, make in ((AR, synthetic.ar), (SJD, synthetic.sjd)):
        with RunStore(out / spec.run_id).lock(spec).begin(spec, synthetic.INVOCATION) as store:
            for number, (text, item) in enumerate(zip(HOSTILE, make(4), strict=True)):
                text = text.replace("PORT", str(port))
                request = Request(text, f"p{number}", category=f"pets {number % 2}")
                base = base_row(request, 0, synthetic.INVOCATION["started_at"])
                item.forced = np.zeros(4, dtype=bool)
                item.image = np.full((3, 8, 8), 40 * number, dtype=np.uint8)
                row = sample_row(base, item, True)
                failed = spec is SJD and number == 3
                images = {} if failed else {row["image"]: item.image}
                store.append([failed_row(base, HOSTILE[0]) if failed else row], images)
    return find_runs(out)


def opened(folder: Path, dark: bool = False) -> tuple[list[dict], list[str]]:
    """Views of `page.html` by a browser in `folder`, narrow and wide, and what it says on its console."""
    views = answer(folder, PROBE, dark)
    complaints = [line for line in (folder / "console").read_text().splitlines() if "CONSOLE" in line]
    return sorted(views, key=lambda view: view["width"]), complaints


def answer(folder: Path, probe: str, dark: bool) -> list[dict]:
    """Return what a page sends to REPORT as soon as it has it, so that no clock decides when the page is done."""
    answers = queue.Queue()
    with server(lambda _, body: answers.put(body)) as port, open(folder / "console", "w") as console:
        (folder / "probe.html").write_text(probe.replace("REPORT", f"http://127.0.0.1:{port}/"))
        command = [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr",
            "--disable-background-networking", "--allow-file-access-from-files", "--window-size=1700,1000",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--user-data-dir={folder / 'profile'}",
            "--remote-debugging-port=0", f"file://{folder / 'probe.html'}",
        ]  # fmt: skip
        browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=console)
        try:
            return json.loads(answers.get(timeout=240))
        except queue.Empty:
            pytest.fail("the page did not answer: " + (folder / "console").read_text()[-2000:])
        finally:
            browser.terminate()
            browser.wait(30)


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, for example `apt-get install chromium`")


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_opens_without_network_or_complaint(tmp_path, trap, dark):
    port, asked = trap
    write_page(hostile_runs(tmp_path / "out", port), tmp_path / "page.html")
    views, complaints = opened(tmp_path, dark)
    assert complaints == [] and asked == []
    for view in views:
        assert view["images"] > 8 and view["missing"] == 0, view
        assert view["drawings"] == view["charts"] >= 5, view
        assert view["overflow"] <= 0, "the page itself never scrolls sideways"
        assert view["scripts"] == 4 and view["handlers"] == 0, "the page's own scripts and its data, nothing else"
        assert view["ink"] == view["line"] != view["paper"], "plots are in the page's ink"
        used = view["used"]
        assert used["opened"] and [used["first"], used["second"], used["lower"][0]] == ["ar", "sjd", "sjd"]
        assert " ".join(used["lower"][1].split()) == " ".join(HOSTILE[1].replace("PORT", str(port)).split())
        assert used["overlay"] == "block difference" and used["left"] == 1
        assert used["sorted"] == "descending ● sjd window=3" and used["unfolded"]
        assert "sjd: 1.29x" in used["tip"], "a point says what it is"
        assert used["covered"] == 0, "a name covers no point"
        assert used["track"] >= 50, "points of different values are apart, also in narrow columns"
        for text in HOSTILE:
            assert " ".join(text.replace("PORT", str(port)).split()) in view["text"]
        assert "failed: <script>" in view["text"]
    brightness = sum(map(int, re.findall(r"\d+", views[0]["paper"])))
    assert brightness < 150 if dark else brightness > 700


@needs_browser
def test_the_browser_would_have_complained(tmp_path, trap):
    """The test above relies on this: a page that does run scripts and load pictures is caught in both ways."""
    port, asked = trap
    body = HOSTILE[0] + f'<img src="http://127.0.0.1:{port}/x.png">'
    (tmp_path / "page.html").write_text(f"<!doctype html><body>{body}</body>")
    views, complaints = opened(tmp_path)
    assert any("ran" in line for line in complaints) and "/x.png" in asked and views[0]["missing"] == 1


def test_the_page_holds_everything_itself_and_without_scripts_each_plot_lists_its_numbers(tmp_path):
    text = write_page(hostile_runs(tmp_path / "out", 1), tmp_path / "page.html").read_text()
    sources = re.findall(r'(?:src|href|action|data)\s*=\s*["\']([^"\']{0,40})', re.sub(r"&[a-z#0-9]+;", "", text))
    assert sources and all(source.startswith(("data:image/", "#")) for source in sources)
    assert "url(http" not in text and "@import" not in text and "default-src 'none'" in text
    assert "specbench run --decoder sjd:" in text and "Test CPU, 2 cores" in text, "a reader can repeat the runs"
    assert text.count('data-take="csv"') == text.count('<table class="cards'), "each table to copy and as CSV"
    assert 'class="track point"' in text and "[too few]" in text, "no interval, no line"
    assert "49" not in re.findall(r"right .*?</bdi>", text)[0], "prompts are no templates"
    lists = re.findall(r"<noscript><ul.*?</ul></noscript>", text, re.DOTALL)
    assert len(lists) == text.count('class="chart" data-chart=') and all("<li>" in items for items in lists)
    assert any("sjd: 1.29x" in items for items in lists), "the speed-up of a prompt"


@pytest.mark.parametrize("kind", ["runs", "table"])
def test_no_level_of_headings_is_skipped_and_every_image_has_a_text(tmp_path, kind):
    text = written(tmp_path, kind).read_text()
    levels = [int(level) for level in re.findall(r"<h([1-6])[ >]", text.partition("<dialog")[0])]
    assert levels[0] == 1 and levels.count(1) == 1 and all(b <= a + 1 for a, b in pairwise(levels)), levels
    assert all(re.search(r' alt="[^"]', image) for image in re.findall(r"<img[^>]*>", text))


def written(folder: Path, kind: str) -> Path:
    """A page of runs, or of a paper's table without any."""
    if kind == "runs":
        write_page(hostile_runs(folder / "out", 1), folder / "page.html")
    else:
        (folder / "page.html").write_text(tables_page([join(load_table("sjd-1"), {})]))
    return folder / "page.html"


@needs_browser
@pytest.mark.slow  # starts a browser
@pytest.mark.skipif(find_spec("axe_core_python") is None, reason="needs axe: pip install axe-core-python")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("kind", ["runs", "table"])
def test_axe_finds_nothing(tmp_path, kind, dark):
    axe = Path(find_spec("axe_core_python").origin).with_name("axe.min.js").read_text()
    page = re.sub(r"<meta http-equiv[^>]*>", "", written(tmp_path, kind).read_text())
    probe = "<script>onload = () => setTimeout(() => axe.run().then((all) => fetch('REPORT', "
    probe += "{ method: 'POST', mode: 'no-cors', body: JSON.stringify(all.violations) })), 500)</script>"
    violations = answer(tmp_path, page.replace("</body>", f"<script>{axe}</script>{probe}</body>"), dark)
    assert [(violation["id"], [node["html"][:200] for node in violation["nodes"]]) for violation in violations] == []


def test_ten_decoders_have_ten_colours_and_a_long_name_is_broken_after_punctuation_alone():
    names = [*PRESETS]
    for some in (names[place : place + 10] for place in range(len(names) - 9)):
        assert len({mark.colour for mark in marks_of([*some, "ar"]).values()}) == len({*some, "ar"})
    every = marks_of(names).values()
    assert len({(mark.colour, mark.symbol) for mark in every}) == len(names), (
        "colour and shape together are one's alone"
    )
    assert breakable("my_package.drafters:ROW_ABOVE G=50") == ("my_<wbr>package.<wbr>drafters:<wbr>ROW_<wbr>ABOVE G=50")
    assert breakable("sjd tau=0.5,k=2") == "sjd tau=0.5,k=2", "short words are left alone"
    assert breakable("<b>bold-and-quite-long:x") == "&lt;b&gt;bold-and-quite-long:<wbr>x"


def test_one_image_or_none_is_a_page_without_nan(tmp_path):
    synthetic.folder(tmp_path / "none", SJD, [None, None])
    assert "failed: no luck" in write_page(find_runs(tmp_path / "none"), tmp_path / "page.html").read_text()
    shutil.rmtree(tmp_path / "none")
    synthetic.folder(tmp_path, AR, [generation(4, 40.0)])
    synthetic.folder(tmp_path, SJD, [generation(2, 20.0)])
    text = write_page(find_runs(tmp_path), tmp_path / "page.html").read_text()
    visible = re.sub(r"data:image/[^\"]*|<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"\bnan\b", visible, re.IGNORECASE) and "no image file" in visible


def test_each_table_of_a_page_is_called_by_what_it_holds(tmp_path):
    synthetic.folder(tmp_path, AR, [generation(4, 40.0)])
    with_head = replace(SJD.decoder, options=Options({**SJD.decoder.options, "head": "h"}))
    synthetic.folder(tmp_path, replace(SJD, decoder=with_head), [generation(2, 20.0)])
    text = write_page(find_runs(tmp_path), tmp_path / "page.html").read_text()
    shown = re.findall(r"<details id=\"more-.*?<summary>(.*?)</summary>.*?<thead>(.*?)</thead>", text, re.DOTALL)
    columns = {title: re.sub(r"<.*?>|\s+", " ", head) for title, head in shown}
    assert "latency p95" in columns["Tails: median, 95th percentile, slowest category"]
    assert "latency" not in columns["Drafting"] and "latency" in columns["Speed, every column"]
    assert "log p" in columns["Quality, every column"]


def test_a_run_is_dominated_only_if_the_intervals_say_so():
    def row(label, speed, value, half):
        score = {"metric": "m", "fingerprint": "f", "value": value, "n": 9, "better": "lower", "kind": "plain"}
        score |= {"low": None, "high": None} if half is None else {"low": value - half, "high": value + half}
        total = speed and Estimate(speed, speed - 0.1, speed + 0.1)
        return bare_row(label=label, run_id=label, over_ar=OverAR(total), scores=[ShownScore.of(score)])

    rows = [row("ar", 1.0, 20.0, 0.5), row("slow", 0.7, 22.0, 0.5), row("unsure", 0.7, 20.9, 0.5),
            row("near", 0.9, 22.0, 0.5), row("unknown", 0.5, 30.0, None), row("fast", 2.0, 25.0, 0.5),
            row("unmeasured", None, 1.0, 0.5)]  # fmt: skip
    dominated = {point.label: point.dominated_by for point in pareto(rows, "m", "f")}
    assert dominated == {"ar": None, "slow": "ar", "unsure": None, "near": None, "unknown": None, "fast": None}
    higher = {point.label: point.dominated_by for point in pareto(
        [replace(row, scores=[replace(row.scores[0], better="higher")]) for row in rows], "m", "f")}  # fmt: skip
    assert higher["ar"] == "fast" and higher["slow"] == "fast" and higher["unknown"] is None


def test_sweeps_are_runs_that_differ_in_one_option():
    def row(decoder, speed, **options):
        over = OverAR(speed and Estimate(speed, None, None), step_ratio=2.0)
        return bare_row(decoder=decoder, options=options, over_ar=over)

    rows = [row("ar", 1.0), row("sjd", 1.5, window=16), row("sjd", 1.2, window=4), row("gsd", 1.4, window=16, G=3),
            row("gsd", 1.3, window=16, G=10), row("gsd", None, window=4, G=3)]  # fmt: skip
    widths = {option: {name: [point[0] for point in points] for name, points in curves.items()}
             for option, curves in sweeps(rows).items()}  # fmt: skip
    assert widths == {"window": {"sjd": [4, 16]}, "G": {"gsd": [3, 10]}}
