"""The `mizarr` command: a file per group of subcommands; group.py maps errors to messages and exit codes."""

from __future__ import annotations

from .group import cli, main, run

__all__ = ["cli", "main", "run"]
