"""Logit attribution and PCA over a stored corpus against the same arithmetic in memory, and peak memory.

    python tests/benchmarks/bench_offline.py [--tokens 1000000] [--hidden 512] [--rounds 7] [--folder DIR]

Attribution: shares of one layer's output, and of its heads, in the logit of each token's successor minus that
of another token ("a different target everywhere": directions are gathered, not broadcast). PCA: six
components of one layer. The limit is plain numpy, block by block, on one array in memory; beside it the
stage on that array, and the stage on the stored corpus, in alternation in one process. Targets: stored >=
0.8 of the limit, and under 600 MB resident, measured in a process of its own that opens the store and runs
the stage (mapped pages of the store count while they are mapped).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from harness import alternate, print_table, ratio

from mizarr.stages.geometry.pca import pca
from mizarr.stages.logits.attribution import component_attribution
from mizarr.stages.logits.attribution_units import head_attribution
from mizarr.stages.logits.readout import readout
from mizarr.store import PackedTokens, RunKey, open_store
from mizarr.store.runs.entries import ArraySpec, Entry

VOCAB, HEADS, PROMPT, SEGMENT = 4096, 8, 500, 1 << 13
COMPONENTS = 6
BLOCK = 8192
"""Tokens the plain numpy takes at a time: small enough for the cache, large enough for the products."""


def entry_of(folder: Path, tokens: int, hidden: int) -> Entry:
    """Random states of one layer, stored as attention output and as z, and the embedding."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB, tokens)
    packed = PackedTokens.from_lists([ids[at : at + PROMPT].tolist() for at in range(0, tokens, PROMPT)])
    specs = [
        ArraySpec("embed", "hook_embed", ("token", "hidden"), {"hidden": hidden}, "float32", None),
        ArraySpec(
            "attn_out",
            "blocks.*.hook_attn_out",
            ("layer", "token", "hidden"),
            {"hidden": hidden},
            "float32",
            1,
        ),
        ArraySpec(
            "z",
            "blocks.*.attn.hook_z",
            ("layer", "token", "head", "d_head"),
            {"head": HEADS, "d_head": hidden // HEADS},
            "float32",
            1,
        ),
    ]
    run = RunKey("model", packed.digest, "none")
    store = open_store(folder)
    entry = store.create_entry(run, packed, specs, segment_tokens=SEGMENT)
    cells = [("embed", None), ("attn_out", 0), ("z", 0)]
    for n, part in enumerate(entry.segments):
        rows = rng.standard_normal((len(part), hidden), dtype=np.float32)
        heads = rows.reshape(len(part), HEADS, -1)
        entry.write_segment(n, dict(zip(cells, (rows, rows, heads), strict=True)))
    entry.publish(cells)
    return entry


def told(hidden: int, tokens: int) -> dict[str, Any]:
    """Divisors, targets, other tokens and a readout, the same in every process."""
    rng = np.random.default_rng(1)
    table = readout(
        rng.standard_normal((VOCAB, hidden), dtype=np.float32), np.ones(hidden), norm="rms", eps=1e-6
    )
    ids = (xr.DataArray(rng.integers(0, VOCAB, tokens), dims="token") for _ in range(2))
    scale = xr.DataArray(rng.uniform(1, 2, tokens).astype(np.float32), dims="token")
    return {"scale": scale, "targets": next(ids), "against": next(ids), "readout": table}


def weights_of(hidden: int) -> xr.Dataset:
    """An output projection."""
    rng = np.random.default_rng(2)
    shape = (1, HEADS, hidden // HEADS, hidden)
    matrix = rng.standard_normal(shape, dtype=np.float32)
    dims = ("layer", "head", "d_head", "hidden")
    return xr.Dataset({"W_O": (dims, matrix)}, coords={"layer": [0]}, attrs={"norm": "rms"})


def layers(states: xr.Dataset, given: dict[str, Any]) -> xr.Dataset:
    """Shares of the layer's output; read three times, as embedding and as MLP output too."""
    found: xr.Dataset = component_attribution(
        states["embed"], states["attn_out"], mlp_out=states["attn_out"], **given
    )
    return found


def heads(states: xr.Dataset, given: dict[str, Any]) -> xr.Dataset:
    """Shares of the heads."""
    found: xr.Dataset = head_attribution(states["z"], weights=weights_of(states.sizes["hidden"]), **given)
    return found


def components(states: xr.Dataset, given: dict[str, Any]) -> xr.Dataset:
    """Principal components of the layer's output."""
    return pca(states["attn_out"].isel(layer=0), n_components=COMPONENTS)


def directions(given: dict[str, Any], here: slice) -> np.ndarray[Any, Any]:
    """What the states of a block are multiplied by, in plain numpy."""
    unembed = given["readout"]["unembed"].values
    found: np.ndarray[Any, Any] = unembed[given["targets"].values[here]]
    found -= unembed[given["against"].values[here]]
    found /= given["scale"].values[here, None]
    return found


def plain_layers(rows: np.ndarray[Any, Any], given: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The arithmetic of `layers`."""
    out = np.empty((3, len(rows)), np.float32)
    for start in range(0, len(rows), BLOCK):
        here = slice(start, start + BLOCK)
        along = directions(given, here)
        for part in out:
            np.einsum("th,th->t", rows[here], along, out=part[here])
    return out


def plain_heads(
    rows: np.ndarray[Any, Any], given: dict[str, Any], matrix: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """The arithmetic of `heads`."""
    out = np.empty((len(rows), HEADS), np.float32)
    for start in range(0, len(rows), BLOCK):
        here = slice(start, start + BLOCK)
        along = directions(given, here) @ matrix.T
        block = rows[here].reshape(len(along), HEADS, -1)
        np.einsum("thd,thd->th", block, along.reshape(block.shape), out=out[here])
    return out


def plain_components(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The arithmetic of `components`."""
    mean = rows.mean(0, dtype=np.float64)
    products = np.zeros((rows.shape[1],) * 2)
    for start in range(0, len(rows), BLOCK):
        block = rows[start : start + BLOCK]
        products += block.T @ block
    values, vectors = np.linalg.eigh(products - len(rows) * np.outer(mean, mean))
    return vectors[:, values.argsort()[::-1][:COMPONENTS]]


def peak(folder: Path, which: str, tokens: int, hidden: int) -> int:
    """Most bytes resident in a fresh process that opens the store and runs a stage over all of it."""
    script = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}]
import bench_offline as bench
states = bench.opened({str(folder)!r})
given = bench.told({hidden}, {tokens})
bench.{which}(states, given)
print(int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]) << 10)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def opened(folder: str | Path) -> xr.Dataset:
    """The one entry of the store."""
    (entry,) = open_store(folder, mode="r").entries()
    return entry.open()


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        entry_of(Path(folder) / "store", args.tokens, args.hidden)
        compare(Path(folder) / "store", args.tokens, args.hidden, args.rounds)


def compare(folder: Path, tokens: int, hidden: int, rounds: int) -> None:
    """Contestants of each question in alternation, then their memory."""
    stored = opened(folder)
    held = stored[["embed", "attn_out"]].load()
    held = held.assign(z=stored["z"].copy(data=held["attn_out"].values.reshape(stored["z"].shape)))
    rows = held["attn_out"].values[0]
    given = told(hidden, tokens)
    matrix = weights_of(hidden)["W_O"].values.reshape(-1, hidden)
    questions: dict[str, dict[str, Callable[[], Any]]] = {
        "layers": {
            "numpy, in memory (limit)": lambda: plain_layers(rows, given),
            "stage, in memory": lambda: layers(held, given),
            "stage, stored": lambda: layers(stored, given),
        },
        "heads": {
            "numpy, in memory (limit)": lambda: plain_heads(rows, given, matrix),
            "stage, in memory": lambda: heads(held, given),
            "stage, stored": lambda: heads(stored, given),
        },
        "components": {
            "numpy, in memory (limit)": lambda: plain_components(rows),
            "stage, in memory": lambda: components(held, given),
            "stage, stored": lambda: components(stored, given),
        },
    }
    lines = []
    for question, runs in questions.items():
        seconds = alternate(runs, rounds)
        limit = seconds[next(iter(runs))]
        for name, own in seconds.items():
            mb = f"{peak(folder, question, tokens, hidden) / 1e6:.0f}" if name == "stage, stored" else ""
            told_ratio = f"{ratio(limit, own):.2f}"
            lines.append((f"{question}: {name}", f"{statistics.median(own):.2f}", told_ratio, mb))
    title = (
        f"Stages over {tokens} x {hidden}, {rounds} rounds; targets: stored at 0.8 of the limit, under 600 MB"
    )
    print_table(title, ("", "seconds", "of the limit", "peak MB"), lines)


if __name__ == "__main__":
    main()
