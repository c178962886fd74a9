"""One setting for what is done to the process for speed, noted with whatever was computed."""

from __future__ import annotations

import pytest
import torch

import mizarr
from mizarr.stages.forward.models import memory
from mizarr.stages.forward.networks.kernels import products
from mizarr.stages.forward.networks.kernels.tuning import is_tuned
from mizarr.store.errors import ConfigError


@pytest.fixture(autouse=True)
def asked_anew():
    """Both choices are made once per process."""
    asked = (products._onednn, memory.keep_freed_memory)
    for each in asked:
        each.cache_clear()
    yield
    for each in asked:
        each.cache_clear()


def test_a_process_that_is_not_tuned_leaves_products_to_torch_and_the_allocator_alone(monkeypatch):
    monkeypatch.setattr(products, "_processor_maker", lambda: "AuthenticAMD")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert is_tuned() and products._onednn() is torch.ops.mkldnn._linear_pointwise
    products._onednn.cache_clear()
    monkeypatch.setenv("MIZARR_TUNING", "off")
    called = []
    monkeypatch.setattr(memory.ctypes, "CDLL", called.append)
    assert products._onednn() is None
    assert memory.keep_freed_memory() is False and not called


def test_anything_but_on_and_off_is_refused(monkeypatch):
    monkeypatch.setenv("MIZARR_TUNING", "no")
    with pytest.raises(ConfigError, match="expected MIZARR_TUNING to be 'on' or 'off', found 'no'"):
        is_tuned()


@pytest.mark.parametrize("setting", ["on", "off"])
def test_provenance_tells_the_setting(checkpoint, tmp_path, monkeypatch, setting):
    monkeypatch.setenv("MIZARR_TUNING", setting)
    store = mizarr.open_store(tmp_path / "store", durability="process")
    model = mizarr.Model.from_pretrained(checkpoint())
    mizarr.capture(model, [[1, 2, 3]], "blocks.0.hook_resid_post", store=store, progress=False)
    mizarr.run(model, [mizarr.Run([1, 2])], store=store)
    told = [note for record in store.records() for note in store.provenance(record) if "identity" in note]
    assert len(told) == 2 and {note["tuning"] for note in told} == {setting}
