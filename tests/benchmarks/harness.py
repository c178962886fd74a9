"""How every benchmark measures: contestants in alternation in one process, ratios within a round, medians
over rounds.

Alternation lets the drift of a shared machine hit everybody alike; a ratio taken within one round cancels
it. Nothing here judges: targets are printed beside what was measured.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

Contestants = Mapping[str, Callable[[], Any]]


def alternate(contestants: Contestants, rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of each contestant in each round; the order rotates, and turns round every second time, so that
    nobody always comes behind the same one (which may have let go of a lot of memory)."""
    names = list(contestants)
    for _ in range(warmup):
        for name in names:
            contestants[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number // 2 % len(names)
        for name in (names[turn:] + names[:turn])[:: -1 if number % 2 else 1]:
            gc.collect()
            start = time.perf_counter()
            contestants[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(numerator: list[float], denominator: list[float]) -> float:
    """Median over rounds of one contestant's time over another's."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def print_table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """A table on stdout, the first column to the left."""
    table = Table(
        title=f"{title}\n{os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}"
    )
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=110).print(table)
