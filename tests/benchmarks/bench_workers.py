"""Two worker processes beside one, a thread each: a capture of all layers.

    python tests/benchmarks/bench_workers.py [--rounds 5] [--workers 2] [--prompts 96]

Target: two workers on two cores take at most 1 / 1.5 of the time of one. All workers are started, and have
loaded the model, before the first clock runs; both sides take turns. A few minutes in all. Beside the wall
clock stands the processor time of the workers: on a quiet machine each has a core to itself, and n workers
that take c seconds of processor for what one does in c_1 are n c_1 / c times as fast, whatever others do with
the cores now.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

import numpy as np
import psutil
from distributed import Client
from harness import alternate, print_table, ratio
from large_models import write_llama

import mizarr
from mizarr.pipeline.clusters import local_workers


def seconds_of(address: str) -> float:
    """Processor time that the workers at an address have taken so far."""
    with Client(address, set_as_default=False) as client:
        pids = client.run(lambda: __import__("os").getpid()).values()
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def main(rounds: int, count: int, prompts: int) -> None:
    """8 layers, hidden 512, prompts of 128 tokens, segments of four of them."""
    import torch

    torch.set_num_threads(1)
    ids = np.random.default_rng(0).integers(0, 8000, (prompts, 128))
    with tempfile.TemporaryDirectory() as folder, local_workers(1) as one, local_workers(count) as several:
        model = Path(folder) / "m"
        write_llama(model, layers=8, hidden=512, inner=2048, heads=8, vocab=8000)
        number: list[int] = []
        taken: dict[str, list[float]] = {one: [], several: []}

        def capture(address: str) -> None:
            number.append(0)
            before = seconds_of(address)
            store = mizarr.open_store(Path(folder) / f"store{len(number)}", durability="process")
            mizarr.capture(
                model, ids, "blocks.*.hook_resid_post", store=store, cluster=address, progress=False,
                segment_tokens=512,
            )  # fmt: skip
            taken[address].append(seconds_of(address) - before)

        seconds = alternate({"one": lambda: capture(one), "several": lambda: capture(several)}, rounds)
    cpu = median(count * a / b for a, b in zip(taken[one][1:], taken[several][1:], strict=True))
    rows = [
        ("one worker, s", f"{median(seconds['one']):.2f}", f"{median(taken[one][1:]):.2f}"),
        (f"{count} workers, s", f"{median(seconds['several']):.2f}", f"{median(taken[several][1:]):.2f}"),
        ("times as fast (target: 1.5)", f"{ratio(seconds['one'], seconds['several']):.2f}", f"{cpu:.2f}"),
    ]
    print_table(f"{ids.size:,} tokens, 8 layers of 512, a thread each", ("", "wall", "processor"), rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=96)
    chosen = parser.parse_args()
    main(chosen.rounds, chosen.workers, chosen.prompts)
