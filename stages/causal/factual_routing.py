"""Factual routing: which heads look elsewhere once the subject of a fact is another?

The subject of the original prompt is overwritten, block by block of layers, by that of the counterfactual one
(counterfact.py), and the attention of the last token to the fact is compared head by head with the run as it
was (candle-mi's factual_routing).

Routing is this: what is said of a subject reaches the place where the next word is predicted through
attention heads that depend on the subject (Geva et al. 2023, "Dissecting Recall of Factual Associations in
Auto-Regressive Language Models", section 6). It is shown where another subject moves the attention of a head
more than states as foreign as it, but of no such subject, do; that attention moves at all shows nothing.

Border: as counterfact.py, whose cells and pairs these are; where a subject is, is said by whoever makes the
pairs. Planning imports no torch.

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
    SAID,
    OnPairs,
    PairRuns,
    attention_to,
    blocks_of,
    cell_of,
    pair_of,
    patched,
    said,
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
class FactualRouting(OnPairs):
    """The subject of every pair patched, block by block, and the attention of the last token to the fact.

    pairs: with `subject`. block_size: layers patched together.
    """

    name: ClassVar[str] = "factual_routing"
    version: ClassVar[int] = 2
    outputs: ClassVar[Mapping[str, Output]] = {
        "attention": Output(
            ("pair", "block", "layer", "head"), "1", "mean attention of the last token over the fact, patched"
        ),
        "baseline_attention": Output(
            ("pair", "layer", "head"), "1", "mean attention of the last token over the fact"
        ),
        "kl": Output(("pair", "block"), "nats", "KL(original || patched) of next-token distributions"),
        "token_id": Output(("pair", "block"), "1", "said when patched"),
        **SAID,
    }

    def check(self, config: Architecture) -> None:
        """As for patching; PromptError for a pair whose subject is missing or outside its prompts,
        StageError for a model in which nobody attends."""
        super().check(config)
        weights_of(config)
        for pair in self.pairs:
            if not pair.subject:
                raise PromptError(
                    f"{self.name}: expected the subject's positions in both prompts, found none"
                )
            own, sources = zip(*pair.subject, strict=True)
            in_range("subject", "position", own, len(pair.original))
            in_range("counterfactual subject", "position", sources, len(pair.counterfactual))

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One per pair, with the places of its subject. Raises what `check` does."""
        self.check(config)
        return [
            {**cell_of(pair), "subject": [list(each) for each in pair.subject or ()]} for pair in self.pairs
        ]

    def prepare(self, model: Model) -> PairRuns:
        """The model; pairs are run as they come up, the original's attention looked at."""
        return PairRuns(model.config, model, with_attention=True)

    def runs(self, prepared: PairRuns, cell: CellLabels) -> Sequence[Run]:
        """One per block, with the attention of every layer."""
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
        """KL from the original run, what would be said, and the attention of the last token to the fact."""
        pair = pair_of(cell)
        return (*self.changes(prepared, pair, result), attention_to(pair.fact, result))

    def dataset(self, prepared: PairRuns, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """One pair: attention [pair, block, layer, head], and as it is unpatched [pair, layer, head]."""
        import xarray as xr

        unpatched = prepared.of(pair_of(cell))
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
            {**arrays, **said(unpatched)}, {"layer": np.arange(layers), "head": np.arange(heads)}
        )

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """Cells of all pairs, along `pair`."""
        import xarray as xr

        whole: xr.Dataset = xr.concat(parts, "pair", join="exact", combine_attrs="override")
        return whole
