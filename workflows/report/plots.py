"""Elements with numbers to look into: heatmap, lines, tokens, logit lens, attention.

Border: arrays and labels in the order of the house's axes; what they look like, and what happens under a
pointer or a key, is in assets/. Each checks at the door that labels and arrays belong together.

Axes: row column; layer position rank; layer head query_position key_position. Probabilities and attention
weights have no unit, entropy and KL are in nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from ...stages.lens import format_token
from ...store.errors import ShapeError
from .blocks import size
from .elements import Element

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["Attention", "Heatmap", "Lens", "Line", "Lines", "Measure", "Text", "Tokens"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Heatmap(Element):
    """A matrix as coloured cells: `values` [row, column], NaN where there is none.

    rows, columns: labels.  row_name, column_name, value_name, unit: what the tooltip calls them.
    low, high: ends of the colour scale; None takes those of the values.  diverging: colours part at zero, and
    the scale is as long below it as above.  upward: the first row lies at the bottom, as layers do.
    framed: blocks of cells with a frame around, each (first row, first column, last row, last column), and
    what a frame means.
    """

    kind: ClassVar[str] = "heatmap"
    is_drawn: ClassVar[bool] = True
    values: Array
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    row_name: str = "layer"
    column_name: str = "position"
    value_name: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    diverging: bool = False
    upward: bool = False
    framed: tuple[tuple[int, int, int, int], ...] = ()
    frame_name: str = ""

    def __post_init__(self) -> None:
        _expect("values", self.values, (len(self.rows), len(self.columns)))

    @classmethod
    def of(cls, array: xr.DataArray, **told: Any) -> Heatmap:
        """From a labelled array of two dims, rows first: names, labels and unit are its own unless `told`.
        Layers lie upward."""
        down, across = map(str, array.dims)
        own = {
            "rows": _labels(array, down),
            "columns": _labels(array, across),
            "row_name": _word(down),
            "column_name": _word(across),
            "value_name": _name(array),
            "unit": _unit(array),
            "upward": down == "layer",
        }
        return cls(**{**own, "values": array.values, **told})


@dataclass(frozen=True)
class Line:
    """A curve: one value per point of x, NaN where there is none. `control` draws it dashed and grey."""

    name: str
    values: Array
    control: bool = False


@dataclass(frozen=True, kw_only=True)
class Lines(Element):
    """Curves over a common x, which is numbers in rising order, or labels.

    low, high: what the y axis has to reach at least.
    """

    kind: ClassVar[str] = "lines"
    is_drawn: ClassVar[bool] = True
    x: tuple[float, ...] | tuple[str, ...]
    lines: tuple[Line, ...]
    x_name: str
    y_name: str
    unit: str = ""
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        for line in self.lines:
            _expect(f"values of {line.name!r}", line.values, (len(self.x),))

    @classmethod
    def of(cls, array: xr.DataArray, **told: Any) -> Lines:
        """From a labelled array [curve, x]: a curve per label of its first dim, names and unit its own unless
        `told`."""
        by, across = map(str, array.dims)
        x = array[across].values.tolist()
        order = np.argsort(x, kind="stable") if not isinstance(x[0], str) else np.arange(len(x))
        own = {
            "x": tuple(x[i] for i in order),
            "x_name": _word(across),
            "y_name": _name(array),
            "unit": _unit(array),
            "lines": tuple(
                Line(f"{_word(by)} {label}", row[order])
                for label, row in zip(_labels(array, by), array.values, strict=True)
            ),
        }
        return cls(**{**own, **told})


@dataclass(frozen=True)
class Text:
    """Tokens in order, and a number for each, NaN where there is none; label: what is written before them."""

    tokens: tuple[str, ...]
    values: Array
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Tokens(Element):
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
            _expect(f"values of {text.label!r}", text.values, (len(text.tokens),))


@dataclass(frozen=True)
class Measure:
    """A number per layer and position of a lens, by which cells may be shaded."""

    name: str
    unit: str
    values: Array


@dataclass(frozen=True, kw_only=True)
class Lens(Element):
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
        _expect("top", self.top, (*grid, ranks))
        _expect("probabilities", self.probabilities, (*grid, ranks))
        _expect("target_probability", self.target_probability, grid)
        _expect("target_rank", self.target_rank, grid)

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


@dataclass(frozen=True, kw_only=True)
class Attention(Element):
    """Attention patterns of one prompt: `pattern` [layer, head, query_position, key_position], float.

    Weights above the diagonal are not embedded: there a causal model has none.  overview: [layer, head], a
    number by which heads are told apart in the grid one is chosen from, with its name.  layer, head: shown
    first; head None is the mean over heads.  query: position shown first.
    """

    kind: ClassVar[str] = "attention"
    is_drawn: ClassVar[bool] = True
    tokens: tuple[str, ...]
    layers: tuple[int, ...]
    pattern: Array
    overview: Array
    overview_name: str
    overview_unit: str = ""
    layer: int = 0
    head: int | None = None
    query: int = 0

    def __post_init__(self) -> None:
        length, heads = len(self.tokens), self.pattern.shape[1]
        rows, columns = np.tril_indices(length)
        if self.pattern.ndim == 4:
            _expect("pattern", self.pattern, (len(self.layers), heads, length, length))
            object.__setattr__(self, "pattern", self.pattern[..., rows, columns])
        _expect("pattern", self.pattern, (len(self.layers), heads, len(rows)))
        _expect("overview", self.overview, (len(self.layers), heads))

    def within(self, room: int) -> Element:
        """As many layers as fit, from the first on; the caption tells what is left out."""
        fixed = size(replace(self, pattern=self.pattern[:0], overview=self.overview[:0], layers=()))
        kept = min(len(self.layers), (room - fixed) * len(self.layers) // max(1, size(self) - fixed))
        if kept == len(self.layers):
            return self
        if kept < 1:
            return super().within(room)
        told = f"Layers {self.layers[0]} to {self.layers[kept - 1]} are on this page, which is limited."
        shown = self.layers[:kept]
        return replace(
            self,
            layers=shown,
            pattern=self.pattern[:kept],
            overview=self.overview[:kept],
            layer=self.layer if self.layer in shown else shown[0],
            caption=f"{self.caption} {told}".strip(),
        )


def _labels(array: xr.DataArray, dim: str) -> tuple[str, ...]:
    return tuple(f"{v:g}" if isinstance(v, float) else str(v) for v in array[dim].values.tolist())


def _word(dim: str) -> str:
    return dim.replace("_", " ")


def _name(array: xr.DataArray) -> str:
    return str(array.attrs.get("long_name", "value" if array.name is None else array.name))


def _unit(array: xr.DataArray) -> str:
    unit = str(array.attrs.get("units", ""))
    return "" if unit == "1" else unit


def _expect(name: str, values: Array, shape: tuple[int, ...]) -> None:
    if values.shape != shape:
        raise ShapeError(f"expected {name} of shape {shape}, as its labels say, found {values.shape}")
