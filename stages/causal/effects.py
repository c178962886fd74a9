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
"""Measurements of one changed run, with the axes of one run. Those of the target are NaN without a target."""
OF_BASELINE: Mapping[str, Output] = {
    "baseline_id": Output(("rank",), "1", "most likely next tokens"),
    "baseline_probability": Output(("rank",), "1", "probability of the most likely next tokens"),
    "baseline_first_probability": Output((), "1", "probability of the target's first piece"),
    "baseline_target_logprob": Output((), "nats", "log-probability of the whole target, all its pieces"),
}
"""Measurements of the unchanged run."""


def effects_along(*axes: str) -> dict[str, Output]:
    """Declared outputs of an experiment with one run for each point along `axes`, slowest first."""
    outputs = {name: replace(output, dims=(*axes, *output.dims)) for name, output in EFFECTS.items()}
    return {**outputs, **OF_BASELINE}


@dataclass(frozen=True)
class Baseline:
    """The unchanged run, with which changed runs are compared."""

    config: Architecture
    """Architecture of the model."""
    logits: Floats
    """float64 [piece, vocab]; row 0 is the prompt's last position."""
    pattern: Mapping[int, npt.NDArray[np.float32]]
    """Attention pattern by layer, float32 [head, query, key]; only of the layers that were requested."""

    @classmethod
    def sketch(cls, config: Architecture) -> Baseline:
        """Placeholder without a loaded model, enough to list the runs."""
        return cls(config, np.zeros((0, 0)), {})

    def weight(self, layer: int, heads: Sequence[int] | None, edges: Sequence[tuple[int, int]]) -> Floats:
        """Mean attention weight of some edges, float64 [head].

        Arguments:
            layer: layer of the pattern.
            heads: heads; None for all.
            edges: (query, key) positions.
        """
        return edge_weight(self.pattern[layer], heads, edges)


def baseline_run(
    model: Model, tokens: Sequence[int], target: Sequence[int], layers: Iterable[int] = ()
) -> Baseline:
    """Unchanged run of a prompt and its target.

    Arguments:
        model: the model.
        tokens: token ids of the prompt.
        target: token ids of the target's pieces; may be empty.
        layers: layers whose attention patterns are captured.

    Raises:
        PromptError: for a target outside the vocabulary.
    """
    vocab = model.config.vocab_size
    outside = [token for token in target if token >= vocab]
    if outside:
        raise PromptError(f"expected target ids in 0..{vocab - 1}, found {outside[0]}")
    ids, want = with_target(tokens, target)
    hooks = HookSpec().capture(*(HookPoint.pattern(layer) for layer in layers))
    result = model.forward(ids, hooks, want=want)
    patterns = {layer: array(result[HookPoint.pattern(layer)][0]) for layer in layers}
    return Baseline(model.config, read_logits(result), patterns)


def edge_weight(
    pattern: npt.NDArray[Any], heads: Sequence[int] | None, edges: Sequence[tuple[int, int]]
) -> Floats:
    """Mean attention weight of some edges, float64 [head].

    Arguments:
        pattern: attention weights [head, query, key].
        heads: heads; None for all.
        edges: (query, key) positions.
    """
    queries, keys = zip(*edges, strict=True)
    selected = pattern if heads is None else pattern[list(heads)]
    weights: Floats = selected[:, list(queries), list(keys)].astype(np.float64).mean(1)
    return weights


def layers_of(layers: Sequence[int] | None, n_layers: int, window: int = 1) -> list[int]:
    """First layers of the windows of a sweep.

    Arguments:
        layers: first layers; None for all that leave room for a window.
        n_layers: number of layers of the model.
        window: layers per window.

    Raises:
        InterventionError: for a layer out of range, no layers, or one named twice.
    """
    last = n_layers - window
    if not 1 <= window <= n_layers:
        raise InterventionError(f"expected a window of 1..{n_layers} layers, found {window}")
    starts = list(range(last + 1) if layers is None else as_indices(layers, "layers", InterventionError))
    outside = [layer for layer in starts if not 0 <= layer <= last]
    if outside or not starts or len(set(starts)) != len(starts):
        found = outside[0] if outside else starts or "none"
        raise InterventionError(f"expected layers in 0..{last}, each once, found {found}")
    return starts


def with_target(tokens: Sequence[int], target: Sequence[int]) -> tuple[tuple[int, ...], Logits]:
    """Token ids to run and logits to read, such that every piece of the target is read where it is predicted.

    These positions are the prompt's last one, and that of each piece but the last.

    Arguments:
        tokens: token ids of the prompt.
        target: token ids of the target's pieces; may be empty.
    """
    if not target:
        return tuple(tokens), Logits(positions=(len(tokens) - 1,))
    # The last piece predicts nothing that is read.
    ids = (*tokens, *target[:-1])
    return ids, Logits(positions=tuple(range(len(tokens) - 1, len(ids))))


def check_tokens(tokens: Sequence[int], target: Sequence[int] = ()) -> None:
    """Check token ids without a model.

    Arguments:
        tokens: token ids of the prompt.
        target: token ids of the target's pieces; may be empty.

    Raises:
        PromptError: for an empty prompt, or ids that are not non-negative integers.
    """
    if not tokens:
        raise PromptError("expected a prompt of at least one token, found none")
    for token in (*tokens, *target):
        # bool is a subclass of int: True would pass as token 1.
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise PromptError(f"expected token ids counted from 0, found {token!r}; encode the text first")


def check_target(target: Sequence[int], config: Architecture) -> None:
    """Check a target against a model.

    Arguments:
        target: token ids of the target's pieces.
        config: architecture of the model.

    Raises:
        ConfigError: for several pieces on a bidirectional model.
    """
    # With bidirectional attention the pieces behind the prompt would change the prediction they are read
    # from.
    if len(target) > 1:
        config.require_next_token()


def check_words(words: Sequence[int], vocab_size: int) -> None:
    """Check that tokens are in the vocabulary.

    Arguments:
        words: token ids.
        vocab_size: number of tokens of the model.

    Raises:
        PromptError: for an id outside the vocabulary.
    """
    outside = [word for word in words if word >= vocab_size]
    if outside:
        raise PromptError(f"expected token ids in 0..{vocab_size - 1}, found {outside[0]}")


def array(values: Any) -> npt.NDArray[np.float32]:
    """A tensor of any dtype and device as a float32 numpy array."""
    # float(), as numpy has no bfloat16.
    converted: npt.NDArray[np.float32] = values.detach().float().cpu().numpy()
    return converted


def read_logits(result: HookCache) -> Floats:
    """Logits of one run, float64 [piece, vocab]."""
    return array(result.logits[0]).astype(np.float64)


def effect(baseline: Floats, changed: Floats, target: Sequence[int], top_k: int) -> dict[str, Any]:
    """Measurements of `EFFECTS` for one changed run.

    Arguments:
        baseline: logits of the unchanged run, [piece, vocab]; row 0 is the prompt's last position.
        changed: logits of the changed run, same shape.
        target: token ids of the pieces; may be empty.
        top_k: number of most changed tokens.
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
    """Measurements of several runs as variables, with units.

    Arguments:
        measured: results of `effect`, one per run.
        axes: name -> size of each axis of the runs, slowest first.
    """
    variables = {}
    outputs = effects_along(*axes)
    for name in EFFECTS:
        # Token ids are integers, all other measurements float64.
        values = np.array([run[name] for run in measured], np.int32 if name == "changed_id" else np.float64)
        variables[name] = outputs[name].variable(values.reshape(*axes.values(), *values.shape[1:]))
    return variables


def of_baseline(baseline: Baseline, target: Sequence[int], top_k: int) -> dict[str, Any]:
    """Measurements of `OF_BASELINE` as variables.

    Arguments:
        baseline: the unchanged run.
        target: token ids of the target's pieces; may be empty.
        top_k: number of most likely tokens.
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
    """Datasets of single layers, concatenated along `layer`."""
    import xarray as xr

    whole: xr.Dataset = xr.concat(
        parts, "layer", data_vars="minimal", coords="minimal", compat="override", join="exact"
    )
    return whole
