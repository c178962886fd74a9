"""What does the model itself read from a state, when the state is put into another prompt? Patchscopes.

The state after a layer, at the last token of a source prompt, replaces the state of a placeholder in a target
prompt (stages/causal/patchscopes.py; Ghandeharioun et al. 2024, "Patchscopes: A Unifying Framework for
Inspecting Hidden Representations of Language Models"). Two presets:

identity  the target prompt repeats words, "cat -> cat; 1135 -> 1135; hello -> hello; ?" (section 4.1). Is the
          next token of the source prompt read from its state, and earlier than by the logit lens? Sources are
          facts. The measure is the share of prompts whose next token is the most likely one.
entity    the target prompt describes entities, "Syria: Country in the Middle East, ..., x:" (section 4.3),
          and the model describes the entity at whose last token the state was taken. Sources are texts that
          end with an entity. The measure is the log-probability of its kind, such as " Country", as the first
          word of the description; the colon after x makes that word the next token. Descriptions of held-out
          entities are generated for every source layer.

Layers are chosen on half of the prompts and scored on the other half: those with the largest mean lead over
the logit lens (identity), or over states of entities of other kinds (entity). The null is another state in
the same place: that of a held-out prompt with another answer, or of an entity of another kind. States after
the last layer are no candidates by default, as nothing is left to read them. As in other claims about facts,
the identity preset counts facts whose answer the model predicts (material/facts/known.py).

Defaults are smaller for large models (material/sizes.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

import numpy as np

from ...stages.causal.patchscopes import Patchscopes
from ...stages.corpus.positions import phrase_tokens
from ...stages.forward.runs.duration import PassWork
from ...stages.forward.text.prompts import check_prompts
from ...stages.logits.lens import format_text
from ...store.arrays import Array, Floats
from ...store.errors import ConfigError
from ..claim import CandidateEffects, Claim
from ..labelled import labelled, values_of
from ..material.answers import KNOWN, encoded, require_next
from ..material.facts.fact_data import Fact, default_data, facts_of
from ..material.facts.known import CHOSEN_ON, SCORED, KnownWorkflow
from ..material.samples.entities import ENTITIES
from ..material.sizes import FEWEST_FACTS, affordable, spread_layers
from ..settings import Count, DataSettings, ModelSettings, Natural, setting
from ..views import Data, Heatmap, Lines, Table, View, together
from ..workflow import Nodes, loaded

if TYPE_CHECKING:
    import xarray as xr

    from ...store import Store

__all__ = ["PatchscopesSettings", "PatchscopesWorkflow"]

READINGS, TEXTS = "readings", "texts"
"""Names of the nodes, and of their results: all pairs of layers, and descriptions."""
LAYERS, TARGET_LAYERS, PROMPTS = 12, 4, 32
"""Largest numbers, by default, of source layers, of target layers, and of prompts of each half."""
SHOWN = 3
"""Number of held-out entities that are described."""


class TargetPrompt(NamedTuple):
    """Target prompt of a preset, and what its reading is called."""

    prompt: str
    """The prompt."""
    placeholder: str
    """The word whose state is replaced."""
    wanted: str
    """What is read, in words that follow "the"."""
    measure: str
    """Name of the measure, for axes."""
    unit: str
    """Unit of the measure; "" for none."""


PRESETS = {
    "identity": TargetPrompt(
        "cat -> cat; 1135 -> 1135; hello -> hello; ?", "?", "prompt's next token", "share of prompts", ""
    ),
    "entity": TargetPrompt(
        "Syria: Country in the Middle East, Leonardo DiCaprio: American actor, Samsung: South Korean "
        "multinational corporation, x:",
        "x",
        "kind of the entity",
        "log-probability",
        "nats",
    ),
}
"""Target prompts by name of the preset."""


@dataclass(frozen=True)
class PatchscopesSettings(DataSettings, ModelSettings):
    """Settings of the workflow `patchscopes`: source prompts, target prompt, and pairs of layers."""

    preset: Literal["identity", "entity"] = setting(
        "identity", "what the target prompt asks for: the next token, or a description of an entity"
    )
    target_prompt: str = setting("", "prompt in which states are read; none: the preset's")
    placeholder: str = setting("", "word of it whose state is replaced; none: the preset's")
    layers: tuple[int, ...] = setting(
        (), f"candidate layers after which states are taken; none: {LAYERS}, evenly spaced"
    )
    target_layers: tuple[int, ...] = setting(
        (), f"candidate layers after which the placeholder's state is replaced; none: {TARGET_LAYERS}"
    )
    facts: Natural = setting(
        0, f"prompts to choose layers on, and as many held-out ones; 0: {PROMPTS}, or fewer for a large model"
    )
    max_tokens: Count = setting(12, "number of tokens of a description")


class _SourcePrompt(NamedTuple):
    """A prompt whose state is read."""

    text: str
    """The prompt."""
    ids: tuple[int, ...]
    """Its token ids."""
    wanted: int
    """First token of its answer, or of the kind of its entity."""


@dataclass(frozen=True)
class _Scores:
    """What is read from the states of some prompts, for every pair of layers."""

    own: Floats
    """Measure of each prompt's wanted token in its own state, [prompt, layer, target_layer]."""
    others: Floats
    """The same in states of prompts that want another token, [prompt, other, layer, target_layer]."""
    lens: Floats
    """The same in the own state by the logit lens, [prompt, layer]."""


class PatchscopesWorkflow(KnownWorkflow):
    """Workflow that reads states of prompts inside a target prompt, for pairs of layers."""

    name = "patchscopes"
    question = "What does the model read from a state that is put into another prompt?"
    settings_type = PatchscopesSettings
    settings: PatchscopesSettings

    readings = loaded(READINGS)
    """Result of `Patchscopes` on all prompts, in memory."""

    def plan(self) -> Nodes:
        """Node of all pairs of layers on both halves of the prompts; for facts, that of the ranks of answers.

        Raises:
            ConfigError: for a model that does not predict the next token, and too few prompts.
            PromptError: for a placeholder that is not in the target prompt, or a prompt that is too long.
            InterventionError: for layers that do not exist.
        """
        settings, config = self.settings, self.subject.config
        require_next(self.subject)
        self.preset = PRESETS[settings.preset]
        self.is_identity = settings.preset == "identity"
        self.target_prompt = settings.target_prompt or self.preset.prompt
        target = encoded(self.subject, self.target_prompt)
        self.placeholder = settings.placeholder or self.preset.placeholder
        position = phrase_tokens(target, self.placeholder)[-1]
        whole = [*target.ids, *[0] * settings.max_tokens]
        check_prompts([whole], config.vocab_size, config.context_length, self.subject.name)
        layers = settings.layers or spread_layers(config.num_layers, LAYERS)
        target_layers = settings.target_layers or spread_layers(config.num_layers, TARGET_LAYERS)
        prompts = self._prompts()
        # The part of the target prompt before the placeholder is computed once for all states.
        n_layers, n_read = config.num_layers, len(target.ids) - position
        computed = n_read * len(layers) * sum(n_layers - 1 - layer for layer in target_layers)
        one_prompt = PassWork(
            computed + n_layers * float(np.mean([len(prompt.ids) for prompt in prompts])),
            logit_rows=len(layers) * (1 + len(target_layers)),
        ).operations(config)
        half = len(prompts) // 2
        count = settings.facts or affordable(2 * one_prompt, min(half, PROMPTS), least=FEWEST_FACTS)
        # Every other prompt: neighbours in a file are often about the same thing.
        halves = prompts[::2][:count], prompts[1::2][:count]
        if count > half or any(len({prompt.wanted for prompt in part}) < 2 for part in halves):
            raise ConfigError(
                f"expected two halves of {count or 2} prompts, each with different answers, found "
                f"{len(prompts)} prompts; give more with data=FILE, or ask for fewer: facts=2"
            )
        self.sources = [*halves[0], *halves[1]]
        words = {prompt.wanted for prompt in self.sources}
        self.experiment = Patchscopes(
            tuple((prompt.ids, -1) for prompt in self.sources),
            tuple(target.ids),
            position,
            layers=tuple(layers),
            target_layers=tuple(target_layers),
            words=() if self.is_identity else tuple(sorted(words)),
        )
        self.experiment.cells(config)  # raises for layers that do not exist before anything runs
        nodes: Nodes = {READINGS: self.on_model(self.experiment)}
        if not self.is_identity:
            return nodes
        asked = [[(prompt.ids, prompt.wanted, -1) for prompt in part] for part in halves]
        return nodes | self.known_node(dict(zip((CHOSEN_ON, SCORED), asked, strict=True)))

    def _prompts(self) -> list[_SourcePrompt]:
        """Source prompts with the first token of their answer or kind; of equal token ids, the first."""
        subject, data = self.subject, self.settings.data
        if self.is_identity or data:
            facts = facts_of(subject, default_data(subject, data))
        else:
            facts = [Fact(*entity) for entity in ENTITIES]
        # A kind is the answer to the target prompt, not to the source.
        pairs = [(fact.prompt if self.is_identity else self.target_prompt, fact.target) for fact in facts]
        ids = subject.tokenizer.ids_of([fact.prompt for fact in facts], add_special=True)
        prompts: dict[tuple[int, ...], _SourcePrompt] = {}
        for fact, row, wanted in zip(facts, ids, subject.answer_ids(pairs), strict=True):
            if subject.fits(row):
                prompts.setdefault(tuple(row), _SourcePrompt(fact.prompt, tuple(row), wanted))
        return list(prompts.values())

    def first_nodes(self) -> Nodes:
        """See `Workflow`: the readings, which choose the layers of the descriptions."""
        return {} if self.is_identity else {READINGS: self.nodes[READINGS]}

    def settle(self, store: Store, *, refuses: bool = True) -> Self:
        """See `Workflow`: adds descriptions of the first held-out entities, by source layer."""
        super().settle(store, refuses=refuses)
        if not self.is_identity:
            _, target_layer = self._chosen(self.nodes[READINGS].open(store).load())
            half = len(self.sources) // 2
            described = replace(
                self.experiment,
                sources=self.experiment.sources[half : half + SHOWN],
                target_layers=(target_layer,),
                max_tokens=self.settings.max_tokens,
            )
            self.nodes[TEXTS] = self.on_model(described)
        return self

    # -- the claims

    def _members(self, group: str) -> list[int]:
        """Indices of the prompts of a half that count: those that the model knows, if they suffice for
        claims."""
        half = len(self.sources) // 2
        indices = np.arange(half) + (half if group == SCORED else 0)
        if self.is_identity and min(self.known_counts[0].values()) >= KNOWN:
            indices = indices[self.is_known(group)]
        return [int(i) for i in indices]

    def _wanted(self, readings: xr.Dataset, members: list[int]) -> Array:
        """Token that is to be read from the state of each prompt: its next token, or its kind."""
        if self.is_identity:
            return np.asarray(readings["own_id"].values[members])
        return np.array([self.sources[i].wanted for i in members])

    def _scores(self, readings: xr.Dataset, group: str) -> _Scores:
        """Scores of one half of the prompts."""
        members = self._members(group)
        wanted, part = self._wanted(readings, members), readings.isel(source=members)
        axes = ("source", "layer", "target_layer")
        if self.is_identity:
            # [wanted, state, ...]: a state of another prompt may read the same token.
            read = values_of(part["top_id"], *axes)[None] == wanted[:, None, None, None]
            lens = values_of(part["lens_top_id"], *axes[:2])[None] == wanted[:, None, None]
        else:
            words = part.sel(word=wanted)
            read = values_of(words["logprob"], "word", *axes)
            lens = values_of(words["lens_logprob"], "word", *axes[:2])
        differs = wanted[:, None] != wanted[None]
        random, count = np.random.default_rng(self.settings.seed), int(differs.sum(1).min())
        others = [
            row[random.permutation(np.flatnonzero(is_other))[:count]]
            for row, is_other in zip(read.astype(np.float64), differs, strict=True)
        ]
        own = np.arange(len(members))
        return _Scores(read[own, own].astype(np.float64), np.array(others), lens[own, own].astype(np.float64))

    def _lead(self, scores: _Scores) -> Floats:
        """Effect by which layers are chosen, [prompt, layer, target_layer]."""
        compared = scores.lens[:, :, None] if self.is_identity else scores.others.mean(1)
        lead: Floats = scores.own - compared
        return lead

    def _candidates(self, readings: xr.Dataset) -> CandidateEffects:
        """Effects of all pairs of layers, on both halves of the prompts."""
        scored = self._scores(readings, SCORED)
        # A share has a scale of its own; log-probabilities are told relative to those in other states.
        level = np.zeros(1) if self.is_identity else scored.others.mean(1)
        return CandidateEffects(
            self._lead(self._scores(readings, CHOSEN_ON)), scored.own - level, scored.others - level[:, None]
        )

    def _chosen(self, readings: xr.Dataset) -> tuple[int, int]:
        """Source layer and target layer chosen on the first half of the prompts."""
        layer, target_layer = self._candidates(readings).best
        return int(readings["layer"][layer]), int(readings["target_layer"][target_layer])

    @property
    def chosen(self) -> tuple[int, int]:
        """Source layer and target layer chosen on the first half of the prompts."""
        return self._chosen(self.readings)

    @property
    def not_claimed(self) -> str:
        """Reason why nothing is claimed, in a sentence; empty if there are claims."""
        reason = super().not_claimed
        if reason:
            return reason
        for group in (CHOSEN_ON, SCORED):
            if len(set(self._wanted(self.readings, self._members(group)).tolist())) < 2:
                return (
                    f"All facts {group} that the model knows have one answer, so that no state of another "
                    "prompt can be a control and nothing is claimed: give more facts with data=FILE."
                )
        return ""

    @property
    def _cause(self) -> str:
        """The patch of the chosen layers in words."""
        layer, target_layer = self.chosen
        return (
            f"the state after layer {layer} at the last token, put after layer {target_layer} at "
            f"{self.placeholder!r} of the target prompt,"
        )

    def claims(self) -> Iterator[Claim]:
        """Claims about the chosen layers on held-out prompts: against other states in the same place and, for
        the identity prompt, against the logit lens."""
        candidates = self._candidates(self.readings)
        if not self.is_identity:
            yield candidates.claim(
                f"{self._cause} raises the log-probability of the entity's kind, compared with entities of "
                "other kinds",
                candidates.best,
                "the state of an entity of another kind in the same place",
                self.settings,
                unit="nats",
            )
            return
        yield candidates.claim(
            f"{self._cause} is read as the prompt's next token (share of prompts)",
            candidates.best,
            "the state of a prompt with another next token in the same place",
            self.settings,
        )
        lead = self._lead(self._scores(self.readings, SCORED))
        layer, target_layer = candidates.best
        yield Claim.paired(
            f"reading it there finds the next token in more prompts than the logit lens after layer "
            f"{self.chosen[0]} does (difference of shares)",
            lead[:, layer, target_layer],
            "random exchanges of the two readings within prompts",
            self.settings,
            held_out=True,
        )

    def claims_caption(self) -> str:
        """Caption of the claims: how the layers were chosen, and on how many prompts."""
        compared = "the logit lens" if self.is_identity else "states of entities of other kinds"
        count = self.readings.sizes["layer"] * self.readings.sizes["target_layer"]
        caption = (
            f"The layers are those with the largest mean lead over {compared}, chosen among {count} pairs on "
            f"{len(self._members(CHOSEN_ON))} other prompts."
        )
        if self.is_identity:
            caption += " Only facts count whose answer the model predicts."
        return caption

    # -- the views

    def views(self) -> Iterator[View]:
        """Views in reading order: readings by layer, pairs of layers, and readings or descriptions of single
        prompts."""
        readings, preset = self.readings, self.preset
        layer, target_layer = self.chosen
        scores = self._scores(readings, SCORED)
        layers = readings["layer"].values.tolist()
        target_layers = readings["target_layer"].values.tolist()
        column = target_layers.index(target_layer)
        count = len(scores.own)
        yield Data(
            json={
                **self.subject.about,
                "target_prompt": self.target_prompt,
                "placeholder": self.placeholder,
                "chosen_layer": layer,
                "chosen_target_layer": target_layer,
            }
        )
        curves = {
            "target prompt": scores.own[..., column].mean(0),
            "logit lens": scores.lens.mean(0),
            "other states": scores.others[..., column].mean((0, 1)),
        }
        about = (
            f"{preset.measure} of the {preset.wanted}"
            if preset.unit
            else f"{preset.measure} whose next token is read"
        )
        by_layer = Lines.of(
            labelled(list(curves.values()), about, preset.unit or "1", reading=list(curves), layer=layers),
            "Readings by source layer",
            f"x: layer after which the state at the last token is taken. y: {about}, mean over {count} "
            f"held-out prompts. Target prompt: the state is put after layer {target_layer} at "
            f"{self.placeholder!r}. "
            "Other states: those of other prompts in the same place. Logit lens: the state is decoded as if "
            "it were the last layer's.",
            control="other states",
            sources=(READINGS,),
            json={"by_layer": {"layer": layers} | {name: row.tolist() for name, row in curves.items()}},
        )
        pairs = labelled(
            scores.own.mean(0), about, preset.unit or "1", layer=layers, target_layer=target_layers
        )
        by_pair = Heatmap.of(
            pairs,
            "Pairs of layers",
            f"Each cell: {about} when the state after one layer (row) is put after one layer of the target "
            f"prompt (column), mean over {count} held-out prompts.",
            sources=(READINGS,),
            json={"by_pair": pairs},
        )
        title = f"States of {self.subject.name}, read in '{format_text(self.target_prompt)}'"
        yield from together("patchscopes", title, by_layer, by_pair, beside=[self.findings])
        yield self._tokens_table() if self.is_identity else self._texts_table()

    def _tokens_table(self) -> Table:
        """Table of the tokens read from the states of held-out prompts at the chosen layers."""
        layer, target_layer = self.chosen
        members = self._members(SCORED)
        read = self.readings.isel(source=members).sel(layer=layer, target_layer=target_layer)
        columns = [
            self.subject.token_labels(read[name].values) for name in ("own_id", "top_id", "lens_top_id")
        ]
        kl = read["kl"].values.tolist(), read["lens_kl"].values.tolist()
        names = ("prompt", "next", "read", "lens", "kl", "lens_kl")
        prompts = [self.sources[i].text for i in members]
        rows = [dict(zip(names, row, strict=True)) for row in zip(prompts, *columns, *kl, strict=True)]
        return Table.of(
            rows,
            ("prompt", lambda row: format_text(row["prompt"])),
            ("next token", "next"),
            ("target prompt", "read"),
            ("logit lens", "lens"),
            ("KL", "kl", ".2f"),
            ("KL of the lens", "lens_kl", ".2f"),
            title=f"Next tokens read from the states after layer {layer}",
            caption="One row per held-out prompt. Next token: the model's own. Target prompt: most likely "
            f"token when the state is put after layer {target_layer} at {self.placeholder!r}. Logit lens: "
            "most likely token when the state is decoded as if it were the last layer's. KL: between the "
            "model's own next-token distribution and the one that is read, in nats.",
            sources=(READINGS,),
            json={"read": rows},
        )

    def _texts_table(self) -> Table:
        """Table of the descriptions generated from the states of held-out entities, by source layer."""
        _, target_layer = self.chosen
        texts = self.result(TEXTS)["text"].sel(target_layer=target_layer).load()
        half = len(self.sources) // 2
        rows = [
            {"prompt": self.sources[half + number].text, "layer": int(layer), "description": text.item()}
            for number, row in enumerate(texts.transpose("source", "layer"))
            for layer, text in zip(texts["layer"].values, row, strict=True)
        ]
        return Table.of(
            rows,
            ("prompt", lambda row: format_text(row["prompt"])),
            ("layer", "layer", "d"),
            ("description", lambda row: format_text(row["description"])),
            title="Descriptions generated from states of held-out entities",
            caption="One row per entity and source layer. Description: what the model writes after the "
            "target prompt when the state after the layer, at the last token of the prompt, is put after "
            f"layer {target_layer} at {self.placeholder!r}.",
            sources=(TEXTS,),
            json={"descriptions": rows},
        )
