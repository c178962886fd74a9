"""Texts of workflows come from the files that a corpus is read from."""

from __future__ import annotations

import gzip
import json

import pytest

from mizarr.store.errors import MizarrError
from mizarr.workflows.subject import read_texts, shipped_prose


def test_a_text_file_is_one_text_and_a_folder_one_of_each_file(tmp_path):
    (tmp_path / "b.txt").write_text("second\n\nparagraph", "utf-8")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffirst")
    assert read_texts(str(tmp_path / "b.txt")) == ["second\n\nparagraph"]
    assert read_texts(str(tmp_path)) == ["first", "second\n\nparagraph"]
    assert read_texts(str(tmp_path / "?.txt")) == ["first", "second\n\nparagraph"]
    assert read_texts("") == [shipped_prose()]


def test_lines_of_json_are_texts_and_no_prose(tmp_path):
    rows = [{"text": "one"}, "two\nlines"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"three"))
    assert read_texts(str(tmp_path / "a.jsonl")) == ["one", "two\nlines"]
    assert read_texts(str(tmp_path / "b.txt.gz")) == ["three"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("absent.txt", None, "expected files of documents"),
        ("latin.txt", b"caf\xe9", "expected UTF-8 text"),
        ("empty.txt", b"\n", "expected at least one text"),
        ("ids.jsonl", b"[1, 2]\n", "expected texts in .*found token ids"),
        ("broken.jsonl", b"{\n", "expected JSON"),
        ("table.csv", b"a,b\n", "convert it to .jsonl"),
    ],
)
def test_what_holds_no_texts_is_refused_in_a_line(tmp_path, name, content, said):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(MizarrError, match=said) as caught:
        read_texts(str(path))
    assert "\n" not in str(caught.value)
