"""Bytes come to their places, by however many reads; a file that ends early is noticed."""

from __future__ import annotations

from io import FileIO

import pytest
import torch

from mizarr.stages.forward.checkpoints import reading


@pytest.mark.parametrize("slice_bytes", [7, 64, 1000, 1 << 20])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (13, 11)])
def test_a_tensor_is_filled_with_the_bytes_from_a_place_on(tmp_path, monkeypatch, shape, slice_bytes):
    monkeypatch.setattr(reading, "SLICE", slice_bytes)
    told = torch.randn(shape, dtype=torch.float64)
    (tmp_path / "f").write_bytes(b"before" + told.numpy().tobytes() + b"behind")
    into = torch.empty_like(told)
    with FileIO(tmp_path / "f") as file:
        assert reading.fill(into, file, 6) == told.nbytes
    assert torch.equal(into, told)


@pytest.mark.parametrize("slice_bytes", [7, 64, 1 << 20])
def test_of_a_file_that_ends_early_there_is_less(tmp_path, monkeypatch, slice_bytes):
    monkeypatch.setattr(reading, "SLICE", slice_bytes)
    (tmp_path / "f").write_bytes(bytes(100))
    with FileIO(tmp_path / "f") as file:
        assert reading.fill(torch.empty(50, dtype=torch.float32), file, 30) == 70
        assert reading.fill(torch.empty(50, dtype=torch.float32), file, 300) == 0
