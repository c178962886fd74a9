"""Training: known directions are found, bits repeat, interruptions leave no trace, every kind can be
exported.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest
import torch

from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.export import export
from mizarr.stages.features.training.checkpoint import Log
from mizarr.stages.features.training.settings import TrainingSettings
from mizarr.stages.features.training.trained import FORMATS, as_dictionary
from mizarr.stages.features.training.trainer import Training
from mizarr.stages.training_data.stored import StoredActivations
from mizarr.store.errors import ConfigError, EntryNotFound, PromptError, ShapeError

SMALL = TrainingSettings(
    features=32, k=4, activation="topk", steps=40, batch=64, lr=3e-3, window=512, block=64, skip_positions=0
)
CLT = replace(
    SMALL, kind="clt", read="hook_resid_mid", write="hook_mlp_out", activation="batchtopk", start="samples"
)


def read_log(folder):
    """What was logged, a mapping for each line."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.fixture
def source(stored, made_of_directions):
    """A stored residual stream of one layer, 16 wide."""
    rows = made_of_directions(0, rows=2048, width=16, directions=32, active=3)[1]
    return StoredActivations(stored({"resid_post": {0: rows}}))


@pytest.fixture
def layered(stored, three_layers):
    return StoredActivations(stored(three_layers()))


def digest(folder):
    """Of the exported files, and of the checkpoint's tensors."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def trained(settings, source, folder, **options):
    training = Training(settings, source, folder, **options)
    training.run()
    return training


def exported(training, folder):
    settings = training.settings
    made = as_dictionary(training.layers, settings, model_name="model")
    return export(made, folder, FORMATS[settings.kind], dtype="float32")


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
@pytest.mark.wide
def test_known_directions_are_recovered(stored, made_of_directions, tmp_path, seed):
    """256 directions in 64 dimensions, four at a time: the setting of the sanity check."""
    known, rows = made_of_directions(seed, rows=65_536, width=64, directions=256, active=4)
    settings = TrainingSettings(
        features=512, k=8, activation="topk", steps=1000, batch=512, lr=2e-3, skip_positions=0, seed=seed
    )
    source = StoredActivations(stored({"resid_post": {0: rows}}, segment=8192))
    training = trained(settings, source, tmp_path / "out", validate_every=0)
    found = torch.nn.functional.normalize(training.layers[0].decoder_rows(slice(None)), dim=1)
    best = (found @ known.T).max(0).values
    assert (best > 0.95).float().mean() >= 0.98
    assert training.measured(training.held_out).fvu.item() < 0.12


def test_a_seed_gives_the_same_files_and_another_seed_others(source, tmp_path):
    made = [
        digest(exported(trained(replace(SMALL, seed=seed), source, tmp_path / f"t{i}"), tmp_path / f"d{i}"))
        for i, seed in enumerate((0, 0, 1))
    ]
    assert made[0] == made[1]
    assert made[0]["sae_weights.safetensors"] != made[2]["sae_weights.safetensors"]


@pytest.mark.parametrize("settings", [SMALL, CLT], ids=["sae", "clt"])
def test_an_interrupted_training_ends_with_the_bits_of_one_that_was_not(
    settings, stored, three_layers, tmp_path
):
    rows = three_layers()
    source = StoredActivations(stored({"resid_post": {0: rows["mlp_out"][0]}} if settings is SMALL else rows))
    settings = replace(settings, dead_after=200)  # so that AuxK and its counters take part
    whole = trained(settings, source, tmp_path / "whole", log_every=5)
    left = iter([3, 11, 1])
    cut = tmp_path / "cut"
    for steps in left:
        training = Training(settings, source, cut, log_every=5)
        made = iter(range(steps))
        assert not training.run(stop=lambda made=made: next(made, None) is None or False)
    resumed = trained(settings, source, cut, log_every=5)
    assert digest(exported(whole, tmp_path / "a")) == digest(exported(resumed, tmp_path / "b"))
    assert (cut / "log.jsonl").read_text() == (tmp_path / "whole" / "log.jsonl").read_text()
    both = [torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (cut, tmp_path / "whole")]
    first, second = (state["optimiser"]["state"] for state in both)
    assert all(torch.equal(first[i]["exp_avg_sq"], second[i]["exp_avg_sq"]) for i in first)


def test_a_kill_between_checkpoints_costs_steps_and_changes_nothing(source, tmp_path):
    def killed(tokens, seen=[0]):  # noqa: B006 - counts over calls
        seen[0] += 1
        if seen[0] == 25:
            raise MemoryError

    with pytest.raises(MemoryError):
        Training(SMALL, source, tmp_path / "cut", save_every=10, log_every=5).run(advance=killed)
    resumed = Training(SMALL, source, tmp_path / "cut", save_every=10, log_every=5)
    assert resumed.step == 20
    resumed.run()
    whole = trained(SMALL, source, tmp_path / "whole", log_every=5)
    assert digest(exported(whole, tmp_path / "a")) == digest(exported(resumed, tmp_path / "b"))
    logs = [(tmp_path / name / "log.jsonl").read_text() for name in ("cut", "whole")]
    assert logs[0] == logs[1]


def test_as_many_features_as_dimensions_all_active_leave_nothing_unexplained(stored, tmp_path):
    rows = torch.randn(2048, 8, generator=torch.Generator().manual_seed(0))
    source = StoredActivations(stored({"resid_post": {0: rows}}))
    settings = replace(SMALL, features=32, k=8, steps=1000, batch=256, lr=1e-2)
    training = trained(settings, source, tmp_path / "out")
    assert training.measured(training.held_out).fvu.item() < 0.001


def test_auxk_brings_dead_features_back(stored, made_of_directions, tmp_path):
    """As many features as directions, half of them with a bias that keeps them closed."""
    rows = made_of_directions(0, rows=8192, width=32, directions=64, active=3)[1]
    source = StoredActivations(stored({"resid_post": {0: rows}}))
    settings = replace(SMALL, features=64, k=3, steps=300, batch=64, annealing=0.0, lr=2e-2, dead_after=640)
    dead = []
    for weight in (1 / 32, 0.0):
        training = Training(replace(settings, auxiliary=weight), source, tmp_path / str(weight))
        with torch.no_grad():
            training.model.b_enc["0"][:32] -= 6.0
        training.run()
        dead.append(training.measured(training.held_out).dead.item())
    assert dead[1] > 0.4
    assert dead[0] < 0.5 * dead[1]


KINDS = {
    "sae relu l1": replace(SMALL, activation="relu", sparsity=0.02),
    "sae relu tanh": replace(SMALL, activation="relu", penalty="tanh", sparsity=0.02),
    "sae jumprelu step": replace(SMALL, activation="jumprelu", sparsity=0.01, bandwidth=0.3),
    "sae jumprelu tanh": replace(SMALL, activation="jumprelu", penalty="tanh", sparsity=0.02),
    "sae topk": SMALL,
    "sae topk matryoshka": replace(SMALL, prefixes=(8, 16)),
    "sae batchtopk": replace(SMALL, activation="batchtopk", start="samples"),
    "plt topk": replace(CLT, kind="plt", activation="topk"),
    "plt jumprelu skip": replace(CLT, kind="plt", activation="jumprelu", sparsity=0.01, skip=True),
    "plt batchtopk": replace(CLT, kind="plt"),
    "clt relu tanh": replace(CLT, activation="relu", penalty="tanh", sparsity=0.02),
    "clt jumprelu": replace(CLT, activation="jumprelu", sparsity=0.01),
    "clt batchtopk": CLT,
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_learns_and_its_files_say_what_was_trained(name, layered, tmp_path):
    settings = KINDS[name]
    if settings.kind == "sae":
        settings = replace(settings, read="hook_resid_mid", write=None, layers=(1,))
    training = Training(replace(settings, steps=150, batch=128), layered, tmp_path / "out", log_every=1)
    training.run()
    log = read_log(tmp_path / "out")
    loss = [line["loss"] - line["penalty"] - line["auxiliary"] for line in log]
    assert sum(loss[-5:]) < 0.8 * sum(loss[:5])
    opened = Dictionary.from_pretrained(exported(training, tmp_path / "files"))
    assert (opened.kind, opened.layers, opened.model_name) == (settings.kind, training.layer_numbers, "model")
    x = layered.entry.open().resid_mid
    states = {layer: torch.from_numpy(x.sel(layer=layer).values[:200].copy()) for layer in opened.layers}
    found = opened.encode(states)
    inside = {layer: training.model.read[layer](rows) for layer, rows in states.items()}
    pre = {n: training.model.preactivations(n, rows) for n, rows in inside.items()}
    values = {n: training.model.activation(n)(rows) for n, rows in pre.items()}
    for layer in opened.layers:
        dense = torch.zeros(200, settings.features)
        here = found.layer == layer
        dense[found.position[here], found.feature[here]] = found.value[here]
        threshold = getattr(training.model.activation(layer), "threshold", torch.tensor(-1.0))
        # Thresholds of batchtopk are one of the pre-activations, and rounding decides about that one.
        clear = (pre[layer] - threshold).abs() > 1e-4
        assert clear.float().mean() > 0.999
        assert torch.allclose(dense[clear], values[layer].detach()[clear], atol=1e-4)
        values[layer] = torch.where(clear, values[layer], dense)
    written = opened.reconstruct(found, states)
    made = training.model.decode(values, inside)
    for target, rows in made.items():
        scaled = training.model.write[target]
        assert torch.allclose(written[target], (rows / scaled.scale + scaled.mean).detach(), atol=1e-3)


def test_batchtopk_ends_with_thresholds_that_let_k_features_through(layered, tmp_path):
    """However short: running thresholds would still be on their way."""
    training = trained(replace(CLT, steps=20), layered, tmp_path / "out")
    assert training.measured(training.source).l0.values == pytest.approx([4.0] * 3, abs=0.1)


def test_the_log_holds_layers_and_held_out_prompts(layered, tmp_path):
    trained(CLT, layered, tmp_path / "out", log_every=10, validate_every=20)
    log = read_log(tmp_path / "out")
    assert [line["step"] for line in log] == [10, 20, 30, 40]
    assert all(set(line[name]) == set(log[0][name]) != set() for line in log for name in ("fvu", "l0"))
    assert ["held_out_fvu" in line for line in log] == [False, True, False, True]
    assert set(log[0]) >= {"dead", "threshold", "lr", "loss"}


def test_a_dictionary_in_memory_is_known_by_its_weights(source, tmp_path):
    made = [
        as_dictionary(
            trained(replace(SMALL, seed=seed), source, tmp_path / f"{i}").layers, SMALL, model_name=None
        )
        for i, seed in enumerate((0, 0, 1))
    ]
    assert made[0].identity == made[1].identity != made[2].identity


# -- what cannot be trained on


def test_what_is_not_stored_is_told_and_nothing_is_written(source, layered, tmp_path):
    with pytest.raises(EntryNotFound, match="resid_post"):
        Training(replace(SMALL, read="hook_resid_pre", write=None), source, tmp_path / "out")
    with pytest.raises(EntryNotFound, match="resid_mid of layers 5"):
        Training(replace(SMALL, read="hook_resid_mid", write=None, layers=(1, 5)), layered, tmp_path / "out")
    with pytest.raises(ConfigError, match="every layer from 0 on, found only layers 1, 2"):
        Training(replace(CLT, layers=(1, 2)), layered, tmp_path / "out")
    with pytest.raises(PromptError, match="at least two prompts"):
        Training(SMALL, source.of_prompts([0]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_activations_that_are_not_finite_are_told_and_nothing_is_written(stored, tmp_path):
    rows = torch.zeros(512, 4)
    rows[300, 1] = torch.inf
    source = StoredActivations(stored({"resid_post": {0: rows}}))
    with pytest.raises(ShapeError, match="resid_post of layer 0, prompt 18, position 12"):
        Training(replace(SMALL, validation=0.0), source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_another_training_is_refused(source, layered, tmp_path):
    trained(SMALL, source, tmp_path / "out")
    with pytest.raises(ConfigError, match="features=32, but features=64 was requested"):
        Training(replace(SMALL, features=64), source, tmp_path / "out")
    with pytest.raises(ConfigError, match="on other activations"):
        Training(SMALL, source.of_prompts(range(64)), tmp_path / "out")
    (tmp_path / "out" / "checkpoint.pt").write_bytes(b"no")
    with pytest.raises(ConfigError, match=r"expected a file that torch.save wrote"):
        Training(SMALL, source, tmp_path / "out")


def test_a_log_cut_short_goes_on_behind_its_last_whole_line(source, tmp_path):
    trained(SMALL, source, tmp_path / "out", log_every=10)
    path = tmp_path / "out" / "log.jsonl"
    path.write_text(path.read_text()[:-30])
    Log(tmp_path / "out", step=40).write(step=50)
    assert [line["step"] for line in read_log(tmp_path / "out")] == [10, 20, 30, 50]
