"""Payloads: tensors that interventions carry, copied and checked when they are made, digested by content.

A payload is what it was when it was given: whoever writes to the original later changes no run and no key.
Nor does whoever writes to what an intervention shows of it: a torch tensor cannot be made read-only, so that
the payload itself stays private (`Owned`), digest and passes read that one, and everybody else gets copies.

Border: numbers, as torch tensors, numpy arrays or nested lists; knows no hook points. Never imports torch
unless a payload is one of its tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ....store.arrays import as_number
from ....store.digest import array_digest
from ....store.errors import InterventionError

if TYPE_CHECKING:
    from torch import Tensor

Payload = Any
"""A torch tensor, a numpy array, or nested sequences of floats."""
Chosen = tuple[int, list[int]] | None
"""Position axis of a payload, counted from the end, and entries of it; None for all."""


def checked_payload(name: str, value: Payload) -> Payload:
    """A copy that nobody else holds: a torch tensor as a tensor, anything else as a numpy array that cannot
    be written to; InterventionError unless floating point and finite."""
    if hasattr(value, "detach"):
        value = value.detach().clone()
    else:
        value = own_array(value)
        if value.dtype == np.float64:
            value = own_array(value.astype(np.float32))
    floating = value.is_floating_point() if hasattr(value, "is_floating_point") else value.dtype.kind in "fV"
    if not floating:
        raise InterventionError(
            f"{name}: expected a floating-point tensor, found dtype "
            f"{str(value.dtype).removeprefix('torch.')}; convert it to float32"
        )
    finite = (
        value.isfinite().all() if hasattr(value, "isfinite") else np.isfinite(value.astype(np.float32)).all()
    )
    if not bool(finite):
        raise InterventionError(
            f"{name}: expected finite numbers, found NaN or infinity in a tensor of shape {list(value.shape)}"
        )
    return value


def own_array(value: Any) -> Any:
    """A copy as a numpy array that cannot be written to."""
    found = np.array(value)
    found.setflags(write=False)
    return found


def is_payload(value: Any) -> bool:
    """Whether a value is a torch tensor or a numpy array."""
    return isinstance(value, np.ndarray) or (hasattr(value, "detach") and hasattr(value, "shape"))


def copied(value: Any) -> Any:
    """The same value with every tensor and array in it copied, through tuples, lists and dicts; values
    without any are given back as they are."""
    if isinstance(value, np.ndarray):
        return own_array(value)
    if is_payload(value):
        return value.detach().clone()
    if isinstance(value, dict):
        items = {name: copied(item) for name, item in value.items()}
        return items if any(items[name] is not value[name] for name in items) else value
    if isinstance(value, tuple | list):
        parts = [copied(item) for item in value]
        is_same = all(part is item for part, item in zip(parts, value, strict=True))
        return value if is_same else tuple(parts) if isinstance(value, tuple) else parts
    return value


class Owned:
    """Descriptor of a dataclass field that holds payloads: reading it gives a copy.

    The payload itself lies in the instance's `vars` under the name of the field, where `owned` reads it.
    """

    def __init__(self, *default: Any) -> None:
        """default: value of the field where none is given; a field without one must be given."""
        self._default = default
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is not None:
            return copied(vars(instance)[self._name])
        if not self._default:
            raise AttributeError(self._name)  # what tells `dataclass` that the field has no default
        return self._default[0]

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self._name] = value


def owned(instance: Any, name: str) -> Any:
    """The payload itself that an `Owned` field holds, to be read and never handed out."""
    return vars(instance)[name]


def picked(value: Payload, chosen: Chosen) -> Payload:
    """The entries of a payload that belong to some positions; the axis is counted from the end."""
    if chosen is None or value.ndim < chosen[0] or value.shape[-chosen[0]] == 1:
        return value
    return value[(..., chosen[1], *[slice(None)] * (chosen[0] - 1))]


def as_tensor(value: Payload, like: Tensor) -> Tensor:
    """A payload on the device and in the dtype of the activation it meets."""
    import torch

    if isinstance(value, np.ndarray):
        # A copy: torch has no tensors that cannot be written to, and warns of arrays that cannot.
        value = value.astype(np.float32) if value.dtype.kind == "V" else value.copy()
    return torch.as_tensor(value).detach().to(device=like.device, dtype=like.dtype)


def finite(name: str, value: float) -> float:
    """The number, if it is one."""
    number = as_number(value, name, InterventionError)
    if not np.isfinite(number):
        raise InterventionError(f"{name}: expected a finite number, found {value}")
    return number + 0.0  # 0.0 for -0.0: a key holds them for one number


def payload_record(value: Any) -> Any:
    """The identity of a tensor or array among the fields of a user's intervention.

    Args:
        value: a field that is no plain value.

    Raises:
        TypeError: for what is no array either.
    """
    if not hasattr(value, "shape"):
        raise TypeError(
            "expected plain values (numbers, text, lists, tuples, dicts with names as keys) or tensors, "
            f"found {type(value).__name__} {value!r:.80}"
        )
    return {"payload": payload_identity(value)}


def plain_value(value: Any) -> Any:
    """A field of an intervention as plain JSON values; payloads by their identity."""
    if hasattr(value, "shape"):
        return payload_identity(value)
    if isinstance(value, tuple | list):
        return [plain_value(item) for item in value]
    return value


def payload_identity(value: Payload) -> dict[str, Any]:
    """dtype, shape and digest of a payload; a tensor and an array of equal content are the same payload."""
    if hasattr(value, "detach"):
        import torch

        value = value.detach().cpu().contiguous()
        dtype = str(value.dtype).removeprefix("torch.")
        bits = value.view(torch.int16).numpy() if value.dtype == torch.bfloat16 else value.numpy()
    else:
        dtype = str(value.dtype)
        bits = value.view(np.int16) if dtype == "bfloat16" else value
    return {
        "dtype": dtype,
        "shape": [int(size) for size in value.shape],
        "sha256": array_digest(np.ascontiguousarray(bits)),
    }
