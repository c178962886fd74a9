"""Passes of the two networks in torch: millions of samples, or some with hook points.

Each has one loop, under taps; taps of an empty spec cost a set lookup per point. The RNN goes through its
samples a few thousand at a time with buffers of its own: 2.2 times as fast on one core as the plain loop, to
the bit.

Border: tensors and taps; knows no files, no tasks and no store.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...store.arrays import Array
from ...store.errors import ConfigError, InterventionError, ShapeError
from ..forward.hooks.spec import BoundSpec
from ..forward.hooks.taps import RunTaps
from .networks import RnnShape, Shape, TransformerShape
from .samples import SLICE

__all__ = ["DTYPES", "Network", "Rnn", "Transformer", "network_of"]

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def _nowhere(*_: object) -> None:
    """Where nothing is captured."""


UNTOUCHED = RunTaps(BoundSpec(), _nowhere)


class Rnn:
    """p_t = W_ih x_t + W_hh h_{t-1}, h_t = relu(p_t), y = W_oh h_{T-1}."""

    def __init__(self, tensors: Mapping[str, Array], shape: RnnShape, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        ih, hh, oh = (torch.tensor(tensors[name]).to(dtype) for name in shape.tensors)
        self._ih, self._hh, self._oh = ih[:, 0].contiguous(), hh.T.contiguous(), oh.T.contiguous()

    @torch.no_grad()
    def outputs(self, x: Tensor) -> Tensor:
        """What it says [sample, output] for numbers [sample, time]. Raises ShapeError for other dims."""
        _expect(x)
        x = x.to(self.dtype)
        if len(x) <= SLICE:
            return self.run(x)
        found = x.new_empty(len(x), self.shape.outputs)
        buffers = x.new_empty(2, SLICE, self.shape.hidden)
        for first in range(0, len(x), SLICE):
            part = x[first : first + SLICE]
            found[first : first + SLICE] = self.run(part, buffers=buffers[:, : len(part)])
        return found

    @torch.no_grad()
    def run(self, x: Tensor, taps: RunTaps = UNTOUCHED, buffers: Tensor | None = None) -> Tensor:
        """The same of samples that fit at once, under taps. Tensors handed to taps are written over in the
        next step. buffers: [2, sample, neuron], to be written to."""
        pre, post = x.new_empty(2, len(x), self.shape.hidden) if buffers is None else buffers
        state = post.zero_()
        for step in range(x.shape[1]):
            torch.mul(x[:, step, None], self._ih, out=pre)
            before = taps("rnn_pre_activation", step, pre.addmm_(state, self._hh))
            state = taps("rnn_hidden", step, torch.clamp(before, min=0, out=post))
        last = taps("rnn_final_state", None, state)
        return taps("rnn_output", None, last @ self._oh)


class Transformer:
    """z = embed[x] + pos_embed; z += softmax(Q K' / sqrt(d)) V O' per layer, unmasked; y = unembed
    z[last]."""

    def __init__(self, tensors: Mapping[str, Array], shape: TransformerShape, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        held = {name: torch.tensor(tensors[name]).to(dtype) for name in shape.tensors}
        self._embed, self._pos, self._unembed = (
            held[f"{name}.weight"] for name in ("embed", "pos_embed", "unembed")
        )
        self._in = [held[f"attns.{i}.in_proj_weight"] for i in range(shape.layers)]
        self._out = [held[f"attns.{i}.out_proj.weight"] for i in range(shape.layers)]

    @torch.no_grad()
    def outputs(self, x: Tensor) -> Tensor:
        """What it says [sample, output] for integers [sample, time]. Raises ShapeError for others."""
        self._check(x)
        return torch.cat([self.run(part) for part in x.split(SLICE)])

    @torch.no_grad()
    def run(self, x: Tensor, taps: RunTaps = UNTOUCHED) -> Tensor:
        """The same of samples that fit at once, under taps."""
        self._check(x)
        stream = taps("embed", None, self._embed[x.long()] + self._pos)
        for layer in range(self.shape.layers):
            stream = taps("resid_pre", layer, stream)
            added = taps("attn_out", layer, self._attention(layer, stream, taps))
            stream = taps("resid_post", layer, stream + added)
        return stream[:, -1] @ self._unembed.T

    def _attention(self, layer: int, stream: Tensor, taps: RunTaps) -> Tensor:
        many, length, _ = stream.shape
        heads = (stream @ self._in[layer].T).view(many, length, 3, self.shape.heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        scores = taps("scores", layer, q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5)
        cut = taps.cut(layer, self.shape.heads, length, length, stream.device)
        if cut is not None:
            if cut.all(-1).any():
                raise InterventionError(
                    f"expected every position of layer {layer} to keep an edge, found one whose edges are "
                    "all cut; cut fewer"
                )
            scores = scores.masked_fill(cut, float("-inf"))
        read = (taps("pattern", layer, scores.softmax(-1)) @ v).transpose(1, 2).reshape(many, length, -1)
        added: Tensor = read @ self._out[layer].T
        return added

    def _check(self, x: Tensor) -> None:
        _expect(x)
        shape = self.shape
        if x.shape[1] != shape.sequence:
            raise ShapeError(
                f"expected sequences of {shape.sequence} integers, as pos_embed says, found {x.shape[1]}"
            )
        if x.is_floating_point() or (x.numel() and not (x.min() >= 0 and x.max() < shape.inputs)):
            raise ShapeError(
                f"expected integers in 0..{shape.inputs - 1}, which is what this transformer embeds, found "
                f"{x.dtype} from {x.min().item():g} to {x.max().item():g}"
            )


Network = Rnn | Transformer


def network_of(tensors: Mapping[str, Array], shape: Shape, dtype: str = "float32") -> Network:
    """The network that computes with these tensors. Raises ConfigError for a dtype that is not offered."""
    if dtype not in DTYPES:
        raise ConfigError(f"expected dtype {' or '.join(DTYPES)}, found {dtype!r}")
    if isinstance(shape, RnnShape):
        return Rnn(tensors, shape, DTYPES[dtype])
    return Transformer(tensors, shape, DTYPES[dtype])


def _expect(x: Tensor) -> None:
    if x.ndim != 2 or 0 in x.shape:
        raise ShapeError(
            f"expected inputs [sample, time], found shape {list(x.shape)}; give a row per sample"
        )
