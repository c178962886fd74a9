"""Loading a checkpoint of 1.2 B parameters: time over transformers', and memory over that of the weights.

    python tests/benchmarks/bench_loading.py [--rounds 7] [--cold] [--tiny] [--scratch FOLDER]

A random Llama of 16 layers of 2048, vocabulary 128,256, in float32, read into float32. Each load is a process
of its own, in alternation, timed from the call to the last weight read: both libraries may map the files, so
one token is run behind the load, and counts. With --cold files are on the disk alone when a load begins, as
on the first day; else the system holds them in memory, where a mapped file costs nothing to read. Targets: at
most 1.2 of transformers' time; what is resident at most, beyond what it was before the call, at most the
weights and one layer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from harness import alternate, print_table, ratio
from large_models import write_llama

LARGE = {"layers": 16, "hidden": 2048, "inner": 8192, "heads": 32, "vocab": 128_256}
TINY = {"layers": 8, "hidden": 512, "inner": 2048, "heads": 8, "vocab": 8000}

LOAD = """
import sys, time
import torch

def resident(word):
    return int(open("/proc/self/status").read().partition(word)[2].split()[0]) << 10

ids = torch.tensor([[1]])
if sys.argv[1] == "mizarr":
    from mizarr.stages.forward.models.model import Model
    from mizarr.stages.forward.networks import table
    load = lambda: Model.from_pretrained(sys.argv[2], progress=False)
    run = lambda model: model.forward(ids)
else:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM
    load = lambda: AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32)
    run = lambda model: model(ids)
torch.ones(8, 8) @ torch.ones(8, 8)
before, start = resident("VmRSS:"), time.perf_counter()
model = load()
loaded = time.perf_counter() - start
with torch.no_grad():
    run(model)
print(loaded, time.perf_counter() - start, resident("VmHWM:") - before)
"""


def forget(folder: Path) -> None:
    """Have the system hold nothing of a checkpoint in memory."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cold", action="store_true", help="read from the disk, not from memory")
    parser.add_argument("--tiny", action="store_true", help="a small shape, to see whether it runs")
    parser.add_argument("--scratch", type=Path, help="where the checkpoint is written")
    args = parser.parse_args()
    shape = TINY if args.tiny else LARGE
    layer = 4 * (4 * shape["hidden"] ** 2 + 3 * shape["hidden"] * shape["inner"])
    told: dict[str, list[tuple[float, ...]]] = {"transformers": [], "mizarr": []}
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        weights = write_llama(Path(scratch) / "m", **shape)

        def load(library: str) -> Callable[[], None]:
            def process() -> None:
                if args.cold:
                    forget(Path(scratch) / "m")
                command = [sys.executable, "-c", LOAD, library, str(Path(scratch) / "m")]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                told[library].append(tuple(map(float, done.stdout.split())))

            return process

        alternate({library: load(library) for library in told}, args.rounds)
    rows = []
    for library, found in told.items():
        loaded, used, most = (list(each) for each in zip(*found[1:], strict=True))
        of = [[each[n] for each in told["transformers"][1:]] for n in range(2)]
        rows.append(
            (
                library,
                f"{statistics.median(loaded):.2f}",
                f"{ratio(loaded, of[0]):.2f}",
                f"{statistics.median(used):.2f}",
                f"{ratio(used, of[1]):.2f}",
                f"{(max(most) - weights) / layer:+.2f}",
            )
        )
    columns = ("", "s to load", "x", "s to the first token", "x (1.2)", "layers beyond the weights (1)")
    held = "on the disk" if args.cold else "held in memory"
    print_table(f"{weights / 2**30:.2f} GiB of weights {held}, {args.rounds} rounds", columns, rows)


if __name__ == "__main__":
    main()
