"""Lens files: those of the reference read and written alike, damaged and foreign ones refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

from mizarr.stages.lenses.artifacts import read_lens, require_fit, write_lens
from mizarr.stages.lenses.jacobian import OUTPUTS, merged
from mizarr.store.errors import MizarrError, ShapeError, WeightsError
from tests.stages.lenses.reference import NAMES, SET, arrays, meta, model_of, needs_reference

WIDTH = 4


def lens_of(**attrs: Any) -> xr.Dataset:
    jacobian = np.random.default_rng(0).standard_normal((2, WIDTH, WIDTH)).astype(np.float32)
    values = {"jacobian": jacobian, "n_prompts": np.int64(3), "deviation": np.ones(2)}
    return xr.Dataset({k: OUTPUTS[k].variable(v) for k, v in values.items()}, {"layer": [0, 2]}, attrs)


@needs_reference
@pytest.mark.parametrize("name", NAMES)
def test_files_of_the_reference_are_read_and_written_alike(name, tmp_path):
    for stem, told in meta(name)["artifacts"].items():
        path = SET / "cases" / name / "artifacts" / f"{stem}.pt"
        lens = read_lens(path)
        np.testing.assert_array_equal(lens["jacobian"], arrays(name, "artifacts")[f"{stem}.J"])
        assert lens["jacobian"].dtype == np.float32
        assert lens["layer"].values.tolist() == told["layers"]
        assert int(lens["n_prompts"]) == told["n_prompts"]
        assert lens.sizes["hidden"] == told["d_model"]
        assert lens.attrs == {key: value for key, value in told["metadata"].items() if key != "n_prompts"}
        require_fit(lens, model_of(name).config, name=lens.attrs.get("model_name"))
        if stem == "checkpoint":
            continue
        theirs = torch.load(path, weights_only=True)
        dtype = str(theirs["J"][0].dtype).removeprefix("torch.")
        write_lens(lens, tmp_path / "lens.pt", dtype=dtype)
        ours = torch.load(tmp_path / "lens.pt", weights_only=True)
        for content in (ours, theirs):
            content["J"] = {layer: matrix.tolist() for layer, matrix in content["J"].items()}
        assert ours == theirs


@needs_reference
def test_a_checkpoint_does_not_merge_with_a_finished_fit():
    folder = SET / "cases" / "llama" / "artifacts"
    with pytest.raises(ShapeError, match="expected lenses of one fit"):
        merged([read_lens(folder / "default_float32.pt"), read_lens(folder / "checkpoint.pt")])


def test_the_file_of_a_fit_keeps_its_settings_and_no_more_bytes_than_its_matrices(tmp_path):
    lens = lens_of(target_layer=3, skip_first_positions=16)
    write_lens(lens, tmp_path / "lens.pt", dtype="float32", metadata={"corpus": "c"})
    again = read_lens(tmp_path / "lens.pt")
    assert again.attrs == {"target_layer": 3, "skip_first_positions": 16, "corpus": "c"}
    xr.testing.assert_equal(again, lens.drop_vars("deviation"))
    assert [path.name for path in tmp_path.iterdir()] == ["lens.pt"]
    # Views would have stored the whole array twice.
    storages = [
        matrix.untyped_storage().nbytes() for matrix in torch.load(tmp_path / "lens.pt")["J"].values()
    ]
    assert storages == [4 * WIDTH * WIDTH] * 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"J": None}, "expected a lens"),
        ({"J": {}}, "expected a lens"),
        ({"d_model": None}, "expected the d_model of the lens"),
        ({"d_model": 5}, r"expected a matrix of 5 x 5 \(d_model\) numbers"),
        ({"n_prompts": -1}, "expected the number of prompts"),
        ({"n_prompts": True}, "expected the number of prompts"),
        ({"J": {"a": torch.zeros(WIDTH, WIDTH)}}, "for layer 'a'"),
        ({"J": {-1: torch.zeros(WIDTH, WIDTH)}}, "for layer -1"),
        ({"J": {0: [[1.0]]}}, "found list for layer 0"),
        ({"J": {0: torch.zeros(WIDTH, WIDTH, dtype=torch.int64)}}, "expected a matrix"),
        ({"J": {0: torch.full((WIDTH, WIDTH), float("nan"))}}, "expected finite numbers"),
        ({"jacobian_sum": {0: torch.zeros(WIDTH, WIDTH)}, "J": ..., "n_done": 0}, "at least 1, found 0"),
    ],
)
def test_a_file_that_is_no_lens_is_one_line(change, said, tmp_path):
    content = {"J": {0: torch.eye(WIDTH)}, "n_prompts": 1, "source_layers": [0], "d_model": WIDTH} | change
    path = tmp_path / "lens.pt"
    torch.save({key: value for key, value in content.items() if value is not ...}, path)
    with pytest.raises(WeightsError, match=said) as caught:
        read_lens(path)
    assert "\n" not in str(caught.value)


def test_missing_damaged_and_foreign_files_are_one_line(tmp_path):
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04 and no more")
    torch.save([1, 2], tmp_path / "list.pt")
    for name in ("absent.pt", "cut.pt", "list.pt"):
        with pytest.raises(WeightsError, match="expected") as caught:
            read_lens(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_what_cannot_be_written_leaves_no_file(tmp_path):
    lens = lens_of(target_layer=3)
    wrong: list[tuple[xr.Dataset, dict[str, Any]]] = [
        (lens, {"dtype": "int8"}),
        (lens, {"metadata": {"target_layer": 4}}),
        (lens, {"metadata": {"n_prompts": 4}}),
        (lens.assign(jacobian=lens["jacobian"] * 1e6), {}),
    ]
    for changed, given in wrong:
        with pytest.raises(WeightsError, match="expected"):
            write_lens(changed, tmp_path / "lens.pt", **given)
    assert not list(tmp_path.iterdir())


@needs_reference
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lens: lens.isel(hidden=slice(20), target_hidden=slice(20)), "width 24, found one with 20"),
        (lambda lens: lens.assign_coords(layer=[0, 1, 3]), "expected a lens of layers 0..2"),
        (lambda lens: lens.assign_attrs(target_layer=5), "target layer 3, found one with 5"),
        (lambda lens: lens.assign_attrs(model_name="gpt2"), "model 'models/llama', found one with 'gpt2'"),
        (lambda lens: lens.assign_attrs(model_revision="abc"), "revision of the model 'def', found one"),
    ],
)
def test_a_lens_of_another_model_is_one_line(change, said):
    lens = read_lens(SET / "cases" / "llama" / "artifacts" / "default_float32.pt")
    with pytest.raises(MizarrError, match=said) as caught:
        require_fit(change(lens), model_of("llama").config, name="models/llama", revision="def")
    assert "\n" not in str(caught.value)
