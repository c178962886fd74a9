"""Recurrences as their papers write them, token by token in float64; stored results of single operators."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

KERNELS = Path(__file__).parents[6] / "shared" / "reference" / "recurrent" / "kernels"
needs_reference = pytest.mark.skipif(not KERNELS.is_dir(), reason="needs the reference kernels in ../shared")


@cache
def stored(name: str) -> dict[str, Tensor]:
    with np.load(KERNELS / f"{name}.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file}


def linear(tokens: Mapping[str, Tensor], state: Tensor | None, bonus: Tensor | None) -> tuple[Tensor, Tensor]:
    """What is read, after the change where there is no bonus, and the last state."""
    exact = {name: x.double().numpy() for name, x in tokens.items()}
    prompts, heads, length, width = exact["k"].shape
    read = np.zeros((prompts, heads, length, exact["v"].shape[-1]))
    last = np.zeros((prompts, heads, width, exact["v"].shape[-1]))
    if state is not None:
        last[:] = state.double().numpy()
    for b, h, t in product(range(prompts), range(heads), range(length)):
        token = {name: x[b, h, t] for name, x in exact.items()}
        before = last[b, h]
        after = np.exp(token["log_decay"])[:, None] * before
        if "alpha" in token:
            after += np.outer(token["beta"], token["alpha"] @ before)
        after += token.get("write", 1.0) * np.outer(token["k"], token["v"])
        if bonus is None:
            read[b, h, t] = token["q"] @ after
        else:
            own = np.sum(token["q"] * bonus[h].double().numpy() * token["k"])
            read[b, h, t] = token["q"] @ before + own * token["v"]
        last[b, h] = after
    return torch.from_numpy(read), torch.from_numpy(last)


def average(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor) -> Tensor:
    """RWKV-4 from an empty state, as a softmax over sources: k and v [T, C]."""
    read = torch.empty_like(v, dtype=torch.float64)
    for t in range(len(k)):
        exponent = k[: t + 1].double().clone()
        exponent[:t] += decay.double() * torch.arange(t - 1, -1, -1)[:, None]
        exponent[t] += bonus.double()
        read[t] = (exponent.softmax(0) * v[: t + 1].double()).sum(0)
    return read


def error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest entry; nan if anything found is."""
    return float((found.double() - expected).abs().max() / expected.abs().max())


def heads_first(x: Tensor) -> Tensor:
    """[B, T, H] or [B, T, H, width] in float64 -> [B, H, T, width]."""
    return (x.unsqueeze(-1) if x.ndim == 3 else x).double().transpose(1, 2)


class Case(NamedTuple):
    """What a stored operator was given, and gave."""

    tokens: dict[str, Tensor]
    bonus: Tensor | None
    state: Tensor | None
    read: Tensor
    after: Tensor


def case(name: str) -> Case:
    """A stored linear recurrence. What its layer adds behind it (D x of Mamba) is taken away again."""
    file = stored(name)
    one = {key: heads_first(x) for key, x in file.items() if x.ndim > 2 and not key.endswith("state")}
    read, after, bonus = one["out"], file["final_state"], file.get("u")
    if name.startswith("mamba"):
        tokens, own, after = _mamba(file)
        read = read - own
    elif bonus is not None or name == "wkv7":
        tokens = {"q": one["r"], **_kept(one, "k", "v", "log_decay"), **_corrected(one)}
    else:
        tokens = {"q": one["q"] * one["q"].shape[-1] ** -0.5, **_kept(one, "k", "v"), **_gated(one)}
    if name == "retnet":
        gamma = 1 - torch.tensor([2.0**-5, 2.0**-6], dtype=torch.float64)  # stored rounded
        tokens["log_decay"] = gamma.log().view(2, 1, 1).expand(2, 2, 75, 1)
    if name == "wkv5":
        tokens["log_decay"] = file["log_decay"].double().unsqueeze(1).expand(2, 2, 75, 16)
    return Case(tokens, bonus, file.get("initial_state"), read, after)


def _kept(one: Mapping[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: one[name] for name in names if name in one}


def _corrected(one: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"alpha": -one["kk"], "beta": one["kk"] * one["a"]} if "kk" in one else {}


def _gated(one: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Decays of GLA; and of the delta rules, with their correction and the scale of their writes."""
    gate = one.get("log_gate", torch.zeros_like(one["q"][..., :1]))
    if "beta" not in one:
        return {"log_decay": gate}
    beta = -one["beta"] * gate.exp() * one["k"]
    return {"log_decay": gate, "alpha": one["k"], "beta": beta, "write": one["beta"]}


def _mamba(file: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Tokens, D x, and the last state. Keys of Mamba-2 are of all heads; channels of Mamba-1 are heads."""
    exact = {key: x.double() for key, x in file.items()}
    x, dt = (exact[key].transpose(1, 2) for key in ("x", "dt"))
    if x.ndim == 3:
        x, after = x.unsqueeze(-1), exact["final_state"].unsqueeze(-1)
        log_decay = dt.unsqueeze(-1) * exact["A"][:, None]
    else:
        after, log_decay = exact["final_state"].mT, (dt * exact["A"][:, None]).unsqueeze(-1)
    shared = {
        name: exact[key].unsqueeze(1).expand(-1, x.shape[1], -1, -1) for name, key in (("q", "C"), ("k", "B"))
    }
    tokens = {**shared, "v": dt.unsqueeze(-1) * x, "log_decay": log_decay}
    return tokens, exact["D"][:, None, None] * x, after


def matrix_memory(tokens: Mapping[str, Tensor], eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """An mLSTM from an empty state, nothing divided by anything on the way: what is read, C, n and m."""
    exact = {name: x.double().numpy() for name, x in tokens.items()}
    prompts, heads, length, width = exact["k"].shape
    values = exact["v"].shape[-1]
    read = np.zeros((prompts, heads, length, values))
    memory, norm = np.zeros((prompts, heads, width, values)), np.zeros((prompts, heads, width))
    top = np.zeros((prompts, heads))
    for b, h, t in product(range(prompts), range(heads), range(length)):
        token = {name: x[b, h, t] for name, x in exact.items()}
        forget, enters = np.exp(token["log_decay"][0]), np.exp(token["input"][0]) * token.get("write", 1.0)
        memory[b, h] = forget * memory[b, h] + enters * np.outer(token["k"], token["v"])
        norm[b, h] = forget * norm[b, h] + enters * token["k"]
        top[b, h] = max(token["log_decay"][0] + top[b, h], token["input"][0])
        divisor = max(abs(norm[b, h] @ token["q"]), 1.0) + eps * np.exp(top[b, h])
        read[b, h, t] = token["q"] @ memory[b, h] / divisor
    found = (torch.from_numpy(x) for x in (read, memory, norm, top))
    return tuple(found)  # type: ignore[return-value]
