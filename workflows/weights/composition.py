"""Which heads read what earlier heads write? Composition scores of all pairs of heads, off the weights alone.

The matrices of every head are read from the checkpoint, with norms folded in (stages/weights/folded.py), and
for each pair of an earlier and a later head it is worked out how much of what the one writes the other reads,
as query, as key or as value (stages/weights/composition.py). No prompt is run.

Control: each head that writes, with its singular values, turned at random in the stream; so often as
`controls` says. What is claimed is that the best pair of all is beyond the best pair of all in each such
draw; of each pair the table tells how many of its own draws do as much. Matrices that fit are no proof that
heads work together: nothing says that what is written is ever large, or that the later head looks there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ...stages.weights.circuits import has_scores
from ...stages.weights.composition import MODES, composition_scores
from ...stages.weights.matrices import attending, require_outputs
from ...stages.weights.stored import StoredMatrices
from ...store.errors import ConfigError
from ..claim import Claim
from ..labelled import largest
from ..settings import ControlSettings, Count, ModelSettings, setting
from ..views import Heatmap, Table, View, together
from ..workflow import ModelWorkflow, Nodes, loaded

if TYPE_CHECKING:
    import xarray as xr


__all__ = ["Composition", "CompositionSettings"]

READS = {"Q": "as query", "K": "as key", "V": "as value"}
MOST_CELLS = 48
"""Heads up to which pairs are drawn one by one; more are drawn layer by layer."""


@dataclass(frozen=True)
class CompositionSettings(ControlSettings, ModelSettings):
    """What `--set` can change."""

    modes: tuple[Literal["Q", "K", "V"], ...] = setting(
        (), "how the later head reads; none: all that are matrices in this model"
    )
    folded: bool = setting(True, "fold norms, value biases and means into the matrices")
    top: Count = setting(5, "pairs listed per mode")


class Composition(ModelWorkflow):
    """Every pair of heads of different layers."""

    name = "composition"
    question = "Which heads read what earlier heads write?"
    settings_type = CompositionSettings
    settings: CompositionSettings

    scores = loaded("scores")
    """`composition_scores`, in memory."""

    def plan(self) -> Nodes:
        """The scores. ConfigError for a model with fewer than two layers whose heads are matrices."""
        given, config = self.settings, self.subject.config
        require_outputs(config)
        if len(attending(config)) < 2:
            raise ConfigError(
                f"expected at least two layers that attend, found {len(attending(config))} in "
                f"{self.subject.name}; composition is between layers"
            )
        self.modes = given.modes or (MODES if has_scores(config) else ("V",))
        if set(self.modes) - {"V"} and not has_scores(config):
            raise ConfigError(
                f"expected modes=V of {self.subject.name}, whose queries and keys are normed, found "
                f"{', '.join(self.modes)}; its scores are products of no matrices"
            )
        weights = StoredMatrices.of(self.subject.files, dtype=self.subject.dtype, folded=given.folded)
        asked: dict[str, Any] = {"controls": given.controls, "seed": given.seed}
        return {"scores": composition_scores.on(weights=weights, modes=list(self.modes), **asked)}

    def best(self, mode: str) -> list[dict[str, Any]]:
        """The pairs with the largest scores, largest first."""
        scores = self.scores.sel(mode=mode)
        names = ("score", "control", "share_as_large")
        without: dict[str, Any] = {} if self.settings.controls else {"share_as_large": None}
        return [row | without for row in largest(scores, scores["score"], self.settings.top, *names)]

    claim_sources = ("scores",)

    def claims(self) -> Iterator[Claim]:
        """The pair of heads with the largest score of each mode, beside the largest of every draw."""
        for mode in self.modes:
            best, scores = self.best(mode)[0], self.scores.sel(mode=mode)
            reader, writer = _head(best), _head(best, "source_")
            yield Claim.against(
                f"{reader} reads what {writer} writes, {READS[mode]} (composition score)",
                best["score"],
                scores["largest_control"].values,
                "draws of all heads writing elsewhere as much, each its best of "
                f"{int(scores['score'].notnull().sum())} pairs",
            )

    def claims_caption(self) -> str:
        """What scores of matrices leave open."""
        return "matrices that fit are no proof that heads work together"

    def views(self) -> Iterator[View]:
        """The best pairs of each mode, and all pairs."""
        model, given = self.subject.name, self.settings
        best = {mode: self.best(mode) for mode in self.modes}
        records = [{"mode": mode} | row for mode in self.modes for row in best[mode]]
        yield Table.of(
            [
                row | {"shown": "" if i else READS[mode]}
                for mode in self.modes
                for i, row in enumerate(best[mode])
            ],
            ("read", "shown"),
            ("by", _head),
            ("written by", lambda row: _head(row, "source_")),
            ("score", "score", ".3f"),
            *(
                (("elsewhere", "control", ".3f"), ("as large", "share_as_large", ".2g"))
                if given.controls
                else ()
            ),
            title=f"What heads of {model} read of each other",
            caption=f"elsewhere: mean score of the same head turned at random, {given.controls} times; "
            "as large: share of these that score as much, the pair itself among them",
            json={
                **self.subject.about,
                "modes": list(self.modes),
                "pairs": records,
                "scores": lambda: {
                    name: self.scores[name] for name in ("score", "control", "share_as_large")
                },
                "ov_norm": self.scores["ov_norm"],
            },
        )
        panels = [self._heatmap(mode) for mode in self.modes]
        title = f"What heads of {model} read of each other, above chance"
        yield from together("composition", title, *panels, columns=len(panels))

    def _heatmap(self, mode: str) -> Heatmap:
        """Scores above those of heads turned at random; of many heads the best pair of each two layers."""
        found = self.scores.sel(mode=mode)
        above: xr.DataArray = found["score"] - found["control"]
        above = above.assign_attrs(long_name="score above that of random heads", units="1")
        layers, heads = above["layer"].values.tolist(), range(above.sizes["head"])
        told: dict[str, Any] = {"sources": ("scores",), "diverging": True, "upward": True}
        title = f"Read {READS[mode]}"
        if len(layers) * len(heads) > MOST_CELLS:
            by_layer = above.max(("source_head", "head"), keep_attrs=True)
            return Heatmap.of(
                by_layer.transpose("source_layer", "layer"),
                title,
                "the best pair of heads of two layers",
                **told,
            )
        writes, reads = (
            tuple(f"L{layer}H{head}" for layer in some for head in heads)
            for some in (layers[:-1], layers[1:])
        )
        below = above.isel(source_layer=slice(None, -1), layer=slice(1, None))
        values = below.transpose("source_layer", "source_head", "layer", "head").values
        return Heatmap(
            title=title,
            caption="rows write, columns read; composition score above that of heads turned at random",
            values=values.reshape(len(writes), len(reads)),
            rows=writes,
            columns=reads,
            row_name="writes",
            column_name="reads",
            value_name="score above that of random heads",
            **told,
        )


def _head(row: dict[str, Any], which: str = "") -> str:
    return f"L{row[f'{which}layer']}H{row[f'{which}head']}"
