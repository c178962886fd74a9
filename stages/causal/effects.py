"""What an intervention did to the next token: the measurements that experiments on attention share.

A causal effect is the difference between what is measured in a run with an intervention and in the run as it
was, all else as it would then be (Pearl 2001, "Direct and indirect effects", for the definition; Vig et al.
2020, "Investigating gender bias in language models using causal mediation analysis", for language models).
That *this* cause has it, and not any of its size, is said by a null (controls.py).

A prompt may be followed by the pieces of a target word. Its probability is then that of all its pieces, each
given those before it (one pass over the prompt with the pieces behind it: what comes later changes nothing
earlier), and never that of its last piece alone, which is another word. Logit differences are about the first
piece, the one that the prompt itself is asked for.

Border: logits as arrays, runs as values; loads no model and never imports torch.

Axes: vocab; piece = pieces of the target; rank = most changed tokens, largest change first. Units: nats
(KL, log-probability), logits, probabilities without unit.
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
    "changed_baseline": Output(("rank",), "1", "their probability in the baseline"),
    "changed_other": Output(("rank",), "1", "their probability in the changed run"),
}
"""Measurements of one changed run, with axes of their own. Those of the target are NaN without one."""
OF_BASELINE: Mapping[str, Output] = {
    "baseline_id": Output(("rank",), "1", "most likely next tokens"),
    "baseline_probability": Output(("rank",), "1", "their probability"),
    "baseline_first_probability": Output((), "1", "probability of the first piece"),
    "baseline_target_logprob": Output((), "nats", "log-probability of the whole target"),
}
"""Of the unchanged run."""


def effects_along(*axes: str) -> dict[str, Output]:
    """The outputs of an experiment with a run for each place along some axes, slowest first."""
    placed = {name: replace(each, dims=(*axes, *each.dims)) for name, each in EFFECTS.items()}
    return {**placed, **OF_BASELINE}


@dataclass(frozen=True)
class Baseline:
    """The unchanged run, against which others are measured.

    logits: float64 [piece, vocab]. pattern: attention weights by layer, float32 [head, query, key].
    """

    config: Architecture
    logits: Floats
    pattern: Mapping[int, npt.NDArray[np.float32]]

    @classmethod
    def sketch(cls, config: Architecture) -> Baseline:
        """Of a model nobody has loaded: enough to say which runs there will be."""
        return cls(config, np.zeros((0, 0)), {})

    def weight(self, layer: int, heads: Sequence[int] | None, edges: Sequence[tuple[int, int]]) -> Floats:
        """Mean attention weight of edges in each of some heads (None: all), float64 [head]."""
        return edge_weight(self.pattern[layer], heads, edges)


def baseline_run(
    model: Model, tokens: Sequence[int], target: Sequence[int], layers: Iterable[int] = ()
) -> Baseline:
    """One unchanged run, with the attention patterns of some layers kept.

    Raises PromptError for a target the model has no token for.
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
    """Mean weight of edges in each of some heads (None: all) of a pattern [head, query, key]; [head]."""
    queries, keys = zip(*edges, strict=True)
    chosen = pattern if heads is None else pattern[list(heads)]
    found: Floats = chosen[:, list(queries), list(keys)].astype(np.float64).mean(1)
    return found


def layers_of(layers: Sequence[int] | None, n_layers: int, window: int = 1) -> list[int]:
    """The layers asked for, all by default, from each of which `window` layers must exist.

    Raises InterventionError for a layer out of range, none at all, or one named twice.
    """
    last = n_layers - window
    if not 1 <= window <= n_layers:
        raise InterventionError(f"expected a window of 1..{n_layers} layers, found {window}")
    chosen = list(range(last + 1) if layers is None else as_indices(layers, "layers", InterventionError))
    outside = [layer for layer in chosen if not 0 <= layer <= last]
    if outside or not chosen or len(set(chosen)) != len(chosen):
        found = outside[0] if outside else chosen or "none"
        raise InterventionError(f"expected layers in 0..{last}, each once, found {found}")
    return chosen


def with_target(tokens: Sequence[int], target: Sequence[int]) -> tuple[tuple[int, ...], Logits]:
    """The tokens to run and the logits to ask for, so that every piece of the target is read where it is
    predicted: at the prompt's last position and at each piece but the last."""
    if not target:
        return tuple(tokens), Logits(positions=(len(tokens) - 1,))
    ids = (*tokens, *target[:-1])
    return ids, Logits(positions=tuple(range(len(tokens) - 1, len(ids))))


def check_tokens(tokens: Sequence[int], target: Sequence[int] = ()) -> None:
    """PromptError unless there is a prompt and all ids are plain non-negative numbers."""
    if not tokens:
        raise PromptError("expected a prompt of at least one token, found none")
    for token in (*tokens, *target):
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise PromptError(f"expected token ids counted from 0, found {token!r}; encode the text first")


def check_target(target: Sequence[int], config: Architecture) -> None:
    """ConfigError for a target of several tokens where positions see later ones: each is read with those
    before it behind the prompt (`with_target`), which there change what is read."""
    if len(target) > 1:
        config.require_next_token()


def check_words(words: Sequence[int], vocab_size: int) -> None:
    """PromptError for token ids that are not in the vocabulary."""
    outside = [word for word in words if word >= vocab_size]
    if outside:
        raise PromptError(f"expected token ids in 0..{vocab_size - 1}, found {outside[0]}")


def array(values: Any) -> npt.NDArray[np.float32]:
    """A tensor (any dtype, on any device) as a float32 array."""
    found: npt.NDArray[np.float32] = values.detach().float().cpu().numpy()
    return found


def read_logits(result: HookCache) -> Floats:
    """Logits [piece, vocab] of one run, float64."""
    return array(result.logits[0]).astype(np.float64)


def effect(baseline: Floats, changed: Floats, target: Sequence[int], top_k: int) -> dict[str, Any]:
    """Every measurement of EFFECTS on one run.

    baseline, changed: logits [piece, vocab]; the first row is the prompt's last position.
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
    """Measurements of runs laid out along axes (name -> size, slowest first), as variables with units."""
    found = {}
    outputs = effects_along(*axes)
    for name in EFFECTS:
        values = np.array([one[name] for one in measured], np.int32 if name == "changed_id" else np.float64)
        found[name] = outputs[name].variable(values.reshape(*axes.values(), *values.shape[1:]))
    return found


def of_baseline(baseline: Baseline, target: Sequence[int], top_k: int) -> dict[str, Any]:
    """The unchanged run's own next tokens and its probability of the target, as variables."""
    logprob = log_softmax(baseline.logits)
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
    """Cells of single layers as one dataset."""
    import xarray as xr

    found: xr.Dataset = xr.concat(
        parts, "layer", data_vars="minimal", coords="minimal", compat="override", join="exact"
    )
    return found
