"""One setting for what is done to the process for speed, noted with whatever was computed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import mizarr
from mizarr.stages.forward.models import residency
from mizarr.stages.forward.networks.kernels import products, tuning as tuning_module
from mizarr.stages.forward.networks.kernels.tuning import fix_order_of_sums, is_tuned, processor_maker
from mizarr.store.errors import ConfigError


@pytest.fixture(autouse=True)
def asked_anew():
    """Both choices are made once per process."""
    asked = (products._onednn, residency.keep_freed_memory)
    for each in asked:
        each.cache_clear()
    yield
    for each in asked:
        each.cache_clear()


def test_a_process_that_is_not_tuned_leaves_products_to_torch_and_the_allocator_alone(monkeypatch):
    monkeypatch.setattr(products, "processor_maker", lambda: "AuthenticAMD")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert is_tuned() and products._onednn() is torch.ops.mkldnn._linear_pointwise
    products._onednn.cache_clear()
    monkeypatch.setenv("MIZARR_TUNING", "off")
    called = []
    monkeypatch.setattr(residency.ctypes, "CDLL", called.append)
    assert products._onednn() is None
    assert residency.keep_freed_memory() is False and not called


def test_anything_but_on_and_off_is_refused(monkeypatch):
    monkeypatch.setenv("MIZARR_TUNING", "no")
    with pytest.raises(ConfigError, match="MIZARR_TUNING to be 'on' or 'off', found 'no'"):
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


@pytest.mark.parametrize(
    ("text", "maker"),
    [
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: EPYC\n", "AuthenticAMD"),
        ("vendor_id : GenuineIntel\n", "GenuineIntel"),
        ("processor\t: 0\nBogoMIPS\t: 50.00\n", None),
    ],
)
def test_processor_maker_is_what_linux_says(tmp_path, text, maker):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(text)
    assert processor_maker(cpuinfo) == maker
    assert processor_maker(tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("maker", "variables", "mode"),
    [
        ("GenuineIntel", {}, "AUTO,STRICT"),
        ("GenuineIntel", {"MIZARR_TUNING": "off"}, None),
        ("GenuineIntel", {"MKL_CBWR": "AVX2"}, "AVX2"),
        ("AuthenticAMD", {}, None),
        (None, {}, None),
    ],
)
def test_mkl_is_asked_for_one_order_of_sums_on_its_makers_processors(monkeypatch, maker, variables, mode):
    monkeypatch.setattr(tuning_module, "processor_maker", lambda: maker)
    monkeypatch.setattr(os, "environ", dict(variables))
    fix_order_of_sums()
    assert os.environ.get("MKL_CBWR") == mode


_PRODUCTS = """
import torch
import mizarr
generator = torch.Generator().manual_seed(0)
x, weight = (torch.randn(64, 512, generator=generator) for _ in range(2))
print(*(torch.equal((x @ weight.T)[:rows], x[:rows] @ weight.T) for rows in (4, 8, 12, 16, 20, 40)))
"""


@pytest.mark.skipif(processor_maker() != "GenuineIntel", reason="MKL has a strict mode for Intel's alone")
def test_importing_mizarr_is_early_enough():
    """In a fresh process, also where torch was imported before."""
    environ = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    printed = subprocess.run(
        [sys.executable, "-c", _PRODUCTS],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed.split() == ["True"] * 6
