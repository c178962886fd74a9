"""Does a push heal? Contrastive steering vectors, and how soon later layers look as if nothing had happened.

A contrastive vector is a difference of residual states: of a prompt and its counterpart, or of the means over
two lists of prompts (Rimsky et al. 2024, "Steering Llama 2 via Contrastive Activation Addition"). Here v_l is
added to resid_post of layer l at one position, and at every later layer o the state of the last token is
compared with the undisturbed one:

    M[l][o] = cos(baseline_o, steered_o)

M[l][l] is the state right after the addition (candle-mi's, taken before it, is 1). Layers before l are
untouched: 1. Whether a push was absorbed, absorption.py says of a row of M.

Border: token ids and positions; knows no text. What an addition did to the answer is in effects.py, pushes in
random directions are in random_pushes.py, how runs share their work is the planner's. Never imports torch
until it runs.

Axes: layer (where the vector is added), strength (its factor), read_layer, hidden, rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...pipeline import Output
from ...store.arrays import Array
from ...store.errors import PromptError, StageError
from ..forward.architectures.points import HookPoint
from ..forward.hooks.interventions import Add
from ..forward.hooks.spec import HookSpec
from ..forward.runs.experiment import CellLabels, Experiment
from ..forward.runs.run import Run
from ..geometry.directions import difference_of_means
from .effects import (
    Baseline,
    along_layers,
    array,
    check_target,
    check_tokens,
    effect,
    effects_along,
    gather,
    layers_of,
    of_baseline,
    read_logits,
    with_target,
)

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture
    from ..forward.hooks.cache import HookCache
    from ..forward.hooks.wants import Logits
    from ..forward.models.model import Model

__all__ = ["NEAR", "ContrastiveVectors", "PromptTokens", "PushedStates", "Pushes", "best_layer", "cosine"]

NEAR = 0.95
"""Cosine from which on two states are called near."""
_NORM = 1e-10
PromptTokens = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ContrastiveVectors(Experiment):
    """Mean residual state after every layer, at one position of each prompt, of two lists of prompts; and
    the difference of the means.

    positive, negative: token ids; the vector points from negative to positive. positive_positions,
    negative_positions: one per prompt, or one for all; negative ones count from the end. normalised: scale
    each layer's vector to length 1.
    """

    name: ClassVar[str] = "contrastive_vectors"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "mean_state": Output(
            ("side", "layer", "hidden"), "activation", "mean residual state after each layer"
        ),
        "vector": Output(("layer", "hidden"), "activation", "positive mean - negative mean"),
        "norm": Output(("layer",), "activation", "length of the difference of the means"),
    }

    positive: PromptTokens
    negative: PromptTokens
    positive_positions: tuple[int, ...] = (-1,)
    negative_positions: tuple[int, ...] = (-1,)
    normalised: bool = False

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """The two sides. Raises PromptError for an empty side, or a position a prompt does not have."""
        for side in ("positive", "negative"):
            self._places(side)
        return [{"side": "positive"}, {"side": "negative"}]

    def runs(self, prepared: Any, cell: CellLabels) -> list[Run]:
        """One per prompt of the cell's side, with the state after every layer and no logits."""
        hooks = HookSpec().capture("blocks.*.hook_resid_post")
        return [Run(ids, hooks, None) for ids, _ in self._places(cell["side"])]

    def measure(self, prepared: Any, cell: CellLabels, result: HookCache) -> dict[int, Array]:
        """The states after every layer, [layer, hidden], at each position asked for of this prompt."""
        ids = tuple(result.tokens[0])
        wanted = {position for prompt, position in self._places(cell["side"]) if prompt == ids}
        return {place: np.stack([array(result[point][0, place]) for point in result]) for place in wanted}

    def dataset(self, prepared: Any, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """mean_state [side, layer, hidden] of one side, float32; `prompts`: how many the mean is over."""
        import xarray as xr

        places = [position for _, position in self._places(cell["side"])]
        states = [held[position] for held, position in zip(measured, places, strict=True)]
        mean = np.mean(np.asarray(states, np.float64), axis=0)
        return xr.Dataset(
            {"mean_state": self.outputs["mean_state"].variable(mean.astype(np.float32)[None])},
            coords={
                "side": [cell["side"]],
                "layer": np.arange(len(mean)),
                "prompts": ("side", [len(places)], {"long_name": "prompts the mean is over"}),
            },
        )

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """Both sides, and their difference: vector [layer, hidden], norm [layer] (before normalising)."""
        import xarray as xr

        found = xr.concat(parts, "side", join="exact", coords="minimal", compat="override")
        told = difference_of_means(found["mean_state"].drop_vars("prompts"))
        vector, norm = told["direction"], told["norm"]
        if self.normalised:
            if not (norm > _NORM).all():
                raise StageError(
                    "expected two sides that differ in every layer, found a difference of 0, which has no "
                    "direction; choose other prompts or positions, or normalised=False"
                )
            vector = vector / norm
        found["vector"] = vector.assign_attrs(self.outputs["vector"].attrs)
        found["norm"] = norm.assign_attrs(self.outputs["norm"].attrs)
        return found

    def computed(self, model: Model) -> xr.Dataset:
        """The same in memory, for whoever holds a model."""
        parts = []
        for cell in self.cells(model.config):
            runs = self.runs(None, cell)
            passes = (model.forward(run.prompt, run.hooks, want=None) for run in runs)
            parts.append(self.dataset(None, cell, [self.measure(None, cell, one) for one in passes]))
        return self.joined(parts)

    def _places(self, side: str) -> list[tuple[tuple[int, ...], int]]:
        """(prompt, position counted from its start) of one side."""
        prompts: PromptTokens = getattr(self, side)
        positions: tuple[int, ...] = getattr(self, f"{side}_positions")
        if not prompts:
            raise PromptError(f"expected at least one {side} prompt, found none")
        if len(positions) not in (1, len(prompts)):
            raise PromptError(
                f"expected one {side} position, or one per prompt ({len(prompts)}), found {len(positions)}"
            )
        spread = positions * len(prompts) if len(positions) == 1 else positions
        found = []
        for number, (ids, position) in enumerate(zip(prompts, spread, strict=True)):
            check_tokens(ids)
            if not -len(ids) <= position < len(ids):
                raise PromptError(
                    f"expected a position in 0..{len(ids) - 1} of {side} prompt {number} (or negative, from "
                    f"the end), found {position}"
                )
            found.append((ids, position % len(ids)))
        return found


@dataclass(frozen=True)
class _Prepared:
    """The undisturbed run of the prompt, and what is added to it.

    states: last token after each layer, [layer, hidden]. vectors: [layer, hidden].
    """

    unchanged: Baseline
    states: Array
    vectors: Array


@dataclass(frozen=True)
class Pushes(Experiment):
    """Something added after each layer by itself, at several strengths: what experiments of it share.

    tokens: ids of the prompt. positive … normalised: the vectors, as in `ContrastiveVectors`. position: where
    they are added; negative counts from the end. layers: None for all.
    """

    tokens: tuple[int, ...]
    positive: PromptTokens
    negative: PromptTokens
    positive_positions: tuple[int, ...] = (-1,)
    negative_positions: tuple[int, ...] = (-1,)
    normalised: bool = False
    position: int = -1
    strengths: tuple[float, ...] = (1.0,)
    layers: tuple[int, ...] | None = None

    def params(self) -> dict[str, Any]:
        """Which layers is said by the cells: one more layer leaves the others what they are."""
        return {name: value for name, value in vars(self).items() if name != "layers"}

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One per layer. Raises PromptError, InterventionError or StageError for what cannot be run."""
        check_tokens(self.tokens)
        length = len(self.tokens)
        if not -length <= self.position < length:
            raise PromptError(
                f"expected a position in 0..{length - 1} (or negative, from the end), found {self.position}"
            )
        if not self.strengths or len(set(self.strengths)) != len(self.strengths):
            found = list(self.strengths) or "none"
            raise StageError(f"expected strengths, each once, found {found}")
        if not np.isfinite(self.strengths).all():
            raise StageError(f"expected finite strengths, found {list(self.strengths)}")
        self.contrast.cells(config)
        return [{"layer": layer} for layer in layers_of(self.layers, config.num_layers)]

    def pushed(
        self, ids: tuple[int, ...], want: Logits | None, layer: int, n_layers: int, vector: Array
    ) -> list[Run]:
        """A run per strength, with a vector added after a layer and the states from there on captured."""
        later = [HookPoint.resid_post(o) for o in range(layer, n_layers)]
        place = self.position % len(self.tokens)
        return [
            Run(
                ids,
                HookSpec()
                .intervene(later[0], Add((strength * vector)[None], positions=(place,)))
                .capture(*later),
                want,
            )
            for strength in self.strengths
        ]

    def similarity(self, states: Array, result: HookCache) -> Array:
        """Cosines of the last token's states with undisturbed ones [layer, hidden]; [read_layer], 1 in layers
        before the push."""
        found = np.ones(len(states))
        for point in result:
            found[point.layer] = cosine(states[point.layer], array(result[point][0, len(self.tokens) - 1]))
        return found

    @property
    def contrast(self) -> ContrastiveVectors:
        """The experiment that makes the vectors that are added."""
        return ContrastiveVectors(
            self.positive, self.negative, self.positive_positions, self.negative_positions, self.normalised
        )


@dataclass(frozen=True)
class PushedStates(Pushes):
    """A contrastive vector added after each layer by itself, at several strengths.

    target: the pieces of a word to follow, may be empty. The rest: see `Pushes`.
    """

    name: ClassVar[str] = "steering_convergence"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        **effects_along("layer", "strength"),
        "similarity": Output(
            ("layer", "strength", "read_layer"),
            "1",
            "cosine of the last token's state with the undisturbed one",
        ),
        "vector_norm": Output(("layer",), "activation", "length of the vector"),
        "state_norm": Output(("layer",), "activation", "length of the last token's undisturbed state"),
    }

    target: tuple[int, ...] = ()
    top_k: int = 10

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """As `Pushes`, and of the target."""
        check_tokens(self.tokens, self.target)
        check_target(self.target, config)
        return super().cells(config)

    def prepare(self, model: Model) -> _Prepared:
        """The undisturbed run, and the vectors."""
        ids, want = with_target(self.tokens, self.target)
        hooks = HookSpec().capture("blocks.*.hook_resid_post")
        result = model.forward(ids, hooks, want=want)
        last = len(self.tokens) - 1
        states = np.stack([array(result[point][0, last]) for point in result])
        vectors = self.contrast.computed(model)["vector"].values
        return _Prepared(Baseline(model.config, read_logits(result), {}), states, vectors)

    def runs(self, prepared: _Prepared, cell: CellLabels) -> list[Run]:
        """One per strength, as `pushed`, with pieces of the target behind the prompt."""
        ids, want = with_target(self.tokens, self.target)
        vector = prepared.vectors[cell["layer"]]
        return self.pushed(ids, want, cell["layer"], len(prepared.states), vector)

    def measure(self, prepared: _Prepared, cell: CellLabels, result: HookCache) -> dict[str, Any]:
        """What changed, and how similar the last token's state is after each layer, [read_layer]."""
        similarity = self.similarity(prepared.states, result)
        measured = effect(prepared.unchanged.logits, read_logits(result), self.target, self.top_k)
        return measured | {"similarity": similarity}

    def dataset(self, prepared: _Prepared, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """The effects [layer, strength], and similarity [layer, strength, read_layer]."""
        import xarray as xr

        layer = cell["layer"]
        similarity = np.array([one["similarity"] for one in measured])[None]
        lengths = [float(np.linalg.norm(rows[layer])) for rows in (prepared.vectors, prepared.states)]
        own = {"similarity": similarity, "vector_norm": lengths[:1], "state_norm": lengths[1:]}
        return xr.Dataset(
            {
                **gather(measured, {"layer": 1, "strength": len(self.strengths)}),
                **{name: self.outputs[name].variable(values) for name, values in own.items()},
                **of_baseline(prepared.unchanged, self.target, self.top_k),
            },
            coords={
                "layer": [layer],
                "strength": list(self.strengths),
                "read_layer": np.arange(similarity.shape[-1]),
            },
        )

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """Cells of all layers, along `layer`."""
        return along_layers(parts)


def cosine(one: Array, other: Array) -> float:
    """Cosine of two vectors; 0 where either has no length."""
    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    norm = float(np.linalg.norm(a) * np.linalg.norm(b))
    return 0.0 if norm < _NORM else float(a @ b) / norm


def best_layer(similarity: Mapping[int, Array], kl: Mapping[int, float], near: float = NEAR) -> int:
    """The deepest layer whose push is near the undisturbed state after some later layer; if none is, the one
    of smallest KL, the earlier of equals. Where to look closer, as candle-mi chooses it: no verdict.

    similarity: [read_layer], by layer pushed.
    """
    deep = [layer for layer, row in similarity.items() if (np.asarray(row)[layer + 1 :] >= near).any()]
    return max(deep) if deep else min(kl, key=lambda layer: (kl[layer], layer))
