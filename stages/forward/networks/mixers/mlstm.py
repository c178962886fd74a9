"""An mLSTM: a matrix memory with exponential input gates, read out with a normaliser.

    q, k, v = W u      o = sigmoid(W_o u)       i, f = cap tanh((W u + b) / cap)
    h = memory(q / sqrt(K), k, v, i, log sigmoid(f))        out = W_out (o norm(h))

(Beck et al., xLSTM, 2024, section 2.3; xLSTM 7B, 2025, section 3.) The memory is in
recurrences/matrix_memory.py; the norm is a layer norm per head.

Axes: K keys and V values of a head's memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ...architectures.linear_mixers import MlstmSpec
from ...hooks.taps import Taps
from ..history import History
from ..kernels.products import product
from ..recurrences.matrix_memory import MatrixMemory
from ..scan import scan
from .mixer import LayerTensors, merge_heads, split_heads, strip_prefix, upcast

__all__ = ["Mlstm"]


class Mlstm:
    """The mLSTM of one layer: a matrix memory with exponential input gates."""

    def __init__(self, spec: MlstmSpec, tensors: LayerTensors) -> None:
        self.spec, self.weights = spec, _rearranged(strip_prefix(tensors, "mlstm."), spec)
        self._memory = MatrixMemory(spec.eps)

    def __call__(self, x: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """Normalised stream x [B, token, D] -> output that is added to the residual stream, [B, kept, D];
        kept: the tokens whose output later layers need."""
        spec = self.spec
        gate = torch.sigmoid(self._projected(history.needed(x), "ogate_preact"))
        gate = taps("mlstm_gate", layer, split_heads(gate, spec.value_size))
        queries = split_heads(self._projected(x, "q"), spec.key_size) * spec.key_size**-0.5
        tokens = {"q": taps("mlstm_q", layer, queries)}
        tokens["k"] = taps("mlstm_k", layer, split_heads(self._projected(x, "k"), spec.key_size))
        tokens["v"] = taps("mlstm_v", layer, split_heads(self._projected(x, "v"), spec.value_size))
        tokens["input"] = taps("mlstm_input", layer, self._capped(x, "igate_preact"))
        tokens["log_decay"] = F.logsigmoid(self._capped(x, "fgate_preact"))
        read = taps("mlstm_out", layer, scan(self._memory, tokens, layer, history, taps, "mlstm"))
        normed = merge_heads(self._normed(history.needed(read), x.dtype))
        w = self.weights
        normed = normed * w["norm"] + w["norm.bias"] if "norm.bias" in w else normed * w["norm"]
        return self._projected(merge_heads(gate) * normed, "out")

    def _projected(self, x: Tensor, name: str) -> Tensor:
        """x [B, token, D] times the matrix called `name`, plus its bias if there is one."""
        return product(x, self.weights[name], self.weights.get(f"{name}.bias"))

    def _capped(self, x: Tensor, name: str) -> Tensor:
        """Soft-capped input or forget gate before its activation, [B, head, token, 1], from the normalised
        stream x [B, token, D]; name: of its projection."""
        cap = self.spec.gate_cap
        return split_heads(cap * torch.tanh(upcast(self._projected(x, name)) / cap), 1)

    def _normed(self, read: Tensor, dtype: torch.dtype) -> Tensor:
        """What tokens read from the memory, [B, head, token, V], normalised per head to mean 0 and variance
        1; dtype: of the result."""
        width = (self.spec.value_size,)
        return F.layer_norm(upcast(read.to(dtype)), width, eps=self.spec.norm_eps).to(dtype)


def _rearranged(w: Mapping[str, Tensor], spec: MlstmSpec) -> dict[str, Tensor]:
    """Weights by name in one layout for both kinds of checkpoints: fused projections are split into those to
    queries, keys, values and output gate, and into those to input and forget gate."""
    if not spec.is_fused:
        return dict(w)
    separated = {name: tensor for name, tensor in w.items() if not name.startswith(("qkvo", "gates"))}
    for suffix in ("", ".bias"):
        if f"qkvo{suffix}" in w:
            parts = w[f"qkvo{suffix}"].split(spec.parts)
            for name, part in zip(("q", "k", "v", "ogate_preact"), parts, strict=True):
                separated[f"{name}{suffix}"] = part
        input_gate, forget_gate = w[f"gates{suffix}"].chunk(2)
        separated[f"igate_preact{suffix}"], separated[f"fgate_preact{suffix}"] = input_gate, forget_gate
    return separated
