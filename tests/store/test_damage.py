"""One flipped bit anywhere in a store: what is read is what was written, or an error of mizarr says so.

Left out is `index.sqlite`, which decides no number. The empty groups in which bookkeeping
lies, for Zarr's sake, are flipped too; nothing of ours reads them.
"""

import random
import re
import shutil
from functools import partial

import numpy as np
import pytest
import xarray as xr
import zarr

import mizarr.store.runs.bfloat16  # noqa: F401 - teaches zarr the dtype
from mizarr.store import PackedTokens, ResultKey, RunKey, open_store
from mizarr.store.content import content_of
from mizarr.store.errors import CorruptEntry, MizarrError
from mizarr.store.provenance import note_names
from mizarr.store.runs import shards
from mizarr.store.runs.entries import ArraySpec
from mizarr.store.runs.shards import DTYPES
from mizarr.store.sealed import unsealed

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [3, 3, 1, 2]]
TEXTS = ["a b c", "dé f", "", "x"]
TOKENS = PackedTokens.from_lists(PROMPTS, TEXTS, [[(i, i + 1) for i in range(len(p))] for p in PROMPTS])
WORDS = [f" w{i}" for i in range(10)]
STORED = ("float32", "float16", "bfloat16")
RESULT = ResultKey("lens", 1, {"k": 2}, {})
SLOW_FLIPS = 1000
FOR_OTHERS = ("layer", "prompt", "position", "row_start", "pair_start")
"""Labels that are spelled out for readers without mizarr, which computes them."""


def arrays(dtype):
    axes = ("layer", "token", "hidden"), {"hidden": 2}
    pairs = ("layer", "pair", "head"), {"head": 2}
    return [
        ArraySpec("resid_post", "blocks.{}.hook_resid_post", *axes, dtype, 2, "residual stream", "1"),
        ArraySpec("pattern", "blocks.{}.attn.hook_pattern", *pairs, dtype, 2, "attention pattern", "1"),
        ArraySpec("embed", "hook_embed", ("token", "hidden"), {"hidden": 2}, dtype, None, "embedding", "1"),
    ]


CELLS = [("resid_post", 0), ("resid_post", 1), ("pattern", 1), ("embed", None)]


def key(dtype):
    return RunKey(f"model of {dtype}", TOKENS.digest, "none")


def labelled():
    data = {
        "x": (("layer", "a"), np.arange(12.0).reshape(2, 6), {"units": "nats"}),
        "zeros": ("a", np.zeros(6, np.int64)),
        "name": ("a", list("abcdef")),
    }
    return xr.Dataset(data, {"layer": [3, 5], "told": ("a", np.arange(6) > 2)}, {"unit": "1"})


def compute(store):
    """Capture and compute what is missing, as a workflow does."""
    for dtype in STORED:
        attrs = {"tokenizer": "sha256:words"}
        entry = store.create_entry(key(dtype), TOKENS, arrays(dtype), segment_tokens=5, attrs=attrs)
        for n, cells in entry.missing(CELLS).items():
            entry.write_segment(n, {cell: rows(entry, cell, n, dtype) for cell in cells})
        entry.publish(CELLS)
    if store.vocabulary("sha256:words") is None:
        store.put_vocabulary("sha256:words", WORDS)
    if store.lookup(RESULT) is None:
        store.put_result(RESULT, labelled())
    if "figure" not in store.pins():
        store.pin("figure", RESULT)


def rows(entry, cell, n, dtype):
    shape = (entry.rows(cell[0], n), *entry.spec(cell[0]).tail)
    return np.random.default_rng([n, *repr(cell).encode()]).standard_normal(shape).astype(DTYPES[dtype])


def questions(store):
    """Everything one can ask of the store: name -> a function that answers in comparable values."""
    asked = {
        "keys": lambda: sorted((r.key, r.kind, r.data, r.content, r.label) for r in store.records()),
        "pins": store.pins,
        "notes": lambda: [store.provenance(record) for record in store.records()],
        "vocabulary": lambda: store.vocabulary("sha256:words"),
        "runs": lambda: sorted(entry.digest for entry in store.entries()),
        "result": lambda: content_of(store.open_result(RESULT)),
        "result, by prefix": lambda: content_of(store[RESULT.digest[:12]]),
    }
    for dtype in STORED:
        asked |= {f"{dtype}: {name}": answer for name, answer in of_run(store, dtype).items()}
    return asked


def of_run(store, dtype):
    def entry():
        return store.entry(key(dtype), dtype)

    def dataset():
        return entry().open(chunks=None)

    def variable(name):
        found = dataset()[name]
        layers = next((c.values.tolist() for d, c in found.coords.items() if str(d).startswith("layer")), [])
        return found.dims, np.asarray(found.values).tobytes(), plain(found.attrs), layers

    def labels():
        ds = dataset()
        told = {name: (c.dims, c.values.tolist(), plain(c.attrs)) for name, c in ds.coords.items()}
        return told, {name: value for name, value in ds.attrs.items() if name != "source"}

    names = [spec.variable for spec in arrays(dtype)]
    return {
        **{name: partial(variable, name) for name in names},
        "labels": labels,
        "strings": lambda: dataset().mi.prompt(1)["token_string"].values.tolist(),  # noqa: PLW0108 - the run as it is then
        "specs": lambda: [entry().spec(name) for name in names],
        "missing": lambda: entry().missing(CELLS),
        "contents": lambda: [entry().content(*cell) for cell in CELLS],
        "digests": lambda: [entry().segment_digest(*cell, 1) for cell in CELLS],
        "a shard": lambda: np.asarray(entry().shard("resid_post", 1, 1)).tobytes(),
        "chunked": lambda: entry().open(chunks="segment")["resid_post"].values.tobytes(),  # noqa: PLW0108
    }


def plain(attrs):
    return sorted((str(name), str(value)) for name, value in attrs.items())


def answers(path):
    """What is answered to each question now: the values, or MizarrError."""
    try:
        asked = questions(open_store(path, mode="r"))
    except MizarrError as error:
        return {"store": error}
    found = {}
    for name, answer in asked.items():
        try:
            found[name] = answer()
        except MizarrError as error:
            found[name] = error
    return found


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A store of three runs in several segments and many chunks, a result, a vocabulary and a pin."""
    path = tmp_path_factory.mktemp("sound") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "CHUNK_BYTES", 16)
        compute(open_store(path, durability="process"))
    return path, answers(path)


@pytest.fixture
def copy(sound, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "CHUNK_BYTES", 16)
    shutil.copytree(sound[0], tmp_path / "store")
    return tmp_path / "store"


def files_of(path):
    found = (str(file.relative_to(path)) for file in sorted(path.rglob("*")) if file.is_file())
    return [name for name in found if not name.startswith("index.sqlite")]


def kinds(path, rng):
    """One file of each kind: of names that differ in more than digests and numbers."""
    names = files_of(path)
    rng.shuffle(names)
    told = (re.sub(r"/provenance/.*", "/provenance/#", name) for name in names)
    told = (re.sub(r"[0-9a-f]{8,}|\d+", "#", name) for name in told)
    return dict(sorted(zip(told, names, strict=True)))


def flip(file, rng):
    raw = bytearray(file.read_bytes())
    at = rng.randrange(len(raw))
    raw[at] ^= 1 << rng.randrange(8)
    file.write_bytes(raw)
    return at


def check(path, name, rng, expected):
    """Flip a bit of one file and ask everything; returns whether anything noticed, and mends the file."""
    before = (path / name).read_bytes()
    at = flip(path / name, rng)
    found = answers(path)
    wrong = [
        asked for asked, answer in found.items()
        if not isinstance(answer, MizarrError) and answer != expected.get(asked)
    ]  # fmt: skip
    assert not wrong, f"byte {at} of {name} was flipped, and {wrong} answered something else"
    array = path / name.split("/c/")[0]
    if "/c/" in name:
        refused = [answer for answer in found.values() if isinstance(answer, MizarrError)]
        assert array.name in FOR_OTHERS or "verify --quarantine" in str(refused[0])
        with pytest.raises(Exception):  # noqa: B017 - zarr raises ValueError and others
            read_plainly(array)
    (path / name).write_bytes(before)


def read_plainly(array):
    zarr.open_array(array, mode="r")[...]


def test_a_sound_store_answers_everything(sound):
    path, expected = sound
    assert not [answer for answer in expected.values() if isinstance(answer, MizarrError)]
    assert expected["float32: missing"] == {} and len(expected) > 30
    assert len(list((path / "data").glob("*/*/resid_post/c/*/*/0"))) == len(STORED) * 2 * 3
    for file in (path / "data").glob("*/*/*/zarr.json"):
        if b'"array"' in file.read_bytes():
            read_plainly(file.parent)


def test_a_flipped_bit_is_never_read_as_something_else(copy, sound):
    rng = random.Random(0)
    found = kinds(copy, rng)
    assert len(found) > 40
    for name in rng.sample(list(found.values()), 12):
        check(copy, name, rng, sound[1])


def test_no_flipped_bit_of_a_note_takes_its_check_for_none(sound):
    store = open_store(sound[0], mode="r")
    (name, *_) = note_names(store.files, store.lookup(RESULT).data)
    whole = store.files.get(name)
    assert unsealed(name, whole)["at"]
    for at in range(whole.rindex(b'"check"') - 4, len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << bit
            with pytest.raises(CorruptEntry):
                unsealed(name, bytes(flipped))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_flipped_bit_of_a_thousand_is_read_as_something_else(copy, sound):
    rng = random.Random(1)
    names = files_of(copy)
    some = list(kinds(copy, rng).values())
    for name in [*some, *rng.choices(names, k=SLOW_FLIPS)]:
        check(copy, name, rng, sound[1])


def mend(path, name, rng, expected):
    """Flip a bit of one file, quarantine what `verify` finds, compute again: all must be as it was."""
    before = (path / name).read_bytes()
    flip(path / name, rng)
    if name == "store.json":  # said when the store is opened, with the text to restore
        (path / name).write_bytes(before)
        return
    store = open_store(path, durability="process")
    for damage in store.verify():
        store.quarantine(damage)
    compute(store)
    assert store.verify() == [], name
    found = answers(path)
    # A result that was computed again lies in another folder.
    found["keys"] = [record[3] for record in found["keys"]]
    expected = expected | {"keys": [record[3] for record in expected["keys"]]}
    del found["notes"], expected["notes"]  # one that is damaged is gone, and a second computation adds one
    assert found == expected, name


def test_what_is_damaged_is_set_aside_and_made_again_to_the_bit(copy, sound):
    rng = random.Random(2)
    for kind in rng.sample(list(kinds(copy, rng)), 4):
        mend(copy, kinds(copy, rng)[kind], rng, sound[1])


def test_a_folder_in_the_place_of_a_file_of_an_array_is_an_error_of_ours(copy, sound):
    for name in kinds(copy, random.Random(4)).values():
        if "/c/" not in name and not name.endswith("zarr.json"):
            continue
        before = (copy / name).read_bytes()
        (copy / name).unlink()
        (copy / name).mkdir()
        found = answers(copy)
        wrong = [
            asked for asked, answer in found.items()
            if not isinstance(answer, MizarrError) and answer != sound[1].get(asked)
        ]  # fmt: skip
        assert not wrong, name
        (copy / name).rmdir()
        (copy / name).write_bytes(before)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_whatever_kind_of_file_is_damaged_is_made_again_to_the_bit(copy, sound):
    rng = random.Random(3)
    for kind in kinds(copy, rng):
        mend(copy, kinds(copy, rng)[kind], rng, sound[1])
