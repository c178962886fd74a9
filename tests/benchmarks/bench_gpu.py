"""A harvest on a GPU beside its plain forward pass, and beside the disk.

    python tests/benchmarks/bench_gpu.py [--rounds 7] [--scratch FOLDER] [--tiny --device cpu]

A Llama of the shape of 1 B parameters (16 layers of 2048), random weights, bfloat16: tokens per second with
all `resid_post` stored durably over those of the passes alone (target: 0.9), and bytes per second over those
of files written and synced one by one (target: 0.8). A harvest is no faster than the slower of the two, so a
machine meets one of the targets: that of what holds it up. --tiny is a shape for looking whether all of this
runs, on any device.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from harness import alternate, print_table, ratio
from large_models import write_llama

import mizarr
from mizarr.stages.forward.hooks.spec import HookSpec
from mizarr.stages.forward.models.model import Model

LARGE = {"layers": 16, "hidden": 2048, "inner": 8192, "heads": 32, "vocab": 32_000}
TINY = {"layers": 2, "hidden": 64, "inner": 128, "heads": 4, "vocab": 500}
HOOKS = "blocks.*.hook_resid_post"
BATCH = 8192
"""Tokens of a pass."""
SHARD = 64 << 20
"""Bytes of a file the disk is measured by: about that of a shard."""


def main(
    rounds: int, shape: dict[str, int], device: str, prompts: int, length: int, scratch: Path | None
) -> None:
    """Both comparisons."""
    ids = np.random.default_rng(0).integers(0, shape["vocab"], (prompts, length))
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        write_llama(Path(folder) / "m", **shape)
        model = Model.from_pretrained(Path(folder) / "m", dtype="bfloat16", device=device, progress=False)
        written = ids.size * shape["layers"] * shape["hidden"] * 2
        number: list[int] = []

        def harvest() -> None:
            number.append(0)
            store = mizarr.open_store(Path(folder) / f"store{len(number)}", durability="disk")
            mizarr.capture(
                model, ids, HOOKS, store=store, storage_dtype="bfloat16", batch_tokens=BATCH, progress=False
            )

        contestants: dict[str, Callable[[], None]] = {
            "plain": lambda: plain(model, ids),
            "harvest": harvest,
            "disk": lambda: synced(Path(folder) / "disk", written),
        }
        seconds = alternate(contestants, rounds)
    rows = [(name, f"{statistics.median(each):.2f}") for name, each in seconds.items()]
    rows.append(
        ("tokens/s over those of the plain pass (0.9)", f"{ratio(seconds['plain'], seconds['harvest']):.3f}")
    )
    rows.append(("bytes/s over those of the disk (0.8)", f"{ratio(seconds['disk'], seconds['harvest']):.3f}"))
    name = torch.cuda.get_device_name() if device.startswith("cuda") else device
    print_table(f"{name}: {ids.size:,} tokens, {written / 2**30:.2f} GiB stored, {shape}", ("", "s"), rows)


def plain(model: Model, ids: np.ndarray) -> None:
    """The passes of the harvest with nothing kept: what leaves the last layer is shown to nobody."""
    last = HookSpec().capture(f"blocks.{model.config.num_layers - 1}.hook_resid_post")
    spec = last.bind(model.config.hook_points, model.name)
    together = max(1, BATCH // ids.shape[1])
    for first in range(0, len(ids), together):
        model.stream_batch(ids[first : first + together].tolist(), spec, None, lambda capture, value: None)
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def synced(path: Path, size: int) -> None:
    """So many bytes in files that are synced each, and removed."""
    block = os.urandom(min(SHARD, size))
    for first in range(0, size, SHARD):
        with path.open("wb", buffering=0) as file:
            file.write(block[: size - first])
            os.fsync(file.fileno())
        path.unlink()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a shape that any machine takes")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument(
        "--scratch", type=Path, help="a folder on the disk to measure; default that of temporary files"
    )
    chosen = parser.parse_args()
    if chosen.device.startswith("cuda") and not torch.cuda.is_available():
        parser.exit(
            2, "expected a GPU, found none that torch can use; --tiny --device cpu looks whether it runs\n"
        )
    main(
        chosen.rounds,
        TINY if chosen.tiny else LARGE,
        chosen.device,
        chosen.prompts,
        chosen.length,
        chosen.scratch,
    )
