"""Architectures composed of layers: attention, state spaces, convolutions, MLPs and experts, as one value.

    norm -> mixer, or several side by side -> +        norm -> channel mixer -> +

Norms may stand behind what is added instead, on the stream itself, or on the sum of both
(`LayerSpec.norms`). A layer is a list of mixers and a channel mixer; either may be missing. A model of Mamba
layers alone is one whose layers have one mixer and nothing else. What a mixer is stands in mixers.py;
here is what follows from a sequence of them: hook points that exist in some layers only, and how far a change
reaches.

Border: sizes and switches; checkpoint names are in layer_tensors.py. Never imports torch.

Axes: as in points.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from ....store.digest import digest
from ....store.errors import ConfigError
from .architecture import (
    Architecture,
    AxisSizes,
    Heads,
    HeadTransform,
    InTurn,
    Layer,
    Mixer,
    MixersSideBySide,
    NoMixer,
    Reach,
    Tensors,
    WeightCounts,
    plain,
)
from .layer_tensors import Spelling, composed_tensors
from .mixers import AttentionSpec, ChannelMixerSpec, MixerSpec, SharedBlockSpec
from .points import SPLIT_INPUTS, HookPoint
from .rwkv import UNLIMITED
from .transformer import RopeConfig

__all__ = ["LayerSpec", "ComposedArchitecture"]

_BEFORE_MIXERS = frozenset(("resid_pre", "ln1_scale", "ln1_normalized"))
_FINAL_NORM = ("ln_final_scale", "ln_final_normalized", "final_norm")
_TRANSFORM = ("head_pre_act", "head_post_act", "head_scale", "head_normalized", "head_out")


@dataclass(frozen=True)
class LayerSpec:
    """One layer: mixers that read the same normed stream, and a channel mixer behind them."""

    mixers: tuple[MixerSpec, ...]
    channel_mixer: ChannelMixerSpec | None = None
    norms: Literal["before", "after", "around", "of stream", "of sums"] = "before"
    """Where norms stand: before what each half reads, after what it adds, or both; "of stream": what is
    normed is read, and becomes the stream; "of sums": the stream with what is added is normed (BERT)."""
    carried: tuple[float, float] = (1.0, 1.0)
    """With norms of the stream: factors of it where the mixers' and the channel mixer's outputs are added."""
    is_parallel: bool = False
    """Whether the channel mixer, too, reads the stream that enters the layer."""
    has_two_norms: bool = True
    """Whether each half of a parallel layer reads it through a norm of its own."""
    shared: SharedBlockSpec | None = None
    """A block ahead of the mixers that adds to what they read."""
    post_factor: float = 1.0
    """Factor of each half's output after its post-norm, before it is added to the stream."""
    source: int | None = None
    """Number of the layer whose tensors this layer shares (ALBERT); None if it has its own."""
    reads_normed: bool = True
    """Whether mixers read the stream through a norm, where norms stand before them."""
    has_gains: bool = False
    """Whether the stream is multiplied by weights, [hidden], where something is added to it."""

    def __post_init__(self) -> None:
        if not self.mixers and self.channel_mixer is None:
            raise ConfigError("expected a mixer or a channel mixer in every layer, found neither in one")
        if self.is_parallel and (self.norms != "before" or not self.mixers or self.channel_mixer is None):
            raise ConfigError(
                "expected a parallel layer to have a mixer, a channel mixer and norms before them, found "
                f"norms {self.norms!r}"
            )
        if self.shared is not None and (not self.mixers or self.norms != "before" or self.is_parallel):
            raise ConfigError(
                "expected a shared block ahead of a mixer whose norm stands before it, found none"
            )

    @cached_property
    def norm_names(self) -> tuple[str, ...]:
        """Of the norms it has: "ln1" and "ln2" before what they are read by, "_post" behind."""
        suffixes = {"after": ("_post",), "around": ("", "_post")}.get(self.norms, ("",))
        halves = ["ln1"] if self.mixers and self.reads_normed else []
        has_second = self.channel_mixer is not None and (self.has_two_norms or not self.is_parallel)
        halves += ["ln2"] if has_second else []
        return tuple(half + suffix for half in halves for suffix in suffixes)

    @property
    def mixer(self) -> Mixer:
        """Summary of all its mixers together."""
        facts = tuple(shape.summary for shape in self.mixers)
        if not facts:
            return NoMixer()
        own = facts[0] if len(facts) == 1 else MixersSideBySide(facts)
        return own if self.shared is None else InTurn((self.shared.summary, own))

    @property
    def summary(self) -> Layer:
        """Torch-free summary of this layer, as `Architecture.layers` shows it."""
        channel_mixer = None if self.channel_mixer is None else self.channel_mixer.summary
        norms = "of stream" if self.norms == "of sums" or self.has_gains else self.norms
        return Layer(self.mixer, channel_mixer, norms, self.is_parallel)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of the hook points it has."""
        found = ["resid_pre", "resid_post"]
        found += [f"{norm}_{part}" for norm in self.norm_names for part in ("scale", "normalized")]
        if self.has_split_inputs:
            found += SPLIT_INPUTS
        if self.mixers:
            found += ["attn_out", *(kind for shape in self.mixers for kind in shape.held_points)]
        if self.channel_mixer is not None:
            found += ["mlp_pre", "mlp_post", "mlp_out", *self.channel_mixer.points]
        if self.mixers and self.channel_mixer is not None and not self.is_parallel:
            found.append("resid_mid")
        if self.shared is not None:
            found += self.shared.points
        return tuple(found)

    @cached_property
    def has_split_inputs(self) -> bool:
        """Whether each head of its attention can be shown another stream than the layer reads: q, k and v are
        linear maps of the normed stream, and of nothing else."""
        attends = any(isinstance(mixer, AttentionSpec) and not mixer.has_v_norm for mixer in self.mixers)
        return attends and self.norms in ("before", "around") and self.reads_normed and self.shared is None

    @property
    def all_mixers(self) -> tuple[MixerSpec, ...]:
        """What mixes positions in it: its mixers, and what stands ahead of them."""
        return self.mixers if self.shared is None else (self.shared, *self.mixers)

    @property
    def shapes(self) -> Iterator[MixerSpec | ChannelMixerSpec]:
        """What mixes positions, and its channel mixer."""
        yield from self.all_mixers
        if self.channel_mixer is not None:
            yield self.channel_mixer

    def bytes_per_token(self, itemsize: int) -> int:
        """Bytes of one token inside it."""
        return sum(shape.bytes_per_token(itemsize) for shape in self.shapes)

    @property
    def fields(self) -> dict[str, Any]:
        """All that it is, as plain values."""
        mixers = [_named(shape) for shape in self.mixers]
        channel_mixer = self.channel_mixer and _named(self.channel_mixer)
        shared = self.shared and _named(self.shared)
        return plain(self) | {"mixers": mixers, "channel_mixer": channel_mixer, "shared": shared}


@dataclass(frozen=True)
class ComposedArchitecture(Architecture):
    """A model of such layers: everything that decides its numbers besides its weights."""

    kind: ClassVar[str] = "composed"
    version: ClassVar[str] = "transformer/1"

    model_type: str
    hidden_size: int
    vocab_size: int
    blocks: tuple[LayerSpec, ...]
    spelling: Spelling
    norm_eps: float
    norm_type: Literal["rms", "gemma_rms", "layer"] = "rms"
    max_position_embeddings: int | None = None
    """Positions; None where nothing bounds the context."""
    embedding_scale: float | None = None
    rounds_embedding_scale: bool = False
    """Whether that scale is rounded to the dtype of embeddings."""
    logit_factor: float = 1.0
    """Of logits, before any soft cap."""
    final_logit_softcapping: float | None = None
    has_wide_stream: bool = False
    """Whether the stream is float32 in any dtype."""
    position_rows: int = 0
    first_position: int = 0
    tie_word_embeddings: bool = False
    norm_biases: Literal["of layer norms", "in layers", "none"] = "of layer norms"
    """Norms with a bias: layer norms alone, those inside of layers whatever their kind, or none."""
    has_position_waves: bool = False
    has_embedding_norm: bool = False
    """Whether embeddings are normed before they become the stream."""
    has_norm_weights: bool = True
    """Of norms of the stream."""
    has_unit_norms: bool = False
    """Whether 1 is added to these weights."""
    has_head_bias: bool = False
    embedding_width: int | None = None
    """Embedding width, if a linear projection maps embeddings (with positions and norm) to the hidden size;
    None without such a projection."""
    token_types: int = 0
    """Rows of a table whose first is added to every embedding, as prompts are of one type; 0 for no table."""
    unknown_token: int | None = None
    dropped_token: int | None = None
    """Id whose embeddings are 0, and all others multiplied by what training with dropout of it expects, by
    its share of the prompt (Rives et al., ESM-1b, 2021, and its reference)."""
    has_final_norm: bool = True
    has_final_norm_bias: bool = True
    transform: HeadTransform | None = None

    def __post_init__(self) -> None:
        for shape in (shape for block in self.blocks for shape in block.shapes):
            differing = {axis: n for axis, n in shape.axis_sizes.items() if self.axis_sizes[axis] != n}
            if differing:
                axis, size = next(iter(differing.items()))
                raise ConfigError(
                    f"expected {axis} to be of one size in all layers that have it, found "
                    f"{self.axis_sizes[axis]} and {size}; such a model cannot run here"
                )

    def under(self, root: str, head: str) -> ComposedArchitecture:
        """See `Architecture`."""
        names = ("embed", "embed_norm", "positions", "final_norm", "layer")
        old = {name: getattr(self.spelling, name) for name in names}
        new = {
            name: root + told.removeprefix("model.")
            for name, told in old.items()
            if told.startswith("model.")
        }
        return replace(self, spelling=replace(self.spelling, **new, head=head))

    @property
    def head_dim(self) -> int:
        """Width of a head's values; 0 without attention."""
        return int(self.axis_sizes.get("d_head", 0))

    @property
    def intermediate_size(self) -> int:
        """Width of the MLP's hidden layer; 0 without an MLP."""
        return int(self.axis_sizes.get("mlp", 0))

    @property
    def num_layers(self) -> int:  # type: ignore[override]
        """How many blocks there are."""
        return len(self.blocks)

    @property
    def fields(self) -> dict[str, Any]:
        """Every field, as plain values; of equal blocks one, and which of them each layer is."""
        distinct = list(dict.fromkeys(self.blocks))
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "blocks"}
        return {name: plain(value) if is_dataclass(value) else value for name, value in own.items()} | {
            "blocks": [block.fields for block in distinct],
            "layers": [distinct.index(block) for block in self.blocks],
        }

    @property
    def digest(self) -> str:
        """Of every field but how the checkpoint spells its tensors."""
        return digest("architecture", self.fields | {"spelling": None})

    @property
    def context_length(self) -> int:
        """See `Architecture`; unlimited for state spaces. Dynamic rope stretches it by its factor."""
        stretch = max((rope.factor for rope in self._ropes if rope.scheme == "dynamic"), default=1.0)
        return int((self.max_position_embeddings or UNLIMITED) * stretch)

    @cached_property
    def axis_sizes(self) -> AxisSizes:
        """See `Architecture`; heads of attention and of state spaces have axes of their own."""
        found = AxisSizes(hidden=self.hidden_size, one=1)
        for shape in (shape for block in self.blocks for shape in block.shapes):
            found.update({axis: size for axis, size in shape.axis_sizes.items() if axis not in found})
        return found if self.transform is None else AxisSizes(found, embedding=self.transform.width)

    @cached_property
    def hook_points(self) -> tuple[HookPoint, ...]:
        """See `Architecture`; those of a mixer are in the layers that have it."""
        outside = _FINAL_NORM * self.has_final_norm + _TRANSFORM * (self.transform is not None)
        found = [HookPoint(kind) for kind in ("embed", *outside)]
        for layer, block in enumerate(self.blocks):
            found += [HookPoint(kind, layer) for kind in block.kinds]
        return tuple(sorted(found, key=lambda point: point.order))

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """See `Architecture`."""
        return tuple(block.summary for block in self.blocks)

    def heads_of(self, layer: int) -> Heads | None:
        """See `Architecture`; those of a block that layers share, or of a latent, are none of its own."""
        shapes = (shape for shape in self.blocks[layer].mixers if isinstance(shape, AttentionSpec))
        return next((shape.heads for shape in shapes), None)

    @cached_property
    def tensors(self) -> Tensors:
        """See `Architecture`."""
        return composed_tensors(self)

    def reach(self, point: HookPoint) -> Reach:
        """Later positions too, or all that look there, before a mixer, and at its points that others read."""
        spread: Reach = "all" if self.looks_ahead else "later"
        if point.kind in ("embed", "resid_post"):
            layer = 0 if point.layer is None else point.layer + 1
            return spread if layer < self.num_layers and self.blocks[layer].mixers else "here"
        if point.layer is None:
            return "here"
        block = self.blocks[point.layer]
        mixers = block.all_mixers
        spreads = mixers and point.kind in (_BEFORE_MIXERS if block.norms != "of sums" else ("resid_pre",))
        return spread if spreads or any(point.kind in shape.reaches_later for shape in mixers) else "here"

    @property
    def lengths_must_match(self) -> bool:
        """See `Architecture`; a position that looks ahead would see the padding."""
        return self.looks_ahead or any(rope.depends_on_length for rope in self._ropes)

    def keeps_keys(self, before: int, length: int) -> bool:
        """States are true of whatever follows, unless it is looked at; keys where rope turns them alike."""
        alike = all(rope.turns_alike(before, length) for rope in self._ropes)
        return before == 0 or (alike and not self.looks_ahead)

    @property
    def weight_counts(self) -> WeightCounts:
        """See `Architecture`; without the experts that a token does not choose."""
        counts = super().weight_counts
        assert counts is not None
        idle = sum(
            block.channel_mixer.idle_weights(self.hidden_size) for block in self.blocks if block.channel_mixer
        )
        return replace(counts, in_layers=counts.in_layers - idle)

    def bytes_per_token(self, itemsize: int) -> int:
        """Stream and norms, and the widest block's inside."""
        inside = max(block.bytes_per_token(itemsize) for block in set(self.blocks))
        return (4 if self.has_wide_stream else itemsize) * 6 * self.hidden_size + inside

    @property
    def _ropes(self) -> set[RopeConfig]:
        shapes = (shape for block in self.blocks for shape in block.all_mixers)
        return {shape.rope for shape in shapes if shape.rope is not None}


def _named(shape: MixerSpec | ChannelMixerSpec) -> dict[str, Any]:
    """A shape as plain values, with what it is: two kinds may have the same fields."""
    return {"kind": shape.kind} | plain(shape)
