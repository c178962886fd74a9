"""Architecture: all that can be said of a model without its weights, as one immutable value.

Made from config.json (families.py), or from it and the tensors' names where the family is unknown
(autoconfig.py). Keys, plans, estimates and checks ask it, and none of them needs torch; the network that
computes (`Network` in layers.py) is built from it by networks.py.

A kind of architecture is a frozen dataclass that says these things of its own fields, and an entry in
networks.py. Nobody outside this room knows which kind it is.

Axes: as in points.py; "one" is the axis of norms' divisors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from ....store.errors import ConfigError, WeightsError
from .points import BY_NAME, STATE_ROOMS, HookPoint

__all__ = [
    "BESIDE",
    "Architecture",
    "AttentionMixer",
    "AxisSizes",
    "ConvolutionMixer",
    "Heads",
    "HeadTransform",
    "InTurn",
    "Layer",
    "Mixer",
    "NoMixer",
    "OpaqueMixer",
    "Reach",
    "RecurrentMixer",
    "MixersSideBySide",
    "Stored",
    "Tensors",
    "WeightCounts",
    "plain",
    "require_tied",
]

SHIFTED = frozenset(("Dream",))
"""Families that fill in masks and were trained further from models that predict the next token: the logits at
a position are still of the token behind it (Ye et al., Dream 7B, 2025)."""
Reach = Literal["here", "later", "all"]
"""Which positions a change reaches before its layer ends: its own, later ones too, or all of them."""


@dataclass(frozen=True)
class AttentionMixer:
    """A mixer: how a layer makes weights of queries and keys.

    scale: what q k^T is multiplied by. window: how many keys back a query sees, itself included; None for
    all. is_chunked: whether these lie in its own chunk of so many positions. soft_cap: c tanh(scores / c)
    before the mask; None for none. sinks: a weight, [head], which the network puts here: scores of a place
    with nothing in it, that each query may look at. is_bidirectional: whether a query sees later keys as
    well, up to as far ahead as it sees back. relative: what scores have besides, of queries, keys and the
    distance between them, which the network puts here. part: of a pair, among which tokens, or from target to
    source; None where prompts are no pairs. source: the layer whose keys and values it reads; None for its
    own.
    """

    kind: ClassVar[str] = "attention"
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: Any = field(default=None, compare=False, repr=False)
    is_bidirectional: bool = False
    relative: Any = field(default=None, compare=False, repr=False)
    is_chunked: bool = False
    part: Literal["source", "target", "cross"] | None = None
    source: int | None = None

    @property
    def room(self) -> str:
        """What stands before the kinds of its hook points."""
        return "cross_" if self.part == "cross" else ""

    @property
    def is_capped(self) -> bool:
        """Whether `capped` changes scores; no fused kernel does that."""
        return self.soft_cap is not None

    def capped(self, scores: Any, xp: Any) -> Any:
        """Scores as the softmax takes them but for the mask, each by itself. xp: numpy or torch, of which the
        scores are arrays."""
        return scores if self.soft_cap is None else self.soft_cap * xp.tanh(scores / self.soft_cap)


@dataclass(frozen=True)
class RecurrentMixer:
    """A mixer that reads a state every token decays and writes to. recurrence: which ("rwkv7")."""

    kind: ClassVar[str] = "recurrence"
    is_bidirectional: ClassVar[bool] = False
    window: ClassVar[None] = None
    """Nothing bounds how far back a state remembers."""
    recurrence: str


@dataclass(frozen=True)
class ConvolutionMixer:
    """A mixer that sees a token and the few before it, by the same weights everywhere. window: how many."""

    kind: ClassVar[str] = "convolution"
    is_bidirectional: ClassVar[bool] = False
    window: int


@dataclass(frozen=True)
class NoMixer:
    """In place of a mixer, where a layer only mixes channels."""

    kind: ClassVar[str] = "none"
    is_bidirectional: ClassVar[bool] = False
    window: ClassVar[int] = 1
    """A token sees itself."""


@dataclass(frozen=True)
class OpaqueMixer:
    """A mixer nobody has looked into: of a layer that somebody else computes."""

    kind: ClassVar[str] = "unknown mixer"
    is_bidirectional: ClassVar[bool] = True
    """Nothing is known to keep it from later positions."""
    window: ClassVar[None] = None
    """Nothing is known to bound how far it sees."""


@dataclass(frozen=True)
class MixersSideBySide:
    """Mixers that read the same normed stream, and whose outputs are added up."""

    kind: ClassVar[str] = "side by side"
    is_bidirectional: ClassVar[bool] = False
    mixers: tuple[AttentionMixer | RecurrentMixer | ConvolutionMixer, ...]

    @property
    def window(self) -> int | None:
        """The widest of theirs, in tokens; None where one of them sees everything."""
        windows = [mixer.window for mixer in self.mixers]
        return None if None in windows else max(window for window in windows if window is not None)


@dataclass(frozen=True)
class InTurn:
    """Mixers of one layer of which each reads, at every position, what the one before it gives."""

    kind: ClassVar[str] = "in turn"
    is_bidirectional: ClassVar[bool] = False
    mixers: tuple[AttentionMixer | RecurrentMixer | ConvolutionMixer | MixersSideBySide, ...]

    @property
    def window(self) -> int | None:
        """As far as all of them see, one behind the other."""
        windows = [mixer.window for mixer in self.mixers]
        return None if None in windows else 1 + sum(window - 1 for window in windows if window is not None)


Mixer = AttentionMixer | RecurrentMixer | ConvolutionMixer | MixersSideBySide | InTurn | NoMixer | OpaqueMixer


@dataclass(frozen=True)
class Layer:
    """Facts of one layer.

    mixer: what mixes positions. channel_mixer: what does not; None for neither. norms: "before" what each of
    them reads, "after" it, of what it adds, or "around" it, of both; "of stream" where the stream is not the
    sum of what was added: what is normed becomes the stream, be it what they read or the sum of that and what
    they add, or the stream is multiplied as it is carried. is_parallel: whether both read the stream that
    enters.
    """

    mixer: Mixer
    channel_mixer: Literal["MLP", "gated MLP", "token-shifted MLP", "experts"] | None
    norms: Literal["before", "after", "around", "of stream"]
    is_parallel: bool = False


@dataclass(frozen=True)
class Heads:
    """Heads of a layer that attends: how its tensors hold their matrices, and what stands between these and
    scores or values.

    count: of queries; kv_count: of keys and values, each shared by as many queries. size: of a head. layout:
    of queries, keys and values in one tensor, as `AttentionSpec` says it. rope: how queries and keys turn,
    None for not. are_normed: queries and keys, before they meet. clip: the largest entry of queries, keys and
    values. is_gated: whether what a head has read is multiplied by a gate; gates_beside: whether a head's
    gate stands behind its query in one tensor. slopes: what scores rise by with the position of a key.
    has_sinks: whether weights sum to less than 1. grows: whether queries grow with their positions.
    are_normed_together: whether what all of them have read is normed before it is projected.
    """

    count: int
    kv_count: int
    size: int
    mixer: AttentionMixer
    layout: Literal["separate", "by part", "by head", "by fourths"] = "separate"
    rope: Any = None
    are_normed: bool = False
    clip: float | None = None
    is_gated: bool = False
    gates_beside: bool = False
    slopes: tuple[float, ...] = ()
    has_sinks: bool = False
    grows: bool = False
    are_normed_together: bool = False

    @property
    def shared_by(self) -> int:
        """Heads of queries that read one head of keys and values."""
        return self.count // self.kv_count


LENT = ("frequencies", "relative", "relative_norm", "relative_norm.bias")
"""Weights outside of layers that layers are given."""
BESIDE = "beside."
"""What the names of other weights outside of layers begin with, of what is carried beside the stream."""


@dataclass(frozen=True)
class Stored:
    """Where a checkpoint keeps a weight.

    name: within the layer, for weights of layers. rows: weights that lie in it one after the other, and how
    many rows each has; empty for one alone. is_transposed: whether the weight is its transpose. factors:
    what a model multiplies these rows' products by, which is multiplied into the weight instead; how many
    rows, and by what, one after the other; empty for nothing. plus: what is added to every entry first.
    constant: of all entries of a weight that no checkpoint holds, as the family has none. groups: of rows and
    columns that a convolution of width 1 has, kept as [out, in / groups, 1]; None for a plain matrix.
    """

    name: str
    shape: tuple[int, ...]
    rows: tuple[tuple[str, int], ...] = ()
    is_transposed: bool = False
    factors: tuple[tuple[int, float], ...] = ()
    layer: int | None = None
    plus: float = 0.0
    constant: float | None = None
    groups: int | None = None

    def on_diagonal(self, held: Any, zeros: Any) -> Any:
        """The matrix [out, in] of what a checkpoint holds in groups, written into zeros of that shape; numpy
        or torch."""
        assert self.groups is not None
        rows, columns = len(held) // self.groups, held.shape[1]
        for group in range(self.groups):
            own = slice(group * rows, (group + 1) * rows)
            zeros[own, group * columns : (group + 1) * columns] = held[own, :, 0]
        return zeros


@dataclass(frozen=True)
class Tensors:
    """The map from checkpoint tensors to weights.

    outside: weight -> tensor; "embed", "final_norm", "final_norm.bias" and "head", which is the embedding's
    where the two are tied; "transform…" of what stands before the head (`HeadTransform`). layers: the same of
    every layer ("q", "o.bias", "ln1", …). prefix: of a layer's tensors, "{}" for its number. copies: names of
    tensors a checkpoint may hold besides, and the tensor each of them must equal. unread: names of tensors
    that come with such a checkpoint, and no layer reads.
    """

    outside: Mapping[str, Stored]
    layers: Sequence[Mapping[str, Stored]]
    prefix: str
    copies: Mapping[str, str]
    unread: Collection[str] = ()

    def in_layer(self, layer: int, weight: str) -> str:
        """Name in the checkpoint of a weight of a layer."""
        stored = self.layers[layer][weight]
        return self.prefix.format(layer if stored.layer is None else stored.layer) + stored.name

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor a checkpoint must have, with its shape."""
        found = {stored.name: stored.shape for stored in self.outside.values() if stored.constant is None}
        for layer, weights in enumerate(self.layers):
            held = {weight: stored for weight, stored in weights.items() if stored.constant is None}
            found |= {self.in_layer(layer, weight): stored.shape for weight, stored in held.items()}
        return found

    @cached_property
    def shared(self) -> frozenset[str]:
        """Tensors that several layers read: those one of them has for others, and those lent to all."""
        outside = [stored.name for weight, stored in self.outside.items() if weight in LENT]
        inside = [
            self.in_layer(layer, weight)
            for layer, weights in enumerate(self.layers)
            for weight, stored in weights.items()
            if stored.layer is not None
        ]
        return frozenset((*outside, *inside))

    def copied(self, names: Collection[str]) -> list[tuple[str, str]]:
        """(copy, original) of the tensors of a checkpoint that must be equal."""
        return [(copy, original) for copy, original in self.copies.items() if copy in names]

    def stand_ins(self, names: Collection[str]) -> dict[str, str]:
        """Original -> copy, of the tensors that a checkpoint holds under the name of a copy alone: which name
        of a shared tensor a file keeps is its writer's choice."""
        return {
            original: copy
            for copy, original in self.copies.items()
            if copy in names and original not in names
        }

    def placed(self, name: str) -> tuple[int | None, str]:
        """(layer, name within it) of any tensor of a checkpoint; (None, name) outside of layers."""
        before, after = self.prefix.split("{}")
        layer, found, rest = name.removeprefix(before).partition(after)
        inside = name.startswith(before) and found and layer.isdigit()
        return (int(layer), rest) if inside else (None, name)


@dataclass(frozen=True)
class HeadTransform:
    """What stands between the last stream, or the final norm, and the LM head of an encoder: a dense map, an
    activation and a norm of the kind of all others (Devlin et al., BERT, 2019).

    width: of what the LM head reads. has_bias: of the dense map; has_norm_bias: of the norm.
    """

    width: int
    activation: str
    eps: float
    has_bias: bool = True
    has_norm_bias: bool = True


@dataclass(frozen=True)
class WeightCounts:
    """Numbers of weights of a model."""

    total: int
    in_layers: int
    """Of the matrices that multiply each token, in all layers together; experts that it chooses, not all."""
    head: int
    """Of the LM head."""


class AxisSizes(dict[str, int]):
    """Sizes by axis. Raises ConfigError for an axis no hook point of the model has: heads, where nothing
    attends; and for one that is wider in some layers than in others."""

    differing: Mapping[str, Collection[int]] = {}
    """The sizes of an axis that has several."""

    def get(self, axis: str, default: Any = None) -> Any:
        """As of any dictionary, but that an axis of several sizes is an error."""
        return default if axis not in self and axis not in self.differing else self[axis]

    def __missing__(self, axis: str) -> int:
        if axis in self.differing:
            raise ConfigError(
                f"expected {axis} to be of one size in all layers, found "
                f"{' and '.join(map(str, sorted(self.differing[axis])))}; read such a model layer by layer: "
                "forward(prompts, hooks)"
            )
        raise ConfigError(
            f"expected a model whose hook points have an axis {axis!r}, found one with "
            f"{', '.join(name for name in self if name != 'one')}; choose a model whose layers all attend"
        )


class Architecture(ABC):
    """What a model is; see the module."""

    kind: ClassVar[str]
    """Which network computes it: an entry of networks.py."""
    version: ClassVar[str]
    """Of its forward pass; enters every key, and moves when its numbers move."""

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    norm_type: Literal["rms", "gemma_rms", "layer"]
    """Of the final norm, and of all others. rms: x w / rms(x). gemma_rms: x (1 + w) / rms(x). layer: mean
    removed, weight and bias."""
    norm_eps: float
    """Added to the mean square, or the variance, by every norm; by the final one: `final_norm_eps`."""
    final_logit_softcapping: float | None
    """Of the logits; None for none."""
    tie_word_embeddings: bool
    position_rows: int = 0
    """Of a table of positions; 0 for none."""
    has_position_waves: bool = False
    """Whether that table is one of sines and cosines, which no checkpoint holds."""
    ends_with_slowest_wave: bool = True
    """Whether the last frequency of those is 1/10000, as fairseq has it; else one more would be, as in the
    paper."""
    first_position: int = 0
    """Row of that table for the first position."""
    embedding_scale: float | None = None
    """What embeddings are multiplied by as they enter the stream; None for nothing."""
    transform: HeadTransform | None = None
    """What stands before the LM head; None for the final norm alone."""
    dropped_token: int | None = None
    """Id that embeds as nothing, while others are multiplied by its share of their prompt; None for none."""
    target_start: int | None = None
    """Id that begins a target where prompts are pairs: of its first token, raised by the size of the
    vocabulary; None where a prompt is one sequence."""
    unknown_token: int | None = None
    """Id that no prompt may hold, as the reference has no position for it; None for none."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """Two that could give different numbers have different ones."""

    @property
    @abstractmethod
    def context_length(self) -> int:
        """Longest prompt the model reads, in tokens."""

    @property
    @abstractmethod
    def axis_sizes(self) -> dict[str, int]:
        """Sizes of the axes of hook points that do not depend on the prompts."""

    def sizes_in(self, layer: int | None) -> dict[str, int]:
        """The same of the hook points of a layer, or of those outside of layers."""
        return self.axis_sizes

    @property
    @abstractmethod
    def hook_points(self) -> tuple[HookPoint, ...]:
        """Every hook point the model has, in execution order."""

    @property
    @abstractmethod
    def layers(self) -> tuple[Layer, ...]:
        """Facts of each layer, by its number."""

    @property
    @abstractmethod
    def tensors(self) -> Tensors:
        """Which tensors of a checkpoint it is made of."""

    @abstractmethod
    def reach(self, point: HookPoint) -> Reach:
        """How far a change at a hook point reaches before its layer ends. Points between layers count to the
        layer they enter."""

    @property
    @abstractmethod
    def lengths_must_match(self) -> bool:
        """Whether a position means something else in prompts of different length, so that they may not share
        a batch, padded."""

    @abstractmethod
    def keeps_keys(self, before: int, length: int) -> bool:
        """Whether what was kept of a sequence of `before` positions is true of it when it has `length`."""

    @property
    def final_norm_eps(self) -> float:
        """What the final norm adds to the mean square, or the variance."""
        return self.norm_eps

    @abstractmethod
    def bytes_per_token(self, itemsize: int) -> int:
        """Bytes of one token while a layer is computed."""

    @property
    def weight_counts(self) -> WeightCounts | None:
        """Numbers of weights by what they are for; None where the tensors are not known."""
        tensors = self.tensors
        outside = {stored.name for stored in tensors.outside.values()}
        in_layers = [shape for name, shape in tensors.shapes.items() if name not in outside]
        head = tensors.outside.get("head")
        return WeightCounts(
            total=sum(math.prod(shape) for shape in tensors.shapes.values()),
            in_layers=sum(math.prod(shape) for shape in in_layers if len(shape) > 1),
            head=0 if head is None else math.prod(head.shape),
        )

    def require_linear_head(self) -> None:
        """Raise ConfigError unless logits are a linear map of the normed stream, so that they can be split by
        who wrote what, and tokens have directions in the stream."""
        if self.transform is not None:
            raise ConfigError(
                f"expected logits that are a linear map of the normed stream, found {self.model_type}, whose "
                "head reads it through a dense map, an activation and a norm; read its layers with the logit "
                "lens"
            )

    def require_next_token(self) -> None:
        """Raise ConfigError unless the logits at a position are of the token behind it, seen by no earlier
        one, so that a text says what its own tokens should have been."""
        if not self.predicts_next:
            raise ConfigError(
                f"expected a model that predicts the next token, found {self.model_type}, whose "
                "positions see later ones; put a mask where a token is missing and read the logits there: "
                "forward(prompts)"
            )

    def under(self, root: str, head: str) -> Architecture:
        """The same, of a checkpoint that has other names before its tensors (`root` for "model.") and its LM
        head. ConfigError for a kind that is in no such checkpoint."""
        raise ConfigError(
            f"expected no other names of a {self.kind} model's tensors, found {root!r} and {head!r}"
        )

    @property
    def shares_prefixes(self) -> bool:
        """Whether runs that begin alike can share the layers before they differ."""
        return True

    @property
    def predicts_next(self) -> bool:
        """Whether the logits at a position are of the token behind it, and depend on no later one."""
        return not self.looks_ahead

    @property
    def known_ids(self) -> int:
        """One more than the highest id of a prompt: where prompts are pairs, a target's first is raised."""
        return self.vocab_size if self.target_start is None else 2 * self.vocab_size

    @property
    def side_length(self) -> int | None:
        """Of pairs, how many positions a source or a target may have; None where nothing bounds them."""
        return None

    @property
    def continues(self) -> bool:
        """Whether the last logits of a prompt are of what comes behind it."""
        return self.predicts_next or self.target_start is not None

    def reaches_from(self, tokens: Sequence[int], position: int) -> int:
        """The first position of a prompt that a change at a position reaches, where it reaches "all"."""
        return 0

    @property
    def mask_shift(self) -> int:
        """How far before a mask the logits stand that say what it hides; of models that fill in masks."""
        return int(self.model_type in SHIFTED)

    @property
    def is_differentiable(self) -> bool:
        """Whether a pass can be gone back through."""
        return True

    def require_gradients(self) -> None:
        """ConfigError for a model whose passes cannot be gone back through."""
        if not self.is_differentiable:
            raise ConfigError(
                "expected a model whose layers are computed here to take gradients of, found one that "
                "transformers computes; choose a model of a supported family"
            )

    def attention_in(self, dtype: str) -> str:
        """How attention is computed in a dtype where nothing is asked of it, as identities tell it: with a
        fused kernel, but in float64, which is there to be compared, as the reference computes it."""
        return "eager" if dtype == "float64" else "sdpa"

    @property
    def fields(self) -> dict[str, Any]:
        """Every field, as plain values."""
        return plain(self)

    @cached_property
    def looks_ahead(self) -> bool:
        """Whether positions see later ones, in any layer."""
        return any(layer.mixer.is_bidirectional for layer in self.layers)

    @cached_property
    def known_points(self) -> frozenset[HookPoint]:
        """`hook_points`, to look one up."""
        return frozenset(self.hook_points)

    @cached_property
    def attention_kind(self) -> str | None:
        """Kind of hook point that says how much a position reads of each other one: attention weights, or
        what a recurrence amounts to. None where no point does (RWKV-4)."""
        return self._first_kind("pattern", *(f"{room}_effective_attn" for room in STATE_ROOMS))

    def layers_with(self, kind: str) -> list[int]:
        """Layers that have a hook point of a kind."""
        return [point.layer for point in self.points_of(kind) if point.layer is not None]

    def points_of(self, kind: str) -> list[HookPoint]:
        """The hook points of a kind, by layer."""
        return [point for point in self.hook_points if point.kind == kind]

    def heads_of(self, layer: int) -> Heads | None:
        """The heads of a layer that attends by queries, keys and values of its own; None of any other."""
        return None

    @property
    def attention_heads(self) -> int:
        """Heads by which a layer says how much positions read of each other; 0 where none does."""
        if self.attention_kind is None:
            return 0
        return next(self.axis_sizes[dim] for dim in BY_NAME[self.attention_kind].dims if dim.endswith("head"))

    @property
    def num_attention_heads(self) -> int:
        """`attention_heads`, by the name that transformers has for it."""
        return self.attention_heads

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads; 0 for a model without."""
        return int(self.axis_sizes.get("kv_head", 0))

    @cached_property
    def read_kind(self) -> str:
        """Kind of hook point of what each head has read of other positions, before it is projected."""
        return self._first_kind("z", "rwkv_wkv_out", "ssm_out", "linear_out", "mlstm_out") or "z"

    @cached_property
    def stream_start(self) -> HookPoint:
        """What all layers add to: the embedding, or its norm where that takes its place (RWKV)."""
        normed = HookPoint("pre_norm", 0)
        return normed if normed in self.known_points else HookPoint("embed")

    def _first_kind(self, *kinds: str) -> str | None:
        held = {point.kind for point in self.known_points}
        return next((kind for kind in kinds if kind in held), None)

    def width(self, kind: str) -> int:
        """Numbers per token at hook points of a kind, heads side by side; of attention matrices per query and
        key. Times an itemsize: the bytes a capture takes."""
        sizes = self.axis_sizes
        return math.prod(sizes.get(axis, 1) for axis in BY_NAME[kind].dims)


def require_tied(copy: str, original: str, same: bool) -> None:
    """Raise WeightsError for a tensor that is said to be another one, unless it is: a tied head, a weight
    that layers share.

    The reference computes with the tensor then, whatever the config says.
    """
    if not same:
        if copy.startswith(("lm_head.", "head.")):
            hint = "set tie_word_embeddings to false in config.json if the checkpoint has a head of its own"
        else:
            hint = "layers of this family share it, so fetch the checkpoint again"
        raise WeightsError(
            f"expected {copy} to equal {original}, as config.json ties them, found another matrix; {hint}"
        )


def plain(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, and of dataclasses in it, as plain values; without fields that hold weights,
    which comparisons leave out."""
    return {each.name: _plain(getattr(value, each.name)) for each in fields(value) if each.compare}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return plain(value) if is_dataclass(value) else value
