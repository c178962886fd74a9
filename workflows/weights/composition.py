"""Which heads read what earlier heads write? Composition scores of all pairs of heads, off the weights alone.

The matrices of every head are read from the checkpoint, with norms folded in (stages/weights/folded.py). For
each pair of an earlier and a later head, a composition score measures how much of the earlier head's output
subspace the later head reads, as query, key or value (stages/weights/composition.py). No prompt is run.

Control: each writing head with equal singular values and a random rotation in the residual stream, `controls`
times. Claim: the largest score of all pairs. Null: the largest score of all pairs in each draw. The table
also gives, for each pair, the share of its own draws with a score as large. Aligned matrices do not show that
heads interact: the output may always be small, or the later head may never attend to that position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from ...stages.weights.circuits import has_scores
from ...stages.weights.composition import MODES, composition_scores
from ...stages.weights.matrices import attending, heads_in, require_outputs
from ...stages.weights.stored import StoredMatrices
from ...store.errors import ConfigError
from ..claim import Claim
from ..labelled import largest
from ..material.sizes import CONTROLS, FEWEST_CONTROLS, affordable
from ..settings import Count, WeightSettings, setting
from ..views import Heatmap, Table, View, together
from ..workflow import ModelWorkflow, Nodes, loaded

if TYPE_CHECKING:
    import xarray as xr


__all__ = ["Composition", "CompositionSettings"]

READS = {"Q": "as query", "K": "as key", "V": "as value"}
"""Input of the reading head, in words, by mode."""
MOST_CELLS = 48
"""Largest number of heads whose pairs are drawn one by one; for more, pairs of layers are drawn."""


@dataclass(frozen=True)
class CompositionSettings(WeightSettings):
    """Settings of `composition`."""

    modes: tuple[Literal["Q", "K", "V"], ...] = setting(
        (), "inputs of the later head to score: Q, K, V; none: all that are linear in this model"
    )
    folded: bool = setting(True, "fold norms, value biases and means into the matrices")
    top: Count = setting(5, "number of pairs listed per mode")


class Composition(ModelWorkflow):
    """Composition scores of every pair of heads of different layers, from the weights alone."""

    name = "composition"
    question = "Which heads read what earlier heads write?"
    settings_type = CompositionSettings
    settings: CompositionSettings

    scores = loaded("scores")
    """Result of `composition_scores`, in memory: score, control and share_as_large [mode, source_layer,
    source_head, layer, head], NaN unless the source layer is earlier."""

    def plan(self) -> Nodes:
        """Node of the composition scores.

        Raises:
            ConfigError: for a model with fewer than two attention layers, or for Q or K in a model that
                normalises queries and keys.
        """
        settings, config = self.settings, self.subject.config
        require_outputs(config)
        if len(attending(config)) < 2:
            raise ConfigError(
                f"expected at least two attention layers, found {len(attending(config))} in "
                f"{self.subject.name}; composition is between heads of different layers"
            )
        # Normalised queries and keys make scores a nonlinear function of the stream, with no QK matrix.
        self.modes = settings.modes or (MODES if has_scores(config) else ("V",))
        if set(self.modes) - {"V"} and not has_scores(config):
            raise ConfigError(
                f"expected modes=V of {self.subject.name}, whose queries and keys are normed, found "
                f"{', '.join(self.modes)}; such a model has no QK matrix"
            )
        weights = StoredMatrices.of(self.subject.files, dtype=self.subject.dtype, folded=settings.folded)
        return {
            "scores": composition_scores.on(
                weights=weights, modes=list(self.modes), controls=self.n_controls, seed=settings.seed
            )
        }

    @cached_property
    def n_controls(self) -> int:
        """Random heads per writing head: the setting, or by default CONTROLS, or fewer in a large model."""
        if self.settings.controls is not None:
            return self.settings.controls
        config = self.subject.config
        # All columns that a layer writes or reads with: of the key and value heads as many as of query heads.
        columns = [
            heads_in(config, layer).num_attention_heads * heads_in(config, layer).head_dim
            for layer in attending(config)
        ]
        # Products of what each layer writes with what each later layer reads.
        n_products = (sum(columns) ** 2 - sum(width**2 for width in columns)) / 2
        one_draw = 2.0 * len(self.modes) * config.hidden_size * n_products
        return affordable(one_draw, CONTROLS, least=FEWEST_CONTROLS)

    def best(self, mode: str) -> list[dict[str, Any]]:
        """The `top` pairs with the largest scores of a mode, largest first: records with source_layer,
        source_head, layer, head, score, control and share_as_large.

        mode: "Q", "K" or "V".
        """
        scores = self.scores.sel(mode=mode)
        names = ("score", "control", "share_as_large")
        without: dict[str, Any] = {} if self.n_controls else {"share_as_large": None}
        return [row | without for row in largest(scores, scores["score"], self.settings.top, *names)]

    claim_sources = ("scores",)

    def claims(self) -> Iterator[Claim]:
        """Largest composition score of each mode, compared with the largest score of every random draw."""
        for mode in self.modes:
            best, scores = self.best(mode)[0], self.scores.sel(mode=mode)
            reader, writer = _head(best), _head(best, "source_")
            yield Claim.against(
                f"{reader} reads the output of {writer} {READS[mode]} (largest composition score)",
                best["score"],
                # The largest of all pairs in each draw, as the claimed score was chosen as the largest of all
                # pairs.
                scores["largest_control"].values,
                "random rotations of the outputs of all heads, each with the largest score of "
                f"{int(scores['score'].notnull().sum())} pairs",
            )

    def claims_caption(self) -> str:
        """Caption of the claims: a limit of scores computed from weights."""
        return "computed from the weights alone: aligned matrices do not show that heads interact on text"

    def views(self) -> Iterator[View]:
        """Table of the best pairs of each mode, and heatmaps of all pairs."""
        model = self.subject.name
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
                (("rotated", "control", ".3f"), ("p, one pair", "share_as_large", ".2g"))
                if self.n_controls
                else ()
            ),
            title=f"Composition scores of heads of {model}",
            caption=f"rotated: mean score with {self.n_controls} random rotations of the writing head; p, "
            "one pair: share of these, and of the pair itself, with a score as large, not corrected for the "
            "number of pairs",
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
        title = f"Composition of heads of {model}: scores minus those of random heads"
        yield from together("composition", title, *panels, columns=len(panels))

    def _heatmap(self, mode: str) -> Heatmap:
        """Heatmap of scores minus those of randomly rotated heads: of all pairs of heads, or of the best pair
        of each two layers if there are more than `MOST_CELLS` heads."""
        scores = self.scores.sel(mode=mode)
        # Unrelated heads score about sqrt(rank / width), not 0, so the excess is drawn.
        above: xr.DataArray = scores["score"] - scores["control"]
        above = above.assign_attrs(long_name="score minus mean of random heads", units="1")
        layers, heads = above["layer"].values.tolist(), range(above.sizes["head"])
        options: dict[str, Any] = {"sources": ("scores",), "diverging": True, "upward": True}
        title = f"Read {READS[mode]}"
        if len(layers) * len(heads) > MOST_CELLS:
            by_layer = above.max(("source_head", "head"), keep_attrs=True)
            return Heatmap.of(
                by_layer.transpose("source_layer", "layer"),
                title,
                "largest difference of any pair of heads of the two layers",
                **options,
            )
        writes, reads = (
            tuple(f"L{layer}H{head}" for layer in side for head in heads)
            # No later layer reads from the last one, and the first one reads from none.
            for side in (layers[:-1], layers[1:])
        )
        below = above.isel(source_layer=slice(None, -1), layer=slice(1, None))
        values = below.transpose("source_layer", "source_head", "layer", "head").values
        return Heatmap(
            title=title,
            caption="rows write, columns read; composition score minus the mean of random rotations",
            values=values.reshape(len(writes), len(reads)),
            rows=writes,
            columns=reads,
            row_name="writes",
            column_name="reads",
            value_name="score minus mean of random heads",
            **options,
        )


def _head(row: dict[str, Any], prefix: str = "") -> str:
    """Name of the head of a record, such as "L3H1". prefix: "source_" for the writing head."""
    return f"L{row[f'{prefix}layer']}H{row[f'{prefix}head']}"
