"""The quantisation scheme of a checkpoint, from its config.json: a table of methods. Never imports torch."""

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
"""quant_method -> function from quantization_config to its scheme."""
KEYS = ("quantization_config", "compression_config")
"""Keys of config.json with the quantisation settings; the second is an older spelling."""


def scheme_of(raw: Mapping[str, Any]) -> Scheme | None:
    """Find the quantisation method and settings of a checkpoint in its config.json.

    Arguments:
        raw: content of config.json.

    Returns:
        The scheme; None for a checkpoint that is not quantised.

    Raises:
        ConfigError: for an unknown method or setting.
    """
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
