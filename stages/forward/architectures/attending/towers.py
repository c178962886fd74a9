"""Models that read images or sounds, of which the text model runs: a section of their config.json, and
tensors behind a prefix.

A text without images is read by the text model alone; each of these is held to the reference in that (a
test). Where a model turns queries and keys by three positions of an image (M-RoPE; Qwen2-VL, 2024, section
2.1), they are one and the same in a text, and the rope is a plain one.

Border: a config and names of tensors; which families there are is told by who asks. Never imports torch.
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
_OF_IMAGES = ("mrope_section", "mrope_interleaved")


@dataclass(frozen=True)
class Tower:
    """examples: what people know it by. text: model_type of its text model where the section does not say.
    unread: keys of the section that the larger model does not follow, where the text model by itself does.
    """

    examples: str
    text: str
    unread: tuple[str, ...] = ()


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
"""model_type -> row."""


def text_section(reader: ConfigReader, shapes: TensorShapes) -> ConfigReader:
    """The config of the text model; of older releases that have no section for it, the whole.

    Whether the head is the embedding is told in either of two places, of which the reference asks the one or
    the other; where they differ, by whether there is a head. Raises ConfigError for a section that names no
    family.
    """
    raw, tower = reader.raw, TOWERS[reader.raw["model_type"]]
    section = reader.mapping("text_config")
    text = section or {key: value for key, value in raw.items() if key != "vision_config"}
    told: dict[str, Any] = {**text, "model_type": section.get("model_type", tower.text)}
    for key in tower.unread:
        if told.get(key) is not None:
            raise ConfigError(
                f"{reader.source}: expected no {key} in text_config, found {told[key]!r}, which the "
                f"reference follows in {tower.text} alone; this model cannot run here"
            )
    both = [each.get("tie_word_embeddings") for each in (raw, section)]
    flags = {flag for flag in both if flag is not None}
    if len(flags) > 1:
        told["tie_word_embeddings"] = not any(f"{head}.weight" in shapes for head in HEADS)
    elif flags:
        told["tie_word_embeddings"] = flags.pop()
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(told.get(key), dict):
            told[key] = _of_text(told[key])
    return ConfigReader(told, f"{reader.source}: text_config" if section else reader.source)


def _of_text(rope: Mapping[str, Any]) -> dict[str, Any]:
    """A rope without what it says of images."""
    told = {key: value for key, value in rope.items() if key not in _OF_IMAGES}
    return {key: "default" if value == "mrope" else value for key, value in told.items()}


def read_tower(text: Architecture, shapes: TensorShapes) -> Architecture:
    """The text model, its tensors under the names they have in a larger model's checkpoint; as it is where no
    names are given.

    Raises ConfigError where no tensor, or more than one, could be its embedding.
    """
    if not shapes:
        return text
    held = [name for name, shape in shapes.items() if name.endswith(EMBED)]
    table = [name for name in held if shapes[name] == (text.vocab_size, text.hidden_size)]
    if len(table) != 1:
        raise ConfigError(
            f"expected one tensor …{EMBED} of shape {[text.vocab_size, text.hidden_size]}, the text model's "
            f"embedding, found {len(table)} of {', '.join(held) or 'none'}; is config.json of another model?"
        )
    head = next((name for name in HEADS if f"{name}.weight" in shapes), HEADS[0])
    return text.under(table[0].removesuffix(EMBED), head)
