"""Whether the process is tuned to its machine: one setting for both liberties, and what was made of it.

Two things are done for speed that somebody may not want: large float32 products go to the other of torch's
two libraries where the processor is not its first one's (products.py), and the system's allocator is asked to
keep what a pass frees (memory.py). `MIZARR_TUNING=off` leaves both alone; what was done stands in the
provenance of whatever was computed. tests/benchmarks/bench_tuning.py measures what each is worth on a
machine.

Border: the environment. Never imports torch.
"""

from __future__ import annotations

import os

from .....store.errors import ConfigError

__all__ = ["VARIABLE", "is_tuned", "tuning"]

VARIABLE = "MIZARR_TUNING"


def is_tuned() -> bool:
    """True unless MIZARR_TUNING is "off"; ConfigError for anything but "on" and "off"."""
    found = os.environ.get(VARIABLE) or "on"
    if found not in ("on", "off"):
        raise ConfigError(f"expected {VARIABLE} to be 'on' or 'off', found {found!r}")
    return found == "on"


def tuning() -> dict[str, str]:
    """The setting, as provenance notes it."""
    return {"tuning": "on" if is_tuned() else "off"}
