"""A guessed layout runs only where it computes what transformers computes, or where it is trusted."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys

import pytest
import torch

from mizarr.stages.forward.architectures.composed import ComposedArchitecture
from mizarr.stages.forward.architectures.known import KNOWN
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.stages.forward.models import layout_check
from mizarr.stages.forward.models.autoconfig import report
from mizarr.stages.forward.models.files import BRIDGED, TRUSTED, resolve, resolve_runnable
from mizarr.stages.forward.models.layout_check import FARTHEST, lengths_to_check, turning_points
from mizarr.stages.forward.models.model import Model
from mizarr.stages.forward.models.reference import ModelRef
from mizarr.stages.forward.models.source import ModelSource
from mizarr.stages.forward.networks.weights import read_shapes
from mizarr.store import open_store
from mizarr.store.errors import ConfigError, MissingExtra
from mizarr.workflows import build
from mizarr.workflows.cli import run as mizarr_command
from tests.torch_free import blocking, without_torch

from .. import random_models, shrunk_models

pytest.importorskip("transformers")
AGREES, DIFFERS = "iquestcoder", "ernie4_5"
WINDOWED = "cwm"
"""Families whose rows are taken away for these tests: a Llama by another name, one whose rope turns
neighbours, and one with windows."""


@pytest.fixture(autouse=True)
def without_their_rows(monkeypatch):
    for model_type in (AGREES, DIFFERS, WINDOWED):
        monkeypatch.delitem(KNOWN, model_type)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MIZARR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def saved(tmp_path):
    """Write a small random model of a type that reads text; (its folder, the reference)."""

    def write(model_type, seed=0, **changed):
        folder = tmp_path / model_type
        described = shrunk_models.shrunk(model_type, seed)
        for key, value in changed.items():
            setattr(described, key, value)
        reference = shrunk_models.save(folder, model_type, seed, described)
        random_models.save_tokenizer(folder)
        return folder, reference

    return write


@pytest.fixture
def checks(monkeypatch):
    """How often a check ran."""
    made = []
    check = layout_check.LayoutCase._check
    monkeypatch.setattr(
        layout_check.LayoutCase, "_check", lambda case, witness: made.append(case) or check(case, witness)
    )
    return made


def test_a_family_that_computes_like_its_guess_runs_and_is_right(saved):
    folder, reference = saved(AGREES)
    model = Model.from_pretrained(folder, device="cpu")
    ids = torch.randint(0, 128, (1, 60), generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        torch.testing.assert_close(model.forward(ids).logits, reference(ids).logits, atol=1e-4, rtol=0)
    assert model.require_identity().forward == ComposedArchitecture.version


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("model_type", ["ernie4_5"])
def test_interleaved_rope_is_found_by_its_numbers(model_type, seed, saved):
    folder, _ = saved(model_type, seed)
    raw, shapes = resolve(folder).config, read_shapes([folder / "model.safetensors"])
    assert report(raw, shapes).is_compatible, "no tensor and no key tells it from a Llama"
    with pytest.raises(
        ConfigError, match=r"logits that differ from those of .* by at most 0.0001 .*, found a difference of"
    ):
        resolve(folder).architecture()
    with pytest.warns(UserWarning, match="so transformers runs it"):
        assert Model.from_pretrained(folder, device="cpu").name == f"{folder}{BRIDGED}"


def test_small_weights_hide_no_difference(tmp_path):
    """Attention of a fresh initialisation is nearly uniform, and its logits are small."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    fresh = AutoModelForCausalLM.from_config(shrunk_models.shrunk(DIFFERS, 0))
    fresh.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"found a difference of"):
        resolve(tmp_path).identity()


def test_attention_that_looks_ahead_is_no_causal_language_model(saved, tmp_path):
    """Laid out as a Llama, and of a type that transformers knows as a masked model alone."""
    folder, _ = saved("eurobert")
    shutil.copytree(folder, tmp_path / "other")
    told = json.loads((folder / "config.json").read_text()) | {"model_type": "ultrabert"}
    (tmp_path / "other" / "config.json").write_text(json.dumps(told))
    with pytest.raises(ConfigError, match=r"to compare results with, found none for 'ultrabert'"):
        resolve(tmp_path / "other").architecture()
    with pytest.raises(
        ConfigError, match=r"neither the family 'ultrabert' .* details run: mizarr models inspect"
    ):
        Model.from_pretrained(tmp_path / "other", device="cpu")


def test_a_refusal_names_the_way_out(saved):
    folder, _ = saved(DIFFERS)
    with pytest.raises(ConfigError, match=r"trust_layout=True, or --trust-layout"):
        resolve(folder).identity()


def test_a_known_family_is_never_checked(tmp_path, checks):
    random_models.save_random_model(tmp_path, "llama")
    plain = Model.from_pretrained(tmp_path, device="cpu")
    trusted = Model.from_pretrained(tmp_path, device="cpu", trust_layout=True)
    assert checks == [] and trusted.name == plain.name and trusted.identity == plain.identity


@pytest.mark.parametrize("model_type", [AGREES, DIFFERS])
def test_a_check_runs_once_whatever_it_found(model_type, saved, checks):
    folder, _ = saved(model_type)
    told = [resolve(folder).layout_case(_guess(folder)).verdict() for _ in range(2)]
    assert len(checks) == 1 and told[0] == told[1]


def _guess(folder):
    found = resolve(folder)
    return report(found.config, read_shapes(found.weight_files)).require()


PLAN = """
from mizarr.stages.forward.models.source import ModelSource
from mizarr.store.errors import MizarrError
from mizarr.stages.forward.architectures.known import KNOWN
del KNOWN["iquestcoder"]
try:
    told = ModelSource(sys.argv[1]).identity.request()
except MizarrError as error:
    told = str(error)
print(json.dumps(told))
"""


def test_a_remembered_verdict_plans_without_torch(saved):
    folder, _ = saved(AGREES)
    planned = ModelSource(folder).identity.request()
    assert without_torch(PLAN, folder) == planned


IMPORTED = """
import json, sys
from mizarr.stages.forward.models.source import ModelSource
ModelSource(sys.argv[1]).identity
print(json.dumps(sorted({"torch", "transformers"} & set(sys.modules))))
"""


def test_a_remembered_verdict_imports_neither_torch_nor_transformers(saved):
    folder, _ = saved(AGREES)
    resolve(folder).identity()
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, str(folder)], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == []


def test_without_transformers_the_refusal_says_how_to_get_it(saved):
    folder, _ = saved(AGREES)
    program = blocking("transformers") + PLAN
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True
    )
    said = json.loads(done.stdout)
    assert "which may run it, is not installed: pip install 'mizarr[check]'; for details run" in said


def test_changed_weights_are_checked_again(saved, checks):
    folder, reference = saved(AGREES)
    resolve(folder).identity()
    with torch.no_grad():
        reference.model.norm.weight[0] += 1
    reference.save_pretrained(folder)
    resolve(folder).identity()
    assert len(checks) == 2


def test_a_key_of_the_config_that_nobody_here_reads_is_checked_again(saved, checks):
    folder, _ = saved(AGREES)
    resolve(folder).identity()
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"flux": 3}))
    resolve(folder).identity()
    assert len(checks) == 2


def test_another_transformers_is_asked_again_and_its_absence_believes_the_last(saved, checks, monkeypatch):
    folder, _ = saved(AGREES)
    resolve(folder).identity()
    monkeypatch.setattr(layout_check, "witness", lambda: None)
    resolve(folder).identity()
    assert len(checks) == 1
    monkeypatch.setattr(layout_check, "witness", lambda: "transformers 0.0")
    resolve(folder).identity()
    assert len(checks) == 2


def test_an_older_refusal_is_not_believed_without_transformers(saved, monkeypatch):
    folder, _ = saved(DIFFERS)
    with pytest.raises(ConfigError, match="found a difference of"):
        resolve(folder).identity()
    monkeypatch.setattr(layout_check, "witness", lambda: None)
    with pytest.raises(MissingExtra, match=r"pip install 'mizarr\[check\]'"):
        resolve(folder).identity()


def test_a_damaged_cache_repeats_the_check(saved, checks, own_cache):
    folder, _ = saved(AGREES)
    resolve(folder).identity()
    with sqlite3.connect(own_cache / "layouts.sqlite") as db:
        db.execute("UPDATE verdicts SET verdict = '{'")
    resolve(folder).identity()
    (own_cache / "layouts.sqlite").write_bytes(b"no database" * 100)
    resolve(folder).identity()
    resolve(folder).identity()
    assert len(checks) == 3, "the third repaired what was damaged"


def test_a_cache_that_cannot_be_written_repeats_the_check(saved, checks, tmp_path, monkeypatch):
    folder, _ = saved(AGREES)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MIZARR_CACHE", str(tmp_path / "file" / "folder"))
    for _ in range(2):
        assert resolve(folder).identity().forward == ComposedArchitecture.version
    assert len(checks) == 2


def test_a_failure_of_transformers_is_a_refusal_that_is_not_remembered(saved, monkeypatch):
    folder, _ = saved(AGREES)

    def fails(*_, **__):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as broken:
        broken.setattr(layout_check.LayoutCase, "_transformers_outputs", fails)
        with pytest.raises(ConfigError, match=r"found that it cannot \(RuntimeError: out of memory\)"):
            resolve(folder).identity()
    assert resolve(folder).identity().forward == ComposedArchitecture.version


def test_a_check_leaves_the_random_state_alone(saved):
    folder, _ = saved(AGREES)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    resolve(folder).identity()
    assert torch.equal(torch.get_rng_state(), before)


# -- lengths -----------------------------------------------------------------------------------------------


@pytest.fixture
def config(saved):
    folder, _ = saved(AGREES)
    return _guess(folder)


def test_a_short_context_is_checked_to_its_end(config):
    assert config.context_length == 256
    assert lengths_to_check(config, {}) == [1, 2, 37, 70, 256]


def _with(config, **changed):
    from dataclasses import replace

    return replace(config, **changed)


def test_windows_are_passed_by(config):
    (attention,) = config.blocks[0].mixers
    windowed = _with(config.blocks[0], mixers=(_with(attention, window=1024),))
    wide = _with(config, max_position_embeddings=8192, blocks=(config.blocks[0], windowed, windowed))
    assert turning_points(wide, {}) == {"window 1024": 1024}
    assert max(lengths_to_check(wide, turning_points(wide, {}))) == 1024 + 64


def test_a_number_nobody_reads_may_be_a_length(config):
    long = _with(config, max_position_embeddings=131072)
    found = turning_points(
        long,
        {
            "hidden_size": 4096,
            "attention_chunk_size": 512,
            "deep": {"floor_scale": [8192.0, 4, 200_000], "beta": 0.1},
        },
    )
    assert found == {"attention_chunk_size": 512, "deep.floor_scale": 8192}
    with pytest.raises(
        layout_check.CannotCheck, match=rf"up to {FARTHEST} tokens only.* found deep.floor_scale=8192 in"
    ):
        lengths_to_check(long, found)
    assert turning_points(_with(config, max_position_embeddings=512), {"floor_scale": 8192}) == {}


def test_a_window_beyond_the_check_is_refused_and_runs_when_trusted(saved):
    folder, _ = saved(WINDOWED, sliding_window=4096, max_position_embeddings=32768)
    with pytest.raises(ConfigError, match="found sliding_window=4096, window 4096=4096 in a model"):
        resolve(folder).identity()
    assert resolve(folder, trust_layout=True).identity().forward.endswith("layout trusted")


# -- trust -------------------------------------------------------------------------------------------------


def test_trust_moves_the_key_and_the_name(saved, checks):
    folder, _ = saved(AGREES)
    checked, trusted = ModelSource(folder), ModelSource(ModelRef(folder, trust_layout=True))
    assert trusted.identity.forward == f"{ComposedArchitecture.version}, layout trusted"
    assert trusted.identity.digest != checked.identity.digest
    assert trusted.name == f"{folder}{TRUSTED}" and trusted.load().name == trusted.name
    assert len(checks) == 1


def test_a_trusted_name_is_trust_wherever_it_travels(saved):
    """To a worker, a setting, a note of a run: all hold the name."""
    import pickle

    folder, _ = saved(DIFFERS)
    source = ModelSource(ModelRef(folder, trust_layout=True))
    sent = pickle.loads(pickle.dumps(source))
    assert sent.load().require_identity() == source.identity
    assert ModelSource(source.name).identity == source.identity


def test_what_a_trusted_model_computed_says_so(saved, tmp_path):
    from mizarr import capture

    folder, _ = saved(DIFFERS)
    store = open_store(tmp_path / "store")
    capture(
        str(folder),
        [[1, 2, 3]],
        "blocks.0.hook_resid_post",
        store=store,
        device="cpu",
        progress=False,
        trust_layout=True,
    )
    node = CaptureNode(str(folder), [[1, 2, 3]], "blocks.0.hook_resid_post", trust_layout=True)
    assert node.status(store).is_cached
    (record,) = store.records()
    notes = store.provenance(record.key)
    assert {note["model"] for note in notes if "model" in note} == {f"{folder}{TRUSTED}"}
    forwards = {note["identity"]["forward"] for note in notes if "identity" in note}
    assert forwards == {f"{ComposedArchitecture.version}, layout trusted"}


def test_answers_about_a_trusted_model_say_so(saved, tmp_path):
    folder, _ = saved(DIFFERS, vocab_size=random_models.VOCAB)
    done = build("logit_lens", model=str(folder), trust_layout=True, prompts=("The capital",))
    done.run(open_store(tmp_path / "store"), quiet=True)
    caution = f"{folder}{TRUSTED}: not checked against transformers"
    assert done.caution == caution and done.footer.endswith(f" · {caution}")
    assert done.header()["caution"] == caution
    page = done.report(tmp_path / "page.html").read_text()
    assert page.count("not checked against transformers") >= 2


def test_answers_about_other_models_carry_no_caution(saved):
    folder, _ = saved(AGREES, vocab_size=random_models.VOCAB)
    for model in (str(folder), "specimen"):
        planned = build("logit_lens", model=model)
        assert planned.caution == "" and "caution" not in planned.header()
        assert "trusted" not in planned.footer


def test_the_command_line_trusts_too(saved, tmp_path, capsys):
    folder, _ = saved(DIFFERS, vocab_size=random_models.VOCAB)
    wanted = ["logit_lens", "--model", str(folder), "--set", 'prompts=["The capital"]']
    placed = ["--store", str(tmp_path / "store")]
    with pytest.warns(UserWarning, match="so transformers runs it"):
        assert resolve_runnable(folder).is_bridged
    assert not resolve_runnable(folder, trust_layout=True).is_bridged
    assert mizarr_command(["compute", *wanted, *placed, "--quiet", "--trust-layout"]) == 0
    assert "not checked against transformers" in " ".join(capsys.readouterr().out.split())
    assert mizarr_command(["explain", *wanted, *placed, "--trust-layout"]) == 0
    said = capsys.readouterr()
    assert "not checked against transformers" in said.err and "will run" not in said.out


def test_inspect_tells_the_verdict(saved, capsys):
    folder, _ = saved(DIFFERS)
    inspected = ["models", "inspect", str(folder), "--json", "--quiet"]
    assert mizarr_command([*inspected, "--shapes-only"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"] == "not checked against transformers yet"
    assert mizarr_command(inspected) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["backend"]["name"] == "transformers" and "found a difference of" in found["issues"][0]
    assert mizarr_command([*inspected, "--shapes-only"]) == 0
    assert "found a difference of" in json.loads(capsys.readouterr().out)["issues"][0], "it is remembered"
