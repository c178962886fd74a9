"""A store of a thousand runs and a million tokens in a browser: how long pages take, how much memory.

    python tests/benchmarks/bench_browse.py [--runs 1000] [--tokens 1000000] [--hidden 256] [--folder DIR]

One run has nearly all tokens, the others two prompts each; every tenth has a result made from it. `mizarr
browse` runs in a process of its own and is asked over HTTP: the first page at once, while the store is still
read, then, when all of it was, a page of each kind once and five times more. Targets: the first page under
0.5 s, any page under 1 s, resident memory under 500 MB. Start: from the command to the address it prints.
"""

from __future__ import annotations

import argparse
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from urllib.parse import urljoin

import numpy as np
import xarray as xr
from harness import print_table

from mizarr.store import PackedTokens, ResultKey, RunKey, Store, open_store
from mizarr.store.runs.entries import ArraySpec

LAYERS, VOCAB, PROMPT = 4, 5000, 40
WORDS = ("the", "of", "and", "to", "in", "that", "was", "his", "he", "it", "with", "is", "for", "as", "had")


def stored_run(store: Store, n_prompts: int, hidden: int, seed: int) -> str:
    """Content of the first layer of a run of random states."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCAB, (n_prompts, PROMPT)).tolist()
    texts = [" ".join(WORDS[i % len(WORDS)] for i in row) for row in ids]
    tokens = PackedTokens.from_lists(ids, texts)
    spec = ArraySpec(
        "resid_post", "blocks.*.hook_resid_post", ("layer", "token", "hidden"), {"hidden": hidden}, "float16",
        LAYERS,
    )  # fmt: skip
    entry = store.create_entry(
        RunKey(f"model {seed % 3}", tokens.digest, "none"),
        tokens,
        [spec],
        attrs={"model": f"model-{seed % 3}", "tokenizer": "sha256:words"},
    )
    cells = [("resid_post", layer) for layer in range(LAYERS)]
    for n, part in enumerate(entry.segments):
        rows = rng.standard_normal((len(part), hidden), dtype=np.float32).astype(np.float16)
        entry.write_segment(n, dict.fromkeys(cells, rows))
    return entry.publish(cells)[0].content


def fill(folder: Path, runs: int, tokens: int, hidden: int) -> None:
    """The store that is browsed."""
    store = open_store(folder, durability="process")
    store.put_vocabulary("sha256:words", [f" {WORDS[i % len(WORDS)]}" for i in range(VOCAB)])
    small = 2
    stored_run(store, tokens // PROMPT - small * (runs - 1), hidden, 0)
    for number in range(1, runs):
        content = stored_run(store, small, hidden, number)
        if number % 10 == 0:
            values = xr.DataArray(
                np.arange(12.0).reshape(LAYERS, 3), dims=("layer", "component"), name="share"
            )
            key = ResultKey("pca", 1, {"n_components": 3, "number": number}, {"states": content})
            store.put_result(key, values.to_dataset())


def fetched(address: str) -> tuple[float, str]:
    """Seconds a page took, and its text."""
    start = time.perf_counter()
    with urllib.request.urlopen(address) as answer:
        text = answer.read().decode()
    return time.perf_counter() - start, text


def resident(pid: int) -> int:
    """Most bytes a process ever held."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0]) << 10


def main() -> None:
    """Fill, browse, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--folder", type=Path, help="keep the store there, and take the one that is there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as own:
        folder = (args.folder or Path(own)) / "store"
        if not (folder / "store.json").exists():
            fill(folder, args.runs, args.tokens, args.hidden)
        browse(folder, args.runs, args.tokens)


def browse(folder: Path, runs: int, tokens: int) -> None:
    """Ask for a page of every kind."""
    begun = time.perf_counter()
    code = "import sys; from mizarr.workflows.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "browse", "--no-open", "--store", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        index = server.stdout.readline().strip()
        start = time.perf_counter() - begun
        try:
            lines = measured(index)
            peak = resident(server.pid)
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0
    title = f"{runs:,} runs, {tokens:,} tokens; targets: first page 0.5 s, any page 1 s, 500 MB"
    told = [("start", f"{start:.2f}", ""), *lines, ("resident at most, MB", f"{peak / 1e6:.0f}", "")]
    print_table(title, ("", "first, s", "later, s"), told)


def measured(index: str) -> list[tuple[str, str, str]]:
    """Seconds of a page of every kind: asked for first, and the median of five after that."""
    begun = time.perf_counter()
    first = {"store": fetched(index)}
    while "so far" in fetched(index)[1]:
        time.sleep(0.1)
    lines = [("the whole store was read after", f"{time.perf_counter() - begun:.2f}", "")]
    first["runs, last page"] = fetched(urljoin(index, "runs/10.html"))
    # The large run was written first, and so is the last of those used last.
    run = f"run/{re.findall(r'run/([0-9a-f]{64})', first['runs, last page'][1])[-1]}"
    key = re.findall(r"result/([0-9a-f]{64})", fetched(index)[1])[0]
    pages = {
        "store": "index.html",
        "runs, last page": "runs/10.html",
        "results": "results/1.html",
        "large run": f"{run}/prompts/1.html",
        "its last prompts": f"{run}/prompts/400.html",
        "prompt": f"{run}/prompt/12345/1.html",
        "token": f"{run}/token/500000.html",
        "result": f"result/{key}.html",
        "search, rare": "search.html?q=zebra",
        "search, common": "search.html?q=the+of",
    }
    for name, page in pages.items():
        address = urljoin(index, page)
        once = (first.get(name) or fetched(address))[0]
        later = statistics.median(fetched(address)[0] for _ in range(5))
        lines.append((name, f"{once:.3f}", f"{later:.3f}"))
    return lines


if __name__ == "__main__":
    main()
