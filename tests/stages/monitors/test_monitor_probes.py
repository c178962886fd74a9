"""Probes against scikit-learn, arithmetic by hand, and data in which the answer is known."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from mizarr.stages.monitors import probes as module
from mizarr.stages.monitors.probes import METHODS, PENALTIES, probe_scores, train_probes
from mizarr.stages.monitors.splits import Examples, permuted_labels
from mizarr.stages.monitors.trained import TrainedProbe
from mizarr.store.errors import ConfigError, PromptError, ShapeError, StageError

pytest.importorskip("sklearn")

DEFAULTS = dict(train_probes.params)


def data(seed: int, n: int, width: int, shift: float = 1.5):
    """Correlated rows far from zero, as residual streams are; positives shifted along a random direction."""
    rng = np.random.default_rng(seed)
    label = rng.integers(2, size=n)
    mix = rng.normal(size=(width, width)) / np.sqrt(width)
    direction = rng.normal(size=width)
    direction *= shift / np.linalg.norm(direction)
    rows = rng.normal(size=(n, width)) @ mix + 40 * rng.normal(size=width)
    return (rows + (label - 0.5)[:, None] * direction).astype(np.float32), label


def example(values, dim="prompt"):
    return xr.DataArray(np.asarray(values), dims=dim)


def as_states(rows, **attrs):
    return xr.DataArray(
        rows[None], {"layer": [4]}, ("layer", "prompt", "hidden"), name="resid_post", attrs=attrs
    )


def as_examples(label, group=None, types=None):
    columns = {"target": np.asarray(label, float), "group": np.arange(len(label)) if group is None else group}
    columns |= {} if types is None else {"type": types}
    return xr.Dataset({name: example(values, f"{name}_axis") for name, values in columns.items()})


def trained(rows, label, group=None, types=None, attrs=None, **params):
    inputs = {"states": as_states(rows, **attrs or {}), "examples": as_examples(label, group, types)}
    return train_probes.compute(inputs, DEFAULTS | {"draws": 5} | params)


def parts(result):
    fold = result["fold"].values
    return np.flatnonzero(fold >= 0), np.flatnonzero(fold == -1)


@pytest.mark.parametrize(("seed", "n", "width"), [(0, 120, 200), (1, 400, 48), (2, 150, 70)])
def test_logistic_probes_are_those_of_scikit_learn(seed, n, width):
    """Same penalty, same direction: both minimise one convex objective. Cross-validated, within 0.01."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.model_selection import cross_val_score
    from sklearn.preprocessing import StandardScaler

    rows, label = data(seed, n, width, shift=2.0)
    result = trained(rows, label).sel(layer=4, probe="logistic")
    train, test = parts(result)
    scaler = StandardScaler().fit(rows[train])
    standard = scaler.transform(rows.astype(float))
    peer = LogisticRegression(C=1 / (float(result["penalty"]) * len(train)), max_iter=10_000, tol=1e-10)
    peer.fit(standard[train], label[train])
    theirs, ours = peer.coef_[0] / scaler.scale_, result["weight"].values
    assert theirs @ ours / np.linalg.norm(theirs) / np.linalg.norm(ours) == pytest.approx(1, abs=1e-4)
    area = float(result["auroc"].sel(bound="value"))
    assert area == pytest.approx(roc_auc_score(label[test], peer.decision_function(standard[test])), abs=2e-3)
    peers = [LogisticRegression(C=1 / (p * len(train)), max_iter=5000) for p in PENALTIES]
    peer = max(
        peers,
        key=lambda one: cross_val_score(one, standard[train], label[train], scoring="roc_auc").mean(),
    )
    peer.fit(standard[train], label[train])
    chosen = roc_auc_score(label[test], peer.decision_function(standard[test]))
    # Folds differ, so another penalty may be chosen; the test areas then differ little.
    assert area == pytest.approx(chosen, abs=0.02)


def test_rows_read_from_disk_give_the_probes_of_rows_in_memory(monkeypatch):
    """float32 products and Hessians of a sample of rows, against float64 and all rows."""
    rows, label = data(3, 900, 24, shift=0.6)
    expected = trained(rows, label)
    monkeypatch.setattr(module, "IN_MEMORY", 0)
    monkeypatch.setattr("mizarr.stages.monitors.logistic.SAMPLE_BYTES", 4 * 24 * 150)
    monkeypatch.setattr("mizarr.stages.corpus.token_blocks.BLOCK_BYTES", 4 * 24 * 300)
    found = trained(rows, label)
    np.testing.assert_array_equal(found["penalty"], expected["penalty"])
    for method in METHODS:
        ours, theirs = (one["weight"].sel(layer=4, probe=method).values for one in (found, expected))
        assert np.linalg.norm(ours - theirs) <= 2e-3 * np.linalg.norm(theirs)
    np.testing.assert_allclose(found["auroc"], expected["auroc"], atol=2e-3)


def test_mass_mean_and_lda_are_arithmetic_on_the_train_part():
    rows, label = data(4, 300, 20)
    result = trained(rows, label)
    train, _ = parts(result)
    x, y = rows[train].astype(float), label[train] == 1
    contrast = x[y].mean(0) - x[~y].mean(0)
    scale = x.std(0)
    within = np.concatenate([x[y] - x[y].mean(0), x[~y] - x[~y].mean(0)]) / scale
    covariance = within.T @ within / (len(x) - 2)
    p, n, squares, trace = 20, len(x), np.square(covariance).sum(), covariance.trace()
    share = ((1 - 2 / p) * squares + trace**2) / ((n + 1 - 2 / p) * (squares - trace**2 / p))
    shrunk = (1 - share) * covariance + share * trace / p * np.eye(p)
    lda = np.linalg.solve(shrunk, contrast / scale) / scale
    for method, expected in (("mass_mean", contrast), ("lda", lda)):
        found = result["weight"].sel(layer=4, probe=method).values
        np.testing.assert_allclose(
            found / np.linalg.norm(found), expected / np.linalg.norm(expected), rtol=1e-5, atol=1e-7
        )


def test_scores_of_the_test_part_are_those_of_the_weights_and_of_the_train_part_are_out_of_fold():
    rows, label = data(5, 200, 30)
    result = trained(rows, label)
    train, test = parts(result)
    for method in METHODS:
        probe = result.sel(layer=4, probe=method)
        scores = rows.astype(float) @ probe["weight"].values + float(probe["bias"])
        np.testing.assert_allclose(probe["score"].values[test], scores[test], atol=1e-4)
        assert np.abs(probe["score"].values[train] - scores[train]).max() > 1e-2
    again = probe_scores.compute({"states": as_states(rows[:50]), "probes": result}, {})
    np.testing.assert_allclose(
        again["score"].values[0, 0, test[test < 50]], result["score"].values[0, 0, test[test < 50]], atol=1e-4
    )


@pytest.mark.parametrize("seed", range(4))
def test_without_a_signal_the_areas_are_those_of_shuffled_labels(seed):
    rows, label = data(10 + seed, 240, 300, shift=0.0)
    result = trained(rows, label, draws=40)
    low, high = np.quantile(result["shuffled_auroc"], [0.0, 1.0], axis=(0, 2))
    area = result["auroc"].sel(layer=4, bound="value").values
    # Of 40 draws none is as extreme with a chance of 5 %, so the range is widened a little.
    assert ((area > low - 0.05) & (area < high + 0.05)).all()
    assert np.abs(result["shuffled_auroc"].mean("draw") - 0.5).max() < 0.06


def test_members_of_a_group_are_in_one_part():
    rows, label = data(6, 300, 10)
    group = np.random.default_rng(0).integers(80, size=300)
    fold = trained(rows, label, group)["fold"].values
    assert all(len(set(fold[group == one])) == 1 for one in np.unique(group))
    share = (fold == -1).mean()
    assert 0.4 < share < 0.6


def test_copies_in_other_groups_leak_and_groups_prevent_it():
    """Random labels of 40 texts with ten copies each: only a split by group is at chance."""
    rng = np.random.default_rng(7)
    texts, label = np.repeat(rng.normal(size=(40, 100)), 10, axis=0), np.repeat(rng.integers(2, size=40), 10)
    rows = (texts + 0.1 * rng.normal(size=texts.shape)).astype(np.float32)
    by_text = trained(rows, label, np.repeat(np.arange(40), 10), methods=["logistic"])
    by_row = trained(rows, label, methods=["logistic"])
    assert float(by_row["auroc"].sel(bound="value").squeeze()) > 0.99
    assert float(by_text["auroc"].sel(bound="value").squeeze()) < 0.85
    assert by_text["shuffled_auroc"].std() > 2 * by_row["shuffled_auroc"].std()


def test_pairs_are_shuffled_within_each_pair():
    label = np.tile([0.0, 1.0], 50)
    examples = Examples.of(label, np.repeat(np.arange(50), 2), folds=5, test_share=0.5, seed=0)
    shuffled = examples.shuffled(20, 0)
    assert (shuffled.reshape(50, 2, 20).sum(axis=1) == 1).all()
    assert 0.3 < (shuffled != examples.label[:, None]).mean() < 0.7


@pytest.mark.parametrize("seed", range(3))
def test_labels_of_whole_groups_are_permuted_among_them(seed):
    rng = np.random.default_rng(seed)
    group = 7 * rng.permutation(np.repeat(np.arange(12), 5))
    label = group % 2 == 0
    permuted = np.array([permuted_labels(label, group, rng) for _ in range(40)])
    for member in np.unique(group):
        of_group = permuted[:, group == member]
        assert (of_group == of_group[:, :1]).all()
    assert (permuted.sum(axis=1) == label.sum()).all()
    assert 0.3 < (permuted != label).mean() < 0.7
    # A single group with both labels: all labels stay within their groups.
    label[np.flatnonzero(group == 0)[0]] = False
    permuted = permuted_labels(label, group, rng)
    assert (np.bincount(group, permuted) == np.bincount(group, label)).all()


def test_control_tasks_are_learnt_where_states_tell_types_apart():
    """Each of 12 types has a state of its own: its random labels are read as well as the true ones."""
    rng = np.random.default_rng(8)
    types = rng.integers(12, size=400)
    rows = (rng.normal(size=(12, 30))[types] + 0.05 * rng.normal(size=(400, 30))).astype(np.float32)
    result = trained(rows, types % 2, types=types, methods=["logistic"])
    assert float(result["control_auroc"].squeeze()) > 0.95
    rows = data(9, 400, 30)[0]
    result = trained(rows, types % 2, types=types, methods=["logistic"])
    assert abs(float(result["control_auroc"].squeeze()) - 0.5) < 0.15


def test_layers_are_cells_and_a_layer_is_what_it_is_alone():
    first, label = data(11, 120, 16)
    second, _ = data(12, 120, 16)
    both = xr.concat([as_states(first), as_states(second).assign_coords(layer=[7])], "layer")
    inputs, params = {"examples": as_examples(label)}, DEFAULTS | {"draws": 3}
    whole = train_probes.compute({"states": both, **inputs}, params)
    alone = train_probes.compute({"states": as_states(second).assign_coords(layer=[7]), **inputs}, params)
    xr.testing.assert_identical(whole.sel(layer=[7]).drop_attrs(), alone.drop_attrs())


def test_examples_without_a_target_are_left_out():
    rows, label = data(13, 200, 12)
    target = label.astype(float)
    target[::4] = np.nan
    result = trained(rows, target)
    assert np.isnan(result["score"].values[..., ::4]).all()
    assert (result["fold"].values[::4] == -2).all()
    keep = np.flatnonzero(~np.isnan(target))
    alone = trained(rows[keep], label[keep], group=keep)
    np.testing.assert_allclose(result["weight"], alone["weight"], rtol=1e-9)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"label": np.ones(40)}, PromptError, "negative examples"),
        ({"label": [1.0] * 4 + [0.0] * 36}, PromptError, "positive ones in 4 groups"),
        ({"folds": 30}, PromptError, "fewer folds"),
        ({"folds": 1}, ConfigError, "at least 2 folds"),
        ({"label": np.arange(40) % 3}, ConfigError, "targets 0 and 1"),
        ({"methods": ["svm"]}, ConfigError, "'svm'"),
        ({"false_positives": 2.0}, ConfigError, "from 0 to 1"),
        ({"group": np.arange(39)}, ShapeError, r"40 examples.*group \(39,\)"),
    ],
)
def test_bad_input_is_one_line(change, error, words):
    rows, _ = data(14, 40, 6)
    change = dict(change)
    with pytest.raises(error, match=words) as caught:
        trained(rows, change.pop("label", np.arange(40) % 2), **change)
    assert "\n" not in str(caught.value)


def test_scores_of_other_states_are_refused():
    rows, label = data(15, 80, 8)
    result = trained(rows, label, attrs={"model_digest": "sha256:aa"})
    with pytest.raises(ShapeError, match=r"width 8.*width 7"):
        probe_scores.compute({"states": as_states(rows[:, :7]), "probes": result}, {})
    pooled = as_states(rows, point="resid_post", pooling="mean")
    with pytest.raises(ShapeError, match="pooling: mean"):
        probe_scores.compute({"states": pooled, "probes": result}, {})
    with pytest.raises(StageError, match="different models"):
        probe_scores.compute({"states": as_states(rows, model_digest="sha256:bb"), "probes": result}, {})


def test_a_trained_probe_is_identified_by_its_numbers_and_not_by_its_name():
    rows, label = data(16, 80, 8)
    result = trained(rows, label)
    probe, renamed, other = (
        TrainedProbe.of(result, layer=4),
        TrainedProbe.of(result, layer=4, name="mine"),
        TrainedProbe.of(result, layer=4, method="lda"),
    )
    assert probe.identity == renamed.identity != other.identity
    assert str(probe.point) == "blocks.4.hook_resid_post"
    with pytest.raises(ConfigError, match="nearest is 'lda'"):
        TrainedProbe.of(result, layer=4, method="ldaa")
    with pytest.raises(ConfigError, match="bag_of_words"):
        TrainedProbe.of(result.assign_attrs(point="bag_of_words"), layer=4)
