"""Random runs for a model: prompts of several lengths, several interventions at several places, captures."""

from __future__ import annotations

import random
from typing import Any

import torch

from mizarr.stages.forward.architectures.points import BY_NAME, HookPoint
from mizarr.stages.forward.hooks.edge_interventions import Knockout, SetValue, Steer
from mizarr.stages.forward.hooks.interventions import (
    Add,
    AddAtPositions,
    Clamp,
    Intervention,
    Replace,
    Scale,
    Zero,
)
from mizarr.stages.forward.hooks.spec import HookSpec
from mizarr.stages.forward.hooks.subspaces import LinearCondition, Subspace
from mizarr.stages.forward.hooks.wants import Logits
from mizarr.stages.forward.models.model import Model
from mizarr.stages.forward.runs.run import Run

SCALES = (
    *("ln1_scale", "ln2_scale", "ln1_post_scale", "ln2_post_scale", "ln_final_scale", "head_scale"),
    *("laurel_scale", "layer_input_scale"),
)
DECAYS = tuple(
    f"{room}_{name}" for room in ("rwkv", "ssm", "linear", "mlstm") for name in ("log_decay", "decay")
)


def sizes_of(model: Model, length: int, layer: int | None) -> dict[str, int]:
    """Sizes of every axis of a layer for one prompt."""
    positions = {"batch": 1, "position": length, "query_position": length, "key_position": length}
    return {**model.config.sizes_in(layer), **positions}


def draw_intervention(rng: random.Random, model: Model, point: HookPoint, length: int) -> Intervention:
    """Something that can be done at a point to a prompt of this length."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    sizes = sizes_of(model, length, point.layer)
    positions = rng.choice([None, tuple(sorted(rng.sample(range(length), rng.randint(1, min(3, length)))))])
    if positions is not None and rng.random() < 0.3:
        positions = tuple(position - length for position in positions)
    head_axis = next((axis for axis in point.dims if axis.endswith(("head", "group"))), None)
    heads = None if head_axis is None else rng.choice([None, (rng.randrange(sizes[head_axis]),)])
    where = {"positions": positions, "heads": heads}
    if "expert" in point.dims:
        where["experts"] = rng.choice([None, (rng.randrange(sizes["expert"]),)])
    query = rng.randrange(length)
    seen = length - 1 if model.config.looks_ahead else query
    edges = rng.choice([[(query, rng.randint(0, seen))], [(query, None)], [(None, rng.randrange(length))]])
    if point.kind == "pattern" and rng.random() < 0.6:
        if rng.random() < 0.5:
            return Steer(edges=edges, factor=rng.choice([0.0, 0.5, 3.0]), heads=heads)
        return SetValue(edges=[(query, rng.randint(0, seen))], value=rng.choice([0.0, 0.3, 1.0]), heads=heads)
    if point.kind in ("scores", "attn_scores") and rng.random() < 0.6:
        ahead = model.config.looks_ahead
        spared = [(q, rng.randrange(length if ahead else q)) for q in range(1, length) if rng.random() < 0.5]
        return Knockout(edges=spared or [(0, length - 1)] if length > 1 else [(0, 0)], heads=heads)
    if point.kind == "attn_scores":  # -inf where masked: numbers may only be scaled
        return Scale(rng.choice([0.5, 2.0]), **where)
    if point.kind in DECAYS:  # no more than 1 is kept
        return (
            Scale(0.5, **where)
            if not point.kind.endswith("log_decay")
            else Scale(rng.choice([0.5, 2.0]), **where)
        )
    if point.kind in SCALES:
        return Scale(rng.choice([0.5, 2.0]), **where)
    if point.dims == ("batch", "position", "hidden") and rng.random() < 0.2:
        pairs = [(rng.randrange(length), torch.randn(sizes["hidden"], generator=generator)) for _ in range(2)]
        return AddAtPositions(pairs, scale=0.7)
    region = Zero(**where).region(point, sizes)
    if "position" in point.dims[:-1]:
        where |= draw_direction(rng, region[-1], generator)
    kind = rng.choice([Replace, Add, Scale, Zero, Clamp])
    if kind is Clamp:
        return Clamp(-0.5, rng.choice([None, 0.3]), **where)
    if kind is Scale:
        return Scale(rng.choice([0.0, 0.5, -1.5]), **where)
    if kind is Zero:
        return Zero(**where)
    shape = region if rng.random() < 0.5 else region[-1:]
    if kind is Add and "within" in where and rng.random() < 0.5:
        where |= {"relative_to": "norm"}
    return kind(torch.randn(shape, generator=generator), **where)


def draw_direction(rng: random.Random, width: int, generator: torch.Generator) -> dict[str, Any]:
    """No restriction, or a subspace, a condition or both."""
    vectors = torch.randn(rng.randint(1, min(3, width)), width, generator=generator)
    within = {"within": Subspace(vectors)}
    where = {"where": LinearCondition(torch.randn(width, generator=generator), rng.uniform(-1, 1))}
    return rng.choice([{}, {}, within, where, within | where])


def draw_run(rng: random.Random, model: Model, prompt: list[int], shared: list[Any]) -> Run:
    """A run with zero to three interventions, some of them the same as in other runs of this prompt."""
    length = len(prompt)
    spec = HookSpec()
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        if shared and rng.random() < 0.4:
            point, change = rng.choice(shared)
        else:
            point = rng.choice([each for each in model.hook_points if not BY_NAME[each.kind].is_derived])
            change = draw_intervention(rng, model, point, length)
            if not (isinstance(change, Knockout) and length == 1):
                shared.append((point, change))
        if isinstance(change, Knockout) and (length == 1 or change.edges[0][0] == 0):
            continue
        spec = spec.intervene(point, change)
    for point in rng.sample(model.hook_points, rng.choice([0, 0, 1, 3])):
        spec = spec.capture(point, when=rng.choice(["after", "before"]))
    positions = rng.choice([None, (-1,), (0, -1), (rng.randrange(length),)])
    tokens = rng.choice([None, None, (3, 17, 250)])
    return Run(prompt, spec, rng.choice([Logits(positions, tokens), Logits((-1,)), None]))


def draw_runs(rng: random.Random, model: Model, count: int) -> list[Run]:
    """Runs on three prompts of different length, in mixed order."""
    vocab = model.config.vocab_size
    prompts = [
        [rng.randrange(2, vocab) for _ in range(length)] for length in rng.sample([1, 2, 5, 9, 13, 40], 3)
    ]
    shared: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    chosen = [rng.randrange(3) for _ in range(count)]
    return [draw_run(rng, model, prompts[i], shared[i]) for i in chosen]
