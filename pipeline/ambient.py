"""Settings of torch that a program makes around a call, and that would change what is computed inside.

No key names them: a store would hold two different results under one key. So `plain_torch` surrounds every
call that computes: each setting is put back to what torch begins with, and restored afterwards, or the call
is refused. One begins otherwise: cuDNN's attention is left out (see `_KERNELS`). pipeline/DESIGN.md lists
all settings that torch has, those that are left alone included.

Border: the process's settings; knows no model. Imports neither torch nor numpy: what nobody imported has no
settings.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

from ..store.errors import ConfigError

__all__ = ["OF_PROCESS", "OF_THREAD", "each_in_plain_torch", "plain_torch", "steps_in_plain_torch"]

_AUTOCAST = ("cpu", "cuda", "mps", "xpu")
"""Device types whose automatic casts are switched off."""
_PRECISE = "ieee"
"""Products and convolutions in the dtype of their operands, as torch calls it."""
_OBSERVERS = ("torch.utils.flop_counter", "torch.utils.module_tracker")
"""Modules of dispatch modes and of module hooks that count and change nothing."""
_ABOVE_ALL = 1e-40
"""A float32 below the smallest normal one, 1.2e-38."""
_Item = TypeVar("_Item")
_Given = ParamSpec("_Given")


class _Process:
    """Settings of the whole process, put back for as long as any thread computes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: set[object] = set()
        self._stack = ExitStack()

    @contextmanager
    def plain(self, torch: Any) -> Iterator[None]:
        caller = object()
        try:
            with self._lock:
                self._inside.add(caller)
                for setting in OF_PROCESS.values():
                    setting(torch, self._stack)
            yield
        finally:
            try:
                self._leave(caller)
            except BaseException:  # interrupted
                self._leave(caller)
                raise

    def _leave(self, caller: object) -> None:
        with self._lock:
            self._inside.discard(caller)
            if not self._inside:
                self._stack.close()


_inside = threading.local()
_process = _Process()


@contextmanager
def plain_torch() -> Iterator[None]:
    """Compute as torch does where nobody changed a setting; also a decorator of functions.

    Costs some 30 microseconds; a call inside another one costs one.
    Raises ConfigError for a setting that can only be refused: modes, transforms and hooks of the caller.
    """
    if getattr(_inside, "is_plain", False):
        yield
        return
    torch: Any = sys.modules.get("torch")
    with ExitStack() as stack:
        if torch is None or not hasattr(torch, "backends"):
            _numpy_errors(torch, stack)
            yield
            return
        for setting in OF_THREAD.values():
            setting(torch, stack)
        stack.enter_context(_process.plain(torch))
        stack.callback(setattr, _inside, "is_plain", False)
        _inside.is_plain = True
        yield


def each_in_plain_torch(items: Iterator[_Item]) -> Iterator[_Item]:
    """The items of an iterator that computes them, each in `plain_torch`; whoever takes one is outside."""
    while True:
        with plain_torch():
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def steps_in_plain_torch(
    function: Callable[_Given, Iterator[_Item]],
) -> Callable[_Given, Iterator[_Item]]:
    """A decorator of generators: each item is computed in `plain_torch`, whatever the consumer sets between
    two of them."""

    @functools.wraps(function)
    def stepping(*args: _Given.args, **kwargs: _Given.kwargs) -> Iterator[_Item]:
        return each_in_plain_torch(function(*args, **kwargs))

    return stepping


def _autocast(torch: Any, stack: ExitStack) -> None:
    for device in _AUTOCAST:
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))


def _default_dtype(torch: Any, stack: ExitStack) -> None:
    if (dtype := torch.get_default_dtype()) is not torch.float32:
        stack.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)


def _default_device(torch: Any, stack: ExitStack) -> None:
    if torch.get_default_device().type != "cpu":
        stack.enter_context(torch.device("cpu"))


def _inference_mode(torch: Any, stack: ExitStack) -> None:
    if torch.is_inference_mode_enabled():
        stack.enter_context(torch.inference_mode(False))


def _fp32_precision(torch: Any, stack: ExitStack) -> None:
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    for above, operations in (
        (torch.backends, (cuda.matmul,)),
        (cudnn, (cudnn.conv, cudnn.rnn)),
        (mkldnn, (mkldnn.matmul, mkldnn.conv, mkldnn.rnn)),
    ):
        for operation in operations:
            precision = operation.fp32_precision
            if precision not in (_PRECISE, "none"):
                # "none" takes that of the whole library, or of all of them.
                inherited = precision in (above.fp32_precision, torch.backends.fp32_precision)
                stack.callback(setattr, operation, "fp32_precision", "none" if inherited else precision)
                operation.fp32_precision = _PRECISE


_REDUCED = {
    "allow_fp16_reduced_precision_reduction": True,
    "allow_bf16_reduced_precision_reduction": True,
    "allow_fp16_accumulation": False,
}
"""Switches of products on a GPU, and what torch begins with."""


def _reduced_precision(torch: Any, stack: ExitStack) -> None:
    products = torch.backends.cuda.matmul
    for name, default in _REDUCED.items():
        if (value := getattr(products, name)) != default:
            stack.callback(setattr, products, name, value)
            setattr(products, name, default)


_KERNELS = {"flash": True, "mem_efficient": True, "math": True, "cudnn": False}
"""Kernels of attention that torch may choose. It would begin with cuDNN's too, which plans every combination
of batch size and length when it first meets it: 66 ms each on an H100, at every token that is generated and
for every length in a corpus, to be 1 to 5 % faster where a shape repeats (512 and 4,096 tokens)."""


def _attention_kernels(torch: Any, stack: ExitStack) -> None:
    switches = torch.backends.cuda
    for kernel, is_allowed in _KERNELS.items():
        if getattr(switches, f"{kernel}_sdp_enabled")() != is_allowed:
            enable = getattr(switches, f"enable_{kernel}_sdp")
            stack.callback(enable, not is_allowed)
            enable(is_allowed)
    if switches.fp16_bf16_reduction_math_sdp_allowed():
        stack.callback(switches.allow_fp16_bf16_reduction_math_sdp, True)
        switches.allow_fp16_bf16_reduction_math_sdp(False)


def _flush_denormal(torch: Any, stack: ExitStack) -> None:
    if not (torch.full((), _ABOVE_ALL, device="cpu") * 1.0).item():
        stack.callback(torch.set_flush_denormal, True)
        torch.set_flush_denormal(False)


def _function_modes(torch: Any, stack: ExitStack) -> None:
    # `torch.device(…)` as a context is one, and neutralised above.
    modes = torch.overrides._get_current_function_mode_stack()
    own = [type(mode) for mode in modes if type(mode).__module__ != "torch.utils._device"]
    _refuse(own and f"the function mode {own[-1].__name__}", "leave its `with` block")


def _dispatch_modes(torch: Any, stack: ExitStack) -> None:
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    own = [type(mode) for mode in modes if type(mode).__module__ not in _OBSERVERS]
    _refuse(own and f"the dispatch mode {own[-1].__name__}", "leave its `with` block")


_RAISES = ("raise", "call")
"""What numpy may do beside a number that overflows, other than tell of it."""
_NUMPY_ERRORS: dict[str, Any] = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
"""What numpy begins with."""


def _numpy_errors(torch: Any, stack: ExitStack) -> None:
    numpy: Any = sys.modules.get("numpy")
    chosen = {} if numpy is None else numpy.geterr()
    if raising := [kind for kind, how in chosen.items() if how in _RAISES]:
        stack.enter_context(numpy.errstate(**{kind: _NUMPY_ERRORS[kind] for kind in raising}))


def _transforms(torch: Any, stack: ExitStack) -> None:
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    _refuse(is_transformed and "a transform of torch.func (vmap, grad, …)", "call it outside")


def _saved_tensors(torch: Any, stack: ExitStack) -> None:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    _refuse(hooks and "hooks on saved tensors", "leave their `with` block")


def _module_hooks(torch: Any, stack: ExitStack) -> None:
    if not torch.nn.modules.module._has_any_global_hook():
        return
    modules = torch.nn.modules.module
    # Those with keywords, and those that are always called, are among the forward hooks.
    hooks = [
        hook
        for kind in ("backward_pre", "backward", "forward_pre", "forward")
        for hook in getattr(modules, f"_global_{kind}_hooks").values()
    ]
    own = any(type(getattr(hook, "__self__", None)).__module__ not in _OBSERVERS for hook in hooks)
    _refuse(own and "hooks on all torch modules", "remove them")


def _refuse(what: Any, remedy: str) -> None:
    if what:
        raise ConfigError(
            f"expected torch without {what}, which may change what is computed; {remedy} before mizarr "
            "computes"
        )


Setting = Callable[[Any, ExitStack], None]
"""Puts a setting of torch back to what torch begins with for as long as the stack lasts, or refuses it."""
OF_THREAD: dict[str, Setting] = {
    "autocast": _autocast,
    "default device": _default_device,
    "inference mode": _inference_mode,
    "flush denormal": _flush_denormal,
    "numpy errors": _numpy_errors,
    "function modes": _function_modes,
    "dispatch modes": _dispatch_modes,
    "function transforms": _transforms,
    "saved-tensor hooks": _saved_tensors,
}
"""Settings of the calling thread, by name."""
OF_PROCESS: dict[str, Setting] = {
    "default dtype": _default_dtype,
    "float32 precision": _fp32_precision,
    "reduced precision": _reduced_precision,
    "attention kernels": _attention_kernels,
    "module hooks": _module_hooks,
}
"""Settings of all threads, by name."""
