"""Patchscopes: a state of a source prompt, read inside a target prompt.

The state after a layer, at one position of a source prompt, replaces the state after a target layer at the
placeholder of a target prompt; the model then goes on as usual (Ghandeharioun et al. 2024, "Patchscopes: A
Unifying Framework for Inspecting Hidden Representations of Language Models"). The next token at the end of
the target prompt tells what the model reads from the state, and so does the text that it generates.

The logit lens is the special case in which the state is not moved to another prompt: it replaces the state
after the last layer at its own position. Every source is read that way too.

Border: token ids in, labelled arrays out; the planner computes the part of the target prompt before the
placeholder once for all states. Torch is imported when it runs.

Axes: source (a cell each), layer (of the source prompt), target_layer, word. Unit: nats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...pipeline import Output
from ...store.arrays import Array, Floats
from ...store.errors import PromptError, StageError
from ..forward.architectures.points import HookPoint
from ..forward.hooks.interventions import Replace
from ..forward.hooks.spec import HookSpec
from ..forward.hooks.wants import Logits
from ..forward.runs.experiment import CellLabels, Experiment
from ..forward.runs.run import Run, stream
from .effects import array, check_tokens, check_words, layers_of, read_logits
from .metrics import kl_divergence, log_softmax

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture
    from ..forward.hooks.cache import HookCache
    from ..forward.models.model import Model

__all__ = ["OWN", "Patchscopes", "SourceState"]

SourceState = tuple[tuple[int, ...], int]
"""Token ids of a source prompt, and the position whose states are read (negative from the end)."""
OWN = -1
"""Label on the axis `word` of the source's own most likely next token."""
_MEASURED = {
    "rank": (("word",), "1", "number of tokens more likely than the word"),
    "logprob": (("word",), "nats", "log-probability of the word"),
    "kl": ((), "nats", "KL(own next token of the source || next token read)"),
    "top_id": ((), "1", "most likely next token"),
}
"""Measurements of one reading, by name: axes, unit and description."""


def _outputs(prefix: str, axes: tuple[str, ...], how: str) -> dict[str, Output]:
    return {
        f"{prefix}{name}": Output((*axes, *dims), unit, f"{how}: {text}")
        for name, (dims, unit, text) in _MEASURED.items()
    }


@dataclass(frozen=True)
class _Sources:
    """What the unchanged source prompts give."""

    model: Model
    """The loaded model, which generates texts."""
    states: Mapping[SourceState, Array]
    """States float32 [layer, hidden] after the layers of the sweep, by source."""
    logits: Mapping[SourceState, Floats]
    """Next-token logits float64 [vocab] at the position of the source."""


@dataclass(frozen=True)
class Patchscopes(Experiment):
    """Reads states of source prompts inside a target prompt, for every pair of layers.

    Raises:
        StageError: A source or word occurs twice, or the number of tokens is negative.
        PromptError: There are no sources, a prompt is empty, or a position is outside its prompt.
    """

    name: ClassVar[str] = "patchscopes"
    version: ClassVar[int] = 1
    reads_text: ClassVar[bool] = True
    outputs: ClassVar[Mapping[str, Output]] = {
        **_outputs("", ("source", "layer", "target_layer"), "read in the target prompt"),
        **_outputs("lens_", ("source", "layer"), "read by the logit lens"),
        "own_id": Output(("source",), "1", "most likely next token of the source prompt"),
        "text": Output(
            ("source", "layer", "target_layer"),
            "1",
            "text generated after the target prompt",
            is_optional=True,
        ),
    }

    sources: tuple[SourceState, ...]
    """Source prompts, each with the position whose states are read."""
    target: tuple[int, ...]
    """Token ids of the target prompt."""
    placeholder: int = -1
    """Position of the target prompt whose state is replaced, negative from the end."""
    layers: tuple[int, ...] | None = None
    """Source layers: layers whose residual stream is read from the source prompts; None for all."""
    target_layers: tuple[int, ...] | None = None
    """Target layers: layers whose residual stream is replaced at the placeholder; None for all."""
    words: tuple[int, ...] = ()
    """Token ids whose rank and log-probability are measured, besides the source's own next token."""
    max_tokens: int = 0
    """Number of tokens generated after the target prompt, for every pair of layers; 0 for no texts."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise PromptError("patchscopes: expected at least one source prompt, found none")
        for name in ("sources", "words"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise StageError(f"patchscopes: expected {name} that differ, found one twice; leave it out")
        if self.max_tokens < 0:
            raise StageError(
                f"patchscopes: expected max_tokens of at least 0, found {self.max_tokens}; 0 generates none"
            )
        for ids, position, name in (
            *((ids, position, "a source position") for ids, position in self.sources),
            (self.target, self.placeholder, "the placeholder"),
        ):
            check_tokens(ids, self.words)
            if not -len(ids) <= position < len(ids):
                raise PromptError(
                    f"patchscopes: expected {name} from {-len(ids)} to {len(ids) - 1}, as the prompt has "
                    f"{len(ids)} tokens, found {position}"
                )

    def params(self) -> dict[str, Any]:
        """Fields that enter the key of results; sources are labels of cells."""
        return {name: value for name, value in vars(self).items() if name != "sources"}

    def outputs_on(self, config: Architecture) -> Mapping[str, Output]:
        """Declared outputs; `text` only if texts are generated."""
        return {name: output for name, output in self.outputs.items() if name != "text" or self.max_tokens}

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell per source.

        Raises:
            ConfigError: The model does not predict the next token.
            InterventionError: A layer does not exist.
            PromptError: A word is outside the vocabulary.
        """
        config.require_next_token()
        self._grid(config)
        check_words(self.words, config.vocab_size)
        return [{"source": [list(ids), position]} for ids, position in self.sources]

    def _grid(self, config: Architecture) -> tuple[list[int], list[int]]:
        """Layers of the sources, and target layers."""
        n_layers = config.num_layers
        return layers_of(self.layers, n_layers), layers_of(self.target_layers, n_layers)

    def prepare(self, model: Model) -> _Sources:
        """States and next-token logits of all sources, from unchanged runs."""
        layers, _ = self._grid(model.config)
        hooks = HookSpec().capture(*map(HookPoint.resid_post, layers))
        runs = [Run(ids, hooks, Logits((position,))) for ids, position in self.sources]
        states, logits = {}, {}
        for number, result in stream(model, runs):
            source = self.sources[number]
            states[source] = np.stack(
                [array(result[HookPoint.resid_post(layer)][0, source[1]]) for layer in layers]
            )
            logits[source] = read_logits(result)[0]
        return _Sources(model, states, logits)

    def runs(self, prepared: _Sources, cell: CellLabels) -> list[Run]:
        """For each layer, the state read by the logit lens, and in the target prompt at each target layer."""
        config, source = prepared.model.config, _source(cell)
        _, target_layers = self._grid(config)
        return self._readings(config.num_layers, target_layers, source, prepared.states[source])

    def sketch(self, config: Architecture, cell: CellLabels) -> list[Run]:
        """The runs with arbitrary states that differ, for planning."""
        layers, target_layers = self._grid(config)
        states = np.arange(1, len(layers) + 1)[:, None] * np.ones(config.hidden_size, np.float32)
        return self._readings(config.num_layers, target_layers, _source(cell), states)

    def _readings(
        self, n_layers: int, target_layers: Sequence[int], source: SourceState, states: Array
    ) -> list[Run]:
        ids, position = source
        runs = []
        for state in states:
            runs.append(Run(ids, _replacing(n_layers - 1, position, state), Logits((position,))))
            runs += [Run(self.target, _replacing(layer, self.placeholder, state)) for layer in target_layers]
        return runs

    def measure(self, prepared: _Sources, cell: CellLabels, result: HookCache) -> dict[str, Any]:
        """Measurements of one reading, by name."""
        source_logits, row = prepared.logits[_source(cell)], read_logits(result)[0]
        words = [int(source_logits.argmax()), *self.words]
        # Tokens of an equal logit do not count, as in the metric Rank.
        rank = len(row) - np.searchsorted(np.sort(row), row[words], side="right")
        return {
            "rank": rank,
            "logprob": log_softmax(row)[words],
            "kl": float(kl_divergence(source_logits, row)),
            "top_id": int(row.argmax()),
        }

    def dataset(self, prepared: _Sources, cell: CellLabels, measured: Sequence[dict[str, Any]]) -> xr.Dataset:
        """Readings of one source, for every pair of layers."""
        import xarray as xr

        source = _source(cell)
        layers, target_layers = self._grid(prepared.model.config)
        values: dict[str, Any] = {"own_id": np.array([prepared.logits[source].argmax()], np.int32)}
        for name in _MEASURED:
            kind = np.float64 if name in ("logprob", "kl") else np.int32
            readings = np.array([reading[name] for reading in measured], kind)
            readings = readings.reshape(1, len(layers), 1 + len(target_layers), *readings.shape[1:])
            values[f"lens_{name}"], values[name] = readings[:, :, 0], readings[:, :, 1:]
        if self.max_tokens:
            states = prepared.states[source]
            texts = [[self._text(prepared.model, at, state) for at in target_layers] for state in states]
            values["text"] = np.array([texts])
        return xr.Dataset(
            {name: self.outputs[name].variable(value) for name, value in values.items()},
            coords={
                "source": [self.sources.index(source)],
                "layer": layers,
                "target_layer": target_layers,
                "word": [OWN, *self.words],
            },
        )

    def _text(self, model: Model, target_layer: int, state: Array) -> str:
        """Text generated after the target prompt with a state put after a layer."""
        from ..forward.generation.generate import generate

        # Counted from the start: the prompt grows.
        hooks = _replacing(target_layer, self.placeholder % len(self.target), state)
        # eos=(): which tokens end a text depends on files that are in no key.
        (made,) = generate(
            model, [self.target], hooks, max_tokens=self.max_tokens, temperature=0.0, eos=(), cache=True
        )
        return made.generated_text or ""

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """All sources, in order."""
        import xarray as xr

        whole: xr.Dataset = xr.concat(
            parts, "source", data_vars="minimal", coords="minimal", compat="override", join="override"
        )
        return whole.assign_coords(source=np.arange(len(parts)))


def _source(cell: CellLabels) -> SourceState:
    ids, position = cell["source"]
    return tuple(ids), position


def _replacing(layer: int, position: int, state: Array) -> HookSpec:
    """Spec that replaces the residual stream after a layer at one position by a state [hidden]."""
    return HookSpec().intervene(HookPoint.resid_post(layer), Replace(state, positions=(position,)))
