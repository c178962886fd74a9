"""Tiny transformers that rhyme, whose weights are set by hand, so that it is known where the rhyme is kept.

`plans`: the line break copies the family of the end before it, and all later tokens read the line break.
`decides_late`: the tokens that stand last but one do so, in place of the line break. `improvises`: every
token reads the end of line 1 itself; `relays` does so too, while the line break holds the family and nobody
reads it; `does_both`: half of each.

Made as those of toy_models.py, with a BOS that heads look at where there is nothing to read.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from mizarr.stages.forward.architectures.known import from_hf_config
from mizarr.stages.forward.networks.weights import expected_tensors
from mizarr.workflows.material.samples.couplets import COUPLETS, FAMILIES

__all__ = ["decides_late", "does_both", "favourite", "improvises", "plans", "relays"]

PIECE = r"\n| ?[^ \n]+"
ENDS = [word for family in FAMILIES for word in family]
SAID = frozenset[str]().union(*(pair.said for pair in COUPLETS))
VOCABULARY = list(
    dict.fromkeys(
        ["<s>", "\n", *(f" {word}" for word in ENDS)]
        + [piece for pair in COUPLETS for piece in re.findall(PIECE, pair.text("x"))]
    )
)
HIDDEN, HEADS, SIZE, CONSTANT = 128, 2, 64, 40.0
SCALE = CONSTANT / np.sqrt(HIDDEN)
"""What a norm divides by."""
# Dimensions of the stream: 0 the constant, then three copies of which family, then what a token is.
FAMILY, PLAN, SAYS = 1, 1 + len(FAMILIES), 1 + 2 * len(FAMILIES)
IS_END, IS_BREAK, IS_FIRST, IS_LATE, HOLDS = range(100, 105)
TO_NOTHING, TO_READ = 30, 31
"""Dimensions of a head that do not turn with the position."""


def favourite(family: int) -> str:
    """The likeliest word of a family: one that no first line ends on, where there is one."""
    used = {end for pair in COUPLETS for end in (pair.end, pair.other)}
    return next((word for word in FAMILIES[family] if word not in used), FAMILIES[family][0])


class Toy:
    """A model of two layers that adds nothing, until heads are told what they read."""

    def __init__(self) -> None:
        self.config = {
            "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": 2,
            "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": SIZE,
            "intermediate_size": 8, "vocab_size": len(VOCABULARY), "max_position_embeddings": 64,
            "rms_norm_eps": 1e-6, "rope_theta": 1e30, "tie_word_embeddings": False, "bos_token_id": 0,
        }  # fmt: skip
        shapes = expected_tensors(from_hf_config(self.config))
        self.tensors = {
            name: (np.ones if "norm" in name else np.zeros)(shape, np.float32)
            for name, shape in shapes.items()
        }
        embed, head = self.tensors["model.embed_tokens.weight"], self.tensors["lm_head.weight"]
        embed[:, 0] = CONSTANT
        embed[0, IS_FIRST] = embed[VOCABULARY.index("\n"), IS_BREAK] = 1.0
        for pair in COUPLETS:
            embed[VOCABULARY.index(f" {pair.second.split()[-2]}"), IS_LATE] = 1.0
        for number, family in enumerate(FAMILIES):
            for word in family:
                at = VOCABULARY.index(f" {word}")
                if word not in SAID:
                    embed[at, [IS_END, FAMILY + number]] = 1.0
                head[at, SAYS + number] = (8.5 if word == favourite(number) else 8.0) * SCALE

    def reads(self, layer: int, head: int, who: int, what: int, source: int, target: int) -> None:
        """A head whose tokens with `who` look at the ones with `what`, and copy families from there."""
        attention = f"model.layers.{layer}.self_attn.{{}}_proj.weight"
        query, key, value, out = (self.tensors[attention.format(name)] for name in "qkvo")
        start, constant = head * SIZE, np.sqrt(HIDDEN)
        query[start + TO_NOTHING, 0] = 16.0 / constant
        key[start + TO_NOTHING, IS_FIRST] = 8.0 * SCALE
        query[start + TO_READ, who] = 24.0 / constant if who == 0 else 24.0 * SCALE
        key[start + TO_READ, what] = 12.0 * SCALE
        for number in range(len(FAMILIES)):
            value[start + number, source + number] = SCALE
            out[target + number, start + number] = 1.0
        if target == PLAN:
            value[start + len(FAMILIES), IS_END] = SCALE
            out[HOLDS, start + len(FAMILIES)] = 1.0

    def save(self, folder: Path) -> Path:
        """Weights, and a tokenizer of whole words that keeps line breaks."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, folder / "model.safetensors")
        words = {word: i for i, word in enumerate(VOCABULARY)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<s>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), "isolated")
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        tokenizer.decoder = decoders.Fuse()
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
        return folder


def plans(folder: Path) -> Path:
    """The line break knows the rhyme from layer 0 on, and all tokens behind it read it there."""
    toy = Toy()
    toy.reads(0, 0, IS_BREAK, IS_END, FAMILY, PLAN)
    toy.reads(1, 0, 0, HOLDS, PLAN, SAYS)
    return toy.save(folder)


def decides_late(folder: Path) -> Path:
    """Tokens that stand last but one in a line know the rhyme, and those behind them read it there."""
    toy = Toy()
    toy.reads(0, 0, IS_LATE, IS_END, FAMILY, PLAN)
    toy.reads(1, 0, 0, HOLDS, PLAN, SAYS)
    return toy.save(folder)


def improvises(folder: Path) -> Path:
    """Every token reads the end of line 1 itself."""
    toy = Toy()
    toy.reads(1, 0, 0, IS_END, FAMILY, SAYS)
    return toy.save(folder)


def relays(folder: Path) -> Path:
    """The line break knows the rhyme, and every token reads it at the end of line 1."""
    toy = Toy()
    toy.reads(0, 0, IS_BREAK, IS_END, FAMILY, PLAN)
    toy.reads(1, 0, 0, IS_END, FAMILY, SAYS)
    return toy.save(folder)


def does_both(folder: Path) -> Path:
    """Every token reads the line break, which knows the rhyme, and the end of line 1."""
    toy = Toy()
    toy.reads(0, 0, IS_BREAK, IS_END, FAMILY, PLAN)
    toy.reads(1, 0, 0, HOLDS, PLAN, SAYS)
    toy.reads(1, 1, 0, IS_END, FAMILY, SAYS)
    return toy.save(folder)
