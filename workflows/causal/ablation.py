"""Which heads and layers does the answer depend on? Ablation of each by itself.

The output of one head, or of the attention or the MLP of one layer, is replaced by zero, by its mean over
reference prompts, which is fairer, as nothing reads a zero in training, or by what it is in other prompts of
as many tokens, drawn at random, which keeps it what the model is used to read
(stages/causal/grids/ablation.py; Wang et al. 2022, "Interpretability in the Wild", section 2; Chan et al.
2022, "Causal scrubbing"). KL from the run as it is says how much the next token hangs on it, the target's
probability in which direction.

Told is the head that loses most on other facts that the model knows, the shipped ones or those of `data`,
scored on more of them and in this prompt beside other heads drawn at random; where it knows too few, they are
not run and nothing is claimed (material/facts/known.py). Defaults: a shipped fact on the specimen, for other
models candle-mi's France; means over shipped facts.
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
from ...stages.logits.lens import format_probability, format_text, format_token
from ...store.arrays import Floats
from ...store.errors import ConfigError
from ..claim import CandidateEffects, Claim
from ..labelled import largest, values_of
from ..material.answers import answer_pieces, encoded, named, target_json
from ..material.facts.fact_data import Fact, enough, facts_of, shown_fact
from ..material.facts.known import CHOSEN_ON, SCORED, KnownWorkflow
from ..material.places import in_every_layer
from ..material.unrelated import Unrelated
from ..settings import Count, DataSettings, FactSettings, setting
from ..subject import shipped_facts
from ..views import Data, Heatmap, Table, View, points, together
from ..workflow import Nodes, loaded

if TYPE_CHECKING:
    import xarray as xr


__all__ = ["AblationOfEach", "AblationOfEachSettings"]


PARTS = ("attn_out", "mlp_out")
MANY = 50
"""Shipped facts that the mean is over by default."""
FEW = 8
"""The same in other facts, each of which takes the mean anew."""
SAMPLES = 10
"""Largest number of random prompts for how=resample; KL is the mean over them."""
INSTEAD = {
    "mean": "its mean",
    "zero": "zero",
    "resample": f"what it is in {SAMPLES} other prompts of as many tokens, drawn at random",
}


@dataclass(frozen=True)
class AblationOfEachSettings(DataSettings, FactSettings):
    """What `--set` can change. Raises ConfigError for references where `how` takes none."""

    how: Literal["mean", "zero", "resample"] = setting(
        "mean", "what takes the place: the mean over references, zero, or what other prompts have there"
    )
    references: tuple[str, ...] = setting((), "prompts the mean is over; none: shipped facts")
    top: Count = setting(10, "heads listed")
    facts: Count = setting(6, "other facts the head is chosen on, and as many more it is scored on")

    def __post_init__(self) -> None:
        if self.how != "mean" and self.references:
            raise ConfigError(
                f"expected references for how=mean alone, found {len(self.references)} for how={self.how}; "
                "leave them out"
            )


class AblationOfEach(KnownWorkflow):
    """Ablation of every head, and of the attention and the MLP of every layer."""

    name = "ablation"
    question = "Which heads and layers does the answer depend on?"
    settings_type = AblationOfEachSettings
    settings: AblationOfEachSettings
    described: ClassVar[str] = " Layers are described, not claimed: there are too few of them."
    unit: ClassVar[str] = "head"
    """Unit that is ablated, one at a time, and the name of its axis."""

    layers = loaded("layers")
    """Attention and MLP of every layer, [kind, layer]."""

    @cached_property
    def units(self) -> xr.Dataset:
        """Every one of them, [layer, head]."""
        return self.result(f"{self.unit}s").load()

    def plan(self) -> Nodes:
        """Two grids of the same prompt, and one of other facts."""
        shared = self._shared()
        parts = Ablation(kinds=in_every_layer(self.subject.config, PARTS), over="layer", **shared)
        units = self.on_model(Ablation(**self._grid, **shared))
        return {"heads": units, "layers": self.on_model(parts), **self._fact_nodes(shared["tokens"])}

    def _shared(self) -> dict[str, Any]:
        """What all grids of the prompt have in common."""
        chosen = self.settings
        self.prompt, self.target = shown_fact(chosen.model, chosen.prompt, chosen.target, chosen.data)
        self.pieces = answer_pieces(self.subject, self.prompt, self.target)
        metrics: tuple[Metric, ...] = (KL(),)
        if self.pieces:
            metrics += (Probability(self.pieces[0]),)
        ids = tuple(encoded(self.subject, self.prompt).ids)
        return {
            "tokens": ids,
            "metrics": metrics,
            **self._instead(ids, self.target, MANY),
        }

    @property
    def _kind(self) -> str:
        """Kind of hook point that a head is ablated at: its output before the output projection."""
        return self.subject.config.read_kind

    @property
    def _grid(self) -> dict[str, Any]:
        """Arguments of an ablation of every unit, in the layers that have any."""
        config = self.subject.config
        layers = config.layers_with(self._kind)
        if not layers:
            raise ConfigError(
                f"expected a model with {self.unit}s that can be taken away, found {config.model_type}, of "
                "which none is known; patch its stream: activation_patching"
            )
        return {
            "kinds": (self._kind,),
            "over": "head",
            "layers": None if len(layers) == config.num_layers else tuple(layers),
        }

    def _fact_nodes(self, own: tuple[int, ...]) -> Nodes:
        """Every unit in other facts, [draw = fact, layer, head], and which of them the model knows; none
        where no control is asked for. None of the facts is a reference of the mean, or the prompt with these
        tokens."""
        given, limit = self.settings, self.subject.config.context_length
        if not given.controls:
            return {}
        facts = facts_of(given.data)[0 if given.data else MANY :]
        tokens = ((tuple(self.subject.tokenizer.encode(each.prompt).ids), each) for each in facts)
        fitting = ((ids, each) for ids, each in tokens if ids != own and (limit is None or len(ids) <= limit))
        several = list(dict(islice(fitting, 4 * given.facts)).items())
        chosen = enough(several, given.data, 2 * given.facts, f"a {self.unit}")
        self.only_claims = ("facts",)
        asked = [(ids, self.subject.answer_id(*each[:2]), -1) for ids, each in chosen]
        half = len(chosen) // 2
        units = AtOnce(tuple(self._on_fact(ids, each) for ids, each in chosen))
        known = self.known_node({CHOSEN_ON: asked[:half], SCORED: asked[half:]})
        return known | {"facts": self.on_model(units)}

    def _on_fact(self, tokens: tuple[int, ...], told: Fact) -> Ablation:
        instead = self._instead(tokens, told.target, FEW)
        return Ablation(**self._grid, tokens=tokens, metrics=(KL(),), **instead)

    @property
    def compared(self) -> list[int]:
        """Indices of the units that are compared, counted through layers."""
        return list(range(self.units["kl"].size))

    @cached_property
    def lost(self) -> Floats:
        """KL without each unit on other facts, in nats: [fact, layer, head]."""
        return values_of(self.result("facts")["kl"], "draw", "layer", self.unit)

    @cached_property
    def candidates(self) -> CandidateEffects:
        """KL without each compared unit on other facts that the model knows, in nats: [fact, unit]."""
        parts = zip(np.split(self.lost, 2), (CHOSEN_ON, SCORED), strict=True)
        chosen_on, scored_on = (
            part[self.is_known(name)].reshape(-1, part[0].size)[:, self.compared] for part, name in parts
        )
        return CandidateEffects(chosen_on, scored_on)

    def claims(self) -> Iterator[Claim]:
        """The head or MLP with the largest KL on other facts, scored on held-out facts and in this prompt;
        then the one with the least."""
        heads, layers, settings = self.lost.shape[2], self.units["layer"].values, self.settings
        most, least = (self.compared[index[0]] for index in (self.candidates.best, self.candidates.weakest))

        def text(unit: int) -> str:
            where = f"{self.unit} {unit % heads} of layer {layers[unit // heads]}"
            return f"taking {where} away changes the next token"

        of = f"another {self.unit} of each prompt"
        yield self.candidates.claim(text(most), self.candidates.best, of, settings, unit="nats")
        here = self.units["kl"].transpose("layer", self.unit).values
        prompt = f"in '{format_text(self.prompt)}'"
        for unit, before in ((most, prompt), (least, "for comparison")):
            yield Claim.among(
                f"{before}, {text(unit)}",
                here,
                unit,
                f"other {self.unit}s",
                settings,
                candidates=self.compared,
                unit="nats",
                held_out=True,
            )

    def claims_caption(self) -> str:
        """Caption of the claims: on which facts the ablated heads or MLPs were chosen."""
        counts, totals = self.known_counts
        return (
            f"The {self.unit} of the largest mean KL ({float(self.candidates.mean.max()):.3f} nats) on other "
            f"facts, of {totals[CHOSEN_ON]} the {counts[CHOSEN_ON]} whose answer the model says, scored on "
            f"{counts[SCORED]} more; for comparison that of the least.{self.described}"
        )

    def _instead(self, tokens: tuple[int, ...], target: str, count: int) -> dict[str, Any]:
        """What takes the place in a prompt, as `Ablation` has it.

        count: references of the mean, or prompts of as many tokens and another answer that are drawn.
        """
        given = self.settings
        if given.how == "zero":
            return {"how": "zero"}
        if given.how == "mean":
            texts = given.references or tuple(each["prompt"] for each in shipped_facts()[:count])
            references = tuple(tuple(encoded(self.subject, text).ids) for text in texts)
            return {"how": "mean", "references": references}
        drawn = self._unrelated.to(tokens, min(count, SAMPLES), seed=given.seed, targets=(target,))
        return {
            "how": "resample",
            "references": tuple(drawn),
            "samples": min(count, SAMPLES),
            "seed": given.seed,
        }

    @cached_property
    def _unrelated(self) -> Unrelated:
        return Unrelated(self.subject)

    def views(self) -> Iterator[View]:
        """KL by head and by layer, change of the target's probability, and the heads with the largest KL."""
        layers = self.layers if "kind" in self.layers.dims else self.layers.expand_dims("kind")
        names = ["attention", "MLP"][: layers.sizes["kind"]]
        layers = layers.assign_coords(kind=names).transpose("layer", "kind", ...)
        yield Data(json=self._about())
        instead = INSTEAD[self.settings.how]
        panels = [
            self._loss("heads", self.units, "What is lost without a head", f"each replaced by {instead}"),
            self._loss("layers", layers, "What is lost without a part", f"each replaced by {instead}"),
        ]
        if self.pieces:
            panels += [
                self._change("heads", self.units, "Target without a head"),
                self._change("layers", layers, "Target without a part"),
            ]
        title = f"What {self.subject.name} needs: '{format_text(self.prompt)}'"
        yield from together("ablation", title, *panels, beside=[self.findings], columns=2)
        yield self._most()

    def _loss(self, name: str, grid: xr.Dataset, title: str, caption: str) -> Heatmap:
        return Heatmap.of(grid["kl"], title, caption, sources=(name,), low=0.0, json={name: _told(grid)})

    def _change(self, name: str, grid: xr.Dataset, title: str) -> Heatmap:
        """Points of probability that the target gains."""
        change = 100 * (grid["probability"] - self.clean)
        word = self.word
        return Heatmap.of(
            change.assign_attrs(long_name=f"change of the probability of {word!r}", units="points"),
            title,
            f"{word!r} has {format_probability(self.clean)} as it is; below zero: less without it",
            sources=(name,),
            diverging=True,
        )

    @property
    def word(self) -> str:
        """The token whose probability is followed."""
        return format_token(named(self.subject, self.pieces[:1])[0])

    @property
    def clean(self) -> float:
        """The target's probability in the run as it is."""
        return float(self.units["unpatched"].sel(run="clean", metric="probability"))

    def _most(self) -> Table:
        """Table of the units with the largest KL."""
        units, names = self.units, ["kl"]
        columns: list[tuple[Any, ...]] = [
            ("layer", "layer", "d"),
            (self.unit, self.unit, "d"),
            ("KL", "kl", ".5f"),
        ]
        if self.pieces:
            change = units["probability"] - self.clean
            units, names = units.assign(probability_change=change), [*names, "probability_change"]
            columns.append((repr(self.word), "probability_change", points))
        most = largest(units, units["kl"].transpose("layer", self.unit), self.settings.top, *names)
        return Table.of(
            most,
            *columns,
            title=f"{self.subject.name}: the {self.unit}s that '{format_text(self.prompt)}' needs most",
            caption=f"KL(as it is || without the {self.unit}) of the next token, nats",
            sources=(f"{self.unit}s",),
            json={"most": most},
        )

    def _about(self) -> dict[str, Any]:
        found = {**self.subject.about, "prompt": self.prompt, "how": self.settings.how}
        found |= target_json(self.subject, self.target, self.pieces)
        return found | ({"clean_probability": self.clean} if self.pieces else {})


def _told(grid: xr.Dataset) -> dict[str, Any]:
    return {name: grid[name] for name in ("kl", "probability") if name in grid}
