"""How does the residual stream encode the position in a line?

The curve of mean states by character count, with controls.

Prose is wrapped at several widths; the residual stream after every layer is averaged over all tokens that
start c characters into their line (stages/geometry/character_count.py). In a model that counts characters
these means lie on a curve that winds through a few dimensions: the first principal components explain most of
the variance, and the cosine between two means rises and falls with the difference of their counts
("ringing"). Controls: counts shuffled among tokens, and a linear regression of the count on the states,
scored on held-out prompts.

The protocol is candle-mi's `character_count_helix` (after Gurnee et al. 2025), with four corrections: lengths
are in characters, not bytes; text is cut into contexts only at starts of lines, so that the whole line before
a token is in its context; tokens that are line breaks are left out of the means; means are centred before
projections and cosines are computed (`centre=false` gives the uncentred numbers of the original).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ...pipeline import run
from ...pipeline.nodes import one_look
from ...stages.corpus.text import token_counts
from ...stages.geometry.character_count import count_geometry, count_sums, decodability
from ...store.errors import ConfigError
from ..labelled import column, records, stacked
from ..material.line_corpus import line_corpus
from ..material.sizes import affordable_characters
from ..settings import AtLeastTwo, Count, ModelSettings, Natural, preset_of, setting
from ..subject import read_texts
from ..views import Bars, Choice, Curve, Data, Figure, Heatmap, Lines, Table, View
from ..workflow import ModelWorkflow, Nodes, loaded

if TYPE_CHECKING:
    import xarray as xr

    from ...stages.forward.models.model import Model
    from ...store import Store

__all__ = ["CharacterCountHelix", "CharacterCountHelixSettings"]


CHARACTERS = 24_000
"""Largest number of characters of the shipped prose that are read by default: enough to see the helix,
computed in seconds on a laptop for a small model. Larger models read less (material/sizes.py)."""


@dataclass(frozen=True)
class CharacterCountHelixSettings(ModelSettings):
    """Settings of the workflow `character_count_helix`: the texts, the line widths, and the analysis of mean
    states."""

    text: str = setting("", "file, folder or glob of texts; none: the prose shipped with mizarr")
    characters: int | None = setting(
        None,
        f"number of characters read of each text; 0: all; none: up to {CHARACTERS:,} of the shipped prose, "
        "fewer for large models, and all of other texts",
    )
    widths: tuple[AtLeastTwo, ...] = setting(
        (30, 40, 50, 60, 70, 80), "line widths to wrap at, in characters"
    )
    max_count: Natural = setting(0, "largest character count; 0: the largest width")
    min_count: Natural = setting(1, "smallest character count; tokens nearer to the line start are left out")
    min_tokens: Natural = setting(30, "smallest number of tokens of a count; rarer counts are left out")
    # Line breaks occur only near the widths, so their means would reflect the widths and not the count.
    line_breaks: bool = setting(False, "include tokens that are line breaks, as candle-mi does")
    context: Natural = setting(0, "number of tokens per prompt; 0: the model's context, at most 4096")
    layers: tuple[int, ...] = setting((), "layers to analyse; none: all")
    show: int = setting(-1, "layer to draw; -1: the layer with the largest R2 of the count")
    components: Count = setting(6, "number of principal components")
    centre: bool = setting(True, "subtract the mean over counts before projections and cosines are computed")
    seed: Natural = setting(0, "seed of the shuffled control")
    preset: str = setting(
        "", 'published protocol that replaces settings at their defaults: "gemma2-2b"; none: no preset'
    )
    stop: Natural = setting(0, "number of layers to compute in this run, besides stored ones; 0: all")
    jsonl: str = setting("", "folder for one JSON file per layer, written when the layer is computed")


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "gemma2-2b": {
        "model": "google/gemma-2-2b",
        "widths": tuple(range(20, 151, 10)),
        "max_count": 150,
        "line_breaks": True,
    }
}
"""Settings of published protocols, by name. "gemma2-2b" is that of Gurnee et al. as candle-mi ran it; its
corpus, 30 chapters of Dickens, is not shipped: pass it as text=FOLDER."""


def with_preset(settings: CharacterCountHelixSettings) -> CharacterCountHelixSettings:
    """A copy of the settings in which the preset's values replace those at their defaults.

    Raises ConfigError for an unknown preset.
    """
    if not settings.preset:
        return settings
    defaults = {field.name: field.default for field in fields(settings)}
    preset = preset_of(settings.preset, PRESETS)
    return replace(
        settings,
        **{name: value for name, value in preset.items() if getattr(settings, name) == defaults[name]},
    )


class CharacterCountHelix(ModelWorkflow):
    """Workflow that shows how the residual stream encodes the number of characters since the line start, with
    shuffled counts as control."""

    name = "character_count_helix"
    question = "How does the residual stream encode the position in a line?"
    descriptive = "PCA of the mean state per character count, beside the same with shuffled counts."
    settings_type = CharacterCountHelixSettings
    settings: CharacterCountHelixSettings

    geometry = loaded("geometry")
    """Result of `count_geometry`, in memory: PCA, cosines and ringing of the means by count, for each
    layer."""
    control = loaded("control")
    """Like `geometry`, computed with counts shuffled among tokens."""

    def __init__(self, settings: CharacterCountHelixSettings, model: Model | None = None) -> None:
        super().__init__(with_preset(settings), model)

    def plan(self) -> Nodes:
        """Nodes of the analysis of all layers. Raises ConfigError if `jsonl` is a file."""
        settings = self.settings
        if settings.jsonl and Path(settings.jsonl).expanduser().is_file():
            raise ConfigError(
                f"expected jsonl to be a folder, for one file per layer, found the file {settings.jsonl!r}; "
                "name a folder: jsonl=FOLDER"
            )
        self.max_count = settings.max_count or max(settings.widths)
        context = settings.context or min(self.subject.config.context_length, 4096)
        max_length = settings.characters
        if max_length is None:
            # Every character is read once at each width.
            times, config = len(settings.widths), self.subject.config
            max_length = 0 if settings.text else affordable_characters(config, CHARACTERS, times=times)
        texts = [text[: max_length or None] for text in read_texts(settings.text)]
        self.context, self.tokens = context, line_corpus(self.subject, texts, settings.widths, context)
        self.layers = settings.layers or tuple(range(self.subject.config.num_layers))
        return self._nodes_of(self.layers)

    def _nodes_of(self, layers: Sequence[int]) -> Nodes:
        """Nodes of the geometry with true and with shuffled counts, and of the linear regression of the
        count, for some layers."""
        settings, tokens = self.settings, self.tokens
        captured = self.subject.capture(tokens, *(f"blocks.{layer}.hook_resid_post" for layer in layers))
        states = captured["resid_post"]
        count = column(token_counts(tokens, line_breaks=settings.line_breaks), "token", "count")
        # The regression is scored on held-out prompts: tokens of one prompt are too similar to be split.
        prompt = column(tokens.prompt_of(slice(None)), "token", "prompt")
        counting = {"max_count": self.max_count, "shuffle_seed": settings.seed}
        sums = count_sums.on(states=states, count=count, **counting)
        geometry: dict[str, Any] = {
            "n_components": settings.components,
            "min_count": settings.min_count,
            "min_tokens": settings.min_tokens,
            "centre": settings.centre,
        }
        return {
            "geometry": count_geometry.on(sums=sums, **geometry),
            "control": count_geometry.on(sums=sums, counts="shuffled", **geometry),
            "decodability": decodability.on(states=states, count=count, prompt=prompt, **counting),
        }

    def run(self, store: Store, **options: Any) -> Self:
        """Computes the results that are not stored yet; see `Workflow.run` for `options`.

        With `stop` or `jsonl`, layers are computed one after another, and the results are those of the layers
        that are stored then. Stored layers are not computed again, so that the same command continues.
        """
        settings = self.settings
        if settings.stop or settings.jsonl:
            stored_layers, n_computed = [], 0
            for layer in self.layers:
                nodes = self._nodes_of([layer])
                # The three nodes share inputs, whose keys are then looked up once.
                with one_look():
                    is_stored = all(node.status(store).is_cached for node in nodes.values())
                if not is_stored and settings.stop and n_computed == settings.stop:
                    break
                n_computed += not is_stored
                run(nodes.values(), store, **options)
                self._write(layer, nodes, store)
                stored_layers.append(layer)
            # With the nodes of all layers, `super().run` would compute those after `stop` too.
            self.nodes = self._nodes_of(stored_layers)
        return super().run(store, **options)

    def _write(self, layer: int, nodes: Nodes, store: Store) -> None:
        """Writes a JSON file with the results of one layer into the folder `jsonl`, if that is set."""
        if not self.settings.jsonl:
            return
        folder = Path(self.settings.jsonl).expanduser()
        ratio = nodes["geometry"].open(store)["explained_variance_ratio"].isel(layer=0).values
        keys = [key.digest for node in nodes.values() if (key := node.key(store)) is not None]
        notes = [note for key in keys for note in store.provenance(key)]
        record = {
            "layer": layer,
            "explained_variance": ratio.tolist(),
            # The name is candle-mi's; the number of components is that of the settings.
            "total_variance_top6": float(ratio.sum()),
            "time_secs": round(sum(note.get("seconds", 0.0) for note in notes), 3),
            "text": self.settings.text or "shipped prose",
            "max_tokens": self.context,
            "model_id": self.subject.name,
            "keys": keys,
        }
        folder.mkdir(parents=True, exist_ok=True)
        # Written under another name first: a reader never sees half a file.
        unfinished = folder / f".layer_{layer:02d}.part"
        unfinished.write_text(json.dumps(record) + "\n", "utf-8")
        unfinished.replace(folder / f"layer_{layer:02d}_variance.jsonl")

    @cached_property
    def r2(self) -> xr.DataArray:
        """R2 on held-out prompts of a linear regression of the count on the states, [layer, counts], in
        memory; counts is "true" or "shuffled"."""
        return self.result("decodability")["r2"].load()

    @property
    def layer(self) -> int:
        """Layer that is drawn: the setting `show`, or else the layer with the largest R2 of the true
        counts."""
        settings = self.settings
        # With `stop`, the layer to show may not be computed yet.
        is_missing = settings.stop > 0 and settings.show not in self.geometry["layer"].values
        if settings.show >= 0 and not is_missing:
            return int(settings.show)
        # xarray's argmax skips NaN and raises if all scores are NaN.
        best = self.r2.sel(counts="true").fillna(-np.inf).argmax("layer")
        return int(self.r2["layer"][int(best)])

    def document(self, layer: int) -> dict[str, Any]:
        """JSON document of a layer, in the field names of candle-mi's example, with ringing and controls.

        `projections` and `cosine_similarity` are those of centred means if `centred` is true. Uncentred
        projections are then `projections` + `mean_projection`.
        """
        part, control = self.geometry.sel(layer=layer), self.control.sel(layer=layer)
        ratio = part["explained_variance_ratio"].values
        offset = np.zeros(len(ratio))
        if part.attrs["centred"]:
            offset = part["components"].values @ part["mean"].mean("count").values
        return {
            "model_id": self.subject.name,
            "layer": layer,
            "max_char_count": self.max_count,
            "line_widths": self.settings.widths,
            "explained_variance": ratio,
            "total_variance_top6": ratio.sum(),
            "total_variance_top6_shuffled": control["explained_variance_ratio"].values.sum(),
            "projections": records(part, "count", char_count="count", pc="projection"),
            "mean_projection": offset,
            "cosine_similarity": part["cosine"],
            "centred": bool(part.attrs["centred"]),
            "ringing": dict(zip(part["offset"].values.tolist(), part["ringing"].values, strict=True)),
            "ringing_shuffled": dict(
                zip(control["offset"].values.tolist(), control["ringing"].values, strict=True)
            ),
            "tokens": int(part["n"].sum()),
            "r2": self.r2.sel(layer=layer, counts="true"),
            "r2_shuffled": self.r2.sel(layer=layer, counts="shuffled"),
        }

    @property
    def summary(self) -> str:
        """See `Workflow`: scores of the regression, and variance of the components, of the shown layer."""
        document = self.document(self.layer)
        explained, shuffled = document["total_variance_top6"], document["total_variance_top6_shuffled"]
        return (
            f"After layer {document['layer']} a linear regression of the position in the line has R² "
            f"{float(document['r2']):.2f} on held-out prompts (shuffled counts: "
            f"{float(document['r2_shuffled']):.2f}); {self.settings.components} principal components explain "
            f"{explained:.0%} of the variance of the mean states (shuffled counts: {shuffled:.0%})."
        )

    def views(self) -> Iterator[View]:
        """Views in reading order: table of all layers; ringing, cosines and principal components of one
        layer; R2 and variance of all layers."""
        shown, layers, geometry = self.layer, self.geometry["layer"].values.tolist(), self.geometry
        documents = [self.document(layer) for layer in layers]
        tokens, counts = int(geometry["n"].sum()), geometry["count"].values
        yield Data(json={"shown_layer": shown, "results": documents})
        yield Table.of(
            documents,
            ("layer", "layer", "d"),
            *((f"PC{k + 1}", partial(_component, k), ".1%") for k in range(3)),
            (f"top {self.settings.components}", "total_variance_top6", ".1%"),
            ("(shuffled)", "total_variance_top6_shuffled", ".1%"),
            ("lowest cos", lambda document: min(document["ringing"].values()), "+.2f"),
            ("(shuffled)", lambda document: min(document["ringing_shuffled"].values()), "+.2f"),
            ("R²", lambda document: float(document["r2"]), "+.2f"),
            ("(shuffled)", lambda document: float(document["r2_shuffled"]), "+.2f"),
            strong=lambda document: document["layer"] == shown,
            title=f"Mean state of {self.subject.name} by character count: {tokens:,} tokens at "
            f"{len(counts)} counts",
            caption="The count: number of characters since the line start. States are averaged over all "
            "tokens with the same count: one mean per count. One row per layer. PC1, PC2, …: share of the "
            "variance of these means that a principal component explains. Lowest cos: cosine of two means, "
            "averaged over all pairs of counts with the same difference, at the difference where it is "
            "smallest. R²: linear regression of the count on the states, scored on held-out prompts. "
            "(shuffled): control, counts shuffled among tokens. Bold: the layer that the figures show.",
        )
        shuffled = self.control["ringing"].reindex(offset=geometry["offset"])
        both = stacked("counts", {"true": geometry["ringing"], "shuffled": shuffled})
        ringing_curves = both.assign_coords(counts=["true counts", "shuffled counts"])
        numbered = geometry.assign_coords(
            component=[f"PC{k + 1}" for k in range(geometry.sizes["component"])]
        )
        curves = numbered["projection"][..., :4].transpose("layer", "component", "count")
        centred = "centred " if geometry.attrs["centred"] else ""
        bands = (
            f"Each cell: cosine between the {centred}mean states of two character counts (row, column). "
            "Positive bands beside the diagonal: the curve of means winds back to an earlier direction "
            "(ringing)."
        )
        square: dict[str, Any] = {name: tuple(map(str, counts)) for name in ("rows", "columns")}
        ends: dict[str, Any] = {"low": -1.0, "high": 1.0}
        ringing, cosines, components = (
            Choice.of("layer", layers, make, title=title, caption=caption, sources=sources, start=shown)
            for title, caption, sources, make in (
                (
                    "Ringing",
                    ("x: difference of two character counts. y: cosine between their mean states, averaged "
                    "over all pairs of counts with this difference. Dashed: control, counts shuffled among "
                    "tokens."),
                    ("geometry", "control"),
                    lambda layer: Lines.of(
                        ringing_curves.sel(layer=layer),
                        x_name="difference of the counts, in characters",
                        control="shuffled counts",
                        **ends,
                    ),
                ),
                (
                    "Cosine between the means of two counts",
                    bands,
                    ("geometry",),
                    lambda layer: Heatmap.of(
                        geometry["cosine"].sel(layer=layer), low=-1.0, high=1.0, diverging=True, upward=True,
                        row_name="count", column_name="count", **square,
                    ),
                ),
                (
                    "Principal components of the curve",
                    ("x: character count. y: projection of its mean state on a principal component of these "
                    "means. One curve per component, all on the same scale."),
                    ("geometry",),
                    lambda layer: Lines.of(
                        curves.sel(layer=layer), x_name="characters since the line start", apart=True
                    ),
                ),
            )
        )  # fmt: skip
        along: dict[str, Any] = {"control": "shuffled counts", "low": 0.0, "high": 1.0, "at": shown}
        scores = self.r2.sel(layer=layers).transpose("counts", "layer")
        scores = scores.assign_coords(counts=[f"{counts} counts" for counts in scores["counts"].values])
        marked = f"Dashed: control, counts shuffled among tokens. Marked: layer {shown}, which the other "
        "panels show."
        readout = Lines.of(
            scores,
            "Linear regression of the count",
            "x: layer. y: R², on held-out prompts, of a linear regression of the character count on the "
            f"layer's states. {marked}",
            y_name="R² on held-out prompts",
            **along,
        )
        ratio = numbered["explained_variance_ratio"].transpose("component", "layer")
        dims = Lines.of(
            self._shares(ratio),
            "Dimensions of the means",
            "x: layer. y: share of the variance of the means (mean state per character count) that the first "
            f"principal components explain together. One curve per number of components. {marked}",
            y_name="share of the variance explained",
            **along,
        )
        variance = Bars.of(
            ratio[:6],
            "Variance of the means by component",
            "x: layer. y: share of the variance of the means (mean state per character count). One colour "
            "per principal component, stacked.",
            stacked=True,
            low=0.0,
            high=1.02,
        )
        yield from (ringing, cosines, components, readout, dims)
        yield Figure(
            name=f"character_count_helix_L{shown}",
            title=f"Mean states of {self.subject.name} after layer {shown} by character count in the line, "
            f"{tokens:,} tokens",
            panels=(self._curve(shown), components, cosines, ringing, variance, readout),
        )
        offsets = [d for d in (1, 2, 5, 10, 15, 20, 25, 30, 40, 49) if d in geometry["offset"].values]
        yield Table.of(
            both.sel(layer=shown),
            ("counts \\ difference", lambda row: row["counts"].item()),
            *((str(d), partial(_at, d), "+.2f") for d in offsets),
            title=f"Ringing in layer {shown}: mean cosine of two means by the difference of their counts",
            caption="Columns: difference of two character counts (characters since the line start). Cells: "
            "cosine between the mean states of two counts, averaged over all pairs with that difference. "
            "Second row: control, counts shuffled among tokens.",
        )

    def _shares(self, ratio: xr.DataArray) -> xr.DataArray:
        """Cumulative shares of variance, [component, layer]: of the first, the first two, three and all
        components, and of all components with shuffled counts.

        ratio: share of variance of each component, [component, layer].
        """
        import xarray as xr

        first_name, *more = ratio["component"].values
        names = [first_name, *(f"{first_name} to {name}" for name in more)]
        sums = ratio.cumsum("component").assign_coords(component=names)
        shuffled = self.control["explained_variance_ratio"].sum("component")
        drawn = sums[sorted({0, 1, 2, len(names) - 1} & set(range(len(names))))]
        return xr.concat([drawn, shuffled.expand_dims(component=["shuffled counts"])], "component")

    def _curve(self, layer: int) -> Curve:
        """Drawing of the mean states of a layer in the space of their first three principal components."""
        part = self.geometry.sel(layer=layer)
        # Fewer than three components are padded with zeros.
        points = part["projection"].transpose("count", "component").values[:, :3]
        share = np.pad(part["explained_variance_ratio"].values, (0, 3))[:3]
        return Curve(
            title="Mean state at each count",
            caption="One point per character count: the mean residual stream of its tokens, projected on the "
            "first three principal components. Percentages: share of the variance explained.",
            points=np.pad(points, ((0, 0), (0, 3 - points.shape[1]))),
            values=part["count"].values,
            value_name="characters since the line start",
            names=(f"PC1  {share[0]:.0%}", f"PC2  {share[1]:.0%}", f"PC3  {share[2]:.0%}"),
        )


def _component(k: int, document: dict[str, Any]) -> float | None:
    """Share of variance that principal component k explains; None if fewer components were computed."""
    ratio = document["explained_variance"]
    return float(ratio[k]) if k < len(ratio) else None


def _at(offset: int, ringing: xr.DataArray) -> float | None:
    """Mean cosine of two mean states whose counts differ by `offset`; None if no two counts do."""
    cosine = float(ringing.sel(offset=offset))
    return None if np.isnan(cosine) else cosine
