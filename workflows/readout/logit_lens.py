"""At which layer can the next token be read from the residual stream? The logit lens over a list of prompts.

Captures the residual stream after every layer, reads a next-token distribution off each with the model's own
readout (stages/logits/lens.py), and follows the answer of each prompt through the layers.

Defaults: the facts that ship with the specimen. A prompt's answer is followed by its first token, found by
encoding prompt and answer together, so that a word of several tokens is not looked up as a token of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.logits.lens import (
    first_appearance,
    format_probability,
    format_text,
    format_token,
    logit_lens,
    next_tokens,
)
from ...stages.logits.readout import readout_node
from ..labelled import column
from ..settings import AnswerSettings, Count, Natural, setting
from ..subject import answered
from ..views import Choice, Data, Figure, Lens, Line, Lines, Table, View, dim, together
from ..workflow import ModelWorkflow, Nodes, loaded

if TYPE_CHECKING:
    import xarray as xr

    from ...store import PackedTokens

__all__ = ["LogitLens", "LogitLensSettings"]

TOP = 10
"""Layers are searched for the answer among this many tokens (candle-mi's `first_appearance`)."""
ROWS = 12
"""Prompts listed in the table of answers, and to choose from on a page."""
LINES = 60
"""Largest number of prompts that are drawn as single curves."""


@dataclass(frozen=True)
class LogitLensSettings(AnswerSettings):
    """What `--set` can change."""

    top_k: Count = setting(10, "most likely tokens kept per layer and position")
    soft_cap: bool = setting(True, "apply the model's final soft cap, if it has one")
    heatmaps: Natural = setting(2, "how many prompts get a figure of their own")


class LogitLens(ModelWorkflow):
    """Prompts whose state after every layer the model's own readout reads."""

    name = "logit_lens"
    question = "At which layer can the next token be read from the residual stream?"
    descriptive = "The state after each layer, decoded as if it were the last layer's."
    settings_type = LogitLensSettings
    settings: LogitLensSettings

    lens = loaded("lens")
    """The lens on all tokens of all prompts, in memory: [layer, token, rank] and [layer, token]."""

    def plan(self) -> Nodes:
        """The residual stream after every layer, and what the model's readout makes of it."""
        given = self.settings
        self.texts, self.words = answered(given.prompts, given.answers)
        self.texts = tuple(map(self.subject.asked, self.texts))
        tokens = self.subject.pack(self.texts)
        self.ends = [self.subject.read_at(ids.tolist()) for ids in tokens]
        states = self.subject.capture(tokens, "blocks.*.hook_resid_post")["resid_post"]
        readout = readout_node(self.subject.files, dtype=self.subject.dtype)
        shape: dict[str, Any] = {"top_k": given.top_k, "soft_cap": given.soft_cap}
        lens = logit_lens.on(resid_post=states, targets=self._targets(tokens), readout=readout, **shape)
        return {"lens": lens, "readout": readout}

    def _targets(self, tokens: PackedTokens) -> xr.DataArray:
        """What each token should say: the next one, or of most models that look ahead the token itself; at
        the end of a prompt, or where its mask is read, the answer."""
        if self.subject.config.predicts_next or self.subject.config.mask_shift:
            targets = next_tokens(tokens.ids, tokens.prompt_of(slice(None)))
        else:
            targets = np.asarray(tokens.ids, np.int32).copy()
        asked_at = [tokens.row(i).start + end for i, end in enumerate(self.ends)]
        told = self.subject.answer_ids(list(zip(self.texts, self.words, strict=True))) if self.words else -1
        targets[asked_at] = told
        return column(targets, "token", "targets")

    @cached_property
    def vocabulary(self) -> list[str]:
        """Text of each token id."""
        return list(self.result("readout")["token"].values)

    def prompt(self, i: int) -> xr.Dataset:
        """The lens on prompt `i`: [layer, position, rank] and [layer, position]."""
        rows = np.flatnonzero(self.lens["prompt"].values == i)
        part = self.lens.isel(token=rows).drop_vars(["prompt", "position"], errors="ignore")
        return part.rename(token="position").assign_coords(position=np.arange(len(rows)))

    def answers(self) -> xr.Dataset:
        """The lens at the last token, or the mask, of every prompt that has an answer: prompt in place of
        token."""
        prompts = self.lens["prompt"].values
        starts = np.flatnonzero(np.diff(prompts, prepend=-1))
        last = starts + np.array(self.ends)
        last = last[self.lens["target_id"].values[last] >= 0]
        part = self.lens.isel(token=last).drop_vars(["prompt", "position"], errors="ignore")
        return part.rename(token="prompt").assign_coords(prompt=prompts[last])

    def document(self, i: int) -> dict[str, Any]:
        """Prompt `i` in the fields of candle-mi's example, plus entropy and KL."""
        last = self.prompt(i).isel(position=self.ends[i])
        found: dict[str, Any] = {**self.subject.about, "prompt": self.texts[i]}
        if self.words:
            appears = first_appearance(last["top_id"], int(last["target_id"]), TOP)
            found |= {
                "answer": self.words[i],
                "answer_token_id": int(last["target_id"]),
                "answer_first_top10": appears,
            }
            if self.words[i].strip() == "Paris":
                found["paris_first_top10"] = appears
        found["layers"] = [self._layer(last.isel(layer=row)) for row in range(last.sizes["layer"])]
        return found

    def _layer(self, row: xr.Dataset) -> dict[str, Any]:
        ids, probabilities = row["top_id"].values.tolist(), np.exp(row["top_logprob"].values).tolist()
        found = {
            "layer": int(row["layer"]),
            "predictions": [
                {"rank": rank, "token_id": token, "token": self.vocabulary[token], "probability": p}
                for rank, (token, p) in enumerate(zip(ids, probabilities, strict=True), start=1)
            ],
            "entropy": float(row["entropy"]),
            "kl_from_last": float(row["kl"]),
        }
        if int(row["target_id"]) >= 0:
            found |= {
                "answer_rank": int(row["target_rank"]),
                "answer_probability": float(np.exp(row["target_logprob"])),
            }
        return found

    def views(self) -> Iterator[View]:
        """The lens on each of the first prompts, and where the answers of all prompts appear."""
        yield Data(json={"results": lambda: [self.document(i) for i in range(len(self.texts))]})
        title = f"What each layer of {self.subject.name} would say next"
        texts = self.texts[:ROWS]
        lenses = [Lens.of(self.prompt(i), self.vocabulary, title="") for i in range(len(texts))]
        yield Choice(
            title=title,
            caption="The residual stream after each layer, read with the model's own final norm and "
            "unembedding. Click a cell to pin it.",
            sources=("lens", "readout"),
            name="prompt",
            options=tuple(zip(map(format_text, texts), lenses, strict=True)),
        )
        for i, lens in enumerate(lenses[: self.settings.heatmaps]):
            known = " Framed: what does come next." if any(lens.target) else ""
            caption = f"Logit lens: most likely token, shaded by its probability.{known}"
            yield Figure(name=f"logit_lens_{i}", title=title, caption=caption, panels=(lens,))
        answers = self.answers()
        if answers.sizes["prompt"] > 1:
            yield from self._curves(answers)
        yield self._layers_table(0)
        if answers.sizes["prompt"]:
            yield self._answers_table(answers)

    def _curves(self, answers: xr.Dataset) -> Iterator[View]:
        """How many prompts have their answer among the first tokens, and how likely it is, by layer."""
        rank = answers["target_rank"].transpose("layer", "prompt").values
        probability = np.exp(answers["target_logprob"].transpose("layer", "prompt").values)
        words = [self.words[i] for i in answers["prompt"].values]
        by_layer: dict[str, Any] = {
            "sources": ("lens",),
            "x": tuple(answers["layer"].values.tolist()),
            "x_name": "layer",
            "low": 0.0,
            "high": 1.0,
        }
        where = "last token" if self.subject.mask is None else "mask"
        shares = tuple(Line(f"answer in the top {k}", (rank <= k).mean(axis=1)) for k in (TOP, 5, 1))
        median = np.median(probability, axis=1)
        if len(words) <= LINES:
            best = np.argsort(-probability[-1])[:3].tolist()
            ends = {i: f"{words[i]} {format_probability(probability[-1, i])}" for i in best}
            lines = [Line(ends.get(i, ""), row, faint=True) for i, row in enumerate(probability.T)]
            told = f"{len(words)} prompts (thin) and their median (thick)"
        else:
            lines = [
                Line("", median, faint=True, band=np.percentile(probability, ends, axis=1))
                for ends in ((5, 95), (25, 75))
            ]
            told = f"{len(words)} prompts: middle half, middle nine tenths, median"
        each = Lines(
            title="Where the answer appears",
            caption=f"{told}, at the {where}.",
            y_name="probability of the answer",
            lines=(*lines, Line("median", median, strong=True)),
            **by_layer,
        )
        among = Lines(
            title="Answer among the most likely tokens",
            y_name="share of prompts",
            lines=shares,
            filled=True,
            **by_layer,
        )
        title = f"When {self.subject.name} has the answer"
        yield from together("logit_lens_answers", title, each, among)

    def _layers_table(self, i: int) -> Table:
        """The likeliest tokens at the end of one prompt, layer by layer from the last one down."""
        layers = self.document(i)["layers"]

        def token(k: int, layer: dict[str, Any]) -> Any:
            said = layer["predictions"][k]
            return f"{format_token(said['token'])} ", dim(format_probability(said["probability"]))

        shown = ("most likely", "2nd", "3rd", "4th")[: len(layers[0]["predictions"])]
        return Table.of(
            reversed(layers),
            ("layer", "layer", "d"),
            *((name, partial(token, k)) for k, name in enumerate(shown)),
            ("entropy", "entropy", ".2f"),
            ("KL", "kl_from_last", ".2f"),
            title=f"After each layer of {self.subject.name}: '{format_text(self.texts[i])}' …",
            caption="entropy of the distribution, KL of it from the last layer's; nats",
        )

    def _answers_table(self, answers: xr.Dataset) -> Table:
        """From which layer on the answers of the first prompts are likely."""
        n = answers.sizes["prompt"]
        best = (answers["target_rank"].isel(layer=-1) == 1).values.sum()
        more = f"and {n - ROWS} more, all in the JSON; " if n > ROWS else ""
        ids, targets = answers["top_id"].transpose("prompt", "layer", "rank"), answers["target_id"].values
        probabilities = np.exp(answers["target_logprob"].isel(layer=-1).values)

        def since(row: int, k: int) -> str:
            layer = first_appearance(ids[row], int(targets[row]), k)
            return "never" if layer is None else f"layer {layer}"

        return Table.of(
            enumerate(answers["prompt"].values[:ROWS].tolist()),
            ("prompt", lambda one: format_text(self.texts[one[1]])),
            ("answer", lambda one: format_token(self.words[one[1]])),
            (f"top {TOP} from", lambda one: since(one[0], TOP), str),
            ("top 1 from", lambda one: since(one[0], 1), str),
            ("at the end", lambda one: float(probabilities[one[0]]), format_probability),
            title=f"Answers: the most likely token at the end of {best} of {n} prompts",
            caption=f"{more}a multi-token answer is tracked by its first token",
        )
