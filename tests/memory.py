"""How much memory a script takes, measured in a process of its own.

`VmHWM` and not `ru_maxrss`: the latter starts at what the parent held when it forked.
"""

from __future__ import annotations

import subprocess
import sys

PEAK = '(int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]) << 10)'
"""Expression for a script: the most bytes its process ever held."""


def printed(script: str, *arguments: str) -> int:
    """The number a script prints last."""
    command = [sys.executable, "-c", script, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return int(run.stdout.split()[-1])
