"""Relative position terms of attention scores (`RelativeSpec`).

Either a learned bias per head and distance (Raffel et al., T5, 2020, section 2.1), or products of queries
with keys projected from a table of distances, and of keys with queries projected from it (He et al., DeBERTa,
2021, section 3.1).

Axes: [B, H, query, key]; row = row of the table, which stands for a distance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..architectures.mixers import AttentionSpec, RelativeSpec
from .kernels.products import product
from .weights import AttentionWeights, Linear

__all__ = ["Relative"]


class Relative:
    """Relative position terms that are added to the attention scores of one layer."""

    def __init__(self, spec: AttentionSpec, weights: AttentionWeights, tensors: Mapping[str, Tensor]) -> None:
        assert spec.relative is not None
        self.spec, self._scale, self._heads = spec.relative, spec.summary.scale, spec.num_attention_heads
        self._table, self._norm = tensors["relative"], tensors.get("relative_norm")
        self._norm_bias = tensors.get("relative_norm.bias")
        self._maps = {"q": weights.q, "k": weights.k}
        # DeBERTa without `share_att_key` projects the table by maps of its own.
        if not self.spec.shares_maps:
            self._maps = {part: _linear(tensors, f"relative.{part}") for part in "qk"}

    def __call__(self, q: Tensor, k: Tensor, places: Tensor) -> Tensor:
        """Terms that are added to the scores, [B, H, query, key].

        Arguments:
            q: queries [B, H, query, dh].
            k: keys [B, H, key, dh] at positions 0, 1, ….
            places: positions of the queries, [query] or [B, query].
        """
        keys = torch.arange(k.shape[2], device=k.device)
        rows = _rows(places[..., :, None] - keys, self.spec)
        rows = rows.view(-1, 1, *rows.shape[-2:]).expand(len(q), q.shape[1], -1, -1)
        terms = []
        for term in self.spec.terms:
            if term == "bias":
                terms.append(self._table.T[:, rows[:, 0]].transpose(0, 1))
            elif term == "content to position":
                scores = torch.matmul(q * self._scale, self._projected("k").transpose(-1, -2))
                terms.append(scores.gather(-1, rows))
            else:
                scores = torch.matmul(k * self._scale, self._projected("q").transpose(-1, -2))
                terms.append(scores.gather(-1, rows.transpose(-1, -2)).transpose(-1, -2))
        return sum(terms[1:], terms[0])

    def _projected(self, part: str) -> Tensor:
        """Queries ("q") or keys ("k") projected from the table, [H, row, dh]."""
        table, linear = self._table, self._maps[part]
        assert linear is not None  # a layer with the term has its projection
        if self.spec.norm_eps is not None:
            table = F.layer_norm(table, table.shape[1:], self._norm, self._norm_bias, self.spec.norm_eps)
        flat = product(table, linear.weight, linear.bias)
        projected: Tensor = flat.unflatten(-1, (self._heads, -1)).transpose(0, 1)
        return projected


def _linear(tensors: Mapping[str, Tensor], name: str) -> Linear | None:
    """The linear map with this name among the layer's tensors, with its bias if it has one; None if
    absent."""
    return Linear(tensors[name], tensors.get(f"{name}.bias")) if name in tensors else None


def _rows(distance: Tensor, spec: RelativeSpec) -> Tensor:
    """Row of the table of relative positions for each pair of query and key, int, of the shape of `distance`.

    Arguments:
        distance: query position - key position, int; negative for later keys.
        spec: sizes of the table, and how distances share rows.
    """
    # Without `looks_back`, half of the table stands for earlier keys and half for later ones.
    half = spec.rows if spec.looks_back else spec.rows // 2
    if spec.terms == ("bias",):
        # T5: one row per distance up to `near`, then logarithmic buckets up to `farthest`.
        size = distance.clamp(min=0) if spec.looks_back else distance.abs()
        log = torch.log(size.clamp(min=1).float() / spec.near) / math.log(spec.farthest / spec.near)
        far = spec.near + (log * (half - spec.near)).long()
        row = torch.where(size < spec.near, size, far.clamp(max=half - 1))
        return row if spec.looks_back else row + half * (distance < 0)
    # Logarithmic buckets of DeBERTa-v2 (`make_log_bucket_position`).
    size = distance.abs().clamp(min=spec.near)
    if spec.near < half:
        last = torch.log(torch.tensor((spec.farthest - 1) / spec.near))
        size = (torch.ceil(torch.log(size / spec.near) / last * (spec.near - 1)) + spec.near).long()
    row = torch.where(distance.abs() <= spec.near, distance, size * distance.sign())
    return (row + half).clamp(0, spec.rows - 1)
