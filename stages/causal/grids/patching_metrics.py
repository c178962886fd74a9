"""Metrics of patched runs, as values: what is read off the next-token logits of each run.

A metric is data: it says what it is called, its unit, which logits it needs and how it enters a key. It sees
one vector of logits and those of the clean run; what it gives is the number of one run, and, where it has
one, its gradient with respect to these logits in closed form. `Recovery` rescales the numbers of another
metric so that 0 is the corrupted run and 1 the clean one.

Border: numpy vectors of logits; knows no model and no runs. Never imports torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ....pipeline.code import code_version
from ....pipeline.parameters import parameter_record
from ....store.arrays import Floats
from ....store.errors import PromptError, StageError
from .. import metrics

__all__ = [
    "KL",
    "Custom",
    "LogProbability",
    "LogitDifference",
    "Metric",
    "Probability",
    "Rank",
    "Recovery",
    "check_metrics",
    "wanted",
]


class Metric(ABC):
    """One number of one run. A frozen dataclass whose fields are its place in the key.

    A metric of one's own may have a `version` among its fields or as a class variable; without one its code
    is its version, as of `Custom`.
    """

    units: str
    long_name: str
    name: str
    """Of the variable that holds it; two metrics of one experiment need two names."""

    @property
    def tokens(self) -> tuple[int, ...] | None:
        """Vocabulary items whose logits are needed; None for all of them."""
        return None

    @property
    def named(self) -> tuple[int, ...]:
        """Vocabulary items it asks about, which a model must have (`check_metrics`)."""
        return self.tokens or ()

    def canonical(self) -> dict[str, Any]:
        """Plain values that identify the metric, its code as it is now among them."""
        kind = type(self).__name__
        if type(self).__module__ == __name__:
            return {"metric": kind, **vars(self)}
        version = getattr(self, "version", None)
        if version is None:
            version = code_version(f"metric {self.name!r}", type(self))
        # As stage parameters: code may tell a tuple from a list. What has no record is refused by the digest,
        # unless a subclass puts something else in its place.
        fields = {field: parameter_record(value, lambda other: other) for field, value in vars(self).items()}
        return {"metric": kind, **fields, "version": version}

    @abstractmethod
    def value(self, logits: Floats, clean: Floats) -> float:
        """The number of one run. logits, clean: of this run and of the clean one, float64 [vocab], or
        [tokens] in the order of `tokens`."""

    needs_baseline: ClassVar[bool] = False
    """Whether its gradient depends on the clean run."""

    @property
    def has_gradient(self) -> bool:
        """Whether it says one; else `gradient` raises."""
        return type(self).gradient is not Metric.gradient

    def gradient(self, logits: Floats, clean: Floats) -> Floats:
        """Derivative of `value` with respect to each of these logits, float64, of their shape. StageError for
        a metric that has none."""
        raise StageError(
            f"metric {self.name!r}: expected one with a gradient, found {type(self).__name__}; take "
            "LogitDifference, LogProbability, Probability or KL"
        )

    def scaled(self, values: Floats, clean: float, corrupted: float) -> Floats:
        """Numbers of runs on the scale the metric reports. clean, corrupted: the numbers of those runs."""
        return values


@dataclass(frozen=True)
class LogitDifference(Metric):
    """logits[correct] - logits[wrong]: above 0 where the correct token is the likelier of the two."""

    correct: int
    wrong: int
    name: str = "logit_difference"

    units: str = field(default="logits", init=False, repr=False)
    long_name: str = field(
        default="logit of the correct token minus that of the wrong one", init=False, repr=False
    )

    @property
    def tokens(self) -> tuple[int, ...]:
        """The two tokens it compares."""
        return (self.correct, self.wrong)

    def value(self, logits: Floats, clean: Floats) -> float:
        """In logits, of the two in the order of `tokens`."""
        return float(logits[0] - logits[1])

    def gradient(self, logits: Floats, clean: Floats) -> Floats:
        """[1, -1], in the order of `tokens`."""
        return np.array([1.0, -1.0])


@dataclass(frozen=True)
class KL(Metric):
    """KL(clean || run) of the next-token distributions, 0 for the clean run."""

    name: str = "kl"

    units: str = field(default="nats", init=False, repr=False)
    long_name: str = field(default="KL(clean || run) of next-token distributions", init=False, repr=False)
    needs_baseline: ClassVar[bool] = True

    def value(self, logits: Floats, clean: Floats) -> float:
        """In nats, never below 0."""
        return float(metrics.kl_divergence(clean, logits))

    def gradient(self, logits: Floats, clean: Floats) -> Floats:
        """Probabilities of this run less those of the clean one; 0 at the clean run."""
        return metrics.kl_gradient(clean, logits)


@dataclass(frozen=True)
class Probability(Metric):
    """Probability of one token among the whole vocabulary."""

    token: int
    name: str = "probability"

    units: str = field(default="1", init=False, repr=False)
    long_name: str = field(default="probability of the token", init=False, repr=False)

    @property
    def named(self) -> tuple[int, ...]:
        """The token it asks about."""
        return (self.token,)

    def value(self, logits: Floats, clean: Floats) -> float:
        """Between 0 and 1."""
        return float(metrics.probability(logits, self.token))

    def gradient(self, logits: Floats, clean: Floats) -> Floats:
        """p times that of log p."""
        return metrics.probability_gradient(logits, self.token)


@dataclass(frozen=True)
class LogProbability(Metric):
    """Log-probability of one token among the whole vocabulary."""

    token: int
    name: str = "log_probability"

    units: str = field(default="nats", init=False, repr=False)
    long_name: str = field(default="log-probability of the token", init=False, repr=False)

    @property
    def named(self) -> tuple[int, ...]:
        """The token it asks about."""
        return (self.token,)

    def value(self, logits: Floats, clean: Floats) -> float:
        """In nats, at most 0."""
        return float(metrics.log_softmax(logits)[self.token])

    def gradient(self, logits: Floats, clean: Floats) -> Floats:
        """1 at the token, less the probabilities."""
        return metrics.log_probability_gradient(logits, self.token)


@dataclass(frozen=True)
class Rank(Metric):
    """How many tokens are likelier than one: 0 for the likeliest."""

    token: int
    name: str = "rank"

    units: str = field(default="1", init=False, repr=False)
    long_name: str = field(default="tokens likelier than the token", init=False, repr=False)

    @property
    def named(self) -> tuple[int, ...]:
        """The token it asks about."""
        return (self.token,)

    def value(self, logits: Floats, clean: Floats) -> float:
        """A whole number from 0; tokens that are just as likely do not count."""
        return float((logits > logits[self.token]).sum())


@dataclass(frozen=True)
class Recovery(Metric):
    """Another metric rescaled: 0 = corrupted run, 1 = clean run; not clipped.

    Of `KL` it is 1 - KL(clean || patched) / KL(clean || corrupted).
    """

    of: Metric
    name: str = "recovery"

    units: str = field(default="1", init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.of, Recovery):
            raise StageError("expected recovery of a metric, found recovery of a recovery; give the metric")

    @property
    def long_name(self) -> str:  # type: ignore[override]  # depends on the metric
        """Which metric is rescaled, and what 0 and 1 are."""
        return f"recovery of {self.of.name}, 0 = corrupted, 1 = clean"

    @property
    def tokens(self) -> tuple[int, ...] | None:
        """See `Metric`: those of the metric it rescales."""
        return self.of.tokens

    @property
    def named(self) -> tuple[int, ...]:
        """See `Metric`: those of the metric it rescales."""
        return self.of.named

    def canonical(self) -> dict[str, Any]:
        """See `Metric`; the metric it rescales stands in it as it identifies itself."""
        return {"metric": "Recovery", "of": self.of.canonical(), "name": self.name}

    def value(self, logits: Floats, clean: Floats) -> float:
        """Of the metric, not yet rescaled."""
        return self.of.value(logits, clean)

    def scaled(self, values: Floats, clean: float, corrupted: float) -> Floats:
        """StageError where clean and corrupted runs do not differ: there is nothing to recover."""
        if abs(clean - corrupted) <= 1e-10 + 1e-7 * max(abs(clean), abs(corrupted)):
            raise StageError(
                f"recovery of {self.of.name}: expected clean and corrupted runs that differ, found "
                f"{clean:.6g} and {corrupted:.6g}; choose other prompts or another metric"
            )
        return (values - corrupted) / (clean - corrupted)


@dataclass(frozen=True)
class Custom(Metric):
    """A function of the logits of one run: float64 [vocab] -> float.

    version: moves when numbers move; without one the function's code is its version, with everything that
    code reads from outside, as it is when the key is made. StageError then for what has no identity.
    derivative: its gradient, float64 [vocab] -> [vocab]; part of the version where there is none.
    """

    function: Callable[[Floats], float] = field(repr=False)
    version: int | str | None = None
    name: str = ""
    units: str = "1"
    long_name: str = ""
    derivative: Callable[[Floats], Floats] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        label = self.name or getattr(self.function, "__name__", "metric")
        object.__setattr__(self, "name", "metric" if label == "<lambda>" else label)
        object.__setattr__(self, "long_name", self.long_name or self.name.replace("_", " "))

    def canonical(self) -> dict[str, Any]:
        """Name, unit and version; never the address of the function."""
        told = {"name": self.name, "units": self.units, "long_name": self.long_name}
        versions: dict[str, Any] = {"version": self._version_of(self.function)}
        versions |= {} if self.derivative is None else {"derivative": self._version_of(self.derivative)}
        return {"metric": "Custom", **versions, **told}

    @property
    def has_gradient(self) -> bool:
        """Where it was given one."""
        return self.derivative is not None

    def gradient(self, logits: Floats, clean: Floats) -> Floats:
        """What the derivative says; StageError unless it is finite numbers, one for each logit."""
        if self.derivative is None:
            return super().gradient(logits, clean)
        found = np.asarray(self.derivative(logits), np.float64)
        if found.shape != logits.shape or not np.isfinite(found).all():
            raise StageError(
                f"metric {self.name!r}: expected {len(logits)} finite numbers as its gradient, found shape "
                f"{list(found.shape)}; return one for each logit"
            )
        return found

    def _version_of(self, function: Callable[[Floats], Any]) -> int | str:
        return code_version(f"metric {self.name!r}", function) if self.version is None else self.version

    def value(self, logits: Floats, clean: Floats) -> float:
        """What the function says; StageError unless it is a finite number."""
        found = float(self.function(logits))
        if not np.isfinite(found):
            raise StageError(f"metric {self.name!r}: expected a finite number for every run, found {found}")
        return found


def check_metrics(chosen: Sequence[Metric], vocab_size: int) -> None:
    """StageError for no metric or two of one name, PromptError for a token id out of range."""
    if not chosen:
        raise StageError("expected at least one metric, found none; give metrics=(KL(),)")
    names = [metric.name for metric in chosen]
    for name in names:
        if names.count(name) > 1:
            raise StageError(f"expected metrics of different names, found {name!r} twice; give name=… to one")
    for metric in chosen:
        for token in metric.named:
            if not 0 <= token < vocab_size:
                raise PromptError(
                    f"metric {metric.name!r}: expected a token id in 0..{vocab_size - 1}, found {token}"
                )


def wanted(chosen: Sequence[Metric]) -> tuple[int, ...] | None:
    """Vocabulary items whose logits several metrics need together, ascending; None for all."""
    found: set[int] = set()
    for metric in chosen:
        if metric.tokens is None:
            return None
        found.update(metric.tokens)
    return tuple(sorted(found))


def read(chosen: Sequence[Metric], logits: Floats, clean: Floats) -> Floats:
    """The number of one run by every metric, float64 [metric]. logits, clean: of the items `wanted` names."""
    held = wanted(chosen)

    def part(metric: Metric, vector: Floats) -> Floats:
        if held is None and metric.tokens is not None:
            return vector[list(metric.tokens)]
        if held is None or metric.tokens is None:
            return vector
        return vector[[held.index(token) for token in metric.tokens]]

    return np.array([metric.value(part(metric, logits), part(metric, clean)) for metric in chosen])
