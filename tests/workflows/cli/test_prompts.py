"""Prompts from text files, JSONL files, stdin and the command line."""

from __future__ import annotations

import io
import sys

import pyarrow.parquet
import pytest

from mizarr.stages.forward.models.source import ModelSource
from mizarr.store.errors import MissingExtra, PromptError
from mizarr.workflows.cli.prompts import PromptSources, read_prompts
from tests.stages.forward.random_pairs import VOCABULARY, random_pair


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_a_text_file_holds_one_prompt_per_line(tmp_path):
    path = write(tmp_path, "prompts.txt", "first\n\n  second, indented \r\nthird")
    assert read_prompts([path]) == ["first", "  second, indented ", "third"]


def test_a_jsonl_file_holds_strings_or_objects_with_text(tmp_path):
    path = write(tmp_path, "prompts.jsonl", '"first"\n{"text": "two\\nlines", "source": "x"}\n\n')
    assert read_prompts([path]) == ["first", "two\nlines"]


def test_a_jsonl_file_holds_token_ids(tmp_path):
    path = write(tmp_path, "prompts.jsonl", '[1, 2]\n{"ids": [3]}\n')
    assert read_prompts([path]) == [[1, 2], [3]]


def test_files_are_read_in_the_order_given(tmp_path):
    one, two = write(tmp_path, "1.txt", "a\n"), write(tmp_path, "2.jsonl", '"b"\n')
    assert read_prompts([two, one]) == ["b", "a"]


def test_words_on_the_command_line_are_prompts_when_asked():
    assert read_prompts(["a prompt", "-"], literal=True) == ["a prompt", "-"]


def test_a_dash_is_stdin(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("piped\n"))
    assert read_prompts(["-"]) == ["piped"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("{text: 1}", "expected JSON"),
        ("3", "expected a string"),
        ('{"prompt": "x"}', "expected a string"),
        ("[1, true]", "expected a string"),
        ('[1, "a"]', "expected a string"),
        ('{"text": null}', "expected a string"),
    ],
)
def test_a_line_that_is_no_prompt_is_named_by_file_and_number(tmp_path, line, found):
    path = write(tmp_path, "prompts.jsonl", f'"fine"\n{line}\n')
    with pytest.raises(PromptError, match=found) as error:
        read_prompts([path])
    assert f"{path}:2:" in str(error.value)


@pytest.fixture(scope="module")
def reads_pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bart")
    random_pair("bart", 0, folder)
    return ModelSource(folder)


def test_pairs_are_read_for_a_model_that_reads_them(reads_pairs, tmp_path):
    path = write(
        tmp_path, "prompts.jsonl", '{"source": [7, 8], "target": [9]}\n[7]\n{"source": [6], "target": []}\n'
    )
    start = VOCABULARY + 2
    assert read_prompts([path], model=reads_pairs) == [[7, 8, start, 9], [7], [6, start]]


def test_a_text_with_its_source_is_no_pair(reads_pairs, tmp_path):
    path = write(tmp_path, "prompts.jsonl", '{"text": "words", "source": "a book"}\n')
    assert read_prompts([path], model=reads_pairs) == ["words"]


@pytest.mark.parametrize("line", ['{"source": [7]}', '{"target": [7]}', '{"source": "a", "target": 7}'])
def test_half_a_pair_is_named_by_file_and_number(reads_pairs, tmp_path, line):
    path = write(tmp_path, "prompts.jsonl", f"[7]\n{line}\n")
    with pytest.raises(
        PromptError, match=r"prompts\.jsonl:2: expected both source and target, each a string"
    ):
        read_prompts([path], model=reads_pairs)
    with pytest.raises(PromptError, match=r"prompts\.jsonl:2: expected a string, {'text': string}"):
        read_prompts([path])


def test_text_and_ids_do_not_mix(tmp_path):
    with pytest.raises(PromptError, match="found both"):
        read_prompts([write(tmp_path, "prompts.jsonl", '"text"\n[1]\n')])


def test_no_prompt_at_all_is_an_error(tmp_path):
    with pytest.raises(PromptError, match="found none in"):
        read_prompts([write(tmp_path, "empty.txt", "\n\n")])


def test_a_missing_file_says_how_to_pass_the_prompt_itself(tmp_path):
    with pytest.raises(PromptError, match="--text"):
        read_prompts([str(tmp_path / "absent.txt")])
    with pytest.raises(PromptError, match="found a directory"):
        read_prompts([str(tmp_path)])


def test_a_file_that_is_not_utf8_is_named(tmp_path):
    with pytest.raises(PromptError, match="UTF-8"):
        read_prompts([write(tmp_path, "latin.txt", "caf\xe9\n".encode("latin-1"))])


def parquet(tmp_path, **columns):
    path = tmp_path / "prompts.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return str(path)


def test_a_parquet_file_holds_a_column_of_text_or_of_ids(tmp_path):
    assert read_prompts([parquet(tmp_path, n=[1, 2], text=["a", "b"])]) == ["a", "b"]
    assert read_prompts([parquet(tmp_path, ids=[[1, 2], [3]])]) == [[1, 2], [3]]


def test_a_parquet_file_without_prompts_names_its_columns(tmp_path):
    with pytest.raises(PromptError, match="found prompt, n"):
        read_prompts([parquet(tmp_path, prompt=["a"], n=[1])])


def test_a_null_in_a_parquet_file_is_named_by_row(tmp_path):
    with pytest.raises(PromptError, match="row 1"):
        read_prompts([parquet(tmp_path, text=["a", None])])


def test_a_file_that_only_says_parquet_is_named(tmp_path):
    with pytest.raises(PromptError, match="expected a Parquet file"):
        read_prompts([write(tmp_path, "prompts.parquet", "words")])


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    path = parquet(tmp_path, text=["a"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"mizarr\[corpora\]"):
        read_prompts([path])


def test_seed_0_is_a_seed_like_another(tmp_path):
    path = write(tmp_path, "prompts.txt", "a\n")
    for seed in (None, 0, 1):
        with PromptSources(
            (path,), documents={"context": None, "pack": False, "seed": seed}
        ).corpus() as corpus:
            assert (corpus is None) == (seed is None)
            assert corpus is None or corpus.seed == seed
