"""Which heads carry a fact to the last token? Attention to the fact when its subject is patched.

The subject of a fact is overwritten, block by block of layers, by that of a counterfactual prompt
(stages/causal/counterfact.py); watched is how much the last token then attends to the fact, head by head.
A head whose attention moves is one that reads the subject to decide where to look.

The subject is all tokens in which the two prompts differ, or the last of them; `subject=last_fact` takes the
last token of the fact, as candle-mi does, which in CounterFact is a word of the relation. Defaults: pairs of
shipped facts on the specimen; `data` as for counterfact_patching.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.causal.factual_routing import FactualRouting
from ...stages.logits.lens import format_text
from ...store.arrays import Floats
from ..claim import CandidateEffects, Claim
from ..labelled import largest, ranked, values_of
from ..material.answers import named
from ..material.facts.fact_pairs import SUBJECTS, PairWorkflow, layers_told
from ..material.facts.known import CHOSEN_ON, SCORED
from ..settings import Count, PairSettings, setting
from ..views import Bars, Choice, Figure, Heatmap, Line, Table, View, bold
from ..workflow import Nodes

if TYPE_CHECKING:
    import xarray as xr


__all__ = ["Routing", "RoutingSettings"]

OFTEN = 10
"""Heads of a block that count as its top heads (candle-mi's appearances_in_top10)."""
ROWS, PANELS = 10, 4
"""Heads listed, and blocks drawn, at most."""


@dataclass(frozen=True)
class RoutingSettings(PairSettings):
    """What `--set` can change."""

    top_k: Count = setting(10, "heads listed per block")


class Routing(PairWorkflow):
    """Attention to the fact, with its subject patched in every block."""

    name = "factual_routing"
    question = "Which heads carry a fact to the last token?"
    needs = "weights"
    settings_type = RoutingSettings
    settings: RoutingSettings

    def plan(self) -> Nodes:
        """The subject of every pair, in every block."""
        routing = FactualRouting(**self.read_pairs())
        return {"routing": self.on_model(routing), **self.control_nodes()}

    @cached_property
    def candidates(self) -> CandidateEffects:
        """How far attention moves for the other subject, [pair, block, layer, head], of pairs that the model
        knows."""
        sizes = {
            name: np.abs(_moved(self.result(name).load().isel(draw=0))) for name in ("choice", "controls")
        }
        scored_on = np.abs(self.routing["delta"].values)[self.is_known(SCORED)]
        return CandidateEffects(
            sizes["choice"][self.is_known(CHOSEN_ON)], scored_on, self.by_donor(sizes["controls"])
        )

    def claims(self) -> Iterator[Claim]:
        """How far attention moves in all heads of the block that moves most, in its head that moves most and
        in the one that moves least."""
        heads, of = self.candidates, "the states of unrelated prompts as long"
        assert heads.controls is not None  # by_donor gives them
        blocks = CandidateEffects(
            *(part.sum((-2, -1)) for part in (heads.chosen_on, heads.scored_on, heads.controls))
        )
        (block,) = blocks.best
        in_block = np.zeros(heads.mean.shape, bool)
        in_block[block] = True
        best = replace(heads, among=in_block).best
        # Below the block nothing can move; that is no comparison.
        in_block[block, : min(self.blocks[block][0] + 1, len(in_block[block]) - 1)] = False
        weakest = replace(heads, among=in_block).weakest
        cause = f"another {SUBJECTS[self.settings.subject]} in layers {layers_told(self.blocks[block])} moves"
        text = f"{cause} the last token's attention to the fact, sum over heads"
        yield blocks.claim(text, (block,), of, self.settings)
        for before, place in (("", best), ("for comparison, ", weakest)):
            _, layer, head = place
            text = f"{before}{cause} that of head {head} of layer {layer}"
            yield heads.claim(text, place, of, self.settings)

    def claims_caption(self) -> str:
        """How block and heads were chosen."""
        return (
            f"Block and head that move most on {self.counted()}, and the head that moves least; "
            f"{self.settings.donors} unrelated prompts per pair."
        )

    @cached_property
    def routing(self) -> xr.Dataset:
        """Attention in memory, with its change `delta` [pair, block, layer, head] and what was said."""
        found = self.result("routing").load()
        said = [named(self.subject, row) for row in found["token_id"].values]
        own = named(self.subject, found["original_token_id"].values)
        different = [[text != before for text in row] for row, before in zip(said, own, strict=True)]
        axes = ("pair", "block", "layer", "head")
        return found.assign(delta=(axes, _moved(found)), is_different=(("pair", "block"), different))

    def frequency(self) -> list[dict[str, Any]]:
        """Heads that are ever among the top heads of a (pair, block), most often first: how often, and their
        mean |delta| there; equal ones by mean |delta|, then by place."""
        size = np.abs(self.routing["delta"].values)
        flat = size.reshape(-1, size.shape[2] * size.shape[3])
        top = np.argsort(-flat, axis=1, kind="stable")[:, :OFTEN]
        count = np.bincount(top.ravel(), minlength=flat.shape[1])
        total = np.bincount(top.ravel(), np.take_along_axis(flat, top, 1).ravel(), flat.shape[1])
        return [
            {
                "layer": i // size.shape[3],
                "head": i % size.shape[3],
                "appearances_in_top10": int(count[i]),
                "pct_of_blocks": 100 * int(count[i]) / len(flat),
                "avg_abs_delta": float(total[i] / count[i]),
            }
            for i in np.lexsort((-total / np.maximum(count, 1), -count)).tolist()
            if count[i]
        ]

    def document(self, i: int) -> dict[str, Any]:
        """Pair `i` in the fields of candle-mi's example."""
        pair, found, rule = self.pairs[i].pair, self.routing.isel(pair=i), self.settings.subject
        assert pair.subject is not None
        positions, sources = zip(*pair.subject, strict=True)
        tokens = named(self.subject, (pair.original[positions[-1]], pair.counterfactual[sources[-1]]))
        return {
            **self.pair_told(i, self.routing),
            "fact_positions": pair.fact,
            "subject": {
                "rule": rule,
                "positions": positions,
                "counterfactual_positions": sources,
                "position": positions[-1],
                "counterfactual_position": sources[-1],
                "token": tokens[0],
                "counterfactual_token": tokens[1],
            },
            "blocks": [self._block(found.isel(block=block), block) for block in range(len(self.blocks))],
        }

    def _block(self, found: xr.Dataset, block: int) -> dict[str, Any]:
        moved = abs(found["delta"])
        columns = {"baseline_attn": "baseline_attention", "patched_attn": "attention"}
        return {
            "layers": self.blocks[block],
            "is_different": bool(found["is_different"]),
            "continuation": named(self.subject, [found["token_id"]])[0],
            "kl_from_original": float(found["kl"]),
            "top_heads": largest(found, moved, self.settings.top_k, "delta", **columns),
            "total_routing_shift": float(moved.sum()),
        }

    def views(self) -> Iterator[View]:
        """Which heads move, by the block patched, and how much does."""
        model, rule, pairs, blocks = self.subject.name, self.settings.subject, len(self.pairs), self.blocks
        total, count = np.abs(self.routing["delta"].values).sum((2, 3)), pairs * len(blocks)
        changed = 100 * self.routing["is_different"].values.mean(0)
        moved = [
            {"layers": layers, "avg_total_routing_shift": float(mean), "pct_is_different": float(share)}
            for layers, mean, share in zip(blocks, total.mean(0), changed, strict=True)
        ]
        heads = self.frequency()
        mean = abs(self.routing["delta"]).mean("pair")
        mean.attrs = {"units": "1", "long_name": "mean change of attention to the fact"}
        maps = {layers_told(layers): self._map(mean.isel(block=i), mean) for i, layers in enumerate(blocks)}
        yield Choice(
            title="Which heads look elsewhere when the subject is patched?",
            caption=f"Absolute change of the last token's attention, mean of {pairs} pairs.",
            name="layers patched",
            options=tuple(maps.items()),
        )
        first = self.pairs[0].pair
        assert first.subject is not None
        tokens = named(self.subject, [first.original[position] for position, _ in first.subject])
        yield Table.of(
            moved,
            ("layers", lambda row: bold(layers_told(row["layers"]))),
            ("attention moved", "avg_total_routing_shift", ".3f"),
            ("next word changes", "pct_is_different", "{:.1f} %".format),
            title=f"{model}: the subject patched, {pairs} pairs",
            caption="sum over heads of the change in the last token's mean attention to the fact, mean of "
            f"pairs; subject: {rule}, in the first pair {format_text(''.join(tokens))!r}",
            json={
                **self.about,
                "n_heads": self.subject.config.attention_heads,
                "subject_rule": rule,
                "results": lambda: [self.document(i) for i in range(pairs)],
                "aggregate": {"head_frequency": heads, "avg_routing_by_block": moved},
            },
        )
        yield Table.of(
            heads[:ROWS],
            ("layer", "layer", "d"),
            ("head", "head", "d"),
            ("in top 10", "pct_of_blocks", "{:.0f} %".format),
            ("mean change", "avg_abs_delta", ".4f"),
            title="Heads whose attention to the fact moves most",
            caption=f"of {count} (pair, block) combinations; mean of the absolute change where it is",
        )
        # Of many blocks, those where most moves.
        shown = np.sort(np.argsort(-total.mean(0), kind="stable")[:PANELS]).tolist()
        drawn = [(name, panel) for i, (name, panel) in enumerate(maps.items()) if i in shown]
        amount = Bars(
            title="How much moves",
            caption=f"bars: mean of {pairs} pairs; in brackets: next word changes",
            x=tuple(f"{name} ({share:.0f} %)" for name, share in zip(maps, changed, strict=True)),
            x_name="layers patched",
            y_name="attention moved, sum over heads",
            lines=(Line("", total.mean(0), dots=total.T, control=True),),
        )
        panels = (replace(panel, title=f"Layers {name} patched") for name, panel in drawn)
        yield Figure(
            name="factual_routing",
            title=f"Which heads of {model} look elsewhere once the {SUBJECTS[rule]} is another",
            panels=(*panels, amount, self.findings),
            columns=2,
        )

    def _map(self, part: xr.DataArray, whole: xr.DataArray) -> Heatmap:
        """How much each head moves when one block is patched, on the scale of all blocks."""
        part = part.transpose("layer", "head")
        most = "most: layer {layer}, head {head}".format(**ranked(part, 1)[0])
        return Heatmap.of(part, "", most, low=0.0, high=float(whole.max()))


def _moved(found: xr.Dataset) -> Floats:
    """Change of the last token's attention to the fact, [pair, block, layer, head]."""
    return values_of(found["attention"] - found["baseline_attention"], "pair", "block", "layer", "head")
