"""Shards against the disk: writing, scanning, random tokens, one prompt, opening, resuming.

    python tests/benchmarks/bench_shards.py [--mib 256] [--dtype bfloat16] [--rounds 9] [--folder DIR]

Compares the entry's own read and write paths with a raw file of the same bytes (`write`, `np.memmap`), in
alternation in one process. Ratios are raw time / own time, medians over rounds; 1.0 = as fast as the disk.
Targets (storage.md, section 10): write >= 0.8 of a raw write to the page cache without a digest; with digest
and fsync >= 0.8 of a raw synced write; scan >= 0.9 and random tokens >= 0.3 of memmap; one prompt < 0.1 ms;
open < 10 ms; looking through 10 000 segments < 1 s. DIR should lie on the disk that is meant, not in memory.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from harness import alternate, print_table, ratio

from mizarr.store import PackedTokens, RunKey, open_store
from mizarr.store.files import LocalFolder
from mizarr.store.runs import shards
from mizarr.store.runs.entries import ArraySpec, Entry
from mizarr.store.runs.shards import DTYPES
from mizarr.store.sealed import sealed

HIDDEN, LAYERS, PROMPT = 1024, 4, 64
SEGMENTS = 4
RESUMED = 10_000


def spec(dtype: str) -> ArraySpec:
    dims = ("layer", "token", "hidden")
    return ArraySpec("resid_post", "blocks.*.hook_resid_post", dims, {"hidden": HIDDEN}, dtype, LAYERS)


def entry_in(root: Path, tokens: PackedTokens, dtype: str, segment_tokens: int, durability: str) -> Entry:
    run = RunKey("model", tokens.digest, "none")
    folder = LocalFolder(root, durability)
    return Entry.create(folder, run, tokens, [spec(dtype)], segment_tokens=segment_tokens)


def write_raw(path: Path, array: np.ndarray[Any, Any], *, sync: bool) -> None:
    """The limit: the same bytes in the same number of files, nothing else."""
    path.mkdir(parents=True)
    for n, part in enumerate(array.reshape(LAYERS * SEGMENTS, -1)):
        handle = os.open(path / str(n), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.writev(handle, [part.view("u1").data])
        if sync:
            os.fsync(handle)
        os.close(handle)


@contextmanager
def undigested() -> Iterator[None]:
    """Shards without their digest, to see what the digest costs."""

    with patch.object(shards, "content_digest", lambda *_: "sha256:" + "0" * 64):
        yield


def writers(root: Path, array: np.ndarray[Any, Any], dtype: str) -> dict[str, Callable[[], Any]]:
    """Ways to write `array` [layer, segment, token, hidden], and a sweep, not to time removal."""
    segment_tokens = array.shape[2]
    tokens = PackedTokens(np.ones(segment_tokens * SEGMENTS, np.int32), np.array([segment_tokens * SEGMENTS]))

    number = itertools.count()

    def own(durability: str) -> None:
        entry = entry_in(root / str(next(number)), tokens, dtype, segment_tokens, durability)
        for n in range(SEGMENTS):
            entry.write_segment(n, {("resid_post", layer): array[layer, n] for layer in range(LAYERS)})

    def bare() -> None:
        with undigested():
            own("process")

    return {
        "sweep": lambda: shutil.rmtree(root, ignore_errors=True),
        "raw": lambda: write_raw(root / str(next(number)), array, sync=False),
        "raw synced": lambda: write_raw(root / str(next(number)), array, sync=True),
        "own, no digest": bare,
        "own, digest": lambda: own("process"),
        "own, digest, synced": lambda: own("disk"),
    }


def readers(entry: Entry, raw: np.memmap[Any, Any]) -> dict[str, Callable[[], Any]]:
    """Ways to read layer by layer: everything, 4096 random tokens, one prompt."""
    rng = np.random.default_rng(0)
    length = entry.segment_tokens
    picked = np.sort(rng.integers(0, length * SEGMENTS, 4096))
    where = [(n, picked[picked // length == n] - n * length) for n in range(SEGMENTS)]
    out = np.empty((length, HIDDEN), raw.dtype)
    first = int(rng.integers(0, length - PROMPT))

    def own(layer: int, n: int) -> Any:
        return entry.shard("resid_post", layer, n)

    def own_scan(entry: Entry) -> None:
        for layer in range(LAYERS):
            for n in range(SEGMENTS):
                for at, block in entry.shard("resid_post", layer, n).blocks(0, length):
                    out[at : at + len(block)] = block

    def first_scan() -> None:
        """Of an entry just opened, and so of chunks nobody has checked."""
        own_scan(Entry.load(entry.folder, entry.path, entry.tokens))

    def first_memmap() -> None:
        fresh = np.memmap(str(raw.filename), raw.dtype, "r", shape=raw.shape)
        scan(lambda layer, n: fresh[layer, n])

    def mapped(layer: int, n: int) -> Any:
        return raw[layer, n]

    def scan(shard: Callable[[int, int], Any]) -> None:
        for layer in range(LAYERS):
            for n in range(SEGMENTS):
                np.copyto(out, shard(layer, n))

    def gather(shard: Callable[[int, int], Any]) -> None:
        for layer in range(LAYERS):
            for n, rows in where:
                shard(layer, n)[rows]

    def prompt(shard: Callable[[int, int], Any]) -> None:
        shard(1, 0)[first : first + PROMPT].copy()

    return {
        "memmap scan": lambda: scan(mapped),
        "own scan": lambda: own_scan(entry),
        "memmap scan, just mapped": first_memmap,
        "own scan, chunks checked": first_scan,
        "memmap tokens": lambda: gather(mapped),
        "own tokens": lambda: gather(own),
        "memmap prompt": lambda: prompt(mapped),
        "own prompt": lambda: prompt(own),
    }


def make_records(root: Path) -> Callable[[], Any]:
    """A harvest of many segments, of which only the records are there; returns what looks through it."""
    tokens = PackedTokens(np.ones(RESUMED, np.int32), np.array([RESUMED]))
    entry = entry_in(root, tokens, "bfloat16", 1, "process")
    cells = [("resid_post", layer) for layer in range(LAYERS)]
    layout = entry.layout("resid_post")
    folder = root / entry.path / "seg"
    folder.mkdir()
    for n in range(RESUMED):
        files = {layout.path(*cell, n): [layout.file_bytes(1), "sha256:" + "0" * 64] for cell in cells}
        cell_names = [f"resid_post.{layer}" for layer in range(LAYERS)]
        # "plain" is empty: no shard is compressed.
        record = {"segment": n, "cells": cell_names, "files": files, "plain": {}}
        (folder / f"{n}.pass.json").write_bytes(sealed(record))

    def look() -> None:
        assert entry_in(root, tokens, "bfloat16", 1, "process").missing(cells) == {}

    return look


def make_run(root: Path, array: np.ndarray[Any, Any], dtype: str) -> Entry:
    """A published run in a store."""
    tokens = PackedTokens(
        np.ones(array.shape[2] * SEGMENTS, np.int32), np.full(array.shape[2] * SEGMENTS // PROMPT, PROMPT)
    )
    run = RunKey("model", tokens.digest, "none")
    entry = open_store(root, durability="process").create_entry(
        run, tokens, [spec(dtype)], segment_tokens=array.shape[2]
    )
    for n in range(SEGMENTS):
        entry.write_segment(n, {("resid_post", layer): array[layer, n] for layer in range(LAYERS)})
    entry.publish([("resid_post", layer) for layer in range(LAYERS)])
    return entry


def reopen(root: Path, entry: Entry) -> Any:
    """From nothing to a labelled dataset, as the next session would."""
    return open_store(root, mode="r").entry(entry.run).open(chunks=None)


def rates(
    seconds: dict[str, list[float]], size: int, pairs: list[tuple[str, str, str]]
) -> list[tuple[str, ...]]:
    """Rows: name, median seconds, MB/s, ratio to its limit, target."""
    rows: list[tuple[str, ...]] = []
    for name, limit, target in pairs:
        middle = statistics.median(seconds[name])
        share = f"{ratio(seconds[limit], seconds[name]):.2f}" if limit else "1"
        rows.append((name, f"{middle:.3f}", f"{size / middle / 1e6:,.0f}", share, target))
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, default=None)
    wanted = parser.parse_args()
    native = DTYPES[wanted.dtype]
    # A power of two tokens a segment, as the store chooses them.
    segment_tokens = (
        1 << ((wanted.mib << 20) // (LAYERS * SEGMENTS * HIDDEN * native.itemsize)).bit_length() - 1
    )
    rng = np.random.default_rng(0)
    array = rng.standard_normal((LAYERS, SEGMENTS, segment_tokens, HIDDEN), "f4").astype(native)
    title = f"{array.nbytes / 1e6:,.0f} MB of {wanted.dtype}, shards of {array[0, 0].nbytes >> 20} MiB"
    with tempfile.TemporaryDirectory(dir=wanted.folder) as name:
        root = Path(name)
        written = alternate(writers(root / "written", array, wanted.dtype), wanted.rounds)
        entry = make_run(root / "opened", array, wanted.dtype)
        array.tofile(root / "raw")
        time.sleep(3)  # what was written within two seconds is checked each time it is read
        raw = np.memmap(root / "raw", native, "r", shape=array.shape)
        read = alternate(readers(entry, raw), wanted.rounds)
        look = make_records(root / "resumed")
        opened = alternate({"open": lambda: reopen(root / "opened", entry), "resume": look}, wanted.rounds)
    table = rates(
        written,
        array.nbytes,
        [
            ("raw", "", "limit"),
            ("own, no digest", "raw", ">= 0.8"),
            ("own, digest", "raw", ""),
            ("raw synced", "", "limit"),
            ("own, digest, synced", "raw synced", ">= 0.8"),
        ],
    )
    print_table(f"Writing {title}", ("", "s", "MB/s", "of limit", "target"), table)
    rows = 4096 * LAYERS * HIDDEN * native.itemsize
    table = [
        *rates(read, array.nbytes, [("memmap scan", "", "limit"), ("own scan", "memmap scan", ">= 0.9")]),
        *rates(
            read,
            array.nbytes,
            [
                ("memmap scan, just mapped", "", "limit"),
                ("own scan, chunks checked", "memmap scan, just mapped", ""),
            ],
        ),
        *rates(read, rows, [("memmap tokens", "", "limit"), ("own tokens", "memmap tokens", ">= 0.3")]),
    ]
    print_table(f"Reading {title}", ("", "s", "MB/s", "of limit", "target"), table)
    milli = {name: f"{statistics.median(times) * 1e3:,.3f}" for name, times in {**read, **opened}.items()}
    table = [
        (f"{PROMPT}-token prompt, one layer, memmap", milli["memmap prompt"], "limit"),
        (f"{PROMPT}-token prompt, one layer, own", milli["own prompt"], "< 0.1"),
        ("open as labelled dataset", milli["open"], "< 10"),
        (f"look through {RESUMED:,} segments", milli["resume"], "< 1000"),
    ]
    print_table("Latencies", ("", "ms", "target"), table)


if __name__ == "__main__":
    main()
