"""Linear recurrences with a decay and a rank-one correction, the form of most recurrent mixers.

    S_t = diag(exp log_decay_t) S_{t-1} + beta_t (alpha_t^T S_{t-1}) + write_t k_t v_t^T
    o_t = q_t^T S_t                                 readout "after"
    o_t = q_t^T S_{t-1} + (sum q_t bonus k_t) v_t   readout "before"

(diagonal plus low rank: Yang et al., Gated Delta Networks, 2024; Peng et al., RWKV-7, 2025.)

| mixer | log_decay | alpha, beta | readout |
| --- | --- | --- | --- |
| RetNet, Mamba-2 | one per head | - | after |
| GLA | one per key channel | - | after |
| RWKV-5, RWKV-6 | one per key channel | - | before, with bonus |
| RWKV-7 | one per key channel | -kappa, kappa a | after |
| DeltaNet, gated DeltaNet | one per head | k, -b d k | after |
| Mamba-1 | one per key channel; each channel is a head with V = 1 | - | after |

The kernels give equal numbers up to rounding, for any decay. The only case found where chunks are less
accurate than the loop is one key reflected repeatedly (beta = -2 alpha at every token): errors of 6e-6 of the
largest entry, against 8e-7.

| kernel | algorithm | "auto" selects it for |
| --- | --- | --- |
| "step" | a loop over tokens (terms.py) | up to 16 tokens; V = 1 in 512 heads or more |
| "chunk" | matrix products over chunks (chunks.py), of blocks as long as decays allow (pairs.py) | all else |

Measured for 1024 tokens with V from 1 to 16 and no correction, a scan on two levels (all chunks stepped
through side by side, then joined) was never the fastest by more than the noise: chunks were, and the loop
in 1536 heads with V = 1, where steps are large and matrices thin (0.13 s to 0.21 s).

Computed in float32, or in float64 if a token is float64. Matrix products of a GPU must not be rounded to
TF32.

Axes: as in recurrence.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from .....store.errors import ConfigError
from .chunks import by_chunks
from .recurrence import Tokens, widened
from .terms import Kernel, Terms, step_through

Readout = Literal["after", "before"]
Choice = Literal["auto", "step", "chunk"]

_FEW = 16
"""Tokens up to which the loop is as fast as chunks."""
_MANY = 512
"""B * H from which the loop is faster than chunks if V = 1."""


@dataclass(frozen=True, eq=False)
class LinearRecurrence:
    """A linear recurrence: a state with a decay, a rank-one correction and an outer product written at each
    token.

    Its inputs, each [B, H, T, width]: "q" and "k" (K), "v" (V); "log_decay" (K, or 1 for one per head), the
    natural logarithm of the decay factor, down to -inf; optionally "alpha" and "beta" (K), and "write" (1), a
    factor of what the token writes into the state.

    Raises:
        ConfigError: a bonus with readout "after", or none with "before".
    """

    readout: Readout
    """"after": a token reads the state after its own write; "before": the state before it, and its own value
    through the bonus."""
    bonus: Tensor | None = None
    """Vector u [H, K] by which a token reads its own value, sum(q u k) v, with readout "before"; None with
    readout "after"."""
    kernel: Choice = "auto"
    """Algorithm: "step", a loop over tokens; "chunk", matrix products over chunks; "auto" for the faster
    one."""

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("readout", self.readout, get_args(Readout)),
            ("kernel", self.kernel, get_args(Choice)),
        ):
            if value not in allowed:
                raise ConfigError(
                    f"expected {name} of a LinearRecurrence to be one of {', '.join(allowed)}, found "
                    f"{value!r}"
                )
        if self.readout == "before" and self.bonus is None:
            raise ConfigError(
                "expected a LinearRecurrence with readout 'before' to have a bonus, found none; give zeros "
                "if no token reads its own value"
            )
        if self.readout == "after" and self.bonus is not None:
            raise ConfigError(
                "expected a LinearRecurrence with readout 'after' to have no bonus, found one; leave it out, "
                "or use readout 'before'"
            )

    def __call__(self, tokens: Tokens, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """What each token reads, [B, H, T, V], and the state after the last token, [B, H, K, V]. state:
        before the first token, of the same shape; None for zeros."""
        tokens = widened(tokens)
        terms = self._terms(tokens)
        if state is None:
            state = terms.keys.new_zeros(*terms.keys.shape[:2], terms.keys.shape[-1], terms.values.shape[-1])
        read, state = self._kernel(terms)(terms, state.to(terms.keys.dtype))
        return torch.addcmul(read, self._own_weight(tokens), terms.values), state

    def read(self, tokens: Tokens, before: Tensor, after: Tensor) -> Tensor:
        """Output of one token (T = 1) from given states, [B, H, 1, V].

        Arguments:
            tokens: inputs by name, each [B, H, 1, width].
            before: state before the token, [B, H, K, V]; read only with readout "before".
            after: state after the token, [B, H, K, V]; read only with readout "after".
        """
        tokens = widened(tokens)
        if self.bonus is None:
            return tokens["q"] @ after.to(tokens["q"].dtype)
        read = tokens["q"] @ before.to(tokens["q"].dtype)
        return torch.addcmul(read, self._own_weight(tokens), tokens["v"])

    def weights(self, tokens: Tokens, *, start: int = 0, stop: int | None = None) -> Tensor:
        """Effective attention alpha [B, H, T, stop - start], signed: the weight of each source's value in
        what each query reads, from an empty state.

        It includes the factors "write"; the diagonal includes the bonus, without "write".

        Arguments:
            tokens: inputs by name, each [B, H, T, width].
            start: first source.
            stop: end of the sources, exclusive; None for all sources from `start` on.
        """
        length = tokens["k"].shape[2]
        begin, end, _ = slice(start, stop).indices(length)
        later = {name: x[:, :, begin:] for name, x in tokens.items()}
        # With one-hot values per source, what a query reads is its weight of each source.
        one_hot = torch.eye(length - begin, max(end - begin, 0), device=tokens["k"].device)
        later["v"] = one_hot.expand(*tokens["k"].shape[:2], -1, -1).to(tokens["v"].dtype)
        alpha, _ = self(later, None)
        # Queries before the first source have weight 0: filled in, not computed.
        return F.pad(alpha, (0, 0, begin, 0))

    def _terms(self, tokens: Tokens) -> Terms:
        """Inputs for both kernels, arranged so that each query reads the state before its token."""
        queries, beta = tokens["q"], tokens.get("beta")
        correction = None if beta is None else (tokens["alpha"], beta)
        if self.bonus is None:
            # q^T S_t in terms of S_{t-1}: decay here, correction below, the own write in `_own_weight`.
            queries = queries * tokens["log_decay"].exp()
            if correction is not None:
                alpha, beta = correction
                queries = torch.addcmul(queries, (tokens["q"] * beta).sum(-1, keepdim=True), alpha)
        keys = tokens["k"] * tokens["write"] if "write" in tokens else tokens["k"]
        return Terms(queries, keys, tokens["v"], tokens["log_decay"], correction)

    def _own_weight(self, tokens: Tokens) -> Tensor:
        """Weight with which each token reads its own value, [B, H, T, 1]."""
        if self.bonus is not None:
            bonus = self.bonus.to(tokens["q"].dtype).unsqueeze(1)
            return (tokens["q"] * bonus * tokens["k"]).sum(-1, keepdim=True)
        weight = (tokens["q"] * tokens["k"]).sum(-1, keepdim=True)
        return weight * tokens["write"] if "write" in tokens else weight

    def _kernel(self, terms: Terms) -> Kernel:
        """Algorithm for these inputs: the chosen kernel, or with "auto" the kernel measured as faster."""
        batch, heads, length, width = terms.values.shape
        if self.kernel == "auto":
            by_steps = length <= _FEW or (width == 1 and batch * heads >= _MANY)
        else:
            # Without tokens there are no chunks to stack.
            by_steps = self.kernel == "step" or not length
        return step_through if by_steps else by_chunks
