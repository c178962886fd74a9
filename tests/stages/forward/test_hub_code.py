"""Families whose code came with their checkpoints compute what transformers' kin of them does."""

from __future__ import annotations

import json

import pytest

from mizarr import Model, generate
from mizarr.stages.forward.architectures.known import KNOWN
from mizarr.stages.forward.models.autoconfig import report
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.forward.networks.weights import read_shapes
from mizarr.store.errors import ConfigError, PromptError

from .compared import RAGGED, assert_alike_together, assert_parity, draw_ids
from .random_hub_code import MADE, save_random_hub_code

pytest.importorskip("transformers")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", MADE)
def test_logits_and_streams_agree_with_the_same_weights_in_their_kin(family, seed, tmp_path):
    reference = save_random_hub_code(tmp_path, family, seed)
    model = Model.from_pretrained(tmp_path)
    assert_parity(model, reference)
    assert_alike_together(model, RAGGED)


@pytest.mark.parametrize("family", MADE)
def test_a_checkpoint_is_known_and_complete(family, tmp_path):
    save_random_hub_code(tmp_path, family, 0)
    files = resolve(tmp_path)
    found = report(files.config, read_shapes(files.weight_files))
    assert files.has_known_family and found.is_compatible and not found.warnings
    assert KNOWN[family].described["model_type"] == family


@pytest.mark.parametrize("family", MADE)
def test_a_prompt_goes_on_as_in_their_kin(family, tmp_path):
    reference = save_random_hub_code(tmp_path, family, 2)
    (found,) = generate(Model.from_pretrained(tmp_path), draw_ids(1, 7).tolist(), max_tokens=8, eos=())
    ids = draw_ids(1, 7).new_tensor([list(found.token_ids)])
    assert list(found.generated_ids) == reference(ids).logits[0, 6:-1].argmax(-1).tolist()


def test_qwen_is_refused_beyond_what_its_queries_do_not_grow_in(tmp_path):
    save_random_hub_code(tmp_path, "qwen", 0)
    model = Model.from_pretrained(tmp_path)
    assert model.config.max_position_embeddings == 200
    model.forward([3] * 200)
    with pytest.raises(PromptError, match="200"):
        model.forward([3] * 201)


@pytest.mark.parametrize(
    ("family", "told", "said"),
    [
        ("qwen", {"no_bias": False}, "no_bias to be True"),
        ("qwen", {"rotary_pct": 0.5}, "rotary_pct to be 1.0"),
        ("qwen", {"intermediate_size": 49}, "2 projections together, found 49"),
        ("baichuan", {"z_loss_weight": 0}, "Baichuan 7B"),
    ],
)
def test_what_is_not_followed_is_refused_in_a_line(family, told, said, tmp_path):
    save_random_hub_code(tmp_path, family, 0, **told)
    with pytest.raises(ConfigError, match=said) as error:
        Model.from_pretrained(tmp_path)
    assert "\n" not in str(error.value)


def test_the_larger_baichuan_without_a_rope_is_refused(tmp_path):
    save_random_hub_code(tmp_path, "baichuan", 0)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="13B"):
        Model.from_pretrained(tmp_path)
