"""Which heads copy tokens, by their weights alone? OV and QK circuits, off the weights alone.

The full OV circuit of every head, from embedding to unembedding with norms folded in
(stages/weights/folded.py), has a copying score: the sum of its eigenvalues divided by the sum of their
absolute values, 1 if attended tokens raise their own logits, -1 if they lower them
(stages/weights/copying.py). Of one head, by default that with the largest score, singular directions of OV
and QK are projected on the vocabulary (stages/weights/singular.py). No prompt is run; whether a head ever
attends to such tokens is not measured.

Control: each head with equal singular values, writing into random directions. Claims are made of the largest
and of the smallest score of all heads. Null: the largest and the smallest score of all heads in each draw.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...stages.causal.controls import Null, Side
from ...stages.logits.lens import format_token
from ...stages.weights.circuits import has_scores
from ...stages.weights.copying import copying_scores
from ...stages.weights.matrices import attending, heads_in, require_embedding, require_outputs
from ...stages.weights.positional import position_scores
from ...stages.weights.singular import singular_directions
from ...stages.weights.stored import StoredMatrices
from ...store.errors import ConfigError
from ..claim import Claim
from ..labelled import largest, records
from ..material.sizes import CONTROLS, FEWEST_CONTROLS, affordable
from ..settings import Count, Natural, WeightSettings, setting
from ..views import Heatmap, Table, View, together
from ..workflow import ModelWorkflow, Nodes, loaded

__all__ = ["OvQk", "OvQkSettings"]

POSITIONS, OFFSETS = 64, 4
"""Number of positions for which attention by position alone is computed, and largest distance from query to
key that is listed."""


@dataclass(frozen=True)
class OvQkSettings(WeightSettings):
    """Settings of the workflow `ov_qk`: the head shown in full, and how much of it."""

    layer: int | None = setting(
        None, "layer of the head shown in full; none: the head of the largest copying score"
    )
    head: Natural = setting(0, "index of the head shown in full, used if its layer is set")
    directions: Count = setting(5, "number of singular directions shown")
    top_k: Count = setting(5, "number of tokens listed per direction")
    offset: Natural = setting(0, "distance between query and key for QK, in a model with rope")
    top: Count = setting(5, "number of heads listed with the largest and with the smallest scores")


class OvQk(ModelWorkflow):
    """Workflow that scores, from the weights alone, which heads copy tokens, and shows singular directions of
    one head's OV and QK circuits."""

    name = "ov_qk"
    question = "Which heads copy tokens, by their weights alone?"
    settings_type = OvQkSettings
    settings: OvQkSettings

    copying = loaded("copying")
    """Result of `copying_scores`, in memory: copying and ov_norm [layer, head], control [layer, head,
    draw]."""

    @cached_property
    def n_controls(self) -> int:
        """Number of random heads with which each head is compared: the setting `controls`; without it
        CONTROLS, or fewer if those would take too long in a large model (material/sizes.py)."""
        if self.settings.controls is not None:
            return self.settings.controls
        config = self.subject.config
        heads = [heads_in(config, layer) for layer in attending(config)]
        # A random head takes a QR decomposition of [hidden, d_head], 4 hidden d_head^2 operations, and the
        # eigenvalues of a [d_head, d_head] matrix, 25 d_head^3 (Golub and Van Loan). Both run at about a
        # tenth of the rate of large products.
        one_draw = sum(
            item.num_attention_heads * item.head_dim**2 * (4 * config.hidden_size + 25 * item.head_dim)
            for item in heads
        )
        return affordable(10.0 * one_draw, CONTROLS, least=FEWEST_CONTROLS)

    def plan(self) -> Nodes:
        """Nodes of the copying scores, of singular directions of one head and, in models with learned
        positions, of attention by position alone.

        Raises:
            ConfigError: for a model without such circuits, or a layer or head out of range.
        """
        settings, config = self.settings, self.subject.config
        require_outputs(config)
        require_embedding(config)
        # Behind the activation of a head such as BERT's, there is no linear map from what a head writes to
        # logits.
        config.require_linear_head()
        # Attention by position applies the layer's first norm itself, so it needs unfolded matrices.
        folded, plain = (
            StoredMatrices.of(self.subject.files, dtype=self.subject.dtype, folded=folds)
            for folds in (True, False)
        )
        copying = copying_scores.on(weights=folded, controls=self.n_controls, seed=settings.seed)
        selection: dict[str, Any] = {"directions": settings.directions, "top_k": settings.top_k}
        if settings.layer is None:
            selection["copying"] = copying["copying"]
        else:
            count = heads_in(config, settings.layer).num_attention_heads
            if settings.head >= count:
                raise ConfigError(
                    f"expected a head in 0..{count - 1} of layer {settings.layer}, found {settings.head}; "
                    "set head to one of these"
                )
            selection |= {"layer": settings.layer, "head": settings.head}
        nodes: Nodes = {
            "copying": copying,
            "ov": singular_directions.on(weights=folded, circuit="OV", **selection),
        }
        if has_scores(config):
            nodes["qk"] = singular_directions.on(
                weights=folded, circuit="QK", offset=settings.offset, **selection
            )
            # Only learned position embeddings are a tensor; rope and ALiBi have none.
            if "positions" in config.tensors.outside:
                # Some tables have rows in front of the first position, as BART's.
                length = min(POSITIONS, config.position_rows - config.first_position)
                nodes["positions"] = position_scores.on(
                    weights=plain, length=length, offsets=min(OFFSETS, length - 1)
                )
        return nodes

    claim_sources = ("copying",)

    def claims(self) -> Iterator[Claim]:
        """Claims about the largest and the smallest copying score of all heads, compared with the extremes of
        every random draw."""
        copying = self.copying.transpose(..., "draw")
        scores, control = copying["copying"].values, copying["control"].values
        # A head whose matrices are zero, as in a pruned model, has no score.
        heads = int(np.isfinite(scores).sum())

        def claim(extreme: Any, pick: Any, effect: str, rank: str, side: Side) -> Claim:
            layer, head = np.unravel_index(pick(scores), scores.shape)
            name = f"L{copying['layer'].values[layer]}H{head}"
            text = f"{name} {effect} the logits of the tokens it attends to ({rank} copying score)"
            of = f"draws of random output directions of all heads, each with the {rank} of {heads} scores"
            # The extreme of all heads in each draw, as the claimed score was chosen as the extreme of all
            # heads.
            return Claim.against(text, scores[layer, head], extreme(control, axis=(0, 1)), of, side=side)

        yield claim(np.nanmax, np.nanargmax, "raises", "largest", "above")
        yield claim(np.nanmin, np.nanargmin, "lowers", "smallest", "below")

    def claims_caption(self) -> str:
        """Caption of the claims: definition and limits of copying scores."""
        return (
            "Copying score of a head: sum of the eigenvalues of its full OV circuit (embedding to "
            "unembedding), divided by the sum of their absolute values. 1: attended tokens raise their own "
            "logits; -1: they lower them. It is computed from the weights alone. Which tokens a head attends "
            "to is not measured."
        )

    def heads(self) -> list[dict[str, Any]]:
        """Records of all heads, largest copying score first: layer, head, copying, ov_norm, top_share, the 95
        % bounds of its controls, and its quantile among them (NaN without controls)."""
        copying = self.copying.transpose(..., "draw")
        rows = largest(copying, copying["copying"], None, "copying", "ov_norm", "top_share", "control")
        for row in rows:
            null = Null(np.array(row.pop("control")), "draws of the head writing into random directions")
            row["control_low"], row["control_high"] = null.bound()
            row["quantile"] = float((null.values < row["copying"]).mean()) if null.is_run else float("nan")
        return rows

    def views(self) -> Iterator[View]:
        """Views in reading order: copying scores of all heads, singular directions of one head, and attention
        by position alone."""
        model, settings = self.subject.name, self.settings
        rows = self.heads()
        shown = rows if len(rows) <= 2 * settings.top else [*rows[: settings.top], *rows[-settings.top :]]
        control_columns: tuple[tuple[Any, ...], ...] = (
            ("random", lambda row: f"{row['control_low']:+.2f} to {row['control_high']:+.2f}"),
            ("quantile", "quantile", ".2f"),
        )
        control_columns = control_columns if self.n_controls else ()
        yield Table.of(
            shown,
            ("head", lambda row: f"L{row['layer']}H{row['head']}"),
            ("copying", "copying", "+.2f"),
            *control_columns,
            ("norm of OV", "ov_norm", ".3g"),
            ("first direction", "top_share", ".0%"),
            title=f"Heads of {model} with the largest and smallest copying scores",
            caption=self._heads_caption(),
            json={**self.subject.about, "heads": rows},
        )
        by_head = Heatmap.of(
            self.copying["copying"].transpose("layer", "head"),
            "Copying score",
            "Each cell: copying score of one head (column) of one layer (row), from the weights alone. 1: "
            "attending to a token raises its own logit; -1: it lowers it.",
            sources=("copying",),
            diverging=True,
            low=-1.0,
            high=1.0,
        )
        yield from together("ov_qk", f"Copying scores of the heads of {model}", by_head)
        yield self._directions("ov", "OV", ("attended tokens", "raised tokens"))
        if "qk" in self.nodes:
            yield self._directions("qk", "QK", ("query tokens", "key tokens"))
        if "positions" in self.nodes:
            yield self._positions()

    def _heads_caption(self) -> str:
        """Caption of the table of heads; names the control columns if there are controls."""
        controls = (
            f" Random: control, the range of 95 % of {self.n_controls} draws in which the same head writes "
            "into random directions. Quantile: share of these draws below the head's score."
            if self.n_controls
            else ""
        )
        return (
            "One row per head. Copying: copying score, from -1 (attended tokens lower their own logits) to 1 "
            f"(they raise them).{controls} Norm of OV: Frobenius norm. First direction: share of OV's "
            "squared norm in its largest singular value."
        )

    def _directions(self, node: str, circuit: str, sides: tuple[str, str]) -> Table:
        """Table of the singular directions of the OV or QK circuit of one head.

        Arguments:
            node: name of the result.
            circuit: "OV" or "QK".
            sides: heads of the columns of tokens on the input and on the output side.
        """
        result = self.result(node).load()
        layer, head = int(result["told_layer"]), int(result["told_head"])
        columns = {"read": "read_token", "written": "written_token"}
        directions = [
            row | {side: self.subject.token_texts(row[side]) for side in columns}
            for row in records(result, "direction", "share", "singular_value", **columns)
        ]
        apart = (
            f", {self.settings.offset} positions apart" if circuit == "QK" and self.settings.offset else ""
        )
        return Table.of(
            directions,
            ("share", "share", ".1%"),
            (sides[0], lambda row: " ".join(format_token(token) for token in row["read"])),
            (sides[1], lambda row: " ".join(format_token(token) for token in row["written"])),
            title=f"Singular directions of {circuit} of L{layer}H{head}{apart}",
            caption=f"One row per singular direction of the head's {circuit} circuit, largest first. Share: "
            "part of the circuit's squared Frobenius norm that the direction holds. Other columns: the "
            "tokens with the largest projections on each of its two sides.",
            sources=(node,),
            json={node: {"layer": layer, "head": head, "directions": directions}},
        )

    def _positions(self) -> Table:
        """Table of the attention that position embeddings alone produce, by distance from query to key."""
        weights = self.result("positions").load().transpose("layer", "head", "offset")
        offsets = weights["offset"].values.tolist()
        heads = largest(weights, weights["weight"].sel(offset=1), None, "offset", "weight")

        def weight_at(offset: int) -> Any:
            return lambda row: row["weight"][offsets.index(offset)]

        return Table.of(
            heads[: self.settings.top],
            ("head", lambda row: f"L{row['layer']}H{row['head']}"),
            *((f"{k} back" if k >= 0 else f"{-k} ahead", weight_at(k), ".2f") for k in offsets),
            title="Attention by position alone",
            caption="One row per head, largest weight on the previous position first. Columns: mean "
            "attention weight at a distance from query to key, computed from the weights as if every token "
            "had the mean token embedding.",
            sources=("positions",),
            json={"positions": heads},
        )
