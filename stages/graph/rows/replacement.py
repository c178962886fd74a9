"""The local replacement model of one prompt: linear maps between residual streams, applied backwards.

With attention patterns and norm divisors held at what the prompt gave, and MLPs replaced by what they wrote,
the residual stream is a linear function of embeddings, features and errors (Ameisen et al. 2025, "Circuit
Tracing", section 3; spec in circuit-tracer 0.5.0). A gradient at one place is carried down the layers by the
transposed maps: through attention (patterns, V and O projections, norm gains), through the linear skip of
skip transcoders, and along the stream itself. No autograd: nothing is retained, and a batch of targets costs
what its causal cone costs.

Everything that is diagonal is folded in beforehand: gains and the centring of LayerNorm into the V and O
matrices, divisors into the patterns.

Axes: gradients are [position, target, hidden], so that one position is one matrix; positions 0 to the last
one anybody asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    """A norm with its divisors frozen: x -> gain * (x - mean, where centred) / scale, which is linear.

    gain [hidden], scale [position].
    """

    gain: Tensor
    scale: Tensor
    centred: bool

    def columns(self, matrix: Tensor) -> Tensor:
        """matrix [out, hidden] of what reads the norm, to be applied to what the norm reads, but for the
        divisor."""
        found = matrix * self.gain
        return found - found.mean(-1, keepdim=True) if self.centred else found

    def forward(self, x: Tensor, positions: Tensor | slice) -> Tensor:
        """x [..., hidden] through the norm, at these positions, one for each row."""
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        return x * self.gain / self.scale[positions, None]

    def backward(self, gradient: Tensor, positions: Tensor) -> Tensor:
        """Gradients [target, hidden] at the norm's output, at these positions, to its input."""
        return self.columns(gradient) / self.scale[positions, None]


@dataclass(frozen=True, eq=False)
class LayerMaps:
    """One layer's transposed maps, divisors and gains folded in.

    out [hidden, head * d_head], values [kv_head * d_head, hidden]. mix [kv_head, key_position, heads of the
    group, query_position]. skip [hidden, hidden] with skip_scale [position], where there is a linear skip.
    """

    out: Tensor
    values: Tensor
    mix: Tensor
    skip: Tensor | None = None
    skip_scale: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the four maps; `skip_scale`, a number per position, does not count."""
        return sum(part.nbytes for part in (self.out, self.values, self.mix, self.skip) if part is not None)


class Replacement:
    """The replacement model of a prompt."""

    def __init__(
        self,
        model: Model,
        dictionary: Dictionary,
        frozen: FrozenPass,
        *,
        dtype: torch.dtype = torch.float64,
        room: int = 1 << 30,
    ) -> None:
        """dtype: of the arithmetic. room: bytes for maps that are kept; others are made when they are
        needed."""
        self.config, self.network = model.config, model.network
        self._heads, self._kv_heads, self._d_head = (
            self.config.axis_sizes[axis] for axis in ("head", "kv_head", "d_head")
        )
        self.dictionary, self.frozen, self.dtype = dictionary, frozen, dtype
        self.n_layers, self.n_positions = self.config.num_layers, frozen.n_positions
        self.device = model.device
        self._room, self._kept = room, dict[int, LayerMaps]()

    # -- the pieces

    def norm(self, name: str, layer: int | None) -> NormMap:
        """A norm of a layer ("ln1", "ln2", "ln1_post", "ln2_post"), or "ln_final"."""
        gain = self.network.norm_gain(name, layer, self.dtype)
        scale = self.frozen.scales[HookPoint(f"{name}_scale", layer)].to(self.dtype)
        return NormMap(gain, scale, centred=self.config.norm_type == "layer")

    def _has_norm(self, name: str, layer: int) -> bool:
        return HookPoint(f"{name}_scale", layer) in self.config.known_points

    def written(self, layer: int, vectors: Tensor, positions: Tensor | slice) -> Tensor:
        """What vectors [n, d_out] at the write hook of a layer, at these positions, add to the stream."""
        if self.dictionary.layout.write == "mlp_post" and self._has_norm("ln2_post", layer):
            return self.norm("ln2_post", layer).forward(vectors, positions)
        return vectors

    def read_gradient(self, layer: int, vectors: Tensor, positions: Tensor) -> Tensor:
        """Vectors [target, d_in] that read at the read hook, as gradients at resid_mid of the layer.

        At `n_layers`: vectors that read the final norm's output, as gradients at the last stream.
        """
        if layer == self.n_layers:
            return self.norm("ln_final", None).backward(vectors, positions)
        read = self.dictionary.layout.read
        if read == "resid_mid":
            return vectors
        norm = self.norm("ln2", layer)
        if read == "ln2_normalized":
            norm = NormMap(torch.ones_like(norm.gain), norm.scale, norm.centred)
        return norm.backward(vectors, positions)

    @property
    def is_kept(self) -> bool:
        """Whether the maps of all layers are in memory; makes them."""
        for layer in range(self.n_layers):
            self.maps(layer)
        return len(self._kept) == self.n_layers

    def maps(self, layer: int) -> LayerMaps:
        """The maps of a layer, made or kept."""
        found = self._kept.get(layer)
        if found is None:
            found = self._made(layer)
            if sum(each.nbytes for each in self._kept.values()) + found.nbytes <= self._room:
                self._kept[layer] = found
        return found

    def _made(self, layer: int) -> LayerMaps:
        before = self.norm("ln1", layer)
        values = before.columns(self.network.value_matrix(layer).to(self.dtype))
        out = self.network.output_matrix(layer).to(self.dtype)
        mix = self.frozen.patterns[layer].to(self.dtype) / before.scale
        if self._has_norm("ln1_post", layer):
            after = self.norm("ln1_post", layer)
            out = after.columns(out.T).T
            mix = mix / after.scale[:, None]
        grouped = mix.unflatten(0, (self._kv_heads, -1)).permute(0, 3, 1, 2).contiguous()
        return LayerMaps(out.contiguous(), values, grouped, *self._skip(layer))

    def _skip(self, layer: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """The skip's matrix from gradients after the layer to resid_mid, and its divisor by position."""
        if layer not in self.dictionary.layers:
            return None, None
        matrix = self.dictionary.layer(layer).W_skip
        if matrix is None:
            return None, None
        matrix = matrix.to(device=self.device, dtype=self.dtype)
        scale = torch.ones(self.n_positions, dtype=self.dtype, device=self.device)
        if self.dictionary.layout.write == "mlp_post" and self._has_norm("ln2_post", layer):
            after = self.norm("ln2_post", layer)
            matrix, scale = after.columns(matrix.T).T, scale * after.scale
        if self.dictionary.layout.read != "resid_mid":
            before = self.norm("ln2", layer)
            if self.dictionary.layout.read == "ln2_normalized":
                before = NormMap(torch.ones_like(before.gain), before.scale, before.centred)
            matrix, scale = before.columns(matrix), scale * before.scale
        return matrix.contiguous(), scale

    # -- the walk

    def start(self, layer: int, positions: Tensor, gradient: Tensor) -> Tensor:
        """Gradients at the stream that enters a layer, from gradients [target, hidden] at its resid_mid, each
        at one position: [position, target, hidden], positions up to the last one.

        At `n_layers`: gradients of the last stream itself.
        """
        count, targets = int(positions.max()) + 1, len(positions)
        lane = torch.arange(targets, device=self.device)
        if layer == self.n_layers:
            found = gradient.new_zeros(count, targets, gradient.shape[-1])
        else:
            maps = self.maps(layer)
            # One position per target: what its query mixed, [target, kv_head, key, group] @ [.., d_head].
            z = (gradient @ maps.out).unflatten(-1, (self._kv_heads, -1, self._d_head))
            seen = maps.mix[:, :count].permute(3, 0, 1, 2)[positions]
            mixed = torch.matmul(seen, z).permute(2, 0, 1, 3).reshape(count * targets, -1)
            found = (mixed @ maps.values).view(count, targets, -1)
        found[positions, lane] += gradient
        return found

    def back(self, layer: int, gradient: Tensor) -> Tensor:
        """Gradients after a layer to gradients before it, in place: [position, target, hidden]."""
        maps = self.maps(layer)
        count, targets, hidden = gradient.shape
        flat = gradient.view(count * targets, hidden)
        if maps.skip is not None and maps.skip_scale is not None:
            scaled = gradient / maps.skip_scale[:count, None, None]
            flat.addmm_(scaled.view(count * targets, hidden), maps.skip)
        group = self._heads // self._kv_heads
        z = (flat @ maps.out).view(count, targets, self._kv_heads, group, self._d_head)
        stacked = z.permute(2, 3, 0, 1, 4).reshape(self._kv_heads, group * count, targets * self._d_head)
        seen = maps.mix[:, :count, :, :count].reshape(self._kv_heads, count, group * count)
        mixed = torch.bmm(seen, stacked).view(self._kv_heads, count, targets, self._d_head)
        flat.addmm_(mixed.permute(1, 2, 0, 3).reshape(count * targets, -1), maps.values)
        return gradient
