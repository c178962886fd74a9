"""The environment variable MIZARR_TUNING, which switches three adaptations to the machine on or off.

* Order of summation (`fix_order_of_sums`, below): on Intel processors MKL chooses the order in which a matrix
  product sums by the number of rows, so a prompt's numbers would depend on the size of its batch. Its strict
  mode has one order for all sizes.
* Large float32 products use oneDNN instead of MKL on processors of other makers (products.py).
* The allocator keeps memory that a pass frees (stages/forward/models/residency.py).

`MIZARR_TUNING=off` disables all three; the provenance of every result records the setting.
tests/benchmarks/bench_tuning.py measures what each is worth on a machine.

Border: the environment. Never imports torch.
"""

from __future__ import annotations

import os
from pathlib import Path

from .....store.errors import ConfigError

__all__ = ["VARIABLE", "fix_order_of_sums", "is_tuned", "processor_maker", "tuning"]

VARIABLE = "MIZARR_TUNING"
_MKL_MODE = "MKL_CBWR"
"""MKL's environment variable for reproducible sums, which it reads once, before its first product."""
_STRICT = "AUTO,STRICT"
"""Value of it: the best kernels of the processor, with one order of summation for all sizes and threads."""


def is_tuned() -> bool:
    """Whether mizarr may tune torch to the machine: True unless the environment variable MIZARR_TUNING is
    "off"; ConfigError if it is neither "on" nor "off"."""
    setting = os.environ.get(VARIABLE) or "on"
    if setting not in ("on", "off"):
        raise ConfigError(
            f"expected the environment variable {VARIABLE} to be 'on' or 'off', found {setting!r}; set it to "
            "one of these, or unset it for 'on'"
        )
    return setting == "on"


def tuning() -> dict[str, str]:
    """The setting MIZARR_TUNING, as it is recorded in the provenance of a result: {"tuning": "on" or
    "off"}."""
    return {"tuning": "on" if is_tuned() else "off"}


def fix_order_of_sums() -> None:
    """Ask MKL for one order of sums, unless the user chose a mode or MIZARR_TUNING is "off".

    Called when mizarr is imported, because MKL reads its variable once. Measured on an Intel Xeon (AVX-512,
    two cores), strict products take 0.7 to 1.1 of the time of others. MKL has no strict mode for processors
    of other makers, whose kernels need none (products.py).
    """
    if os.environ.get(VARIABLE) != "off" and processor_maker() == "GenuineIntel":
        os.environ.setdefault(_MKL_MODE, _STRICT)


def processor_maker(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Vendor of the processor, such as "AuthenticAMD" or "GenuineIntel", from Linux; None on other systems.

    cpuinfo: file to read.
    """
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as lines:
            return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), None)
    except OSError:
        return None
