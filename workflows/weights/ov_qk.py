"""Which heads copy tokens, by their weights alone? OV and QK circuits, off the weights alone.

Every head's OV circuit is followed through embedding and unembedding, with norms folded in
(stages/weights/folded.py): the sum of its eigenvalues over that of their sizes says whether a token that is
read raises its own logit (stages/weights/copying.py). Of one head, the one that copies most unless another is
named, singular directions of OV and QK are read through the vocabulary (stages/weights/singular.py). No
prompt is run, so that nothing is said of whether a head ever looks there.

Control: each head with its singular values, writing elsewhere; what is claimed of the best, and of the worst,
of all heads stands beside the best and the worst of all in each such draw.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...stages.causal.controls import Null, Side
from ...stages.logits.lens import format_token
from ...stages.weights.circuits import has_scores
from ...stages.weights.copying import copying_scores
from ...stages.weights.matrices import heads_in, require_embedding, require_outputs
from ...stages.weights.positional import position_scores
from ...stages.weights.singular import singular_directions
from ...stages.weights.stored import StoredMatrices
from ...store.errors import ConfigError
from ..claim import Claim
from ..labelled import largest, records
from ..material.answers import named
from ..settings import ControlSettings, Count, ModelSettings, Natural, setting
from ..views import Heatmap, Table, View, together
from ..workflow import ModelWorkflow, Nodes, loaded

__all__ = ["OvQk", "OvQkSettings"]

POSITIONS, OFFSETS = 64, 4
"""Positions that attend to each other by position alone, and how far back is told."""


@dataclass(frozen=True)
class OvQkSettings(ControlSettings, ModelSettings):
    """What `--set` can change."""

    layer: int | None = setting(None, "layer of the head told in full; none: the head that copies most")
    head: Natural = setting(0, "the head told in full, where its layer is named")
    directions: Count = setting(5, "singular directions told")
    top_k: Count = setting(5, "tokens named along each")
    offset: Natural = setting(0, "positions between query and key, of a model with rope")
    top: Count = setting(5, "heads listed from either end")


class OvQk(ModelWorkflow):
    """Copying scores of all heads, and the circuits of one."""

    name = "ov_qk"
    question = "Which heads copy tokens, by their weights alone?"
    settings_type = OvQkSettings
    settings: OvQkSettings

    copying = loaded("copying")
    """`copying_scores`, in memory."""

    def plan(self) -> Nodes:
        """Copying scores of all heads, and singular directions of one head."""
        given, config = self.settings, self.subject.config
        require_outputs(config)
        require_embedding(config)
        config.require_linear_head()
        folded, plain = (
            StoredMatrices.of(self.subject.files, dtype=self.subject.dtype, folded=folds)
            for folds in (True, False)
        )
        copying = copying_scores.on(weights=folded, controls=given.controls, seed=given.seed)
        asked: dict[str, Any] = {"directions": given.directions, "top_k": given.top_k}
        if given.layer is None:
            asked["copying"] = copying["copying"]
        else:
            count = heads_in(config, given.layer).count
            if given.head >= count:
                raise ConfigError(
                    f"expected a head in 0..{count - 1} of layer {given.layer}, found {given.head}"
                )
            asked |= {"layer": given.layer, "head": given.head}
        nodes: Nodes = {
            "copying": copying,
            "ov": singular_directions.on(weights=folded, circuit="OV", **asked),
        }
        if has_scores(config):
            turned = {"offset": given.offset}
            nodes["qk"] = singular_directions.on(weights=folded, circuit="QK", **turned, **asked)
            if "positions" in config.tensors.outside:
                length = min(POSITIONS, config.position_rows - config.first_position)
                nodes["positions"] = position_scores.on(
                    weights=plain, length=length, offsets=min(OFFSETS, length - 1)
                )
        return nodes

    claim_sources = ("copying",)

    def claims(self) -> Iterator[Claim]:
        """The heads with the largest and the smallest copying score, beside the extremes of every draw."""
        copying = self.copying.transpose(..., "draw")
        scores, control = copying["copying"].values, copying["control"].values
        heads = int(np.isfinite(scores).sum())

        def claim(extreme: Any, pick: Any, does: str, of: str, side: Side) -> Claim:
            layer, head = np.unravel_index(pick(scores), scores.shape)
            name = f"L{copying['layer'].values[layer]}H{head}"
            text = f"{name} {does} what it reads (sum of eigenvalues over that of their sizes)"
            of = f"draws of all heads writing elsewhere, each the {of} of {heads}"
            return Claim.against(text, scores[layer, head], extreme(control, axis=(0, 1)), of, side=side)

        yield claim(np.nanmax, np.nanargmax, "copies", "best", "above")
        yield claim(np.nanmin, np.nanargmin, "lowers", "lowest", "below")

    def claims_caption(self) -> str:
        """What copying scores leave open."""
        return "of a token that is read with weight 1; nothing is said of where heads look"

    def heads(self) -> list[dict[str, Any]]:
        """Every head, by copying score, highest first."""
        found = self.copying.transpose(..., "draw")
        rows = largest(found, found["copying"], None, "copying", "ov_norm", "top_share", "control")
        for row in rows:
            null = Null(np.array(row.pop("control")), "the head elsewhere")
            row["control_low"], row["control_high"] = null.bound()
            row["quantile"] = float((null.values < row["copying"]).mean()) if null.is_run else float("nan")
        return rows

    def views(self) -> Iterator[View]:
        """Copying scores of all heads, and the singular directions of one head."""
        model, given = self.subject.name, self.settings
        rows = self.heads()
        shown = rows if len(rows) <= 2 * given.top else [*rows[: given.top], *rows[-given.top :]]
        elsewhere: tuple[tuple[Any, ...], ...] = (
            ("elsewhere", lambda row: f"{row['control_low']:+.2f} to {row['control_high']:+.2f}"),
            ("quantile", "quantile", ".2f"),
        )
        elsewhere = elsewhere if given.controls else ()
        yield Table.of(
            shown,
            ("head", lambda row: f"L{row['layer']}H{row['head']}"),
            ("copying", "copying", "+.2f"),
            *elsewhere,
            ("norm of OV", "ov_norm", ".3g"),
            ("in one direction", "top_share", ".0%"),
            title=f"Heads of {model} that copy most, and least",
            caption=f"elsewhere: 95 % of {given.controls} draws of the head writing elsewhere, and the "
            "quantile of the head among them; in one direction: share of the squared norm",
            json={**self.subject.about, "heads": rows},
        )
        by_head = Heatmap.of(
            self.copying["copying"].transpose("layer", "head"),
            "Copying score",
            "1: reading a token raises its logit; -1: lowers it",
            sources=("copying",),
            diverging=True,
            low=-1.0,
            high=1.0,
        )
        yield from together("ov_qk", f"Which heads of {model} copy what they read", by_head)
        yield self._directions("ov", "OV", ("what it reads", "what it then writes"))
        if "qk" in self.nodes:
            yield self._directions("qk", "QK", ("where it stands", "what it looks for"))
        if "positions" in self.nodes:
            yield self._positions()

    def _directions(self, node: str, circuit: str, sides: tuple[str, str]) -> Table:
        found = self.result(node).load()
        layer, head = int(found["told_layer"]), int(found["told_head"])
        columns = {"read": "read_token", "written": "written_token"}
        directions = [
            row | {side: named(self.subject, row[side]) for side in columns}
            for row in records(found, "direction", "share", "singular_value", **columns)
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
            caption="tokens farthest along each side; share: of the squared norm",
            sources=(node,),
            json={node: {"layer": layer, "head": head, "directions": directions}},
        )

    def _positions(self) -> Table:
        """Where heads look by positions alone."""
        found = self.result("positions").load().transpose("layer", "head", "offset")
        offsets = found["offset"].values.tolist()
        heads = largest(found, found["weight"].sel(offset=1), None, "offset", "weight")

        def back(offset: int) -> Any:
            return lambda row: row["weight"][offsets.index(offset)]

        return Table.of(
            heads[: self.settings.top],
            ("head", lambda row: f"L{row['layer']}H{row['head']}"),
            *((f"{k} back" if k >= 0 else f"{-k} ahead", back(k), ".2f") for k in offsets),
            title="Where heads look by position alone",
            caption="mean attention by distance if every token were the mean token; best at 1 back first",
            sources=("positions",),
            json={"positions": heads},
        )
