"""What a notebook shows of models, specs, caches, plans, dictionaries and graphs: useful, and escaped."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import mizarr
from mizarr.pipeline import plan as plan_nodes
from mizarr.stages.causal.knockout import EdgeKnockout
from mizarr.stages.forward.runs.run import plan

PROMPT = "a <b>bold</b> & 'quoted' prompt"


class Cells(HTMLParser):
    """Rows of all tables, as text, and the tags that were opened."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.is_inside = False

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.is_inside = True

    def handle_endtag(self, tag):
        self.is_inside = self.is_inside and tag not in ("td", "th")

    def handle_data(self, data):
        if self.is_inside:
            self.rows[-1][-1] += data


def rows_of(shown: str) -> list[list[str]]:
    """Cells of every row; nothing but the tags of tables may be in it."""
    parser = Cells()
    parser.feed(shown)
    assert parser.tags <= {
        *("div", "p", "b", "small", "table", "thead", "tbody", "tr", "th", "td", "details", "summary")
    }
    return parser.rows


@pytest.fixture(scope="module")
def model():
    return mizarr.Model.from_pretrained("specimen")


def test_a_model_tells_sizes_identity_and_hook_points(model):
    rows = rows_of(model._repr_html_())
    facts = {row[0]: row[1] for row in rows if len(row) == 2}
    assert facts["layers"] == "6" and facts["hidden"] == "192"
    assert facts["identity as loaded"] == model.identity.short
    assert facts["computes in"] == "float32 on cpu" or model.device.type != "cpu"
    points = {row[0]: row[1] for row in rows if len(row) == 3}
    assert points["blocks.*.hook_resid_post"] == "batch, position, hidden 192"
    assert points["hook_embed"] == "batch, position, hidden 192"


def test_the_name_of_a_model_is_escaped(model, monkeypatch):
    monkeypatch.setattr(model, "name", "<script>alert(1)</script>")
    assert "<script" not in model._repr_html_()
    assert "&lt;script&gt;" in model._repr_html_()


def test_a_spec_lists_captures_and_interventions():
    spec = mizarr.HookSpec().capture("blocks.*.hook_resid_post", when="before")
    spec = spec.intervene("blocks.1.hook_mlp_out", mizarr.Zero())
    assert rows_of(spec._repr_html_())[1:] == [
        ["blocks.*.hook_resid_post", "capture, before interventions"],
        ["blocks.1.hook_mlp_out", repr(mizarr.Zero())],
    ]


def test_an_intervention_of_ones_own_cannot_write_html():
    class Odd(mizarr.Zero):
        def __repr__(self):
            return "<img src=x>"

    shown = mizarr.HookSpec().intervene("blocks.1.hook_mlp_out", Odd())._repr_html_()
    assert "<img" not in shown and html.escape("<img src=x>") in shown


def test_a_cache_tells_layers_dims_shape_and_dtype_of_each_point(model):
    hooks = mizarr.HookSpec().capture("blocks.*.hook_resid_post", "blocks.2.attn.hook_pattern", "hook_embed")
    cache = model.forward([[1, 2, 3], [4, 5, 6]], hooks)
    shown = cache._repr_html_()
    assert rows_of(shown)[1:] == [
        ["hook_embed", "after", "", "batch, position, hidden", "2 x 3 x 192", "float32"],
        [
            "blocks.*.hook_resid_post",
            "after",
            "0, 1, 2, 3, 4, 5",
            "batch, position, hidden",
            "2 x 3 x 192",
            "float32",
        ],
        [
            "blocks.*.attn.hook_pattern",
            "after",
            "2",
            "batch, head, query_position, key_position",
            "2 x 6 x 3 x 3",
            "float32",
        ],
        ["logits", "", "", "batch, position, vocab", f"2 x 3 x {model.config.vocab_size}", "float32"],
    ]
    assert "2 prompts of 3 tokens" in shown
    assert "logits" not in model.forward([[1, 2]], want=None)._repr_html_()


def test_a_plan_of_runs_tells_what_a_loop_would_compute(model):
    change = mizarr.HookSpec().intervene("blocks.4.hook_mlp_out", mizarr.Zero(positions=(2,)))
    planned = plan(model, [mizarr.Run((1, 2, 3)), mizarr.Run((1, 2, 3), change)])
    facts = dict(rows_of(planned._repr_html_()))
    assert facts["runs requested"] == facts["distinct runs"] == "2"
    assert facts["positions x layers of this plan"] == f"{planned.positions:,}"
    assert facts["positions x layers of one pass per run"] == f"{2 * 3 * 6:,}"


def test_a_plan_of_stages_has_a_line_per_stage(tmp_path: Path):
    steps = plan_nodes(EdgeKnockout((1, 2, 3), ((2, 0),)).on("specimen"), mizarr.open_store(tmp_path))
    head, line = rows_of(steps._repr_html_())
    assert head == ["stage", "state", "cells stored", "reads", "writes", "peak memory", "expected time"]
    assert line == list(steps.rows()[0])


def test_a_dictionary_tells_kind_sizes_and_where_it_reads_and_writes():
    found = mizarr.Dictionary.from_pretrained("specimen/clt")
    rows = rows_of(found._repr_html_())
    facts = {row[0]: row[1] for row in rows if len(row) == 2}
    assert facts["kind"] == "clt" and facts["features per layer"] == f"{found.n_features:,}"
    layers = {row[0]: row[1:] for row in rows if len(row) == 3}
    assert layers["4"] == [
        str(found.read_hook(4)),
        ", ".join(str(found.write_hook(m)) for m in found.targets(4)),
    ]


def test_a_graph_tells_its_nodes_and_the_logits_it_explains(model, tmp_path: Path):
    graph = mizarr.attribution_graph(model, "specimen/plt", PROMPT, max_feature_nodes=8, max_n_logits=3)
    shown = graph._repr_html_()
    rows = rows_of(shown)
    counts = {row[0]: row[1] for row in rows[1:5]}
    c = graph.counts
    assert counts == {
        name: f"{n:,}"
        for name, n in zip(
            ("feature", "error", "token", "logit"), (c.features, c.errors, c.positions, c.logits), strict=True
        )
    }
    assert [row[0] for row in rows[6:]] == [repr(text) for text in graph.logit_tokens]
    assert "<b>bold" not in re.sub(r"<p><b>Attr", "", shown)
    pruned = graph.prune(node_threshold=0.8, edge_threshold=0.98)
    kept = rows_of(pruned._repr_html_())[1:]
    assert [int(row[1]) for row in kept] == [(pruned.nodes["kind"] == row[0]).sum() for row in kept]
    assert sum(int(row[1]) for row in kept) == pruned.node_mask.sum()
    assert [row[2] for row in kept] == list(counts.values())
    assert html.escape("<b>bold</b>") in shown
