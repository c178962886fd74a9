"""Trace of a pass through arbitrary torch modules: inputs and outputs of each call of a submodule.

Border: modules and tensors; knows no layers and no hook points.

Axes: B prompts, S positions; a state is a floating-point tensor [B, S, width], or [S, B, width] in families
that put positions first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

__all__ = ["Call", "Slot", "argument_tensors", "at_slot", "same", "tensors_in", "traced", "with_slot"]

Slot = str
"""Place of a tensor among a module's arguments or results: "0" by position, "hidden_states" by name, "" if it
is the whole result."""


@dataclass
class Call:
    """One call of a module during a traced pass, with copies of the hidden states that it took and gave."""

    path: str
    """Dotted path of the module."""
    began: int
    """Index of its start in the order of all starts and ends of calls."""
    above: tuple[Call, ...]
    """Enclosing calls, outermost first."""
    taken: Mapping[Slot, Tensor]
    """Copies of the hidden states among the arguments, by place in the argument list."""
    ended: int = -1
    """Index of its end in the order of all starts and ends; -1 while it runs."""
    made: Mapping[Slot, Tensor] = field(default_factory=dict)
    """Copies of the hidden states among the results, by place in the results."""


def tensors_in(values: Any) -> Iterator[tuple[Slot, Tensor]]:
    """(place, tensor) of each tensor at the top level of a module's arguments or results: a tensor, a
    mapping, a tuple or a list."""
    if isinstance(values, Tensor):
        yield "", values
    elif isinstance(values, Mapping):
        yield from ((str(name), value) for name, value in values.items() if isinstance(value, Tensor))
    elif isinstance(values, tuple | list):
        yield from ((str(i), value) for i, value in enumerate(values) if isinstance(value, Tensor))


def argument_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[Slot, Tensor]:
    """Place -> tensor, for the tensors among the positional and keyword arguments of a call."""
    return {**dict(tensors_in(args)), **dict(tensors_in(kwargs))}


def at_slot(result: Any, slot: Slot) -> Tensor:
    """Tensor at a slot of a module's result: index "0", key "hidden_states", or "" for the whole result.
    Raises LookupError or TypeError for an absent slot."""
    if slot == "":
        value = result
    else:
        value = result[slot] if isinstance(result, Mapping) else result[int(slot)]
    if not isinstance(value, Tensor):
        raise TypeError(type(value).__name__)
    return value


def with_slot(result: Any, slot: Slot, value: Tensor) -> Any:
    """A module's arguments or result with the tensor at a place replaced; tuples and lists are copied,
    mappings are changed in place."""
    if slot == "":
        return value
    if isinstance(result, Mapping):
        result[slot] = value  # type: ignore[index]  # transformers' named results are ordered dicts
        return result
    parts = [value if i == int(slot) else part for i, part in enumerate(result)]
    return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)


def traced(
    module: nn.Module, run: Callable[[], Any], is_state: Callable[[Tensor], bool]
) -> tuple[list[Call], Any]:
    """Run a function and record all calls of submodules.

    Arguments:
        module: module whose submodules are traced.
        run: runs a pass through the module.
        is_state: selects the tensors that are copied.

    Returns:
        Calls in order of their starts, and the result of `run`.
    """
    calls: list[Call] = []
    with _watched(module, calls, is_state):
        result = run()
    return calls, result


@contextmanager
def _watched(module: nn.Module, calls: list[Call], is_state: Callable[[Tensor], bool]) -> Iterator[None]:
    """Context in which every call of a submodule is appended to `calls`, by hooks that are removed at the
    end."""
    clock, handles = itertools.count(), list[RemovableHandle]()
    running: list[Call] = []

    def states(tensors: Mapping[Slot, Tensor]) -> dict[Slot, Tensor]:
        return {slot: tensor.detach().clone() for slot, tensor in tensors.items() if is_state(tensor)}

    def watch(path: str, submodule: nn.Module) -> None:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = Call(path, next(clock), tuple(running), states(argument_tensors(args, kwargs)))
            calls.append(call)
            running.append(call)

        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            call = running.pop()
            call.ended, call.made = next(clock), states(dict(tensors_in(result)))

        handles.append(submodule.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(submodule.register_forward_hook(after, with_kwargs=True))

    try:
        for path, submodule in module.named_modules():
            if path:
                watch(path, submodule)
        yield
    finally:
        for handle in handles:
            handle.remove()


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two hidden states are equal to the bit, so that nothing was computed between them."""
    return a.shape == b.shape and torch.equal(a, b)
