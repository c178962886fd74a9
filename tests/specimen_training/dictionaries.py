"""Train the dictionaries that ship with the specimen, on what it does with its own texts.

    python -m tests.specimen_training.dictionaries --data DIR --run DIR --to DIR

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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mizarr.stages.features.training.settings import TrainingSettings

from .dictionary_card import write_card
from .dictionary_corpus import SAE_LAYER, captured, training_prompts
from .dictionary_figures import pack

if TYPE_CHECKING:
    from mizarr.stages.features.training.trainer import Training
    from mizarr.stages.training_data.stored import StoredActivations

__all__ = ["CLT", "PLT", "SAE", "main"]

log = logging.getLogger(__name__)

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
            pack(training, options.to / name, options.run / "store")
    if options.to:
        write_card(options.to)


def train(settings: TrainingSettings, source: StoredActivations, folder: Path) -> Training:
    """The training in a folder, brought to its end."""
    from mizarr.pipeline.progress import Progress
    from mizarr.stages.features.training.trainer import Training

    training = Training(settings, source, folder)
    with Progress() as progress:
        task = progress.task(settings.kind, total=settings.steps * settings.batch, unit="tokens")
        task.advance(training.step * settings.batch)
        training.run(advance=task.advance)
    return training


if __name__ == "__main__":
    main()
