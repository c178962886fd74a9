"""State-space models and hybrids go on from states, keys and convolved rows that are kept."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from mizarr import Model
from mizarr.stages.forward.architectures.points import BY_NAME
from mizarr.stages.forward.generation.generate import generate
from mizarr.stages.forward.hooks.edge_interventions import Knockout
from mizarr.stages.forward.hooks.interventions import Add, Replace
from mizarr.stages.forward.hooks.spec import BoundSpec, HookSpec
from mizarr.stages.forward.hooks.taps import RunTaps
from mizarr.stages.forward.passes.kept import Cache, read_on
from mizarr.store.errors import InterventionError

from ..random_gemmas import GEMMAS
from ..random_hybrids import HYBRIDS, save_random_hybrid
from ..random_models import VOCAB
from ..random_runs import draw_intervention

pytest.importorskip("transformers")
PROMPT, NEW = 7, 20


def draw_ids(rows: int, length: int, seed: int = 0) -> list[list[int]]:
    ids = torch.randint(2, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
    return ids.tolist()


@pytest.mark.parametrize("family", [*HYBRIDS, *GEMMAS])
def test_greedy_tokens_are_those_of_transformers_with_states_kept_or_not(family, tmp_path):
    reference = save_random_hybrid(tmp_path, family, 1)
    model, prompts = Model.from_pretrained(tmp_path), draw_ids(2, PROMPT)
    anew = generate(model, prompts, max_tokens=NEW, eos=(), cache=False)
    kept = generate(model, prompts, max_tokens=NEW, eos=(), cache=True)
    assert kept.ids == anew.ids
    ids = torch.tensor([list(result.token_ids) for result in anew])
    with torch.no_grad():
        logprobs = reference(ids, use_cache=False).logits.log_softmax(-1)[:, PROMPT - 1 : -1]
    for row, (one, other) in enumerate(zip(anew, kept, strict=True)):
        assert list(one.generated_ids) == logprobs[row].argmax(-1).tolist()
        expected = logprobs[row, range(NEW), list(one.generated_ids)]
        np.testing.assert_allclose(one.logprobs, expected, atol=1e-5)
        np.testing.assert_allclose(other.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("family", [*HYBRIDS, *GEMMAS])
def test_steps_are_positions_of_one_pass_over_the_result(family, tmp_path):
    """Random interventions, random points captured: what a step read, from kept states or not, is what a pass
    over the whole result has there."""
    save_random_hybrid(tmp_path, family, 0)
    model, rng, length = Model.from_pretrained(tmp_path), random.Random(family), PROMPT + 7
    places = [point for point in model.hook_points if not BY_NAME[point.kind].is_derived]
    for trial in range(4):
        spec = HookSpec()
        while spec.num_interventions < 2:
            point = rng.choice(places)
            change = draw_intervention(rng, model, point, length)
            moves = any(position < 0 for position in getattr(change, "positions", None) or ())
            ahead = point.kind == "pattern" and isinstance(change, Add | Replace)
            if not (moves or ahead or (isinstance(change, Knockout) and change.edges[0][0] == 0)):
                spec = spec.intervene(point, change)
        points = rng.sample([point for point in places if point.kind not in ("scores", "attn_scores")], 5)
        spec = spec.capture(*points)
        (ids,) = draw_ids(1, PROMPT, trial)
        anew = generate(model, ids, spec, max_tokens=8, eos=(), cache=False)
        kept = generate(model, ids, spec, max_tokens=8, eos=(), cache=True)
        assert kept.ids == anew.ids, spec
        cache = model.forward(anew[0].token_ids[:-1], spec)
        for point in points:
            axis = point.dims.index("position" if "position" in point.dims else "query_position") - 1
            steps = cache[point][0].movedim(axis, 0)[PROMPT - 1 :]
            for found in (anew.activations(point), kept.activations(point)):
                missing = found.isnan()
                torch.testing.assert_close(
                    found[~missing], steps[~missing], atol=1e-4, rtol=1e-3, msg=f"{point} {spec}"
                )
                assert not missing.any() or "key_position" in point.dims


@pytest.mark.parametrize("family", [*HYBRIDS, *GEMMAS])
def test_thirteen_tokens_and_twenty_seven_more_are_forty_in_as_much_memory(family, tmp_path):
    """Of what is kept, keys and values alone grow. In float64, but for RMS norms, as states that nothing
    fades add up rounding."""
    save_random_hybrid(tmp_path, family, 2)
    model, rows, cache = Model.from_pretrained(tmp_path, dtype="float64"), draw_ids(3, 100), Cache()
    attends, held = {"rot_k", "latent_k"} & {point.kind for point in model.hook_points}, []
    for length in (13, 40, 41, 100):
        parts = [row[:length] for row in rows]
        with torch.no_grad():
            found = read_on(model.network, parts, cache, RunTaps(BoundSpec(), lambda *_: None))
        whole = model.forward(torch.tensor(parts)).logits[:, -1]
        assert float((found - whole).abs().max()) <= 1e-6 * max(1.0, float(whole.abs().max()))
        held.append(cache.nbytes)
    assert (held[0] == held[1] == held[2] == held[3]) or attends
    assert held[0] > 0


def test_attention_to_tokens_of_which_the_state_alone_is_kept_is_refused(tmp_path):
    save_random_hybrid(tmp_path, "mamba2", 0)
    model, hooks = Model.from_pretrained(tmp_path), HookSpec().capture("blocks.0.ssm.hook_effective_attn")
    with pytest.raises(InterventionError, match="only the state of earlier tokens is cached; generate first"):
        generate(model, draw_ids(1, PROMPT), hooks, max_tokens=3, eos=(), cache=True)


@pytest.mark.parametrize("family", ["mamba", "bamba"])
def test_texts_that_end_leave_the_others_as_they_are(family, tmp_path):
    """Rows of states, keys and convolved inputs that stay are those of the texts that stay."""
    save_random_hybrid(tmp_path, family, 2, tie_word_embeddings=False)  # tied ones repeat themselves
    model, prompts = Model.from_pretrained(tmp_path), draw_ids(4, PROMPT, 3)
    alone = [generate(model, ids, max_tokens=NEW, eos=(), cache=True) for ids in prompts]
    texts = [list(found[0].generated_ids) for found in alone]
    lengths = {token: [until(token, text) for text in texts] for text in texts for token in text}
    ends = max(lengths, key=lambda token: len(set(lengths[token])))
    together = generate(model, prompts, max_tokens=NEW, eos=(ends,), cache=True)
    assert [len(found.generated_ids) for found in together] == lengths[ends]
    for found, text in zip(together, texts, strict=True):
        assert list(found.generated_ids) == text[: len(found.generated_ids)]
    assert len(set(lengths[ends])) > 1


def until(token: int, text: list[int]) -> int:
    """Tokens of a text that ends with this one."""
    return text.index(token) + 1 if token in text else len(text)
