"""How well does the model do, and is it whole? Loss on text, induction, order of layers, facts.

Four things are measured (stages/evaluation), each beside a control of the same tokens:

* text: loss in nats per token, beside that of the same prompts with their tokens shuffled, and of uniform
  guessing;
* induction: loss on random tokens that are repeated, where they stand the second time, beside that of the
  same tokens with the repetition shuffled;
* order: loss with two layers in each other's place. Of a trained model each such exchange costs something;
  one that gains by one has its layers mixed up, however fluent it is;
* facts: whether prompts of facts are continued by their objects rather than by those of other facts.

With `zero` or `dictionary` all but the order is measured a second time of the changed model: hook points set
to zero, or a dictionary's reconstructions in place of what it writes. These are measurements; that they are
special to what was changed is not claimed.

What is claimed is an effect over prompts beside its means under random signs, or of facts under answers that
change places.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..stages.causal.controls import Null, interval, random_signs
from ..stages.evaluation.loss import CorpusLoss, over_spans
from ..stages.evaluation.order import LayerOrders, swaps
from ..stages.evaluation.recall import FactualRecall
from ..stages.forward.architectures.points import expand
from ..stages.forward.hooks.interventions import Zero
from ..stages.forward.hooks.spec import HookSpec
from ..store.errors import ConfigError
from .character_count_helix import line_corpus
from .head_detection import ordinary_tokens, repeated_tokens, shuffled, special_prefix
from .material.fact_pairs import FIELDS, read_records
from .sae_features import dictionary_of
from .settings import ControlSettings, Count, ModelSettings, Natural, setting
from .subject import read_texts, shipped_facts
from .views import Finding, Findings, Lines, Table, View, together
from .workflow import ModelWorkflow

if TYPE_CHECKING:
    import xarray as xr

    from ..pipeline.nodes import ResultNode
    from ..stages.evaluation.changed import Prompts
    from ..store.arrays import Floats

__all__ = ["Evaluate", "EvaluateSettings"]

CONTEXT = 128
"""Tokens of a prompt of text at most, by default."""


@dataclass(frozen=True)
class EvaluateSettings(ControlSettings, ModelSettings):
    """What `--set` can change."""

    text: str = setting("", "a text file, or a folder of *.txt; none: the prose shipped with mizarr")
    width: Count = setting(60, "characters of the lines it is wrapped at")
    limit: Count = setting(32, "prompts of text")
    context: Count = setting(CONTEXT, "tokens of such a prompt at most")
    sequences: Count = setting(16, "random sequences that are repeated")
    length: Count = setting(50, "tokens of each before it is repeated")
    swapped: Natural = setting(50, "exchanges of two layers tried at most, on a quarter of the text; 0: none")
    data: str = setting("", "a JSON file of CounterFact records; none: the shipped facts")
    facts: Count = setting(100, "facts asked at most")
    zero: tuple[str, ...] = setting((), "hook points (or globs) set to zero: measured with and without")
    dictionary: str = setting("", "a dictionary whose reconstructions stand in: measured with and without")
    controls: Count = setting(1000, "draws of signs, or of answers, that an effect is held against")

    def __post_init__(self) -> None:
        if self.zero and self.dictionary:
            raise ConfigError("expected zero or dictionary, found both; evaluate one after the other")
        if self.context < 2 or self.length < 2:
            raise ConfigError("expected a context and a length of at least 2 tokens")


class Evaluate(ModelWorkflow):
    """A model, whole or changed, on text, repetitions, and facts."""

    name = "evaluate"
    question = "How well does the model do, and is it whole?"
    settings_type = EvaluateSettings
    settings: EvaluateSettings

    def plan(self) -> Mapping[str, ResultNode]:
        """Losses on all there is, facts, orders of layers; of a changed model a second time."""
        given, config = self.settings, self.subject.config
        if not config.predicts_next:
            raise ConfigError(
                f"evaluate: expected a model that predicts the next token, found {self.subject.name} "
                f"({config.model_type}); name another: model=…"
            )
        text, mixed = self._text()
        repeated, apart = self._repeated()
        prompts, targets = self._facts()
        whole: dict[str, Any] = {
            "text": CorpusLoss(text),
            "shuffled_text": CorpusLoss(mixed),
            "repeated": CorpusLoss(repeated),
            "shuffled_repeats": CorpusLoss(apart),
            "facts": FactualRecall(prompts, targets),
        }
        self.changed = bool(given.zero or given.dictionary)
        if self.changed:
            change = self._change()
            whole |= {
                f"changed_{name}": replace(whole[name], **change)
                for name in ("text", "repeated", "shuffled_repeats", "facts")
            }
        first = int(config.stream_start.kind != "embed")  # such layers hand on what later ones read
        if given.swapped and config.num_layers - first > 1 and config.shares_prefixes:
            orders = swaps(config.num_layers, given.swapped, first=first, seed=given.seed)
            whole["orders"] = LayerOrders(text[: max(8, len(text) // 4)], orders)
        return {name: self.on_model(each) for name, each in whole.items()}

    # -- what is read

    def _text(self) -> tuple[Prompts, Prompts]:
        """Prompts of wrapped text, and the same with their tokens in another order."""
        given = self.settings
        context = min(given.context, self.subject.config.context_length)
        packed = line_corpus(self.subject, read_texts(given.text), (given.width,), context)
        rows = [row.tolist() for row in packed][: given.limit]
        fixed = self.subject.special_tokens
        mixed = [shuffled(row, fixed, max(1, len(row) - fixed), given.seed + i) for i, row in enumerate(rows)]
        return _as_prompts(rows), _as_prompts(mixed)

    def _repeated(self) -> tuple[Prompts, Prompts]:
        """Random blocks, twice over, and the same with the second shuffled."""
        given = self.settings
        prefix = special_prefix(self.subject)
        length = min(given.length, (self.subject.config.context_length - len(prefix)) // 2)
        rows = repeated_tokens(
            ordinary_tokens(self.subject, length),
            prefix,
            sequences=given.sequences,
            length=length,
            repeats=2,
            seed=given.seed,
        )
        start = len(prefix) + length
        self.spans = (max(1, len(prefix)), start), (start + 1, start + length)
        apart = [shuffled(row, start, length, given.seed + i) for i, row in enumerate(rows)]
        return _as_prompts(rows), _as_prompts(apart)

    def _facts(self) -> tuple[Prompts, tuple[int, ...]]:
        given = self.settings
        if given.data:
            told = [(record[FIELDS[0]], record[FIELDS[2]]) for record in read_records(given.data)]
        else:
            told = [(fact["prompt"], fact["target"]) for fact in shipped_facts()]
        told = told[: given.facts]
        prompts = [self.subject.tokenizer.encode(prompt).ids for prompt, _ in told]
        return _as_prompts(prompts), tuple(self.subject.answer_id(*each) for each in told)

    def _change(self) -> dict[str, Any]:
        given = self.settings
        if given.dictionary:
            held = dictionary_of(given.dictionary, given.model, "clt")
            held.require_fit(self.subject.config, self.subject.name)
            return {"dictionary": held.name, "features": held.identity}
        spec = HookSpec()
        for pattern in given.zero:
            for point in expand(pattern, self.subject.config.hook_points):
                spec.intervene(point, Zero())
        return {"hooks": spec}

    # -- what came out

    def _loss(self, name: str) -> float:
        """Nats per token over all prompts of a node."""
        found = self.result(name)
        return float((found["loss"] * found["tokens"]).sum() / found["tokens"].sum())

    def _gain(self, one: str, other: str) -> Floats:
        """By how much less each prompt of `one` loses than the same of `other`, nats per token."""
        found: Floats = self.result(other)["loss"].values - self.result(one)["loss"].values
        return found

    def _paired(self, claim: str, gain: Floats, of: str) -> Finding:
        null = Null(random_signs(gain, self.settings.controls, seed=self.settings.seed), of)
        spread = interval(gain, seed=self.settings.seed)
        return Finding(claim, float(gain.mean()), null, "nats", spread, prompts=len(gain))

    def recall(self, name: str = "facts") -> dict[str, Any]:
        """Share of facts said, median rank, and how much likelier an answer is behind its own prompt."""
        found = self.result(name).load()
        place = np.searchsorted(found["answer"].values, found["target"].values)
        behind = found["logprob"].values[:, place]
        gain = np.diag(behind) - behind.mean(axis=0)
        rng = np.random.default_rng(self.settings.seed)
        each = np.arange(len(behind))
        orders = (rng.permutation(len(behind)) for _ in range(self.settings.controls))
        return {
            "facts": len(behind),
            "said": float((found["rank"] == 0).mean()),
            "median_rank": float(found["rank"].median()),
            "own_logprob": float(np.diag(behind).mean()),
            "other_logprob": float(behind.mean()),
            "gain": gain,
            "draws": np.array([behind[each, order].mean() for order in orders]) - behind.mean(),
        }

    @cached_property
    def orders(self) -> dict[str, Any] | None:
        """What exchanges of two layers cost, by prompt, and whether one gains; None where none was tried."""
        if "orders" not in self.nodes:
            return None
        found = self.result("orders").load()
        loss = found["loss"].transpose("order", "prompt").values
        cost = loss[1:] - loss[0]
        best = int(cost.mean(axis=1).argmin())
        flips = random_signs(cost, self.settings.controls, seed=self.settings.seed).min(axis=1)
        exchanged = np.flatnonzero(found["layers"].values[1 + best] != found["layers"].values[0])
        return {
            "loss": float(loss[0].mean()),
            "costs": cost.mean(axis=1),
            "best": float(cost[best].mean()),
            "by_prompt": cost[best],
            "exchanged": exchanged.tolist(),
            "draws": flips,
            "is_sound": not self._is_better(cost[best], loss[1 + best]),
        }

    def _is_better(self, cost: Floats, loss: Floats) -> bool:
        """Whether an exchange gains, and leaves a model that has learned something: what was never trained
        does better in one order or another, and worse than uniform guessing in all."""
        gains, tells = (interval(each, seed=self.settings.seed)[1] for each in (cost, loss))
        return bool(gains < 0 and tells < math.log(self.subject.config.vocab_size))

    def _findings(self) -> Findings:
        given = self.settings
        signs = "draws of which of the two it was, prompt by prompt"
        found = [
            self._paired(
                "text is told better than its tokens in another order",
                self._gain("text", "shuffled_text"),
                signs,
            ),
            self._paired(
                "random tokens are told better where they are repeated than where the repetition is shuffled",
                self._gain("repeated", "shuffled_repeats"),
                signs,
            ),
        ]
        recalled = self.recall()
        found.append(
            Finding(
                "answers are likelier behind their own prompts than behind those of other facts",
                float(recalled["gain"].mean()),
                Null(recalled["draws"], "exchanges of answers among facts"),
                "nats",
                interval(recalled["gain"], seed=given.seed),
                prompts=recalled["facts"],
            )
        )
        told = ""
        if self.orders is not None:
            one, other = self.orders["exchanged"]
            many = len(self.orders["costs"])
            found.append(
                Finding(
                    f"of {many} exchanges of two layers the cheapest, of {one} and {other}, costs",
                    self.orders["best"],
                    Null(self.orders["draws"], f"draws of signs, each the cheapest of {many}"),
                    "nats",
                    interval(self.orders["by_prompt"], seed=given.seed),
                    prompts=len(self.orders["by_prompt"]),
                )
            )
            if not self.orders["is_sound"]:
                told = (
                    f"the model does better with layers {one} and {other} exchanged: its layers are not in "
                    "the order they were trained in; check how the checkpoint was converted"
                )
        return Findings.of(*found, caption=told, sources=tuple(self.nodes))

    def records(self) -> list[dict[str, Any]]:
        """Each measure, of the model as it is and, where something is changed, of the changed one."""

        def column(prefix: str) -> dict[str, float]:
            first, second = over_spans(self.result(f"{prefix}repeated"), self.spans)
            correct, tokens = (self.result(f"{prefix}text")[name] for name in ("correct", "tokens"))
            recalled = self.recall(f"{prefix}facts")
            return {
                "loss on text": self._loss(f"{prefix}text"),
                "tokens of text said": float((correct * tokens).sum() / tokens.sum()),
                "loss on random tokens": float(first),
                "induction loss": float(second),
                "facts said": recalled["said"],
                "median rank of answers": recalled["median_rank"],
                "log-probability of answers": recalled["own_logprob"],
            }

        whole = column("")
        changed = column("changed_") if self.changed else {}
        units = {"tokens of text said": "share", "facts said": "share", "median rank of answers": "rank"}
        return [
            {
                "measure": name,
                "unit": units.get(name, "nats"),
                "value": value,
                **({"changed": changed[name]} if changed else {}),
            }
            for name, value in whole.items()
        ]

    def views(self) -> Iterator[View]:
        """What is claimed, the measures, and loss by position."""
        yield self._findings()
        model, records = self.subject.name, self.records()
        uniform = math.log(self.subject.config.vocab_size)
        mixed = self._loss("shuffled_text")
        orders = None if self.orders is None else {k: v for k, v in self.orders.items() if k != "draws"}
        what = self.settings.dictionary or ", ".join(self.settings.zero)
        columns: Sequence[tuple[Any, ...]] = (("changed", "changed", ".3f"),) if self.changed else ()
        yield Table.of(
            records,
            ("measure", "measure"),
            ("unit", "unit"),
            (model, "value", ".3f"),
            *columns,
            title=f"What {model} does{f', and with {what} changed' if what else ''}",
            caption=f"uniform guessing loses {uniform:.3f} nats, the text with its tokens "
            f"shuffled {mixed:.3f}",
            json={
                **self.subject.about,
                "measures": records,
                "uniform_loss": uniform,
                "shuffled_text_loss": mixed,
                "order": orders,
                "changed": what or None,
                "facts": {k: v for k, v in self.recall().items() if k not in ("draws", "gain")},
            },
        )
        panels = [
            self._by_position("text", "shuffled_text", "Loss on text, by position"),
            self._by_position("repeated", "shuffled_repeats", "Loss on random tokens that are repeated"),
        ]
        yield from together("evaluate", f"What {model} loses", *panels)

    def _by_position(self, one: str, other: str, title: str) -> Lines:
        import xarray as xr

        shown = {"as it is": one} | ({"changed": f"changed_{one}"} if self.changed else {})
        curves: list[xr.DataArray] = [
            self.result(name)["position_loss"].load() for name in (*shown.values(), other)
        ]
        found = xr.concat(curves, "model", join="outer").assign_coords(model=[*shown, "shuffled"])
        found = found.assign_coords(position=np.arange(found.sizes["position"])).isel(position=slice(1, None))
        found = found.assign_attrs(units="nats", long_name="loss")
        caption = "mean over prompts; shuffled: the same tokens in another order"
        return Lines.of(
            found.transpose("model", "position"),
            title,
            caption,
            control="shuffled",
            sources=(one, other),
            low=0.0,
        )


def _as_prompts(rows: Sequence[Sequence[int]]) -> Prompts:
    return tuple(tuple(int(token) for token in row) for row in rows)


WORKFLOW = Evaluate
