"""The three questions about networks of AlgZoo: what they tell is what the stages give, and a reader can
check."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from mizarr.stages.algzoo.files import write_tensors
from mizarr.stages.algzoo.model import SHIPPED, load_model
from mizarr.stages.algzoo.networks import labelled, shape_of
from mizarr.stages.algzoo.rnn import require_rnn
from mizarr.stages.algzoo.samples import drawn
from mizarr.stages.algzoo.training import ZooTraining, train
from mizarr.stages.causal.controls import CHANCE
from mizarr.store.errors import ConfigError, MizarrError
from mizarr.workflows import build, compute
from mizarr.workflows.cli import run
from mizarr.workflows.views import Lines
from tests.stages.algzoo.reference import file_of, needs_reference, random_rnn, told
from tests.torch_free import without_torch

pytestmark = pytest.mark.wide

QUICK: dict[str, Any] = {
    "samples": 2000,
    "analysed": 300,
    "controls": 5,
    "realisations": 2,
    "budgets": [1000],
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


# -- inference


@pytest.mark.parametrize("name", [*SHIPPED, "handcrafted-2nd-argmax-10"])
def test_inference_tells_answers_accuracy_and_states(name, store, tmp_path):
    done = compute("stoicheia_inference", store=store, model=name, samples=3000, inputs=7, shown=2)
    found, model = json.loads(json.dumps(done.to_json(), allow_nan=False)), load_model(name)
    x = drawn(model.task, model.sequence, 7)
    said = model.outputs(x)
    assert [row["answer"] for row in found["results"]] == said.argmax(1).tolist()
    assert [row["target"] for row in found["results"]] == model.task.targets(x).tolist()
    np.testing.assert_allclose([row["output"] for row in found["results"]], said)
    every = drawn(model.task, model.sequence, 3000)
    if model.is_rnn:
        right = np.mean(model.outputs(every, "float32").argmax(1) == model.task.targets(every))
        assert found["accuracy"] == pytest.approx(right, abs=1e-12)
    else:
        assert found["exhaustive"] and found["samples"] == 4**4
    assert len(done.draw(tmp_path)) == 1
    assert done.report(tmp_path / "page.html").stat().st_size > 10_000


def test_a_network_whose_answer_is_a_number_has_an_error(store, tmp_path):
    path = write_tensors(tmp_path / "median_h4_n3.pth", random_rnn(0, 4, 1))
    about = {"store": store, "model": str(path), "samples": 2000}
    found = compute("stoicheia_inference", **about).to_json()
    model, x = load_model(path), drawn(load_model(path).task, 3, 2000)
    expected = np.sqrt(np.mean((model.outputs(x)[:, 0] - model.task.targets(x)) ** 2))
    assert found["rmse"] == pytest.approx(expected, rel=1e-4)
    done = compute("stoicheia_analysis", **about | QUICK)
    assert "surprise" not in done.nodes and done.to_json()["exact_rmse"] == pytest.approx(expected, rel=0.1)
    assert done.report(tmp_path / "page.html").stat().st_size > 10_000


def test_with_an_end_token_every_input_shown_and_counted_has_one(store):
    about = {"store": store, "model": "specimen-longest-cycle-4", "samples": 500}
    done = compute("stoicheia_inference", end_token=True, **about)
    assert (done.states["x"][:, -1] == 3).all() and (done.states["x"][:, :-1] < 3).all()
    assert not done.is_exhaustive and int(done.counted["samples"].sum()) == 500
    with pytest.raises(ConfigError, match="expected a transformer for end_token"):
        build("stoicheia_inference", end_token=True)


# -- analysis


@needs_reference
@pytest.mark.parametrize("name", ["2nd_argmax_h2_n2", "argoutlier_h8_n5", "handcrafted_h22_n10"])
def test_analysis_runs_on_files_of_either_format_and_is_plain_json(name, store, tmp_path):
    one, other = (
        compute("stoicheia_analysis", store=store, model=str(file_of(name, ending)), **QUICK)
        for ending in (".safetensors", ".pth")
    )
    keys = [each.header()["provenance"]["keys"] for each in (one, other)]
    assert keys[0] == keys[1], "the same network, computed once"
    found = json.loads(json.dumps(one.to_json(), allow_nan=False))
    assert found["param_count"] == told(name)["param_count"]
    assert ("standardized" in found) == (told(name)["standardized"] is not None)
    assert set(found["surprise"]["estimators"]) == {"oracle", "piecewise", "top_regions", "ablation", "roles"}
    assert found["baseline_mse_vs_compute"][0]["samples"] == 1000
    assert len(found["pairs"]) == math.comb(len(found["neurons"]), 2)
    if "accuracy_gaussian_exact_angle_grid" in told(name):
        assert found["exact_accuracy"] == pytest.approx(
            told(name)["accuracy_gaussian_exact_angle_grid"], abs=1e-5
        )
    assert one.draw(tmp_path)
    assert one.report(tmp_path / "page.html").stat().st_size > 10_000


def test_the_claim_stands_beside_bases_with_as_many_directions_to_choose_among(store):
    done = compute("stoicheia_analysis", store=store, **QUICK)
    (finding,) = done.to_json()["findings"]
    null = -done.result("controls")["delta"].min("direction").values
    assert finding["null"]["median"] == pytest.approx(np.median(null))
    assert finding["effect"] == pytest.approx(-float(done.ablation["delta"][done.neuron]))
    assert done.neuron == int(done.result("chosen")["delta"].argmin("neuron")), (
        "chosen on samples it is not scored on"
    )


def test_errors_are_drawn_as_they_are_over_samples_in_rising_order(store):
    done = compute("stoicheia_analysis", store=store, **QUICK | {"budgets": [10_000, 1000]})
    (view,) = [each for each in done.shown if isinstance(each, Lines) and each.x_name == "samples"]
    assert (view.x, view.log, view.log_x) == ((1000, 10_000), True, True)
    told = {each["samples"]: each["baseline_expected"] for each in done.to_json()["baseline_mse_vs_compute"]}
    (expected,) = [line for line in view.lines if line.name == "samples, expected"]
    assert expected.values.tolist() == [told[1000], told[10_000]]
    assert told[1000] == pytest.approx(10 * told[10_000])


def test_a_transformer_is_refused_in_one_line_that_says_where_to_go(capsys):
    assert run(["compute", "stoicheia_analysis", "--set", "model=specimen-longest-cycle-4"]) == 2
    said = capsys.readouterr().err
    assert "expected an RNN" in said and "stoicheia_inference" in said and said.count("\n") == 1


def test_a_cached_analysis_needs_no_torch(store):
    here = compute("stoicheia_analysis", store=store, **QUICK).to_json()
    program = """
from mizarr.workflows import compute
done = compute("stoicheia_analysis", store=sys.argv[1], **json.loads(sys.argv[2]))
print(json.dumps(done.to_json()))
"""
    assert without_torch(program, store, json.dumps(QUICK)) == json.loads(json.dumps(here))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"model": "specimen"}, "expected an AlgZoo network"),
        ({"task": "argmedian_"}, "did you mean 'argmedian'"),
        ({"task": "longest_cycle"}, "longest_cycle has integer inputs, which need a transformer"),
        ({"sequence": 4}, "the tensors are for inputs of 3 time steps, but sequence is 4"),
        ({"heads": 2}, "an RNN, which has no attention heads, found heads=2"),
        ({"budgets": [1500]}, "multiples of 1000"),
        ({"sigmas": [0.0]}, "expected sigmas to be a list of float of more than 0"),
        ({"samples": 0}, "expected samples to be int of at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_one_line(settings, match):
    with pytest.raises(MizarrError, match=match) as caught:
        build("stoicheia_analysis", **settings)
    assert "\n" not in str(caught.value)


# -- sweep


def test_a_sweep_is_one_labelled_dataset_of_trained_networks(store, tmp_path):
    about: dict[str, Any] = {
        "hidden": [2, 3],
        "sequences": [2, 3],
        "seeds": [0],
        "trained": 4096,
        "samples": 3000,
    }
    done = compute("stoicheia_sweep", store=store, **about)
    table = done.table
    assert dict(table.sizes) == {"hidden": 2, "sequence": 2, "seed": 1}
    assert table["accuracy"].notnull().all() and (table["accuracy"] > 0.1).all()
    found = json.loads(json.dumps(done.to_json(), allow_nan=False))
    assert len(found["results"]) == 4
    assert done.draw(tmp_path) and done.report(tmp_path / "page.html").stat().st_size > 10_000
    records = len(list((store / "keys").rglob("*.json")))
    again = compute("stoicheia_sweep", store=store, **about | {"seeds": [0, 1]})
    assert again.table["accuracy"].sel(seed=0).equals(table["accuracy"].sel(seed=0))
    assert len(list((store / "keys").rglob("*.json"))) == records + 4 * 3, (
        "weights, a cell and a count of four more"
    )


def test_a_sweep_over_a_folder_takes_the_last_checkpoint_and_tells_what_is_missing(store, tmp_path):
    for hidden, trained in ((2, 1024), (2, 2048), (4, 1024)):
        tensors = random_rnn(hidden + trained, hidden, 3)
        write_tensors(tmp_path / f"argmax_{hidden}_3_{trained}_0.pth", tensors)
    shutil.copy(tmp_path / "argmax_4_3_1024_0.pth", tmp_path / "unrelated.pth")
    about = {"task": "argmax", "hidden": [2, 4, 8], "sequences": [3], "seeds": [0], "samples": 2000}
    done = compute("stoicheia_sweep", store=store, zoo=str(tmp_path), **about)
    model = load_model(tmp_path / "argmax_2_3_2048_0.pth")
    x = drawn(model.task, 3, 2000)
    right = np.mean(model.outputs(x, "float32").argmax(1) == model.task.targets(x))
    assert float(done.table["accuracy"][0, 0, 0]) == pytest.approx(right)
    assert np.isnan(done.table["accuracy"].values[2, 0, 0])
    assert "1 networks are missing" in done.shown[0].caption
    early = compute("stoicheia_sweep", store=store, zoo=str(tmp_path), trained=1024, **about)
    assert float(early.table["accuracy"][0, 0, 0]) != float(done.table["accuracy"][0, 0, 0])
    with pytest.raises(ConfigError, match="found none of the sizes"):
        build("stoicheia_sweep", zoo=str(tmp_path), **about | {"sequences": [5]})
    with pytest.raises(ConfigError, match="give a folder of trained transformers"):
        build("stoicheia_sweep", task="longest_cycle")


def test_checkpoints_of_one_training_are_an_axis(store):
    """Each is what the training gives when it has come so far, and the last is the whole training."""
    about: dict[str, Any] = {"hidden": [2], "sequences": [2], "seeds": [0, 1], "samples": 3000}
    done = compute("stoicheia_sweep", store=store, trained=[8192, 0, 2048], **about)
    table = done.table["accuracy"]
    assert table.dims == ("hidden", "sequence", "seed", "trained")
    assert table["trained"].values.tolist() == [0, 2048, 8192]
    for seed in (0, 1):
        kept: dict[int, dict[str, np.ndarray]] = {}
        recipe = ZooTraining("2nd_argmax", 2, 2, seed, 8192, checkpoints=(0, 2048, 8192))
        last, _ = train(recipe, keep=kept.__setitem__)
        for name, tensor in last.items():
            np.testing.assert_array_equal(tensor, kept[8192][name])
        for after, tensors in kept.items():
            rnn = require_rnn(labelled(tensors, shape_of(tensors, "")), "")
            x = drawn(load_model(SHIPPED[0]).task, 2, 3000)
            right = np.mean(rnn.outputs(x).argmax(1) == np.argsort(x, axis=1)[:, -2])
            assert float(table.sel(seed=seed, trained=after).squeeze()) == pytest.approx(right, abs=1e-3)
    told = json.loads(json.dumps(done.to_json(), allow_nan=False))
    assert told["dims"] == ["hidden", "sequence", "seed", "trained"]
    assert [row["trained"] for row in told["results"]] == [0, 2048, 8192] * 2
    assert told["best"][0]["accuracy"] == pytest.approx(float(table.sel(trained=8192).max()))
    (course,) = [view for view in done.shown if isinstance(view, Lines) and "course" in view.title]
    assert (course.log_x, course.x) == (False, ("0", "2,048", "8,192")), "0 has no place on a log axis"
    later = compute("stoicheia_sweep", store=store, trained=[8192, 2048], **about)
    (course,) = [view for view in later.shown if isinstance(view, Lines) and "course" in view.title]
    assert (course.log_x, course.x) == (True, (2048, 8192))
    whole = compute("stoicheia_sweep", store=store, trained=8192, **about).table["accuracy"]
    np.testing.assert_array_equal(whole.values, table.sel(trained=8192).values)


def test_checkpoints_of_a_folder_are_an_axis_with_gaps(store, tmp_path):
    for trained in (1024, 2048):
        write_tensors(tmp_path / f"argmax_2_3_{trained}_0.pth", random_rnn(trained, 2, 3))
    about: dict[str, Any] = {"task": "argmax", "hidden": [2], "sequences": [3], "seeds": [0], "samples": 1000}
    about |= {"zoo": str(tmp_path), "trained": [512, 1024, 2048]}
    table = compute("stoicheia_sweep", store=store, **about).table
    assert np.isnan(table["accuracy"].values.ravel()).tolist() == [True, False, False]


def test_checkpoints_that_cannot_be_are_refused():
    with pytest.raises(
        ConfigError, match="multiples of the batch of 1024 inputs, from 0 to 2048, found 1500"
    ):
        build("stoicheia_sweep", trained=[1500, 2048])
    with pytest.raises(ConfigError, match="expected different trained"):
        build("stoicheia_sweep", trained=[1024, 1024])


def test_roles_are_told_number_by_number(store):
    """The last of them are those of the cards; earlier ones are of the numbers until then."""
    done = compute("stoicheia_analysis", store=store, **QUICK)
    told = json.loads(json.dumps(done.to_json(), allow_nan=False))["roles_by_time"]
    found, cards = np.array(told["correlation"]), done.cards
    assert told["dims"] == ["neuron", "role", "time"]
    assert found.shape == (len(cards), len(told["roles"]), done.network.sequence)
    for card, row in zip(cards, found[..., -1], strict=True):
        assert row.max() == pytest.approx(card["correlation"])
    rnn, x = require_rnn(done.network.weights, ""), drawn(done.network.task, done.network.sequence, 300)
    first = np.maximum(rnn.states(x)[:, 0], 0)
    seen = np.corrcoef(first[:, 0], np.maximum(x[:, 0], 0))[0, 1]
    assert found[0, told["roles"].index("RecentInput"), 0] == pytest.approx(abs(seen), abs=1e-6)


# -- the training tool


@pytest.mark.parametrize(
    ("task", "ending"), [("2nd_argmax", ".safetensors"), ("longest_cycle", ".pth"), ("median", ".pth")]
)
def test_a_trained_network_has_the_zoo_s_name_and_its_seed_decides_it(task, ending, tmp_path, capsys):
    words = [
        "train-zoo",
        task,
        "--hidden",
        "4",
        "--sequence",
        "3",
        "--sequences",
        "20480",
        "--json",
        "--quiet",
    ]
    more = ["--pth"] if ending == ".pth" else []
    for folder in ("one", "two"):
        assert run([*words, *more, "--seed", "1", "--seed", "2", "--out", str(tmp_path / folder)]) == 0
    capsys.readouterr()
    name = f"{task}_4_3_20480_1{ending}"
    one, two, other = (
        load_model(tmp_path / folder / each)
        for folder, each in (
            ("one", name),
            ("two", name),
            ("one", name.replace(f"_1{ending}", f"_2{ending}")),
        )
    )
    assert one.identity() == two.identity() != other.identity()
    assert (one.task.name, one.sequence, one.metadata.seed, one.metadata.trained) == (task, 3, 1, 20480)


def test_training_learns_the_task():
    tensors, losses = train(ZooTraining("argmax", 4, 2, seed=0, sequences=2**18))
    x = drawn(load_model(SHIPPED[0]).task, 2, 5000)
    said = require_rnn(labelled(tensors, shape_of(tensors, "trained")), "").outputs(x)
    assert np.mean(said.argmax(1) == x.argmax(1)) > 0.9
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["nothing", "--hidden", "2", "--sequence", "2"], "AlgZoo has no task 'nothing'"),
        (["argmax", "--hidden", "0", "--sequence", "2"], "expected hidden from 1 to 4096, found 0"),
        (["argmax", "--hidden", "2", "--sequence", "1"], "expected sequence from 2 to 4096, found 1"),
        (
            ["longest_cycle", "--hidden", "4", "--sequence", "3", "--heads", "3"],
            "heads to divide the hidden size 4",
        ),
    ],
)
def test_a_training_that_makes_no_network_is_one_line(words, match, capsys, tmp_path):
    assert run(["train-zoo", *words, "--out", str(tmp_path / "zoo")]) == 2
    said = capsys.readouterr().err
    assert match in said and said.count("\n") == 1
    assert not (tmp_path / "zoo").exists()


@pytest.mark.parametrize("task", ["2nd_argmax", "longest_cycle"])
def test_training_leaves_networks_on_its_way_that_say_how_far_they_came(task, tmp_path, capsys):
    """The drawn network, one on the way and the last: a sweep over the folder would find them."""
    words = ["train-zoo", task, "--hidden", "4", "--sequence", "3", "--sequences", "4096", "--quiet"]
    more = ["--checkpoint", "0", "--checkpoint", "2048", "--out", str(tmp_path)]
    assert run([*words, *more]) == 0
    assert capsys.readouterr().err.count("wrote ") == 3
    found = {after: load_model(tmp_path / f"{task}_4_3_{after}_0.safetensors") for after in (0, 2048, 4096)}
    assert len({str(model.identity()) for model in found.values()}) == 3
    assert run([*words, "--out", str(tmp_path / "plain")]) == 0
    plain = load_model(tmp_path / "plain" / f"{task}_4_3_4096_0.safetensors")
    for name, tensor in plain.tensors.items():
        np.testing.assert_array_equal(tensor, found[4096].tensors[name], "checkpoints change nothing")


# -- chance


def claimed(folder: Path, store: Path, seeds: range) -> int:
    """How many random networks are said to need a neuron more than a direction of a random basis."""
    found = 0
    for seed in seeds:
        path = write_tensors(folder / f"argmax_6_4_0_{seed}.pth", random_rnn(seed, 6, 4))
        about = QUICK | {"controls": 40, "seed": seed}
        (finding,) = compute("stoicheia_analysis", store=store, model=str(path), **about).to_json()[
            "findings"
        ]
        found += finding["verdict"] == "beyond chance"
    return found


def test_random_weights_are_said_to_need_no_neuron_more_than_chance(store, tmp_path):
    assert claimed(tmp_path, store, range(3)) <= binom.ppf(0.999, 3, CHANCE)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_random_weights_are_said_to_need_none_either(store, tmp_path):
    assert claimed(tmp_path, store, range(3, 27)) <= binom.ppf(0.999, 24, CHANCE)
