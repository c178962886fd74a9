"""Settings of a way to quantise, read so that whatever is not followed is refused.

Border: quantization_config as it stands in config.json; knows no scheme.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from .....store.errors import ConfigError

__all__ = ["ADVICE", "require"]

ADVICE = "fetch the model's unquantised checkpoint"


def require(method: str, config: Mapping[str, Any], key: str, allowed: Collection[Any], absent: Any) -> Any:
    """The value of a key; ConfigError for one that is not allowed. absent: what it stands for where it is
    not there, or null."""
    value = config.get(key)
    value = absent if value is None else value
    # By type as well: True is 1 to Python.
    if not any(value == each and type(value) is type(each) for each in allowed):
        raise ConfigError(
            f"quantization_config: expected {key} of {method} to be one of "
            f"{', '.join(map(repr, allowed))}, found {value!r}; {ADVICE}"
        )
    return value
