"""BridgeConfig: a model that transformers computes, as what was found of it by running it.

No family is described here: which modules are layers, what of them adds to the stream, and with what the last
stream is read was found, and checked, by `networks/bridge/probe.py`. This value is what it found. A change
may reach every position, as nobody says how layers mix them.

Border: torch-free; a value that goes to and fro as plain JSON, so that it can be remembered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Literal

from .....store.digest import digest
from .....store.errors import ConfigError
from ..architecture import Architecture, AxisSizes, Layer, OpaqueMixer, Reach, Stored, Tensors
from ..points import HookPoint
from .found import FoundLayer, FoundReadout, LayerPart, TensorPlace

__all__ = ["BridgeConfig", "declared_digest"]

STAMPS = ("transformers_version", "_name_or_path", "_commit_hash", "name_or_path")
"""Keys of a config.json that say who wrote it."""


def declared_digest(raw: Mapping[str, Any]) -> str:
    """Digest of a config.json without its version stamps, in its order: a reader may try key by key."""
    told = {key: value for key, value in raw.items() if key not in STAMPS}
    return digest("declared", json.dumps(told))  # as text: it may hold an Infinity


@dataclass(frozen=True)
class BridgeConfig(Architecture):
    """A model behind the bridge.

    class_name, transformers: what computes it, and of which version. declared: digest of config.json, all of
    it but version stamps. stream_in, stream_out: where a layer takes its stream and gives it
    (`TensorPlace.slot`). stream_tail: sizes of the stream's axes behind positions, which `hidden` counts as
    one. position_first: whether positions come before prompts in it. next_token: whether logits are of the
    next token, and no token sees a later one. norms: "of stream" where layers norm the stream itself.
    remarks: what it cannot do, a line each.
    """

    kind: ClassVar[str] = "bridge"

    model_type: str
    class_name: str
    transformers: str
    declared: str
    context: int
    vocab_size: int
    embedded_tokens: int
    stream_in: str
    stream_out: str
    stream_tail: tuple[int, ...]
    position_first: bool
    next_token: bool
    norms: Literal["before", "of stream"]
    found: tuple[FoundLayer, ...]
    readout: FoundReadout | None = None
    remarks: tuple[str, ...] = ()

    @property
    def version(self) -> str:  # type: ignore[override]  # of kinds we compute it is ours, and a constant
        """Whose forward pass it is."""
        return f"transformers/{self.transformers}/{self.class_name}"

    @cached_property
    def digest(self) -> str:
        """Of the whole configuration and of what was found, but for what is only told."""
        return digest("bridge-config", self.fields | {"remarks": None})

    @property
    def num_layers(self) -> int:  # type: ignore[override]
        """See `Architecture`."""
        return len(self.found)

    @property
    def hidden_size(self) -> int:  # type: ignore[override]
        """The axes of the stream behind positions, multiplied."""
        size = 1
        for each in self.stream_tail:
            size *= each
        return size

    @property
    def context_length(self) -> int:
        """See `Architecture`."""
        return self.context

    @property
    def axis_sizes(self) -> AxisSizes:
        """The stream alone has axes here."""
        return AxisSizes(hidden=self.hidden_size, one=1)

    @cached_property
    def hook_points(self) -> tuple[HookPoint, ...]:
        """The stream, and in each layer those parts that were found to add up."""
        points = [HookPoint("embed")]
        for number, layer in enumerate(self.found):
            kinds = ("resid_pre", *(part.kind for part in layer.parts), "resid_post")
            points += [HookPoint(kind, number) for kind in kinds]
        return tuple(sorted(points, key=lambda point: point.order))

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """See `Architecture`; nothing is known of what is inside."""
        return (Layer(OpaqueMixer(), None, self.norms),) * self.num_layers

    @property
    def norm_type(self) -> Literal["rms", "gemma_rms", "layer"]:  # type: ignore[override]
        """Of the final norm. Raises ConfigError where none was found."""
        return self.require_readout().norm_type

    @property
    def norm_eps(self) -> float:  # type: ignore[override]
        """Of the final norm. Raises ConfigError where none was found."""
        return self.require_readout().norm_eps

    @property
    def final_logit_softcapping(self) -> float | None:  # type: ignore[override]
        """Of the logits. Raises ConfigError where no readout was found."""
        return self.require_readout().soft_cap

    @property
    def tie_word_embeddings(self) -> bool:  # type: ignore[override]
        """The bridge reads the head wherever it is."""
        return False

    @property
    def weight_counts(self) -> None:
        """Not known: only the readout's tensors are."""

    @cached_property
    def tensors(self) -> Tensors:
        """The readout's, as the bridge knows of no other. Raises ConfigError where none was found."""
        found, width = self.require_readout(), self.hidden_size
        factors = () if found.scale == 1 else ((self.vocab_size, found.scale),)
        outside = {
            "final_norm": Stored(found.final_norm, (width,)),
            "head": Stored(found.head, (self.vocab_size, width), factors=factors),
        }
        if found.final_norm_bias:
            outside["final_norm.bias"] = Stored(found.final_norm_bias, (width,))
        if found.head_bias:
            outside["head.bias"] = Stored(found.head_bias, (self.vocab_size,), factors=factors)
        return Tensors(outside, ({},) * self.num_layers, "layer.{}.", {})

    def require_readout(self) -> FoundReadout:
        """The readout. Raises ConfigError where the logits are no norm and head of the last stream."""
        if self.readout is None:
            raise ConfigError(
                "expected a final norm and a head that give the logits of the last residual stream, found "
                f"none in {self.class_name}, which runs behind the transformers bridge; its states cannot be "
                "unembedded, so capture them, or intervene and read the model's own logits"
            )
        return self.readout

    def reach(self, point: HookPoint) -> Reach:
        """Nobody says how layers mix positions, so every one may be reached."""
        return "all"

    @property
    def predicts_next(self) -> bool:
        """See `Architecture`."""
        return self.next_token

    @cached_property
    def looks_ahead(self) -> bool:
        """See `Architecture`; measured, as is what logits are of."""
        return not self.next_token

    @property
    def is_differentiable(self) -> bool:
        """Hooks on somebody's modules are shown copies, through which nothing goes back."""
        return False

    @property
    def shares_prefixes(self) -> bool:
        """A pass through transformers begins at its first layer."""
        return False

    @property
    def lengths_must_match(self) -> bool:
        """No prompt is ever padded."""
        return True

    def keeps_keys(self, before: int, length: int) -> bool:
        """See `Architecture`: of no positions alone, as nothing is kept."""
        return before == 0

    def bytes_per_token(self, itemsize: int) -> int:
        """Streams and an MLP's inside, as is usual; and the logits, which are computed at every position."""
        return itemsize * (32 * self.hidden_size + 2 * self.vocab_size)

    def attention_in(self, dtype: str) -> str:
        """As transformers writes it out."""
        return "eager"

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> BridgeConfig:
        """What `to_json` gave. Raises KeyError or TypeError for anything else."""
        values = {field.name: told[field.name] for field in fields(cls)}
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
