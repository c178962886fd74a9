"""Scripts in which torch cannot be imported: the offline student's laptop."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def blocking(*modules: str) -> str:
    """The beginning of a script in which importing these modules raises; it has imported json and sys."""
    return f"""
import json, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {modules!r}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, NoTorch())
"""


TORCH_BLOCKED = blocking("torch", "transformers")


def without_torch(program: str, *arguments: object) -> Any:
    """What a program prints last, as JSON, when run with torch blocked; arguments arrive in sys.argv."""
    done = subprocess.run(
        [sys.executable, "-c", TORCH_BLOCKED + program, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
