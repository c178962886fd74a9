"""How good are the model's predictions, and what does an intervention cost?

Loss on text, induction, order of layers, facts.

Four things are measured (stages/evaluation), each beside a control of the same tokens:

* text: loss in nats per token, beside that of the same prompts with their tokens shuffled, and of uniform
  guessing;
* induction: loss on random tokens that are repeated, where they stand the second time, beside that of the
  same tokens with the repetition shuffled;
* order: loss with two layers in each other's place. Of a trained model each such exchange costs something;
  one that gains by one has its layers mixed up, however fluent it is;
* facts: whether prompts of facts are continued by their objects rather than by those of other facts.

With `zero`, `mean` or `dictionary` all but the order is measured a second time of the changed model: hook
points set to zero, or to their mean over text that is not scored, or a dictionary's reconstructions in place
of what it writes. Means are over all tokens of as many further prompts of the text, the same for text,
repetitions and facts; special tokens before a prompt, and any first token, count in no mean and keep what
they hold, as they do under a dictionary.

What is claimed is an effect over prompts beside its means under random signs, or of facts under answers that
change places; and what a change costs beside `draws` others of its size: hook points set to zero, or their
mean, beside the same kinds in as many other layers (stages/evaluation/layer_controls.py), reconstructions
beside errors as long in random directions (random_errors.py; Gurnee 2024). Where fewer than 19 others are
known, from which nothing could be told from chance, their costs are listed and nothing is claimed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.causal.controls import CHANCE, Null, interval, random_signs
from ...stages.causal.draws import Draws
from ...stages.evaluation.loss import CorpusLoss, over_spans
from ...stages.evaluation.order import LayerOrders, swaps
from ...stages.evaluation.recall import FactualRecall
from ...store.errors import ConfigError
from ..claim import Claim
from ..labelled import stacked, values_of
from ..material.facts.fact_data import FIELDS, read_records
from ..material.samples.repeated import RepeatedBlocks, shuffled
from ..readout.character_count_helix import line_corpus
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

CONTEXT = 128
"""Tokens of a prompt of text at most, by default."""
LEAST = math.ceil(1 / CHANCE) - 1
"""Draws that a null needs before anything can be beyond chance."""
COSTS = {
    "loss on text": ("text", 1),
    "induction loss": ("repetitions", 1),
    "log-probability of answers": ("facts", -1),
}
"""Measure of what a change costs -> where, and the sign by which more of it is worse."""


@dataclass(frozen=True)
class EvaluateSettings(ControlSettings, ModelSettings):
    """What `--set` can change.

    Raises ConfigError for several of zero, mean and dictionary.
    """

    text: str = setting("", "file, folder or glob of texts; none: the prose shipped with mizarr")
    width: Count = setting(60, "characters of the lines it is wrapped at")
    limit: Count = setting(32, "prompts of text")
    context: AtLeastTwo = setting(CONTEXT, "tokens of such a prompt at most")
    sequences: Count = setting(16, "random sequences that are repeated")
    length: AtLeastTwo = setting(50, "tokens of each before it is repeated")
    swapped: Natural = setting(50, "exchanges of two layers tried at most, on a quarter of the text; 0: none")
    data: str = setting("", "a JSON file of CounterFact records; none: the shipped facts")
    facts: Count = setting(100, "facts asked at most")
    zero: tuple[str, ...] = setting((), "hook points (or globs) set to zero: measured with and without")
    mean: tuple[str, ...] = setting((), "the same set to their mean over text that is not scored")
    dictionary: str = setting("", "a dictionary whose reconstructions stand in: measured with and without")
    draws: Count = setting(20, "changes of equal size that what a change costs is held against")
    controls: Natural = setting(
        1000, "draws of signs, or of answers, that an effect is held against; 0: none, nothing is claimed"
    )

    def __post_init__(self) -> None:
        changes = [name for name in ("zero", "mean", "dictionary") if getattr(self, name)]
        if len(changes) > 1:
            raise ConfigError(
                f"expected one of zero, mean and dictionary, found {' and '.join(changes)}; evaluate one "
                "after the other"
            )


class Evaluate(ModelWorkflow):
    """A model, whole or changed, on text, repetitions, and facts."""

    name = "evaluate"
    question = "How good are the model's predictions, and what does an intervention cost?"
    settings_type = EvaluateSettings
    settings: EvaluateSettings

    def plan(self) -> Nodes:
        """Losses on all there is, facts, orders of layers; of a changed model a second time."""
        given, config = self.settings, self.subject.config
        if not config.predicts_next:
            raise ConfigError(
                f"evaluate: expected a model that predicts the next token, found {self.subject.name} "
                f"({config.model_type}); name another: model=…"
            )
        text, mixed, further = self._text()
        repeated, apart = self._repeated()
        prompts, targets = self._facts()
        whole: dict[str, Any] = {
            "text": CorpusLoss(text),
            "shuffled_text": CorpusLoss(mixed),
            "repeated": CorpusLoss(repeated),
            "shuffled_repeats": CorpusLoss(apart),
            "facts": FactualRecall(prompts, targets),
        }
        self.change = self._change(further)
        if self.change is not None:
            measured = {name: whole[name] for name in ("text", "repeated", "facts")}
            for name, each in (*measured.items(), ("shuffled_repeats", whole["shuffled_repeats"])):
                whole[f"changed_{name}"] = replace(each, **self.change.fields)
            if self.change.others:
                for name, each in measured.items():
                    whole[f"other_{name}"] = Draws(tuple(replace(each, **f) for f in self.change.others))
        first = int(config.stream_start.kind != "embed")  # such layers hand on what later ones read
        if given.swapped and config.num_layers - first > 1 and config.shares_prefixes:
            orders = swaps(config.num_layers, given.swapped, first=first, seed=given.seed)
            whole["orders"] = LayerOrders(text[: max(8, len(text) // 4)], orders)
        return {name: self.on_model(each) for name, each in whole.items()}

    # -- what is read

    def _text(self) -> tuple[Prompts, Prompts, Prompts]:
        """Prompts of wrapped text, the same with their tokens in another order, and as many further ones."""
        given = self.settings
        context = min(given.context, self.subject.config.context_length)
        packed = line_corpus(self.subject, read_texts(given.text), (given.width,), context)
        every = [row.tolist() for row in packed]
        rows, further = every[: given.limit], every[given.limit : 2 * given.limit]
        fixed = self.subject.special_tokens
        mixed = [shuffled(row, fixed, max(1, len(row) - fixed), given.seed + i) for i, row in enumerate(rows)]
        return _as_prompts(rows), _as_prompts(mixed), _as_prompts(further)

    def _repeated(self) -> tuple[Prompts, Prompts]:
        """Random blocks, twice over, and the same with the second shuffled."""
        given, room = self.settings, self.subject.config.context_length - self.subject.special_tokens
        length = min(given.length, room // 2)
        blocks = RepeatedBlocks.of(self.subject, given.sequences, length, seed=given.seed)
        self.spans = (max(1, blocks.prefix), blocks.start), (blocks.start + 1, blocks.start + length)
        return _as_prompts(blocks.rows), _as_prompts(blocks.mixed)

    def _facts(self) -> tuple[Prompts, tuple[int, ...]]:
        given = self.settings
        if given.data:
            facts = [(record[FIELDS[0]], record[FIELDS[2]]) for record in read_records(given.data)]
        else:
            facts = [(fact["prompt"], fact["target"]) for fact in shipped_facts()]
        facts = facts[: given.facts]
        prompts = self.subject.tokenizer.ids_of([prompt for prompt, _ in facts], add_special=True)
        return _as_prompts(prompts), tuple(self.subject.answer_ids(facts))

    def _change(self, further: Prompts) -> Change | None:
        """What is changed, and others of its size. further: prompts that are not scored."""
        given = self.settings
        if given.zero:
            return zeroed(self.subject, given.zero, given.draws, given.seed)
        if given.mean:
            return averaged(self.subject, given.mean, further, given.draws, given.seed)
        if given.dictionary:
            return reconstructed(self.subject, given.dictionary, given.model, given.draws, given.seed)
        return None

    # -- what came out

    def _gain(self, one: str, other: str) -> Floats:
        """Loss of `other` minus loss of `one` per prompt, nats per token."""
        return values_of(self.result(other)["loss"] - self.result(one)["loss"])

    def recall(self) -> dict[str, Any]:
        """Share of facts said, median rank, and how much likelier an answer is behind its own prompt."""
        found = self.result("facts").load()
        behind, own = _behind(found)
        rng = np.random.default_rng(self.settings.seed)
        each = np.arange(len(behind))
        orders = (rng.permutation(len(behind)) for _ in range(self.settings.controls))
        return {
            "facts": len(behind),
            "said": float((found["rank"] == 0).mean()),
            "median_rank": float(found["rank"].median()),
            "own_logprob": float(own.mean()),
            "other_logprob": float(behind.mean()),
            "gain": own - behind.mean(axis=0),
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

    def claims(self) -> Iterator[Claim]:
        """What the model does better than under each control, what a change costs, and what the cheapest
        exchange of two layers costs."""
        signs = "draws of which of the two it was, prompt by prompt"
        for text, one, other in (
            ("text is told better than its tokens in another order", "text", "shuffled_text"),
            (
                "random tokens are told better where they are repeated than where the repetition is shuffled",
                "repeated",
                "shuffled_repeats",
            ),
        ):
            yield Claim.paired(text, self._gain(one, other), signs, self.settings, unit="nats")
        recalled, seed = self.recall(), self.settings.seed
        text = "answers are likelier behind their own prompts than behind those of other facts"
        of = "exchanges of answers among facts"
        yield Claim.against(text, recalled["gain"], recalled["draws"], of, unit="nats", seed=seed)
        yield from self._cost_claims()
        if self.orders is not None:
            count = len(self.orders["costs"])
            text = "of {} exchanges of two layers the cheapest, of {} and {}, costs".format(
                count, *self.orders["exchanged"]
            )
            of, cost = f"draws of signs, each the cheapest of {count}", self.orders["by_prompt"]
            yield Claim.against(text, cost, self.orders["draws"], of, unit="nats", seed=seed)

    def claims_caption(self) -> str:
        """Why nothing is claimed of a change, and whether layers are in the order they were trained in."""
        mixed_up = ""
        if self.orders is not None and not self.orders["is_sound"]:
            mixed_up = (
                "the model does better with layers {} and {} exchanged: its layers are not in the order they "
                "were trained in; check how the checkpoint was converted"
            ).format(*self.orders["exchanged"])
        return "; ".join(filter(None, (self._too_few(), mixed_up)))

    def _measures(self, prefix: str = "", **of: int) -> dict[str, float]:
        """All measures of the model or of a changed one. prefix: of the results. of: index of the draw."""
        text, repeated, facts = (
            self.result(f"{prefix}{name}").isel(of).load() for name in ("text", "repeated", "facts")
        )
        first, second = over_spans(repeated, self.spans)
        return {
            "loss on text": _weighted(text, "loss"),
            "tokens of text said": _weighted(text, "correct"),
            "loss on random tokens": float(first),
            "induction loss": float(second),
            "facts said": float((facts["rank"] == 0).mean()),
            "median rank of answers": float(facts["rank"].median()),
            "log-probability of answers": float(_behind(facts)[1].mean()),
        }

    @cached_property
    def others(self) -> list[dict[str, float]]:
        """Measures of the model under each control change."""
        many = 0 if self.change is None else len(self.change.others)
        return [self._measures("other_", draw=number) for number in range(many)]

    def records(self) -> list[dict[str, Any]]:
        """Each measure, of the model as it is and, where something is changed, of the changed one and of
        those changed as much."""
        whole = self._measures()
        changed = {} if self.change is None else self._measures("changed_")
        units = {"tokens of text said": "share", "facts said": "share", "median rank of answers": "rank"}
        return [
            {
                "measure": name,
                "unit": units.get(name, "nats"),
                "value": value,
                **({"changed": changed[name]} if changed else {}),
                **(self._beside(name) if self.others else {}),
            }
            for name, value in whole.items()
        ]

    def _beside(self, name: str) -> dict[str, float]:
        """Of the other changes: median, and between what 95 % of them lie."""
        null = Null(np.array([each[name] for each in self.others]), "other changes")
        low, high = null.bound()
        return {"others_median": null.median, "others_low_95": low, "others_high_95": high}

    @cached_property
    def costs(self) -> list[dict[str, Any]]:
        """What the change costs, and what each other does, in nats: by where, the change itself first."""
        assert self.change is not None
        whole = self._measures()
        names = (self.change.text, *self.change.names)
        return [
            {"change": name, **{where: sign * (each[of] - whole[of]) for of, (where, sign) in COSTS.items()}}
            for name, each in zip(names, (self._measures("changed_"), *self.others), strict=True)
        ]

    def _told_costs(self, change: Change) -> dict[str, Any]:
        own, *others = self.costs
        return {"unit": "nats", **own, "others": {"of": change.of, "costs": others}}

    def _cost_claims(self) -> Iterator[Claim]:
        """Claims that a change costs more than others of its size; none with fewer than LEAST others."""
        if self.change is None or len(self.others) < LEAST:
            return
        own, *others = self.costs
        told, changed = (_behind(self.result(name).load())[1] for name in ("facts", "changed_facts"))
        by_prompt = {"text": self._gain("text", "changed_text"), "facts": told - changed}
        for where, _ in COSTS.values():
            fields: dict[str, Any] = {"unit": "nats"}
            if where in by_prompt:  # the effect is a mean over tokens, its interval one over prompts
                spread = interval(by_prompt[where], seed=self.settings.seed)
                fields |= {"spread": spread, "prompts": len(by_prompt[where])}
            text, draws = f"{self.change.text} costs, on {where}", [other[where] for other in others]
            yield Claim.against(text, own[where], draws, self.change.of, **fields)

    def _too_few(self) -> str:
        """Sentence that says why the cost of a change is not claimed; empty where it is."""
        if self.change is None or len(self.others) >= LEAST:
            return ""
        many = len(self.others)
        if self.settings.draws == many:
            return f"{many} draws cannot tell chance; ask for {LEAST} or more: draws=…"
        others = f"are {many} other choices" if many > 1 else f"is {many or 'no'} other choice"
        return (
            f"there {others} of layers to hold the change against, and {LEAST} are "
            "the fewest that can tell chance: nothing is claimed of its cost"
        )

    def views(self) -> Iterator[View]:
        """What is claimed, the measures, what the change costs, and loss by position."""
        model, records = self.subject.name, self.records()
        uniform = math.log(self.subject.config.vocab_size)
        mixed = _weighted(self.result("shuffled_text"), "loss")
        orders = None if self.orders is None else {k: v for k, v in self.orders.items() if k != "draws"}
        given = self.settings
        what = given.dictionary or ", ".join(given.zero or given.mean)
        columns, beside = self._compared()
        yield Table.of(
            records,
            ("measure", "measure"),
            ("unit", "unit"),
            (model, "value", ".3f"),
            *columns,
            title=f"What {model} does{f', and with {what} changed' if what else ''}",
            caption=f"uniform guessing loses {uniform:.3f} nats, the text with its tokens "
            f"shuffled {mixed:.3f}{beside}",
            json={
                **self.subject.about,
                "measures": records,
                "uniform_loss": uniform,
                "shuffled_text_loss": mixed,
                "order": orders,
                "changed": what or None,
                "cost": None if self.change is None else self._told_costs(self.change),
                "facts": {k: v for k, v in self.recall().items() if k not in ("draws", "gain")},
            },
        )
        if self.change is not None and not given.dictionary:
            yield self._costs_table()
        panels = [
            self._by_position("text", "shuffled_text", "Loss on text, by position"),
            self._by_position("repeated", "shuffled_repeats", "Loss on random tokens that are repeated"),
        ]
        yield from together("evaluate", f"What {model} loses", *panels)

    def _compared(self) -> tuple[list[tuple[Any, ...]], str]:
        """Table columns of the changed model and of other changes, and a sentence for the caption."""
        if self.change is None:
            return [], ""
        columns: list[tuple[Any, ...]] = [("changed", "changed", ".3f")]
        if not self.others:
            return columns, ""
        columns += [
            (f"{len(self.others)} others", "others_median", ".3f"),
            ("95 % from", "others_low_95", ".3f"),
            ("to", "others_high_95", ".3f"),
        ]
        return columns, f"; others: {self.change.of}, median"

    def _costs_table(self) -> Table:
        """What the change costs and what each other does, the dearest on text first."""
        costs = self.costs
        return Table.of(
            sorted(costs, key=lambda row: -row["text"]),
            ("change", "change"),
            *((f"on {where}", where, "+.3f") for where, _ in COSTS.values()),
            strong=lambda row: row is costs[0],
            title="What it costs, and what others do",
            caption="nats more than the model as it is loses",
        )

    def _by_position(self, one: str, other: str, title: str) -> Lines:
        shown = {"as it is": one} | ({"changed": f"changed_{one}"} if self.change is not None else {})
        curves = {
            label: self.result(name)["position_loss"].load()
            for label, name in (*shown.items(), ("shuffled", other))
        }
        found = stacked("model", curves)
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


def _weighted(found: xr.Dataset, name: str) -> float:
    """Mean over all tokens of what `CorpusLoss` gives by prompt."""
    return float((found[name] * found["tokens"]).sum() / found["tokens"].sum())


def _behind(found: xr.Dataset) -> tuple[Floats, Floats]:
    """Log-probability of each fact's answer behind every prompt, [prompt, answer's fact], and behind its own,
    [fact], in nats; of `FactualRecall`."""
    place = np.searchsorted(found["answer"].values, found["target"].values)
    behind: Floats = found["logprob"].values[:, place]
    return behind, np.diag(behind)


def _as_prompts(rows: Sequence[Sequence[int]]) -> Prompts:
    return tuple(tuple(int(token) for token in row) for row in rows)
