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
    """Activations of one prompt that the local replacement model freezes, in the dtype of the model."""

    tokens: tuple[int, ...]
    """Token ids of the prompt."""
    read: Mapping[int, Tensor]
    """Input of the transcoder [position, d_in], by layer."""
    written: Mapping[int, Tensor]
    """Output of the MLP at the write hook [position, d_out], by layer."""
    patterns: Mapping[int, Tensor]
    """Attention pattern [head, query_position, key_position], by layer."""
    scales: Mapping[HookPoint, Tensor]
    """Divisors of each norm [position], by hook point."""
    embed: Tensor
    """Input of the first layer, [position, hidden], after the family's embedding scale."""
    logits: Tensor
    """Logits of the last position, [vocab], after the soft cap."""

    @property
    def n_positions(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.tokens)


def require_attention(config: Architecture, model: str) -> None:
    """Check that attribution graphs support a model: causal attention, then an MLP, each after its own norm.

    Arguments:
        config: Architecture of the model.
        model: Name of the model, for messages.

    Raises:
        ConfigError: A layer has another form.
    """
    other_mixers = {layer.mixer.kind for layer in config.layers} - {"attention"}
    if other_mixers:
        raise ConfigError(
            f"attribution graphs need a model with attention in every layer, found "
            f"{' and '.join(sorted(other_mixers))} in {model}; choose another model"
        )
    if config.looks_ahead:
        raise ConfigError(
            f"attribution graphs need a causal model, found the bidirectional model {model}; choose another "
            "model"
        )
    config.require_linear_head()
    for layer in config.layers:
        if layer.is_parallel or layer.norms not in ("before", "around"):
            layout = "an MLP parallel to attention" if layer.is_parallel else f"norms {layer.norms!r}"
            raise ConfigError(
                "attribution graphs need layers of attention followed by an MLP, with a norm before each, "
                f"found {layout} in {model}; choose another model"
            )


def require_transcoders(dictionary: Dictionary, config: Architecture, model: str) -> None:
    """Check that a dictionary has transcoders for the MLP of every layer of the model.

    Arguments:
        dictionary: The dictionary.
        config: Architecture of the model.
        model: Name of the model, for messages.

    Raises:
        DictionaryError: It has no such transcoders.
    """
    dictionary.require_fit(config, model)
    read, write = dictionary.layout.read, dictionary.layout.write
    if dictionary.kind in ("sae", "crosscoder") or read not in READS or write not in WRITES:
        raise DictionaryError(
            f"expected transcoders for an attribution graph, which read {' or '.join(READS)} and write "
            f"{' or '.join(WRITES)}, found {dictionary.name}, which reads {read} and writes {write}; use "
            "another dictionary"
        )
    missing = sorted(set(range(config.num_layers)) - set(dictionary.layers))
    if missing:
        raise DictionaryError(
            f"expected transcoders of all {config.num_layers} layers of {model} for an attribution graph, "
            f"found none of {layers_text(missing)} in {dictionary.name}; use another dictionary"
        )


@plain_torch()
def frozen_pass(model: Model, dictionary: Dictionary, tokens: Sequence[int]) -> FrozenPass:
    """Run a prompt once, and record the activations that are frozen.

    Arguments:
        model: A loaded model.
        dictionary: Transcoders of the model.
        tokens: Token ids of the prompt.

    Raises:
        ConfigError: Attribution graphs do not support the model.
        DictionaryError: The dictionary does not fit the model.
        PromptError: Logits are infinite or NaN.
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
            f"the logits of {model.name} for this prompt are infinite or NaN in {model.dtype}; load the "
            "model with dtype='float32', or check its weights"
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
