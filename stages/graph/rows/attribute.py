"""Rows of the adjacency matrix: what every source adds to a target, by the target's gradient.

The edge from source s to target t is what t's pre-activation (or logit) would gain if s were added once more,
with everything else frozen: the source's vector in the stream after each layer it writes to, met by the
gradient of t there (circuit-tracer 0.5.0; spec section C.3 of Ameisen et al. 2025's construction). Positive
or negative, in units of the target; not normalised.

Targets are taken by layer and position, so that a batch has gradients only below its layer and up to its last
position: the causal cone. What a row is does not depend on its batch.

Batches are independent. Where maps and decoder vectors are in memory, as in small models, batches run side by
side, each on one thread (threads.py). Large products, and a GPU, have one batch at a time.

Border: which rows, in which order, and where they are kept is node.py's and selection.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....store.errors import PlanError
from .threads import one_thread_each

if TYPE_CHECKING:
    from .replacement import Replacement
    from .sources import Sources
    from .targets import Targets

__all__ = ["Attributor"]

LANES = 64
"""Targets in a batch, where memory allows; measured on 2 cores, 32 to 128 are equal."""
FEWEST = 16
"""Targets in a batch below which batches are not made smaller to run side by side."""


@dataclass(frozen=True, eq=False)
class TargetBatch:
    """Targets of one layer: where their rows go, their positions, the vectors they read with."""

    rows: npt.NDArray[np.int64]
    layer: int
    positions: Tensor
    vectors: Tensor


class Attributor:
    """Computes rows of one prompt's graph.

    room: bytes for the gradients and rows of a batch. Raises PlanError if one target does not fit.
    """

    def __init__(
        self, replacement: Replacement, sources: Sources, targets: Targets, *, room: int = 1 << 28
    ) -> None:
        self.replacement, self.sources, self.targets = replacement, sources, targets
        config, positions = replacement.config, replacement.n_positions
        heads = config.axis_sizes["head"] + config.axis_sizes["kv_head"]
        width = 2 * config.hidden_size + 2 * heads * config.axis_sizes["d_head"]
        lane = (positions * width + 2 * sources.n_columns) * replacement.dtype.itemsize
        if room < lane:
            raise PlanError(
                f"a row of this graph needs {lane} bytes for its gradients, more than the {room} it may "
                "take; raise memory="
            )
        self._most = room // lane
        is_small = sources.is_kept and replacement.is_kept and replacement.device.type == "cpu"
        self._side_by_side = max(1, self._most // FEWEST) if is_small else 1

    def rows(self, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Rows [n, source] of some targets, columns in the order of the graph before selection: all active
        features, errors, tokens.

        chosen: active features by index; from their number on, logits.
        """
        workers = min(torch.get_num_threads(), self._side_by_side)
        # Decoder vectors that are read anew for every batch are worth batches as large as can be.
        most = self._most // workers
        lanes = min(LANES, most) if self.sources.is_kept else most
        items = torch.from_numpy(np.ascontiguousarray(chosen)).to(self.replacement.device)
        batches = self._batches(items, lanes)
        found = np.empty((len(items), self.sources.n_columns), np.float32)

        def compute(batch: TargetBatch) -> None:
            out = self.batch(batch.layer, batch.positions, batch.vectors)
            found[batch.rows] = out.float().cpu().numpy()

        if workers == 1:
            for batch in batches:
                compute(batch)
            return found
        self.sources.fill()
        with one_thread_each(), ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(compute, batches):
                pass
        return found

    def _batches(self, items: Tensor, lanes: int) -> Iterator[TargetBatch]:
        """Logits, then features layer by layer, by position; so many targets at a time."""
        active, count = self.sources.active, self.sources.n_features
        last = self.replacement.n_positions - 1
        is_logit = items >= count
        for some in is_logit.nonzero().squeeze(1).split(lanes):
            vectors = self.targets.vectors[items[some] - count]
            rows = some.cpu().numpy()
            if len(rows):  # split gives one empty piece of nothing
                yield TargetBatch(rows, self.replacement.n_layers, torch.full_like(some, last), vectors)
        layers = torch.full_like(items, -1)
        layers[~is_logit] = active.layer[items[~is_logit]]
        for layer in layers.unique().tolist():
            if layer < 0:
                continue
            places = (layers == layer).nonzero().squeeze(1)
            places = places[torch.argsort(active.position[items[places]], stable=True)]
            features = self.replacement.dictionary.layer(layer)
            for some in places.split(lanes):
                chosen = items[some]
                vectors = features.encoder_rows(active.feature[chosen].cpu())
                yield TargetBatch(some.cpu().numpy(), layer, active.position[chosen], vectors)

    def batch(self, layer: int, positions: Tensor, vectors: Tensor) -> Tensor:
        """Rows [target, source], in the dtype of the arithmetic, of targets that read with these vectors at
        the read hook of a layer (or, at the number of layers, behind the final norm), at these positions."""
        model, sources = self.replacement, self.sources
        vectors = vectors.to(model.device, model.dtype)
        walking = model.start(layer, positions, model.read_gradient(layer, vectors, positions))
        out = vectors.new_zeros(len(positions), sources.n_columns)
        for below in range(min(layer, model.n_layers) - 1, -1, -1):
            sources.contract(below, walking, out)
            model.back(below, walking)
        sources.contract_tokens(walking, out)
        return out.index_select(1, sources.order)
