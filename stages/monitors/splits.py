"""Labelled examples of probes: train and test part, folds, shuffled labels, control tasks.

Groups of examples, such as prompts from one document or the two texts of a contrast pair, are never divided:
all members are in the test part, or in one fold of the train part.

Axes: example.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...store.arrays import Array, Bools, Ints
from ...store.errors import ConfigError, PromptError

__all__ = ["TEST", "Examples", "permuted_labels"]

TEST = -1
"""Value of `Examples.fold` for the test part."""


@dataclass(frozen=True)
class Examples:
    """Labelled examples, divided by group into a test part and folds of the train part."""

    index: Ints
    """Index of each example on the axis of the states, ascending, [example]."""
    label: Bools
    """Whether each example is positive, [example]."""
    group: Ints
    """Group of each example, numbered from 0, [example]."""
    fold: Ints
    """Fold of each example of the train part; TEST for the test part, [example]."""

    @classmethod
    def of(cls, target: Array, group: Array, *, folds: int, test_share: float, seed: int) -> Examples:
        """Divide the examples with a target by group, with about equal shares of positives in all parts.

        Arguments:
            target: 1 for positive, 0 for negative, NaN for none, [all].
            group: group of each, [all].
            folds: number of folds of the train part.
            test_share: share of the groups in the test part.
            seed: seed of the division.

        Raises:
            ConfigError: A setting out of range, or another target than 0 and 1.
            PromptError: A label occurs in too few groups for all folds and the test part.
        """
        if folds < 2 or not 0 < test_share < 1:
            raise ConfigError(
                f"expected at least 2 folds and test_share between 0 and 1, found {folds} and {test_share:g}"
            )
        index = np.flatnonzero(~np.isnan(np.asarray(target, np.float64)))
        values = np.asarray(target)[index]
        if not np.isin(values, (0, 1)).all():
            wrong = values[~np.isin(values, (0, 1))][0]
            raise ConfigError(f"expected targets 0 and 1, or NaN for none, found {wrong:g}")
        label, groups = values == 1, np.unique(np.asarray(group)[index], return_inverse=True)[1]
        rng = np.random.default_rng(seed)
        # Systematic sampling of groups in the order of their share of positives: each part gets its share.
        positives = np.bincount(groups, label) / np.bincount(groups) if len(groups) else np.zeros(0)
        order = np.lexsort((rng.random(len(positives)), positives))
        passed = np.floor((np.arange(len(order) + 1) + rng.random()) * test_share)
        is_test = np.diff(passed) > 0
        fold_of = np.full(len(order), TEST)
        fold_of[order[~is_test]] = np.arange((~is_test).sum()) % folds
        examples = cls(index, label, groups, fold_of[groups])
        examples._require_labels(folds)
        return examples

    def _require_labels(self, folds: int) -> None:
        """Raise PromptError unless both labels occur in the test part and in every fold of the train part."""
        for sign, name in ((True, "positive"), (False, "negative")):
            n_groups = len(np.unique(self.group[self.label == sign]))
            parts = np.unique(self.fold[self.label == sign])
            if len(parts) < folds + 1:
                raise PromptError(
                    f"expected {name} examples in all {folds} folds and in the test part, found {name} ones "
                    f"in {n_groups} groups, which reach {len(parts)} of these {folds + 1} parts; pass more "
                    "examples of this label, or set fewer folds"
                )

    @property
    def train(self) -> Ints:
        """Numbers of the examples of the train part, ascending."""
        train: Ints = np.flatnonzero(self.fold != TEST)
        return train

    @property
    def test(self) -> Ints:
        """Numbers of the examples of the test part, ascending."""
        test: Ints = np.flatnonzero(self.fold == TEST)
        return test

    def shuffled(self, draws: int, seed: int) -> Bools:
        """Labels shuffled within the train part and within the test part, [example, draw].

        Arguments:
            draws: number of shuffled labellings.
            seed: seed of the shuffles.
        """
        rng = np.random.default_rng(seed)
        labels = np.repeat(self.label[:, None], draws, axis=1)
        for draw in range(draws):
            for part in (self.train, self.test):
                labels[part, draw] = permuted_labels(self.label[part], self.group[part], rng)
        return labels

    def control_tasks(self, types: Array, draws: int, seed: int) -> Bools:
        """Random labels of a control task, the same for all examples of a type, [example, draw].

        Hewitt & Liang 2019, "Designing and Interpreting Probes with Control Tasks".

        Arguments:
            types: type of each example, such as its token id, [all].
            draws: number of control tasks.
            seed: seed of the labels.
        """
        _, type_of = np.unique(np.asarray(types)[self.index], return_inverse=True)
        # Half of the types are positive, so that both labels occur however few types there are.
        alternating = np.repeat(np.arange(type_of.max() + 1)[:, None] % 2 == 1, draws, axis=1)
        of_type = np.random.default_rng(seed).permuted(alternating, axis=0)
        labels: Bools = of_type[type_of]
        return labels


def permuted_labels(label: Bools, group: Array, rng: np.random.Generator) -> Bools:
    """Labels permuted among groups if every group has one label, within groups otherwise, [example].

    Arguments:
        label: whether each example is positive, [example].
        group: group of each example, [example].
        rng: generator of the permutation.
    """
    _, first, member, sizes = np.unique(group, return_index=True, return_inverse=True, return_counts=True)
    if (np.bincount(member, label) % sizes == 0).all():
        permuted: Bools = rng.permutation(label[first])[member]
        return permuted
    # Sorted by group, then randomly: a permutation within each group.
    permuted = np.empty_like(label)
    permuted[np.argsort(member, kind="stable")] = label[np.lexsort((rng.random(len(label)), member))]
    return permuted
