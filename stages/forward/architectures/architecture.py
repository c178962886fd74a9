"""Architecture: torch-free, immutable description of a model without its weights.

It is made from config.json (known.py), or from config.json and tensor names for models of unknown families
(models/autoconfig.py). Cache keys, plans, memory estimates and checks use it without importing torch; the
network that computes (`Network` in networks/loop.py) is built from it by networks/table.py.

A kind of architecture is a frozen dataclass that implements `Architecture`, and an entry in
networks/table.py. Code outside this folder uses only the interface of `Architecture`, never the kind.

Axes: as in points.py; "one" is the axis of length 1 of the norms' divisors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from ....store.errors import ConfigError, WeightsError
from .layer_summaries import Layer
from .mixers import AttentionSpec
from .points import BY_NAME, STATE_ROOMS, HookPoint

__all__ = [
    "BESIDE",
    "LANGUAGE",
    "UNLIMITED",
    "Architecture",
    "AttentionSpec",
    "AxisSizes",
    "FinalNorm",
    "HeadSpec",
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
"""Positions that a change at a hook point can affect before the layer ends: the changed position ("here"),
also later positions, or all."""


LENT = ("frequencies", "relative", "relative_norm", "relative_norm.bias")
"""Names of weights that a checkpoint stores once, outside of the layers, and that every layer uses: the
frequencies of rope, and the table of relative positions with its norm."""
_WITHOUT = (
    "ask about its states and attention, which need no language head: capture its hook points, or run the "
    "workflows probe, attention_patterns, head_detection or composition"
)
"""Remedy in messages about next tokens: hook points and workflows that need no language head."""
BESIDE = "beside."
"""Prefix of the names of weights outside of the layers that compute Gemma 3n's parallel residual streams and
per-layer inputs (layer_parts.py)."""


@dataclass(frozen=True)
class Stored:
    """How a checkpoint stores a weight: its tensor, and the transformations from tensor to weight."""

    name: str
    """Name of the tensor; for weights of a layer without the layer's prefix."""
    shape: tuple[int, ...]
    """Shape of the tensor in the checkpoint."""
    rows: tuple[tuple[str, int], ...] = ()
    """(weight name, number of rows) of each weight concatenated in the tensor; () for a tensor of a single
    weight."""
    is_transposed: bool = False
    """Whether the tensor is the transpose of the weight."""
    factors: tuple[tuple[int, float], ...] = ()
    """(number of rows, factor) of consecutive rows of the weight. The model's own code multiplies the layer's
    output by these factors; here the weight is multiplied once, when it is loaded. () for no factors."""
    layer: int | None = None
    """Number of the layer under whose prefix the checkpoint stores the tensor, if several layers share the
    tensor of one of them; None for the layer that the weight belongs to."""
    plus: float = 0.0
    """Added to every entry, before the factors (norms that multiply by 1 + weight)."""
    constant: float | None = None
    """Value of all entries of a weight that no checkpoint stores, such as 1.0 for norms without weights; None
    for a weight that the checkpoint stores."""
    groups: int | None = None
    """Groups of a width-1 convolution, whose tensor is [out, in / groups, 1]; None for a plain matrix."""

    def on_diagonal(self, tensor: Any, zeros: Any) -> Any:
        """Write the tensor of a grouped width-1 convolution into the equivalent block-diagonal matrix.

        Arguments:
            tensor: numpy or torch array [out, in / groups, 1].
            zeros: Zeros [out, in] of the same kind and dtype; changed in place.

        Returns:
            The matrix [out, in], which is the array `zeros`.
        """
        assert self.groups is not None
        rows_per_group, columns_per_group = len(tensor) // self.groups, tensor.shape[1]
        for group in range(self.groups):
            rows = slice(group * rows_per_group, (group + 1) * rows_per_group)
            columns = slice(group * columns_per_group, (group + 1) * columns_per_group)
            zeros[rows, columns] = tensor[rows, :, 0]
        return zeros


@dataclass(frozen=True)
class Tensors:
    """Map from model weights to checkpoint tensors."""

    outside: Mapping[str, Stored]
    """Name of a weight outside of the layers -> its tensor: "embed", "final_norm", "final_norm.bias", "head"
    (the tensor of the embedding if both are tied), "transform…" (`HeadTransform`), and others by kind of
    architecture."""
    layers: Sequence[Mapping[str, Stored]]
    """For each layer: name of a weight, such as "q", "o.bias" or "ln1" -> its tensor."""
    prefix: str
    """Prefix of the tensor names of a layer, such as "model.layers.{}.", in which "{}" stands for the
    layer's number."""
    copies: Mapping[str, str]
    """Name of an optional tensor, such as that of a tied head -> name of the tensor that it must equal if the
    checkpoint has both."""
    unread: Collection[str] = ()
    """Names of optional checkpoint tensors that the forward pass does not use."""
    decoder: tuple[int, str] | None = None
    """Encoder-decoders: number of the first decoder layer, and prefix of the tensors of decoder layers, in
    which "{}" stands for the layer's number within the decoder; None for other models."""

    def under(self, prefix: str, stored: str) -> Tensors:
        """Copy for a checkpoint whose names begin with another prefix.

        Arguments:
            prefix: Prefix of names here; names without it stay as they are.
            stored: Prefix that the checkpoint has in its place.
        """

        def moved(name: str) -> str:
            return stored + name.removeprefix(prefix) if name.startswith(prefix) else name

        return replace(
            self,
            outside={weight: replace(item, name=moved(item.name)) for weight, item in self.outside.items()},
            prefix=moved(self.prefix),
            copies={moved(copy): moved(original) for copy, original in self.copies.items()},
            unread={moved(name) for name in self.unread},
            decoder=self.decoder and (self.decoder[0], moved(self.decoder[1])),
        )

    def in_layer(self, layer: int, weight: str) -> str:
        """Full name in the checkpoint of the tensor of a layer's weight.

        Arguments:
            layer: Number of the layer; in encoder-decoders, decoder layers follow the encoder's.
            weight: Name of the weight, such as "q".
        """
        stored = self.layers[layer][weight]
        stored_under = layer if stored.layer is None else stored.layer
        first_layer, prefix = self.prefixes[-1]
        if stored_under < first_layer:  # an encoder layer of an encoder-decoder
            first_layer, prefix = self.prefixes[0]
        return prefix.format(stored_under - first_layer) + stored.name

    @property
    def prefixes(self) -> tuple[tuple[int, str], ...]:
        """(number of the first layer, prefix of tensor names with "{}" for the layer) of each stack of
        layers: of the encoder and the decoder in encoder-decoders, else of the only stack."""
        return ((0, self.prefix),) if self.decoder is None else ((0, self.prefix), self.decoder)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor that a checkpoint must have."""
        # Constant weights (`Stored.constant`) are in no checkpoint.
        shapes = {stored.name: stored.shape for stored in self.outside.values() if stored.constant is None}
        for layer, weights in enumerate(self.layers):
            in_file = {weight: stored for weight, stored in weights.items() if stored.constant is None}
            shapes |= {self.in_layer(layer, weight): stored.shape for weight, stored in in_file.items()}
        return shapes

    @cached_property
    def shared(self) -> frozenset[str]:
        """Names of the checkpoint tensors that several layers read: tensors of one layer that other layers
        share, and tensors outside of the layers that all layers use (`LENT`)."""
        outside = [stored.name for weight, stored in self.outside.items() if weight in LENT]
        inside = [
            self.in_layer(layer, weight)
            for layer, weights in enumerate(self.layers)
            for weight, stored in weights.items()
            if stored.layer not in (None, layer)
        ]
        return frozenset((*outside, *inside))

    def copied(self, names: Collection[str]) -> list[tuple[str, str]]:
        """Pairs of tensor names (copy, original) whose tensors must be equal, such as a tied head and the
        embedding, for the copies that a checkpoint has. names: names of the checkpoint's tensors."""
        return [(copy, original) for copy, original in self.copies.items() if copy in names]

    def stand_ins(self, names: Collection[str]) -> dict[str, str]:
        """Name of a needed tensor -> name of its copy, for tensors that a checkpoint has only under the
        copy's name: a file keeps one of a shared tensor's names, and not all writers keep the same one.

        Arguments:
            names: Names of the checkpoint's tensors.
        """
        return {
            original: copy
            for copy, original in self.copies.items()
            if copy in names and original not in names
        }

    def placed(self, name: str) -> tuple[int | None, str]:
        """Layer of a checkpoint tensor and its name within the layer; (None, name) for a tensor outside of
        the layers. name: full name of the tensor."""
        for first_layer, prefix in self.prefixes:
            # Prefixes look like "model.layers.{}.": the text before and after the layer number.
            before, after = prefix.split("{}")
            number, separator, name_in_layer = name.removeprefix(before).partition(after)
            if name.startswith(before) and separator and number.isdigit():
                return first_layer + int(number), name_in_layer
        return None, name


@dataclass(frozen=True)
class HeadSpec:
    """What a model computes from its final states: logits of the vocabulary, logits of labels, or nothing."""

    kind: Literal["vocabulary", "labels", "none"] = "vocabulary"
    """"vocabulary": a language head, causal or masked. "labels": a classifier; with one label a regression,
    such as a reward. "none": a base model, which ends with its final states."""
    labels: tuple[str, ...] = ()
    """Name of each label, in the order of the logits; () for heads without labels."""
    reads: Literal["each", "first", "last", "mean"] = "each"
    """Which final states give logits: those of each position, of the first or of the last position, or their
    mean over positions."""
    padding: int | None = field(default=None, compare=False)
    """Id of the padding token if the head reads the last position, which transformers counts without padding;
    None if it has none. A prompt that ends with it is refused, so it changes no result."""
    model_class: str = field(default="", compare=False)
    """Class of the model in transformers, for messages; "" if config.json names none."""

    @property
    def is_pooled(self) -> bool:
        """Whether a prompt has one vector of logits, instead of one per position."""
        return self.reads != "each"

    @property
    def dims(self) -> tuple[str, ...]:
        """Axes of the logits of a batch of prompts."""
        unit = "label" if self.kind == "labels" else "vocab"
        return ("batch", unit) if self.is_pooled else ("batch", "position", unit)


LANGUAGE = HeadSpec()
"""A head over the vocabulary."""


@dataclass(frozen=True)
class HeadTransform:
    """Transform before the head of an encoder: dense layer, activation, and a norm of the kind
    `Architecture.norm_type` (Devlin et al., BERT, 2019). BERT's pooler is one, without norm."""

    width: int
    """Width of its output, which the head reads."""
    activation: str
    """Activation function of the dense layer's output: a key of `ACTIVATIONS` in networks/mlp.py."""
    eps: float | None
    """Epsilon of its norm; None without a norm, as before the labels of most classifiers."""
    has_bias: bool = True
    """Whether the dense layer has a bias."""
    has_norm_bias: bool = True
    """Whether the norm has a bias, if it is a layer norm."""


@dataclass(frozen=True)
class FinalNorm:
    """Norm before the language head, of the kind `Architecture.norm_type`."""

    has_bias: bool = True
    """Whether a layer norm has a bias."""
    eps: float | None = None
    """Epsilon; None for the epsilon of all other norms (`Architecture.norm_eps`)."""


@dataclass(frozen=True)
class WeightCounts:
    """Numbers of weights in a model, total and by part, for estimates of memory and time."""

    total: int
    """Number of all weights."""
    in_layers: int
    """Number of entries of the matrices that multiply one token, over all layers; of the routed experts, only
    the top k of a token count."""
    head: int
    """Number of entries of the language head's matrix; 0 if the model has none."""


class AxisSizes(dict[str, int]):
    """Axis name -> size.

    A lookup raises ConfigError for an axis that no hook point of the model has, such as "head" in a model
    without attention, and for an axis whose size differs between layers.
    """

    differing: Mapping[str, Collection[int]] = {}
    """Axes whose size differs between layers -> their sizes."""

    def get(self, axis: str, default: Any = None) -> Any:
        """Size of an axis, or the default if no hook point has the axis; ConfigError if the size differs
        between layers."""
        return self[axis] if axis in self or axis in self.differing else default

    def __missing__(self, axis: str) -> int:
        if axis in self.differing:
            sizes = " and ".join(map(str, sorted(self.differing[axis])))
            raise ConfigError(
                f"expected the axis {axis!r} to have one size in all layers of the model, found the sizes "
                f"{sizes}; capture the hook points of one layer at a time with model.forward(prompts, hooks)"
            )
        axes = ", ".join(name for name in self if name != "one")
        raise ConfigError(
            f"expected a model whose hook points have an axis {axis!r}, found one with the axes {axes}; "
            "choose a model whose layers all have attention"
        )


class Architecture(ABC):
    """Torch-free, immutable description of a model without its weights: sizes, layers, hook points, and the
    tensors that a checkpoint must have."""

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
    """Number of rows of the position table; 0 without a position table."""
    position_waves: Literal["fairseq", "transformer"] | None = None
    """Formula of a sinusoidal table of positions, which is computed instead of loaded; None for a learned
    table, or none. "transformer": exponents are 2i / d, as in the Transformer paper; "fairseq": the lowest
    frequency is exactly 1/10000."""
    first_position: int = 0
    """Row of the table of positions for the first token of a prompt."""
    embedding_scale: float | None = None
    """Factor of the embeddings at entry to the residual stream; None for unscaled embeddings."""
    transform: HeadTransform | None = None
    """Transform before the head; None if the head reads the final norm."""
    head: HeadSpec = LANGUAGE
    """What the model computes from its final states."""
    dropped_token: int | None = None
    """Id of the mask token in ESM models: its embedding is replaced by 0, and all other embeddings are
    rescaled by the share of mask tokens in the prompt; None for other models."""
    target_start: int | None = None
    """Encoder-decoders: id of the first target token, which is raised by the vocabulary size to mark where
    the target begins; None for models of single sequences."""
    unknown_token: int | None = None
    """Id of the padding token, which prompts must not contain in families whose positions skip padding
    (RoBERTa); None in other families."""

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
        """All hook points of the model, in execution order."""

    @property
    @abstractmethod
    def layers(self) -> tuple[Layer, ...]:
        """Summary of each layer, in order."""

    @property
    @abstractmethod
    def tensors(self) -> Tensors:
        """Map from this model's weights to the tensors of a checkpoint."""

    @abstractmethod
    def reach(self, point: HookPoint) -> Reach:
        """Positions that a change at one position of a hook point can affect before the end of its layer:
        that position only ("here"), also later ones ("later"), or all ("all"). Hook points between layers,
        such as resid_post, belong to the layer that reads them."""

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
        """Numbers of weights: total, in layers and in the head; None for unknown tensors."""
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

    @property
    def n_logits(self) -> int:
        """Number of logits: tokens of the vocabulary, or labels; 0 for a model without head."""
        return self.vocab_size if self.head.kind == "vocabulary" else len(self.head.labels)

    def require_head(self) -> None:
        """Raise ConfigError for a model without head, which computes no logits."""
        if self.head.kind == "none":
            raise ConfigError(f"expected a model that computes logits, found {self._shown_head}; {_WITHOUT}")

    def require_vocabulary(self) -> None:
        """Raise ConfigError unless the logits are those of the vocabulary, so that the model can be asked
        about tokens."""
        if self.head.kind != "vocabulary":
            raise ConfigError(f"expected a model with a language head, found {self._shown_head}; {_WITHOUT}")

    @property
    def _shown_head(self) -> str:
        """Class and head of a model, for messages about what it has no head for."""
        n = len(self.head.labels)
        head = "no head" if self.head.kind == "none" else f"a head for {n} label{'s' * (n > 1)}"
        return f"{self.head.model_class or self.model_type}, which has {head}"

    def require_linear_head(self) -> None:
        """Raise ConfigError unless logits of tokens are a linear map of the normalised stream, so that they
        can be attributed to components and tokens have directions in the stream."""
        self.require_vocabulary()
        if self.transform is not None:
            raise ConfigError(
                "expected a model whose logits are a linear map of the normalised residual stream, found "
                f"{self.model_type}, which applies a dense map, an activation and a norm before its language "
                "head; use the logit lens to read its layers"
            )

    def require_next_token(self) -> None:
        """Raise ConfigError unless the model is a causal next-token predictor, so that each token of a text
        is the target of the prediction before it."""
        self.require_vocabulary()
        if not self.predicts_next:
            raise ConfigError(
                f"expected a model that predicts the next token, found {self.model_type}, in which every "
                "position also sees later tokens; put the mask token into the prompt where a token is "
                "missing, and read the logits at that position of model.forward(prompts)"
            )

    def under(self, root: str, head: str) -> Architecture:
        """Copy of this architecture for a checkpoint in which the tensors have other names, such as that of a
        multimodal model.

        Arguments:
            root: Prefix of tensor names that replaces "model.".
            head: Name of the language head's tensor without ".weight".

        Raises:
            ConfigError: Tensors of this kind of architecture cannot be renamed.
        """
        raise ConfigError(
            f"expected a multimodal checkpoint whose text model is a plain decoder, found {self.model_type}, "
            f"whose tensors cannot be read under the prefix {root!r} and the head {head!r}"
        )

    @property
    def shares_prefixes(self) -> bool:
        """Whether runs with equal interventions in their first layers can share the computation of these
        layers."""
        return True

    @property
    def predicts_next(self) -> bool:
        """Whether the logits at a position predict the next token and depend on no later one."""
        return not self.looks_ahead and self.head.kind == "vocabulary"

    @property
    def known_ids(self) -> int:
        """Number of valid token ids: the vocabulary size, or twice the vocabulary size for encoder-decoders,
        in which the id of the first target token is raised by the vocabulary size."""
        return self.vocab_size if self.target_start is None else 2 * self.vocab_size

    @property
    def side_length(self) -> int | None:
        """Encoder-decoders: largest length of a source and of a target, in tokens; None for no bound."""
        return None

    @property
    def continues(self) -> bool:
        """Whether the logits at the last position predict the token after the prompt, so that the model can
        generate text."""
        return self.predicts_next or (self.target_start is not None and self.head.kind == "vocabulary")

    def reaches_from(self, tokens: Sequence[int], position: int) -> int:
        """First position of a prompt that a change at one position can affect, for a hook point whose `reach`
        is "all".

        Arguments:
            tokens: Token ids of the prompt.
            position: Position of the change.
        """
        return 0

    @property
    def mask_shift(self) -> int:
        """How many positions before a mask token its prediction is read: 1 for models that were initialised
        from next-token predictors (`SHIFTED`), 0 for other masked language models."""
        return int(self.model_type in SHIFTED)

    @property
    def is_differentiable(self) -> bool:
        """Whether gradients can be computed through a forward pass."""
        return True

    def require_gradients(self) -> None:
        """Raise ConfigError for a model without gradients (`is_differentiable`)."""
        if not self.is_differentiable:
            raise ConfigError(
                f"expected a model that mizarr itself computes, to take gradients of it, found "
                f"{self.model_type}, which transformers computes; choose a family that `mizarr models "
                "families` lists"
            )

    def attention_in(self, dtype: str) -> str:
        """Name of the attention implementation that is used by default with a dtype; part of cache keys.

        Arguments:
            dtype: Dtype of the computation, such as "bfloat16".

        Returns:
            "sdpa", a fused kernel; or "eager" for float64, which is used for comparisons with transformers.
        """
        return "eager" if dtype == "float64" else "sdpa"

    @property
    def fields(self) -> dict[str, Any]:
        """Name of each field -> its value as numbers, strings, tuples and dicts."""
        return plain(self)

    @cached_property
    def looks_ahead(self) -> bool:
        """Whether attention in any layer is bidirectional, so that positions see later positions."""
        return any(layer.mixer.is_bidirectional for layer in self.layers)

    @cached_property
    def known_points(self) -> frozenset[HookPoint]:
        """All hook points of the model as a set, for fast lookup."""
        return frozenset(self.hook_points)

    @cached_property
    def attention_kind(self) -> str | None:
        """Kind of hook point that holds attention weights: "pattern" of attention, or the effective attention
        of a recurrence, such as "ssm_effective_attn"; None if the model has neither (RWKV-4)."""
        # In a hybrid, attention comes first; else the order of STATE_ROOMS decides.
        return self._first_kind("pattern", *(f"{room}_effective_attn" for room in STATE_ROOMS))

    def layers_with(self, kind: str) -> list[int]:
        """Numbers of the layers that have a hook point of a kind, such as "pattern"."""
        return [point.layer for point in self.points_of(kind) if point.layer is not None]

    def points_of(self, kind: str) -> list[HookPoint]:
        """The hook points of a kind, such as "pattern", ordered by layer."""
        return [point for point in self.hook_points if point.kind == kind]

    def heads_of(self, layer: int) -> AttentionSpec | None:
        """Sizes and switches of a layer's attention, for analyses of the QK and OV circuits of its heads;
        None if the layer has no attention with query, key and value matrices of its own."""
        return None

    @property
    def attention_heads(self) -> int:
        """Number of heads at the hook points with attention weights (`attention_kind`); 0 for a model without
        such hook points."""
        if self.attention_kind is None:
            return 0
        return next(self.axis_sizes[dim] for dim in BY_NAME[self.attention_kind].dims if dim.endswith("head"))

    @property
    def num_attention_heads(self) -> int:
        """Number of heads, under the name that transformers uses; equal to `attention_heads`."""
        return self.attention_heads

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads; 0 for a model without attention."""
        return int(self.axis_sizes.get("kv_head", 0))

    @cached_property
    def read_kind(self) -> str:
        """Kind of hook point with each head's output before the output projection: "z" of attention, or the
        output of a recurrence, such as "ssm_out"."""
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
        """How many numbers a hook point of a kind holds per token, over all heads; for attention matrices,
        per pair of query and key. Times bytes per number, this is the size of a capture."""
        sizes = self.axis_sizes
        return math.prod(sizes.get(axis, 1) for axis in BY_NAME[kind].dims)


def require_tied(copy: str, original: str, same: bool) -> None:
    """Raise WeightsError if a checkpoint has two different tensors where the architecture has one weight: a
    tied head, or layers that share weights.

    transformers would compute with the tensor in the file, whatever the config says.

    Arguments:
        copy: Name of the tensor that a checkpoint may leave out.
        original: Name of the tensor that it must equal.
        same: Whether the two tensors are equal.
    """
    if not same:
        # A tied head and layers that share weights need different remedies.
        if copy.startswith(("lm_head.", "head.")):
            hint = "set tie_word_embeddings to false in config.json if the checkpoint has a head of its own"
        else:
            hint = "layers of this family share the tensor, so fetch the checkpoint again"
        raise WeightsError(
            f"expected the tensors {copy!r} and {original!r} to be equal, as config.json ties them, found "
            f"different values; {hint}"
        )


def plain(value: Any) -> dict[str, Any]:
    """Name of each field of a dataclass -> its value, with nested dataclasses as dicts; fields that hold
    weights (declared with `compare=False`) are left out."""
    return {item.name: _plain(getattr(value, item.name)) for item in fields(value) if item.compare}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return plain(value) if is_dataclass(value) else value
