"""Report pages as files: views, escaping, recipes, the same bytes twice, limits, and the command."""

from __future__ import annotations

import base64
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import xarray as xr

from mizarr.stages.logits.lens import format_token
from mizarr.store.errors import ConfigError, ShapeError
from mizarr.workflows import build, compute
from mizarr.workflows.cli import run
from mizarr.workflows.cli.options import settings as read_pairs
from mizarr.workflows.report import page
from mizarr.workflows.report.recipe import asked, command, made
from mizarr.workflows.views import (
    Attention,
    Bars,
    Choice,
    Figure,
    Heatmap,
    Line,
    Lines,
    Note,
    Table,
    Text,
    Tokens,
    blocks,
    dim,
)
from mizarr.workflows.workflow import Workflow

PROMPTS = ["it was the age of", "</script><b>'\" & it was"]
ANSWERS = ["wisdom", "us"]


class Parsed(HTMLParser):
    """What a browser would take a page for: its tags, its text, its blocks of JSON."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.data = "", []
        self._raw = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._raw = {
            "script": "json" if ("type", "application/json") in attrs else "code",
            "style": "code",
        }.get(tag, "")

    def handle_endtag(self, tag: str) -> None:
        self._raw = ""

    def handle_data(self, data: str) -> None:
        if self._raw == "json":
            self.data.append(json.loads(data))
        elif not self._raw:
            self.text += data


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report") / "store"


@pytest.fixture(scope="module")
def lens(tiny_model: Path, store: Path) -> Workflow:
    return compute(
        "logit_lens", store=store, model=str(tiny_model), prompts=PROMPTS, answers=ANSWERS, top_k=3
    )


@pytest.fixture(scope="module")
def text(lens: Workflow) -> str:
    return page.render(lens)


@dataclass(frozen=True)
class Nothing:
    """No settings."""


class Plain(Workflow):
    """A table and nothing else to show; stores nothing."""

    name, question, settings_type = "plain", "Is it enough?", Nothing
    nodes: ClassVar[dict[str, Any]] = {}

    def views(self) -> Iterator[Table]:
        words = {1: ("a ", dim("b")), 2: "[red]", 3: "long enough to need several lines"}
        yield Table.of(
            words,
            ("word", words.__getitem__),
            ("number", lambda number: number, "d"),
            strong=lambda number: number == 2,
            title="T",
            caption="below",
        )


# What a page is made of


def test_a_workflow_that_says_one_table_has_it_on_the_page():
    parsed = Parsed(page.render(Plain(Nothing())))
    for said in ("Is it enough?", "T", "word", "a b", "[red]", "below", "mizarr report plain"):
        assert said in parsed.text
    assert parsed.data == []


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (np.array([0.5, np.nan]), "<f4"),
        (np.array([True, False]), "|u1"),
        (np.array([0, 255]), "|u1"),
        (np.array([-3, 127]), "|i1"),
        (np.array([[0], [40_000]]), "<u2"),
        (np.array([-1, 40_000]), "<i4"),
        (np.zeros((0, 3), np.int64), "|u1"),
        (np.linspace(0, 1, blocks.MANY + 1), "<f2"),
        (np.linspace(0, 1e6, blocks.MANY + 1), "<f4"),
    ],
)
def test_a_block_holds_the_array_in_the_narrowest_kind_that_tells_it(values, dtype):
    block = blocks.block(values)
    assert block["dtype"] == dtype
    back = np.frombuffer(base64.b64decode(block["data"]), dtype).reshape(block["shape"])
    np.testing.assert_allclose(back, values, rtol=1e-3 if dtype == "<f2" else 1e-6, atol=1e-6)


def test_integers_too_large_for_a_page_are_refused():
    with pytest.raises(OverflowError, match="32 bits"):
        blocks.block(np.array([1 << 40]))


def test_a_heatmap_takes_its_words_from_the_array():
    array = xr.DataArray(
        np.arange(6.0).reshape(2, 3),
        dims=("layer", "read_layer"),
        coords={"layer": [3, 5], "read_layer": [0.0, 0.5, 1.0]},
        attrs={"long_name": "distance", "units": "nats"},
    )
    heatmap = Heatmap.of(array, title="t", low=0.0)
    assert (heatmap.rows, heatmap.columns) == (("3", "5"), ("0", "0.5", "1"))
    assert (heatmap.row_name, heatmap.column_name) == ("layer", "read layer")
    assert (heatmap.value_name, heatmap.unit, heatmap.upward, heatmap.low) == ("distance", "nats", True, 0.0)


def test_curves_are_taken_from_an_array_in_rising_order_of_x():
    array = xr.DataArray([[1.0, 2.0, 3.0]], {"layer": [4], "dose": [2.0, 0.5, 1.0]}, ("layer", "dose"), "kl")
    lines = Lines.of(array)
    assert (lines.x, lines.x_name, lines.y_name) == ((0.5, 1.0, 2.0), "dose", "kl")
    assert lines.lines[0].name == "layer 4"
    assert lines.lines[0].values.tolist() == [2.0, 3.0, 1.0]


def test_attention_is_embedded_without_the_triangle_that_is_empty():
    pattern = np.tril(np.arange(1.0, 37.0).reshape(1, 4, 3, 3))
    tokens, overview = ("a", "b", "c"), np.zeros((1, 4))
    viewer = Attention(tokens=tokens, layers=(0,), pattern=pattern, overview=overview, overview_name="x")
    assert viewer.pattern[0, 0].tolist() == [1, 4, 5, 7, 8, 9]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Heatmap(values=np.zeros((2, 2)), rows=("a",), columns=("b", "c"), value_name="v"),
        lambda: Lines(x=(1.0,), lines=(Line("l", np.zeros(2)),), x_name="x", y_name="y"),
        lambda: Tokens(texts=(Text(("a",), np.zeros(2)),), value_name="v"),
        lambda: Attention(
            tokens=("a",),
            layers=(0,),
            pattern=np.zeros((1, 1, 2, 2)),
            overview=np.zeros((1, 1)),
            overview_name="x",
        ),
    ],
)
def test_arrays_and_labels_that_do_not_belong_together_are_refused(wrong):
    with pytest.raises(ShapeError, match="one entry per label of the view; found shape"):
        wrong()


# The file


def test_prompts_are_text_wherever_they_stand(text):
    parsed = Parsed(text)
    hostile = PROMPTS[1]
    assert not [tag for tag, _ in parsed.tags if tag == "b" and hostile in text]
    assert hostile in parsed.text
    assert hostile in {attrs.get("data-label") for _, attrs in parsed.tags}
    assert len(re.findall("</script", text)) == sum(tag == "script" for tag, _ in parsed.tags)


def test_a_page_fetches_nothing_and_runs_only_its_own_script(text):
    parsed = Parsed(text)
    sources = [attrs[name] for _, attrs in parsed.tags for name in ("src", "href") if name in attrs]
    assert sources and all(str(source).startswith(("data:", "#")) for source in sources)
    policy = next(str(attrs["content"]) for _, attrs in parsed.tags if "http-equiv" in attrs)
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert not [
        name for _, attrs in parsed.tags for name in attrs if name == "style" or name.startswith("on")
    ]


def test_the_numbers_on_a_page_are_the_results(text, lens):
    block = next(data for data in Parsed(text).data if "target_rank" in data)
    part = lens.prompt(0)
    for name, exact in (
        ("probabilities", np.exp(part["top_logprob"])),
        ("target_rank", part["target_rank"]),
    ):
        held = block[name]
        back = np.frombuffer(base64.b64decode(held["data"]), held["dtype"]).reshape(held["shape"])
        np.testing.assert_allclose(back, exact, rtol=1e-6)
    words = [format_token(lens.vocabulary[i]) for i in part["top_id"].values[-1, -1]]
    top = block["top"]
    ids = np.frombuffer(base64.b64decode(top["data"]), top["dtype"]).reshape(top["shape"])[-1, -1]
    assert [block["words"][i] for i in ids] == words


def test_every_result_names_its_key_and_what_it_read(text, lens):
    stages = {each.name: each for each in made(lens)}
    assert {name for name, each in stages.items() if each.is_result} == set(lens.nodes)
    keys = lens.to_json()["provenance"]["keys"]
    assert {name: stages[name].key for name in keys} == keys
    assert set(stages["lens"].reads) == {"capture", "targets", "readout"}
    assert list(stages).index("capture") < list(stages).index("lens")
    facts = dict(stages["capture"].facts)
    assert facts["prompts"].startswith("2 (")
    held = lens.store
    arrays = dict(told.split(" ") for told in facts["arrays"].split(", "))
    assert set(arrays) == {"resid_post/0", "resid_post/1", "resid_post/2"}
    for key in (*arrays.values(), *keys.values()):
        assert held[key].sizes, "what a page names can be opened"
    assert {"computed", "took", "software", "content"} <= dict(stages["lens"].facts).keys()
    for each in stages.values():
        assert each.key in text


def test_prompts_of_a_larger_run_name_the_arrays_of_that_run(lens, tiny_model, store):
    chosen = {"prompts": PROMPTS[:1], "answers": ANSWERS[:1]}
    fewer = compute("logit_lens", store=store, model=str(tiny_model), **chosen)
    passes = {each.name: each for each in made(fewer)}["capture"]
    assert dict(passes.facts)["prompts"].startswith("1 (")
    assert passes.key == {each.name: each for each in made(lens)}["capture"].key


def test_no_page_says_where_it_was_computed(text, lens):
    import platform

    assert platform.platform() not in text and str(Path.cwd()) not in text
    assert not {"host", "pid", "platform"} & {name for each in made(lens) for name, _ in each.facts}


def test_the_command_on_the_page_asks_for_the_same(lens):
    words = shlex.split(command(lens))
    assert words[:3] == ["mizarr", "report", "logit_lens"]
    pairs = [pair for option, pair in pairwise(words) if option == "--set"]
    given = read_pairs(None, None, pairs)  # type: ignore[arg-type]
    assert build("logit_lens", **given).settings == lens.settings
    assert {each.name for each in asked(lens.settings) if not each.is_default} == set(given)


def test_the_same_results_give_the_same_bytes_and_leave_the_file_alone(lens, tiny_model, store, tmp_path):
    path = lens.report(tmp_path / "deep" / "lens.html")
    before, when = path.read_bytes(), path.stat().st_mtime_ns
    chosen = {"prompts": PROMPTS, "answers": ANSWERS, "top_k": 3}
    again = compute("logit_lens", store=store, model=str(tiny_model), **chosen)
    again.report(path)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (before, when)
    compute("logit_lens", store=store, model=str(tiny_model), **chosen | {"top_k": 2}).report(path)
    assert path.read_bytes() != before
    assert [each.name for each in path.parent.iterdir()] == ["lens.html"]


def test_without_matplotlib_all_but_the_figures_is_there(lens, text, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    bare = Parsed(page.render(lens))
    assert "mizarr[plots]" in bare.text
    assert bare.data == Parsed(text).data
    assert not [tag for tag, _ in bare.tags if tag == "img"]
    assert [tag for tag, _ in Parsed(text).tags if tag == "img"]


def test_what_does_not_fit_is_thinned_or_left_out_and_the_page_says_so(monkeypatch):
    class Heavy(Plain):
        def views(self) -> list[Any]:
            def heatmap(n: int) -> Heatmap:
                labels = tuple(map(str, range(n)))
                return Heatmap(values=np.zeros((n, n)), rows=labels, columns=labels, value_name="v")

            pattern = np.zeros((8, 2, 64, 64))
            tokens, overview = tuple("t" * 64), np.zeros((8, 2))
            return [
                Choice(name="layer", options=tuple((str(i), heatmap(50)) for i in range(9)), caption="Nine."),
                Attention(
                    tokens=tokens,
                    layers=tuple(range(8)),
                    pattern=pattern,
                    overview=overview,
                    overview_name="x",
                ),
                heatmap(300),
                Note(text="small enough"),
            ]

    monkeypatch.setattr(page, "LIMIT", 120_000)
    text = page.render(Heavy(Nothing()))
    parsed = Parsed(text)
    kept = len([data for data in parsed.data if "value_name" in data])
    assert (
        0 < kept < 9 and f"Nine. The size limit of this page leaves room for {kept} of 9 views" in parsed.text
    )
    viewer = next(data for data in parsed.data if "overview" in data)
    n = len(viewer["layers"])
    assert 0 < n < 8 and viewer["pattern"]["shape"][0] == n
    assert f"The size limit of this page leaves room for layers 0 to {n - 1} only" in parsed.text
    assert "Left out of this page: the view takes 0.5 MB" in parsed.text
    assert "small enough" in parsed.text
    bare = len(page.render(Plain(Nothing())))
    assert len(text) - bare < 1.3 * page.LIMIT


def test_a_panel_is_on_the_page_once_and_its_figure_for_browsers_without_scripts():
    class Shown(Plain):
        def views(self) -> list[Any]:
            grid, other = (
                Heatmap(
                    title=name, values=np.eye(2) * scale, rows=("a", "b"), columns=("c", "d"), value_name="v"
                )
                for name, scale in (("one", 1), ("two", 2))
            )
            again = replace(grid, title="one, framed", caption="the same cells")
            bars = Bars(x=("a",), lines=(Line("n", np.ones(1)),), x_name="x", y_name="y", title="bars")
            choice = Choice(name="which", options=(("one", grid),))
            return [choice, Figure(name="all", title="All", panels=(again, other, bars))]

    text = page.render(Shown(Nothing()))
    shown, _, without_scripts = text.partition('<noscript><section id="figures">')
    assert len(Parsed(text).data) == 2, "one grid by the choice, the other from the figure"
    titles = re.findall(r"<h2>(.*?)</h2>", shown)
    assert titles == ["two", "bars"]
    assert shown.count("<img") == 1 and 'alt="bars"' in shown
    assert without_scripts.count("<img") == 1


# The command


@pytest.fixture
def arguments(checkpoint, tmp_path: Path) -> list[str]:
    settings = ["--set", 'prompts=["w1 w2 w3", "w4 w5"]', "--store", str(tmp_path / "store"), "--quiet"]
    return ["report", "logit_lens", "--model", checkpoint(), *settings]


def test_the_command_writes_a_page_and_prints_its_path(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 0
    assert capsys.readouterr().out == "logit_lens.html\n"
    assert "w1 w2 w3" in Path("logit_lens.html").read_text()
    assert run([*arguments, "--output", "other.html", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "workflow": "logit_lens",
        "page": "other.html",
        "bytes": Path("other.html").stat().st_size,
    }
    assert Path("other.html").read_bytes() == Path("logit_lens.html").read_bytes()


def test_a_cached_page_needs_no_torch(arguments, tmp_path):
    target = ["--output", str(tmp_path / "page.html")]
    assert run([*arguments, *target]) == 0
    before = (tmp_path / "page.html").read_bytes()
    (tmp_path / "page.html").unlink()
    code = (
        f"import sys; from mizarr.workflows.cli import run; assert run({[*arguments, *target]!r}) == 0; "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").read_bytes() == before


@pytest.mark.parametrize(
    ("output", "said"),
    [("", "because it is a folder"), ("taken/page.html", "is a file, not a folder")],
    ids=["a folder", "below a file"],
)
def test_a_path_that_cannot_be_written_is_told_before_anything_runs(
    output, said, arguments, capsys, tmp_path
):
    (tmp_path / "taken").write_text("")
    assert run([*arguments, "--output", str(tmp_path / output)]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1
    assert not (tmp_path / "store").exists()
    with pytest.raises(ConfigError, match=said):
        Plain(Nothing()).report(tmp_path / output)
