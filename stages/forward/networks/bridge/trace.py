"""What a pass through somebody's modules does, call by call: which module got which states, and gave which.

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

__all__ = ["Call", "Slot", "at_slot", "given", "same", "tensors_in", "traced", "with_slot"]

Slot = str
"""Where a tensor is among what a module gets or gives: "0" by position, "hidden_states" by name, "" where it
is all that is given."""


@dataclass
class Call:
    """One call of a module.

    path: of the module. began, ended: places in the order of all beginnings and ends. above: the calls it was
    made in, outermost first. taken, made: copies of the states among its arguments and results, by slot.
    """

    path: str
    began: int
    above: tuple[Call, ...]
    taken: Mapping[Slot, Tensor]
    ended: int = -1
    made: Mapping[Slot, Tensor] = field(default_factory=dict)


def tensors_in(found: Any) -> Iterator[tuple[Slot, Tensor]]:
    """(slot, tensor) of the tensors at the top of arguments or results."""
    if isinstance(found, Tensor):
        yield "", found
    elif isinstance(found, Mapping):
        yield from ((str(name), each) for name, each in found.items() if isinstance(each, Tensor))
    elif isinstance(found, tuple | list):
        yield from ((str(place), each) for place, each in enumerate(found) if isinstance(each, Tensor))


def given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[Slot, Tensor]:
    """The tensors among arguments, by slot."""
    return {**dict(tensors_in(args)), **dict(tensors_in(kwargs))}


def at_slot(found: Any, slot: Slot) -> Tensor:
    """The tensor at a slot of what a module gave. Raises LookupError or TypeError where there is none."""
    if slot == "":
        value = found
    else:
        value = found[slot] if isinstance(found, Mapping) else found[int(slot)]
    if not isinstance(value, Tensor):
        raise TypeError(type(value).__name__)
    return value


def with_slot(found: Any, slot: Slot, value: Tensor) -> Any:
    """What a module gave with another tensor at a slot."""
    if slot == "":
        return value
    if isinstance(found, Mapping):
        found[slot] = value  # type: ignore[index]  # results by name are ordered dicts
        return found
    parts = [value if place == int(slot) else each for place, each in enumerate(found)]
    return type(found)(*parts) if hasattr(found, "_fields") else type(found)(parts)


def traced(
    module: nn.Module, run: Callable[[], Any], is_state: Callable[[Tensor], bool]
) -> tuple[list[Call], Any]:
    """Every call of a module below `module` while `run` runs, in order of beginning; and what `run` gives.

    is_state: which tensors are kept.
    """
    calls: list[Call] = []
    with _watched(module, calls, is_state):
        result = run()
    return calls, result


@contextmanager
def _watched(module: nn.Module, calls: list[Call], is_state: Callable[[Tensor], bool]) -> Iterator[None]:
    clock, handles = itertools.count(), list[RemovableHandle]()
    under_way: list[Call] = []

    def states(found: Mapping[Slot, Tensor]) -> dict[Slot, Tensor]:
        return {slot: each.detach().clone() for slot, each in found.items() if is_state(each)}

    def watch(path: str, each: nn.Module) -> None:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = Call(path, next(clock), tuple(under_way), states(given(args, kwargs)))
            calls.append(call)
            under_way.append(call)

        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
            call = under_way.pop()
            call.ended, call.made = next(clock), states(dict(tensors_in(made)))

        handles.append(each.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(each.register_forward_hook(after, with_kwargs=True))

    try:
        for path, each in module.named_modules():
            if path:
                watch(path, each)
        yield
    finally:
        for handle in handles:
            handle.remove()


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two states are one: to the bit, as nothing was computed between them."""
    return one.shape == other.shape and torch.equal(one, other)
