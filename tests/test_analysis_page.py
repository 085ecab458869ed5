"""Knows what the page of results must do in a browser: draw, sort, show values, and fit a phone, light and dark."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from analysis_files import about, record, write_lines, write_run

from analysis.report import find, page, sections_of

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)
LONG = "a-name-of-a-run-that-is-longer-than-any-telephone-is-wide_" * 2

pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"needs a browser: none of {', '.join(BROWSERS)} is installed")

# Looks at the page inside a frame as wide as a phone or a desk, uses it, and leaves what it saw for the test to read.
PROBE = """
const seen = {};
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
async function look(name) {
  const { contentWindow: view, contentDocument: page } = document.getElementById(name);
  const root = page.documentElement, all = (what) => [...page.querySelectorAll(what)];
  const column = (i) => all("#runs tbody tr").map((row) => row.cells[i].textContent);
  const heading = (text) => all("#runs th").findIndex((one) => one.textContent === text);
  const click = (i) => all("#runs th button")[i].click();
  const out = { scroll: root.scrollWidth, width: view.innerWidth };
  out.ground = view.getComputedStyle(page.body).backgroundColor;
  out.order = [column(0)];
  for (let i = 0; i < 2; i++) { click(heading("tokens/s")); out.order.push(column(0)); }
  out.sort = all("#runs th")[heading("tokens/s")].getAttribute("aria-sort");
  click(heading("run")); out.order.push(column(0));
  const figure = all("#runs figure")[1], drawing = figure.querySelector("svg"), box = drawing.getBoundingClientRect();
  const move = new view.PointerEvent("pointermove", { bubbles: true, clientX: box.right - 16, clientY: box.top + 40 });
  drawing.dispatchEvent(move);
  const tip = figure.querySelector(".tip");
  out.hover = tip.hidden ? null : [...tip.children].map((row) => row.textContent);
  const edge = tip.getBoundingClientRect(), outer = figure.getBoundingClientRect();
  out.tipInside = edge.left >= outer.left && edge.right <= outer.right;
  const lines = () => figure.querySelectorAll("path.line").length;
  const labels = () => [...figure.querySelectorAll("text")].map((one) => one.textContent);
  out.lines = [lines()];
  page.querySelector("#runs .legend button[aria-pressed]").click();
  out.lines.push(lines());
  page.querySelector("#runs .legend button[aria-pressed]").click();
  out.linear = labels();
  figure.querySelector(".toggle").click();
  out.log = labels();
  const bar = page.querySelector("#steps figure g");
  bar.dispatchEvent(new view.PointerEvent("pointerenter"));
  out.bar = page.querySelector("#steps .tip").textContent;
  all("details").forEach((one) => { one.open = true; });
  out.named = all(".named dt").map((one) => one.textContent);
  out.openScroll = root.scrollWidth;
  out.title = page.title;
  out.command = page.querySelector("#runs pre").textContent;
  seen[name] = out;
}
addEventListener("load", async () => {
  await wait(300);
  for (const name of ["phone", "desk"]) await look(name);
  const found = document.createElement("pre");
  found.id = "seen";
  found.textContent = JSON.stringify(seen);
  document.body.append(found);
});
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("results")
    for name, rate in (("a", 200.0), ("b", 1000.0), (LONG, 30.0)):
        records = [record(step, loss=6 / step, tokens_per_second=rate) for step in range(1, 41)]
        write_run(root / name, records, about(command=f"train.py --max_steps 40 --x {LONG}</script>"))
    step: dict[str, Any] = {
        "benchmark": "step", "implementation": "plain", "label": "plain", "model": "llama3.2-1b", "layers": 16,
        "length": 32768, "world": 4, "dtype": "bfloat16", "tokens_per_second": 5000.0,
        "tokens_per_second_lowest": 4000.0, "tokens_per_second_highest": 6000.0, "mfu": 0.4,
        "model_tflops_per_gpu": 400.0, "peak_memory_allocated_bytes": 2**34, "first_loss": 11.9, "last_loss": 11.8,
        "losses_finite": True, "skipped": None, "hardware": {"device": "NVIDIA H200"},
    }  # fmt: skip
    write_lines(root / "step.jsonl", [step])
    return page("Results", sections_of(find(root), root), [LONG])


@pytest.fixture(scope="module", params=["light", "dark"])
def seen(request: pytest.FixtureRequest, report: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the probe saw in a browser of that colour scheme, and what the browser's console said."""
    frames = [
        f'<iframe id="{name}" width="{width}" height="800" style="border: 0" srcdoc="{html.escape(report)}"></iframe>'
        for name, width in (("phone", 375), ("desk", 1200))
    ]
    folder = tmp_path_factory.mktemp("browser")
    (folder / "outer.html").write_text(f"<!doctype html><body>{''.join(frames)}<script>{PROBE}</script>")
    scheme = {"dark": 0, "light": 1}[request.param]
    words = [
        *(
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--virtual-time-budget=5000",
            "--dump-dom",
        ),
        *(f"--blink-settings=preferredColorScheme={scheme}", f"--user-data-dir={folder / 'profile'}"),
        *("--enable-logging=stderr", "--window-size=1400,1000", (folder / "outer.html").as_uri()),
    ]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert found, (console, done.stderr[-2000:])
    return {**json.loads(html.unescape(found[1])), "console": console, "scheme": request.param}


def test_the_console_stays_silent(seen: dict[str, Any]) -> None:
    assert seen["console"] == []


def test_the_page_follows_the_colour_scheme(seen: dict[str, Any]) -> None:
    grounds = {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 24, 27)"}
    assert seen["desk"]["ground"] == grounds[seen["scheme"]]


@pytest.mark.parametrize("frame", ["phone", "desk"])
def test_the_page_never_scrolls_sideways(frame: str, seen: dict[str, Any]) -> None:
    assert seen[frame]["width"] == {"phone": 375, "desk": 1200}[frame]
    assert max(seen[frame]["scroll"], seen[frame]["openScroll"]) <= seen[frame]["width"]


@pytest.mark.parametrize("frame", ["phone", "desk"])
def test_headings_sort_numbers_by_size_and_words_by_letter(frame: str, seen: dict[str, Any]) -> None:
    found, down, up, by_name = seen[frame]["order"]
    assert found == by_name == ["a", LONG, "b"]
    assert (down, up) == (["b", "a", LONG], [LONG, "a", "b"])
    assert seen[frame]["sort"] == "ascending"


@pytest.mark.parametrize("frame", ["phone", "desk"])
def test_hovering_shows_the_values_of_a_step_inside_the_chart(frame: str, seen: dict[str, Any]) -> None:
    assert seen[frame]["hover"] == ["step 40", "b1,000", "a200", f"{LONG}30"]
    assert seen[frame]["tipInside"]
    assert seen[frame]["bar"] == "32K tokensplain5,000lowest to highest4,000 to 6,000"


def test_the_legend_hides_a_line_and_the_switch_makes_the_axis_logarithmic(seen: dict[str, Any]) -> None:
    assert seen["desk"]["lines"] == [3, 2]
    assert "500" in seen["desk"]["linear"] and "0" in seen["desk"]["linear"]
    assert "100" in seen["desk"]["log"] and "0" not in seen["desk"]["log"]


def test_an_end_tag_in_a_command_stays_text(seen: dict[str, Any]) -> None:
    assert seen["desk"]["title"] == "Results"
    assert seen["desk"]["command"].endswith("</script>")


def test_flags_that_the_command_names_are_marked(seen: dict[str, Any]) -> None:
    assert set(seen["desk"]["named"]) == {"max_steps"}


def test_one_run_of_many_steps_leaves_the_others_room(tmp_path: Path) -> None:
    for name, steps in (("a", 4), ("b", 4), ("c", 400)):
        write_run(tmp_path / name, [record(step) for step in range(1, steps + 1)], about())
    (tmp_path / "page.html").write_text(page("Results", sections_of(find(tmp_path), tmp_path), []))
    words = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    words += [f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "page.html").as_uri()]
    drawn = subprocess.run(words, capture_output=True, text=True, timeout=120).stdout
    assert ">training step, logarithmic<" in drawn and ">training step<" not in drawn
    last = re.search(r'class="line"[^>]* d="M[^"]*L([0-9.]+) [0-9.]+"', drawn)
    width = re.search(r'<svg viewBox="0 0 ([0-9.]+)', drawn)
    assert last and width and float(last[1]) > 0.2 * float(width[1]), "the last of four steps, a being the first line"


def test_runs_of_like_length_are_on_a_plain_axis(seen: dict[str, Any]) -> None:
    assert not any("logarithmic" in text for text in seen["desk"]["linear"])
