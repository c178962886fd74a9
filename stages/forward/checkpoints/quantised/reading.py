"""From config.json to the way its checkpoint is quantised: a table of methods.

Border: the one place that lists them. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .....store.errors import ConfigError
from .bitsandbytes import bitsandbytes
from .compressed import compressed
from .floats import fp8, mxfp4
from .integers import awq, gptq
from .scheme import Scheme
from .settings import ADVICE

__all__ = ["METHODS", "KEYS", "scheme_of"]

METHODS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "gptq": gptq,
    "awq": awq,
    "bitsandbytes": bitsandbytes,
    "fp8": fp8,
    "mxfp4": mxfp4,
    "compressed-tensors": compressed,
}
"""quant_method -> its scheme."""
KEYS = ("quantization_config", "compression_config")
"""Where config.json says how it is quantised; the second is the older."""


def scheme_of(raw: Mapping[str, Any]) -> Scheme | None:
    """How the checkpoint of a config.json is quantised; None where it is not. Raises ConfigError for a method
    or a setting that is not followed."""
    config = next((raw[key] for key in KEYS if raw.get(key) is not None), None)
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else None
    if method not in METHODS:
        raise ConfigError(
            f"quantization_config: expected quant_method to be one of {', '.join(METHODS)}, found "
            f"{method!r}; {ADVICE}"
        )
    return METHODS[method](config)
