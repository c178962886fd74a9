"""Published accuracies of the zoo on its own weights, fetched from its public bucket: `pytest -m network`.

The zoo keeps the best of five seeds, and publishes to a tenth of a percent.
"""

from __future__ import annotations

import urllib.request
from pathlib import Path

import numpy as np
import pytest

from mizarr.stages.algzoo.accuracy import accuracy_of, rmse_of, sampled_accuracy
from mizarr.stages.algzoo.model import load_model

from .test_accuracy import blocks

pytestmark = pytest.mark.network

BUCKET = "https://storage.googleapis.com/arc-ml-public/alg"
TRAINED, SAMPLES = 2**30, 1_000_000
WIDTHS = (32, 16, 8, 6, 5, 4, 3, 2)
SECOND_ARGMAX = {
    2: (100, 100, 100, 100, 100, 100, 100, 100),
    3: (100, 100, 99.9, 99.9, 99.9, 98.5, 90.8, 41.0),
    4: (99.9, 99.8, 98.7, 86.5, 74.6, 60.2, 43.3, 32.8),
    10: (99.4, 94.8, 42.7, 37.5, 34.7, 31.8, 23.9, 20.2),
}
"""Accuracy in percent by length, of the widths above."""
ARGMEDIAN = {3: (100, 100, 99.9, 98.5, 41.0), 11: (74.8, 46.0, 33.6, 19.1, 10.6)}
MEDIAN_RMSE = {3: (0, 0, 0, 0.132, 0.326), 10: (0, 0.041, 0.083, 0.127, 0.189)}
LONGEST_CYCLE = {4: (100, 100, 100, 90.2, 72.3), 6: (85.4, 84.1, 72.2, 63.1, 52.3)}
FIVE = (32, 16, 8, 4, 2)


def fetched(folder: Path, name: str) -> Path:
    path = folder / name.rpartition("/")[2]
    with urllib.request.urlopen(f"{BUCKET}/{name}", timeout=60) as answer:
        path.write_bytes(answer.read())
    return path


def best(folder: Path, task: str, hidden: int, sequence: int) -> float:
    """Score of the best of five seeds, in percent; of a number its error."""
    scores = []
    for seed in range(5):
        path = fetched(folder, f"zoo/{task}_{hidden}_{sequence}_{TRAINED}_{seed}.pth")
        model = load_model(path)
        every = {"draw": "all"} if not model.is_rnn else {}
        many = SAMPLES if model.is_rnn else sequence**sequence
        found = sampled_accuracy(model.weights, blocks(many), task=task, sequence=sequence, **every)
        scores.append(-rmse_of(found) if model.task.is_scalar else 100 * accuracy_of(found))
    return max(scores)


def each(table: dict[int, tuple[float, ...]], widths: tuple[int, ...]) -> list[tuple[int, int, float]]:
    return [(h, n, value) for n, row in table.items() for h, value in zip(widths, row, strict=True)]


@pytest.mark.parametrize(("hidden", "sequence", "published"), each(SECOND_ARGMAX, WIDTHS))
def test_second_argmax(hidden, sequence, published, tmp_path):
    assert best(tmp_path, "2nd_argmax", hidden, sequence) == pytest.approx(published, abs=0.2)


@pytest.mark.parametrize(("hidden", "sequence", "published"), each(ARGMEDIAN, FIVE))
def test_argmedian(hidden, sequence, published, tmp_path):
    assert best(tmp_path, "argmedian", hidden, sequence) == pytest.approx(published, abs=0.2)


@pytest.mark.parametrize(("hidden", "sequence", "published"), each(MEDIAN_RMSE, FIVE))
def test_median(hidden, sequence, published, tmp_path):
    assert -best(tmp_path, "median", hidden, sequence) == pytest.approx(published, abs=0.002)


@pytest.mark.parametrize(("hidden", "sequence", "published"), each(LONGEST_CYCLE, (8, 6, 4, 3, 2)))
def test_longest_cycle(hidden, sequence, published, tmp_path):
    assert best(tmp_path, "longest_cycle", hidden, sequence) == pytest.approx(published, abs=0.2)


def test_the_network_of_sixteen_and_ten_is_right_as_often_as_was_told(tmp_path):
    model = load_model(fetched(tmp_path, "one_layer_16_hidden_94_acc_2nd_argmax.pth"))
    assert (model.parameters, model.task.name, model.sequence) == (432, "2nd_argmax", 10)
    found = sampled_accuracy(model.weights, blocks(SAMPLES), task="2nd_argmax", sequence=10)
    assert np.isclose(accuracy_of(found), 0.953, atol=0.002)
