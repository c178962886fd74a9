"""Interventions whose cost `evaluate` measures, and control interventions of equal size.

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
from ..material.dictionaries import fitting_dictionary

if TYPE_CHECKING:
    from ...stages.evaluation.changed import Prompts
    from ..subject import Subject

__all__ = ["Change", "averaged", "reconstructed", "zeroed"]


@dataclass(frozen=True)
class Change:
    """An intervention on a model, and control interventions of equal size."""

    text: str
    """Description with which a claim begins: "setting blocks.0.attn.hook_z to zero"."""
    fields: dict[str, Any]
    """Fields of `ChangedModelExperiment` that apply the intervention."""
    control_fields: tuple[dict[str, Any], ...]
    """The same fields for each control intervention."""
    control_names: tuple[str, ...]
    """Name of each control intervention, for tables."""
    null: str
    """Name of the null distribution, in words that follow a number: "choices of other layers"."""


def zeroed(subject: Subject, patterns: Sequence[str], draws: int, seed: int) -> Change:
    """Intervention that sets hook points to zero; its controls set hook points of the same kinds in other
    layers to zero.

    Arguments:
        subject: the model.
        patterns: names of hook points, or globs.
        draws: largest number of controls.
        seed: of the layers that are drawn.
    """

    def fields(points: Sequence[HookPoint]) -> dict[str, Any]:
        spec = HookSpec()
        for point in points:
            spec = spec.intervene(point, Zero())
        return {"hooks": spec}

    text = f"setting {', '.join(patterns)} to zero"
    return _with_layer_controls(subject, patterns, draws, seed, text, "set to zero", fields)


def averaged(subject: Subject, patterns: Sequence[str], references: Prompts, draws: int, seed: int) -> Change:
    """Intervention that sets hook points to their mean over the tokens of reference prompts; its controls do
    so with hook points of the same kinds in other layers.

    Special tokens in front of a prompt, and the first token in any case, keep their values; see `Means`.

    Arguments:
        subject: the model.
        patterns: names of hook points, or globs.
        references: prompts that are not scored, as token ids.
        draws: largest number of controls.
        seed: of the layers that are drawn.

    Raises:
        ConfigError: without reference prompts.
    """
    if not references:
        raise ConfigError(
            "expected text beyond the prompts that are scored, to compute means over, found none; score "
            "fewer prompts: limit=…"
        )
    # Without BOS the first token is the attention sink, with activations unlike all others (`Means`).
    skip = max(SKIP, subject.special_tokens)

    def fields(points: Sequence[HookPoint]) -> dict[str, Any]:
        return {"mean": Means(tuple(map(str, points)), references, skip)}

    text = f"setting {', '.join(patterns)} to the mean"
    return _with_layer_controls(subject, patterns, draws, seed, text, "set to the mean", fields)


def reconstructed(subject: Subject, name: str, model: str, draws: int, seed: int) -> Change:
    """Intervention that replaces activations by a dictionary's reconstructions; its controls add errors of
    equal norm in random directions.

    Arguments:
        subject: the model.
        name: dictionary: directory or org/repo.
        model: name of the model in the settings.
        draws: number of controls.
        seed: of the random rotations.

    Raises:
        DictionaryError: for a crosscoder, or a dictionary that does not fit the model.
    """
    dictionary = fitting_dictionary(subject, name, model, "clt")
    _ = dictionary.read_hooks  # raises for a crosscoder, before anything runs
    fields = {"dictionary": dictionary.name, "features": dictionary.identity}
    # Seeds enter keys, whose integers must be within 2**53 (store/digest.py).
    seeds = np.random.default_rng(seed).integers(2**53, size=draws).tolist()
    return Change(
        f"replacing activations by reconstructions of {dictionary.name}",
        fields,
        tuple({**fields, "turned": rotation_seed} for rotation_seed in seeds),
        tuple(f"rotation {i}" for i in range(draws)),
        "random rotations of the reconstruction errors, of equal norm for every token",
    )


def _with_layer_controls(
    subject: Subject,
    patterns: Sequence[str],
    draws: int,
    seed: int,
    text: str,
    action: str,
    fields: Callable[[Sequence[HookPoint]], dict[str, Any]],
) -> Change:
    """An intervention on hook points, with the same kinds of hook points in other layers as controls.

    Arguments:
        subject: the model.
        patterns: names of hook points, or globs.
        draws: largest number of controls.
        seed: of the layers that are drawn.
        text: see `Change`.
        action: what is done to the hook points, such as "set to zero", for the name of the null distribution.
        fields: fields of the experiment for a list of hook points.
    """
    available = subject.config.hook_points
    # Patterns may overlap; `fromkeys` keeps each hook point once, in order.
    points = tuple(dict.fromkeys(point for pattern in patterns for point in expand(pattern, available)))
    controls = layer_controls(points, available, draws, seed=seed)
    return Change(
        text,
        fields(points),
        tuple(map(fields, controls)),
        tuple(", ".join(map(str, control)) for control in controls),
        f"choices of other layers, with {_kinds(points)} {action} there",
    )


def _kinds(points: Sequence[HookPoint]) -> str:
    """Kinds of the hook points, joined: "z and mlp_out"; hook points that belong to no layer are left out."""
    return " and ".join(dict.fromkeys(point.kind for point in points if point.layer is not None))
