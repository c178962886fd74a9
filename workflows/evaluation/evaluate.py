"""How good are the model's predictions, and what does an intervention cost?

Loss on text, induction, order of layers, facts.

Four measures (stages/evaluation), each compared with a control on the same tokens:

* text: loss in nats per token, compared with the same prompts with shuffled tokens, and with uniform
  guessing;
* induction: loss on the repetition of random tokens, compared with a shuffled repetition;
* order: loss with two layers exchanged. In a trained model every exchange raises the loss; if one lowers it,
  the layers of the checkpoint are in the wrong order, even if the model writes fluent text;
* facts: log-probability of each fact's object after its own prompt, compared with the prompts of other facts.

With `zero`, `mean` or `dictionary` everything but the order is also measured with an intervention: hook
points set to zero, hook points set to their mean over text that is not scored, or a dictionary's
reconstructions in place of the original outputs. The means are taken over as many further prompts of the text
as are scored and are used for text, repetitions and facts. Special tokens in front of a prompt, and the first
token in any case, are left out of the means and keep their values; so they do with a dictionary.

Nulls: for text and induction, the mean effect over prompts with random signs; for facts, answers exchanged
among facts; for the cost of an intervention, up to `draws` interventions of equal size, which are the same
kinds of hook points in other layers (stages/evaluation/layer_controls.py), or, for a dictionary, errors of
equal norm in random directions (random_errors.py; Gurnee 2024). With fewer than 19 controls no p-value can
reach 0.05, so their costs are listed and nothing is claimed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.causal.controls import CHANCE, Null, interval, random_signs
from ...stages.causal.draws import Draws
from ...stages.evaluation.loss import CorpusLoss, over_spans
from ...stages.evaluation.order import LayerOrders, swaps
from ...stages.evaluation.recall import FactualRecall
from ...stages.forward.models.files import SHIPPED
from ...stages.forward.runs.duration import PassWork
from ...store.errors import ConfigError
from ..claim import Claim
from ..general_facts import general_facts
from ..labelled import stacked, values_of
from ..material.facts.fact_data import FIELDS, read_records
from ..material.line_corpus import line_corpus
from ..material.samples.repeated import RepeatedBlocks, shuffled
from ..material.sizes import affordable
from ..settings import AtLeastTwo, ControlSettings, Count, ModelSettings, Natural, setting
from ..subject import read_texts, shipped_facts
from ..views import Lines, Table, View, together
from ..workflow import ModelWorkflow, Nodes
from .changed import Change, averaged, reconstructed, zeroed

if TYPE_CHECKING:
    import xarray as xr

    from ...stages.evaluation.changed import Prompts
    from ...store.arrays import Floats

__all__ = ["Evaluate", "EvaluateSettings"]

SWAPPED = 50
"""Largest number of exchanges of two layers by default."""
CONTEXT = 128
"""Default for the largest number of tokens of a prompt of text."""
LEAST = math.ceil(1 / CHANCE) - 1
"""Smallest number of draws with which a p-value, at least 1 / (draws + 1), can be at most `CHANCE`."""
COSTS = {
    "loss on text": ("text", 1),
    "induction loss": ("repetitions", 1),
    "log-probability of answers": ("facts", -1),
}
"""Measures with a cost -> (name of the cost in JSON, sign). Cost in nats: sign * (value with the intervention
- value of the unchanged model)."""
COST_NAMES = {
    "text": "text",
    "repetitions": "repeated random tokens",
    "facts": "the answers of facts",
}
"""Tokens on which each cost is measured, in words that follow "loss on" in claims."""


@dataclass(frozen=True)
class EvaluateSettings(ControlSettings, ModelSettings):
    """Settings of the workflow `evaluate`: text, facts, and the intervention whose cost is measured.

    Raises:
        ConfigError: for more than one of `zero`, `mean` and `dictionary`.
    """

    text: str = setting("", "file, folder or glob of texts; none: the prose shipped with mizarr")
    width: Count = setting(60, "line width at which the text is wrapped, in characters")
    limit: Count = setting(32, "largest number of prompts of text")
    context: AtLeastTwo = setting(CONTEXT, "largest number of tokens of a prompt of text")
    sequences: Count = setting(16, "number of random sequences")
    length: AtLeastTwo = setting(50, "number of tokens of a random sequence before it is repeated")
    swapped: Natural | None = setting(
        None,
        "largest number of exchanges of two layers, measured on a quarter of the text; 0: none; none: "
        f"{SWAPPED}, or fewer for a large model",
    )
    data: str = setting(
        "",
        "JSON file of CounterFact records; none: the shipped facts for a model that ships with mizarr, the "
        "general facts for others",
    )
    facts: Count = setting(100, "largest number of facts")
    zero: tuple[str, ...] = setting(
        (), "hook points (or globs) to set to zero; everything is measured with and without"
    )
    mean: tuple[str, ...] = setting(
        (), "hook points (or globs) to set to their mean over text that is not scored"
    )
    dictionary: str = setting("", "dictionary whose reconstructions replace the original outputs")
    draws: Count = setting(20, "number of control interventions with which the cost is compared")
    controls: Natural = setting(
        1000, "number of draws of random signs or exchanged answers; 0: none, nothing is claimed"
    )

    def __post_init__(self) -> None:
        changes = [name for name in ("zero", "mean", "dictionary") if getattr(self, name)]
        if len(changes) > 1:
            raise ConfigError(
                f"expected one of zero, mean and dictionary, found {' and '.join(changes)}; evaluate one "
                "after the other"
            )


class Evaluate(ModelWorkflow):
    """Workflow that measures a model's loss on text and on repetitions, its recall of facts and the order of
    its layers, with and without an intervention."""

    name = "evaluate"
    question = "How good are the model's predictions, and what does an intervention cost?"
    settings_type = EvaluateSettings
    settings: EvaluateSettings

    def plan(self) -> Nodes:
        """Nodes of losses, recall of facts and layer orders: of the unchanged model, with the intervention,
        and with its controls.

        Raises:
            ConfigError: for a masked language model or a model without a language head, or without text to
                take means over.
        """
        settings, config = self.settings, self.subject.config
        config.require_vocabulary()
        if not config.predicts_next:
            raise ConfigError(
                f"evaluate: expected a model that predicts the next token, found {self.subject.name} "
                f"({config.model_type}); name another: model=…"
            )
        text, mixed, further = self._text()
        repeated, shuffled_repeats = self._repeated()
        prompts, targets = self._facts()
        experiments: dict[str, Any] = {
            "text": CorpusLoss(text),
            "shuffled_text": CorpusLoss(mixed),
            "repeated": CorpusLoss(repeated),
            "shuffled_repeats": CorpusLoss(shuffled_repeats),
            "facts": FactualRecall(prompts, targets),
        }
        self.change = self._change(further)
        if self.change is not None:
            measured = {name: experiments[name] for name in ("text", "repeated", "facts")}
            shuffled_too = {**measured, "shuffled_repeats": experiments["shuffled_repeats"]}
            for name, experiment in shuffled_too.items():
                experiments[f"changed_{name}"] = replace(experiment, **self.change.fields)
            if self.change.control_fields:
                for name, experiment in measured.items():
                    experiments[f"other_{name}"] = Draws(
                        tuple(replace(experiment, **fields) for fields in self.change.control_fields)
                    )
        # In models whose stream does not start at the embedding, later layers read the first layer's output.
        first_swapped = int(config.stream_start.kind != "embed")
        swapped_on = text[: max(8, len(text) // 4)]
        n_swaps = self._affordable_swaps(swapped_on) if settings.swapped is None else settings.swapped
        if n_swaps and config.num_layers - first_swapped > 1 and config.shares_prefixes:
            orders = swaps(config.num_layers, n_swaps, first=first_swapped, seed=settings.seed)
            experiments["orders"] = LayerOrders(swapped_on, orders)
        return {name: self.on_model(experiment) for name, experiment in experiments.items()}

    def _affordable_swaps(self, prompts: Prompts) -> int:
        """Default of the setting `swapped`, the number of pairs of layers to exchange: SWAPPED, or fewer if
        those would take too long (material/sizes.py). Each pair takes a forward pass of all prompts, with
        logits at every position."""
        n_tokens, config = sum(map(len, prompts)), self.subject.config
        work = PassWork(n_tokens * config.num_layers, logit_rows=n_tokens)
        return affordable(work.operations(config), SWAPPED)

    # -- prompts

    def _text(self) -> tuple[Prompts, Prompts, Prompts]:
        """Prompts of wrapped text, the same prompts with shuffled tokens, and as many further prompts that
        are not scored."""
        settings = self.settings
        context = min(settings.context, self.subject.config.context_length)
        packed = line_corpus(self.subject, read_texts(settings.text), (settings.width,), context)
        all_rows = [row.tolist() for row in packed]
        rows, further = all_rows[: settings.limit], all_rows[settings.limit : 2 * settings.limit]
        n_fixed = self.subject.special_tokens  # these stay in front
        mixed = [
            # At least 1: `shuffled` steps through a row by this length, and a step of 0 raises.
            shuffled(row, n_fixed, max(1, len(row) - n_fixed), settings.seed + i)
            for i, row in enumerate(rows)
        ]
        return _as_prompts(rows), _as_prompts(mixed), _as_prompts(further)

    def _repeated(self) -> tuple[Prompts, Prompts]:
        """Prompts of a random block repeated once, and the same prompts with the repetition shuffled."""
        settings, room = self.settings, self.subject.config.context_length - self.subject.special_tokens
        length = min(settings.length, room // 2)
        blocks = RepeatedBlocks.of(self.subject, settings.sequences, length, seed=settings.seed)
        # No token predicts position 0, and nothing announces the repetition: its first token is left out.
        self.spans = (max(1, blocks.prefix), blocks.start), (blocks.start + 1, blocks.start + length)
        return _as_prompts(blocks.rows), _as_prompts(blocks.mixed)

    def _facts(self) -> tuple[Prompts, tuple[int, ...]]:
        """Prompts of facts, and the first token id of each answer."""
        settings = self.settings
        if settings.data:
            prompt_field, _, answer_field, _ = FIELDS
            facts = [(record[prompt_field], record[answer_field]) for record in read_records(settings.data)]
        else:
            # All facts, not only those that the model is known to recall: their recall would be 100 %.
            asked = shipped_facts() if self.subject.files.name in SHIPPED else general_facts()
            facts = [(fact["prompt"], fact["target"]) for fact in asked]
        facts = facts[: settings.facts]
        prompts = self.subject.tokenizer.ids_of([prompt for prompt, _ in facts], add_special=True)
        return _as_prompts(prompts), tuple(self.subject.answer_ids(facts))

    def _change(self, further: Prompts) -> Change | None:
        """Intervention that the settings `zero`, `mean` or `dictionary` define, with its controls; None if
        none is set.

        further: prompts that are not scored, over which means are taken.
        """
        settings = self.settings
        if settings.zero:
            return zeroed(self.subject, settings.zero, settings.draws, settings.seed)
        if settings.mean:
            return averaged(self.subject, settings.mean, further, settings.draws, settings.seed)
        if settings.dictionary:
            return reconstructed(
                self.subject, settings.dictionary, settings.model, settings.draws, settings.seed
            )
        return None

    # -- results

    def _gain(self, name: str, control: str) -> Floats:
        """Loss of the result `control` minus that of the result `name`, in nats per token, [prompt]."""
        return values_of(self.result(control)["loss"] - self.result(name)["loss"])

    def recall(self) -> dict[str, Any]:
        """Factual recall of the unchanged model.

        Returns:
            facts, the number of facts; said, the share whose answer is the most likely next token;
            median_rank of the answers, from 0; own_logprob and other_logprob, mean log-probability of an
            answer after its own prompt and after the prompts of all facts; gain [fact], the difference of
            these for each answer; draws [draw], its mean with answers exchanged among facts. In nats.
        """
        recall = self.result("facts").load()
        after_all, after_own = _answer_logprobs(recall)
        rng = np.random.default_rng(self.settings.seed)
        rows = np.arange(len(after_all))
        # A generator: the orders are used once, one after another.
        orders = (rng.permutation(len(after_all)) for _ in range(self.settings.controls))
        return {
            "facts": len(after_all),
            "said": float((recall["rank"] == 0).mean()),
            "median_rank": float(recall["rank"].median()),
            "own_logprob": float(after_own.mean()),
            "other_logprob": float(after_all.mean()),
            "gain": after_own - after_all.mean(axis=0),
            "draws": np.array([after_all[rows, order].mean() for order in orders]) - after_all.mean(),
        }

    @cached_property
    def orders(self) -> dict[str, Any] | None:
        """Costs of exchanging two layers; None if no exchange was measured.

        Returns:
            loss of the model as loaded; costs [exchange], mean rise of the loss; best, the smallest cost,
            with by_prompt [prompt] and exchanged, its two layers; draws [draw], smallest cost of any exchange
            under random signs; is_sound, whether no exchange improves the model. In nats per token.
        """
        if "orders" not in self.nodes:
            return None
        losses = self.result("orders").load()
        loss = losses["loss"].transpose("order", "prompt").values
        # Order 0 is that of the model as loaded.
        cost = loss[1:] - loss[0]
        best = int(cost.mean(axis=1).argmin())
        flips = random_signs(cost, self.settings.controls, seed=self.settings.seed).min(axis=1)
        exchanged = np.flatnonzero(losses["layers"].values[1 + best] != losses["layers"].values[0])
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
        """Whether the model does better with two layers exchanged: the exchange lowers the loss, to below
        that of uniform guessing, by the upper ends of the 95 % intervals over prompts.

        cost, loss: rise of the loss, and loss with the layers exchanged, in nats per token, [prompt].
        """
        # An untrained model also has a lower loss in some order, but always above that of uniform guessing.
        largest_cost, largest_loss = (interval(values, seed=self.settings.seed)[1] for values in (cost, loss))
        return bool(largest_cost < 0 and largest_loss < math.log(self.subject.config.vocab_size))

    def claims(self) -> Iterator[Claim]:
        """Claims about text, repetitions and facts, about the cost of an intervention, and about the exchange
        of two layers with the smallest cost."""
        signs = "draws with a random sign of the difference in each prompt"
        for text, name, control in (
            (
                "the loss on text is lower than on the same text with shuffled tokens",
                "text",
                "shuffled_text",
            ),
            (
                "the loss on repeated random tokens is lower than on a shuffled repetition",
                "repeated",
                "shuffled_repeats",
            ),
        ):
            yield Claim.paired(text, self._gain(name, control), signs, self.settings, unit="nats")
        recalled, seed = self.recall(), self.settings.seed
        text = (
            "the log-probability of answers is higher after their own prompts than after those of all facts"
        )
        null = "random exchanges of answers among facts"
        yield Claim.against(text, recalled["gain"], recalled["draws"], null, unit="nats", seed=seed)
        yield from self._cost_claims()
        if self.orders is not None:
            count = len(self.orders["costs"])
            text = "exchanging layers {} and {}, the exchange with the smallest cost of {}, raises the loss"
            text = text.format(*self.orders["exchanged"], count)
            null = f"draws of random signs, each with the smallest cost of {count} exchanges"
            cost = self.orders["by_prompt"]
            yield Claim.against(text, cost, self.orders["draws"], null, unit="nats", seed=seed)

    def claims_caption(self) -> str:
        """Reason why the cost of an intervention is not claimed, and a warning if layers are in the wrong
        order."""
        mixed_up = ""
        if self.orders is not None and not self.orders["is_sound"]:
            mixed_up = (
                "The model does better with layers {} and {} exchanged: its layers are not in the order of "
                "training. Check how the checkpoint was converted."
            ).format(*self.orders["exchanged"])
        return " ".join(filter(None, (self._too_few(), mixed_up)))

    def _measures(self, prefix: str = "", **draw: int) -> dict[str, float]:
        """All measures by name, of the unchanged model, the changed model, or a control intervention.

        prefix: of the names of results: "", "changed_" or "other_". draw: `draw=i` for control i of "other_".
        """
        text, repeated, facts = (
            self.result(f"{prefix}{name}").isel(draw).load() for name in ("text", "repeated", "facts")
        )
        loss_before, loss_repeated = over_spans(repeated, self.spans)
        return {
            "loss on text": _weighted(text, "loss"),
            "tokens of text said": _weighted(text, "correct"),
            "loss on random tokens": float(loss_before),
            "induction loss": float(loss_repeated),
            "facts said": float((facts["rank"] == 0).mean()),
            "median rank of answers": float(facts["rank"].median()),
            "log-probability of answers": float(_answer_logprobs(facts)[1].mean()),
        }

    @cached_property
    def control_measures(self) -> list[dict[str, float]]:
        """Measures under each control intervention; empty without an intervention."""
        n_controls = 0 if self.change is None else len(self.change.control_fields)
        return [self._measures("other_", draw=i) for i in range(n_controls)]

    def records(self) -> list[dict[str, Any]]:
        """JSON record of each measure: measure, unit and value; with an intervention also the changed value,
        and the median and 95 % range over the controls."""
        unchanged = self._measures()
        changed = {} if self.change is None else self._measures("changed_")
        units = {"tokens of text said": "share", "facts said": "share", "median rank of answers": "rank"}
        return [
            {
                "measure": name,
                "unit": units.get(name, "nats"),
                "value": value,
                **({"changed": changed[name]} if changed else {}),
                **(self._control_range(name) if self.control_measures else {}),
            }
            for name, value in unchanged.items()
        ]

    def _control_range(self, name: str) -> dict[str, float]:
        """Median and 95 % range of a measure over the control interventions."""
        null = Null(np.array([control[name] for control in self.control_measures]), "control interventions")
        low, high = null.bound()
        return {"others_median": null.median, "others_low_95": low, "others_high_95": high}

    @cached_property
    def costs(self) -> list[dict[str, Any]]:
        """Costs of the intervention, then of each control: records with the intervention's name and its cost
        on text, repetitions and facts, in nats; positive if predictions get worse."""
        assert self.change is not None
        unchanged = self._measures()
        names = (self.change.text, *self.change.control_names)
        measures = (self._measures("changed_"), *self.control_measures)
        return [
            {
                "change": name,
                **{
                    cost: sign * (changed[measure] - unchanged[measure])
                    for measure, (cost, sign) in COSTS.items()
                },
            }
            for name, changed in zip(names, measures, strict=True)
        ]

    def _costs_json(self, change: Change) -> dict[str, Any]:
        """JSON record of the costs of the intervention and of its controls."""
        cost, *controls = self.costs
        return {"unit": "nats", **cost, "others": {"of": change.null, "costs": controls}}

    def _cost_claims(self) -> Iterator[Claim]:
        """Claims that an intervention raises the loss more than its controls; none with fewer than `LEAST`
        controls."""
        if self.change is None or len(self.control_measures) < LEAST:
            return
        cost, *controls = self.costs
        unchanged, changed = (
            _answer_logprobs(self.result(name).load())[1] for name in ("facts", "changed_facts")
        )
        by_prompt = {"text": self._gain("text", "changed_text"), "facts": unchanged - changed}
        for name, _ in COSTS.values():
            fields: dict[str, Any] = {"unit": "nats"}
            if name in by_prompt:  # the effect is a mean over tokens, its interval one over prompts
                spread = interval(by_prompt[name], seed=self.settings.seed)
                fields |= {"spread": spread, "prompts": len(by_prompt[name])}
            text = f"{self.change.text} increases the model's loss on {COST_NAMES[name]}"
            draws = [control[name] for control in controls]
            yield Claim.against(text, cost[name], draws, self.change.null, **fields)

    def _too_few(self) -> str:
        """Caption sentence on the reason for an unclaimed intervention cost; empty for a claimed cost, or
        without an intervention."""
        if self.change is None or len(self.control_measures) >= LEAST:
            return ""
        n_controls = len(self.control_measures)
        if self.settings.draws == n_controls:
            return (
                f"{n_controls} control interventions cannot give a p-value of {CHANCE:g}, so that nothing is "
                f"claimed about the cost of the intervention; set draws to {LEAST} or more."
            )
        choices = (
            f"are {n_controls} other choices" if n_controls > 1 else f"is {n_controls or 'no'} other choice"
        )
        return (
            f"There {choices} of layers to compare the intervention with, and a p-value of {CHANCE:g} needs "
            f"at least {LEAST}, so that nothing is claimed about its cost."
        )

    def views(self) -> Iterator[View]:
        """Views in reading order: table of all measures, table of costs, and loss by position."""
        model, records = self.subject.name, self.records()
        uniform = math.log(self.subject.config.vocab_size)
        mixed = _weighted(self.result("shuffled_text"), "loss")
        settings = self.settings
        changed = settings.dictionary or ", ".join(settings.zero or settings.mean)
        columns, controls_note = self._changed_columns()
        # Draws of null distributions are left out of the JSON document, as they are many.
        orders = None if self.orders is None else _without(self.orders, "draws")
        yield Table.of(
            records,
            ("measure", "measure"),
            ("unit", "unit"),
            (model, "value", ".3f"),
            *columns,
            title=f"Evaluation of {model}{f', unchanged and with {changed} changed' if changed else ''}",
            caption="One row per measure. Losses: means per token. Said: share of tokens or answers that are "
            "the model's most likely next token. Induction loss: on the second occurrence of a block of "
            "random tokens. Answers: the objects of facts, after their prompts. For comparison: the loss of "
            f"uniform guessing is {uniform:.3f} nats; that on the text with shuffled tokens is {mixed:.3f} "
            f"nats.{controls_note}",
            json={
                **self.subject.about,
                "measures": records,
                "uniform_loss": uniform,
                "shuffled_text_loss": mixed,
                "order": orders,
                "changed": changed or None,
                "cost": None if self.change is None else self._costs_json(self.change),
                "facts": _without(self.recall(), "draws", "gain"),
            },
        )
        if self.change is not None and not settings.dictionary:
            yield self._costs_table()
        panels = [
            self._by_position("text", "shuffled_text", "Loss on text, by position"),
            self._by_position("repeated", "shuffled_repeats", "Loss on repeated random tokens, by position"),
        ]
        yield from together("evaluate", f"Loss of {model} by position", *panels)

    def _changed_columns(self) -> tuple[list[tuple[Any, ...]], str]:
        """Table columns for the intervention and its controls, and the end of the caption, which names the
        controls."""
        if self.change is None:
            return [], ""
        columns: list[tuple[Any, ...]] = [("changed", "changed", ".3f")]
        if not self.control_measures:
            return columns, ""
        columns += [
            (f"{len(self.control_measures)} controls", "others_median", ".3f"),
            ("95 % from", "others_low_95", ".3f"),
            ("to", "others_high_95", ".3f"),
        ]
        return columns, f" Controls: median of {len(self.control_measures)} {self.change.null}."

    def _costs_table(self) -> Table:
        """Table of the costs of the intervention (bold) and of each control, largest cost on text first."""
        costs = self.costs
        return Table.of(
            sorted(costs, key=lambda row: -row["text"]),
            ("change", "change"),
            *((f"on {cost}", cost, "+.3f") for cost, _ in COSTS.values()),
            strong=lambda row: row is costs[0],
            title="Cost of the intervention and of its controls",
            caption="One row per intervention: bold, the intervention of the question; the others, controls "
            "of equal size. Cells: mean loss per token with the intervention, minus that of the unchanged "
            "model, in nats. Columns: loss on text, on repetitions of random tokens, and on answers of "
            "facts.",
        )

    def _by_position(self, name: str, control: str, title: str) -> Lines:
        """Curves of the loss by position, unchanged, with the intervention, and on shuffled tokens.

        name, control: results on the tokens and on the shuffled tokens.
        """
        drawn = {"unchanged": name} | ({"changed": f"changed_{name}"} if self.change is not None else {})
        curves = {
            label: self.result(result)["position_loss"].load()
            for label, result in (*drawn.items(), ("shuffled", control))
        }
        loss = stacked("model", curves)
        # No token is predicted at position 0.
        loss = loss.assign_coords(position=np.arange(loss.sizes["position"])).isel(position=slice(1, None))
        loss = loss.assign_attrs(units="nats", long_name="loss")
        caption = (
            "x: position in the prompt. y: loss in nats, mean over prompts. Shuffled: control, the same "
            "tokens in random order."
        )
        return Lines.of(
            loss.transpose("model", "position"),
            title,
            caption,
            control="shuffled",
            sources=(name, control),
            low=0.0,
        )


def _without(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Copy of the fields without the named fields."""
    return {name: value for name, value in fields.items() if name not in names}


def _weighted(losses: xr.Dataset, name: str) -> float:
    """Mean over all tokens of a variable of `CorpusLoss`, which holds the mean over each prompt's tokens,
    [prompt]."""
    return float((losses[name] * losses["tokens"]).sum() / losses["tokens"].sum())


def _answer_logprobs(recall: xr.Dataset) -> tuple[Floats, Floats]:
    """Log-probabilities of answers in a result of `FactualRecall`, in nats: after the prompt of every fact,
    [prompt's fact, answer's fact], and after the answer's own prompt, [fact]."""
    # Answers are stored once, sorted by token id; several facts may have the same one.
    columns = np.searchsorted(recall["answer"].values, recall["target"].values)
    after_all: Floats = recall["logprob"].values[:, columns]
    return after_all, np.diag(after_all)


def _as_prompts(rows: Sequence[Sequence[int]]) -> Prompts:
    """Prompts as tuples of token ids, the form that experiments take."""
    return tuple(tuple(int(token) for token in row) for row in rows)
