"""The memory of an mLSTM: the paper's equations with nothing scaled, and gates that would overflow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mizarr.stages.forward.networks.recurrences.matrix_memory import MatrixMemory

from .recurrence_reference import error, matrix_memory

LENGTHS = (1, 2, 16, 17, 37, 100)


def drawn(length: int, *, gates: float = 2.0) -> dict[str, Tensor]:
    """gates: how far input gates are from 0."""
    torch.manual_seed(length)
    q, k = torch.randn(2, 2, 3, length, 4).double()
    v, f = torch.randn(2, 3, length, 5).double(), torch.randn(2, 3, length, 1).double()
    log_input = gates * torch.randn(2, 3, length, 1).double()
    return {"q": q, "k": k, "v": v, "log_decay": torch.nn.functional.logsigmoid(2 * f), "input": log_input}


@pytest.mark.parametrize("eps", [1e-6, 0.1])
@pytest.mark.parametrize("gates", [0.5, 5.0])
@pytest.mark.parametrize("length", LENGTHS)
def test_what_is_read_and_kept_is_what_the_equations_say(length: int, gates: float, eps: float) -> None:
    tokens = drawn(length, gates=gates)
    read, state = MatrixMemory(eps)(tokens, None)
    expected, memory, norm, top = matrix_memory(tokens, eps)
    assert error(read, expected) <= 1e-10
    found = state[..., :-1] * state[..., -1:].exp()
    assert error(found[..., :-1], memory) <= 1e-10
    assert error(found[..., -1], norm) <= 1e-10
    assert error(state[..., -1], top[..., None].expand(-1, -1, 4)) <= 1e-12


@pytest.mark.parametrize("cut", [1, 13, 27, 39])
def test_pieces_make_the_whole(cut: int) -> None:
    tokens, compute = drawn(40), MatrixMemory(1e-6)
    whole, last = compute(tokens, None)
    first, state = compute({name: x[:, :, :cut] for name, x in tokens.items()}, None)
    second, state = compute({name: x[:, :, cut:] for name, x in tokens.items()}, state)
    assert error(torch.cat([first, second], dim=2), whole) <= 1e-12
    assert error(state, last) <= 1e-12


@pytest.mark.parametrize("length", LENGTHS)
def test_weights_times_values_are_what_is_read_and_later_sources_have_none(length: int) -> None:
    tokens, compute = drawn(length), MatrixMemory(1e-3)
    tokens["write"] = torch.rand(2, 3, length, 1).double()
    read, _ = compute(tokens, None)
    alpha = compute.weights(tokens)
    assert error(alpha @ tokens["v"], read) <= 1e-12
    assert not alpha.triu(1).any()
    assert error(compute.weights(tokens, start=length // 2), alpha[..., length // 2 :]) <= 1e-12
    expected, *_ = matrix_memory(tokens, 1e-3)
    assert error(read, expected) <= 1e-10


def test_a_token_reads_of_a_state_that_somebody_set_what_it_would_read_of_its_own() -> None:
    tokens, compute = drawn(9), MatrixMemory(1e-6)
    read, state = compute(tokens, None)
    last = {name: x[:, :, -1:] for name, x in tokens.items()}
    assert error(compute.read(last, torch.zeros_like(state), state), read[:, :, -1:]) <= 1e-12


def test_gates_whose_exponentials_overflow_do_not() -> None:
    """In float32: e^100 is infinite, and what is read is a ratio."""
    tokens = {name: x.float() for name, x in drawn(100, gates=60.0).items()}
    read, state = MatrixMemory(1e-6)(tokens, None)
    exact = {name: x.double() for name, x in tokens.items()}
    wide, _ = MatrixMemory(1e-6)(exact, None)
    assert float(tokens["input"].max()) > 89
    assert read.isfinite().all() and state.isfinite().all()
    assert error(read, wide) <= 1e-4 and error(wide, matrix_memory(exact, 1e-6)[0]) <= 1e-8


def test_a_token_that_forgets_everything_is_a_beginning() -> None:
    tokens = drawn(20)
    tokens["log_decay"][:, :, 8] = -torch.inf
    tokens["input"][:, :, 8] += 10.0
    read, _ = MatrixMemory(0.0)(tokens, None)
    alone, _ = MatrixMemory(0.0)({name: x[:, :, 8:] for name, x in tokens.items()}, None)
    assert read.isfinite().all()
    assert error(read[:, :, 8:], alone) <= 1e-12
