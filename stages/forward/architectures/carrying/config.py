"""CarryingConfig: architecture of Gemma 3n and Gemma 4, whose layers pass on more than the residual stream.

    [AltUp predicts ->] ln1 -> attention -> ln1_post -> + [LAuReL] -> ln2 -> MLP -> ln2_post -> +
                        [AltUp corrects ->] inputs of the layer -> + -> [times a number]

* *inputs of a layer* (per-layer embeddings): a table gives each token a vector for every layer, to which a
  projection of its embedding is added; after attention and MLP, a layer gates its vector by the stream and
  adds a projection of it to the stream.
* *keys of earlier layers* (KV sharing): the last layers only have queries, and reuse keys and values of the
  last earlier layer of the same type (window or full attention).
* *AltUp*: several parallel streams. A layer predicts all of them, computes one of them, and corrects all by
  the difference (Baykal et al., Alternating Updates, 2023, section 3). The computed stream is the residual
  stream here; the language head reads the mean of all.
* *LAuReL*: the input of attention, plus a low-rank projection of it, is also added to the stream (Menghani et
  al., LAuReL, 2024, section 2).

Widths of heads and MLPs may differ between layers, so that an axis may have several sizes.

Border: sizes and switches; tensor names are in tensors.py. Never imports torch.

Axes: as in points.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from .....store.digest import digest
from .....store.errors import ConfigError
from ..architecture import AxisSizes, Heads, Layer, Reach, Tensors
from ..composed import ComposedArchitecture
from ..mixers import AttentionSpec
from ..points import HookPoint
from .tensors import carrying_tensors

__all__ = ["CarryingConfig"]

_INPUT = tuple(f"layer_input_{name}" for name in ("embed", "gate", "scale", "normalized", "out"))
_STREAMS = ("altup_streams", "altup_predicted", "altup_corrected")
_LAUREL = ("laurel_scale", "laurel_normalized", "laurel_out")


@dataclass(frozen=True)
class CarryingConfig(ComposedArchitecture):
    """A Gemma 3n or 4: everything except the weights that decides its results."""

    kind: ClassVar[str] = "carrying"
    version: ClassVar[str] = "carrying/1"

    input_size: int = 0
    """Width of the input vector of each layer; 0 for no such inputs."""
    input_rows: int = 0
    """Rows of their table; tokens beyond it use the first row."""
    has_scalars: bool = False
    """Whether each layer finally multiplies the stream by a learned number."""
    streams: int = 1
    """Number of parallel streams."""
    active: int = 0
    """Index of the stream that layers compute."""
    scales_corrected: bool = False
    """Whether the corrected stream is multiplied by learned weights before it gates the layer's input
    vector."""
    laurel_rank: int = 0
    """Rank of LAuReL's projections; 0 for no LAuReL."""

    def __post_init__(self) -> None:
        if not 0 <= self.active < self.streams:
            raise ConfigError(
                f"expected the active stream to be one of {self.streams}, counted from 0, found "
                f"{self.active}; correct config.json, or fetch it again"
            )

    def attention(self, layer: int) -> AttentionSpec:
        """Attention spec of a layer."""
        (shape,) = self.blocks[layer].mixers
        assert isinstance(shape, AttentionSpec)  # as their families make them
        return shape

    @property
    def sources(self) -> frozenset[int]:
        """Numbers of the layers whose keys and values later layers reuse."""
        sources = (self.attention(layer).source for layer in range(self.num_layers))
        return frozenset(source for source in sources if source is not None)

    @property
    def digest(self) -> str:
        """Digest of every field except the tensor names (`spelling`)."""
        return digest("carrying-config", self.fields | {"spelling": None})

    @cached_property
    def axis_sizes(self) -> AxisSizes:
        """See `Architecture`; axes whose size differs between layers are in `AxisSizes.differing`."""
        sizes: dict[str, set[int]] = {}
        for spec in (spec for block in self.blocks for spec in block.shapes):
            for axis, size in spec.axis_sizes.items():
                sizes.setdefault(axis, set()).add(size)
        axis_sizes = AxisSizes(hidden=self.hidden_size, one=1)
        if self.input_size:
            axis_sizes["layer_input"] = self.input_size
        if self.streams > 1:
            axis_sizes["stream"] = self.streams
        axis_sizes |= {axis: next(iter(values)) for axis, values in sizes.items() if len(values) == 1}
        axis_sizes.differing = {axis: values for axis, values in sizes.items() if len(values) > 1}
        return axis_sizes

    def sizes_in(self, layer: int | None) -> dict[str, int]:
        """See `Architecture`."""
        sizes = dict(self.axis_sizes)
        for spec in self.blocks[layer].shapes if layer is not None else ():
            sizes |= spec.axis_sizes
        return sizes

    @cached_property
    def hook_points(self) -> tuple[HookPoint, ...]:
        """See `Architecture`."""
        kinds = _INPUT * bool(self.input_size) + _LAUREL * bool(self.laurel_rank)
        kinds += _STREAMS * (self.streams > 1)
        points = [HookPoint(kind, layer) for layer in range(self.num_layers) for kind in kinds]
        points += [HookPoint("altup_merged")] * (self.streams > 1)
        return tuple(sorted((*super().hook_points, *points), key=lambda point: point.order))

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """See `Architecture`; norms are "of stream", as no stream is the plain sum of all outputs."""
        return tuple(replace(block.summary, norms="of stream") for block in self.blocks)

    def heads_of(self, layer: int) -> Heads | None:
        """None: values are normalised, so that head outputs are no linear maps of the stream."""
        return None

    @cached_property
    def tensors(self) -> Tensors:
        """See `Architecture`."""
        return carrying_tensors(self)

    def reach(self, point: HookPoint) -> Reach:
        """See `ComposedArchitecture`; layers that reuse keys and values do not pass changes on to later
        positions."""
        entered = 0 if point.layer is None else point.layer + (point.kind == "resid_post")
        is_seen = entered < self.num_layers and self.attention(entered).source is None
        # These include the stream that the layer's attention reads.
        if point.kind in ("altup_streams", "altup_predicted"):
            return "later" if is_seen else "here"
        reach = super().reach(point)
        return reach if is_seen else "here"

    def bytes_per_token(self, itemsize: int) -> int:
        """See `Architecture`; with all streams before and after their prediction, the inputs of all layers,
        and the keys and values that later layers reuse."""
        shared = (self.attention(source) for source in self.sources)
        kv_size = sum(2 * spec.num_kv_heads * spec.head_dim for spec in shared)
        carried = 4 * (self.streams - 1) * self.hidden_size + 2 * (
            self.num_layers * self.input_size + kv_size
        )
        return super().bytes_per_token(itemsize) + itemsize * carried
