"""Loading a GGUF file over dequantising its tensors with the format's package, and memory over the weights.

    python tests/benchmarks/bench_gguf.py [FILE.gguf ...] [--rounds 5]

Without a file: all in ~/.cache/mizarr-real. Each contestant is a process of its own, in alternation, and
counts processor time without imports: the header, the tokenizer, `Model.from_pretrained`, and
`gguf.dequantize` of all tensors, one after the other. Targets: loading at most 1.5 of dequantising; resident
afterwards at most 1.2 of the float32 weights; header at most 1 s for 262,144 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from harness import print_table

MEASURE = """
import sys, time
from pathlib import Path
import gguf, numpy as np, tokenizers, torch
from mizarr.stages.forward.checkpoints.gguf.parsing import read_gguf
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.forward.models.model import Model
from mizarr.stages.forward.networks import table

def resident(word):
    return int(open("/proc/self/status").read().partition(word)[2].split()[0]) << 10

path, what = Path(sys.argv[1]), sys.argv[2]
torch.ones(8, 8) @ torch.ones(8, 8)
size = 1
if what == "tokenizer":
    tokenizer = resolve(path).tokenizer()
if what == "dequantize":
    _, tensors = read_gguf(path)
before, start = resident("VmRSS:"), time.process_time()
if what == "header":
    read_gguf(path)
elif what == "tokenizer":
    tokenizer.decode([1])
elif what == "load":
    size = Model.from_pretrained(path, progress=False).weight_bytes
else:
    for tensor in tensors.values():
        gguf.dequantize(np.ascontiguousarray(tensor.data), gguf.GGMLQuantizationType[tensor.kind])
seconds = time.process_time() - start
print(seconds, (resident("VmRSS:") - before) / size, (resident("VmHWM:") - before) / size)
"""
CONTESTANTS = ("dequantize", "load", "header", "tokenizer")


def measured(path: Path, what: str) -> tuple[float, float, float]:
    """Processor seconds of one thing in a fresh process; bytes resident afterwards, and at most, each over
    those of the weights where a model was loaded."""
    line = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), what], check=True, capture_output=True, text=True
    ).stdout
    seconds, after, peak = map(float, line.split())
    return seconds, after, peak


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    files = args.files or sorted((Path.home() / ".cache" / "mizarr-real").glob("*.gguf"))
    if not files:
        print("expected a GGUF file, found none in ~/.cache/mizarr-real; name one")
        sys.exit(2)
    for path in files:
        show(path, [{what: measured(path, what) for what in CONTESTANTS} for _ in range(args.rounds)])


def show(path: Path, rounds: list[dict[str, tuple[float, float, float]]]) -> None:
    """The table of one file: medians over rounds."""
    rows = []
    for what in CONTESTANTS:
        seconds = statistics.median(one[what][0] for one in rounds)
        over = statistics.median(one[what][0] / one["dequantize"][0] for one in rounds)
        after, peak = (statistics.median(one[what][n] for one in rounds) for n in (1, 2))
        memory = (f"{after:.2f}", f"{peak:.2f}") if what == "load" else ("", "")
        rows.append((what, f"{seconds:.2f}", f"{over:.2f}", *memory))
    columns = ("", "processor s", "of dequantising", "resident after, of weights", "at most")
    print_table(f"{path.name}; targets: load 1.5, resident 1.2, header 1 s", columns, rows)


if __name__ == "__main__":
    main()
