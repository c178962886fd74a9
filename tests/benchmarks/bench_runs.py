"""Grids of runs through the planner against loops of plain forward passes, in alternation in one process.

    python tests/benchmarks/bench_runs.py [--rounds 7] [--threads 2] [--device cpu]

A random Llama of 8 layers, hidden 512, 8 heads, 4 key/value heads, MLP 1408, vocabulary 4096, float32; two
prompts of 20 random tokens that share their first. Times over loops of transformers' sdpa forward, lower is
better, targets in the last column: the residual grid (160 cells), the grid of heads by position (1280 cells),
and 50 doses of attention steering in one layer. Where transformer_lens is installed, its own functions run
beside them (its 1280 forwards per grid take a while; --no-heads leaves them out).

--large: a Llama of 1.2 B parameters (16 layers, hidden 2048, 32 heads, 8 key and value heads, MLP 8192, vocab
128256) with random weights in bfloat16, for a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_forward import save_random_llama
from harness import alternate, print_table, ratio

import mizarr
from mizarr.stages.forward.architectures.points import HookPoint
from mizarr.stages.forward.runs.run import Run, plan, stream

LENGTH, GOOD, BAD = 20, 100, 200
WANT = mizarr.logits(position=-1, tokens=[GOOD, BAD])
DOSES = [0.1 * k for k in range(1, 51)]


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-heads", action="store_true", help="leave out the grid of 1280 cells")
    parser.add_argument("--large", action="store_true", help="1.2 B parameters in bfloat16")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        reference = save_random_llama(folder, **(LARGE if args.large else {})).to(args.device)
        model = mizarr.Model.from_pretrained(
            folder, device=args.device, dtype="bfloat16" if args.large else "float32"
        )
        compare(Grids(model), reference, folder, args)


LARGE: dict[str, Any] = {
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "dtype": torch.bfloat16,
}


class Grids:
    """The grids as runs, and what each gives."""

    def __init__(self, model: mizarr.Model) -> None:
        self.model = model
        generator = torch.Generator().manual_seed(0)
        both = torch.randint(2, 4096, (2, LENGTH), generator=generator)
        both[1, 0] = both[0, 0]
        self.clean, self.corrupted = both.tolist()
        self.layers = model.config.num_layers

    def residual(self) -> torch.Tensor:
        """Logit difference of every (layer, position) of resid_pre, [layer, position]."""
        return self._grid("blocks.*.hook_resid_pre", self._residual_runs).view(self.layers, LENGTH)

    def heads(self) -> torch.Tensor:
        """Logit difference of every (layer, position, head) of z, [layer, position, head]."""
        return self._grid("blocks.*.attn.hook_z", self._head_runs).view(self.layers, LENGTH, -1)

    def doses(self) -> torch.Tensor:
        """Logit difference of every dose of attention steering in the middle layer."""
        layer = self.layers // 2
        runs = [
            Run(
                self.corrupted,
                mizarr.HookSpec().intervene(
                    HookPoint.pattern(layer), mizarr.Steer(edges=[(LENGTH - 1, 0)], factor=dose)
                ),
                WANT,
            )
            for dose in DOSES
        ]
        return self._measured(runs)

    def stream_doses(self) -> torch.Tensor:
        """Logit difference of every dose of a vector added to the stream of all positions of that layer."""
        layer = self.layers // 2
        vector = torch.ones(self.model.config.hidden_size)
        runs = [
            Run(
                self.corrupted,
                mizarr.HookSpec().intervene(HookPoint.resid_post(layer), mizarr.Add(dose * vector)),
                WANT,
            )
            for dose in DOSES
        ]
        return self._measured(runs)

    def _grid(self, hooks: str, make: Callable[[Any], list[Run]]) -> torch.Tensor:
        cache = self.model.forward(self.clean, mizarr.HookSpec().capture(hooks), want=None)
        return self._measured(make(cache))

    def _residual_runs(self, cache: Any) -> list[Run]:
        runs = []
        for layer in range(self.layers):
            point = HookPoint.resid_pre(layer)
            for position in range(LENGTH):
                patch = mizarr.Replace(cache[point][0, position], positions=(position,))
                runs.append(Run(self.corrupted, mizarr.HookSpec().intervene(point, patch), WANT))
        return runs

    def _head_runs(self, cache: Any) -> list[Run]:
        runs = []
        for layer in range(self.layers):
            point = HookPoint.z(layer)
            for position in range(LENGTH):
                for head in range(self.model.config.attention_heads):
                    value = cache[point][0, head, position]
                    patch = mizarr.Replace(value, positions=(position,), heads=(head,))
                    runs.append(Run(self.corrupted, mizarr.HookSpec().intervene(point, patch), WANT))
        return runs

    def _measured(self, runs: list[Run]) -> torch.Tensor:
        self.told = plan(self.model, runs).describe()
        found = torch.zeros(len(runs))
        for index, result in stream(self.model, runs):
            good, bad = result.logits[0, 0].float().tolist()
            found[index] = good - bad
        return found


def loop_of(reference: Any, ids: list[int], count: int, device: str) -> Callable[[], None]:
    """As many plain forward passes, one after the other."""
    prompt = torch.tensor([ids], device=device)

    def run() -> None:
        with torch.no_grad():
            for _ in range(count):
                reference(prompt, use_cache=False).logits[0, -1, GOOD].item()

    return run


def compare(grids: Grids, reference: Any, folder: Path, args: argparse.Namespace) -> None:
    """Time each grid beside its loop."""
    cells = grids.layers * LENGTH
    heads = cells * grids.model.config.attention_heads
    cases = [
        ("resid_pre by layer, position", grids.residual, cells, "0.15"),
        ("50 doses of attention steering", grids.doses, len(DOSES), "0.35"),
        ("50 doses of a vector, all positions", grids.stream_doses, len(DOSES), "0.35"),
    ]
    if not args.no_heads:
        cases.append(("z by layer, position, head", grids.heads, heads, ""))
    lens = transformer_lens(folder, grids) if importlib.util.find_spec("transformer_lens") else {}
    rows = []
    for name, ours, count, target in cases:
        contestants = {"ours": ours, "loop": loop_of(reference, grids.corrupted, count, args.device)}
        if name in lens:
            contestants["lens"] = lens[name]
        seconds = alternate(contestants, args.rounds)
        over = f"{ratio(seconds['ours'], seconds['lens']):.3f}" if name in lens else ""
        wanted = {"resid_pre by layer, position": "0.11", "z by layer, position, head": "0.08"}.get(name, "")
        middle = sorted(seconds["ours"])[args.rounds // 2]
        rows.append(
            (
                name,
                str(count),
                f"{middle:.3f}",
                f"{ratio(seconds['ours'], seconds['loop']):.3f}",
                target,
                over,
                wanted,
            )
        )
        print(f"{name}: {grids.told}")
    columns = ("grid", "runs", "seconds", "over a loop", "target", "over TransformerLens", "target")
    print_table("Grids of runs: time over that of plain passes", columns, rows)


def transformer_lens(folder: Path, grids: Grids) -> dict[str, Callable[[], Any]]:
    """TransformerLens's own grids on the same weights, checked to give the same numbers."""
    from tokenizers import Tokenizer, models
    from transformer_lens import patching
    from transformer_lens.model_bridge import TransformerBridge

    # It loads no model without a tokenizer; nothing here is text.
    Tokenizer(models.WordLevel({"<s>": 0}, unk_token="<s>")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    lens = TransformerBridge.boot_transformers(str(folder), device="cpu", dtype=torch.float32)
    lens.eval()
    clean, corrupted = torch.tensor([grids.clean]), torch.tensor([grids.corrupted])

    def metric(logits: torch.Tensor) -> torch.Tensor:
        return logits[0, -1, GOOD] - logits[0, -1, BAD]

    def grid(function: Any) -> Callable[[], Any]:
        def run() -> Any:
            with torch.no_grad():
                _, cache = lens.run_with_cache(clean)
                return function(lens, corrupted, cache, metric)

        return run

    residual = grid(patching.get_act_patch_resid_pre)
    difference = (residual() - grids.residual()).abs().max()
    print(f"largest difference of the residual grid from TransformerLens's: {difference:.1e}")
    return {
        "resid_pre by layer, position": residual,
        "z by layer, position, head": grid(patching.get_act_patch_attn_head_out_by_pos),
    }


if __name__ == "__main__":
    main()
