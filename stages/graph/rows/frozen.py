"""One forward pass over a prompt, which records everything that the local replacement model freezes.

Axes: position, head, query_position, key_position, hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....pipeline.ambient import plain_torch
from ....store.errors import ConfigError, DictionaryError, PromptError
from ...features.layers.layer import layers_text
from ...forward.architectures.points import HookPoint
from ...forward.hooks.spec import HookSpec
from ...forward.hooks.wants import LAST_LOGITS

if TYPE_CHECKING:
    from torch import Tensor

    from ...features.dictionary import Dictionary
    from ...forward.architectures.architecture import Architecture
    from ...forward.models.model import Model

__all__ = ["READS", "WRITES", "FrozenPass", "frozen_pass", "require_attention", "require_transcoders"]

# Between these and the residual stream lies at most a norm, so gradients are linear (replacement.py).
READS = ("resid_mid", "ln2_normalized", "mlp_pre")
"""Kinds of hook points that transcoders of a graph may read."""
WRITES = ("mlp_out", "mlp_post")
"""Kinds of hook points that transcoders of a graph may write."""


@dataclass(frozen=True, eq=False)
class FrozenPass:
    """Activations of one prompt, in the dtype of the model."""

    tokens: tuple[int, ...]
    """Token ids of the prompt."""
    read: Mapping[int, Tensor]
    """Layer -> input of the transcoder, [position, d_in]."""
    written: Mapping[int, Tensor]
    """Layer -> output of the MLP at the write hook, [position, d_out]."""
    patterns: Mapping[int, Tensor]
    """Layer -> attention pattern, [head, query_position, key_position]."""
    scales: Mapping[HookPoint, Tensor]
    """Hook point -> divisors of a norm, [position]."""
    embed: Tensor
    """Input of the first layer, [position, hidden], after the family's embedding scale."""
    logits: Tensor
    """Logits of the last position, [vocab], after the soft cap."""

    @property
    def n_positions(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.tokens)


def require_attention(config: Architecture, model: str) -> None:
    """Check that every layer is causal attention followed by an MLP, each after its own norm.

    Arguments:
        config: architecture of the model.
        model: name of the model, for messages.

    Raises:
        ConfigError: for another architecture.
    """
    other_mixers = {layer.mixer.kind for layer in config.layers} - {"attention"}
    if other_mixers:
        raise ConfigError(
            f"expected attention in every layer, found {' and '.join(sorted(other_mixers))} in {model}: "
            "attribution graphs follow attention heads"
        )
    if config.looks_ahead:
        raise ConfigError(
            f"expected a model whose positions see no later ones, found {model}; attribution graphs follow "
            "what comes before a token"
        )
    config.require_linear_head()
    for layer in config.layers:
        if layer.is_parallel or layer.norms not in ("before", "around"):
            layout = "an MLP beside it" if layer.is_parallel else f"norms {layer.norms}"
            raise ConfigError(
                f"expected norms before attention and before the MLP after it, found {layout} in {model}; "
                "attribution graphs do not follow such layers"
            )


def require_transcoders(dictionary: Dictionary, config: Architecture, model: str) -> None:
    """Check that a dictionary has transcoders for the MLP of every layer of the model.

    Arguments:
        dictionary: the dictionary.
        config: architecture of the model.
        model: name of the model, for messages.

    Raises:
        DictionaryError: for another dictionary.
    """
    dictionary.require_fit(config, model)
    read, write = dictionary.layout.read, dictionary.layout.write
    if dictionary.kind in ("sae", "crosscoder") or read not in READS or write not in WRITES:
        raise DictionaryError(
            f"expected transcoders that read {' or '.join(READS)} and write {' or '.join(WRITES)}, found "
            f"{dictionary.name}, which reads {read} and writes {write}; an attribution graph replaces MLPs"
        )
    missing = sorted(set(range(config.num_layers)) - set(dictionary.layers))
    if missing:
        raise DictionaryError(
            f"expected features of all {config.num_layers} layers of {model}, found none of "
            f"{layers_text(missing)} in {dictionary.name}; an attribution graph replaces every MLP"
        )


@plain_torch()
def frozen_pass(model: Model, dictionary: Dictionary, tokens: Sequence[int]) -> FrozenPass:
    """Run a prompt once, and record the activations that are frozen.

    Arguments:
        model: a loaded model.
        dictionary: transcoders of the model.
        tokens: token ids of the prompt.

    Raises:
        ConfigError: for a model that attribution graphs do not support.
        DictionaryError: for a dictionary that does not fit the model.
        PromptError: for logits that are not finite.
    """
    require_attention(model.config, model.name)
    require_transcoders(dictionary, model.config, model.name)
    layers = range(model.config.num_layers)
    scales = [point for point in model.hook_points if point.kind.endswith("_scale")]
    patterns = [HookPoint.pattern(layer) for layer in layers]
    reads, writes = dictionary.read_hooks, tuple(dictionary.write_hook(layer) for layer in layers)
    spec = HookSpec().capture(HookPoint.embed(), *scales, *patterns, *reads, *writes)
    # The graph explains the last position only; all logits would be [position, vocab].
    captured = model.forward([list(tokens)], spec, want=LAST_LOGITS)
    if not bool(captured.logits.isfinite().all()):
        raise PromptError(
            f"{model.name} gives logits that are not finite for this prompt in {model.dtype}; compute in "
            "float32, or check its weights"
        )
    # [0]: a batch of one prompt.
    return FrozenPass(
        tokens=tuple(tokens),
        read={layer: captured[dictionary.read_hook(layer)][0] for layer in dictionary.layers},
        written={layer: captured[writes[layer]][0] for layer in layers},
        patterns={layer: captured[patterns[layer]][0] for layer in layers},
        scales={point: captured[point][0, :, 0] for point in scales},  # [batch, position, 1]
        embed=captured[HookPoint.embed()][0],
        logits=captured.logits[0, 0],
    )
