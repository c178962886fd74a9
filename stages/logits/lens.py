"""Logit lens: what each layer of the residual stream would predict if it were the last.

Border: labelled states and a readout dataset (final norm, unembedding, and what stands between them in
encoders); knows no model and never imports torch.

Idea (nostalgebraist 2020, "interpreting GPT: the logit lens"): apply the model's own final norm and
unembedding to the residual stream after every layer. The statistics of the norm are recomputed for every
state, and the final soft cap of the models that have one (Gemma 2) is applied, so that the last layer gives
exactly the model's own distribution.

Memory: states are taken in blocks of tokens; of the [token, vocab] logits only one block of one layer, and of
the last layer, exist at a time. The unembedding itself is held once, as float32.

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
    "logit_lens",
    "logits",
    "next_tokens",
]


BLOCK_BYTES = 1 << 25  # of logits; about four such blocks exist at a time


def join_tokens(parts: Sequence[xr.Dataset]) -> xr.Dataset:
    """The lens of consecutive token ranges as one."""
    import xarray as xr

    return xr.concat(parts, "token", data_vars="all", coords="minimal", compat="override", join="exact")


@stage(
    version=1,
    inputs={"resid_post": ("layer", "token", "hidden"), "targets": ("token",), "readout": None},
    outputs={
        "top_id": Output(("layer", "token", "rank"), "1", "most likely tokens"),
        "top_logprob": Output(("layer", "token", "rank"), "nats", "their log-probabilities"),
        "entropy": Output(("layer", "token"), "nats", "entropy of the distribution"),
        "kl": Output(("layer", "token"), "nats", "KL(last layer || this layer)"),
        "target_id": Output(("token",), "1", "token followed, -1 for none"),
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
    """Read a next-token distribution off every state.

    resid_post: [layer, token, hidden], any float dtype, lazy or not; the last layer given is "final" below.
    targets: int [token], the token id whose probability is followed, -1 where there is none; None for none.
    readout: as `stages.readout` describes it.  soft_cap: apply the model's final soft cap, if it has one.
    Returns, with the coordinates of resid_post:
      top_id int32, top_logprob float32 [layer, token, rank]: most likely first, equal ones by smaller id;
      entropy float32 [layer, token];
      kl float32 [layer, token]: KL(final || this layer), 0 at the last layer;
      target_id int32 [token]; target_logprob float32, target_rank int32 [layer, token]: rank 1 is the most
      likely token, 0 (and NaN) where there is no target.
    Raises ShapeError when states and readout, or states and targets, do not fit.
    """
    axis = _sample_axis(resid_post, readout)
    states = resid_post.transpose("layer", axis, "hidden")
    n_layers, n_tokens, vocab = states.sizes["layer"], states.sizes[axis], readout.sizes["vocab"]
    wanted = _targets(targets, axis, n_tokens, vocab)
    k = min(top_k, vocab)
    found = {
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
        here = slice(start, start + step)
        block = states.isel({axis: here}).values
        final = head.log_probabilities(block[-1])
        for layer in range(n_layers):
            own = final if layer == n_layers - 1 else head.log_probabilities(block[layer])
            for name, values in _read(own, final, wanted[here], k).items():
                found[name][layer, here] = values
    return _labelled(found, wanted, states, axis)


def logits(states: xr.DataArray, readout: xr.Dataset, *, soft_cap: bool = True) -> xr.DataArray:
    """Logits [..., vocab], float32, of states [..., hidden]; for few states, as all are held at once."""
    import xarray as xr

    states = states.transpose(..., "hidden")
    rows = states.values.reshape(-1, states.sizes["hidden"])
    values = _Head(readout, soft_cap).logits(rows).reshape(*states.shape[:-1], readout.sizes["vocab"])
    coords = {name: c for name, c in states.coords.items() if "hidden" not in c.dims}
    return xr.DataArray(values, dims=(*states.dims[:-1], "vocab"), coords=coords, name="logits")


def final_norm(states: Array, readout: xr.Dataset) -> Array:
    """States [..., hidden] after the final norm, float32; its statistics are those of each state.

    readout.attrs: norm "rms", "layer" or "none", and eps. Rms: x / sqrt(mean(x^2) + eps) * weight. Layer: the
    mean is subtracted first, and a bias added last if the readout has one.
    """
    return _normed(states, readout, "norm", readout.attrs["eps"])


def before_head(states: Array, readout: xr.Dataset) -> Array:
    """What the LM head reads of states [..., hidden], float32: their final norm, and in encoders with a
    transform its dense map, activation and norm of that (Devlin et al., BERT, 2019), [..., embedding]."""
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
    """The norm of a readout with this name."""
    states, norm = np.asarray(states, np.float32), readout.attrs[name]
    if norm == "none":
        return states
    if norm not in ("rms", "layer"):
        raise ShapeError(f"expected a readout with norm 'rms', 'layer' or 'none', found {norm!r}")
    if norm == "layer":
        states = states - states.mean(axis=-1, keepdims=True)
    scale = np.sqrt(np.mean(np.square(states), axis=-1, keepdims=True) + np.float32(eps))
    states = states / scale * readout[f"{name}_weight"].values.astype(np.float32)
    if f"{name}_bias" in readout:
        states += readout[f"{name}_bias"].values.astype(np.float32)
    return states


def _gelu(x: Array) -> Array:
    """x times the share of a normal distribution below it (Hendrycks and Gimpel, GELUs, 2016)."""
    below = np.asarray(_ERF(x / math.sqrt(2)), np.float32)
    found: Array = x * np.float32(0.5) * (1 + below)
    return found


def _gelu_tanh(x: Array) -> Array:
    """Its approximation, section 2 there."""
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)
    found: Array = np.float32(0.5) * x * (1 + np.tanh(inner))
    return found


_ERF = np.frompyfunc(math.erf, 1, 1)
"""numpy has none. A tenth of what the unembedding costs."""
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "silu": lambda x: x / (1 + np.exp(-x)),
}
"""Of transforms, by their names in architectures/."""


def next_tokens(token_id: Array, prompt: Array) -> npt.NDArray[np.int32]:
    """The token that follows each token in its own prompt, int32 [token]; -1 after the last one of a prompt.

    token_id, prompt: int [token], packed, prompts end to end.

    >>> next_tokens(np.array([5, 6, 7, 8]), np.array([0, 0, 1, 1])).tolist()
    [6, -1, 8, -1]
    """
    token_id, prompt = np.asarray(token_id), np.asarray(prompt)
    following = np.full(len(token_id), -1, np.int32)
    is_inside = prompt[1:] == prompt[:-1]
    following[:-1][is_inside] = token_id[1:][is_inside]
    return following


def first_appearance(top_id: xr.DataArray, token_id: int, k: int = 10) -> int | None:
    """First layer with `token_id` among its `k` most likely tokens, or None.

    top_id: [layer, rank], the lens at one token. By id, so that neither " Parisian" counts as " Paris" nor a
    token of another spelling is missed; for a word of several tokens follow its first one.
    """
    if top_id.dims != ("layer", "rank"):
        raise ShapeError(
            f"expected top_id [layer, rank] of one token, found {top_id.dims}; select a token first"
        )
    hits = np.flatnonzero((top_id.isel(rank=slice(k)).values == token_id).any(axis=1))
    return int(top_id["layer"].values[hits[0]]) if len(hits) else None


def format_probability(p: float) -> str:
    """A probability as a percentage one can read at a glance.

    >>> [format_probability(p) for p in (0.4093, 0.00031, 0.000012)]
    ['40.9%', '0.031%', '1.2e-03%']
    """
    percent = 100 * p
    if percent >= 1:
        return f"{percent:.1f}%"
    return f"{percent:.3f}%" if percent >= 0.01 else f"{percent:.1e}%"


def format_token(token: str) -> str:
    """A token as tables, figures and pages show it: its whitespace visible, a space as "␣".

    >>> format_token(" a\\n")
    '␣a⏎'
    """
    return format_text(token).replace(" ", "␣")


def format_text(text: str) -> str:
    """A text on one line: newline and tab visible, whatever else one cannot see escaped; spaces as they are.

    >>> format_text("a b\\n\\x0b")
    'a b⏎\\\\x0b'
    """
    signs = {"\n": "⏎", "\t": "⇥"}
    return "".join(
        signs.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode()) for c in text
    )


class _Head:
    """Final norm, unembedding, scale and soft cap, with the unembedding in memory once."""

    def __init__(self, readout: xr.Dataset, soft_cap: bool) -> None:
        self.readout = readout
        read = "embedding" if "transform_weight" in readout else "hidden"
        self.unembed = np.asarray(readout["unembed"].transpose("vocab", read).values, np.float32)
        self.bias = readout["unembed_bias"].values.astype(np.float32) if "unembed_bias" in readout else None
        self.scale = np.float32(readout.attrs.get("logit_scale", 1.0))
        self.cap = np.float32(readout.attrs.get("soft_cap", 0.0) if soft_cap else 0.0)

    def logits(self, states: Array) -> Array:
        """Logits [row, vocab] of states [row, hidden], float32."""
        found: Array = before_head(states, self.readout) @ self.unembed.T
        if self.bias is not None:
            found += self.bias
        if self.scale != 1:
            found *= self.scale
        if self.cap:
            found /= self.cap
            np.tanh(found, out=found)
            found *= self.cap
        return found

    def log_probabilities(self, states: Array) -> Array:
        """Log-softmax of the logits, [row, vocab], nats."""
        found = self.logits(states)
        found -= found.max(axis=1, keepdims=True)
        found -= np.log(np.exp(found).sum(axis=1, keepdims=True))
        return found


def _read(own: Array, final: Array, targets: Array, k: int) -> dict[str, Array]:
    """What is kept of one block of log-probabilities [row, vocab]."""
    probability = np.exp(own)
    ids = top_columns(own, k)
    found = {
        "top_id": ids,
        "top_logprob": np.take_along_axis(own, ids, axis=1),
        "entropy": -np.einsum("rv,rv->r", probability, own),
        "kl": np.zeros(len(own), np.float32),
    }
    if own is not final:
        np.exp(final, out=probability)
        # Rounding may leave -1e-8 where the two agree; KL is never negative.
        gap = np.einsum("rv,rv->r", probability, final) - np.einsum("rv,rv->r", probability, own)
        found["kl"] = np.maximum(gap, 0)
    is_wanted = targets >= 0
    logprob = np.take_along_axis(own, np.where(is_wanted, targets, 0)[:, None], axis=1)
    found["target_logprob"] = np.where(is_wanted, logprob[:, 0], np.nan)
    found["target_rank"] = np.where(is_wanted, 1 + (own > logprob).sum(axis=1), 0)
    return found


def _sample_axis(states: xr.DataArray, readout: xr.Dataset) -> str:
    others = [str(dim) for dim in states.dims if dim not in ("layer", "hidden")]
    if states.ndim != 3 or len(others) != 1:
        raise ShapeError(
            f"expected resid_post [layer, token, hidden], found {states.dims}; "
            "stack prompts into one token axis, and keep a single layer as a list: isel(layer=[0])"
        )
    if states.sizes["hidden"] != readout.sizes["hidden"]:
        raise ShapeError(
            f"expected states as wide as the readout ({readout.sizes['hidden']}), found hidden "
            f"{states.sizes['hidden']}; are they of the same model?"
        )
    return others[0]


def _targets(targets: xr.DataArray | None, axis: str, n_tokens: int, vocab: int) -> npt.NDArray[np.int32]:
    if targets is None:
        return np.full(n_tokens, -1, np.int32)
    values = np.asarray(targets.values, np.int64)
    if targets.dims != (axis,) or len(values) != n_tokens:
        raise ShapeError(
            f"expected one target per state, [{axis}] of {n_tokens}, found {targets.dims} of {targets.shape}"
        )
    if n_tokens and (values.max() >= vocab or values.min() < -1):
        raise ShapeError(
            f"expected target ids from -1 to {vocab - 1}, found {values.min()} to {values.max()}"
        )
    return values.astype(np.int32)


def _labelled(found: dict[str, Array], targets: Array, states: xr.DataArray, axis: str) -> xr.Dataset:
    import xarray as xr

    dims = {"top_id": ("layer", axis, "rank"), "top_logprob": ("layer", axis, "rank")}
    coords = {name: c for name, c in states.coords.items() if "hidden" not in c.dims}
    data: dict[str, Any] = {name: (dims.get(name, ("layer", axis)), values) for name, values in found.items()}
    data["target_id"] = ((axis,), targets)
    return xr.Dataset(data, coords=coords)
