"""The README: what it lists is all there is, and its Python runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import mizarr

README = (Path(mizarr.__file__).parent / "README.md").read_text()


def test_every_hook_point_is_in_the_readme():
    from mizarr.stages.forward.architectures.points import KINDS

    wanted = [kind.path.replace("{}", "{i}") for kind in KINDS]
    assert not [name for name in wanted if f"| `{name}` |" not in README]


def test_python_in_the_readme_runs(tmp_path):
    """All blocks in one fresh process, as a reader would paste them one after another."""
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert blocks
    command = [sys.executable, "-c", "\n".join(blocks)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
