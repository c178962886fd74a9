"""Of models that read images, too, the text model computes what the reference computes of a text."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mizarr import Model
from mizarr.stages.forward.architectures.attending.towers import TOWERS
from mizarr.stages.forward.architectures.known import KNOWN
from mizarr.stages.forward.architectures.transformer import ConfigReader
from mizarr.stages.forward.generation.generate import generate
from mizarr.stages.forward.models.autoconfig import report
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.forward.networks.weights import read_shapes
from mizarr.store.errors import ConfigError

from . import random_hybrids, random_models
from .compared import BOUND, LENGTHS, assert_near

pytest.importorskip("transformers")
IMAGE = 300
"""Token that stands for an image, and is in no prompt here."""
EYES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "depth": 1,
    "embed_dim": 16,
    "hidden_act": "gelu",
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
}
"""What sees, as small as it can be; each model reads what it knows of this."""


def text_of(family: str, seed: int) -> dict[str, Any]:
    """A random configuration of the text model of a family."""
    name = TOWERS[family].text
    if name.endswith("vl_text"):
        return _qwen_of_images(name, random.Random(f"{family} {seed}"))
    known = random_hybrids.draw if name in random_hybrids.DRAWS else random_models.draw
    drawn = {"vocab_size": random_models.VOCAB, **known(name, seed), "model_type": name}
    if family == "gemma4":
        drawn["pad_token_id"] = 0  # the reference embeds images as padding first
    return drawn | dict.fromkeys(TOWERS[family].unread)


def _qwen_of_images(name: str, rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([2, 4])
    rope = {"rope_type": "default", "rope_theta": rng.choice([1e4, 300.0]), "mrope_section": [2, 1, 1]}
    drawn = {
        "model_type": name,
        "vocab_size": random_models.VOCAB,
        "hidden_size": heads * 8,
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([1, 2]),
        "num_hidden_layers": 3,
        "intermediate_size": 20,
        "max_position_embeddings": random_models.CONTEXT,
        "rope_parameters": rope,
    }
    windows = {"use_sliding_window": rng.random() < 0.5, "sliding_window": 7, "max_window_layers": 1}
    return drawn | ({"head_dim": 8} if name.startswith("qwen3") else windows)


@contextlib.contextmanager
def blind(family: str) -> Iterator[None]:
    """Models whose eyes another library makes are made without."""
    from transformers import AutoModel

    if family != "gemma3n":
        yield
        return
    with pytest.MonkeyPatch.context() as patched:
        made = AutoModel.from_config
        own = ("Gemma3nTextConfig",)
        patched.setattr(
            AutoModel,
            "from_config",
            lambda config: made(config) if type(config).__name__ in own else torch.nn.Identity(),
        )
        yield


def described(family: str, seed: int) -> Any:
    """A random configuration of a model that also reads images."""
    from transformers import AutoConfig

    text = text_of(family, seed)
    eyes = EYES | {"out_hidden_size": text["hidden_size"]}
    eyes |= {"hidden_size": text["hidden_size"]} if family == "qwen2_vl" else {}
    if family == "gemma4":  # which knows most of these, and takes none else
        kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size")
        eyes = {key: EYES[key] for key in kept} | {"num_key_value_heads": 2, "head_dim": 8}
    tokens = {"image_token_id": IMAGE, "image_token_index": IMAGE, "video_token_id": IMAGE + 1}
    made = AutoConfig.for_model(family, text_config=text, vision_config=eyes, pad_token_id=None, **tokens)
    made._attn_implementation = "eager"
    return made


def save(directory: Any, family: str, seed: int) -> Any:
    """Write a random model; returns the reference, eager, float32."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(seed)
    with blind(family):
        model = AutoModelForImageTextToText.from_config(described(family, seed)).float().eval()
    random_models.draw_weights(model)
    model.save_pretrained(directory)
    return model


LOOSE = dict.fromkeys(("gemma3n", "gemma4"), 5e-5)
"""As of their text models (test_gemma3n_gemma4.py)."""


def draw_ids(length: int) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(length)
    return torch.randint(2, IMAGE, (2, length), generator=seeded)


def logits_of(reference: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = reference(input_ids=ids, use_cache=False).logits
    return found


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", TOWERS)
def test_logits_of_a_text_agree_with_transformers(family, seed, tmp_path):
    reference = save(tmp_path, family, seed)
    model = Model.from_pretrained(tmp_path)
    for length in LENGTHS:
        ids = draw_ids(length)
        assert_near(model.forward(ids).logits, logits_of(reference, ids), LOOSE.get(family, BOUND))


@pytest.mark.parametrize("family", ["gemma3", "llava", "qwen2_vl"])
def test_a_text_goes_on_as_the_reference_has_it(family, tmp_path):
    reference = save(tmp_path, family, 3)
    model = Model.from_pretrained(tmp_path)
    found = generate(model, draw_ids(7).tolist(), max_tokens=12, eos=())
    logits = logits_of(reference, torch.tensor([list(each.token_ids) for each in found]))
    for row, each in enumerate(found):
        assert list(each.generated_ids) == logits[row, 6:-1].argmax(-1).tolist()


@pytest.mark.parametrize(
    ("before", "head"),
    [("model.language_model.", "lm_head"), ("language_model.model.", "language_model.lm_head")],
)
def test_tensors_have_names_of_either_release(before, head, tmp_path):
    reference = save(tmp_path, "llava", 1)
    file = tmp_path / "model.safetensors"
    moved = {
        name.replace("language_model.model.", before).replace("language_model.lm_head", head): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(moved, file, {"format": "pt"})
    ids = draw_ids(20)
    assert_near(Model.from_pretrained(tmp_path).forward(ids).logits, logits_of(reference, ids))


def test_the_text_model_alone_has_the_same_digest(tmp_path):
    """Names of tensors are in none."""
    save(tmp_path, "mistral3", 0)
    whole = resolve(tmp_path).architecture()
    # The reference asks the larger model's config whether the head is the embedding.
    alone = text_of("mistral3", 0) | {"tie_word_embeddings": whole.tie_word_embeddings}
    assert whole.digest == KNOWN["mistral"].read(ConfigReader(json.loads(json.dumps(alone))), {}).digest
    assert whole.model_type == "mistral"


def test_a_report_says_what_no_text_needs(tmp_path):
    save(tmp_path, "internvl", 0)
    files = resolve(tmp_path)
    found = report(files.config, read_shapes(files.weight_files))
    assert files.has_known_family and found.is_compatible
    assert found.warnings and all("language_model" not in told for told in found.warnings)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (
            {"model_type": "gemma3", "text_config": {"final_logit_softcapping": 30.0}},
            "expected no final_logit_soft",
        ),
        (
            {"model_type": "llava", "text_config": {"model_type": "lama"}},
            "lists, found 'lama'; nearest is 'llama'",
        ),
        ({"model_type": "llava", "text_config": {"model_type": "llava"}}, "lists, found 'llava'"),
        ({"model_type": "mistral3", "text_config": 3}, "expected text_config to be a JSON object, found 3"),
    ],
)
def test_what_no_text_model_is_told_as_is_refused(told, message):
    with pytest.raises(ConfigError, match=message):
        KNOWN[told["model_type"]].read(ConfigReader(told), {})


def test_a_checkpoint_without_an_embedding_is_refused(tmp_path):
    save(tmp_path, "llava", 0)
    file = tmp_path / "model.safetensors"
    held = load_file(file)
    save_file({name: x for name, x in held.items() if "embed_tokens" not in name}, file, {"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"expected one tensor whose name ends with embed_tokens\.weight, of the shape"
    ):
        Model.from_pretrained(tmp_path)
