"""Texts steered along a direction: how likely a wanted continuation becomes, compared with random directions.

A contrast pair is a prompt with two continuations, a positive one (say in French) and a negative one (the
same in English). Half of the pairs make a direction after each layer (stages/geometry/directions.py) from the
mean states of the continuations' tokens, and choose layer and strength: the largest mean gain of the positive
continuation. The other half is scored with this layer and strength. Steering adds

    strength * norm * unit

to the residual stream at every position, where norm is that of the difference of the two mean states: at
strength 1 the added vector is as long as this difference; with the method "mean" it moves the negative mean
to the positive one.

The measure is the mean log-probability per token of the positive continuation, given the prompt, not its
difference from that of the negative one: adding noise until both are equally unlikely would raise the
difference. Each prompt is also continued with and without steering; the loss of these texts in the unsteered
model is a rough measure of their fluency; repetition lowers it too.

Border: token ids in, labelled arrays out; the planner shares work between runs. Torch is imported when it
runs.

Axes: pair (a cell each), draw (random directions), layer and strength (candidates). Unit: nats per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ....pipeline import Output
from ....store.arrays import Array, Floats
from ....store.errors import PromptError, StageError
from ...forward.architectures.points import HookPoint
from ...forward.hooks.interventions import Add
from ...forward.hooks.spec import HookSpec
from ...forward.runs.experiment import CellLabels, Experiment
from ...forward.runs.run import Run, stream
from ...geometry.directions import METHODS, steering_direction
from ..controls import random_directions
from ..effects import array, check_tokens, layers_of, read_logits, with_target
from ..metrics import log_softmax

if TYPE_CHECKING:
    import xarray as xr

    from ...forward.architectures.architecture import Architecture
    from ...forward.hooks.cache import HookCache
    from ...forward.models.model import Model

__all__ = ["ContrastPair", "SteeredTexts"]

ContrastPair = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Token ids of a prompt, of its positive and of its negative continuation."""


@dataclass(frozen=True)
class _Chosen:
    """Directions of the candidate layers, and the layer and strength chosen among them."""

    model: Model
    """The loaded model, which generates texts."""
    directions: xr.Dataset
    """Result of `steering_direction`."""
    gain: Floats
    """Mean gain over the pairs chosen on, [layer, strength]."""
    layer: int
    """Layer after which vectors are added."""
    strength: float
    """Factor of the vector."""
    vectors: Array
    """Vector that is added, then the random ones of the same norm, float32 [1 + draw, hidden]."""


@dataclass(frozen=True)
class SteeredTexts(Experiment):
    """Steers held-out texts along a direction made of other texts, and along random ones of the same norm.

    Raises:
        StageError: Strengths are missing, repeated or not finite; the method is unknown; or a number is
            negative.
        PromptError: There are no pairs of a half, or a prompt or continuation is empty.
    """

    name: ClassVar[str] = "steered_texts"
    version: ClassVar[int] = 1
    reads_text: ClassVar[bool] = True
    outputs: ClassVar[Mapping[str, Output]] = {
        "plain": Output(("pair",), "nats", "mean log-probability per token of the positive continuation"),
        "steered": Output(("pair",), "nats", "the same when steered along the direction"),
        "random": Output(("pair", "draw"), "nats", "the same when steered along a random direction"),
        "order": Output(
            ("pair",),
            "nats",
            "unsteered: mean log-probability per token of the negative continuation minus that of its tokens "
            "in random order; 0 for a continuation of one token",
        ),
        "plain_text": Output(("pair",), "1", "text generated without steering"),
        "steered_text": Output(("pair",), "1", "text generated with steering"),
        "plain_loss": Output(("pair",), "nats", "loss per token of plain_text in the unsteered model"),
        "steered_loss": Output(("pair",), "nats", "loss per token of steered_text in the unsteered model"),
        "gain": Output(
            ("layer", "strength"),
            "nats",
            "increase of the mean log-probability per token of the positive continuation by steering, mean "
            "over the pairs chosen on",
        ),
        "auc": Output(
            ("layer",),
            "1",
            "probability that a held-out positive state lies farther along the direction than a held-out "
            "negative one",
        ),
        "norm": Output(("layer",), "1", "norm of the vector added at strength 1"),
        "chosen_layer": Output((), "1", "layer with the largest gain"),
        "chosen_strength": Output((), "1", "strength with the largest gain"),
    }

    chosen_on: tuple[ContrastPair, ...]
    """Pairs that make the direction and choose layer and strength."""
    scored_on: tuple[ContrastPair, ...]
    """Held-out pairs that are scored."""
    layers: tuple[int, ...] | None = None
    """Candidate layers after which the vector is added; None for all."""
    strengths: tuple[float, ...] = (0.25, 0.5, 1.0)
    """Candidate factors of the vector."""
    method: str = "mean"
    """How the direction is made, see `steering_direction`."""
    draws: int = 50
    """Number of random directions."""
    seed: int = 0
    """Seed of the random directions, and of the random order of tokens."""
    max_tokens: int = 16
    """Number of tokens of each generated text."""

    def __post_init__(self) -> None:
        if not self.strengths or len(set(self.strengths)) < len(self.strengths):
            raise StageError(
                "steered_texts: expected at least one strength, and each once, found "
                f"{list(self.strengths) or 'none'}; for example strengths=(0.5, 1.0)"
            )
        if not np.isfinite(self.strengths).all():
            raise StageError(f"steered_texts: expected finite strengths, found {list(self.strengths)}")
        if self.method not in METHODS:
            raise StageError(
                f"steered_texts: expected a method among {', '.join(METHODS)}, found {self.method!r}"
            )
        if self.draws < 0 or self.max_tokens < 1:
            raise StageError(
                "steered_texts: expected draws of at least 0 and max_tokens of at least 1, found "
                f"draws={self.draws} and max_tokens={self.max_tokens}"
            )
        for name in ("chosen_on", "scored_on"):
            if not getattr(self, name):
                raise PromptError(f"steered_texts: expected at least one pair in {name}, found none")
            for part in (part for pair in getattr(self, name) for part in pair):
                check_tokens(part)

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell per held-out pair.

        Raises:
            ConfigError: The model does not predict the next token.
            InterventionError: A layer does not exist.
        """
        config.require_next_token()
        layers_of(self.layers, config.num_layers)
        return [{"pair": number} for number in range(len(self.scored_on))]

    def prepare(self, model: Model) -> _Chosen:
        """Directions of the candidate layers, and the choice of layer and strength."""
        layers = layers_of(self.layers, model.config.num_layers)
        directions = self._directions(model, layers)
        steps = directions["unit"].values * directions["norm"].values[:, None]
        vectors = np.asarray(steps, np.float32)
        runs, targets = [], []
        for prompt, positive, _ in self.chosen_on:
            steered = [
                _steering(layer, strength * vector)
                for layer, vector in zip(layers, vectors, strict=True)
                for strength in self.strengths
            ]
            runs += [_run(prompt, positive, hooks) for hooks in (None, *steered)]
            targets += [positive] * (1 + len(steered))
        logprobs = np.zeros(len(runs))
        for number, result in stream(model, runs):
            logprobs[number] = _mean_logprob(result, targets[number])
        by_pair = logprobs.reshape(len(self.chosen_on), -1)
        gain = (by_pair[:, 1:] - by_pair[:, :1]).mean(0).reshape(len(layers), len(self.strengths))
        row, column = np.unravel_index(int(gain.argmax()), gain.shape)
        vector = self.strengths[column] * vectors[row]
        random = random_directions(vector, self.draws, seed=self.seed)
        stacked = np.concatenate([vector[None], random])
        return _Chosen(model, directions, gain, layers[row], self.strengths[column], stacked)

    def _directions(self, model: Model, layers: Sequence[int]) -> xr.Dataset:
        """Directions after some layers, of the mean states of the continuations' tokens."""
        import xarray as xr

        pairs = (*self.chosen_on, *self.scored_on)
        hooks = HookSpec().capture(*(HookPoint.resid_post(layer) for layer in layers))
        rows = []
        for prompt, *continuations in pairs:
            for ids in continuations:
                result = model.forward((*prompt, *ids), hooks, want=None)
                rows.append([array(result[point][0, len(prompt) :]).mean(0) for point in result])
        number = np.repeat(np.arange(len(pairs)), 2)
        labels = {
            "side": np.tile([1, -1], len(pairs)),
            "pair": number,
            "held_out": number >= len(self.chosen_on),
        }
        states = xr.DataArray(
            np.array(rows).transpose(1, 0, 2),
            dims=("layer", "token", "hidden"),
            coords={"layer": list(layers)},
        )
        by_token = {name: xr.DataArray(values, dims="token") for name, values in labels.items()}
        directions: xr.Dataset = steering_direction(states, **by_token, method=self.method)
        return directions

    def runs(self, prepared: _Chosen, cell: CellLabels) -> list[Run]:
        """The positive continuation without steering, steered, and steered along random directions; then the
        negative one, in its order and in a random one."""
        prompt, positive, negative = self.scored_on[cell["pair"]]
        hooks = [None, *(_steering(prepared.layer, vector) for vector in prepared.vectors)]
        unsteered = [_run(prompt, ids) for ids in (negative, self._shuffled(negative))]
        return [*(_run(prompt, positive, spec) for spec in hooks), *unsteered]

    def sketch(self, config: Architecture, cell: CellLabels) -> list[Run]:
        """The runs with arbitrary vectors in the middle one of the candidate layers, for planning."""
        layers = layers_of(self.layers, config.num_layers)
        vectors = np.arange(1, self.draws + 2)[:, None] * np.ones(config.hidden_size, np.float32)
        middle = layers[len(layers) // 2]
        return self.runs(_Chosen(None, None, np.zeros(0), middle, 1.0, vectors), cell)  # type: ignore[arg-type]

    def measure(self, prepared: _Chosen, cell: CellLabels, result: HookCache) -> float:
        """Not used, as runs differ in their targets; see `measure_run`."""
        raise NotImplementedError

    def measure_run(self, prepared: _Chosen, cell: CellLabels, number: int, result: HookCache) -> float:
        """Mean log-probability per token of the continuation of one run."""
        _, positive, negative = self.scored_on[cell["pair"]]
        unsteered = {self.draws + 2: negative, self.draws + 3: self._shuffled(negative)}
        return _mean_logprob(result, unsteered.get(number, positive))

    def dataset(self, prepared: _Chosen, cell: CellLabels, measured: Sequence[float]) -> xr.Dataset:
        """Log-probabilities and generated texts of one pair, with the choice of layer and strength."""
        import xarray as xr

        prompt, *_ = self.scored_on[cell["pair"]]
        plain, steered, *random, ordered, shuffled = measured
        texts = {
            name: _continued(prepared.model, prompt, hooks, self.max_tokens)
            for name, hooks in (("plain", None), ("steered", _steering(prepared.layer, prepared.vectors[0])))
        }
        of_pair: dict[str, Any] = {
            "plain": plain,
            "steered": steered,
            "random": random,
            "order": ordered - shuffled,
            **{f"{name}_text": text for name, (text, _) in texts.items()},
            **{f"{name}_loss": loss for name, (_, loss) in texts.items()},
        }
        directions = prepared.directions
        shared = {
            "gain": prepared.gain,
            **{name: directions[name].values for name in ("auc", "norm")},
            "chosen_layer": prepared.layer,
            "chosen_strength": prepared.strength,
        }
        values = {name: np.array([value]) for name, value in of_pair.items()} | shared
        return xr.Dataset(
            {name: self.outputs[name].variable(value) for name, value in values.items()},
            coords={
                "pair": [cell["pair"]],
                "layer": directions["layer"].values,
                "strength": list(self.strengths),
            },
        )

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """All pairs; the choice of layer and strength is the same in each."""
        import xarray as xr

        whole: xr.Dataset = xr.concat(
            parts, "pair", data_vars="minimal", coords="minimal", compat="override", join="override"
        )
        return whole

    def _shuffled(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens in random order, which depends on them and the seed alone."""
        order = np.random.default_rng([self.seed, *ids]).permutation(len(ids))
        return tuple(ids[i] for i in order)


def _steering(layer: int, vector: Array) -> HookSpec:
    """Spec that adds a vector to the residual stream after a layer, at every position."""
    return HookSpec().intervene(HookPoint.resid_post(layer), Add(vector))


def _run(prompt: Sequence[int], target: Sequence[int], hooks: HookSpec | None = None) -> Run:
    """Run over a prompt and its continuation, with the logits that predict the continuation."""
    ids, want = with_target(prompt, target)
    return Run(ids, hooks, want)


def _mean_logprob(result: HookCache, target: Sequence[int]) -> float:
    """Mean log-probability per token of the continuation of a run made by `_run`."""
    logprobs = log_softmax(read_logits(result))
    return float(logprobs[np.arange(len(target)), list(target)].mean())


def _continued(
    model: Model, prompt: tuple[int, ...], hooks: HookSpec | None, max_tokens: int
) -> tuple[str, float]:
    """Greedy continuation of a prompt, and its loss per token in the unsteered model.

    Arguments:
        model: the model.
        prompt: token ids of the prompt.
        hooks: interventions at every step; None for none.
        max_tokens: number of tokens to generate.
    """
    from ...forward.generation.generate import generate

    # eos=(): which tokens end a text depends on files that are in no key.
    (made,) = generate(model, [prompt], hooks, max_tokens=max_tokens, temperature=0.0, eos=())
    ids = tuple(made.token_ids[len(prompt) :])
    ids_run, want = with_target(prompt, ids)
    return made.generated_text or "", -_mean_logprob(model.forward(ids_run, want=want), ids)
