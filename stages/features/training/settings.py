"""Settings of a training as plain, checked values: kind of dictionary, size, activation, schedule.

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
"""Dictionary kinds that training supports."""
ACTIVATIONS = ("topk", "batchtopk", "jumprelu", "relu")
"""Activation functions with which dictionaries can be trained."""
PENALTIES = {"relu": ("l1", "tanh"), "jumprelu": ("step", "tanh"), "topk": (), "batchtopk": ()}
"""Sparsity penalties that each activation function allows; the first is the default."""


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of one training of a dictionary. Hook points are named without block: "hook_resid_post".

    Raises:
        ConfigError: Values contradict each other; the message names the one to change.
    """

    kind: str = option(
        "sae",
        "sae (writes what it reads), plt (a transcoder per layer), clt (cross-layer) or crosscoder (one set "
        "of features for all layers, or models)",
    )
    read: str = option("hook_resid_post", "hook point that features read")
    write: str | None = option(None, "hook point that features write to; default, the one that they read")
    layers: tuple[int, ...] | None = option(None, "layers to train on; default, all that are stored")
    features: int = option(4096, "number of features of each layer")
    activation: str = option("batchtopk", "topk, batchtopk, jumprelu or relu")
    k: int = option(32, "active features per token and layer (topk, batchtopk)")
    penalty: str | None = option(None, "sparsity penalty; of relu: l1 or tanh; of jumprelu: step or tanh")
    sparsity: float = option(
        1e-3, "coefficient of the sparsity penalty, in units of the fraction of variance unexplained"
    )
    tanh_scale: float = option(4.0, "c of the penalty tanh(c a |W_dec|)")
    bandwidth: float = option(
        0.05, "width of the band around the threshold in which it gets gradients (jumprelu)"
    )
    threshold: float = option(0.01, "initial threshold (jumprelu)")
    dead_penalty: float = option(3e-6, "coefficient of the loss that revives dead features (jumprelu)")
    prefixes: tuple[int, ...] = option(
        (), "numbers n for which the first n features must also reconstruct alone (Matryoshka)"
    )
    skip: bool = option(False, "whether a linear skip connection is trained beside the features (plt)")
    start: str = option(
        "tied", "initial weights: tied (random; in an sae encoder = decoder), or samples of the activations"
    )
    steps: int = option(10_000, "number of optimiser steps")
    batch: int = option(4096, "number of tokens of a step")
    lr: float | None = option(None, "peak learning rate of Adam; default 2e-4 sqrt(2^14 / features)")
    warmup: float = option(0.01, "share of the steps over which the learning rate rises from 0")
    decay: float = option(0.2, "share of the steps, at the end, over which the learning rate falls to 0")
    clip: float = option(1.0, "largest norm of the gradients; longer ones are scaled to it")
    annealing: float = option(
        0.1, "share of the steps, at the start, in which k falls, or the penalty rises, to its value"
    )
    auxiliary: float = option(
        1 / 32, "weight of the loss that revives dead features (topk, batchtopk); 0 for none"
    )
    dead_after: int | None = option(
        None,
        "number of tokens without activation after which a feature counts as dead; default 10 million, but "
        "at most a tenth of all tokens",
    )
    skip_positions: int = option(1, "number of positions at the start of each prompt that are left out")
    without: tuple[int, ...] = option((), "token ids that are left out at every position")
    validation: float = option(0.05, "share of the prompts that is held out for measurements")
    window: int = option(32_768, "number of tokens that are shuffled together in memory")
    block: int = option(1024, "number of neighbouring tokens that are read together")
    seed: int = option(0, "seed of the initial weights and of the order of batches")

    def __post_init__(self) -> None:
        _require_one_of("kind", self.kind, KINDS)
        _require_one_of("activation", self.activation, ACTIVATIONS)
        _require_one_of("start", self.start, ("tied", "samples"))
        allowed = PENALTIES[self.activation]
        # The default depends on the activation function, so it is set past the frozen dataclass.
        if self.penalty is None and allowed:
            object.__setattr__(self, "penalty", allowed[0])
        if self.penalty is not None:
            if not allowed:
                raise ConfigError(
                    f"the activation {self.activation} is trained without a sparsity penalty, found "
                    f"penalty={self.penalty!r}; leave the setting out"
                )
            _require_one_of(f"penalty of the activation {self.activation}", self.penalty, allowed)
        self._check_numbers()
        # Stored as a hook kind, so that all spellings of a hook point give equal settings.
        object.__setattr__(self, "read", hook_kind(self.read))
        object.__setattr__(self, "write", hook_kind(self.write) if self.write else self.read)
        for kind in (self.read, self.writes):
            if not BY_NAME[kind].per_layer:
                raise ConfigError(
                    "expected a hook point that every layer has as read and write, found "
                    f"{BY_NAME[kind].path!r}; choose another, such as hook_resid_post"
                )
        if self.is_autoencoder != (self.read == self.write):
            requirement = (
                "reads and writes the same hook point, so leave write out"
                if self.is_autoencoder
                else "writes to another hook point than it reads, so set write"
            )
            raise ConfigError(
                f"a dictionary of kind {self.kind!r} {requirement}; found read={self.read!r}, "
                f"write={self.write!r}"
            )
        if self.kind == "clt" and self.activation == "topk":
            raise ConfigError(
                "the file format of a clt cannot hold the activation topk; train it with "
                "activation='batchtopk' or 'jumprelu'"
            )
        if self.skip and self.kind != "plt":
            raise ConfigError(
                f"only a dictionary of kind 'plt' can have a skip connection, found skip with kind "
                f"{self.kind!r}; leave skip out"
            )

    def _check_numbers(self) -> None:
        as_count(self.seed, "seed", least=0, most=LARGEST)
        for name in ("features", "k", "steps", "batch", "window", "block"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"expected the setting {name} to be at least 1, found {getattr(self, name)}"
                )
        if self.is_top and self.k > self.features:
            raise ConfigError(
                f"expected k, the number of active features, to be at most features={self.features}, found "
                f"k={self.k}"
            )
        if self.window < self.block:
            raise ConfigError(
                f"expected window to be at least block={self.block}, found window={self.window}"
            )
        for name in ("warmup", "decay", "annealing", "validation"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"expected the setting {name} to be a share from 0 to below 1, found "
                    f"{getattr(self, name)}"
                )
        for name in ("sparsity", "dead_penalty", "auxiliary", "skip_positions"):
            if not getattr(self, name) >= 0:
                raise ConfigError(
                    f"expected the setting {name} to be at least 0, found {getattr(self, name)}"
                )
        for name in ("tanh_scale", "bandwidth", "threshold", "clip", "rate"):
            if not getattr(self, name) > 0:
                setting = "lr" if name == "rate" else name
                raise ConfigError(
                    f"expected the setting {setting} to be above 0, found {getattr(self, name)}"
                )
        # A prefix of all features would be redundant: they reconstruct together in any case.
        wrong = [n for n in self.prefixes if not 0 < n < self.features]
        if wrong:
            raise ConfigError(
                f"expected prefixes to be numbers from 1 to below features={self.features}, found {wrong[0]}"
            )

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
        """Number of tokens without activation after which a feature counts as dead."""
        return (
            self.dead_after if self.dead_after is not None else min(10_000_000, self.steps * self.batch // 10)
        )

    def plain(self) -> dict[str, Any]:
        """The settings by name as JSON values, with lists in place of tuples."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(self).items()
        }


def _require_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError if a setting is none of its choices."""
    if value not in choices:
        near = nearest(value, choices)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(
            f"expected the setting {name} to be one of {', '.join(choices)}, found {value!r}{hint}"
        )
