"""Rows of the adjacency matrix: what every source adds to a target, by the target's gradient.

The edge from source s to target t is what t's pre-activation (or logit) would gain if s were added once more,
with everything else frozen: the source's vector in the stream after each layer it writes to, met by the
gradient of t there (circuit-tracer 0.5.0; spec section C.3 of Ameisen et al. 2025's construction). Positive
or negative, in units of the target; not normalised.

Targets are taken by layer and position, so that a batch has gradients only below its layer and up to its last
position: the causal cone. What a row is does not depend on its batch.

Border: which rows, in which order, and where they are kept is `rows.py`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...store.errors import PlanError

if TYPE_CHECKING:
    from .replacement import Replacement
    from .sources import Sources
    from .targets import Targets

__all__ = ["Attributor"]

LANES = 64
"""Targets in a batch, where memory allows; measured on 2 cores, 32 to 128 are equal."""


class Attributor:
    """Computes rows of one prompt's graph.

    room: bytes for the gradients and rows of a batch. Raises PlanError if one target does not fit.
    """

    def __init__(
        self, replacement: Replacement, sources: Sources, targets: Targets, *, room: int = 1 << 28
    ) -> None:
        self.replacement, self.sources, self.targets = replacement, sources, targets
        config, positions = replacement.config, replacement.n_positions
        heads = config.num_attention_heads + config.num_kv_heads
        width = 2 * config.hidden_size + 2 * heads * config.head_dim
        lane = (positions * width + 2 * sources.n_columns) * replacement.dtype.itemsize
        if room < lane:
            raise PlanError(
                f"a row of this graph needs {lane} bytes for its gradients, more than the {room} it may "
                "take; raise memory="
            )
        # Decoder vectors that are read anew for every batch are worth batches as large as can be.
        self.lanes = room // lane if not sources.is_kept else min(LANES, room // lane)

    def rows(self, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Rows [n, source] of some targets, columns in the order of the graph before selection: all active
        features, errors, tokens.

        chosen: active features by index; from their number on, logits.
        """
        active, count = self.sources.active, self.sources.n_features
        items = torch.from_numpy(np.ascontiguousarray(chosen)).to(self.replacement.device)
        found = np.empty((len(items), self.sources.n_columns), np.float32)
        is_logit = items >= count
        if bool(is_logit.any()):
            self._logits(items, is_logit.nonzero().squeeze(1), found)
        layers = torch.full_like(items, -1)
        layers[~is_logit] = active.layer[items[~is_logit]]
        for layer in layers.unique().tolist():
            if layer >= 0:
                self._features(layer, items, (layers == layer).nonzero().squeeze(1), found)
        return found

    def _logits(self, items: Tensor, places: Tensor, found: npt.NDArray[np.float32]) -> None:
        last, count = self.replacement.n_positions - 1, self.sources.n_features
        for some in places.split(self.lanes):
            vectors = self.targets.vectors[items[some] - count]
            where = torch.full_like(some, last)
            found[some.cpu().numpy()] = _stored(self.batch(self.replacement.n_layers, where, vectors))

    def _features(self, layer: int, items: Tensor, places: Tensor, found: npt.NDArray[np.float32]) -> None:
        """Rows of features of one layer, by position."""
        active = self.sources.active
        places = places[torch.argsort(active.position[items[places]], stable=True)]
        features = self.replacement.dictionary.layer(layer)
        for some in places.split(self.lanes):
            chosen = items[some]
            vectors = features.encoder_rows(active.feature[chosen].cpu())
            found[some.cpu().numpy()] = _stored(self.batch(layer, active.position[chosen], vectors))

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


def _stored(rows: Tensor) -> npt.NDArray[np.float32]:
    """As the store keeps them."""
    found: npt.NDArray[np.float32] = rows.float().cpu().numpy()
    return found
