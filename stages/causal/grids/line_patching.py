"""Line patching: effect of a donor's states on the end of a line, and on the words before it.

A prompt is run with states of a donor, a prompt that differs in some earlier tokens, patched place by place:
resid_post of each layer, at one set of positions. Measured are the probabilities of word groups at the last
position, and the change of next-token distributions on the way there.

Besides single layers there are ways: some positions have the donor's states in every layer, others are fixed
to the prompt's states. They separate direct from indirect effects (Pearl 2001, "Direct and indirect effects";
Vig et al. 2020). With all positions in between fixed, the change reaches the last position directly only;
with only those positions changed, it reaches the last position through them only.

    LinePatching(prompt=a, donor=b, places=((6,), (7, 8)), ways=(((5,), (6, 7)),), groups=…, read=(6, 7))

With a seed, a random direction of the norm of (donor - prompt), drawn for every layer and position, replaces
that difference: a control.

Border: token ids in, labelled arrays out; knows neither text nor rhymes.

Axes: layer, place, way, group; run: the prompt, the donor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from ....pipeline import Output
from ....store.arrays import Floats
from ....store.digest import digest
from ....store.errors import PromptError, StageError
from ...forward.architectures.points import HookPoint
from ...forward.hooks.interventions import Replace
from ...forward.hooks.spec import HookSpec
from ...forward.hooks.wants import Logits
from ...forward.runs.experiment import CellLabels, Experiment
from ...forward.runs.run import Run, stream
from ..controls import random_directions
from ..effects import array, read_logits
from ..metrics import kl_divergence, log_softmax

if TYPE_CHECKING:
    import xarray as xr

    from ...forward.architectures.architecture import Architecture
    from ...forward.hooks.cache import HookCache
    from ...forward.models.model import Model

__all__ = ["LinePatching", "Way"]

UNPATCHED = ("unpatched", "unpatched_top", "donor_kl")
"""Names of the outputs of the unpatched runs."""
Positions = tuple[int, ...]
Way = tuple[Positions, Positions]
"""Positions with the donor's states in every layer, and positions fixed to the prompt's states."""


@dataclass(frozen=True)
class PreparedLines:
    """Results of the prompt and the donor, run without patches."""

    prompt_states: npt.NDArray[np.float32]
    """Residual states of the prompt, [layer + 1, position, hidden]; entry 0 is the input of layer 0."""
    patch_states: npt.NDArray[np.float32]
    """States that are patched in, the donor's or those of the random control, same shape."""
    logits: Floats
    """Logits of prompt and donor at the positions `read` and the last, float64 [run, position, vocab]."""


@dataclass(frozen=True, kw_only=True)
class LinePatching(Experiment):
    """Patches residual states of a donor into a prompt: at one place and layer per run, or in all layers.

    Raises:
        PromptError: Prompt and donor have different lengths.
        StageError: There are no groups, there are ways but no places, or a position is outside the prompt.
    """

    prompt: Positions
    """Token ids of the prompt."""
    donor: Positions
    """Token ids of the donor, as many as the prompt has."""
    places: tuple[Positions, ...]
    """Sets of positions; those of a set are patched together, in one layer per run. Empty for the unpatched
    runs of prompt and donor alone."""
    groups: tuple[tuple[int, ...], ...]
    """Sets of token ids whose probabilities as next token of the prompt are summed."""
    read: Positions
    """Positions before the last, ascending, at which next-token distributions are compared as well."""
    ways: tuple[Way, ...] = ()
    """Patches in every layer at once, one run each: (positions set to the donor's states, positions set to
    the prompt's own states)."""
    seed: int | None = None
    """Seed of the random control, in which each patched state is the prompt's state plus a random vector of
    the norm of (donor state - prompt state); None patches the donor's states themselves."""

    name: ClassVar[str] = "line_patching"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "probability": Output(
            ("layer", "place", "group"), "1", "probability of a group of next tokens at the last position"
        ),
        "kl": Output(
            ("layer", "place"),
            "nats",
            "KL(prompt || patched) of next tokens, mean over read positions from the place on; NaN for none",
        ),
        "top": Output(("layer", "place"), "1", "most likely next token at the last position"),
        "way_probability": Output(
            ("way", "group"), "1", "probability of a group, patched in all layers", is_optional=True
        ),
        "way_kl": Output(
            ("way",), "nats", "KL(prompt || patched in all layers) of next tokens, as `kl`", is_optional=True
        ),
        "unpatched": Output(("run", "group"), "1", "probability of a group without patches"),
        "unpatched_top": Output(("run",), "1", "most likely next token without patches"),
        "donor_kl": Output((), "nats", "KL(prompt || donor) of next tokens, mean over read positions"),
    }

    def __post_init__(self) -> None:
        if len(self.prompt) != len(self.donor):
            raise PromptError(
                f"{self.name}: expected a prompt and a donor of equal length, found {len(self.prompt)} and "
                f"{len(self.donor)} tokens; choose another donor"
            )
        sets = {"groups": self.groups}
        if self.places or self.ways:
            sets |= {"places": self.places, "ways": tuple(changed for changed, _ in self.ways) or ((0,),)}
        for name, entries in sets.items():
            if not entries or not all(entries):
                raise StageError(
                    f"{self.name}: expected at least one entry in {name}, and no empty entries, found "
                    f"{entries}"
                )
        positions = [*self.read, *(position for place in self.places for position in place)]
        positions += [position for way in self.ways for part in way for position in part]
        if outside := [position for position in positions if not 0 <= position < len(self.prompt)]:
            raise StageError(
                f"{self.name}: expected positions from 0 to {len(self.prompt) - 1}, as the prompt has "
                f"{len(self.prompt)} tokens, found {outside[0]}"
            )

    def outputs_on(self, config: Architecture) -> Mapping[str, Output]:
        """All declared outputs; `way_*` only with ways, and without places those of the unpatched runs."""
        if not self.places:
            return {name: output for name, output in self.outputs.items() if name in UNPATCHED}
        return {name: output for name, output in self.outputs.items() if self.ways or not output.is_optional}

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell; PromptError if a token id is outside the vocabulary."""
        tokens = (*self.prompt, *self.donor, *(token for group in self.groups for token in group))
        if outside := [token for token in tokens if not 0 <= token < config.vocab_size]:
            raise PromptError(
                f"{self.name}: expected token ids from 0 to {config.vocab_size - 1}, found {outside[0]}"
            )
        return [{"layers": config.num_layers}]

    @property
    def want(self) -> Logits:
        """Logits of the whole vocabulary at the positions `read` and at the last one."""
        return Logits((*self.read, len(self.prompt) - 1))

    # -- runs

    def prepare(self, model: Model) -> PreparedLines:
        """Run the prompt and the donor without patches, and keep their residual states and logits."""
        layers = range(model.config.num_layers)
        points = [HookPoint("resid_pre", 0), *(HookPoint("resid_post", layer) for layer in layers)]
        runs = [Run(ids, HookSpec().capture(*points), self.want) for ids in (self.prompt, self.donor)]
        results = dict(stream(model, runs))
        prompt_states, patch_states = (
            np.stack([array(results[run][point][0]) for point in points]) for run in (0, 1)
        )
        # The control keeps the norm of the donor's difference at every layer and position, and randomises its
        # direction.
        if self.seed is not None:
            patch_states = (
                prompt_states + random_directions(patch_states - prompt_states, 1, seed=self.seed)[0]
            )
        return PreparedLines(
            prompt_states, patch_states, np.stack([read_logits(results[run]) for run in (0, 1)])
        )

    def runs(self, prepared: PreparedLines, cell: CellLabels) -> Sequence[Run]:
        """One run per layer and place (places fastest), then one run per way."""
        specs = [
            HookSpec().intervene(
                HookPoint("resid_post", layer),
                # Entry 0 of the states is the input of layer 0, so entry layer + 1 is resid_post of the
                # layer.
                Replace(prepared.patch_states[layer + 1, list(place)], positions=place),
            )
            for layer in range(cell["layers"])
            for place in self.places
        ]
        specs += [self._in_all_layers(prepared, way, cell["layers"]) for way in self.ways]
        return [Run(self.prompt, spec, self.want) for spec in specs]

    @staticmethod
    def _in_all_layers(prepared: PreparedLines, way: Way, layers: int) -> HookSpec:
        """Intervention of one of `ways` in every layer: states of the donor at some positions, the prompt's
        own states at others."""
        changed, fixed = way
        spec = HookSpec()
        for layer in range(layers):
            # resid_pre of every layer: fixing it cuts all paths through these positions, not only that of one
            # layer.
            value = np.concatenate(
                [prepared.patch_states[layer, list(changed)], prepared.prompt_states[layer, list(fixed)]]
            )
            spec = spec.intervene(HookPoint("resid_pre", layer), Replace(value, positions=(*changed, *fixed)))
        return spec

    def sketch(self, config: Architecture, cell: CellLabels) -> Sequence[Run]:
        """The runs of the cell for planning: patched states are constants, as the real ones are not computed
        yet."""
        shape = (config.num_layers + 1, len(self.prompt), config.axis_sizes["hidden"])
        # A constant of its own for each donor and seed: a plan would otherwise merge runs that will differ.
        constant = 1 + int(digest("line_patching", list(self.donor), self.seed)[:5], 16)
        prompt_states, patch_states = (np.broadcast_to(np.float32(value), shape) for value in (0, constant))
        return self.runs(PreparedLines(prompt_states, patch_states, np.zeros(0)), cell)

    # -- numbers

    def measure(
        self, prepared: PreparedLines, cell: CellLabels, result: HookCache
    ) -> tuple[Floats, int, Floats]:
        """(group probabilities and most likely token after the prompt, KL at each position of `read`)."""
        logits = read_logits(result)
        return (*self._next_token(logits[-1]), kl_divergence(prepared.logits[0, :-1], logits[:-1]))

    def _next_token(self, logits: Floats) -> tuple[Floats, int]:
        """(probability of every group, float64 [group]; most likely token), from logits [vocab]."""
        probability = np.exp(log_softmax(logits))
        return np.array([probability[list(group)].sum() for group in self.groups]), int(logits.argmax())

    def _mean(self, values: Floats, start: int, fixed: Positions = ()) -> float:
        """Mean of values [read position] from `start` on, without positions `fixed`; NaN if none is left."""
        indices = [i for i, position in enumerate(self.read) if position >= start and position not in fixed]
        return float(values[indices].mean()) if indices else float("nan")

    def dataset(
        self, prepared: PreparedLines, cell: CellLabels, measured: Sequence[tuple[Floats, int, Floats]]
    ) -> xr.Dataset:
        """Probabilities, KL divergences and most likely tokens of all runs, patched and unpatched."""
        import xarray as xr

        unpatched = [self._next_token(logits[-1]) for logits in prepared.logits]
        donor_kl = kl_divergence(prepared.logits[0, :-1], prepared.logits[1, :-1])
        variables: dict[str, Any] = {
            "unpatched": np.array([probability for probability, _ in unpatched]),
            "unpatched_top": np.array([token for _, token in unpatched]),
            "donor_kl": np.array(self._mean(donor_kl, 0)),
        }
        coords: dict[str, Any] = {"run": ["prompt", "donor"]}
        if self.places:
            coords["layer"] = list(range(cell["layers"]))
            variables |= self._patched(cell["layers"], measured)
        return xr.Dataset(
            {name: self.outputs[name].variable(values) for name, values in variables.items()}, coords=coords
        )

    def _patched(self, layers: int, measured: Sequence[tuple[Floats, int, Floats]]) -> dict[str, Any]:
        """Values of the outputs of the patched runs by name, from the measurements in the order of `runs`."""
        probabilities, top, kl = (list(values) for values in zip(*measured, strict=True))
        places = len(self.places)
        grid = layers * places
        starts = [min(place) for place in self.places] * layers
        kls = [self._mean(kl_values, start) for kl_values, start in zip(kl[:grid], starts, strict=True)]
        variables: dict[str, Any] = {
            "probability": np.reshape(probabilities[:grid], (layers, places, -1)),
            "kl": np.reshape(kls, (layers, places)),
            "top": np.reshape(top[:grid], (layers, places)),
        }
        if self.ways:
            variables["way_probability"] = np.array(probabilities[grid:])
            variables["way_kl"] = np.array(
                [
                    self._mean(kl_values, min(changed), fixed)
                    for kl_values, (changed, fixed) in zip(kl[grid:], self.ways, strict=True)
                ]
            )
        return variables
