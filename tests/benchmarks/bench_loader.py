"""Shuffled training batches against a raw gather and against zarr-python.

    python tests/benchmarks/bench_loader.py [--tokens 131072] [--hidden 1024] [--dtype float16] [--rounds 7]
        [--folder DIR]

One stored layer, and the same rows as one flat file. In alternation in one process, each for an epoch in
batches of 4096: rows gathered out of `np.memmap` by one permutation of all tokens; the loader in the stored
dtype, as float32 (and memmap with `astype`, for that), and as a torch DataLoader without and with two
workers. zarr-python gathers two batches by `oindex`, as an epoch of it takes minutes. Rates are rows per
second, ratios taken within a round, medians over rounds.

Targets: the loader in the stored dtype >= 0.5 of the memmap and >= 10 times `oindex`. Files are in the
system's cache, as they are from the second epoch on. DIR should lie on the disk that is meant.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from harness import alternate, print_table
from torch.utils.data import DataLoader

import mizarr
import mizarr.store.runs.bfloat16  # for zarr to know the dtype
from mizarr.store import PackedTokens, RunKey, open_store
from mizarr.store.files.local import LocalFolder
from mizarr.store.reading.labelled import LabelledEntry
from mizarr.store.runs.entries import ArraySpec
from mizarr.store.runs.shards import DTYPES

BATCH, BUFFER, PROMPT, SEGMENT = 4096, 1 << 15, 128, 8192
OINDEX = 2
"""Batches that zarr-python is asked for."""


def make_run(root: Path, rows: np.ndarray[Any, Any], dtype: str) -> LabelledEntry:
    """The rows as one layer of a stored run."""
    tokens = PackedTokens(np.ones(len(rows), np.int32), np.full(len(rows) // PROMPT, PROMPT))
    dims = ("layer", "token", "hidden")
    spec = ArraySpec("resid_post", "blocks.{}.hook_resid_post", dims, {"hidden": rows.shape[1]}, dtype, 1)
    run = RunKey("model", tokens.digest, "none")
    entry = open_store(root, durability="process").create_entry(run, tokens, [spec], segment_tokens=SEGMENT)
    for n, here in enumerate(entry.segments):
        entry.write_segment(n, {("resid_post", 0): rows[here.start : here.stop]})
    entry.publish([("resid_post", 0)])
    return entry


def contestants(entry: LabelledEntry, raw: np.memmap[Any, Any]) -> dict[str, Callable[[], Any]]:
    """Ways to take an epoch in shuffled batches."""
    rng = np.random.default_rng(0)
    assert isinstance(entry.folder, LocalFolder)
    opened = zarr.open_array(str(entry.folder.path(f"{entry.path}/resid_post")), mode="r")
    loaders = {
        dtype: mizarr.ActivationLoader(
            entry.open(chunks=None), layers=0, batch=BATCH, buffer_tokens=BUFFER, dtype=dtype
        )
        for dtype in ("stored", "float32")
    }

    def memmap(convert: Callable[[Any], Any]) -> None:
        order = rng.permutation(len(raw))
        for start in range(0, len(raw), BATCH):
            convert(raw[order[start : start + BATCH]])

    def oindex() -> None:
        order = rng.permutation(len(raw))
        for start in range(0, OINDEX * BATCH, BATCH):
            opened.oindex[0, np.sort(order[start : start + BATCH])]

    def own(dtype: str) -> None:
        loaders[dtype].position = 0
        for _ in loaders[dtype]:
            pass

    def torch_loader(workers: int) -> None:
        loader = loaders["stored"]
        loader.position = 0
        for _ in DataLoader(loader.to_torch(), batch_size=None, num_workers=workers):
            pass

    return {
        "memmap": lambda: memmap(lambda rows: rows),
        "memmap, float32": lambda: memmap(lambda rows: rows.astype(np.float32)),
        "zarr oindex": oindex,
        "loader": lambda: own("stored"),
        "loader, float32": lambda: own("float32"),
        "DataLoader": lambda: torch_loader(0),
        "DataLoader, 2 workers": lambda: torch_loader(2),
    }


def main() -> None:
    """Make the data, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1 << 17)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = np.random.default_rng(0).standard_normal((args.tokens, args.hidden), np.float32)
        rows = rows.astype(DTYPES[args.dtype])
        rows.tofile(Path(folder) / "raw")
        raw = np.memmap(Path(folder) / "raw", rows.dtype, "r", shape=rows.shape)
        seconds = alternate(contestants(make_run(Path(folder) / "store", rows, args.dtype), raw), args.rounds)
    taken = dict.fromkeys(seconds, args.tokens) | {"zarr oindex": OINDEX * BATCH}
    rates = {name: [taken[name] / each for each in some] for name, some in seconds.items()}

    def over(name: str, other: str) -> str:
        found = statistics.median(a / b for a, b in zip(rates[name], rates[other], strict=True))
        return f"{found:.2f}" if found < 100 else f"{found:,.0f}"

    table = [
        (
            name,
            f"{statistics.median(some) / 1e3:,.0f}",
            f"{statistics.median(some) * rows.shape[1] * rows.itemsize / 1e6:,.0f}",
            over(name, "memmap"),
            over(name, "memmap, float32"),
            over(name, "zarr oindex"),
        )
        for name, some in rates.items()
    ]
    columns = ("an epoch by", "1000 rows/s", "MB/s stored", "of memmap", "of memmap f32", "of oindex")
    title = (
        f"{args.tokens} x {args.hidden} {args.dtype}, batches of {BATCH}, {args.rounds} rounds; targets: "
        "loader >= 0.5 of memmap, >= 10 of oindex"
    )
    print_table(title, columns, table)


if __name__ == "__main__":
    main()
