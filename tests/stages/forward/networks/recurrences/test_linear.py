"""Linear recurrences: stored results of single operators, the formula written out, what each kernel owes."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor

from mizarr.stages.forward.networks.recurrences.linear import LinearRecurrence
from mizarr.store.errors import ConfigError

from .recurrence_reference import case, error, linear, needs_reference

LINEAR = (
    *("deltanet", "gated_deltanet", "gla", "mamba1_scan", "mamba2_ssd", "retnet"),
    *("wkv5", "wkv6_mild", "wkv6_extreme", "wkv7"),
)
DECAYS = ("none", "mild", "steep", "forgotten", "steep, one a head", "forgotten, one a head")
KERNELS: tuple[Literal["step", "chunk"], ...] = ("step", "chunk")
LENGTHS = (1, 2, 37, 75, 100)


def recurrence(bonus: Tensor | None, kernel: Literal["auto", "step", "chunk"] = "chunk") -> LinearRecurrence:
    return LinearRecurrence("after" if bonus is None else "before", bonus, kernel)


def drawn_decay(kind: str, *shape: int) -> Tensor:
    """Logarithms of decays, [B, H, T, K or 1]."""
    uniform = torch.rand(shape if "head" not in kind else (*shape[:3], 1))
    if kind == "none":
        return torch.zeros_like(uniform)
    if kind == "mild":
        return -0.6 * uniform
    if kind.startswith("steep"):
        return -(4 * uniform).exp()  # -1 to -55
    return (-3 * uniform).masked_fill(torch.rand_like(uniform) < 0.1, -torch.inf)


def drawn(
    seed: int,
    decay: str = "mild",
    *,
    sizes: tuple[int, int, int, int, int] = (2, 2, 75, 16, 12),
    corrected: bool = False,
    written: bool = False,
) -> dict[str, Tensor]:
    """Random tokens of sizes B, H, T, K, V; a correction takes out up to twice what a key finds."""
    torch.manual_seed(seed)
    *rows, key, value = sizes
    tokens = {name: torch.randn(*rows, key) for name in ("q", "k")} | {"v": torch.randn(*rows, value)}
    tokens["log_decay"] = drawn_decay(decay, *rows, key)
    if corrected:
        found = F.normalize(tokens["k"], dim=-1)
        share = 2 * torch.rand(*rows, 1) if "head" in decay else torch.rand(*rows, key)
        tokens |= {"k": found, "alpha": -found, "beta": share * found * tokens["log_decay"].exp().sqrt()}
    if written:
        tokens["write"] = torch.randn(*rows, 1).masked_fill(torch.rand(*rows, 1) < 0.3, 0)
    return tokens


def doubled(tokens: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.double() for name, x in tokens.items()}


@needs_reference
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", LINEAR)
def test_stored_operators_are_repeated(name: str, kernel: Literal["step", "chunk"]) -> None:
    tokens, bonus, state, read, after = case(name)
    compute = recurrence(bonus, kernel)
    found, last = compute(tokens, state)
    assert (found - read).abs().max() <= 1e-10 and (last - after).abs().max() <= 1e-10
    found, last = compute({name: x.float() for name, x in tokens.items()}, state)
    assert found.dtype == last.dtype == torch.float32
    assert error(found, read) <= 5e-6 and error(last, after) <= 5e-6


@given(
    seed=st.integers(0, 2**32 - 1),
    decay=st.sampled_from(DECAYS),
    sizes=st.tuples(
        *(st.integers(1, n) for n in (2, 2)),
        st.sampled_from(LENGTHS),
        *(st.integers(1, n) for n in (9, 7)),
    ),
    corrected=st.booleans(),
    written=st.booleans(),
    before=st.booleans(),
    started=st.booleans(),
)
def test_kernels_give_what_the_formula_says(
    seed: int,
    decay: str,
    sizes: tuple[int, int, int, int, int],
    corrected: bool,
    written: bool,
    before: bool,
    started: bool,
) -> None:
    tokens = drawn(seed, decay, sizes=sizes, corrected=corrected, written=written)
    bonus = torch.randn(sizes[1], sizes[3]) if before else None
    state = torch.randn(sizes[0], sizes[1], *sizes[3:]) if started else None
    read, after = linear(tokens, state, bonus)
    scale = max(read.abs().max(), after.abs().max())
    for kernel in KERNELS:
        found, last = recurrence(bonus, kernel)(tokens, state)
        assert max((found - read).abs().max(), (last - after).abs().max()) <= 5e-6 * scale
        found, last = recurrence(bonus, kernel)(doubled(tokens), state)
        assert max((found - read).abs().max(), (last - after).abs().max()) <= 1e-13 * scale


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
def test_a_long_text_is_as_exact_as_a_short_one(decay: str, corrected: bool) -> None:
    tokens = drawn(0, decay, sizes=(1, 1, 1025, 8, 6), corrected=corrected)
    read, after = linear(tokens, None, None)
    found, last = recurrence(None)(tokens, None)
    assert error(found, read) <= 5e-6 and error(last, after) <= 5e-6


@pytest.mark.parametrize(("share", "bound"), [(0.5, 5e-6), (1.0, 5e-6), (2.0, 2e-5)])
def test_a_key_that_comes_again_and_again_costs_few_digits(share: float, bound: float) -> None:
    """As in a text of one word: powers of the triangular system grow like binomials, its inverse does not. A
    share of 2 reflects what the key finds, and never forgets an error."""
    tokens = drawn(0, "none", corrected=True)
    key = tokens["k"][:, :, :1].expand_as(tokens["k"])
    tokens |= {"k": key, "alpha": key, "beta": -share * key, "write": torch.full((2, 2, 75, 1), share)}
    read, after = linear(tokens, None, None)
    found, last = recurrence(None)(tokens, None)
    assert error(found, read) <= bound and error(last, after) <= bound


def test_one_decay_far_below_the_others_costs_no_digits() -> None:
    """Sums of logarithms would be -1000 from there on, which leaves a float four digits behind the point."""
    tokens = drawn(0, "mild")
    tokens["log_decay"][:, :, 3] = -1000
    read, after = linear(tokens, None, None)
    found, last = recurrence(None)(tokens, None)
    assert error(found[:, :, 4:], read[:, :, 4:]) <= 1e-6 and error(last, after) <= 1e-6


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("width", [2, 12], ids=["narrow", "wide"])
def test_pieces_make_the_whole(width: int, corrected: bool, before: bool) -> None:
    tokens = doubled(drawn(1, "steep", sizes=(2, 2, 40, 16, width), corrected=corrected, written=True))
    bonus = torch.randn(2, 16) if before else None
    compute = recurrence(bonus, "auto")
    whole, last = compute(tokens, None)
    first, state = compute({name: x[:, :, :13] for name, x in tokens.items()}, None)
    rest, state = compute({name: x[:, :, 13:] for name, x in tokens.items()}, state)
    assert (torch.cat([first, rest], dim=2) - whole).abs().max() <= 1e-13
    assert (state - last).abs().max() <= 1e-13


def test_of_no_tokens_nothing_is_read_and_the_state_stays() -> None:
    state = torch.randn(2, 2, 16, 12)
    read, after = recurrence(None)({name: x[:, :, :0] for name, x in drawn(0).items()}, state)
    assert read.shape == (2, 2, 0, 12) and torch.equal(after, state)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
def test_one_token_reads_of_the_states_around_it_what_the_recurrence_reads(
    corrected: bool, before: bool
) -> None:
    tokens = doubled(drawn(2, sizes=(2, 2, 1, 16, 12), corrected=corrected, written=True))
    bonus, state = torch.randn(2, 16) if before else None, torch.randn(2, 2, 16, 12).double()
    compute = recurrence(bonus)
    read, after = compute(tokens, state)
    assert (compute.read(tokens, state, after) - read).abs().max() <= 1e-13
    changed = compute.read(tokens, state + before, after + (not before)) - read
    assert torch.allclose(changed, tokens["q"].sum(-1, keepdim=True).expand_as(changed))


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_weights_times_values_are_what_is_read(
    kernel: Literal["step", "chunk"], before: bool, corrected: bool
) -> None:
    tokens = doubled(drawn(3, sizes=(2, 2, 40, 16, 12), corrected=corrected))
    compute = recurrence(torch.randn(2, 16) if before else None, kernel)
    alpha = compute.weights(tokens)
    read, _ = compute(tokens, None)
    assert alpha.shape == (2, 2, 40, 40)
    assert (alpha @ tokens["v"] - read).abs().max() <= 1e-12
    assert not alpha.triu(1).any()
    assert (compute.weights(tokens, start=7, stop=29) - alpha[..., 7:29]).abs().max() <= 1e-13


def test_weights_without_a_correction_are_products_of_decays() -> None:
    tokens = doubled(drawn(4, sizes=(1, 2, 20, 16, 12), written=True))
    bonus = torch.randn(2, 16).double()
    alpha = recurrence(bonus).weights(tokens)
    q, k, write, log_decay = (tokens[name] for name in ("q", "k", "write", "log_decay"))
    for t in range(20):
        for s in range(t):
            left = log_decay[:, :, s + 1 : t].sum(2).exp()
            expected = write[:, :, s, 0] * (q[:, :, t] * left * k[:, :, s]).sum(-1)
            assert torch.allclose(alpha[:, :, t, s], expected, rtol=0, atol=1e-12)
        assert torch.allclose(
            alpha[:, :, t, t], (q[:, :, t] * bonus * k[:, :, t]).sum(-1), rtol=0, atol=1e-12
        )


def test_weights_with_a_correction_come_of_a_walk_back_from_each_query() -> None:
    tokens = doubled(drawn(5, sizes=(1, 2, 20, 16, 12), corrected=True))
    found = recurrence(None).weights(tokens)
    for t in range(20):
        reader = tokens["q"][:, :, t]
        for s in range(t, -1, -1):
            expected = (reader * tokens["k"][:, :, s]).sum(-1)
            assert torch.allclose(found[:, :, t, s], expected, rtol=0, atol=1e-12)
            erased = (reader * tokens["beta"][:, :, s]).sum(-1, keepdim=True) * tokens["alpha"][:, :, s]
            reader = reader * tokens["log_decay"][:, :, s].exp() + erased


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_write_of_one_changes_no_bit_and_a_bonus_reads_what_was_not_written(
    kernel: Literal["step", "chunk"],
) -> None:
    tokens = drawn(6)
    compute = recurrence(torch.randn(2, 16), kernel)
    plain, last = compute(tokens, None)
    write = torch.ones(2, 2, 75, 1)
    assert torch.equal(compute(tokens | {"write": write}, None)[0], plain)
    write[:, :, -1] = 0
    read, after = compute(tokens | {"write": write}, None)
    assert torch.equal(read, plain)
    lost = tokens["k"][:, :, -1, :, None] * tokens["v"][:, :, -1, None]
    assert torch.allclose(last - after, lost, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("decay", "corrected", "width"),
    [
        ("mild", False, 5),
        ("mild", False, 2),
        ("steep", False, 5),
        ("mild", True, 5),
        ("steep", True, 5),
        ("steep, one a head", True, 5),
    ],
)
@pytest.mark.parametrize("before", [False, True])
def test_gradients_are_those_of_finite_differences(
    decay: str, corrected: bool, width: int, before: bool, kernel: Literal["step", "chunk"]
) -> None:
    tokens = doubled(drawn(7, decay, sizes=(1, 1, 4, 3, width), corrected=corrected, written=True))
    state = torch.randn(1, 1, 3, width).double()
    bonus = (torch.randn(1, 3).double(),) if before else ()

    def compute(state: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        values = dict(zip(tokens, given, strict=False))
        return recurrence(given[-1] if before else None, kernel)(values, state)

    inputs = [x.clone().requires_grad_() for x in (state, *tokens.values(), *bonus)]
    assert torch.autograd.gradcheck(compute, inputs, fast_mode=True)


@pytest.mark.parametrize("width", [2, 12], ids=["narrow", "wide"])
@pytest.mark.parametrize("decay", ["forgotten", "forgotten, one a head"])
def test_gradients_pass_by_what_is_forgotten(decay: str, width: int) -> None:
    """A multiplier of 0 is a number like others; its logarithm has the gradient 0 and never NaN."""
    tokens = doubled(drawn(8, decay, sizes=(1, 2, 40, 6, width)))
    gradients = {}
    for kernel in KERNELS:
        inputs = {name: x.clone().requires_grad_() for name, x in tokens.items()}
        read, after = recurrence(None, kernel)(inputs, None)
        (read.square().sum() + after.square().sum()).backward()
        gradients[kernel] = inputs
    for name, x in gradients["step"].items():
        grad = gradients["chunk"][name].grad
        assert x.grad is not None and x.grad.isfinite().all() and grad is not None
        assert error(grad, x.grad) <= 1e-12


@pytest.mark.parametrize(
    ("sizes", "kernel"),
    [
        ((2, 2, 16, 16, 12), "step"),
        ((2, 2, 17, 16, 12), "chunk"),
        ((2, 256, 17, 16, 1), "step"),
        ((2, 255, 17, 16, 1), "chunk"),
        ((2, 256, 17, 16, 2), "chunk"),
    ],
)
def test_few_tokens_and_many_narrow_heads_are_stepped_through(
    sizes: tuple[int, int, int, int, int], kernel: str
) -> None:
    tokens = drawn(9, sizes=sizes, corrected=True)
    read, after = recurrence(None, "auto")(tokens, None)
    for choice in KERNELS:
        same, last = recurrence(None, choice)(tokens, None)
        assert (torch.equal(read, same) and torch.equal(after, last)) == (choice == kernel)


def test_half_precision_is_computed_in_single() -> None:
    tokens = {name: x.bfloat16() for name, x in drawn(10, corrected=True).items()}
    read, after = recurrence(None)(tokens, None)
    exact, last = recurrence(None)({name: x.float() for name, x in tokens.items()}, None)
    assert read.dtype == after.dtype == torch.float32
    assert torch.equal(read, exact) and torch.equal(after, last)


def test_what_a_readout_needs_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="give zeros"):
        LinearRecurrence("before")
    with pytest.raises(ConfigError, match="'after' to have no bonus, found one"):
        LinearRecurrence("after", torch.zeros(1, 1))
    with pytest.raises(ConfigError, match="expected kernel of a LinearRecurrence to be one of"):
        LinearRecurrence("after", kernel="scan")  # type: ignore[arg-type]
