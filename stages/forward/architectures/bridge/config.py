"""BridgeConfig: architecture of a model that transformers computes, as measured by running it.

It is not specific to a family: `networks/bridge/probe.py` measures and checks which modules are layers, which
of their outputs are added to the residual stream, and which norm and head map the last stream to logits. The
result is stored here. As it is unknown how layers mix positions, a change is assumed to affect all positions.

Border: torch-free; convertible to and from JSON, so that measurements can be cached.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Literal

from .....store.digest import digest
from .....store.errors import ConfigError
from ..architecture import Architecture, AxisSizes, Reach, Stored, Tensors
from ..layer_summaries import Layer, OpaqueMixer
from ..points import HookPoint
from .found import FoundLayer, FoundReadout, LayerPart, TensorPlace

__all__ = ["BridgeConfig", "declared_digest"]

STAMPS = ("transformers_version", "_name_or_path", "_commit_hash", "name_or_path")
"""Keys of a config.json that depend on its writer, not on the model."""


def declared_digest(raw: Mapping[str, Any]) -> str:
    """Hex digest of a parsed config.json without keys that depend on its writer (`STAMPS`). The order of keys
    counts, as readers may depend on it."""
    values = {key: value for key, value in raw.items() if key not in STAMPS}
    # As text, since configs may contain Infinity, which the digest refuses as a number.
    return digest("declared", json.dumps(values))


@dataclass(frozen=True)
class BridgeConfig(Architecture):
    """Architecture of a model that transformers computes, as measured by running it."""

    kind: ClassVar[str] = "bridge"

    model_type: str
    """Model type in its config.json."""
    class_name: str
    """Class of the model in transformers."""
    transformers: str
    """Version of transformers with which the model was measured."""
    declared: str
    """Digest of the model's config.json (`declared_digest`)."""
    context: int
    """Largest length of a prompt, in tokens."""
    vocab_size: int
    """Number of logits."""
    embedded_tokens: int
    """Number of rows of the embedding: token ids that the model accepts."""
    stream_in: str
    """Place of the residual stream among a layer's arguments: "0" by position, or a name."""
    stream_out: str
    """Place of the residual stream in a layer's result: "0" by position, a name, or "" for the whole
    result."""
    stream_tail: tuple[int, ...]
    """Sizes of the residual stream's axes after batch and position, which hook points flatten to "hidden"."""
    position_first: bool
    """Whether the stream is [position, batch, …] instead of [batch, position, …]."""
    next_token: bool
    """Whether the model is a causal next-token predictor."""
    norms: Literal["before", "of stream"]
    """"of stream" if layers normalise the residual stream itself (post-norm), else "before"."""
    found: tuple[FoundLayer, ...]
    """The layers, in order of execution."""
    readout: FoundReadout | None = None
    """Final norm and language head; None if the logits are not computed by these from the last layer's
    output."""
    remarks: tuple[str, ...] = ()
    """Limitations of the model behind the bridge, one line each."""

    @property
    def version(self) -> str:  # type: ignore[override]  # a constant in other kinds
        """Version of the forward pass for cache keys: version of transformers and name of the model's
        class."""
        return f"transformers/{self.transformers}/{self.class_name}"

    @cached_property
    def digest(self) -> str:
        """Hex digest of config.json and of all measurements, without the `remarks`."""
        return digest("bridge-config", self.fields | {"remarks": None})

    @property
    def num_layers(self) -> int:  # type: ignore[override]
        """Number of layers."""
        return len(self.found)

    @property
    def hidden_size(self) -> int:  # type: ignore[override]
        """Numbers per position of the stream: the product of its axes after positions."""
        return math.prod(self.stream_tail)

    @property
    def context_length(self) -> int:
        """Largest length of a prompt, in tokens."""
        return self.context

    @property
    def axis_sizes(self) -> AxisSizes:
        """Axis name -> size, only for axes of the residual stream, as other activations are not known."""
        return AxisSizes(hidden=self.hidden_size, one=1)

    @cached_property
    def hook_points(self) -> tuple[HookPoint, ...]:
        """All hook points, in execution order: the residual stream, and the module outputs of each layer that
        were measured to add up to its change."""
        points = [HookPoint("embed")]
        for number, layer in enumerate(self.found):
            # A part is only listed if the probe measured that parts add up to the stream's change.
            kinds = ("resid_pre", *(part.kind for part in layer.parts), "resid_post")
            points += [HookPoint(kind, number) for kind in kinds]
        return tuple(sorted(points, key=lambda point: point.order))

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Summary of each layer, in order; how layers mix positions is unknown (`OpaqueMixer`)."""
        return (Layer(OpaqueMixer(), None, self.norms),) * self.num_layers

    @property
    def norm_type(self) -> Literal["rms", "gemma_rms", "layer"]:  # type: ignore[override]
        """Final norm type; ConfigError for a model whose final norm and head were not found."""
        return self.require_readout().norm_type

    @property
    def norm_eps(self) -> float:  # type: ignore[override]
        """Epsilon of the final norm; ConfigError for a model in which no final norm and head were found."""
        return self.require_readout().norm_eps

    @property
    def final_logit_softcapping(self) -> float | None:  # type: ignore[override]
        """Cap c of the logits, c tanh(logits / c); None for no cap. ConfigError for a model in which no final
        norm and head were found."""
        return self.require_readout().soft_cap

    @property
    def tie_word_embeddings(self) -> bool:  # type: ignore[override]
        """False: the bridge loads the head under its own tensor name, tied or not."""
        return False

    @property
    def weight_counts(self) -> None:
        """Numbers of weights: None, as the shapes of the layers' tensors are unknown."""

    @cached_property
    def tensors(self) -> Tensors:
        """Map from weights to checkpoint tensors of final norm and head only; ConfigError for a model whose
        final norm and head were not found."""
        readout, width = self.require_readout(), self.hidden_size
        factors = () if readout.scale == 1 else ((self.vocab_size, readout.scale),)
        outside = {
            "final_norm": Stored(readout.final_norm, (width,)),
            "head": Stored(readout.head, (self.vocab_size, width), factors=factors),
        }
        if readout.final_norm_bias:
            outside["final_norm.bias"] = Stored(readout.final_norm_bias, (width,))
        if readout.head_bias:
            outside["head.bias"] = Stored(readout.head_bias, (self.vocab_size,), factors=factors)
        return Tensors(outside, ({},) * self.num_layers, "layer.{}.", {})

    def require_readout(self) -> FoundReadout:
        """Final norm and head; ConfigError if the logits are not computed by these from the last layer's
        output."""
        if self.readout is None:
            raise ConfigError(
                "expected a model whose logits are computed by a final norm and a head from the last "
                f"residual stream, found {self.class_name}, which transformers runs and which computes them "
                "in another way; states cannot be unembedded, so capture them, or intervene and read the "
                "model's own logits"
            )
        return self.readout

    def reach(self, point: HookPoint) -> Reach:
        """Always "all", as it is unknown how layers mix positions."""
        return "all"

    @property
    def predicts_next(self) -> bool:
        """Whether the logits at a position predict the next token and depend on no later one."""
        return self.next_token

    @cached_property
    def looks_ahead(self) -> bool:
        """Whether positions see later positions, as measured when the model was probed."""
        return not self.next_token

    @property
    def is_differentiable(self) -> bool:
        """False: hooks on modules of transformers get detached copies of activations."""
        return False

    @property
    def shares_prefixes(self) -> bool:
        """False: every pass through transformers begins at the first layer."""
        return False

    @property
    def lengths_must_match(self) -> bool:
        """True, so that prompts are never padded."""
        return True

    def keeps_keys(self, before: int, length: int) -> bool:
        """Whether keys and values of a prefix of `before` tokens can be reused in a sequence of `length`
        tokens: only for an empty prefix, as none are cached."""
        return before == 0

    def bytes_per_token(self, itemsize: int) -> int:
        """Estimated bytes of activations per token, with itemsize bytes per number: residual streams, an MLP
        of usual size, and logits, which transformers computes at all positions."""
        return itemsize * (32 * self.hidden_size + 2 * self.vocab_size)

    def attention_in(self, dtype: str) -> str:
        """Always "eager", the plain implementation of transformers."""
        return "eager"

    def to_json(self) -> dict[str, Any]:
        """Name of each field -> its value as plain values, from which `from_json` makes the architecture."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> BridgeConfig:
        """The architecture from the result of `to_json`. Raises KeyError or TypeError for anything else."""
        values = {field.name: record[field.name] for field in fields(cls)}

        def layer(values: Mapping[str, Any]) -> FoundLayer:
            parts = (LayerPart(part["kind"], TensorPlace(**part["place"])) for part in values["parts"])
            return FoundLayer(values["path"], tuple(parts))

        # JSON has lists and objects where the fields have tuples and dataclasses.
        readout = values["readout"]
        values["readout"] = None if readout is None else FoundReadout(**readout)
        values["stream_tail"], values["remarks"] = tuple(values["stream_tail"]), tuple(values["remarks"])
        return cls(**values | {"found": tuple(map(layer, values["found"]))})
