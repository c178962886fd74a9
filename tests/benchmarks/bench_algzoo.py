"""The RNN of AlgZoo against the loop anybody would write, in alternation in one process; and 1e8 samples in
memory.

    python tests/benchmarks/bench_algzoo.py [--hidden 16] [--steps 10] [--samples 200000] [--rounds 7]
    [--hundred-million]

Prints the median over rounds of the loop's time over ours (1.0 = as fast; the target is 0.8), for the passes
alone. --hundred-million counts the accuracy of a network of that size on 1e8 samples into a store, and prints
seconds and the peak of the process; minutes.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import alternate, print_table, ratio

from mizarr.pipeline import run
from mizarr.stages.algzoo.accuracy import accuracy_of, sampled_accuracy_node
from mizarr.stages.algzoo.files import write_tensors
from mizarr.stages.algzoo.forward import Rnn
from mizarr.stages.algzoo.model import load_model
from mizarr.stages.algzoo.networks import RnnShape
from mizarr.store import open_store


def drawn_tensors(hidden: int, steps: int) -> dict[str, np.ndarray]:
    """Weights of a random network of this size."""
    rng = np.random.default_rng(0)
    return {
        name: (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        for name, shape in RnnShape(hidden, steps).tensors.items()
    }


def contestants(tensors: dict[str, np.ndarray], steps: int, samples: int) -> dict[str, Callable[[], Any]]:
    """The plain loop first, then ours, on the same samples."""
    ih, hh, oh = (torch.from_numpy(held) for held in tensors.values())
    x = torch.randn(samples, steps)
    network = Rnn(tensors, RnnShape(len(hh), steps), torch.float32)

    def loop() -> torch.Tensor:
        h = torch.zeros(len(x), len(hh))
        for step in range(steps):
            h = torch.relu(x[:, step, None] * ih[:, 0] + h @ hh.T)
        return h @ oh.T

    assert torch.allclose(loop(), network.outputs(x), rtol=1e-5, atol=1e-5)
    return {"a loop by hand": loop, "Rnn.outputs": lambda: network.outputs(x)}


def hundred_million(tensors: dict[str, np.ndarray], samples: int = 10**8) -> tuple[float, float, float]:
    """Seconds, peak of the process in MB, and accuracy of a count of 1e8 samples."""
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(write_tensors(Path(folder) / "2nd_argmax_bench.safetensors", tensors))
        store = open_store(Path(folder) / "store")
        node = sampled_accuracy_node(
            model.weights_node(), task="2nd_argmax", sequence=model.sequence, samples=samples
        )
        start = time.perf_counter()
        run(node, store, quiet=False)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return time.perf_counter() - start, peak, accuracy_of(node.open(store))


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--hundred-million", action="store_true")
    args = parser.parse_args()
    tensors = drawn_tensors(args.hidden, args.steps)
    with torch.no_grad():
        runs = contestants(tensors, args.steps, args.samples)
        seconds = alternate(runs, args.rounds)
    limit = next(iter(runs))
    rows = [
        (
            name,
            f"{args.samples / statistics.median(seconds[name]) / 1e6:.2f}",
            f"{ratio(seconds[limit], seconds[name]):.2f}",
        )
        for name in runs
    ]
    title = (
        f"RNN of {args.hidden} neurons, {args.steps} steps, {args.samples} samples; target: 0.8 of the loop"
    )
    print_table(title, ("", "million samples/s", "speed of the loop"), rows)
    if args.hundred_million:
        took, peak, accuracy = hundred_million(tensors)
        print(
            f"1e8 samples: {took:.0f} s, {1e8 / took / 1e6:.2f} million/s, peak {peak:.0f} MB, {accuracy:.6f}"
        )


if __name__ == "__main__":
    main()
