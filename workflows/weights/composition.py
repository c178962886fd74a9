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
"""Input of the reading head in words, by composition mode."""
MOST_CELLS = 48
"""Largest number of heads whose pairs are drawn one by one; for more heads, pairs of layers are drawn."""


@dataclass(frozen=True)
class CompositionSettings(WeightSettings):
    """Settings of the workflow `composition`: the inputs of later heads that are scored."""

    modes: tuple[Literal["Q", "K", "V"], ...] = setting(
        (), "inputs of the later head to score: Q, K, V; none: all that are linear in this model"
    )
    folded: bool = setting(True, "fold norms, value biases and means into the matrices")
    top: Count = setting(5, "number of pairs listed per mode")


class Composition(ModelWorkflow):
    """Workflow that scores, from the weights alone, how much of each head's output every later head reads."""

    name = "composition"
    question = "Which heads read what earlier heads write?"
    settings_type = CompositionSettings
    settings: CompositionSettings

    scores = loaded("scores")
    """Result of `composition_scores`, in memory: score, control and share_as_large [mode, source_layer,
    source_head, layer, head], NaN unless the source layer is earlier."""

    def plan(self) -> Nodes:
        """Node of the composition scores of all pairs of heads.

        Raises:
            ConfigError: for a model with fewer than two attention layers, or for Q or K in a model that
                normalises queries and keys.
        """
        settings, config = self.settings, self.subject.config
        require_outputs(config)
        if len(attending(config)) < 2:
            raise ConfigError(
                f"expected at least two attention layers, found {len(attending(config))} in "
                f"{self.subject.name}; name another model, as composition is between heads of different "
                "layers"
            )
        # Normalised queries and keys make scores a nonlinear function of the stream, with no QK matrix.
        self.modes = settings.modes or (MODES if has_scores(config) else ("V",))
        if set(self.modes) - {"V"} and not has_scores(config):
            raise ConfigError(
                f"expected modes=V for {self.subject.name}, which has no QK matrix as its queries and keys "
                f"are normalised, found {', '.join(self.modes)}; set modes=V"
            )
        weights = StoredMatrices.of(self.subject.files, dtype=self.subject.dtype, folded=settings.folded)
        return {
            "scores": composition_scores.on(
                weights=weights, modes=list(self.modes), controls=self.n_controls, seed=settings.seed
            )
        }

    @cached_property
    def n_controls(self) -> int:
        """Number of random heads with which each writing head is compared: the setting `controls`; without it
        CONTROLS, or fewer if those would take too long in a large model (material/sizes.py)."""
        if self.settings.controls is not None:
            return self.settings.controls
        config = self.subject.config
        heads = [heads_in(config, layer) for layer in attending(config)]
        # Products of what each layer writes with the columns that each later layer reads. Reading heads that
        # share keys and values share these columns in K and V.
        n_products = 0
        for i, writer in enumerate(heads):
            for reader in heads[i + 1 :]:
                n_read = sum(
                    reader.num_attention_heads if mode == "Q" else reader.num_kv_heads for mode in self.modes
                )
                n_products += writer.num_attention_heads * writer.head_dim * n_read * reader.head_dim
        one_draw = 2.0 * config.hidden_size * n_products
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
        """Claims about the largest composition score of each mode, compared with the largest score of every
        random draw."""
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
        """Caption of the claims: definition and limits of composition scores."""
        return (
            "Composition score: how much of the earlier head's output subspace the later head reads. Scores "
            "are computed from the weights alone; they do not show that the heads interact on any text."
        )

    def views(self) -> Iterator[View]:
        """Views in reading order: table of the best pairs of each mode, and heatmaps of all pairs."""
        model = self.subject.name
        pairs: list[dict[str, Any]] = []
        table_rows = []
        for mode in self.modes:
            for rank, pair in enumerate(self.best(mode)):
                pairs.append({"mode": mode} | pair)
                # The mode stands in its first row only.
                table_rows.append(pair | {"read_as": READS[mode] if rank == 0 else ""})
        control_columns = (("rotated", "control", ".3f"), ("p, one pair", "share_as_large", ".2g"))
        yield Table.of(
            table_rows,
            ("read", "read_as"),
            ("by", _head),
            ("written by", lambda row: _head(row, "source_")),
            ("score", "score", ".3f"),
            *(control_columns if self.n_controls else ()),
            title=f"Composition scores of heads of {model}",
            caption=self._table_caption(),
            json={
                **self.subject.about,
                "modes": list(self.modes),
                "pairs": pairs,
                "scores": lambda: {
                    name: self.scores[name] for name in ("score", "control", "share_as_large")
                },
                "ov_norm": self.scores["ov_norm"],
            },
        )
        panels = [self._heatmap(mode) for mode in self.modes]
        title = f"Composition of heads of {model}: scores minus those of random heads"
        yield from together("composition", title, *panels, columns=len(panels))

    def _table_caption(self) -> str:
        """Caption of the table of the best pairs; names the control columns if there are controls."""
        caption = (
            "One row per pair of heads, largest scores first. One head writes; a later one reads its output "
            "as query, key or value. Score: how much of the output subspace of the writing head the reading "
            "head takes in. L3H1: head 1 of layer 3."
        )
        if not self.n_controls:
            return caption
        return (
            f"{caption} Rotated: control, the mean score with {self.n_controls} random rotations of the "
            "writing head. p, one pair: share of these rotations (and of the pair itself) with a score as "
            "large, not corrected for the number of pairs."
        )

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
                "Each cell: the largest value of any pair of heads of two layers, one that writes (row) and "
                "one that reads (column). Value: composition score minus its mean with random rotations of "
                "the writing head (control).",
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
            caption="Each cell: a head that writes (row) and a later head that reads its output (column). "
            "Value: their composition score, minus its mean with random rotations of the writing head "
            "(control).",
            values=values.reshape(len(writes), len(reads)),
            rows=writes,
            columns=reads,
            row_name="writes",
            column_name="reads",
            value_name="score minus mean of random heads",
            **options,
        )


def _head(row: dict[str, Any], prefix: str = "") -> str:
    """Name of the head in a record, such as "L3H1". prefix: "source_" for the writing head."""
    return f"L{row[f'{prefix}layer']}H{row[f'{prefix}head']}"
