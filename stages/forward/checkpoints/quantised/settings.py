"""Checks of quantisation settings: every value that is not implemented is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from .....store.errors import ConfigError

__all__ = ["ADVICE", "require"]

ADVICE = "fetch the model's unquantised checkpoint"


def require(method: str, config: Mapping[str, Any], key: str, allowed: Collection[Any], absent: Any) -> Any:
    """Read a setting of quantization_config, and refuse values that mizarr does not implement.

    Arguments:
        method: name of the quantisation method, for the message.
        config: quantization_config, or a part of it.
        key: name of the setting.
        allowed: values that are implemented.
        absent: value that a missing key or null stands for.

    Raises:
        ConfigError: for any other value.
    """
    value = config.get(key)
    value = absent if value is None else value
    # Compared by type as well, because True == 1 in Python.
    if not any(value == known and type(value) is type(known) for known in allowed):
        raise ConfigError(
            f"quantization_config: expected {key} of {method} to be one of "
            f"{', '.join(map(repr, allowed))}, found {value!r}; {ADVICE}"
        )
    return value
