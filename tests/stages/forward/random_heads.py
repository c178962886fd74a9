"""Small random models with other heads than a language head, of every family that has such classes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from mizarr.stages.forward.architectures.attending.towers import TOWERS
from mizarr.stages.forward.architectures.known import KNOWN

from . import random_encoders, random_hybrids, random_models, random_pairs, random_rwkv, test_towers

KINDS = ("base", "sequence", "token", "regression")
LABELS = {0: "one star", 1: "three stars", 2: "five stars"}
PAD = 1


def classes() -> list[tuple[str, str, str]]:
    """(family, kind, class) that transformers registers for the families that are read here."""
    from transformers.models.auto import modeling_auto as auto

    sequence = auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    listed = {
        "base": auto.MODEL_MAPPING_NAMES,
        "sequence": sequence,
        "token": auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        "regression": sequence,
    }
    found = []
    for family in KNOWN:
        for kind in KINDS:
            name = listed[kind].get(family)
            # Some families are listed under the class of another one, which then writes its own model_type.
            found += [(family, kind, name)] if name is not None and _config_of(name) == family else []
    return [*found, *((name.lower(), "base", f"{name}EncoderModel") for name in ("T5", "MT5", "UMT5"))]


def _config_of(name: str) -> str:
    import transformers

    made = getattr(transformers, name, None)
    return str(getattr(getattr(made, "config_class", None), "model_type", ""))


def config(family: str, seed: int, **overrides: Any) -> Any:
    """A random configuration of a family, as the tests of its language models draw it."""
    import transformers

    if family in TOWERS:
        return test_towers.described(family, seed)
    if family in ("t5", "mt5", "umt5", *random_pairs.BARTS):
        name, settings = random_pairs.settings_of(family, random.Random(seed))
        return getattr(transformers, f"{name}Config")(**(settings | overrides))
    if family in ("qwen3_5", "qwen3_5_moe"):
        text = random_hybrids.draw(f"{family}_text", seed) | {"model_type": f"{family}_text"}
        eyes = test_towers.EYES | {"out_hidden_size": text["hidden_size"]}
        return transformers.AutoConfig.for_model(family, text_config=text, vision_config=eyes)
    if family.endswith("vl_text"):
        drawn = test_towers.text_of(family.removesuffix("_text"), seed)
    elif family in random_encoders.ENCODERS:
        drawn = random_encoders.draw(family, seed)
    elif family in random_hybrids.DRAWS:
        drawn = random_hybrids.draw(family, seed)
    elif family in random_rwkv.GENERATIONS:
        drawn = random_rwkv.draw_config(family, seed)
        # The reference computes no other width.
        drawn["attention_hidden_size"] = drawn["hidden_size"]
    else:
        return random_models.config(family, seed, **overrides)
    drawn.pop("model_type", None)
    return transformers.AutoConfig.for_model(family, **(drawn | overrides))


def save(directory: Path, family: str, kind: str, name: str, seed: int = 0, **overrides: Any) -> Any:
    """Write a random model of a class into `directory`; returns the reference, eager, float32."""
    import torch
    import transformers

    described = config(family, seed)
    described._attn_implementation = described._experts_implementation = "eager"
    if kind != "base":
        described.id2label = {0: "reward"} if kind == "regression" else LABELS
        described.label2id = {label: number for number, label in described.id2label.items()}
    text = described.get_text_config()
    # Prompts hold no padding: without this id some classes take batches of one prompt only.
    text.pad_token_id = PAD if getattr(text, "pad_token_id", None) is None else text.pad_token_id
    if family in ("modernbert", "eurobert"):
        described.classifier_pooling = ("mean", "cls" if family == "modernbert" else "bos")[seed % 2]
    for key, value in overrides.items():
        setattr(described, key, value)
    torch.manual_seed(seed)
    with test_towers.blind(family):
        model = getattr(transformers, name)(described).float().eval()
    _draw(model, family)
    model.save_pretrained(directory)
    return model


def _draw(model: Any, family: str) -> None:
    """Weights as the tests of language models draw them, so that a wrong mask or decay shows."""
    import torch

    random_models.draw_weights(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.uniform_(-2.5, 0.5)
            elif name.endswith("recurrent_param"):
                weight.uniform_(-4.0, -1.0)
            elif name.endswith(("dt_bias", "dt_proj.bias")):
                weight.uniform_(-2.0, 0.5)
    if family == "roformer":  # a table of sines that is a weight by its kind alone
        (table,) = (module for name, module in model.named_modules() if name.endswith("embed_positions"))
        table.weight.data = table.create_weight()
