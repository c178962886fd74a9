"""The texts that dictionaries of the specimen are trained on and measured with, and what it does with them.

Border: prompts and stored activations; what is trained on them is dictionaries.py's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .data import BOS, HELD_OUT, WATCHED, Batches, Chapter, Fact, Mixture, read_chapters, read_facts, token_id

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from mizarr.stages.training_data.stored import StoredActivations

log = logging.getLogger(__name__)

MIXTURE = Mixture(
    prose=0.76, facts=0.0, random_repeats=0.08, word_repeats=0.08, couplets=0.08, long_share=0.0
)
"""Rows of running text; facts are prompts of their own besides, as people will ask for them."""
PROSE_ROWS = 1536
TOLD = 4
"""How often each fact is told: once, and its few tokens drown in the prose, which dictionaries then learn."""
SAE_LAYER = 3


def corpus(
    tokenizer: Tokenizer, chapters: Sequence[Chapter], facts: Sequence[Fact], *, seed: int
) -> list[list[int]]:
    """Prompts, as token ids: rows of prose, repeats and couplets, then `TOLD` times each fact and its end."""
    rows = Batches(tokenizer, chapters, [], facts, seed=seed)(0, replace(MIXTURE, rows=PROSE_ROWS)).ids
    bos = token_id(tokenizer, BOS)
    told = [tokenizer.encode(f"{fact.prompt} {fact.target}.", add_special_tokens=False).ids for fact in facts]
    return [*rows.tolist(), *([bos, *ids] for ids in told * TOLD)]


def training_prompts(data: Path) -> list[list[int]]:
    """`corpus` of the chapters and facts in a folder, without the chapters held out."""
    held = (*HELD_OUT, *WATCHED)
    chapters = [chapter for chapter in read_chapters(data / "dickens") if chapter.name not in held]
    return corpus(specimen_tokenizer(), chapters, read_facts(data / "counterfact"), seed=0)


def specimen_tokenizer() -> Tokenizer:
    """The tokenizer of the specimen, as it ships."""
    from tokenizers import Tokenizer

    from mizarr.stages.forward.models.files import resolve

    found: Tokenizer = Tokenizer.from_file(str(resolve("specimen").directory / "tokenizer.json"))
    return found


def captured(prompts: list[list[int]], store: Path) -> StoredActivations:
    """The specimen's activations on prompts, stored in float16; only what is missing is computed."""
    from mizarr.pipeline import run
    from mizarr.stages.forward.capture.capture import CaptureNode
    from mizarr.stages.training_data.stored import StoredActivations
    from mizarr.store import open_store

    hooks = ["blocks.*.hook_resid_mid", "blocks.*.hook_mlp_out", f"blocks.{SAE_LAYER}.hook_resid_post"]
    node = CaptureNode("specimen", prompts, hooks, storage_dtype="float16", device="cpu")
    opened = open_store(store)
    run(node, opened)
    log.info("%d prompts, %d tokens", node.tokens.n_prompts, node.tokens.n_tokens)
    return StoredActivations.of_run(opened, node.run_key, node.tokens, node.dtype, node.cells)
