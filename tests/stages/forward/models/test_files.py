"""Model files: found by directory, by hub id in the local cache, or not; and an identity that is their
content.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mizarr.stages.forward.models import files
from mizarr.stages.forward.models.files import ModelFiles, resolve
from mizarr.store.errors import ConfigError, ModelNotFound, TokenizerError, WeightsError

from .. import random_models


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("MIZARR_CACHE", str(tmp_path / "memo"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("made")
    random_models.save_random_model(directory, "llama", 1)
    return directory


@pytest.fixture
def model(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "model"))


def cache_snapshot(hub, source, name="org/name", commit="a" * 40, ref="main", lfs=True):
    """A model as the hub's client lays it out: snapshots of links into blobs, named by sha256 for large
    files.
    """
    repository = hub / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        content = file.read_bytes()
        large = lfs and file.suffix == ".safetensors"
        blob = repository / "blobs" / (hashlib.sha256 if large else hashlib.sha1)(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / file.name).symlink_to(blob)
    if ref:
        (repository / "refs" / ref).write_text(commit)
    return snapshot


def edit_config(model, **keys):
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_a_directory_is_its_files(model):
    found = resolve(model)
    assert found.directory == model and found.revision is None
    assert [path.name for path in found.weight_files] == ["model.safetensors"]
    assert found.config["model_type"] == "llama"
    assert found.tokenizer_file == model / "tokenizer.json" and found.tokenizer().encode("Paris").ids[0] == 0


def test_a_model_without_a_tokenizer_has_none(model):
    (model / "tokenizer.json").unlink()
    assert resolve(model).tokenizer() is None and resolve(model).tokenizer_file is None


def test_a_world_vocabulary_is_read_where_there_is_no_tokenizer_json(model):
    vocabulary = random_models.save_world_vocabulary(model, "Paris")
    assert resolve(model).tokenizer_file == model / "tokenizer.json"
    (model / "tokenizer.json").unlink()
    found = resolve(model)
    assert found.tokenizer_file == vocabulary and found.tokenizer().encode("Paris!").ids == [300, 34]
    assert found.tokenizer().name == str(model)
    vocabulary.with_name("rwkv_vocab_v2.txt").write_text("1 'a' 1\n")
    with pytest.raises(
        TokenizerError,
        match=r"expected one vocabulary file rwkv_vocab\*.txt .*found rwkv_vocab_v2.txt, rwkv_vocab_v",
    ):
        resolve(model).tokenizer()


def test_the_identity_is_the_content_and_not_the_name(model, tmp_path):
    elsewhere = shutil.copytree(model, tmp_path / "another name")
    assert resolve(model).identity() == resolve(elsewhere).identity()


def test_every_byte_of_the_weights_is_in_the_identity(model):
    """Two models under one name: the second is not the first."""
    before = resolve(model).identity()
    path = model / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    after = resolve(model).identity()
    assert after.digest != before.digest and after.config == before.config


@pytest.mark.parametrize(
    "keys", [{"rms_norm_eps": 1e-3}, {"hidden_act": "gelu"}, {"rope_parameters": {"rope_theta": 7.0}}]
)
def test_config_fields_that_alter_numbers_are_in_the_identity(model, keys):
    before = resolve(model).identity()
    edit_config(model, **keys)
    assert resolve(model).identity().digest != before.digest


def test_config_fields_that_alter_nothing_are_not(model):
    before = resolve(model).identity()
    edit_config(model, use_cache=False, transformers_version="9", eos_token_id=5)
    assert resolve(model).identity() == before


def test_dtype_attention_and_the_declared_forward_version_are_in_the_identity(model):
    found = resolve(model)
    assert len({found.identity(d, a).digest for d in ("float32", "bfloat16") for a in ("sdpa", "eager")}) == 4
    assert found.identity().forward == found.architecture().version == "transformer/1"


def test_shards_under_other_names_are_the_same_weights(model, tmp_path):
    from safetensors.torch import load_file, save_file

    held = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(held)

    def write(first, second):
        for shard, chosen in ((first, names[::2]), (second, names[1::2])):
            save_file({name: held[name] for name in chosen}, model / shard)
        index = {name: (first, second)[i % 2] for i, name in enumerate(names)}
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        return resolve(model).identity()

    assert write("a.safetensors", "b.safetensors") == write("d.safetensors", "c.safetensors")


def test_a_cached_hub_model_is_found_offline_by_the_revision_asked_for(model, own_caches):
    old = cache_snapshot(own_caches, model, commit="a" * 40, ref="old")
    edit_config(model, rms_norm_eps=0.5)
    new = cache_snapshot(own_caches, model, commit="b" * 40, ref="main")
    assert resolve("org/name").directory == new and resolve("org/name").revision == "b" * 40
    assert resolve("org/name", "old").directory == old
    assert resolve("org/name", "a" * 40).directory == old


@pytest.mark.parametrize("prefix", ["", "sha256-"])
def test_a_blob_whose_bytes_are_not_those_its_name_says_is_refused(model, own_caches, prefix):
    """…and one that is whole is the same model as a copy out of the cache."""
    snapshot = cache_snapshot(own_caches, model)
    assert resolve("org/name").identity() == resolve(model).identity()
    blob = (snapshot / "model.safetensors").resolve()
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.write_bytes(content)
    named = blob.rename(blob.with_name(prefix + blob.name))
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(named)
    with pytest.raises(
        WeightsError, match=r"expected the contents of .* to have the sha256 in its file name"
    ):
        resolve("org/name").identity()


def test_a_blob_not_named_by_sha256_is_hashed(model, own_caches):
    cache_snapshot(own_caches, model, lfs=False)
    assert resolve("org/name").identity() == resolve(model).identity()


def test_a_model_that_is_nowhere_says_how_to_fetch_it(model, own_caches):
    with pytest.raises(
        ModelNotFound, match=r"found no org/name; download it with: mizarr models fetch org/name$"
    ):
        resolve("org/name")
    cache_snapshot(own_caches, model)
    with pytest.raises(
        ModelNotFound, match=r"did you mean 'org/name'\?; download it with: mizarr models fetch org/nam$"
    ):
        resolve("org/nam")
    with pytest.raises(
        ModelNotFound,
        match=r"at revision 'v2' .*commits aaaaaaaaaaaa; download it with: .* org/name --revision v2$",
    ):
        resolve("org/name", "v2")


def test_a_branch_that_is_not_cached_is_not_replaced_by_another_snapshot(model, own_caches):
    cache_snapshot(own_caches, model, ref=None)
    with pytest.raises(ModelNotFound, match=r"at revision 'main'"):
        resolve("org/name")


def test_what_is_no_model_directory_is_told_apart(model, tmp_path):
    with pytest.raises(ModelNotFound, match=r"found no directory ./nowhere"):
        resolve("./nowhere")
    with pytest.raises(ModelNotFound, match=r"found the file"):
        resolve(model / "config.json")
    with pytest.raises(
        ModelNotFound, match=r"found no config.json; name the folder that contains config.json"
    ):
        resolve(tmp_path)
    with pytest.raises(ModelNotFound, match=r"only hub ids have revisions"):
        resolve(model, "main")


def test_broken_files_are_named(model):
    (model / "model.safetensors").rename(model / "consolidated.pth")
    with pytest.raises(WeightsError, match=r"found consolidated.pth; convert or copy them there"):
        _ = resolve(model).weight_files
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b.safetensors"}}')
    with pytest.raises(
        WeightsError, match=r"to map each tensor to a file in the same folder, found '../b.safetensors'"
    ):
        _ = resolve(model).weight_files
    for content, found in (("{", "expected JSON"), ("[]", "found a list")):
        (model / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=found):
            _ = resolve(model).config


def test_finding_and_identifying_a_model_does_not_import_torch(model):
    code = (
        "import sys; from mizarr.stages.forward.models.files import resolve; m = resolve(sys.argv[1]); "
        "m.identity().digest; "
        "m.tokenizer().encode('a'); print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(model)], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_specimen_is_a_name_of_its_own():
    found = ModelFiles("specimen", Path(files.__file__).parents[1] / "specimen")
    if (found.directory / "config.json").is_file():
        assert resolve("specimen").directory == found.directory
    else:
        with pytest.raises(ModelNotFound, match=r"specimen"):
            resolve("specimen")
