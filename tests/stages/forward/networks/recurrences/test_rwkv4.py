"""RWKV-4's average: the stored operator, a softmax over sources, and what nothing may overflow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mizarr.stages.forward.networks.recurrences.rwkv4 import ExponentialAverage

from .recurrence_reference import average, error, needs_reference, stored


def drawn(
    length: int, *, channels: int = 5, scale: float = 1.0
) -> tuple[ExponentialAverage, dict[str, Tensor]]:
    torch.manual_seed(length)
    k, v = (torch.randn(2, 1, length, channels).double() for _ in range(2))
    compute = ExponentialAverage(-torch.randn(channels).double().exp(), torch.randn(channels).double())
    return compute, {"k": scale * k, "v": v}


def expected(compute: ExponentialAverage, tokens: dict[str, Tensor]) -> Tensor:
    return torch.stack(
        [
            average(k, v, compute.decay, compute.bonus)
            for k, v in zip(tokens["k"][:, 0], tokens["v"][:, 0], strict=True)
        ]
    ).unsqueeze(1)


@needs_reference
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_stored_operator_is_repeated(dtype: torch.dtype) -> None:
    """Its inputs are stored rounded to float32, which alone moves what is read by 1.4e-7 and its state, whose
    largest entry is 30, by 6e-6."""
    file = stored("wkv4")
    compute = ExponentialAverage(file["w"], file["u"])
    read, after = compute({name: file[name].to(dtype).unsqueeze(1) for name in "kv"}, None)
    numerator, denominator, exponent = after[:, 0].unbind(1)
    sums = torch.stack([numerator, denominator], dim=-1) * exponent.exp().unsqueeze(-1)
    assert read.dtype == dtype
    assert error(read[:, 0], file["out"]) <= (2e-7 if dtype == torch.float64 else 5e-6)
    assert error(sums, file["final_state"]) <= (1e-6 if dtype == torch.float64 else 5e-6)


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("length", [1, 2, 32, 33, 100])
def test_what_is_read_is_a_softmax_over_sources(length: int, scale: float) -> None:
    """Exponents of 300 overflow in float32, and need not."""
    compute, tokens = drawn(length, scale=scale)
    read, _ = compute(tokens, None)
    assert (read - expected(compute, tokens)).abs().max() <= 1e-12
    single, _ = compute({name: x.float() for name, x in tokens.items()}, None)
    rounded = {name: x.float().double() for name, x in tokens.items()}
    assert error(single, expected(compute, rounded)) <= 5e-6 * scale


@pytest.mark.parametrize("cut", [1, 13, 40, 69])
def test_pieces_make_the_whole(cut: int) -> None:
    compute, tokens = drawn(70)
    whole, last = compute(tokens, None)
    first, state = compute({name: x[:, :, :cut] for name, x in tokens.items()}, None)
    rest, state = compute({name: x[:, :, cut:] for name, x in tokens.items()}, state)
    assert (torch.cat([first, rest], dim=2) - whole).abs().max() <= 1e-13
    assert (state - last).abs().max() <= 1e-12


def test_an_empty_state_is_the_one_that_is_told() -> None:
    compute, tokens = drawn(20)
    empty = torch.zeros(2, 1, 3, 5)
    empty[:, :, 2] = -1e38
    assert torch.equal(compute(tokens, empty)[0], compute(tokens, None)[0])
    none = {name: x[:, :, :0] for name, x in tokens.items()}
    assert torch.equal(compute(none, empty)[1].float(), empty)


def test_weights_of_each_channel_sum_to_one_and_average_the_values() -> None:
    compute, tokens = drawn(40)
    alpha = compute.weights(tokens)
    assert alpha.shape == (2, 5, 40, 40)
    assert (alpha >= 0).all() and not alpha.triu(1).any()
    assert (alpha.sum(-1) - 1).abs().max() <= 1e-12
    read = (alpha @ tokens["v"][:, 0].mT.unsqueeze(-1))[..., 0].mT
    assert (read - compute(tokens, None)[0][:, 0]).abs().max() <= 1e-12
    assert torch.equal(compute.weights(tokens, start=7, stop=29), alpha[..., 7:29])


def test_one_token_reads_of_the_state_before_it_what_the_recurrence_reads() -> None:
    compute, tokens = drawn(9)
    _, before = compute({name: x[:, :, :8] for name, x in tokens.items()}, None)
    newest = {name: x[:, :, 8:] for name, x in tokens.items()}
    read, after = compute(newest, before)
    assert (compute.read(newest, before, after) - read).abs().max() <= 1e-14
    assert torch.equal(compute.read(newest, torch.zeros_like(before) - 1e38, after), newest["v"])


@pytest.mark.parametrize("length", [4, 34])
def test_gradients_are_those_of_finite_differences(length: int) -> None:
    plain, tokens = drawn(length, channels=2)
    _, state = plain(tokens, None)

    def compute(decay: Tensor, bonus: Tensor, state: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return ExponentialAverage(decay, bonus)({"k": k, "v": v}, state)

    inputs = [x.clone().requires_grad_() for x in (plain.decay, plain.bonus, state, tokens["k"], tokens["v"])]
    assert torch.autograd.gradcheck(compute, inputs, fast_mode=True)
