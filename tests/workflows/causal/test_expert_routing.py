"""Which experts read which tokens, against plain passes; what is claimed of experts that matter or do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom

import mizarr
from mizarr import HookPoint, HookSpec, Model, Zero
from mizarr.stages.causal.controls import CHANCE
from mizarr.store.errors import ConfigError
from mizarr.workflows import build, compute
from tests.known_facts import compute_as_known

from ...stages.forward.random_hybrids import save_random_hybrid

SPECIMEN = Path(mizarr.__file__).parent / "stages" / "forward" / "specimen"
TEXTS = ("The mother tongue of Danielle Darrieux is French", "It was the best of times, it was the worst.")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory):
    """The defaults, on the specimen of experts."""
    return compute("expert_routing", store=tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.from_pretrained("specimen-experts")


def test_what_is_lost_is_what_a_pass_without_the_expert_says(done, model):
    told = done.to_json()
    clean = model.forward(done.prompt).logits[0, -1].double().log_softmax(-1)
    for one in told["most"][:3]:
        point = HookPoint.expert_weights(one["layer"])
        cut = HookSpec().intervene(point, Zero(experts=(one["expert"],)))
        logs = model.forward(done.prompt, cut).logits[0, -1].double().log_softmax(-1)
        assert one["kl"] == pytest.approx(float((clean.exp() * (clean - logs)).sum()), rel=1e-3)


def test_shares_are_those_of_plain_passes(model, tmp_path):
    found = compute("expert_routing", store=tmp_path, texts=list(TEXTS), least=1, top=3)
    points = [HookPoint.expert_weights(layer) for layer in range(model.config.num_layers)]
    caches = [model.forward(text, HookSpec().capture(*points)) for text in TEXTS]
    special = found.subject.special_tokens
    for layer, point in enumerate(points):
        rows = np.concatenate([cache[point][0, special:].numpy() for cache in caches])
        share = found.use["share"].sel(layer=layer)
        np.testing.assert_allclose(share, (rows > 0).mean(0), atol=1e-12)


def test_the_expert_told_is_needed_and_beyond_chance(done):
    over, _, quiet = done.findings.findings
    assert over.verdict == "beyond chance" and over.held_out and over.prompts >= 2
    assert quiet.verdict == "no more than chance"
    used = done.use["share"].transpose("layer", "expert").values.ravel() >= 0.01
    assert done.compared == np.flatnonzero(used).tolist()
    assert (done.use["information"] > 2 * done.use["chance"].max("draw")).all(), "tokens decide where they go"


def test_it_is_told_in_every_form(done, tmp_path):
    assert json.dumps(done.to_json(), allow_nan=False)
    assert done.report(tmp_path / "page.html").stat().st_size > 10_000
    readers = done.to_json()["readers"]
    assert len(readers) == done.use["share"].size
    assert all(0 <= each["share"] <= 1 for each in readers)


def test_a_model_without_experts_and_texts_that_are_too_long_are_refused():
    with pytest.raises(ConfigError, match=r"expected a mixture-of-experts model, found specimen \(llama\)"):
        build("expert_routing", model="specimen")
    with pytest.raises(ConfigError, match="expected texts of at most 512 tokens"):
        build("expert_routing", texts=["word " * 2000])


@pytest.mark.slow
def test_random_weights_are_said_to_need_no_expert_more_than_chance(tmp_path):
    """As if they knew the facts: without that nothing is claimed of them."""
    verdicts = []
    for seed in range(20):
        folder = tmp_path / str(seed)
        save_random_hybrid(folder, "mixtral", seed, tokenizer=False, vocab_size=2048)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(SPECIMEN / file, folder)
        given = {"store": tmp_path / "store", "model": str(folder), "pieces": 4, "seed": seed}
        assert not compute("expert_routing", **given).findings.findings
        found = compute_as_known("expert_routing", **given)
        verdicts += [each.verdict == "beyond chance" for each in found.findings.findings[:1]]
    assert sum(verdicts) <= binom.ppf(0.999, len(verdicts), CHANCE), verdicts
