"""Probes as monitors: linear detectors of a labelled property, trained on stored states out of core.

A probe gives each example, a pooled prompt or a token, the log-odds that it is positive. Methods:

* "logistic": logistic regression with an L2 penalty, chosen by cross-validation (Alain & Bengio 2016);
* "mass_mean": difference of the class means (Marks & Tegmark 2023, "The Geometry of Truth");
* "lda": linear discriminant analysis, that difference multiplied by the inverse of the covariance within
  classes, which is shrunk towards a multiple of the identity (Chen et al. 2010, "Shrinkage Algorithms for
  MMSE Covariance Estimation", eq. 23).

States are standardised by the train part; mass_mean is the difference of the means of unscaled states.
Scores become log-odds by a logistic regression on the out-of-fold scores of the train part (Platt 1999).
The test part is scored by the probe of the whole train part and chooses nothing. Controls are probes of
shuffled labels, and of the random labels of control tasks.

States are read block by block, in up to about 120 passes. Memory grows with the number of examples only by
their labels and scores: 9 bytes per example and label column.

Axes: layer, probe (its method), example, hidden, draw. Needs no model and no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...pipeline import Output, stage
from ...store.arrays import Array, Floats, Ints
from ...store.errors import ConfigError, ShapeError
from ...store.identity import model_of, require_same_model
from ..corpus.token_blocks import ahead, read_rows, token_ranges
from ..geometry.row_moments import Moments
from ..geometry.separation import auroc, shrunk
from .logistic import Blocks, Fit, fit_logistic
from .measures import MEASURES, RESAMPLES, measure
from .pooling import POOLINGS
from .splits import TEST, Examples

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["METHODS", "PENALTIES", "probe_scores", "train_probes"]

METHODS = ("logistic", "mass_mean", "lda")
"""Names of the methods."""
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Penalties on the squared weights to choose from, relative to the mean loss; states are standardised."""
CONTROL_TASKS = 5
"""Number of control tasks whose AUROC is averaged: a single random labelling may be easy by chance."""
IN_MEMORY = 1 << 26
"""Largest size in bytes of the float64 rows of one layer that are kept in memory between passes."""
_FLATTEST = 1e-3
"""Smallest slope of a calibration: probes that rank no better than chance keep the sign of their scores."""

EXAMPLE = "example|token|prompt|prompt_id"
"""Axis of the examples in states, under any of the names that it has in captures and pooled states."""
_PER_PROBE = ("layer", "probe")
"""Axes of a value of each trained probe."""


@stage(
    version=1,
    inputs={"states": ("layer", EXAMPLE, "hidden"), "examples": None},
    outputs={
        **{
            name: Output((*_PER_PROBE, "bound"), "1", f"{name} on the test part, with its 95 % interval")
            for name in MEASURES
        },
        "cv_auroc": Output(_PER_PROBE, "1", "AUROC in the train part, mean over held-out folds"),
        "shuffled_auroc": Output((*_PER_PROBE, "draw"), "1", "test AUROC of probes of shuffled labels"),
        "control_auroc": Output(_PER_PROBE, "1", "test AUROC of probes of control tasks", is_optional=True),
        "score": Output((*_PER_PROBE, "example"), "1", "log-odds; out of fold in the train part"),
        "weight": Output((*_PER_PROBE, "hidden"), "1", "weights, for unscaled states"),
        "bias": Output(_PER_PROBE, "1", "bias"),
        "penalty": Output(_PER_PROBE, "1", "penalty chosen; NaN for methods without one"),
        "fold": Output(("example",), "1", "fold of the train part; -1: test part; -2: no target"),
    },
    cells="layer",
    memory=1.0,
)
def train_probes(
    states: xr.DataArray,
    examples: xr.Dataset,
    *,
    methods: Sequence[str] = METHODS,
    folds: int = 5,
    test_share: float = 0.5,
    draws: int = 50,
    false_positives: float = 0.05,
    seed: int = 0,
) -> xr.Dataset:
    """Train and test probes of a binary target in every layer.

    Arguments:
        states: [layer, example, hidden], any float dtype, lazy; read block by block, several times.
        examples: target, float [example]: 1 positive, 0 negative, NaN for examples to leave out; group, int
            [example], never divided between parts; optionally type, int [example], for control tasks, such
            as the token id.
        methods: some of METHODS.
        folds: Number of folds of the train part.
        test_share: Share of the groups in the test part.
        draws: Number of shuffled labellings.
        false_positives: Largest share of negatives above the threshold, for recall.
        seed: Seed of the parts, shuffles, control tasks and resamples.

    Returns:
        Measures with bounds "value", "low" and "high"; scores float32; states @ weight + bias are log-odds.
        Attributes: the model, and pooling and hook point of the states.

    Raises:
        ShapeError: Not one target, group and type per example.
        ConfigError: A setting is out of range.
        PromptError: A label occurs in too few groups.
    """
    import xarray as xr

    if unknown := [name for name in methods if name not in METHODS]:
        raise ConfigError(f"expected methods among {', '.join(METHODS)}, found {unknown[0]!r}")
    if not methods or not 0 <= false_positives <= 1:
        raise ConfigError(
            "expected at least one method and false_positives from 0 to 1, found "
            f"{list(methods)} and {false_positives:g}"
        )
    n = states.sizes["example"]
    columns = {name: array.values for name, array in examples.data_vars.items()}
    if {array.shape for array in columns.values()} != {(n,)} or not {"target", "group"} <= set(columns):
        found = ", ".join(f"{name} {array.shape}" for name, array in columns.items())
        raise ShapeError(
            f"expected target and group of {n} examples, [example] each, found {found or 'none'}"
        )
    parts = Examples.of(columns["target"], columns["group"], folds=folds, test_share=test_share, seed=seed)
    tasks = [parts.shuffled(draws, seed)]
    if "type" in columns:
        tasks.append(parts.control_tasks(columns["type"], CONTROL_TASKS, seed))
    labels = np.column_stack([parts.label, *tasks])
    results = []
    for i in range(states.sizes["layer"]):
        layer = _Layer(states.isel(layer=i), parts, labels)
        trained = [layer.train(method) for method in methods]
        tested = [
            measure(
                probe["score"][parts.test],
                parts.label[parts.test],
                parts.group[parts.test],
                false_positives=false_positives,
                resamples=RESAMPLES,
                seed=seed,
            )
            for probe in trained
        ]
        results.append(
            {name: np.stack([probe[name] for probe in trained]) for name in trained[0]}
            | {name: np.stack([values[j] for values in tested]) for j, name in enumerate(MEASURES)}
        )
    data = {name: np.stack([result[name] for result in results]) for name in results[0]}
    test_auroc = data.pop("test_auroc")
    score = np.full((*data["score"].shape[:2], n), np.nan, np.float32)
    score[..., parts.index] = data["score"]
    fold = np.full(n, TEST - 1, np.int8)
    fold[parts.index] = parts.fold
    values = data | {"shuffled_auroc": test_auroc[..., 1 : 1 + draws], "score": score, "fold": fold}
    if "type" in columns:
        values["control_auroc"] = test_auroc[..., 1 + draws :].mean(axis=-1)
    variables = {name: train_probes.outputs[name].variable(array) for name, array in values.items()}
    return xr.Dataset(
        variables,
        coords={"layer": states["layer"], "probe": list(methods), "bound": ["value", "low", "high"]},
        attrs=model_of(states) | _origin(states),
    )


@stage(
    version=1,
    inputs={"states": ("layer", EXAMPLE, "hidden"), "probes": None},
    outputs={"score": Output((*_PER_PROBE, "example"), "1", "log-odds that the example is positive")},
    cells="layer",
    memory=1.0,
)
def probe_scores(states: xr.DataArray, probes: xr.Dataset) -> xr.Dataset:
    """Scores of trained probes on other states of the same model, such as those of another dataset.

    Arguments:
        states: [layer, example, hidden], pooled as those that the probes were trained on.
        probes: Result of `train_probes`, for at least the layers of the states.

    Returns:
        score float32 [layer, probe, example].

    Raises:
        ShapeError: The probes lack a layer, or have another width, hook point or pooling.
        StageError: The states are of another model.
    """
    import xarray as xr

    require_same_model(states=states, probes=probes)
    layers, width = np.atleast_1d(states["layer"].values).tolist(), states.sizes["hidden"]
    states_origin, probes_origin = _origin(states), _origin(probes)
    if (
        not set(layers) <= set(probes["layer"].values.tolist())
        or width != probes.sizes["hidden"]
        or states_origin != probes_origin
    ):
        raise ShapeError(
            f"the probes are for layers {probes['layer'].values.tolist()} of width {probes.sizes['hidden']}, "
            f"{_origin_text(probes_origin)}; found states of layers {layers} and width {width}, "
            f"{_origin_text(states_origin)}; pass states captured and pooled alike"
        )
    scores = []
    for i, layer in enumerate(layers):
        probe = probes.sel(layer=layer)
        weight = np.column_stack([probe["weight"].values, probe["bias"].values])
        rows = _Rows(states.isel(layer=i), np.arange(states.sizes["example"]))
        scores.append(_scores(rows.blocks, weight, len(rows.index)).T)
    coords = {"layer": states["layer"], "probe": probes["probe"]}
    dims = (*_PER_PROBE, "example")
    return xr.Dataset({"score": (dims, np.stack(scores).astype(np.float32))}, coords, model_of(states))


class _Rows:
    """Rows of one layer at some examples, read in blocks; few rows are read once and kept in memory."""

    def __init__(self, states: xr.DataArray, index: Ints) -> None:
        self._states = states.rename(example="token").transpose("token", "hidden")
        self.index, self.width = index, states.sizes["hidden"]
        self._kept: Array | None = None
        if len(index) * self.width * 8 <= IN_MEMORY:
            self._kept = np.concatenate([rows for _, rows in self._read()]).astype(np.float64)

    def blocks(self) -> Iterator[tuple[slice, Array]]:
        """Yield (range of examples, rows [example, hidden]): float64 from memory, else float32."""
        if self._kept is None:
            yield from self._read()
        else:
            yield slice(0, len(self.index)), self._kept

    def _read(self) -> Iterator[tuple[slice, Array]]:
        def read(tokens: slice) -> tuple[slice, Array]:
            start, stop = np.searchsorted(self.index, [tokens.start, tokens.stop])
            return slice(start, stop), read_rows(self._states, tokens, self.index[start:stop] - tokens.start)

        for _, (examples, rows) in ahead(token_ranges(self._states, self.width), read):
            if examples.stop > examples.start:
                yield examples, rows


class _Layer:
    """Training of probes on one layer."""

    def __init__(self, states: xr.DataArray, examples: Examples, labels: Array) -> None:
        """Standardise the rows.

        Arguments:
            states: [example, hidden].
            examples: labelled examples.
            labels: columns to fit, bool [example, column]: true labels first, then shuffled ones and those
                of control tasks.
        """
        self._examples, self._labels = examples, labels
        self._rows = _Rows(states, examples.index)
        self._is_train = examples.fold != TEST
        self._fold = examples.fold[examples.train]
        self._n_folds = int(self._fold.max()) + 1
        moments = Moments.of(rows[self._is_train[block]] for block, rows in self._rows.blocks())
        spread = np.sqrt(moments.scatter.diagonal() / moments.n)
        # Constant coordinates stay 0 instead of becoming NaN.
        self._mean, self._scale = (
            moments.mean,
            np.where(spread > 1e-12 * np.abs(moments.mean), spread, np.inf),
        )
        self._basis: Floats | None = None
        if moments.n < self._rows.width:
            # With fewer rows than coordinates all weights lie in the span of the rows.
            standardised = np.concatenate([rows for _, rows in self._train_blocks()])
            self._basis = np.linalg.svd(standardised, full_matrices=False)[2].T

    def train(self, method: str) -> dict[str, Any]:
        """Train a probe, and probes of all other label columns.

        Returns:
            weight [hidden], bias, penalty and cv_auroc of the probe of the true labels; its score [example],
            out of fold in the train part; test_auroc [column].
        """
        examples, n_folds = self._examples, self._n_folds
        penalties = PENALTIES if method == "logistic" else (np.nan,)
        left_out = np.repeat(np.arange(n_folds), len(penalties))
        fold_weights = self._fit(method, np.zeros(len(left_out), int), np.tile(penalties, n_folds), left_out)
        scores = _scores(self._train_blocks, fold_weights, len(examples.train)).reshape(
            -1, n_folds, len(penalties)
        )
        # Each example is scored by the probe that its fold was left out of.
        held_out = scores[np.arange(len(scores)), self._fold]
        label = examples.label[examples.train]
        cv_auroc = np.mean(
            [
                [
                    auroc(held_out[self._fold == fold, i], label[self._fold == fold])
                    for i in range(len(penalties))
                ]
                for fold in range(n_folds)
            ],
            axis=0,
        )
        # From the largest: a smaller penalty must be strictly better.
        best = max(range(len(penalties)), key=lambda i: (cv_auroc[i], penalties[i]))
        columns = np.arange(self._labels.shape[1])
        final = self._fit(method, columns, np.full(len(columns), penalties[best]), np.full(len(columns), -1))
        slope, offset = _calibration(held_out[:, best], label)
        all_scores = _scores(self._blocks, final, len(self._labels))
        test = examples.test
        test_auroc = [auroc(all_scores[test, i], self._labels[test, i]) for i in columns]
        score = all_scores[:, 0].copy()
        score[examples.train] = held_out[:, best]
        weight = slope * final[0, :-1] / self._scale
        return {
            "weight": weight,
            "bias": slope * final[0, -1] + offset - weight @ self._mean,
            "penalty": float(penalties[best]),
            "cv_auroc": float(cv_auroc[best]),
            "score": slope * score + offset,
            "test_auroc": np.array(test_auroc),
        }

    def _blocks(self) -> Iterator[tuple[slice, Array]]:
        """Pass over the standardised rows of all examples."""
        for block, rows in self._rows.blocks():
            yield block, (rows - self._mean.astype(rows.dtype)) / self._scale.astype(rows.dtype)

    def _train_blocks(self) -> Iterator[tuple[slice, Array]]:
        """Pass over the standardised rows of the train part."""
        n_read = 0
        for block, rows in self._blocks():
            part = rows[self._is_train[block]]
            if len(part):
                yield slice(n_read, n_read + len(part)), part
                n_read += len(part)

    def _fitted_blocks(self) -> Iterator[tuple[slice, Array]]:
        """Pass over the rows of the train part in the space in which probes are fitted."""
        for block, rows in self._train_blocks():
            yield block, rows if self._basis is None else rows @ self._basis

    def _fit(self, method: str, columns: Ints, penalty: Floats, left_out: Ints) -> Floats:
        """Weights for standardised rows, [model, hidden + 1], with the bias last.

        Arguments:
            method: one of METHODS.
            columns: label column of each model.
            penalty: penalty of each model.
            left_out: fold that each model is not fitted to; -1 for none.
        """
        width = self._rows.width if self._basis is None else self._basis.shape[1]
        fit = Fit(self._labels[self._examples.train][:, columns], penalty, self._fold, left_out)
        if method == "logistic":
            return self._unrotated(fit_logistic(self._fitted_blocks, width, fit))
        contrast, middle = _class_means(self._fitted_blocks, width, fit)
        if method == "lda":
            contrast = self._whitened(contrast, fit)
        if method == "mass_mean":
            # The direction is the difference of the means of unscaled states, scale * contrast; as weights
            # for standardised rows it is multiplied by scale once more.
            contrast, middle = (self._unrotated(vectors) for vectors in (contrast, middle))
            contrast = contrast * np.square(np.where(np.isfinite(self._scale), self._scale, 0.0))
            return np.column_stack([contrast, -(contrast * middle).sum(axis=1)])
        return self._unrotated(np.column_stack([contrast, -(contrast * middle).sum(axis=1)]))

    def _unrotated(self, vectors: Floats) -> Floats:
        """Vectors [model, ...] of the space in which probes are fitted, in that of standardised rows; a bias
        in the last column is kept."""
        if self._basis is None:
            return vectors
        width = self._basis.shape[1]
        return np.column_stack([vectors[:, :width] @ self._basis.T, vectors[:, width:]])

    def _whitened(self, contrast: Floats, fit: Fit) -> Floats:
        """Contrasts [model, hidden] multiplied by the inverse of the shrunk covariance within classes of
        the rows that each model is fitted to."""
        weight = np.zeros_like(contrast)
        for fold in np.unique(fit.left_out):
            moments = Moments.of(rows[self._fold[block] != fold] for block, rows in self._fitted_blocks())
            for model in np.flatnonzero(fit.left_out == fold):
                n_positive = int(fit.labels[self._fold != fold, model].sum())
                # Scatter within classes: that of all rows without that between the two means.
                between = n_positive * (moments.n - n_positive) / moments.n
                within = moments.scatter - between * np.outer(contrast[model], contrast[model])
                covariance = shrunk(within / max(moments.n - 2, 1), moments.n, self._rows.width)
                weight[model] = np.linalg.solve(covariance, contrast[model])
        return weight


def _class_means(blocks: Blocks, width: int, fit: Fit) -> tuple[Floats, Floats]:
    """(positive minus negative mean, midpoint of both) of each model's rows, both [model, hidden]."""
    sums, counts = np.zeros((2, len(fit.left_out), width)), np.zeros((2, len(fit.left_out), 1))
    for block, rows in blocks():
        is_fitted = fit.is_fitted(block)
        for side, label in enumerate((fit.labels[block], ~fit.labels[block])):
            member = is_fitted & label
            sums[side] += member.T.astype(rows.dtype) @ rows
            counts[side, :, 0] += member.sum(axis=0)
    # A shuffled labelling may leave a class empty: its mean counts as the other's.
    positive, negative = sums / np.maximum(counts, 1)
    return positive - negative, (positive + negative) / 2


def _calibration(score: Floats, label: Array) -> tuple[float, float]:
    """(slope, offset) such that slope * score + offset are log-odds, by logistic regression on one score."""
    spread = float(score.std()) or 1.0
    values = (score / spread)[:, None]
    once = np.zeros(len(score), int)
    # A penalty keeps the slope finite where the scores separate the labels.
    fit = Fit(label[:, None], np.array([1e-3]), once, np.array([-1]))
    ((slope, offset),) = fit_logistic(lambda: [(slice(0, len(values)), values)], 1, fit)
    return max(float(slope), _FLATTEST) / spread, float(offset)


def _scores(blocks: Blocks, weight: Floats, n: int) -> Floats:
    """Scores [row, model] of n rows; weight: [model, hidden + 1], with the bias last."""
    scores = np.empty((n, len(weight)))
    for block, rows in blocks():
        scores[block] = rows @ weight[:, :-1].T.astype(rows.dtype) + weight[:, -1]
    return scores


def _origin(states: xr.DataArray | xr.Dataset) -> dict[str, str]:
    """Attributes "point" and "pooling" of states, from their attributes or from the name of a captured
    array, such as resid_post__mean; the pooling "token" stands for states of single tokens."""
    if "point" in states.attrs:
        return {name: str(states.attrs[name]) for name in ("point", "pooling")}
    point, _, kept = str(getattr(states, "name", "") or "").partition("__")
    return {
        "point": point,
        "pooling": str(states.attrs.get("pooling", kept if kept in POOLINGS else "token")),
    }


def _origin_text(origin: dict[str, str]) -> str:
    return f"of {origin['point'] or 'an unnamed point'} (pooling: {origin['pooling']})"
