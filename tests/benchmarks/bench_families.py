"""Forward passes of six families against transformers' sdpa passes, measured in alternation in one process.

    python tests/benchmarks/bench_families.py [--rounds 9] [--threads 2] [--only gpt2,bert]

Random models of 8 layers, hidden 512, 8 heads, vocabulary 4096, float32, 8 prompts of 256 tokens: with
nothing hooked (target: at most 1.05 of transformers' time), and with every hook point of the field's table
and per-head z captured in memory (target: at most 1.2). The last column is the largest difference of a logit.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from bench_forward import EVERY_POINT, LENGTH, PROMPTS, draw
from harness import alternate, print_table, ratio

import mizarr
from mizarr.stages.forward.architectures.points import HookPoint

LAYERS, HIDDEN, HEADS, VOCAB, POSITIONS = 8, 512, 8, 4096, 1024

LLAMA_LIKE = {
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "intermediate_size": 1408,
    "max_position_embeddings": POSITIONS,
}
BERT_LIKE = {
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "intermediate_size": 4 * HIDDEN,
    "max_position_embeddings": POSITIONS,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": LAYERS, "n_embd": HIDDEN, "n_head": HEADS, "n_positions": POSITIONS},
    "gpt_neox": BERT_LIKE,
    "gemma3_text": LLAMA_LIKE | {"head_dim": HIDDEN // HEADS, "sliding_window": 128},
    "olmo2": LLAMA_LIKE,
    "mixtral": LLAMA_LIKE | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "bert": BERT_LIKE,
}


def save_random(family: str, folder: Path) -> Any:
    """The model of a family in a directory; returns transformers' own copy of it."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    torch.manual_seed(0)
    ends = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = AutoConfig.for_model(family, vocab_size=VOCAB, **ends, **FAMILIES[family])
    kind: Any = AutoModelForMaskedLM if family == "bert" else AutoModelForCausalLM
    kind.from_config(config).save_pretrained(folder)
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


def measured(family: str, folder: Path, rounds: int) -> tuple[str, ...]:
    """A row of the table."""
    reference = save_random(family, folder)
    model = mizarr.Model.from_pretrained(folder)
    ids, points = draw(PROMPTS), model.hook_points
    wanted = [HookPoint(kind, layer) for layer in range(LAYERS) for kind in EVERY_POINT]
    every = mizarr.HookSpec().capture(*(point for point in wanted if point in points))
    more = {} if family == "bert" else {"use_cache": False}

    def plain() -> Any:
        with torch.no_grad():
            return reference(ids, **more).logits

    difference = (plain() - model.forward(ids).logits).abs().max().item()
    seconds = alternate(
        {"plain": plain, "nothing": lambda: model.forward(ids), "all": lambda: model.forward(ids, every)},
        rounds,
    )
    nothing, everything = (ratio(seconds[name], seconds["plain"]) for name in ("nothing", "all"))
    return (
        family,
        f"{nothing:.3f}",
        f"{everything:.3f}",
        str(sum(point in points for point in wanted)),
        f"{difference:.1e}",
    )


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default=",".join(FAMILIES), help="families, by commas")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        rows = [measured(family, Path(scratch) / family, args.rounds) for family in args.only.split(",")]
    columns = ("", "nothing hooked (1.05)", "all captured (1.2)", "points", "max |logit difference|")
    title = f"times transformers' sdpa pass, {PROMPTS} x {LENGTH} tokens, {args.rounds} rounds"
    print_table(title, columns, rows)


if __name__ == "__main__":
    main()
