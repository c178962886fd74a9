"""Digests: one spelling per value, the same everywhere; what has none is refused."""

import enum
import hashlib
import json
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st

from mizarr.store.digest import array_digest, canonical_json, content_digest, digest, file_digest

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("abcé", max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


class Colour(enum.Enum):
    RED = 1


class Word(enum.StrEnum):
    RIGHT = "padded-right"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": 1, "a": 2}, '{"a":2,"b":1}'),
        (0.5, '"0x1.0000000000000p-1"'),
        (-0.0, '"0x0.0p+0"'),
        (0.1, '"0x1.999999999999ap-4"'),
        (np.float32(0.5), '"0x1.0000000000000p-1"'),
        (np.int64(3), "3"),
        (np.bool_(True), "true"),
        (2**53, "9007199254740992"),
        ((1, [2]), "[1,[2]]"),
        ({3, 1, 2}, "[1,2,3]"),
        (frozenset({"b", "a"}), '["a","b"]'),
        (Colour.RED, '"RED"'),
        (Word.RIGHT, '"RIGHT"'),
        (np.dtype(">f4"), '"float32"'),
        (np.dtype(ml_dtypes.bfloat16), '"bfloat16"'),
        ("é\n", '"é\\n"'),
        (None, "null"),
    ],
)
def test_canonical_spelling(value, text):
    assert canonical_json(value) == text


def test_golden_digests_never_change():
    # Written down in the format's first version: a change here orphans every store there is.
    assert digest("run", {"model": "m", "layers": [0, 1]}, 0.1) == (
        "7f2d672461299ecd8ef051c73631e588b629fc4b20d77fa25f1748f35f7552ba"
    )
    assert array_digest(np.arange(6, dtype="<i4").reshape(2, 3)) == (
        "sha256:77a91f875d490d9b14defe13ffbf3a46544df952fd2a3a37fe9242a336e03368"
    )
    assert content_digest(b"mizarr") == f"sha256:{hashlib.sha256(b'mizarr').hexdigest()}"


@given(st.dictionaries(st.text(max_size=3), PLAIN, max_size=5))
def test_the_order_of_names_does_not_matter(value):
    turned = dict(reversed(value.items()))
    assert digest("any", value) == digest("any", turned)


@given(PLAIN)
def test_canonical_text_is_json_and_stable(value):
    text = canonical_json(value)
    assert canonical_json(json.loads(text)) == text  # floats have become strings, and those stay


@given(PLAIN, PLAIN)
def test_values_that_differ_digest_apart(one, other):
    same = canonical_json(one) == canonical_json(other)
    assert (digest("any", one) == digest("any", other)) == same


def test_another_kind_digests_apart():
    assert digest("run", 1) != digest("result", 1)
    assert digest("run", "a", "b") != digest("run", ["a", "b"]) != digest("run", "ab")


def test_numbers_of_another_type_are_other_values():
    assert len({digest("any", value) for value in (1, 1.0, True, "1")}) == 4


@pytest.mark.parametrize("seed", ["1", "2"])
def test_digests_are_the_same_in_another_process(seed):
    value = {"names": sorted("abc"), "set": {"x", "y", "z"}, "rate": 0.3}
    code = (
        "from mizarr.store.digest import digest;"
        "print(digest('any', {'rate': 0.3, 'set': {'z', 'y', 'x'}, 'names': ['a', 'b', 'c']}))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == digest("any", value)


@pytest.mark.parametrize(
    "value", [object(), b"bytes", 1j, lambda: 0, np.zeros(2), {1: "a"}, [{"a": object()}], range(3)]
)
def test_what_has_no_spelling_is_refused(value):
    with pytest.raises(TypeError, match="a key can"):
        canonical_json(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("-inf"), 2**53 + 1, -(2**60)])
def test_numbers_that_json_cannot_keep_are_refused(value):
    with pytest.raises(ValueError, match="a key can"):
        canonical_json({"a": [value]})


def test_array_digest_does_not_depend_on_layout_or_byte_order():
    array = np.arange(12, dtype="<f8").reshape(3, 4)
    for same in (array.astype(">f8"), np.asfortranarray(array), np.repeat(array, 2, 0)[::2]):
        assert array_digest(same) == array_digest(array)


def test_array_digest_depends_on_dtype_shape_and_every_bit():
    array = np.zeros((2, 6), "f4")
    flipped = array.copy()
    flipped[1, 5] = -0.0
    others = [
        array.reshape(3, 4),
        array.astype("f8"),
        array.view("i4"),
        flipped,
        array[0],
        np.zeros((), "f4"),
    ]
    assert len({array_digest(each) for each in [array, *others]}) == 1 + len(others)


def test_array_digest_takes_bfloat16_and_refuses_objects():
    array = np.arange(3).astype(ml_dtypes.bfloat16)
    assert array_digest(array) != array_digest(array.view("u2"))
    for wrong in (np.array([object()]), np.array(["a"]), np.zeros(2, [("x", "f4")])):
        with pytest.raises(TypeError, match="numbers"):
            array_digest(wrong)


def test_file_digest_is_the_content_digest_of_its_bytes(tmp_path):
    data = os.urandom(1 << 20) + b"tail"
    (tmp_path / "f").write_bytes(data)
    assert file_digest(tmp_path / "f") == content_digest(data)
