"""Which heads and layers does the answer depend on? Ablation of one head, attention layer or MLP at a time.

The output of one head, or of the attention or the MLP of one layer, is replaced
(stages/causal/grids/ablation.py)
- by zero;
- by its mean over reference prompts (Wang et al. 2022, "Interpretability in the Wild", section 2);
- by its value in random other prompts of the same length, "resample ablation" (Chan et al. 2022, "Causal
  scrubbing").

The KL divergence of the next-token distribution from that of the unchanged run measures the size of the
effect; the change of the target's probability measures its direction.

The claim: the head with the largest mean KL on facts that the model knows is scored on held-out facts and in
the prompt shown, against random other heads. With too few known facts nothing is claimed
(material/facts/known.py). Facts are the shipped ones or those of `data`. Default prompt: a shipped fact for a
specimen, a general fact that it knows for other models; default means are over shipped facts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from ...stages.causal.draws import AtOnce
from ...stages.causal.grids.ablation import Ablation
from ...stages.causal.grids.patching_metrics import KL, Metric, Probability
from ...stages.logits.lens import format_probability, format_text
from ...store.arrays import Floats
from ...store.errors import ConfigError
from ..claim import CandidateEffects, Claim
from ..labelled import largest, values_of
from ..material.answers import answer_pieces, encoded, target_json
from ..material.facts.fact_data import Fact, default_data, enough, facts_of, shown_fact
from ..material.facts.known import CHOSEN_ON, SCORED, KnownWorkflow
from ..material.places import in_every_layer
from ..material.sizes import FEWEST_FACTS, affordable, intervention_operations
from ..material.unrelated import Unrelated
from ..settings import Count, DataSettings, FactSettings, Natural, setting
from ..subject import shipped_facts
from ..views import Data, Heatmap, Table, View, points, together
from ..workflow import Nodes, loaded

if TYPE_CHECKING:
    import xarray as xr


__all__ = ["AblationOfEach", "AblationOfEachSettings"]


PARTS = ("attn_out", "mlp_out")
"""Kinds of hook points of the ablation by layer: outputs of attention and of the MLP."""
MANY = 50
"""Number of shipped facts over which the default mean activation is computed for ablations in the displayed
prompt."""
FEW = 8
"""Number of shipped facts over which the mean activation is computed for ablations in each other fact."""
FACTS = 6
"""Largest number of facts to choose the head on by default."""
SAMPLES = 10
"""Largest number of random prompts that each output is resampled from for how=resample; KL is the mean over
them."""
INSTEAD = {
    "mean": "its mean over reference prompts",
    "zero": "zero",
    "resample": f"its value in up to {SAMPLES} random other prompts of the same length",
}
"""Replacement of an ablated output in captions, by value of the setting `how`."""
KL_CAPTION = "KL(unchanged run || ablated run) of the next-token distribution, in nats."
"""Sentence of captions that defines the measured KL."""


@dataclass(frozen=True)
class AblationOfEachSettings(DataSettings, FactSettings):
    """Settings of the workflow `ablation`, which ablates one head, attention layer or MLP at a time.

    Raises:
        ConfigError: `references` are set and `how` is not "mean".
    """

    how: Literal["mean", "zero", "resample"] = setting(
        "mean",
        "replacement of an ablated output: its mean over references, zero, or its value in other prompts",
    )
    references: tuple[str, ...] = setting(
        (), "reference prompts that the mean is computed over; none: shipped facts"
    )
    top: Count = setting(10, "heads listed in the table, largest KL first")
    facts: Natural = setting(
        0,
        "facts to choose the head on, and as many held-out facts to score it on; 0: "
        f"{FACTS}, or fewer for a large model",
    )

    def __post_init__(self) -> None:
        if self.how != "mean" and self.references:
            raise ConfigError(
                f"expected references only with how=mean, found {len(self.references)} with how={self.how}; "
                "leave references out"
            )


class AblationOfEach(KnownWorkflow):
    """Workflow that ablates every head, and the attention and MLP output of every layer, one at a time."""

    name = "ablation"
    question = "Which heads and layers does the answer depend on?"
    settings_type = AblationOfEachSettings
    settings: AblationOfEachSettings
    described: ClassVar[str] = (
        " Nothing is claimed about whole layers: a model has too few of them for a null distribution."
    )
    """Last sentence of the caption of the claims, on what nothing is claimed about."""
    unit: ClassVar[str] = "head"
    """What is ablated, "head" or "expert"; also the name of its axis in results."""

    layers = loaded("layers")
    """Result of ablating the attention and the MLP of every layer, [kind, layer], in memory."""

    @cached_property
    def units(self) -> xr.Dataset:
        """Result of ablating every unit (head or expert) in the displayed prompt, [layer, unit], in
        memory."""
        return self.result(f"{self.unit}s").load()

    def plan(self) -> Nodes:
        """Nodes of the ablations by head and by layer in the displayed prompt, and of ablations by head in
        other facts for the claim."""
        shared = self._shared()
        parts = Ablation(kinds=in_every_layer(self.subject.config, PARTS), over="layer", **shared)
        units = self.on_model(Ablation(**self._grid, **shared))
        return {"heads": units, "layers": self.on_model(parts), **self._fact_nodes(shared["tokens"])}

    def _shared(self) -> dict[str, Any]:
        """Arguments of `Ablation` that the ablations by head and by layer in the displayed prompt have in
        common."""
        settings = self.settings
        self.prompt, self.target = shown_fact(self.subject, settings)
        self.pieces = answer_pieces(self.subject, self.prompt, self.target)
        metrics: tuple[Metric, ...] = (KL(),)
        if self.pieces:
            metrics += (Probability(self.pieces[0]),)
        token_ids = tuple(encoded(self.subject, self.prompt).ids)
        return {
            "tokens": token_ids,
            "metrics": metrics,
            **self._instead(token_ids, self.target, MANY),
        }

    @property
    def _kind(self) -> str:
        """Kind of hook point at which a head is ablated: its output before the output projection."""
        return self.subject.config.read_kind

    @property
    def _grid(self) -> dict[str, Any]:
        """Arguments of `Ablation` that ablate every head or expert, in the layers that have any. Raises
        ConfigError if no layer has."""
        config = self.subject.config
        layers = config.layers_with(self._kind)
        if not layers:
            raise ConfigError(
                f"expected a model with {self.unit}s that can be ablated, found {config.model_type}, which "
                "has none; patch its residual stream instead: activation_patching"
            )
        return {
            "kinds": (self._kind,),
            "over": "head",
            # None is the default for all layers: equal experiments then have equal cache keys.
            "layers": None if len(layers) == config.num_layers else tuple(layers),
        }

    def _fact_nodes(self, prompt_ids: tuple[int, ...]) -> Nodes:
        """Nodes that ablate every head or expert in other facts, [draw = fact, layer, unit], and that measure
        which of these facts the model knows; empty with controls=0.

        Facts that the mean is computed over are left out, and so is the prompt shown, with tokens
        `prompt_ids`."""
        settings = self.settings
        if not settings.controls:
            return {}
        # The first MANY shipped facts are the references of the mean, and are not scored.
        data = default_data(self.subject, settings.data)
        facts = facts_of(self.subject, data)[0 if data else MANY :]
        tokens = ((tuple(self.subject.tokenizer.encode(fact.prompt).ids), fact) for fact in facts)
        fitting = ((ids, fact) for ids, fact in tokens if ids != prompt_ids and self.subject.fits(ids))
        n_facts = settings.facts or self._affordable_facts(len(prompt_ids))
        # Four times as many as are asked for, as prompts of the same tokens count once.
        by_ids = list(dict(islice(fitting, 4 * n_facts)).items())
        facts_used = enough(by_ids, data, 2 * n_facts, f"a {self.unit}")
        self.only_claims = ("facts",)
        questions = [(ids, self.subject.answer_id(*fact[:2]), -1) for ids, fact in facts_used]
        half = len(facts_used) // 2
        units = AtOnce(tuple(self._on_fact(ids, fact) for ids, fact in facts_used))
        ranks_node = self.known_node({CHOSEN_ON: questions[:half], SCORED: questions[half:]})
        return ranks_node | {"facts": self.on_model(units)}

    def _affordable_facts(self, length: int) -> int:
        """Number of facts to choose on by default, for prompts of about `length` tokens."""
        config, n_units = self.subject.config, self.subject.config.axis_sizes[self.unit]
        one_run = intervention_operations(config, length)
        # As many facts are scored as are chosen on.
        return affordable(2 * one_run * config.num_layers * n_units, FACTS, least=FEWEST_FACTS)

    def _on_fact(self, tokens: tuple[int, ...], fact: Fact) -> Ablation:
        """Experiment that ablates every head or expert in another fact."""
        instead = self._instead(tokens, fact.target, FEW)
        return Ablation(**self._grid, tokens=tokens, metrics=(KL(),), **instead)

    @property
    def compared(self) -> list[int]:
        """Indices of the heads or experts that claims compare, into the flattened array [layer, unit]."""
        return list(range(self.units["kl"].size))

    @cached_property
    def lost(self) -> Floats:
        """KL by the ablation of each head or expert in other facts, in nats, [fact, layer, unit]."""
        return values_of(self.result("facts")["kl"], "draw", "layer", self.unit)

    @cached_property
    def candidates(self) -> CandidateEffects:
        """KL by the ablation of each compared head or expert in other facts that the model knows, in nats,
        [fact, unit]."""
        # Facts to choose on are the first half, as in `_fact_nodes`.
        parts = zip(np.split(self.lost, 2), (CHOSEN_ON, SCORED), strict=True)
        chosen_on, scored_on = (
            part[self.is_known(name)].reshape(-1, part[0].size)[:, self.compared] for part, name in parts
        )
        return CandidateEffects(chosen_on, scored_on)

    def claims(self) -> Iterator[Claim]:
        """Claims about the head or expert with the largest mean KL on other facts, on held-out facts and in
        the displayed prompt; then, for comparison, about the one with the smallest."""
        n_units, layers, settings = self.lost.shape[2], self.units["layer"].values, self.settings
        most, least = (self.compared[index[0]] for index in (self.candidates.best, self.candidates.weakest))

        def text(unit: int) -> str:
            where = f"{self.unit} {unit % n_units} of layer {layers[unit // n_units]}"
            return f"ablating {where} changes the next-token distribution (KL)"

        of = f"another {self.unit} of each prompt"
        yield self.candidates.claim(text(most), self.candidates.best, of, settings, unit="nats")
        kl_here = self.units["kl"].transpose("layer", self.unit).values
        prompt = f"in '{format_text(self.prompt)}'"
        # The least effective unit is a negative control: its effect should be no more than chance.
        for unit, before in ((most, prompt), (least, "for comparison")):
            yield Claim.among(
                f"{before}, {text(unit)}",
                kl_here,
                unit,
                f"other {self.unit}s",
                settings,
                candidates=self.compared,
                unit="nats",
                held_out=True,
            )

    def claims_caption(self) -> str:
        """Caption of the claims: how many known facts the units were chosen and scored on."""
        counts, totals = self.known_counts
        return (
            f"The {self.unit} was chosen as the one whose ablation has the largest mean KL "
            f"({float(self.candidates.mean.max()):.3f} nats), on {counts[CHOSEN_ON]} of {totals[CHOSEN_ON]} "
            f"other facts: those that the model answers correctly. It is scored on {counts[SCORED]} held-out "
            f"KL.{self.described}"
        )

    def _instead(self, tokens: tuple[int, ...], target: str, count: int) -> dict[str, Any]:
        """Arguments of `Ablation` that define what replaces an ablated output in one prompt.

        Arguments:
            tokens: token ids of the prompt.
            target: its answer; prompts drawn for how=resample have another one.
            count: number of reference prompts of the mean, or of drawn prompts (at most SAMPLES).
        """
        settings = self.settings
        if settings.how == "zero":
            return {"how": "zero"}
        if settings.how == "mean":
            texts = settings.references or tuple(fact["prompt"] for fact in shipped_facts()[:count])
            references = tuple(tuple(encoded(self.subject, text).ids) for text in texts)
            return {"how": "mean", "references": references}
        # Prompts with the same answer would leave in what the ablation has to remove.
        donor_ids = self._unrelated.to(tokens, min(count, SAMPLES), seed=settings.seed, targets=(target,))
        return {
            "how": "resample",
            "references": tuple(donor_ids),
            "samples": min(count, SAMPLES),
            "seed": settings.seed,
        }

    @cached_property
    def _unrelated(self) -> Unrelated:
        return Unrelated(self.subject)

    def views(self) -> Iterator[View]:
        """Heatmaps of KL and of the change of the target's probability, and a table of the units with the
        largest KL."""
        # With one kind (a model without MLPs in every layer) the result has no axis "kind".
        layers = self.layers if "kind" in self.layers.dims else self.layers.expand_dims("kind")
        names = ["attention", "MLP"][: layers.sizes["kind"]]
        layers = layers.assign_coords(kind=names).transpose("layer", "kind", ...)
        yield Data(json=self._about())
        instead = INSTEAD[self.settings.how]
        panels = [
            self._loss(
                "heads",
                self.units,
                "KL when a head is ablated",
                f"Each cell: the output of one head (column) of one layer (row) is replaced by {instead}. "
                f"{KL_CAPTION}",
            ),
            self._loss(
                "layers",
                layers,
                "KL when attention or MLP is ablated",
                "Each cell: the output of the attention or MLP (column) of one layer (row) is replaced by "
                f"{instead}. {KL_CAPTION}",
            ),
        ]
        if self.pieces:
            panels += [
                self._change("heads", self.units, "Target probability when a head is ablated"),
                self._change("layers", layers, "Target probability when attention or MLP is ablated"),
            ]
        title = f"Ablations in {self.subject.name}: '{format_text(self.prompt)}'"
        yield from together("ablation", title, *panels, beside=[self.findings], columns=2)
        yield self._most()

    def _loss(self, name: str, grid: xr.Dataset, title: str, caption: str) -> Heatmap:
        """Heatmap of the KL of every ablation of a grid, [layer, head] or [layer, kind]."""
        return Heatmap.of(grid["kl"], title, caption, sources=(name,), low=0.0, json={name: _grid_json(grid)})

    def _change(self, name: str, grid: xr.Dataset, title: str) -> Heatmap:
        """Heatmap of the change of the target's probability by every ablation of a grid, in percentage
        points."""
        change = 100 * (grid["probability"] - self.clean)
        word = self.word
        return Heatmap.of(
            change.assign_attrs(long_name=f"change of the probability of {word!r}", units="points"),
            title,
            f"Each cell: probability of {word!r} with one output ablated, minus that of the unchanged run "
            f"({format_probability(self.clean)}), in percentage points. Below 0: the ablation lowers it.",
            sources=(name,),
            diverging=True,
        )

    @property
    def word(self) -> str:
        """First token of the target as text; its probability is measured."""
        return self.subject.token_labels(self.pieces[:1])[0]

    @property
    def clean(self) -> float:
        """Probability of the target's first token in the unchanged run."""
        return float(self.units["unpatched"].sel(run="clean", metric="probability"))

    def _most(self) -> Table:
        """Table of the heads or experts with the largest KL."""
        units, names = self.units, ["kl"]
        columns: list[tuple[Any, ...]] = [
            ("layer", "layer", "d"),
            (self.unit, self.unit, "d"),
            ("KL", "kl", ".5f"),
        ]
        if self.pieces:
            change = units["probability"] - self.clean
            units, names = units.assign(probability_change=change), [*names, "probability_change"]
            columns.append((f"change of P({self.word!r})", "probability_change", points))
        top_units = largest(units, units["kl"].transpose("layer", self.unit), self.settings.top, *names)
        return Table.of(
            top_units,
            *columns,
            title=f"{self.subject.name}: the {self.unit}s with the largest effect on "
            f"'{format_text(self.prompt)}'",
            caption=self._most_caption(),
            sources=(f"{self.unit}s",),
            json={"most": top_units},
        )

    def _most_caption(self) -> str:
        """Caption of the table of the units with the largest KL; explains the probability column if there is
        one."""
        kl = f"One row per {self.unit}, ablated alone. {KL_CAPTION}"
        if not self.pieces:
            return kl
        return (
            f"{kl} Last column: probability of {self.word!r} with this {self.unit} ablated, minus that of "
            "the unchanged run, in percentage points."
        )

    def _about(self) -> dict[str, Any]:
        """Fields of the JSON document that describe the prompt and the target."""
        fields = {**self.subject.about, "prompt": self.prompt, "how": self.settings.how}
        fields |= target_json(self.subject, self.target, self.pieces)
        return fields | ({"clean_probability": self.clean} if self.pieces else {})


def _grid_json(grid: xr.Dataset) -> dict[str, Any]:
    """Measures of a grid of ablations, for the JSON document."""
    return {name: grid[name] for name in ("kl", "probability") if name in grid}
