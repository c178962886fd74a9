"""Effects of an intervention on the next token: measurements shared by knockout and steering experiments.

A causal effect is the difference between a run with the intervention and the run without it (Pearl 2001,
"Direct and indirect effects", for the definition; Vig et al. 2020, "Investigating gender bias in language
models using causal mediation analysis", for language models). Whether it exceeds that of other causes of
equal size is decided with a null distribution (controls.py).

A prompt may be followed by the pieces of a multi-token target. Its probability is the product over all
pieces, each conditioned on those before it, from one pass over prompt and pieces (a causal model makes
earlier positions independent of later ones). The last piece alone would be another word. Logit differences
are about the first piece, the next token of the prompt itself.

Border: logits as arrays, runs as values; loads no model and imports no torch.

Axes: vocab; piece = token of the target; rank = most changed tokens, largest change first. Units: nats (KL,
log-probability), logits; probabilities have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...pipeline import Output
from ...store.arrays import Floats, as_indices
from ...store.errors import InterventionError, PromptError
from ..forward.architectures.points import HookPoint
from ..forward.hooks.spec import HookSpec
from ..forward.hooks.wants import Logits
from .metrics import kl_divergence, log_softmax, top_changed

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture
    from ..forward.hooks.cache import HookCache
    from ..forward.models.model import Model

__all__ = ["EFFECTS", "Baseline", "baseline_run", "effect", "effects_along", "gather", "with_target"]


EFFECTS: Mapping[str, Output] = {
    "kl": Output((), "nats", "KL(baseline || changed) at the prompt's last position"),
    "logit_diff": Output((), "logits", "baseline - changed logit of the target's first piece"),
    "first_probability": Output((), "1", "probability of the target's first piece"),
    "target_logprob": Output((), "nats", "log-probability of the whole target, all its pieces"),
    "changed_id": Output(("rank",), "1", "tokens whose probability changed most"),
    "changed_baseline": Output(("rank",), "1", "probability of these tokens in the baseline"),
    "changed_other": Output(("rank",), "1", "probability of these tokens in the changed run"),
}
"""Declared outputs for one changed run; those about the target are NaN if there is no target."""
OF_BASELINE: Mapping[str, Output] = {
    "baseline_id": Output(("rank",), "1", "most likely next tokens"),
    "baseline_probability": Output(("rank",), "1", "probability of the most likely next tokens"),
    "baseline_first_probability": Output((), "1", "probability of the target's first piece"),
    "baseline_target_logprob": Output((), "nats", "log-probability of the whole target, all its pieces"),
}
"""Declared outputs for the unchanged run."""


def effects_along(*axes: str) -> dict[str, Output]:
    """Declared outputs of an experiment that makes one run for each point along `axes` (slowest first)."""
    outputs = {name: replace(output, dims=(*axes, *output.dims)) for name, output in EFFECTS.items()}
    return {**outputs, **OF_BASELINE}


@dataclass(frozen=True)
class Baseline:
    """Result of the unchanged run, with which changed runs are compared."""

    config: Architecture
    """Architecture of the model."""
    logits: Floats
    """Logits float64 [piece, vocab] that predict the target's tokens; row 0 is the prompt's last position."""
    pattern: Mapping[int, npt.NDArray[np.float32]]
    """Attention patterns float32 [head, query, key] of the requested layers, by layer."""

    @classmethod
    def sketch(cls, config: Architecture) -> Baseline:
        """Placeholder without results, from which runs can be planned without a loaded model."""
        return cls(config, np.zeros((0, 0)), {})

    def weight(self, layer: int, heads: Sequence[int] | None, edges: Sequence[tuple[int, int]]) -> Floats:
        """Attention weight averaged over some edges of a layer, float64 [head].

        Arguments:
            layer: Layer of the attention pattern.
            heads: Indices of the heads; None for all.
            edges: (query position, key position) of each edge.
        """
        return edge_weight(self.pattern[layer], heads, edges)


def baseline_run(
    model: Model, tokens: Sequence[int], target: Sequence[int], layers: Iterable[int] = ()
) -> Baseline:
    """Run a prompt, followed by its target, without intervention.

    Arguments:
        model: The model.
        tokens: Token ids of the prompt.
        target: Token ids of the target; may be empty.
        layers: Layers whose attention patterns are captured.

    Raises:
        PromptError: A token of the target is outside the vocabulary.
    """
    vocab = model.config.vocab_size
    outside = [token for token in target if token >= vocab]
    if outside:
        raise PromptError(f"expected token ids of the target from 0 to {vocab - 1}, found {outside[0]}")
    ids, want = with_target(tokens, target)
    hooks = HookSpec().capture(*(HookPoint.pattern(layer) for layer in layers))
    result = model.forward(ids, hooks, want=want)
    patterns = {layer: array(result[HookPoint.pattern(layer)][0]) for layer in layers}
    return Baseline(model.config, read_logits(result), patterns)


def edge_weight(
    pattern: npt.NDArray[Any], heads: Sequence[int] | None, edges: Sequence[tuple[int, int]]
) -> Floats:
    """Attention weight averaged over some edges, float64 [head].

    Arguments:
        pattern: Attention weights [head, query, key].
        heads: Indices of the heads; None for all.
        edges: (query position, key position) of each edge.
    """
    queries, keys = zip(*edges, strict=True)
    selected = pattern if heads is None else pattern[list(heads)]
    weights: Floats = selected[:, list(queries), list(keys)].astype(np.float64).mean(1)
    return weights


def layers_of(layers: Sequence[int] | None, n_layers: int, window: int = 1) -> list[int]:
    """First layer of each window of layers that a sweep changes together.

    Arguments:
        layers: First layers; None for all that leave room for a window.
        n_layers: Number of layers of the model.
        window: Number of layers of a window.

    Raises:
        InterventionError: A layer is out of range or named twice, there are none, or the window is invalid.
    """
    last = n_layers - window
    if not 1 <= window <= n_layers:
        raise InterventionError(
            f"expected a window from 1 to {n_layers}, the number of layers, found {window}"
        )
    starts = list(range(last + 1) if layers is None else as_indices(layers, "layers", InterventionError))
    outside = [layer for layer in starts if not 0 <= layer <= last]
    if outside or not starts or len(set(starts)) != len(starts):
        found = outside[0] if outside else starts or "none"
        raise InterventionError(
            f"expected layers from 0 to {last}, each once, found {found}"
            + (f" (a window has {window} layers)" if window > 1 else "")
        )
    return starts


def with_target(tokens: Sequence[int], target: Sequence[int]) -> tuple[tuple[int, ...], Logits]:
    """(token ids to run, logits to compute), from which the probability of the whole target can be read.

    The logits are those of the prompt's last position and of each token of the target but the last.

    Arguments:
        tokens: Token ids of the prompt.
        target: Token ids of the target; may be empty.
    """
    if not target:
        return tuple(tokens), Logits(positions=(len(tokens) - 1,))
    # The last piece predicts nothing that is read.
    ids = (*tokens, *target[:-1])
    return ids, Logits(positions=tuple(range(len(tokens) - 1, len(ids))))


def check_tokens(tokens: Sequence[int], target: Sequence[int] = ()) -> None:
    """Check token ids as far as possible without a model.

    Arguments:
        tokens: Token ids of the prompt.
        target: Token ids of the target; may be empty.

    Raises:
        PromptError: The prompt is empty, or an id is not an integer of at least 0.
    """
    if not tokens:
        raise PromptError("expected a prompt of at least one token, found none")
    for token in (*tokens, *target):
        # bool is a subclass of int: True would pass as token 1.
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise PromptError(
                f"expected token ids, integers of at least 0, found {token!r}; encode the text first"
            )


def check_target(target: Sequence[int], config: Architecture) -> None:
    """Check that the model can give the probability of a target.

    Arguments:
        target: Token ids of the target.
        config: Architecture of the model.

    Raises:
        ConfigError: The target has several tokens, and the model is bidirectional.
    """
    # With bidirectional attention, tokens behind the prompt would change the prediction at its end.
    if len(target) > 1:
        config.require_next_token()


def check_words(words: Sequence[int], vocab_size: int) -> None:
    """Check that tokens are in the vocabulary.

    Arguments:
        words: Token ids.
        vocab_size: Number of tokens in the model's vocabulary.

    Raises:
        PromptError: An id is outside the vocabulary.
    """
    outside = [word for word in words if word >= vocab_size]
    if outside:
        raise PromptError(f"expected token ids from 0 to {vocab_size - 1}, found {outside[0]}")


def array(values: Any) -> npt.NDArray[np.float32]:
    """A tensor of any dtype and device as a float32 numpy array."""
    # float(), as numpy has no bfloat16.
    converted: npt.NDArray[np.float32] = values.detach().float().cpu().numpy()
    return converted


def read_logits(result: HookCache) -> Floats:
    """Logits of one run, float64 [piece, vocab]."""
    return array(result.logits[0]).astype(np.float64)


def effect(baseline: Floats, changed: Floats, target: Sequence[int], top_k: int) -> dict[str, Any]:
    """How one changed run differs from the unchanged run: the values of `EFFECTS` by name.

    Arguments:
        baseline: Logits of the unchanged run [piece, vocab]; row 0 is the prompt's last position.
        changed: Logits of the changed run, same shape.
        target: Token ids of the target; may be empty.
        top_k: Number of most changed tokens.
    """
    before, after = baseline[0], changed[0]
    tokens = top_changed(before, after, top_k)
    logprob = log_softmax(changed)
    pieces = [logprob[row, token] for row, token in enumerate(target)]
    return {
        "kl": float(kl_divergence(before, after)),
        "logit_diff": float(before[target[0]] - after[target[0]]) if target else np.nan,
        "first_probability": float(np.exp(pieces[0])) if target else np.nan,
        "target_logprob": float(sum(pieces)) if target else np.nan,
        "changed_id": [change.token_id for change in tokens],
        "changed_baseline": [change.baseline for change in tokens],
        "changed_other": [change.other for change in tokens],
    }


def gather(
    measured: Sequence[Mapping[str, Any]], axes: Mapping[str, int]
) -> dict[str, tuple[tuple[str, ...], npt.NDArray[Any], dict[str, str]]]:
    """Measurements of several runs as variables of a dataset, along the axes of the runs.

    Arguments:
        measured: Results of `effect`, one per run.
        axes: Size of each axis of the runs by name, slowest first.
    """
    variables = {}
    outputs = effects_along(*axes)
    for name in EFFECTS:
        # Token ids are integers, all other measurements float64.
        values = np.array([run[name] for run in measured], np.int32 if name == "changed_id" else np.float64)
        variables[name] = outputs[name].variable(values.reshape(*axes.values(), *values.shape[1:]))
    return variables


def of_baseline(baseline: Baseline, target: Sequence[int], top_k: int) -> dict[str, Any]:
    """Measurements of the unchanged run (`OF_BASELINE`) as variables of a dataset.

    Arguments:
        baseline: Result of the unchanged run.
        target: Token ids of the target; may be empty.
        top_k: Number of most likely tokens.
    """
    logprob = log_softmax(baseline.logits)
    # Stable, so that ties are resolved by token id.
    order = np.argsort(-logprob[0], kind="stable")[:top_k]
    pieces = [logprob[row, token] for row, token in enumerate(target)]
    values: dict[str, Any] = {
        "baseline_id": order.astype(np.int32),
        "baseline_probability": np.exp(logprob[0, order]),
        "baseline_first_probability": float(np.exp(pieces[0])) if target else np.nan,
        "baseline_target_logprob": float(sum(pieces)) if target else np.nan,
    }
    return {name: OF_BASELINE[name].variable(value) for name, value in values.items()}


def along_layers(parts: Sequence[xr.Dataset]) -> xr.Dataset:
    """Results of single layers, concatenated along `layer`."""
    import xarray as xr

    whole: xr.Dataset = xr.concat(
        parts, "layer", data_vars="minimal", coords="minimal", compat="override", join="exact"
    )
    return whole
