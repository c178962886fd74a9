"""CounterFact patching: at which positions and depths does a patch turn one fact into another?

In the run of the original prompt, resid_post of one position is overwritten, in every layer of a block, by
the counterfactual prompt's state; everything else is computed normally. Measured is the change of the
next-token distribution (protocol: Transluce's activation-patching data, after Li et al. 2025). candle-mi
replaces the whole sequence at every layer of the block, so that only the block's last layer has an effect;
here each layer's patch acts.

The effect of such patches on attention is in factual_routing.py.

Border: token ids and positions in, labelled arrays out; workflows make texts and token labels. One cell is
one pair of prompts. Planning imports no torch.

Axes: pair; patch (one position and block of one pair).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from ...pipeline import Output
from ...store.arrays import Floats
from ...store.errors import PromptError, StageError
from ..forward.architectures.points import HookPoint
from ..forward.hooks.interventions import Replace
from ..forward.hooks.spec import HookSpec
from ..forward.runs.experiment import CellLabels, Experiment
from ..forward.runs.run import Run, stream
from .grids.patching import common_ends
from .grids.patching_grid import in_range
from .grids.patching_results import Blank, as_vector
from .metrics import kl_divergence

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from ..forward.architectures.architecture import Architecture
    from ..forward.hooks.cache import HookCache
    from ..forward.models.model import Model

__all__ = [
    "CounterFactPatching",
    "FactTokens",
    "blocks_of",
    "differing_span",
    "position_map",
]

NEXT_TOKENS: Mapping[str, Output] = {
    f"{name}_token_id": Output(("pair",), "1", f"most likely next token of the {name} prompt")
    for name in ("original", "counterfactual")
}
"""Declared outputs that two experiments share: the most likely next token of each unpatched prompt."""


@dataclass(frozen=True)
class FactTokens:
    """A pair of prompts as token ids, and the positions that state the fact."""

    original: tuple[int, ...]
    """Token ids of the prompt that is patched."""
    counterfactual: tuple[int, ...]
    """Token ids of the prompt whose states are patched in."""
    fact: tuple[int, ...]
    """Positions, in the original prompt, of the tokens that state the fact."""
    subject: tuple[tuple[int, int], ...] | None = None
    """(position, counterfactual position) of each subject token, which `FactualRouting` patches together.

    `CounterFactPatching` does not use it.
    """

    def check(self) -> None:
        """Raise PromptError if the prompts are empty or equal, or the fact is outside the original prompt."""
        if not self.original or not self.counterfactual or self.original == self.counterfactual:
            raise PromptError(
                "expected an original and a counterfactual prompt that differ, each of at least one token, "
                f"found prompts of {len(self.original)} and {len(self.counterfactual)} tokens"
                + (", which are equal" if self.original and self.original == self.counterfactual else "")
            )
        if not self.fact:
            raise PromptError("expected the positions of the fact in the original prompt, found none")
        in_range("fact", "position", self.fact, len(self.original))


def position_map(pair: FactTokens) -> tuple[int, ...]:
    """For every position of the original prompt, the counterfactual position whose state is patched in.

    Positions up to the end of the fact keep their index; later ones are aligned from the end. Both are
    clipped to the counterfactual prompt.
    """
    # Differences in length are taken to lie right behind the fact.
    shift, last = len(pair.counterfactual) - len(pair.original), max(pair.fact)
    return tuple(
        int(np.clip(i if i <= last else i + shift, 0, len(pair.counterfactual) - 1))
        for i in range(len(pair.original))
    )


def differing_span(original: Sequence[int], counterfactual: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The span in which two prompts differ, as pairs (original position, counterfactual position).

    Spans of unequal length are aligned at their last token, where a subject is complete (Meng et al. 2022);
    surplus positions at the start of the original get the first counterfactual position.

    Arguments:
        original: Token ids of the original prompt.
        counterfactual: Token ids of the counterfactual prompt.
    """
    start, end = common_ends(original, counterfactual)
    last, source = (max(len(prompt) - end - 1, 0) for prompt in (original, counterfactual))
    first = min(start, source)
    # max: where the original span is longer, its first positions share the first counterfactual one.
    return tuple((i, max(source - last + i, first)) for i in range(min(start, last), last + 1))


def blocks_of(num_layers: int, size: int) -> list[list[int]]:
    """The model's layers in blocks of neighbouring layers; the last block may be shorter.

    Arguments:
        num_layers: Number of layers of the model.
        size: Number of layers of a block.
    """
    return [list(range(start, min(start + size, num_layers))) for start in range(0, num_layers, size)]


class Unpatched(NamedTuple):
    """Results of the two prompts of a pair, run without patches."""

    original: Floats
    """Logits at the last position of the original, float64 [vocab]."""
    counterfactual: Floats
    """Logits at the last position of the counterfactual, float64 [vocab]."""
    states: dict[HookPoint, Tensor]
    """States [position, hidden] of the counterfactual run by hook point."""
    attention: Floats | None
    """Attention of the original's last position to the fact, float64 [layer, head]; None unless requested."""


@dataclass
class PairRuns:
    """Runs of pairs of prompts without patches, computed when a pair is needed first."""

    config: Architecture
    """Architecture of the model."""
    model: Model | None
    """The model; None while runs are only planned, when all states are taken as zero."""
    with_attention: bool = False
    """Whether the attention of the last position to the fact is measured in the original run."""
    computed: dict[FactTokens, Unpatched] = field(default_factory=dict)
    """Results that are computed already, by pair."""

    def of(self, pair: FactTokens) -> Unpatched:
        """Results of a pair without patches; the first call for a pair runs the model."""
        if self.model is None:
            return Unpatched(np.zeros(0), np.zeros(0), Blank(self.config, len(pair.counterfactual)), None)
        # Pairs run lazily: after an interruption only pairs of missing cells are run again.
        if pair not in self.computed:
            layers = range(self.config.num_layers)
            states = [HookPoint("resid_post", layer) for layer in layers]
            weights = weights_of(self.config) if self.with_attention else []
            runs = [
                Run(pair.original, HookSpec().capture(*weights) if weights else None),
                Run(pair.counterfactual, HookSpec().capture(*states)),
            ]
            results = dict(stream(self.model, runs))
            self.computed[pair] = Unpatched(
                as_vector(results[0].logits),
                as_vector(results[1].logits),
                {point: results[1][point][0] for point in states},
                attention_to(pair.fact, results[0]) if self.with_attention else None,
            )
        return self.computed[pair]


def patched(unpatched: Unpatched, block: Sequence[int], places: Sequence[tuple[int, int]]) -> HookSpec:
    """Interventions that overwrite states of the original prompt by counterfactual ones, in some layers.

    Arguments:
        unpatched: Results of the pair without patches.
        block: Layers in which states are overwritten.
        places: (original position, counterfactual position) of each state.
    """
    positions, sources = zip(*places, strict=True)
    spec = HookSpec()
    for layer in block:
        point = HookPoint("resid_post", layer)
        spec = spec.intervene(point, Replace(unpatched.states[point][list(sources)], positions=positions))
    return spec


def weights_of(config: Architecture) -> list[HookPoint]:
    """Hook points of the attention weights of every layer.

    Raises:
        StageError: The model has no attention.
    """
    if config.attention_kind is None:
        raise StageError(
            f"expected a model with attention, whose weights are measured, found {config.model_type}, which "
            "has none; choose another model"
        )
    return config.points_of(config.attention_kind)


def attention_to(fact: Sequence[int], result: HookCache) -> Floats:
    """Attention of the last position to a fact, averaged over the fact's positions, float64 [layer, head].

    Arguments:
        fact: Positions of the fact.
        result: Run with the attention weights of every layer captured.
    """
    layers = [result[point][0, :, -1, list(fact)].float().mean(-1).cpu().numpy() for point in result]
    weights: Floats = np.stack(layers).astype(np.float64)
    return weights


@dataclass(frozen=True, kw_only=True)
class FactPairExperiment(Experiment):
    """Base class of experiments that patch pairs of prompts in blocks of layers, one cell per pair."""

    pairs: tuple[FactTokens, ...]
    """Pairs of prompts; the two prompts of a pair may have different lengths."""
    block_size: int = 4
    """Number of neighbouring layers that are patched together."""

    def params(self) -> dict[str, Any]:
        """Fields that enter the key of results: all except the pairs, which are labels of cells."""
        return {name: value for name, value in vars(self).items() if name != "pairs"}

    def check(self, config: Architecture) -> None:
        """Raise StageError without pairs or for an invalid block size, PromptError for an invalid pair."""
        if not self.pairs:
            raise StageError(f"{self.name}: expected at least one pair of prompts, found none")
        if not 1 <= self.block_size <= config.num_layers:
            raise StageError(
                f"{self.name}: expected a block_size from 1 to {config.num_layers}, the number of layers, "
                f"found {self.block_size}"
            )
        for pair in self.pairs:
            pair.check()

    def sketch(self, config: Architecture, cell: CellLabels) -> Sequence[Run]:
        """The runs of a cell for planning: patched states are zeros, as the real ones are not computed
        yet."""
        return self.runs(PairRuns(config, None), cell)

    def changes(self, prepared: PairRuns, pair: FactTokens, result: HookCache) -> tuple[float, int]:
        """(KL(original || patched) in nats, most likely next token of the patched run).

        Arguments:
            prepared: Runs without patches.
            pair: The pair of prompts.
            result: The patched run.
        """
        logits = as_vector(result.logits)
        return float(kl_divergence(prepared.of(pair).original, logits)), int(logits.argmax())


@dataclass(frozen=True, kw_only=True)
class CounterFactPatching(FactPairExperiment):
    """Patches each position of each pair in each block of layers, one run each."""

    name: ClassVar[str] = "counterfact_patching"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "kl": Output(("patch",), "nats", "KL(original || patched) of next-token distributions"),
        "token_id": Output(("patch",), "1", "most likely next token of the patched run"),
        **NEXT_TOKENS,
    }

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell per pair; StageError or PromptError for invalid fields (`check`)."""
        self.check(config)
        return [cell_of(pair) for pair in self.pairs]

    def prepare(self, model: Model) -> PairRuns:
        """Runs without patches, which are computed when a pair needs them first."""
        return PairRuns(model.config, model)

    def runs(self, prepared: PairRuns, cell: CellLabels) -> Sequence[Run]:
        """One run per block and position; position varies fastest."""
        pair = pair_of(cell)
        return [
            Run(pair.original, patched(prepared.of(pair), block, [place]))
            for block in blocks_of(prepared.config.num_layers, self.block_size)
            for place in enumerate(position_map(pair))
        ]

    def measure(self, prepared: PairRuns, cell: CellLabels, result: HookCache) -> tuple[float, int]:
        """(KL(original || patched) in nats, most likely next token of the patched run)."""
        return self.changes(prepared, pair_of(cell), result)

    def dataset(self, prepared: PairRuns, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """Patches of one pair [patch], and the next tokens of its unpatched prompts [pair]."""
        import xarray as xr

        pair = pair_of(cell)
        sources = np.array(position_map(pair), np.int64)
        blocks = len(blocks_of(prepared.config.num_layers, self.block_size))
        coords = {
            "block": ("patch", np.repeat(np.arange(blocks), len(sources))),
            "position": ("patch", np.tile(np.arange(len(sources)), blocks)),
            "counterfactual_position": ("patch", np.tile(sources, blocks)),
        }
        # `runs` lists blocks, and within each all positions: repeat and tile follow that order.
        kl, token_ids = (np.array(column) for column in zip(*measured, strict=True))
        arrays = {
            "kl": self.outputs["kl"].variable(kl.astype(np.float64)),
            "token_id": self.outputs["token_id"].variable(token_ids.astype(np.int64)),
            **next_tokens(prepared.of(pair)),
        }
        return xr.Dataset(arrays, coords)

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """Patches of all pairs along the axis `patch`; the coordinate `pair_of` is the number of the pair."""
        import xarray as xr

        patches = xr.concat([part.drop_dims("pair") for part in parts], "patch", combine_attrs="override")
        sizes = [part.sizes["patch"] for part in parts]
        patches = patches.assign_coords(pair_of=("patch", np.repeat(np.arange(len(parts)), sizes)))
        pairs = xr.concat([part.drop_dims("patch") for part in parts], "pair", combine_attrs="override")
        return patches.merge(pairs)


def next_tokens(unpatched: Unpatched) -> dict[str, Any]:
    """Variables with the most likely next token of both prompts of a pair, run without patches [pair]."""
    both = zip(NEXT_TOKENS.items(), (unpatched.original, unpatched.counterfactual), strict=True)
    return {name: output.variable(np.array([logits.argmax()], np.int64)) for (name, output), logits in both}


def cell_of(pair: FactTokens) -> dict[str, Any]:
    """Labels of the cell of a pair: its prompts and the fact, without the subject."""
    return {
        "original": list(pair.original),
        "counterfactual": list(pair.counterfactual),
        "fact": list(pair.fact),
    }


def pair_of(cell: CellLabels) -> FactTokens:
    """The pair of prompts that a cell's labels describe; its `subject` is None."""
    return FactTokens(tuple(cell["original"]), tuple(cell["counterfactual"]), tuple(cell["fact"]))
