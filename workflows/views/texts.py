"""Texts and their tokens: shaded by a number, or through the logit lens.

Axes: layer position rank. Probabilities have no unit, entropy and KL are in nats.
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
    """Tokens in order, and a number for each, NaN where there is none; label: what is written before them."""

    tokens: tuple[str, ...]
    values: Array
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Tokens(View):
    """Texts whose tokens are shaded by a number: probabilities, activations of a feature, losses.

    low, high, diverging: the colour scale, as for a heatmap, common to all texts.
    """

    kind: ClassVar[str] = "tokens"
    is_drawn: ClassVar[bool] = True
    texts: tuple[Text, ...]
    value_name: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    diverging: bool = False

    def __post_init__(self) -> None:
        for text in self.texts:
            labels.expect(f"values of {text.label!r}", text.values, (len(text.tokens),))


@dataclass(frozen=True)
class Measure:
    """A number per layer and position of a lens, by which cells may be shaded."""

    name: str
    unit: str
    values: Array


@dataclass(frozen=True, kw_only=True)
class Lens(View):
    """The logit lens of one prompt: what each layer would say next at each position.

    tokens: of the prompt, one per position.  words: strings that `top` [layer, position, rank] points into;
    probabilities likewise.  target: what does come next, "" where nobody says; its probability and rank
    (1 = most likely, 0 = no target) are [layer, position].  measures: other numbers to shade by.
    """

    kind: ClassVar[str] = "lens"
    is_drawn: ClassVar[bool] = True
    tokens: tuple[str, ...]
    layers: tuple[int, ...]
    words: tuple[str, ...]
    top: Array
    probabilities: Array
    target: tuple[str, ...]
    target_probability: Array
    target_rank: Array
    measures: tuple[Measure, ...] = ()

    def __post_init__(self) -> None:
        grid = (len(self.layers), len(self.tokens))
        ranks = self.top.shape[-1]
        labels.expect("top", self.top, (*grid, ranks))
        labels.expect("probabilities", self.probabilities, (*grid, ranks))
        labels.expect("target_probability", self.target_probability, grid)
        labels.expect("target_rank", self.target_rank, grid)

    @classmethod
    def of(cls, lens: xr.Dataset, vocabulary: Sequence[str], *, title: str, caption: str = "") -> Lens:
        """From what the `logit_lens` stage gives for one prompt, [layer, position, rank] and
        [layer, position], with the ids of its tokens as `token_id`; vocabulary: strings by token id."""
        grid = lens.transpose("layer", "position", "rank", ...)
        known, top = np.unique(grid["top_id"].values, return_inverse=True)
        targets = grid["target_id"].values.tolist()
        return cls(
            title=title,
            caption=caption,
            sources=("lens",),
            tokens=tuple(format_token(vocabulary[token]) for token in grid["token_id"].values.tolist()),
            layers=tuple(grid["layer"].values.tolist()),
            words=tuple(format_token(vocabulary[token]) for token in known.tolist()),
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
        """As the heatmap of the likeliest tokens."""
        return self._cells().inches()

    def draw(self, axes: Any) -> None:
        """The likeliest token of each layer and position, shaded by its probability."""
        self._cells().draw(axes)

    def _cells(self) -> Heatmap:
        right = zip(*np.nonzero(self.target_rank == 1), strict=True)
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
            framed=tuple((int(row), int(column)) * 2 for row, column in right),
        )
