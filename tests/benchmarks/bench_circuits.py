"""Every edge of a model left out by itself, against a loop of plain passes; scores of edges against passes.

    python tests/benchmarks/bench_circuits.py [--rounds 3] [--threads 2] [--device cpu] [--layers 8]
        [--heads 8] [--last]

The random Llama of bench_runs.py (8 layers, 8 heads of 64 in as wide a stream, half as many key/value heads,
MLP 1408, vocabulary 4096, float32) and two prompts of 20 random tokens. It has 6,637 edges; `--layers 16`
makes it 27,673, `--heads 18` 29,997. Times are over those of as many forward passes of transformers, of which
fifty are run in each round, lower is better, target in the last column: edges left out at the last position,
at all of them, and at all of them in prompts that begin alike, as most pairs of tasks do, here by half.
`--last` takes the last position alone, as all positions of 30,000 edges take many minutes. Beside the times
stand multiplications, ours over those of as many passes, which no neighbour on the machine changes. Then EAP
and EAP-IG (5 steps) of one pair, in plain passes.

What the target leaves out of reach at all positions: README.md, "Edges at all positions".
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from bench_forward import save_random_llama
from harness import alternate, print_table, ratio
from torch.utils.flop_counter import FlopCounterMode

import mizarr
from mizarr.stages.causal.grids.patching_metrics import LogitDifference
from mizarr.stages.circuits.names import Method
from mizarr.stages.circuits.pairs import Pair
from mizarr.stages.circuits.scores import EdgeEffects, EdgeScores
from mizarr.stages.forward.edges.layout import Layout

LENGTH, PASSES = 20, 50


def main() -> None:
    """Run the rounds and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--last", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = {
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": max(1, args.heads // 2),
        "hidden_size": 64 * args.heads,
    }
    with tempfile.TemporaryDirectory() as scratch:
        reference = save_random_llama(Path(scratch), **shape).to(args.device)
        model = mizarr.Model.from_pretrained(scratch, device=args.device)
    generator = torch.Generator().manual_seed(0)
    clean, corrupted = torch.randint(2, 4096, (2, LENGTH), generator=generator).tolist()
    alike = [*clean[: LENGTH // 2], *corrupted[LENGTH // 2 :]]
    pair, half = (Pair(tuple(clean), tuple(other), LogitDifference(100, 200)) for other in (corrupted, alike))
    edges = int(Layout.of(model.config).edges.sum())
    prompt = torch.tensor([clean], device=args.device)

    def passes() -> None:
        with torch.no_grad():
            for _ in range(PASSES):
                reference(prompt, use_cache=False).logits[0, -1, 100].item()

    def exactly(asked: Pair, position: int | None) -> Any:
        effects = EdgeEffects(pairs=(asked,), position=position)
        (cell,) = effects.cells(model.config)
        return lambda: effects.dataset(model, cell, ())

    def scored(method: Method) -> Any:
        scores = EdgeScores(pairs=(pair,), method=method)
        return lambda: scores.dataset(model, {}, ())

    rows = []
    of_passes = _multiplications(passes) / PASSES * edges
    asked = [
        ("at the last position", exactly(pair, -1)),
        ("at all positions", exactly(pair, None)),
        ("at all positions, half of them alike", exactly(half, None)),
    ]
    for name, ours in asked[: 1 if args.last else None]:
        multiplied = _multiplications(ours) / of_passes
        seconds = alternate({"ours": ours, "passes": passes}, args.rounds)
        share = ratio(seconds["ours"], seconds["passes"]) * PASSES / edges
        middle = sorted(seconds["ours"])[args.rounds // 2]
        rows.append((name, str(edges), f"{middle:.2f}", f"{multiplied:.3f}", f"{share:.4f}", "0.05"))
    columns = ("edges left out", "edges", "seconds", "multiplications", "over as many passes", "target")
    print_table("Exact effects of all edges", columns, rows)
    costs = []
    estimates: tuple[Method, ...] = ("EAP", "EAP-IG-inputs")
    for method in estimates:
        seconds = alternate({"ours": scored(method), "passes": passes}, args.rounds)
        costs.append((method, f"{ratio(seconds['ours'], seconds['passes']) * PASSES:.1f}"))
    print_table("Scores of all edges and nodes", ("method", "plain passes"), costs)


def _multiplications(call: Any) -> int:
    """Of matrix products; oneDNN's would not be counted, and are not asked."""
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


if __name__ == "__main__":
    main()
