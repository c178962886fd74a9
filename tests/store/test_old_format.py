"""A store of format 1, written before chunks and records carried checks: read, added to, and told apart.

`format_1.tar.gz` was written by the last version of mizarr that made such stores.
"""

import tarfile
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from mizarr.store import PackedTokens, ResultKey, RunKey, open_store
from mizarr.store.errors import CorruptEntry
from mizarr.store.runs.entries import ArraySpec
from mizarr.workflows.cli import run

TOKENS = PackedTokens.from_lists([[1, 2, 3], [4, 5, 6, 7, 8], [9]])
RUN = RunKey("m", TOKENS.digest, "none")
RESID = ArraySpec(
    "resid_post", "blocks.{}.hook_resid_post", ("layer", "token", "hidden"), {"hidden": 2}, "float32", 3,
    "residual stream", "1",
)  # fmt: skip
RESULT = ResultKey("lens", 1, {"k": 2}, {})


@pytest.fixture
def store(tmp_path):
    with tarfile.open(Path(__file__).with_name("format_1.tar.gz")) as archive:
        archive.extractall(tmp_path / "store", filter="data")
    return open_store(tmp_path / "store", durability="process")


def rows(n, layer):
    ids = TOKENS.ids[n * 4 : n * 4 + 4].astype("f4")
    return np.stack([ids, ids * 0 + layer], 1)


def test_it_opens_with_every_value_and_verifies(store):
    ds = store.entry(RUN).open()
    assert ds["resid_post"].sel(layer=1)[:, 0].values.tolist() == TOKENS.ids.tolist()
    assert ds["pattern"][0, :, 1].values.tolist() == [-float(i) for i in range(6 + 15 + 1)]
    assert ds["text"].values.tolist() == ["a", "b", "c"] and ds["char_end"].values[3] == 1
    assert ds.mi.prompt(2)["token_string"].values.tolist() == [" w9"]
    result = store.open_result(RESULT)
    assert (result["x"].values.tolist(), "".join(result["name"].values)) == (list(range(6)), "abcdef")
    assert store.pins() == {"figure": RESULT.digest} and store.verify() == []


def test_a_full_cache_hit_stays_one(store):
    entry = store.create_entry(RUN, TOKENS, [RESID], segment_tokens=4)
    cells = [("resid_post", 0), ("resid_post", 1)]
    assert entry.missing(cells) == {}
    before = [entry.content(*cell) for cell in cells]
    assert [record.content for record in entry.publish(cells)] == before
    assert store.lookup(RESULT) is not None


def test_it_takes_a_further_layer_in_its_own_layout_and_another_variable_in_the_new_one(store):
    mlp = ArraySpec("mlp_out", "blocks.{}.hook_mlp_out", RESID.dims, RESID.sizes, "float32", 3)
    entry = store.create_entry(RUN, TOKENS, [RESID, mlp], segment_tokens=4)
    for n in range(3):
        entry.write_segment(n, {("resid_post", 2): rows(n, 2), ("mlp_out", 0): rows(n, 7)})
    entry.publish([("resid_post", 2), ("mlp_out", 0)])
    ds = open_store(store.path, mode="r").entry(RUN).open()
    assert ds["resid_post"][:, :, 1].values.tolist() == [[0.0] * 9, [1.0] * 9, [2.0] * 9]
    assert ds["mlp_out"][0, :, 1].values.tolist() == [7.0] * 9
    plain = xr.open_zarr(store.path / entry.path, consolidated=False)
    assert plain["resid_post"][2, :, 1].values.tolist() == [2.0] * 9
    assert not entry.layout("resid_post").checked and entry.layout("mlp_out").checked
    assert store.verify() == []
    names = {name.rpartition("/")[2] for name in store.unchecked()}
    assert {"resid_post", "pattern", "token_id", "text", "x", "name"} <= names and "mlp_out" not in names


def test_a_description_set_aside_is_written_again_as_the_shards_lie(store):
    entry = store.entry(RUN)
    path = store.path / entry.path / "resid_post/zarr.json"
    before = path.read_bytes()
    path.write_bytes(before.replace(b"residual", b"residuam"))
    with pytest.raises(CorruptEntry, match="resid_post"):
        store.entry(RUN).open()
    for damage in store.verify():
        store.quarantine(damage)
    again = store.create_entry(RUN, TOKENS, [RESID], segment_tokens=4)
    assert again.missing([("resid_post", 0), ("resid_post", 1)]) == {}
    again.publish([("resid_post", 0), ("resid_post", 1)])
    assert path.read_bytes() == before and store.verify() == []


def test_it_says_that_readers_cannot_check_it(store, capsys):
    """By `verify` and `show`, on stderr, with how many arrays; a new store says nothing."""
    assert run(["verify", "--store", str(store.path)]) == 0
    told = capsys.readouterr().err
    assert f"{len(store.unchecked())} arrays carry no checksums of their own" in told and "new store" in told
    assert run(["show", RESULT.digest[:12], "--store", str(store.path)]) == 0
    assert "2 arrays carry no checksums" in capsys.readouterr().err
    other = open_store(store.path.with_name("other"))
    other.put_result(RESULT, xr.Dataset({"x": ("a", np.arange(3.0))}))
    assert run(["verify", "--store", str(other.path)]) == 0
    assert "checksums" not in capsys.readouterr().err and other.unchecked() == []
