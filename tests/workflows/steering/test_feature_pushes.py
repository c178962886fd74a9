"""States pushed along a feature: the matrix and its null by plain passes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import mizarr
from mizarr.store.errors import MizarrError
from mizarr.workflows import build, compute

PROMPT = "The large horse said night\nand Estella with the coach said"
SITE = 5
"""The end of the first line."""
GIVEN = {
    "prompt": PROMPT,
    "target": "light",
    "feature": "0:184",
    "inject_position": SITE,
    "max_strength": 20.0,
    "strength_steps": 1,
    "controls": 3,
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory):
    return compute("steering_convergence", store=tmp_path_factory.mktemp("pushes") / "store", **GIVEN)


@pytest.fixture(scope="module")
def model() -> mizarr.Model:
    return mizarr.Model.from_pretrained("specimen")


def cosines(model: mizarr.Model, vector: torch.Tensor, layer: int) -> list[float]:
    """Of the last token after each layer from this one on, pushed and not, by two plain passes."""
    spec = mizarr.HookSpec().capture("blocks.*.hook_resid_post")
    pushed = mizarr.HookSpec().intervene(
        f"blocks.{layer}.hook_resid_post", mizarr.Add(vector[None], positions=(SITE,))
    )
    one, other = model.forward(PROMPT, spec), model.forward(PROMPT, pushed.extend(spec))
    found = []
    for later in range(layer, 6):
        name = f"blocks.{later}.hook_resid_post"
        a, b = (each[name][0, -1].double() for each in (one, other))
        found.append(float(a @ b / (a.norm() * b.norm())))
    return found


@pytest.mark.parametrize("strength", [1.0, 20.0])
def test_the_matrix_is_that_of_plain_passes_with_what_the_feature_writes(done, model, strength):
    held = mizarr.Dictionary.from_pretrained("specimen/clt")
    similarity = (
        done.push_effects()["similarity"].sel(strength=strength).transpose("layer", "read_layer").values
    )
    for layer in range(5):
        vector = strength * held.decoder_vector("0:184", layer)
        # What was pushed at this layer itself is told before it is read.
        assert similarity[layer, layer + 1 :] == pytest.approx(cosines(model, vector, layer)[1:], abs=1e-5)


def test_a_control_is_another_feature_as_long_in_every_layer(done, model):
    held, drawn = mizarr.Dictionary.from_pretrained("specimen/clt"), done.result("controls").load()
    first = done.nodes["controls"].experiment.experiments[0]
    assert first.draw != 184
    for layer in (0, 3):
        own, other = held.decoder_vector("0:184", layer), held.decoder_vector((0, first.draw), layer)
        vector = 20.0 * other * (own.norm() / other.norm())
        expected = cosines(model, vector, layer)
        found = drawn["similarity"].isel(draw=0).sel(layer=layer, strength=20.0).values
        np.testing.assert_allclose(found[layer + 1 :], expected[1:], atol=1e-5)


def test_the_document_names_the_feature_and_the_null_says_what_was_drawn(done):
    told = done.to_json()
    assert told["feature"] == {"layer": 0, "index": 184} and told["clt_repo"] == "specimen/clt"
    assert told["contrastive_prompt"] is None
    assert [row["injection_layer"] for row in told["layer_summaries"]] == list(range(6))
    (claim,) = told["findings"]
    assert "along L0:184" in claim["claim"]
    assert claim["null"]["of"] == "other features of layer 0 with the same norm, at the same position"
    assert claim["null"]["draws"] == 3


def test_a_feature_of_a_later_layer_is_pushed_where_it_writes(tmp_path: Path):
    given = GIVEN | {"feature": "4:10", "controls": 1}
    told = compute("steering_convergence", store=tmp_path, **given).to_json()
    assert [row["injection_layer"] for row in told["layer_summaries"]] == [4, 5]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"contrastive": PROMPT}, "either a feature or counterparts"),
        ({"feature": None, "dictionary": "specimen/clt"}, "expected a feature of the dictionary"),
        ({"feature": "0:9999"}, "from 0 to 479.*, found 9999"),
        ({"feature": "9:1"}, "9"),
        ({"feature": "many"}, "many"),
        ({"inject_position": "auto"}, "needs a counterpart"),
        ({"dictionary": "specimen/sae"}, "specimen/sae|layer"),
        ({"batch_file": "x.json", "prompt": None, "target": None}, "either a feature or counterparts"),
        ({"model": "specimen-rwkv"}, "expected a dictionary for specimen-rwkv, found none"),
    ],
)
def test_what_cannot_be_pushed_is_refused_in_one_line(given, match):
    with pytest.raises(MizarrError, match=match) as caught:
        build("steering_convergence", **GIVEN | given)
    assert "\n" not in str(caught.value)
