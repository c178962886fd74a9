"""Settings of torch and numpy that the calling program may have changed and that would change results.

No key contains them, so two different results could get one key. `plain_torch` therefore surrounds every call
that computes: each setting is set to torch's default and restored afterwards, or the call is refused. One
exception to the default: cuDNN's attention kernel is switched off (see `_KERNELS`). pipeline/DESIGN.md lists
all settings of torch, including those that are left alone.

Border: the settings of this process; knows no model. Imports neither torch nor numpy: a library that nobody
imported has no settings.
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
"""Device types for which autocast is switched off."""
_PRECISE = "ieee"
"""torch's name for matrix products and convolutions in the full precision of float32 operands (no TF32)."""
_OBSERVERS = ("torch.utils.flop_counter", "torch.utils.module_tracker")
"""Modules whose dispatch modes and module hooks only count and change no result."""
_SUBNORMAL = 1e-40
"""A subnormal float32 (the smallest normal one is 1.2e-38); 0 if denormals are flushed."""
_Item = TypeVar("_Item")
_Params = ParamSpec("_Params")


class _ProcessSettings:
    """Keeps settings of the whole process at torch's defaults as long as any thread is inside `plain`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: set[object] = set()
        self._stack = ExitStack()  # restores the settings when it is closed

    @contextmanager
    def plain(self, torch: Any) -> Iterator[None]:
        """Context manager in which the settings are torch's defaults; the last caller restores them."""
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
_process = _ProcessSettings()


@contextmanager
def plain_torch() -> Iterator[None]:
    """Context manager or decorator: settings of torch and numpy that change results have their defaults.

    They are restored at the end. Costs about 30 microseconds; within another `plain_torch`, one microsecond.

    Raises:
        ConfigError: The caller uses a mode, transform or hook that cannot be switched off.
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
    """Yield the items of a lazy iterator, each computed with torch's default settings; between two items the
    consumer's own settings apply."""
    while True:
        with plain_torch():
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def steps_in_plain_torch(
    function: Callable[_Params, Iterator[_Item]],
) -> Callable[_Params, Iterator[_Item]]:
    """Decorator of generator functions: each item is computed with torch's default settings, whatever the
    consumer sets between two items."""

    @functools.wraps(function)
    def stepping(*args: _Params.args, **kwargs: _Params.kwargs) -> Iterator[_Item]:
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
    operations_of_library = (
        (torch.backends, (cuda.matmul,)),
        (cudnn, (cudnn.conv, cudnn.rnn)),
        (mkldnn, (mkldnn.matmul, mkldnn.conv, mkldnn.rnn)),
    )
    for library, operations in operations_of_library:
        for operation in operations:
            precision = operation.fp32_precision
            if precision not in (_PRECISE, "none"):
                # "none" inherits the setting of the library, or of all libraries; it is restored as "none".
                is_inherited = precision in (library.fp32_precision, torch.backends.fp32_precision)
                stack.callback(setattr, operation, "fp32_precision", "none" if is_inherited else precision)
                operation.fp32_precision = _PRECISE


_REDUCED_PRECISION = {
    "allow_fp16_reduced_precision_reduction": True,
    "allow_bf16_reduced_precision_reduction": True,
    "allow_fp16_accumulation": False,
}
"""Attributes of `torch.backends.cuda.matmul` and their defaults."""


def _reduced_precision(torch: Any, stack: ExitStack) -> None:
    products = torch.backends.cuda.matmul
    for name, default in _REDUCED_PRECISION.items():
        if (value := getattr(products, name)) != default:
            stack.callback(setattr, products, name, value)
            setattr(products, name, default)


_KERNELS = {"flash": True, "mem_efficient": True, "math": True, "cudnn": False}
"""Attention kernels that torch may choose. Its default would include cuDNN's, which plans every new
combination of batch size and length: 66 ms each on an H100, at every generated token and for every length in
a corpus, to be 1 to 5 % faster where a shape repeats (512 and 4,096 tokens)."""


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
    # torch sets this without a way to read it, so a product with a subnormal number tells.
    if not (torch.full((), _SUBNORMAL, device="cpu") * 1.0).item():
        stack.callback(torch.set_flush_denormal, True)
        torch.set_flush_denormal(False)


def _function_modes(torch: Any, stack: ExitStack) -> None:
    # `with torch.device(…)` is a function mode too; `_default_device` neutralises it.
    modes = torch.overrides._get_current_function_mode_stack()
    foreign = [type(mode) for mode in modes if type(mode).__module__ != "torch.utils._device"]
    _refuse(foreign and f"the torch function mode {foreign[-1].__name__}", "leave its `with` block")


def _dispatch_modes(torch: Any, stack: ExitStack) -> None:
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    foreign = [type(mode) for mode in modes if type(mode).__module__ not in _OBSERVERS]
    _refuse(foreign and f"the torch dispatch mode {foreign[-1].__name__}", "leave its `with` block")


_INTERRUPTING = ("raise", "call")
"""Actions of `numpy.seterr` that interrupt a computation or call the user's code."""
_NUMPY_ERRORS: dict[str, Any] = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
"""numpy's default action for each kind of floating-point error."""


def _numpy_errors(torch: Any, stack: ExitStack) -> None:
    numpy: Any = sys.modules.get("numpy")
    actions = {} if numpy is None else numpy.geterr()
    if raising := [kind for kind, action in actions.items() if action in _INTERRUPTING]:
        stack.enter_context(numpy.errstate(**{kind: _NUMPY_ERRORS[kind] for kind in raising}))


def _transforms(torch: Any, stack: ExitStack) -> None:
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    _refuse(is_transformed and "a transform of torch.func (vmap, grad, …)", "call mizarr outside of it,")


def _saved_tensors(torch: Any, stack: ExitStack) -> None:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    _refuse(hooks and "hooks on saved tensors (torch.autograd.graph)", "leave their `with` block")


def _module_hooks(torch: Any, stack: ExitStack) -> None:
    if not torch.nn.modules.module._has_any_global_hook():
        return
    modules = torch.nn.modules.module
    # torch keeps hooks with_kwargs and always_call in the dict of forward hooks as well.
    hooks = [
        hook
        for kind in ("backward_pre", "backward", "forward_pre", "forward")
        for hook in getattr(modules, f"_global_{kind}_hooks").values()
    ]
    is_foreign = any(type(getattr(hook, "__self__", None)).__module__ not in _OBSERVERS for hook in hooks)
    _refuse(is_foreign and "hooks on all torch modules (register_module_forward_hook)", "remove them")


def _refuse(setting: Any, remedy: str) -> None:
    """Raise ConfigError if `setting`, the description of a setting in use, is not empty."""
    if setting:
        raise ConfigError(
            f"the program uses {setting}, which may change results and cannot be switched off; {remedy} "
            "before mizarr computes"
        )


Setting = Callable[[Any, ExitStack], None]
"""Sets a torch setting to its default until the stack closes; ConfigError if that is impossible."""
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
"""Settings of the calling thread by name."""
OF_PROCESS: dict[str, Setting] = {
    "default dtype": _default_dtype,
    "float32 precision": _fp32_precision,
    "reduced precision": _reduced_precision,
    "attention kernels": _attention_kernels,
    "module hooks": _module_hooks,
}
"""Settings of the whole process by name."""
