"""How does the residual stream encode the position in a line?

The curve of mean states by character count, with controls.

Prose is wrapped at several widths; the residual stream after every layer is averaged over all tokens that
start c characters into their line (stages/geometry/character_count.py). A model that counts characters
lays these means out along a curve that winds through few dimensions: top components explain most of the
variance, and the cosine between two means rises and falls with their distance ("ringing"). Controls:
counts shuffled among tokens, and a linear read-out of the count scored on prompts it was not fitted to.

The protocol is candle-mi's `character_count_helix` (after Gurnee et al. 2025), with four repairs: lengths
are characters, not bytes; text is cut into contexts at line starts only, so that no token's count lies
outside what the model can see; line breaks themselves are left out of the means; means are centred before
projecting and before taking cosines (`centre=false` gives the original's uncentred numbers).
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
from ...stages.corpus.text import pack_lines, token_counts, wrap
from ...stages.geometry.character_count import count_geometry, count_sums, decodability
from ...store.errors import ConfigError
from ..labelled import column, records, stacked
from ..settings import AtLeastTwo, Count, ModelSettings, Natural, preset_of, setting
from ..subject import Subject, read_texts
from ..views import Bars, Choice, Curve, Data, Figure, Heatmap, Lines, Table, View
from ..workflow import ModelWorkflow, Nodes, loaded

if TYPE_CHECKING:
    import xarray as xr

    from ...stages.forward.models.model import Model
    from ...store import PackedTokens, Store

__all__ = ["CharacterCountHelix", "CharacterCountHelixSettings", "line_corpus"]


CHARACTERS = 24_000
"""Characters of the shipped prose that are enough to see the helix, in seconds on a laptop."""


@dataclass(frozen=True)
class CharacterCountHelixSettings(ModelSettings):
    """What `--set` can change."""

    text: str = setting("", "file, folder or glob of texts; none: the prose shipped with mizarr")
    characters: int | None = setting(
        None,
        f"of each text, how many to read; 0: all; none: {CHARACTERS:,} of the shipped prose, all of others",
    )
    widths: tuple[AtLeastTwo, ...] = setting((30, 40, 50, 60, 70, 80), "line widths to wrap at")
    max_count: Natural = setting(0, "largest character count; 0 means the largest width")
    min_count: Natural = setting(1, "leave out the first positions of a line")
    min_tokens: Natural = setting(30, "leave out counts seen in fewer tokens")
    line_breaks: bool = setting(False, "let tokens that are line breaks take part, as candle-mi does")
    context: Natural = setting(0, "tokens per forward pass; 0 means the model's context, at most 4096")
    layers: tuple[int, ...] = setting((), "layers to study; none means all")
    show: int = setting(-1, "layer to draw; -1: the one whose count reads off best")
    components: Count = setting(6, "principal components")
    centre: bool = setting(True, "subtract the mean of the means before projecting and taking cosines")
    seed: Natural = setting(0, "of the shuffled control")
    preset: str = setting("", "what is left at its default is the preset's: gemma2-2b, as published")
    stop: Natural = setting(0, "layers more to compute, after those that are stored; 0: all")
    jsonl: str = setting("", "folder for a line of JSON per layer, written as soon as the layer is done")


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "gemma2-2b": {
        "model": "google/gemma-2-2b",
        "widths": tuple(range(20, 151, 10)),
        "max_count": 150,
        "line_breaks": True,
    }
}
"""Published protocols. That of Gurnee et al. as candle-mi ran it; its 30 chapters of Dickens: text=FOLDER."""


def with_preset(settings: CharacterCountHelixSettings) -> CharacterCountHelixSettings:
    """Settings with those of their preset in place of defaults. Raises ConfigError for an unknown one."""
    if not settings.preset:
        return settings
    defaults = {field.name: field.default for field in fields(settings)}
    chosen = preset_of(settings.preset, PRESETS)
    return replace(
        settings,
        **{name: value for name, value in chosen.items() if getattr(settings, name) == defaults[name]},
    )


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


class CharacterCountHelix(ModelWorkflow):
    """Wrapped prose through the model, averaged by character count."""

    name = "character_count_helix"
    question = "How does the residual stream encode the position in a line?"
    descriptive = "PCA of the mean state per character count, beside the same with shuffled counts."
    settings_type = CharacterCountHelixSettings
    settings: CharacterCountHelixSettings

    geometry = loaded("geometry")
    """Curve of each layer, `count_geometry`."""
    control = loaded("control")
    """The same with counts shuffled among tokens."""

    def __init__(self, settings: CharacterCountHelixSettings, model: Model | None = None) -> None:
        super().__init__(with_preset(settings), model)

    def plan(self) -> Nodes:
        """Every layer, of the text wrapped."""
        given = self.settings
        if given.jsonl and Path(given.jsonl).expanduser().is_file():
            raise ConfigError(f"expected a folder for the lines of layers, found the file {given.jsonl!r}")
        self.max_count = given.max_count or max(given.widths)
        context = given.context or min(self.subject.config.context_length, 4096)
        own = 0 if given.text else CHARACTERS
        most = own if given.characters is None else given.characters
        texts = [text[: most or None] for text in read_texts(given.text)]
        self.context, self.tokens = context, line_corpus(self.subject, texts, given.widths, context)
        self.layers = given.layers or tuple(range(self.subject.config.num_layers))
        return self._of(self.layers)

    def _of(self, layers: Sequence[int]) -> Nodes:
        """Sums by count, their geometry with true and shuffled counts, and a linear read-out."""
        given, tokens = self.settings, self.tokens
        captured = self.subject.capture(tokens, *(f"blocks.{layer}.hook_resid_post" for layer in layers))
        states = captured["resid_post"]
        count = column(token_counts(tokens, line_breaks=given.line_breaks), "token", "count")
        prompt = column(tokens.prompt_of(slice(None)), "token", "prompt")
        chosen = {"max_count": self.max_count, "shuffle_seed": given.seed}
        sums = count_sums.on(states=states, count=count, **chosen)
        shape: dict[str, Any] = {
            "n_components": given.components,
            "min_count": given.min_count,
            "min_tokens": given.min_tokens,
            "centre": given.centre,
        }
        return {
            "geometry": count_geometry.on(sums=sums, **shape),
            "control": count_geometry.on(sums=sums, counts="shuffled", **shape),
            "decodability": decodability.on(states=states, count=count, prompt=prompt, **chosen),
        }

    def run(self, store: Store, **options: Any) -> Self:
        """As every workflow; layer by layer where `stop` or `jsonl` asks for that, then of the layers there
        are. What is stored is not computed again, so that the same command goes on."""
        given = self.settings
        if given.stop or given.jsonl:
            done, new = [], 0
            for layer in self.layers:
                nodes = self._of([layer])
                with one_look():
                    is_stored = all(node.status(store).is_cached for node in nodes.values())
                if not is_stored and given.stop and new == given.stop:
                    break
                new += not is_stored
                run(nodes.values(), store, **options)
                self._write(layer, nodes, store)
                done.append(layer)
            self.nodes = self._of(done)
        return super().run(store, **options)

    def _write(self, layer: int, nodes: Nodes, store: Store) -> None:
        """The line of a layer, in a file of its own that is there as a whole or not at all."""
        if not self.settings.jsonl:
            return
        folder = Path(self.settings.jsonl).expanduser()
        ratio = nodes["geometry"].open(store)["explained_variance_ratio"].isel(layer=0).values
        keys = [key.digest for node in nodes.values() if (key := node.key(store)) is not None]
        notes = [note for key in keys for note in store.provenance(key)]
        told = {
            "layer": layer,
            "explained_variance": ratio.tolist(),
            "total_variance_top6": float(ratio.sum()),
            "time_secs": round(sum(note.get("seconds", 0.0) for note in notes), 3),
            "text": self.settings.text or "shipped prose",
            "max_tokens": self.context,
            "model_id": self.subject.name,
            "keys": keys,
        }
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".layer_{layer:02d}.part"
        part.write_text(json.dumps(told) + "\n", "utf-8")
        part.replace(folder / f"layer_{layer:02d}_variance.jsonl")

    @cached_property
    def r2(self) -> xr.DataArray:
        """Held-out R2 of a linear read-out of the count, [layer, counts]."""
        return self.result("decodability")["r2"].load()

    @property
    def layer(self) -> int:
        """The layer shown: as set, else the one whose count reads off best."""
        given = self.settings
        is_later = given.stop > 0 and given.show not in self.geometry["layer"].values
        if given.show >= 0 and not is_later:
            return int(given.show)
        best = self.r2.sel(counts="true").fillna(-np.inf).argmax("layer")
        return int(self.r2["layer"][int(best)])

    def document(self, layer: int) -> dict[str, Any]:
        """A layer in the fields of candle-mi's example, the ringing, and the controls.

        `projections` and `cosine_similarity` are of centred means iff `centred`; mean_projection is what
        centring took away: uncentred projections are `projections` + `mean_projection`.
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

    def views(self) -> Iterator[View]:
        """Layer by layer the ringing, the cosines and the curve; of all layers the read-out and variance."""
        shown, layers, found = self.layer, self.geometry["layer"].values.tolist(), self.geometry
        told = [self.document(layer) for layer in layers]
        tokens, counts = int(found["n"].sum()), found["count"].values
        yield Data(json={"shown_layer": shown, "results": told})
        yield Table.of(
            told,
            ("layer", "layer", "d"),
            *((f"PC{k + 1}", partial(_component, k), ".1%") for k in range(3)),
            (f"top {self.settings.components}", "total_variance_top6", ".1%"),
            ("(shuffled)", "total_variance_top6_shuffled", ".1%"),
            ("lowest cos", lambda one: min(one["ringing"].values()), "+.2f"),
            ("(shuffled)", lambda one: min(one["ringing_shuffled"].values()), "+.2f"),
            ("R²", lambda one: float(one["r2"]), "+.2f"),
            ("(shuffled)", lambda one: float(one["r2_shuffled"]), "+.2f"),
            strong=lambda one: one["layer"] == shown,
            title=f"Mean state of {self.subject.name} by character count: {tokens:,} tokens at "
            f"{len(counts)} counts",
            caption="share of the variance of the means; lowest mean cosine at any distance; linear read-out "
            "of the count on held-out prompts; each also with counts shuffled among tokens",
        )
        shuffled = self.control["ringing"].reindex(offset=found["offset"])
        both = stacked("counts", {"true": found["ringing"], "shuffled": shuffled})
        ringing_curves = both.assign_coords(counts=["true counts", "shuffled counts"])
        numbered = found.assign_coords(component=[f"PC{k + 1}" for k in range(found.sizes["component"])])
        curves = numbered["projection"][..., :4].transpose("layer", "component", "count")
        bands = f"Of {'centred ' if found.attrs['centred'] else ''}mean states. Bands beside the diagonal: "
        bands += "the curve comes round again; without them it turns away."
        square: dict[str, Any] = {name: tuple(map(str, counts)) for name in ("rows", "columns")}
        ends: dict[str, Any] = {"low": -1.0, "high": 1.0}
        ringing, cosines, components = (
            Choice.of("layer", layers, make, title=title, caption=caption, sources=sources, start=shown)
            for title, caption, sources, make in (
                (
                    "Ringing",
                    "Mean cosine of two mean states by how far apart they are.",
                    ("geometry", "control"),
                    lambda layer: Lines.of(
                        ringing_curves.sel(layer=layer),
                        x_name="characters apart",
                        control="shuffled counts",
                        **ends,
                    ),
                ),
                (
                    "Cosine between the means of two counts",
                    bands,
                    ("geometry",),
                    lambda layer: Heatmap.of(
                        found["cosine"].sel(layer=layer), low=-1.0, high=1.0, diverging=True, upward=True,
                        row_name="count", column_name="count", **square,
                    ),
                ),
                (
                    "The curve, one component at a time",
                    "Mean states projected on their principal components, on one scale.",
                    ("geometry",),
                    lambda layer: Lines.of(
                        curves.sel(layer=layer), x_name="characters since the line began", apart=True
                    ),
                ),
            )
        )  # fmt: skip
        along: dict[str, Any] = {"control": "shuffled counts", "low": 0.0, "high": 1.0, "at": shown}
        scores = self.r2.sel(layer=layers).transpose("counts", "layer")
        scores = scores.assign_coords(counts=[f"{counts} counts" for counts in scores["counts"].values])
        marked = f"marked: layer {shown}, shown above"
        readout = Lines.of(
            scores, "Can the count be read off linearly?", marked, y_name="R² on held-out prompts", **along
        )
        ratio = numbered["explained_variance_ratio"].transpose("component", "layer")
        dims = Lines.of(
            self._shares(ratio),
            "How few dimensions hold the means?",
            marked,
            y_name="share of their variance",
            **along,
        )
        variance = Bars.of(ratio[:6], "Variance of the means by component", stacked=True, low=0.0, high=1.02)
        yield from (ringing, cosines, components, readout, dims)
        yield Figure(
            name=f"character_count_helix_L{shown}",
            title=f"Where in its line is a token? Mean states of {self.subject.name} after layer {shown}, "
            f"{tokens:,} tokens by character count",
            panels=(self._curve(shown), components, cosines, ringing, variance, readout),
        )
        offsets = [d for d in (1, 2, 5, 10, 15, 20, 25, 30, 40, 49) if d in found["offset"].values]
        here = both.sel(layer=shown)
        yield Table.of(
            here,
            ("apart", lambda row: row["counts"].item()),
            *((str(d), partial(_at, d), "+.2f") for d in offsets),
            title=f"Ringing at layer {shown}: mean cosine of means so many characters apart",
        )

    def _shares(self, ratio: xr.DataArray) -> xr.DataArray:
        """Share of the first components together; and of all of them with shuffled counts."""
        import xarray as xr

        first_name, *more = ratio["component"].values
        names = [first_name, *(f"{first_name} to {name}" for name in more)]
        sums = ratio.cumsum("component").assign_coords(component=names)
        shuffled = self.control["explained_variance_ratio"].sum("component")
        first = sums[sorted({0, 1, 2, len(names) - 1} & set(range(len(names))))]
        return xr.concat([first, shuffled.expand_dims(component=["shuffled counts"])], "component")

    def _curve(self, layer: int) -> Curve:
        part = self.geometry.sel(layer=layer)
        points = part["projection"].transpose("count", "component").values[:, :3]
        share = np.pad(part["explained_variance_ratio"].values, (0, 3))[:3]
        return Curve(
            title="Mean state at each count",
            points=np.pad(points, ((0, 0), (0, 3 - points.shape[1]))),
            values=part["count"].values,
            value_name="characters since the line began",
            names=(f"PC1  {share[0]:.0%}", f"PC2  {share[1]:.0%}", f"PC3  {share[2]:.0%}"),
        )


def _component(k: int, told: dict[str, Any]) -> float | None:
    """Share of variance of component k; None beyond the computed components."""
    ratio = told["explained_variance"]
    return float(ratio[k]) if k < len(ratio) else None


def _at(apart: int, ringing: xr.DataArray) -> float | None:
    """Mean cosine so many characters apart; None where no means are."""
    found = float(ringing.sel(offset=apart))
    return None if np.isnan(found) else found
