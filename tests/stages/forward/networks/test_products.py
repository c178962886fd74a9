"""Products of activations with weights: the same numbers from either library, and the choice between them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mizarr.stages.forward.networks.kernels import products
from mizarr.stages.forward.networks.kernels.products import product

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
        ((1, 1), 512, 512, False),
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


@pytest.mark.parametrize(
    ("text", "maker"),
    [
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: EPYC\n", "AuthenticAMD"),
        ("vendor_id : GenuineIntel\n", "GenuineIntel"),
        ("processor\t: 0\nBogoMIPS\t: 50.00\n", None),
    ],
)
def test_processor_maker_is_what_linux_tells(tmp_path: Path, text: str, maker: str | None) -> None:
    told = tmp_path / "cpuinfo"
    told.write_text(text)
    assert products._processor_maker(told) == maker
    assert products._processor_maker(tmp_path / "absent") is None
