"""Corpora: the same documents in any kind of file are the same tokens, and only what is new is computed."""

from __future__ import annotations

import gzip
import io
import json
import mmap
import os
import tarfile
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import xarray as xr
from hypothesis import given, settings, strategies as st

from mizarr import Corpus, capture, open_store
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.forward.text.corpora import contexts, corpus as corpora, formats
from mizarr.stages.forward.text.corpora.contexts import Framing, framed_prompts
from mizarr.stages.forward.text.corpora.estimate import LOOK, estimated_size
from mizarr.store.errors import MizarrError, PromptError, StoreFull, TokenizerError
from mizarr.workflows.cli import run as mizarr_command

TEXTS = ["It was the best of times.", "it was the worst of times,", "the age of wisdom", "a", "foolishness"]
ROWS = [{"text": text, "book": f"book {n % 2}", "page": n} for n, text in enumerate(TEXTS)]
HOOKS = "blocks.*.hook_resid_post"


@pytest.fixture(scope="module")
def words():
    return resolve("specimen").tokenizer()


def write_text(path):
    path.write_text("\n\n".join(TEXTS) + "\n")


def write_jsonl(path):
    path.write_text("\n".join(map(json.dumps, ROWS)))


def write_gzip(path):
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, ROWS)).encode()))


def write_parquet(path):
    pa.parquet.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=2)


def write_stream(path):
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(path, table.schema) as sink:
        sink.write_table(table, max_chunksize=2)


def write_arrow(path):
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(path, table.schema) as sink:
        sink.write_table(table, max_chunksize=2)


def write_tar(path, texts=True):
    with tarfile.open(path, "w") as archive:
        for n, row in enumerate(ROWS):
            members = {"json": json.dumps(row if not texts else {**row, "text": "no"}).encode()}
            if texts:
                members["txt"] = row["text"].encode()
            for ending, data in members.items():
                about = tarfile.TarInfo(f"shard/{n:04}.{ending}")
                about.size = len(data)
                archive.addfile(about, io.BytesIO(data))


WRITERS = {
    "a.txt": write_text,
    "a.jsonl": write_jsonl,
    "a.jsonl.gz": write_gzip,
    "a.parquet": write_parquet,
    "stream.arrow": write_stream,
    "file.arrow": write_arrow,
    "a.tar": write_tar,
    "json.tar": lambda path: write_tar(path, texts=False),
}


@pytest.mark.parametrize("name", WRITERS)
def test_any_kind_of_file_gives_its_documents_and_their_labels(name, words, tmp_path):
    WRITERS[name](tmp_path / name)
    store = open_store(tmp_path / "store")
    labels = () if name.endswith(".txt") else ("book", "page")
    corpus = Corpus(str(tmp_path / name), labels=labels)
    tokens = corpus.tokens(words, store)
    assert [ids.tolist() for ids in tokens] == [words.encode(text).ids for text in TEXTS]
    about = corpus.about(words, store)
    assert about["document"].values.tolist() == [0, 1, 2, 3, 4]
    if labels:
        assert about["book"].values.tolist() == [row["book"] for row in ROWS]
        assert about["page"].values.tolist() == [0, 1, 2, 3, 4]


def test_folders_and_globs_are_all_their_files_in_order(words, tmp_path):
    for name in ("b.jsonl", "a.txt", "deep/c.parquet", ".hidden/d.txt", "deep/notes.pdf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (
            write_parquet
            if name.endswith("t") and "c." in name
            else write_jsonl
            if "jsonl" in name
            else write_text
        )(tmp_path / name)
    assert [path.name for path in Corpus(str(tmp_path)).files] == ["a.txt", "b.jsonl", "c.parquet"]
    assert [path.name for path in Corpus(str(tmp_path / "*.[jt]*")).files] == ["a.txt", "b.jsonl"]
    for missing in ("absent.txt", "*.csv", "deep/nothing"):
        with pytest.raises(PromptError, match="expected files of documents"):
            Corpus(str(tmp_path / missing)).files  # noqa: B018


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=12), max_size=8),
    st.integers(1, 6),
    st.lists(st.just(77), max_size=2),
    st.booleans(),
    st.sampled_from([1, 5, 1000]),
)
@settings(max_examples=120, deadline=None)
def test_contexts_hold_every_token_once_and_in_order(documents, room, before, pack, row):
    framing = Framing(tuple(before), (), room + len(before), (99,) if pack else None)
    with mock.patch.object(contexts, "ROW", row):
        found = list(framed_prompts(documents, framing))
    bodies = [ids[len(before) :].tolist() for ids, _ in found]
    flat = [each for body in bodies for each in body]
    expected = [[*document, 99] if pack else document for document in documents if document]
    assert flat == [each for document in expected for each in document]
    assert all(ids[: len(before)].tolist() == before for ids, _ in found)
    assert all(0 < len(body) <= room for body in bodies)
    if pack:
        assert all(len(body) == room for body in bodies[:-1])
    starts = np.cumsum([0, *(len(document) + pack if document else 0 for document in documents)])
    at = np.cumsum([0, *map(len, bodies)])[:-1]
    owners = [int(np.searchsorted(starts, place, side="right")) - 1 for place in at]
    assert [number for _, number in found] == owners


def test_what_is_kept_follows_from_content_and_not_from_names(words, tmp_path):
    write_jsonl(tmp_path / "a.jsonl")
    store = open_store(tmp_path / "store")
    corpus = Corpus(str(tmp_path / "a.jsonl"), context=8, pack=True)
    first = corpus.tokens(words, store)
    keys = sorted(store.files.list("keys"))
    (tmp_path / "a.jsonl").rename(tmp_path / "b.jsonl")
    assert Corpus(str(tmp_path / "b.jsonl"), context=8, pack=True).tokens(words, store) == first
    assert sorted(store.files.list("keys")) == keys
    (tmp_path / "b.jsonl").write_text('"others"\n')
    changed = Corpus(str(tmp_path / "b.jsonl"), context=8, pack=True).tokens(words, store)
    assert changed != first
    assert Corpus(str(tmp_path / "b.jsonl"), context=9, pack=True).nodes(words)[0].key(store) not in keys


def test_a_share_is_drawn_by_seed_and_a_document_does_not_depend_on_the_rest(words, tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(f"word {n}" for n in range(400)))
    store = open_store(tmp_path / "store")

    def drawn(**given):
        corpus = Corpus(str(tmp_path / "a.txt"), **given)
        return [words.decode(ids.tolist(), keep_special=False) for ids in corpus.tokens(words, store)]

    some, more = drawn(share=0.25, seed=1), drawn(share=0.5, seed=1)
    assert 60 < len(some) < 140
    assert set(some) < set(more)
    assert drawn(share=0.25, seed=2) != some


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_corpus_that_has_grown_costs_what_is_new(words, tmp_path, monkeypatch, dtype):
    monkeypatch.setattr("mizarr.stages.forward.capture.capture.WORTH_A_LOOK", 1)
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(["the", "best", "of", "times", "worst"], 12)) for _ in range(120)]
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "1.txt").write_text("\n".join(lines[:100]))
    store = open_store(tmp_path / "store")
    corpus = Corpus(str(tmp_path / "corpus"), context=16, pack=True)
    asked = {"store": store, "progress": False, "segment_tokens": 128, "storage_dtype": dtype}
    before = capture("specimen", corpus, HOOKS, **asked)
    (tmp_path / "corpus" / "2.txt").write_text("\n".join(lines[100:]))
    seen = []
    real = mizarr_harvest().fill
    monkeypatch.setattr(mizarr_harvest(), "fill", lambda *given: (seen.append(given[2]), real(*given)))
    after = capture("specimen", corpus, HOOKS, **asked)
    whole = before.sizes["token"] // 128
    assert seen == list(range(whole, -(-after.sizes["token"] // 128)))
    fresh = capture("specimen", corpus, HOOKS, **{**asked, "store": open_store(tmp_path / "fresh")})
    np.testing.assert_array_equal(after["resid_post"].values, fresh["resid_post"].values)
    assert store.verify() == []
    # The old run may go; what the new one took over stays.
    np.testing.assert_array_equal(
        before["resid_post"].values, after["resid_post"].values[:, : before.sizes["token"]]
    )
    assert after["document"].dims == ("prompt_id",)


def mizarr_harvest():
    from mizarr.stages.forward.capture import harvest

    return harvest


def test_a_disk_without_room_is_told_before_anything_is_computed(tmp_path, monkeypatch):
    from mizarr.store.files import LocalFolder

    monkeypatch.setattr(LocalFolder, "free_bytes", property(lambda self: 1000))
    store = open_store(tmp_path / "store")
    with pytest.raises(StoreFull, match="bytes of free disk space"):
        capture("specimen", ["a prompt"], HOOKS, store=store, progress=False)
    assert list(store.entries()) == []


def test_so_is_one_without_room_for_what_a_corpus_gained(tmp_path, monkeypatch):
    """What is taken over takes no room."""
    from mizarr.store.files import LocalFolder

    monkeypatch.setattr("mizarr.stages.forward.capture.capture.WORTH_A_LOOK", 1)
    store = open_store(tmp_path / "store", durability="process")
    asked = {"store": store, "progress": False, "segment_tokens": 32}
    prompts = [[n % 50] * 16 for n in range(40)]
    capture("specimen", prompts[:8], HOOKS, **asked)
    of_token = 6 * 192 * 4
    monkeypatch.setattr(LocalFolder, "free_bytes", property(lambda self: 30 * 16 * of_token))
    with pytest.raises(StoreFull, match=f"expected {32 * 16 * of_token} bytes of free disk space"):
        capture("specimen", prompts, HOOKS, **asked)
    assert capture("specimen", prompts[:32], HOOKS, **asked).sizes["token"] == 32 * 16


def test_an_estimate_is_near_and_reads_little(words, tmp_path):
    rng = np.random.default_rng(0)
    for n in range(20):
        lines = [" ".join(rng.choice(TEXTS, 4)) for _ in range(2000)]
        (tmp_path / f"{n:02}.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    corpus = Corpus(str(tmp_path), context=32, pack=True)
    size = estimated_size(corpus, words)
    exact = corpus.tokens(words, open_store(tmp_path / "store"))
    assert size.tokens == pytest.approx(exact.n_tokens, rel=0.05)
    assert size.prompts == pytest.approx(exact.n_prompts, rel=0.05)
    assert size.files == 20
    half = estimated_size(Corpus(str(tmp_path / "*.jsonl"), context=32, pack=True, share=0.5), words)
    assert half.tokens == pytest.approx(size.tokens / 2, rel=0.01)


def test_the_command_streams_estimates_and_captures(tmp_path, capsys, monkeypatch):
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "a.jsonl")
    asked = [
        "capture",
        "specimen",
        str(tmp_path / "data"),
        "--hooks",
        HOOKS,
        "--store",
        str(tmp_path / "store"),
    ]
    options = ["--context", "16", "--pack", "--label", "book", "--json", "--quiet"]
    assert mizarr_command([*asked, *options, "--dry-run"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["is_estimated"]
    assert not (tmp_path / "store").exists()
    assert mizarr_command([*asked, *options]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["tokens"] == pytest.approx(told["tokens"], rel=0.2)
    assert mizarr_command([*asked, *options, "--dry-run"]) == 0
    assert "is_estimated" not in json.loads(capsys.readouterr().out)
    assert mizarr_command([*asked, "--dry-run", "--share", "0.5"]) == 0
    assert "estimated from" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["txt", "jsonl"])
def test_a_dry_run_of_a_large_file_of_prompts_looks_at_a_sample(form, tmp_path, capsys, monkeypatch, words):
    """Whose lines get longer from its beginning to its end."""
    lines = [" ".join(TEXTS[(n + k) % len(TEXTS)] for k in range(1 + n // 1000)) for n in range(9000)]
    file, store = tmp_path / f"prompts.{form}", str(tmp_path / "store")
    file.write_text("\n".join(json.dumps({"text": line}) if form == "jsonl" else line for line in lines))
    assert file.stat().st_size > 2 * LOOK
    monkeypatch.setattr("mizarr.workflows.cli.prompts.COUNTED", 1 << 18)
    asked = ["capture", "specimen", str(file), "--hooks", HOOKS, "--store", store, "--dry-run"]
    assert mizarr_command([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["is_estimated"] and told["looked_at_bytes"] <= 2 * LOOK
    assert told["seconds"] > 0
    tokens = sum(len(words.encode(line).ids) for line in lines)
    assert told["tokens"] == pytest.approx(tokens, rel=0.1)
    assert told["prompts"] == pytest.approx(len(lines), rel=0.1)
    assert mizarr_command([*asked, "--json", "--exact"]) == 0
    (step,) = json.loads(capsys.readouterr().out)["steps"]
    assert step["bytes_written"] == pytest.approx(told["bytes_written"], rel=0.1)
    assert not (tmp_path / "store").exists()
    assert mizarr_command([*asked[:-1], "--exact"]) == 2
    assert "--dry-run" in capsys.readouterr().err


def test_texts_are_read_only_for_a_run_that_is_not_stored(tmp_path, monkeypatch):
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "a.txt").write_text("the cat sat\non the mat\n")
    store, corpus = open_store(tmp_path / "store", durability="process"), Corpus(str(folder))
    first = capture("specimen", corpus, HOOKS, store=store, progress=False)
    assert first["text"].values.tolist() == ["the cat sat", "on the mat"]
    monkeypatch.setattr(Corpus, "with_texts", lambda *_: pytest.fail("tokenised once more"))
    again = capture("specimen", corpus, HOOKS, store=store, progress=False)
    assert again["text"].values.tolist() == first["text"].values.tolist()
    command = ["capture", "specimen", str(folder), "--hooks", HOOKS, "--store", str(tmp_path / "store")]
    assert mizarr_command([*command, "--quiet"]) == 0


def test_what_cannot_be_sampled_is_counted(tmp_path, capsys, monkeypatch):
    file = tmp_path / "prompts.txt"
    file.write_text("the cat sat\n" * 10)
    monkeypatch.setattr("mizarr.workflows.cli.prompts.COUNTED", 1 << 18)
    asked = ["capture", "specimen", str(file), "--hooks", HOOKS, "--store", str(tmp_path / "store")]
    assert mizarr_command([*asked, "--dry-run", "--json"]) == 0
    assert "is_estimated" not in json.loads(capsys.readouterr().out)
    corpus = [*asked, "--context", "8", "--pack", "--dry-run", "--json"]
    assert mizarr_command(corpus) == 0
    assert json.loads(capsys.readouterr().out)["is_estimated"]
    assert mizarr_command([*corpus, "--exact"]) == 0
    assert "is_estimated" not in json.loads(capsys.readouterr().out)
    assert not (tmp_path / "store").exists()


BAD = {
    "not.jsonl": b"{text: 1}",
    "no.parquet": b"PAR1 no",
    "no.arrow": b"ARROW1 no",
    "no.tar": b"\0" * 100 + b"x" * 500,
    "no.jsonl.gz": b"\x1f\x8b\x08no",
    "latin.txt": "café".encode("latin-1"),
    "mixed.jsonl": b'{"text": "a"}\n{"book": "b"}',
    "deep.jsonl": b"[" * 100_000,
    "digits.jsonl": b'{"ids": [' + b"9" * 5000 + b"]}",
    "large.jsonl": b'{"ids": [2147483648]}',
    "negative.jsonl": b'{"ids": [4, -1]}',
    "half.jsonl": b'{"text": "a \\ud800 b"}',
    "documents.json": b'{"text": "a"}',
    "documents.CSV": b"text\na\n",
}


def test_ids_of_a_large_corpus_lie_in_a_file_that_is_gone_with_them(words, tmp_path, monkeypatch):
    """The same tokens, read in blocks that end nowhere in particular; in memory where no disk has room."""
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("the cat sat on the mat\n" * (number + 2))
    store = open_store(tmp_path / "store", durability="process")
    corpus = Corpus(str(tmp_path / "*.txt"))
    expected = corpus.tokens(words, store)
    monkeypatch.setattr(corpora, "LARGE", 16)
    monkeypatch.setattr(corpora, "AT_ONCE", 5)
    found = corpus.tokens(words, store)
    assert found == expected
    assert found.digest == expected.digest
    assert is_mapped(found.ids)
    assert not is_mapped(expected.ids)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(28, "no space left")))
    assert not is_mapped(corpus.tokens(words, store).ids)


def is_mapped(ids):
    """Whether an array is a view of a mapped file."""
    while isinstance(ids, np.ndarray):
        ids = ids.base
    return isinstance(ids, mmap.mmap)


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_corpus_is_one_line_and_nothing_is_written(name, words, tmp_path):
    (tmp_path / name).write_bytes(BAD[name])
    store = open_store(tmp_path / "store")
    with pytest.raises(MizarrError) as said:
        Corpus(str(tmp_path / name)).tokens(words, store)
    assert name in str(said.value)
    assert "\n" not in str(said.value)
    assert list(store.files.list("keys")) == []


def test_what_is_no_part_of_a_text_is_left_out_of_it(words, tmp_path):
    """A mark at the beginning of a file, and capitals in its name."""
    plain = [words.encode(text).ids for text in ("hello there", "you")]
    rows = b'{"text": "hello there"}\n{"text": "you"}'
    for name, data in (
        ("marked.txt", b"\xef\xbb\xbfhello there\r\nyou\r\n"),
        ("marked.jsonl", b"\xef\xbb\xbf" + rows),
        ("CAPITALS.JSONL", rows),
        ("CAPITALS.TXT.GZ", gzip.compress(b"hello there\nyou")),
    ):
        (tmp_path / name).write_bytes(data)
        tokens = Corpus(str(tmp_path / name)).tokens(words, open_store(tmp_path / "store"))
        assert [ids.tolist() for ids in tokens] == plain, name


@pytest.mark.parametrize(
    ("each", "expected"),
    [
        ([[1], ["x"]], ["1", "x"]),
        ([[], ["x"]], ["x"]),
        ([["x"], [], [None]], ["x", "null"]),
        ([[True], [3]], ["true", "3"]),
        ([[1], [2.5]], [1.0, 2.5]),
        ([[2**60 + 1, 2.5]], [str(2**60 + 1), "2.5"]),
        ([[2**60 + 1], [2.5]], [str(2**60 + 1), "2.5"]),
        ([[2**70]], [str(2**70)]),
    ],
)
def test_labels_of_files_that_differ_in_kind_are_joined_without_loss(words, tmp_path, each, expected):
    for number, labels in enumerate(each):
        lines = [json.dumps({"text": "a", "l": label}) for label in labels]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines))
    about = Corpus(str(tmp_path), labels=["l"]).about(words, open_store(tmp_path / "store"))
    assert about["l"].values.tolist() == expected


def test_a_file_that_grows_keeps_what_was_drawn_of_it(words, tmp_path):
    """So that what it gains is all there is to compute; and files of one document are drawn one by one."""
    path, store = tmp_path / "a.txt", open_store(tmp_path / "store")
    lines = [f"word {n}" for n in range(300)]
    path.write_text("\n".join(lines[:200]))
    before = Corpus(str(path), share=0.3, seed=5).tokens(words, store)
    path.write_text("\n".join(lines))
    after = Corpus(str(path), share=0.3, seed=5).tokens(words, store)
    assert after.shared_start(before) == before.n_tokens < after.n_tokens
    (tmp_path / "each").mkdir()
    for line in lines[:120]:
        (tmp_path / "each" / f"{line}.txt").write_text(line)
    assert 15 < Corpus(str(tmp_path / "each"), share=0.3, seed=5).tokens(words, store).n_prompts < 60


def test_documents_are_bounded_however_little_they_unpack_from(words, tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "LARGEST", 1000)
    store = open_store(tmp_path / "store")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a" * 100_000))
    (tmp_path / "a.jsonl").write_bytes(b'"' + b"a" * 2000 + b'"')
    for name, whole in (("a.txt.gz", False), ("a.txt.gz", True), ("a.jsonl", False)):
        with pytest.raises(PromptError, match="at most 1000 characters"):
            Corpus(str(tmp_path / name), whole_files=whole).tokens(words, store)


def test_members_of_an_archive_are_those_of_a_sample_once(words, tmp_path):
    def write(*members):
        with tarfile.open(tmp_path / "a.tar", "w") as archive:
            for name, data in members:
                about = tarfile.TarInfo(name)
                about.size = len(data)
                archive.addfile(about, io.BytesIO(data))

    corpus, store = Corpus(str(tmp_path / "a.tar")), open_store(tmp_path / "store")
    write(("._1.txt", b"\0"), ("1.jpg", b"\xff"), ("1.txt", b"a"), ("../2.txt", b"b"))
    assert [ids.tolist() for ids in corpus.tokens(words, store)] == [words.encode(text).ids for text in "ab"]
    write(("1.txt", b"a"), ("1.txt", b"b"))
    with pytest.raises(PromptError, match=r"1\.txt again"):
        corpus.tokens(words, store)
    pa.parquet.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(PromptError, match="one column 'text'"):
        Corpus(str(tmp_path / "a.parquet")).tokens(words, store)


def test_labels_have_names_that_store_and_capture_leave_them(words, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "resid_post": 1, "token_id": 3}')
    (tmp_path / "a.txt").write_text("a")
    path, store = str(tmp_path / "a.jsonl"), open_store(tmp_path / "store")
    for name in ("../../evil", "a/b", "..", "", "zarr.json", "token_id", "row_size"):
        with pytest.raises(PromptError, match="labels= with names that can be stored"):
            Corpus(path, labels=[name])
    with pytest.raises(PromptError, match="other names than captures and their axes, found 'resid_post'"):
        capture("specimen", Corpus(path, labels=["resid_post"]), HOOKS, store=store, progress=False)
    with pytest.raises(PromptError, match="a column 'l', found the text file"):
        Corpus(str(tmp_path / "a.txt"), labels=["l"]).tokens(words, store)


def test_settings_that_make_no_sense_are_refused(words, tmp_path):
    write_jsonl(tmp_path / "a.jsonl")
    path, store = str(tmp_path / "a.jsonl"), open_store(tmp_path / "store")
    for wrong, says in (
        ({"pack": True}, "context"),
        ({"context": 0}, "at least 1"),
        ({"share": 0.0}, "share"),
        ({"labels": ["document"]}, "a name that mizarr uses"),
    ):
        with pytest.raises(PromptError, match=says):
            Corpus(path, **wrong)
    with pytest.raises(PromptError, match="'author'"):
        Corpus(path, labels=["author"]).tokens(words, store)
    with pytest.raises(TokenizerError, match="token ids"):
        Corpus(path).tokens(None, store)


# -- labels stay with a run


def test_a_run_keeps_labels_and_texts_and_is_selected_by_them(tmp_path):
    """By whichever door it was captured, it opens with them anywhere; a later capture's labels count."""
    rows = [("The film was good", "pos", 1), ("The film was bad", "neg", 2), ("A film", "pos", 3)]
    file = tmp_path / "reviews.jsonl"
    file.write_text(
        "".join(json.dumps(dict(zip(("text", "label", "stars"), row, strict=True))) + "\n" for row in rows)
    )
    hook = "blocks.2.hook_resid_post"
    made = {}
    for door in ("cli", "python"):
        store = open_store(tmp_path / door, durability="process")
        if door == "cli":
            labels = ["--label", "label", "--label", "stars"]
            asked = ["capture", "specimen", str(file), *labels, "--hooks", hook]
            assert mizarr_command([*asked, "--store", str(tmp_path / door), "--quiet"]) == 0
        else:
            corpus = Corpus(str(file), labels=["label", "stars"])
            capture("specimen", corpus, hooks=hook, store=store, progress=False)
        (entry,) = store.entries()
        found = xr.open_dataset(tmp_path / door / entry.path, engine="mizarr")
        made[door] = found
        for ds in (found, entry.open()):
            assert ds["text"].values.tolist() == [text for text, _, _ in rows]
            assert ds["label"].values.tolist() == ["pos", "neg", "pos"]
            assert ds.mi.sel(label="pos")["prompt_id"].values.tolist() == [0, 2]
            assert ds.mi.sel(label=["pos", "neg"], stars=[2, 3])["prompt_id"].values.tolist() == [1, 2]
            assert ds.mi.sel(label="pos", prompt=[1, 2])["prompt_id"].values.tolist() == [2]
            film = ds.mi.sel(label="neg", chars="film")
            assert "".join(film["token_string"].values.tolist()) == " film"
        assert store.verify() == []
        assert [
            note for note in store.provenance(entry.key("resid_post", 2).digest) if "columns" in note
        ] == []
    xr.testing.assert_identical(made["cli"].load(), made["python"].load())
    store = open_store(tmp_path / "python")
    file.write_text("".join(json.dumps({"text": t, "label": "x"}) + "\n" for t, _, _ in rows))
    capture("specimen", Corpus(str(file), labels="label"), hooks=hook, store=store, progress=False)
    (entry,) = store.entries()
    assert entry.open()["label"].values.tolist() == ["x"] * 3


def test_labels_that_are_not_there_are_refused_in_a_line(tmp_path):
    file = tmp_path / "reviews.jsonl"
    file.write_text('{"text": "The film", "label": "pos"}\n')
    store = open_store(tmp_path / "store", durability="process")
    corpus = Corpus(str(file), labels="label")
    ds = capture("specimen", corpus, hooks="blocks.0.hook_resid_post", store=store, progress=False)
    for said, told in (
        ({"label": "neg"}, "no prompt has label='neg'; values of label are 'pos'"),
        ({"lable": "pos"}, "selects by document, label, prompt.* found 'lable'"),
        ({"token": "film"}, "no token 'film'.* by chars='film'"),
    ):
        with pytest.raises(MizarrError, match=told):
            ds.mi.sel(**said)
