"""Pages of a whole dictionary: features a second from stored sparse codes to files, and memory.

    python tests/benchmarks/bench_feature_pages.py [--features 25000] [--tokens 1000000] [--active 32]

Synthetic: activations of width 64 and a random top-k dictionary are not encoded here (that is the forward
pass' and `encode_features`' business), but written as its codes would be: at every token `active` distinct
features, whose frequencies follow a power law, with exponential activations; prompts of 128 random ids of a
vocabulary of 32,768; a decoder and an unembedding of random normals, width 64. Counted are, one after
another, all stages of the pages - statistics, examples of every strength, windows, partners, neighbours,
logits - from the stored codes into an empty store, and writing every page as a file; the import of torch is
in the first stage that needs it. Not counted: the forward pass, encoding, and start of the process.
Partners are counted over a sample of tokens, as the pages say. Wall time is that of a machine which others
may use; processor seconds tell what it would be on a quiet one, and are themselves larger beside others.
Target: 1,000 features a second, in at most 1 GB of resident memory, of the whole process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

WIDTH, VOCABULARY, PROMPT = 64, 32_768, 128


def codes(features: int, tokens: int, active: int) -> Any:
    """What `encode_features` gives for a corpus, drawn; lazy, a block of tokens at a time."""
    import dask.array as da
    import xarray as xr

    step = 8192
    frequency = 1 / (np.arange(features) + 10.0) ** 0.6
    bounds = (frequency / frequency.sum()).cumsum()

    def drawn(block_info: Any = None) -> Any:
        start, stop = block_info[None]["array-location"][0]
        rng = np.random.default_rng(int(start))
        rows = (stop - start) // active
        found = np.searchsorted(bounds, rng.random((rows, active + active // 2))).clip(max=features - 1)
        found.sort(axis=1)
        again = np.diff(found, axis=1, prepend=-1) == 0
        for row in np.flatnonzero(
            (~again).sum(1) < active
        ):  # too few that differ: as many neighbours as it takes
            found[row, :active], again[row] = np.arange(active), False
        kept = np.cumsum(~again, axis=1)
        return found[(kept <= active) & ~again].astype(np.int32)

    def strengths(block_info: Any = None) -> Any:
        start, stop = block_info[None]["array-location"][0]
        return np.random.default_rng([1, int(start)]).exponential(size=stop - start).astype(np.float32) + 0.01

    chunks = tuple(active * min(step, tokens - start) for start in range(0, tokens, step))
    at = np.arange(tokens)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, tokens)
    return xr.Dataset(
        {
            "token_ptr": ("edge", np.arange(tokens + 1) * active),
            "feature": (
                "active",
                da.map_blocks(drawn, chunks=(chunks,), dtype=np.int32, meta=np.empty(0, np.int32)),
            ),
            "value": (
                "active",
                da.map_blocks(strengths, chunks=(chunks,), dtype=np.float32, meta=np.empty(0, np.float32)),
            ),
        },
        coords={
            "prompt": ("token", at // PROMPT),
            "position": ("token", at % PROMPT),
            "token_id": ("token", ids.astype(np.int32)),
            "layer": 0,
        },
        attrs={"n_features": features, "zero_positions": 0},
    )


def write_dictionary(folder: Path, features: int) -> None:
    """A SAELens directory of that many features."""
    import torch
    from safetensors.torch import save_file

    rng = torch.Generator().manual_seed(0)
    folder.mkdir()
    weights = {
        name: torch.randn(shape, generator=rng)
        for name, shape in {
            "W_enc": (WIDTH, features),
            "W_dec": (features, WIDTH),
            "b_enc": (features,),
            "b_dec": (WIDTH,),
        }.items()
    }
    save_file(weights, folder / "sae_weights.safetensors")
    about = {
        "hook_name": "blocks.0.hook_resid_post",
        "model_name": "synthetic",
        "sae_lens_version": "6.54.12",
    }
    (folder / "cfg.json").write_text(
        json.dumps(
            {
                "architecture": "topk",
                "k": 64,
                "d_in": WIDTH,
                "d_sae": features,
                "dtype": "float32",
                "apply_b_dec_to_input": False,
                "normalize_activations": "none",
                "reshape_activations": "none",
                "metadata": about,
            }
        )
    )


def prepare(folder: Path, features: int, tokens: int, active: int) -> None:
    """A store with codes, a readout, and a dictionary, in a process of its own."""
    import mizarr
    from mizarr.pipeline import SourceNode, run
    from mizarr.stages.logits.readout import readout

    store = mizarr.open_store(folder / "store", durability="process")
    rng = np.random.default_rng(3)
    unembed = rng.standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
    head = readout(
        unembed, np.ones(WIDTH), norm="rms", eps=1e-6, vocabulary=[f" t{i}" for i in range(VOCABULARY)]
    )
    asked = {"features": features, "tokens": tokens, "active": active}
    run(
        [SourceNode("codes", 1, asked, lambda: codes(**asked)), SourceNode("head", 1, {}, lambda: head)],
        store,
        quiet=True,
    )
    write_dictionary(folder / "dictionary", features)


def measure(folder: Path, features: int, tokens: int, active: int, threads: int) -> None:
    """Print seconds of each step, and the most this process, which does nothing else, has held of memory."""
    import xarray as xr

    import mizarr
    from mizarr.pipeline import SourceNode, run
    from mizarr.stages.features.dictionary import Dictionary
    from mizarr.stages.features.pages.nodes import page_nodes
    from mizarr.workflows.features.page_files import PageFiles, PageMaterial

    store = mizarr.open_store(folder / "store", durability="process")
    asked = {"features": features, "tokens": tokens, "active": active}
    encoded, head = (
        SourceNode(name, 1, given, xr.Dataset) for name, given in (("codes", asked), ("head", {}))
    )
    dictionary = Dictionary.from_pretrained(folder / "dictionary")
    nodes = page_nodes(dictionary, encoded=encoded, layer=0, readout=head)
    begin = time.perf_counter(), time.process_time()

    def timed(name: str, work: Any) -> None:
        start = time.perf_counter(), time.process_time()
        work()
        wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
        print(f"{name:12} {wall:6.1f} s, {cpu:6.1f} s of processor, at most {peak():5.0f} MB")

    for name, node in nodes.items():
        timed(name, lambda node=node: run(node, store, threads=threads, quiet=True))
    results = {name: node.open(store) for name, node in nodes.items()}
    words = head.open(store)["token"].values.tolist()
    files = PageFiles(PageMaterial(results, encoded.open(store), words))
    timed("files", lambda: files.write(folder / "pages"))
    size = sum(path.stat().st_size for path in (folder / "pages").rglob("*.*"))
    wall, cpu = time.perf_counter() - begin[0], time.process_time() - begin[1]
    print(
        f"{features:,} features of {tokens:,} tokens, {active} active at each: {wall:.1f} s, "
        f"{cpu:.1f} s of processor"
    )
    print(
        f"{features / wall:,.0f} features / s (target 1,000), {features / cpu:,.0f} / s of processor, "
        f"at most {peak():,.0f} MB (target 1,000), "
        f"{size / 1e6:.0f} MB of pages"
    )


def peak() -> float:
    """The most resident memory of this process, MB."""
    from mizarr.pipeline.memory import Memory

    return (Memory.ever().resident or 0) / 1e6


def main() -> None:
    """Prepare in one process, measure in another."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--features", type=int, default=25_000)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--active", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes = given.features, given.tokens, given.active
    if given.measure:
        measure(given.measure, *sizes, given.threads)
        return
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), *sizes)
        command = [sys.executable, __file__, "--measure", name, "--threads", str(given.threads)]
        told = zip(("--features", "--tokens", "--active"), map(str, sizes), strict=True)
        subprocess.run([*command, *(word for pair in told for word in pair)], check=True)


if __name__ == "__main__":
    main()
