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
"""Outputs of both experiments: the most likely next token of each unpatched prompt."""


@dataclass(frozen=True)
class FactTokens:
    """A pair of prompts as token ids, and the positions that state the fact."""

    original: tuple[int, ...]
    """Token ids of the prompt that is patched."""
    counterfactual: tuple[int, ...]
    """Token ids of the prompt whose states are put in."""
    fact: tuple[int, ...]
    """Positions of the fact in the original prompt."""
    subject: tuple[tuple[int, int], ...] | None = None
    """(position, counterfactual position) of each subject token, patched together by `FactualRouting`;
    `CounterFactPatching` ignores it.
    """

    def check(self) -> None:
        """Raise PromptError for empty or equal prompts, or a fact outside the original prompt."""
        if not self.original or not self.counterfactual or self.original == self.counterfactual:
            raise PromptError(
                f"expected two prompts that differ, found {len(self.original)} and "
                f"{len(self.counterfactual)} tokens, {'equal' if self.original else 'none'}"
            )
        if not self.fact:
            raise PromptError("expected the positions of the fact in the original prompt, found none")
        in_range("fact", "position", self.fact, len(self.original))


def position_map(pair: FactTokens) -> tuple[int, ...]:
    """For every position of the original prompt, the counterfactual position whose state is put there.

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
    """The span in which two prompts differ, as (position, counterfactual position), in order.

    Spans of unequal length are aligned at their last token, where a subject is complete (Meng et al. 2022);
    surplus positions at the start of the original get the first counterfactual position.

    Arguments:
        original: token ids.
        counterfactual: token ids.
    """
    start, end = common_ends(original, counterfactual)
    last, source = (max(len(prompt) - end - 1, 0) for prompt in (original, counterfactual))
    first = min(start, source)
    # max: where the original span is longer, its first positions share the first counterfactual one.
    return tuple((i, max(source - last + i, first)) for i in range(min(start, last), last + 1))


def blocks_of(num_layers: int, size: int) -> list[list[int]]:
    """Contiguous blocks of layers; the last may be shorter.

    Arguments:
        num_layers: number of layers of the model.
        size: layers per block.
    """
    return [list(range(start, min(start + size, num_layers))) for start in range(0, num_layers, size)]


class Unpatched(NamedTuple):
    """Results of both prompts of a pair without patches."""

    original: Floats
    """Logits at the last position of the original, float64 [vocab]."""
    counterfactual: Floats
    """Logits at the last position of the counterfactual, float64 [vocab]."""
    states: dict[HookPoint, Tensor]
    """States of the counterfactual run by hook point, [position, hidden]."""
    attention: Floats | None
    """Attention of the original's last position to the fact, float64 [layer, head]; None unless requested."""


@dataclass
class PairRuns:
    """Unpatched runs of pairs, computed when the first patch of a pair is planned."""

    config: Architecture
    """Architecture of the model."""
    model: Model | None
    """None while runs are only sketched: every state is zero then."""
    with_attention: bool = False
    """Whether attention to the fact is measured in the original run."""
    computed: dict[FactTokens, Unpatched] = field(default_factory=dict)
    """Results so far, by pair."""

    def of(self, pair: FactTokens) -> Unpatched:
        """Unpatched results of a pair; computed at the first call."""
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
    """Interventions that overwrite positions in every layer of a block with counterfactual states.

    Arguments:
        unpatched: unpatched runs of the pair.
        block: layers.
        places: (position, counterfactual position) of each overwritten position.
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
        StageError: for a model without attention.
    """
    if config.attention_kind is None:
        raise StageError(
            f"expected a model with attention weights, found {config.model_type}, which has none"
        )
    return config.points_of(config.attention_kind)


def attention_to(fact: Sequence[int], result: HookCache) -> Floats:
    """Mean attention of the last position over the positions of a fact, float64 [layer, head].

    Arguments:
        fact: positions of the fact.
        result: run with the attention weights of every layer.
    """
    layers = [result[point][0, :, -1, list(fact)].float().mean(-1).cpu().numpy() for point in result]
    weights: Floats = np.stack(layers).astype(np.float64)
    return weights


@dataclass(frozen=True, kw_only=True)
class FactPairExperiment(Experiment):
    """Base of experiments with one cell per pair of prompts, patched in blocks of layers."""

    pairs: tuple[FactTokens, ...]
    """Pairs of prompts; lengths within a pair may differ."""
    block_size: int = 4
    """Number of neighbouring layers patched together."""

    def params(self) -> dict[str, Any]:
        """All fields but the pairs, which label the cells."""
        return {name: value for name, value in vars(self).items() if name != "pairs"}

    def check(self, config: Architecture) -> None:
        """Raise StageError for no pairs or an invalid block size, PromptError for an invalid pair."""
        if not self.pairs:
            raise StageError(f"{self.name}: expected at least one pair of prompts, found none")
        if not 1 <= self.block_size <= config.num_layers:
            raise StageError(
                f"{self.name}: expected a block size in 1..{config.num_layers}, the model's layers, found "
                f"{self.block_size}"
            )
        for pair in self.pairs:
            pair.check()

    def sketch(self, config: Architecture, cell: CellLabels) -> Sequence[Run]:
        """The runs of a cell with zeros for every state."""
        return self.runs(PairRuns(config, None), cell)

    def changes(self, prepared: PairRuns, pair: FactTokens, result: HookCache) -> tuple[float, int]:
        """KL(original || patched) in nats, and the most likely next token of the patched run.

        Arguments:
            prepared: unpatched runs.
            pair: the pair.
            result: patched run.
        """
        logits = as_vector(result.logits)
        return float(kl_divergence(prepared.of(pair).original, logits)), int(logits.argmax())


@dataclass(frozen=True, kw_only=True)
class CounterFactPatching(FactPairExperiment):
    """Every position and block of layers of every pair patched, one run each."""

    name: ClassVar[str] = "counterfact_patching"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "kl": Output(("patch",), "nats", "KL(original || patched) of next-token distributions"),
        "token_id": Output(("patch",), "1", "most likely next token of the patched run"),
        **NEXT_TOKENS,
    }

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell per pair. Raises what `check` raises."""
        self.check(config)
        return [cell_of(pair) for pair in self.pairs]

    def prepare(self, model: Model) -> PairRuns:
        """The model; unpatched runs of a pair are computed when first needed."""
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
        """KL from the original run in nats, and the most likely next token."""
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
        """Patches of all pairs concatenated along `patch`; coordinate `pair_of` is the number of the pair."""
        import xarray as xr

        patches = xr.concat([part.drop_dims("pair") for part in parts], "patch", combine_attrs="override")
        sizes = [part.sizes["patch"] for part in parts]
        patches = patches.assign_coords(pair_of=("patch", np.repeat(np.arange(len(parts)), sizes)))
        pairs = xr.concat([part.drop_dims("patch") for part in parts], "pair", combine_attrs="override")
        return patches.merge(pairs)


def next_tokens(unpatched: Unpatched) -> dict[str, Any]:
    """Most likely next token of each prompt of a pair without patches, [pair]."""
    both = zip(NEXT_TOKENS.items(), (unpatched.original, unpatched.counterfactual), strict=True)
    return {name: output.variable(np.array([logits.argmax()], np.int64)) for (name, output), logits in both}


def cell_of(pair: FactTokens) -> dict[str, Any]:
    """Labels of the cell of a pair, without its subject."""
    return {
        "original": list(pair.original),
        "counterfactual": list(pair.counterfactual),
        "fact": list(pair.fact),
    }


def pair_of(cell: CellLabels) -> FactTokens:
    """FactTokens of a cell, without subject."""
    return FactTokens(tuple(cell["original"]), tuple(cell["counterfactual"]), tuple(cell["fact"]))
