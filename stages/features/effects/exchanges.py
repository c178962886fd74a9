"""Exchanges of features: doses injected at positions of prompts, and the next-token predictions that follow.

The protocol of "planning in poems" (Lindsey et al. 2025, "On the Biology of a Large Language Model", section
4): suppress the features of the planned word, inject those of another word, and find the position at which
that changes the end of the line. Null distributions come from the same experiment: random features, parts of
the exchange, other prompts. Runs of one strength are one cell, because storing a cell costs more than a short
run.

The dictionary is given by name, and opened only to compute.

Axes: strength; place = a prompt and the position of the exchange; exchange = doses injected together; word =
tokens whose logits are stored; layer, head, of the attention from the last position to the position of the
exchange. Units: nats, logits; attention weights have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ....pipeline import Output
from ....store.errors import InterventionError
from ...causal.effects import array, check_tokens, check_words, read_logits
from ...causal.metrics import kl_divergence, log_softmax
from ...forward.hooks.interventions import AddAtPositions
from ...forward.hooks.spec import HookSpec
from ...forward.hooks.wants import Logits
from ...forward.runs.experiment import CellLabels
from ...forward.runs.run import Run
from ..dictionary import Dictionary
from ..dictionary_experiment import DictionaryExperiment
from .doses import Dose
from .injection import injected

if TYPE_CHECKING:
    import xarray as xr

    from ...forward.architectures.architecture import Architecture
    from ...forward.hooks.cache import HookCache
    from ...forward.models.model import Model

__all__ = ["FeatureExchanges", "Place"]

Place = tuple[tuple[int, ...], int]
"""Tokens of a prompt, and the position at which features are exchanged."""

_MEASURES: Mapping[str, Output] = {
    "logit": Output(("word",), "logits", "logit of a word"),
    "logprob": Output(("word",), "nats", "log-probability of a word"),
    "top_id": Output((), "1", "most likely next token"),
    "top_logprob": Output((), "nats", "log-probability of the most likely token"),
    "kl": Output((), "nats", "KL(untouched || changed) of the next token"),
    "distance": Output((), "logits", "L2 distance of all logits from the untouched run"),
    "attention": Output(
        ("layer", "head"), "1", "attention from the last position to the place", is_optional=True
    ),
}
"""Measurements of one run at the last position of its prompt."""
_COMPARISONS = ("kl", "distance")
"""Measurements relative to the untouched run; the untouched run itself lacks them."""


def _outputs() -> dict[str, Output]:
    """Outputs of an exchange: every measurement by strength, place and exchange, and its untouched value."""
    outputs = {}
    for name, output in _MEASURES.items():
        outputs[name] = replace(output, dims=("strength", "place", "exchange", *output.dims))
        if name not in _COMPARISONS:
            untouched = f"{output.long_name}, untouched"
            outputs[f"baseline_{name}"] = replace(output, dims=("place", *output.dims), long_name=untouched)
    return outputs


@dataclass(frozen=True)
class FeatureExchanges(DictionaryExperiment):
    """Injects sets of features into prompts, and measures the next-token predictions at the last position.

    Every exchange (a set of doses injected together) is run at every place (prompt and position) and
    strength.

    Raises:
        PromptError: A token is out of range.
        InterventionError: A position is out of range, or there are no places, strengths or exchanges.
    """

    name: ClassVar[str] = "feature_exchanges"
    version: ClassVar[int] = 2
    outputs: ClassVar[Mapping[str, Output]] = _outputs()

    places: tuple[Place, ...]
    """Prompts, each with the position at which features are injected."""
    dictionary: str
    """Argument of `Dictionary.from_pretrained`; excluded from the key of results."""
    features: str
    """Digest of the dictionary (`Dictionary.identity`)."""
    exchanges: tuple[tuple[Dose, ...], ...]
    """Doses that are injected together, one tuple per exchange."""
    strengths: tuple[float, ...]
    """Strengths of the runs, by which a dose's `factor` is multiplied; one cell each."""
    words: tuple[int, ...]
    """Ids of the tokens whose logits are stored."""
    edge: bool = False
    """Whether to store attention weights from the last position to the position of the injection."""

    def params(self) -> dict[str, Any]:
        """All fields except the dictionary's name and the strengths, which are labels of the cells."""
        doses = [[dose.params() for dose in exchange] for exchange in self.exchanges]
        params = {name: value for name, value in super().params().items() if name != "strengths"}
        return {**params, "exchanges": doses}

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell per strength."""
        if not self.places or not self.strengths or not self.exchanges or not all(self.exchanges):
            raise InterventionError(
                "expected at least one place, one strength and one exchange, each exchange with a feature, "
                f"found {len(self.places)} places, {len(self.strengths)} strengths and exchanges with "
                f"{list(map(len, self.exchanges))} features"
            )
        for tokens, position in self.places:
            check_tokens(tokens, self.words)
            if not 0 <= position < len(tokens):
                raise InterventionError(
                    f"expected the position of an injection from 0 to {len(tokens) - 1}, as its prompt has "
                    f"{len(tokens)} tokens, found {position}"
                )
        check_words(self.words, config.vocab_size)
        return [{"strength": float(strength)} for strength in self.strengths]

    def prepare(self, model: Model) -> tuple[Dictionary, list[dict[str, Any]]]:
        """(dictionary, measurements of a run without injection for each place)."""
        dictionary = self.opened(model)
        # Once per prompt: several places may be positions of the same prompt.
        untouched = {
            tokens: model.forward([list(tokens)], self._captures(), want=self._want)
            for tokens in dict.fromkeys(tokens for tokens, _ in self.places)
        }
        return dictionary, [self._read(untouched[tokens], position) for tokens, position in self.places]

    def runs(self, prepared: tuple[Dictionary, Any], cell: CellLabels) -> list[Run]:
        """One run per place and exchange, in this order."""
        dictionary = prepared[0]
        # Computed once per exchange: scaling to equal norms reads decoder rows.
        injections = [[dose.at(cell["strength"], dictionary) for dose in doses] for doses in self.exchanges]
        return [
            Run(tokens, injected(dictionary, added, [position]).extend(self._captures()), self._want)
            for tokens, position in self.places
            for added in injections
        ]

    def sketch(self, config: Architecture, cell: CellLabels) -> list[Run]:
        """The same runs with vectors of zeros, for planning; only headers of the dictionary are read."""
        # Zeros suffice: the plan depends on hook points and positions, not on the vectors.
        dictionary = self.resource.opened
        zeros = np.zeros(dictionary.d_out, np.float32)
        written_layers = []
        for doses in self.exchanges:
            layers_by_dose = [
                {target for target in dictionary.targets(dose.layer) if target >= (dose.from_layer or 0)}
                for dose in doses
            ]
            written_layers.append(sorted(set().union(*layers_by_dose)))
        runs = []
        for tokens, position in self.places:
            for targets in written_layers:
                spec = self._captures()
                for target in targets:
                    hook = dictionary.write_hook(target)
                    spec = spec.intervene(hook, AddAtPositions([(position, zeros)]))
                runs.append(Run(tokens, spec, self._want))
        return runs

    def measure(self, prepared: Any, cell: CellLabels, result: HookCache) -> dict[str, Any]:
        """Next-token measurements of a run of the first place; see `measure_run`."""
        return self.measure_run(prepared, cell, 0, result)

    def measure_run(self, prepared: Any, cell: CellLabels, number: int, result: HookCache) -> dict[str, Any]:
        """Next-token measurements of one run by name, some compared with the run without injection.

        Arguments:
            prepared: Result of `prepare`.
            cell: Labels of the cell.
            number: Index of the run in `runs`.
            result: Logits and captured activations of the run.
        """
        place = number // len(self.exchanges)
        measured, untouched = self._read(result, self.places[place][1]), prepared[1][place]
        logits = measured.pop("logits")  # [vocab], needed for the comparison and not stored
        measured["kl"] = float(kl_divergence(untouched["logits"], logits))
        measured["distance"] = float(np.linalg.norm(logits - untouched["logits"]))
        return measured

    def dataset(
        self, prepared: tuple[Dictionary, list[dict[str, Any]]], cell: CellLabels, measured: Sequence[Any]
    ) -> xr.Dataset:
        """Measurements [strength, place, exchange, ...]; `baseline_...` [place, ...] without injection."""
        import xarray as xr

        shape = (1, len(self.places), len(self.exchanges))
        variables: dict[str, Any] = {}
        for name in measured[0]:
            values = np.stack([run[name] for run in measured])
            variables[name] = self.outputs[name].variable(values.reshape(*shape, *values.shape[1:]))
            # The untouched run is not compared with itself.
            if name not in _COMPARISONS:
                baseline_name, untouched = f"baseline_{name}", np.stack([run[name] for run in prepared[1]])
                variables[baseline_name] = self.outputs[baseline_name].variable(untouched)
        coords = {
            "strength": [cell["strength"]],
            "position": ("place", [position for _, position in self.places]),
            "word": list(self.words),
        }
        return xr.Dataset(variables, coords=coords)

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """The results of all cells, concatenated along `strength`."""
        import xarray as xr

        joined: xr.Dataset = xr.concat(
            parts, "strength", data_vars="minimal", coords="minimal", compat="override", join="exact"
        )
        return joined

    @property
    def _want(self) -> Logits:
        return Logits(positions=(-1,))

    def _captures(self) -> HookSpec:
        return HookSpec().capture("blocks.*.attn.hook_pattern") if self.edge else HookSpec()

    def _read(self, result: HookCache, position: int) -> dict[str, Any]:
        """Measurements of one run at its last position, by name.

        "logits" is [vocab]; "attention" [layer, head] is that from the last position to `position`.
        """
        logits = read_logits(result)[0]
        logprob, words = log_softmax(logits), list(self.words)
        top = int(logits.argmax())
        measured: dict[str, Any] = {
            "logits": logits,
            "logit": logits[words],
            "logprob": logprob[words],
            "top_id": np.int32(top),
            "top_logprob": logprob[top],
        }
        if self.edge:
            measured["attention"] = np.stack([array(result[point][0])[:, -1, position] for point in result])
        return measured
