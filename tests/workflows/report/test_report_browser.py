"""Report pages in a real browser: what a person sees is what was computed; nothing is fetched or thrown."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from mizarr.stages.attention.flow import unpacked
from mizarr.stages.logits.lens import format_probability, format_token
from mizarr.workflows import WORKFLOWS, compute
from mizarr.workflows.views import Bars, Figure, Heatmap, Line, Lines, paper
from mizarr.workflows.workflow import Workflow
from tests.browser import CUT, Opened, chromium, opened

pytestmark = [pytest.mark.browser, pytest.mark.wide]

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'> \"&amp;"
ASKED: dict[str, dict[str, Any]] = {
    "logit_lens": {"prompts": ["The mother tongue of John Calvin is", HOSTILE], "heatmaps": 1, "top_k": 5},
    "attention_patterns": {"prompt": "The mother tongue of John Calvin is"},
    "activation_patching": {"pairs": 1, "kinds": ["resid_post", "attn_out"]},
    "character_count_helix": {"characters": 4000, "widths": [20, 30], "min_tokens": 5, "components": 3},
    "generate": {"prompts": ["The mother tongue of John Calvin is"], "max_tokens": 4},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[str, Any]:
    """Every workflow computed on the specimen, its page written."""
    found = {name: compute(name, store=folder / "store", **asked) for name, asked in ASKED.items()}
    for name, workflow in found.items():
        workflow.report(folder / f"{name}.html")
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture
def visit(browser: Any, done: dict[str, Any], folder: Path) -> Iterator[Callable[..., Opened]]:
    """visit(name) opens a page; when the test is over it must have been quiet, and alone."""
    with ExitStack() as open_pages:
        held: list[tuple[Opened, str]] = []

        def open_page(name: str, **view: Any) -> Opened:
            file = folder / f"{name}.html"
            held.append((open_pages.enter_context(opened(browser, file, **view)), file.as_uri()))
            return held[-1][0]

        yield open_page
        for page, address in held:
            assert page.complaints == []
            assert page.requests == [address]


def colours(png: bytes) -> int:
    """How many different pixels a picture has."""
    from PIL import Image

    return len(Image.open(io.BytesIO(png)).convert("RGB").getcolors(1 << 24))


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", text)]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ASKED)
def test_a_page_draws_itself_and_asks_for_nothing(name, dark, visit):
    here = visit(name, dark=dark)
    drawn = here.page.locator("[data-drawn] canvas, [data-drawn] svg, [data-drawn] .shaded")
    assert drawn.count() > 0
    assert colours(drawn.first.screenshot()) > 20
    assert colours(here.page.screenshot(full_page=True)) > 100
    brightness = here.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(numbers(brightness)[:3]) < 300) == dark


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("name", ASKED)
def test_nothing_sticks_out_of_a_window(name, width, visit):
    here = visit(name, width=width)
    here.page.locator("summary").evaluate_all("all => all.forEach(each => each.click())")
    inside, outside = here.page.evaluate("[innerWidth, document.documentElement.scrollWidth]")
    assert outside <= inside
    assert here.page.evaluate(CUT) == []


def test_a_cell_of_a_heatmap_tells_its_value(visit, done):
    here, grids = visit("activation_patching"), done["activation_patching"].grids(0)
    for kind in ("resid_post", "attn_out"):
        here.page.locator(".segments label", has_text=kind).click()
        canvas = here.page.locator(".option:not(.hidden) .heatmap canvas")
        for x, y in ((0.3, 0.5), (0.9, 0.9), (0.6, 0.7)):
            said = here.hover(canvas, x, y)
            layer, position = re.search(r"layer (\d+) · token .*\((\d+)\)", said["where"]).groups()
            exact = 100 * float(grids[kind]["recovery"].sel(layer=int(layer), position=int(position)))
            assert numbers(said["what"])[0] == pytest.approx(exact, rel=1e-3, abs=1e-4)
            assert "%" in said["what"] and kind in said["what"]


def test_keys_walk_through_a_heatmap(visit, done):
    here, grids = visit("activation_patching"), done["activation_patching"].grids(0)
    grid = next(iter(grids.values()))["recovery"]
    last = grid.sizes["position"] - 1
    here.page.locator(".heatmap .grid").first.focus()
    for key in ("ArrowRight", "End", "ArrowDown", "ArrowLeft"):
        here.page.keyboard.press(key)
    here.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    layer = grid.sizes["layer"] - 2  # the last layer is on top
    said = here.page.locator("[aria-live]").last.inner_text()
    assert f"layer {layer}" in said
    exact = 100 * float(grid.isel(layer=layer, position=last - 1))
    assert numbers(said.rpartition(":")[2])[0] == pytest.approx(exact, rel=1e-3, abs=1e-4)


def test_a_cell_of_the_lens_is_pinned_with_its_tokens_and_their_probabilities(visit, done):
    here, workflow = visit("logit_lens"), done["logit_lens"]
    lens, words = workflow.prompt(0), workflow.vocabulary
    canvas = here.page.locator(".option:not(.hidden) .lens canvas")
    box = canvas.bounding_box()
    canvas.click(position={"x": 0.4 * box["width"], "y": 0.5 * box["height"]})
    panel = here.page.locator(".option:not(.hidden) .panel > div").first
    where = panel.locator(".where").first.inner_text()
    layer, position = re.search(r"after layer (\d+), reading .*\((\d+)\)", where).groups()
    cell = lens.isel(layer=int(layer), position=int(position))
    shown = panel.locator(".ranks")
    assert shown.locator(".token").all_text_contents() == [
        format_token(words[i]) for i in cell["top_id"].values
    ]
    assert shown.locator(".right").all_text_contents() == [
        format_probability(p) for p in np.exp(cell["top_logprob"].values.astype(float)).tolist()
    ]
    rank = int(cell["target_rank"])
    through = here.page.locator(".option:not(.hidden) .panel > div").last.locator(".bold")
    assert through.inner_text() == f"layer {layer} · rank {rank}"
    here.page.mouse.move(0, 0)
    assert panel.locator(".where").first.inner_text() == where, "pinned, it stays"


def test_a_prompt_of_markup_is_text(visit):
    here = visit("logit_lens")
    here.page.locator("select").first.select_option(index=1)
    assert here.page.locator(".option:not(.hidden) .lens canvas").count() == 1
    assert HOSTILE in here.page.locator("select").first.inner_text()
    assert here.page.evaluate("window.hacked") is None


def test_another_head_shows_its_own_weights(visit, done):
    here, workflow = visit("attention_patterns"), done["attention_patterns"]
    pattern = (
        unpacked(workflow.captured.open(workflow.store)["pattern"]).transpose("layer", "head", ...).values
    )
    menus, query = here.page.locator(".attention select"), 5
    buttons = here.page.locator(".strip button")
    menus.nth(0).select_option(label="2")
    for label, weights in (("4", pattern[2, 4]), ("mean of all", pattern[2].mean(0))):
        menus.nth(1).select_option(label=label)
        buttons.nth(query).hover()
        told = [text if text == "–" else float(text) for text in buttons.locator("small").all_text_contents()]
        np.testing.assert_allclose(told[: query + 1], weights[query, : query + 1], atol=6e-4)
        assert set(told[query + 1 :]) == {"–"}
    here.page.locator(".attention .segments label", has_text="what reads it").click()
    told = buttons.locator("small").all_text_contents()
    np.testing.assert_allclose(list(map(float, told[query:])), pattern[2].mean(0)[query:, query], atol=6e-4)
    head = here.hover(here.page.locator(".attention .grid canvas").first, 0.5, 0.6)
    layer, number = map(int, re.search(r"layer (\d+) · head (\d+)", head["where"]).groups())
    edge = pattern[layer, number, workflow.query, workflow.key]
    assert numbers(head["what"])[0] == pytest.approx(edge, rel=1e-3)
    here.page.mouse.down()
    here.page.mouse.up()
    assert here.page.locator(".attention h5").last.inner_text() == f"Weights in layer {layer}, head {number}"


def test_the_cursor_on_curves_tells_all_of_them(visit, done):
    here, workflow = visit("character_count_helix"), done["character_count_helix"]
    svg = here.page.locator(".option:not(.hidden) .lines svg").first
    svg.scroll_into_view_if_needed()
    here.hover(svg, 0.4, 0.5)
    apart = int(numbers(here.page.locator(".tip .where").inner_text())[0])
    said = dict(
        zip(
            here.page.locator(".tip .series span").all_text_contents(),
            map(float, here.page.locator(".tip .series b").all_text_contents()),
            strict=True,
        )
    )
    for name, curve in (("true counts", workflow.geometry), ("shuffled counts", workflow.control)):
        exact = float(curve["ringing"].sel(layer=workflow.layer, offset=apart))
        assert said[name] == pytest.approx(exact, rel=1e-3, abs=1e-6)


def test_a_curve_has_one_colour_on_the_whole_page_and_no_other_curve_has_it(visit):
    here = visit("character_count_helix")
    keys = here.page.locator("ul.keys li:has(i:not(.control))").evaluate_all(
        "all => all.map(each => [each.textContent, getComputedStyle(each.querySelector('i')).borderTopColor])"
    )
    assert {"true counts", "PC1", "PC2", "PC1 to PC2"} <= {name for name, _ in keys}
    assert [name for name, _ in keys].count("true counts") > 1 < [name for name, _ in keys].count("PC1")
    pairs = set(map(tuple, keys))
    assert len({name for name, _ in pairs}) == len({colour for _, colour in pairs}) == len(pairs)


def test_every_token_generated_tells_its_probability(visit, done):
    here, workflow = visit("generate"), done["generate"]
    probabilities = np.exp(workflow.generation["logprob"].values[0])
    spans = here.page.locator(".shaded span")
    for i in range(spans.count()):
        spans.nth(i).hover()
        assert numbers(here.tip()["what"])[0] == pytest.approx(float(probabilities[i]), rel=1e-3)


@dataclass(frozen=True)
class Nothing:
    """No settings."""


class Wide(Workflow):
    """A page with a grid far larger than a window."""

    name, question, settings_type = "wide", "Is the far end within reach?", Nothing
    nodes: ClassVar[dict[str, Any]] = {}
    values = np.random.default_rng(0).normal(size=(60, 900)).astype(np.float32)

    def views(self) -> list[Any]:
        rows, columns = (
            tuple(f"{axis}{i}" for i in range(n)) for axis, n in zip("ab", self.values.shape, strict=True)
        )
        heatmap = Heatmap(
            title="wide", values=self.values, rows=rows, columns=columns, value_name="x", diverging=True
        )
        return [heatmap]


class Deep(Workflow):
    """A page on a model of 30 layers: a grid, curves, and a figure that has more than these."""

    name, question, settings_type = "deep", "Is all of it here?", Nothing
    nodes: ClassVar[dict[str, Any]] = {}

    def views(self) -> list[Any]:
        layers = tuple(map(str, range(30)))
        grid = Heatmap(
            title="grid", values=np.eye(30, 9), rows=layers, columns=layers[:9], value_name="v", upward=True
        )
        curves = tuple(
            Line(f"layer {i}", np.arange(3.0) * i, strong=i == 12, faint=i != 12) for i in range(30)
        )
        bars = Bars(title="bars", x=layers, lines=(Line("one", np.ones(30)),), x_name="layer", y_name="n")
        lines = Lines(title="curves", x=(0, 1, 2), x_name="dose", y_name="y", lines=curves)
        return [grid, lines, Figure(name="deep", title="All of it", panels=(grid, lines, bars))]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_a_model_of_thirty_layers_is_seen_whole_and_once(width, dark, browser, tmp_path):
    page = Deep(Nothing()).report(tmp_path / "deep.html")
    with opened(browser, page, width=width, dark=dark) as here:
        assert here.page.locator("h2").all_inner_texts()[:3] == ["grid", "curves", "bars"]
        inner, outer = here.page.locator(".grid").evaluate("e => [e.scrollHeight, e.clientHeight]")
        assert inner <= outer and inner > 30 * 20, "all layers are in view"
        picture = here.page.locator(".picture img:visible")
        box = here.page.locator(".picture:visible").bounding_box()
        assert picture.count() == 1 and box["x"] >= 0 and box["x"] + box["width"] <= width
        scale = picture.evaluate("e => e.getBoundingClientRect().width / e.naturalWidth / 0.6")
        assert 0.65 < scale <= 1, "its text is large enough to be read: a narrow window scrolls"
        from PIL import Image

        pixels = np.asarray(Image.open(io.BytesIO(picture.screenshot())).convert("L"))
        assert (pixels[2, 2] < 60) == dark, "its paper is that of the page"
        keys = here.page.locator(".lines .keys li").all_inner_texts()
        assert keys[:2] == ["layer 0layer 29", "layer 12"]
        assert here.complaints == []


class Many(Workflow):
    """A page with more curves than colours: in families, and in an order."""

    name, question, settings_type = "many", "Which is which?", Nothing
    nodes: ClassVar[dict[str, Any]] = {}

    def views(self) -> list[Any]:
        kin = tuple(
            Line(f"{f}{i}", np.array([0.0, i]), family=f) for f, n in (("a", 4), ("b", 3)) for i in range(n)
        )
        ordered = tuple(Line(f"layer {i}", np.array([0.0, i])) for i in range(9))
        return [Lines(x=(0, 1), x_name="x", y_name="y", lines=lines) for lines in (kin, ordered)]


@pytest.mark.parametrize("which", [0, 1], ids=["families", "in order"])
def test_many_curves_have_the_colours_of_a_figure(which, browser, tmp_path):
    workflow = Many(Nothing())
    workflow.report(tmp_path / "many.html")
    with opened(browser, tmp_path / "many.html") as here:
        told = (
            here.page.locator(".lines")
            .nth(which)
            .locator("ul.keys i")
            .evaluate_all("all => all.map((one) => getComputedStyle(one).borderTopColor)")
        )
    figure = paper.compose([workflow.shown[which]]).axes[0]
    drawn = [to_rgb(line.get_color()) for line in figure.lines if len(line.get_xdata()) == 2]
    for page, one in zip(told, drawn, strict=False):
        assert numbers(page) == pytest.approx([255 * channel for channel in one], abs=3)
    assert len(set(told)) == len(told) == (7, 9)[which]


class Steep(Workflow):
    """A page with curves over logarithmic axes, one of which meets zero."""

    name, question, settings_type = "steep", "How fast does it fall?", Nothing
    nodes: ClassVar[dict[str, Any]] = {}
    x = (1000.0, 20_000.0, 500_000.0, 1e7)
    falling = np.array([0.5, 2e-3, 0.0, 3e-6])

    def views(self) -> list[Any]:
        band = np.array([[0.2, -1.0, 1e-4, 1e-4], [0.9, 0.1, 1e-2, 1e-3]])
        lines = (Line("falling", self.falling), Line("even", np.full(4, 1e-2), control=True, band=band))
        told = {"x": self.x, "x_name": "samples", "y_name": "error", "lines": lines}
        return [Lines(title="Errors", log=True, log_x=True, low=0.0, **told)]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_logarithmic_axes_are_marked_as_figures_are_and_tell_true_values(width, dark, browser, tmp_path):
    page = Steep(Nothing()).report(tmp_path / "steep.html")
    with opened(browser, page, width=width, dark=dark) as here:
        svg = here.page.locator(".lines svg").first
        wide = svg.evaluate("e => e.clientWidth")
        told = svg.locator("text").evaluate_all(
            "all => all.map(e => [e.textContent, ...['x', 'y'].map(a => Number(e.getAttribute(a))), "
            "e.getAttribute('text-anchor')])"
        )
        across = {text: x for text, x, _, anchor in told if anchor == "middle"}
        up = {text: y - 4 for text, x, y, anchor in told if anchor == "end" and x < 60}
        assert list(across) == [*map(paper.mark, paper.log_ticks(1000, 1e7, 1 + (wide - 68) // 62))]
        assert list(up) == [*map(paper.mark, paper.log_ticks(3e-6, 0.9, 6))]
        # Equal factors are equally far apart, from the first value at the one edge to the last at the other.
        for text, place in across.items():
            share = np.log(float(text.replace(",", "")) / 1000) / np.log(1e4)
            assert place == pytest.approx(52 + share * (wide - 68), abs=0.1)
        for text, place in up.items():
            share = np.log(float(text) / 3e-6) / np.log(0.9 / 3e-6)
            assert place == pytest.approx(262 - share * 252, abs=0.1)
        assert "samples, log scale" in [text for text, *_ in told]
        keys = here.page.locator("ul.keys li").all_inner_texts()
        assert keys == ["falling", "even", "up: error, log scale", "not drawn: 1 value of 0 or below"]
        assert "NaN" not in svg.inner_html() and "Infinity" not in svg.inner_html()
        paths = svg.locator("path[fill=none]")
        assert paths.first.get_attribute("d").count("M") == 2, "the curve has a gap where it is 0"
        svg.focus()
        for x, value in zip(Steep.x, ("0.5", "0.002", "0", "0.000003"), strict=True):
            here.page.keyboard.press("ArrowRight")
            where = here.page.locator(".tip .where").inner_text()
            assert where == f"samples {x:,.0f} · error"
            rows = here.page.locator(".tip .series b").all_inner_texts()
            assert sorted(map(float, rows)) == pytest.approx(sorted([float(value), 0.01]), rel=1e-3)
        assert here.complaints == []


@pytest.mark.parametrize("width", [400, 1400])
def test_a_grid_of_hundreds_of_columns_scrolls_inside_itself(width, browser, tmp_path):
    page = Wide(Nothing()).report(tmp_path / "wide.html")
    with opened(browser, page, width=width) as here:
        grid = here.page.locator(".grid")
        assert here.page.evaluate("document.documentElement.scrollWidth") <= width
        inner, outer = grid.evaluate("e => [e.scrollWidth, e.clientWidth]")
        assert inner > 10 * outer
        assert grid.locator("canvas").evaluate("e => e.width") <= 2 * width, "only what is in view is painted"
        grid.evaluate("e => e.scrollTo(e.scrollWidth, e.scrollHeight)")
        here.page.wait_for_timeout(100)
        said = here.hover(grid.locator("canvas"), 0.7, 0.9)
        row, column = map(int, re.search(r"a(\d+) · position b(\d+)", said["where"]).groups())
        assert row > 30 and column > 850
        assert numbers(said["what"])[0] == pytest.approx(float(Wide.values[row, column]), rel=1e-3)
        assert here.complaints == []


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_workflow_as_it_comes_has_a_page_that_draws_itself(name, browser, tmp_path):
    page = compute(name, store=tmp_path / "store").report(tmp_path / "page.html")
    with opened(browser, page, width=400) as here:
        for choice in here.page.locator("fieldset.segments label").all():
            choice.click()
        assert (here.complaints, here.requests) == ([], [page.as_uri()])
        assert here.page.evaluate("document.documentElement.scrollWidth") <= 400
