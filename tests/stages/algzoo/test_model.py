"""Networks from files and by name: what they compute, against the references and plain loops."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import mizarr
from mizarr import Add, HookSpec, Knockout, Replace, Scale, Zero
from mizarr.pipeline import run
from mizarr.stages.algzoo.capture import capture, run_key
from mizarr.stages.algzoo.files import metadata_of_name, write_tensors
from mizarr.stages.algzoo.handcrafted import handcrafted_2nd_argmax
from mizarr.stages.algzoo.model import HANDCRAFTED, load_model
from mizarr.stages.algzoo.samples import drawn, lcg
from mizarr.stages.algzoo.tasks import TASKS
from mizarr.store.errors import (
    ConfigError,
    HookPointNotFound,
    InterventionError,
    MizarrError,
    ModelNotFound,
    ShapeError,
    SourceChanged,
    WeightsError,
)
from tests.torch_free import without_torch

from .reference import (
    CLASSES,
    MODELS,
    REFERENCE,
    RNNS,
    file_of,
    needs_reference,
    random_rnn,
    random_transformer,
    told,
)

ENDINGS = (".safetensors", ".pth")


# -- against the references


@needs_reference
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_answers_are_the_reference(name, ending):
    model, expected = load_model(file_of(name, ending)), told(name)
    x = np.array(expected["input"], np.float32 if model.is_rnn else np.int64)
    assert (model.task.name, model.parameters) == (expected["task"], expected["param_count"])
    assert np.abs(model.outputs(x) - np.array(expected["output"])).max() < 1e-9
    np.testing.assert_allclose(model.task.targets(x), expected["target"], atol=1e-9)


@needs_reference
@pytest.mark.parametrize("name", [name for name in RNNS if name != "handcrafted_h4_n3"])
def test_in_float32_outputs_are_the_reference_within_1e_4(name):
    """The written network of three numbers takes differences of thousands, which float32 does not have."""
    expected = told(name)
    said = load_model(file_of(name)).outputs(np.array(expected["input"], np.float32), "float32")
    assert np.abs(said - np.array(expected["output"])).max() < 1e-4


@needs_reference
@pytest.mark.parametrize("name", RNNS)
def test_states_at_hook_points_are_the_reference(name):
    expected, model = told(name), load_model(file_of(name))
    cache = model.forward(np.array(expected["input"][:4], np.float32), HookSpec().capture("rnn.*"))
    traced = np.array(expected["pre_activation_trace"])
    for step in range(traced.shape[1]):
        here = cache[f"rnn.hook_pre_activation.{step}"].numpy()
        np.testing.assert_allclose(here, traced[:, step], atol=1e-9)
        np.testing.assert_array_equal(cache[f"rnn.hook_hidden.{step}"].numpy(), np.maximum(here, 0))
    np.testing.assert_allclose(cache["rnn.hook_final_state"], expected["final_state"], atol=1e-9)
    np.testing.assert_array_equal(cache["rnn.hook_output"], cache.logits)


@needs_reference
@pytest.mark.parametrize("name", ["rnn_2nd_argmax_h2_n2", "transformer_longest_cycle_h4_n4"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_published_networks_say_what_was_published(name, dtype):
    model = load_model(REFERENCE / f"{name}.safetensors")
    expected = json.loads((REFERENCE / f"ref_{name.partition('_')[2]}.json").read_text())
    x, said = np.array(expected["input"]), np.array(expected["output"])
    x = x.astype(np.float32) if model.is_rnn else x
    tolerance = 1e-4 if model.is_rnn else 1e-5 * np.abs(said).max()
    assert np.abs(model.outputs(x, dtype) - said).max() < tolerance


@needs_reference
def test_hook_points_of_the_transformer_are_the_reference():
    expected, model = told("longest_cycle_h8_n4"), load_model(file_of("longest_cycle_h8_n4"))
    cache = model.forward(np.array(expected["input"][:2]), HookSpec().capture("*"))
    for point, values in expected["cache"].items():
        np.testing.assert_allclose(cache[point].numpy(), values, atol=1e-9, err_msg=point)


@needs_reference
@pytest.mark.parametrize(("length", "name"), [(2, "h2_n2"), (3, "h4_n3"), (10, "h22_n10")])
def test_written_networks_are_the_published_ones_bit_for_bit(length, name):
    published = load_model(file_of(f"handcrafted_{name}"))
    written = handcrafted_2nd_argmax(length)
    for tensor, values in published.tensors.items():
        np.testing.assert_array_equal(written[tensor], values)
    assert load_model(f"handcrafted-2nd-argmax-{length}").identity() == published.identity()


# -- against torch and plain loops


@pytest.mark.parametrize(("hidden", "outputs", "seed"), [(1, 2, 0), (3, 5, 1), (32, 11, 2), (40, 12, 3)])
def test_a_random_rnn_computes_what_torch_s_own_does(hidden, outputs, seed, tmp_path):
    tensors = random_rnn(seed, hidden, outputs)
    model = load_model(write_tensors(tmp_path / "argmax_x.pth", tensors))
    theirs = torch.nn.RNN(1, hidden, nonlinearity="relu", bias=False, batch_first=True)
    theirs.load_state_dict(
        {name[4:]: torch.tensor(held) for name, held in tensors.items() if name[:4] == "rnn."}
    )
    x = drawn(model.task, outputs, 20_000, seed=seed)
    with torch.no_grad():
        said = theirs(torch.tensor(x)[..., None])[1][0] @ torch.tensor(tensors["linear.weight"]).T
    scale = float(said.abs().max())
    assert np.abs(model.outputs(x, "float32") - said.numpy()).max() < 1e-5 * scale
    assert np.abs(model.outputs(x) - said.numpy()).max() < 1e-5 * scale


@pytest.mark.parametrize(
    ("hidden", "sequence", "layers", "heads"), [(4, 3, 1, 1), (6, 5, 3, 2), (8, 6, 2, 4)]
)
def test_a_random_transformer_computes_what_torch_s_attention_does(hidden, sequence, layers, heads, tmp_path):
    tensors = random_transformer(hidden, hidden, sequence, layers)
    model = load_model(write_tensors(tmp_path / "longest_cycle_x.safetensors", tensors), heads=heads)
    x = torch.tensor(drawn(model.task, sequence, 50, seed=1))
    held = {name: torch.tensor(values).double() for name, values in tensors.items()}
    stream = held["embed.weight"][x] + held["pos_embed.weight"]
    for i in range(layers):
        attention = torch.nn.MultiheadAttention(hidden, heads, bias=False, batch_first=True).double()
        here = {
            name.partition(f"attns.{i}.")[2]: values for name, values in held.items() if f"attns.{i}." in name
        }
        attention.load_state_dict(here)
        with torch.no_grad():
            stream = stream + attention(stream, stream, stream, need_weights=False)[0]
    np.testing.assert_allclose(
        model.outputs(x), (stream[:, -1] @ held["unembed.weight"].T).numpy(), rtol=1e-9, atol=1e-9
    )


def test_scaling_the_numbers_scales_the_answer():
    model = load_model("handcrafted-2nd-argmax-10")
    x = drawn(model.task, 10, 100, seed=0).astype(np.float64)
    np.testing.assert_allclose(model.outputs(3 * x), 3 * model.outputs(x), rtol=1e-12)


# -- hook points


@pytest.fixture
def rnn(tmp_path):
    return load_model(write_tensors(tmp_path / "argmedian_h5_n3.safetensors", random_rnn(7, 5, 3)))


X = lcg(6, 3)


def stepped(tensors, x, change):
    """The pass by hand: change(step, state) after every ReLU."""
    ih, hh, oh = (
        tensors[name].astype(np.float64) for name in ("rnn.weight_ih_l0", "rnn.weight_hh_l0", "linear.weight")
    )
    h = np.zeros((len(x), len(hh)))
    for step in range(x.shape[1]):
        h = change(step, np.maximum(x[:, step, None] @ ih.T + h @ hh.T, 0))
    return h @ oh.T


@pytest.mark.parametrize(
    ("intervention", "change"),
    [
        (Zero(), lambda h: h * 0),
        (Zero(neurons=(1, 3)), lambda h: h * [1, 0, 1, 0, 1]),
        (Scale(0.5, neurons=(-1,)), lambda h: h * [1, 1, 1, 1, 0.5]),
        (
            Replace([0.25, 4.0], neurons=(0, 2)),
            lambda h: np.concatenate(
                [h[:, :0] + 0, np.tile([0.25], (6, 1)), h[:, 1:2], np.tile([4.0], (6, 1)), h[:, 3:]], 1
            ),
        ),
        (Add([1.0, 2.0, 3.0, 4.0, 5.0]), lambda h: h + np.arange(1, 6)),
    ],
)
@pytest.mark.parametrize("where", ["rnn.hook_hidden.*", "rnn.hook_hidden.1"])
def test_a_changed_state_goes_on_changed(rnn, intervention, change, where):
    steps = range(3) if "*" in where else (1,)
    said = rnn.forward(X, HookSpec().intervene(where, intervention)).logits.numpy()
    expected = stepped(rnn.tensors, X, lambda step, h: change(h) if step in steps else h)
    np.testing.assert_allclose(said, expected, atol=1e-12)


def test_capturing_changes_nothing_and_both_sides_of_a_change_are_told(rnn):
    plain = rnn.forward(X).logits
    spec = HookSpec().capture("rnn.*")
    assert torch.equal(rnn.forward(X, spec).logits, plain)
    spec = HookSpec().intervene("rnn.hook_final_state", Zero()).capture("rnn.hook_final_state")
    spec = spec.capture("rnn.hook_final_state", when="before")
    cache = rnn.forward(X, spec)
    assert not cache.get("rnn.hook_final_state").any()
    assert cache.get("rnn.hook_final_state", when="before").any()
    assert not cache.logits.any()


def test_a_pattern_is_changed_and_an_edge_is_cut():
    model = load_model("specimen-longest-cycle-4")
    x = drawn(model.task, 4, 8, seed=0)
    uniform = HookSpec().intervene("blocks.*.attn.hook_pattern", Replace(np.full((4, 4), 0.25)))
    assert not np.allclose(model.forward(x, uniform).logits, model.outputs(x))
    cut = (
        HookSpec()
        .intervene("blocks.0.attn.hook_scores", Knockout(edges=((3, 1),)))
        .capture("blocks.0.attn.hook_pattern")
    )
    pattern = model.forward(x, cut)["blocks.0.attn.hook_pattern"]
    assert not pattern[:, :, 3, 1].any()
    assert torch.allclose(pattern.sum(-1), torch.ones(8, 1, 4, dtype=torch.float64))


def test_what_is_not_there_is_named_with_the_nearest(rnn):
    with pytest.raises(HookPointNotFound, match=r"has time steps 0 to 2, found 'rnn\.hook_hidden\.3'"):
        rnn.forward(X, HookSpec().capture("rnn.hook_hidden.3"))
    with pytest.raises(HookPointNotFound, match="has no hook point 'hook_embed'"):
        rnn.forward(X, HookSpec().capture("hook_embed"))
    with pytest.raises(InterventionError, match=r"expected neurons in 0\.\.4"):
        rnn.forward(X, HookSpec().intervene("rnn.hook_hidden.0", Zero(neurons=(5,))))
    with pytest.raises(InterventionError, match="with positions to select"):
        rnn.forward(X, HookSpec().intervene("rnn.hook_hidden.0", Zero(positions=(0,))))


# -- in the store


def test_captures_are_kept_under_network_inputs_and_interventions(rnn, tmp_path):
    store = mizarr.open_store(tmp_path / "store")
    hooks = HookSpec().capture("rnn.hook_hidden.*")
    found = capture(rnn, X, hooks, store=store)
    np.testing.assert_array_equal(found["rnn_hidden"][2], rnn.forward(X, hooks)["rnn.hook_hidden.2"])
    assert found["rnn_hidden"].dims == ("time", "sample", "neuron")
    np.testing.assert_array_equal(found["logits"], rnn.outputs(X))
    many = len(list(store.records()))
    capture(rnn, X.copy(), hooks, store=store)
    assert len(list(store.records())) == many
    capture(
        rnn, X, HookSpec().capture("rnn.hook_hidden.*").intervene("rnn.hook_hidden.0", Zero()), store=store
    )
    assert len(list(store.records())) == many + 1


def test_a_run_is_keyed_by_content_not_by_format_or_name(rnn, tmp_path):
    again = load_model(write_tensors(tmp_path / "other_argmedian.pth", rnn.tensors))
    other = dict(rnn.tensors) | {"rnn.weight_ih_l0": rnn.tensors["rnn.weight_ih_l0"] * np.float32(1.0000001)}
    changed = load_model(write_tensors(tmp_path / "argmedian_h5_n3.pth", other))
    spec = rnn.bind(HookSpec().intervene("rnn.hook_hidden.0", Zero()), 3)
    plain = rnn.bind(None, 3)
    assert run_key(rnn, X, plain) == run_key(again, X, plain)
    keys = {
        run_key(rnn, X, plain),
        run_key(changed, X, plain),
        run_key(rnn, X[:5], plain),
        run_key(rnn, X, spec),
        run_key(rnn, X, plain, "float32"),
    }
    assert len(keys) == 5


def test_a_file_that_was_replaced_after_it_was_planned_stores_nothing(rnn, tmp_path):
    store = mizarr.open_store(tmp_path / "store")
    node = rnn.weights_node()
    write_tensors(Path(rnn.name), random_rnn(8, 5, 3))
    with pytest.raises(SourceChanged, match="its file was replaced meanwhile"):
        run(node, store)
    Path(rnn.name).unlink()
    with pytest.raises(SourceChanged, match="its file was replaced meanwhile"):
        run(node, store)
    assert not list(store.records())


def test_weights_lie_in_the_store_for_whoever_has_no_torch(rnn, tmp_path):
    store = mizarr.open_store(tmp_path / "store")
    node = rnn.weights_node()
    run(node, store)
    program = """
import mizarr
store = mizarr.open_store(sys.argv[1], mode="r")
(record,) = store.records()
weights = store.open_result(record)
from mizarr.stages.algzoo.rnn import require_rnn
import numpy as np
print(json.dumps(require_rnn(weights, "here").outputs(np.array(json.loads(sys.argv[2]))).tolist()))
"""
    found = without_torch(program, tmp_path / "store", json.dumps(X.tolist()))
    np.testing.assert_allclose(found, rnn.outputs(X), rtol=1e-12)


# -- files


def test_names_of_the_zoo_say_what_is_in_them():
    found = metadata_of_name("2nd_argmax_16_10_1073741824_3")
    assert (found.task, found.hidden, found.sequence, found.trained, found.seed) == (
        "2nd_argmax",
        16,
        10,
        2**30,
        3,
    )
    assert metadata_of_name("one_layer_16_hidden_94_acc_2nd_argmax").task == "2nd_argmax"
    assert metadata_of_name("argmedian_h8_n5").sequence == 5
    assert metadata_of_name("network").task is None


class Code:
    def __reduce__(self):
        return os.system, ("true",)


def test_a_pickle_with_code_in_it_is_refused_and_does_not_run(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(os, "system", ran.append)
    for number, write in enumerate(
        (
            lambda path: path.write_bytes(pickle.dumps({"a": Code()})),
            lambda path: torch.save({"a": Code()}, path),
        )
    ):
        path = tmp_path / f"argmax_{number}.pth"
        write(path)
        with pytest.raises(
            WeightsError, match=r"expected (only tensors in|a file that torch.save wrote at)"
        ) as caught:
            load_model(path)
        assert "\n" not in str(caught.value)
    assert not ran


def damaged(tmp_path: Path, name: str, data: bytes) -> Path:
    (tmp_path / name).write_bytes(data)
    return tmp_path / name


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda p: p / "argmax_2_2.pth", ModelNotFound, "there is no file"),
        (lambda p: p, WeightsError, "found a folder"),
        (lambda p: damaged(p, "argmax.bin", b""), WeightsError, r"ends in \.bin"),
        (lambda p: damaged(p, "argmax.safetensors", b"nothing"), WeightsError, "not a complete safetensors"),
        (lambda p: damaged(p, "argmax.pth", b"nothing"), WeightsError, "cannot be read"),
        (
            lambda p: write_tensors(p / "network.pth", random_rnn(0, 3, 3)),
            ConfigError,
            "does not name the network's task",
        ),
        (
            lambda p: write_tensors(p / "argmax_h4_n3.pth", random_rnn(0, 3, 3)),
            WeightsError,
            "the network has width 4",
        ),
        (
            lambda p: write_tensors(p / "argmax_h3_n4.pth", random_rnn(0, 3, 3)),
            ConfigError,
            "the tensors are for inputs of 3 time steps",
        ),
        (
            lambda p: write_tensors(p / "median_h3_n4.pth", random_rnn(0, 3, 3)),
            ConfigError,
            "a network of 1 outputs",
        ),
        (
            lambda p: write_tensors(p / "median.pth", random_rnn(0, 3, 1)),
            ConfigError,
            "does not state the number of time steps",
        ),
        (
            lambda p: write_tensors(p / "argmax.pth", random_rnn(0, 3, 1)),
            ConfigError,
            "needs at least 2 numbers",
        ),
        (
            lambda p: write_tensors(p / "longest_cycle.pth", random_rnn(0, 3, 3)),
            ConfigError,
            "which need a transformer",
        ),
        (
            lambda p: write_tensors(p / "argmax.pth", random_transformer(0, 4, 4)),
            ConfigError,
            "which need an RNN",
        ),
        (
            lambda p: write_tensors(p / "argmax.pth", random_rnn(0, 3, 3) | {"rnn.bias_ih_l0": np.zeros(3)}),
            WeightsError,
            "no biases",
        ),
        (
            lambda p: write_tensors(
                p / "argmax.pth", random_rnn(0, 3, 3) | {"rnn.weight_hh_l0": np.zeros((3, 4))}
            ),
            WeightsError,
            r"imply shape \[3, 3\] for rnn.weight_hh_l0",
        ),
        (
            lambda p: write_tensors(
                p / "argmax.pth", random_rnn(0, 3, 3) | {"rnn.weight_hh_l0": np.full((3, 3), np.nan)}
            ),
            WeightsError,
            "rnn.weight_hh_l0 holds NaN or infinity",
        ),
        (
            lambda p: write_tensors(p / "argmax.pth", {"linear.weight": np.zeros((5000, 3))}),
            WeightsError,
            "have sizes from 1 to 4096",
        ),
        (
            lambda p: write_tensors(p / "argmax.pth", {"linear.weight": np.zeros((5, 3))}),
            WeightsError,
            "is missing",
        ),
        (
            lambda p: write_tensors(p / "argmax.pth", {"something": np.zeros((5, 3))}),
            WeightsError,
            "check that the file holds an AlgZoo network",
        ),
    ],
)
def test_what_cannot_be_loaded_is_one_clear_line(make, error, match, tmp_path):
    with pytest.raises(error, match=match) as caught:
        load_model(make(tmp_path))
    assert isinstance(caught.value, MizarrError)
    assert "\n" not in str(caught.value)


def test_an_unknown_name_offers_the_nearest():
    with pytest.raises(ModelNotFound, match="did you mean 'handcrafted-2nd-argmax-3'"):
        load_model("handcrafted-2nd-argmx-3")
    with pytest.raises(
        ConfigError, match="handcrafted networks for inputs of 2, 3, 10 numbers, found sequence=4"
    ):
        handcrafted_2nd_argmax(4)


@pytest.mark.parametrize("name", HANDCRAFTED)
def test_inputs_of_other_shapes_are_refused(name):
    model = load_model(name)
    for shape in ((3,), (0, 3), (2, 3, 1)):
        with pytest.raises(ShapeError, match=r"expected inputs of shape \[sample, time\]"):
            model.outputs(np.zeros(shape))


def test_a_transformer_refuses_other_lengths_and_integers():
    model = load_model("specimen-longest-cycle-4")
    with pytest.raises(ShapeError, match="position embeddings for inputs of 4 integers"):
        model.outputs(np.zeros((2, 5), np.int64))
    with pytest.raises(ShapeError, match=r"embeddings for the integers 0 to 3"):
        model.outputs(np.full((2, 4), 4))
    with pytest.raises(ShapeError, match=r"embeddings for the integers 0 to 3"):
        model.outputs(np.zeros((2, 4)))


@needs_reference
@pytest.mark.parametrize("name", CLASSES)
def test_tasks_name_themselves_in_the_reference(name):
    assert TASKS[told(name)["task"]].targets(np.array(told(name)["input"])).tolist() == told(name)["target"]
