"""The shipped specimen does what its card says, and the script that made it repeats itself."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, replace
from io import StringIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer

import mizarr
from mizarr.stages.corpus.text import character_counts, wrap
from mizarr.stages.forward.models.files import HELP, resolve
from mizarr.workflows import WORKFLOWS, build, compute
from mizarr.workflows.report.page import render
from tests.specimen_training import card, card_training, couplets, evaluate, train
from tests.specimen_training.card import read_model
from tests.specimen_training.curriculum import CURRICULUM, Phase, phase_at, read_curriculum
from tests.specimen_training.data import (
    HELD_OUT,
    WATCHED,
    Batches,
    Chapter,
    Fact,
    Mixture,
    Prose,
    read_chapters,
    read_facts,
    repeated_row,
    shuffled_row,
    train_tokenizer,
    wrapped_row,
)
from tests.specimen_training.goose import Goose
from tests.specimen_training.muon import Muon
from tests.specimen_training.network import Llama, Shape, write_model

SPECIMEN = Path(mizarr.__file__).parent / "stages" / "forward" / "specimen"
GUIDED = SPECIMEN.with_name("specimen_guided")
SMALL = Shape(vocabulary=300, hidden=32, layers=2, heads=4, key_heads=2, mlp=48)


@pytest.fixture(scope="module", params=["specimen", "specimen_guided"])
def folder(request: pytest.FixtureRequest) -> Path:
    return SPECIMEN.with_name(request.param)


@pytest.fixture(scope="module")
def network(folder):
    return read_model(folder)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def figures(folder):
    return json.loads((folder / "evaluation.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def facts():
    return [Fact(**fact) for fact in json.loads((SPECIMEN / "facts.json").read_text("utf-8"))]


@pytest.fixture(scope="module")
def prose():
    return (SPECIMEN / "prose.txt").read_text("utf-8")


# What is shipped


def test_the_specimen_takes_eight_megabytes_at_most(folder):
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 8_000_000


def test_transformers_loads_it_and_computes_the_same(folder, network, prose):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = transformers.AutoTokenizer.from_pretrained(folder)(
        wrap(prose, 50)[:900], return_tensors="pt"
    ).input_ids
    assert ids[0, 0] == theirs.config.bos_token_id
    with torch.no_grad():
        torch.testing.assert_close(network(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


def test_mizarr_loads_it_by_name_and_computes_the_same(folder, network, tokenizer):
    text = "The mother tongue of John Calvin is"
    cache = mizarr.Model.from_pretrained(folder.name.replace("_", "-")).forward(text)
    with torch.no_grad():
        expected = network(torch.tensor([tokenizer.encode(text).ids]))[0]
    logits = torch.as_tensor(cache.logits).reshape(expected.shape)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_text_survives_the_tokenizer(tokenizer, prose):
    text = wrap(prose, 40)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize("name", ["specimen", "specimen_guided", "specimen_rwkv", "specimen_experts"])
def test_the_card_is_the_one_its_evaluation_makes(name: str):
    folder = SPECIMEN.parent / name
    figures = json.loads((folder / "evaluation.json").read_text("utf-8"))
    assert (folder / "README.md").read_text("utf-8") == card.card(figures)


# What it can do, measured again on a part


def test_it_breaks_held_out_lines_as_well_as_its_card_says(network, tokenizer, prose, figures):
    newline = tokenizer.encode("\n", add_special_tokens=False).ids[0]
    rows = evaluate.prose_rows(tokenizer, [prose[:12_000]], widths=(40, 60))
    read = evaluate.read_rows(network, rows, newline)
    said = read.newline > figures["line_breaks"]["threshold"]
    measured = evaluate.break_scores(said[read.late], read.is_break[read.late])
    for name, value in figures["line_breaks"]["specimen"].items():
        assert measured[name] == pytest.approx(value, abs=0.08)
    # Who does not count cannot have both.
    assert min(measured.values()) > 0.6 > 2 * min(figures["line_breaks"]["previous_token"].values())


def test_it_knows_the_facts_its_card_says(network, tokenizer, facts, figures):
    known = evaluate.known_facts(network, tokenizer, facts[::8])
    assert known.mean() == pytest.approx(figures["facts"]["share"], abs=0.04)


def test_it_copies_random_tokens_as_its_card_says(network, tokenizer, figures):
    bos = tokenizer.token_to_id("<s>")
    assert evaluate.copying(network, bos=bos, seed=8, rows=8) == pytest.approx(figures["copying"], abs=0.1)


def test_it_ends_couplets_on_a_rhyme_as_its_card_says(network, tokenizer, figures):
    measured = evaluate.rhyming(network, tokenizer, count=330)
    for name, share in figures["couplets"].items():
        # Of pairs of ends that were held out there are few.
        assert measured[name] == pytest.approx(share, abs=0.08 if name == "unseen" else 0.04)


def test_it_carries_the_character_count_as_its_card_says(network, tokenizer, prose, figures):
    halves = [prose[:15_000], prose[15_000:30_000]]
    r2 = evaluate.count_r2(network, evaluate.prose_rows(tokenizer, halves, widths=(50, 70)))
    best = figures["count_r2"]["best_layer"]
    assert r2[1 + best] == pytest.approx(figures["count_r2"]["layers"][best], abs=0.06)
    assert r2[1 + best] > r2[0] + 0.3


@pytest.mark.parametrize("name", card.TARGETS)
def test_a_target_is_met_or_the_card_says_that_it_is_missed(name, folder, figures):
    assert figures["targets"] == card.TARGETS
    rows = dict(zip(card.TARGETS, card.goals(figures), strict=True))
    words, measured, _, met = rows[name]
    bound = card.TARGETS[name]
    reached = float(measured) <= bound if name == "loss_above_minimum" else float(measured) >= bound
    assert (met == "yes") == reached
    assert f"| {words} | {measured} |" in (folder / "README.md").read_text("utf-8")
    # The guided one never read couplets.
    assert met == "yes" or (folder == GUIDED and name == "couplets")


# How it was made


@pytest.fixture
def batches(tokenizer, facts, prose):
    def make(seed):
        half = len(prose) // 2
        own, additional = Chapter("own", (prose[:half],)), Chapter("additional", (prose[half:],))
        made = Batches(tokenizer, [own], [additional], facts, seed=seed)
        usual = Mixture(rows=12, size=64)
        return lambda step, mixture=usual: made(step, mixture)

    return make


def test_a_batch_depends_on_seed_and_step_alone(batches):
    one, other = batches(3), batches(3)
    one(0)
    for step in (7, 2):
        for mine, theirs in zip(one(step), other(step), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    assert not np.array_equal(one(2)[0], one(3)[0])
    assert not np.array_equal(one(2)[0], batches(4)(2)[0])
    assert one(2, Mixture(rows=6, size=32, long_share=0)).weights.shape == (6, 32)
    assert one(2, Mixture(rows=6, size=32, long_share=1)).weights.shape == (3, 64)


def test_rows_are_wrapped_and_counted_by_the_rules_of_the_workflows(tokenizer, prose):
    words = Prose(prose, tokenizer)
    newline = tokenizer.encode("\n", add_special_tokens=False).ids[0]
    bos = tokenizer.token_to_id("<s>")
    ids, columns = wrapped_row(words, range(len(words)), 43, 10**9, bos=bos, newline=newline)
    wrapped = wrap(prose, 43)
    code = tokenizer.encode(wrapped, add_special_tokens=False)
    assert ids == [bos, *code.ids]
    counts = character_counts(wrapped, [start for start, _ in code.offsets])
    assert all(count < column for count, column in zip(counts, columns[1:], strict=True) if column)
    assert max(columns) == max(map(len, wrapped.split("\n")))


def test_a_token_can_be_copied_where_it_followed_the_same_one_before():
    rng = np.random.default_rng(0)
    fresh = iter(range(2, 100_000))
    ids, copied = repeated_row(rng, lambda n: [next(fresh) for _ in range(n)], 500, bos=0)
    assert len(ids) == len(copied) == 500
    pairs = list(pairwise(ids))
    again = [pair in pairs[:i] for i, pair in enumerate(pairs)]
    assert all(a for a, c in zip(again, copied[1:], strict=True) if c)
    # From the third occurrence on, its first token has followed the last one before; that does not count.
    assert sum(again) - sum(copied) < 0.1 * len(ids)
    assert 0.3 < np.mean(copied) < 0.8


def test_shuffled_spans_cannot_be_copied_by_distance():
    rng = np.random.default_rng(0)
    ids, copied = shuffled_row(rng, range(2, 18), 400, bos=0)
    assert (len(ids), set(ids)) == (400, {0, *range(2, 18)})
    last, distances = {}, []
    for i, (token, c) in enumerate(zip(ids, copied, strict=True)):
        if c:
            assert ids[last[token] - 1] == ids[i - 1]
            distances.append(i - last[token])
        last[token] = i
    assert np.bincount(distances).max() < 0.5 * len(distances)
    assert np.mean(copied) > 0.5


@pytest.mark.parametrize("options", [{}, {"shuffled": 1.0}, {"shuffled": 1.0, "alphabet": 8}])
def test_only_what_can_be_copied_counts_in_rows_of_repeats(batches, options):
    mixture = Mixture(
        rows=6, size=64, prose=0, facts=0, word_repeats=0, couplets=0, random_repeats=1, **options
    )
    ids, weights = batches(0)(0, mixture)
    assert set(np.unique(weights)) == {0.0, 1.0}
    for row, counted in zip(ids, weights, strict=True):
        pairs = list(pairwise(row))
        assert all(pair in pairs[:i] for i, pair in enumerate(pairs) if counted[i])


def test_tokens_of_shuffled_rows_are_few_and_of_the_first_of_the_vocabulary(batches):
    usual = Mixture(
        rows=40,
        size=64,
        prose=0,
        facts=0,
        word_repeats=0,
        couplets=0,
        random_repeats=1,
        shuffled=1,
        alphabet=8,
        long_share=0,
    )
    ids, _ = batches(0)(0, replace(usual, pool=32))
    assert all(len(set(row.tolist())) == 9 for row in ids)
    assert 20 < ids.max() < 34  # BOS and EOS, and 32 behind them
    ids, _ = batches(0)(0, usual)
    assert ids.max() > 100


def test_echoes_count_where_the_token_before_last_comes_again(batches):
    mixture = Mixture(
        rows=6,
        size=64,
        prose=0,
        facts=0,
        word_repeats=0,
        couplets=0,
        random_repeats=0,
        echoes=1,
        long_share=0,
    )
    ids, weights = batches(0)(0, mixture)
    assert weights.sum(axis=1).tolist() == [21.0] * 6
    for row, counted in zip(ids, weights, strict=True):
        assert all(row[i + 1] == row[i - 1] for i in np.flatnonzero(counted))


def test_the_embedding_stands_still_where_its_rate_is_nought():
    options = train._parser().parse_args(["--data=here", "--out=there"])
    network = Llama(SMALL)
    optimizers = train._optimizers(network, options)
    train._set_rates(optimizers, 0.5, 0.0)
    rates = {id(p): g["lr"] for o in optimizers for g in o.param_groups for p in g["params"]}
    still = [name for name, p in network.named_parameters() if not rates[id(p)]]
    assert still == ["model.embed_tokens.weight"]


def test_a_row_of_couplets_weighs_their_ends(batches, tokenizer):
    mixture = Mixture(
        rows=4, size=128, prose=0, facts=0, word_repeats=0, random_repeats=0, couplets=1, long_share=0
    )
    ids, weights = batches(0)(0, mixture)
    said = [tokenizer.decode([token]).strip() for token in ids[:, 1:][weights == 1.0]]
    assert len(said) > 10
    assert all(couplets.family_of(word) is not None for word in said)


def test_every_end_of_a_couplet_is_one_token_and_of_one_family(tokenizer):
    ends = [word for family in couplets.FAMILIES for word in family]
    assert len(ends) == len(set(ends))
    for word in ends:
        assert len(tokenizer.encode(f" {word}", add_special_tokens=False).ids) == 1
    assert all(len(family) >= 4 for family in couplets.FAMILIES)


def test_a_couplet_to_train_on_rhymes_and_is_none_of_those_held_out():
    rng = np.random.default_rng(0)
    made = [couplets.couplet(rng) for _ in range(2000)]
    assert len({lines.text for lines in made}) > 1950
    followed = {}
    for lines in made:
        assert lines.first.endswith(lines.rhyme)
        assert lines.end in lines.fitting
        assert not couplets.is_held_out_pair(lines.rhyme, lines.end)
        assert not couplets.is_held_out_pair(lines.end, lines.rhyme)
        assert _frames(lines) not in _held_out_frames()
        followed.setdefault(lines.rhyme, set()).add(lines.end)
    # The first line leaves several ends open.
    assert np.mean([len(ends) > 1 for ends in followed.values()]) > 0.9


def test_couplets_to_score_are_in_frames_that_never_met():
    made = list(couplets.held_out_couplets(300))
    assert made == list(couplets.held_out_couplets(300))
    assert {_frames(lines) for lines in made} == _held_out_frames()
    assert {lines.rhyme for lines in made} == {word for family in couplets.FAMILIES for word in family}
    # Every frame of either line is trained on as well, with others.
    assert {first for first, _ in _held_out_frames()} == set(range(len(couplets.FIRST)))


def _held_out_frames():
    both = ((i, j) for i in range(len(couplets.FIRST)) for j in range(len(couplets.SECOND)))
    return {pair for pair in both if couplets.is_held_out_frames(*pair)}


def _frames(lines):
    """Which frames two lines were made in."""

    def which(line, frames):
        patterns = (re.sub(r"\\\{\w\\\}", r"\\w+", re.escape(frame)) for frame in frames)
        (found,) = (i for i, pattern in enumerate(patterns) if re.fullmatch(pattern, line))
        return found

    first, second = lines.text.split("\n")
    return which(first, couplets.FIRST), which(second, couplets.SECOND)


def test_rhyming_is_counted_for_another_word_of_the_family(tokenizer):
    """A network that always says "light" fits where the first line ends on another word of its family."""

    class Says(torch.nn.Module):
        def forward(self, ids):
            return torch.nn.functional.one_hot(torch.full_like(ids, said), 2048).float()

    said = tokenizer.encode(" light", add_special_tokens=False).ids[0]
    ends = [word for family in couplets.FAMILIES for word in family]
    scores = evaluate.rhyming(Says(), tokenizer, count=2 * len(ends))
    family = couplets.FAMILIES[couplets.family_of("light")]
    assert scores["fitting"] == pytest.approx((len(family) - 1) / len(ends))
    assert scores["unseen"] < 0.05


def test_head_scores_are_one_for_heads_that_look_there():
    class Looks:
        shape = SMALL

        def patterns(self, ids):
            size = ids.shape[1]
            previous, induction = torch.zeros(2, len(ids), 1, size, size)
            for query in range(1, size):
                previous[:, 0, query, query - 1] = 1
            for query in range(41, size):
                first = (ids[0, :query] == ids[0, query]).nonzero()[0, 0]
                induction[:, 0, query, first + 1] = 1
            return [previous, induction]

    scores = evaluate.head_scores(Looks(), bos=0, rows=1)
    assert scores["previous"] == [1, pytest.approx(0, abs=0.02)]
    assert scores["induction"] == [pytest.approx(0, abs=0.05), pytest.approx(1, abs=0.1)]


def test_patterns_are_causal_and_sum_to_one():
    torch.manual_seed(0)
    with torch.no_grad():
        patterns = Llama(SMALL).patterns(torch.randint(0, 300, (2, 9)))
    assert len(patterns) == SMALL.layers
    for pattern in patterns:
        assert pattern.shape == (2, SMALL.heads, 9, 9)
        torch.testing.assert_close(pattern.sum(-1), torch.ones(2, SMALL.heads, 9))
        assert pattern.triu(1).max() == 0


def test_a_curriculum_is_read_from_its_plain_form(tmp_path):
    phases = (Phase(3, Mixture(rows=4)), Phase(2, Mixture(shuffled=0.5), rate=0.5))
    path = tmp_path / "curriculum.json"
    path.write_text(json.dumps([phase.plain() for phase in phases]), "utf-8")
    assert read_curriculum(path) == phases
    assert [phase_at(phases, step) for step in range(6)] == [phases[0]] * 3 + [phases[1]] * 3
    path.write_text(json.dumps([phase.plain() for phase in CURRICULUM]), "utf-8")
    assert read_curriculum(path) == CURRICULUM


def test_the_card_tells_the_first_step_and_layer_of_an_ability():
    def point(step, score):
        heads = {"previous": [0.1, score], "induction": [0.1, 0.1]}
        figures = dict.fromkeys(("loss", "recall", "precision", "facts", "copying", "couplets"), score)
        return {
            "step": step,
            "tokens": step * 1_000_000,
            **figures,
            "count_r2": [0.1, 0.2, 0.3],
            "heads": heads,
        }

    told = card_training.training([{"from_step": 0, "options": {}}], [point(1, 0.2), point(2, 0.9)])
    assert "| a previous-token head | 0.5 | 2 | 2.0 M | 1 |" in told
    assert "| an induction head | 0.5 | never |  |  |" in told
    assert "| copying | 0.5 | 2 | 2.0 M |  |" in told


def test_facts_are_one_per_prompt_and_end_before_the_blank_line(tmp_path):
    entry = {
        "original_prompt": "A is in\n\nRespond with one of B or C\n\nResponse:",
        "counterfactual_prompt": "D is in",
        "gt_original_target": "B",
        "gt_counterfactual_target": "C",
    }
    again = {**entry, "gt_original_target": "E"}
    (tmp_path / "x.json").write_text(json.dumps([entry, again]))
    assert read_facts(tmp_path) == [Fact("A is in", "B"), Fact("D is in", "C")]


def test_chapters_are_paragraphs_without_line_breaks(tmp_path):
    (tmp_path / "one.txt").write_text("The first\nline's end.\n\n\n'Second'  one.\n", "utf-8")
    assert read_chapters(tmp_path) == [Chapter("one", ("The first line’s end.", "‘Second’ one."))]


def test_the_trainer_computes_what_transformers_computes(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ours = Llama(SMALL)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    write_model(ours, tmp_path, dtype=torch.float32, bos=0, eos=1)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, SMALL.vocabulary, (2, 90))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)
        assert torch.equal(read_model(tmp_path)(ids), ours(ids))


def test_the_recurrent_one_is_computed_by_the_pass_that_serves_it(tmp_path):
    """Logits, streams and the attention it amounts to, away from its beginning, where blocks add nothing."""
    torch.manual_seed(0)
    ours = Goose(SMALL)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    write_model(ours, tmp_path, dtype=torch.float32, bos=0, eos=1)
    served, ids = mizarr.Model.from_pretrained(tmp_path), torch.randint(0, SMALL.vocabulary, (2, 90))
    hooks = mizarr.HookSpec().capture("blocks.*.hook_resid_post", "blocks.*.rwkv.hook_effective_attn")
    cache = served.forward(ids, hooks)
    with torch.no_grad():
        states, patterns = ours.states(ids), ours.patterns(ids)
        torch.testing.assert_close(ours(ids), cache.logits, atol=1e-4, rtol=1e-4)
        assert torch.equal(read_model(tmp_path)(ids), ours(ids))
    assert len(states) == SMALL.layers + 1 and len(patterns) == SMALL.layers
    for layer in range(SMALL.layers):
        here = cache[mizarr.HookPoint.resid_post(layer)]
        torch.testing.assert_close(states[layer + 1], here, atol=1e-4, rtol=1e-4)
        attention = cache[mizarr.HookPoint.rwkv_effective_attn(layer)]
        torch.testing.assert_close(patterns[layer], attention, atol=1e-3, rtol=1e-3)


def test_every_parameter_of_the_recurrent_one_learns():
    """What begins at zero is freed within three steps."""
    torch.manual_seed(0)
    network = Goose(SMALL)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    for _ in range(4):
        ids = torch.randint(0, SMALL.vocabulary, (4, 20))
        loss = torch.nn.functional.cross_entropy(network(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    still = [name for name, p in network.named_weights().items() if not bool(p.grad.abs().max() > 0)]
    assert not still


def test_a_line_break_is_a_token_of_its_own(prose, facts):
    made = train_tokenizer([Chapter("own", (prose[:20_000],))], facts[:50], vocabulary=400, seed=0)
    assert made.get_vocab_size() == 400
    assert made.encode("it\n\nit").tokens == ["<s>", "it", "Ċ", "Ċ", "it"]


def test_muon_moves_every_direction_alike():
    torch.manual_seed(0)
    tall = torch.nn.Parameter(torch.zeros(48, 20))
    tall.grad = torch.randn(48, 20) * torch.logspace(0, -2, 20)
    Muon([tall], lr=1.0).step()
    moved = torch.linalg.svdvals(tall.detach()) / (0.2 * 48**0.5)
    assert moved.min() > 0.4
    assert moved.max() < 1.4


@pytest.mark.parametrize("family", train.FAMILIES)
def test_training_goes_on_where_it_was_stopped(family, tmp_path, prose, facts):
    data = tmp_path / "data"
    (data / "dickens").mkdir(parents=True)
    (data / "counterfact").mkdir()
    for i, name in enumerate(("own", *HELD_OUT, *WATCHED)):
        (data / "dickens" / f"{name}.txt").write_text(prose[i * 6_000 : (i + 1) * 6_000], "utf-8")
    entries = [
        {
            "original_prompt": a.prompt,
            "counterfactual_prompt": b.prompt,
            "gt_original_target": a.target,
            "gt_counterfactual_target": b.target,
        }
        for a, b in zip(facts[:40:2], facts[1:40:2], strict=True)
    ]
    (data / "counterfact" / "facts.json").write_text(json.dumps(entries), "utf-8")
    shape = replace(SMALL, vocabulary=2048)
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(shape).items()]
    phases = [{"steps": steps, "rows": 4, "size": size} for steps, size in ((3, 32), (1, 64))]
    (tmp_path / "curriculum.json").write_text(json.dumps(phases), "utf-8")
    common = [
        f"--data={data}",
        f"--curriculum={tmp_path / 'curriculum.json'}",
        "--warmup=2",
        f"--family={family}",
        "--muon-lr=0.01",
        *sizes,
        "--every=2",
        "--threads=2",
    ]

    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
        shutil.copyfile(SPECIMEN / "tokenizer.json", tmp_path / folder / "tokenizer.json")

    def weights(folder):
        return read_model(folder).state_dict()

    train.main([*common, f"--out={tmp_path / 'whole'}"])
    monkey = pytest.MonkeyPatch()
    calls = []

    def stop_after_two(self, step, mixture, original=Batches.__call__):
        calls.append(step)
        if step == 2 and calls.count(2) == 1:
            raise KeyboardInterrupt
        return original(self, step, mixture)

    with monkey.context() as patch:
        patch.setattr(Batches, "__call__", stop_after_two)
        with pytest.raises(KeyboardInterrupt):
            train.main([*common, f"--out={tmp_path / 'parts'}"])
        train.main([*common, f"--out={tmp_path / 'parts'}"])
    assert calls == [0, 1, 2, 2, 3]
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert json.loads((tmp_path / "whole" / "training.json").read_text()) == json.loads(
        (tmp_path / "parts" / "training.json").read_text()
    )


# -- what training asked of the inside stands on every answer


def test_the_file_that_says_so_is_what_the_card_is_made_of():
    figures = json.loads((GUIDED / "evaluation.json").read_text("utf-8"))
    options = figures["training"]["history"][-1]["options"]
    assert (GUIDED / HELP).read_text("utf-8").strip() == card.trained_with_help(options)
    assert card.trained_with_help({**options, "guided": 0}) == ""


def test_the_file_is_in_no_identity(tmp_path: Path):
    folder = tmp_path / "specimen"
    shutil.copytree(GUIDED, folder)
    with_it = resolve(folder).identity()
    assert resolve(folder).trained_with_help.startswith("rewarded in training for the character count")
    (folder / HELP).unlink()
    assert resolve(folder).trained_with_help == ""
    assert resolve(folder).identity() == with_it


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_answer_about_the_guided_specimen_says_what_was_rewarded(name: str):
    planned = build(name)
    assert planned.trained_with_help == "", "no model that is a default had help"
    asked = planned.settings
    if getattr(asked, "dictionary", None) is not None or getattr(asked, "model", "") != "specimen":
        return  # what it asks for was trained on another model
    planned = build(name, model="specimen-guided")
    told = f"specimen-guided: {(GUIDED / HELP).read_text('utf-8').strip()}"
    assert planned.trained_with_help == told
    assert planned.footer.endswith(f" · {told}")
    assert planned.header()["trained_with_help"] == told


def test_terminal_page_and_figure_say_it(tmp_path: Path):
    prompts = ["The mother tongue of Danielle Darrieux is"]
    done = compute("logit_lens", model="specimen-guided", store=tmp_path / "store", prompts=prompts)
    told = done.trained_with_help
    console = Console(width=80, record=True, file=StringIO())
    (figure,) = done.render(console, tmp_path)
    assert told in " ".join(console.export_text().split())
    assert told.encode() in figure.read_bytes()[:4096]
    assert told in render(done).split("<footer>")[1]
