"""At which layer does patching the subject change the fact? CounterFact patching over blocks of layers.

The original prompt is run with the residual states of one position, in one block of layers, replaced by those
of the counterfactual prompt (stages/causal/counterfact.py), for every position and block. The table counts
how often the next token changes, by block and by type of token: in the fact, the fact's last token, or in the
instruction after it. The claims are about the whole subject, with all of its tokens patched together
(factual_routing.py), as a subject of several tokens has no single position.

Default pairs: shipped facts of one relation. `data` reads a JSON list of records with original_prompt,
counterfactual_prompt, gt_original_target and gt_counterfactual_target; a fact is the text before the first
blank line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.causal.counterfact import CounterFactPatching
from ...stages.causal.factual_routing import FactualRouting
from ...stages.logits.lens import format_text, format_token
from ..claim import CandidateEffects, Claim
from ..labelled import values_of
from ..material.facts.fact_pairs import SUBJECTS, PairWorkflow, layers_label
from ..material.facts.known import CHOSEN_ON, SCORED
from ..settings import PairSettings
from ..views import Bars, Choice, Figure, Heatmap, Line, Table, View, bold, dim
from ..workflow import Nodes, loaded

if TYPE_CHECKING:
    import xarray as xr


__all__ = ["CounterFactPatches", "CounterFactPatchesSettings"]

TYPES = {"fact": "inside the fact", "fact_final": "last of the fact", "other": "after the fact"}
"""Token types in tables and captions, by their label: where the patched token is."""
PAIRS = 12
"""Largest number of pairs for which a page has a heatmap to select."""


@dataclass(frozen=True)
class CounterFactPatchesSettings(PairSettings):
    """Settings of the workflow `counterfact_patching`: the pairs of facts, and the blocks of layers."""


class CounterFactPatches(PairWorkflow):
    """Workflow that patches one position of a fact at a time, in blocks of layers, with the states of a
    counterfactual fact."""

    name = "counterfact_patching"
    question = "At which layer does patching the subject change the fact?"
    needs = "weights"
    settings_type = CounterFactPatchesSettings
    settings: CounterFactPatchesSettings

    raw_patches = loaded("patches")
    """Result of patching, in memory: one entry per patched position and block, [patch], and the unpatched
    predictions, [pair]."""

    def plan(self) -> Nodes:
        """Nodes that patch each position in every block of layers; for claims also nodes that patch the whole
        subject."""
        shared = self.read_pairs()
        nodes: Nodes = {"patches": self.on_model(CounterFactPatching(**shared))}
        if controls := self.control_nodes():
            nodes |= {"subjects": self.on_model(FactualRouting(**shared)), **controls}
            self.only_claims = (*self.only_claims, "subjects")
        return nodes

    @cached_property
    def candidates(self) -> CandidateEffects:
        """Whether patching the subject in one block makes the model predict the next token of the
        counterfactual prompt: 0 or 1, [pair, block], for pairs that the model knows."""
        # `AtOnce` adds an axis "draw", of one experiment here.
        choice = self.result("choice").load().isel(draw=0)
        predicts, patched, controls = (
            values_of(by_block, "pair", "block")
            for by_block in (
                choice["token_id"] == choice["counterfactual_token_id"],
                self.result("subjects")["token_id"],
                self.result("controls").isel(draw=0)["token_id"],
            )
        )
        is_known = self.is_known(SCORED)
        expected = self.raw_patches["counterfactual_token_id"].values[is_known]
        return CandidateEffects(
            predicts[self.is_known(CHOSEN_ON)],
            patched[is_known] == expected[:, None],
            self.by_donor(controls) == expected[:, None, None],
        )

    def claims(self) -> Iterator[Claim]:
        """Claims about the block of layers in which patching the subject most often makes the model predict
        the counterfactual answer, chosen on other pairs, and, for comparison, about the block in which it
        does so least often."""
        shares = self.candidates.mean
        # Of several blocks with equally few changes the last one: it is farthest from the first block.
        weakest = len(shares) - 1 - int(shares[::-1].argmin())
        for block, before in ((self.candidates.best[0], ""), (weakest, "for comparison, ")):
            text = (
                f"{before}share of pairs in which patching the counterfactual "
                f"{SUBJECTS[self.settings.subject]} into layers {layers_label(self.blocks[block])} makes the "
                "model predict the counterfactual prompt's next token"
            )
            of = "patching states of an unrelated prompt of the same length"
            yield self.candidates.claim(text, (block,), of, self.settings)

    def claims_caption(self) -> str:
        """Caption of the claims: on which pairs the blocks were chosen and scored."""
        return (
            "The block (of consecutive layers) was chosen in which patching most often makes the model "
            f"predict the counterfactual prompt's next token, on {self.claimed_pairs()}. The last claim is a "
            "comparison: the block in which it happens least often. Control: patching in states of "
            f"{self.settings.donors} unrelated prompts per pair."
        )

    @cached_property
    def patches(self) -> xr.Dataset:
        """All patches in memory, [patch], with three more variables: `said`, the predicted next token as
        text; `is_different`, whether that differs from the unpatched prediction; `token_type` of the patched
        position."""
        patches = self.raw_patches
        pair, position = patches["pair_of"].values, patches["position"].values
        next_tokens = self.subject.token_texts(patches["token_id"].values)
        unpatched = self.subject.token_texts(patches["original_token_id"].values)
        different = [text != unpatched[i] for text, i in zip(next_tokens, pair, strict=True)]
        kinds = [self.pairs[i].labels[p] for i, p in zip(pair, position, strict=True)]
        columns = {"said": next_tokens, "is_different": different, "token_type": kinds}
        return patches.assign({name: ("patch", values) for name, values in columns.items()})

    def of(self, i: int) -> xr.Dataset:
        """All patches of pair `i`, [patch]."""
        return self.patches.isel(patch=self.patches["pair_of"].values == i)

    @property
    def predicts(self) -> bool:
        """Whether every prompt ends with its fact, so that the fact's last token predicts the next token."""
        return all(pair.labels[-1] == "fact_final" for pair in self.pairs)

    def document(self, i: int) -> dict[str, Any]:
        """JSON document of pair `i`, in the fields of candle-mi's example."""
        names = {
            "orig_pos": "position",
            "cf_pos": "counterfactual_position",
            "ablated_continuation": "said",
            "is_different": "is_different",
            "kl_from_original": "kl",
            "token_type": "token_type",
        }
        patches = self.of(i)
        rows = zip(*(patches[name].values.tolist() for name in ("block", *names.values())), strict=True)
        return {
            **self.prompts_json(i, self.raw_patches),
            "input_tokens": self.subject.token_texts(self.pairs[i].tokens.original),
            "patches": [
                {"layer": self.blocks[block], **dict(zip(names, row, strict=True))} for block, *row in rows
            ],
        }

    def views(self) -> Iterator[View]:
        """Views in reading order: how often a patch changes the next token, by block and type of token, and
        the KL of every patch."""
        patches, total, model = self.patches, len(self.pairs), self.subject.name
        different, kinds = patches["is_different"].values, patches["token_type"].values
        in_block = [patches["block"].values == block for block in range(len(self.blocks))]
        of_type = {kind: kinds == kind for kind in TYPES}
        rows: list[dict[str, Any]] = [
            {
                "layers": layers_label(layers),
                "any token": _share(different[at]),
                **{kind: _share(different[at & mask]) for kind, mask in of_type.items()},
                "kl": float(patches["kl"].values[at].mean()),
            }
            for layers, at in zip(self.blocks, in_block, strict=True)
        ]
        summary = {
            "pct_different_by_block": [
                {"block": i, "layers": layers, **rows[i]["any token"]} for i, layers in enumerate(self.blocks)
            ],
            "pct_different_by_token_type": [
                {"token_type": kind, **_share(different[mask])}
                for kind, mask in of_type.items()
                if mask.any()
            ],
            "total_patches": different.size,
            "total_different": different.sum(),
        }
        caption = (
            "One row per block of consecutive layers. In it, the states of one position are replaced by "
            "those of the counterfactual prompt. Columns: type of the patched token. Percentages: share of "
            "such patches that change the most likely next token. Mean KL: KL(original run || patched run) "
            "in nats."
        )
        if self.predicts:
            caption += " The next token is read at the last token of a fact."
        pair = self.prompts_json(0, self.raw_patches)
        clean, counterfactual = (format_token(pair[f"{name}_continuation"]) for name in ("original", "cf"))
        caption += (
            f"\nFirst pair: {format_text(pair['label'])}. Predicted for the original prompt: {clean!r}, "
            f"for the counterfactual prompt: {counterfactual!r}."
        )
        yield Table.of(
            rows,
            ("layers", lambda row: bold(row["layers"])),
            ("any token", "any token", _share_cell),
            *((name, token_type, _share_cell) for token_type, name in TYPES.items()),
            ("mean KL", "kl", ".3f"),
            title=f"{model}: how often patching one position changes the next token, {total} pairs",
            caption=caption,
            json={
                **self.about,
                "summary": summary,
                "results": lambda: [self.document(i) for i in range(total)],
            },
        )
        maps = [self._map(i) for i in range(min(total, PAIRS))]
        yield Choice(
            title="How much does a patch change the next-token distribution?",
            caption="Each cell: the states of one position (column) are replaced by those of the "
            "counterfactual prompt, in one block of consecutive layers (row). Value: KL(original run || "
            "patched run) in nats. Framed: the most likely next token changes.",
            name="pair",
            # strict=False: only the first PAIRS pairs have a map.
            options=tuple((pair.label, heatmap) for pair, heatmap in zip(self.pairs, maps, strict=False)),
        )
        # If prompts end with their fact, patching its last token patches the prediction itself.
        names = TYPES | ({"fact_final": "last of the fact,\nwhich predicts"} if self.predicts else {})
        often = Bars(
            title="How often the next token changes",
            caption="x: the block of consecutive layers that is patched. y: share of patches that change the "
            f"most likely next token, over {total} pairs of facts. One position is patched at a time. Bars: "
            "place of the patched token; the fact: the tokens that state it.",
            x=tuple(row["layers"] for row in rows),
            x_name="layers patched together",
            y_name="patches that change the next token",
            unit="%",
            low=0.0,
            high=102.0,
            lines=tuple(
                Line(name, np.array([row[kind]["pct_different"] for row in rows]), control=kind == "other")
                for kind, name in names.items()
                if of_type[kind].any()
            ),
        )
        label = (
            f"{format_text(pair['label'])}. Each cell: states of one token (column) patched in one block of "
            "layers (row). Framed: the most likely next token changes."
        )
        example = replace(maps[0], title="One pair: KL of every patch", caption=label)
        title = f"Where patching changes the fact that {model} predicts"
        panels = (often, example, self.findings)
        yield Figure(name="counterfact_patching", title=title, panels=panels, columns=2)

    def _map(self, i: int) -> Heatmap:
        """Heatmap of the KL of every patch of pair `i`, [block, position]."""
        patches, tokens = self.of(i), self.subject.token_labels(self.pairs[i].tokens.original)
        rows, columns = patches["block"].values, patches["position"].values
        kl = np.full((len(self.blocks), len(tokens)), np.nan)
        kl[rows, columns] = patches["kl"].values
        is_changed = patches["is_different"].values
        changed = zip(rows[is_changed].tolist(), columns[is_changed].tolist(), strict=True)
        return Heatmap(
            values=kl,
            rows=tuple(map(layers_label, self.blocks)),
            columns=tuple(tokens),
            row_name="layers",
            column_name="token",
            value_name=str(patches["kl"].attrs["long_name"]),
            unit="nats",
            low=0.0,
            upward=True,
            framed=tuple((row, column, row, column) for row, column in changed),
            frame_name="the next token changes",
        )


def _share(different: Any) -> dict[str, Any]:
    """Number and percentage of patches that changed the next token, from bool [patch]."""
    count, total = int(np.sum(different)), len(different)
    share = 100 * count / total if total else np.nan
    return {"pct_different": share, "count_different": count, "count_total": total}


def _share_cell(share: dict[str, Any]) -> Any:
    """Cell of a table: the percentage and the number of patches; "-" without any patch."""
    total = share["count_total"]
    return (f"{share['pct_different']:.1f} % ", dim(f"of {total}")) if total else "-"
