"""Generation: the reference's tokens, with kept keys or without, alone or in company, under interventions."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import mizarr
from mizarr import Add, AddAtPositions, HookSpec, Knockout, Replace, Scale, SetValue, Steer, Zero
from mizarr.stages.forward.architectures.points import HookPoint
from mizarr.stages.forward.generation.continuations import GenerationSettings
from mizarr.stages.forward.generation.generate import NewToken, TokenStream, generate, narrowed
from mizarr.stages.forward.generation.growing import so_far, why_uncached
from mizarr.stages.forward.generation.stopping import GeneratedText, Stop
from mizarr.stages.forward.hooks.interventions import Intervention
from mizarr.stages.forward.models.model import Model
from mizarr.stages.forward.text.world import WorldTokenizer
from mizarr.store.errors import ConfigError, HookPointNotFound, InterventionError, PromptError, TokenizerError

from ..random_models import FAMILIES, VOCAB, draw, save_random_model, save_world_vocabulary
from ..random_runs import draw_intervention

pytest.importorskip("transformers")
PROMPT, NEW = 7, 34
"""Together past every drawn window, and past the 32 positions at which longrope changes its factors."""
LIVELY = ("mistral", 2)
"""A random model whose greedy text does not run in a circle."""


def load(folder: Path, family: str = LIVELY[0], seed: int = LIVELY[1], **overrides) -> Model:
    save_random_model(folder, family, seed, **overrides)
    return Model.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(tmp_path_factory.mktemp("lively"))


def draw_ids(rows: int, length: int, seed: int = 0) -> list[list[int]]:
    ids = torch.randint(2, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
    return ids.tolist()


def assert_same(found, expected, tolerance=1e-4):
    """Token ids equal, log-probabilities near."""
    assert found.ids == expected.ids
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=tolerance)


# Against the reference


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family, tmp_path):
    reference = save_random_model(tmp_path, family, 2)
    model = Model.from_pretrained(tmp_path)
    prompts = draw_ids(2, PROMPT, seed=2)
    found = generate(model, prompts, max_tokens=NEW, cache=False)
    kept = generate(model, prompts, max_tokens=NEW, cache=True)
    assert_same(kept, found)
    expected = reference.generate(
        torch.tensor(prompts),
        do_sample=False,
        use_cache=False,
        max_new_tokens=NEW,
        pad_token_id=1,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logprobs = torch.stack(expected.logits, 1).log_softmax(-1)
    for row, result in enumerate(found):
        ids = list(result.generated_ids)
        assert ids == expected.sequences[row, PROMPT : PROMPT + len(ids)].tolist()
        assert result.finish_reason == ("eos" if ids[-1] == 1 else "max_tokens")
        np.testing.assert_allclose(result.logprobs, logprobs[row, range(len(ids)), ids], atol=1e-4)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        (
            "llama",
            {
                "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
                "max_position_embeddings": 16,
            },
        ),
        ("phi3", {}),
    ],
    ids=["dynamic", "longrope"],
)
def test_kept_keys_are_read_anew_where_rope_turns_with_the_length(family, overrides, tmp_path):
    model = load(tmp_path, family, 0, **overrides)
    assert model.config.heads_of(0).rope.scheme in ("dynamic", "longrope")
    prompts = draw_ids(3, 12)
    anew = generate(model, prompts, max_tokens=30, cache=False)
    for cache in (True, None):
        assert_same(generate(model, prompts, max_tokens=30, cache=cache), anew)


def test_bfloat16_generates_too(tmp_path):
    save_random_model(tmp_path, "gemma2", 1)
    model = Model.from_pretrained(tmp_path, dtype="bfloat16")
    hooks = HookSpec().capture("blocks.0.hook_resid_post")
    for cache in (False, True):
        found = generate(model, draw_ids(1, PROMPT), hooks, max_tokens=5, cache=cache)
        assert found.activations("blocks.0.hook_resid_post").dtype == torch.bfloat16
        assert found.to_xarray()["resid_post"].dtype == np.float32
        assert found[0].generated_tokens == 5


# Batches and seeds


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_a_prompt_gives_the_same_alone_and_in_company(model, cache, temperature):
    prompts = [*draw_ids(2, PROMPT), *draw_ids(2, 3), *draw_ids(1, 11)]
    chosen = {"max_tokens": 12, "temperature": temperature, "cache": cache}
    together = generate(model, prompts, seed=5, **chosen)
    for row, ids in enumerate(prompts):
        alone = generate(model, ids, seed=5, **chosen)
        assert together.ids[row] == alone.ids[0]
        np.testing.assert_allclose(together[row].logprobs, alone[0].logprobs, atol=1e-4)


@pytest.mark.parametrize("cache", [False, True])
def test_company_that_ends_early_changes_nothing(model, cache):
    prompts = draw_ids(3, PROMPT)
    free = generate(model, prompts, max_tokens=16, cache=cache, eos=())
    ends = free.ids[1][4]  # a token of the second prompt ends generations
    found = generate(model, prompts, max_tokens=16, cache=cache, eos=[ends])
    assert found[1].finish_reason == "eos"
    for row in range(3):
        whole = free.ids[row]
        assert found.ids[row] == (whole[: whole.index(ends) + 1] if ends in whole else whole)


def test_seeds_repeat_and_differ(model):
    prompts = draw_ids(1, PROMPT) * 3
    first, again, other = generate(model, prompts, max_tokens=20, temperature=1.0, seed=[3, 3, 4]).ids
    assert first == again != other
    assert generate(model, prompts[0], max_tokens=20, temperature=1.0, seed=4).ids == [other]


def test_top_k_and_top_p_keep_the_likeliest(model):
    logits = torch.log(torch.tensor([0.1, 0.4, 0.3, 0.15, 0.05], dtype=torch.float64))
    assert narrowed(logits, 1.0, 2, None).isfinite().tolist() == [False, True, True, False, False]
    assert narrowed(logits, 1.0, None, 0.69).isfinite().tolist() == [False, True, True, False, False]
    assert narrowed(logits, 1.0, None, 0.71).isfinite().tolist() == [False, True, True, True, False]
    assert narrowed(logits, 1.0, None, 0.01).isfinite().tolist() == [False, True, False, False, False]
    assert narrowed(logits, 1.0, 1, 0.9).isfinite().sum() == 1
    # Sharpened, the first token alone reaches the same share.
    assert narrowed(logits, 0.1, None, 0.69).isfinite().sum() == 1
    assert narrowed(torch.zeros(4), 1.0, 2, None).isfinite().tolist() == [True, True, False, False]
    greedy = generate(model, draw_ids(1, PROMPT), max_tokens=10)
    likeliest = generate(model, draw_ids(1, PROMPT), max_tokens=10, temperature=2.0, seed=0, top_k=1)
    assert likeliest.ids == greedy.ids
    np.testing.assert_allclose(likeliest[0].logprobs, greedy[0].logprobs, atol=1e-6)


# Ends


def test_a_generation_ends_at_its_length_or_with_the_context(model):
    assert generate(model, draw_ids(1, PROMPT), max_tokens=3)[0].finish_reason == "max_tokens"
    context = model.config.context_length
    for cache in (False, True):
        found = generate(model, draw_ids(1, context - 2), max_tokens=9, cache=cache, eos=())[0]
        assert (found.finish_reason, found.total_tokens) == ("context", context)
        model.forward(found.token_ids)  # what is given can be read


def test_ids_end_a_generation_and_stay_out_of_its_text(model):
    free = generate(model, "The capital", max_tokens=20, eos=())[0]
    ends = free.generated_ids[6]
    cut = free.generated_ids[: free.generated_ids.index(ends) + 1]
    tokenizer = model.tokenizer
    for chosen, reason in (
        ({"stop": ends}, "stop"),
        ({"eos": [ends]}, "eos"),
        ({"stop": ["\0", ends]}, "stop"),
    ):
        found = generate(model, "The capital", max_tokens=20, **{"eos": (), **chosen})[0]
        assert (found.generated_ids, found.finish_reason) == (cut, reason)
        known = [token for token in cut[:-1] if tokenizer.decode_token(token)]
        assert found.generated_text == tokenizer.decode(known, keep_special=False)


def test_a_model_names_its_own_end(tmp_path):
    free = generate(load(tmp_path / "free"), draw_ids(1, PROMPT), max_tokens=12, eos=())
    ends = free.ids[0][5]
    (tmp_path / "own").mkdir()
    model = load(tmp_path / "own")
    (tmp_path / "own" / "generation_config.json").write_text(f'{{"eos_token_id": [{ends}]}}')
    found = generate(model, draw_ids(1, PROMPT), max_tokens=12)
    assert found[0].finish_reason == "eos"
    assert found.ids[0] == free.ids[0][: free.ids[0].index(ends) + 1]


def test_a_stop_string_is_found_across_tokens_and_cut_off(model):
    free = generate(model, "The capital", max_tokens=24, eos=())[0]
    text = free.generated_text
    assert text is not None and len(text) > 8
    pieces: list[str] = []
    for start, end in [(2, 5), (4, 8), (0, 1)]:
        pieces.clear()
        stop = text[start:end]
        found = generate(
            model,
            "The capital",
            max_tokens=24,
            eos=(),
            stop=stop,
            on_token=lambda new: pieces.append(new.text),
        )[0]
        assert found.finish_reason == "stop"
        assert found.generated_text == text[: text.index(stop)] == "".join(pieces)
        assert found.generated_ids == free.generated_ids[: found.generated_tokens]
        assert found.full_text == "The capital" + found.generated_text


def test_what_streams_is_the_text_and_never_half_a_character(model):
    """Tokens of a byte each: an accent of two bytes, a bicycle of four."""
    tokenizer = model.tokenizer
    said = "hé 🚲 b\n"
    prompt, ids = tokenizer.encode("xé ").ids, tokenizer.encode_raw(said).ids
    assert len(ids) > len(said)
    text = GeneratedText(tokenizer, prompt)
    pieces = [text.push(token) for token in ids]
    assert "".join(pieces) == said == text.text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    halved = GeneratedText(tokenizer, prompt)
    shown = "".join(halved.push(token) for token in tokenizer.encode_raw("ab🚲").ids[:-1])
    assert shown == "ab", "half a character may still become a whole one"
    assert halved.finish() == "\N{REPLACEMENT CHARACTER}", "and at the end it is what it is"
    started = tokenizer.encode("x🚲").ids
    assert GeneratedText(tokenizer, started[:-1]).push(started[-1]) == "🚲"


def test_tokens_that_end_inside_a_character_stream_whole_characters(tmp_path):
    """A vocabulary of byte strings: 日 in two tokens, 🚲 in four, then a byte that nothing completes."""
    tokenizer = WorldTokenizer(save_world_vocabulary(tmp_path, b"\xe6\x97"))
    ids = [*tokenizer.encode("h日🚲").ids, 0, *tokenizer.encode_bytes(b"\xe6a")]
    text = GeneratedText(tokenizer, tokenizer.encode("日").ids[:1])
    shown = [text.push(token) for token in ids]
    assert shown == ["h", "", "日", "", "", "", "🚲", "", "", "\N{REPLACEMENT CHARACTER}a"]
    assert text.finish() == "" and text.text == "".join(shown)


def test_the_beginning_of_a_stop_string_is_held_back(model):
    tokenizer = model.tokenizer
    text = GeneratedText(tokenizer, tokenizer.encode("x").ids, ["\n\nEnd", "zz"])
    shown = [text.push(token) for letter in "a\n\nEnz\nb" for token in tokenizer.encode_raw(letter).ids]
    assert shown == ["a", "", "", "", "", "\n\nEn", "z", "\nb"]
    ended = GeneratedText(tokenizer, tokenizer.encode("x").ids, ["\n\nEnd", "zz"])
    shown = [ended.push(token) for letter in "a\n\nEnd" for token in tokenizer.encode_raw(letter).ids]
    assert shown == ["a", "", "", "", "", ""]
    assert ended.is_stopped and ended.text == "a" and ended.finish() == ""


# Interventions at every step


def by_hand(model: Model, ids: list[int], spec_of, steps: int) -> list[int]:
    """Greedy tokens by a plain loop over forward passes."""
    grown = list(ids)
    for _ in range(steps):
        logits = model.forward(grown, spec_of(len(grown)), want=mizarr.logits(position=-1)).logits[0, 0]
        grown.append(int(logits.argmax()))
    return grown[len(ids) :]


def vector(model: Model, seed: int = 0) -> torch.Tensor:
    return torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(seed))


def test_interventions_act_at_every_step_on_the_whole_sequence(model):
    (ids,) = draw_ids(1, PROMPT)
    steer = HookSpec().intervene("blocks.0.hook_resid_post", Add(vector(model)))
    found = generate(model, ids, steer, max_tokens=20, eos=()).ids[0]
    assert found == by_hand(model, ids, lambda length: steer, 20)
    assert found != generate(model, ids, max_tokens=20, eos=()).ids[0]


def test_a_negative_position_is_the_newest_one_of_each_step(model):
    (ids,) = draw_ids(1, PROMPT)
    last = HookSpec().intervene("blocks.0.hook_resid_post", Add(vector(model), positions=(-1,)))
    found = generate(model, ids, last, max_tokens=20, eos=()).ids[0]
    assert found == by_hand(model, ids, lambda length: last, 20)
    # With kept keys every position stays what it was made when it was the newest.
    kept = generate(model, ids, last, max_tokens=20, eos=(), cache=True).ids[0]
    since = PROMPT - 1

    def stays(length: int) -> HookSpec:
        return HookSpec().intervene(
            "blocks.0.hook_resid_post", Add(vector(model), positions=range(since, length))
        )

    assert kept == by_hand(model, ids, stays, 20)
    assert kept != found


def test_a_position_to_come_is_left_in_peace_until_it_is_there(model):
    (ids,) = draw_ids(1, PROMPT)
    places = (2, PROMPT + 3, PROMPT + 6)
    values = torch.stack([vector(model, seed) for seed in range(3)])
    spec = HookSpec().intervene("blocks.0.hook_resid_post", Replace(values, positions=places))
    pairs = list(zip(places, values, strict=True))
    spec = spec.intervene("blocks.1.hook_attn_out", AddAtPositions(pairs))
    edges = [(3, 1), (PROMPT + 4, 2), (None, PROMPT + 2), (PROMPT + 5, None)]
    spec = spec.intervene("blocks.1.attn.hook_pattern", Steer(edges[:3], 4.0))
    spec = spec.intervene("blocks.0.attn.hook_scores", Knockout([(4, 0), (PROMPT + 4, 3)], heads=(0,)))

    def so_far(length: int) -> HookSpec:
        kept = [i for i, place in enumerate(places) if place < length]
        there = [edge for edge in edges[:3] if all(place is None or place < length for place in edge)]
        cut = [edge for edge in [(4, 0), (PROMPT + 4, 3)] if edge[0] < length]
        return (
            HookSpec()
            .intervene("blocks.0.hook_resid_post", Replace(values[kept], positions=[places[i] for i in kept]))
            .intervene("blocks.1.hook_attn_out", AddAtPositions([pairs[i] for i in kept]))
            .intervene("blocks.1.attn.hook_pattern", Steer(there, 4.0))
            .intervene("blocks.0.attn.hook_scores", Knockout(cut, heads=(0,)))
        )

    for cache in (False, True):
        found = generate(model, ids, spec, max_tokens=16, eos=(), cache=cache)
        assert found.ids[0] == by_hand(model, ids, so_far, 16)


def test_payloads_and_masks_are_cut_to_the_positions_there_are():
    values = torch.randn(2, 3, 10)  # of [head, query, key], queries 1, 5 and 9
    spread = Replace(values, positions=(1, 5, 9))
    for length, there in ((10, 3), (9, 2), (6, 2), (5, 1)):
        found = so_far(HookPoint.scores(0), spread, length)
        assert found.positions == (1, 5, 9)[:there]
        torch.testing.assert_close(found.value, values[:, :there, :length])
    assert so_far(HookPoint.scores(0), spread, 1) is None
    whole = Add(torch.randn(1, 10, 4))
    torch.testing.assert_close(so_far(HookPoint.resid_post(0), whole, 6).value, whole.value[:, :6])
    mask = np.tril(np.ones((10, 10), bool), -1)
    np.testing.assert_array_equal(so_far(HookPoint.scores(0), Knockout(mask=mask), 4).mask, mask[:4, :4])
    for change in (Add(torch.randn(4)), Scale(2.0), Replace(torch.randn(1, 4), positions=(-1,))):
        assert so_far(HookPoint.resid_post(0), change, 6) is change


def draw_spec(rng: random.Random, model: Model, length: int) -> HookSpec:
    """Interventions that do to a position the same however many follow it."""
    spec = HookSpec()
    while spec.num_interventions < 3:
        point = rng.choice(model.hook_points)
        change = draw_intervention(rng, model, point, length)
        moves = any(position < 0 for position in getattr(change, "positions", None) or ())
        ahead = point.kind == "pattern" and isinstance(change, Add | Replace)
        if not (moves or ahead or (isinstance(change, Knockout) and change.edges[0][0] == 0)):
            spec = spec.intervene(point, change)
    return spec


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_are_positions_of_one_pass_over_the_result(family, tmp_path):
    """Three random interventions at a time, every kind of hook point captured before and after them: what a
    step read, with and without kept keys, is what a pass over the whole result has there."""
    seeds = (seed for seed in range(20) if "dynamic" not in str(draw(family, seed)))
    models = []
    for seed in seeds:
        models.append(load(tmp_path / str(seed), family, seed))
        if models[-1].config.heads_of(0).rope.depends_on_length:
            models.pop()
        if len(models) == 2:
            break
    rng = random.Random(family)
    length = PROMPT + 11
    for model in models:
        for trial in range(4):
            (ids,) = draw_ids(1, PROMPT, trial)
            spec = draw_spec(rng, model, length)
            points = rng.sample(model.hook_points, 6)
            spec = spec.capture(*points[:3]).capture(*points[3:], when="before")
            plain = generate(model, ids, spec, max_tokens=12, eos=(), cache=False)
            kept = generate(model, ids, spec, max_tokens=12, eos=(), cache=True)
            result = plain[0]
            assert kept.ids == plain.ids, spec
            cache = model.forward(result.token_ids[:-1], spec)
            logprobs = cache.logits[0, PROMPT - 1 :].log_softmax(-1)
            own = logprobs[range(12), list(result.generated_ids)].numpy()
            np.testing.assert_allclose(result.logprobs, own, atol=2e-4)
            np.testing.assert_allclose(kept[0].logprobs, own, atol=2e-4)
            for point in points:
                whole = cache[point][0]
                axis = point.dims.index("position" if "position" in point.dims else "query_position") - 1
                steps = whole.movedim(axis, 0)[PROMPT - 1 :]
                for found in (plain.activations(point), kept.activations(point)):
                    assert found.shape == steps.shape
                    missing = found.isnan()
                    torch.testing.assert_close(
                        found[~missing], steps[~missing], atol=1e-4, rtol=1e-3, msg=f"{point} {spec}"
                    )
                    assert not missing.any() or "key_position" in point.dims


# Which way to read


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_chosen_gives_the_tokens_of_reading_anew(family, tmp_path):
    """Whatever is done, at positions counted from either end: keys are kept only where nobody can tell."""
    model, rng, ways = load(tmp_path, family, 1), random.Random(family), set()
    for trial in range(12):
        (ids,) = draw_ids(1, PROMPT, trial)
        spec = HookSpec()
        if trial % 6 == 0:
            spec = spec.intervene("blocks.1.hook_resid_pre", Scale(0.5, positions=(-1 - trial,)))
        while spec.num_interventions < 1 + trial % 2:
            point = rng.choice(model.hook_points)
            change = draw_intervention(rng, model, point, PROMPT)
            if not (isinstance(change, Knockout) and change.edges[0][0] == 0):
                spec = spec.intervene(point, change)
        try:
            anew = generate(model, ids, spec, max_tokens=10, eos=(), cache=False)
        except InterventionError:  # a payload as long as the prompt, which does not grow with it
            continue
        chosen = generate(model, ids, spec, max_tokens=10, eos=())
        assert chosen.ids == anew.ids, spec
        np.testing.assert_allclose(chosen[0].logprobs, anew[0].logprobs, atol=2e-4, err_msg=str(spec))
        ways.add(chosen.reading.partition(":")[0])
    assert ways == {"keys and values kept", "every position anew"}


STREAM, PATTERN = "blocks.0.hook_resid_post", "blocks.0.attn.hook_pattern"
SCORES = "blocks.0.attn.hook_attn_scores"


@pytest.mark.parametrize(
    ("point", "change", "why"),
    [
        (None, None, None),
        (STREAM, Scale(2.0), None),
        (STREAM, Zero(positions=(2,)), None),
        (STREAM, Zero(positions=(2, -1)), "Zero at 'blocks.0.hook_resid_post' counts positions from the end"),
        (STREAM, AddAtPositions([(-2, [0.0] * 32)]), "counts positions from the end"),
        (SCORES, Knockout([(None, 0)]), None),
        (SCORES, Knockout([(-1, 0)]), "Knockout at 'blocks.0.attn.hook_attn_scores' counts positions"),
        (SCORES, Scale(0.5), None),
        (SCORES, Zero(), "may give weight to later positions"),
        (PATTERN, Steer([(3, 1)], 2.0), None),
        (PATTERN, Scale(0.5), None),
        (PATTERN, Add([0.1]), "may give weight to later positions"),
    ],
)
def test_how_steps_read_is_told_with_the_reason(point, change, why):
    spec = HookSpec() if point is None else HookSpec().intervene(point, change)
    points = [HookPoint.parse(name) for name in (STREAM, PATTERN, SCORES)]
    found = why_uncached(spec.bind(points))
    assert (found is None) == (why is None)
    assert why is None or why in found


@pytest.mark.parametrize(
    ("is_said", "why"), [(False, "looks at all positions"), (True, "is of a kind that is not known here")]
)
def test_an_intervention_of_an_unknown_kind_is_in_the_way(is_said, why):
    class Doubled(Intervention):
        """Nobody knows what it does to positions."""

        is_positionwise = is_said

    spec = HookSpec().intervene(STREAM, Doubled()).bind([HookPoint.parse(STREAM)])
    assert why_uncached(spec) == f"Doubled at '{STREAM}' {why}"


def test_a_generation_tells_how_it_read(model):
    (ids,) = draw_ids(1, PROMPT)
    every = generate(model, ids, HookSpec().capture(STREAM), max_tokens=2, capture_positions="every")
    assert every.reading == "every position anew: as every position is captured"
    assert generate(model, ids, max_tokens=2).reading == "keys and values kept"
    assert generate(model, ids, max_tokens=2, cache=False).reading == "every position anew: as asked"


# What is kept


def test_steps_have_labels(model):
    prompts = [*draw_ids(1, PROMPT), *draw_ids(1, 4)]
    hooks = HookSpec().capture("blocks.*.hook_resid_post", "blocks.1.attn.hook_pattern", "hook_embed")
    hooks = hooks.capture("blocks.*.attn.hook_z").capture("blocks.1.hook_resid_post", when="before")
    stops = generate(model, prompts[1], max_tokens=9, eos=()).ids[0][5]
    for cache in (False, True):
        found = generate(model, prompts, hooks, max_tokens=9, eos=[stops], cache=cache)
        dataset = found.to_xarray()
        steps = max(len(ids) for ids in found.ids)
        layers, heads = model.config.num_layers, model.config.num_attention_heads
        hidden = model.config.hidden_size
        assert dataset["token_id"].dims == ("prompt", "step")
        assert dict(dataset["resid_post"].sizes) == {
            "prompt": 2,
            "step": steps,
            "layer": layers,
            "hidden": hidden,
        }
        assert dataset["z"].dims == ("prompt", "step", "layer", "head", "d_head")
        assert dataset["embed"].dims == ("prompt", "step", "hidden")
        assert dataset["pattern"].dims == ("prompt", "step", "layer", "head", "key_position")
        assert np.isnan(dataset["resid_post__pre"].sel(layer=0)).all(), "asked for at layer 1 only"
        for row, result in enumerate(found):
            count = result.generated_tokens
            assert dataset["token_id"].values[row, :count].tolist() == list(result.generated_ids)
            assert (dataset["token_id"].values[row, count:] == -1).all()
            np.testing.assert_array_equal(dataset["logprob"].values[row, :count], result.logprobs)
            read = result.prompt_tokens - 1 + np.arange(count)
            assert dataset["position_read"].values[row, :count].tolist() == read.tolist()
            values = dataset["resid_post"].sel(layer=1).values[row]
            np.testing.assert_array_equal(values[:count], found.activations("blocks.1.hook_resid_post", row))
            assert np.isnan(values[count:]).all()
            pattern = dataset["pattern"].sel(layer=1).values[row, :count]
            assert pattern.shape[1] == heads
            for step in range(count):
                reach = result.prompt_tokens + step
                np.testing.assert_allclose(pattern[step, :, :reach].sum(-1), 1, atol=1e-5)
                assert np.isnan(pattern[step, :, reach:]).all()


def test_every_position_of_every_step_is_kept_on_request(model):
    (ids,) = draw_ids(1, PROMPT)
    point = HookPoint.resid_post(1)
    last = HookSpec().intervene(HookPoint.resid_post(0), Add(vector(model), positions=(-1,))).capture(point)
    found = generate(model, ids, last, max_tokens=4, eos=(), capture_positions="every")
    steps = found.activations(point)
    assert steps.shape == (4, PROMPT + 3, model.config.hidden_size)
    for step in range(4):
        there = PROMPT + step
        own = model.forward(found[0].token_ids[:there], last)[point][0]
        torch.testing.assert_close(steps[step, :there], own, atol=1e-5, rtol=1e-5)
        assert steps[step, there:].isnan().all()
    assert found.to_xarray()["resid_post"].dims == ("prompt", "step", "layer", "position", "hidden")


def test_newest_positions_hold_on_to_nothing_else(model):
    found = generate(model, draw_ids(3, 40), HookSpec().capture("hook_embed"), max_tokens=3, eos=())
    for captured in found._captured:
        for steps in captured.values():
            assert all(step.untyped_storage().nbytes() <= 3 * step.nbytes for step in steps)


def test_a_result_counts_and_tells_its_text(model):
    found = generate(model, ["The capital of", "It was"], max_tokens=6, eos=())
    assert len(found) == 2
    for prompt, result in zip(["The capital of", "It was"], found, strict=True):
        assert result.prompt == prompt
        assert result.prompt_ids == tuple(model.tokenizer.encode(prompt).ids)
        assert result.full_text == prompt + result.generated_text
        assert result.total_tokens == result.prompt_tokens + result.generated_tokens == len(result.token_ids)
        assert result.generated_tokens == 6
        assert result.probabilities == pytest.approx([math.exp(value) for value in result.logprobs])
    as_ids = generate(model, [found[0].prompt_ids], max_tokens=6, eos=())[0]
    assert (as_ids.prompt, as_ids.generated_text) == ("The capital of", found[0].generated_text)


def test_tokens_come_step_by_step(model):
    stream = TokenStream(model, draw_ids(2, PROMPT), settings=GenerationSettings(max_tokens=3, eos=()))
    tokens = iter(stream)
    first = next(tokens)
    assert isinstance(first, NewToken)
    assert [stream.result()[row].generated_tokens for row in range(2)] == [1, 0]
    rest = list(tokens)
    assert [(new.step, new.prompt) for new in [first, *rest]] == [(s, p) for s in range(3) for p in range(2)]
    assert [new.finish_reason for new in rest] == [None] * 3 + ["max_tokens"] * 2
    assert [new.token_id for new in [first, *rest] if new.prompt == 1] == stream.result().ids[1]


def test_without_a_tokenizer_ids_are_continued(tmp_path):
    save_random_model(tmp_path, "llama", 1, tokenizer=False)
    model = Model.from_pretrained(tmp_path)
    result = generate(model, [5, 6, 7], max_tokens=3)[0]
    assert (result.generated_tokens, result.generated_text, result.full_text) == (3, None, None)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        generate(model, [5, 6, 7], stop="\n")


# Bad input


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"max_tokens": 0}, "expected max_tokens of at least 1, found 0"),
        ({"temperature": -1.0}, "expected a finite temperature >= 0, found -1.0"),
        ({"temperature": math.nan}, "expected a finite temperature >= 0, found nan"),
        ({"temperature": 1.0}, "expected a seed"),
        ({"temperature": 1.0, "seed": 0, "top_k": 0}, "expected top_k of at least 1"),
        ({"temperature": 1.0, "seed": 0, "top_p": 1.5}, r"expected top_p in \(0, 1\], found 1.5"),
        ({"top_k": 3}, "set temperature=1"),
        ({"stop": ""}, "stop: expected texts and token ids"),
        ({"stop": [1.5]}, "stop: expected texts and token ids"),
        ({"stop": -1}, "stop: expected token ids of at least 0, found -1"),
        ({"capture_positions": "all"}, "expected capture_positions='new' or 'every'"),
        ({"capture_positions": "every", "cache": True}, "cache=True computes only the newest position"),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_one_line(model, chosen, message):
    with pytest.raises(ConfigError, match=message) as caught:
        generate(model, "a", **chosen)
    assert "\n" not in str(caught.value)


def test_prompts_and_specs_that_do_not_fit_are_refused_before_anything_runs(model, monkeypatch):
    def never(*_):
        raise AssertionError("nothing may run")

    monkeypatch.setattr(type(model.network), "layer", never)
    (ids,) = draw_ids(1, PROMPT)
    resid, pattern = "blocks.0.hook_resid_post", "blocks.0.attn.hook_pattern"
    reach = PROMPT + 4 - 1
    with pytest.raises(PromptError, match="expected a prompt shorter than the context"):
        generate(model, [3] * model.config.context_length)
    with pytest.raises(PromptError, match="expected one seed, or one for each of 1 prompts, found 2"):
        generate(model, ids, temperature=1.0, seed=[1, 2])
    with pytest.raises(HookPointNotFound, match="did you mean"):
        generate(model, ids, HookSpec().capture("blocks.0.hook_resid_pots"))
    for point, change, message in (
        (resid, Zero(positions=(reach,)), rf"positions in 0\.\.{reach - 1} .* found {reach}"),
        (resid, Zero(positions=(-PROMPT - 1,)), f"found -{PROMPT + 1}"),
        (pattern, SetValue([(reach, 0)], 0.5), f"found {reach}"),
        (resid, Replace(torch.zeros(1, PROMPT, model.config.hidden_size)), f"position={reach}"),
        (resid, Scale(2.0, heads=(0,)), "with heads to select"),
    ):
        for cache in (False, True):
            with pytest.raises(InterventionError, match=message):
                generate(model, ids, HookSpec().intervene(point, change), max_tokens=4, cache=cache)


def test_what_was_not_captured_is_named(model):
    found = generate(model, "a", HookSpec().capture("blocks.0.hook_resid_post"), max_tokens=1)
    with pytest.raises(HookPointNotFound, match=r"nearest is 'blocks\.0\.hook_resid_post'"):
        found.activations("blocks.0.hook_resid_pre")


def test_token_0_can_end_a_text_and_ids_that_are_none_are_refused(model):
    (ids,) = draw_ids(1, PROMPT)
    (free,) = generate(model, ids, max_tokens=3, eos=())
    first = free.generated_ids[0]
    for ends in (first, [first], (first,), np.array([first])):
        (result,) = generate(model, ids, max_tokens=3, eos=ends)
        assert (result.finish_reason, len(result.generated_ids)) == ("eos", 1)
    assert Stop.of(0, 0) == Stop(frozenset({0}), frozenset({0}))
    assert (Stop.of((), 0).reason(0), Stop.of(0, ()).reason(0), Stop.of((), ()).reason(0)) == (
        "eos",
        "stop",
        None,
    )
    for wrong in ([1.5], ["a"], [True], [None], [-1], True):
        with pytest.raises(ConfigError, match="eos: expected token ids"):
            generate(model, ids, max_tokens=1, eos=wrong)
