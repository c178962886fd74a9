"""At which layer can the next token be read from the residual stream? The logit lens over a list of prompts.

Captures the residual stream after every layer, applies the model's own final norm and unembedding to each
(stages/logits/lens.py), and lists rank and probability of each prompt's answer by layer.

Defaults: the facts that ship with the specimen. Of an answer of several tokens the first one is tracked; it
is found by encoding prompt and answer together, as a word alone may be encoded differently.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.forward.models.files import SHIPPED
from ...stages.forward.runs.duration import PassWork
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
from ..material.sizes import affordable
from ..settings import AnswerSettings, Count, Natural, setting
from ..subject import answered
from ..views import Choice, Data, Figure, Lens, Line, Lines, Table, View, dim, together
from ..workflow import ModelWorkflow, Nodes, loaded

if TYPE_CHECKING:
    import xarray as xr

    from ...store import PackedTokens

__all__ = ["LogitLens", "LogitLensSettings"]

TOP = 10
"""Rank up to which an answer counts as readable at a layer (candle-mi's `first_appearance`)."""
ROWS = 12
"""Number of prompts listed in the table of answers and selectable on a page."""
TOKENS = 10
"""Approximate number of tokens of a fact, for the estimate of what the lens costs."""
LINES = 60
"""Largest number of prompts that are drawn as single curves; of more prompts, quantiles are drawn."""


@dataclass(frozen=True)
class LogitLensSettings(AnswerSettings):
    """Settings of the workflow `logit_lens`: the prompts, their answers, and what is stored of each decoded
    distribution."""

    top_k: Count = setting(10, "number of most likely tokens stored per layer and position")
    limit: Natural = setting(0, "largest number of facts read by default; 0: by the size of the model")
    soft_cap: bool = setting(True, "apply the model's final soft cap, if it has one")
    heatmaps: Natural = setting(2, "number of prompts that get a figure of their own")


class LogitLens(ModelWorkflow):
    """Workflow of the logit lens: decodes the residual stream after every layer with the model's final norm
    and unembedding."""

    name = "logit_lens"
    question = "At which layer can the next token be read from the residual stream?"
    descriptive = "The state after each layer, decoded as if it were the last layer's."
    settings_type = LogitLensSettings
    settings: LogitLensSettings

    lens = loaded("lens")
    """Result of `logit_lens` for all tokens of all prompts, in memory: top_id and top_logprob [layer, token,
    rank], entropy, kl and target values [layer, token]."""

    def plan(self) -> Nodes:
        """Nodes of the lens on the residual stream after every layer, and of the model's readout."""
        settings = self.settings
        limit = settings.limit or (0 if settings.prompts else self._affordable_facts)
        self.texts, self.words = answered(self.subject, settings.prompts, settings.answers, limit)
        # A masked model is asked at a mask, which is appended to prompts without one.
        self.texts = tuple(map(self.subject.asked, self.texts))
        tokens = self.subject.pack(self.texts)
        self.ends = [self.subject.read_at(ids.tolist()) for ids in tokens]
        states = self.subject.capture(tokens, "blocks.*.hook_resid_post")["resid_post"]
        readout = readout_node(self.subject.files, dtype=self.subject.dtype)
        options: dict[str, Any] = {"top_k": settings.top_k, "soft_cap": settings.soft_cap}
        lens = logit_lens.on(resid_post=states, targets=self._targets(tokens), readout=readout, **options)
        return {"lens": lens, "readout": readout}

    @property
    def _affordable_facts(self) -> int:
        """Default number of facts: 0 (all facts) for a model shipped with mizarr; for other models as many
        facts as the lens decodes after every layer in about a minute."""
        if self.subject.files.name in SHIPPED:
            return 0
        states = float(TOKENS * self.subject.config.num_layers)
        per_fact = PassWork(states, logit_rows=states).operations(self.subject.config)
        return affordable(per_fact, len(self.subject.facts))

    def _targets(self, tokens: PackedTokens) -> xr.DataArray:
        """Target token id of each token, int [token]: the next token of the prompt, and at the end of the
        prompt the answer, or -1 without one. In masked models the token itself, and at the mask the
        answer."""
        # With a mask shift, logits at a position predict the next one, as in a model that predicts next
        # tokens.
        if self.subject.config.predicts_next or self.subject.config.mask_shift:
            targets = next_tokens(tokens.ids, tokens.prompt_of(slice(None)))
        else:
            targets = np.asarray(tokens.ids, np.int32).copy()
        ends = [tokens.row(i).start + end for i, end in enumerate(self.ends)]
        targets[ends] = (
            self.subject.answer_ids(list(zip(self.texts, self.words, strict=True))) if self.words else -1
        )
        return column(targets, "token", "targets")

    @cached_property
    def vocabulary(self) -> list[str]:
        """Text of each token id."""
        return list(self.result("readout")["token"].values)

    def prompt(self, i: int) -> xr.Dataset:
        """Result of the lens for prompt `i`, with an axis `position` in place of `token`."""
        rows = np.flatnonzero(self.lens["prompt"].values == i)
        # xarray refuses to rename an axis to the name of a label that exists.
        part = self.lens.isel(token=rows).drop_vars(["prompt", "position"], errors="ignore")
        return part.rename(token="position").assign_coords(position=np.arange(len(rows)))

    def answers(self) -> xr.Dataset:
        """Lens result at the last token or mask of every prompt with an answer, with axis `prompt` instead of
        `token`."""
        prompts = self.lens["prompt"].values
        # Prompts are packed end to end; a new one begins where the index changes.
        starts = np.flatnonzero(np.diff(prompts, prepend=-1))
        last = starts + np.array(self.ends)
        last = last[self.lens["target_id"].values[last] >= 0]
        part = self.lens.isel(token=last).drop_vars(["prompt", "position"], errors="ignore")
        return part.rename(token="prompt").assign_coords(prompt=prompts[last])

    def document(self, i: int) -> dict[str, Any]:
        """JSON document of the lens at the end of prompt `i`, in the field names of candle-mi's example, with
        entropy and KL from the last layer in nats."""
        last = self.prompt(i).isel(position=self.ends[i])
        document: dict[str, Any] = {**self.subject.about, "prompt": self.texts[i]}
        if self.words:
            appears = first_appearance(last["top_id"], int(last["target_id"]), TOP)
            document |= {
                "answer": self.words[i],
                "answer_token_id": int(last["target_id"]),
                "answer_first_top10": appears,
            }
            if self.words[i].strip() == "Paris":  # the field that candle-mi's example has
                document["paris_first_top10"] = appears
        document["layers"] = [self._layer(last.isel(layer=row)) for row in range(last.sizes["layer"])]
        return document

    def _layer(self, row: xr.Dataset) -> dict[str, Any]:
        """JSON record of the predictions at one layer of one position. row: the lens there."""
        ids, probabilities = row["top_id"].values.tolist(), np.exp(row["top_logprob"].values).tolist()
        document = {
            "layer": int(row["layer"]),
            "predictions": [
                {"rank": rank, "token_id": token, "token": self.vocabulary[token], "probability": p}
                for rank, (token, p) in enumerate(zip(ids, probabilities, strict=True), start=1)
            ],
            "entropy": float(row["entropy"]),
            "kl_from_last": float(row["kl"]),
        }
        if int(row["target_id"]) >= 0:
            document |= {
                "answer_rank": int(row["target_rank"]),
                "answer_probability": float(np.exp(row["target_logprob"])),
            }
        return document

    @property
    def summary(self) -> str:
        """See `Workflow`: first layers at which answers are among the most likely tokens; empty without
        any."""
        answers = self.answers()
        rank, n = answers["target_rank"].transpose("layer", "prompt").values, answers.sizes["prompt"]
        parts = []
        for k, name in ((TOP, f"among the {TOP} most likely tokens"), (1, "the most likely token")):
            is_reached = (rank <= k).any(axis=0)
            if is_reached.any():
                first = answers["layer"].values[(rank <= k).argmax(axis=0)[is_reached]]
                over = f" (median of {is_reached.sum()} of {n} prompts)" if n > 1 else ""
                parts.append(f"{name} first after layer {np.median(first):g}{over}")
        return f"The answer is {' and '.join(parts)}." if parts else ""

    def views(self) -> Iterator[View]:
        """Views in reading order: the lens on each of the first prompts, and rank and probability of all
        answers by layer."""
        yield Data(json={"results": lambda: [self.document(i) for i in range(len(self.texts))]})
        title = f"Logit lens: most likely next token after each layer of {self.subject.name}"
        texts = self.texts[:ROWS]
        lenses = [Lens.of(self.prompt(i), self.vocabulary, title="") for i in range(len(texts))]
        yield Choice(
            title=title,
            caption="Each cell: the most likely token when the residual stream after one layer (row), at one "
            "position (column), is decoded with the model's own final norm and unembedding. This shows what "
            "can be decoded, not what later layers use. Click a cell to pin it.",
            sources=("lens", "readout"),
            name="prompt",
            options=tuple(zip(map(format_text, texts), lenses, strict=True)),
        )
        for i, lens in enumerate(lenses[: self.settings.heatmaps]):
            frames = " Framed: the token that does come next in the prompt." if any(lens.target) else ""
            caption = (
                "Each cell: the most likely token when the residual stream after one layer (row), at one "
                "position (column), is decoded with the final norm and unembedding. Shade: its "
                f"probability.{frames}"
            )
            yield Figure(name=f"logit_lens_{i}", title=title, caption=caption, panels=(lens,))
        answers = self.answers()
        if answers.sizes["prompt"] > 1:
            yield from self._curves(answers)
        yield self._layers_table(0)
        if answers.sizes["prompt"]:
            yield self._answers_table(answers)

    def _curves(self, answers: xr.Dataset) -> Iterator[View]:
        """Views of the probability of the answers by layer, and of the share of prompts with the answer among
        the most likely tokens."""
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
            # More names than three would overlap at the right end.
            best = np.argsort(-probability[-1])[:3].tolist()
            ends = {i: f"{words[i]} {format_probability(probability[-1, i])}" for i in best}
            lines = [Line(ends.get(i, ""), row, faint=True) for i, row in enumerate(probability.T)]
            drawn = f"Thin: {len(words)} prompts; thick: their median"
        else:
            lines = [
                Line("", median, faint=True, band=np.percentile(probability, ends, axis=1))
                for ends in ((5, 95), (25, 75))
            ]
            drawn = f"{len(words)} prompts: median (line), middle 50 % and middle 90 % (bands)"
        curves = Lines(
            title="Probability of the answer by layer",
            caption="x: layer. y: probability of the answer when the residual stream after the layer is "
            f"decoded at the {where}. {drawn}.",
            y_name="probability of the answer",
            lines=(*lines, Line("median", median, strong=True)),
            **by_layer,
        )
        ranks = Lines(
            title="Answer among the most likely tokens by layer",
            caption=f"x: layer whose residual stream is decoded at the {where}. y: share of prompts whose "
            "answer is among the 10 most likely tokens, among the 5, or the single most likely one.",
            y_name="share of prompts",
            lines=shares,
            filled=True,
            **by_layer,
        )
        title = f"Answers decoded from each layer of {self.subject.name}"
        yield from together("logit_lens_answers", title, curves, ranks)

    def _layers_table(self, i: int) -> Table:
        """Table of the most likely tokens at the end of prompt `i`, from the last layer to the first."""
        layers = self.document(i)["layers"]

        def token(k: int, layer: dict[str, Any]) -> Any:
            prediction = layer["predictions"][k]
            return f"{format_token(prediction['token'])} ", dim(format_probability(prediction["probability"]))

        rank_names = ("most likely", "2nd", "3rd", "4th")[: len(layers[0]["predictions"])]
        return Table.of(
            reversed(layers),
            ("layer", "layer", "d"),
            *((name, partial(token, k)) for k, name in enumerate(rank_names)),
            ("entropy", "entropy", ".2f"),
            ("KL", "kl_from_last", ".2f"),
            title=f"Next tokens decoded after each layer of {self.subject.name}: "
            f"'{format_text(self.texts[i])}' …",
            caption="One row per layer: the most likely next tokens, with their probabilities, when the "
            "residual stream after that layer is decoded at the end of the prompt. Entropy: of the decoded "
            "distribution, in nats. KL: of this distribution from that of the last layer, in nats.",
        )

    def _answers_table(self, answers: xr.Dataset) -> Table:
        """Table of the first layer at which the answer of each prompt is among the most likely tokens."""
        n = answers.sizes["prompt"]
        # Ranks of the lens count from 1.
        best = (answers["target_rank"].isel(layer=-1) == 1).values.sum()
        more = f" {n - ROWS} more prompts are in the JSON document." if n > ROWS else ""
        ids, targets = answers["top_id"].transpose("prompt", "layer", "rank"), answers["target_id"].values
        probabilities = np.exp(answers["target_logprob"].isel(layer=-1).values)

        def since(row: int, k: int) -> str:
            layer = first_appearance(ids[row], int(targets[row]), k)
            return "never" if layer is None else f"layer {layer}"

        return Table.of(
            enumerate(answers["prompt"].values[:ROWS].tolist()),
            ("prompt", lambda row: format_text(self.texts[row[1]])),
            ("answer", lambda row: format_token(self.words[row[1]])),
            (f"top {TOP} from", lambda row: since(row[0], TOP), str),
            ("top 1 from", lambda row: since(row[0], 1), str),
            ("P, last layer", lambda row: float(probabilities[row[0]]), format_probability),
            title=f"The answer is the model's most likely token in {best} of {n} prompts",
            caption=f"One row per prompt.{more} Top {TOP} from: first layer whose decoded residual stream "
            f"has the answer among its {TOP} most likely tokens. Top 1 from: the first one with the answer "
            "as the most likely token. P, last layer: probability of the answer in the model's own "
            "prediction. Of an answer of several tokens, the first one is tracked.",
        )
