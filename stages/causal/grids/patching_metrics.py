"""Metrics of runs, as values: numbers computed from the next-token logits of each run.

A metric declares its name, its unit, the logits that it needs and its identity in a key. It maps the logits
of a run (and of the clean run) to one number and, if differentiable, to the gradient with respect to these
logits in closed form. `Recovery` rescales another metric to 0 for the corrupted run and 1 for the clean run.

Border: numpy vectors of logits; no model and no runs. Never imports torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ....pipeline.code import code_version
from ....pipeline.parameters import parameter_record
from ....store.arrays import Floats
from ....store.errors import PromptError, StageError
from .. import metrics

if TYPE_CHECKING:
    from ...forward.architectures.architecture import Architecture

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
    "required_tokens",
]


class Metric(ABC):
    """Base class of metrics: frozen dataclasses that compute one number from the logits of a run.

    The fields enter keys of results. A metric defined by a user may have `version` as a field or class
    variable;
    otherwise the digest of its code is its version.
    """

    units: str
    """Unit of the number: "logits", "nats", "1"."""
    long_name: str
    """Description, stored with the variable."""
    name: str
    """Name of the variable that holds the metric, distinct within an experiment."""

    @property
    def tokens(self) -> tuple[int, ...] | None:
        """Ids of the tokens whose logits the metric reads; None for the whole vocabulary."""
        return None

    @property
    def named(self) -> tuple[int, ...]:
        """Ids of tokens that must exist in the model's vocabulary (`check_metrics`)."""
        return self.tokens or ()

    def canonical(self) -> dict[str, Any]:
        """Plain values that identify the metric in keys, with a digest of its code if it has no version."""
        kind = type(self).__name__
        # Fields declared with init=False (unit, description) stay on the class: vars, and the key, lack them.
        if type(self).__module__ == __name__:
            return {"metric": kind, **vars(self)}
        version = getattr(self, "version", None)
        if version is None:
            version = code_version(f"metric {self.name!r}", type(self))
        # Recorded as stage parameters are, as code can distinguish a tuple from a list. Values without a
        # record pass unchanged: the digest refuses them, unless a subclass replaces them.
        fields = {field: parameter_record(value, lambda other: other) for field, value in vars(self).items()}
        return {"metric": kind, **fields, "version": version}

    @abstractmethod
    def value(self, logits: Floats, clean: Floats) -> float:
        """The metric of one run, before rescaling.

        Arguments:
            logits: Logits of the run, float64 [vocab], or [token] in the order of `tokens`.
            clean: Logits of the clean run, same shape.
        """

    needs_baseline: ClassVar[bool] = False
    """Whether the gradient depends on the clean run."""

    @property
    def has_gradient(self) -> bool:
        """Whether the metric defines `gradient`."""
        return type(self).gradient is not Metric.gradient

    def gradient(self, logits: Floats, clean: Floats) -> Floats:
        """Gradient of `value` with respect to `logits`, float64, same shape; arguments as for `value`.

        Raises:
            StageError: The metric has no gradient.
        """
        raise StageError(
            f"metric {self.name!r}: expected a metric with a gradient, found {type(self).__name__}; use "
            "LogitDifference, LogProbability, Probability or KL"
        )

    def scaled(self, values: Floats, clean: float, corrupted: float) -> Floats:
        """Metrics of several runs on the scale of results, which only `Recovery` changes.

        Arguments:
            values: Metrics as `value` returns them.
            clean, corrupted: The metric of the clean and of the corrupted run.
        """
        return values


@dataclass(frozen=True)
class LogitDifference(Metric):
    """Logit of a correct token minus that of a wrong one: positive if the correct one is more likely."""

    correct: int
    """Token id whose logit counts positively."""
    wrong: int
    """Token id whose logit is subtracted."""
    name: str = "logit_difference"
    """Name of the variable."""

    units: str = field(default="logits", init=False, repr=False)
    """Unit of the metric."""
    long_name: str = field(
        default="logit of the correct token minus that of the wrong one", init=False, repr=False
    )
    """Description of the metric."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The correct and the wrong token."""
        return (self.correct, self.wrong)

    def value(self, logits: Floats, clean: Floats) -> float:
        """Logit difference; `logits` holds the logits of the two tokens only."""
        return float(logits[0] - logits[1])

    def gradient(self, logits: Floats, clean: Floats) -> Floats:
        """Gradient [1, -1] with respect to the logits of the two tokens."""
        return np.array([1.0, -1.0])


@dataclass(frozen=True)
class KL(Metric):
    """KL divergence KL(clean || run) of next-token distributions in nats; 0 for the clean run."""

    name: str = "kl"
    """Name of the variable."""

    units: str = field(default="nats", init=False, repr=False)
    """Unit of the metric."""
    long_name: str = field(default="KL(clean || run) of next-token distributions", init=False, repr=False)
    """Description of the metric."""
    needs_baseline: ClassVar[bool] = True

    def value(self, logits: Floats, clean: Floats) -> float:
        """KL in nats, never negative."""
        return float(metrics.kl_divergence(clean, logits))

    def gradient(self, logits: Floats, clean: Floats) -> Floats:
        """Gradient softmax(logits) - softmax(clean), float64 [vocab]."""
        return metrics.kl_gradient(clean, logits)


@dataclass(frozen=True)
class Probability(Metric):
    """Probability of one token as the next token."""

    token: int
    """Token id."""
    name: str = "probability"
    """Name of the variable."""

    units: str = field(default="1", init=False, repr=False)
    """Unit of the metric."""
    long_name: str = field(default="probability of the token", init=False, repr=False)
    """Description of the metric."""

    @property
    def named(self) -> tuple[int, ...]:
        """The token."""
        return (self.token,)

    def value(self, logits: Floats, clean: Floats) -> float:
        """Probability of the token, 0 to 1."""
        return float(metrics.probability(logits, self.token))

    def gradient(self, logits: Floats, clean: Floats) -> Floats:
        """Gradient p (onehot(token) - softmax(logits)), float64 [vocab], with p the probability."""
        return metrics.probability_gradient(logits, self.token)


@dataclass(frozen=True)
class LogProbability(Metric):
    """Log-probability of one token as the next token."""

    token: int
    """Token id."""
    name: str = "log_probability"
    """Name of the variable."""

    units: str = field(default="nats", init=False, repr=False)
    """Unit of the metric."""
    long_name: str = field(default="log-probability of the token", init=False, repr=False)
    """Description of the metric."""

    @property
    def named(self) -> tuple[int, ...]:
        """The token."""
        return (self.token,)

    def value(self, logits: Floats, clean: Floats) -> float:
        """Log-probability of the token in nats, at most 0."""
        return float(metrics.log_softmax(logits)[self.token])

    def gradient(self, logits: Floats, clean: Floats) -> Floats:
        """Gradient onehot(token) - softmax(logits), float64 [vocab]."""
        return metrics.log_probability_gradient(logits, self.token)


@dataclass(frozen=True)
class Rank(Metric):
    """Number of tokens more likely than one token; 0 for the most likely."""

    token: int
    """Token id."""
    name: str = "rank"
    """Name of the variable."""

    units: str = field(default="1", init=False, repr=False)
    """Unit of the metric."""
    long_name: str = field(default="tokens likelier than the token", init=False, repr=False)
    """Description of the metric."""

    @property
    def named(self) -> tuple[int, ...]:
        """The token."""
        return (self.token,)

    def value(self, logits: Floats, clean: Floats) -> float:
        """Rank from 0; tokens of equal logit do not count."""
        # Strictly greater: tied tokens do not push the answer down.
        return float((logits > logits[self.token]).sum())


@dataclass(frozen=True)
class Recovery(Metric):
    """Another metric, rescaled to 0 for the corrupted run and 1 for the clean run; not clipped.

    For `KL` this is 1 - KL(clean || patched) / KL(clean || corrupted).
    """

    of: Metric
    """The metric that is rescaled, not itself a `Recovery`."""
    name: str = "recovery"
    """Name of the variable."""

    units: str = field(default="1", init=False, repr=False)
    """Unit of the metric."""

    def __post_init__(self) -> None:
        if isinstance(self.of, Recovery):
            raise StageError(
                "expected Recovery of another metric, found Recovery of a Recovery; give the inner metric"
            )

    @property
    def long_name(self) -> str:  # type: ignore[override]  # depends on the metric
        """Name of the rescaled metric and meaning of 0 and 1."""
        return f"recovery of {self.of.name}, 0 = corrupted, 1 = clean"

    @property
    def tokens(self) -> tuple[int, ...] | None:
        """Tokens that the rescaled metric reads."""
        return self.of.tokens

    @property
    def named(self) -> tuple[int, ...]:
        """Tokens that the rescaled metric names."""
        return self.of.named

    def canonical(self) -> dict[str, Any]:
        """Plain values that identify the metric in keys: the rescaled metric and the name."""
        return {"metric": "Recovery", "of": self.of.canonical(), "name": self.name}

    def value(self, logits: Floats, clean: Floats) -> float:
        """The metric inside, before rescaling."""
        return self.of.value(logits, clean)

    def scaled(self, values: Floats, clean: float, corrupted: float) -> Floats:
        """Rescaled metrics, (values - corrupted) / (clean - corrupted).

        Raises:
            StageError: The metric is equal in the clean and the corrupted run.
        """
        # Below float32 rounding of the logits the quotient would be noise.
        if abs(clean - corrupted) <= 1e-10 + 1e-7 * max(abs(clean), abs(corrupted)):
            raise StageError(
                f"recovery of {self.of.name}: expected different values in the clean and the corrupted run, "
                f"found {clean:.6g} and {corrupted:.6g}; choose other prompts or another metric"
            )
        return (values - corrupted) / (clean - corrupted)


@dataclass(frozen=True)
class Custom(Metric):
    """Metric that a user's function computes from the logits of one run."""

    function: Callable[[Floats], float] = field(repr=False)
    """Function from the logits of the whole vocabulary, float64 [vocab], to a number."""
    version: int | str | None = None
    """Version of the function, to be changed when its numbers change.

    None takes the digest of its code and of all that it reads.
    """
    name: str = ""
    """Name of the variable; empty for the name of the function."""
    units: str = "1"
    """Unit of the metric."""
    long_name: str = ""
    """Description of the metric; empty for its name."""
    derivative: Callable[[Floats], Floats] | None = field(default=None, repr=False)
    """Function from the logits [vocab] to the gradient [vocab]; None if the metric has no gradient."""

    def __post_init__(self) -> None:
        label = self.name or getattr(self.function, "__name__", "metric")
        # "<lambda>" would be the variable's name in the stored dataset.
        object.__setattr__(self, "name", "metric" if label == "<lambda>" else label)
        object.__setattr__(self, "long_name", self.long_name or self.name.replace("_", " "))

    def canonical(self) -> dict[str, Any]:
        """Plain values that identify the metric in keys: name, unit, and versions of the functions.

        Raises:
            StageError: The code of a function has no digest.
        """
        labels = {"name": self.name, "units": self.units, "long_name": self.long_name}
        versions: dict[str, Any] = {"version": self._version_of(self.function)}
        versions |= {} if self.derivative is None else {"derivative": self._version_of(self.derivative)}
        return {"metric": "Custom", **versions, **labels}

    @property
    def has_gradient(self) -> bool:
        """Whether `derivative` is given."""
        return self.derivative is not None

    def gradient(self, logits: Floats, clean: Floats) -> Floats:
        """Value of `derivative`; StageError unless it is one finite number per logit."""
        if self.derivative is None:
            return super().gradient(logits, clean)
        gradient = np.asarray(self.derivative(logits), np.float64)
        if gradient.shape != logits.shape or not np.isfinite(gradient).all():
            raise StageError(
                f"metric {self.name!r}: expected its derivative to return {len(logits)} finite numbers, one "
                f"for each logit, found shape {list(gradient.shape)} or numbers that are infinite or NaN"
            )
        return gradient

    def _version_of(self, function: Callable[[Floats], Any]) -> int | str:
        # A digest of code refuses what has no identity; a version of the user's own is accepted as it is.
        return code_version(f"metric {self.name!r}", function) if self.version is None else self.version

    def value(self, logits: Floats, clean: Floats) -> float:
        """Value of `function`; StageError unless it is finite."""
        value = float(self.function(logits))
        if not np.isfinite(value):
            raise StageError(
                f"metric {self.name!r}: expected its function to return a finite number for every run, found "
                f"{value}"
            )
        return value


def check_metrics(run_metrics: Sequence[Metric], config: Architecture) -> None:
    """Check the metrics of an experiment against the model's logits: of its vocabulary, or of its labels.

    Arguments:
        run_metrics: The metrics; in a model with labels, the tokens that they name are numbers of labels.
        config: Architecture of the model.

    Raises:
        ConfigError: The model has no head.
        StageError: There are no metrics, or two have the same name.
        PromptError: A token is outside the vocabulary.
    """
    config.require_head()
    if not run_metrics:
        raise StageError("expected at least one metric, found none; give for example metrics=(KL(),)")
    names = [metric.name for metric in run_metrics]
    for name in names:
        if names.count(name) > 1:
            raise StageError(
                f"expected metrics with different names, found {name!r} twice; give one of them another name="
            )
    for metric in run_metrics:
        for token in metric.named:
            if not 0 <= token < config.n_logits:
                noun = "token id" if config.head.kind == "vocabulary" else "label"
                raise PromptError(
                    f"metric {metric.name!r}: expected a {noun} from 0 to {config.n_logits - 1}, found "
                    f"{token}"
                )


def required_tokens(run_metrics: Sequence[Metric]) -> tuple[int, ...] | None:
    """Ids of the tokens whose logits some metrics read, ascending; None for the whole vocabulary."""
    tokens: set[int] = set()
    for metric in run_metrics:
        if metric.tokens is None:
            return None
        tokens.update(metric.tokens)
    return tuple(sorted(tokens))


def read_metrics(run_metrics: Sequence[Metric], logits: Floats, clean: Floats) -> Floats:
    """All metrics of one run before rescaling, float64 [metric].

    Arguments:
        run_metrics: The metrics.
        logits: Logits of the run, [token] in the order of `required_tokens`, or [vocab] if that is None.
        clean: Logits of the clean run, same shape.
    """
    # The runs compute logits of these tokens only; each metric gets its own, in its order.
    tokens = required_tokens(run_metrics)

    def part(metric: Metric, vector: Floats) -> Floats:
        if tokens is None and metric.tokens is not None:
            return vector[list(metric.tokens)]
        if tokens is None or metric.tokens is None:
            return vector
        return vector[[tokens.index(token) for token in metric.tokens]]

    return np.array([metric.value(part(metric, logits), part(metric, clean)) for metric in run_metrics])
