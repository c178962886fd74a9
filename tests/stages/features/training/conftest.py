"""Stored runs made of given rows, and rows that are made of known directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from mizarr.store.runs.entries import Entry
from tests.stored_rows import write_rows

Store = Callable[..., Entry]


@pytest.fixture(autouse=True)
def one_thread():
    """Sums are split over threads; and small matrices lose by it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def stored(tmp_path) -> Store:
    """Write rows into a store: variable -> layer -> [token, hidden]; returns the entry."""

    def write(
        rows: Mapping[str, Mapping[int, torch.Tensor]],
        *,
        prompt: int = 16,
        segment: int = 512,
        dtype: str = "float32",
        folder: Path | None = None,
        model: str = "rows",
    ) -> Entry:
        first = next(iter(next(iter(rows.values())).values()))
        held = {name: {layer: v.numpy() for layer, v in layers.items()} for name, layers in rows.items()}
        prompts = [[1] * prompt for _ in range(len(first) // prompt)]
        place = folder or tmp_path / "store"
        return write_rows(place, held, prompts, segment=segment, dtype=dtype, model=model)

    return write


def sparse_rows(
    seed: int, *, rows: int, width: int, directions: int, active: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(unit directions [direction, width], rows [row, width]): each row the sum of `active` of them, drawn
    evenly, with factors drawn evenly from [0.5, 1.5]."""
    draw = torch.Generator().manual_seed(seed)
    known = torch.nn.functional.normalize(torch.randn(directions, width, generator=draw), dim=1)
    made = []
    for size in torch.full((rows,), 1).split(8192):
        chosen = torch.rand(len(size), directions, generator=draw).topk(active, dim=1).indices
        factors = 0.5 + torch.rand(len(size), active, generator=draw)
        made.append((factors[..., None] * known[chosen]).sum(1))
    return known, torch.cat(made)


@pytest.fixture
def made_of_directions():
    """`sparse_rows`, see there."""
    return sparse_rows


@pytest.fixture
def three_layers():
    """Rows of a read and a written hook point at three layers: what is written is a rectified map of what
    was read here and before."""

    def make(seed: int = 0, rows: int = 4096, width: int = 12) -> dict[str, dict[int, torch.Tensor]]:
        draw = torch.Generator().manual_seed(seed)
        read = {
            layer: sparse_rows(seed + layer, rows=rows, width=width, directions=20, active=2)[1]
            for layer in range(3)
        }
        written = {}
        for layer in range(3):
            made = torch.zeros(rows, width)
            for source in range(layer + 1):
                made += (read[source] @ torch.randn(width, 8, generator=draw)).relu() @ torch.randn(
                    8, width, generator=draw
                )
            written[layer] = made
        return {"resid_mid": read, "mlp_out": written}

    return make
