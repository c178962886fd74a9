"""Expected wall time of forward passes: from an earlier run, or from a count of operations.

A pass is a product with every weight of a layer, and reads and writes of activations around these products.
The rate of products is measured here, in a few milliseconds; the other rates are constants.
Captures of two pretrained models (135 M and 270 M parameters) on two idle cores were expected to take 1.0 to
2.2 times what they took; runs of a second, which are mostly start, up to 7 times
(`tests/benchmarks/bench_estimates.py`).

Never imports torch, because estimates are made while planning.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from ....pipeline.nodes import Estimate
from ....pipeline.reasons import scaled_seconds
from ..models.source import ModelSource

if TYPE_CHECKING:
    from ..architectures.architecture import Architecture

__all__ = ["PassWork", "expected_duration", "load_seconds", "pass_seconds"]

COMPARABLE = 4
"""Largest ratio of work to that of an earlier run which still predicts the time. A smaller earlier run is
mostly overhead, so that it only bounds the time from above."""

ACTIVATION_PASSES = 40
"""Vectors of the residual stream's width that norms, attention and activations move, per token and layer."""
BANDWIDTH = 5e9
"""Bytes per second at which these vectors are moved: memory bandwidth of an ordinary machine with two
cores."""
WRITE_RATE = 500e6
"""Bytes per second of digesting, compressing and writing arrays."""
IMPORT_SECONDS = 1.0
"""Seconds to import torch."""
PLAIN, QUANTISED = 500e6, 60e6
"""Parameters read per second from safetensors, and from a quantised GGUF file."""


@dataclass(frozen=True)
class PassWork:
    """Amount of work of some forward passes together."""

    layer_positions: float
    """Number of tokens times number of layers that they run through."""
    logit_rows: float = 0.0
    """Number of tokens whose logits are computed."""
    written: float = 0.0
    """Bytes written to the store."""

    def operations(self, config: Architecture) -> float:
        """Floating-point operations of the matrix products, two for each multiply-add.

        Arguments:
            config: architecture of the model. Behind the transformers bridge its matrices are not known;
                they are taken for 12 * hidden² weights per layer (attention 4, MLP 8), as in GPT-2.
        """
        counts, hidden = config.weight_counts, config.hidden_size
        per_layer = 12 * hidden**2 if counts is None else counts.in_layers / max(config.num_layers, 1)
        head = hidden * config.vocab_size if counts is None else counts.head
        return 2.0 * (self.layer_positions * per_layer + self.logit_rows * head)


def expected_duration(
    source: ModelSource, work: PassWork, earlier: Mapping[str, Any] | None, share: float
) -> Estimate:
    """Estimate the wall time of forward passes, from an earlier run of the model or by counting operations.

    Arguments:
        source: the model.
        work: amount of work.
        earlier: provenance of the earlier run, with `seconds` and `setup_seconds`; None if there is none.
        share: ratio of this work to the work of the earlier run.

    Returns:
        An estimate with `seconds` and `setup_seconds` only; empty if neither source is available.
    """
    scaled = None if earlier is None else scaled_seconds(earlier, share)
    setup = load_seconds(source) if earlier is None else earlier.get("setup_seconds", 0.0)
    if scaled is not None and share <= COMPARABLE:
        return Estimate(seconds=round(scaled, 3), setup_seconds=setup)
    counted = pass_seconds(source, work)
    candidates = [scaled, None if counted is None else counted + setup]
    estimates = [seconds for seconds in candidates if seconds is not None]
    # The least: a much smaller earlier run is mostly overhead, and bounds the time from above.
    return Estimate(seconds=round(min(estimates), 3), setup_seconds=setup) if estimates else Estimate()


def pass_seconds(source: ModelSource, work: PassWork) -> float | None:
    """Expected seconds of passes on the CPU, from a count of operations, without loading the model.

    Arguments:
        source: the model.
        work: amount of work.

    Returns:
        Seconds; None on a GPU, whose rate is not measured while planning, and for a model that transformers
        runs.
    """
    if source.device is not None and source.device != "cpu":
        return None
    config = source.config
    if config.weight_counts is None:
        return None
    products = work.operations(config)
    # 4 bytes a number, as in float32.
    moved = 4 * ACTIVATION_PASSES * config.axis_sizes["hidden"] * work.layer_positions
    return products / product_rate() + moved / BANDWIDTH + work.written / WRITE_RATE


def load_seconds(source: ModelSource) -> float:
    """Expected seconds to import torch and read the weights of a model; 0 if it is already loaded."""
    if source.files is None:
        return 0.0
    counts = source.config.weight_counts
    parameters = 0 if counts is None else counts.total
    return IMPORT_SECONDS + parameters / (PLAIN if source.files.gguf is None else QUANTISED)


@cache
def product_rate() -> float:
    """Operations per second of float32 matrix products on all cores, measured once.

    One thread is measured, by its own processor time, so that other work on the machine does not count.
    """
    rows, weights = np.ones((256, 768), np.float32), np.ones((768, 768), np.float32)
    seconds = []
    # One thread, whose processor time leaves out other work on the machine.
    with threadpool_limits(1, user_api="blas"):
        for _ in range(6):  # the first includes what BLAS sets up
            start = time.thread_time()
            rows @ weights
            seconds.append(time.thread_time() - start)
    # The fastest of several: interruptions only add time. 1e-9 avoids 0 where the clock is coarse.
    return 2 * rows.size * weights.shape[1] / max(min(seconds), 1e-9) * (os.cpu_count() or 1)
