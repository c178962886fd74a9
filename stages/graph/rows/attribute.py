"""Rows of the adjacency matrix: the direct effect of every source on a target.

The edge from source s to target t is the change of t's pre-activation (or logit) if s were added once more,
with everything else frozen: the sum, over the layers that s writes to, of the dot product of its vector with
the gradient of t in the residual stream (circuit-tracer 0.5.0; Ameisen et al. 2025, section C.3). It is
signed, in units of the target, and not normalised.

Targets are batched by layer and position, so that a batch needs gradients only below its layer and up to its
last position (the causal cone). A row does not depend on its batch.

Batches are independent. If maps and decoder vectors are in memory, as for small models, several batches run
at the same time, each on one thread (threads.py). Large models, and a GPU, run one batch at a time.
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
"""Number of targets per batch, if memory allows; 32 to 128 are equally fast (measured on 2 cores)."""
FEWEST = 16
"""Smallest number of targets per batch when batches are made smaller to run several at the same time."""


@dataclass(frozen=True, eq=False)
class TargetBatch:
    """Targets of one layer whose rows are computed together."""

    rows: npt.NDArray[np.int64]
    """Index of each target's row in the result [target]."""
    layer: int
    """Layer whose transcoder input the targets read; the number of layers for logits."""
    positions: Tensor
    """Position of each target [target]."""
    vectors: Tensor
    """Encoder vector of each feature, or unembedding vector of each logit [target, hidden]."""


class Attributor:
    """Computes rows of the adjacency matrix of one prompt's graph."""

    def __init__(
        self, replacement: Replacement, sources: Sources, targets: Targets, *, room: int = 1 << 28
    ) -> None:
        """Plan the size of batches.

        Arguments:
            replacement: The local replacement model.
            sources: Features, errors and tokens.
            targets: Logits that the graph explains.
            room: Bytes for the gradients and rows of a batch.

        Raises:
            PlanError: The row of one target does not fit in `room`.
        """
        self.replacement, self.sources, self.targets = replacement, sources, targets
        config, positions = replacement.config, replacement.n_positions
        heads = config.axis_sizes["head"] + config.axis_sizes["kv_head"]
        width = 2 * config.hidden_size + 2 * heads * config.axis_sizes["d_head"]
        # Gradients and attention temporaries, then the row before and after sorting.
        bytes_per_target = (positions * width + 2 * sources.n_columns) * replacement.dtype.itemsize
        if room < bytes_per_target:
            raise PlanError(
                f"a row of this attribution graph needs {bytes_per_target} bytes for its gradients, more "
                f"than the {room} available, an eighth of memory; raise memory="
            )
        self._most_targets = room // bytes_per_target
        is_small = sources.is_kept and replacement.is_kept and replacement.device.type == "cpu"
        self._most_workers = max(1, self._most_targets // FEWEST) if is_small else 1

    def rows(self, items: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Compute rows of the adjacency matrix.

        Arguments:
            items: Target of each row [n]: index of an active feature, or the number of active features plus
                the index of a logit.

        Returns:
            float32 [n, source], with columns for all active features, errors and tokens.
        """
        workers = min(torch.get_num_threads(), self._most_workers)
        # Every batch needs all decoder vectors. If they are not kept in memory, each batch reads them from
        # disk again, so that batches are as large as memory allows.
        most = self._most_targets // workers
        lanes = min(LANES, most) if self.sources.is_kept else most
        item_tensor = torch.from_numpy(np.ascontiguousarray(items)).to(self.replacement.device)
        batches = self._batches(item_tensor, lanes)
        # Batches write different rows, so threads need no lock.
        rows = np.empty((len(items), self.sources.n_columns), np.float32)

        def compute(batch: TargetBatch) -> None:
            out = self.batch(batch.layer, batch.positions, batch.vectors)
            rows[batch.rows] = out.float().cpu().numpy()

        if workers == 1:
            for batch in batches:
                compute(batch)
            return rows
        # Filled before threads start, which would otherwise read the same vectors several times.
        self.sources.fill()
        with one_thread_each(), ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(compute, batches):
                pass
        return rows

    def _batches(self, items: Tensor, lanes: int) -> Iterator[TargetBatch]:
        """Yield batches of at most `lanes` targets: logits first, then features by layer and position."""
        active, count = self.sources.active, self.sources.n_features
        last_position = self.replacement.n_positions - 1
        is_logit = items >= count
        for part in is_logit.nonzero().squeeze(1).split(lanes):
            vectors = self.targets.vectors[items[part] - count]
            rows = part.cpu().numpy()
            if len(rows):  # split of an empty tensor returns one empty part
                positions = torch.full_like(part, last_position)
                yield TargetBatch(rows, self.replacement.n_layers, positions, vectors)
        layers = torch.full_like(items, -1)
        layers[~is_logit] = active.layer[items[~is_logit]]
        for layer in layers.unique().tolist():
            if layer < 0:
                continue
            places = (layers == layer).nonzero().squeeze(1)
            # By position, so that the causal cone of a batch ends as early as possible.
            places = places[torch.argsort(active.position[items[places]], stable=True)]
            features = self.replacement.dictionary.layer(layer)
            for part in places.split(lanes):
                indices = items[part]
                vectors = features.encoder_rows(active.feature[indices].cpu())
                yield TargetBatch(part.cpu().numpy(), layer, active.position[indices], vectors)

    def batch(self, layer: int, positions: Tensor, vectors: Tensor) -> Tensor:
        """Compute the rows of one batch.

        Arguments:
            layer: Layer whose transcoder input the targets read; the number of layers for logits.
            positions: Position of each target [target].
            vectors: Vector with which each target reads the state [target, d_in].

        Returns:
            Direct effects [target, source], in the dtype of the replacement model.
        """
        model, sources = self.replacement, self.sources
        vectors = vectors.to(model.device, model.dtype)
        gradient = model.start(layer, positions, model.read_gradient(layer, vectors, positions))
        out = vectors.new_zeros(len(positions), sources.n_columns)
        # A feature reads below its own MLP, so only layers below write to it; logits read all layers.
        for below in range(min(layer, model.n_layers) - 1, -1, -1):
            sources.contract(below, gradient, out)
            model.back(below, gradient)
        sources.contract_tokens(gradient, out)
        return out.index_select(1, sources.order)
