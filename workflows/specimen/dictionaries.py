"""Train the dictionaries that ship with the specimen, on what it does with its own texts.

    python -m mizarr.workflows.specimen.dictionaries --data DIR --run DIR --to DIR

Border: which texts, which settings, which files. Capturing is CaptureNode's, training
stages/features/training's, measuring dictionary_figures.py's, the card dictionary_card.py's.

DIR of --data holds `dickens/*.txt` and `counterfact/*.json`, as for train.py; the chapters held out from the
specimen are held out here as well. --run keeps the captured activations and the checkpoints: the same command
goes on where it was stopped. Everything is seeded.

    clt   cross-layer transcoder, all layers: reads resid_mid, writes mlp_out
    plt   transcoder of each layer by itself, between the same hook points
    sae   autoencoder of one layer's resid_post, where the count of characters lives

Sizes are what fits into 6 MB together in float16.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...stages.features.training.settings import TrainingSettings
from .data import BOS, HELD_OUT, WATCHED, Batches, Chapter, Fact, Mixture, read_chapters, read_facts, token_id

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from ...stages.features.training.source import StoredActivations
    from ...stages.features.training.trainer import Training

__all__ = ["CLT", "PLT", "SAE", "SAE_LAYER", "corpus", "main"]

log = logging.getLogger(__name__)

MIXTURE = Mixture(prose=0.84, facts=0.0, random_repeats=0.08, word_repeats=0.08, long_share=0.0)
"""Rows of running text; facts are prompts of their own besides, as people will ask for them."""
PROSE_ROWS = 2048
SAE_LAYER = 3
CLT = TrainingSettings(
    kind="clt",
    read="hook_resid_mid",
    write="hook_mlp_out",
    features=480,
    activation="batchtopk",
    k=32,
    start="samples",
    steps=2500,
    batch=2048,
    lr=2e-3,
    dead_after=200_000,
    validation=0.02,
)
PLT = replace(CLT, kind="plt", features=112, k=16)
SAE = TrainingSettings(
    kind="sae",
    read="hook_resid_post",
    layers=(SAE_LAYER,),
    features=512,
    activation="batchtopk",
    k=24,
    start="samples",
    steps=3000,
    batch=2048,
    lr=1e-3,
    dead_after=200_000,
    validation=0.02,
)


def main(arguments: list[str] | None = None) -> None:
    """Command line of the trainer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with dickens/ and counterfact/")
    parser.add_argument("--run", type=Path, required=True, help="where activations and checkpoints go")
    parser.add_argument("--to", type=Path, help="where the dictionaries and their card go; default, nowhere")
    parser.add_argument("--only", choices=("clt", "plt", "sae"), help="train this one only")
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch; another number gives other last bits"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    import torch

    torch.set_num_threads(options.threads)
    source = captured(training_prompts(options.data), options.run / "store")
    chosen = {"clt": CLT, "plt": PLT, "sae": SAE}
    for name in [options.only] if options.only else chosen:
        training = train(chosen[name], source, options.run / name)
        if options.to:
            from .dictionary_figures import pack

            pack(training, options.to / name, options.run / "store")
    if options.to:
        from .dictionary_card import write_card

        write_card(options.to)


def corpus(
    tokenizer: Tokenizer, chapters: Sequence[Chapter], facts: Sequence[Fact], *, seed: int
) -> list[list[int]]:
    """Prompts, as token ids: rows of wrapped prose and of repeats, then each fact with its end."""
    mixture = replace(MIXTURE, rows=PROSE_ROWS)
    rows = Batches(tokenizer, chapters, [], facts, mixture, seed=seed)(0).ids
    bos = token_id(tokenizer, BOS)
    told = [tokenizer.encode(f"{fact.prompt} {fact.target}.", add_special_tokens=False).ids for fact in facts]
    return [*rows.tolist(), *([bos, *ids] for ids in told)]


def training_prompts(data: Path) -> list[list[int]]:
    """`corpus` of the chapters and facts in a folder, without the chapters held out."""
    held = (*HELD_OUT, *WATCHED)
    chapters = [chapter for chapter in read_chapters(data / "dickens") if chapter.name not in held]
    return corpus(specimen_tokenizer(), chapters, read_facts(data / "counterfact"), seed=0)


def specimen_tokenizer() -> Tokenizer:
    """As it ships."""
    from tokenizers import Tokenizer

    from ...stages.forward.models.files import resolve

    found: Tokenizer = Tokenizer.from_file(str(resolve("specimen").directory / "tokenizer.json"))
    return found


def captured(prompts: list[list[int]], store: Path) -> StoredActivations:
    """The specimen's activations on prompts, stored in float16; only what is missing is computed."""
    from ...pipeline import run
    from ...stages.features.training.source import StoredActivations
    from ...stages.forward.capture.capture import CaptureNode
    from ...store import open_store

    hooks = ["blocks.*.hook_resid_mid", "blocks.*.hook_mlp_out", f"blocks.{SAE_LAYER}.hook_resid_post"]
    node = CaptureNode("specimen", prompts, hooks, storage_dtype="float16", device="cpu")
    opened = open_store(store)
    run(node, opened)
    log.info("%d prompts, %d tokens", node.tokens.n_prompts, node.tokens.n_tokens)
    return StoredActivations.of_run(opened, node.run_key, node.tokens, node.dtype, node.cells)


def train(settings: TrainingSettings, source: StoredActivations, folder: Path) -> Training:
    """The training in a folder, brought to its end."""
    from ...pipeline.progress import Progress
    from ...stages.features.training.trainer import Training

    training = Training(settings, source, folder)
    with Progress() as progress:
        task = progress.task(settings.kind, total=settings.steps * settings.batch, unit="tokens")
        task.advance(training.step * settings.batch)
        training.run(advance=task.advance)
    return training


if __name__ == "__main__":
    main()
