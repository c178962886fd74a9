"""Settings of torch and numpy that a program may have made around a call, and what mizarr does about each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


@contextlib.contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def called(function: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    function(value)
    try:
        yield
    finally:
        function(before)


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if isinstance(result, torch.Tensor) and result.is_floating_point() else result


class Rounding(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def module_hook() -> Iterator[None]:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def vmapped() -> Iterator[None]:
    from torch._C._functorch import _vmap_decrement_nesting, _vmap_increment_nesting

    _vmap_increment_nesting(2, "error")
    try:
        yield
    finally:
        _vmap_decrement_nesting()


B = torch.backends
PUT_BACK: dict[tuple[str, str], Callable[[], AbstractContextManager[Any]]] = {
    ("autocast", "bfloat16 on the CPU"): lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ("autocast", "float16 on the CPU"): lambda: torch.autocast("cpu", dtype=torch.float16),
    ("default device", "meta"): lambda: called(torch.set_default_device, "meta", None),
    ("default device", "a context"): lambda: torch.device("meta"),
    ("inference mode", "on"): torch.inference_mode,
    ("flush denormal", "on"): lambda: called(torch.set_flush_denormal, True, False),
    ("numpy errors", "raise"): lambda: np.errstate(all="raise"),
    ("numpy errors", "call"): lambda: np.errstate(all="call", call=lambda *_: None),
    ("default dtype", "float64"): lambda: called(torch.set_default_dtype, torch.float64, torch.float32),
    ("default dtype", "bfloat16"): lambda: called(torch.set_default_dtype, torch.bfloat16, torch.float32),
    ("float32 precision", "medium"): lambda: called(torch.set_float32_matmul_precision, "medium", "highest"),
    ("float32 precision", "high"): lambda: called(torch.set_float32_matmul_precision, "high", "highest"),
    ("float32 precision", "tf32 everywhere"): lambda: attribute(B, "fp32_precision", "tf32"),
    ("float32 precision", "allow_tf32"): lambda: attribute(B.cuda.matmul, "allow_tf32", True),
    ("float32 precision", "bfloat16 in oneDNN"): lambda: attribute(B.mkldnn, "fp32_precision", "bf16"),
    ("reduced precision", "float16 sums"): lambda: attribute(B.cuda.matmul, "allow_fp16_accumulation", True),
    ("reduced precision", "no bfloat16 reductions"): lambda: attribute(
        B.cuda.matmul, "allow_bf16_reduced_precision_reduction", False
    ),
    ("reduced precision", "no float16 reductions"): lambda: attribute(
        B.cuda.matmul, "allow_fp16_reduced_precision_reduction", False
    ),
    ("attention kernels", "math alone"): lambda: sdpa_kernel(SDPBackend.MATH),
    ("attention kernels", "without flash"): lambda: called(B.cuda.enable_flash_sdp, False, True),
    ("attention kernels", "reduced math"): lambda: called(
        B.cuda.allow_fp16_bf16_reduction_math_sdp, True, False
    ),
}
"""(Setting, variant) -> a context in which a program has made it."""
REFUSED: dict[tuple[str, str], Callable[[], AbstractContextManager[Any]]] = {
    ("function modes", "that doubles"): Doubling,
    ("dispatch modes", "that rounds"): Rounding,
    ("function transforms", "vmap"): vmapped,
    ("saved-tensor hooks", "that halve"): lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda x: x / 2, lambda x: x
    ),
    ("module hooks", "forward"): module_hook,
}
LEFT_ALONE: dict[tuple[str, str], Callable[[], AbstractContextManager[Any]]] = {
    ("gradient mode", "off"): torch.no_grad,
    ("gradient mode", "on"): torch.enable_grad,
    ("deterministic algorithms", "on"): lambda: called(torch.use_deterministic_algorithms, True, False),
    ("anomaly detection", "on"): torch.autograd.detect_anomaly,
    ("oneDNN", "off"): lambda: B.mkldnn.flags(enabled=False),
    ("linear algebra library", "chosen"): lambda: called(
        B.cuda.preferred_linalg_library, "default", "default"
    ),
    ("cuDNN", "benchmark"): lambda: attribute(B.cudnn, "benchmark", True),
    ("threads", "one"): lambda: called(torch.set_num_threads, 1, torch.get_num_threads()),
    ("threads", "three"): lambda: called(torch.set_num_threads, 3, torch.get_num_threads()),
    ("compile stance", "eager"): lambda: torch.compiler.set_stance("force_eager"),
    ("fast path of attention modules", "off"): lambda: called(B.mha.set_fastpath_enabled, False, True),
    ("order of contractions", "off"): lambda: attribute(B.opt_einsum, "enabled", False),
    ("NNPACK", "off"): lambda: B.nnpack.flags(enabled=False),
    ("forward-mode derivatives", "on"): torch.autograd.forward_ad.dual_level,
    ("threads of backward passes", "one"): lambda: torch.autograd.set_multithreading_enabled(False),
    ("random state", "another seed"): lambda: called(torch.manual_seed, 5, 0),
    ("print options", "short"): lambda: called(lambda n: torch.set_printoptions(precision=n), 1, 4),
}
