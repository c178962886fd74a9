"""What gradients are of, as the command line says it: a metric, its tokens, a prompt it compares with.

    --metric 'logit_difference=[" English", " French"]'      words, or ids: [3, 17]
    --metric probability=English --at -2
    --metric kl --baseline 'The law in Saskatchewan declares the language'

Border: names and words in, metrics out; knows no hook point.
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

__all__ = ["GRADIENT_OPTIONS", "METRICS", "gradient_options", "told_metric"]

METRICS: Mapping[str, tuple[str, int]] = {
    "logit_difference": ("LogitDifference", 2),
    "log_probability": ("LogProbability", 1),
    "probability": ("Probability", 1),
    "kl": ("KL", 0),
}
"""Name -> the metric of stages/causal/grids/patching_metrics.py, and how many tokens it names: those with a
gradient, but for functions of one's own."""


GRADIENT_OPTIONS = ("metric", "at", "baseline")
"""Names of the options that say what gradients are of."""


def gradient_options(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """How a command is told what gradients are of; it is called with `metric`, `at` and `baseline`."""
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


def told_metric(
    spec: HookSpec, source: ModelSource, *, metric: str | None, at: int | None, baseline: str | None
) -> HookSpec:
    """The spec with what its gradients are of, where that is said. source: whose words are read.

    Raises UsageError for a position or a prompt of no metric, or none where it is needed; StageError for
    another metric or number of tokens, TokenizerError and PromptError for words and prompts that are none.
    """
    if metric is None:
        for name, value in {"--at": at, "--baseline": baseline}.items():
            if value is not None:
                raise click.UsageError(f"{name} goes with a metric, found none; add --metric NAME=TOKENS")
        return spec
    found = _metric(metric, source)
    if baseline is not None and not found.needs_baseline:
        raise click.UsageError(f"--baseline goes with kl, found {found.name}; leave it out")
    if baseline is None and found.needs_baseline:
        raise click.UsageError(
            f"{found.name} compares with another prompt, found none; add --baseline PROMPT"
        )
    compared = () if baseline is None else _baseline(baseline, source)
    return spec.gradient_of(found, at=-1 if at is None else at, baseline=compared)


def _metric(text: str, source: ModelSource) -> Metric:
    from ...stages.causal.grids import patching_metrics

    name, _, told = text.partition("=")
    if name not in METRICS:
        near = nearest(name, METRICS)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(METRICS)}"
        raise StageError(f"no metric {name!r} that has a gradient; {hint}")
    made, count = METRICS[name]
    given = [] if told == "" else _json_or_text(told, "--metric")
    words = given if isinstance(given, list) else [given]
    if len(words) != count or any(type(word) not in (int, str) for word in words):
        named = ("no tokens", "one token", "two tokens")[count]
        written = (name, f"{name}=yes", f"""'{name}=["yes", "no"]'""")[count]
        raise StageError(f"metric {name!r}: expected {named}, found {told or 'none'}; write {written}")
    tokens = [word if isinstance(word, int) else _token(word, source) for word in words]
    found: Metric = getattr(patching_metrics, made)(*tokens)
    return found


def _token(word: str, source: ModelSource) -> int:
    from ...stages.forward.text.prompts import no_tokenizer

    if source.tokenizer is None:
        raise no_tokenizer(source.name)
    return source.tokenizer.find_token_id(word.strip(" "))


def _baseline(prompt: str, source: ModelSource) -> list[int]:
    """Token ids of the prompt that a metric compares with: a text, or a list of ids in JSON."""
    from ...stages.forward.text.prompts import tokenize
    from ...stages.forward.text.rows import one_row

    value = _json_or_text(prompt, "--baseline")
    row = one_row(value if isinstance(value, list) else prompt, "baseline")
    (ids,) = tokenize(row, source.tokenizer, source.config, source.name)
    return ids


def _json_or_text(text: str, option: str) -> Any:
    try:
        return json_or_text(text)
    except ValueError as error:
        raise click.UsageError(f"{option}: {error}") from None
