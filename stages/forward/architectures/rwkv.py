"""RWKV 4 to 7: an architecture of token shifts and a recurrent state, as one value.

Every block mixes positions twice: its time mix reads a state that each token decays and writes to, and both
it and the channel mix read the token before (token shift). The stream of layer 0 is *replaced* by its
normed embedding (`pre_norm`), so that what is added to it begins there.

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
from .architecture import Architecture, Layer, Reach, RecurrentMixer, Tensors
from .points import ORDER, HookPoint, points_of
from .rwkv_tensors import Spelling, rwkv_tensors

__all__ = ["RwkvConfig"]

Generation = Literal[4, 5, 6, 7]

UNLIMITED = 2**31 - 1
"""Tokens of a context nothing bounds."""
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
"""All that comes before the channel mix has shifted its tokens."""


@dataclass(frozen=True)
class RwkvConfig(Architecture):
    """An RWKV model: everything that decides its numbers besides its weights.

    head_norm_eps: of the norm of each head. attention_size: width of the time mix; in RWKV-4 every channel
    is a head of its own. has_gate: of versions from 5.1 on. norm_first: whether layer 0 norms the embedding.
    ranks: of the low-rank maps, by weight.
    """

    kind: ClassVar[str] = "rwkv"
    version: ClassVar[str] = "rwkv/1"
    norm_type: ClassVar[Literal["layer"]] = "layer"  # type: ignore[misc]
    final_logit_softcapping: ClassVar[None] = None  # type: ignore[misc]

    model_type: str
    generation: Generation
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_heads: int
    head_dim: int
    attention_size: int
    intermediate_size: int
    norm_eps: float
    head_norm_eps: float
    ranks: tuple[tuple[str, int], ...]
    spelling: Spelling
    has_gate: bool = True
    has_norm_bias: bool = True
    norm_first: bool = True
    decays_per_head: bool = False
    """One decay and one bonus for all channels of a head (RWKV-5.0 and 5.1)."""
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.num_heads * self.head_dim != self.attention_size:
            raise ConfigError(
                f"expected heads of {self.head_dim} channels to divide a width of {self.attention_size}, "
                f"found {self.num_heads} heads; correct head_dim or head_size in config.json"
            )

    @property
    def digest(self) -> str:
        """Of every field but how the checkpoint spells its tensors."""
        return digest("rwkv-config", self.fields | {"spelling": None})

    @property
    def context_length(self) -> int:
        """`UNLIMITED`: what was read is a state of one size."""
        return UNLIMITED

    @property
    def final_norm_eps(self) -> float:
        """See `Architecture`; up to RWKV-6 the reference's final norm has PyTorch's default, whatever the
        config says of the others."""
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
        kinds |= {"rwkv_kk", "rwkv_a"} if self.generation == 7 else set()
        found = points_of(kinds, self.num_layers)
        first = (HookPoint("pre_norm", 0),) if self.norm_first else ()
        return tuple(sorted((*found, *first), key=lambda point: point.order))

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
        """Later positions too, through the state and two token shifts, up to the second of these."""
        return "later" if point.kind in _REACHES_LATER else "here"

    @property
    def lengths_must_match(self) -> bool:
        """A recurrence knows no positions."""
        return False

    def keeps_keys(self, before: int, length: int) -> bool:
        """A state is true of whatever follows."""
        return True

    def bytes_per_token(self, itemsize: int) -> int:
        """Stream, norms, shifted copies, the recurrence in float32, the channel mix."""
        return itemsize * (12 * self.hidden_size + 2 * self.intermediate_size) + 4 * 10 * self.attention_size
