"""Linear recurrences by chunks against the loop over tokens, in alternation in one process.

    python tests/benchmarks/bench_recurrences.py [--tokens 1024] [--heads 8] [--width 64] [--rounds 7]

One row per kind of mixer: median milliseconds of both, and the median over rounds of the loop's time over the
chunks' (the target is 10 for RWKV-7). Two threads, float32, no gradients. The decays of a kind are drawn from
the range its models have, down to -55 a token for the steep ones, which no matrix product can divide by.
"""

from __future__ import annotations

import argparse
import statistics

import torch
import torch.nn.functional as F
from harness import alternate, print_table, ratio
from torch import Tensor

from mizarr.stages.forward.models.residency import keep_freed_memory
from mizarr.stages.forward.networks.recurrences.linear import LinearRecurrence, Readout

Contestant = tuple[dict[str, Tensor], Tensor | None]
"""Tokens, and the bonus of readouts before."""


def mixers(heads: int, tokens: int, width: int) -> dict[str, Contestant]:
    """Random tokens [1, heads, tokens, width] as each mixer has them."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, tokens, width) for _ in range(3))
    unit, uniform = F.normalize(k, dim=-1), torch.rand_like(k)
    plain, one = {"q": q, "k": k, "v": v}, uniform[..., :1]
    delta = {"q": q, "k": unit, "v": v, "alpha": unit}
    bonus = torch.randn(heads, width)
    shared = {name: torch.randn(1, 1, tokens, 16).expand(-1, heads * width, -1, -1) for name in "qk"}
    channels = shared | {"v": v.transpose(2, 3).flatten(1, 2).unsqueeze(-1)}
    decays = -torch.rand(1, heads * width, tokens, 16)
    return {
        "RWKV-7": (
            plain | {"log_decay": -0.6065 * uniform, "alpha": -unit, "beta": unit * uniform.flip(2)},
            None,
        ),
        "gated DeltaNet": (delta | {"log_decay": -0.1 * one, "beta": -unit * one.flip(2)}, None),
        "RetNet, Mamba-2": (plain | {"log_decay": -0.1 * one}, None),
        "GLA": (plain | {"log_decay": -0.2 * uniform}, None),
        "RWKV-6": (plain | {"log_decay": -(2 * uniform).exp()}, bonus),
        "RWKV-6, steep": (plain | {"log_decay": -(4 * uniform).exp()}, bonus),
        "Mamba-1": (channels | {"log_decay": decays}, None),
    }


def milliseconds(seconds: list[float]) -> str:
    """The median, to be read."""
    return f"{1e3 * statistics.median(seconds):.1f}"


def contest(contestant: Contestant, rounds: int) -> tuple[str, str, str]:
    """Median milliseconds of the loop and of chunks, and the ratio."""
    tokens, bonus = contestant
    readout: Readout = "after" if bonus is None else "before"
    step = LinearRecurrence(readout, bonus, "step")
    chunk = LinearRecurrence(readout, bonus, "chunk")
    runs = {"loop": lambda: step(tokens, None), "chunks": lambda: chunk(tokens, None)}
    seconds = alternate(runs, rounds)
    quotient = f"{ratio(seconds['loop'], seconds['chunks']):.1f}"
    return milliseconds(seconds["loop"]), milliseconds(seconds["chunks"]), quotient


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(2)
    keep_freed_memory()  # as a process does that has loaded a model
    with torch.no_grad():
        contestants = mixers(args.heads, args.tokens, args.width)
        rows = [(name, *contest(contestant, args.rounds)) for name, contestant in contestants.items()]
    size = f"{args.heads} heads of {args.width}, {args.tokens} tokens"
    title = f"linear recurrences, {size}, {args.rounds} rounds; target: RWKV-7 at 10"
    print_table(title, ("", "loop, ms", "chunks, ms", "loop / chunks"), rows)


if __name__ == "__main__":
    main()
