"""A loaded transformers model being probed: passes over reproducible random prompts, with and without hooks.

Border: one loaded module; probe.py and adding.py draw conclusions from its passes.

Axes: B prompts, S positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...architectures.bridge.config import BridgeConfig
from ...architectures.points import HookPoint
from ...hooks.spec import Capture, HookSpec
from ...hooks.taps import RunTaps
from .network import Bridged
from .reference import in_one_line
from .stack import NotBridged
from .trace import Call, traced

__all__ = ["LENGTHS", "Examined", "Passed", "agree"]

LENGTHS = (1, 2, 7, 40, 90)
"""Lengths of the prompts that every model is checked on, up to its context length."""
TOLERANCE = 1e-4
"""Largest difference, relative to the largest value, between passes that should agree but differ in batch
size or in how a change is made: float32 passes of other shapes differ by 1e-6 to 1e-5."""


@dataclass(frozen=True)
class Passed:
    """Logits and captured activations of one forward pass of a model being probed."""

    logits: Tensor
    """[B, S, V]."""
    at: Mapping[HookPoint, Tensor]
    """Captured activations by hook point."""


def agree(logits: Tensor, reference: Tensor) -> bool:
    """Whether logits of two passes are equal up to rounding, within 1e-4 of the largest one (`TOLERANCE`)."""
    return bool(float((logits - reference).abs().max()) <= TOLERANCE * float(reference.abs().max()))


class Examined:
    """A transformers model that is being probed, and passes through it."""

    tokens: int
    """Number of rows of the model's embedding matrix."""

    def __init__(self, module: nn.Module) -> None:
        """Raises NotBridged if the model has no matrix of token embeddings. module: a transformers model."""
        self.module = module
        self.config: Any = module.config
        untyped: Any = module
        table = untyped.get_input_embeddings() if hasattr(module, "get_input_embeddings") else None
        weight = getattr(table, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            raise NotBridged(
                "expected a model whose get_input_embeddings() gives one matrix of token embeddings, found "
                "none"
            )
        self.tokens = weight.shape[0]

    def ids(self, rows: int, length: int, *, seed: int) -> Tensor:
        """Random token ids [B, S], the same for equal arguments, without the special tokens that the model's
        config names.

        Arguments:
            rows: number of prompts B.
            length: tokens per prompt S.
            seed: seed of the random numbers.
        """
        text_config = self.config.get_text_config()
        special_ids = {
            value
            for key, value in text_config.to_dict().items()
            if key.endswith("token_id") and isinstance(value, int)
        }
        declared = getattr(text_config, "vocab_size", None)
        n_tokens = min(self.tokens, declared) if isinstance(declared, int) else self.tokens
        usable = torch.tensor([token for token in range(n_tokens) if token not in special_ids] or [0])
        generator = torch.Generator().manual_seed(seed + 1000 * length)
        return usable[torch.randint(0, len(usable), (rows, length), generator=generator)]

    def plain(self, ids: Tensor) -> Tensor:
        """Logits [B, S, V] of the model without hooks, for token ids [B, S]. Raises NotBridged if the model
        fails, or logits are not finite."""
        try:
            output = self.module(input_ids=ids)
        except Exception as error:
            raise NotBridged(
                f"expected a model that runs prompts of {ids.shape[1]} tokens from token ids alone, found "
                f"one that fails ({in_one_line(error)})"
            ) from error
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != ids.shape:
            shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise NotBridged(
                f"expected logits [prompt, position, token] for prompts of shape {list(ids.shape)}, found "
                f"{shape}"
            )
        if not bool(torch.isfinite(logits).all()):
            raise NotBridged(
                f"expected finite logits, found NaN or infinite logits for prompts of {ids.shape[1]} tokens"
            )
        return logits

    def runs(self, length: int) -> bool:
        """Whether the model can run a prompt of this many tokens without an error."""
        try:
            self.module(input_ids=self.ids(1, length, seed=1))
        except Exception:  # noqa: BLE001 - model code may raise anything for too long a prompt
            return False
        return True

    def traced(self, ids: Tensor, run: Callable[[], Any]) -> Sequence[Call]:
        """All calls of the model's submodules during a pass, with copies of the hidden states that they take
        and give.

        Arguments:
            ids: token ids of the pass [B, S]; a tensor whose first axes have these sizes is a hidden state.
            run: runs the pass.
        """
        size = (ids.shape[0], ids.shape[1])

        def is_state(value: Tensor) -> bool:
            # Some families have positions before prompts.
            has_axes = tuple(value.shape[:2]) in (size, size[::-1])
            return value.is_floating_point() and value.ndim >= 3 and has_axes

        calls, _ = traced(self.module, run, is_state)
        return calls

    def hooked(self, config: BridgeConfig, ids: Tensor, spec: HookSpec) -> Passed:
        """Logits and captured activations of a pass through the bridge's network, with interventions.

        Arguments:
            config: structure of the model as far as it has been found.
            ids: token ids [B, S].
            spec: captures and interventions.
        """
        network, captured = Bridged(config, self.module), dict[Capture, Tensor]()
        try:
            logits = network.logits(ids, RunTaps(spec.bind(config.hook_points), captured.__setitem__))
        finally:
            network.remove()
        return Passed(logits, {capture.point: value for capture, value in captured.items()})

    def settings(self) -> dict[str, Any]:
        """State that a pass could change and a later pass read, by name: attributes of all modules that are
        numbers, booleans or strings, settings of the config, and summaries of buffers."""
        settings = {
            f"{path}.{name}": value
            for path, module in self.module.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, bool | int | float | str)
        }
        settings |= {f"config.{key}": str(value) for key, value in self.config.to_dict().items()}
        return settings | {name: _summary(value) for name, value in self.module.named_buffers()}


def _summary(buffer: Tensor) -> str:
    """Shape and sum of a buffer as text, which reveals changes of the buffer."""
    return f"{list(buffer.shape)} of sum {float(buffer.double().sum()):.17g}"


def noise(shape: Sequence[int], like: Tensor, seed: int = 8) -> Tensor:
    """Normally distributed random numbers with the standard deviation of a tensor.

    Arguments:
        shape: Shape of the result.
        like: Tensor; the standard deviation of the numbers is that of its entries, plus 1e-3.
        seed: Seed of the random numbers.

    Returns:
        Random numbers on the CPU, in torch's default dtype.
    """
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)) * float(
        like.std(correction=0) + 1e-3
    )
