"""What a worker process of this machine does before its first task: Dask imports this file there (`preload`).

Border: the settings of a process; knows no tasks.
"""

from __future__ import annotations

from typing import Any

from ...store.display.terminal import escape_reports_of_python

__all__ = ["dask_setup"]


def dask_setup(worker: Any) -> None:
    """Escape what Python reports in this process: it shares the terminal of whoever started it."""
    escape_reports_of_python()
