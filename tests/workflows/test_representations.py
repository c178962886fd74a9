"""What `print` shows of values that users hold: what they are, never an address in memory."""

from __future__ import annotations

import json

import pytest

import mizarr
from mizarr.pipeline import plan
from mizarr.store import open_store
from mizarr.workflows import WORKFLOWS, build, kind_of
from mizarr.workflows.cli import run

PROMPTS = ["The capital of France is", "Once upon a time"]


@pytest.fixture(scope="module")
def model():
    return mizarr.Model.from_pretrained("specimen", progress=False)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return open_store(tmp_path_factory.mktemp("store"), durability="process")


def test_a_generation_shows_texts_and_why_they_end(model):
    generation = mizarr.generate(model, PROMPTS, max_tokens=3)
    lines = repr(generation).splitlines()
    assert lines[0] == "Generation of 2 prompts"
    for line, prompt, result in zip(lines[1:], PROMPTS, generation, strict=True):
        assert line == f"  {prompt!r} -> {result.generated_text!r} (max_tokens)"
    many = mizarr.generate(model, [[5, 6, n] for n in range(10, 20)], max_tokens=1)
    assert repr(many).splitlines()[-1] == "  and 2 more"
    long = mizarr.generate(model, ["word " * 60], max_tokens=1)
    assert len(repr(long)) < 400


def test_a_workflow_shows_its_question_settings_and_results(store):
    workflow = build("logit_lens", prompts=PROMPTS)
    assert "has not run yet" in repr(workflow)
    answer = mizarr.compute("logit_lens", store=store, prompts=PROMPTS)
    first, question, *results = repr(answer).splitlines()
    assert first.startswith("LogitLens(prompts=(") and "top_k" not in first
    assert question.strip() == answer.question
    assert len(results) == len(answer.nodes)
    for line, name in zip(results, answer.nodes, strict=True):
        assert line.startswith(f"  result({name!r}): ")
        assert all(str(variable) in line for variable in answer.result(name).data_vars)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_no_workflow_shows_an_address(name):
    shown = repr(kind_of(name)(kind_of(name).settings_type()))
    assert " at 0x" not in shown and "has not run yet" in shown


def test_no_public_value_shows_an_address(model, store):
    spec = mizarr.HookSpec().capture("blocks.*.hook_resid_post")
    dataset = mizarr.capture(model, PROMPTS, spec, store=store, progress=False)
    cache = model.forward(PROMPTS, spec)
    values = {
        "model": model,
        "store": store,
        "spec": spec,
        "dataset": dataset,
        "cache": cache,
        "run": mizarr.Run(PROMPTS[0], spec),
        "corpus": mizarr.Corpus("*.txt"),
        "dictionary": mizarr.Dictionary.from_pretrained("specimen/sae"),
        "plan": plan(build("logit_lens", prompts=PROMPTS).nodes.values(), store),
        "config": model.config,
        "tokenizer": model.tokenizer,
        "point": mizarr.HookPoint("resid_post", 0),
        "metric": mizarr.logits(position=-1, tokens=[5]),
    }
    shown = {name: repr(value) for name, value in values.items()}
    assert {name: text for name, text in shown.items() if " at 0x" in text} == {}


def test_tensors_are_listed_in_the_order_of_layers(capsys, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=12, num_attention_heads=1
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    assert run(["models", "inspect", str(tmp_path / "model")]) == 0
    lines = capsys.readouterr().out.splitlines()
    layers = [int(line.split(".")[2]) for line in lines if line.startswith("model.layers.")]
    assert layers == sorted(layers) and set(layers) == set(range(12))
    assert run(["models", "inspect", str(tmp_path / "model"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tensors"]) == 12 * 9 + 3
