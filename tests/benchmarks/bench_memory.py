"""Memory of a harvest over a corpus of any size: what is resident, batch by batch; and what `explain` takes.

    python tests/benchmarks/bench_memory.py [--tokens 10_000_000] [--planned 1_000_000_000]

A model of one layer, 32 wide, captures `resid_post` of prompts of 512 tokens in bfloat16; what is resident is
printed twenty times on the way. Target: flat, never more than 64 MiB above what it was after a tenth. Then a
plan of `--planned` tokens, in a process of its own: under 10 seconds and 1 GB.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from harness import print_table
from large_models import write_llama

import mizarr
from mizarr.pipeline.context import Context
from mizarr.pipeline.progress import Bar, Progress
from mizarr.stages.forward.capture.capture import CaptureNode

LENGTH = 512
VOCAB = 1000


def resident() -> int:
    """Bytes of this process that are its own: what is mapped from files may go at any time."""
    told = Path("/proc/self/status").read_text()
    return int(told.partition("RssAnon:")[2].split()[0]) << 10


class Watched(Progress):
    """Notes what is resident as tokens are committed."""

    def __init__(self, total: int) -> None:
        super().__init__(quiet=True)
        self.seen: list[tuple[int, int]] = []
        self._total = total

    def task(self, label: str, *, total: int | None = None, unit: str = "") -> Bar:
        """A task that notes."""
        task = super().task(label, total=total, unit=unit)
        advance, done = task.advance, [0]

        def noted(count: int = 1, written: int = 0) -> None:
            advance(count, written)
            done[0] += count
            if not self.seen or done[0] - self.seen[-1][0] >= self._total // 20:
                self.seen.append((done[0], resident()))
                print(f"{done[0]:>12,} tokens {self.seen[-1][1] / 2**20:8.1f} MiB", flush=True)

        task.advance = noted  # type: ignore[method-assign]  # of this one task
        return task


def harvest(tokens: int, folder: Path) -> None:
    """The harvest, and how much more was resident at its end than after a tenth."""
    write_llama(folder / "m", layers=1, hidden=32, inner=64, heads=2, vocab=VOCAB)
    ids = np.random.default_rng(0).integers(0, VOCAB, (tokens // LENGTH, LENGTH), dtype=np.int32)
    store = mizarr.open_store(folder / "store", durability="process")
    node = CaptureNode(
        folder / "m", ids, "blocks.0.hook_resid_post", storage_dtype="bfloat16", memory=32 << 20
    )
    batches = -(-ids.size // node.options.batch_tokens)
    progress = Watched(ids.size)
    node.run(store, Context(1, progress=progress))
    early = next(held for done, held in progress.seen if done >= ids.size // 10)
    held = [held for done, held in progress.seen if done >= ids.size // 10]
    rows = [
        ("after a tenth", f"{early / 2**20:.0f}"),
        ("most after that", f"{max(held) / 2**20:.0f}"),
        ("at the end", f"{held[-1] / 2**20:.0f}"),
        ("grown by (target: 64 at most)", f"{(max(held) - early) / 2**20:.0f}"),
    ]
    print_table(f"{ids.size:,} tokens, about {batches:,} batches, 1 layer of 32", ("", "MiB"), rows)


PLANNED = """
import sys, threading, time
import numpy as np
import mizarr
from mizarr.pipeline import plan
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.store import PackedTokens

def own():
    return int(open("/proc/self/status").read().partition("RssAnon:")[2].split()[0]) << 10

def watch():
    while True:
        most[0] = max(most[0], own())
        time.sleep(0.01)

most = [0]
threading.Thread(target=watch, daemon=True).start()
start, began = time.perf_counter(), time.process_time()
tokens, length = int(sys.argv[2]), 2048
ids = np.lib.format.open_memmap(sys.argv[3], mode="r")
packed = PackedTokens(ids, np.full(tokens // length, length, np.int64))
node = CaptureNode(sys.argv[1], packed, "blocks.*.hook_resid_post", storage_dtype="bfloat16")
steps = plan(node, mizarr.open_store(sys.argv[4]))
print(steps.rows(), file=sys.stderr)
print(time.perf_counter() - start, time.process_time() - began, max(most[0], own()))
"""


def planned(tokens: int, folder: Path) -> None:
    """A plan of so many tokens, whose ids lie in a file (4 bytes each)."""
    tokens -= tokens % 2048
    ids = np.lib.format.open_memmap(folder / "ids.npy", mode="w+", dtype=np.int32, shape=(tokens,))
    ids.flush()
    del ids
    command = [sys.executable, "-c", PLANNED, str(folder / "m"), str(tokens), str(folder / "ids.npy")]
    done = subprocess.run([*command, str(folder / "empty")], capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"the plan of {tokens:,} tokens failed: {done.stderr.strip().splitlines()[-1]}")
        return
    wall, processor, most = map(float, done.stdout.split())
    rows = [
        ("seconds (target: 10)", f"{wall:.1f}"),
        ("of the processor", f"{processor:.1f}"),
        ("MiB at most, beside the file of ids (target: 954)", f"{most / 2**20:.0f}"),
    ]
    print_table(f"a plan of {tokens:,} tokens", ("", ""), rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--no-harvest", action="store_true", help="the plan alone")
    parser.add_argument("--planned", type=int, default=1_000_000_000)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as found:
        harvest(LENGTH if chosen.no_harvest else chosen.tokens, Path(found))
        planned(chosen.planned, Path(found))
