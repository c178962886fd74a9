"""Line patching: what becomes of a line's end, and of what comes before it, under another line's states?

A prompt is run with states of a donor, a prompt that differs from it in some earlier tokens, put in place by
place: the residual stream after each layer, at one set of positions. What is read is which groups of words
may come next at the last position, and how far next tokens change on the way there.

Beside single layers there are ways: some positions as in the donor in every layer, others held as they are in
the prompt. They part what the donor changes (direct and indirect effects: Pearl 2001, "Direct and indirect
effects"; Vig et al. 2020): where all positions between are held, the last one alone hears of the change;
where they alone are changed, it hears of it through them.

    LinePatching(prompt=a, donor=b, places=((6,), (7, 8)), ways=(((5,), (6, 7)),), groups=…, read=(6, 7))

With a seed, a random direction as long as the donor's difference, drawn for every layer and position, stands
in the place of that difference: a control.

Border: token ids in, labelled arrays out; knows no lines and no rhymes.

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

Positions = tuple[int, ...]
Way = tuple[Positions, Positions]
"""Positions as in the donor in every layer, and positions held as in the prompt."""


@dataclass(frozen=True)
class PreparedLines:
    """What runs are made of and measured against.

    own, other: states of the prompt and of what is put there, float32 [layer + 1, position, hidden]; the
    first entry is what enters layer 0. logits: of both unpatched runs, float64 [run, read and last, vocab].
    """

    own: npt.NDArray[np.float32]
    other: npt.NDArray[np.float32]
    logits: Floats


@dataclass(frozen=True, kw_only=True)
class LinePatching(Experiment):
    """States of a donor at one place after each layer, and by ways in all layers.

    prompt, donor: token ids of equal length. places: positions patched together. groups: token ids whose
    probabilities at the last position are summed. read: positions before the last, ascending, whose next
    tokens are compared. seed: of random directions in the place of the donor's difference; None: the donor's
    states themselves. Raises PromptError for prompts of different lengths, StageError for no place or group,
    or positions that there are not.
    """

    prompt: Positions
    donor: Positions
    places: tuple[Positions, ...]
    groups: tuple[tuple[int, ...], ...]
    read: Positions
    ways: tuple[Way, ...] = ()
    seed: int | None = None

    name: ClassVar[str] = "line_patching"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "probability": Output(("layer", "place", "group"), "1", "of a group to come next at the end"),
        "kl": Output(
            ("layer", "place"),
            "nats",
            "KL(prompt || patched) of next tokens, mean over what is read from the place on; NaN for none",
        ),
        "top": Output(("layer", "place"), "1", "token that is likeliest to come next at the end"),
        "way_probability": Output(
            ("way", "group"), "1", "the same where states of all layers are put in", is_optional=True
        ),
        "way_kl": Output(("way",), "nats", "KL of next tokens then, likewise", is_optional=True),
        "unpatched": Output(("run", "group"), "1", "of a group to come next, nothing patched"),
        "unpatched_top": Output(("run",), "1", "likeliest token, nothing patched"),
        "donor_kl": Output((), "nats", "KL(prompt || donor) of next tokens, mean over what is read"),
    }

    def __post_init__(self) -> None:
        if len(self.prompt) != len(self.donor):
            raise PromptError(
                f"{self.name}: expected a prompt and a donor of equal length, found {len(self.prompt)} and "
                f"{len(self.donor)} tokens; choose others"
            )
        sets = {"places": self.places, "groups": self.groups}
        sets |= {"ways": tuple(changed for changed, _ in self.ways) or ((0,),)}
        for what, each in sets.items():
            if not each or not all(each):
                raise StageError(f"{self.name}: expected {what} of at least one each, found {each}")
        asked = [*self.read, *(at for place in self.places for at in place)]
        asked += [at for way in self.ways for part in way for at in part]
        if outside := [at for at in asked if not 0 <= at < len(self.prompt)]:
            raise StageError(
                f"{self.name}: expected positions in 0..{len(self.prompt) - 1}, found {outside[0]}"
            )

    def outputs_on(self, config: Architecture) -> Mapping[str, Output]:
        """All of them; those of ways where there are any."""
        return {name: each for name, each in self.outputs.items() if self.ways or not each.is_optional}

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One: nobody asks for half of it. Raises PromptError for a token the model has not."""
        tokens = (*self.prompt, *self.donor, *(token for group in self.groups for token in group))
        if outside := [token for token in tokens if not 0 <= token < config.vocab_size]:
            raise PromptError(
                f"{self.name}: expected token ids in 0..{config.vocab_size - 1}, found {outside[0]}"
            )
        return [{"layers": config.num_layers}]

    @property
    def want(self) -> Logits:
        """All logits, where something is read and at the end."""
        return Logits((*self.read, len(self.prompt) - 1))

    # -- runs

    def prepare(self, model: Model) -> PreparedLines:
        """Both unpatched runs with all states."""
        layers = range(model.config.num_layers)
        points = [HookPoint("resid_pre", 0), *(HookPoint("resid_post", layer) for layer in layers)]
        asked = [Run(ids, HookSpec().capture(*points), self.want) for ids in (self.prompt, self.donor)]
        found = dict(stream(model, asked))
        own, other = (np.stack([array(found[run][point][0]) for point in points]) for run in (0, 1))
        if self.seed is not None:
            other = own + random_directions(other - own, 1, seed=self.seed)[0]
        return PreparedLines(own, other, np.stack([read_logits(found[run]) for run in (0, 1)]))

    def runs(self, prepared: PreparedLines, cell: CellLabels) -> Sequence[Run]:
        """One per layer and place, places fastest; then one per way."""
        specs = [
            HookSpec().intervene(
                HookPoint("resid_post", layer),
                Replace(prepared.other[layer + 1, list(place)], positions=place),
            )
            for layer in range(cell["layers"])
            for place in self.places
        ]
        specs += [self._spec(prepared, way, cell["layers"]) for way in self.ways]
        return [Run(self.prompt, spec, self.want) for spec in specs]

    @staticmethod
    def _spec(prepared: PreparedLines, way: Way, layers: int) -> HookSpec:
        """Changed and held positions of one way, in every layer."""
        changed, held = way
        spec = HookSpec()
        for layer in range(layers):
            value = np.concatenate([prepared.other[layer, list(changed)], prepared.own[layer, list(held)]])
            spec = spec.intervene(HookPoint("resid_pre", layer), Replace(value, positions=(*changed, *held)))
        return spec

    def sketch(self, config: Architecture, cell: CellLabels) -> Sequence[Run]:
        """The runs with constants for states, others for each donor and seed: what is drawn will differ."""
        shape = (config.num_layers + 1, len(self.prompt), config.axis_sizes["hidden"])
        drawn = 1 + int(digest("line_patching", list(self.donor), self.seed)[:5], 16)
        own, other = (np.broadcast_to(np.float32(constant), shape) for constant in (0, drawn))
        return self.runs(PreparedLines(own, other, np.zeros(0)), cell)

    # -- numbers

    def measure(
        self, prepared: PreparedLines, cell: CellLabels, result: HookCache
    ) -> tuple[Floats, int, Floats]:
        """Probabilities of the groups and the likeliest token at the end, KLs where next tokens are read."""
        logits = read_logits(result)
        return (*self._said(logits[-1]), kl_divergence(prepared.logits[0, :-1], logits[:-1]))

    def _said(self, logits: Floats) -> tuple[Floats, int]:
        """Probability of every group, and the likeliest token, by logits [vocab]."""
        probability = np.exp(log_softmax(logits))
        return np.array([probability[list(group)].sum() for group in self.groups]), int(logits.argmax())

    def _mean(self, values: Floats, start: int, held: Positions = ()) -> float:
        """Over what is read from a position on, but where it is held; NaN for nothing. values: [read]."""
        chosen = [i for i, at in enumerate(self.read) if at >= start and at not in held]
        return float(values[chosen].mean()) if chosen else float("nan")

    def dataset(
        self, prepared: PreparedLines, cell: CellLabels, measured: Sequence[tuple[Floats, int, Floats]]
    ) -> xr.Dataset:
        """All of `outputs`, layers by their numbers."""
        import xarray as xr

        layers, places = cell["layers"], len(self.places)
        said, top, kl = (list(each) for each in zip(*measured, strict=True))
        grid = layers * places
        starts = [min(place) for place in self.places] * layers
        kls = [self._mean(*each) for each in zip(kl[:grid], starts, strict=True)]
        unpatched = [self._said(each[-1]) for each in prepared.logits]
        donor_kl = kl_divergence(prepared.logits[0, :-1], prepared.logits[1, :-1])
        given: dict[str, Any] = {
            "probability": np.reshape(said[:grid], (layers, places, -1)),
            "kl": np.reshape(kls, (layers, places)),
            "top": np.reshape(top[:grid], (layers, places)),
            "unpatched": np.array([probability for probability, _ in unpatched]),
            "unpatched_top": np.array([token for _, token in unpatched]),
            "donor_kl": np.array(self._mean(donor_kl, 0)),
        }
        if self.ways:
            given["way_probability"] = np.array(said[grid:])
            given["way_kl"] = np.array(
                [
                    self._mean(each, min(changed), held)
                    for each, (changed, held) in zip(kl[grid:], self.ways, strict=True)
                ]
            )
        return xr.Dataset(
            {name: self.outputs[name].variable(values) for name, values in given.items()},
            coords={"layer": list(range(layers)), "run": ["prompt", "donor"]},
        )
