"""The report of a measurement: complete, self-contained, safe with hostile text, and it looks right in a browser."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from bench_artifacts import make_arm
from bench_reports import HOSTILE, measured
from conftest import unmet

from pilotfish.bench.artifact import Artifact, Prompt
from pilotfish.bench.report import write_report

PLOTS = ["rates", "ratios", "acceptance", "phases", "samples"]
HEADINGS = ["The arms", "How to read it", "Plots", "The host", "The models", "Settings and order", "The prompts"]
LINKS = {"action", "background", "data", "formaction", "href", "poster", "src", "srcset", "xlink:href"}
CHROMIUM, CHROMEDRIVER = shutil.which("chromium"), shutil.which("chromedriver")


def several_systems() -> Artifact:
    """Two systems with a baseline each; the other one tells neither phases nor proposals."""
    return measured(
        repeats=2,
        arms=[
            make_arm("target-only", 0),
            make_arm("other", 0, system="other"),
            make_arm("other with a draft model", 4, baseline="other", system="other"),
            make_arm("k=4", 4),
        ],
    )


def hostile() -> Artifact:
    """Every text that comes from outside is hostile, and the output differs."""
    prompt = Prompt(id=HOSTILE, prompt_class=HOSTILE, user=HOSTILE, system=HOSTILE)
    artifact = measured([prompt], arms=[make_arm("target-only", 0), make_arm(HOSTILE, 2)], differ=True)
    models = [model.model_copy(update={"name": HOSTILE, "file_name": HOSTILE}) for model in artifact.models]
    assert artifact.host is not None
    host = artifact.host.model_copy(update={"cpu": HOSTILE, "commit": HOSTILE, "versions": {HOSTILE: HOSTILE}})
    return artifact.model_copy(update={"models": models, "host": host})


ARTIFACTS: dict[str, Callable[[], Artifact]] = {
    "four arms": measured,
    "one round": lambda: measured(repeats=1),
    "incomplete": lambda: measured(interrupt_at=6),
    "empty": lambda: measured(interrupt_at=0),
    "mismatch": lambda: measured(differ=True),
    "several systems": several_systems,
    "hostile": hostile,
}


class Page(HTMLParser):
    """A page's elements in order, its whole text, and its headings."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.headings: list[str] = []
        self._open = ""
        self.feed(html)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}))
        self._open = tag
        if tag in ("dd", "dt", "li", "p", "td", "th"):
            self.text += " "

    def handle_data(self, data: str) -> None:
        if self._open != "style":
            self.text += data
        if self._open == "h2":
            self.headings.append(data.strip())

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def attributes(self, name: str) -> list[str]:
        return [attributes[name] for _, attributes in self.elements if name in attributes]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Artifact, Path]]:
    """An artifact by its name in `ARTIFACTS`, and its report."""
    made: dict[str, tuple[Artifact, Path]] = {}

    def report(name: str) -> tuple[Artifact, Path]:
        if name not in made:
            artifact = ARTIFACTS[name]()
            made[name] = artifact, write_report(artifact, tmp_path_factory.mktemp("report"))
        return made[name]

    return report


def page_of(path: Path) -> Page:
    return Page(path.read_text("utf-8"))


@pytest.mark.parametrize("name", ARTIFACTS)
def test_page_is_whole_and_needs_nothing_else(name: str, reports: Callable[[str], tuple[Artifact, Path]]) -> None:
    artifact, path = reports(name)
    page = page_of(path)
    assert [path.name for path in path.parent.iterdir()] == ["report.html"]
    assert [heading for heading in page.headings if heading] == HEADINGS
    assert artifact.verdict in page.text
    assert [dict(attributes).get("id") for tag, attributes in page.elements if tag == "figure"] == PLOTS
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "img", "iframe", "object", "embed", "base", "form", "image", "foreignobject"}
    for _, attributes in page.elements:
        for key, value in attributes.items():
            assert not key.startswith("on"), f"{key} would run"
            assert name == "hostile" or not re.search(r"https?:|//", value), f"{key}={value} leads elsewhere"
            assert key not in LINKS or value.startswith("#") or value == "data:,", f"{key}={value} leads elsewhere"
            assert all(found.startswith("#") for found in re.findall(r"url\(['\"]?(.)", value)), value
    ids = page.attributes("id")
    assert len(set(ids)) == len(ids)
    style = "".join(re.findall(r"<style>(.*?)</style>", path.read_text("utf-8"), re.DOTALL))
    assert not re.search(r"url\(|@import|//", style)


def test_references_within_plots_lead_to_the_same_plot(reports: Callable[[str], tuple[Artifact, Path]]) -> None:
    _, path = reports("four arms")
    page = page_of(path)
    html = path.read_text("utf-8")
    targets = {value[1:] for value in page.attributes("href") if value.startswith("#")}
    targets |= set(re.findall(r"url\(#([^)]+)\)", html))
    assert targets
    assert targets <= set(page.attributes("id"))
    for plot in PLOTS:
        figure = re.search(rf'<figure id="{plot}">.*?</figure>', html, re.DOTALL)
        assert figure is not None
        inner = Page(figure[0])
        assert all(value.startswith(plot) for value in inner.attributes("id"))


def test_same_artifact_gives_the_same_bytes(tmp_path: Path, reports: Callable[[str], tuple[Artifact, Path]]) -> None:
    artifact, path = reports("several systems")
    assert write_report(artifact, tmp_path).read_bytes() == path.read_bytes()


def test_hostile_text_is_shown_as_text(reports: Callable[[str], tuple[Artifact, Path]]) -> None:
    _, path = reports("hostile")
    page = page_of(path)
    shown = " ".join(
        HOSTILE.replace("\x00", "\N{REPLACEMENT CHARACTER}").replace("\x1b", "\N{REPLACEMENT CHARACTER}").split()
    )
    assert page.text.count(shown) > 10  # prompt, class, arm, model, host, versions
    assert page.text.count("$\\x$<sc") > page.text.count(shown)  # shortened, in plots
    assert not set(path.read_text("utf-8")) & {"\x00", "\x1b"}


def test_page_tells_complete_from_incomplete(reports: Callable[[str], tuple[Artifact, Path]]) -> None:
    texts = {name: page_of(reports(name)[1]).text for name in ARTIFACTS}
    assert "Complete: all 16 samples were taken." in texts["four arms"]
    assert "Identical: " in texts["four arms"]
    assert "Incomplete: 6 of 16 samples were taken" in texts["incomplete"]
    assert "Incomplete: 0 of 16 samples were taken" in texts["empty"]
    assert "nothing has been compared yet" in texts["empty"]
    assert texts["empty"].count("Nothing to draw.") == len(PLOTS)
    assert "A single round has no interval." in texts["one round"]


def test_mismatch_shows_where_and_what(reports: Callable[[str], tuple[Artifact, Path]]) -> None:
    artifact, path = reports("mismatch")
    text = page_of(path).text
    (mismatch,) = artifact.mismatches
    assert f"Different output: {mismatch.arm} differs from target-only." in text
    assert f"Prompt {mismatch.prompt_id} Position {mismatch.position} " in text
    assert mismatch.expected is not None
    assert " ".join(repr(mismatch.expected.text).split()) + " (id 9)" in text
    assert "'' (id 8)" in text
    assert "0.25 between the target's likeliest token" in text
    assert "Identical" not in text


def test_page_names_what_it_leaves_out(reports: Callable[[str], tuple[Artifact, Path]]) -> None:
    text = page_of(reports("several systems")[1]).text
    assert "Left out: other, other with a draft model (the system does not tell)." in text
    assert "Left out: target-only, other, other with a draft model (nothing was drafted" in text


def test_large_residual_is_pointed_out(tmp_path: Path, reports: Callable[[str], tuple[Artifact, Path]]) -> None:
    artifact, path = reports("four arms")
    assert "unexplained" not in page_of(path).text
    content = artifact.model_dump()
    content["samples"][0]["answers"][3]["phases"]["other_seconds"] = 1.0
    text = page_of(write_report(Artifact.model_validate(content), tmp_path)).text
    share = artifact.samples[0].answers[3].end_to_end_seconds
    assert f"* In target-only it reaches {1 / share:.1%} in one answer, more than 5.0%" in text


def test_many_prompts_are_drawn_by_class(tmp_path: Path) -> None:
    prompts = [Prompt(id=str(n), prompt_class=f"class {n // 8}", user="Say.") for n in range(48)]
    artifact = measured(prompts, repeats=2, arms=[make_arm("target-only", 0), make_arm("k=2", 2)])
    assert "Paired ratio by class" in page_of(write_report(artifact, tmp_path)).text


Browser = Any


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium; without one the test is `unmet`."""
    if CHROMIUM is None or CHROMEDRIVER is None:
        unmet("chromium or chromedriver is not on this machine (Debian: chromium and chromium-driver)")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(CHROMEDRIVER))
    yield driver
    driver.quit()


def look_at(browser: Browser, path: Path, width: int = 1200, scheme: str = "light") -> None:
    """Opens a report, and holds that nothing was said on the console and nothing else was asked for."""
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get_log("performance")
    browser.get(path.as_uri())
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"}
    assert asked - {"data:,"} == {path.as_uri()}


# For each plot: its size, texts that leave it, and pairs of texts that lie on each other. Half a pixel does not matter.
MEASURE = """
const inset = box => ({left: box.left + .5, right: box.right - .5, top: box.top + .5, bottom: box.bottom - .5});
return [...document.querySelectorAll('figure')].map(figure => {
  const svg = figure.querySelector('svg');
  if (!svg) return {id: figure.id, width: 0, height: 0, outside: [], overlapping: []};
  const whole = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll('text')].map(t => [t.textContent, inset(t.getBoundingClientRect())]);
  const outside = texts.filter(([_, b]) =>
    b.left < whole.left || b.right > whole.right || b.top < whole.top || b.bottom > whole.bottom).map(([t]) => t);
  const overlapping = texts.flatMap(([t, a], i) => texts.slice(i + 1).filter(([_, b]) =>
    a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom).map(([other]) => [t, other]));
  return {id: figure.id, width: whole.width, height: whole.height, num_texts: texts.length, outside, overlapping};
});
"""


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("name", ARTIFACTS)
def test_page_in_a_browser(
    name: str, width: int, browser: Browser, reports: Callable[[str], tuple[Artifact, Path]]
) -> None:
    artifact, path = reports(name)
    look_at(browser, path, width)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    found = browser.execute_script(MEASURE)
    assert [plot["id"] for plot in found] == PLOTS
    for plot in found if artifact.samples else []:
        assert plot["width"] > 200, plot
        assert plot["height"] > 50, plot
        assert plot["num_texts"] > 5, plot
        assert plot["outside"] == [], plot
        assert plot["overlapping"] == [], plot


# The colour of every piece of text, and the ground below it; of every mark in a plot, its colour.
COLOURS = """
const ground = e => { for (; e; e = e.parentElement) {
  const c = getComputedStyle(e).backgroundColor; if (!c.endsWith(', 0)') && c != 'transparent') return c; } };
const all = [...document.body.querySelectorAll('*')];
const written = all.filter(e => [...e.childNodes].some(n => n.nodeType == 3 && n.textContent.trim()));
const texts = written.map(e => [e.closest('svg') ? getComputedStyle(e).fill : getComputedStyle(e).color, ground(e)]);
const marks = all.filter(e => e.closest('svg') && e.tagName == 'use').map(e => [getComputedStyle(e).fill, ground(e)]);
return [texts, marks];
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_marks_stand_out(
    scheme: str, browser: Browser, reports: Callable[[str], tuple[Artifact, Path]]
) -> None:
    grounds = set()
    for name in ("four arms", "mismatch"):
        look_at(browser, reports(name)[1], scheme=scheme)
        texts, marks = browser.execute_script(COLOURS)
        grounds |= {ground for _, ground in texts}
        for pairs, least in ((texts, 4.5), (marks, 3.0)):
            assert len(pairs) > 50
            for colour, ground in {tuple(pair) for pair in pairs}:
                assert contrast(colour, ground) >= least, (scheme, colour, ground)
    assert all((luminance(ground) < 0.1) == (scheme == "dark") for ground in grounds)


def test_print_is_light_and_whole(browser: Browser, reports: Callable[[str], tuple[Artifact, Path]]) -> None:
    look_at(browser, reports("four arms")[1], width=700, scheme="dark")
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": features})
    texts, _ = browser.execute_script(COLOURS)
    assert all(luminance(ground) > 0.9 for _, ground in texts)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 700
    for plot in browser.execute_script(MEASURE):
        assert plot["height"] < 800  # a figure is never cut by a page's end
        assert plot["outside"] == []


def contrast(colour: str, ground: str) -> float:
    """As WCAG 2 defines it, from 1 to 21."""
    darker, lighter = sorted((luminance(colour), luminance(ground)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    """Of a CSS `rgb(…)`; 1 for white."""
    channels = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * channel for weight, channel in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
