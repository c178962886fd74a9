"""A capture stored in int8: read everywhere as the float32 it stands for."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import xarray as xr

from mizarr import ActivationLoader, HookSpec, capture, open_store
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.store.errors import CorruptEntry, EntryNotFound, ShapeError
from mizarr.store.exchange.exports import export
from mizarr.store.runs.quantised import quantise, restored
from mizarr.workflows.cli.group import run

POINTS = ["blocks.*.hook_resid_post", "blocks.*.attn.hook_z", "blocks.*.attn.hook_pattern", "hook_embed"]
OPTIONS = {"segment_tokens": 16, "batch_tokens": 32, "progress": False}


def captured(model, tokens, folder, points=POINTS, dtype="int8", **options):
    store = open_store(folder, durability="process")
    spec = HookSpec().capture(*points)
    chosen = {**OPTIONS, "storage_dtype": dtype, **options}
    return store, capture(model, tokens, spec, store=store, **chosen)


@pytest.fixture(scope="module")
def whole(model, tokens, tmp_path_factory):
    return captured(model, tokens, tmp_path_factory.mktemp("whole"), dtype=None)[1].load()


def by_hand(values):
    """What int8 makes of labelled rows, the layer axis taken along."""
    flat = np.ascontiguousarray(values.reshape(-1, *values.shape[-1:]))
    return restored(*quantise(flat, "rows")).reshape(values.shape)


@pytest.mark.parametrize("segment_tokens", [8, 16, None])
@pytest.mark.parametrize("order", ["batch", "layer"])
def test_what_is_read_is_what_int8_makes_of_the_float32_capture(
    model, tokens, whole, tmp_path, segment_tokens, order
):
    store, found = captured(model, tokens, tmp_path, segment_tokens=segment_tokens, order=order)
    plain = captured(
        model, tokens, tmp_path / "plain", dtype=None, segment_tokens=segment_tokens, order=order
    )[1]
    assert set(found.data_vars) == set(whole.data_vars)
    for name in found.data_vars:
        assert found[name].dtype == np.float32 and found[name].dims == whole[name].dims
        np.testing.assert_array_equal(found[name].values, by_hand(plain[name].values))
    rows = [40, 3, 71, 3]
    np.testing.assert_array_equal(
        found["resid_post"][1, rows].values, by_hand(plain["resid_post"].values)[1, rows]
    )
    assert float(found["z"][2, 17, 1, 3]) == float(by_hand(plain["z"].values)[2, 17, 1, 3])
    assert store.verify() == []


def test_selections_are_quantised_row_by_row(model, tokens, whole, tmp_path):
    store = open_store(tmp_path, durability="process")
    spec = HookSpec().capture(POINTS[0], positions="::4")
    found = capture(model, tokens, spec, store=store, storage_dtype="int8", **OPTIONS)
    (name,) = found.data_vars
    kept = np.flatnonzero(whole["position"].values % 4 == 0)
    expected = whole["resid_post"].values[:, kept]
    scale = np.abs(expected).max() / 127
    np.testing.assert_allclose(found[name].values, expected, atol=scale)


REDUCED = ("norm", "mean", "run_mean")


def some_reduced():
    """Whole rows, and what is made of them while they go by; reductions first."""
    spec = HookSpec()
    for how in REDUCED:
        spec = spec.capture(POINTS[0], reduce=how)
    return spec.capture(POINTS[0])


@pytest.mark.parametrize("order", ["batch", "layer"])
def test_reductions_are_made_of_what_is_computed_and_not_of_int8(model, tokens, tmp_path, order):
    """To the bit those of a capture in float32, in keys of their own; whole rows beside them are int8."""
    options = {**OPTIONS, "order": order}
    stores = {kind: open_store(tmp_path / kind, durability="process") for kind in ("int8", "float32")}
    found = {
        kind: capture(model, tokens, some_reduced(), store=store, storage_dtype=kind, **options).load()
        for kind, store in stores.items()
    }
    small, plain = found["int8"], found["float32"]
    for how in REDUCED:
        name = f"resid_post__{how}"
        np.testing.assert_array_equal(small[name].values, plain[name].values)
        assert small[name].dtype == plain[name].dtype
    np.testing.assert_array_equal(small["resid_post"].values, by_hand(plain["resid_post"].values))
    entries = {kind: next(iter(store.entries())) for kind, store in stores.items()}
    folders = {path.name for path in (stores["int8"].path / entries["int8"].path).iterdir()}
    assert "resid_post__scale" in folders
    assert not any(f"resid_post__{how}__scale" in folders for how in REDUCED)
    norms = [entry.record("resid_post__norm", 1) for entry in entries.values()]
    assert norms[0].key != norms[1].key
    assert norms[0].content == norms[1].content  # the same numbers
    assert stores["int8"].verify() == []
    other = open_store(tmp_path / "copy", durability="process")
    stores["int8"].copy_to(other)
    xr.testing.assert_identical(
        other.entry(entries["int8"].digest).open().load(), entries["int8"].open().load()
    )


def test_reductions_are_added_to_a_run_in_int8(model, tokens, tmp_path):
    """In either order the same keys with the same content."""
    asked = {"whole": POINTS[0], "norms": HookSpec().capture(POINTS[0], reduce="norm")}
    contents = []
    for order in (("whole", "norms"), ("norms", "whole")):
        store = open_store(tmp_path / order[0], durability="process")
        for name in order:
            capture(model, tokens, asked[name], store=store, storage_dtype="int8", **OPTIONS)
        contents.append({record.key: record.content for record in store.records()})
    assert contents[0] == contents[1]


def test_logits_of_a_run_in_int8_are_kept_as_they_are(model, tokens, tmp_path):
    spec = HookSpec().capture("hook_logits", reduce="topk:3").capture("hook_logits", reduce="logsumexp")
    found = {
        kind: capture(model, tokens, spec, store=open_store(tmp_path / kind), storage_dtype=kind, **OPTIONS)
        for kind in ("int8", "float32")
    }
    for name in found["float32"].data_vars:
        np.testing.assert_array_equal(found["int8"][name].values, found["float32"][name].values)


def test_plain_zarr_multiplies_numbers_by_scales(model, tokens, tmp_path):
    store, found = captured(model, tokens, tmp_path)
    (entry,) = store.entries()
    plain = xr.open_zarr(store.path / entry.path, consolidated=False)
    assert plain["resid_post"].dtype == np.int8
    assert "resid_post__scale" in plain["resid_post"].attrs["values"]
    width = plain.sizes["hidden"]
    scales = np.repeat(plain["resid_post__scale"].values, 64, axis=-1)[..., :width]
    np.testing.assert_array_equal(plain["resid_post"].values * scales, found["resid_post"].values)
    with xr.open_dataset(store.path / entry.path, engine="mizarr") as opened:
        xr.testing.assert_identical(opened.load(), entry.open().load())


def test_another_process_reads_the_same_without_torch(model, tokens, tmp_path):
    store, found = captured(model, tokens, tmp_path)
    (entry,) = store.entries()
    program = (
        "import sys, xarray as xr\n"
        f"ds = xr.open_dataset({str(store.path / entry.path)!r}, engine='mizarr', chunks={{}})\n"
        "print(float(ds['resid_post'].astype('f8').sum().compute()), 'torch' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    total, has_torch = told.split()
    assert has_torch == "False"
    assert float(total) == pytest.approx(float(found["resid_post"].astype("f8").sum()), rel=1e-12)


def test_keys_and_contents_are_others_than_those_of_float32(model, tokens, tmp_path):
    store, _ = captured(model, tokens, tmp_path)
    captured(model, tokens, tmp_path, dtype=None)
    small, large = sorted(store.entries(), key=lambda entry: entry.dtype, reverse=True)
    assert (small.dtype, large.dtype) == ("int8", "float32")
    assert small.content("resid_post", 1) != large.content("resid_post", 1)
    assert small.published() == large.published()
    assert small.segment_digest("resid_post", 1, 2) != large.segment_digest("resid_post", 1, 2)


def test_content_tells_other_scales_apart(model, tokens, tmp_path):
    """Twice the activations are the same numbers with twice the scales."""
    contents = []
    for factor, folder in ((1, "one"), (2, "two")):
        store, _ = captured(model, tokens, tmp_path / folder, [POINTS[0]])
        (entry,) = store.entries()
        rows = np.random.default_rng(0).standard_normal((16, *entry.spec("resid_post").tail))
        fresh = type(entry).create(
            open_store(tmp_path / f"{folder}-made", durability="process").files,
            entry.run,
            entry.tokens,
            [entry.spec("resid_post")],
            segment_tokens=16,
        )
        for n, segment in enumerate(fresh.segments):
            part = np.ascontiguousarray(rows[: len(segment)] * factor, np.float32)
            fresh.write_segment(n, {("resid_post", 0): part})
        contents.append(
            (fresh.publish([("resid_post", 0)])[-1].content, fresh.segment_digest("resid_post", 0, 0))
        )
    assert contents[0][0] != contents[1][0] and contents[0][1] != contents[1][1]


def test_what_is_stored_is_not_computed_again_and_more_is_added(model, tokens, tmp_path):
    captured(model, tokens, tmp_path, ["blocks.1.hook_resid_post"])
    node = CaptureNode(model, tokens, POINTS[0], storage_dtype="int8", segment_tokens=16)
    store = open_store(tmp_path)
    assert node.status(store).cells_cached == 1
    captured(model, tokens, tmp_path, [POINTS[0]])
    assert node.status(store).is_cached
    assert node.estimate(store).bytes_written == 0


def test_the_estimate_counts_numbers_and_scales(model, tokens, tmp_path):
    node = CaptureNode(model, tokens, POINTS[0], storage_dtype="int8", segment_tokens=16)
    store = open_store(tmp_path)
    width, layers = model.config.hidden_size, model.config.num_layers
    assert node.estimate(store).bytes_written == tokens.n_tokens * layers * (width + 4 * -(-width // 64))


def test_a_damaged_scale_is_found_withdrawn_and_made_again(model, tokens, tmp_path):
    store, found = captured(model, tokens, tmp_path, [POINTS[0]])
    expected = found["resid_post"].values
    (entry,) = store.entries()
    file = store.path / entry.path / "resid_post__scale/c/1/2/0"
    raw = bytearray(file.read_bytes())
    raw[5] ^= 64
    file.chmod(0o644)
    file.write_bytes(raw)
    with pytest.raises(CorruptEntry):
        open_store(tmp_path).entry(entry.digest).open()["resid_post"].load()
    (damage,) = store.verify()
    keys = [entry.key(name, 1).digest for name in ("resid_post", "resid_post__scale")]
    assert all(store.lookup(key) for key in keys)
    store.quarantine(damage)
    (entry,) = store.entries()
    assert [store.lookup(key) for key in keys] == [None, None]
    assert not any(record.label == "resid_post/1" for record in store.records())
    assert entry.record("resid_post", 1) is None and entry.record("resid_post", 0) is not None
    with pytest.raises(EntryNotFound):
        entry.open(["resid_post"], [1])
    _, again = captured(model, tokens, tmp_path, [POINTS[0]])
    np.testing.assert_array_equal(again["resid_post"].values, expected)
    assert all(store.lookup(key) for key in keys)
    assert store.verify() == []


@pytest.mark.parametrize(
    "what", ["resid_post/c/1/2/0", "resid_post/zarr.json", "resid_post__scale/zarr.json"]
)
def test_numbers_and_scales_are_withdrawn_together(model, tokens, tmp_path, what):
    store, found = captured(model, tokens, tmp_path, [POINTS[0]])
    expected = found["resid_post"].values
    (entry,) = store.entries()
    file = store.path / entry.path / what
    raw = bytearray(file.read_bytes())
    raw[5] ^= 1
    file.chmod(0o644)
    file.write_bytes(raw)
    store = open_store(tmp_path)
    keys = [entry.key(name, 1).digest for name in ("resid_post", "resid_post__scale")]
    for damage in store.verify():
        store.quarantine(damage)
    assert [store.lookup(key) for key in keys] == [None, None]
    _, again = captured(model, tokens, tmp_path, [POINTS[0]])
    np.testing.assert_array_equal(again["resid_post"].values, expected)
    assert store.verify() == []


def test_a_single_key_is_copied_with_its_scales(model, tokens, tmp_path):
    store, found = captured(model, tokens, tmp_path / "a")
    other = open_store(tmp_path / "b", durability="process")
    (entry,) = store.entries()
    store.copy_to(other, [entry.record("resid_post", 2)])
    (copied,) = other.entries()
    assert copied.published() == [("resid_post", 2)]
    np.testing.assert_array_equal(
        copied.open()["resid_post"].values[0], found["resid_post"].sel(layer=2).values
    )
    store.copy_to(other)
    xr.testing.assert_identical(other.entry(entry.digest).open().load(), entry.open().load())
    assert other.verify() == []


def test_a_store_in_memory_reads_the_same(model, tokens, whole):
    store = open_store("memory://int8")
    found = capture(model, tokens, HookSpec().capture(*POINTS), store=store, storage_dtype="int8", **OPTIONS)
    np.testing.assert_array_equal(found["resid_post"].values, by_hand(whole["resid_post"].values))


@pytest.mark.parametrize("suffix", [".nc", ".safetensors", ".npz", ".zarr", ".parquet"])
def test_exports_hold_the_float32_it_stands_for(model, tokens, tmp_path, suffix):
    pytest.importorskip({".parquet": "pyarrow", ".nc": "h5netcdf"}.get(suffix, "numpy"))
    _, found = captured(model, tokens, tmp_path / "store", [POINTS[0]])
    path = export(found, tmp_path / f"out{suffix}", layout="wide")
    if suffix == ".npz":
        held = np.load(path)
        layers = [held[name] for name in sorted(held.files) if name.endswith("hook_resid_post")]
        np.testing.assert_array_equal(layers, found["resid_post"].values)
    if suffix == ".zarr":
        np.testing.assert_array_equal(xr.open_zarr(path)["resid_post"].values, found["resid_post"].values)
    assert path.exists()


@pytest.mark.parametrize("dtype", ["float32", "stored"])
def test_training_data_are_the_float32_it_stands_for(model, tokens, tmp_path, dtype):
    _, found = captured(model, tokens, tmp_path, [POINTS[0]])
    batches = list(ActivationLoader(found, layers=1, batch=10, dtype=dtype, labels=True))
    for batch in batches:
        at = tokens.row_start[batch["prompt"]] + batch["position"]
        rows = batch["resid_post"] if "resid_post" in batch else batch["rows"]
        assert rows.dtype == np.float32
        np.testing.assert_array_equal(rows.reshape(len(at), -1), found["resid_post"].values[1, at])
    assert sum(len(batch["position"]) for batch in batches) == tokens.n_tokens


def test_one_number_to_a_row_is_refused_before_anything_is_written(model, tokens, tmp_path):
    with pytest.raises(ShapeError, match="one number per row"):
        captured(model, tokens, tmp_path, ["blocks.*.ln1.hook_scale"])
    assert not list(tmp_path.rglob("data/*"))


def test_the_command_line_stores_int8_and_lists_it_once(tmp_path, capsys):
    prompts, store = tmp_path / "prompts.txt", tmp_path / "store"
    prompts.write_text("the cat sat\nand then it rained\n")
    arguments = ["capture", "specimen", str(prompts), "--hooks", POINTS[0], "--store", str(store)]
    assert run([*arguments, "--storage-dtype", "int8"]) == 0
    capsys.readouterr()
    assert run(["ls", "--store", str(store)]) == 0
    told = capsys.readouterr().out
    assert "int8" in told and "scale" not in told
