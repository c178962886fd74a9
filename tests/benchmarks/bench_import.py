"""What starting mizarr costs, next to a bare interpreter, measured in alternation.

    python tests/benchmarks/bench_import.py [--rounds 15]

Prints per command the median and best wall time of a fresh process and what it adds to a bare interpreter.
Budgets: `import mizarr` 0.3 s, `mizarr --help` 0.5 s, neither with torch.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from functools import partial

from harness import alternate, print_table

BARE = "bare interpreter"
COMMANDS = {
    BARE: "pass",
    "import mizarr": "import mizarr",
    "mizarr --help": "from mizarr.workflows.cli import run; run(['--help'])",
    "mizarr.HookSpec": "import mizarr; mizarr.HookSpec",
    "mizarr.open_store": "import mizarr; mizarr.open_store",
    "mizarr.Model (torch)": "import mizarr; mizarr.Model",
}
BUDGETS = {"import mizarr": "0.3", "mizarr --help": "0.5"}


def start(code: str) -> None:
    """A fresh interpreter running `code`."""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    seconds = alternate({name: partial(start, code) for name, code in COMMANDS.items()}, rounds)
    bare = statistics.median(seconds[BARE])
    rows = []
    for name, taken in seconds.items():
        median = statistics.median(taken)
        best, over = f"{min(taken):.3f}", f"{median - bare:.3f}"
        rows.append((name, f"{median:.3f}", best, over, BUDGETS.get(name, "")))
    print_table(f"start-up, {rounds} rounds", ("", "median s", "best s", "over bare s", "budget s"), rows)


if __name__ == "__main__":
    main()
