"""Models without a language head compute what the reference does: states, labels of prompts and tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mizarr
from mizarr import HookPoint, HookSpec, Model, Replace, Run
from mizarr.pipeline import run as compute
from mizarr.stages.causal.grids.patching import ActivationPatching
from mizarr.stages.causal.grids.patching_metrics import LogitDifference
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.stages.forward.generation.generate import generate
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.forward.models.residency import bytes_of
from mizarr.stages.forward.runs.run import run
from mizarr.stages.logits.readout import readout_node
from mizarr.store.errors import ConfigError, HookPointNotFound, PromptError

from . import random_heads
from .random_encoders import ENCODERS, save_random_encoder
from .random_heads import LABELS, classes, save
from .random_models import save_random_model

pytest.importorskip("transformers")
BOUND = {torch.float32: 1e-4, torch.float64: 1e-9}
"""Share of the scale, by dtype."""
LENGTHS = (1, 6, 19)
FIRST_ID = 5
"""Ids below are special in some families: padding, masks."""
PAIRS = ("bart", "mbart", "plbart", "mvp", "t5", "mt5", "umt5")
FAST = (
    ("llama", "base"),
    ("llama", "regression"),
    ("qwen2", "token"),
    ("gpt2", "sequence"),
    ("bert", "base"),
    ("bert", "sequence"),
    ("roberta", "sequence"),
    ("distilbert", "sequence"),
    ("albert", "sequence"),
    ("modernbert", "sequence"),
    ("mamba", "base"),
)
"""Classes with one kind of head each, or one kind of prefix."""


def expected_of(reference: Any, ids: torch.Tensor, target: torch.Tensor | None) -> Any:
    """Logits, or final states of a base model."""
    reference.config.use_cache = False  # with its own cache, the reference of RWKV-4 gives other numbers
    with torch.no_grad():
        told = {} if target is None else {"decoder_input_ids": target}
        output = reference(input_ids=ids, **told)
    return output.logits if hasattr(output, "logits") else output[0]


def assert_agrees(model: Model, reference: Any) -> None:
    """Outputs, and the states between layers where the reference returns them, at several lengths."""
    bound = BOUND[model.dtype]
    for length in LENGTHS:
        seeded = torch.Generator().manual_seed(length)
        top = min(model.config.vocab_size, 60)
        ids, target = torch.randint(FIRST_ID, top, (2, length), generator=seeded), None
        prompts = ids.tolist()
        if model.config.target_start is not None:
            target = ids.flip(1)
            prompts = [
                model.pair(source, rest[1:]) for source, rest in zip(prompts, target.tolist(), strict=True)
            ]
            target[:, 0] = model.config.target_start - model.config.vocab_size
        expected = expected_of(reference, ids, target)
        last = HookPoint.resid_post(model.config.num_layers - 1)
        final = HookPoint("final_norm") if HookPoint("final_norm") in model.hook_points else last
        cache = model.forward(prompts, HookSpec().capture(final))
        found = cache[final] if model.config.head.kind == "none" else cache.logits
        found = found[:, -expected.shape[1] :] if target is not None else found
        assert found.shape == expected.shape
        assert float((found - expected).abs().max()) <= bound * max(1.0, float(expected.abs().max()))


def loaded(folder: Any, **options: Any) -> Model:
    return Model.from_pretrained(folder, device="cpu", progress=False, **options)


@pytest.mark.parametrize(("family", "kind"), FAST)
def test_states_and_labels_agree_with_transformers(family, kind, tmp_path):
    (name,) = (name for *of, name in classes() if of == [family, kind])
    reference = save(tmp_path, family, kind, name)
    model = loaded(tmp_path)
    assert_agrees(model, reference)
    if family in ("llama", "qwen2"):  # others round inside of attention, as test_parity.py has it
        assert_agrees(loaded(tmp_path, dtype="float64"), reference.double())
    assert model.config.head.model_class == name
    expected = {"base": (), "regression": ("reward",)}.get(kind, tuple(LABELS.values()))
    assert model.config.head.labels == expected


@pytest.mark.wide
@pytest.mark.parametrize(("family", "kind", "name"), classes())
def test_every_class_of_every_family_agrees_or_is_refused(family, kind, name, tmp_path):
    reference = save(tmp_path, family, kind, name, seed=1)
    if family in PAIRS and kind in ("sequence", "regression"):
        with pytest.raises(ConfigError, match="encoder-decoder, which reads the end") as error:
            loaded(tmp_path)
        assert "\n" not in str(error.value)
        return
    assert_agrees(loaded(tmp_path), reference)


CLASSIFIERS = {
    "bert": "BertForSequenceClassification",
    "llama": "LlamaForSequenceClassification",
    "modernbert": "ModernBertForSequenceClassification",
}
"""They read the first position, the last one, and the mean over all."""
IDS = [7, 9, 12, 30, 8, 21]


def classifier(folder: Any, family: str) -> Model:
    save(folder, family, "sequence", CLASSIFIERS[family])
    return loaded(folder)


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_planned_runs_with_interventions_give_the_labels_of_literal_passes(family, tmp_path):
    model = classifier(tmp_path, family)
    width, last = model.config.hidden_size, HookPoint.resid_post(model.config.num_layers - 1)
    changes = [HookSpec().intervene(HookPoint.resid_post(0), Replace(torch.ones(width), positions=[2]))]
    changes += [HookSpec().intervene(last, Replace(torch.ones(width), positions=[at])) for at in range(6)]
    results = run(model, [Run(IDS, spec) for spec in [None, *changes]])
    clean = results[0].logits
    assert clean.shape == (1, 3)
    moved = []
    for spec, result in zip(changes, results[1:], strict=True):
        assert torch.allclose(result.logits, model.forward([IDS], spec).logits, atol=1e-5)
        moved.append(not torch.allclose(result.logits, clean, atol=1e-6))
    # A change of the last state reaches the labels only at a position that the head reads.
    reads = model.config.head.reads
    expected = {"first": [0], "last": [5], "mean": list(range(6))}[reads]
    assert [at for at, has_moved in enumerate(moved[1:]) if has_moved] == expected


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_the_logit_of_a_label_has_gradients_that_differences_confirm(family, tmp_path):
    save(tmp_path, family, "sequence", CLASSIFIERS[family])
    model = loaded(tmp_path, dtype="float64")
    # Before the head: inside of attention the reference rounds to float32, and so do we.
    point = HookPoint.resid_post(model.config.num_layers - 1)
    spec = HookSpec().capture(f"grad:{point}").gradient_of(LogitDifference(2, 0))
    gradient = model.forward([IDS], spec)[f"grad:{point}"][0]
    state = model.forward([IDS], HookSpec().capture(point))[point][0]
    step, direction = 1e-3, torch.randn(state.shape, generator=torch.Generator().manual_seed(0)).double()

    def difference(sign: float) -> float:
        shifted = HookSpec().intervene(point, Replace(state + sign * step * direction))
        logits = model.forward([IDS], shifted).logits[0]
        return float(logits[2] - logits[0])

    expected = (difference(1) - difference(-1)) / (2 * step)
    assert float((gradient * direction).sum()) == pytest.approx(expected, rel=1e-2, abs=1e-6)


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_patching_to_the_logit_of_a_label_is_what_literal_passes_give(family, tmp_path):
    save(tmp_path / "model", family, "sequence", CLASSIFIERS[family])
    corrupted, metric, layer = [*IDS[:2], 44, *IDS[3:]], LogitDifference(2, 0), 0
    patching = ActivationPatching(
        clean=tuple(IDS),
        corrupted=tuple(corrupted),
        metrics=(metric,),
        kinds=("resid_post",),
        layers=(layer,),
    )
    store, node = mizarr.open_store(tmp_path / "store"), patching.on(str(tmp_path / "model"))
    compute(node, store)
    found = node.open(store).load()["logit_difference"].values.ravel()
    model, point = loaded(tmp_path / "model"), HookPoint.resid_post(layer)
    clean = model.forward([IDS], HookSpec().capture(point))[point][0]
    for position, value in enumerate(found):
        patch = HookSpec().intervene(point, Replace(clean[position], positions=[position]))
        logits = model.forward([corrupted], patch).logits[0]
        assert value == pytest.approx(float(logits[2] - logits[0]), abs=2e-5)
    outside = replace(patching, metrics=(LogitDifference(3, 0),)).on(str(tmp_path / "model"))
    with pytest.raises(PromptError, match="expected a label from 0 to 2, found 3"):
        compute(outside, store)


@pytest.mark.parametrize("kind", ["base", "sequence"])
def test_weights_that_are_streamed_give_the_same_states_and_labels(kind, tmp_path):
    (name,) = (name for *of, name in classes() if of == ["llama", kind])
    save(tmp_path, "llama", kind, name)
    model, point = loaded(tmp_path), HookPoint("final_norm")
    streamed = loaded(tmp_path, max_memory=bytes_of(model.config, 4).total - 1)
    assert streamed.streamed is not None
    whole, parts = (each.forward([IDS], HookSpec().capture(point)) for each in (model, streamed))
    assert torch.equal(whole[point], parts[point])
    assert whole.has_logits == parts.has_logits == (kind == "sequence")
    assert kind == "base" or torch.equal(whole.logits, parts.logits)


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_results_carry_the_names_of_the_labels(family, tmp_path):
    model = classifier(tmp_path / "model", family)
    cache = model.forward([IDS, IDS[:3]], HookSpec().capture("blocks.0.hook_resid_post"))
    dataset = cache.to_xarray()
    assert dataset["logits"].dims == ("batch", "label")
    assert dataset["label"].values.tolist() == list(LABELS.values())
    store = mizarr.open_store(tmp_path / "store")
    runs = [Run(IDS), Run(IDS[:4])]
    first, again = (run(model, runs, store=store) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        assert a.logits.shape == (1, 3)
        assert torch.equal(a.logits, b.logits)
    groups = [store.open_result(record) for record in store.records()]
    assert [group["logits"].dims for group in groups] == [("run", "label")] * 2
    assert groups[0]["label"].values.tolist() == list(LABELS.values())


def test_a_model_without_head_runs_and_says_so_when_asked_for_logits(tmp_path):
    save(tmp_path, "llama", "base", "LlamaModel")
    model = loaded(tmp_path)
    (result,) = run(model, [Run(IDS, HookSpec().capture("hook_final_norm"))])
    cache = model.forward([IDS], HookSpec().capture("hook_final_norm"))
    assert torch.allclose(result["hook_final_norm"], cache["hook_final_norm"], atol=1e-6)
    for found in (result, cache):
        with pytest.raises(HookPointNotFound, match="found LlamaModel without head"):
            found.logits  # noqa: B018
    gradient = HookSpec().capture("grad:hook_embed").gradient_of(LogitDifference(1, 2))
    refused = [
        lambda: model.forward([IDS], want=mizarr.logits(tokens=[3])),
        lambda: model.project_to_vocab(cache["hook_final_norm"]),
        lambda: generate(model, [IDS]),
        lambda: readout_node(resolve(tmp_path)),
        lambda: model.forward([IDS], gradient),
        lambda: CaptureNode(model, [IDS], HookSpec().capture("hook_logits", reduce="topk:2")),
    ]
    for ask in refused:
        with pytest.raises(ConfigError, match="found LlamaModel, which has no head; ask about") as error:
            ask()
        assert "\n" not in str(error.value)


def test_questions_about_tokens_are_refused_where_logits_are_those_of_labels(tmp_path):
    model = classifier(tmp_path, "llama")
    for ask in (lambda: generate(model, [IDS]), lambda: readout_node(resolve(tmp_path))):
        with pytest.raises(ConfigError, match="which has a head for 3 labels"):
            ask()
    with pytest.raises(PromptError, match="one vector of logits per prompt"):
        model.forward([IDS], want=mizarr.logits(position=2))
    with pytest.raises(PromptError, match=r"expected a token id in 0\.\.2"):
        model.forward([IDS], want=mizarr.logits(tokens=[3]))
    chosen = model.forward([IDS], want=mizarr.logits(tokens=[2, 0])).logits
    assert torch.allclose(chosen, model.forward([IDS]).logits[:, [2, 0]], atol=1e-6)
    with pytest.raises(PromptError, match="that do not end with the padding token 1"):
        model.forward([[*IDS, random_heads.PAD]])


def rewritten(folder: Any, tensors: Any = None, **keys: Any) -> None:
    """Change keys of config.json, and the names of tensors."""
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | keys))
    if tensors is not None:
        held = load_file(folder / "model.safetensors")
        save_file(
            {new: value for name, value in held.items() if (new := tensors(name))},
            folder / "model.safetensors",
            {"format": "pt"},
        )


@pytest.mark.parametrize(
    ("keys", "tensors", "refusal"),
    [
        ({}, lambda name: name if name != "score.weight" else "", "expected the tensor .*score.weight"),
        ({"id2label": {"0": "a", "1": "b"}}, None, "to name the labels 0 to 2"),
        ({"architectures": ["LlamaForQuestionAnswering"]}, None, "whose head is not implemented"),
    ],
)
def test_a_class_that_its_files_contradict_is_refused_in_one_line(keys, tensors, refusal, tmp_path):
    save(tmp_path, "llama", "sequence", "LlamaForSequenceClassification")
    rewritten(tmp_path, tensors, **keys)
    with pytest.raises(ConfigError, match=refusal) as error:
        loaded(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["base", "sequence"])
def test_eurobert_that_averages_labels_is_refused_and_runs_without_its_head(kind, tmp_path):
    save(tmp_path, "eurobert", "sequence", "EuroBertForSequenceClassification", classifier_pooling="late")
    if kind == "sequence":
        with pytest.raises(ConfigError, match="classifier_pooling to be 'bos' or 'mean', found 'late'"):
            loaded(tmp_path)
        return
    rewritten(tmp_path, architectures=["EuroBertModel"])
    assert loaded(tmp_path).config.head.kind == "none"


@pytest.mark.parametrize(
    ("family", "head", "kind"),
    [
        ("bert", lambda name: name.startswith("cls."), "none"),
        ("mpnet", lambda name: name.startswith("lm_head."), "none"),
        ("qwen3", lambda name: False, "vocabulary"),
    ],
)
def test_a_language_model_stored_as_its_base_model_has_a_head_only_if_its_tensors_are_there(
    family, head, kind, tmp_path
):
    """As sentence encoders are, under the class of the masked model; and tied decoders, whose head is the
    embedding."""
    options = {"tie_word_embeddings": True}
    writes = save_random_encoder if family in ENCODERS else save_random_model
    reference = writes(tmp_path, family, 0, tokenizer=False, **options)
    prefix = f"{reference.base_model_prefix}."
    rewritten(tmp_path, lambda name: "" if head(name) else name.removeprefix(prefix))
    model, ids = loaded(tmp_path), torch.tensor([IDS])
    assert model.config.head.kind == kind
    last = HookPoint.resid_post(model.config.num_layers - 1)
    cache = model.forward(ids, HookSpec().capture(last))
    with torch.no_grad():
        output = reference(ids, output_hidden_states=True)
    if kind == "none":
        assert torch.allclose(cache[last], output.hidden_states[-1], atol=1e-5)
    else:
        assert torch.allclose(cache.logits, output.logits, atol=1e-4)


def test_a_head_is_part_of_the_identity_and_a_language_head_changes_no_key(tmp_path):
    save(tmp_path, "llama", "sequence", "LlamaForSequenceClassification")
    labelled = resolve(tmp_path).architecture()
    rewritten(tmp_path, architectures=["LlamaModel"])
    base = resolve(tmp_path).architecture()
    rewritten(tmp_path, architectures=["LlamaForCausalLM"], tie_word_embeddings=True)
    language = resolve(tmp_path).architecture()
    assert len({labelled.digest, base.digest, language.digest}) == 3
    assert "head" not in language.fields
    assert {"head", "class"} & set(base.fields) == {"head"}
