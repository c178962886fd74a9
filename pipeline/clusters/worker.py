"""Set-up of a local worker process before its first task; Dask imports this file there (option `preload`).

Border: the settings of a process; knows no tasks.
"""

from __future__ import annotations

from typing import Any

from ...store.display.terminal import escape_reports_of_python

__all__ = ["dask_setup"]


def dask_setup(worker: Any) -> None:
    """Set up a worker process: escape control characters in Python's error reports, as it shares a terminal
    with its parent."""
    escape_reports_of_python()
