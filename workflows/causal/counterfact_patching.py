"""At which layer does patching the subject change the fact? CounterFact patching over blocks of layers.

The original prompt is run with one position, in one block of layers, taken from the counterfactual prompt
(stages/causal/counterfact.py), for every position and block; counted is how often the next word changes,
by block and by what the token belongs to: the fact, its last token, or the instruction after it. As a
subject of several tokens is at no single position, what is claimed is of all of it, patched together
(factual_routing.py, whose cells these are).

Defaults: pairs of shipped facts of one relation, on the specimen. `data` reads a JSON list of records with
original_prompt, counterfactual_prompt, gt_original_target and gt_counterfactual_target; a fact is the text
before the first blank line.
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
from ..material.answers import named
from ..material.facts.fact_pairs import SUBJECTS, PairWorkflow, layers_told
from ..material.facts.known import CHOSEN_ON, SCORED
from ..settings import PairSettings
from ..views import Bars, Choice, Figure, Heatmap, Line, Table, View, bold, dim
from ..workflow import Nodes, loaded

if TYPE_CHECKING:
    import xarray as xr


__all__ = ["CounterFactPatches", "CounterFactPatchesSettings"]

TYPES = {"fact": "the fact", "fact_final": "its last token", "other": "other tokens"}
PAIRS = 12
"""Pairs to choose from on a page."""


@dataclass(frozen=True)
class CounterFactPatchesSettings(PairSettings):
    """What `--set` can change."""


class CounterFactPatches(PairWorkflow):
    """Patches of every position in every block, for all pairs."""

    name = "counterfact_patching"
    question = "At which layer does patching the subject change the fact?"
    needs = "weights"
    settings_type = CounterFactPatchesSettings
    settings: CounterFactPatchesSettings

    found = loaded("patches")

    def plan(self) -> Nodes:
        """Every position of every pair, and its subject, in every block."""
        shared = self.read_pairs()
        nodes: Nodes = {"patches": self.on_model(CounterFactPatching(**shared))}
        if controls := self.control_nodes():
            nodes |= {"subjects": self.on_model(FactualRouting(**shared)), **controls}
            self.only_claims = (*self.only_claims, "subjects")
        return nodes

    @cached_property
    def candidates(self) -> CandidateEffects:
        """Whether the state of the counterfactual subject in each block makes the model predict what the
        counterfactual prompt does, of pairs that the model knows."""
        choice = self.result("choice").load().isel(draw=0)
        predicts, patched, controls = (
            values_of(each, "pair", "block")
            for each in (
                choice["token_id"] == choice["counterfactual_token_id"],
                self.result("subjects")["token_id"],
                self.result("controls").isel(draw=0)["token_id"],
            )
        )
        known = self.is_known(SCORED)
        expected = self.found["counterfactual_token_id"].values[known]
        return CandidateEffects(
            predicts[self.is_known(CHOSEN_ON)],
            patched[known] == expected[:, None],
            self.by_donor(controls) == expected[:, None, None],
        )

    def claims(self) -> Iterator[Claim]:
        """The block that most often turns the answer on other pairs, and the one that does so least."""
        often = self.candidates.mean
        # Of several blocks in which nothing happens the last one: it is farthest from the first.
        weakest = len(often) - 1 - int(often[::-1].argmin())
        for block, begins in ((self.candidates.best[0], "putting"), (weakest, "for comparison, putting")):
            text = (
                f"{begins} the counterfactual {SUBJECTS[self.settings.subject]} into layers "
                f"{layers_told(self.blocks[block])} makes the model say what that prompt does, of all pairs"
            )
            of = "the states of unrelated prompts as long"
            yield self.candidates.claim(text, (block,), of, self.settings)

    def claims_caption(self) -> str:
        """How the blocks were chosen."""
        return (
            f"The block in which that happens most often on {self.counted()}, and the one in which it "
            f"happens least; {self.settings.donors} unrelated prompts per pair."
        )

    @cached_property
    def patches(self) -> xr.Dataset:
        """Every patch in memory, [patch]: what it says, whether that is new, and what its token is."""
        found = self.found
        pair, position = found["pair_of"].values, found["position"].values
        said = named(self.subject, found["token_id"].values)
        own = named(self.subject, found["original_token_id"].values)
        different = [text != own[i] for text, i in zip(said, pair, strict=True)]
        kinds = [self.pairs[i].labels[p] for i, p in zip(pair, position, strict=True)]
        columns = {"said": said, "is_different": different, "token_type": kinds}
        return found.assign({name: ("patch", values) for name, values in columns.items()})

    def of(self, i: int) -> xr.Dataset:
        """The patches of one pair."""
        return self.patches.isel(patch=self.patches["pair_of"].values == i)

    @property
    def predicts(self) -> bool:
        """Whether facts end their prompts, so that a fact's last token is where the next word is read."""
        return all(each.labels[-1] == "fact_final" for each in self.pairs)

    def document(self, i: int) -> dict[str, Any]:
        """Pair `i` in the fields of candle-mi's example."""
        names = {
            "orig_pos": "position",
            "cf_pos": "counterfactual_position",
            "ablated_continuation": "said",
            "is_different": "is_different",
            "kl_from_original": "kl",
            "token_type": "token_type",
        }
        own = self.of(i)
        rows = zip(*(own[name].values.tolist() for name in ("block", *names.values())), strict=True)
        return {
            **self.pair_told(i, self.found),
            "input_tokens": named(self.subject, self.pairs[i].pair.original),
            "patches": [
                {"layer": self.blocks[block], **dict(zip(names, row, strict=True))} for block, *row in rows
            ],
        }

    def views(self) -> Iterator[View]:
        """How often the next word changes, by block and type of token, and how far every patch moves it."""
        patches, total, model = self.patches, len(self.pairs), self.subject.name
        different, kinds = patches["is_different"].values, patches["token_type"].values
        here = [patches["block"].values == block for block in range(len(self.blocks))]
        held = {kind: kinds == kind for kind in TYPES}
        rows: list[dict[str, Any]] = [
            {
                "layers": layers_told(layers),
                "any token": _share(different[at]),
                **{kind: _share(different[at & of]) for kind, of in held.items()},
                "kl": float(patches["kl"].values[at].mean()),
            }
            for layers, at in zip(self.blocks, here, strict=True)
        ]
        summary = {
            "pct_different_by_block": [
                {"block": i, "layers": layers, **rows[i]["any token"]} for i, layers in enumerate(self.blocks)
            ],
            "pct_different_by_token_type": [
                {"token_type": kind, **_share(different[of])} for kind, of in held.items() if of.any()
            ],
            "total_patches": different.size,
            "total_different": different.sum(),
        }
        caption = "patches that change it, of those tried; KL(original || patched) in nats, mean"
        if self.predicts:
            caption += "; here the last token of a fact is the one that predicts"
        first = self.pair_told(0, self.found)
        said = [format_token(first[f"{name}_continuation"]) for name in ("original", "cf")]
        caption += f"\nfirst pair: {format_text(first['label'])}; said {said[0]!r} and {said[1]!r}"
        yield Table.of(
            rows,
            ("layers", lambda row: bold(row["layers"])),
            *((name, name, _told) for name in ("any token", *TYPES)),
            ("mean KL", "kl", ".3f"),
            title=f"{model}: how often the next word changes, {total} pairs",
            caption=caption,
            json={
                **self.about,
                "summary": summary,
                "results": lambda: [self.document(i) for i in range(total)],
            },
        )
        maps = [self._map(i) for i in range(min(total, PAIRS))]
        yield Choice(
            title="How far does a patch move the next word?",
            caption="One position, in one block of layers, taken from the counterfactual prompt.",
            name="pair",
            options=tuple((each.label, of) for each, of in zip(self.pairs, maps, strict=False)),
        )
        names = TYPES | ({"fact_final": "its last token,\nwhich predicts"} if self.predicts else {})
        often = Bars(
            title="How often the next word changes",
            caption=f"{total} pairs of facts, one position at a time, by what it is in",
            x=tuple(row["layers"] for row in rows),
            x_name="layers patched together",
            y_name="patches that change it",
            unit="%",
            low=0.0,
            high=102.0,
            lines=tuple(
                Line(name, np.array([row[kind]["pct_different"] for row in rows]), control=kind == "other")
                for kind, name in names.items()
                if held[kind].any()
            ),
        )
        told = f"{format_text(first['label'])}; framed: the next word changes"
        one = replace(maps[0], title="One pair: how far the prediction moves", caption=told)
        title = f"Where {model} can be told another fact"
        yield Figure(name="counterfact_patching", title=title, panels=(often, one, self.findings), columns=2)

    def _map(self, i: int) -> Heatmap:
        """KL of every patch of a pair, block by position."""
        own, tokens = self.of(i), named(self.subject, self.pairs[i].pair.original)
        place = own["block"].values, own["position"].values
        kl = np.full((len(self.blocks), len(tokens)), np.nan)
        kl[place] = own["kl"].values
        cells = zip(*(axis[own["is_different"].values].tolist() for axis in place), strict=True)
        return Heatmap(
            values=kl,
            rows=tuple(map(layers_told, self.blocks)),
            columns=tuple(map(format_token, tokens)),
            row_name="layers",
            column_name="token",
            value_name=str(own["kl"].attrs["long_name"]),
            unit="nats",
            low=0.0,
            upward=True,
            framed=tuple(cell * 2 for cell in cells),
            frame_name="the next word changes",
        )


def _share(different: Any) -> dict[str, Any]:
    """How many of some patches changed the next word."""
    count, total = int(np.sum(different)), len(different)
    share = 100 * count / total if total else np.nan
    return {"pct_different": share, "count_different": count, "count_total": total}


def _told(share: dict[str, Any]) -> Any:
    total = share["count_total"]
    return (f"{share['pct_different']:.1f} % ", dim(f"of {total}")) if total else "-"
