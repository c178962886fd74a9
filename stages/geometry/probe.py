"""Linear probes: targets predicted by a linear map from the states of each layer, scored on held-out prompts.

Fitted with scikit-learn (extra `probing`): logistic regression for labels, ridge regression for numbers
(Alain and Bengio 2016, "Understanding intermediate layers using linear classifier probes"). A probe with many
weights may learn the task by itself; its score on shuffled targets measures how much (after Hewitt and Liang
2019, "Designing and Interpreting Probes with Control Tasks").

Prompts, not tokens, are split into train and test, because neighbours in one prompt are similar. States are
standardised by the train part; the penalty is chosen on a validation split within it, and the probe is then
fitted on all of it. The interval is a bootstrap over test prompts.

Axes: layer, token, hidden; targets ("true" or "shuffled", to which a probe was fitted); output (one per
label; one for two labels or a number). Needs no model and no torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...pipeline import Output, stage
from ...store.arrays import Array
from ...store.errors import ConfigError, MissingExtra, PromptError, ShapeError

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["FEWEST", "KINDS", "PENALTIES", "TARGETS", "fit_linear", "probe"]


KINDS = ("label", "number")
"""Kinds of targets: classes, or real numbers."""
TARGETS = ["true", "shuffled"]
"""Labels of the `targets` axis: a probe fitted to the true targets, and the control fitted to shuffled
ones."""
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Penalties on the squared weights, relative to the mean loss per example; states are standardised."""
FEWEST = 3
"""Minimum number of prompts: one each for fit, validation and test."""
VALIDATION_SHARE = 0.25
"""Share of the prompts that are not test prompts on which the penalty is chosen."""
STEPS = 500
"""Maximum iterations of a logistic regression; the validation score decides whether an unconverged fit is
used."""


@stage(
    version=1,
    inputs={"states": ("layer", "token", "hidden"), "target": ("token",), "prompt": ("token",)},
    outputs={
        "score": Output(("layer", "targets"), "1", "accuracy (labels) or R2 (numbers) on test prompts"),
        "low": Output(("layer", "targets"), "1", "2.5% of the bootstrap over test prompts"),
        "high": Output(("layer", "targets"), "1", "97.5% of the bootstrap over test prompts"),
        "penalty": Output(("layer", "targets"), "1", "penalty chosen"),
        "weight": Output(
            ("layer", "output", "hidden"),
            "1",
            "weights of the probe of true targets, for unscaled states",
        ),
        "bias": Output(("layer", "output"), "1", "bias of the probe of true targets"),
        "baseline": Output(
            (), "1", "score of predicting the most frequent label, or the mean, of the train part"
        ),
        "n_train": Output((), "1", "number of examples fitted"),
        "n_test": Output((), "1", "number of examples scored"),
    },
    cells="layer",
    memory=4.0,
)
def probe(
    states: xr.DataArray,
    target: xr.DataArray,
    prompt: xr.DataArray,
    *,
    kind: str,
    test_share: float = 0.25,
    penalties: Sequence[float] = PENALTIES,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Score of a linear probe of the target per layer, with a control on shuffled targets.

    Arguments:
        states: [layer, token, hidden], any float dtype, lazy; only tokens with a target are read, one layer
            at a time.
        target: float [token], NaN for none; for kind "label" the class, 0, 1, 2, …
        prompt: int [token], prompt of each token.
        kind: "label" or "number".
        test_share: Share of the prompts for the test.
        penalties: Candidate penalties, of which the validation split selects one.
        resamples: Number of bootstrap resamples.
        seed: Seed of splits, shuffling and bootstrap.

    Returns:
        float64; states @ weight + bias is the number, the log-odds of class 1 (two classes), or a score per
        class.

    Raises:
        PromptError: Too few prompts, or a single class.
        ConfigError: A setting is out of range.
        MissingExtra: scikit-learn is not installed.
    """
    import xarray as xr

    settings = _Settings(kind, test_share, tuple(penalties), resamples, seed)
    values, prompt_index = np.asarray(target.values), np.asarray(prompt.values)
    if len(values) != states.sizes["token"] or len(prompt_index) != len(values):
        raise ShapeError(
            f"expected a target and a prompt for each of the {states.sizes['token']} tokens of the states, "
            f"found {len(values)} targets and {len(prompt_index)} prompts"
        )
    rows = np.flatnonzero(~np.isnan(values.astype(np.float64)))
    examples = _Examples.of(values[rows], prompt_index[rows], settings)
    labelled_states = states.isel(token=rows)
    layer_results = [
        _probe_layer(
            labelled_states.isel(layer=i).transpose("token", "hidden").values.astype(np.float64),
            examples,
            settings,
        )
        for i in range(states.sizes["layer"])
    ]
    axes = {"weight": ("layer", "output", "hidden"), "bias": ("layer", "output")}
    data: dict[str, Any] = {
        name: (
            axes.get(name, ("layer", "targets")),
            np.stack([layer_result[name] for layer_result in layer_results]),
        )
        for name in layer_results[0]
    }
    data |= {"baseline": examples.baseline(), "n_train": len(examples.train), "n_test": len(examples.test)}
    layers = states["layer"].values if "layer" in states.coords else np.arange(states.sizes["layer"])
    return xr.Dataset(data, coords={"layer": layers, "targets": TARGETS})


@dataclass(frozen=True)
class _Settings:
    """Parameters of the stage `probe`; ConfigError for one that is out of its range."""

    kind: str
    """"label" or "number"."""
    test_share: float
    """Share of the prompts for the test."""
    penalties: tuple[float, ...]
    """Candidate penalties."""
    resamples: int
    """Number of bootstrap resamples."""
    seed: int
    """Seed of splits, shuffling and bootstrap."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"expected 'label' or 'number' as the kind of a probe, found {self.kind!r}")
        if not 0 < self.test_share < 1:
            raise ConfigError(f"expected test_share of a probe between 0 and 1, found {self.test_share}")
        if not self.penalties or min(self.penalties) <= 0:
            raise ConfigError(f"expected penalties of a probe above 0, found {list(self.penalties)}")

    @property
    def is_label(self) -> bool:
        """Whether targets are classes; else they are numbers."""
        return self.kind == "label"


@dataclass(frozen=True)
class _Examples:
    """Tokens with a target (examples), split by prompt into parts for fit, validation and test."""

    target: Array
    """Target of each example, [example]; int64 for labels."""
    shuffled: Array
    """Targets permuted within train (fit and validation) and within test, [example]."""
    prompt: Array
    """Prompt of each example, [example]."""
    fit: Array
    """Indices of the examples that are fitted while a penalty is chosen."""
    validation: Array
    """Indices of the examples on which the penalty is chosen."""
    test: Array
    """Indices of the examples on which the probe is scored."""

    @classmethod
    def of(cls, target: Array, prompt: Array, settings: _Settings) -> _Examples:
        """Split examples by prompt, and shuffle their targets within train and within test.

        Arguments:
            target: Target of each example, [example].
            prompt: Prompt of each example, [example].
            settings: Parameters of the probe.

        Raises:
            PromptError: There are too few prompts, or only one class.
        """
        prompts = np.unique(prompt)
        if len(prompts) < FEWEST:
            raise PromptError(
                f"a probe needs targets in at least {FEWEST} prompts, one each for fit, validation and test, "
                f"found them in {len(prompts)}; pass more prompts"
            )
        if settings.is_label and len(np.unique(target)) < 2:
            raise PromptError(
                f"a probe needs targets with at least two labels, found the same label in all {len(target)} "
                "examples; pass examples of another label"
            )
        rng = np.random.default_rng(settings.seed)
        # Prompts are permuted, not examples, so that no prompt is in two parts.
        order = rng.permutation(prompts)
        n_test = _share(len(order), settings.test_share, 2)
        n_validation = _share(len(order) - n_test, VALIDATION_SHARE, 1)
        test, validation, fit = np.split(order, [n_test, n_test + n_validation])
        parts = [np.flatnonzero(np.isin(prompt, part)) for part in (fit, validation, test)]
        if settings.is_label and len(np.unique(target[parts[0]])) < 2:
            raise PromptError(
                f"a probe needs at least two labels among the {len(fit)} prompts that it is fitted to, found "
                "one; pass more prompts, or another seed of the split"
            )
        if settings.is_label:
            target = target.astype(np.int64)
        shuffled = target.copy()
        # Within each part: the shuffled targets keep the label frequencies, so the baseline is the same.
        for part in (np.concatenate(parts[:2]), parts[2]):
            shuffled[part] = rng.permutation(target[part])
        return cls(target, shuffled, prompt, *parts)

    @property
    def train(self) -> Array:
        """Indices of the examples for fit and validation together."""
        return np.concatenate([self.fit, self.validation])

    def baseline(self) -> float:
        """Score on the test examples of a constant prediction: the train part's most frequent label, or
        mean."""
        train, test = self.target[self.train], self.target[self.test]
        if self.target.dtype.kind == "i":
            return float((test == np.bincount(train).argmax()).mean())
        return float(_r2(test, np.full(len(test), train.mean())))


def _probe_layer(states: Array, examples: _Examples, settings: _Settings) -> dict[str, Array]:
    """Fit and score the probes of one layer, for true and for shuffled targets.

    Arguments:
        states: States of all examples, float64 [example, hidden].
        examples: Targets, and the split.
        settings: Parameters of the probe.

    Returns:
        score, low, high and penalty [targets]; weight [output, hidden] and bias [output] of the probe that
        was fitted to the true targets.
    """
    results: dict[str, list[Any]] = {name: [] for name in ("score", "low", "high", "penalty")}
    probes = []
    for target in (examples.target, examples.shuffled):
        penalty = _best_penalty(states, target, examples, settings)
        weight, bias = fit_linear(
            states[examples.train], target[examples.train], penalty, is_label=settings.is_label
        )
        probes.append((weight, bias))
        # A class that occurs only in the test part has no output, so its examples count as wrong.
        classes = np.unique(target[examples.train]) if settings.is_label else None
        predicted = _predict(states[examples.test], weight, bias, classes)
        sums = _sums_by_prompt(
            target[examples.test], predicted, examples.prompt[examples.test], settings.is_label
        )
        low, high = _bootstrap_interval(sums, settings)
        for name, value in zip(results, (float(_score(sums.sum(0))), low, high, penalty), strict=True):
            results[name].append(value)
    weight, bias = probes[0]
    return {**{name: np.array(values) for name, values in results.items()}, "weight": weight, "bias": bias}


def _best_penalty(states: Array, target: Array, examples: _Examples, settings: _Settings) -> float:
    """Penalty with the best validation score; ties go to the largest."""
    if len(settings.penalties) == 1:
        return settings.penalties[0]
    fit, validation = examples.fit, examples.validation
    best_score, best_penalty = -np.inf, settings.penalties[0]
    classes = np.unique(target[fit]) if settings.is_label else None
    if classes is not None and len(classes) < 2:
        # Shuffled targets may leave a single class in the fit split, which logistic regression refuses.
        return max(settings.penalties)
    # From the largest: a later, smaller penalty must be strictly better.
    for penalty in sorted(settings.penalties, reverse=True):
        weight, bias = fit_linear(states[fit], target[fit], penalty, is_label=settings.is_label)
        predicted = _predict(states[validation], weight, bias, classes)
        is_right = predicted == target[validation]
        score = float(is_right.mean()) if settings.is_label else float(_r2(target[validation], predicted))
        if score > best_score:
            best_score, best_penalty = score, penalty
    return best_penalty


def fit_linear(states: Array, target: Array, penalty: float, *, is_label: bool) -> tuple[Array, Array]:
    """Fit a linear probe on standardised states: logistic regression for labels, ridge regression for
    numbers.

    Arguments:
        states: float64 [example, hidden].
        target: Target of each example, [example].
        penalty: Penalty on the squared weights, relative to the mean loss per example.
        is_label: Whether targets are classes; else they are numbers.

    Returns:
        (weight [output, hidden], bias [output]) for states that are not standardised.

    Raises:
        MissingExtra: scikit-learn is not installed.
    """
    try:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression, Ridge
    except ImportError as error:
        raise MissingExtra(
            "a probe is fitted with scikit-learn, which is not installed; run pip install 'mizarr[probing]'"
        ) from error
    mean, spread = states.mean(0), states.std(0)
    # Constant dimensions stay 0 instead of becoming NaN.
    spread = np.where(spread > 0, spread, 1.0)
    standardised = (states - mean) / spread
    n = len(target)
    if is_label:
        # scikit-learn's C multiplies the sum of losses; here the penalty is relative to their mean.
        model = LogisticRegression(C=1 / (penalty * n), max_iter=STEPS)
    else:
        model = Ridge(alpha=penalty * n, solver="cholesky")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(standardised, target)
    weight = np.atleast_2d(model.coef_) / spread
    return weight, np.atleast_1d(model.intercept_) - weight @ mean


def _predict(states: Array, weight: Array, bias: Array, classes: Array | None) -> Array:
    """Prediction of a probe for each state, [example]: a number, or one of the classes.

    Arguments:
        states: float64 [example, hidden].
        weight: Weights of the probe, [output, hidden].
        bias: Bias of the probe, [output].
        classes: Classes that were fitted, in order; None for numbers.
    """
    raw: Array = states @ weight.T + bias
    if classes is None:
        return raw[:, 0]
    # scikit-learn has one output, the log-odds of the second class, for two classes.
    class_index = (raw[:, 0] > 0).astype(np.int64) if raw.shape[1] == 1 else raw.argmax(1)
    predicted: Array = classes[class_index]
    return predicted


def _sums_by_prompt(target: Array, predicted: Array, prompt: Array, is_label: bool) -> Array:
    """Sums over the examples of each prompt, from which `_score` computes the score of any set of prompts.

    Returns:
        For labels [prompt, 2]: numbers of correct examples and of all examples. For numbers [prompt, 4]: sums
        of squared errors, of examples, of centred targets, and of their squares.
    """
    if is_label:
        columns = [predicted == target, np.ones(len(target))]
    else:
        centred = target - target.mean()  # sums of squares of numbers far from 0 would cancel badly
        columns = [np.square(predicted - target), np.ones(len(target)), centred, np.square(centred)]
    _, row = np.unique(prompt, return_inverse=True)
    return np.stack([np.bincount(row, np.asarray(column, np.float64)) for column in columns], axis=1)


def _score(sums: Array) -> Array:
    """Accuracy or R2 from the columns of `_sums_by_prompt`, summed over prompts, [..., 2 or 4].

    R2 is NaN if all targets are equal.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        if sums.shape[-1] == 2:
            accuracy: Array = sums[..., 0] / sums[..., 1]
            return accuracy
        error, n, total, squares = np.moveaxis(sums, -1, 0)
        # Sum of squared deviations of the targets from their mean.
        deviations = squares - total**2 / n
        r2: Array = 1 - error / np.where(deviations > 0, deviations, np.nan)
        return r2


def _r2(target: Array, predicted: Array) -> Array:
    """R2, share of the variance explained; 0 for predicting the mean, negative for worse."""
    return _score(_sums_by_prompt(target, predicted, np.zeros(len(target), int), is_label=False)[0])


def _bootstrap_interval(sums: Array, settings: _Settings) -> tuple[float, float]:
    """95 % bootstrap interval of the score over resampled test prompts, as (2.5 %, 97.5 %) percentiles.

    Arguments:
        sums: Result of `_sums_by_prompt` for the test examples.
        settings: Number of resamples and seed.
    """
    rng = np.random.default_rng(settings.seed)
    n_prompts = len(sums)
    # How often each prompt is in a resample, so that scores of all resamples are one matrix product.
    drawn = rng.multinomial(n_prompts, np.full(n_prompts, 1 / n_prompts), size=settings.resamples)
    scores = _score(drawn @ sums)
    if np.isnan(scores).all():
        return float("nan"), float("nan")
    # A resample whose targets are all equal has no R2.
    low, high = np.nanpercentile(scores, (2.5, 97.5))
    return float(low), float(high)


def _share(n: int, share: float, left: int) -> int:
    """Number of prompts for a share of n prompts: at least one, and such that at least `left` remain."""
    return min(max(1, round(share * n)), n - left)
