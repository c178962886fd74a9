"""The shipped specimen does what its card says, and the script that made it repeats itself."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from io import StringIO
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
from mizarr.workflows.specimen import card, evaluate, train
from mizarr.workflows.specimen.data import (
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
    wrapped_row,
)
from mizarr.workflows.specimen.guides import COUNTS, Guides
from mizarr.workflows.specimen.muon import Muon
from mizarr.workflows.specimen.network import Llama, Shape, read_model, write_model

SPECIMEN = Path(mizarr.__file__).parent / "stages" / "forward" / "specimen"
SMALL = Shape(vocabulary=300, hidden=32, layers=2, heads=4, key_heads=2, mlp=48)


@pytest.fixture(scope="module")
def network():
    return read_model(SPECIMEN)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(SPECIMEN / "tokenizer.json"))


@pytest.fixture(scope="module")
def figures():
    return json.loads((SPECIMEN / "evaluation.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def facts():
    return [Fact(**fact) for fact in json.loads((SPECIMEN / "facts.json").read_text("utf-8"))]


@pytest.fixture(scope="module")
def prose():
    return (SPECIMEN / "prose.txt").read_text("utf-8")


# What is shipped


def test_the_specimen_takes_ten_megabytes_at_most():
    assert sum(path.stat().st_size for path in SPECIMEN.iterdir()) <= 10_000_000


def test_transformers_loads_it_and_computes_the_same(network, prose):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaForCausalLM.from_pretrained(SPECIMEN, dtype=torch.float32)
    ids = transformers.AutoTokenizer.from_pretrained(SPECIMEN)(
        wrap(prose, 50)[:900], return_tensors="pt"
    ).input_ids
    assert ids[0, 0] == theirs.config.bos_token_id
    with torch.no_grad():
        torch.testing.assert_close(network(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


def test_mizarr_loads_it_by_name_and_computes_the_same(network, tokenizer):
    text = "The mother tongue of John Calvin is"
    cache = mizarr.Model.from_pretrained("specimen").forward(text)
    with torch.no_grad():
        expected = network(torch.tensor([tokenizer.encode(text).ids]))[0]
    logits = torch.as_tensor(cache.logits).reshape(expected.shape)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_text_survives_the_tokenizer(tokenizer, prose):
    text = wrap(prose, 40)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_card_is_the_one_its_evaluation_makes():
    figures = json.loads((SPECIMEN / "evaluation.json").read_text("utf-8"))
    assert (SPECIMEN / "README.md").read_text("utf-8") == card.card(figures)


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


def test_it_carries_the_character_count_as_its_card_says(network, tokenizer, prose, figures):
    halves = [prose[:15_000], prose[15_000:30_000]]
    r2 = evaluate.count_r2(network, evaluate.prose_rows(tokenizer, halves, widths=(50, 70)))
    best = figures["count_r2"]["best_layer"]
    assert r2[1 + best] == pytest.approx(figures["count_r2"]["layers"][best], abs=0.06)
    assert r2[1 + best] > r2[0] + 0.3


@pytest.mark.parametrize("name", card.TARGETS)
def test_a_target_is_met_or_the_card_says_that_it_is_missed(name, figures):
    assert figures["targets"] == card.TARGETS
    rows = dict(zip(card.TARGETS, card.goals(figures), strict=True))
    words, measured, _, met = rows[name]
    bound = card.TARGETS[name]
    reached = float(measured) <= bound if name == "loss_above_minimum" else float(measured) >= bound
    assert (met == "yes") == reached
    assert f"| {words} | {measured} |" in (SPECIMEN / "README.md").read_text("utf-8")


# How it was made


@pytest.fixture
def batches(tokenizer, facts, prose):
    def make(seed):
        half = len(prose) // 2
        own, additional = Chapter("own", (prose[:half],)), Chapter("additional", (prose[half:],))
        return Batches(tokenizer, [own], [additional], facts, Mixture(rows=12, size=64), seed=seed)

    return make


def test_a_batch_depends_on_seed_and_step_alone(batches):
    one, other = batches(3), batches(3)
    one(0)
    for step in (7, 2):
        for mine, theirs in zip(one(step), other(step), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    assert not np.array_equal(one(2)[0], one(3)[0])
    assert not np.array_equal(one(2)[0], batches(4)(2)[0])


def test_rows_are_wrapped_and_counted_by_the_rules_of_the_workflows(tokenizer, prose):
    words = Prose(prose, tokenizer)
    newline = tokenizer.encode("\n", add_special_tokens=False).ids[0]
    bos = tokenizer.token_to_id("<s>")
    ids, counts, columns = wrapped_row(words, range(len(words)), 43, 10**9, bos=bos, newline=newline)
    wrapped = wrap(prose, 43)
    code = tokenizer.encode(wrapped, add_special_tokens=False)
    assert ids == [bos, *code.ids]
    assert counts == [-1, *character_counts(wrapped, [start for start, _ in code.offsets])]
    assert max(columns) == max(map(len, wrapped.split("\n")))


def test_a_source_is_where_the_next_token_stands_already():
    rng = np.random.default_rng(0)
    fresh = iter(range(2, 100_000))
    ids, sources = repeated_row(rng, lambda n: [next(fresh) for _ in range(n)], 500, bos=0)
    assert len(ids) == len(sources) == 500
    for i, source in enumerate(sources[:-1]):
        if source >= 0:
            assert source <= i
            assert (ids[source - 1], ids[source]) == (ids[i], ids[i + 1])
    assert 0.3 < np.mean(np.array(sources) >= 0) < 0.8


def test_only_what_can_be_copied_counts_in_rows_of_repeats(tokenizer, prose, facts):
    mixture = Mixture(rows=6, size=64, prose=0, facts=0, random_repeats=1, word_repeats=0)
    batch = Batches(tokenizer, [Chapter("own", (prose,))], [], facts, mixture, seed=0)(0)
    np.testing.assert_array_equal(batch.weights, batch.sources >= 0)
    assert batch.weights.any()


def test_guides_ask_heads_for_the_token_before_and_the_source_and_a_state_for_the_count():
    torch.manual_seed(0)
    shape = Shape(vocabulary=16)
    network, guides = Llama(shape), Guides(shape)
    ids = torch.tensor([[0, 3, 4, 5, 3, 4, 5]])
    sources = torch.tensor([[-1, -1, -1, -1, 2, 3, -1]])
    counts = torch.tensor([[-1, 0, 4, 9, -1, -1, -1]])
    attention, count = guides(network, network.states(ids), sources, counts).detach()
    # Untrained heads look everywhere alike: log(position + 1), meaned over the positions that are asked.
    previous = np.mean([np.log(i + 1) for i in range(1, 7)])
    induction = np.mean([np.log(5), np.log(6)])
    assert float(attention) == pytest.approx(previous + induction, abs=0.05)
    assert float(count) == pytest.approx(np.log(COUNTS), abs=0.3)
    nowhere = torch.full_like(sources, -1)
    assert guides(network, network.states(ids), nowhere, nowhere).detach()[1] == 0


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
    ours = Llama(SMALL, dropout=0.3).eval()
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    write_model(ours, tmp_path, dtype=torch.float32, bos=0, eos=1)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, SMALL.vocabulary, (2, 90))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)
        assert torch.equal(read_model(tmp_path)(ids), ours(ids))


def test_muon_moves_every_direction_alike():
    torch.manual_seed(0)
    tall = torch.nn.Parameter(torch.zeros(48, 20))
    tall.grad = torch.randn(48, 20) * torch.logspace(0, -2, 20)
    Muon([tall], lr=1.0).step()
    moved = torch.linalg.svdvals(tall.detach()) / (0.2 * 48**0.5)
    assert moved.min() > 0.4
    assert moved.max() < 1.4


def test_training_goes_on_where_it_was_stopped(tmp_path, prose, facts):
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
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(SMALL).items()]
    common = [
        f"--data={data}",
        "--rows=4",
        "--size=64",
        "--warmup=2",
        "--muon-lr=0.01",
        "--dropout=0.1",
        *sizes,
    ]
    common += ["--every=2", "--threads=1"]

    def weights(folder):
        return read_model(folder).state_dict()

    train.main([*common, "--steps=4", f"--out={tmp_path / 'whole'}"])
    monkey = pytest.MonkeyPatch()
    calls = []

    def stop_after_two(self, step, original=Batches.__call__):
        calls.append(step)
        if step == 2 and calls.count(2) == 1:
            raise KeyboardInterrupt
        return original(self, step)

    with monkey.context() as patch:
        patch.setattr(Batches, "__call__", stop_after_two)
        with pytest.raises(KeyboardInterrupt):
            train.main([*common, "--steps=4", f"--out={tmp_path / 'parts'}"])
        train.main([*common, "--steps=4", f"--out={tmp_path / 'parts'}"])
    assert calls == [0, 1, 2, 2, 3]
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert json.loads((tmp_path / "whole" / "training.json").read_text()) == json.loads(
        (tmp_path / "parts" / "training.json").read_text()
    )


# -- what training asked of the inside stands on every answer


def test_the_file_that_says_so_is_what_the_card_is_made_of():
    figures = json.loads((SPECIMEN / "evaluation.json").read_text("utf-8"))
    options = figures["training"]["history"][-1]["options"]
    assert (SPECIMEN / HELP).read_text("utf-8").strip() == card.trained_with_help(options)
    assert card.trained_with_help({**options, "guided": 0}) == ""


def test_the_file_is_in_no_identity(tmp_path: Path):
    folder = tmp_path / "specimen"
    shutil.copytree(SPECIMEN, folder)
    with_it = resolve(folder).identity()
    assert resolve(folder).trained_with_help.startswith("rewarded in training for the character count")
    (folder / HELP).unlink()
    assert resolve(folder).trained_with_help == ""
    assert resolve(folder).identity() == with_it


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_answer_about_the_specimen_says_what_was_rewarded(name: str):
    planned = build(name)
    told = f"specimen: {(SPECIMEN / HELP).read_text('utf-8').strip()}"
    assert planned.trained_with_help == told
    assert planned.footer.endswith(f" · {told}")
    assert planned.header()["trained_with_help"] == told


def test_terminal_page_and_figure_say_it(tmp_path: Path):
    prompts = ["The mother tongue of Danielle Darrieux is"]
    done = compute("logit_lens", store=tmp_path / "store", prompts=prompts)
    told = done.trained_with_help
    console = Console(width=80, record=True, file=StringIO())
    (figure,) = done.render(console, tmp_path)
    assert told in " ".join(console.export_text().split())
    assert told.encode() in figure.read_bytes()[:4096]
    assert told in render(done).split("<footer>")[1]


def test_a_model_without_such_a_file_says_nothing(tiny_model: Path):
    planned = build("logit_lens", model=str(tiny_model), prompts=["it was"])
    assert planned.trained_with_help == "" and "trained_with_help" not in planned.header()
    assert "rewarded" not in planned.footer
