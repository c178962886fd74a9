"""A CUDA device for machines without one: pytest -m gpu -p tests.pretend_cuda

It computes on the CPU and refuses what a GPU refuses (pretend_cuda.cpp, compiled on first use: a minute or
two, with a C++ compiler and ninja). So tests marked `gpu` say on any machine that all that meets lies on one
device, that nothing is read before it arrived, and that memory may run out; a GPU's roundings and speed only
a GPU says.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

NAME = "pretend_cuda"
SOURCE = Path(__file__).with_suffix(".cpp")
BUILD = Path(__file__).parents[1] / "build" / NAME
TOTAL = 8 << 30
"""Bytes it says it has."""


def compiled() -> Path:
    """The library, made where it is not or its source is newer; by another process, as that imports torch."""
    BUILD.mkdir(parents=True, exist_ok=True)
    load = f"load({NAME!r}, {str(SOURCE)!r}, build_directory={str(BUILD)!r})"
    code = f"from torch.utils.cpp_extension import load; {load}"
    subprocess.run([sys.executable, "-c", code], check=True)
    return BUILD / f"{NAME}.so"


def loaded(library: Path) -> ModuleType:
    """Its module. torch asks for a device once, as it is imported: the library is there before it."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    for name in ("torch_global_deps", "c10", "torch_cpu", "torch", "torch_python"):
        ctypes.CDLL(str(Path(found.origin).parent / "lib" / f"lib{name}.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if "torch" in sys.modules:
    raise pytest.UsageError("expected to be there before torch, found it imported; start pytest with -p")
device = loaded(compiled())

import torch  # noqa: E402 - see `loaded`

if torch.version.cuda is not None:
    raise pytest.UsageError(
        f"expected a torch for CPUs alone, found one for CUDA {torch.version.cuda}; "
        "leave out -p tests.pretend_cuda where there is a GPU"
    )


class Event:
    """All that was begun, whenever it is asked."""

    def __init__(self, **_: Any) -> None: ...

    def record(self, stream: object = None) -> None:
        """Everything counts."""

    def synchronize(self) -> None:
        """Until nothing is under way."""
        device.synchronize()


ANSWERS = {
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "current_stream": lambda device=None: None,
    "get_device_name": lambda device=None: "a CPU that says it is a GPU",
    "synchronize": lambda _=None: device.synchronize(),
    "empty_cache": lambda: None,
    "mem_get_info": lambda _=None: (TOTAL - device.held(), TOTAL),
    "memory_allocated": lambda _=None: device.held(),
    "max_memory_allocated": lambda _=None: device.peak(),
    "reset_peak_memory_stats": lambda _=None: device.reset_peak(),
    "set_per_process_memory_fraction": lambda share, _=None: device.set_limit(int(share * TOTAL)),
    "set_sync_debug_mode": lambda mode: device.set_must_not_wait(mode == "error"),
    "Event": Event,
}
for question, answer in ANSWERS.items():
    setattr(torch.cuda, question, answer)
