"""bfloat16 as a Zarr v3 data type, so that bfloat16 models are stored in two bytes per number.

zarr-python has no bfloat16. The name `bfloat16` with two little-endian bytes is what tensorstore and zarrs
use. Importing this module registers the type: plain `zarr.open` then reads such arrays as
`ml_dtypes.bfloat16`. The entry point in pyproject.toml would do so without an import, but zarr 3.1 collects
these entry points and never loads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import ml_dtypes
import numpy as np
from zarr.core.dtype import data_type_registry
from zarr.core.dtype.common import DataTypeValidationError, HasItemSize
from zarr.core.dtype.npy.common import check_json_float_v3, float_from_json_v3, float_to_json_v3
from zarr.core.dtype.wrapper import ZDType

NATIVE = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class BFloat16(ZDType[Any, Any], HasItemSize):
    """Zarr v3 data type for `ml_dtypes.bfloat16`, two bytes per number."""

    dtype_cls = type(NATIVE)
    _zarr_v3_name: ClassVar[Literal["bfloat16"]] = "bfloat16"

    @property
    def item_size(self) -> int:
        """Bytes per number: 2."""
        return 2

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        """The Zarr type of a numpy dtype; DataTypeValidationError unless it is bfloat16."""
        if dtype == NATIVE:
            return cls()
        raise DataTypeValidationError(f"the Zarr type bfloat16 is for dtype {NATIVE}, found {dtype}")

    def to_native_dtype(self) -> Any:
        """`ml_dtypes.bfloat16` as a numpy dtype."""
        return NATIVE

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        raise DataTypeValidationError(f"Zarr format 2 has no bfloat16, found data type {data!r}")

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if data == cls._zarr_v3_name:
            return cls()
        raise DataTypeValidationError(
            f"expected data_type {cls._zarr_v3_name!r} in zarr.json, found {data!r}"
        )

    def to_json(self, zarr_format: int) -> Any:
        """Name of the data type in `zarr.json`; ValueError for Zarr format 2, which has no bfloat16."""
        if zarr_format != 3:
            raise ValueError("Zarr format 2 has no bfloat16; write with zarr_format=3, or convert to float32")
        return self._zarr_v3_name

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, int | float | np.number | ml_dtypes.bfloat16)

    def cast_scalar(self, data: object) -> Any:
        """Round a number to bfloat16; TypeError for anything else."""
        if not self._check_scalar(data):
            raise TypeError(f"expected a number to convert to bfloat16, found {data!r}")
        return NATIVE.type(data)

    def default_scalar(self) -> Any:
        """Value that unwritten chunks read as: 0."""
        return NATIVE.type(0)

    def from_json_scalar(self, data: Any, *, zarr_format: int) -> Any:
        """Parse a fill value from `zarr.json`, such as 0.0 or "NaN"."""
        return NATIVE.type(float_from_json_v3(data) if check_json_float_v3(data) else float(data))

    def to_json_scalar(self, data: object, *, zarr_format: int) -> Any:
        """Convert a fill value to the form of `zarr.json`, such as 0.0 or "NaN"."""
        return float_to_json_v3(np.float32(self.cast_scalar(data)))


data_type_registry.register(BFloat16._zarr_v3_name, BFloat16)  # harmless when repeated
