"""HookCache: captured activations and logits of a forward pass, in memory.

Prompts of different length never share a padded batch. Their results are stacked afterwards; positions past
the end of a prompt hold NaN, so that a padded position can never be mistaken for a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ....store.display import html
from ....store.errors import HookPointNotFound, nearest
from ..architectures.architecture import LANGUAGE, HeadSpec
from ..architectures.points import BY_NAME, HookPoint, as_point
from .spec import Capture, When, capture_name, split_gradient

if TYPE_CHECKING:
    import xarray
    from torch import Tensor

POSITION_AXES = ("position", "query_position", "key_position")
_NAN = float("nan")


class HookCache(Mapping[HookPoint | str, "Tensor"]):
    """Captured activations and logits of one call of `Model.forward`.

    ``cache["blocks.5.hook_resid_post"]`` and ``cache[HookPoint.resid_post(5)]`` are the same tensor, with the
    axes of the hook point's kind, e.g. [batch, position, hidden]. ``cache["grad:…"]`` is the gradient there.
    Where a point was captured before and after its interventions, indexing gives the value after them; `get`
    takes ``when``.
    """

    def __init__(
        self,
        tokens: Sequence[Sequence[int]],
        logits: Tensor | None,
        captured: Mapping[Capture, Tensor],
        head: HeadSpec = LANGUAGE,
    ) -> None:
        """Store the results of a pass.

        Arguments:
            tokens: token ids of each prompt.
            logits: [batch, position, logit], or the selected ones; None where the pass computed none. Of a
                head that gives one vector per prompt, only the first position is kept.
            captured: capture -> its tensor; those that share memory with an earlier one are copied.
            head: what the model computes from its final states.
        """
        self.head = head
        """What the model computes from its final states."""
        self.tokens: list[list[int]] = [list(row) for row in tokens]
        """Token ids of each prompt."""
        self._logits = logits if logits is None or not head.is_pooled else logits[:, 0]
        self._captured = _without_shared_memory(captured)

    @property
    def logits(self) -> Tensor:
        """Logits [batch, position, vocab], or the selected positions and tokens; of a head with labels
        [batch, position, label], or [batch, label] if it labels prompts.

        Raises:
            HookPointNotFound: the pass computed no logits.
        """
        if self._logits is None and self.head.kind == "none":
            raise HookPointNotFound(
                f"expected a model that computes logits, found {self.head.model_class or 'one'} without "
                "head; capture its last states: HookSpec().capture('blocks.*.hook_resid_post')"
            )
        if self._logits is None:
            raise HookPointNotFound(
                "expected a pass that computed logits, found one with want=None; call model.forward(…, "
                "want=mizarr.logits())"
            )
        return self._logits

    @property
    def has_logits(self) -> bool:
        """Whether the pass computed logits."""
        return self._logits is not None

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each prompt; positions past the end of a prompt are NaN in every array."""
        return [len(row) for row in self.tokens]

    @property
    def num_captures(self) -> int:
        """Number of captured activations and gradients, without the logits."""
        return len(self._captured)

    def get(self, point: HookPoint | str, default: Any = None, *, when: When | None = None) -> Any:
        """The captured value at a hook point, or `default`.

        Arguments:
            point: HookPoint or its string form, with ``grad:`` for a gradient.
            default: returned where nothing was captured.
            when: "after" or "before" its interventions; None prefers "after".
        """
        candidates: list[When] = ["after", "before"] if when is None else [when]
        name, is_gradient = split_gradient(point)
        for candidate in candidates:
            value = self._captured.get(Capture(as_point(name), candidate, is_gradient))
            if value is not None:
                return value
        return default

    def require(self, point: HookPoint | str, *, when: When | None = None) -> Tensor:
        """The captured value at a hook point, as a tensor with the axes of the hook point.

        Arguments:
            point: HookPoint or its string form, with ``grad:`` for a gradient.
            when: "after" or "before" its interventions; None prefers "after".

        Raises:
            HookPointNotFound: where it was not captured; names the nearest captured point.
        """
        value: Tensor | None = self.get(point, when=when)
        if value is None:
            names = sorted({capture.name for capture in self._captured})
            near = nearest(str(point), names)
            hint = f", nearest is {near!r}" if near else ""
            raise HookPointNotFound(
                f"expected a captured hook point, found {str(point)!r}, which is none of the {len(names)} "
                f"captured ones{hint}; add .capture({str(point)!r}) to the HookSpec"
            )
        return value

    def __getitem__(self, point: HookPoint | str) -> Tensor:
        return self.require(point)

    def __contains__(self, point: object) -> bool:
        # Overridden because Mapping's own calls __getitem__, whose error message searches for the nearest
        # name.
        return isinstance(point, HookPoint | str) and self.get(point) is not None

    def __iter__(self) -> Iterator[Any]:
        # Values come before gradients, each in execution order.
        ordered = sorted(self._captured, key=lambda capture: (capture.is_gradient, capture.point.order))
        return iter(dict.fromkeys(c.name if c.is_gradient else c.point for c in ordered))

    def __len__(self) -> int:
        return len({(capture.point, capture.is_gradient) for capture in self._captured})

    def __repr__(self) -> str:
        kinds = ", ".join(sorted({capture.variable for capture in self._captured}))
        return f"HookCache({len(self.tokens)} prompts, {self.num_captures} captures: {kinds or 'none'})"

    def _repr_html_(self) -> str:
        """HTML table for a notebook: prompts, and a row per captured variable."""
        layers: dict[str, list[int]] = {}
        for capture in self._captured:
            layers.setdefault(capture.variable, [])
            if capture.point.layer is not None:
                layers[capture.variable].append(capture.point.layer)
        rows: list[tuple[str, ...]] = []
        for variable, indices in layers.items():
            # The first captured layer stands for all: their shapes are equal.
            example = next(capture for capture in self._captured if capture.variable == variable)
            any_layer = BY_NAME[example.point.kind].path.format("*")
            rows.append(
                (
                    capture_name(any_layer, example.is_gradient),
                    example.when,
                    ", ".join(map(str, sorted(indices))),
                    ", ".join(example.point.dims),
                    *_shape_and_dtype(self._captured[example]),
                )
            )
        if self._logits is not None:
            rows.append(("logits", "", "", ", ".join(self.head.dims), *_shape_and_dtype(self._logits)))
        lengths = ", ".join(map(str, sorted(set(self.lengths))))
        columns = ["hook point", "captured before or after interventions", "layers", "dims", "shape", "dtype"]
        caption = f"{len(self.tokens)} prompts of {lengths} tokens"
        return html.shown("HookCache", html.table(columns, rows), caption)

    def to_xarray(self) -> xarray.Dataset:
        """Captures as one labelled dataset: a variable per hook point kind, half precision as float32.

        The logits of all labels of a classifier are a variable, too, with the names of the labels. Layers are
        stacked on a ``layer`` axis (time steps on a ``time`` axis). Layers at which a kind was not captured
        are NaN where another kind has them.
        """
        import xarray as xr

        by_variable: dict[str, dict[int | None, Tensor]] = {}
        for capture, value in self._captured.items():
            by_variable.setdefault(capture.variable, {})[capture.point.layer] = value
        arrays = {name: _labelled(name, layers) for name, layers in by_variable.items()}
        if (
            (labels := self.head.labels)
            and self._logits is not None
            and self._logits.shape[-1] == len(labels)
        ):
            arrays["logits"] = xr.DataArray(
                _as_numpy(self._logits), dims=self.head.dims, coords={"label": list(labels)}, name="logits"
            )
        return xr.Dataset(arrays)


def _without_shared_memory(captured: Mapping[Capture, Tensor]) -> dict[Capture, Tensor]:
    """The captures, cloned where two share memory, so that writing to one changes no other."""
    # `resid_post` of a layer and `resid_pre` of the next are one tensor; so are views of one projection.
    storages: set[int] = set()
    separate = {}
    for capture, value in captured.items():
        storage = value.untyped_storage().data_ptr()
        separate[capture] = value.clone() if storage in storages else value
        storages.add(storage)
    return separate


def _shape_and_dtype(value: Tensor) -> tuple[str, str]:
    return " x ".join(map(str, value.shape)), str(value.dtype).removeprefix("torch.")


def _labelled(variable: str, layers: Mapping[int | None, Tensor]) -> xarray.DataArray:
    import numpy as np
    import xarray as xr

    kind = variable.partition("__")[0]
    # None is the layer of a point outside the layers, such as `embed`: one value, nothing to stack.
    if None in layers:
        return xr.DataArray(_as_numpy(layers[None]), dims=HookPoint(kind).dims, name=variable)
    indices = sorted(layer for layer in layers if layer is not None)
    stacked = np.stack([_as_numpy(layers[layer]) for layer in indices])
    # "layer", or "time" for models that count time steps.
    stacking_axis = BY_NAME[kind].counted
    dims = (stacking_axis, *HookPoint(kind, 0).dims)
    return xr.DataArray(stacked, dims=dims, coords={stacking_axis: indices}, name=variable)


def _as_numpy(value: Tensor) -> Any:
    # numpy has no bfloat16 and few routines for float16, so both become float32.
    # Numbers of eight bytes (float64) stay as they are.
    return (value if value.dtype.itemsize == 8 else value.float()).cpu().numpy()


def stack_ragged(
    parts: Sequence[tuple[Sequence[int], Tensor]], dims: Sequence[str], rows: int, length: int
) -> Tensor:
    """One tensor of all prompts, from groups of prompts of equal length.

    Arguments:
        parts: (indices of the prompts, their stacked tensor) pairs.
        dims: axes of each tensor, "batch" first.
        rows: number of prompts.
        length: length of position axes in the result.

    Returns:
        A tensor whose positions past the end of a prompt are NaN.
    """
    example = parts[0][1]
    shape = [
        length if axis in POSITION_AXES else size for axis, size in zip(dims, example.shape, strict=True)
    ]
    # NaN instead of 0: a padded position that enters a mean is then noticed.
    full = example.new_full((rows, *shape[1:]), _NAN)
    for prompts, part in parts:
        filled: tuple[Any, ...] = tuple(slice(0, size) for size in part.shape[1:])
        for prompt, value in zip(prompts, part, strict=True):
            full[(prompt, *filled)] = value
    return full
