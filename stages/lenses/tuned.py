"""Fit of the tuned lens: an affine map per layer that carries a residual stream to the last layer.

Belrose et al. 2023, "Eliciting Latent Predictions from Transformers with the Tuned Lens". With h the stream
after a layer, the lens decodes

    h + A h + b

by the model's final norm and unembedding, where A and b minimise KL(model || lens), averaged over tokens.
Training starts at A = 0 and b = 0, the logit lens. Every layer is trained for itself, on stored streams: no
model runs.

A lens is a dataset of the form of jacobian.py: `jacobian` is 1 + A, the derivative of the map, and `bias` is
b. So whatever reads a Jacobian lens reads a tuned one: `transported`, `fitted_lens`, `lens_vectors`.

Optimisation: Adam on batches of shuffled tokens, with a learning rate that falls linearly to 0. Streams are
centred, and b is in units of their typical size, because they lie far from 0 and grow with the layer; both
are folded into b in the end. Logits [token, vocab] exist for few tokens at a time, and gradients are summed
over a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...pipeline import Output, stage
from ...store.arrays import Array, as_count, as_number
from ...store.errors import ConfigError, ShapeError
from ..corpus.token_blocks import read_rows, token_ranges
from ..logits.readout import require_linear
from ..training_data.order import Order

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

__all__ = ["TUNED", "tuned_lens_fit"]

TUNED = {
    "jacobian": Output(("layer", "target_hidden", "hidden"), "1", "matrix of the map, 1 + A"),
    "bias": Output(("layer", "target_hidden"), "activation", "offset of the map, b"),
}
"""Arrays of a tuned lens, as trained or as read from a file."""
LOGIT_BYTES = 1 << 25
"""Bytes of float32 logits that exist at once, 32 MiB; the gradient needs about four times as many."""
WINDOW_BYTES = 1 << 26
"""Bytes of float32 states of one layer that are in memory and shuffled together, 64 MiB."""
BLOCK = 256
"""Number of neighbouring tokens that enter a window together."""


@dataclass(frozen=True)
class _Settings:
    """Settings of a training, checked."""

    steps: int
    """Number of steps of the optimiser."""
    batch: int
    """Number of tokens per step."""
    rate: float
    """Learning rate of the first step."""
    seed: int
    """Seed of the order of tokens."""

    def __post_init__(self) -> None:
        as_count(self.steps, "steps")
        as_count(self.batch, "batch")
        if not 0 < as_number(self.rate, "rate") < float("inf"):
            raise ConfigError(f"expected rate, a learning rate, above 0 and finite, found {self.rate}")


@stage(
    version=1,
    inputs={"resid_post": ("layer", "token", "hidden"), "final": None, "readout": None},
    outputs={
        **TUNED,
        "loss": Output(("layer", "step"), "nats", "KL(model || lens) on the batch of each step, before it"),
    },
    cells="layer",
    memory=1.0,
)
def tuned_lens_fit(
    resid_post: xr.DataArray,
    final: xr.Dataset,
    readout: xr.Dataset,
    *,
    steps: int = 250,
    batch: int = 1024,
    rate: float = 1e-3,
    seed: int = 0,
) -> xr.Dataset:
    """Train a tuned lens on stored streams, each layer for itself: a killed fit keeps its finished layers.

    Arguments:
        resid_post: Residual stream after layers below the last, [layer, token, hidden], lazy or not.
        final: Dataset whose resid_post, [layer, token, hidden], has the last layer of the same tokens.
        readout: Final norm and unembedding of the model, see stages/logits/readout.py.
        steps: Number of steps of the optimiser.
        batch: Number of tokens per step; tokens are used again after all have been used.
        rate: Learning rate of the first step.
        seed: Seed of the order of tokens.

    Returns:
        jacobian float32 [layer, target_hidden, hidden], bias float32 [layer, target_hidden], loss float32
        [layer, step]. Attribute target_layer: the last layer.

    Raises:
        ShapeError: States and readout do not match, or logits are no linear map of the normalised stream.
        ConfigError: A setting is out of range, or the loss is not finite.
    """
    import xarray as xr

    settings = _Settings(steps, batch, rate, seed)
    require_linear(readout)
    target = _last(resid_post, final, readout)
    last, layers = int(target["layer"]), resid_post["layer"].values.tolist()
    log_probabilities = _decoder(readout)
    fits = [_fit(resid_post.isel(layer=i), target, log_probabilities, settings) for i in range(len(layers))]
    outputs = tuned_lens_fit.outputs
    data = {name: output.variable(np.stack([fit[name] for fit in fits])) for name, output in outputs.items()}
    return xr.Dataset(data, {"layer": layers}, {"target_layer": last})


def _last(resid_post: xr.DataArray, final: xr.Dataset, readout: xr.Dataset) -> xr.DataArray:
    """Stream after the last layer, [token, hidden]; ShapeError unless it belongs to the other streams."""
    target = final.get("resid_post")
    if target is None or "layer" not in target.coords or not target.sizes["layer"]:
        raise ShapeError(
            "tuned_lens_fit: expected final with the variable resid_post of the last layer, found "
            f"{', '.join(map(str, final.data_vars)) or 'nothing'}; capture resid_post of the last layer"
        )
    target = target.isel(layer=-1)
    last, layers = int(target["layer"]), resid_post["layer"].values.tolist()
    if not layers or max(layers) >= last:
        raise ShapeError(
            f"tuned_lens_fit: expected streams of layers below the last one, {last}, found layers {layers}; "
            f"capture resid_post of layers up to {last - 1}"
        )
    sizes = [(array.sizes["token"], array.sizes["hidden"]) for array in (resid_post, target)]
    if sizes[0] != sizes[1] or sizes[0][1] != readout.sizes["hidden"]:
        raise ShapeError(
            f"tuned_lens_fit: expected streams of the same tokens, and of {readout.sizes['hidden']} hidden "
            f"dimensions as the readout has, found [token, hidden] = {sizes[0]} and {sizes[1]}; take all of "
            "them from one run"
        )
    return target


def _decoder(readout: xr.Dataset) -> Callable[[Tensor], Tensor]:
    """Differentiable function from streams [token, hidden] to log-probabilities [token, vocab].

    Arguments:
        readout: A readout without head transform.
    """
    import torch
    from torch.nn import functional

    def tensor(name: str, *dims: str) -> Tensor | None:
        if name not in readout:
            return None
        return torch.as_tensor(readout[name].transpose(*dims).values.astype(np.float32))

    unembed, unembed_bias = tensor("unembed", "vocab", "hidden"), tensor("unembed_bias", "vocab")
    gain, norm_bias = tensor("norm_weight", "hidden"), tensor("norm_bias", "hidden")
    assert unembed is not None
    norm, eps, cap = readout.attrs["norm"], readout.attrs["eps"], readout.attrs.get("soft_cap", 0.0)
    shape = (unembed.shape[1],)

    def log_probabilities(x: Tensor) -> Tensor:
        if norm == "layer":
            x = functional.layer_norm(x, shape, gain, norm_bias, eps)
        elif norm == "rms":
            x = functional.rms_norm(x, shape, gain, eps)
            x = x if norm_bias is None else x + norm_bias
        logits = functional.linear(x, unembed, unembed_bias)
        logits = cap * torch.tanh(logits / cap) if cap else logits
        return logits.log_softmax(-1)

    return log_probabilities


def _fit(
    states: xr.DataArray,
    target: xr.DataArray,
    log_probabilities: Callable[[Tensor], Tensor],
    settings: _Settings,
) -> dict[str, Array]:
    """Train the map of one layer.

    Arguments:
        states: Stream after the layer, [token, hidden].
        target: Stream after the last layer, [token, hidden].
        log_probabilities: Decoder of the model.
        settings: Settings of the training.

    Returns:
        jacobian, bias and loss of the layer.
    """
    import torch

    width = states.sizes["hidden"]
    mean = sum(rows.sum(axis=0, dtype=np.float64) for rows in _ranges(states)) / states.sizes["token"]
    # The median, as the first tokens of prompts have norms that are many times larger in some models.
    distance = np.concatenate([np.linalg.norm(rows - mean, axis=1) for rows in _ranges(states)])
    scale = float(np.median(distance)) / width**0.5 or 1.0
    centre = torch.as_tensor(mean.astype(np.float32))
    matrix = torch.zeros(width, width, requires_grad=True)
    offset = torch.zeros(width, requires_grad=True)
    optimiser = torch.optim.Adam([matrix, offset], lr=settings.rate)
    losses = np.zeros(settings.steps, np.float32)
    with torch.no_grad():
        n_vocab = log_probabilities(centre[None]).shape[1]
    at_once = max(1, LOGIT_BYTES // (4 * n_vocab))
    step, missing = 0, settings.batch
    for window in _windows(states, target, settings):
        taken = 0
        while taken < len(window[0]):
            end = taken + min(at_once, missing)
            x, y = (torch.as_tensor(rows[taken:end]) for rows in window)
            with torch.no_grad():
                wanted = log_probabilities(y)
            decoded = log_probabilities(x + (x - centre) @ matrix.T + scale * offset)
            kl = (wanted.exp() * (wanted - decoded)).sum() / settings.batch
            kl.backward()
            losses[step] += float(kl.detach())
            taken, missing = taken + len(x), missing - len(x)
            if missing:
                continue
            if not np.isfinite(losses[step]):
                raise ConfigError(
                    f"the loss of step {step} of the tuned lens is infinite or NaN; train with a rate below "
                    f"{settings.rate:g}, and on finite states"
                )
            optimiser.param_groups[0]["lr"] = settings.rate * (1 - step / settings.steps)
            optimiser.step()
            optimiser.zero_grad()
            step, missing = step + 1, settings.batch
    with torch.no_grad():
        bias = scale * offset - matrix @ centre
        jacobian = matrix + torch.eye(width)
    return {"jacobian": jacobian.numpy(), "bias": bias.numpy(), "loss": losses}


def _ranges(states: xr.DataArray) -> Iterator[Array]:
    """Yield all rows of a stream [token, hidden] in order, float32, a range of tokens at a time."""
    for tokens in token_ranges(states, states.sizes["hidden"]):
        yield read_rows(states, tokens, np.arange(tokens.stop - tokens.start))


def _windows(
    states: xr.DataArray, target: xr.DataArray, settings: _Settings
) -> Iterator[tuple[Array, Array]]:
    """Yield shuffled rows of both streams, float32 [row, hidden] each, a window at a time; as many in all as
    the training takes.

    Arguments:
        states: Stream after a layer, [token, hidden].
        target: Stream after the last layer, [token, hidden].
        settings: Number and order of the rows.
    """
    n_tokens, width = states.sizes["token"], states.sizes["hidden"]
    starts = np.arange(0, n_tokens, BLOCK)
    counts = np.minimum(starts + BLOCK, n_tokens) - starts
    order = Order(counts, max(1, WINDOW_BYTES // (4 * width * BLOCK)), settings.seed)
    for piece in order.pieces(0, settings.steps * settings.batch):
        blocks = [
            (slice(int(starts[n]), int(starts[n] + counts[n])), np.arange(counts[n]))
            for n in order.blocks(piece.epoch, piece.window)
        ]
        n_rows = sum(len(rows) for _, rows in blocks)
        selected = order.permutation(piece.epoch, piece.window, n_rows)[piece.start : piece.stop]
        first, second = (
            np.concatenate([read_rows(array, *block) for block in blocks])[selected]
            for array in (states, target)
        )
        yield first, second
