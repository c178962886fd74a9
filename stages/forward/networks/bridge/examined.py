"""A model under examination: passes over prompts that are the same whenever asked, with and without hooks.

Border: one loaded module. What is concluded from its passes is other files' business (probe.py, adding.py).

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
"""Prompts every model is checked on, as far as its context reaches."""
BESIDE = 1e-4
"""Largest difference that company in a batch, or another way to make the same change, may make, relative to
the largest number: float32 passes in other shapes differ by 1e-6 to 1e-5 of it."""


@dataclass(frozen=True)
class Passed:
    """What a pass gave: logits [B, S, V], and captures by hook point."""

    logits: Tensor
    at: Mapping[HookPoint, Tensor]


def agree(one: Tensor, other: Tensor) -> bool:
    """Whether two passes gave the same, but for how they were computed."""
    return bool(float((one - other).abs().max()) <= BESIDE * float(other.abs().max()))


class Examined:
    """A module, and its passes. tokens: rows of its embedding."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.config: Any = module.config
        whole: Any = module
        table = whole.get_input_embeddings() if hasattr(module, "get_input_embeddings") else None
        weight = getattr(table, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            raise NotBridged("expected one matrix of token embeddings, found none")
        self.tokens = weight.shape[0]

    def ids(self, rows: int, length: int, *, seed: int) -> Tensor:
        """The same random tokens [B, S] whenever asked, but for those the configuration gives a meaning."""
        text = self.config.get_text_config()
        named = {
            value
            for key, value in text.to_dict().items()
            if key.endswith("token_id") and isinstance(value, int)
        }
        declared = getattr(text, "vocab_size", None)
        most = min(self.tokens, declared) if isinstance(declared, int) else self.tokens
        usable = torch.tensor([token for token in range(most) if token not in named] or [0])
        seeded = torch.Generator().manual_seed(seed + 1000 * length)
        return usable[torch.randint(0, len(usable), (rows, length), generator=seeded)]

    def plain(self, ids: Tensor) -> Tensor:
        """Logits [B, S, V] of the model by itself. Raises NotBridged where it gives none, or no numbers."""
        try:
            given = self.module(input_ids=ids)
        except Exception as error:
            raise NotBridged(
                f"expected it to run prompts of {ids.shape[1]} tokens of text alone, found that it cannot "
                f"({in_one_line(error)})"
            ) from error
        logits = getattr(given, "logits", None)
        if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != ids.shape:
            shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise NotBridged(
                f"expected logits [prompt, position, token] of prompts {list(ids.shape)}, found {shape}"
            )
        if not bool(torch.isfinite(logits).all()):
            raise NotBridged(f"expected finite logits, found others in prompts of {ids.shape[1]} tokens")
        return logits

    def runs(self, length: int) -> bool:
        """Whether it reads a prompt of so many tokens."""
        try:
            self.module(input_ids=self.ids(1, length, seed=1))
        except Exception:  # noqa: BLE001 - whatever foreign code raises, it cannot read so much
            return False
        return True

    def traced(self, ids: Tensor, run: Callable[[], Any]) -> Sequence[Call]:
        """Every call of a module while a pass over ids [B, S] runs."""
        size = (ids.shape[0], ids.shape[1])

        def is_state(value: Tensor) -> bool:
            fits = tuple(value.shape[:2]) in (size, size[::-1])
            return value.is_floating_point() and value.ndim >= 3 and fits

        calls, _ = traced(self.module, run, is_state)
        return calls

    def hooked(self, config: BridgeConfig, ids: Tensor, spec: HookSpec) -> Passed:
        """A pass behind the bridge, as far as it is found by now."""
        network, held = Bridged(config, self.module), dict[Capture, Tensor]()
        try:
            logits = network.logits(ids, RunTaps(spec.bind(config.hook_points), held.__setitem__))
        finally:
            network.remove()
        return Passed(logits, {capture.point: value for capture, value in held.items()})

    def settings(self) -> dict[str, Any]:
        """Every number, word, switch and buffer of its modules and their configurations, which passes may
        read; what is large by its sum."""
        plain = bool | int | float | str
        found = {
            f"{path}.{name}": value
            for path, each in self.module.named_modules()
            for name, value in vars(each).items()
            if isinstance(value, plain)
        }
        found |= {f"config.{key}": str(value) for key, value in self.config.to_dict().items()}
        return found | {name: _told(value) for name, value in self.module.named_buffers()}


def _told(buffer: Tensor) -> str:
    """A buffer, as it can be compared."""
    return f"{list(buffer.shape)} of sum {float(buffer.double().sum()):.17g}"


def noise(shape: Sequence[int], like: Tensor, seed: int = 8) -> Tensor:
    """Random numbers as large as others."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)) * float(
        like.std(correction=0) + 1e-3
    )
