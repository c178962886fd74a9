"""An RWKV-7 model against its step loop, transformers' Mamba-2, its plain pass, and loops of that.

    python tests/benchmarks/bench_recurrent_models.py [--rounds 7] [--threads 2]

Random weights, 4 layers, hidden 512, 8 heads of 64, vocabulary 4096, float32; 1024 random tokens. Targets: a
forward pass at least 10 times as fast as the step loop (the model read token by token from kept states;
beside it the same pass with only its states computed so), and 5 times transformers' Mamba-2 of the same width
and depth on its path without kernels of its own; capturing every residual stream into the store at most 1.1
of the plain pass; a grid of 160 residual cells (8 layers x 20 tokens) at most 0.2 of 160 passes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import alternate, print_table, ratio
from safetensors.torch import save_file

import mizarr
from mizarr.stages.forward.architectures.rwkv_families import RWKV
from mizarr.stages.forward.architectures.transformer import ConfigReader
from mizarr.stages.forward.hooks.spec import BoundSpec
from mizarr.stages.forward.hooks.taps import RunTaps
from mizarr.stages.forward.networks.mixers import rwkv
from mizarr.stages.forward.networks.recurrences.linear import LinearRecurrence
from mizarr.stages.forward.passes.kept import Cache

HIDDEN, VOCAB, RANKS = 512, 4096, {"w": 64, "a": 64, "v": 32, "g": 128}
WANT = mizarr.logits(position=-1, tokens=[100, 200])


def save_random_rwkv7(folder: Path, layers: int) -> None:
    """Config and tensors of a random RWKV-7, scaled so that the stream stays of size one."""
    torch.manual_seed(0)
    config = {"model_type": "rwkv7", "hidden_size": HIDDEN, "head_dim": 64, "num_hidden_layers": layers}
    config |= {"vocab_size": VOCAB, "intermediate_size": 4 * HIDDEN, "norm_eps": 1e-5}
    first = "model.layers.{}.attn."
    shapes: dict[str, tuple[int, ...]] = {first.format(0) + "r_proj.weight": (HIDDEN, HIDDEN)}
    for layer in range(layers):
        for name, rank in RANKS.items():
            shapes[f"{first.format(layer)}{name}_lora.lora.0.weight"] = (rank, HIDDEN)
    wanted = RWKV["rwkv7"].config(ConfigReader(config), shapes).tensors.shapes
    tensors = {
        name: torch.randn(shape) / shape[-1] ** 0.5
        if min(shape) > 1 and len(shape) == 2
        else torch.rand(shape)
        for name, shape in wanted.items()
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


class StepByStep(LinearRecurrence):
    """The same recurrence, token by token."""

    def __init__(self, readout: Any, bonus: torch.Tensor | None = None) -> None:
        super().__init__(readout, bonus, "step")


def by_steps(run: Callable[[], Any]) -> Callable[[], Any]:
    """A pass whose states are computed token by token."""

    def stepped() -> Any:
        kernel = vars(rwkv)["LinearRecurrence"]
        vars(rwkv)["LinearRecurrence"] = StepByStep
        try:
            return run()
        finally:
            vars(rwkv)["LinearRecurrence"] = kernel

    return stepped


def token_by_token(model: mizarr.Model, ids: list[int]) -> None:
    """The prompt read as a text is generated: one token at a time, from the state kept."""
    cache, taps = Cache(), RunTaps(BoundSpec(), lambda *_: None)
    for stop in range(1, len(ids) + 1):
        model.read_on([ids[:stop]], cache, taps)


def mamba2(layers: int) -> Callable[[list[int]], Any]:
    """transformers' Mamba-2 of the same width; without its CUDA kernels it takes the path in torch."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        vocab_size=VOCAB,
        num_heads=16,
        head_dim=64,
        state_size=64,
        n_groups=1,
    )
    model: Any = Mamba2ForCausalLM(config)
    model.eval()

    def run(ids: list[int]) -> Any:
        with torch.no_grad():
            return model(torch.tensor([ids]), use_cache=False).logits

    return run


def residual_grid(model: mizarr.Model, clean: list[int], corrupted: list[int]) -> list[mizarr.Run]:
    """Every (layer, position) of resid_pre patched from another prompt."""
    held = model.forward(clean, mizarr.HookSpec().capture("blocks.*.hook_resid_pre"), want=None)
    runs = []
    for layer in range(model.config.num_layers):
        point = mizarr.HookPoint.resid_pre(layer)
        for place in range(len(clean)):
            patch = mizarr.Replace(held[point][0, place], positions=(place,))
            runs.append(mizarr.Run(corrupted, mizarr.HookSpec().intervene(point, patch), WANT))
    return runs


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ids = torch.randint(2, VOCAB, (1024,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = []

    def told(name: str, seconds: dict[str, list[float]], over: str, of: str, target: str) -> None:
        middle = sorted(seconds[of])[args.rounds // 2]
        rows.append((name, f"{middle:.3f}", f"{ratio(seconds[over], seconds[of]):.2f}", target))

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "small").mkdir()
        save_random_rwkv7(folder / "small", 4)
        model = mizarr.Model.from_pretrained(folder / "small")
        mamba = mamba2(4)
        difference = (by_steps(lambda: model.forward(ids))().logits - model.forward(ids).logits).abs().max()
        print(f"largest difference of logits from the step loop: {float(difference):.1e}")
        seconds = alternate(
            {
                "plain": lambda: model.forward(ids),
                "tokens": lambda: token_by_token(model, ids),
                "steps": by_steps(lambda: model.forward(ids)),
                "mamba2": lambda: mamba(ids),
            },
            args.rounds,
        )
        told("token by token over pass, 1024 tokens", seconds, "tokens", "plain", ">= 10")
        told("states by steps over pass", seconds, "steps", "plain", "")
        told("transformers' Mamba-2 over pass", seconds, "mamba2", "plain", ">= 5")

        prompts = [ids[256 * n : 256 * (n + 1)] for n in range(4)] * 2
        count = iter(range(10**6))

        def captured() -> None:
            store = mizarr.open_store(folder / f"store-{next(count)}")
            mizarr.capture(model, prompts, "blocks.*.hook_resid_post", store=store, progress=False)

        def plain() -> None:
            model.forward(prompts)

        seconds = alternate({"captured": captured, "plain": plain}, args.rounds)
        told("capture into the store over pass", seconds, "captured", "plain", "<= 1.1")

        (folder / "grid").mkdir()
        save_random_rwkv7(folder / "grid", 8)
        deep = mizarr.Model.from_pretrained(folder / "grid")
        runs = residual_grid(deep, ids[:20], ids[100:120])

        def loop() -> None:
            for _ in runs:
                deep.forward(ids[100:120], want=WANT)

        seconds = alternate({"grid": lambda: mizarr.run(deep, runs), "loop": loop}, args.rounds)
        told("160 residual cells over 160 passes", seconds, "grid", "loop", "<= 0.2")
    print_table("Recurrent models", ("what", "seconds", "ratio", "target"), rows)


if __name__ == "__main__":
    main()
