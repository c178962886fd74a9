"""What somebody else wrote is read within bounds, and refused in one line beyond them."""

from __future__ import annotations

import hashlib
import os

import pytest

from mizarr.store.errors import ConfigError
from mizarr.store.exchange.outside import (
    LFS_POINTER,
    MOST_DEPTH,
    bounded_depth,
    json_file,
    json_object,
    json_value,
    require_content,
)

REFUSED = {
    "lists": b"[" * 100_000 + b"]" * 100_000,
    "objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "one level too many": b"[" * (MOST_DEPTH + 2) + b"]" * (MOST_DEPTH + 2),
    "never closed": b"[" * 100_000,
    "NaN": b'{"a": NaN}',
    "a float beyond all": b'{"a": 1e999}',
    "a negative one": b'{"a": -1e999}',
    "an integer no float holds": b'{"a": 9007199254740993}',
    "a negative integer": b'{"a": -9007199254740993}',
    "5,000 digits": b'{"a": ' + b"9" * 5000 + b"}",
    "two values of a name": b'{"a": 1, "a": 2}',
    "two types of a name": b'{"a": 1, "a": true}',
    "not UTF-8": b'{"a": "\xff"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "nothing": b"",
    "half": b'{"a": ',
    "more": b"{} {}",
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
def test_json_beyond_its_bounds_is_refused_in_one_line(data, tmp_path):
    with pytest.raises(ValueError) as caught:
        json_value(data)
    assert type(caught.value) is not RecursionError and len(str(caught.value)) < 200
    (tmp_path / "a.json").write_bytes(data)
    for reader in (json_object, json_file):
        with pytest.raises(ConfigError, match=r"a\.json") as told:
            reader(tmp_path / "a.json", ConfigError)
        assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\xef\xbb\xbf{}", {}),
        (b'{"a": 9007199254740992, "b": -9007199254740992}', {"a": 2**53, "b": -(2**53)}),
        (b'{"a": Infinity, "b": -Infinity}', {"a": float("inf"), "b": float("-inf")}),
        (b'{"a": 1, "a": 1}', {"a": 1}),
        (b"[" * MOST_DEPTH + b"]" * MOST_DEPTH, None),
    ],
)
def test_json_within_its_bounds_is_read(data, value):
    assert value is None or json_value(data) == value


def test_integers_of_tokenizers_may_be_large():
    assert json_value(b'{"model_max_length": 1' + b"0" * 30 + b"}", large_integers=True) == {
        "model_max_length": 10**30
    }


def test_values_that_refer_to_each_other_are_counted():
    value: list[object] = []
    for _ in range(60):
        value = [value, value]
    with pytest.raises(ValueError, match="expand to more values"):
        bounded_depth(value, 1000)


def make_link(path):
    path.symlink_to(path.with_name("nowhere"))


PLACES = {
    "a link to nothing": (make_link, "nowhere, which does not exist; put the file there"),
    "a link to itself": (lambda path: path.symlink_to(path), "leads to"),
    "a folder": (lambda path: path.mkdir(), "found a folder"),
    "a pipe": (os.mkfifo, "found a pipe, socket or device"),
    "an empty file": (lambda path: path.touch(), "is empty"),
    "a pointer": (lambda path: path.write_bytes(LFS_POINTER + b"v1\noid sha256:0\nsize 9\n"), "git lfs pull"),
}


@pytest.mark.parametrize(("make", "says"), PLACES.values(), ids=PLACES)
def test_a_place_without_content_is_told_in_one_line(make, says, tmp_path):
    make(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=says) as caught:
        require_content(tmp_path / "model.safetensors", ConfigError)
    assert "\n" not in str(caught.value) and str(caught.value).count("expected") <= 1


def test_nothing_at_all_is_for_the_reader_to_tell(tmp_path):
    assert not require_content(tmp_path / "none", ConfigError)
    with pytest.raises(ConfigError, match=r"none: No such file"):
        json_file(tmp_path / "none", ConfigError)


def test_a_file_that_may_not_be_read_is_told_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "a.json").write_text("{}")

    def refused(*given, **named):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refused)
    with pytest.raises(ConfigError, match=r"a\.json: Permission denied"):
        json_object(tmp_path / "a.json", ConfigError)


@pytest.mark.parametrize("prefix", ["", "sha256-"])
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_blob_is_compared_with_the_digest_in_its_name(prefix, is_whole, tmp_path):
    (tmp_path / "blobs").mkdir()
    blob = tmp_path / "blobs" / (prefix + hashlib.sha256(b'{"a": 1}').hexdigest())
    blob.write_bytes(b'{"a": 1}' if is_whole else b'{"a": 2}')
    (tmp_path / "config.json").symlink_to(blob)
    if is_whole:
        assert json_object(tmp_path / "config.json", ConfigError) == {"a": 1}
    else:
        with pytest.raises(ConfigError, match="sha256 in its name"):
            json_object(tmp_path / "config.json", ConfigError)
