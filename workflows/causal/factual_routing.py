"""Which heads carry a fact to the last token? Attention to the fact when its subject is patched.

The residual states of a fact's subject are replaced, in one block of layers at a time, by those of a
counterfactual subject (stages/causal/counterfact.py), and the last token's attention to the fact is measured
head by head. A head whose attention changes depends on the subject for where it attends.

The subject is all tokens in which the two prompts differ (`subject=whole`) or the last of them; `last_fact`
is the last token of the fact, as in candle-mi, which in CounterFact is a word of the relation. Default pairs
are shipped facts; `data` as for counterfact_patching.
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
from ..material.facts.fact_pairs import SUBJECTS, PairWorkflow, layers_label
from ..material.facts.known import CHOSEN_ON, SCORED
from ..settings import Count, PairSettings, setting
from ..views import Bars, Choice, Figure, Heatmap, Line, Table, View, bold
from ..workflow import Nodes

if TYPE_CHECKING:
    import xarray as xr


__all__ = ["Routing", "RoutingSettings"]

OFTEN = 10
"""Number of heads that count as the top heads for one pair and block; 10, as in candle-mi's field
appearances_in_top10."""
ROWS, PANELS = 10, 4
"""Largest number of heads listed in the table, and of blocks of layers drawn in the figure."""


@dataclass(frozen=True)
class RoutingSettings(PairSettings):
    """Settings of the workflow `factual_routing`: the pairs of facts, and the blocks of layers."""

    top_k: Count = setting(10, "heads listed per block in the JSON document")


class Routing(PairWorkflow):
    """Workflow that measures, head by head, how the last token's attention to a fact changes when the fact's
    subject is patched in one block of layers."""

    name = "factual_routing"
    question = "Which heads carry a fact to the last token?"
    needs = "weights"
    settings_type = RoutingSettings
    settings: RoutingSettings

    def plan(self) -> Nodes:
        """Node that patches the subject of each pair in every block of layers, and control nodes."""
        routing = FactualRouting(**self.read_pairs())
        return {"routing": self.on_model(routing), **self.control_nodes()}

    @cached_property
    def candidates(self) -> CandidateEffects:
        """Absolute change of the last token's attention to the fact when the subject is patched, [pair,
        block, layer, head], for pairs that the model knows."""
        sizes = {
            name: np.abs(_attention_change(self.result(name).load().isel(draw=0)))
            for name in ("choice", "controls")
        }
        scored_on = np.abs(self.routing["delta"].values)[self.is_known(SCORED)]
        return CandidateEffects(
            sizes["choice"][self.is_known(CHOSEN_ON)], scored_on, self.by_donor(sizes["controls"])
        )

    def claims(self) -> Iterator[Claim]:
        """Claims about the last token's attention to the fact: its change summed over heads, for the most
        effective block of layers; then its change in that block's most effective head and, for comparison, in
        its least effective one."""
        heads, of = self.candidates, "patching states of an unrelated prompt of the same length"
        assert heads.controls is not None  # by_donor gives them
        blocks = CandidateEffects(
            *(part.sum((-2, -1)) for part in (heads.chosen_on, heads.scored_on, heads.controls))
        )
        (block,) = blocks.best
        in_block = np.zeros(heads.mean.shape, bool)
        in_block[block] = True
        best = replace(heads, among=in_block).best
        # In layers before the patched block and in its first one nothing can change; that is no comparison.
        in_block[block, : min(self.blocks[block][0] + 1, len(in_block[block]) - 1)] = False
        weakest = replace(heads, among=in_block).weakest
        cause = (
            f"patching the counterfactual {SUBJECTS[self.settings.subject]} into layers "
            f"{layers_label(self.blocks[block])} changes the last token's attention to the fact"
        )
        text = f"{cause} (absolute change, summed over all heads)"
        yield blocks.claim(text, (block,), of, self.settings)
        for before, place in (("", best), ("for comparison, ", weakest)):
            _, layer, head = place
            text = f"{before}{cause} in head {head} of layer {layer} (absolute change)"
            yield heads.claim(text, place, of, self.settings)

    def claims_caption(self) -> str:
        """Caption of the claims: on which pairs the block and the heads were chosen and scored."""
        return (
            "The fact: the tokens of the prompt that state it. The block of consecutive layers and the head "
            "were chosen in which patching the subject changes the last token's attention to the fact most, "
            f"in the mean of {self.claimed_pairs()}. The last claim is a comparison: the head with the "
            f"smallest mean change. Control: patching in states of {self.settings.donors} unrelated prompts "
            "per pair."
        )

    @cached_property
    def routing(self) -> xr.Dataset:
        """Result of patching in memory, with two more variables: `delta`, the change of attention, [pair,
        block, layer, head], and `is_different`, whether the next token differs from that of the unpatched
        run, [pair, block]."""
        result = self.result("routing").load()
        patched = [self.subject.token_texts(row) for row in result["token_id"].values]
        unpatched = self.subject.token_texts(result["original_token_id"].values)
        different = [[text != before for text in row] for row, before in zip(patched, unpatched, strict=True)]
        axes = ("pair", "block", "layer", "head")
        return result.assign(
            delta=(axes, _attention_change(result)), is_different=(("pair", "block"), different)
        )

    def frequency(self) -> list[dict[str, Any]]:
        """Records of the heads that are among the OFTEN with the largest |delta| for any (pair, block), most
        frequent first, with their counts and mean |delta| there; ties by mean |delta|, then by layer and
        head."""
        size = np.abs(self.routing["delta"].values)
        flat = size.reshape(-1, size.shape[2] * size.shape[3])
        top = np.argsort(-flat, axis=1, kind="stable")[:, :OFTEN]
        count = np.bincount(top.ravel(), minlength=flat.shape[1])
        # The third argument is the number of bins, the second the summand of each entry.
        total = np.bincount(top.ravel(), np.take_along_axis(flat, top, 1).ravel(), flat.shape[1])
        return [
            {
                "layer": i // size.shape[3],
                "head": i % size.shape[3],
                # Field names are those of candle-mi.
                "appearances_in_top10": int(count[i]),
                "pct_of_blocks": 100 * int(count[i]) / len(flat),
                "avg_abs_delta": float(total[i] / count[i]),
            }
            # `lexsort` sorts by its last key first: by -count, then by -mean.
            for i in np.lexsort((-total / np.maximum(count, 1), -count)).tolist()
            if count[i]
        ]

    def document(self, i: int) -> dict[str, Any]:
        """JSON document of pair `i`, in the fields of candle-mi's example."""
        pair, routing, rule = self.pairs[i].tokens, self.routing.isel(pair=i), self.settings.subject
        assert pair.subject is not None
        positions, sources = zip(*pair.subject, strict=True)
        tokens = self.subject.token_texts((pair.original[positions[-1]], pair.counterfactual[sources[-1]]))
        return {
            **self.prompts_json(i, self.routing),
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
            "blocks": [
                self._block_json(routing.isel(block=block), block) for block in range(len(self.blocks))
            ],
        }

    def _block_json(self, routing: xr.Dataset, block: int) -> dict[str, Any]:
        """JSON record of one pair with one block of layers patched.

        Arguments:
            routing: part of `routing` for one pair and block.
            block: index of the block.
        """
        size = abs(routing["delta"])
        columns = {"baseline_attn": "baseline_attention", "patched_attn": "attention"}
        return {
            "layers": self.blocks[block],
            "is_different": bool(routing["is_different"]),
            "continuation": self.subject.token_texts([routing["token_id"]])[0],
            "kl_from_original": float(routing["kl"]),
            "top_heads": largest(routing, size, self.settings.top_k, "delta", **columns),
            "total_routing_shift": float(size.sum()),
        }

    def views(self) -> Iterator[View]:
        """Views in reading order: change of attention by head, by patched block, and the heads that are most
        often among those with the largest change."""
        model, rule, pairs, blocks = self.subject.name, self.settings.subject, len(self.pairs), self.blocks
        total, count = np.abs(self.routing["delta"].values).sum((2, 3)), pairs * len(blocks)
        changed = 100 * self.routing["is_different"].values.mean(0)
        by_block = [
            {"layers": layers, "avg_total_routing_shift": float(mean), "pct_is_different": float(share)}
            for layers, mean, share in zip(blocks, total.mean(0), changed, strict=True)
        ]
        heads = self.frequency()
        mean = abs(self.routing["delta"]).mean("pair")
        mean.attrs = {"units": "1", "long_name": "mean change of attention to the fact"}
        maps = {layers_label(layers): self._map(mean.isel(block=i), mean) for i, layers in enumerate(blocks)}
        yield Choice(
            title="In which heads does attention to the fact change when the subject is patched?",
            caption="Each cell: the attention weight from the last token to the fact in one head (column) of "
            "one layer (row), with the subject patched minus without, as an absolute value; mean over "
            f"{pairs} pairs. The fact: the tokens of the prompt that state it. The subject is patched in one "
            "block of layers at a time.",
            name="layers patched",
            options=tuple(maps.items()),
        )
        pair = self.pairs[0].tokens
        assert pair.subject is not None
        tokens = self.subject.token_texts([pair.original[position] for position, _ in pair.subject])
        yield Table.of(
            by_block,
            ("layers", lambda row: bold(layers_label(row["layers"]))),
            ("change of attention", "avg_total_routing_shift", ".3f"),
            ("next token changes", "pct_is_different", "{:.1f} %".format),
            title=f"{model}: attention to the fact when its subject is patched, {pairs} pairs",
            caption="One row per block of consecutive layers. In it, the subject's states are replaced by "
            "those of the counterfactual prompt. Change of attention: the last token's attention weight to "
            "the fact (the tokens that state it), patched minus unpatched run; absolute values summed over "
            "all heads, mean over pairs. Next token changes: share of pairs whose most likely next token "
            f"differs. Patched: the {SUBJECTS[rule]}, in the first pair {format_text(''.join(tokens))!r}.",
            json={
                **self.about,
                "n_heads": self.subject.config.attention_heads,
                "subject_rule": rule,
                "results": lambda: [self.document(i) for i in range(pairs)],
                "aggregate": {"head_frequency": heads, "avg_routing_by_block": by_block},
            },
        )
        yield Table.of(
            heads[:ROWS],
            ("layer", "layer", "d"),
            ("head", "head", "d"),
            ("in top 10", "pct_of_blocks", "{:.0f} %".format),
            ("mean absolute change", "avg_abs_delta", ".4f"),
            title="Heads whose attention to the fact changes most",
            caption="One row per head. Its change: the last token's attention weight to the fact, with the "
            f"subject patched minus without, as an absolute value. In top {OFTEN}: how often the head is "
            f"among the {OFTEN} heads with the largest change, as a share of {count} combinations of a pair "
            "and a block of layers. Mean absolute change: over these combinations.",
        )
        # Of many blocks, those with the largest changes.
        shown = np.sort(np.argsort(-total.mean(0), kind="stable")[:PANELS]).tolist()
        drawn = [(name, panel) for i, (name, panel) in enumerate(maps.items()) if i in shown]
        amount = Bars(
            title="Change of attention by block",
            caption="x: the block of consecutive layers that is patched. y: absolute change of the last "
            "token's attention to the fact by patching the subject, summed over heads. Bars: mean of "
            f"{pairs} pairs. Dots: single pairs. In brackets: share of pairs whose most likely next token "
            "changes.",
            x=tuple(f"{name} ({share:.0f} %)" for name, share in zip(maps, changed, strict=True)),
            x_name="layers patched",
            y_name="absolute change, sum over heads",
            lines=(Line("", total.mean(0), dots=total.T, control=True),),
        )
        panels = (replace(panel, title=f"Layers {name} patched") for name, panel in drawn)
        yield Figure(
            name="factual_routing",
            title=f"Heads of {model} whose attention changes when the {SUBJECTS[rule]} is patched",
            panels=(*panels, amount, self.findings),
            columns=2,
        )

    def _map(self, part: xr.DataArray, whole: xr.DataArray) -> Heatmap:
        """Heatmap of the change in each head when one block is patched.

        Arguments:
            part: mean absolute change for one block, [layer, head].
            whole: the same for all blocks, which share one colour scale.
        """
        part = part.transpose("layer", "head")
        caption = (
            "Each cell: absolute change of the attention from the last token to the fact in one head "
            "(column) of one layer (row), mean over pairs. Largest: layer {layer}, head {head}."
        ).format(**ranked(part, 1)[0])
        return Heatmap.of(part, "", caption, low=0.0, high=float(whole.max()))


def _attention_change(result: xr.Dataset) -> Floats:
    """Change of the last token's attention to the fact, [pair, block, layer, head]."""
    return values_of(result["attention"] - result["baseline_attention"], "pair", "block", "layer", "head")
