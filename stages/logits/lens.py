"""Logit lens: what each layer of the residual stream would predict if it were the last.

Idea (nostalgebraist 2020, "interpreting GPT: the logit lens"): apply the model's own final norm and
unembedding to the residual stream after every layer. The norm's statistics are recomputed for every state,
and a final soft cap (Gemma 2) is applied, so that the last layer gives exactly the model's own distribution.

Memory: tokens are processed in blocks; logits [token, vocab] exist for one block of one layer and of the last
layer. The unembedding is in memory once, as float32. Needs no torch.

Axes: layer, token (or any one other name for the axis of states), rank (0 = most likely), vocab, hidden.
Units: log-probabilities, entropy and KL in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...pipeline import Output, stage
from ...store.arrays import Array
from ...store.errors import ShapeError
from .ranking import top_columns

if TYPE_CHECKING:
    import xarray as xr

__all__ = [
    "before_head",
    "final_norm",
    "first_appearance",
    "format_probability",
    "format_text",
    "format_token",
    "join_tokens",
    "logit_lens",
    "logits",
    "next_tokens",
]


BLOCK_BYTES = 1 << 25
"""Bytes of logits per block, 32 MiB; about four blocks are in memory at a time."""


def join_tokens(parts: Sequence[xr.Dataset]) -> xr.Dataset:
    """Join the results of consecutive ranges of tokens along the token axis."""
    import xarray as xr

    # Variables without a token axis are equal in all parts; "minimal" keeps one copy instead of adding the
    # axis.
    return xr.concat(parts, "token", data_vars="minimal", coords="minimal", compat="override", join="exact")


@stage(
    version=1,
    inputs={"resid_post": ("layer", "token", "hidden"), "targets": ("token",), "readout": None},
    outputs={
        "top_id": Output(("layer", "token", "rank"), "1", "most likely tokens"),
        "top_logprob": Output(
            ("layer", "token", "rank"), "nats", "log-probabilities of the most likely tokens"
        ),
        "entropy": Output(("layer", "token"), "nats", "entropy of the distribution"),
        "kl": Output(("layer", "token"), "nats", "KL(last layer || this layer)"),
        "target_id": Output(("token",), "1", "token whose probability is tracked, -1 for none"),
        "target_logprob": Output(("layer", "token"), "nats", "log-probability of the target"),
        "target_rank": Output(("layer", "token"), "1", "rank of the target, 1 = most likely, 0 = no target"),
    },
    cells="segment",
    combine=join_tokens,
)
def logit_lens(
    resid_post: xr.DataArray,
    targets: xr.DataArray | None,
    readout: xr.Dataset,
    *,
    top_k: int = 10,
    soft_cap: bool = True,
) -> xr.Dataset:
    """Next-token distribution that final norm and unembedding read from every state.

    Arguments:
        resid_post: Residual stream after each layer, [layer, token, hidden], any float dtype, lazy or not;
            its last layer counts as the final one.
        targets: Token ids int [token] whose probability is tracked, -1 for none; None for no targets.
        readout: Final norm and unembedding of the model, see stages/logits/readout.py.
        top_k: Number of most likely tokens.
        soft_cap: Whether to apply the model's final soft cap, if it has one.

    Returns:
        Dataset with the coordinates of resid_post: top_id int32, top_logprob float32 [layer, token, rank]:
        most likely first, ties by smaller id; entropy float32 [layer, token]; kl float32 [layer, token]:
        KL(final || this layer), 0 at the last layer; target_id int32 [token]; target_logprob float32,
        target_rank int32 [layer, token]: rank 1 is the most likely token, 0 (and NaN) without a target.

    Raises:
        ShapeError: States and readout, or states and targets, do not match.
    """
    axis = _sample_axis(resid_post, readout)
    states = resid_post.transpose("layer", axis, "hidden")
    n_layers, n_tokens, vocab = states.sizes["layer"], states.sizes[axis], readout.sizes["vocab"]
    target_ids = _targets(targets, axis, n_tokens, vocab)
    k = min(top_k, vocab)
    results = {
        "top_id": np.empty((n_layers, n_tokens, k), np.int32),
        "top_logprob": np.empty((n_layers, n_tokens, k), np.float32),
        "entropy": np.empty((n_layers, n_tokens), np.float32),
        "kl": np.empty((n_layers, n_tokens), np.float32),
        "target_logprob": np.empty((n_layers, n_tokens), np.float32),
        "target_rank": np.empty((n_layers, n_tokens), np.int32),
    }
    head = _Head(readout, soft_cap)
    step = max(1, BLOCK_BYTES // (4 * vocab))
    for start in range(0, n_tokens, step):
        token_slice = slice(start, start + step)
        block = states.isel({axis: token_slice}).values
        # Per block, because KL compares every layer with the last one.
        final = head.log_probabilities(block[-1])
        for layer in range(n_layers):
            logprobs = final if layer == n_layers - 1 else head.log_probabilities(block[layer])
            for name, values in _lens_statistics(logprobs, final, target_ids[token_slice], k).items():
                results[name][layer, token_slice] = values
    return _labelled(results, target_ids, states, axis)


def logits(states: xr.DataArray, readout: xr.Dataset, *, soft_cap: bool = True) -> xr.DataArray:
    """Logits of states of the residual stream, all in memory at once: for few states.

    Arguments:
        states: [..., hidden].
        readout: Final norm and unembedding of the model, see stages/logits/readout.py.
        soft_cap: Whether to apply the model's final soft cap, if it has one.

    Returns:
        float32 [..., vocab].
    """
    import xarray as xr

    states = states.transpose(..., "hidden")
    rows = states.values.reshape(-1, states.sizes["hidden"])
    values = _Head(readout, soft_cap).logits(rows).reshape(*states.shape[:-1], readout.sizes["vocab"])
    coords = {name: c for name, c in states.coords.items() if "hidden" not in c.dims}
    return xr.DataArray(values, dims=(*states.dims[:-1], "vocab"), coords=coords, name="logits")


def final_norm(states: Array, readout: xr.Dataset) -> Array:
    """States after the final norm, float32 [..., hidden]; the norm's statistics are those of each state.

    Arguments:
        states: [..., hidden].
        readout: Its attrs have norm and eps. "rms": x / sqrt(mean(x^2) + eps) * weight. "layer": the mean is
            subtracted first, and a bias, if there is one, added last. "none": states are unchanged.
    """
    return _normed(states, readout, "norm", readout.attrs["eps"])


def before_head(states: Array, readout: xr.Dataset) -> Array:
    """Input of the LM head: states after the final norm, and after the transform of an encoder.

    The transform is a dense layer, an activation and a norm (Devlin et al. 2019, "BERT").

    Arguments:
        states: [..., hidden].
        readout: See stages/logits/readout.py.

    Returns:
        float32 [..., hidden], or [..., embedding] after a transform.
    """
    states = final_norm(states, readout)
    if "transform_weight" not in readout:
        return states
    weight = readout["transform_weight"].transpose("embedding", "hidden").values.astype(np.float32)
    states = states @ weight.T
    if "transform_bias" in readout:
        states += readout["transform_bias"].values.astype(np.float32)
    act = ACTIVATIONS[readout.attrs["transform_activation"]]
    return _normed(act(states), readout, "transform_norm", readout.attrs["transform_eps"])


def _normed(states: Array, readout: xr.Dataset, name: str, eps: float) -> Array:
    """Apply one of the norms of a readout to states, float32.

    Arguments:
        states: [..., width].
        readout: The readout.
        name: "norm" for the final norm, "transform_norm" for that of an encoder's transform.
        eps: Epsilon of the norm.
    """
    states, norm = np.asarray(states, np.float32), readout.attrs[name]
    if norm == "none":
        return states
    if norm not in ("rms", "layer"):
        raise ShapeError(f"expected the norm of a readout to be 'rms', 'layer' or 'none', found {norm!r}")
    if norm == "layer":
        states = states - states.mean(axis=-1, keepdims=True)
    # eps inside the root, as in all supported families.
    scale = np.sqrt(np.mean(np.square(states), axis=-1, keepdims=True) + np.float32(eps))
    states = states / scale * readout[f"{name}_weight"].values.astype(np.float32)
    if f"{name}_bias" in readout:
        states += readout[f"{name}_bias"].values.astype(np.float32)
    return states


def _gelu(x: Array) -> Array:
    """Exact GELU: x times the normal CDF of x (Hendrycks and Gimpel, GELUs, 2016)."""
    normal_cdf = np.asarray(_ERF(x / math.sqrt(2)), np.float32)
    activated: Array = x * np.float32(0.5) * (1 + normal_cdf)
    return activated


def _gelu_tanh(x: Array) -> Array:
    """Tanh approximation of GELU (Hendrycks and Gimpel, GELUs, 2016, section 2)."""
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)
    activated: Array = np.float32(0.5) * x * (1 + np.tanh(inner))
    return activated


_ERF = np.frompyfunc(math.erf, 1, 1)
"""erf for arrays, which numpy lacks; costs a tenth of the unembedding."""
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    # exp(-x) overflows to inf for very negative x, and x / inf is the right limit, -0.
    "silu": lambda x: x / (1 + np.exp(-x)),
}
"""Activations of head transforms, by their names in architectures/."""


def next_tokens(token_id: Array, prompt: Array) -> npt.NDArray[np.int32]:
    """The token that follows each token in its own prompt, int32 [token]; -1 for the last one of a prompt.

    Arguments:
        token_id: int [token], packed, prompts end to end.
        prompt: Prompt index of each token, int [token].

    >>> next_tokens(np.array([5, 6, 7, 8]), np.array([0, 0, 1, 1])).tolist()
    [6, -1, 8, -1]
    """
    token_id, prompt = np.asarray(token_id), np.asarray(prompt)
    following = np.full(len(token_id), -1, np.int32)
    # The first token of the next prompt does not follow the last one of this prompt.
    is_inside = prompt[1:] == prompt[:-1]
    following[:-1][is_inside] = token_id[1:][is_inside]
    return following


def first_appearance(top_id: xr.DataArray, token_id: int, k: int = 10) -> int | None:
    """First layer with `token_id` among its `k` most likely tokens; None if there is none.

    Compared by id, so that " Parisian" does not count as " Paris". A word of several tokens is tracked by its
    first token.

    Arguments:
        top_id: [layer, rank], the lens at one token.
        token_id: Token to look for.
        k: Number of ranks to look at.
    """
    if top_id.dims != ("layer", "rank"):
        raise ShapeError(
            f"expected top_id of a single token, with the dims (layer, rank), found the dims {top_id.dims}; "
            "select a token with isel(token=…) first"
        )
    hits = np.flatnonzero((top_id.isel(rank=slice(k)).values == token_id).any(axis=1))
    return int(top_id["layer"].values[hits[0]]) if len(hits) else None


def format_probability(p: float) -> str:
    """Format a probability as a short percentage.

    >>> [format_probability(p) for p in (0.4093, 0.00031, 0.000012)]
    ['40.9%', '0.031%', '1.2e-03%']
    """
    percent = 100 * p
    if percent >= 1:
        return f"{percent:.1f}%"
    return f"{percent:.3f}%" if percent >= 0.01 else f"{percent:.1e}%"


def format_token(token: str) -> str:
    """Format a token for tables and figures: whitespace visible, a space as "␣".

    >>> format_token(" a\\n")
    '␣a⏎'
    """
    return format_text(token).replace(" ", "␣")


def format_text(text: str) -> str:
    """Format a text on one line: newline and tab visible, other unprintable characters escaped, spaces kept.

    >>> format_text("a b\\n\\x0b")
    'a b⏎\\\\x0b'
    """
    signs = {"\n": "⏎", "\t": "⇥"}
    return "".join(
        signs.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode()) for c in text
    )


class _Head:
    """Computes logits from states: final norm, unembedding and soft cap, with the unembedding in memory."""

    def __init__(self, readout: xr.Dataset, soft_cap: bool) -> None:
        """Read the unembedding of a readout; `soft_cap` says whether its soft cap is applied."""
        self.readout = readout
        read = "embedding" if "transform_weight" in readout else "hidden"
        # Read once: lazily it would be read from disk for every block.
        self.unembed = np.asarray(readout["unembed"].transpose("vocab", read).values, np.float32)
        self.bias = readout["unembed_bias"].values.astype(np.float32) if "unembed_bias" in readout else None
        self.cap = np.float32(readout.attrs.get("soft_cap", 0.0) if soft_cap else 0.0)

    def logits(self, states: Array) -> Array:
        """Logits float32 [row, vocab] of states [row, hidden]."""
        values: Array = before_head(states, self.readout) @ self.unembed.T
        if self.bias is not None:
            values += self.bias
        # In place: logits of a block are the largest array of the lens.
        if self.cap:
            values /= self.cap
            np.tanh(values, out=values)
            values *= self.cap
        return values

    def log_probabilities(self, states: Array) -> Array:
        """Log-softmax of the logits, [row, vocab], in nats."""
        values = self.logits(states)
        # Log-sum-exp with the maximum subtracted, so that exp cannot overflow; in place, as blocks are large.
        values -= values.max(axis=1, keepdims=True)
        values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
        return values


def _lens_statistics(logprobs: Array, final: Array, targets: Array, k: int) -> dict[str, Array]:
    """The outputs of `logit_lens` for some tokens at one layer: name -> [row] or [row, rank].

    Arguments:
        logprobs: Log-probabilities read from this layer, [row, vocab].
        final: Log-probabilities of the last layer, [row, vocab]; the same object for the last layer itself.
        targets: Ids of the tracked tokens, -1 for none, [row].
        k: Number of most likely tokens.
    """
    probability = np.exp(logprobs)
    ids = top_columns(logprobs, k)
    statistics = {
        "top_id": ids,
        "top_logprob": np.take_along_axis(logprobs, ids, axis=1),
        "entropy": -np.einsum("rv,rv->r", probability, logprobs),
        "kl": np.zeros(len(logprobs), np.float32),
    }
    if logprobs is not final:
        np.exp(final, out=probability)
        # Rounding may give -1e-8 where both agree, but KL is never negative.
        gap = np.einsum("rv,rv->r", probability, final) - np.einsum("rv,rv->r", probability, logprobs)
        statistics["kl"] = np.maximum(gap, 0)
    has_target = targets >= 0
    # Index 0 stands in for missing targets; its values are replaced below.
    logprob = np.take_along_axis(logprobs, np.where(has_target, targets, 0)[:, None], axis=1)
    statistics["target_logprob"] = np.where(has_target, logprob[:, 0], np.nan)
    # Strictly larger only: tokens with equal logits share the better rank.
    statistics["target_rank"] = np.where(has_target, 1 + (logprobs > logprob).sum(axis=1), 0)
    return statistics


def _sample_axis(states: xr.DataArray, readout: xr.Dataset) -> str:
    """Name of the axis along which states lie, usually "token"; ShapeError unless states fit the readout."""
    sample_dims = [str(dim) for dim in states.dims if dim not in ("layer", "hidden")]
    if states.ndim != 3 or len(sample_dims) != 1:
        raise ShapeError(
            f"expected resid_post with the dims (layer, token, hidden), found {states.dims}; stack prompts "
            "into one token axis, and select a single layer as a list: isel(layer=[0])"
        )
    if states.sizes["hidden"] != readout.sizes["hidden"]:
        raise ShapeError(
            f"the readout is for states of width {readout.sizes['hidden']}, found states of width "
            f"{states.sizes['hidden']}; pass states and readout of the same model"
        )
    return sample_dims[0]


def _targets(targets: xr.DataArray | None, axis: str, n_tokens: int, vocab: int) -> npt.NDArray[np.int32]:
    """Ids of the tracked tokens, int32 [token], -1 for none; ShapeError unless they fit states and
    vocabulary."""
    if targets is None:
        return np.full(n_tokens, -1, np.int32)
    values = np.asarray(targets.values, np.int64)
    if targets.dims != (axis,) or len(values) != n_tokens:
        raise ShapeError(
            f"expected a target token for each of {n_tokens} states, with the dim {axis}, found an array of "
            f"shape {targets.shape} with the dims {targets.dims}"
        )
    if n_tokens and (values.max() >= vocab or values.min() < -1):
        raise ShapeError(
            f"expected target token ids from -1 (none) to {vocab - 1}, the last one of the vocabulary, found "
            f"{values.min()} to {values.max()}"
        )
    return values.astype(np.int32)


def _labelled(results: dict[str, Array], targets: Array, states: xr.DataArray, axis: str) -> xr.Dataset:
    """Outputs of `logit_lens` as a dataset with coordinates of the states.

    Arguments:
        results: Name -> values.
        targets: Ids of the tracked tokens, [token].
        states: The states.
        axis: Name of their token axis.
    """
    import xarray as xr

    dims = {"top_id": ("layer", axis, "rank"), "top_logprob": ("layer", axis, "rank")}
    coords = {name: c for name, c in states.coords.items() if "hidden" not in c.dims}
    data: dict[str, Any] = {
        name: (dims.get(name, ("layer", axis)), values) for name, values in results.items()
    }
    data["target_id"] = ((axis,), targets)
    return xr.Dataset(data, coords=coords)
