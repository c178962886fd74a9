"""HookCache: what a forward pass gave, by hook point, in memory.

Prompts of different length never share a batch with padding; their results are stacked afterwards,
positions past the end of a prompt holding NaN, so that a padded place can never be mistaken for a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ....store.display import html
from ....store.errors import HookPointNotFound, nearest
from ..architectures.points import BY_NAME, HookPoint, as_point
from .spec import Capture, When, named, split_gradient

if TYPE_CHECKING:
    import xarray
    from torch import Tensor

POSITION_AXES = ("position", "query_position", "key_position")
_NAN = float("nan")


class HookCache(Mapping[HookPoint | str, "Tensor"]):
    """Captured activations and logits of one call of `Model.forward`.

    ``cache["blocks.5.hook_resid_post"]`` and ``cache[HookPoint.resid_post(5)]`` are the same tensor, its axes
    those of the hook point's kind, e.g. [batch, position, hidden]; ``cache["grad:…"]`` is the gradient there.
    Where a point was captured before and after its interventions, indexing gives the value after them; `get`
    takes ``when``.
    """

    def __init__(
        self, tokens: Sequence[Sequence[int]], logits: Tensor | None, captured: Mapping[Capture, Tensor]
    ) -> None:
        self.tokens: list[list[int]] = [list(row) for row in tokens]
        """Token ids of each prompt."""
        self._logits = logits
        self._captured = _apart(captured)

    @property
    def logits(self) -> Tensor:
        """[batch, position, vocab], or the positions and vocabulary rows asked for."""
        if self._logits is None:
            raise HookPointNotFound(
                "this pass computed no logits (want=None); call forward(..., want=mizarr.logits())"
            )
        return self._logits

    @property
    def has_logits(self) -> bool:
        """Whether the pass computed logits."""
        return self._logits is not None

    @property
    def lengths(self) -> list[int]:
        """Positions of each prompt; later ones are NaN in every array."""
        return [len(row) for row in self.tokens]

    @property
    def num_captures(self) -> int:
        """Captured activations; the logits are not one of them."""
        return len(self._captured)

    def get(self, point: HookPoint | str, default: Any = None, *, when: When | None = None) -> Any:
        """The activation at a point, or `default`. when: "after" or "before" its interventions; None
        prefers "after"."""
        asked: list[When] = ["after", "before"] if when is None else [when]
        place, is_gradient = split_gradient(point)
        for choice in asked:
            found = self._captured.get(Capture(as_point(place), choice, is_gradient))
            if found is not None:
                return found
        return default

    def require(self, point: HookPoint | str, *, when: When | None = None) -> Tensor:
        """The activation at a point; HookPointNotFound names the nearest captured one otherwise."""
        found: Tensor | None = self.get(point, when=when)
        if found is None:
            held = sorted({capture.name for capture in self._captured})
            near = nearest(str(point), held)
            hint = f", nearest is {near!r}" if near else ""
            raise HookPointNotFound(
                f"{str(point)!r} was not captured{hint}; this pass holds {len(held)} hook points. Add it to "
                f"the HookSpec: .capture({str(point)!r})"
            )
        return found

    def __getitem__(self, point: HookPoint | str) -> Tensor:
        return self.require(point)

    def __contains__(self, point: object) -> bool:
        return isinstance(point, HookPoint | str) and self.get(point) is not None

    def __iter__(self) -> Iterator[Any]:
        ordered = sorted(self._captured, key=lambda capture: (capture.is_gradient, capture.point.order))
        return iter(dict.fromkeys(c.name if c.is_gradient else c.point for c in ordered))

    def __len__(self) -> int:
        return len({(capture.point, capture.is_gradient) for capture in self._captured})

    def __repr__(self) -> str:
        kinds = ", ".join(sorted({capture.variable for capture in self._captured}))
        return f"HookCache({len(self.tokens)} prompts, {self.num_captures} captures: {kinds or 'none'})"

    def _repr_html_(self) -> str:
        """For a notebook: prompts, and what is held of each hook point."""
        layers: dict[str, list[int]] = {}
        for capture in self._captured:
            layers.setdefault(capture.variable, [])
            if capture.point.layer is not None:
                layers[capture.variable].append(capture.point.layer)
        first = {capture.variable: capture for capture in reversed(self._captured)}
        rows: list[tuple[str, ...]] = [
            (
                named(BY_NAME[first[name].point.kind].path.format("*"), first[name].is_gradient),
                first[name].when,
                ", ".join(map(str, sorted(held))),
                ", ".join(first[name].point.dims),
                *_shape(self._captured[first[name]]),
            )
            for name, held in layers.items()
        ]
        if self._logits is not None:
            rows.append(("logits", "", "", "batch, position, vocab", *_shape(self._logits)))
        lengths = ", ".join(map(str, sorted(set(self.lengths))))
        columns = ["hook point", "interventions", "layers", "dims", "shape", "dtype"]
        told = f"{len(self.tokens)} prompts of {lengths} tokens"
        return html.shown("HookCache", html.table(columns, rows), told)

    def to_xarray(self) -> xarray.Dataset:
        """Captures as one labelled dataset: a variable per kind, layers stacked on a ``layer`` axis (time
        steps on a ``time`` axis), half precision as float32.

        Layers a kind was not captured at are NaN where another kind has them.
        """
        import xarray as xr

        by_variable: dict[str, dict[int | None, Tensor]] = {}
        for capture, value in self._captured.items():
            by_variable.setdefault(capture.variable, {})[capture.point.layer] = value
        arrays = {name: _labelled(name, layers) for name, layers in by_variable.items()}
        return xr.Dataset(arrays)


def _apart(captured: Mapping[Capture, Tensor]) -> dict[Capture, Tensor]:
    """Captures that share no memory, so that whoever writes to one writes to no other: the stream that leaves
    a layer and enters the next is one tensor."""
    storages: set[int] = set()
    apart = {}
    for capture, value in captured.items():
        storage = value.untyped_storage().data_ptr()
        apart[capture] = value.clone() if storage in storages else value
        storages.add(storage)
    return apart


def _shape(value: Tensor) -> tuple[str, str]:
    return " x ".join(map(str, value.shape)), str(value.dtype).removeprefix("torch.")


def _labelled(variable: str, layers: Mapping[int | None, Tensor]) -> xarray.DataArray:
    import numpy as np
    import xarray as xr

    kind = variable.partition("__")[0]
    if None in layers:
        return xr.DataArray(_numbers(layers[None]), dims=HookPoint(kind).dims, name=variable)
    chosen = sorted(layer for layer in layers if layer is not None)
    stacked = np.stack([_numbers(layers[layer]) for layer in chosen])
    counted = BY_NAME[kind].counted
    return xr.DataArray(
        stacked, dims=(counted, *HookPoint(kind, 0).dims), coords={counted: chosen}, name=variable
    )


def _numbers(value: Tensor) -> Any:
    return (value if value.dtype.itemsize == 8 else value.float()).cpu().numpy()


def stack_ragged(
    parts: Sequence[tuple[Sequence[int], Tensor]], dims: Sequence[str], rows: int, length: int
) -> Tensor:
    """One tensor of all prompts from groups of equal length.

    parts: (which prompts, their tensor) pairs; dims: the axes of each tensor, "batch" first. Position axes
    grow to `length`; what no prompt reaches is NaN.
    """
    first = parts[0][1]
    shape = [length if axis in POSITION_AXES else size for axis, size in zip(dims, first.shape, strict=True)]
    full = first.new_full((rows, *shape[1:]), _NAN)
    for chosen, part in parts:
        held: tuple[Any, ...] = tuple(slice(0, size) for size in part.shape[1:])
        for row, value in zip(chosen, part, strict=True):
            full[(row, *held)] = value
    return full
