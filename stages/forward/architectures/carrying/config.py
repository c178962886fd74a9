"""Decoders whose layers hand on more than the stream: Gemma 3n and Gemma 4.

    [AltUp predicts ->] ln1 -> attention -> ln1_post -> + [LAuReL] -> ln2 -> MLP -> ln2_post -> +
                        [AltUp corrects ->] inputs of the layer -> + -> [times a number]

* *inputs of a layer*: a table gives each token a vector for every layer, to which a map of its embedding is
  added; behind attention and MLP a layer multiplies its own, by what the stream says, into the stream.
* *keys of earlier layers*: the last layers make queries alone, and read keys and values of the last layer
  before them that sees as far as they do.
* *AltUp*: several streams go side by side. A layer predicts all of them, computes one of them, and corrects
  all by what it made of that one (Baykal et al., Alternating Updates, 2023, section 3). The stream that is
  computed is the residual stream here; what the LM head reads is the mean of all.
* *LAuReL*: what attention reads is added to the stream itself, with what maps of low rank make of it
  (Menghani et al., LAuReL, 2024, section 2).

Heads and MLPs may be wider in some layers than in others, so that an axis may have several sizes.

Border: sizes and switches; checkpoint names are in tensors.py. Never imports torch.

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
    """Such a decoder: everything that decides its numbers besides its weights.

    input_size: width of what each layer is given for itself, 0 for nothing; input_rows: of its table, where
    tokens beyond it have the first row. has_scalars: whether a layer multiplies the stream by a number in
    the end. streams: how many there are; active: which of them layers compute. scales_corrected: whether
    inputs of a layer are multiplied by a weighted stream. laurel_rank: 0 for no LAuReL.
    """

    kind: ClassVar[str] = "carrying"
    version: ClassVar[str] = "carrying/1"

    input_size: int = 0
    input_rows: int = 0
    has_scalars: bool = False
    streams: int = 1
    active: int = 0
    scales_corrected: bool = False
    laurel_rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.active < self.streams:
            raise ConfigError(
                f"expected the active stream to be one of {self.streams}, counted from 0, found "
                f"{self.active}; correct config.json, or fetch it again"
            )

    def attention(self, layer: int) -> AttentionSpec:
        """Of a layer; every layer attends."""
        (shape,) = self.blocks[layer].mixers
        assert isinstance(shape, AttentionSpec)  # as their families make them
        return shape

    @property
    def sources(self) -> frozenset[int]:
        """Layers whose keys and values later ones read."""
        found = (self.attention(layer).source for layer in range(self.num_layers))
        return frozenset(source for source in found if source is not None)

    @property
    def digest(self) -> str:
        """Of every field but how the checkpoint spells its tensors."""
        return digest("carrying-config", self.fields | {"spelling": None})

    @cached_property
    def axis_sizes(self) -> AxisSizes:
        """See `Architecture`; of axes that are of one size in all layers."""
        sizes: dict[str, set[int]] = {}
        for shape in (shape for block in self.blocks for shape in block.shapes):
            for axis, size in shape.axis_sizes.items():
                sizes.setdefault(axis, set()).add(size)
        found = AxisSizes(hidden=self.hidden_size, one=1)
        if self.input_size:
            found["layer_input"] = self.input_size
        if self.streams > 1:
            found["stream"] = self.streams
        found |= {axis: next(iter(those)) for axis, those in sizes.items() if len(those) == 1}
        found.differing = {axis: those for axis, those in sizes.items() if len(those) > 1}
        return found

    def sizes_in(self, layer: int | None) -> dict[str, int]:
        """See `Architecture`."""
        found = dict(self.axis_sizes)
        for shape in self.blocks[layer].shapes if layer is not None else ():
            found |= shape.axis_sizes
        return found

    @cached_property
    def hook_points(self) -> tuple[HookPoint, ...]:
        """See `Architecture`."""
        kinds = _INPUT * bool(self.input_size) + _LAUREL * bool(self.laurel_rank)
        kinds += _STREAMS * (self.streams > 1)
        found = [HookPoint(kind, layer) for layer in range(self.num_layers) for kind in kinds]
        found += [HookPoint("altup_merged")] * (self.streams > 1)
        return tuple(sorted((*super().hook_points, *found), key=lambda point: point.order))

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """See `Architecture`; no stream is the sum of what was written to it."""
        return tuple(replace(block.summary, norms="of stream") for block in self.blocks)

    def heads_of(self, layer: int) -> Heads | None:
        """None: values are normed, so that no map makes what heads read of the stream."""
        return None

    @cached_property
    def tensors(self) -> Tensors:
        """See `Architecture`."""
        return carrying_tensors(self)

    def reach(self, point: HookPoint) -> Reach:
        """As of any attention, but that a layer without keys of its own shows later positions nothing."""
        entered = 0 if point.layer is None else point.layer + (point.kind == "resid_post")
        is_seen = entered < self.num_layers and self.attention(entered).source is None
        if point.kind in ("altup_streams", "altup_predicted"):
            return "later" if is_seen else "here"
        found = super().reach(point)
        return found if is_seen else "here"

    def bytes_per_token(self, itemsize: int) -> int:
        """With all streams, as they were and as they are predicted, the inputs of all layers, and the keys
        and values that are handed on."""
        lent = (self.attention(source) for source in self.sources)
        kept = sum(2 * shape.num_kv_heads * shape.head_dim for shape in lent)
        carried = 4 * (self.streams - 1) * self.hidden_size + 2 * self.num_layers * self.input_size + 2 * kept
        return super().bytes_per_token(itemsize) + itemsize * carried
