"""Multimodal models, of which only the text model runs: its section of config.json, and its tensors.

Prompts without images only need the text model; a test compares each of these families with transformers.
M-RoPE (Qwen2-VL, 2024, section 2.1) rotates by three positions of an image, which are equal for text tokens,
so that plain rope is exact.

Border: a config and names of tensors; the families of text models are looked up by the caller (known.py).
Never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .....store.errors import ConfigError
from ..architecture import Architecture
from ..transformer import ConfigReader

__all__ = ["TOWERS", "Tower", "read_tower", "text_section"]

TensorShapes = Mapping[str, tuple[int, ...]]
EMBED, HEADS = "embed_tokens.weight", ("lm_head", "language_model.lm_head")
"""Name of the embedding, after its prefix; possible names of the language head."""
_MROPE_KEYS = ("mrope_section", "mrope_interleaved")


@dataclass(frozen=True)
class Tower:
    """A family of multimodal models, of which mizarr runs the text model only."""

    examples: str
    """Well-known models of the family."""
    text: str
    """model_type of the text model, if text_config does not name one."""
    unread: tuple[str, ...] = ()
    """Keys of text_config that transformers reads in the text model, but not in the multimodal model; they
    must be absent or null."""


TOWERS: dict[str, Tower] = {
    "gemma3": Tower("Gemma 3, 4B to 27B", "gemma3_text", ("final_logit_softcapping",)),
    "gemma3n": Tower("Gemma 3n E2B and E4B", "gemma3n_text"),
    "gemma4": Tower("Gemma 4", "gemma4_text"),
    "got_ocr2": Tower("GOT-OCR 2", "qwen2"),
    "idefics2": Tower("Idefics 2", "mistral"),
    "idefics3": Tower("Idefics 3", "llama"),
    "internvl": Tower("InternVL 3", "qwen2"),
    "lfm2_vl": Tower("LFM2-VL", "lfm2"),
    "lighton_ocr": Tower("LightOnOCR", "qwen3"),
    "llama4": Tower("Llama 4 Scout and Maverick", "llama4_text"),
    "llava": Tower("LLaVA 1.5", "llama"),
    "llava_next": Tower("LLaVA-NeXT", "llama"),
    "llava_onevision": Tower("LLaVA-OneVision", "qwen2"),
    "mistral3": Tower("Mistral Small 3.1", "mistral"),
    "qwen2_vl": Tower("Qwen2-VL", "qwen2_vl_text"),
    "qwen2_5_vl": Tower("Qwen2.5-VL", "qwen2_5_vl_text"),
    "qwen3_vl": Tower("Qwen3-VL", "qwen3_vl_text"),
    "smolvlm": Tower("SmolVLM", "llama"),
    "vipllava": Tower("ViP-LLaVA", "llama"),
}
"""model_type of the multimodal model -> family."""


def text_section(reader: ConfigReader, shapes: TensorShapes) -> ConfigReader:
    """The config of a multimodal model's text model: the section text_config of config.json, or the whole
    file of older releases without it.

    tie_word_embeddings may stand in the section, outside of it, or in both. If both values differ, the head
    is tied unless the checkpoint has a tensor for it: transformers reads one or the other, by model.

    Arguments:
        reader: The config.json of the multimodal model.
        shapes: Shapes of the checkpoint's tensors by name; empty if they are not known.

    Raises:
        ConfigError: A key of `Tower.unread` is not null.
    """
    raw, tower = reader.raw, TOWERS[reader.raw["model_type"]]
    section = reader.mapping("text_config")
    text = section or {key: value for key, value in raw.items() if key != "vision_config"}
    values: dict[str, Any] = {**text, "model_type": section.get("model_type", tower.text)}
    # The head is that of the whole model, whatever class the section names.
    values.pop("architectures", None)
    for key in tower.unread:
        if values.get(key) is not None:
            raise ConfigError(
                f"{reader.source}: expected no {key} in text_config, because transformers ignores it in a "
                f"{raw['model_type']} model, found {values[key]!r}; remove the key"
            )
    flags = {config["tie_word_embeddings"] for config in (raw, section) if "tie_word_embeddings" in config}
    flags.discard(None)
    if len(flags) > 1:
        values["tie_word_embeddings"] = not any(f"{head}.weight" in shapes for head in HEADS)
    elif flags:
        values["tie_word_embeddings"] = flags.pop()
    # In a text all three M-RoPE positions are equal, so plain rope gives the same rotation.
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(values.get(key), dict):
            values[key] = _without_mrope(values[key])
    return ConfigReader(values, f"{reader.source}: text_config" if section else reader.source)


def _without_mrope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """rope_parameters without the keys of M-RoPE, and with the type "default" instead of "mrope"."""
    values = {key: value for key, value in rope.items() if key not in _MROPE_KEYS}
    return {key: "default" if value == "mrope" else value for key, value in values.items()}


def read_tower(text: Architecture, shapes: TensorShapes) -> Architecture:
    """Architecture of a text model, with the tensor names that a multimodal checkpoint has.

    Arguments:
        text: The text model, with the tensor names of a checkpoint of its own.
        shapes: Shapes of the multimodal checkpoint's tensors by name; if empty, `text` is returned unchanged.

    Raises:
        ConfigError: No tensor, or more than one, has the name and shape of the text model's embedding.
    """
    if not shapes:
        return text
    candidates = [name for name in shapes if name.endswith(EMBED)]
    embeddings = [name for name in candidates if shapes[name] == (text.vocab_size, text.hidden_size)]
    if len(embeddings) != 1:
        raise ConfigError(
            f"expected one tensor whose name ends with {EMBED}, of the shape "
            f"{[text.vocab_size, text.hidden_size]} of the text model's embedding, found {len(embeddings)} "
            f"among {', '.join(candidates) or 'no candidates'}; check that config.json and weights are of "
            "the same model"
        )
    # Checkpoints name the head with or without the prefix of the language model.
    head = next((name for name in HEADS if f"{name}.weight" in shapes), HEADS[0])
    return text.under(embeddings[0].removesuffix(EMBED), head)
