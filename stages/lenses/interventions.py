"""Interventions along lens vectors: steer towards a token, remove tokens from a stream, exchange two tokens.

Each is a value that a HookSpec applies at `blocks.L.hook_resid_post`; the vectors of a layer are rows of
`lens_vectors` (readout.py) at that layer. Removing tokens subtracts the projection on the span of their
vectors. With V the vectors of two tokens and c = pinv(V) h the coordinates of a state, exchanging them
exchanges the coordinates, or sets them to the exchanged coordinates of a clean run.

Axes: vocab (tokens of the vectors), position, hidden.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ...store.arrays import Array
from ...store.errors import InterventionError
from ..forward.architectures.points import HookPoint
from ..forward.hooks.interventions import Add, Selective, Zero
from ..forward.hooks.payloads import (
    Payload,
    PayloadField,
    PayloadPositions,
    as_tensor,
    checked_payload,
    finite,
    private_payload,
    select_positions,
)
from ..forward.hooks.spec import HookSpec
from ..forward.hooks.subspaces import Subspace

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from ..forward.models.model import Model

__all__ = ["SetCoordinates", "exchange", "remove", "steer"]

_DEPENDENT = 1e-6
"""Singular values below this share of the largest count as 0, as vectors are float32."""
REFUSED, WARNED = 0.999, 0.99
"""Cosines of two vectors from which their coordinates cannot be told apart, or are large and cancel."""


@dataclass(frozen=True, eq=False)
class SetCoordinates(Selective):
    """Set the coordinates of an activation in the span of some vectors; the rest of it stays.

    With V the vectors as columns and c = pinv(V) x, the activation becomes x + alpha V (c' - c).
    """

    is_positionwise: ClassVar[bool] = True
    vectors: Payload = PayloadField()
    """[vector, hidden]; they may depend on each other linearly, and have any length but 0."""
    coordinates: Payload | None = PayloadField(None)
    """New coordinates c', [vector] or [position, vector]; None for the present ones in reversed order, which
    exchanges those of two vectors."""
    alpha: float = 1.0
    """Share of the change that is made; 1 sets the coordinates."""

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        for field in ("vectors", "coordinates"):
            value = private_payload(self, field)
            if value is not None:
                object.__setattr__(self, field, checked_payload(name, value))
        object.__setattr__(self, "alpha", finite(name, self.alpha))

    def check(self, point: HookPoint, sizes: Mapping[str, int]) -> None:
        """Raise InterventionError unless it can be applied at `point`, whose axes have these sizes."""
        super().check(point, sizes)
        vectors, coordinates = (private_payload(self, field) for field in ("vectors", "coordinates"))
        shape = tuple(vectors.shape)
        if point.dims[-2:] != ("position", "hidden") or len(shape) != 2 or shape[1] != sizes["hidden"]:
            raise InterventionError(
                f"SetCoordinates at '{point}': expected a hook point with the axes position and hidden, and "
                f"vectors [vector, {sizes.get('hidden', 'hidden')}], found the axes {list(point.dims)} and "
                f"vectors of shape {list(shape)}; take the vectors of this model and layer"
            )
        n_positions = sizes["position"] if self.positions is None else len(self.positions)
        allowed = [[shape[0]], [1, shape[0]], [n_positions, shape[0]]]
        if coordinates is not None and list(coordinates.shape) not in allowed:
            raise InterventionError(
                f"SetCoordinates at '{point}': expected coordinates of shape {allowed[0]} or {allowed[2]}, "
                f"one per vector or one per position and vector, found {list(coordinates.shape)}"
            )

    def change(self, part: Tensor, positions: PayloadPositions = None) -> Tensor:
        """The selected part [..., position, hidden] with the new coordinates."""
        import torch

        # float64, as the pseudoinverse of nearly parallel vectors magnifies rounding.
        x = part.double()
        vectors = as_tensor(private_payload(self, "vectors"), x)
        current = x @ torch.linalg.pinv(vectors, rtol=_DEPENDENT)
        target = private_payload(self, "coordinates")
        new = current.flip(-1) if target is None else as_tensor(select_positions(target, positions), x)
        changed: Tensor = (x + self.alpha * (new - current) @ vectors).to(part.dtype)
        return changed


def remove(vectors: xr.DataArray, *, positions: tuple[int, ...] | None = None) -> Zero:
    """Intervention that subtracts the orthogonal projection on the span of lens vectors.

    Arguments:
        vectors: [vocab, hidden], of one layer; repeated tokens count once.
        positions: positions to change, negative ones from the end; None for all.

    Raises:
        InterventionError: The vectors of different tokens depend on each other linearly.
    """
    rows = _rows(vectors)
    _, first = np.unique(vectors["vocab"].values, return_index=True)
    return Zero(within=Subspace(rows[np.sort(first)]), positions=positions)


def exchange(
    vectors: xr.DataArray,
    *,
    alpha: float = 1.0,
    positions: tuple[int, ...] | None = None,
    clean: Array | None = None,
) -> SetCoordinates:
    """Intervention that exchanges the coordinates of two tokens along their lens vectors.

    Arguments:
        vectors: [vocab, hidden] of two tokens, of one layer, with their own lengths.
        alpha: share of the exchange; 2 overshoots by as much again.
        positions: positions to change, negative ones from the end; None for all.
        clean: stream of a clean run at that layer, [position, hidden], whose exchanged coordinates are set;
            None to exchange those of the run itself.

    Raises:
        InterventionError: There are not two different tokens, or their vectors are nearly parallel.
    """
    tokens, rows = vectors["vocab"].values.tolist(), _rows(vectors)
    if len(tokens) != 2 or tokens[0] == tokens[1]:
        raise InterventionError(
            f"exchange: expected the vectors of two different tokens, found those of the tokens {tokens}; "
            "pass lens_vectors(lens, readout, [source, target]).sel(layer=…)"
        )
    cosine = abs(float(rows[0] @ rows[1]) / float(np.linalg.norm(rows[0]) * np.linalg.norm(rows[1])))
    if cosine >= REFUSED:
        raise InterventionError(
            f"exchange: expected vectors whose |cosine| is below {REFUSED}, found {cosine:.4f} for the "
            f"tokens {tokens}, whose coordinates cannot be told apart; choose other tokens or another layer"
        )
    if cosine >= WARNED:
        warnings.warn(
            f"exchange: the vectors of the tokens {tokens} are nearly parallel (|cosine| {cosine:.4f}), so "
            "that their coordinates are large and uncertain",
            stacklevel=2,
        )
    coordinates = None
    if clean is not None:
        chosen = np.asarray(clean, np.float64)[slice(None) if positions is None else list(positions)]
        own = chosen @ np.linalg.pinv(rows.astype(np.float64), rcond=_DEPENDENT)
        coordinates = own[..., ::-1].astype(np.float32)
    return SetCoordinates(rows, coordinates, alpha, positions=positions)


def steer(
    model: Model,
    prompts: Sequence[Sequence[int]],
    vectors: xr.DataArray,
    *,
    alpha: float = 4.0,
    positions: tuple[int, ...] | None = None,
    hooks: HookSpec | None = None,
) -> HookSpec:
    """Spec that adds alpha m u after each layer of lens vectors: u is the unit vector of the token, and m the
    median norm of the stream there, over the selected positions of all prompts together.

    Of an even number of norms the median is the lower of the two in the middle, as in torch.median. The norm
    at a layer is that of the stream as earlier layers of the spec have changed it, so the prompts are run
    once for each layer.

    Arguments:
        model: the model.
        prompts: token ids of the prompts that are to be steered.
        vectors: lens vectors of one token, [layer, hidden].
        alpha: length of the added vector, in median norms.
        positions: positions to change, negative ones from the end; None for all.
        hooks: spec to add to; None for an empty one.

    Raises:
        InterventionError: `vectors` have other axes, or there are no positions.
    """
    if set(vectors.dims) != {"layer", "hidden"}:
        raise InterventionError(
            f"steer: expected the vectors of one token with the axes layer and hidden, found {vectors.dims}; "
            "select a token with isel(vocab=0)"
        )
    spec, rows = hooks or HookSpec(), [list(ids) for ids in prompts]
    for layer in sorted(vectors["layer"].values.tolist()):
        point, vector = HookPoint.resid_post(layer), vectors.sel(layer=layer).values
        # Checked before the pass, which would otherwise run for an intervention that cannot be made.
        change = Add(vector / np.linalg.norm(vector), positions=positions)
        streams = model.forward(rows, spec.capture(point), want=None)[point].double().cpu().numpy()
        chosen = slice(None) if change.positions is None else list(change.positions)
        # Rows past the end of a shorter prompt are NaN, and no positions of it.
        norms = np.concatenate(
            [np.linalg.norm(x[: len(ids)][chosen], axis=-1) for x, ids in zip(streams, rows, strict=True)]
        )
        median = np.sort(norms)[(len(norms) - 1) // 2]
        spec = spec.intervene(point, Add(change.value * np.float32(alpha * median), positions=positions))
    return spec


def _rows(vectors: xr.DataArray) -> Array:
    """Vectors as an array [vocab, hidden]; InterventionError unless they have these axes."""
    if set(vectors.dims) != {"vocab", "hidden"}:
        raise InterventionError(
            f"expected lens vectors of one layer with the axes vocab and hidden, found {vectors.dims}; "
            "select a layer with sel(layer=…)"
        )
    rows: Array = vectors.transpose("vocab", "hidden").values.astype(np.float32)
    return rows
