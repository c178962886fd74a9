"""Contrastive steering vectors, and how similar later layers stay to the unsteered run.

A contrastive vector is a difference of residual states, of a prompt and its counterpart or of the means over
two lists of prompts (Rimsky et al. 2024, "Steering Llama 2 via Contrastive Activation Addition"). v_l is
added to resid_post of layer l at one position, and at every later layer o the last token's state is compared
with the unsteered one:

    M[l][o] = cos(baseline_o, steered_o)

M[l][l] is taken right after the addition (candle-mi takes it before, where it is 1). Layers before l are
unchanged, so M is 1 there. pushes/absorption.py decides from a row of M whether the perturbation was
absorbed.

Border: token ids and positions, no text. Effects on the answer are in effects.py, random directions in
pushes/random_pushes.py; the planner shares work between runs. Torch is imported when it runs.

Axes: layer (where the vector is added), strength (factor of the vector), read_layer, hidden, rank.
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
"""Smallest cosine at which two states count as near."""
_NORM = 1e-10
"""Norm below which a vector has no direction."""
PromptTokens = tuple[tuple[int, ...], ...]
"""Token ids of several prompts."""


@dataclass(frozen=True)
class ContrastiveVectors(Experiment):
    """Mean residual state of two lists of prompts after every layer, and the difference of the means."""

    name: ClassVar[str] = "contrastive_vectors"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "mean_state": Output(
            ("side", "layer", "hidden"), "activation", "mean residual state after each layer"
        ),
        "vector": Output(("layer", "hidden"), "activation", "positive mean - negative mean"),
        "norm": Output(("layer",), "activation", "norm of the difference of the means"),
    }

    positive: PromptTokens
    """Token ids of the prompts towards whose mean state the vector points."""
    negative: PromptTokens
    """Token ids of the prompts whose mean state is subtracted."""
    positive_positions: tuple[int, ...] = (-1,)
    """State position in each positive prompt, or one for all; negative positions count from the end."""
    negative_positions: tuple[int, ...] = (-1,)
    """State position in each negative prompt, or a single position for all."""
    normalised: bool = False
    """Whether each layer's vector is scaled to norm 1."""

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """Two cells: the positive and the negative prompts.

        Raises:
            PromptError: There are no positive or no negative prompts, or a position is outside its prompt.
        """
        for side in ("positive", "negative"):
            self._places(side)
        return [{"side": "positive"}, {"side": "negative"}]

    def runs(self, prepared: Any, cell: CellLabels) -> list[Run]:
        """One run per prompt, which captures resid_post of every layer and computes no logits."""
        # want=None: a mean of states needs no logits, and a run without them no unembedding.
        hooks = HookSpec().capture("blocks.*.hook_resid_post")
        return [Run(ids, hooks, None) for ids, _ in self._places(cell["side"])]

    def measure(self, prepared: Any, cell: CellLabels, result: HookCache) -> dict[int, Array]:
        """States after every layer [layer, hidden], by the positions that are read in this prompt."""
        ids = tuple(result.tokens[0])
        # One prompt may occur several times with different positions: its run is shared by all of them.
        positions = {read_position for prompt, read_position in self._places(cell["side"]) if prompt == ids}
        return {
            position: np.stack([array(result[point][0, position]) for point in result])
            for position in positions
        }

    def dataset(self, prepared: Any, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """mean_state [side, layer, hidden] of one side, float32; the coordinate `prompts` is their number."""
        import xarray as xr

        positions = [position for _, position in self._places(cell["side"])]
        states = [by_position[position] for by_position, position in zip(measured, positions, strict=True)]
        # A vector is a small difference of two means: they are accumulated in float64.
        mean = np.mean(np.asarray(states, np.float64), axis=0)
        return xr.Dataset(
            {"mean_state": self.outputs["mean_state"].variable(mean.astype(np.float32)[None])},
            coords={
                "side": [cell["side"]],
                "layer": np.arange(len(mean)),
                "prompts": ("side", [len(positions)], {"long_name": "number of prompts in the mean"}),
            },
        )

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """Mean states of both sides, their difference `vector` [layer, hidden], and its norm [layer].

        Raises:
            StageError: `normalised` is set, and the difference of some layer is zero.
        """
        import xarray as xr

        whole = xr.concat(parts, "side", join="exact", coords="minimal", compat="override")
        difference = difference_of_means(whole["mean_state"].drop_vars("prompts"))
        vector, norm = difference["direction"], difference["norm"]
        if self.normalised:
            # A vector of norm 0 would become NaN at every strength.
            if not (norm > _NORM).all():
                raise StageError(
                    "expected positive and negative prompts whose mean states differ in every layer, found a "
                    "layer in which they are equal, so that the vector cannot be normalised; choose other "
                    "prompts or positions, or normalised=False"
                )
            vector = vector / norm
        whole["vector"] = vector.assign_attrs(self.outputs["vector"].attrs)
        whole["norm"] = norm.assign_attrs(self.outputs["norm"].attrs)
        return whole

    def computed(self, model: Model) -> xr.Dataset:
        """The same dataset, computed with a loaded model and without a store."""
        parts = []
        for cell in self.cells(model.config):
            runs = self.runs(None, cell)
            passes = (model.forward(run.prompt, run.hooks, want=None) for run in runs)
            parts.append(self.dataset(None, cell, [self.measure(None, cell, result) for result in passes]))
        return self.joined(parts)

    def _places(self, side: str) -> list[tuple[tuple[int, ...], int]]:
        """(token ids, position counted from the start) of each prompt of a side, "positive" or "negative"."""
        prompts: PromptTokens = getattr(self, side)
        positions: tuple[int, ...] = getattr(self, f"{side}_positions")
        if not prompts:
            raise PromptError(f"expected at least one {side} prompt, found none")
        if len(positions) not in (1, len(prompts)):
            raise PromptError(
                f"expected one position for all {side} prompts, or one for each of the {len(prompts)}, found "
                f"{len(positions)}"
            )
        per_prompt = positions * len(prompts) if len(positions) == 1 else positions
        places = []
        for number, (ids, position) in enumerate(zip(prompts, per_prompt, strict=True)):
            check_tokens(ids)
            if not -len(ids) <= position < len(ids):
                raise PromptError(
                    f"expected a position from {-len(ids)} to {len(ids) - 1} (negative: from the end) in "
                    f"{side} prompt {number}, which has {len(ids)} tokens, found {position}"
                )
            places.append((ids, position % len(ids)))
        return places


@dataclass(frozen=True)
class _Prepared:
    """Logits and states of the unsteered run, and the vectors that are added."""

    unchanged: Baseline
    """Logits of the unsteered run."""
    states: Array
    """State of the last token after each layer, float32 [layer, hidden]."""
    vectors: Array
    """Contrastive vector of each layer [layer, hidden]."""


@dataclass(frozen=True)
class Pushes(Experiment):
    """Base class of experiments that add a vector after one layer at a time, at several strengths."""

    tokens: tuple[int, ...]
    """Token ids of the prompt that is steered."""
    positive: PromptTokens
    """Token ids of the prompts towards whose mean state the vector points."""
    negative: PromptTokens
    """Token ids of the prompts whose mean state is subtracted."""
    positive_positions: tuple[int, ...] = (-1,)
    """State position in each positive prompt, or one for all; negative positions count from the end."""
    negative_positions: tuple[int, ...] = (-1,)
    """State position in each negative prompt, or a single position for all."""
    normalised: bool = False
    """Whether each layer's vector is scaled to norm 1."""
    position: int = -1
    """Position at which the vector is added; negative ones count from the end."""
    strengths: tuple[float, ...] = (1.0,)
    """Factors by which the vector is multiplied, finite and distinct."""
    layers: tuple[int, ...] | None = None
    """Layers after which the vector is added, one stored cell each; None for all layers."""

    def params(self) -> dict[str, Any]:
        """Fields that enter the key of results: all except `layers`, which are labels of cells."""
        return {name: value for name, value in vars(self).items() if name != "layers"}

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell per layer.

        Raises:
            PromptError: The prompt is empty, or the position is outside of it.
            StageError: Strengths are missing, repeated, infinite or NaN.
            InterventionError: A layer does not exist.
        """
        check_tokens(self.tokens)
        length = len(self.tokens)
        if not -length <= self.position < length:
            raise PromptError(
                f"expected the position of the added vector from {-length} to {length - 1} (negative: from "
                f"the end), as the prompt has {length} tokens, found {self.position}"
            )
        if not self.strengths or len(set(self.strengths)) != len(self.strengths):
            found = list(self.strengths) or "none"
            raise StageError(f"expected at least one strength, and each strength once, found {found}")
        if not np.isfinite(self.strengths).all():
            raise StageError(f"expected finite strengths, found {list(self.strengths)}")
        self.contrast.cells(config)
        return [{"layer": layer} for layer in layers_of(self.layers, config.num_layers)]

    def pushed(
        self, ids: tuple[int, ...], want: Logits | None, layer: int, n_layers: int, vector: Array
    ) -> list[Run]:
        """One run per strength, which adds a vector after a layer and captures all states from there on.

        Arguments:
            ids: Token ids of the prompt, followed by those of the target but its last token.
            want: Logits to compute in each run; None for none.
            layer: Layer after which the vector is added.
            n_layers: Number of layers of the model.
            vector: Vector that is multiplied by the strength, float32 [hidden].
        """
        later = [HookPoint.resid_post(o) for o in range(layer, n_layers)]
        # Counted from the start: the run may have pieces of a target behind the prompt.
        position = self.position % len(self.tokens)
        return [
            Run(
                ids,
                HookSpec()
                .intervene(later[0], Add((strength * vector)[None], positions=(position,)))
                .capture(*later),
                want,
            )
            for strength in self.strengths
        ]

    def similarity(self, states: Array, result: HookCache) -> Array:
        """Cosine, after each layer, of the last prompt token's state with that of the unsteered run.

        Arguments:
            states: States of the unsteered run [layer, hidden].
            result: Steered run, with resid_post captured from the pushed layer on.

        Returns:
            float64 [read_layer]; 1 before the pushed layer.
        """
        cosines = np.ones(len(states))
        for point in result:
            cosines[point.layer] = cosine(states[point.layer], array(result[point][0, len(self.tokens) - 1]))
        return cosines

    @property
    def contrast(self) -> ContrastiveVectors:
        """Experiment that computes the vectors which are added."""
        return ContrastiveVectors(
            self.positive, self.negative, self.positive_positions, self.negative_positions, self.normalised
        )


@dataclass(frozen=True)
class PushedStates(Pushes):
    """Adds a contrastive vector after one layer at a time: effects on the answer and on later states.

    Fields other than `target` and `top_k` are those of `Pushes`.
    """

    name: ClassVar[str] = "steering_convergence"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        **effects_along("layer", "strength"),
        "similarity": Output(
            ("layer", "strength", "read_layer"),
            "1",
            "cosine of the last token's state with that of the unsteered run",
        ),
        "vector_norm": Output(("layer",), "activation", "norm of the added vector at strength 1"),
        "state_norm": Output(("layer",), "activation", "norm of the last token's unsteered state"),
    }

    target: tuple[int, ...] = ()
    """Token ids of a word whose probability is measured; may be empty."""
    top_k: int = 10
    """Number of tokens, those of most changed probability, that are stored for each run."""

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell per layer after which the vector is added.

        Raises:
            PromptError: The prompt is empty, the position is outside of it, or a token id is invalid.
            ConfigError: The target has several tokens, and the model is bidirectional.
            StageError: Strengths are missing, repeated, infinite or NaN.
            InterventionError: A layer does not exist.
        """
        check_tokens(self.tokens, self.target)
        check_target(self.target, config)
        return super().cells(config)

    def prepare(self, model: Model) -> _Prepared:
        """Unsteered run with the states of the last prompt token, and the contrastive vectors."""
        ids, want = with_target(self.tokens, self.target)
        hooks = HookSpec().capture("blocks.*.hook_resid_post")
        result = model.forward(ids, hooks, want=want)
        # The state of the prompt's last token, not of the target's pieces behind it.
        last = len(self.tokens) - 1
        states = np.stack([array(result[point][0, last]) for point in result])
        vectors = self.contrast.computed(model)["vector"].values
        return _Prepared(Baseline(model.config, read_logits(result), {}), states, vectors)

    def runs(self, prepared: _Prepared, cell: CellLabels) -> list[Run]:
        """One run per strength, on the prompt followed by the target."""
        ids, want = with_target(self.tokens, self.target)
        vector = prepared.vectors[cell["layer"]]
        return self.pushed(ids, want, cell["layer"], len(prepared.states), vector)

    def measure(self, prepared: _Prepared, cell: CellLabels, result: HookCache) -> dict[str, Any]:
        """Effects of one run on the next token by name, with `similarity` [read_layer]."""
        similarity = self.similarity(prepared.states, result)
        measured = effect(prepared.unchanged.logits, read_logits(result), self.target, self.top_k)
        return measured | {"similarity": similarity}

    def dataset(self, prepared: _Prepared, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """Effects [layer, strength], similarity [layer, strength, read_layer], norms [layer]."""
        import xarray as xr

        layer = cell["layer"]
        # [None]: the layer axis of the cell, along which cells are concatenated.
        similarity = np.array([run["similarity"] for run in measured])[None]
        lengths = [float(np.linalg.norm(rows[layer])) for rows in (prepared.vectors, prepared.states)]
        arrays = {"similarity": similarity, "vector_norm": lengths[:1], "state_norm": lengths[1:]}
        return xr.Dataset(
            {
                **gather(measured, {"layer": 1, "strength": len(self.strengths)}),
                **{name: self.outputs[name].variable(values) for name, values in arrays.items()},
                **of_baseline(prepared.unchanged, self.target, self.top_k),
            },
            coords={
                "layer": [layer],
                "strength": list(self.strengths),
                "read_layer": np.arange(similarity.shape[-1]),
            },
        )

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """Cells of all layers, concatenated along `layer`."""
        return along_layers(parts)


def cosine(x: Array, y: Array) -> float:
    """Cosine of two vectors, computed in float64; 0 if either has norm 0.

    Arguments:
        x: Vector [hidden].
        y: Vector [hidden].
    """
    a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
    norm = float(np.linalg.norm(a) * np.linalg.norm(b))
    return 0.0 if norm < _NORM else float(a @ b) / norm


def best_layer(similarity: Mapping[int, Array], kl: Mapping[int, float], near: float = NEAR) -> int:
    """Pushed layer to look at more closely, as candle-mi selects it; a heuristic, not a test.

    This is the deepest layer whose push is near the unsteered state after some later layer. If there is none,
    it is the layer of smallest KL divergence, the earlier of equals.

    Arguments:
        similarity: Cosines of steered and unsteered states [read_layer], by pushed layer.
        kl: KL(baseline || steered) in nats, by pushed layer.
        near: Smallest cosine at which two states count as near.
    """
    deep = [layer for layer, row in similarity.items() if (np.asarray(row)[layer + 1 :] >= near).any()]
    # Keyed by (KL, layer): min alone would depend on the order of the mapping.
    return max(deep) if deep else min(kl, key=lambda layer: (kl[layer], layer))
