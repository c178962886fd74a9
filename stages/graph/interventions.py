"""Runs a model with features set to other values, to test the predictions of an attribution graph.

    clean = feature_intervention(model, clt, prompt)
    doubled = feature_intervention(model, clt, prompt, [(2, 8, 56, 7.29)], constrained_layers=range(n_layers))

Modes, as in circuit-tracer 0.5.0 (`feature_intervention`):

    constrained to all layers    patterns, norm divisors and MLP outputs are those of the clean run: direct
                                 effects only; pre-activations change by the column of the adjacency matrix
    constrained to some layers   patterns, and the MLP outputs of these layers, are frozen; features write to
                                 these layers only
    freeze_attention             only patterns are frozen; a feature changes relative to its activation in the
                                 running pass, so effects pass through MLPs and norms
    nothing frozen               the unmodified model

Without interventions nothing is frozen. An intervention is (layer, position or slice, feature, new value).

This module runs the passes; rows/feature_taps.py changes features within a pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ...pipeline.ambient import plain_torch
from ...store.errors import ConfigError, InterventionError, PromptError
from ..forward.architectures.points import HookPoint
from ..forward.generation.sampling import sample_token
from ..forward.hooks.spec import HookSpec
from ..forward.hooks.wants import ALL_LOGITS
from ..forward.passes.kept import Cache
from ..options import option, split_options, takes_options
from .rows.feature_taps import FeatureTaps, Frozen, SetFeature
from .rows.frozen import require_attention, require_transcoders
from .rows.targets import prompt_tokens

if TYPE_CHECKING:
    from ..features.dictionary import Dictionary
    from ..forward.models.model import Model

__all__ = ["FeatureGeneration", "FeatureRun", "feature_intervention", "generate_with_features"]

Intervention = SetFeature | tuple[int, int | slice, int, float]


@dataclass(frozen=True, eq=False)
class FeatureRun:
    """Result of one forward pass with features set to other values."""

    logits: Tensor
    """Logits [position, vocab]; if the model soft-caps them, after the cap."""
    activations: Tensor | None
    """Feature activations [layer, position, feature]; None if not requested."""


@dataclass(frozen=True, eq=False)
class FeatureGeneration:
    """A continuation generated with features set to other values."""

    token_ids: tuple[int, ...]
    """Token ids of the prompt and the new tokens."""
    logits: Tensor
    """Logits [new token, vocab] from which each new token was sampled."""
    activations: Tensor | None
    """Feature activations [layer, position, feature] of all tokens but the last; None if not requested."""


@dataclass(frozen=True)
class FeatureRunOptions:
    """Options of forward passes with features set to other values."""

    constrained_layers: Sequence[int] | None = option(
        None,
        "Layers whose MLP outputs are frozen at the run without interventions; set features write only to "
        "these. Default: none are frozen.",
    )
    freeze_attention: bool = option(True, "Keep the attention patterns of the run without interventions.")
    apply_activation_function: bool = option(
        True, "Return feature activations; False returns pre-activations."
    )
    return_activations: bool = option(
        True, "Return the activations of all features in every layer and position."
    )
    zero_positions: int = option(
        1,
        "Number of positions at the start where all features count as 0, both in the result and as the "
        "activation from which a set feature changes.",
    )


@takes_options(FeatureRunOptions)
@plain_torch()
def feature_intervention(
    model: Model,
    dictionary: Dictionary,
    prompt: Any,
    interventions: Sequence[Intervention] = (),
    **options: Any,
) -> FeatureRun:
    """Run a prompt with features set to other values; the module's docstring lists what can be frozen.

    Arguments:
        model: A loaded model.
        dictionary: Transcoders that were trained on the model.
        prompt: Text, token ids, or any other prompt that `attribution_graph` takes.
        interventions: (layer, position or slice of positions, feature, new activation) of each set feature.
        options: Fields of `FeatureRunOptions`, listed below.

    Raises:
        ConfigError: Attribution graphs do not support the model's layers.
        DictionaryError: The dictionary does not fit the model, or a feature does not exist.
        PromptError, TokenizerError: The prompt is invalid.
        InterventionError: A position or a constrained layer does not exist, or a value is not finite.
    """
    (values,) = split_options("feature_intervention", options, FeatureRunOptions)
    run_options = FeatureRunOptions(**values)
    tokens = _tokens(model, dictionary, prompt)
    settings = _checked(interventions, dictionary, len(tokens))
    frozen = _frozen(model, dictionary, tokens, settings, run_options)
    taps = FeatureTaps(
        dictionary,
        settings,
        frozen,
        zero_positions=run_options.zero_positions,
        keep=dictionary.layers if run_options.return_activations else (),
        before=not run_options.apply_activation_function,
    )
    logits = model.tapped(torch.tensor([tokens], device=model.device), taps, ALL_LOGITS)
    assert logits is not None  # ALL_LOGITS were requested
    return FeatureRun(logits[0], _stacked(taps) if run_options.return_activations else None)


@takes_options(FeatureRunOptions)
@plain_torch()
def generate_with_features(
    model: Model,
    dictionary: Dictionary,
    prompt: Any,
    interventions: Sequence[Intervention] = (),
    *,
    max_new_tokens: int = 20,
    temperature: float = 0.0,
    seed: int | None = None,
    stop: Sequence[int] = (),
    **options: Any,
) -> FeatureGeneration:
    """Continue a prompt with features set to other values.

    Values are frozen only in the pass over the prompt. An intervention whose slice has no end also applies to
    every new token, with nothing frozen; other interventions apply to the prompt only, and reach new tokens
    through its cached keys and values.

    Arguments:
        model, dictionary, prompt, interventions: As for `feature_intervention`.
        max_new_tokens: Largest number of tokens that are generated.
        temperature, seed: As for `mizarr.generate`.
        stop: Token ids after which the generation ends.
        options: Fields of `FeatureRunOptions`, listed below.

    Raises:
        PromptError: Prompt and new tokens exceed the model's context.
        ConfigError: The model's rotary embedding depends on the length of the sequence.
        InterventionError, DictionaryError: An intervention is invalid; see `feature_intervention`.
    """
    (values,) = split_options("generate_with_features", options, FeatureRunOptions)
    run_options = FeatureRunOptions(**values)
    tokens = _tokens(model, dictionary, prompt)
    config = model.config
    if max_new_tokens < 1 or len(tokens) + max_new_tokens > config.context_length:
        raise PromptError(
            f"expected max_new_tokens from 1 to {config.context_length - len(tokens)}, as the prompt has "
            f"{len(tokens)} tokens and the context of {model.name} {config.context_length}, found "
            f"{max_new_tokens}"
        )
    if config.lengths_must_match:
        raise ConfigError(
            f"{model.name} rotates keys depending on the length of the sequence (dynamic RoPE), so keys "
            "cannot be cached from token to token; call feature_intervention on each sequence instead"
        )
    settings = _checked(interventions, dictionary, len(tokens))
    open_ended = [setting for setting in settings if setting.is_open_ended]
    frozen = _frozen(model, dictionary, tokens, settings, run_options)
    keep = tuple(dictionary.layers) if run_options.return_activations else ()
    tap_options: dict[str, Any] = {"keep": keep, "before": not run_options.apply_activation_function}
    taps = FeatureTaps(dictionary, settings, frozen, zero_positions=run_options.zero_positions, **tap_options)
    cache = Cache()
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    token_ids, parts = list(tokens), []
    logits = []
    for _ in range(max_new_tokens):
        logits.append(model.read_on([token_ids], cache, taps)[0])
        if run_options.return_activations:
            parts.append(_stacked(taps))
        token = sample_token(logits[-1], temperature=temperature, generator=generator)
        token_ids.append(token)
        # The stop token belongs to the result, and is not run.
        if token in stop:
            break
        # The next pass has one position, the newest token.
        newest = [
            replace(setting, position=0) for setting in open_ended if _reaches(setting, len(token_ids) - 1)
        ]
        # Nothing is frozen, as the clean pass has no value at this position; no position counts as zero.
        taps = FeatureTaps(dictionary, newest, Frozen(), zero_positions=0, **tap_options)
    activations = torch.cat(parts, dim=1) if run_options.return_activations else None
    return FeatureGeneration(tuple(token_ids), torch.stack(logits), activations)


def _tokens(model: Model, dictionary: Dictionary, prompt: Any) -> list[int]:
    """Token ids of the prompt, after checking that graphs support the model and the dictionary fits it."""
    require_attention(model.config, model.name)
    require_transcoders(dictionary, model.config, model.name)
    (tokens,) = model.tokenize([prompt_tokens(prompt, model._tokenizer)])
    return tokens


def _checked(interventions: Sequence[Intervention], dictionary: Dictionary, length: int) -> list[SetFeature]:
    """Convert interventions to `SetFeature`, with plain ints and floats as fields.

    Arguments:
        interventions: `SetFeature` objects, or tuples of their fields.
        dictionary: transcoders, which must have the features.
        length: number of tokens of the prompt.

    Raises:
        DictionaryError: A feature does not exist.
        InterventionError: A position is outside the prompt, or an activation is infinite or NaN.
    """
    settings = []
    for intervention in interventions:
        setting = intervention if isinstance(intervention, SetFeature) else SetFeature(*intervention)
        dictionary.feature((int(setting.layer), int(setting.feature)))  # raises if it does not exist
        position, value = setting.position, float(setting.value)
        if not isinstance(position, slice) and not -length <= position < length:
            raise InterventionError(
                f"expected the position of the intervention on feature {setting.feature} of layer "
                f"{setting.layer} from {-length} to {length - 1} (negative: from the end), as the prompt has "
                f"{length} tokens, found {position}"
            )
        if not math.isfinite(value):
            raise InterventionError(
                f"expected a finite new activation for feature {setting.feature} of layer {setting.layer}, "
                f"found {value}"
            )
        settings.append(SetFeature(int(setting.layer), position, int(setting.feature), value))
    return settings


def _frozen(
    model: Model,
    dictionary: Dictionary,
    tokens: Sequence[int],
    settings: Sequence[SetFeature],
    options: FeatureRunOptions,
) -> Frozen:
    """Values of a run without interventions that the options freeze; nothing is run if none are."""
    layers = range(model.config.num_layers)
    constrained = frozenset(options.constrained_layers or ())
    if not constrained <= set(layers):
        raise InterventionError(
            f"expected constrained_layers among the model's layers 0 to {len(layers) - 1}, found "
            f"{sorted(constrained - set(layers))[0]}"
        )
    if not settings or not (constrained or options.freeze_attention):
        return Frozen()
    points = [HookPoint.pattern(layer) for layer in layers]
    # circuit-tracer freezes norms only if all layers are constrained, and then effects are exactly direct.
    if constrained >= set(layers):
        points += [point for point in model.hook_points if point.kind.endswith("_scale")]
    points += [dictionary.write_hook(layer) for layer in sorted(constrained)]
    clean = model.forward([list(tokens)], HookSpec().capture(*points, *dictionary.read_hooks), want=None)
    values = {point: clean[point] for point in points}
    if not constrained:
        return Frozen(values)
    reads = {layer: clean[dictionary.read_hook(layer)][0] for layer in dictionary.layers}
    activations = {
        layer: dictionary.layer(layer).encode(reads[layer])
        for layer in {setting.layer for setting in settings}
    }
    # As in the graph, features at the first positions count as 0.
    for of_layer in activations.values():
        of_layer[: options.zero_positions] = 0
    # A linear skip is not frozen: its output follows its input, relative to the clean input.
    skipped = {layer for layer in constrained if dictionary.layer(layer).W_skip is not None}
    return Frozen(values, activations, {layer: reads[layer] for layer in skipped}, constrained)


def _stacked(taps: FeatureTaps) -> Tensor:
    """Feature activations [layer, position, feature] that the taps of a pass recorded."""
    return torch.stack([taps.kept[layer] for layer in sorted(taps.kept)])


def _reaches(setting: SetFeature, position: int) -> bool:
    """Whether an intervention on a slice without end applies at a position after the prompt."""
    # A negative start lies within the prompt.
    start = cast("slice", setting.position).start
    return start is None or start < 0 or position >= start
