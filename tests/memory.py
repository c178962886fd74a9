"""How much memory a script takes, measured in a process of its own.

`VmHWM` and not `ru_maxrss`: the latter starts at what the parent held when it forked.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

PEAK = '(int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]) << 10)'
"""Expression for a script: the most bytes its process ever held."""


def printed(script: str, *arguments: str) -> Any:
    """The number, or numbers as JSON, that a script prints last."""
    command = [sys.executable, "-c", script, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])
