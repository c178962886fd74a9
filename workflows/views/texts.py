"""Views of tokens: texts whose tokens are shaded by a number, and the logit lens of a prompt.

Axes: layer, position, rank (0 = most likely token). Entropy and KL divergence are in nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...stages.logits.lens import format_token
from ...store.arrays import Array
from . import labels
from .heatmap import Heatmap
from .view import View

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["Lens", "Measure", "Text", "Tokens"]


@dataclass(frozen=True)
class Text:
    """A sequence of tokens with one number per token."""

    tokens: tuple[str, ...]
    """Text of each token, in order."""
    values: Array
    """Number that shades each token, float [token]; NaN for a token without shade."""
    label: str = ""
    """Heading above the tokens, such as the prompt number; "" without a heading."""


@dataclass(frozen=True, kw_only=True)
class Tokens(View):
    """Texts whose tokens are shaded by a number: probabilities, activations of a feature, losses."""

    kind: ClassVar[str] = "tokens"
    is_drawn: ClassVar[bool] = True
    texts: tuple[Text, ...]
    """The texts, which share one colour scale."""
    value_name: str
    """Name of the quantity that shades the tokens."""
    unit: str = ""
    """Unit of the shading quantity; "" without a unit."""
    low: float | None = None
    """Value at the lower end of the colour scale; None for the smallest value of all texts."""
    high: float | None = None
    """Value at the upper end of the colour scale; None for the largest value of all texts."""
    diverging: bool = False
    """Whether the colour scale is symmetric around zero."""

    def __post_init__(self) -> None:
        for text in self.texts:
            labels.expect(f"values of {text.label!r}", text.values, (len(text.tokens),))


@dataclass(frozen=True)
class Measure:
    """Quantity by which a page can shade the cells of a logit lens, such as the entropy of the prediction."""

    name: str
    """Name of the quantity."""
    unit: str
    """Unit of the quantity."""
    values: Array
    """The quantity in each cell of the lens, float [layer, position]."""


@dataclass(frozen=True, kw_only=True)
class Lens(View):
    """The logit lens of one prompt: the next-token prediction read from each layer at each position."""

    kind: ClassVar[str] = "lens"
    is_drawn: ClassVar[bool] = True
    tokens: tuple[str, ...]
    """Text of each token of the prompt [position]."""
    layers: tuple[int, ...]
    """Layer numbers; the predictions of layer i are read from the residual stream after block i."""
    words: tuple[str, ...]
    """Distinct texts of all predicted tokens; `top` holds indices into this tuple."""
    top: Array
    """Most likely next tokens, int [layer, position, rank]: indices into `words`."""
    probabilities: Array
    """Probabilities of the tokens in `top`, float [layer, position, rank]."""
    target: tuple[str, ...]
    """Text of the token that actually follows each position [position]; "" if unknown."""
    target_probability: Array
    """Probability of the token that actually follows, float [layer, position]."""
    target_rank: Array
    """Rank of the token that actually follows, int [layer, position]: 1 = most likely, 0 = unknown token."""
    measures: tuple[Measure, ...] = ()
    """Further quantities by which a page can shade the cells."""

    def __post_init__(self) -> None:
        grid = (len(self.layers), len(self.tokens))
        ranks = self.top.shape[-1]
        labels.expect("top", self.top, (*grid, ranks))
        labels.expect("probabilities", self.probabilities, (*grid, ranks))
        labels.expect("target_probability", self.target_probability, grid)
        labels.expect("target_rank", self.target_rank, grid)

    @classmethod
    def of(cls, lens: xr.Dataset, vocabulary: Sequence[str], *, title: str, caption: str = "") -> Lens:
        """Build the view from the output of the stage `logit_lens` for one prompt.

        Arguments:
            lens: Output of the stage: variables [layer, position, rank] and [layer, position], and
                `token_id`, the token ids of the prompt [position].
            vocabulary: Text of each token id.
            title: Title of the view.
            caption: Caption of the view.
        """
        grid = lens.transpose("layer", "position", "rank", ...)
        word_ids, top = np.unique(grid["top_id"].values, return_inverse=True)
        # -1 for a position whose next token is unknown.
        targets = grid["target_id"].values.tolist()
        return cls(
            title=title,
            caption=caption,
            sources=("lens",),
            tokens=tuple(format_token(vocabulary[token]) for token in grid["token_id"].values.tolist()),
            layers=tuple(grid["layer"].values.tolist()),
            words=tuple(format_token(vocabulary[token]) for token in word_ids.tolist()),
            # Reshaped because numpy versions differ in the shape of return_inverse.
            top=top.reshape(grid["top_id"].shape),
            probabilities=np.exp(grid["top_logprob"].values),
            target=tuple(format_token(vocabulary[token]) if token >= 0 else "" for token in targets),
            target_probability=np.exp(grid["target_logprob"].values),
            target_rank=grid["target_rank"].values,
            measures=(
                Measure("entropy", "nats", grid["entropy"].values),
                Measure("KL from the last layer", "nats", grid["kl"].values),
            ),
        )

    def inches(self) -> tuple[float, float]:
        """(width, height) in inches of the heatmap that `draw` draws."""
        return self._heatmap().inches()

    def draw(self, axes: Any) -> None:
        """Draw the most likely token of each layer and position, shaded by its probability."""
        self._heatmap().draw(axes)

    def _heatmap(self) -> Heatmap:
        """Heatmap of the most likely tokens; cells that predict the token that actually follows are
        framed."""
        correct_cells = zip(*np.nonzero(self.target_rank == 1), strict=True)
        return Heatmap(
            values=self.probabilities[..., 0],
            rows=tuple(map(str, self.layers)),
            columns=self.tokens,
            row_name="layer (residual stream after it)",
            column_name="token read",
            value_name="probability",
            low=0.0,
            high=1.0,
            upward=True,
            texts=tuple(tuple(self.words[i] for i in row) for row in self.top[..., 0]),
            # A frame is (top, left, bottom, right): a single cell is its own first and last cell.
            framed=tuple((int(row), int(column)) * 2 for row, column in correct_cells),
        )
