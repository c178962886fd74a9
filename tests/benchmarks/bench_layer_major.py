"""A corpus layer by layer beside the same corpus batch by batch; and weights of four times the memory.

    python tests/benchmarks/bench_layer_major.py [--rounds 7] [--large]

First a Llama of 8 layers, 512 wide, one layer in memory at a time, so that every layer is read and spooled,
beside the model as a whole, both from loading to the published run (target: at least 0.85 of its speed). Then
(--large) 1.27 GB of weights within 300 MiB of data (setrlimit) beside what the libraries take: seconds, and
the most that was resident beyond that.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import alternate, print_table, ratio
from large_models import write_llama

import mizarr
from mizarr.stages.forward.models.model import Model
from mizarr.stages.forward.models.residency import bytes_of

HOOKS = "blocks.*.hook_resid_post"
VOCAB = 8000


def capture(model: Model, ids: np.ndarray, folder: str, number: list[int]) -> None:
    """Into a new store each time."""
    number.append(0)
    store = mizarr.open_store(Path(folder) / f"store{len(number)}", durability="process")
    mizarr.capture(model, ids, HOOKS, store=store, progress=False)


def small(rounds: int) -> None:
    """8 layers, hidden 512, prompts of 128 tokens."""
    ids = np.random.default_rng(0).integers(0, VOCAB, (128, 128))
    with tempfile.TemporaryDirectory() as folder:
        write_llama(Path(folder) / "m", layers=8, hidden=512, inner=2048, heads=8, vocab=VOCAB)
        number: list[int] = []

        def load(**options: Any) -> Model:
            return Model.from_pretrained(Path(folder) / "m", progress=False, **options)

        least = bytes_of(load().config, 4).least
        seconds = alternate(
            {
                "batch": lambda: capture(load(), ids, folder, number),
                "layer": lambda: capture(load(max_memory=least), ids, folder, number),
            },
            rounds,
        )
    rows = [(name, f"{np.median(each):.2f}") for name, each in seconds.items()]
    rows.append(("batch / layer (target: 0.85)", f"{ratio(seconds['batch'], seconds['layer']):.3f}"))
    print_table(
        f"8 layers, hidden 512, {ids.size:,} tokens, {torch.get_num_threads()} threads", ("", "s"), rows
    )


LIMITED = """
import resource, sys, time
import numpy as np, torch
import mizarr, mizarr.stages.forward.capture.layer_major, mizarr.stages.forward.networks.table

def held(what):
    return int(open("/proc/self/status").read().partition(what)[2].split()[0]) << 10

torch.ones(64, 64) @ torch.ones(64, 64)
before, allowed = held("VmRSS:"), int(sys.argv[3])
if allowed:
    resource.setrlimit(resource.RLIMIT_DATA, (held("VmData:") + allowed,) * 2)
ids = np.random.default_rng(0).integers(0, 8000, (32, 64))
start = time.perf_counter()
mizarr.capture(sys.argv[1], ids, "blocks.*.hook_resid_post", memory=16 << 20, batch_tokens=1024,
               store=mizarr.open_store(sys.argv[2], durability="process"), progress=False)
print(time.perf_counter() - start, before, held("VmHWM:") - before)
"""


def large() -> None:
    """Weights of four times the memory allowed, and the same without a limit."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "m"
        held = write_llama(model, layers=18, hidden=1024, inner=4096, heads=16, vocab=VOCAB)
        for name, allowed in (("no limit", 0), ("300 MiB", 300 << 20)):
            command = [sys.executable, "-c", LIMITED, str(model), str(Path(folder) / name), str(allowed)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            seconds, before, most = map(float, done.stdout.split())
            rows.append((name, f"{seconds:.1f}", f"{before / 2**20:.0f}", f"{most / 2**20:.0f}"))
    print_table(
        f"{held / 2**20:,.0f} MiB of weights, 2,048 tokens",
        ("allowed beside the libraries", "s", "libraries, MiB", "most beyond, MiB"),
        rows,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--large", action="store_true", help="also weights of four times the memory")
    chosen = parser.parse_args()
    small(chosen.rounds)
    if chosen.large:
        large()
