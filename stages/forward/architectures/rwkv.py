"""RwkvConfig: architecture of RWKV 4 to 7, with token shifts and a recurrent state.

Every layer mixes positions twice: the time mix has a recurrent state, which each token decays and writes to,
and both time mix and channel mix also read the previous token (token shift). In layer 0 the normalised
embedding (`pre_norm`) *replaces* the embedding as the start of the residual stream.

Papers: RWKV-4 (Peng et al. 2023), RWKV-5 and 6 (Peng et al. 2024, "Eagle and Finch"), RWKV-7 (Peng et al.
2025, "Goose"). Torch-free.

Axes: head, key (rows of the state), value (its columns).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from ....store.digest import digest
from ....store.errors import ConfigError
from .architecture import Architecture, Reach, Tensors
from .layer_summaries import Layer, RecurrentMixer
from .points import ORDER, HookPoint, points_of
from .rwkv_tensors import Spelling, rwkv_tensors

__all__ = ["RwkvConfig"]

Generation = Literal[4, 5, 6, 7]

UNLIMITED = 2**31 - 1
"""Context length, in tokens, of models without a limit."""
_COMMON = (
    *("embed", "resid_pre", "ln1_scale", "ln1_normalized"),
    *("rwkv_r", "rwkv_k", "rwkv_v", "rwkv_wkv_out", "attn_out", "resid_mid"),
    *("ln2_scale", "ln2_normalized", "mlp_pre", "mlp_pre_act", "mlp_post_act", "mlp_post", "mlp_out"),
    *("resid_post", "ln_final_scale", "ln_final_normalized", "final_norm"),
)
_OF_STATES = (
    *("rwkv_log_decay", "rwkv_decay", "rwkv_write", "rwkv_state_seq", "rwkv_state"),
    *("rwkv_alpha_raw", "rwkv_effective_attn"),
)
_REACHES_LATER = frozenset(
    kind for kind, place in ORDER.items() if ORDER["resid_pre"] <= place <= ORDER["mlp_pre"]
) | {"embed", "resid_post"}
"""Kinds of hook points up to the token shift of the channel mix, which passes a change on to the next
token."""


@dataclass(frozen=True)
class RwkvConfig(Architecture):
    """An RWKV model: everything except the weights that decides its results."""

    kind: ClassVar[str] = "rwkv"
    version: ClassVar[str] = "rwkv/1"
    norm_type: ClassVar[Literal["layer"]] = "layer"  # type: ignore[misc]
    final_logit_softcapping: ClassVar[None] = None  # type: ignore[misc]

    model_type: str
    generation: Generation
    """Version of RWKV."""
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_heads: int
    """Number of heads; in RWKV-4 every channel is a head."""
    head_dim: int
    attention_size: int
    """Width of the time mix."""
    intermediate_size: int
    """Hidden width of the channel mix."""
    norm_eps: float
    head_norm_eps: float
    """Epsilon of the norm of each head's output."""
    ranks: tuple[tuple[str, int], ...]
    """(weight, rank) of the low-rank maps."""
    spelling: Spelling
    """Naming scheme of the checkpoint's tensors."""
    has_gate: bool = True
    """Whether the time mix has an output gate (version 5.1 and later)."""
    has_norm_bias: bool = True
    norm_first: bool = True
    """Whether layer 0 normalises the embedding (`pre_norm`)."""
    decays_per_head: bool = False
    """Whether all channels of a head share one decay and one bonus (RWKV-5.0 and 5.1)."""
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.num_heads * self.head_dim != self.attention_size:
            raise ConfigError(
                f"expected heads of {self.head_dim} channels to divide a width of {self.attention_size}, "
                f"found {self.num_heads} heads; correct head_dim or head_size in config.json"
            )

    @property
    def digest(self) -> str:
        """Digest of every field except the naming scheme of the tensors."""
        return digest("rwkv-config", self.fields | {"spelling": None})

    @property
    def context_length(self) -> int:
        """`UNLIMITED`, as the state has a fixed size."""
        return UNLIMITED

    @property
    def final_norm_eps(self) -> float:
        """See `Architecture`; up to RWKV-6, the reference's final norm ignores the config and has PyTorch's
        default epsilon."""
        return self.norm_eps if self.generation == 7 else 1e-5

    @property
    def axis_sizes(self) -> dict[str, int]:
        """See `Architecture`."""
        return {
            "hidden": self.hidden_size,
            "head": self.num_heads,
            "key": self.head_dim,
            "value": self.head_dim,
            "mlp": self.intermediate_size,
            "one": 1,
        }

    @cached_property
    def hook_points(self) -> tuple[HookPoint, ...]:
        """See `Architecture`; `pre_norm` in layer 0 only."""
        kinds = {*_COMMON, *(_OF_STATES if self.generation > 4 else ())}
        kinds |= {"rwkv_g"} if self.has_gate else set()
        # Only version 7 removes the value under a normalised key before it writes.
        kinds |= {"rwkv_kk", "rwkv_a"} if self.generation == 7 else set()
        points = points_of(kinds, self.num_layers)
        pre_norm = (HookPoint("pre_norm", 0),) if self.norm_first else ()
        return tuple(sorted((*points, *pre_norm), key=lambda point: point.order))

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """See `Architecture`."""
        return (
            Layer(RecurrentMixer(f"rwkv{self.generation}"), "token-shifted MLP", "before"),
        ) * self.num_layers

    @cached_property
    def tensors(self) -> Tensors:
        """See `Architecture`."""
        return rwkv_tensors(self)

    def reach(self, point: HookPoint) -> Reach:
        """See `Architecture`: changes up to the token shift of the channel mix also affect later positions,
        through the state and both token shifts."""
        return "later" if point.kind in _REACHES_LATER else "here"

    @property
    def lengths_must_match(self) -> bool:
        """False: recurrences do not depend on the length of the prompt."""
        return False

    def keeps_keys(self, before: int, length: int) -> bool:
        """True: the state after a prefix does not depend on later tokens."""
        return True

    def bytes_per_token(self, itemsize: int) -> int:
        """See `Architecture`: stream, norms, shifted copies, the recurrence in float32, and the channel
        mix."""
        return itemsize * (12 * self.hidden_size + 2 * self.intermediate_size) + 4 * 10 * self.attention_size
