"""Architecture: torch-free, immutable description of a model without its weights.

It is made from config.json (known.py), or from config.json and tensor names for models of unknown families
(autoconfig.py). Cache keys, plans, memory estimates and checks use it without importing torch; the network
that computes (`Network` in layers.py) is built from it by networks.py.

A kind of architecture is a frozen dataclass that implements `Architecture`, and an entry in networks.py. Code
outside this folder uses only the interface of `Architecture`, never the kind.

Axes: as in points.py; "one" is the axis of length 1 of the norms' divisors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from ....store.errors import ConfigError, WeightsError
from .layer_summaries import Layer
from .mixers import AttentionSpec
from .points import BY_NAME, STATE_ROOMS, HookPoint

__all__ = [
    "BESIDE",
    "UNLIMITED",
    "Architecture",
    "AttentionSpec",
    "AxisSizes",
    "FinalNorm",
    "HeadTransform",
    "Reach",
    "Stored",
    "Tensors",
    "WeightCounts",
    "plain",
    "require_tied",
]

SHIFTED = frozenset(("Dream",))
"""Masked diffusion models that were initialised from next-token predictors: the logits at position i still
predict the token at position i + 1 (Ye et al., Dream 7B, 2025)."""
UNLIMITED = 2**31 - 1
"""Context length, in tokens, of models without a limit."""
Reach = Literal["here", "later", "all"]
"""Positions that a change at a hook point can affect before the end of its layer: only its own position
("here"), also later ones, or all."""


LENT = ("frequencies", "relative", "relative_norm", "relative_norm.bias")
"""Weights that are stored once outside of the layers and are passed to every layer."""
BESIDE = "beside."
"""Prefix of the names of weights outside of the layers that process further streams or per-layer inputs
(layer_parts.py)."""


@dataclass(frozen=True)
class Stored:
    """How a checkpoint stores a weight: its tensor, and the transformations from tensor to weight."""

    name: str
    """Name of the tensor; for weights of a layer without the layer's prefix."""
    shape: tuple[int, ...]
    """Shape of the tensor in the checkpoint."""
    rows: tuple[tuple[str, int], ...] = ()
    """(weight, number of rows) of several weights concatenated in the tensor; () if it holds one weight."""
    is_transposed: bool = False
    """Whether the tensor is the transpose of the weight."""
    factors: tuple[tuple[int, float], ...] = ()
    """(number of rows, factor) of consecutive rows of the weight. The model multiplies outputs by these
    factors; they are multiplied into the weight on loading. () for no factors."""
    layer: int | None = None
    """Number of the layer under whose prefix the tensor is stored, if another layer has it; None for the
    weight's own layer."""
    plus: float = 0.0
    """Added to every entry, before the factors (norms that multiply by 1 + weight)."""
    constant: float | None = None
    """Constant value of a weight without tensor (norms without weights: 1.0); None for a stored weight."""
    groups: int | None = None
    """Groups of a width-1 convolution, whose tensor is [out, in / groups, 1]; None for a plain matrix."""

    def on_diagonal(self, tensor: Any, zeros: Any) -> Any:
        """Write the tensor of a grouped convolution into a block-diagonal matrix.

        Arguments:
            tensor: numpy or torch array [out, in / groups, 1].
            zeros: Zeros [out, in] of the same kind; changed in place.

        Returns:
            The matrix [out, in], which is `zeros`.
        """
        assert self.groups is not None
        rows, columns = len(tensor) // self.groups, tensor.shape[1]
        for group in range(self.groups):
            block = slice(group * rows, (group + 1) * rows)
            zeros[block, group * columns : (group + 1) * columns] = tensor[block, :, 0]
        return zeros


@dataclass(frozen=True)
class Tensors:
    """Map from the weights of a model to the tensors of a checkpoint."""

    outside: Mapping[str, Stored]
    """Weights outside of the layers: "embed", "final_norm", "final_norm.bias", "head" (the tensor of the
    embedding if both are tied), "transform…" (`HeadTransform`), and others by kind of architecture."""
    layers: Sequence[Mapping[str, Stored]]
    """Weights of each layer: "q", "o.bias", "ln1", …"""
    prefix: str
    """Prefix of the tensors of a layer; "{}" stands for its number."""
    copies: Mapping[str, str]
    """Optional tensor -> tensor that it must equal if the checkpoint has both."""
    unread: Collection[str] = ()
    """Names of optional checkpoint tensors that the forward pass does not use."""
    decoder: tuple[int, str] | None = None
    """Encoder-decoders: number of the first decoder layer, and prefix of the tensors of decoder layers, in
    which "{}" stands for the layer's number within the decoder; None for other models."""

    def in_layer(self, layer: int, weight: str) -> str:
        """Full tensor name in the checkpoint of a layer's weight."""
        stored = self.layers[layer][weight]
        number = layer if stored.layer is None else stored.layer
        start, prefix = self.prefixes[-1]
        if number < start:
            start, prefix = self.prefixes[0]
        return prefix.format(number - start) + stored.name

    @property
    def prefixes(self) -> tuple[tuple[int, str], ...]:
        """(number of its first layer, prefix of the tensors of a layer) of each stack of layers."""
        return ((0, self.prefix),) if self.decoder is None else ((0, self.prefix), self.decoder)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor that a checkpoint must have."""
        shapes = {stored.name: stored.shape for stored in self.outside.values() if stored.constant is None}
        for layer, weights in enumerate(self.layers):
            in_file = {weight: stored for weight, stored in weights.items() if stored.constant is None}
            shapes |= {self.in_layer(layer, weight): stored.shape for weight, stored in in_file.items()}
        return shapes

    @cached_property
    def shared(self) -> frozenset[str]:
        """Names of tensors that several layers read: one layer's tensors that others share, and `LENT`."""
        outside = [stored.name for weight, stored in self.outside.items() if weight in LENT]
        inside = [
            self.in_layer(layer, weight)
            for layer, weights in enumerate(self.layers)
            for weight, stored in weights.items()
            if stored.layer not in (None, layer)
        ]
        return frozenset((*outside, *inside))

    def copied(self, names: Collection[str]) -> list[tuple[str, str]]:
        """(copy, original) pairs of tensors that must be equal, for the copies among `names`, the tensors of
        a checkpoint."""
        return [(copy, original) for copy, original in self.copies.items() if copy in names]

    def stand_ins(self, names: Collection[str]) -> dict[str, str]:
        """Original -> copy, for tensors that a checkpoint holds only under the name of the copy.

        A file keeps one name of a shared tensor, and writers differ in which one they keep.
        """
        return {
            original: copy
            for copy, original in self.copies.items()
            if copy in names and original not in names
        }

    def placed(self, name: str) -> tuple[int | None, str]:
        """(layer number, name without the layer's prefix) of a tensor; (None, name) outside of layers."""
        for start, prefix in self.prefixes:
            # Prefixes look like "model.layers.{}.": the text before and after the layer number.
            before, after = prefix.split("{}")
            layer, separator, name_in_layer = name.removeprefix(before).partition(after)
            if name.startswith(before) and separator and layer.isdigit():
                return start + int(layer), name_in_layer
        return None, name


@dataclass(frozen=True)
class HeadTransform:
    """Transform before the language head of an encoder: dense layer, activation, and a norm of the model's
    kind (Devlin et al., BERT, 2019)."""

    width: int
    """Width of its output, which the language head reads."""
    activation: str
    """Activation function of the dense layer's output: a key of `ACTIVATIONS` in networks/mlp.py."""
    eps: float
    """Epsilon of its norm."""
    has_bias: bool = True
    """Whether the dense layer has a bias."""
    has_norm_bias: bool = True
    """Whether the norm has a bias, if it is a layer norm."""


@dataclass(frozen=True)
class FinalNorm:
    """Norm before the language head, of the model's kind."""

    has_bias: bool = True
    """Whether it has a bias, if it is a layer norm."""
    eps: float | None = None
    """Its epsilon; None for that of all other norms (`Architecture.norm_eps`)."""


@dataclass(frozen=True)
class WeightCounts:
    """Numbers of weights of a model."""

    total: int
    """All weights."""
    in_layers: int
    """Entries of the matrices that multiply one token, over all layers; of experts, only the top k count."""
    head: int
    """Entries of the language head's matrix."""


class AxisSizes(dict[str, int]):
    """Axis name -> size.

    A lookup raises ConfigError for an axis that no hook point of the model has, such as "head" in a model
    without attention, and for an axis whose size differs between layers.
    """

    differing: Mapping[str, Collection[int]] = {}
    """Axes whose size differs between layers -> their sizes."""

    def get(self, axis: str, default: Any = None) -> Any:
        """The size, or the default for an axis that is absent; ConfigError for an axis of several sizes."""
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
    """Description of a model without its weights; see the module docstring."""

    kind: ClassVar[str]
    """Kind of network that computes it: a key of the table in networks.py."""
    version: ClassVar[str]
    """Version of the forward pass; part of every cache key, and changed whenever results change."""

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    norm_type: Literal["rms", "gemma_rms", "layer"]
    """Kind of all norms of the stream. rms: x w / rms(x). gemma_rms: x (1 + w) / rms(x). layer: mean removed,
    with weight and bias."""
    norm_eps: float
    """Epsilon added to the mean square or variance by every norm; of the final norm: `final_norm_eps`."""
    final_logit_softcapping: float | None
    """Cap c of the logits, c tanh(logits / c); None for no cap."""
    tie_word_embeddings: bool
    """Whether the language head uses the embedding matrix."""
    position_rows: int = 0
    """Rows of the table of positions; 0 for a model without such a table."""
    position_waves: Literal["fairseq", "transformer"] | None = None
    """Kind of sines and cosines in that table, which are computed instead of loaded; None for a learned
    table. "transformer": exponents are 2i / d, as in the Transformer paper; "fairseq": the lowest frequency
    is exactly 1/10000."""
    first_position: int = 0
    """Row of that table for the first position."""
    embedding_scale: float | None = None
    """Factor of the embeddings as they enter the stream; None for no factor."""
    transform: HeadTransform | None = None
    """Transform before the language head; None if the head reads the final norm."""
    dropped_token: int | None = None
    """Token id whose embedding is zero, while all others are rescaled by its share of the prompt (ESM);
    None for no such token."""
    target_start: int | None = None
    """Encoder-decoders: id of the first target token, which is raised by the vocabulary size to mark where
    the target begins; None for models of single sequences."""
    unknown_token: int | None = None
    """Token id that prompts must not contain, as the reference has no position for it; None for no such
    token."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """Hex digest of everything that decides the results; equal digests mean equal computations."""

    @property
    @abstractmethod
    def context_length(self) -> int:
        """Largest length of a prompt, in tokens."""

    @property
    @abstractmethod
    def axis_sizes(self) -> dict[str, int]:
        """Axis name -> size, for the axes of hook points whose size does not depend on the prompts."""

    def sizes_in(self, layer: int | None) -> dict[str, int]:
        """`axis_sizes` for the hook points of one layer, or outside of layers for None."""
        return self.axis_sizes

    @property
    @abstractmethod
    def hook_points(self) -> tuple[HookPoint, ...]:
        """Every hook point the model has, in execution order."""

    @property
    @abstractmethod
    def layers(self) -> tuple[Layer, ...]:
        """Summary of each layer, in order."""

    @property
    @abstractmethod
    def tensors(self) -> Tensors:
        """Map from its weights to the tensors of a checkpoint."""

    @abstractmethod
    def reach(self, point: HookPoint) -> Reach:
        """Positions that a change at a hook point can affect before the end of its layer. Hook points between
        layers belong to the layer that reads them."""

    @property
    @abstractmethod
    def lengths_must_match(self) -> bool:
        """Whether results at a position depend on the prompt's length, so that prompts of different lengths
        must not share a padded batch."""

    @abstractmethod
    def keeps_keys(self, before: int, length: int) -> bool:
        """Whether keys, values and states computed for a prefix of `before` tokens remain valid when the
        sequence grows to `length` tokens."""

    @property
    def final_norm_eps(self) -> float:
        """Epsilon that the final norm adds to the mean square or variance."""
        return self.norm_eps

    @abstractmethod
    def bytes_per_token(self, itemsize: int) -> int:
        """Estimated bytes of activations per token while a layer is computed. itemsize: bytes per number."""

    @property
    def weight_counts(self) -> WeightCounts | None:
        """Numbers of weights in total, in the layers and in the head; None if the tensors are not known."""
        tensors = self.tensors
        outside = {stored.name for stored in tensors.outside.values()}
        # Vectors (norms, biases) are left out below: only matrices multiply tokens.
        in_layers = [shape for name, shape in tensors.shapes.items() if name not in outside]
        head = tensors.outside.get("head")
        return WeightCounts(
            total=sum(math.prod(shape) for shape in tensors.shapes.values()),
            in_layers=sum(math.prod(shape) for shape in in_layers if len(shape) > 1),
            head=0 if head is None else math.prod(head.shape),
        )

    def require_linear_head(self) -> None:
        """Raise ConfigError unless logits are a linear map of the normalised stream, so that logits can be
        attributed to components and tokens have directions in the stream."""
        if self.transform is not None:
            raise ConfigError(
                "expected logits that are a linear map of the normalised stream, found "
                f"{self.model_type}, whose head reads it through a dense map, an activation and a norm; read "
                "its layers with the logit lens"
            )

    def require_next_token(self) -> None:
        """Raise ConfigError unless the model is a causal next-token predictor, so that a text contains the
        targets of its own predictions."""
        if not self.predicts_next:
            raise ConfigError(
                f"expected a model that predicts the next token, found {self.model_type}, whose "
                "positions see later ones; put a mask where a token is missing and read the logits there: "
                "forward(prompts)"
            )

    def under(self, root: str, head: str) -> Architecture:
        """Copy for a checkpoint with other tensor names.

        Arguments:
            root: Prefix that replaces "model.".
            head: Name of the language head without ".weight".

        Raises:
            ConfigError: This kind of architecture has no such checkpoints.
        """
        raise ConfigError(
            f"expected no other names of a {self.kind} model's tensors, found {root!r} and {head!r}"
        )

    @property
    def shares_prefixes(self) -> bool:
        """Whether runs with equal interventions in their first layers can share the computation of these
        layers."""
        return True

    @property
    def predicts_next(self) -> bool:
        """Whether the logits at a position predict the next token and depend on no later one."""
        return not self.looks_ahead

    @property
    def known_ids(self) -> int:
        """Number of valid token ids: the vocabulary size, or twice that for encoder-decoders, whose first
        target id is raised by the vocabulary size."""
        return self.vocab_size if self.target_start is None else 2 * self.vocab_size

    @property
    def side_length(self) -> int | None:
        """Encoder-decoders: largest length of a source and of a target, in tokens; None for no bound."""
        return None

    @property
    def continues(self) -> bool:
        """Whether the logits at the last position predict the token after the prompt."""
        return self.predicts_next or self.target_start is not None

    def reaches_from(self, tokens: Sequence[int], position: int) -> int:
        """First position that a change with reach "all" at a position of a prompt can affect."""
        return 0

    @property
    def mask_shift(self) -> int:
        """Masked language models: 1 if the prediction for a mask is at the position before it, else 0."""
        return int(self.model_type in SHIFTED)

    @property
    def is_differentiable(self) -> bool:
        """Whether gradients can be computed through a forward pass."""
        return True

    def require_gradients(self) -> None:
        """Raise ConfigError for a model without gradients (`is_differentiable`)."""
        if not self.is_differentiable:
            raise ConfigError(
                "expected a model whose layers are computed here to take gradients of, found one that "
                "transformers computes; choose a model of a supported family"
            )

    def attention_in(self, dtype: str) -> str:
        """Attention implementation for a dtype by default, as recorded in cache keys.

        Returns:
            "sdpa", a fused kernel; or "eager" for float64, which is used for comparisons with the reference.
        """
        return "eager" if dtype == "float64" else "sdpa"

    @property
    def fields(self) -> dict[str, Any]:
        """Every field as plain values (numbers, strings, tuples, dicts)."""
        return plain(self)

    @cached_property
    def looks_ahead(self) -> bool:
        """Whether positions see later positions in any layer."""
        return any(layer.mixer.is_bidirectional for layer in self.layers)

    @cached_property
    def known_points(self) -> frozenset[HookPoint]:
        """`hook_points` as a set, for fast lookup."""
        return frozenset(self.hook_points)

    @cached_property
    def attention_kind(self) -> str | None:
        """Kind of hook point with attention weights: "pattern", or the effective attention of a recurrence.
        None if the model has neither (RWKV-4)."""
        # In a hybrid, attention comes first; else the order of STATE_ROOMS decides.
        return self._first_kind("pattern", *(f"{room}_effective_attn" for room in STATE_ROOMS))

    def layers_with(self, kind: str) -> list[int]:
        """Layer numbers with a hook point of this kind."""
        return [point.layer for point in self.points_of(kind) if point.layer is not None]

    def points_of(self, kind: str) -> list[HookPoint]:
        """The hook points of this kind, ordered by layer."""
        return [point for point in self.hook_points if point.kind == kind]

    def heads_of(self, layer: int) -> AttentionSpec | None:
        """Attention of a layer, for analyses of the QK and OV circuits of its heads; None if it has no
        attention with query, key and value matrices of its own."""
        return None

    @property
    def attention_heads(self) -> int:
        """Number of heads at hook points of `attention_kind`; 0 for a model without such hook points."""
        if self.attention_kind is None:
            return 0
        return next(self.axis_sizes[dim] for dim in BY_NAME[self.attention_kind].dims if dim.endswith("head"))

    @property
    def num_attention_heads(self) -> int:
        """`attention_heads`, under the name used by transformers."""
        return self.attention_heads

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads; 0 for a model without attention."""
        return int(self.axis_sizes.get("kv_head", 0))

    @cached_property
    def read_kind(self) -> str:
        """Kind of hook point with each head's output before the output projection: "z", or that of a
        recurrence."""
        return self._first_kind("z", "rwkv_wkv_out", "ssm_out", "linear_out", "mlstm_out") or "z"

    @cached_property
    def stream_start(self) -> HookPoint:
        """Hook point where the residual stream begins: the embedding, or the normalised embedding (RWKV)."""
        # Only RWKV has this hook point.
        normed = HookPoint("pre_norm", 0)
        return normed if normed in self.known_points else HookPoint("embed")

    def _first_kind(self, *kinds: str) -> str | None:
        available = {point.kind for point in self.known_points}
        return next((kind for kind in kinds if kind in available), None)

    def width(self, kind: str) -> int:
        """Numbers per token at hook points of a kind, over all heads; for attention matrices, numbers per
        pair of query and key. Multiplied by bytes per number, this is the size of a capture."""
        sizes = self.axis_sizes
        return math.prod(sizes.get(axis, 1) for axis in BY_NAME[kind].dims)


def require_tied(copy: str, original: str, same: bool) -> None:
    """Raise WeightsError if two tensors that the architecture shares differ: a tied head, or shared layers.

    The reference would compute with the tensor in the file, whatever the config says.

    Arguments:
        copy: Name of the tensor that may be missing.
        original: Name of the tensor that it must equal.
        same: Whether they are equal.
    """
    if not same:
        # Two reasons for equal tensors need two remedies.
        if copy.startswith(("lm_head.", "head.")):
            hint = "set tie_word_embeddings to false in config.json if the checkpoint has a head of its own"
        else:
            hint = "layers of this family share it, so fetch the checkpoint again"
        raise WeightsError(
            f"expected {copy} to equal {original}, as config.json ties them, found another matrix; {hint}"
        )


def plain(value: Any) -> dict[str, Any]:
    """Fields of a dataclass and of nested dataclasses as plain values, without fields that hold weights
    (`compare=False`)."""
    return {item.name: _plain(getattr(value, item.name)) for item in fields(value) if item.compare}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return plain(value) if is_dataclass(value) else value
