"""Products of activations with weights: the same numbers from either library, and the choice between them."""

from __future__ import annotations

import pytest
import torch

from mizarr.stages.forward.networks.kernels import FEW_ROWS, products
from mizarr.stages.forward.networks.kernels.products import batched_product, product

LARGE = (512, 320, 448)
"""Rows, in, out: above the size from which oneDNN is asked."""


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    made = x.double() @ weight.double().T
    return made if bias is None else made + bias.double()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("layout", ["plain", "batched", "heads", "transposed weight", "part of a weight"])
def test_numbers_are_those_of_the_exact_product(
    monkeypatch: pytest.MonkeyPatch, layout: str, biased: bool
) -> None:
    rows, width, out = LARGE
    x, weight = draw(rows, width), draw(out, width)
    if layout == "batched":
        x = draw(8, rows // 8, width)
    if layout == "heads":
        x = draw(4, 8, rows // 32, width).transpose(1, 2)
    if layout == "transposed weight":
        weight = draw(width, out).T
    if layout == "part of a weight":
        weight = draw(out + 1, width + 3)[1:, 3:]
    bias = draw(out) if biased else None
    with torch.no_grad():
        made = product(x, weight, bias)
        monkeypatch.setattr(products, "_onednn", lambda: None)
        plain = product(x, weight, bias)
    expected = exact(x, weight, bias)
    assert made.shape == plain.shape == expected.shape
    bound = 1e-6 * width**0.5 * expected.abs().max()
    assert (made - expected).abs().max() < bound
    assert (plain - expected).abs().max() < bound


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the weights that oneDNN is asked for, on a machine where it would be."""
    shapes: list[tuple[int, ...]] = []

    def onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *_: object) -> torch.Tensor:
        shapes.append(tuple(weight.shape))
        return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(products, "_onednn", lambda: onednn)
    return shapes


@pytest.mark.parametrize(
    ("rows", "width", "out", "is_asked"),
    [
        ((1, 512), 320, 448, True),
        ((1, 700), 320, 448, False),
        ((3, 512), 320, 448, False),
        ((1, 64), 320, 448, False),
        ((8, 64), 320, 448, False),
        ((512,), 320, 448, False),
        ((1, 1), 2048, 2048, True),
        ((1, 1), 512, 512, True),
        ((3, 1), 512, 512, True),
        ((1, 1), 500, 500, False),
        ((65, 1), 512, 512, False),
        ((3, 2), 512, 512, False),
    ],
)
def test_large_products_of_sizes_that_come_again_are_asked_of_onednn(
    asked: list[tuple[int, ...]], rows: tuple[int, ...], width: int, out: int, is_asked: bool
) -> None:
    """Prompts, and their length: which decides, so that nobody's bits depend on how many share a batch."""
    with torch.no_grad():
        product(draw(*rows, width), draw(out, width))
    assert asked == ([(out, width)] if is_asked else [])


def test_torch_keeps_what_onednn_cannot_do(
    monkeypatch: pytest.MonkeyPatch, asked: list[tuple[int, ...]]
) -> None:
    rows, width, out = LARGE
    x, weight = draw(1, rows, width), draw(out, width).requires_grad_()
    product(x, weight).sum().backward()
    assert weight.grad is not None
    assert torch.allclose(weight.grad, x.sum((0, 1)).expand(out, width), atol=1e-3)
    with torch.no_grad():
        assert product(x.double(), weight.double()).dtype == torch.float64
        assert product(x.bfloat16(), weight.bfloat16()).dtype == torch.bfloat16
        assert product(x[:, :0], weight).shape == (1, 0, out)
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
        product(x, weight)
    assert asked == []


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 16])
@pytest.mark.parametrize(("width", "out"), [(32, 48), (30, 77), (512, 320)])
def test_a_row_is_summed_in_one_order_whatever_stands_beside_it(threads: int, width: int, out: int) -> None:
    x, weight, bias = draw(80, width), draw(out, width), draw(out)
    before = torch.get_num_threads()
    try:
        with torch.no_grad():
            alike = product(x, weight, bias)
            torch.set_num_threads(threads)
            for rows in (*range(2, 40), 61, 79):
                made = product(x[:rows], weight, bias)
                assert torch.equal(made, alike[:rows]), rows
                apart = product(x[: 2 * (rows // 2)].view(2, rows // 2, width), weight, bias)
                assert torch.equal(apart.flatten(0, 1), alike[: 2 * (rows // 2)]), rows
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("width", "out"), [(512, 512), (640, 1000), (1536, 576)])
def test_a_step_of_a_generation_has_the_same_bits_beside_any_number_of_prompts(
    threads: int, width: int, out: int
) -> None:
    x, weight = draw(products._STEP_ROWS, 1, width), draw(out, width)
    before = torch.get_num_threads()
    try:
        with torch.no_grad():
            torch.set_num_threads(1)
            alike = product(x, weight)
            torch.set_num_threads(threads)
            for rows in (2, 3, 4, 7, 15, 16, 17, 33):
                assert torch.equal(product(x[:rows], weight), alike[:rows]), rows
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [2, 3, 8, 48])
def test_no_number_of_threads_changes_a_bit(threads: int) -> None:
    """Pieces of four rows and of sixteen columns, of which a thread would be left with less."""
    before = torch.get_num_threads()
    try:
        with torch.no_grad():
            for out in (20, 24, 40, 72, 100, 200, 250, 512):
                weight, x, bias = draw(out, 48), draw(230, 48), draw(out)
                torch.set_num_threads(1)
                expected = product(x, weight, bias)
                torch.set_num_threads(threads)
                for rows in (32, 33, 34, 50, 61, 67, 122, 171, 226):
                    found = product(x[:rows], weight, bias)
                    assert torch.equal(found, expected[:rows]), (out, rows)
                    assert found.is_contiguous()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [2, 3, 8, 48])
def test_nor_one_of_many_small_products(threads: int) -> None:
    before = torch.get_num_threads()
    try:
        with torch.no_grad():
            for rows, columns in ((33, 33), (17, 24), (100, 50), (9, 40), (122, 7), (200, 203)):
                for count in (1, 2, 5) if rows > FEW_ROWS else (4,):  # as many rows as a batch has
                    x, y = draw(count, rows, 12), draw(count, columns, 12).transpose(1, 2)
                    torch.set_num_threads(1)
                    expected = batched_product(x, y)
                    torch.set_num_threads(threads)
                    assert torch.equal(batched_product(x, y), expected), (rows, columns, count)
                    assert torch.allclose(expected, x @ y, rtol=1e-5, atol=1e-5)
    finally:
        torch.set_num_threads(before)


def test_where_a_row_stands_changes_no_bit() -> None:
    with torch.no_grad():
        for width in (5, 6, 11, 16, 22, 39):
            for out in (2, 4, 8, 11, 12, 20):
                row, weight, bias = draw(1, width), draw(out, width), draw(out)
                for rows in (32, 36, 45, 100):
                    made = product(row.expand(rows, -1), weight, bias)
                    assert torch.equal(made, made[:1].expand(rows, -1)), (width, out, rows)
