"""The `mizarr` command, a file per group of commands; group.py holds the border to the shell."""

from __future__ import annotations

from .group import cli, main, run

__all__ = ["cli", "main", "run"]
