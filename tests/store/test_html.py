"""HTML for notebooks is escaped wherever it is made."""

from __future__ import annotations

from mizarr.store.display import html


def test_titles_captions_heads_and_cells_are_escaped():
    found = html.shown("<t>", html.table(["<h>"], [["<c> & 'd'"], [3]]), "<n>")
    assert "&lt;t&gt;" in found and "&lt;n&gt;" in found
    assert "&lt;h&gt;</th>" in found and "&lt;c&gt; &amp; &#x27;d&#x27;</td>" in found and ">3</td>" in found
    assert html.details("<s>", "<hr>") == "<details><summary>&lt;s&gt;</summary><hr></details>"


def test_columns_are_aligned_as_asked():
    found = html.table(["name", "number"], [["a", "1"]], right=[1])
    assert '<td style="text-align:left">a</td><td style="text-align:right">1</td>' in found


def test_nothing_stands_for_an_empty_title_or_caption():
    assert html.shown("", "<hr>") == "<div><hr></div>"
