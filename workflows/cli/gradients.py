"""Options that name the metric whose gradient is captured: the metric, its tokens, its baseline prompt.

    --metric 'logit_difference=[" English", " French"]'      words, or ids: [3, 17]
    --metric probability=English --at -2
    --metric kl --baseline 'The law in Saskatchewan declares the language'

Texts of the command line become a metric object here; hook points are handled by the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from ...store.errors import StageError, nearest
from .options import json_or_text, with_options

if TYPE_CHECKING:
    from ...stages.causal.grids.patching_metrics import Metric
    from ...stages.forward.hooks.spec import HookSpec
    from ...stages.forward.models.source import ModelSource

__all__ = ["GRADIENT_OPTIONS", "METRICS", "gradient_options", "with_metric"]

# Names of classes, so that `--help` does not import them.
METRICS: Mapping[str, tuple[str, int]] = {
    "logit_difference": ("LogitDifference", 2),
    "log_probability": ("LogProbability", 1),
    "probability": ("Probability", 1),
    "kl": ("KL", 0),
}
"""Name on the command line -> class in stages/causal/grids/patching_metrics.py, and its number of tokens.

All metrics with a gradient are listed, except `Custom`, which needs a Python function.
"""


GRADIENT_OPTIONS = ("metric", "at", "baseline")
"""Parameters that `gradient_options` adds to a command."""


def gradient_options(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """Decorator that adds --metric, --at and --baseline; the command is called with GRADIENT_OPTIONS."""
    names = ", ".join(METRICS)
    return with_options(
        command,
        click.option(
            "--metric", metavar="NAME=TOKENS", help=f"Metric whose gradient grad: hook points store: {names}."
        ),
        click.option(
            "--at",
            type=int,
            metavar="POSITION",
            help="Position whose next-token logits the metric reads; default the last.",
        ),
        click.option(
            "--baseline", metavar="PROMPT", help="Prompt whose prediction kl compares with: a text, or [ids]."
        ),
    )


def with_metric(
    spec: HookSpec, source: ModelSource, *, metric: str | None, at: int | None, baseline: str | None
) -> HookSpec:
    """Add the metric of the gradients to a hook spec.

    Arguments:
        spec: Hook points to capture.
        source: The model whose tokenizer reads the tokens of the metric and the baseline prompt.
        metric: `NAME` or `NAME=TOKENS`; None returns the spec unchanged.
        at: Position whose next-token logits the metric reads; None for the last.
        baseline: Text, or token ids in JSON, of the prompt that KL compares with.

    Raises:
        UsageError: A position or baseline without a metric that takes it, or a metric without its baseline.
        StageError: Unknown metric, or a wrong number of tokens.
        TokenizerError: A word that is not one token, or a model without a tokenizer.
        PromptError: A baseline that is not a prompt.
    """
    if metric is None:
        for name, value in {"--at": at, "--baseline": baseline}.items():
            if value is not None:
                raise click.UsageError(
                    f"{name} is a parameter of the metric, and no metric is named; add --metric NAME=TOKENS"
                )
        return spec
    differentiable = _metric(metric, source)
    if baseline is not None and not differentiable.needs_baseline:
        raise click.UsageError(
            f"--baseline is a parameter of the metric kl only, found --metric {differentiable.name}; leave "
            "out --baseline"
        )
    if baseline is None and differentiable.needs_baseline:
        raise click.UsageError(
            f"the metric {differentiable.name} compares a prediction with that of a baseline prompt, and no "
            "baseline is given; add --baseline PROMPT"
        )
    baseline_ids = () if baseline is None else _baseline(baseline, source)
    return spec.gradient_of(differentiable, at=-1 if at is None else at, baseline=baseline_ids)


def _metric(text: str, source: ModelSource) -> Metric:
    """Build the metric that --metric names.

    Arguments:
        text: Value of the option: "NAME" or "NAME=TOKENS".
        source: The model whose tokenizer converts words to token ids.

    Raises:
        StageError: Unknown metric, or a wrong number of tokens.
    """
    from ...stages.causal.grids import patching_metrics

    name, _, tokens_text = text.partition("=")
    if name not in METRICS:
        near = nearest(name, METRICS)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(METRICS)}"
        raise StageError(f"no metric {name!r} that has a gradient; {hint}")
    class_name, count = METRICS[name]
    value = [] if tokens_text == "" else _json_or_text(tokens_text, "--metric")
    words = value if isinstance(value, list) else [value]
    # `type`, not isinstance: JSON's true is an int for Python.
    if len(words) != count or any(type(word) not in (int, str) for word in words):
        expected = ("no tokens", "one token", "two tokens")[count]
        example = (name, f"{name}=yes", f"""'{name}=["yes", "no"]'""")[count]
        raise StageError(
            f"metric {name!r}: expected {expected} after the name, found {tokens_text or 'none'}; write "
            f"--metric {example}"
        )
    tokens = [word if isinstance(word, int) else _token(word, source) for word in words]
    metric: Metric = getattr(patching_metrics, class_name)(*tokens)
    return metric


def _token(word: str, source: ModelSource) -> int:
    """Token id of a word, with or without a leading space; TokenizerError unless the word is one token."""
    from ...stages.forward.text.prompts import no_tokenizer

    if source.tokenizer is None:
        raise no_tokenizer(source.name)
    # Without its space: `find_token_id` tries the word with a space first, then without.
    return source.tokenizer.find_token_id(word.strip(" "))


def _baseline(prompt: str, source: ModelSource) -> list[int]:
    """Token ids of the baseline prompt, which is a text or a JSON list of token ids."""
    from ...stages.forward.text.prompts import tokenize
    from ...stages.forward.text.rows import one_row

    value = _json_or_text(prompt, "--baseline")
    row = one_row(value if isinstance(value, list) else prompt, "baseline")
    (ids,) = tokenize(row, source.tokenizer, source.config, source.name)
    return ids


def _json_or_text(text: str, option: str) -> Any:
    """Like `json_or_text`, with a UsageError that names the option."""
    try:
        return json_or_text(text)
    except ValueError as error:
        raise click.UsageError(f"{option}: {error}") from None
