"""Settings of a training: kind of dictionary, size, activation function, schedule; plain values, checked
once.

Border: values only; imports no torch. Two trainings with equal settings on equal data give equal bytes, on
one machine with one number of threads. Intervals of logging and saving are not settings.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ....store.arrays import as_count
from ....store.digest import LARGEST
from ....store.errors import ConfigError, nearest
from ...forward.architectures.points import BY_NAME
from ...options import option
from ..layers.names import hook_kind

__all__ = ["TrainingSettings"]

KINDS = ("sae", "plt", "clt", "crosscoder")
"""Kinds of dictionaries."""
ACTIVATIONS = ("topk", "batchtopk", "jumprelu", "relu")
"""Activation functions."""
PENALTIES = {"relu": ("l1", "tanh"), "jumprelu": ("step", "tanh"), "topk": (), "batchtopk": ()}
"""Sparsity penalties that each activation function allows; the first is the default."""


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of one training. Hook points are named inside a block: "hook_resid_post".

    Raises:
        ConfigError: Values contradict each other; the message names the one to change.
    """

    kind: str = option(
        "sae",
        "sae (writes what it reads), plt (a transcoder per layer), clt (cross-layer) or crosscoder (one set "
        "of features for all layers, or models)",
    )
    read: str = option("hook_resid_post", "hook point that is read")
    write: str | None = option(None, "hook point that is written; default, the one that is read")
    layers: tuple[int, ...] | None = option(None, "layers; default, all that are stored")
    features: int = option(4096, "features of each layer")
    activation: str = option("batchtopk", "topk, batchtopk, jumprelu or relu")
    k: int = option(32, "active features per token and layer (topk, batchtopk)")
    penalty: str | None = option(None, "of relu: l1 or tanh; of jumprelu: step or tanh")
    sparsity: float = option(
        1e-3, "coefficient of the penalty, in units of the fraction of variance unexplained"
    )
    tanh_scale: float = option(4.0, "c of the penalty tanh(c a |W_dec|)")
    bandwidth: float = option(0.05, "width of the straight-through estimate (jumprelu)")
    threshold: float = option(0.01, "initial threshold (jumprelu)")
    dead_penalty: float = option(3e-6, "coefficient that pulls dead features back (jumprelu)")
    prefixes: tuple[int, ...] = option(
        (), "numbers of first features that reconstruct by themselves (Matryoshka)"
    )
    skip: bool = option(False, "a linear part beside the features (plt)")
    start: str = option("tied", "first weights: tied (sae) or unrelated random rows, or samples of the data")
    steps: int = option(10_000, "optimiser steps")
    batch: int = option(4096, "tokens of a step")
    lr: float | None = option(None, "learning rate of Adam; default 2e-4 sqrt(2^14 / features)")
    warmup: float = option(0.01, "share of the steps over which the learning rate rises")
    decay: float = option(0.2, "share of the steps over which it falls to 0 at the end")
    clip: float = option(1.0, "norm to which gradients are cut")
    annealing: float = option(0.1, "share of the steps in which k falls, or the penalty rises, to its value")
    auxiliary: float = option(
        1 / 32, "weight of the loss that dead features get (topk, batchtopk); 0 for none"
    )
    dead_after: int | None = option(
        None, "tokens without firing after which a feature is dead; default 10 million, or a tenth of all"
    )
    skip_positions: int = option(1, "first positions of each prompt that are left out")
    without: tuple[int, ...] = option((), "token ids that are left out, wherever they stand")
    validation: float = option(0.05, "share of the prompts held out")
    window: int = option(32_768, "tokens shuffled together in memory")
    block: int = option(1024, "neighbouring tokens read together")
    seed: int = option(0, "seed of weights and of the order of batches")

    def __post_init__(self) -> None:
        _one_of("kind", self.kind, KINDS)
        _one_of("activation", self.activation, ACTIVATIONS)
        _one_of("start", self.start, ("tied", "samples"))
        allowed = PENALTIES[self.activation]
        # The default depends on the activation function, so it is set past the frozen dataclass.
        if self.penalty is None and allowed:
            object.__setattr__(self, "penalty", allowed[0])
        if self.penalty is not None:
            if not allowed:
                raise ConfigError(
                    f"{self.activation} has no penalty, found penalty={self.penalty!r}; leave it out"
                )
            _one_of(f"penalty of {self.activation}", self.penalty, allowed)
        self._check_numbers()
        # Stored as a hook kind, so that all spellings of a hook point give equal settings.
        object.__setattr__(self, "read", hook_kind(self.read))
        object.__setattr__(self, "write", hook_kind(self.write) if self.write else self.read)
        for kind in (self.read, self.writes):
            if not BY_NAME[kind].per_layer:
                raise ConfigError(f"expected a hook point that every layer has, found {BY_NAME[kind].path!r}")
        if self.is_autoencoder != (self.read == self.write):
            requirement = (
                "reads and writes one hook point"
                if self.is_autoencoder
                else "writes to another than it reads"
            )
            raise ConfigError(
                f"kind {self.kind!r} {requirement}, found read={self.read!r}, write={self.write!r}"
            )
        if self.kind == "clt" and self.activation == "topk":
            raise ConfigError(
                "the file format of a clt cannot say topk; train it with activation='batchtopk' or 'jumprelu'"
            )
        if self.skip and self.kind != "plt":
            raise ConfigError(
                f"only a plt has a linear part beside its features, found skip with {self.kind!r}"
            )

    def _check_numbers(self) -> None:
        as_count(self.seed, "seed", least=0, most=LARGEST)
        for name in ("features", "k", "steps", "batch", "window", "block"):
            if getattr(self, name) < 1:
                raise ConfigError(f"expected {name} of at least 1, found {getattr(self, name)}")
        if self.is_top and self.k > self.features:
            raise ConfigError(f"expected k of at most features={self.features}, found k={self.k}")
        if self.window < self.block:
            raise ConfigError(f"expected window of at least block={self.block}, found window={self.window}")
        for name in ("warmup", "decay", "annealing", "validation"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"expected {name} as a share from 0 to below 1, found {getattr(self, name)}"
                )
        for name in ("sparsity", "dead_penalty", "auxiliary", "skip_positions"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"expected {name} of at least 0, found {getattr(self, name)}")
        for name in ("tanh_scale", "bandwidth", "threshold", "clip", "rate"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"expected {name} above 0, found {getattr(self, name)}")
        # All features together are reconstructed in any case.
        wrong = [n for n in self.prefixes if not 0 < n < self.features]
        if wrong:
            raise ConfigError(f"expected prefixes from 1 to below features={self.features}, found {wrong[0]}")

    @property
    def writes(self) -> str:
        """Hook kind that features write to."""
        return self.write or self.read

    @property
    def is_autoencoder(self) -> bool:
        """Whether features write the hook point that they read."""
        return self.kind in ("sae", "crosscoder")

    @property
    def is_top(self) -> bool:
        """Whether sparsity is set by a number of active features instead of a penalty."""
        return self.activation in ("topk", "batchtopk")

    @property
    def rate(self) -> float:
        """Peak learning rate (Gao et al. 2024 scale it with the inverse root of the number of features)."""
        # 2e-4 at 2^14 features.
        return self.lr if self.lr is not None else 2e-4 * (2**14 / self.features) ** 0.5

    @property
    def dead_tokens(self) -> int:
        """Number of tokens without firing after which a feature counts as dead."""
        return (
            self.dead_after if self.dead_after is not None else min(10_000_000, self.steps * self.batch // 10)
        )

    def plain(self) -> dict[str, Any]:
        """Fields by name as JSON values, tuples as lists."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(self).items()
        }


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        near = nearest(value, choices)
        hint = f"; nearest is {near!r}" if near else ""
        raise ConfigError(f"expected {name} to be one of {', '.join(choices)}, found {value!r}{hint}")
