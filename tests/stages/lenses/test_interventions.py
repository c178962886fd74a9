"""Interventions along lens vectors: logits and streams of the reference, through a pass and the planner."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import mizarr
from mizarr.stages.lenses.interventions import SetCoordinates, exchange, remove, steer
from mizarr.stages.lenses.readout import lens_vectors
from mizarr.store.errors import InterventionError, MizarrError
from tests.stages.lenses.reference import NAMES, OF_LOGITS, arrays, meta, model_of, needs_reference
from tests.stages.lenses.test_readout import lens_of, readout_of

pytestmark = needs_reference


def rows_of(name: str, inputs: str) -> list[list[int]]:
    return arrays(name, "prompts")[f"inputs.{inputs}"].tolist()


def layers_of(name: str, told: dict[str, Any]) -> list[int]:
    return [layer % meta(name)["layers"] for layer in told["options"]["layers"]]


def hooks_of(name: str, told: dict[str, Any]) -> list[mizarr.HookSpec]:
    """Spec of each prompt of a case of the reference."""
    model, options, rows = model_of(name), told["options"], rows_of(name, told["inputs"])
    lens, readout, positions = lens_of(name), readout_of(name), told["options"].get("positions")
    layers = layers_of(name, told)
    if told["kind"] == "steering":
        vectors = lens_vectors(lens, readout, [options["token"]]).isel(vocab=0).sel(layer=layers)
        return [steer(model, rows, vectors, alpha=options.get("alpha", 4.0), positions=positions)] * len(rows)
    if told["kind"] == "ablation":
        tokens = options["tokens"] if isinstance(options["tokens"], list) else [options["tokens"]]
        changes = [
            remove(v, positions=positions) for v in lens_vectors(lens, readout, tokens).sel(layer=layers)
        ]
        return [spec_of(layers, changes)] * len(rows)
    tokens = [options["source_token"], options["target_token"]]
    vectors, specs = lens_vectors(lens, readout, tokens).sel(layer=layers), []
    given = {"alpha": options.get("alpha", 1.0), "positions": positions}
    for number in range(len(rows)):
        streams = [None] * len(layers)
        if "clamp_to" in options:
            clean = rows_of(name, options["clamp_to"])
            points = [f"blocks.{layer}.hook_resid_post" for layer in layers]
            cache = model.forward([clean[number % len(clean)]], mizarr.HookSpec().capture(*points))
            streams = [cache[point][0].numpy() for point in points]
        changes = [exchange(v, clean=x, **given) for v, x in zip(vectors, streams, strict=True)]
        specs.append(spec_of(layers, changes))
    return specs


def spec_of(layers: list[int], changes: list[Any]) -> mizarr.HookSpec:
    spec = mizarr.HookSpec()
    for layer, change in zip(layers, changes, strict=True):
        spec = spec.intervene(f"blocks.{layer}.hook_resid_post", change)
    return spec


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_streams_are_those_of_the_reference(name):
    wanted, model = arrays(name, "interventions"), model_of(name)
    for case, told in meta(name)["interventions"].items():
        if told["kind"] == "coordinate_patch":
            continue
        points = [f"blocks.{layer}.hook_resid_post" for layer in layers_of(name, told)]
        rows = rows_of(name, told["inputs"])
        specs = [spec.capture(*points) for spec in hooks_of(name, told)]
        runs = [mizarr.Run(tuple(ids), spec, mizarr.logits()) for ids, spec in zip(rows, specs, strict=True)]
        for number, (ids, spec, planned) in enumerate(zip(rows, specs, mizarr.run(model, runs), strict=True)):
            for cache in (model.forward([ids], spec), planned):
                found = cache.logits[0].numpy()
                np.testing.assert_allclose(
                    found, wanted[f"{case}.logits"][number], rtol=0, atol=OF_LOGITS, err_msg=case
                )
                for layer, point in zip(layers_of(name, told), points, strict=True):
                    stream = wanted[f"{case}.stream{layer}"][number]
                    np.testing.assert_allclose(cache[point][0], stream, rtol=0, atol=OF_LOGITS, err_msg=case)


def test_tokens_that_are_removed_have_no_coordinates_left_and_the_rest_stays():
    model, point = model_of("llama"), "blocks.1.hook_resid_post"
    vectors = lens_vectors(lens_of("llama"), readout_of("llama"), [3, 4, 3]).sel(layer=1)
    (ids,) = rows_of("llama", "S")
    spec = mizarr.HookSpec().capture(point)
    clean, changed = (
        model.forward([ids], hooks)[point][0].double().numpy()
        for hooks in (spec, spec.intervene(point, remove(vectors, positions=[2, -1])))
    )
    basis = np.linalg.qr(vectors.values[:2].T.astype(np.float64))[0]
    np.testing.assert_allclose(changed[[2, -1]] @ basis, 0, atol=1e-5)
    np.testing.assert_allclose(clean[2] - clean[2] @ basis @ basis.T, changed[2], atol=1e-5)
    np.testing.assert_array_equal(changed[3], clean[3])


def test_an_exchange_and_its_repetition_cancel_and_every_field_is_in_the_key():
    vectors = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    x = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(1))
    point = mizarr.HookPoint.resid_post(0)
    swap = SetCoordinates(vectors)
    torch.testing.assert_close(swap.apply(swap.apply(x, point), point), x)
    # Twice the exchange is the reflection of the difference: as far beyond as it was before.
    twice = SetCoordinates(vectors, alpha=2.0).apply(x, point)
    torch.testing.assert_close(twice, 2 * swap.apply(x, point) - x)
    different = [
        swap,
        SetCoordinates(vectors.flip(0) + 1),
        SetCoordinates(vectors, [0.0, 1.0]),
        SetCoordinates(vectors, alpha=0.5),
        SetCoordinates(vectors, positions=[1]),
    ]
    assert len({str(change.canonical()) for change in different}) == len(different)


def test_steering_prompts_of_different_length_takes_the_norms_of_their_positions_only():
    model, point = model_of("llama"), "blocks.1.hook_resid_post"
    rows = [row[:length] for row, length in zip(rows_of("llama", "B"), (9, 20), strict=True)]
    vectors = lens_vectors(lens_of("llama"), readout_of("llama"), [5]).isel(vocab=0).sel(layer=[1])
    spec = steer(model, rows, vectors, alpha=2.0)
    norms = [model.forward([ids], mizarr.HookSpec().capture(point))[point][0].norm(dim=-1) for ids in rows]
    ((_, change),) = spec.bind(model.hook_points).interventions
    # 29 norms: the fifteenth.
    assert np.linalg.norm(change.value) == pytest.approx(2 * float(torch.cat(norms).sort()[0][14]), rel=1e-5)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda v, m: exchange(v.isel(vocab=[0, 0])), "two different tokens, found those of the tokens"),
        (lambda v, m: exchange(v.isel(vocab=[0])), "two different tokens"),
        (lambda v, m: exchange(v.copy(data=v.values * 0 + v.values[:1])), "whose .cosine. is below 0.999"),
        (lambda v, m: remove(v.isel(vocab=0)), "axes vocab and hidden"),
        (lambda v, m: remove(v, positions=[]), "expected at least one of positions"),
        (lambda v, m: steer(m, [[1, 2]], v), "axes layer and hidden"),
        (
            lambda v, m: steer(m, [[1, 2]], v.isel(vocab=0).expand_dims(layer=[1]), positions=[]),
            "expected at least one of positions",
        ),
        (lambda v, m: SetCoordinates([[float("nan")] * 24]), "expected finite numbers"),
        (lambda v, m: SetCoordinates(v.values, alpha=float("inf")), "expected a finite number"),
    ],
)
def test_a_wrong_argument_is_one_line(call, said):
    vectors = lens_vectors(lens_of("llama"), readout_of("llama"), [3, 4]).sel(layer=1)
    with pytest.raises(MizarrError, match=said) as caught:
        call(vectors, model_of("llama"))
    assert "\n" not in str(caught.value)


def test_vectors_or_coordinates_of_another_shape_are_refused_before_the_pass():
    model, point = model_of("llama"), "blocks.1.hook_resid_post"
    for change in (
        SetCoordinates(np.ones((2, 23), np.float32)),
        SetCoordinates(np.ones(24, np.float32)),
        SetCoordinates(np.ones((2, 24), np.float32), [1.0, 2.0, 3.0]),
        SetCoordinates(np.ones((2, 24), np.float32), np.ones((3, 2), np.float32)),
    ):
        with pytest.raises(InterventionError, match=r"SetCoordinates at 'blocks\.1") as caught:
            model.forward([[1, 2]], mizarr.HookSpec().intervene(point, change))
        assert "\n" not in str(caught.value)


def test_nearly_parallel_vectors_are_warned_about():
    vectors = lens_vectors(lens_of("llama"), readout_of("llama"), [3, 4]).sel(layer=1)
    first, second = vectors.values
    side = second - first * (first @ second) / (first @ first)
    near = first + 0.1 * side * np.linalg.norm(first) / np.linalg.norm(side)
    with pytest.warns(UserWarning, match="nearly parallel"):
        exchange(vectors.copy(data=np.stack([first, near])))
