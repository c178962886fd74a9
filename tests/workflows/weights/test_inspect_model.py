"""Facts about checkpoints, on files whose answers can be done on paper."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from mizarr.store.errors import WeightsError
from mizarr.workflows.weights.inspect_model import tensor_facts


@pytest.fixture
def checkpoint(tmp_path):
    def write(name="model.safetensors", **tensors):
        save_file(tensors, tmp_path / name)
        return tmp_path / name

    return write


def test_norm_mean_and_spread_of_a_small_matrix(checkpoint):
    path = checkpoint(w=np.array([[3, 0], [0, -4]], np.float32))
    (fact,) = tensor_facts([path])
    assert (fact.name, fact.shape, fact.dtype, fact.parameters) == ("w", (2, 2), "F32", 4)
    assert fact.norm == 5
    assert fact.mean == -0.25
    assert fact.std == pytest.approx(np.sqrt(25 / 4 - 1 / 16))
    assert fact.finite


def test_blocks_of_rows_give_the_numbers_of_the_whole(checkpoint, monkeypatch):
    values = np.random.default_rng(0).standard_normal((7, 3)).astype(ml_dtypes.bfloat16)
    path = checkpoint(w=values)
    monkeypatch.setattr("mizarr.workflows.weights.inspect_model.BLOCK", 6)
    seen = []
    (fact,) = tensor_facts([path], on_progress=seen.append)
    wide = values.astype(np.float64)
    assert seen == [6, 6, 6, 3]
    assert fact.dtype == "BF16"
    assert fact.norm == pytest.approx(np.linalg.norm(wide))
    assert (fact.mean, fact.std) == (pytest.approx(wide.mean()), pytest.approx(wide.std()))


def test_headers_are_enough_for_shapes(checkpoint):
    path = checkpoint(w=np.ones((2, 3), np.float16))
    (fact,) = tensor_facts([path], values=False)
    assert (fact.shape, fact.norm, fact.finite) == ((2, 3), None, None)


def test_scalars_vectors_and_empty_tensors_have_norms_too(checkpoint):
    path = checkpoint(a=np.array(2, np.float32), b=np.ones(4, np.float32), c=np.empty((0, 3), np.float32))
    assert [fact.norm for fact in tensor_facts([path])] == [2, 2, 0]


def test_a_tensor_with_a_nan_is_reported_not_measured(checkpoint):
    path = checkpoint(w=np.array([1, np.nan], np.float32))
    (fact,) = tensor_facts([path])
    assert fact.finite is False
    assert fact.norm is None


def test_tensors_of_all_shards_are_listed(checkpoint):
    one = checkpoint("1.safetensors", b=np.ones(1, np.float32), a=np.ones(1, np.float32))
    two = checkpoint("2.safetensors", c=np.ones(1, np.float32))
    assert [fact.name for fact in tensor_facts([one, two])] == ["a", "b", "c"]


def test_a_truncated_file_is_named(checkpoint):
    path = checkpoint(w=np.ones((64, 64), np.float32))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        list(tensor_facts([path]))
