"""Generation against transformers' generate, measured in alternation in one process.

    python tests/benchmarks/bench_generate.py [--rounds 7] [--threads 2] [--prompt 16] [--new 64] [--batch 1]

The benchmark's random Llama (8 layers, hidden 512), greedy. Plain, and with a vector added to the residual
stream after the middle layer at every step, for which transformers gets a forward hook; both with kept keys
and values, and both reading everything anew. Each over transformers with its cache; the last column says
whether the tokens are the same.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bench_forward import LAYERS, save_random_llama
from harness import alternate, print_table, ratio

import mizarr
from mizarr.stages.forward.generation.generate import generate


def main() -> None:
    """Run the rounds and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("rounds", 7), ("threads", 2), ("prompt", 16), ("new", 64), ("batch", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 4096, (args.batch, args.prompt), generator=generator)
    vector = 0.5 * torch.randn(512, generator=generator)
    with tempfile.TemporaryDirectory() as scratch:
        reference = save_random_llama(Path(scratch))
        model = mizarr.Model.from_pretrained(scratch)
    for steered in (False, True):
        measure(reference, model, ids, vector if steered else None, args.new, args.rounds)


def measure(
    reference: Any, model: mizarr.Model, ids: torch.Tensor, vector: torch.Tensor | None, new: int, rounds: int
) -> None:
    """One table: transformers and mizarr, with and without kept keys."""
    hooks = mizarr.HookSpec()
    if vector is not None:
        hooks = hooks.intervene(f"blocks.{LAYERS // 2}.hook_resid_post", mizarr.Add(vector))
    tokens: dict[str, list[list[int]]] = {}

    def theirs(name: str, cache: bool) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad(), steering(reference, vector):
                found = reference.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    use_cache=cache,
                    max_new_tokens=new,
                    min_new_tokens=new,
                    pad_token_id=2,
                )
            tokens[name] = found[:, ids.shape[1] :].tolist()

        return run

    def ours(name: str, cache: bool) -> Callable[[], None]:
        def run() -> None:
            tokens[name] = generate(model, ids, hooks, max_tokens=new, eos=(), cache=cache).ids

        return run

    contestants = {
        name: make(name, cache)
        for name, make, cache in (
            ("transformers, cache", theirs, True),
            ("mizarr, cache", ours, True),
            ("transformers, read anew", theirs, False),
            ("mizarr, read anew", ours, False),
        )
    }
    seconds = alternate(contestants, rounds)
    base = seconds["transformers, cache"]
    rows = [
        (
            name,
            f"{statistics.median(taken):.3f}",
            f"{ids.shape[0] * new / statistics.median(taken):,.0f}",
            f"{ratio(taken, base):.3f}",
            "yes" if tokens[name] == tokens["transformers, cache"] else "no",
        )
        for name, taken in seconds.items()
    ]
    what = "plain" if vector is None else "steered at every step"
    title = f"{what}: {ids.shape[0]} x {new} new tokens behind {ids.shape[1]}, {rounds} rounds"
    print_table(title, ("", "seconds", "tokens/s", "x time", "same tokens"), rows)


@contextlib.contextmanager
def steering(reference: Any, vector: torch.Tensor | None) -> Iterator[None]:
    """Within: the vector is added to what transformers' middle layer gives."""
    if vector is None:
        yield
        return

    def add(module: Any, inputs: Any, output: Any) -> Any:
        return (output[0] + vector, *output[1:]) if isinstance(output, tuple) else output + vector

    handle = reference.model.layers[LAYERS // 2].register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


if __name__ == "__main__":
    main()
