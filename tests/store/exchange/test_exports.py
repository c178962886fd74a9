"""Exports: what is stored, read back by other programs, is every number and label as it was."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import xarray as xr

import mizarr
from mizarr.store import ResultKey, open_store
from mizarr.store.errors import ConfigError, EntryNotFound, MissingExtra, ShapeError, StoreFull
from mizarr.store.exchange.exports import export, export_key
from tests.memory import PEAK, printed
from tests.store.exchanged import CELLS, PROMPTS, TEXTS, cells_in, put_run, values

SUFFIXES = [".nc", ".zarr", ".parquet", ".safetensors", ".npz"]
IDS = [token for prompt in PROMPTS for token in prompt]
POSITIONS = [i for prompt in PROMPTS for i in range(len(prompt))]
ROWS = [row for row, prompt in enumerate(PROMPTS) for _ in prompt]


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "store", durability="process")


@pytest.fixture
def entry(store):
    return put_run(store)


def opened(path: Path) -> xr.Dataset:
    """As somebody without mizarr opens it; a warning is a failure."""
    if path.suffix == ".zarr":
        return xr.open_zarr(path)
    return xr.open_dataset(path)


def note_of(path: Path) -> dict:
    if path.suffix == ".npz":
        return json.loads(np.load(path)["mizarr.json"].tobytes())
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return json.loads(header["__metadata__"]["mizarr"])


# A run in every format


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_plain_xarray_reads_a_run_with_all_its_labels(store, tmp_path, suffix, dtype):
    entry = put_run(store, dtype)
    there = opened(export_key(store, entry.digest, tmp_path / f"run{suffix}"))
    assert set(there.data_vars) == {name for name, _ in cells_in(dtype)}
    for name in there.data_vars:
        layers = [layer for variable, layer in CELLS if variable == name]
        expected = np.stack([values(name, layer, dtype) for layer in layers])
        np.testing.assert_array_equal(there[name].values, expected[0] if layers == [None] else expected)
        assert there[name].attrs["long_name"] == f"what {name} is" and there[name].attrs["units"] == "1"
    assert there.resid_post.dims == ("layer", "token", "hidden")
    assert there.layer.values.tolist() == [0, 2, 3] and there.layer_z.values.tolist() == [2]
    assert there.token_id.values.tolist() == IDS
    assert there.prompt.values.tolist() == ROWS and there.position.values.tolist() == POSITIONS
    assert there.row_size.values.tolist() == [1, 9, 2, 3] and there.row_start.values.tolist() == [
        0,
        1,
        10,
        12,
    ]
    assert there.text.values.tolist() == TEXTS
    assert there.token_string.values.tolist() == [f"w{i}" for i in IDS]
    assert there.char_end.values.tolist() == [p + 1 for p in POSITIONS]
    kept = np.float16 if dtype == "float16" and suffix == ".zarr" else np.float32
    assert {array.dtype for array in there.data_vars.values()} == {np.dtype(kept)}


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_prompts_are_cut_out_of_a_file_as_out_of_a_store(store, entry, tmp_path, suffix):
    there = opened(export_key(store, entry.digest, tmp_path / f"run{suffix}"))
    for i in range(len(PROMPTS)):
        for cut in (lambda ds, i=i: ds.mi.prompt(i)["z"], lambda ds, i=i: ds.mi.attn(i)):
            np.testing.assert_array_equal(cut(there).values, cut(entry.open()).values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_tensors_are_named_after_hook_points(store, tmp_path, suffix, dtype):
    entry = put_run(store, dtype)
    path = export_key(store, entry.digest, tmp_path / f"run{suffix}")
    held = dict(np.load(path)) if suffix == ".npz" else safetensors.numpy.load_file(path)
    hooks = {
        "blocks.0.hook_resid_post": ("resid_post", 0),
        "blocks.2.hook_resid_post": ("resid_post", 2),
        "blocks.3.hook_resid_post": ("resid_post", 3),
        "blocks.2.attn.hook_z": ("z", 2),
        "hook_embed": ("embed", None),
        "blocks.0.ln1.hook_scale": ("ln1_scale", 0),
        "blocks.1.attn.hook_pattern": ("pattern", 1),
    }
    hooks = {hook: cell for hook, cell in hooks.items() if cell in cells_in(dtype)}
    assert {name for name in held if "hook" in name} == set(hooks)
    kept = "float32" if dtype == "int8" or (dtype == "bfloat16" and suffix == ".npz") else dtype
    for hook, cell in hooks.items():
        assert held[hook].dtype == np.dtype(kept)
        np.testing.assert_array_equal(held[hook], values(*cell, dtype).astype(kept))
    assert held["token_id"].tolist() == IDS and held["row_size"].tolist() == [1, 9, 2, 3]
    assert json.loads(held["text.json"].tobytes()) == TEXTS
    assert json.loads(held["token_string.json"].tobytes()) == [f"w{i}" for i in IDS]
    assert note_of(path)["dims"]["blocks.2.attn.hook_z"] == ["token", "head", "d_head"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_says_which_run_it_is_and_how_that_came_about(store, entry, tmp_path, suffix):
    path = export_key(store, entry.digest[:8], tmp_path / f"run{suffix}", variables=["resid_post"])
    if suffix in (".nc", ".zarr"):
        note = json.loads(opened(path).attrs["mizarr"])
    elif suffix == ".parquet":
        import pyarrow.parquet as pq

        note = json.loads(pq.read_schema(path).metadata[b"mizarr"])
    else:
        note = note_of(path)
    assert note["run"] == entry.digest
    assert ["resid_post", 2, entry.content("resid_post", 2)] in note["arrays"]
    told = note["provenance"][0]
    assert told["model"] == "tiny" and "mizarr" in told["versions"]
    assert not {"host", "pid", "platform"} & set(told), "names of machines stay at home"


# Parts, results, datasets


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_layers_and_variables_are_chosen(store, entry, tmp_path, suffix):
    path = tmp_path / f"part{suffix}"
    there = opened(export_key(store, entry.digest, path, variables=["resid_post"], layers=[3, 0]))
    assert set(there.data_vars) == {"resid_post"}
    assert there.layer.values.tolist() == [3, 0]
    expected = [values("resid_post", 3), values("resid_post", 0)]
    np.testing.assert_array_equal(there.resid_post.values, np.stack(expected))


def test_the_key_of_one_array_exports_that_array(store, entry, tmp_path):
    key = entry.key("resid_post", 2).digest
    held = safetensors.numpy.load_file(export_key(store, key[:10], tmp_path / "one.safetensors"))
    assert [name for name in held if "hook" in name] == ["blocks.2.hook_resid_post"]
    np.testing.assert_array_equal(held["blocks.2.hook_resid_post"], values("resid_post", 2))
    assert note_of(tmp_path / "one.safetensors")["key"] == key


RESULT = xr.Dataset(
    {
        "loss": (("layer", "fold"), [[0.5, np.nan], [2.0, -np.inf]], {"units": "nats", "long_name": "loss"}),
        "top": (("layer",), np.array(["ja", "nein"], object)),
        "right": (("layer",), np.array([True, False])),
        "count": ((), np.int64(7)),
    },
    {"layer": [2, 5], "fold": np.array(["a", "ß"])},
    {"model_digest": "sha256:m", "settings": {"ridge": 1.0, "kinds": ["x", "y"]}, "flag": True, "none": None},
)


@pytest.fixture
def result(store):
    return store.put_result(ResultKey("probe", 1, {"ridge": 1.0}, {}), RESULT)


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_a_result_keeps_its_numbers_texts_flags_and_units(store, result, tmp_path, suffix):
    there = opened(export_key(store, result.key, tmp_path / f"result{suffix}"))
    assert set(there.data_vars) == {"loss", "top", "right", "count"}, "texts among the data stay data"
    np.testing.assert_array_equal(there.loss.values, RESULT.loss.values)
    assert there.loss.attrs["units"] == "nats"
    assert there.top.values.tolist() == ["ja", "nein"] and there.fold.values.tolist() == ["a", "ß"]
    assert there.right.dtype == bool and there.right.values.tolist() == [True, False]
    assert there["count"].item() == 7 and there.layer.values.tolist() == [2, 5]
    settings = there.attrs["settings"]
    assert (json.loads(settings) if suffix == ".nc" else settings) == RESULT.attrs["settings"]
    assert json.loads(there.attrs["mizarr"])["label"] == "probe/1"


def test_a_result_without_hook_points_is_npz_by_variable(store, result, tmp_path):
    path = export_key(store, result.key, tmp_path / "result.npz", variables=["loss", "count"])
    held = np.load(path)
    np.testing.assert_array_equal(held["loss"], RESULT.loss.values)
    assert held["count"].shape == () and held["count"] == 7
    assert json.loads(held["fold.json"].tobytes()) == ["a", "ß"] and held["layer"].tolist() == [2, 5]
    assert "top" not in held


@pytest.mark.parametrize("suffix", [".nc", ".zarr", ".npz", ".safetensors"])
def test_a_selection_is_exported_and_stays_as_it_was(entry, tmp_path, suffix):
    part = entry.open().mi.prompt(1)[["resid_post"]]
    before = part.copy(deep=True)
    path = mizarr.export(part, tmp_path / f"prompt{suffix}")
    assert part.identical(before) and part.encoding == before.encoding
    expected = np.stack([values("resid_post", layer)[1:10] for layer in (0, 2, 3)])
    if suffix in (".nc", ".zarr"):
        there = opened(path)
        np.testing.assert_array_equal(there.resid_post.values, expected)
        assert there.token_string.values.tolist() == [f"w{i}" for i in PROMPTS[1]]
    else:
        held = dict(np.load(path)) if suffix == ".npz" else safetensors.numpy.load_file(path)
        np.testing.assert_array_equal(held["blocks.3.hook_resid_post"], expected[2])
        assert json.loads(held["token_string.json"].tobytes()) == [f"w{i}" for i in PROMPTS[1]]


def test_bfloat16_in_memory_is_widened_where_it_must(tmp_path):
    raw = np.array([[1.5, -2.0]], ml_dtypes.bfloat16)
    dataset = xr.Dataset({"a": (("x", "y"), raw)})
    assert xr.open_dataset(export(dataset, tmp_path / "a.nc")).a.values.tolist() == [[1.5, -2.0]]
    assert np.load(export(dataset, tmp_path / "a.npz"))["a"].tolist() == [[1.5, -2.0]]
    assert xr.open_zarr(export(dataset, tmp_path / "a.zarr")).a.values.tolist() == [[1.5, -2.0]]
    kept = safetensors.numpy.load_file(export(dataset, tmp_path / "a.safetensors"))["a"]
    assert kept.dtype == ml_dtypes.bfloat16 and kept.astype("f4").tolist() == [[1.5, -2.0]]


HOOK = {"hook": "blocks.{}.hook_resid_post"}


@pytest.mark.parametrize(
    ("data", "labels", "expected"),
    [
        ({"a": (("token", "layer"), HOOK)}, {"layer": [0, 4]}, {"blocks.0.hook_resid_post": [0, 2]}),
        ({"a": (("token", "layer_a"), HOOK)}, {"layer_a": [1, 4]}, {"blocks.4.hook_resid_post": [1, 3]}),
        ({"a": (("token", "x"), HOOK)}, {"layer": 7}, {"blocks.7.hook_resid_post": [[0, 1], [2, 3]]}),
        ({"a": (("token", "x"), HOOK)}, {}, {"a": [[0, 1], [2, 3]]}),
        (
            {"mean": (("layer", "x"), HOOK), "std": (("layer", "x"), HOOK)},
            {"layer": [0, 4]},
            {"mean": [[0, 1], [2, 3]], "std": [[0, 1], [2, 3]]},
        ),
        ({"a": (("token", "layer"), {})}, {"layer": [0, 4]}, {"a": [[0, 1], [2, 3]]}),
    ],
    ids=["layers last", "layers of its own", "one layer", "no layer", "two of a hook point", "no hook point"],
)
@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_a_hook_point_names_what_alone_is_of_it(tmp_path, suffix, data, labels, expected):
    numbers = np.arange(4).reshape(2, 2)
    dataset = xr.Dataset({name: (dims, numbers, attrs) for name, (dims, attrs) in data.items()}, labels)
    path = mizarr.export(dataset, tmp_path / f"a{suffix}")
    held = dict(np.load(path)) if suffix == ".npz" else safetensors.numpy.load_file(path)
    assert {name: held[name].tolist() for name in expected} == expected


def test_a_dataset_is_exported_with_the_strings_of_its_tokens(entry, tmp_path):
    there = opened(mizarr.export(entry.open(["embed"]).mi.prompts([3, 2]), tmp_path / "a.nc"))
    assert there.token_string.values.tolist() == ["w4", "w4", "w4", "w5", "w6"]


def test_strings_of_tokens_are_left_out_of_a_corpus(store, entry, tmp_path, monkeypatch):
    monkeypatch.setattr("mizarr.store.exchange.exports._MOST_STRINGS", len(IDS) - 1)
    path = export_key(store, entry.digest, tmp_path / "a.nc", variables=["embed"])
    assert "token_string" not in opened(path) and opened(path).token_id.values.tolist() == IDS


def test_a_format_may_be_said_instead_of_a_suffix(tmp_path):
    export(xr.Dataset({"a": ("x", [1.0, 2.0])}), tmp_path / "data.bin", format="npz")
    with (tmp_path / "data.bin").open("rb") as file:
        assert np.load(file)["a"].tolist() == [1.0, 2.0]


# What cannot be


@pytest.mark.parametrize(
    ("name", "options", "error", "says"),
    [
        ("a.nc", {"format": "netcfd"}, ConfigError, "did you mean 'netcdf'"),
        ("a.csv", {}, ConfigError, "names no export format"),
        ("a.nc", {"layout": "tall"}, ConfigError, "'long' or 'wide', found 'tall'"),
        ("none/a.nc", {}, ConfigError, "create it first"),
    ],
)
def test_misuse_names_what_was_expected(tmp_path, name, options, error, says):
    with pytest.raises(error, match=says):
        export(RESULT, tmp_path / name, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_names_of_folders_and_nothing_at_all_are_refused(tmp_path, suffix):
    with pytest.raises(ShapeError, match="has no variables"):
        export(xr.Dataset({}, {"x": [1]}), tmp_path / f"a{suffix}")
    if suffix in (".nc", ".zarr"):
        with pytest.raises(ShapeError, match="the name 'a/b'"):
            export(xr.Dataset({"a/b": ("x", [1.0])}), tmp_path / f"a{suffix}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_path_that_is_taken_is_left_alone(store, entry, tmp_path, suffix):
    taken = tmp_path / f"a{suffix}"
    taken.write_text("mine")
    with pytest.raises(ConfigError, match="remove it, or name another"):
        export_key(store, entry.digest, taken, variables=["resid_post"])
    assert taken.read_text() == "mine"


@pytest.mark.parametrize(
    ("data", "suffix", "says"),
    [
        (np.array([1j]), ".nc", "complex"),
        (np.array([1j]), ".npz", "complex128"),
        (np.array(["a", 1], object), ".zarr", "expected str only"),
        (np.array(["a"]), ".safetensors", "export with --format zarr"),
        (np.array(["2020-01-01"], "M8[ns]"), ".npz", "datetime64"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_and_leaves_nothing(tmp_path, data, suffix, says):
    with pytest.raises(ShapeError, match=says):
        export(xr.Dataset({"a": ("x", data)}), tmp_path / f"a{suffix}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"variables": ["resid_pst"]}, "resid_post"),
        ({"layers": [1]}, "0, 2-3"),
        ({"key": "ffffffff"}, "mizarr ls"),
    ],
)
def test_parts_that_are_not_stored_are_named_with_those_that_are(store, tmp_path, part, says):
    entry = put_run(store, cells=CELLS[:3])
    with pytest.raises(EntryNotFound, match=says):
        export_key(store, part.pop("key", entry.digest), tmp_path / "a.nc", **part)
    assert not (tmp_path / "a.nc").exists()


def test_parts_of_one_array_are_asked_of_the_run(store, entry, tmp_path):
    with pytest.raises(EntryNotFound, match=entry.digest[:12]):
        export_key(store, entry.key("resid_post", 2).digest, tmp_path / "a.nc", layers=[3])


def test_layers_of_a_result_are_refused(store, result, tmp_path):
    with pytest.raises(ConfigError, match="probe/1"):
        export_key(store, result.key, tmp_path / "a.nc", layers=[2])


def test_a_run_that_has_nothing_whole_yet_is_refused(store, tmp_path):
    entry = put_run(store, cells=[("embed", None)])
    for file in (store.path / "keys").rglob("*.json"):
        file.unlink()
    with pytest.raises(EntryNotFound, match="complete"):
        export_key(store, entry.digest, tmp_path / "a.nc")


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(store, entry, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(StoreFull, match="another disk"):
        export_key(store, entry.digest, tmp_path / "a.npz")
    assert not (tmp_path / "a.npz").exists()


FILLING = """
import json, resource, signal, sys
import numpy as np, xarray as xr
from mizarr.store.errors import StoreFull
from mizarr.store.exchange.exports import export
numbers = np.random.default_rng(0).standard_normal((1000, 100), dtype="f4")
data = xr.Dataset({"a": (("token", "hidden"), numbers)}, {"token_id": ("token", np.arange(1000))})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
told = {}
for path in sys.argv[1:]:
    try:
        export(data, path)
    except StoreFull as error:
        told[path] = str(error)
print(json.dumps(told))
"""


def test_a_disk_that_fills_up_is_told_and_leaves_nothing(tmp_path):
    """The kernel takes 200 KB per file and no more."""
    paths = [str(tmp_path / f"a{suffix}") for suffix in SUFFIXES]
    command = [sys.executable, "-c", FILLING, *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert list(told) == paths
    assert all("no space left" in error for error in told.values()), told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_export_that_fails_half_way_leaves_nothing(store, tmp_path, suffix):
    entry = put_run(store, cells=CELLS[:3])
    shard = next((store.path / entry.path / "resid_post" / "c").rglob("2"))
    lost = next(path for path in (shard.rglob("*") if shard.is_dir() else [shard]) if path.is_file())
    lost.write_bytes(lost.read_bytes()[:5])
    with pytest.raises(OSError, match="expected"):
        export_key(store, entry.digest, tmp_path / f"a{suffix}")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


KILLED = """
import json, os, signal, sys
from pathlib import Path
import dask.array, h5netcdf, pyarrow.parquet, xarray, zarr  # once for all that are killed
from mizarr.store import open_store
from mizarr.store.exchange.exports import export_key
Path.rename = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
ends = []
for path in sys.argv[2:]:
    child = os.fork()
    if not child:
        store = open_store(sys.argv[1], mode="r")
        export_key(store, next(store.entries()).digest, path, variables=["resid_post"])
        os._exit(0)
    ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(ends))
"""


def test_an_export_that_is_killed_leaves_no_file_of_that_name(store, entry, tmp_path):
    """Killed at the last moment, a process for each format: all is written, under a hidden name."""
    paths = [tmp_path / f"a{suffix}" for suffix in SUFFIXES]
    command = [sys.executable, "-c", KILLED, *map(str, [store.path, *paths])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [-signal.SIGKILL] * len(paths), done.stderr
    left = [one.name for one in tmp_path.iterdir() if one != store.path]
    assert len(left) >= len(paths) and all(name[0] == "." for name in left)
    for path in paths:
        export_key(store, entry.digest, path, variables=["resid_post"])
        assert path.exists(), "what the killed one left is in nobody's way"


HARD_TEXTS = ["\0", "a\0b\0", "\\\\0", "\\0", "", "\\", "\N{SNOWMAN}"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_texts_with_a_nul_come_back_as_they_were(tmp_path, suffix):
    """In NetCDF, where a NUL ends a text, by the rule that the variable tells; others tell none."""
    texts = np.array(HARD_TEXTS, object)
    coords = {"token_string": ("token", texts), "plain": ("token", np.array([r"\0"] * len(texts), object))}
    dataset = xr.Dataset({"x": ("token", np.arange(len(texts)))}, coords, {"about": "a\0b"})
    path = export(dataset, tmp_path / f"a{suffix}")
    if suffix in (".safetensors", ".npz"):
        held = safetensors.numpy.load_file(path) if suffix == ".safetensors" else np.load(path)
        assert json.loads(held["token_string.json"].tobytes()) == HARD_TEXTS
    elif suffix == ".parquet":
        import pyarrow.parquet as pq

        assert pq.read_table(path)["token_string"].to_pylist() == HARD_TEXTS
    else:
        there = opened(path)
        found = there.token_string.values.tolist()
        if suffix == ".nc":
            assert there.token_string.attrs["escaped"] == r"\0 stands for NUL, \\ for \ ".strip()
            found = [re.sub(r"\\(.)", lambda hit: {"0": "\0"}.get(hit[1], hit[1]), text) for text in found]
            assert json.loads(there.attrs["about"]) == "a\0b"
        assert found == HARD_TEXTS
        assert there.plain.values.tolist() == [r"\0"] * len(texts)
        assert "escaped" not in there.plain.attrs


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_names_with_a_nul_are_refused(tmp_path, suffix):
    with pytest.raises(ShapeError, match="NUL character"):
        export(xr.Dataset({"a\0b": ("token", [1])}), tmp_path / f"a{suffix}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("module", "name"), [("h5netcdf", "a.nc"), ("pyarrow", "a.parquet")])
def test_a_missing_library_is_named_with_its_extra(tmp_path, monkeypatch, module, name):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=r"mizarr\[(netcdf|corpora)\]"):
        export(RESULT, tmp_path / name)
    assert not list(tmp_path.iterdir())


# Size

CORPUS = """
import sys
import numpy as np
from mizarr.store import PackedTokens, RunKey, open_store
from mizarr.store.runs.entries import ArraySpec
tokens = PackedTokens.from_lists([range(64)] * (int(sys.argv[2]) // 64))
spec = ArraySpec("resid_post", "blocks.{}.hook_resid_post", ("layer", "token", "hidden"), {"hidden": 256},
                 "bfloat16", 2)
store = open_store(sys.argv[1], durability="process")
entry = store.create_entry(RunKey("m", tokens.digest, "none"), tokens, [spec], segment_tokens=4096)
import ml_dtypes
for n in range(len(entry.segments)):
    rows = np.full((len(entry.segments[n]), 256), n, ml_dtypes.bfloat16)
    entry.write_segment(n, {("resid_post", 0): rows, ("resid_post", 1): rows})
entry.publish([("resid_post", 0), ("resid_post", 1)])
print(1)
"""
EXPORT = f"""
import sys
from pathlib import Path
from mizarr.store import open_store
from mizarr.store.exchange.exports import export_key
from mizarr.store.runs import mapped
mapped.RESIDENT >>= 3
peaks = []
for folder in sys.argv[3:]:
    store, target = open_store(folder, mode="r"), Path(folder).parent / sys.argv[1]
    export_key(store, next(store.entries()).digest, target, layout=sys.argv[2])
    peaks.append({PEAK})
print(peaks[1] - peaks[0])
"""


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Stores of 32 MiB and 256 MiB of states."""
    folders = {tokens: tmp_path_factory.mktemp("corpus") / "store" for tokens in (1 << 14, 1 << 17)}
    for tokens, folder in folders.items():
        printed(CORPUS, str(folder), str(tokens))
    yield [*folders.values()]
    for folder in folders.values():
        shutil.rmtree(folder.parent)


@pytest.mark.parametrize(
    ("suffix", "layout"), [*((suffix, "long") for suffix in SUFFIXES), (".parquet", "wide")]
)
@pytest.mark.wide
def test_memory_does_not_grow_with_the_corpus(corpora, suffix, layout):
    """224 MiB more of states take no more than the 12 MiB of mapped shards that reading is let keep here, and
    three blocks."""
    grown = printed(EXPORT, f"corpus-{layout}{suffix}", layout, *map(str, corpora))
    assert grown < 64 << 20, grown >> 20
