"""Similarity of the layers of a model: cosines between their states, and linear CKA.

The cosine of a token's states at two layers, averaged over tokens, measures how far a state has turned. It is
dominated by a common offset if there is one, so the cosine of the mean states is reported as well. Centred
kernel alignment (Kornblith et al. 2019, "Similarity of Neural Network Representations Revisited", eq. 3-4)
compares geometries; equal up to rotation and scale is 1:

    CKA(X, Y) = HSIC(X, Y) / sqrt(HSIC(X, X) HSIC(Y, Y)),   HSIC(X, Y) ~ ||Xc' Yc||_F^2.

It is biased upwards if there are few tokens for the width. The unbiased HSIC of Song et al. 2012 ("Feature
Selection via Dependence Maximization", eq. 5) uses pairs of different tokens only. Both are computed from
sums over tokens (Gram matrices of features, never of tokens), so the number of tokens does not affect memory.

Axes: layer, other_layer, token, hidden. All values without unit. Needs no model and no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...pipeline import Output, stage
from ...store.arrays import Array
from ...store.errors import ShapeError
from ..corpus.state_cells import as_layers
from ..corpus.token_blocks import ahead, read_rows, token_ranges

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["cosine", "layer_cka", "layer_cosine"]

PAIRS = ("layer", "other_layer")
"""Dims of a comparison of every two layers."""
GRAM_BYTES = 1 << 28
"""Bytes of Gram matrices in memory at a time. If there are more, pairs of layers are computed in groups, each
of which reads its layers again."""


def cosine(embeddings: xr.DataArray, others: xr.DataArray | None = None) -> xr.DataArray:
    """Cosine of the angle between every two embeddings.

    Arguments:
        embeddings: [prompt, hidden], such as `mizarr.embed` returns.
        others: embeddings of other prompts, [prompt, hidden]; None for those of the same prompts.

    Returns:
        float64 [prompt, other_prompt], with the coordinates of both, those of `others` named "other_…". A
        zero vector has cosine 0 with every vector.

    Raises:
        ShapeError: Other axes, or two widths.
    """
    import xarray as xr

    sides = embeddings, embeddings if others is None else others
    found = [dict(zip(map(str, side.dims), side.shape, strict=True)) for side in sides]
    if any(set(sizes) != {"prompt", "hidden"} for sizes in found) or found[0]["hidden"] != found[1]["hidden"]:
        raise ShapeError(
            f"expected embeddings [prompt, hidden] of one width, found {found[0]} and {found[1]}; compare "
            "what mizarr.embed returned for one model"
        )
    x, y = (_unit(side.transpose("prompt", "hidden").values.astype(np.float64)[None])[0] for side in sides)
    coords = [
        {name: coord for name, coord in side.coords.items() if coord.dims == ("prompt",)} for side in sides
    ]
    named = {f"other_{name}": ("other_prompt", coord.values) for name, coord in coords[1].items()}
    return xr.DataArray(
        (x @ y.T).clip(-1.0, 1.0),
        dims=("prompt", "other_prompt"),
        coords={**coords[0], **named},
        name="cosine",
        attrs={"units": "1", "long_name": "cosine of two embeddings"},
    )


def merge_cosines(parts: Sequence[xr.Dataset]) -> xr.Dataset:
    """Average the cosines of segments, weighted by their numbers of tokens."""
    import xarray as xr

    n = np.array([int(part["n"]) for part in parts])

    # Cosines of means do not average, so `_cosines` computes them again from the merged mean.
    cosine, mean = (
        np.tensordot(n / n.sum(), np.stack([part[name].values for part in parts]), axes=1)
        for name in ("cosine", "mean")
    )
    return _cosines(cosine, mean, int(n.sum()), xr.Variable("layer", parts[0]["layer"].values))


@stage(
    version=1,
    inputs={"states": ("layer", "token", "hidden")},
    outputs={
        "cosine": Output(PAIRS, "1", "mean cosine of a token's states at two layers"),
        "cosine_of_means": Output(PAIRS, "1", "cosine of the mean states of two layers"),
        "mean": Output(("layer", "hidden"), "1", "mean state"),
        "n": Output((), "tokens", "number of states"),
    },
    cells="segment",
    combine=merge_cosines,
    memory=1.0,
)
def layer_cosine(states: xr.DataArray) -> xr.Dataset:
    """Cosines between the states of every two layers.

    Arguments:
        states: [layer, token, hidden], any float dtype, lazy or not.

    Returns:
        float64: cosine, cosine_of_means [layer, other_layer], symmetric; mean [layer, hidden]; n tokens. A
        zero vector has cosine 0 with every vector.

    Raises:
        ShapeError: There is no token.
    """
    states = as_layers(states)
    layers, n = states.sizes["layer"], states.sizes["token"]
    if n == 0:
        raise ShapeError("expected at least one token to compare layers on, found none; select some tokens")
    total = np.zeros((layers, layers))
    sums = np.zeros((layers, states.sizes["hidden"]))
    for rows in _blocks(states, range(layers)):
        sums += rows.sum(axis=1, dtype=np.float64)
        unit = _unit(rows).reshape(layers, -1)
        total += unit @ unit.T  # the trace over tokens and dimensions in one product: unit is flattened
    return _cosines(total / n, sums / n, n, states["layer"].variable)


@stage(
    version=1,
    inputs={"states": ("layer", "token", "hidden")},
    outputs={"cka": Output(PAIRS, "1", "linear CKA"), "n": Output((), "tokens", "number of states")},
    memory=1.0,
)
def layer_cka(states: xr.DataArray, *, unbiased: bool = False) -> xr.Dataset:
    """Linear centred kernel alignment of every two layers.

    Arguments:
        states: [layer, token, hidden], any float dtype, lazy or not.
        unbiased: Whether to use pairs of different tokens only, for few tokens; may be slightly negative.

    Returns:
        cka float64 [layer, other_layer], symmetric, 1 on the diagonal; NaN for a layer without variance.

    Raises:
        ShapeError: Fewer than 2 tokens, or 4 if unbiased.
    """
    import xarray as xr

    states = as_layers(states)
    layers, n = states.sizes["layer"], states.sizes["token"]
    least = 4 if unbiased else 2
    if n < least:
        raise ShapeError(
            f"expected at least {least} tokens to compare layers by CKA, found {n}; select more tokens"
        )
    hsic = np.zeros((layers, layers))
    shift = _first_means(states)  # HSIC does not depend on a common shift of the states of a layer
    for x_layers, y_layers in _tiles(layers, states.sizes["hidden"]):
        products = _Products.of(states, x_layers, y_layers, shift)
        tile = products.unbiased() if unbiased else products.biased()
        hsic[np.ix_(x_layers, y_layers)] = tile
        hsic[np.ix_(y_layers, x_layers)] = tile.T
    with np.errstate(invalid="ignore", divide="ignore"):
        # NaN instead of a division by zero for a layer without variance.
        scale = np.sqrt(np.where(np.diag(hsic) > 0, np.diag(hsic), np.nan))
        cka = hsic / np.outer(scale, scale)
    return xr.Dataset({"cka": (PAIRS, cka), "n": n}, coords=_coords(states["layer"].variable))


@dataclass
class _Products:
    """Token sums that determine HSIC between two groups of layers, x and y.

    All float64, of states shifted by `shift`.
    """

    n: int
    """Number of tokens."""
    cross: Array
    """Sum of x y', [x layer, hidden, y layer, hidden]."""
    total_x: Array
    """Sum of x, [x layer, hidden]."""
    total_y: Array
    """Sum of y, [y layer, hidden]."""
    x_by_y: Array
    """Sum of x |y|^2, [x layer, y layer, hidden]."""
    y_by_x: Array
    """Sum of y |x|^2, [y layer, x layer, hidden]."""
    squares: Array
    """Sum of |x|^2 |y|^2, [x layer, y layer]."""
    square_x: Array
    """Sum of |x|^2, [x layer]."""
    square_y: Array
    """Sum of |y|^2, [y layer]."""

    @classmethod
    def of(
        cls, states: xr.DataArray, x_layers: Sequence[int], y_layers: Sequence[int], shift: Array
    ) -> _Products:
        """Compute the sums over all tokens; each layer of either group is read once.

        Arguments:
            states: [layer, token, hidden].
            x_layers: Indices of the layers of group x.
            y_layers: Indices of the layers of group y.
            shift: Approximate mean state of each layer, [layer, hidden], subtracted from all states.
        """
        width, a, b = states.sizes["hidden"], len(x_layers), len(y_layers)
        layers_read = list(dict.fromkeys([*x_layers, *y_layers]))
        at_x, at_y = [layers_read.index(i) for i in x_layers], [layers_read.index(i) for i in y_layers]
        sums = cls(
            n=states.sizes["token"],
            cross=np.zeros((a * width, b * width)),
            total_x=np.zeros((a, width)),
            total_y=np.zeros((b, width)),
            x_by_y=np.zeros((a, b, width)),
            y_by_x=np.zeros((b, a, width)),
            squares=np.zeros((a, b)),
            square_x=np.zeros(a),
            square_y=np.zeros(b),
        )
        product = np.empty_like(sums.cross, dtype=np.float32)
        for block in _blocks(states, layers_read):
            rows = np.subtract(block, shift[layers_read, None], out=block)
            square = np.einsum("lth,lth->lt", rows, rows)
            # One matrix [token, layer x hidden]: numpy calls syrk if both factors are the same array.
            x = rows[at_x].transpose(1, 0, 2).reshape(rows.shape[1], -1)
            y = x if at_x == at_y else rows[at_y].transpose(1, 0, 2).reshape(rows.shape[1], -1)
            sums.cross += np.matmul(x.T, y, out=product)
            sums._add(rows[at_x], rows[at_y], square[at_x], square[at_y])
        sums.cross = sums.cross.reshape(a, width, b, width)
        return sums

    def _add(self, x: Array, y: Array, xx: Array, yy: Array) -> None:
        """Add a block of tokens to all sums except `cross`.

        Arguments:
            x: States of group x, [layer, token, hidden].
            y: States of group y.
            xx: Squared norms of the states of group x, [layer, token].
            yy: Squared norms of the states of group y.
        """
        self.total_x += x.sum(axis=1, dtype=np.float64)
        self.total_y += y.sum(axis=1, dtype=np.float64)
        self.x_by_y += yy @ x
        self.y_by_x += xx @ y
        self.squares += xx.astype(np.float64) @ yy.T
        self.square_x += xx.sum(axis=1, dtype=np.float64)
        self.square_y += yy.sum(axis=1, dtype=np.float64)

    @property
    def _norm(self) -> Array:
        """||X' Y||_F^2, [x layer, y layer]."""
        norm: Array = np.einsum("ahbk,ahbk->ab", self.cross, self.cross)
        return norm

    @property
    def _between(self) -> Array:
        """(1' X) X' Y (Y' 1), [x layer, y layer]."""
        weighted = np.einsum("ah,ahbk->abk", self.total_x, self.cross)
        between: Array = np.einsum("abk,bk->ab", weighted, self.total_y)
        return between

    def biased(self) -> Array:
        """||Xc' Yc||_F^2, [x layer, y layer]; the means are removed from the sums afterwards."""
        means = np.outer((self.total_x**2).sum(1), (self.total_y**2).sum(1))
        return self._norm - 2 * self._between / self.n + means / self.n**2

    def unbiased(self) -> Array:
        """HSIC_1 of Song et al. 2012, eq. 5, [x layer, y layer], from K = X X' and L = Y Y' without their
        diagonals.

        tr(K L), the sums of K and of L, and 1' K L 1 are sums over tokens of products of features.
        """
        n = self.n
        trace = self._norm - self.squares
        sum_k = (self.total_x**2).sum(1) - self.square_x
        sum_l = (self.total_y**2).sum(1) - self.square_y
        rows = self._between + self.squares
        rows -= np.einsum("ah,abh->ab", self.total_x, self.x_by_y)
        rows -= np.einsum("bk,bak->ab", self.total_y, self.y_by_x)
        hsic: Array = trace + np.outer(sum_k, sum_l) / ((n - 1) * (n - 2)) - 2 * rows / (n - 2)
        return hsic / (n * (n - 3))


def _tiles(n_layers: int, width: int) -> Iterator[tuple[range, range]]:
    """Yield pairs of layer ranges that cover every pair of layers once, with Grams within `GRAM_BYTES`."""
    size = max(1, int((GRAM_BYTES / 12) ** 0.5) // width)  # 8 bytes of sum and 4 of product per entry
    # Only pairs of groups on and above the diagonal: CKA is symmetric.
    groups = [range(start, min(start + size, n_layers)) for start in range(0, n_layers, size)]
    for i, group in enumerate(groups):
        yield from ((group, other_group) for other_group in groups[i:])


def _blocks(states: xr.DataArray, layers: Sequence[int]) -> Iterator[Array]:
    """Yield float32 [layer, token, hidden] of some layers per token range; the arrays may be modified."""
    selected = states.isel(layer=list(layers))

    def read(token_range: slice) -> Array:
        rows = read_rows(selected, token_range, np.arange(token_range.stop - token_range.start))
        # A copy, as callers write into it; contiguous, so that its products are plain BLAS calls.
        return np.array(rows.transpose(1, 0, 2), order="C")

    width = len(layers) * states.sizes["hidden"]
    for _, rows in ahead(token_ranges(selected, width), read):
        yield rows


def _first_means(states: xr.DataArray) -> Array:
    """Mean of the first states of each layer, float32 [layer, hidden], as a shift of all states.

    A large common offset would use up the mantissa of float32 products.
    """
    # A few hundred tokens suffice, since the shift need not be the exact mean.
    sample = next(token_ranges(states, states.sizes["layer"] * states.sizes["hidden"]))
    values = states.isel(token=slice(sample.start, min(sample.stop, 512))).transpose(
        "layer", "token", "hidden"
    )
    means: Array = values.values.astype(np.float32).mean(axis=1)
    return means


def _unit(rows: Array) -> Array:
    """Normalise vectors [layer, token, hidden] to length 1, in place; zero vectors stay zero."""
    length = np.sqrt(np.einsum("lth,lth->lt", rows, rows))[..., None]
    rows /= np.where(length > 0, length, 1)
    return rows


def _cosines(cosine: Array, mean: Array, n: int, layer: xr.Variable) -> xr.Dataset:
    """Result of `layer_cosine` from its cosines, mean states, number of tokens and layer numbers."""
    import xarray as xr

    length = np.linalg.norm(mean, axis=1, keepdims=True)
    unit = mean / np.where(length > 0, length, 1)
    return xr.Dataset(
        {
            "cosine": (PAIRS, cosine.clip(-1.0, 1.0)),
            "cosine_of_means": (PAIRS, (unit @ unit.T).clip(-1.0, 1.0)),
            "mean": (("layer", "hidden"), mean),
            "n": n,
        },
        coords=_coords(layer),
    )


def _coords(layer: xr.Variable) -> dict[str, Any]:
    """Coordinates of a comparison of every two layers, from the layer numbers."""
    return {
        "layer": ("layer", layer.values, {"long_name": "layer"}),
        "other_layer": ("other_layer", layer.values, {"long_name": "layer"}),
    }
