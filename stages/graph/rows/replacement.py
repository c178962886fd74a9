"""The local replacement model of one prompt: linear maps between residual streams, applied backwards.

With attention patterns and norm divisors frozen at their values for the prompt, and MLPs replaced by their
recorded outputs, the residual stream is a linear function of embeddings, features and errors (Ameisen et al.
2025, "Circuit Tracing", section 3; circuit-tracer 0.5.0). A gradient is propagated down the layers by
transposed maps: through attention (patterns, V and O projections, norm gains), through the linear skip of
skip transcoders, and along the residual stream. Without autograd, no activations are retained, and a batch of
targets costs only its causal cone.

Diagonal factors are folded in beforehand: gains and the centring of LayerNorm into the V and O matrices,
divisors into the patterns.

Axes: gradients are [position, target, hidden], so that one position is one matrix; positions run from 0 to
the last position of a target.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...forward.architectures.points import HookPoint
from .frozen import FrozenPass

if TYPE_CHECKING:
    from ...features.dictionary import Dictionary
    from ...forward.models.model import Model

__all__ = ["LayerMaps", "NormMap", "Replacement"]


@dataclass(frozen=True, eq=False)
class NormMap:
    """A norm with frozen divisors, which makes it linear: x -> gain * (x - mean) / scale."""

    gain: Tensor
    """Gain of the norm [hidden]."""
    scale: Tensor
    """Divisor of each position [position]."""
    centred: bool
    """Whether the mean is subtracted (LayerNorm), or not (RMSNorm)."""

    def columns(self, matrix: Tensor) -> Tensor:
        """Fold gain and centring into a matrix [out, hidden] that reads the output of the norm.

        The result reads the input of the norm, except that the divisor is still missing.
        """
        folded = matrix * self.gain
        return folded - folded.mean(-1, keepdim=True) if self.centred else folded

    def forward(self, x: Tensor, positions: Tensor | slice) -> Tensor:
        """Output of the norm for some states, [..., hidden].

        Arguments:
            x: States [..., hidden].
            positions: Position of each state, which selects its divisor.
        """
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        return x * self.gain / self.scale[positions, None]

    def backward(self, gradient: Tensor, positions: Tensor) -> Tensor:
        """Propagate gradients from the output of the norm to its input.

        Arguments:
            gradient: Gradients at the output [target, hidden].
            positions: Position of each gradient, which selects its divisor.
        """
        return self.columns(gradient) / self.scale[positions, None]


@dataclass(frozen=True, eq=False)
class LayerMaps:
    """Transposed maps of one layer, through which gradients go, with norm gains and divisors folded in."""

    out: Tensor
    """Output projection of attention [hidden, head * d_head]."""
    values: Tensor
    """Value projection of attention [kv_head * d_head, hidden]."""
    mix: Tensor
    """Attention patterns [kv_head, key_position, head of the group, query_position]."""
    skip: Tensor | None = None
    """Linear skip connection of the transcoder [hidden, hidden]; None without one."""
    skip_scale: Tensor | None = None
    """Norm divisors of the skip connection [position]; None without one."""

    @property
    def nbytes(self) -> int:
        """Size in bytes of the four matrices; `skip_scale`, a number per position, does not count."""
        return sum(part.nbytes for part in (self.out, self.values, self.mix, self.skip) if part is not None)


class Replacement:
    """The local replacement model of a prompt."""

    def __init__(
        self,
        model: Model,
        dictionary: Dictionary,
        frozen: FrozenPass,
        *,
        dtype: torch.dtype = torch.float64,
        room: int = 1 << 30,
    ) -> None:
        """Prepare the maps of the layers; each is computed at its first use.

        Arguments:
            model: A loaded model.
            dictionary: Transcoders of the model.
            frozen: Activations of the prompt.
            dtype: dtype in which gradients are computed.
            room: Bytes for cached maps; maps that do not fit are computed at every use.
        """
        self.config, self.network = model.config, model.network
        self._heads, self._kv_heads, self._d_head = (
            self.config.axis_sizes[axis] for axis in ("head", "kv_head", "d_head")
        )
        self.dictionary, self.frozen, self.dtype = dictionary, frozen, dtype
        self.n_layers, self.n_positions = self.config.num_layers, frozen.n_positions
        self.device = model.device
        self._room, self._cache = room, dict[int, LayerMaps]()

    # -- the pieces

    def norm(self, name: str, layer: int | None) -> NormMap:
        """A norm of the model, frozen at the divisors of the prompt.

        Arguments:
            name: "ln1", "ln2", "ln1_post", "ln2_post" or "ln_final".
            layer: Layer of the norm; None for "ln_final".
        """
        gain = self.network.norm_gain(name, layer, self.dtype)
        scale = self.frozen.scales[HookPoint(f"{name}_scale", layer)].to(self.dtype)
        return NormMap(gain, scale, centred=self.config.norm_type == "layer")

    def _has_norm(self, name: str, layer: int) -> bool:
        return HookPoint(f"{name}_scale", layer) in self.config.known_points

    def _read_norm(self, layer: int) -> NormMap | None:
        """Norm between resid_mid and the read hook of a layer; None if the hook is resid_mid itself."""
        read = self.dictionary.layout.read
        if read == "resid_mid":
            return None
        norm = self.norm("ln2", layer)
        # The hook ln2_normalized is before the gain.
        return replace(norm, gain=torch.ones_like(norm.gain)) if read == "ln2_normalized" else norm

    def _write_norm(self, layer: int) -> NormMap | None:
        """Norm between the write hook of a layer and the residual stream; None without one."""
        if self.dictionary.layout.write == "mlp_post" and self._has_norm("ln2_post", layer):
            return self.norm("ln2_post", layer)
        return None

    def written(self, layer: int, vectors: Tensor, positions: Tensor | slice) -> Tensor:
        """What vectors at the write hook of a layer add to the residual stream, [n, hidden].

        Arguments:
            layer: The layer.
            vectors: Vectors at the write hook [n, d_out].
            positions: Position of each vector, for the divisors of a norm after the MLP.
        """
        norm = self._write_norm(layer)
        return vectors if norm is None else norm.forward(vectors, positions)

    def read_gradient(self, layer: int, vectors: Tensor, positions: Tensor) -> Tensor:
        """Gradients [target, hidden] at resid_mid of a layer, for targets that read the transcoder's input.

        Arguments:
            layer: The layer. For `n_layers`, gradients are at the final residual stream, for targets that
            read
                the output of the final norm.
            vectors: Vector with which each target reads the state [target, d_in].
            positions: Position of each target [target].
        """
        if layer == self.n_layers:
            return self.norm("ln_final", None).backward(vectors, positions)
        norm = self._read_norm(layer)
        return vectors if norm is None else norm.backward(vectors, positions)

    @property
    def is_kept(self) -> bool:
        """Whether the maps of all layers fit in the cache; the maps are computed to find out."""
        for layer in range(self.n_layers):
            self.maps(layer)
        return len(self._cache) == self.n_layers

    def maps(self, layer: int) -> LayerMaps:
        """Replacement maps of a layer, from the cache if present."""
        maps = self._cache.get(layer)
        if maps is None:
            maps = self._compute_maps(layer)
            if sum(cached.nbytes for cached in self._cache.values()) + maps.nbytes <= self._room:
                self._cache[layer] = maps
        return maps

    def _compute_maps(self, layer: int) -> LayerMaps:
        before = self.norm("ln1", layer)
        values = before.columns(self.network.value_matrix(layer).to(self.dtype))
        out = self.network.output_matrix(layer).to(self.dtype)
        # ln1 normalises what keys and values read: its divisor belongs to the key position.
        mix = self.frozen.patterns[layer].to(self.dtype) / before.scale
        if self._has_norm("ln1_post", layer):
            after = self.norm("ln1_post", layer)
            out = after.columns(out.T).T
            mix = mix / after.scale[:, None]  # by query position, where the output is written
        # Query heads that share a key-value head lie together, so that their sum is part of one product.
        grouped = mix.unflatten(0, (self._kv_heads, -1)).permute(0, 3, 1, 2).contiguous()
        return LayerMaps(out.contiguous(), values, grouped, *self._skip(layer))

    def _skip(self, layer: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Skip connection of a layer: (matrix [hidden, hidden], norm divisors [position]), or two Nones.

        The matrix maps gradients after the layer to gradients at resid_mid.
        """
        if layer not in self.dictionary.layers:
            return None, None
        matrix = self.dictionary.layer(layer).W_skip
        if matrix is None:
            return None, None
        matrix = matrix.to(device=self.device, dtype=self.dtype)
        scale = torch.ones(self.n_positions, dtype=self.dtype, device=self.device)
        if (after := self._write_norm(layer)) is not None:
            matrix, scale = after.columns(matrix.T).T, scale * after.scale
        if (before := self._read_norm(layer)) is not None:
            matrix, scale = before.columns(matrix), scale * before.scale
        return matrix.contiguous(), scale

    # -- the walk

    def start(self, layer: int, positions: Tensor, gradient: Tensor) -> Tensor:
        """Propagate gradients of targets in a layer through its attention, to the input of the layer.

        Arguments:
            layer: Layer of the targets; `n_layers` for the final residual stream.
            positions: Position of each target [target].
            gradient: Gradient of each target at resid_mid of the layer [target, hidden].

        Returns:
            Gradients at the input of the layer, [position, target, hidden], up to the last position of a
            target. For `n_layers`, at the final residual stream.
        """
        count, targets = int(positions.max()) + 1, len(positions)
        lane = torch.arange(targets, device=self.device)
        if layer == self.n_layers:
            start_gradient = gradient.new_zeros(count, targets, gradient.shape[-1])
        else:
            maps = self.maps(layer)
            # Each target has one query position: [target, kv_head, key, group] @ [.., group, d_head].
            z = (gradient @ maps.out).unflatten(-1, (self._kv_heads, -1, self._d_head))
            weights = maps.mix[:, :count].permute(3, 0, 1, 2)[positions]
            mixed = torch.matmul(weights, z).permute(2, 0, 1, 3).reshape(count * targets, -1)
            start_gradient = (mixed @ maps.values).view(count, targets, -1)
        start_gradient[positions, lane] += gradient  # along the residual stream, at the target's own position
        return start_gradient

    def back(self, layer: int, gradient: Tensor) -> Tensor:
        """Propagate gradients from after a layer to before it.

        Arguments:
            layer: The layer.
            gradient: Gradients after the layer [position, target, hidden], changed in place.

        Returns:
            `gradient`.
        """
        maps = self.maps(layer)
        count, targets, hidden = gradient.shape
        flat = gradient.view(count * targets, hidden)
        # The MLP follows attention, so going down its skip comes first; attention then reads the sum.
        if maps.skip is not None and maps.skip_scale is not None:
            scaled = gradient / maps.skip_scale[:count, None, None]
            flat.addmm_(scaled.view(count * targets, hidden), maps.skip)
        group = self._heads // self._kv_heads
        z = (flat @ maps.out).view(count, targets, self._kv_heads, group, self._d_head)
        stacked = z.permute(2, 3, 0, 1, 4).reshape(self._kv_heads, group * count, targets * self._d_head)
        weights = maps.mix[:, :count, :, :count].reshape(self._kv_heads, count, group * count)
        mixed = torch.bmm(weights, stacked).view(self._kv_heads, count, targets, self._d_head)
        flat.addmm_(mixed.permute(1, 2, 0, 3).reshape(count * targets, -1), maps.values)
        return gradient
