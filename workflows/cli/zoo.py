"""`mizarr train-zoo`: trains tiny networks of AlgZoo from seeds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from ...store.display.terminal import echo
from .options import json_option, print_json, quiet_option

__all__ = ["train_zoo"]


@click.command(
    "train-zoo", epilog="Example: mizarr train-zoo 2nd_argmax --hidden 4 --sequence 3 --seed 0 --out zoo"
)
@click.argument("task")
@click.option("--hidden", type=int, required=True, help="Hidden size of the network.")
@click.option("--sequence", type=int, required=True, help="Length of the input sequence.")
@click.option(
    "--seed",
    "seeds",
    type=int,
    multiple=True,
    default=(0,),
    show_default=True,
    help="Seed of a network; repeatable.",
)
@click.option("--sequences", type=int, default=2**22, show_default=True, help="Number of training sequences.")
@click.option("--batch", type=int, default=1024, show_default=True, help="Sequences per training step.")
@click.option("--layers", type=int, default=2, show_default=True, help="Layers, if TASK has a transformer.")
@click.option("--heads", type=int, default=1, show_default=True, help="Heads, if TASK has a transformer.")
@click.option(
    "--checkpoint",
    "checkpoints",
    type=int,
    multiple=True,
    help="Also write the network after this many sequences; repeatable.",
)
@click.option(
    "--end-token",
    is_flag=True,
    help="For tasks on integers: the largest integer marks the end of the sequence.",
)
@click.option("--pth", is_flag=True, help="Write .pth files, as AlgZoo does, instead of .safetensors.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("zoo"),
    show_default=True,
    help="Folder for the networks.",
)
@json_option
@quiet_option
def train_zoo(
    task: str, seeds: tuple[int, ...], pth: bool, out: Path, as_json: bool, quiet: bool, **settings: Any
) -> None:
    """Train tiny networks of AlgZoo.

    Trains one network for TASK per seed, on new random sequences in every step. Files have AlgZoo's names.
    """
    from ...pipeline.progress import Progress
    from ...stages.algzoo.training import ZooTraining, file_name, save_trained, train
    from ..report.page import check_output

    # The other options have the names of its fields.
    trainings = [ZooTraining(task, seed=seed, **settings) for seed in seeds]
    ending = ".pth" if pth else ".safetensors"
    # All networks go into one folder: one file is checked, before any training.
    check_output(out / file_name(trainings[0], ending))
    networks = []
    with Progress(quiet) as progress:
        for training in trainings:
            bar = progress.task(f"train seed {training.seed}", total=training.steps, unit="steps")

            # Bound as a default: a closure would see the training of a later round of the loop.
            def save_checkpoint(n_sequences: int, tensors: Any, training: ZooTraining = training) -> None:
                path = out / file_name(training, ending, n_sequences)
                path = save_trained(training, tensors, path, n_sequences)
                echo(f"wrote {path}", err=True)

            tensors, losses = train(training, bar.advance, save_checkpoint)
            path = save_trained(training, tensors, out / file_name(training, ending))
            networks.append({"file": str(path), "seed": training.seed, "loss": _last_finite(losses.tolist())})
            echo(f"wrote {path}", err=True)
    if as_json:
        print_json({"trained": networks})
        return
    for network in networks:
        loss = "" if network["loss"] is None else f"  last loss {network['loss']:.5g}"
        echo(f"{network['file']}{loss}")


def _last_finite(losses: list[float]) -> float | None:
    """Last finite training loss; None if every loss is infinite or NaN."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return finite[-1] if finite else None
