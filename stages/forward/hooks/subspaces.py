"""Subspaces and conditions: immutable numpy values that restrict interventions on activations.

A `Subspace` restricts an intervention to a part of each activation vector x: with P the orthogonal projection
on the subspace and f(x) the value of the intervention without it, the activation becomes

    x + P (f(x) - x).

So `Zero(within=S)` projects S out (directional ablation, Arditi et al. 2024, "Refusal in Language Models Is
Mediated by a Single Direction"), `Replace(y, within=S)` takes the coordinates in S from y (interchange
intervention, Geiger et al. 2023), `Add(y, within=S)` adds the part of y in S.

A `LinearCondition` is a linear probe: the activation is changed only where the probe fires.

Importing this module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ....store.digest import digest
from ....store.errors import InterventionError
from .payloads import Payload, as_tensor, checked_payload, finite, payload_identity, readonly_copy

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LinearCondition", "Subspace"]

RANK = 1e-5
"""Smallest singular value, relative to the largest, of independent vectors of length 1: below it the
difference of two float32 vectors is mostly rounding."""
ORTHONORMAL = 1e-6
"""Largest deviation of the Gram matrix from the identity at which vectors are kept as the basis: float32
rounding. Otherwise a basis that was written to a file and read again could have another digest."""


@dataclass(frozen=True, eq=False)
class Subspace:
    """Linear subspace of an activation space, made from vectors that span it: `Subspace(vectors)`.

    The basis is the Gram-Schmidt orthonormalisation of the vectors, in their order, so basis vector i is the
    part of vector i that is orthogonal to the vectors before it, at length 1; the coefficient along a single
    direction has the sign of the direction.

    Raises:
        InterventionError: The vectors are not finite, one of them is zero, or they are linearly dependent.
    """

    basis: npt.NDArray[np.float32]
    """Orthonormal basis, float32 [dimension, width], read-only. The constructor takes linearly independent
    vectors [dimension, width], or one vector [width]: arrays, tensors or lists of floats."""

    def __post_init__(self) -> None:
        vectors = _rows(self.basis)
        norms = np.linalg.norm(vectors, axis=1)
        if (norms == 0).any():
            raise InterventionError(
                f"Subspace: expected vectors that differ from zero, found vector {int(norms.argmin())} of "
                "norm 0; leave it out"
            )
        unit = vectors / norms[:, None]
        # Of vectors of length 1, as the length of a vector says nothing about its independence.
        singular = np.linalg.svd(unit, compute_uv=False)
        rank = int((singular > RANK * singular[0]).sum())
        if rank < len(vectors):
            raise InterventionError(
                f"Subspace: expected linearly independent vectors, found {len(vectors)} vectors of width "
                f"{vectors.shape[1]} that span {rank} dimensions; leave out those that the others span"
            )
        if np.abs(vectors @ vectors.T - np.eye(len(vectors))).max() > ORTHONORMAL:
            orthogonal, triangular = np.linalg.qr(unit.T)
            # QR leaves the sign of each basis vector open.
            vectors = (orthogonal * np.sign(np.diagonal(triangular))).T
        object.__setattr__(self, "basis", readonly_copy(vectors.astype(np.float32)))

    @property
    def dimension(self) -> int:
        """Number of basis vectors."""
        return len(self.basis)

    @property
    def width(self) -> int:
        """Length of the vectors."""
        return int(self.basis.shape[1])

    @property
    def digest(self) -> str:
        """Digest of the basis; equal subspaces with other bases have other digests."""
        return digest("subspace", self.canonical())

    def canonical(self) -> dict[str, Any]:
        """dtype, shape and sha256 of the basis, as they enter the key of a run."""
        return {"subspace": payload_identity(self.basis)}

    def coefficients(self, x: Any) -> Any:
        """Coordinates in the basis [..., dimension].

        Arguments:
            x: vectors [..., width], a numpy array or a tensor.
        """
        return x @ self._basis_like(x).T

    def component(self, x: Any) -> Any:
        """Orthogonal projection on the subspace [..., width].

        Arguments:
            x: vectors [..., width], a numpy array or a tensor.
        """
        return self.combined(self.coefficients(x))

    def combined(self, coefficients: Any) -> Any:
        """Vectors with these coordinates in the basis [..., width].

        Arguments:
            coefficients: [..., dimension], a numpy array or a tensor.
        """
        return coefficients @ self._basis_like(coefficients)

    def _basis_like(self, x: Any) -> Any:
        """The basis [dimension, width]: a tensor on the device of x if x is a tensor, else a numpy array."""
        return as_tensor(self.basis, x) if hasattr(x, "detach") else self.basis

    def __repr__(self) -> str:
        return f"Subspace(dimension={self.dimension}, width={self.width}, digest={self.digest[:12]!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Subspace) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@dataclass(frozen=True, eq=False)
class LinearCondition:
    """A linear probe, which fires at the positions where weight · x + bias > threshold.

    x is the activation vector before the intervention (conditional steering; compare Lee et al. 2024,
    "Programming Refusal with Conditional Activation Steering").

    Raises:
        InterventionError: The weight is not one finite vector, or another field is not a finite number.
    """

    weight: npt.NDArray[np.float32]
    """Weight vector, float32 [width], read-only; the constructor takes an array, a tensor or a list."""
    bias: float = 0.0
    """Number added to the product of weight and activation."""
    threshold: float = 0.0
    """Score above which the probe fires."""

    def __post_init__(self) -> None:
        rows = _rows(self.weight, "LinearCondition")
        if len(rows) != 1:
            raise InterventionError(
                f"LinearCondition: expected one weight vector [width], found {len(rows)}; choose the weights "
                "of one output"
            )
        object.__setattr__(self, "weight", readonly_copy(rows[0].astype(np.float32)))
        for name in ("bias", "threshold"):
            object.__setattr__(self, name, finite(f"LinearCondition: {name}", getattr(self, name)))

    @property
    def width(self) -> int:
        """Length of the weight vector."""
        return len(self.weight)

    def canonical(self) -> dict[str, Any]:
        """The fields as plain JSON values, as they enter the key of a run."""
        return {"weight": payload_identity(self.weight), "bias": self.bias, "threshold": self.threshold}

    def holds(self, x: Tensor) -> Tensor:
        """Where the probe fires, bool [..., 1].

        Arguments:
            x: activation vectors [..., width].
        """
        score = x @ as_tensor(self.weight, x)[:, None] + self.bias
        return score > self.threshold

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LinearCondition) and self.canonical() == other.canonical()

    def __hash__(self) -> int:
        return hash(digest("condition", self.canonical()))


def _rows(vectors: Payload, name: str = "Subspace") -> npt.NDArray[np.float64]:
    """Vectors as float64 rows [k, width]; InterventionError unless they are finite floats [width] or
    [k, width] with k at least 1."""
    checked = checked_payload(name, vectors)
    # numpy has no bfloat16, so tensors widen first.
    wide = checked.cpu().double().numpy() if hasattr(checked, "detach") else checked.astype(np.float64)
    if wide.ndim not in (1, 2) or not wide.size:
        raise InterventionError(
            f"{name}: expected a vector [width] or vectors [k, width], found shape {list(wide.shape)}; "
            "reshape them"
        )
    return np.atleast_2d(wide)
