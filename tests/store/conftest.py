"""Tests are no package: folders with what they share, contracts and a writer to kill, have to be named."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "contracts")]
