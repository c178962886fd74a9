"""Factual routing: which heads change their attention to a fact when its subject is replaced?

The subject of the original prompt is overwritten, block by block of layers, by the counterfactual subject
(counterfact.py), and the attention of the last token to the fact is compared head by head with the unpatched
run (candle-mi's factual_routing).

Routing means that attributes of a subject reach the predicting position through heads that depend on the
subject (Geva et al. 2023, "Dissecting Recall of Factual Associations in Auto-Regressive Language Models",
section 6). Evidence is a head whose attention changes more under another subject than under states of equal
distance that belong to no subject; that attention changes at all is no evidence.

Border: pairs and cells as in counterfact.py; callers locate the subject. Planning imports no torch.

Axes: pair, block, layer, head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...pipeline import Output
from ...store.arrays import Floats
from ...store.errors import PromptError
from ..forward.runs.experiment import CellLabels
from ..forward.runs.run import Run
from .counterfact import (
    NEXT_TOKENS,
    FactPairExperiment,
    PairRuns,
    attention_to,
    blocks_of,
    cell_of,
    next_tokens,
    pair_of,
    patched,
    weights_of,
)
from .grids.patching_grid import in_range

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture
    from ..forward.hooks.cache import HookCache
    from ..forward.models.model import Model

__all__ = ["FactualRouting"]


@dataclass(frozen=True, kw_only=True)
class FactualRouting(FactPairExperiment):
    """Patches the subject in each block of layers, and measures the last token's attention to the fact.

    Each pair needs `FactTokens.subject`.
    """

    name: ClassVar[str] = "factual_routing"
    version: ClassVar[int] = 2
    outputs: ClassVar[Mapping[str, Output]] = {
        "attention": Output(
            ("pair", "block", "layer", "head"), "1", "mean attention of the last token to the fact, patched"
        ),
        "baseline_attention": Output(
            ("pair", "layer", "head"), "1", "mean attention of the last token to the fact, unpatched"
        ),
        "kl": Output(("pair", "block"), "nats", "KL(original || patched) of next-token distributions"),
        "token_id": Output(("pair", "block"), "1", "most likely next token of the patched run"),
        **NEXT_TOKENS,
    }

    def check(self, config: Architecture) -> None:
        """Check the pairs against a model, as `CounterFactPatching` does.

        Raises:
            PromptError: A pair has no subject, or one outside its prompts.
            StageError: The model has no attention.
        """
        super().check(config)
        weights_of(config)
        for pair in self.pairs:
            if not pair.subject:
                raise PromptError(
                    f"{self.name}: expected the positions of the subject in both prompts of every pair, "
                    "found a pair without; set FactTokens.subject"
                )
            positions, sources = zip(*pair.subject, strict=True)
            in_range("subject", "position", positions, len(pair.original))
            in_range("counterfactual subject", "position", sources, len(pair.counterfactual))

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell per pair, with the subject among its labels; raises the errors of `check`."""
        self.check(config)
        return [
            {**cell_of(pair), "subject": [list(place) for place in pair.subject or ()]} for pair in self.pairs
        ]

    def prepare(self, model: Model) -> PairRuns:
        """Runs without patches, with attention, which are computed when a pair needs them first."""
        return PairRuns(model.config, model, with_attention=True)

    def runs(self, prepared: PairRuns, cell: CellLabels) -> Sequence[Run]:
        """One run per block of layers, which captures the attention weights of every layer."""
        # A cell's pair has no subject; its positions are a label of the cell.
        pair, config = pair_of(cell), prepared.config
        patterns = weights_of(config)
        return [
            Run(
                pair.original,
                patched(prepared.of(pair), block, cell["subject"]).capture(*patterns),
            )
            for block in blocks_of(config.num_layers, self.block_size)
        ]

    def measure(self, prepared: PairRuns, cell: CellLabels, result: HookCache) -> tuple[float, int, Floats]:
        """(KL in nats, most likely next token, attention of the last token to the fact [layer, head])."""
        pair = pair_of(cell)
        # Reduced to the fact's positions here: whole patterns grow with the square of the prompt.
        return (*self.changes(prepared, pair, result), attention_to(pair.fact, result))

    def dataset(self, prepared: PairRuns, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """One pair: attention [pair, block, layer, head], and unpatched attention [pair, layer, head]."""
        import xarray as xr

        unpatched = prepared.of(pair_of(cell))
        # `prepare` requests attention, so it is never None here.
        assert unpatched.attention is not None
        kl, tokens, attention = zip(*measured, strict=True)
        values = {
            "attention": np.stack(attention)[None],
            "baseline_attention": unpatched.attention[None],
            "kl": np.array(kl, np.float64)[None],
            "token_id": np.array(tokens, np.int64)[None],
        }
        arrays = {name: self.outputs[name].variable(value) for name, value in values.items()}
        layers, heads = unpatched.attention.shape
        return xr.Dataset(
            {**arrays, **next_tokens(unpatched)}, {"layer": np.arange(layers), "head": np.arange(heads)}
        )

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """Cells of all pairs, concatenated along `pair`."""
        import xarray as xr

        whole: xr.Dataset = xr.concat(parts, "pair", join="exact", combine_attrs="override")
        return whole
