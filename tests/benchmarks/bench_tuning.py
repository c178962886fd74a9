"""What tuning the process to its machine is worth here: MIZARR_TUNING=on against off, in alternation.

    python tests/benchmarks/bench_tuning.py [--rounds 7]

Each round starts a process of either kind, which times a plain pass of 8 x 256 tokens through 8 layers of
512, and the same pass with every hook point captured in memory: the first shows the library of large
products, the second the allocator. Prints medians and the ratio on / off; 1 means that nothing is gained.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from harness import print_table, ratio

CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 2048,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
CODE = """
import json, sys, time
import torch, mizarr
model = mizarr.Model.from_pretrained(sys.argv[1])
ids = torch.randint(0, 8192, (8, 256), generator=torch.Generator().manual_seed(0)).tolist()
everything = mizarr.HookSpec().capture("*")
def best(hooks):
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        model.forward(ids, hooks)
        taken.append(time.perf_counter() - start)
    return min(taken[1:])
print(json.dumps({"plain pass": best(None), "every hook point captured": best(everything)}))
"""


def checkpoint(folder: Path) -> Path:
    """Random weights of the shape above."""
    import numpy as np
    from safetensors.numpy import save_file

    from mizarr.stages.forward.architectures.known import from_hf_config
    from mizarr.stages.forward.networks.weights import expected_tensors

    (folder / "config.json").write_text(json.dumps(CONFIG))
    rng = np.random.default_rng(0)
    shapes = expected_tensors(from_hf_config(CONFIG))
    tensors = {name: 0.02 * rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as kept:
        folder = checkpoint(Path(kept))
        for number in range(rounds):
            for setting in ("on", "off") if number % 2 else ("off", "on"):
                environment = {**os.environ, "MIZARR_TUNING": setting}
                command = [sys.executable, "-c", CODE, str(folder)]
                told = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
                for what, taken in json.loads(told.stdout).items():
                    seconds[what][setting].append(taken)
    rows = [
        (
            what,
            f"{statistics.median(by['on']):.3f}",
            f"{statistics.median(by['off']):.3f}",
            f"{ratio(by['on'], by['off']):.2f}",
        )
        for what, by in seconds.items()
    ]
    print_table(f"tuning, {rounds} rounds", ("", "on, s", "off, s", "on / off"), rows)


if __name__ == "__main__":
    main()
