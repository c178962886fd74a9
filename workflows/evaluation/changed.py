"""What `evaluate` changes in a model, and the changes of equal size that its cost is held against.

Border: settings in, fields of an experiment (stages/evaluation/changed.py) out; measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.evaluation.changed import SKIP, Means
from ...stages.evaluation.layer_controls import layer_controls
from ...stages.forward.architectures.points import HookPoint, expand
from ...stages.forward.hooks.interventions import Zero
from ...stages.forward.hooks.spec import HookSpec
from ...store.errors import ConfigError
from ..features.sae_features import dictionary_of

if TYPE_CHECKING:
    from ...stages.evaluation.changed import Prompts
    from ..subject import Subject

__all__ = ["Change", "averaged", "reconstructed", "zeroed"]


@dataclass(frozen=True)
class Change:
    """One change, and others of its size.

    text: the change, as a claim begins. fields: what an experiment is given. others: the same of each
    other change; names: what each is called. of: what they are, in words.
    """

    text: str
    fields: dict[str, Any]
    others: tuple[dict[str, Any], ...]
    names: tuple[str, ...]
    of: str


def zeroed(subject: Subject, patterns: Sequence[str], draws: int, seed: int) -> Change:
    """Hook points set to zero, beside the same kinds in other layers."""

    def fields(points: Sequence[HookPoint]) -> dict[str, Any]:
        spec = HookSpec()
        for point in points:
            spec = spec.intervene(point, Zero())
        return {"hooks": spec}

    text = f"setting {', '.join(patterns)} to zero"
    return _moved(subject, patterns, draws, seed, text, "set to zero", fields)


def averaged(subject: Subject, patterns: Sequence[str], references: Prompts, draws: int, seed: int) -> Change:
    """Hook points set to their mean over `references`, beside the same kinds in other layers.

    Special tokens before a prompt are left alone, and a first token in any case: see `Means`. Raises
    ConfigError for no references.
    """
    if not references:
        raise ConfigError(
            "expected text beyond the prompts that are scored, to take means over, found none; score fewer: "
            "limit=…"
        )
    skip = max(SKIP, subject.special_tokens)

    def fields(points: Sequence[HookPoint]) -> dict[str, Any]:
        return {"mean": Means(tuple(map(str, points)), references, skip)}

    text = f"setting {', '.join(patterns)} to the mean"
    return _moved(subject, patterns, draws, seed, text, "set to the mean", fields)


def reconstructed(subject: Subject, name: str, model: str, draws: int, seed: int) -> Change:
    """A dictionary's reconstructions, beside its errors in random directions."""
    held = dictionary_of(name, model, "clt")
    held.require_fit(subject.config, subject.name)
    _ = held.read_hooks  # refuses a crosscoder before anything runs
    fields = {"dictionary": held.name, "features": held.identity}
    seeds = np.random.default_rng(seed).integers(2**53, size=draws).tolist()
    return Change(
        f"reading reconstructions of {held.name}",
        fields,
        tuple({**fields, "turned": each} for each in seeds),
        tuple(f"rotation {number}" for number in range(draws)),
        "rotations of its errors, as long for every token, in directions drawn at random",
    )


def _moved(
    subject: Subject,
    patterns: Sequence[str],
    draws: int,
    seed: int,
    text: str,
    done: str,
    fields: Callable[[Sequence[HookPoint]], dict[str, Any]],
) -> Change:
    """A change of some hook points, and the same of these kinds in other layers."""
    available = subject.config.hook_points
    points = tuple(dict.fromkeys(point for pattern in patterns for point in expand(pattern, available)))
    others = layer_controls(points, available, draws, seed=seed)
    return Change(
        text,
        fields(points),
        tuple(map(fields, others)),
        tuple(", ".join(map(str, each)) for each in others),
        f"choices of other layers, with {_kinds(points)} {done} there",
    )


def _kinds(points: Sequence[HookPoint]) -> str:
    return " and ".join(dict.fromkeys(point.kind for point in points if point.layer is not None))
