"""Attribution graphs against circuit-tracer, side by side: seconds of processor and of wall clock.

    python tests/benchmarks/bench_graph.py --peer PYTHON [--rounds 7] [--threads 2]

The medium case of the reference circuits: a random Llama of 6 layers, d_model 128, 8 heads on 4 key heads,
512 tokens of vocabulary; a CLT of 512 JumpReLU features per layer of which 1.5 % fire; 48 tokens. Both build
the whole graph of the same prompt from a loaded model and an opened dictionary: circuit-tracer in memory, at
batch sizes 16, 64 and 256, in an interpreter of its own (PYTHON: an environment with circuit-tracer 0.5.0,
transformer-lens 3.2, transformers 4.57 and mizarr's requirements); mizarr into an empty store, and, beside
it, the arithmetic alone. They take turns. Target: mizarr into a store within 0.33 of the processor time of
circuit-tracer's fastest batch size.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 256,
    "vocab_size": 512,
}
FEATURES, DENSITY, TOKENS, BATCHES = 512, 0.015, 48, (16, 64, 256)
ROOT = Path(__file__).parents[2]
Times = tuple[float, float]
"""Seconds of processor and of wall clock."""


def prompt() -> list[int]:
    """Token ids, a special one first."""
    rng = random.Random(57)
    return [0, *(rng.randrange(3, SIZES["vocab_size"]) for _ in range(1, TOKENS))]


def timed(work: Callable[[], Any]) -> tuple[Times, Any]:
    """Times of one call, and what it gave."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = work()
    return (time.process_time() - cpu, time.perf_counter() - wall), found


def helpers() -> Any:
    """The modules that make models and transcoders, which are the tests' own."""
    sys.path.insert(0, str(ROOT))
    import tests.stages.graph.circuit_models as models
    import tests.stages.graph.random_transcoders as transcoders

    return models, transcoders


def serve(folder: Path, threads: int) -> None:
    """Be the peer: for every batch size read from stdin one graph, its times as a line of JSON."""
    import torch

    torch.set_num_threads(threads)
    models, _ = helpers()
    from circuit_tracer import attribute

    model = models.tracer(folder / "model", folder / "clt")
    ids = torch.tensor(prompt())
    print("ready", flush=True)
    for line in sys.stdin:
        batch = int(line)
        times, graph = timed(partial(attribute, ids, model, batch_size=batch, verbose=False))
        told = {
            "times": times,
            "features": len(graph.selected_features),
            "nodes": len(graph.adjacency_matrix),
        }
        print(json.dumps(told), flush=True)


class Peer:
    """circuit-tracer in an interpreter of its own."""

    def __init__(self, python: str, folder: Path, threads: int) -> None:
        command = [python, "-W", "ignore", __file__, "--serve", str(folder), "--threads", str(threads)]
        paths = os.pathsep.join([str(ROOT / ".venv" / "src"), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"},
        )
        if self._line() != "ready":
            raise SystemExit(f"{python} has no working circuit-tracer; run {' '.join(command)} to see why")

    def graph(self, batch: int) -> dict[str, Any]:
        """One graph at a batch size."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{batch}\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._line())
        return found

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def main() -> None:
    """Make the case, run the rounds, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", help="interpreter with circuit-tracer; without it mizarr alone is timed")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve, args.threads)
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), args.peer, args.rounds, args.threads)


def compare(folder: Path, python: str | None, rounds: int, threads: int) -> None:
    """Everyone in turn, round by round, after one that is thrown away."""
    import torch

    torch.set_num_threads(threads)
    models, transcoders = helpers()
    from harness import print_table

    import mizarr
    from mizarr.stages.graph.graph import attribution_graph, graph_node
    from mizarr.stages.graph.prepare import prepare

    model = mizarr.Model.from_pretrained(models.save_model(folder / "model", "llama", 55, **SIZES))
    made = transcoders.save_random_transcoders(
        folder / "clt", model, "clt-jumprelu", seed=56, features=FEATURES, density=DENSITY
    )
    clt = mizarr.Dictionary.from_pretrained(made)
    options = graph_node(model, clt, prompt()).options

    def stored(number: int) -> Any:
        store = mizarr.open_store(folder / f"store-{number}")
        return attribution_graph(model, clt, prompt(), store=store)

    def arithmetic() -> Any:
        import numpy as np

        prepared = prepare(model, clt, prompt(), options, memory=1 << 30)
        return prepared.rows(np.arange(prepared.n_features + prepared.n_logits))

    peer = None if python is None else Peer(python, folder, threads)
    times: dict[str, list[Times]] = {}
    for number in range(rounds + 1):
        found, graph = timed(partial(stored, number))
        turn = {"mizarr, into a store": found, "mizarr, arithmetic alone": timed(arithmetic)[0]}
        for batch in BATCHES if peer is not None else ():
            assert peer is not None
            told = peer.graph(batch)
            cpu, wall = told["times"]
            turn[f"circuit-tracer, batch {batch}"] = cpu, wall
            assert (told["features"], told["nodes"]) == (graph.counts.features, graph.counts.nodes)
        for name, once in turn.items():
            times.setdefault(name, []).extend([once] if number else [])
    if peer is not None:
        peer.close()
    own = times["mizarr, into a store"]
    lines = []
    for name, seconds in times.items():
        ratio = statistics.median(mine[0] / theirs[0] for mine, theirs in zip(own, seconds, strict=True))
        cpu, wall = (statistics.median(each[i] for each in seconds) for i in range(2))
        lines.append((name, f"{cpu:.2f}", f"{wall:.2f}", "" if seconds is own else f"{ratio:.2f}"))
    title = (
        f"Graph of {graph.counts.features} features, {graph.counts.nodes} nodes, {TOKENS} tokens; {rounds} "
        f"rounds, {threads} threads; target: 0.33 of circuit-tracer's processor time"
    )
    print_table(title, ("", "CPU seconds", "wall seconds", "stored / this, CPU"), lines)


if __name__ == "__main__":
    main()
