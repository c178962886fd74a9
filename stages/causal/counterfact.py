"""CounterFact patching: where along a prompt, and at which depth, does a fact turn into another?

The original prompt is run with the residual stream of one position overwritten, in every layer of a block of
layers, by what the counterfactual prompt has there; everything else evolves by itself. What the model would
say next either changes or it does not (protocol: Transluce's activation-patching data, after Li et al. 2025).
candle-mi's program replaces the whole sequence at every layer of the block, so that only the block's last
layer has an effect; here each layer's patch acts.

What such a patch does to attention is asked in factual_routing.py.

Border: token ids and positions in, labelled arrays out; texts and labels of tokens are made in workflows. A
cell is one pair of prompts. Planning imports no torch.

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

SAID: Mapping[str, Output] = {
    f"{name}_token_id": Output(("pair",), "1", f"said by the {name} prompt")
    for name in ("original", "counterfactual")
}


@dataclass(frozen=True)
class FactTokens:
    """Two prompts as token ids, and which positions of the original one state the fact.

    subject: (position, counterfactual position) of each token of it, which routing patches together; patching
    does not read it.
    """

    original: tuple[int, ...]
    counterfactual: tuple[int, ...]
    fact: tuple[int, ...]
    subject: tuple[tuple[int, int], ...] | None = None

    def check(self) -> None:
        """PromptError for prompts that are empty or equal, or a fact that is not in the prompt."""
        if not self.original or not self.counterfactual or self.original == self.counterfactual:
            raise PromptError(
                f"expected two prompts that differ, found {len(self.original)} and "
                f"{len(self.counterfactual)} tokens, {'equal' if self.original else 'none'}"
            )
        if not self.fact:
            raise PromptError("expected the positions of the fact in the original prompt, found none")
        in_range("fact", "position", self.fact, len(self.original))


def position_map(pair: FactTokens) -> tuple[int, ...]:
    """For every position of the original, the counterfactual one whose state is put there.

    Tokens of the fact, and what stands before it (a BOS), keep their index; what comes after is counted from
    the end. Both are kept within the counterfactual prompt.
    """
    shift, last = len(pair.counterfactual) - len(pair.original), max(pair.fact)
    return tuple(
        int(np.clip(i if i <= last else i + shift, 0, len(pair.counterfactual) - 1))
        for i in range(len(pair.original))
    )


def differing_span(original: Sequence[int], counterfactual: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The span in which two prompts differ, as (position, counterfactual position), in order.

    Spans meet at their ends, where subjects of any length are complete (Meng et al. 2022); what the original
    has more at the start gets the first of the other's.
    """
    start, end = common_ends(original, counterfactual)
    last, source = (max(len(prompt) - end - 1, 0) for prompt in (original, counterfactual))
    first = min(start, source)
    return tuple((i, max(source - last + i, first)) for i in range(min(start, last), last + 1))


def blocks_of(num_layers: int, size: int) -> list[list[int]]:
    """Contiguous blocks of layers; the last may be shorter."""
    return [list(range(start, min(start + size, num_layers))) for start in range(0, num_layers, size)]


class Unpatched(NamedTuple):
    """A pair of prompts run as they are.

    original, counterfactual: logits of the last position, float64 [vocab]. states: of the counterfactual, by
    hook point, [position, hidden]. attention: of the original's last position on its fact, or None.
    """

    original: Floats
    counterfactual: Floats
    states: dict[HookPoint, Tensor]
    attention: Floats | None


@dataclass
class PairRuns:
    """A model, and the pairs run through it so far: each is run when its first patch is planned.

    model: None where runs are only sketched; every state is zero then.
    """

    config: Architecture
    model: Model | None
    with_attention: bool = False
    held: dict[FactTokens, Unpatched] = field(default_factory=dict)

    def of(self, pair: FactTokens) -> Unpatched:
        """A pair's own two runs."""
        if self.model is None:
            return Unpatched(np.zeros(0), np.zeros(0), Blank(self.config, len(pair.counterfactual)), None)
        if pair not in self.held:
            layers = range(self.config.num_layers)
            states = [HookPoint("resid_post", layer) for layer in layers]
            weights = weights_of(self.config) if self.with_attention else []
            asked = [
                Run(pair.original, HookSpec().capture(*weights) if weights else None),
                Run(pair.counterfactual, HookSpec().capture(*states)),
            ]
            found = dict(stream(self.model, asked))
            self.held[pair] = Unpatched(
                as_vector(found[0].logits),
                as_vector(found[1].logits),
                {point: found[1][point][0] for point in states},
                attention_to(pair.fact, found[0]) if self.with_attention else None,
            )
        return self.held[pair]


def patched(unpatched: Unpatched, block: Sequence[int], places: Sequence[tuple[int, int]]) -> HookSpec:
    """Positions overwritten in every layer of a block by the counterfactual's states.

    places: (position, counterfactual position) of each.
    """
    positions, sources = zip(*places, strict=True)
    spec = HookSpec()
    for layer in block:
        point = HookPoint("resid_post", layer)
        spec = spec.intervene(point, Replace(unpatched.states[point][list(sources)], positions=positions))
    return spec


def weights_of(config: Architecture) -> list[HookPoint]:
    """Where every layer says how much positions read of each other; StageError where none does."""
    if config.attention_kind is None:
        raise StageError(
            f"expected a model that shows how much positions read of each other, found {config.model_type}"
        )
    return config.points_of(config.attention_kind)


def attention_to(fact: Sequence[int], result: HookCache) -> Floats:
    """Mean attention of the last position over the positions of a fact, float64 [layer, head]."""
    layers = [result[point][0, :, -1, list(fact)].float().mean(-1).cpu().numpy() for point in result]
    found: Floats = np.stack(layers).astype(np.float64)
    return found


@dataclass(frozen=True, kw_only=True)
class OnPairs(Experiment):
    """What both experiments have in common: pairs as cells, blocks of layers, one metric."""

    pairs: tuple[FactTokens, ...]
    block_size: int = 4

    def params(self) -> dict[str, Any]:
        """All fields but the pairs, which are the cells."""
        return {name: value for name, value in vars(self).items() if name != "pairs"}

    def check(self, config: Architecture) -> None:
        """Raise for no pairs, a pair that is none, or blocks that do not fit the model."""
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
        """KL(original || patched) in nats, and the token the patched run would say."""
        logits = as_vector(result.logits)
        return float(kl_divergence(prepared.of(pair).original, logits)), int(logits.argmax())


@dataclass(frozen=True, kw_only=True)
class CounterFactPatching(OnPairs):
    """Every position and block of layers of every pair.

    pairs: of prompts; lengths may differ (`position_map`). block_size: layers patched together.
    """

    name: ClassVar[str] = "counterfact_patching"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "kl": Output(("patch",), "nats", "KL(original || patched) of next-token distributions"),
        "token_id": Output(("patch",), "1", "said when patched"),
        **SAID,
    }

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One per pair. Raises what `check` does."""
        self.check(config)
        return [cell_of(pair) for pair in self.pairs]

    def prepare(self, model: Model) -> PairRuns:
        """The model; pairs are run as they come up."""
        return PairRuns(model.config, model)

    def runs(self, prepared: PairRuns, cell: CellLabels) -> Sequence[Run]:
        """One per block and position, positions fastest."""
        pair = pair_of(cell)
        return [
            Run(pair.original, patched(prepared.of(pair), block, [place]))
            for block in blocks_of(prepared.config.num_layers, self.block_size)
            for place in enumerate(position_map(pair))
        ]

    def measure(self, prepared: PairRuns, cell: CellLabels, result: HookCache) -> tuple[float, int]:
        """KL from the original run, and what would be said."""
        return self.changes(prepared, pair_of(cell), result)

    def dataset(self, prepared: PairRuns, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """The patches of one pair, [patch], and what its two prompts would say."""
        import xarray as xr

        pair = pair_of(cell)
        sources = np.array(position_map(pair), np.int64)
        blocks = len(blocks_of(prepared.config.num_layers, self.block_size))
        coords = {
            "block": ("patch", np.repeat(np.arange(blocks), len(sources))),
            "position": ("patch", np.tile(np.arange(len(sources)), blocks)),
            "counterfactual_position": ("patch", np.tile(sources, blocks)),
        }
        kl, told_tokens = (np.array(column) for column in zip(*measured, strict=True))
        arrays = {
            "kl": self.outputs["kl"].variable(kl.astype(np.float64)),
            "token_id": self.outputs["token_id"].variable(told_tokens.astype(np.int64)),
            **said(prepared.of(pair)),
        }
        return xr.Dataset(arrays, coords)

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """The patches of all pairs one after another; `pair_of` says whose each is."""
        import xarray as xr

        patches = xr.concat([part.drop_dims("pair") for part in parts], "patch", combine_attrs="override")
        sizes = [part.sizes["patch"] for part in parts]
        patches = patches.assign_coords(pair_of=("patch", np.repeat(np.arange(len(parts)), sizes)))
        pairs = xr.concat([part.drop_dims("patch") for part in parts], "pair", combine_attrs="override")
        return patches.merge(pairs)


def said(unpatched: Unpatched) -> dict[str, Any]:
    """What both prompts of a pair would say by themselves, [pair]."""
    both = zip(SAID.items(), (unpatched.original, unpatched.counterfactual), strict=True)
    return {name: output.variable(np.array([logits.argmax()], np.int64)) for (name, output), logits in both}


def cell_of(pair: FactTokens) -> dict[str, Any]:
    """The labels of a pair's cell; its subject is not one of them."""
    return {
        "original": list(pair.original),
        "counterfactual": list(pair.counterfactual),
        "fact": list(pair.fact),
    }


def pair_of(cell: CellLabels) -> FactTokens:
    """The pair a cell is about."""
    return FactTokens(tuple(cell["original"]), tuple(cell["counterfactual"]), tuple(cell["fact"]))
