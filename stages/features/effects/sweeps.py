"""Injection sweeps: the same features, at every position or at many strengths, and what the model says then.

The protocol of "planning in poems" (Lindsey et al. 2025, "On the Biology of a Large Language Model", section
4): suppress the features of the word that is planned, inject those of another, and see at which position
that changes the end of the line.

Border: declares runs; the planner shares what they have in common. The dictionary is named, and opened only
to compute.

Axes: strength, position = where features were injected; word = tokens whose probability is followed; layer,
head, of one attention edge. Units: nats, logits; attention weights have none.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ....pipeline import Output
from ....store.errors import InterventionError
from ...causal.controls import chosen_at_random
from ...causal.effects import array, check_tokens, check_words, read_logits
from ...causal.metrics import kl_divergence, log_softmax
from ...forward.hooks.interventions import AddAtPositions
from ...forward.hooks.spec import HookSpec
from ...forward.hooks.wants import Logits
from ...forward.runs.experiment import CellLabels
from ...forward.runs.run import Run
from ..dictionary import Dictionary
from ..layers.layout import FeatureId
from ..of_dictionary import OfDictionary
from .injection import Injection, injected, written_norm

if TYPE_CHECKING:
    import xarray as xr

    from ...forward.architectures.architecture import Architecture
    from ...forward.hooks.cache import HookCache
    from ...forward.models.model import Model

__all__ = ["Dose", "InjectionSweep", "in_place_of", "random_like"]


@dataclass(frozen=True)
class Dose:
    """A feature of a sweep: its strength is `fixed` + `factor` times the strength of the run.

    like: a feature as text ("L0:128"); the strength is scaled so that as much is written as by that one, as
    norms over all layers written to together: what makes a random feature a control.
    """

    layer: int
    index: int
    factor: float = 0.0
    fixed: float = 0.0
    from_layer: int | None = None
    like: str | None = None

    def params(self) -> dict[str, Any]:
        """The fields as plain values."""
        return dict(vars(self))

    def at(self, strength: float, dictionary: Dictionary) -> Injection:
        """The injection of a run. Raises InterventionError for a feature that writes nothing to be scaled."""
        feature, amount = FeatureId(self.layer, self.index), self.fixed + self.factor * strength
        if self.like is not None:
            own = written_norm(dictionary, feature, self.from_layer)
            if own == 0:
                raise InterventionError(
                    f"expected {feature} to write as much as {self.like}, found that it writes nothing; "
                    "draw others: another seed"
                )
            amount *= written_norm(dictionary, self.like, self.from_layer) / own
        return Injection(feature, amount, self.from_layer)


def random_like(
    dose: Dose, count: int, n_features: int, *, seed: int, without: Sequence[Dose] = ()
) -> list[Dose]:
    """The same dose of other features of the layer, drawn at random, each as much as it writes.

    n_features: of the layer. without: doses whose features are not drawn either. Fewer where there are fewer.
    """
    taken = [each.index for each in (dose, *without) if each.layer == dose.layer]
    drawn = chosen_at_random(range(n_features), count, seed=seed, without=taken)
    return [replace(dose, index=index, like=str(FeatureId(dose.layer, dose.index))) for index in drawn]


def in_place_of(doses: Sequence[Dose], n_features: int, *, seed: int) -> list[Dose]:
    """Every feature exchanged for one of its layer drawn at random without any of them; one that is dosed
    twice stays one. Raises InterventionError where a layer has too few."""
    found: dict[tuple[int, int], int] = {}
    for layer in dict.fromkeys(dose.layer for dose in doses):
        own = list(dict.fromkeys(dose.index for dose in doses if dose.layer == layer))
        if 2 * len(own) > n_features:
            raise InterventionError(
                f"expected {len(own)} other features of layer {layer} to draw, found {n_features - len(own)}"
            )
        drawn = chosen_at_random(range(n_features), len(own), seed=seed, without=own)
        found |= {(layer, index): other for index, other in zip(own, drawn, strict=True)}
    return [
        replace(dose, index=found[dose.layer, dose.index], like=str(FeatureId(dose.layer, dose.index)))
        for dose in doses
    ]


_MEASURES: Mapping[str, Output] = {
    "logit": Output(("word",), "logits", "logit of a word"),
    "logprob": Output(("word",), "nats", "log-probability of a word"),
    "top_id": Output((), "1", "most likely next token"),
    "top_logprob": Output((), "nats", "its log-probability"),
    "kl": Output((), "nats", "KL(untouched || injected) of the next token"),
    "distance": Output((), "logits", "L2 distance of all logits"),
    "attention": Output(("layer", "head"), "1", "attention weight of the edge", is_optional=True),
}
"""Of one run; dims are its own."""
_BETWEEN = ("kl", "distance")
"""Those that compare it with the run without injection, which has none of them."""


def sweep_outputs(*axes: str) -> dict[str, Output]:
    """What a sweep gives along some axes, each measurement followed by that of the run without injection."""
    found = {}
    for name, each in _MEASURES.items():
        found[name] = replace(each, dims=(*axes, *each.dims))
        if name not in _BETWEEN:
            found[f"baseline_{name}"] = replace(each, long_name=f"{each.long_name}, untouched")
    return found


@dataclass(frozen=True)
class InjectionSweep(OfDictionary):
    """Features at each strength and each position of a prompt, measured at its last position.

    tokens: the prompt. dictionary: its name, no part of the key; features: its identity. doses: what is
    injected together. strengths; positions: None for every one. words: token ids that are followed. edge:
    (query, key) whose attention weight is kept in all heads of all layers, or None.
    Raises PromptError and InterventionError for what is out of range.
    """

    name: ClassVar[str] = "injection_sweep"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = sweep_outputs("strength", "position")

    tokens: tuple[int, ...]
    dictionary: str
    features: str
    doses: tuple[Dose, ...]
    strengths: tuple[float, ...]
    words: tuple[int, ...]
    positions: tuple[int, ...] | None = None
    edge: tuple[int, int] | None = None

    def params(self) -> dict[str, Any]:
        """All but where the dictionary lies; strengths are said by the cells."""
        own = {
            key: value for key, value in vars(self).items() if key not in ("dictionary", "strengths", "doses")
        }
        return own | {"doses": [dose.params() for dose in self.doses]}

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One per strength. Refuses what is out of range, as the class says."""
        check_tokens(self.tokens, self.words)
        if not self.doses or not self.strengths:
            raise InterventionError(
                f"expected features and strengths to inject, found {len(self.doses)} and "
                f"{len(self.strengths)}"
            )
        for place in (*self._positions, *(self.edge or ())):
            if not 0 <= place < len(self.tokens):
                raise InterventionError(f"expected positions in 0..{len(self.tokens) - 1}, found {place}")
        check_words(self.words, config.vocab_size)
        return [{"strength": float(strength)} for strength in self.strengths]

    @property
    def baseline(self) -> Hashable:
        """All but what is injected, and where."""
        return self.tokens, self.features, self.words, self.edge

    def prepare(self, model: Model) -> tuple[Dictionary, dict[str, Any]]:
        """The dictionary, and the run without it."""
        dictionary = self.opened(model)
        return dictionary, self._read(model.forward([list(self.tokens)], self._captures(), want=self._want))

    def runs(self, prepared: tuple[Dictionary, dict[str, Any]], cell: CellLabels) -> list[Run]:
        """One per position, where all doses are injected at the cell's strength."""
        injections = [dose.at(cell["strength"], prepared[0]) for dose in self.doses]
        return [
            Run(self.tokens, injected(prepared[0], injections, [place]).extend(self._captures()), self._want)
            for place in self._positions
        ]

    def sketch(self, config: Architecture, cell: CellLabels) -> list[Run]:
        """The same with vectors of no meaning; the dictionary's headers say where features write."""
        dictionary = Dictionary.from_pretrained(self.dictionary)
        targets = {
            target
            for dose in self.doses
            for target in dictionary.targets(dose.layer)
            if target >= (dose.from_layer or 0)
        }
        nothing = np.zeros(dictionary.d_out, np.float32)
        found = []
        for place in self._positions:
            spec = self._captures()
            for target in sorted(targets):
                spec = spec.intervene(dictionary.write_hook(target), AddAtPositions([(place, nothing)]))
            found.append(Run(self.tokens, spec, self._want))
        return found

    def measure(
        self, prepared: tuple[Dictionary, dict[str, Any]], cell: CellLabels, result: HookCache
    ) -> dict[str, Any]:
        """What the model says at the end of the prompt, and the edge."""
        found, base = self._read(result), prepared[1]
        found["kl"] = float(kl_divergence(base["logits"], found["logits"]))
        found["distance"] = float(np.linalg.norm(found.pop("logits") - base["logits"]))
        return found

    def dataset(
        self, prepared: tuple[Dictionary, dict[str, Any]], cell: CellLabels, measured: Sequence[Any]
    ) -> xr.Dataset:
        """[strength, position, ...], and the run without injection as `baseline_...`."""
        import xarray as xr

        found: dict[str, Any] = {}
        for name in _MEASURES:
            if name not in measured[0]:
                continue
            found[name] = self.outputs[name].variable(np.array([one[name] for one in measured])[None])
            if name not in _BETWEEN:
                unchanged = f"baseline_{name}"
                found[unchanged] = self.outputs[unchanged].variable(np.array(prepared[1][name]))
        coords = {"strength": [cell["strength"]], "position": list(self._positions), "word": list(self.words)}
        return xr.Dataset(found, coords=coords)

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """Cells of all strengths, along `strength`."""
        import xarray as xr

        found: xr.Dataset = xr.concat(
            parts, "strength", data_vars="minimal", coords="minimal", compat="override", join="exact"
        )
        return found

    @property
    def _positions(self) -> tuple[int, ...]:
        return tuple(range(len(self.tokens))) if self.positions is None else self.positions

    @property
    def _want(self) -> Logits:
        return Logits(positions=(-1,))

    def _captures(self) -> HookSpec:
        return HookSpec() if self.edge is None else HookSpec().capture("blocks.*.attn.hook_pattern")

    def _read(self, result: HookCache) -> dict[str, Any]:
        logits = read_logits(result)[0]
        logprob = log_softmax(logits)
        top = int(logits.argmax())
        found: dict[str, Any] = {
            "logits": logits,
            "logit": logits[list(self.words)],
            "logprob": logprob[list(self.words)],
            "top_id": np.int32(top),
            "top_logprob": logprob[top],
        }
        if self.edge is not None:
            query, key = self.edge
            found["attention"] = np.stack([array(result[point][0])[:, query, key] for point in result])
        return found
