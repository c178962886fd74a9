"""What gradients are of, as the command line says it: a metric, its tokens, a prompt it compares with.

    --metric 'logit_difference=[" English", " French"]'      words, or ids: [3, 17]
    --metric probability=English --at -2
    --metric kl --baseline 'The law in Saskatchewan declares the language'

Border: names and words in, metrics out; knows no hook point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from ...store.errors import StageError, nearest
from .options import with_options

if TYPE_CHECKING:
    from ...stages.causal.grids.patching_metrics import Metric
    from ...stages.forward.hooks.spec import HookSpec
    from ...stages.forward.models.source import ModelSource
    from ...store.runs.packed import PackedTokens

__all__ = ["METRICS", "gradient_options", "told_metric"]

METRICS: Mapping[str, tuple[str, int]] = {
    "logit_difference": ("LogitDifference", 2),
    "log_probability": ("LogProbability", 1),
    "probability": ("Probability", 1),
    "kl": ("KL", 0),
}
"""Name -> the metric of stages/causal/grids/patching_metrics.py, and how many tokens it names: those with a
gradient, but for functions of one's own."""


def gradient_options(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """How a command is told what gradients are of; it is called with `metric`, `at` and `baseline`."""
    names = ", ".join(METRICS)
    return with_options(
        command,
        click.option(
            "--metric", metavar="NAME=TOKENS", help=f"What grad: hook points are gradients of: {names}."
        ),
        click.option(
            "--at", type=int, metavar="POSITION", help="Whose next token it reads; default the last."
        ),
        click.option("--baseline", metavar="PROMPT", help="What kl compares with: text, or [ids]."),
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
    compared = () if baseline is None else tuple(_packed(baseline, source).ids.tolist())
    return spec.gradient_of(found, at=-1 if at is None else at, baseline=compared)


def _metric(text: str, source: ModelSource) -> Metric:
    from ...stages.causal.grids import patching_metrics

    name, _, told = text.partition("=")
    if name not in METRICS:
        near = nearest(name, METRICS)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(METRICS)}"
        raise StageError(f"no metric {name!r} that has a gradient; {hint}")
    made, count = METRICS[name]
    given = [] if told == "" else _plain(told)
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


def _packed(prompt: str, source: ModelSource) -> PackedTokens:
    from ...stages.forward.text.prompts import pack

    given = _plain(prompt)
    ids = isinstance(given, list) and all(type(token) is int for token in given)
    return pack([given if ids else prompt], source.tokenizer, source.config, source.name)


def _plain(text: str) -> Any:
    """What is JSON as JSON, else the text."""
    from ...store.sealed import read_json

    with suppress(ValueError):
        return read_json(text)
    return text
