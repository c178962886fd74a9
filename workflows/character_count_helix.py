"""How does the model know where it is in a line? The curve of mean states by character count, with controls.

Prose is wrapped at several widths; the residual stream after every layer is averaged over all tokens that
start c characters into their line (stages/character_count.py). A model that counts characters lays these
means out along a curve that winds through few dimensions: top components explain most of the variance, and
the cosine between two means rises and falls with their distance ("ringing"). Controls: counts shuffled among
tokens, and a linear read-out of the count scored on prompts it was not fitted to.

The protocol is candle-mi's `character_count_helix` (after Gurnee et al. 2025), with four repairs: lengths
are characters, not bytes; text is cut into contexts at line starts only, so that no token's count lies
outside what the model can see; line breaks themselves are left out of the means; means are centred before
projecting and before taking cosines (`centre=false` gives the original's uncentred numbers).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..stages.character_count import count_geometry, count_sums, decodability
from ..stages.text import character_counts, pack_lines, wrap
from ..store.errors import ConfigError
from .subject import Subject, read_texts
from .workflow import Workflow, setting

if TYPE_CHECKING:
    import xarray as xr
    from rich.table import Table

    from ..stages.forward.model import Model
    from ..store import PackedTokens
    from .report import Element

__all__ = ["CharacterCountHelix", "Settings", "line_corpus"]


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    model: str = setting("specimen", 'hub id, directory, or "specimen"')
    text: str = setting("", "a text file, or a folder of *.txt; none: the prose shipped with mizarr")
    characters: int = setting(0, "of each text, how many characters to read; 0 reads all")
    widths: tuple[int, ...] = setting((30, 40, 50, 60, 70, 80), "line widths to wrap at")
    max_count: int = setting(0, "largest character count; 0 means the largest width")
    min_count: int = setting(1, "leave out the first positions of a line")
    min_tokens: int = setting(30, "leave out counts seen in fewer tokens")
    line_breaks: bool = setting(False, "let tokens that are line breaks take part, as candle-mi does")
    context: int = setting(0, "tokens per forward pass; 0 means the model's context, at most 4096")
    layers: tuple[int, ...] = setting((), "layers to study; none means all")
    show: int = setting(-1, "layer to draw; -1: the one whose count reads off best")
    components: int = setting(6, "principal components")
    centre: bool = setting(True, "subtract the mean of the means before projecting and taking cosines")
    seed: int = setting(0, "of the shuffled control")
    dtype: str = setting("float32", "what the model computes in")

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 2:
            raise ConfigError(f"expected line widths of at least 2 characters, found {list(self.widths)}")


def line_corpus(subject: Subject, texts: list[str], widths: tuple[int, ...], context: int) -> PackedTokens:
    """Every text wrapped at every width and cut at line starts into prompts of at most `context` tokens.

    Prompts come in a mixed order: counts are shuffled segment by segment, and a segment of one width would
    leave the control with what high counts and wide lines have in common.
    """
    pieces: list[str] = []
    room = context - subject.special_tokens
    for text in texts:
        for width in widths:
            wrapped = wrap(text, width)
            pieces += pack_lines(wrapped, subject.starts(wrapped), room)
    mixed = np.random.default_rng(0).permutation(len(pieces))
    return subject.pack([pieces[i] for i in mixed])


def token_counts(tokens: PackedTokens, *, line_breaks: bool) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Character count of every token, int32 [token]; -1 for tokens that take no part.

    These are special tokens and, unless `line_breaks`, tokens that hold a line break: they sit at counts near
    the widths of the text and nowhere else, so that their mean would tell the width grid, not the count.
    """
    assert tokens.texts is not None
    assert tokens.char_start is not None
    assert tokens.char_end is not None
    starts = np.where(tokens.char_end > tokens.char_start, tokens.char_start, -1)
    rows = []
    for i, text in enumerate(tokens.texts):
        start, end = starts[tokens.row(i)], tokens.char_end[tokens.row(i)]
        counts = character_counts(text, start)
        if not line_breaks:
            breaks = np.cumsum([0, *(c == "\n" for c in text)])
            counts[breaks[end] > breaks[start.clip(0)]] = -1
        rows.append(counts)
    return np.concatenate(rows)


class CharacterCountHelix(Workflow):
    """Wrapped prose through the model, averaged by character count."""

    name = "character_count_helix"
    question = "How does the model know where it is in a line?"
    settings_type = Settings

    def __init__(self, settings: Settings, model: Model | None = None) -> None:
        import xarray as xr

        super().__init__(settings)
        self.subject = Subject(model or settings.model, settings.dtype)
        self.max_count = settings.max_count or max(settings.widths)
        context = settings.context or min(self.subject.config.context_length, 4096)
        texts = [text[: settings.characters or None] for text in read_texts(settings.text)]
        tokens = line_corpus(self.subject, texts, settings.widths, context)
        layers = settings.layers or range(self.subject.config.num_layers)
        captured = self.subject.capture(tokens, *(f"blocks.{layer}.hook_resid_post" for layer in layers))
        states = captured["resid_post"]
        count = xr.DataArray(
            token_counts(tokens, line_breaks=settings.line_breaks), dims="token", name="count"
        )
        prompt = xr.DataArray(tokens.prompt_of(slice(None)), dims="token", name="prompt")
        chosen = {"max_count": self.max_count, "shuffle_seed": settings.seed}
        sums = count_sums.on(states=states, count=count, **chosen)
        shape = {
            "n_components": settings.components,
            "min_count": settings.min_count,
            "min_tokens": settings.min_tokens,
            "centre": settings.centre,
        }
        self.nodes = {
            "geometry": count_geometry.on(sums=sums, **shape),
            "control": count_geometry.on(sums=sums, counts="shuffled", **shape),
            "decodability": decodability.on(states=states, count=count, prompt=prompt, **chosen),
        }

    @cached_property
    def geometry(self) -> xr.Dataset:
        """Curve of each layer, `count_geometry`, in memory."""
        return self.result("geometry").load()

    @cached_property
    def control(self) -> xr.Dataset:
        """The same with counts shuffled among tokens."""
        return self.result("control").load()

    @cached_property
    def r2(self) -> xr.DataArray:
        """Held-out R2 of a linear read-out of the count, [layer, counts]."""
        return self.result("decodability")["r2"].load()

    @property
    def layer(self) -> int:
        """The layer shown: as set, else the one whose count reads off best."""
        if self.settings.show >= 0:
            return int(self.settings.show)
        best = self.r2.sel(counts="true").fillna(-np.inf).argmax("layer")
        return int(self.r2["layer"][int(best)])

    def tables(self) -> list[Table]:
        """One row per layer, and the ringing of the layer shown."""
        return [self._layers_table(), self._ringing_table()]

    def draw(self, folder: Path) -> list[Path]:
        """One page for the layer shown, with all layers in its lower half."""
        from . import figures

        def page() -> Any:
            by_layer = self.geometry[["explained_variance_ratio"]].assign(r2=self.r2)
            return figures.helix_page(
                self.geometry.sel(layer=self.layer),
                self.control.sel(layer=self.layer),
                by_layer,
                model=self.subject.name,
                footer=self.footer,
            )

        return [self.figure(folder / f"character_count_helix_L{self.layer}.png", page)]

    def elements(self) -> list[Element]:
        """Layer by layer the ringing, the cosines and the curve; of all layers the read-out and variance."""
        from .report import Choice, Line, Lines, from_rich

        layers = tuple(self.geometry["layer"].values.tolist())
        views = {
            "Ringing": ("Mean cosine of two mean states by how far apart they are.", self._ringing),
            "Cosine between the means of two counts": (
                "Bands beside the diagonal: the curve turns away, and comes round again.",
                self._cosines,
            ),
            "The curve, one component at a time": (
                "Mean states projected on their principal components.",
                self._projections,
            ),
        }
        choices = [
            Choice(
                title=title,
                caption=caption,
                sources=("geometry", "control") if title == "Ringing" else ("geometry",),
                name="layer",
                options=tuple((str(layer), view(layer)) for layer in layers),
                start=layers.index(self.layer),
            )
            for title, (caption, view) in views.items()
        ]
        ratio = self.geometry["explained_variance_ratio"].transpose("layer", "component").values
        shares = [Line(f"PC1 to PC{k}", ratio[:, :k].sum(axis=1)) for k in (1, 2, 3, ratio.shape[1])]
        shuffled = self.control["explained_variance_ratio"].sum("component").values
        shares.append(Line(f"PC1 to PC{ratio.shape[1]}, shuffled", shuffled, control=True))
        scores = {name: self.r2.sel(layer=list(layers), counts=name).values for name in ("true", "shuffled")}
        readout = Line("true counts", scores["true"]), Line("shuffled", scores["shuffled"], control=True)
        by_layer = [
            Lines(x=layers, x_name="layer", y_name=name, title=title, lines=lines, low=0.0, high=1.0)
            for title, name, lines in (
                ("Can the count be read off linearly?", "R² on held-out prompts", readout),
                ("How few dimensions hold the means?", "share of their variance", tuple(shares)),
            )
        ]
        layers_table, ringing_table = map(from_rich, self.tables())
        return [layers_table, *choices, *by_layer, ringing_table]

    def _ringing(self, layer: int) -> Element:
        from .report import Line, Lines

        part, control = (of.sel(layer=layer)["ringing"] for of in (self.geometry, self.control))
        return Lines(
            x=tuple(part["offset"].values.tolist()),
            x_name="characters apart",
            y_name="mean cosine",
            low=-1.0,
            high=1.0,
            lines=(
                Line("true counts", part.values),
                Line("shuffled counts", control.reindex(offset=part["offset"]).values, control=True),
            ),
        )

    def _cosines(self, layer: int) -> Element:
        from .report import Heatmap

        cosine = self.geometry["cosine"].sel(layer=layer)
        counts = tuple(str(count) for count in self.geometry["count"].values)
        named = {"rows": counts, "columns": counts, "row_name": "count", "column_name": "count"}
        return Heatmap.of(cosine, **named, low=-1.0, high=1.0, diverging=True, upward=True)

    def _projections(self, layer: int) -> Element:
        from .report import Lines

        curve = self.geometry["projection"].sel(layer=layer).transpose("component", "count")[:4]
        curve = curve.assign_coords(component=np.arange(1, len(curve) + 1))
        return Lines.of(curve, x_name="characters since the line began")

    def to_json(self) -> dict[str, Any]:
        """Per layer the fields of candle-mi's example, the ringing, and the controls; and where it comes
        from.

        `projections` and `cosine_similarity` are of centred means iff `centred`; mean_projection is what
        centring took away: uncentred projections are `projections` + `mean_projection`.
        """
        layers = [self._layer_json(int(layer)) for layer in self.geometry["layer"].values]
        return {**self.header(), "shown_layer": self.layer, "results": layers}

    def _layer_json(self, layer: int) -> dict[str, Any]:
        part, control = self.geometry.sel(layer=layer), self.control.sel(layer=layer)
        ratio = part["explained_variance_ratio"].values
        offset = np.zeros(len(ratio))
        if part.attrs["centred"]:
            offset = part["components"].values @ part["mean"].mean("count").values
        return {
            "model_id": self.subject.name,
            "layer": layer,
            "max_char_count": self.max_count,
            "line_widths": list(self.settings.widths),
            "explained_variance": ratio.tolist(),
            "total_variance_top6": float(ratio.sum()),
            "total_variance_top6_shuffled": float(control["explained_variance_ratio"].sum()),
            "projections": [
                {"char_count": int(count), "pc": row.tolist()}
                for count, row in zip(part["count"].values, part["projection"].values, strict=True)
            ],
            "mean_projection": offset.tolist(),
            "cosine_similarity": part["cosine"].values.tolist(),
            "centred": bool(part.attrs["centred"]),
            "ringing": dict(
                zip(part["offset"].values.tolist(), part["ringing"].values.tolist(), strict=True)
            ),
            "ringing_shuffled": dict(
                zip(control["offset"].values.tolist(), control["ringing"].values.tolist(), strict=True)
            ),
            "tokens": int(part["n"].sum()),
            "r2": _number(self.r2.sel(layer=layer, counts="true")),
            "r2_shuffled": _number(self.r2.sel(layer=layer, counts="shuffled")),
        }

    def _layers_table(self) -> Table:
        from rich.table import Table

        counts = self.geometry["count"].values
        tokens = int(self.geometry["n"].sum())
        title = (
            f"Mean state of {self.subject.name} by character count: {tokens:,} tokens at {len(counts)} counts"
        )
        table = Table(title=title, box=None, pad_edge=False)
        columns = (
            "layer",
            "PC1",
            "PC2",
            "PC3",
            f"top {self.settings.components}",
            "(shuffled)",
            "lowest cos",
            "(shuffled)",
            "R²",
            "(shuffled)",
        )
        for column in columns:
            table.add_column(column, justify="right")
        for layer in self.geometry["layer"].values.tolist():
            pair = [of.sel(layer=layer) for of in (self.geometry, self.control)]
            ratios = [part["explained_variance_ratio"].values for part in pair]
            scores = [float(self.r2.sel(layer=layer, counts=name)) for name in ("true", "shuffled")]
            cells = [str(layer), *(f"{v:.1%}" for v in ratios[0][:3]), *(f"{r.sum():.1%}" for r in ratios)]
            cells += [f"{float(part['ringing'].min()):+.2f}" for part in pair]
            cells += [f"{v:+.2f}" for v in scores]
            table.add_row(*cells, style="bold" if layer == self.layer else "")
        table.caption = (
            "share of the variance of the means; lowest mean cosine at any distance; linear read-out of the "
            "count on held-out prompts; each also with counts shuffled among tokens"
        )
        return table

    def _ringing_table(self) -> Table:
        from rich.table import Table

        part, control = self.geometry.sel(layer=self.layer), self.control.sel(layer=self.layer)
        title = f"Ringing at layer {self.layer}: mean cosine of means so many characters apart"
        table = Table(title=title, box=None, pad_edge=False)
        offsets = [d for d in (1, 2, 5, 10, 15, 20, 25, 30, 40, 49) if d in part["offset"].values]
        table.add_column("apart", no_wrap=True)
        for d in offsets:
            table.add_column(str(d), justify="right", no_wrap=True)
        for name, curve in (("true", part["ringing"]), ("shuffled", control["ringing"])):
            known = dict(zip(curve["offset"].values.tolist(), curve.values.tolist(), strict=True))
            table.add_row(name, *(f"{known[d]:+.2f}" if d in known else "" for d in offsets))
        return table


def _number(value: Any) -> float | None:
    """NaN has no place in JSON."""
    number = float(value)
    return None if np.isnan(number) else number


WORKFLOW = CharacterCountHelix
