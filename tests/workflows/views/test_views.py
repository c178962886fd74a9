"""Views: one value, and the same words and numbers in a terminal, a figure, a notebook and a document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import xarray as xr
from matplotlib.colors import rgb_to_hsv, to_hex, to_rgb
from rich.console import Console

from mizarr.store.errors import ShapeError
from mizarr.workflows.report import page, templates
from mizarr.workflows.views import (
    Bars,
    Choice,
    Column,
    Curve,
    Data,
    Figure,
    Heatmap,
    Line,
    Lines,
    Note,
    Strip,
    Styled,
    Table,
    Values,
    View,
    dash,
    dim,
    paper,
    together,
)
from mizarr.workflows.views.blocks import listed, plain
from mizarr.workflows.views.curves import best_view
from mizarr.workflows.workflow import Workflow

RECORDS = [
    {"layer": 0, "kl": 0.12345, "token": "[red]a"},
    {"layer": 1, "kl": float("nan"), "token": "<b>"},
]


@dataclass(frozen=True)
class Nothing:
    """No settings."""


def a_table(**told: Any) -> Table:
    return Table.of(
        RECORDS,
        ("layer", "layer", "d"),
        ("token", lambda one: (one["token"], dim(" so"))),
        ("KL", lambda one: None if np.isnan(one["kl"]) else one["kl"], ".2f"),
        strong=lambda one: one["layer"] == 1,
        title="T [x]",
        caption="c <y>",
        **told,
    )


def a_heatmap(caption: str = "below", **told: Any) -> Heatmap:
    array = xr.DataArray(
        [[0.0, 1.0], [2.0, 3.0]],
        dims=("layer", "head"),
        coords={"layer": [4, 5], "head": [0, 1]},
        attrs={"long_name": "KL", "units": "nats"},
    )
    return Heatmap.of(array, "By head", caption, **told)


class Whole(Workflow):
    """One view of every kind that is shown."""

    name, question, settings_type = "whole", "Is <it> enough?", Nothing
    nodes: ClassVar[dict[str, Any]] = {}

    def views(self) -> Iterator[View]:
        yield Data(json={"sizes": {"layers": np.int64(2)}, "late": lambda: [1]})
        yield a_table(json={"records": RECORDS})
        yield Values(title="V", pairs=(("a", "[b]"),))
        yield Note(text="A paragraph.")
        heat = a_heatmap(json={"grid": np.eye(2)})
        curve = Curve(points=np.eye(3), values=np.arange(3), value_name="n", names=("x", "y", "z"))
        bars = Bars(x=("a", "b"), x_name="x", y_name="y", lines=(Line("one", np.ones(2)),))
        yield from together("whole", "All of it", heat, bars, curve)


@pytest.fixture
def whole() -> Whole:
    return Whole(Nothing())


def test_a_table_has_the_same_cells_in_every_rendering(whole, capsys):
    table = a_table()
    assert table.columns == (Column("layer", right=True), Column("token"), Column("KL", right=True))
    assert table.rows[0] == ((Styled("0"),), (Styled("[red]a"), Styled(" so", "dim")), (Styled("0.12"),))
    assert table.rows[1] == ((Styled("1", "bold"),), (Styled("<b>", "bold"), Styled(" so", "bold dim")), ())
    whole.render(Console(width=100))
    printed = capsys.readouterr().out
    assert all(said in printed for said in ("T [x]", "[red]a so", "0.12", "c <y>", "[b]", "A paragraph."))
    shown = table._repr_html_()
    assert "&lt;b&gt; so" in shown and "T [x]" in shown and "c &lt;y&gt;" in shown and "<b>1" not in shown
    embedded = page.render(whole)
    assert "[red]a" in embedded and "&lt;b&gt;" in embedded


def test_prose_may_wrap_and_numbers_may_not():
    told = Table.of([{"text": "x" * 40}], ("text", "text"), ("n", lambda one: "y" * 40, str))
    assert [column.wraps for column in told.columns] == [True, False]


def test_a_document_is_what_the_views_say(whole):
    found = json.loads(json.dumps(whole.to_json(), allow_nan=False))
    assert found["sizes"] == {"layers": 2}
    assert found["late"] == [1]
    assert found["grid"] == [[1.0, 0.0], [0.0, 1.0]]
    assert [one["kl"] for one in found["records"]] == [0.12345, None]
    assert found["workflow"] == "whole"


def test_a_name_of_the_document_is_said_once():
    class Twice(Whole):
        def views(self) -> Iterator[View]:
            yield Data(json={"n": 1})
            yield Data(json={"n": 2})

    with pytest.raises(AssertionError, match="says n twice"):
        Twice(Nothing()).to_json()


def test_what_only_a_document_needs_is_not_worked_out_for_a_terminal(capsys):
    class Late(Whole):
        def views(self) -> Iterator[View]:
            yield a_table(json={"n": lambda: 1 / 0})

    late = Late(Nothing())
    late.render(Console())
    assert "T [x]" in capsys.readouterr().out
    with pytest.raises(ZeroDivisionError):
        late.to_json()


def test_a_page_embeds_no_document_and_nothing_that_only_figures_use():
    embedded = plain(a_heatmap(json={"x": lambda: 1}, texts=(("a", "b"), ("c", "d"))))
    assert embedded.keys() & {"json", "texts", "numbers"} == set()
    assert embedded["rows"] == ["4", "5"] and embedded["unit"] == "nats" and embedded["upward"]


def test_figures_are_files_named_by_their_view(whole, tmp_path: Path):
    (path,) = whole.draw(tmp_path)
    assert path.name == "whole.png"
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("diverging", [False, True])
def test_a_cell_of_a_figure_has_the_colour_a_page_gives_it(diverging):
    """Ends and middle of both ramps are those of the page's script."""
    script = (Path(page.__file__).parent / "assets" / "core.js").read_text()
    ramp = paper.RAMPS["diverging" if diverging else "sequential"]
    assert json.dumps(ramp) in script
    with paper.style():
        axes = paper.blank(4, 3).add_subplot()
        heat = Heatmap.of(xr.DataArray([[-1.0, 4.0]], dims=("row", "column")), diverging=diverging)
        heat.draw(axes)
    low, high = axes.images[0].get_clim()
    assert (low, high) == ((-4.0, 4.0) if diverging else (-1.0, 4.0))


def test_curves_from_an_array_are_named_and_controls_are_told_apart():
    array = xr.DataArray(
        [[1.0, 2.0], [3.0, 4.0]], dims=("counts", "x"), coords={"counts": ["true", "shuffled"], "x": [9, 3]}
    )
    lines = Lines.of(array, control="shuffled")
    assert lines.x == (3, 9)
    assert [(line.name, line.control, line.values.tolist()) for line in lines.lines] == [
        ("true", False, [2.0, 1.0]),
        ("shuffled", True, [4.0, 3.0]),
    ]
    numbered = Lines.of(array.assign_coords(counts=[0, 1]))
    assert [line.name for line in numbered.lines] == ["counts 0", "counts 1"]


def test_labels_and_numbers_must_belong_together():
    with pytest.raises(ShapeError, match="values of 'one'"):
        Bars(x=("a",), x_name="x", y_name="y", lines=(Line("one", np.ones(2)),))
    with pytest.raises(ShapeError, match="points"):
        Curve(points=np.eye(2), values=np.arange(2), value_name="n", names=("x", "y", "z"))


def test_a_choice_in_a_figure_is_its_chosen_option_under_the_choices_title():
    choice = Choice.of("layer", [2, 3], lambda layer: a_heatmap(low=float(layer)), start=3, title="All")
    assert choice.start == 1 and [label for label, _ in choice.options] == ["2", "3"]
    panel = choice.panel()
    assert isinstance(panel, Heatmap) and panel.low == 3.0 and panel.title == "By head"
    bare = Choice.of("layer", [2], lambda layer: Note(text="n"), title="All", caption="of them")
    assert (bare.panel().title, bare.panel().caption) == ("All", "of them")


def test_rows_of_panels_stay_within_the_width_of_a_page():
    panels = [a_heatmap() for _ in range(9)]
    figure = paper.compose(panels)
    assert figure.get_figwidth() <= paper.WIDEST
    specs = [spec for axes in figure.axes if (spec := axes.get_subplotspec()) is not None]
    rows = {spec.get_topmost_subplotspec().rowspan.start for spec in specs}
    assert len(rows) == np.ceil(sum(panel.inches()[0] for panel in panels) / paper.WIDEST)


def test_a_notebook_shows_the_question_and_each_view_once(whole):
    whole._results = {"x": xr.Dataset()}
    shown = whole._repr_html_()
    assert "Is &lt;it&gt; enough?" in shown
    assert shown.count("<img") == 1, "panels are seen in their figure"
    assert "has not run yet" in Whole(Nothing())._repr_html_()


def test_listed_makes_plain_values_of_everything():
    array = xr.DataArray(np.array([1.5, np.nan], np.float32), dims="x")
    assert listed({"a": array, 3: (np.int32(2), None, "t")}) == {"a": [1.5, None], 3: [2, None, "t"]}


def test_a_figure_of_one_panel_has_its_own_title():
    drawn = Figure(name="f", title="Mine", caption="told", panels=(a_heatmap(),)).compose("foot")
    assert [axes.get_title(loc="left") for axes in drawn.axes[:1]] == ["Mine"]
    assert drawn._suptitle is None


def test_one_curve_stands_out_and_the_others_but_the_control_step_back():
    array = xr.DataArray(
        np.eye(3), dims=("layer", "dose"), coords={"layer": [2, 3, 5], "dose": [1.0, 2.0, 4.0]}
    )
    lines = Lines.of(array, strong=3).lines
    assert [(line.name, line.strong, line.faint) for line in lines] == [
        ("layer 2", False, True),
        ("layer 3", True, False),
        ("layer 5", False, True),
    ]
    named = array.assign_coords(layer=["one", "shuffled", "two"])
    assert [line.faint for line in Lines.of(named, strong="two", control="shuffled").lines] == [
        True,
        False,
        False,
    ]
    assert not any(line.faint or line.strong for line in Lines.of(array).lines)


def test_single_values_lie_beside_the_curve_that_sums_them_up():
    dots = np.array([[0.0, 2.0], [4.0, 6.0]])
    curves = Lines(x=(0, 1), x_name="x", y_name="y", lines=(Line("mean", dots.mean(1), dots=dots),))
    with paper.style():
        axes = paper.blank(4, 3).add_subplot()
        curves.draw(axes)
    heights = [list(line.get_ydata()) for line in axes.lines]
    assert dots.ravel().tolist() in heights and [1.0, 5.0] in heights
    assert "dots" not in plain(curves)["lines"][0]


def test_a_curve_has_the_level_it_is_compared_with_in_its_own_colour():
    two = (Line("one", np.array([0.1, 0.2]), level=0.7), Line("other", np.array([0.3, 0.4])))
    with paper.style():
        axes = paper.blank(4, 3).add_subplot()
        Lines(x=(0, 1), x_name="x", y_name="y", lines=two).draw(axes)
    (level,) = (line for line in axes.lines if list(line.get_ydata()) == [0.7, 0.7])
    (one,) = (line for line in axes.lines if line.get_label() == "one")
    assert level.get_color() == one.get_color() and level.get_linestyle() == "--"


def test_curves_of_a_family_are_shades_of_one_colour():
    names = (("a 1", "a"), ("a 2", "a"), ("b 1", "b"), ("alone", ""))
    lines = tuple(Line(name, np.ones(2), family=family) for name, family in names)
    with paper.style():
        axes = paper.blank(4, 3).add_subplot()
        Lines(x=(0, 1), x_name="x", y_name="y", lines=lines).draw(axes)
    hues = {line.get_label(): rgb_to_hsv(to_rgb(line.get_color())) for line in axes.lines}
    assert hues["a 1"][0] == pytest.approx(hues["a 2"][0], abs=0.02)
    assert hues["a 1"][1] > hues["a 2"][1], "the second one is lighter"
    assert len({round(hues[name][0], 2) for name in ("a 1", "b 1", "alone")}) == 3


def test_curves_that_come_in_an_order_run_from_light_to_dark_and_their_names_can_be_read():
    lines = tuple(Line(f"strength {i}", np.full(2, float(i))) for i in range(12))
    with paper.style():
        axes = paper.blank(4, 3).add_subplot()
        Lines(x=(0, 1), x_name="x", y_name="y", lines=lines).draw(axes)
    lightness = [sum(to_rgb(line.get_color())) for line in axes.lines if len(line.get_xdata()) == 2][:12]
    assert lightness == sorted(lightness, reverse=True)
    assert {text.get_color() for text in axes.texts} == {paper.SOFT}


def test_what_a_frame_means_is_said_in_a_figure_once():
    framed = {"framed": ((0, 0, 0, 0),), "frame_name": "strongest"}
    assert a_heatmap(**framed).panel().caption == "below; framed: strongest"
    assert a_heatmap(**framed, caption="Framed: most").panel().caption == "Framed: most"
    assert a_heatmap(frame_name="strongest").panel().caption == "below", "there is no frame"
    choice = Choice.of("layer", [2], lambda _: a_heatmap(**framed), title="All")
    assert choice.panel().caption == "below; framed: strongest"
    alone = Figure(name="f", title="Mine", caption="told", panels=(a_heatmap(**framed),)).compose("foot")
    assert "told; framed: strongest" in [text.get_text() for text in alone.axes[0].texts]


def test_titles_of_a_row_begin_at_one_height_and_stand_above_their_captions():
    long = "words " * 40
    drawn = paper.compose(
        [a_heatmap(caption=long), replace(a_heatmap(), title=long), replace(a_heatmap(), caption="")],
        columns=3,
    )
    drawn.canvas.draw()
    first = [axes for axes in drawn.axes if axes.get_title(loc="left")]
    titles = [axes.get_title(loc="left") and axes._left_title.get_window_extent() for axes in first]
    assert len(titles) == 3
    # In pixels of 1/100 inch: less than half a line.
    assert max(box.y1 for box in titles) - min(box.y1 for box in titles) < 8
    for axes, title in zip(first, titles, strict=True):
        (caption, *_) = axes.texts
        assert axes.bbox.y1 < caption.get_window_extent().y0
        assert not caption.get_text() or caption.get_window_extent().y1 < title.y0 + 1


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("recovered by patching attn_out, %", ["recovered by", "patching attn_out, %"]),
        ("mean change of attention to the fact", ["mean change of", "attention to the fact"]),
        (
            "KL(clean || run) of next-token distributions, nats",
            ["KL(clean || run) of next-token", "distributions, nats"],
        ),
        ("KL, nats", ["KL, nats"]),
        ("", [""]),
    ],
)
def test_a_name_that_takes_several_lines_leaves_no_word_alone(text: str, lines: list[str]):
    assert paper.even(text, 32).split("\n") == lines


def test_a_title_ends_within_the_figure_however_long_the_names_of_rows_are():
    long = Heatmap(
        title="How it goes on, without blocks.3.hook_attn_out", caption="shaded by " * 8, values=np.eye(2),
        rows=("The mother tongue of John Calvin is", "unchanged"), columns=("0", "1"), value_name="p",
    )  # fmt: skip
    drawn = paper.compose([long])
    drawn.canvas.draw()
    texts = [drawn.axes[0]._left_title, *drawn.axes[0].texts]
    assert max(text.get_window_extent().x1 for text in texts) < drawn.bbox.x1


def test_a_long_caption_leaves_cells_as_wide_as_a_short_one():
    def wide(caption: str) -> float:
        drawn = paper.compose([replace(a_heatmap(), caption=caption) for _ in range(3)])
        drawn.canvas.draw()
        return float(drawn.axes[0].get_position().width)

    assert wide("words " * 40) == pytest.approx(wide("words"), rel=0.01)


def test_words_below_bars_and_cells_lie_flat_where_there_is_room():
    def turned(view: View) -> set[float]:
        return {label.get_rotation() for label in paper.compose([view]).axes[0].get_xticklabels()}

    def bars(*names: str) -> Bars:
        return Bars(x=names, x_name="x", y_name="y", lines=(Line("one", np.ones(len(names))),))

    def cells(*names: str) -> Heatmap:
        return Heatmap(values=np.eye(1, len(names)), rows=("0",), columns=names, value_name="x")

    many = [f"word {i}" for i in range(16)]
    assert turned(bars("0-1 (42 %)", "2-3 (0 %)")) == turned(cells("attention", "MLP")) == {0}
    assert turned(bars(*many)) == turned(cells(*many)) == {40}


def test_a_figure_of_one_panel_has_its_words_once_in_a_notebook(monkeypatch):
    drawn = []
    monkeypatch.setattr(paper, "png", lambda panels: drawn.extend(panels) or b"")
    shown = Figure(name="f", title="Mine", caption="told", panels=(a_heatmap(),))._repr_html_()
    assert [(panel.title, panel.caption) for panel in drawn] == [("", "")]
    assert (shown.count("Mine"), shown.count("told"), "By head" in shown) == (1, 1, False)


def test_levels_of_bars_are_marked_where_they_lie():
    bars = Bars(
        x=("a", "b"), x_name="x", y_name="p", lines=(Line("p", np.array([1e-3, 0.5])),), log=True, low=1e-4,
        levels=((1e-2, "before"), (5.0, "above")),
    )  # fmt: skip
    with paper.style():
        axes = paper.blank(4, 3).add_subplot()
        bars.draw(axes)
    assert axes.get_yscale() == "log" and axes.get_ylim()[0] == 1e-4
    assert [line.get_ydata()[0] for line in axes.lines] == [1e-2, 5.0]
    assert axes.get_ylim()[1] > 5.0, "a level above all bars is within the axes"
    assert [text.get_text().strip() for text in axes.texts] == ["before", "above"]


@pytest.mark.parametrize(
    ("low", "high", "count", "marked"),
    [
        (1, 60, 6, ["1", "2", "5", "10", "20", "50"]),
        (0.1, 100, 6, ["0.1", "1", "10", "100"]),
        (1e3, 1e7, 6, ["1,000", "10,000", "100,000", "1e6", "1e7"]),
        (3e-5, 0.9, 6, ["1e-4", "0.001", "0.01", "0.1"]),
        (1e-12, 1, 5, ["1e-12", "1e-9", "1e-6", "0.001", "1"]),
        (0.31, 0.38, 4, ["0.32", "0.34", "0.36", "0.38"]),
        (20, 30, 2, ["20", "25", "30"]),
    ],
)
def test_a_logarithmic_axis_is_marked_by_1_2_5_by_decades_or_in_even_steps(low, high, count, marked):
    assert list(map(paper.mark, paper.log_ticks(low, high, count))) == marked


def test_curves_over_logarithmic_axes_are_marked_as_on_a_page_and_have_gaps_where_there_is_no_place():
    view = Lines(
        x=(1.0, 10.0, 100.0, 1000.0),
        x_name="samples",
        y_name="error",
        lines=(Line("e", np.array([1.0, 0.0, 1e-2, 1e-4]), level=-1.0), Line("f", np.full(4, 1e-1))),
        log=True,
        log_x=True,
        low=1e-5,
        high=0.5,
    )
    axes = paper.compose([view]).axes[0]
    axes.figure.draw_without_rendering()
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert (axes.get_xscale(), labels) == ("log", ["1", "10", "100", "1,000"])
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert (axes.get_yscale(), labels) == ("log", ["1e-5", "1e-4", "0.001", "0.01", "0.1", "1"])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("samples, log scale", "error, log scale")
    drawn = [line.get_ydata() for line in axes.lines]
    assert len(drawn) == 2, "a level below 0 has no place either"
    np.testing.assert_array_equal(drawn[0], [1.0, np.nan, 1e-2, 1e-4])
    assert view.unplaced == 2
    assert "not drawn: 2 values of 0 or below" in [text.get_text() for text in axes.texts]
    assert (plain(view)["log"], plain(view)["log_x"]) == (True, True), "and so they are on a page"


@pytest.mark.parametrize("count", [3, 20, 60])
def test_names_at_the_ends_of_curves_stay_beside_their_axes(count):
    lines = tuple(Line(f"layer {i}", np.array([0.0, 0.001 * i]), faint=True) for i in range(count))
    top = Line("top", np.array([0.0, 1.0]), strong=True)
    view = Lines(x=(0, 1), x_name="x", y_name="y", lines=(*lines, top))
    figure = paper.compose([view])
    figure.canvas.draw()
    (axes,) = figure.axes
    boxes = sorted(
        (text.get_window_extent() for text in axes.texts if text.get_text().startswith(" layer")),
        key=lambda box: box.y0,
    )
    names = [text.get_text().strip() for text in axes.texts]
    assert {"layer 0", f"layer {count - 1}"} <= set(names)
    assert len(boxes) == min(count, 22)
    # Half a line of text may reach beyond the end of the axes.
    line = boxes[0].height
    assert boxes[0].y0 >= axes.bbox.y0 - line and boxes[-1].y1 <= axes.bbox.y1 + line
    assert all(upper.y0 - lower.y0 > 0.8 * line for lower, upper in pairwise(boxes)), "none covers another"


def test_names_at_the_ends_of_curves_are_apart_by_factors_where_the_axis_is_logarithmic():
    lines = tuple(Line(f"curve {i}", np.array([1.0, 10.0**-i])) for i in range(12))
    axes = paper.compose([Lines(x=(0, 1), x_name="x", y_name="y", lines=lines, log=True)]).axes[0]
    ends = {text.get_text().strip(): text.xy[1] for text in axes.texts if "curve" in text.get_text()}
    assert [ends[f"curve {i}"] for i in range(1, 12)] == pytest.approx([10.0**-i for i in range(1, 12)])


@pytest.mark.parametrize("x", [(0.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0), ("1", "10")])
def test_what_has_no_place_on_a_logarithmic_x_axis_is_refused(x):
    with pytest.raises(ShapeError, match="expected numbers above 0 on the logarithmic x axis 'dose', found"):
        Lines(x=x, x_name="dose", y_name="y", lines=(Line("a", np.ones(2)),), log_x=True)


def test_a_strip_boxes_every_token_and_leaves_out_those_of_no_character():
    strip = Strip(text="ab c" * 20, offsets=((0, 0), (0, 2), (2, 70)), spans=("", "name", ""))
    with paper.style():
        axes = paper.blank(4, 3).add_subplot()
        strip.draw(axes)
    # The third token runs over the end of a row of 60.
    boxes = [(box.get_x(), box.get_y(), box.get_width()) for box in axes.patches]
    assert [tuple(round(number, 6) for number in box) for box in boxes] == [
        (-0.5, -0.3, 2),
        (1.5, -0.3, 58),
        (-0.5, -1.3, 10),
    ]
    assert [text.get_text() for text in axes.texts[:2]] == ["1", "2"], (
        "positions count tokens of no character"
    )
    assert strip.spans.count("name") == 1 and axes.patches[0].get_fc() != axes.patches[1].get_fc()


def test_what_there_is_not_is_a_dash():
    assert [dash(None, ".2f"), dash(0.125, ".2f"), dash(3, "layer {}".format)] == ["–", "0.12", "layer 3"]


# -- one meaning per colour, nothing cut, the view that shows most


def hue(colour: str) -> float:
    return float(360 * rgb_to_hsv(to_rgb(colour))[0])


def test_things_told_apart_have_no_colour_that_means_a_sign():
    below, above = hue(paper.BELOW), hue(paper.ABOVE)
    for shade in paper.shades(6, in_order=False):
        greyish = rgb_to_hsv(to_rgb(shade))[1] < 0.4
        assert greyish or min(abs(hue(shade) - below), abs(hue(shade) - above)) > 12, shade


def test_a_page_and_a_figure_tell_things_apart_by_the_same_colours():
    script = templates.asset("core.js")
    light = script.split("const LINE_COLOURS = {")[1].split("light: [")[1].split("]")[0]
    assert tuple(part.strip(' "') for part in light.split(",")) == paper.SHADES
    assert f'light: "{paper.BLUE}"' in script
    ramp = script.split("diverging: {")[1].split("light: [")[1].split("]")[0]
    assert [part.strip(' "') for part in ramp.split(",")] == paper.RAMPS["diverging"]


def test_signed_bars_have_the_colours_of_a_grid():
    view = Bars(
        x=("a", "b"), lines=(Line("share", np.array([-1.0, 2.0])),), x_name="", y_name="share", signed=True
    )
    drawn = paper.compose([view]).axes[0].patches
    assert [to_hex(patch.get_facecolor()) for patch in drawn] == [paper.BELOW, paper.ABOVE]


@pytest.mark.parametrize("count", [4, 6, 12])
def test_nothing_is_cut_in_a_narrow_terminal(count: int):
    names = [f"a rather long name of column {i}" for i in range(count)]
    words = "supercalifragilistic" * 6
    record = dict.fromkeys(names, -1234.5678) | {"text": words}
    table = Table.of([record], ("text", "text"), *((name, name, "+.4f") for name in names), title="t")
    console = Console(width=80, record=True)
    console.print(paper.fitted(table.rich(), 80))
    shown = console.export_text()
    assert "…" not in shown
    assert sum(shown.count(digit) for digit in "5678") >= 4 * count  # every digit of every number
    assert shown.count("-1234.5678") == count or count > 5
    assert sum(shown.count(letter) for letter in "spq") >= sum(words.count(letter) for letter in "spq")


def test_a_curve_turns_to_the_view_that_shows_most_of_it():
    rng = np.random.default_rng(0)
    for flat in range(3):
        points = rng.standard_normal((200, 3)) * [1, 1, 1]
        outlier = np.zeros((2, 3))
        outlier[:, flat] = [-40, 40]  # stretches the box, so that the rest lies flat in it
        points = np.concatenate([points, outlier])
        within = points / np.ptp(points, axis=0) * [1, 1, 0.8]

        def seen(elevation: float, azimuth: float, within: Any = within) -> float:
            up, around = np.radians(elevation), np.radians(azimuth)
            towards = np.array([np.cos(up) * np.cos(around), np.cos(up) * np.sin(around), np.sin(up)])
            return float(within.var(axis=0).sum() - (within @ towards).var())

        best = best_view(points)
        views = [(e, a) for e in range(15, 61, 5) for a in range(-180, 180, 5) if 15 <= a % 90 <= 75]
        assert seen(*best) == pytest.approx(max(seen(*view) for view in views))
        assert seen(*best) >= seen(22, -58)
        axes = paper.compose([a_curve(points)]).axes[0]
        assert (axes.elev, axes.azim) == best
    assert best[0] == 60  # what is flat is the vertical: seen from as high above as is allowed


def a_curve(points: Any) -> Curve:
    values = np.arange(len(points))
    return Curve(points=points, values=values, value_name="count", names=("a", "b", "c"))


def a_prompt(values: Any, **told: Any) -> Heatmap:
    array = xr.DataArray(values, dims=("layer", "position"), attrs={"long_name": "norm"})
    return Heatmap.of(array, **told)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int32"])
def test_the_first_token_is_left_out_of_colour_scales(dtype: str) -> None:
    heatmap = a_prompt(np.array([[25_000, 100, 90], [30_000, 120, 110]], dtype), low=0.0)
    scaled = heatmap.without_first_token()
    assert (scaled.low, scaled.high) == (0.0, 120.0)
    assert "first token" in scaled.caption
    assert np.array_equal(scaled.values, heatmap.values)  # the numbers stay


def test_a_scale_that_the_first_token_fits_in_needs_no_words() -> None:
    fits = a_prompt([[5.0, 1.0, 9.0]], caption="A.").without_first_token()
    assert fits.caption == "A."


@pytest.mark.parametrize("values", [[[7.0]], [[7.0, np.nan]]])
def test_a_prompt_of_the_first_token_alone_keeps_its_scale(values: Any) -> None:
    heatmap = a_prompt(values)
    assert heatmap.without_first_token() is heatmap


def test_signed_colours_leave_the_first_token_out_on_both_sides() -> None:
    scaled = a_prompt([[-900.0, 2.0, -3.0]], diverging=True).without_first_token()
    assert (scaled.low, scaled.high) == (-3.0, 3.0)


def test_what_the_first_token_reads_of_itself_is_left_out_of_a_pattern() -> None:
    pattern = np.array([[1.0, 0, 0], [0.95, 0.05, 0], [0.9, 0.06, 0.04]])
    names = ("The", " cat", " sat")
    whole = Heatmap(values=pattern, rows=names, columns=names, value_name="weight", low=0.0)
    assert whole.without_first_token().high == 0.06
