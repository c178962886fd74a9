"""Payloads: tensors carried by interventions; copied and checked when made, digested by content.

A payload never changes after the intervention is made: writing to the original tensor later changes no run
and no key. Nor does writing to the tensor that a field of an intervention returns. A torch tensor cannot be
made read-only, so the payload itself stays private (`PayloadField`): digests and passes read it directly,
everybody else gets copies.

Payloads are torch tensors, numpy arrays or nested lists. torch is imported only where a payload is a tensor.
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
PayloadPositions = tuple[int, list[int]] | None
"""(position axis of a payload counted from its end, indices to select on it); None for all positions."""


def checked_payload(name: str, value: Payload) -> Payload:
    """A checked copy of an intervention's tensor; anything but a tensor becomes a read-only numpy array.

    Arguments:
        name: name of the intervention, for messages.
        value: tensor, array or nested sequence of floats; float64 arrays become float32.

    Raises:
        InterventionError: unless it is floating point and finite.
    """
    if hasattr(value, "detach"):
        value = value.detach().clone()
    else:
        value = readonly_copy(value)
        # numpy makes float64 of Python floats, which no caller has chosen.
        if value.dtype == np.float64:
            value = readonly_copy(value.astype(np.float32))
    # numpy has no bfloat16: ml_dtypes registers it as kind "V" (void).
    floating = value.is_floating_point() if hasattr(value, "is_floating_point") else value.dtype.kind in "fV"
    if not floating:
        raise InterventionError(
            f"{name}: expected a floating-point tensor, found dtype "
            f"{str(value.dtype).removeprefix('torch.')}; convert it to float32"
        )
    # Checked now, because NaN would surface as unexplained NaN logits much later.
    finite = (
        value.isfinite().all() if hasattr(value, "isfinite") else np.isfinite(value.astype(np.float32)).all()
    )
    if not bool(finite):
        raise InterventionError(
            f"{name}: expected finite numbers, found NaN or infinity in a tensor of shape "
            f"{list(value.shape)}; replace them before making the intervention"
        )
    return value


def readonly_copy(value: Any) -> Any:
    """A copy as a numpy array that cannot be written to."""
    array = np.array(value)
    array.setflags(write=False)
    return array


def is_payload(value: Any) -> bool:
    """Whether a value is a torch tensor or a numpy array."""
    # By attributes and not by type, so that no torch is imported for a spec without tensors.
    return isinstance(value, np.ndarray) or (hasattr(value, "detach") and hasattr(value, "shape"))


def copy_payloads(value: Any) -> Any:
    """The value with every tensor and array in it copied, also inside tuples, lists and dicts.

    A value without tensors and arrays is returned itself, so that `is` shows whether anything was copied.
    """
    if isinstance(value, np.ndarray):
        return readonly_copy(value)
    if is_payload(value):
        return value.detach().clone()
    if isinstance(value, dict):
        items = {name: copy_payloads(item) for name, item in value.items()}
        # Identity shows whether anything was copied; see `Intervention.with_copied_payloads`.
        return items if any(items[name] is not value[name] for name in items) else value
    if isinstance(value, tuple | list):
        copies = [copy_payloads(item) for item in value]
        is_same = all(item_copy is item for item_copy, item in zip(copies, value, strict=True))
        return value if is_same else tuple(copies) if isinstance(value, tuple) else copies
    return value


class PayloadField:
    """Descriptor of a dataclass field that holds tensors or arrays: reading the field returns copies.

    The tensors themselves are in the instance's `vars` under the field's name; `private_payload` reads them.
    """

    def __init__(self, *default: Any) -> None:
        """Declare the field.

        Arguments:
            default: value of the field if the constructor is not given one; if left out, the field is
                required.
        """
        self._default = default
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is not None:
            return copy_payloads(vars(instance)[self._name])
        if not self._default:
            # `dataclass` reads the class attribute to find the default: AttributeError means there is none.
            raise AttributeError(self._name)
        return self._default[0]

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self._name] = value


def private_payload(instance: Any, name: str) -> Any:
    """The tensors of a `PayloadField` themselves, not copies: read them, never write or return them to users.

    Arguments:
        instance: an intervention.
        name: name of its field.
    """
    return vars(instance)[name]


def select_positions(value: Payload, positions: PayloadPositions) -> Payload:
    """Select positions of an intervention's tensor; a tensor without a position axis is returned whole.

    Arguments:
        value: tensor or numpy array.
        positions: (position axis counted from the end, indices to select); None for all.
    """
    # An axis of length 1 broadcasts over positions, so it has nothing to select from.
    if positions is None or value.ndim < positions[0] or value.shape[-positions[0]] == 1:
        return value
    return value[(..., positions[1], *[slice(None)] * (positions[0] - 1))]


def as_tensor(value: Payload, like: Tensor) -> Tensor:
    """Convert an intervention's tensor or array to the device and dtype of the activation `like`.

    Arguments:
        value: a tensor or a numpy array.
        like: activation that it is combined with.
    """
    import torch

    if isinstance(value, np.ndarray):
        # Copied, as torch warns about read-only arrays; numpy's bfloat16 (kind "V") must widen first.
        value = value.astype(np.float32) if value.dtype.kind == "V" else value.copy()
    return torch.as_tensor(value).detach().to(device=like.device, dtype=like.dtype)


def finite(name: str, value: float) -> float:
    """Check that a number is finite and return it as a float, with 0.0 for -0.0.

    Arguments:
        name: name of the intervention, for the message.
        value: the number.

    Raises:
        InterventionError: for NaN, infinity, or a value that is no number.
    """
    number = as_number(value, name, InterventionError)
    if not np.isfinite(number):
        raise InterventionError(f"{name}: expected a finite number, found {value}")
    return number + 0.0  # -0.0 becomes 0.0: the two act alike and must have one key


def payload_record(value: Any) -> Any:
    """Record of a value that is not plain, for the key of a run, where a user-defined intervention has one as
    a field: a tensor, an array, or a value with a canonical form.

    Arguments:
        value: value of a field that is not plain JSON data.

    Raises:
        TypeError: for a value that is no array either.
    """
    if hasattr(value, "canonical"):
        return value.canonical()
    if not hasattr(value, "shape"):
        raise TypeError(
            "expected plain values (numbers, text, lists, tuples, dicts with names as keys) or tensors, "
            f"found {type(value).__name__} {value!r:.80}"
        )
    return {"payload": payload_identity(value)}


def plain_value(value: Any) -> Any:
    """A field of an intervention as plain JSON values; tensors and arrays as dtype, shape and digest."""
    if hasattr(value, "canonical"):
        return value.canonical()
    if hasattr(value, "shape"):
        return payload_identity(value)
    if isinstance(value, tuple | list):
        return [plain_value(item) for item in value]
    return value


def payload_identity(value: Payload) -> dict[str, Any]:
    """dtype, shape and sha256 of a tensor or array; equal content gives the same result for both."""
    if hasattr(value, "detach"):
        import torch

        value = value.detach().cpu().contiguous()
        dtype = str(value.dtype).removeprefix("torch.")
        # numpy cannot hold torch's bfloat16, so its bytes are read as int16.
        bits = value.view(torch.int16).numpy() if value.dtype == torch.bfloat16 else value.numpy()
    else:
        dtype = str(value.dtype)
        bits = value.view(np.int16) if dtype == "bfloat16" else value
    return {
        "dtype": dtype,
        "shape": [int(size) for size in value.shape],
        "sha256": array_digest(np.ascontiguousarray(bits)),
    }
