"""Options of a capture: how activations are computed and stored.

Heavy imports wait until values are checked, because the help of commands is generated from these fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....store.errors import ConfigError
from ...options import option
from ..models.reference import COMPUTED_IN

if TYPE_CHECKING:
    from .order import Order

__all__ = ["MEMORY", "STORED_IN", "CaptureOptions"]

MEMORY = 1 << 30
"""Default bytes for segment buffers."""

STORED_IN = (*COMPUTED_IN, "int8")
"""Names of the dtypes that activations may be stored in."""


@dataclass(frozen=True)
class CaptureOptions:
    """How activations are computed and stored. Only `storage_dtype` is part of the key of the stored run.

    Raises:
        ConfigError, PlanError: for an invalid value.
    """

    storage_dtype: str | None = option(
        None,
        "Dtype of the stored activations; default the dtype that the model computes in. int8 stores one byte "
        "per number and one scale per 64 numbers; it is read as float32 with errors of at most half a scale.",
        choices=STORED_IN,
    )
    batch_tokens: int = option(2048, "Tokens per forward pass; halved when memory runs out.", kind="count")
    segment_tokens: int | None = option(
        None, "Tokens per segment of the store; default as many as fit in `memory`.", kind="count"
    )
    memory: int | str = option(
        MEMORY, 'Bytes of the segment buffers, or "2GiB"; default 1 GiB.', kind="bytes"
    )
    order: Order = option(
        "auto",
        "Run each batch through all layers (batch), or all batches through one group of layers after another "
        "(layer), which reads weights larger than memory once; auto chooses layer if weights do not fit.",
        choices=("auto", "batch", "layer"),
    )
    memory_limit: int | str | None = option(
        None,
        "Most bytes of weights, buffers and a batch together; default the free memory, or MIZARR_MEMORY.",
        kind="bytes",
    )
    codec: str | None = option(
        None,
        "Lossless compression of newly stored arrays (zstd, none), which changes no key; default that of the "
        "run that is extended, or none.",
        choices=("zstd", "none"),
    )

    def __post_init__(self) -> None:
        from ....pipeline.plan import as_bytes
        from ....store.arrays import as_count, shown
        from ....store.upkeep.recoding import check_codec

        check_codec(self.codec)
        as_count(self.batch_tokens, "batch_tokens")
        if self.segment_tokens is not None:
            as_count(self.segment_tokens, "segment_tokens")
        if self.storage_dtype is not None and self.storage_dtype not in STORED_IN:
            raise ConfigError(
                f"expected storage_dtype to be one of {', '.join(STORED_IN)}, found "
                f"{shown(self.storage_dtype)}"
            )
        as_count(as_bytes(self.memory), "memory")
        as_bytes(self.memory_limit)

    @property
    def buffer_bytes(self) -> int:
        """Most bytes of the segment buffers, as a number."""
        from ....pipeline.plan import as_bytes

        return as_bytes(self.memory) or MEMORY
