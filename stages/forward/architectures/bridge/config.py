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
    """Digest of a config.json without `STAMPS`. The order of keys counts, as readers may depend on it."""
    values = {key: value for key, value in raw.items() if key not in STAMPS}
    # As text, since configs may contain Infinity, which the digest refuses as a number.
    return digest("declared", json.dumps(values))


@dataclass(frozen=True)
class BridgeConfig(Architecture):
    """A model that transformers computes."""

    kind: ClassVar[str] = "bridge"

    model_type: str
    """Model type in its config.json."""
    class_name: str
    """Class of the model in transformers."""
    transformers: str
    """Version of transformers."""
    declared: str
    """`declared_digest` of its config.json."""
    context: int
    """Largest length of a prompt, in tokens."""
    vocab_size: int
    """Number of logits."""
    embedded_tokens: int
    """Number of rows of the embedding: token ids that the model accepts."""
    stream_in: str
    """Place of the stream among a layer's arguments (`TensorPlace.slot`)."""
    stream_out: str
    """Place of the stream in a layer's output (`TensorPlace.slot`)."""
    stream_tail: tuple[int, ...]
    """Sizes of the stream's axes after positions, which the axis "hidden" flattens."""
    position_first: bool
    """Whether the stream is [position, batch, …] instead of [batch, position, …]."""
    next_token: bool
    """Whether the model is a causal next-token predictor."""
    norms: Literal["before", "of stream"]
    """"of stream" if layers normalise the residual stream itself."""
    found: tuple[FoundLayer, ...]
    """The layers, in order of execution."""
    readout: FoundReadout | None = None
    """Final norm and head; None if the logits are not computed by these from the last stream."""
    remarks: tuple[str, ...] = ()
    """Limitations of the model behind the bridge, one line each."""

    @property
    def version(self) -> str:  # type: ignore[override]  # a constant in other kinds
        """Version of transformers and class that compute the forward pass."""
        return f"transformers/{self.transformers}/{self.class_name}"

    @cached_property
    def digest(self) -> str:
        """Digest of the config and of all measurements, without `remarks`."""
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
        """See `Architecture`; only axes of the stream, as other activations are not known."""
        return AxisSizes(hidden=self.hidden_size, one=1)

    @cached_property
    def hook_points(self) -> tuple[HookPoint, ...]:
        """See `Architecture`: the stream, and the outputs of each layer that were measured to add up to its
        change."""
        points = [HookPoint("embed")]
        for number, layer in enumerate(self.found):
            # A part is only listed if the probe measured that parts add up to the stream's change.
            kinds = ("resid_pre", *(part.kind for part in layer.parts), "resid_post")
            points += [HookPoint(kind, number) for kind in kinds]
        return tuple(sorted(points, key=lambda point: point.order))

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """See `Architecture`; mixers are unknown (`OpaqueMixer`)."""
        return (Layer(OpaqueMixer(), None, self.norms),) * self.num_layers

    @property
    def norm_type(self) -> Literal["rms", "gemma_rms", "layer"]:  # type: ignore[override]
        """Of the final norm; ConfigError for a model without readout."""
        return self.require_readout().norm_type

    @property
    def norm_eps(self) -> float:  # type: ignore[override]
        """Of the final norm; ConfigError for a model without readout."""
        return self.require_readout().norm_eps

    @property
    def final_logit_softcapping(self) -> float | None:  # type: ignore[override]
        """Cap of the logits; ConfigError for a model without readout."""
        return self.require_readout().soft_cap

    @property
    def tie_word_embeddings(self) -> bool:  # type: ignore[override]
        """False: the bridge loads the head under its own tensor name, tied or not."""
        return False

    @property
    def weight_counts(self) -> None:
        """None: tensor shapes of layers are unknown."""

    @cached_property
    def tensors(self) -> Tensors:
        """Tensors of the readout only; ConfigError for a model without readout."""
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
        """The readout; ConfigError if logits are not computed by a norm and a head from the last stream."""
        if self.readout is None:
            raise ConfigError(
                "expected a final norm and a head that give the logits of the last residual stream, found "
                f"none in {self.class_name}, which runs behind the transformers bridge; its states cannot be "
                "unembedded, so capture them, or intervene and read the model's own logits"
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
        """See `Architecture`; measured by the probe."""
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
        """See `Architecture`; only for an empty prefix, as no keys are cached."""
        return before == 0

    def bytes_per_token(self, itemsize: int) -> int:
        """See `Architecture`: streams and an MLP of usual size; logits, which are computed at all
        positions."""
        return itemsize * (32 * self.hidden_size + 2 * self.vocab_size)

    def attention_in(self, dtype: str) -> str:
        """Always "eager", the plain implementation of transformers."""
        return "eager"

    def to_json(self) -> dict[str, Any]:
        """All fields as plain values, for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> BridgeConfig:
        """The architecture from the result of `to_json`. Raises KeyError or TypeError for anything else."""
        values = {field.name: record[field.name] for field in fields(cls)}
        readout = values["readout"]
        return cls(
            **values
            | {
                "stream_tail": tuple(values["stream_tail"]),
                "remarks": tuple(values["remarks"]),
                "readout": None if readout is None else FoundReadout(**readout),
                "found": tuple(
                    FoundLayer(
                        layer["path"],
                        tuple(
                            LayerPart(part["kind"], TensorPlace(**part["place"])) for part in layer["parts"]
                        ),
                    )
                    for layer in values["found"]
                ),
            }
        )
