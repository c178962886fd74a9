"""Encoders with decoders, against transformers and against plain passes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mizarr
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.weights.matrices import PlainMatrices
from mizarr.store.errors import ConfigError, PromptError

from .random_pairs import BARTS, KINDS, LONGEST, VOCABULARY, random_pair

pytest.importorskip("transformers")
LENGTHS = (1, 2, 37, 100)


def _tensor(cache: Any, name: str) -> torch.Tensor:
    return torch.as_tensor(np.asarray(cache[name]))


def _differences(model: mizarr.Model, reference: Any, source: Any, target: Any) -> dict[str, float]:
    """Largest difference of everything transformers tells, by name."""
    config: Any = model.config
    e, s = config.pair.encoder_layers, source.shape[1]
    d = config.num_layers - e
    with torch.no_grad():
        told = reference(
            input_ids=source,
            decoder_input_ids=target,
            output_hidden_states=True,
            output_attentions=True,
            use_cache=False,
        )
    ids = torch.cat([source, target], dim=1)
    ids[:, s] += VOCABULARY
    spec = mizarr.HookSpec().capture("blocks.*.hook_resid_*").capture("blocks.*.attn.hook_pattern")
    spec = spec.capture("blocks.*.cross_attn.hook_pattern").capture("blocks.*.cross_attn.hook_memory")
    found = model.forward(ids.tolist(), spec)
    pairs = {"logits": (found.logits[:, s:], told.logits)}
    last = f"blocks.{e}.cross_attn.hook_memory"
    pairs["memory"] = (_tensor(found, last)[:, :s], told.encoder_last_hidden_state)
    for layer in range(e + d):
        states = told.encoder_hidden_states if layer < e else told.decoder_hidden_states
        own = slice(0, s) if layer < e else slice(s, None)
        at = layer if layer < e else layer - e
        pairs[f"stream {layer}"] = (_tensor(found, f"blocks.{layer}.hook_resid_pre")[:, own], states[at])
        pattern = _tensor(found, f"blocks.{layer}.attn.hook_pattern")
        theirs = told.encoder_attentions if layer < e else told.decoder_attentions
        pairs[f"pattern {layer}"] = (pattern[:, :, own, own], theirs[at])
        assert pattern.sum() == pytest.approx(float(pattern[:, :, own, own].sum()), rel=1e-5)
        other = slice(s, None) if layer < e else slice(0, s)
        before, after = (_tensor(found, f"blocks.{layer}.hook_resid_{end}") for end in ("pre", "post"))
        assert torch.equal(before[:, other], after[:, other])  # a layer of the other side adds nothing
        if layer >= e:
            cross = _tensor(found, f"blocks.{layer}.cross_attn.hook_pattern")
            pairs[f"cross {layer}"] = (cross[:, :, own, :s], told.cross_attentions[at])
            assert cross[:, :, :s].abs().max() == 0
    return {name: float((ours - theirs).abs().max()) for name, (ours, theirs) in pairs.items()}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_everything_transformers_tells_of_a_pair_is_told_alike(kind: str, seed: int, tmp_path: Path) -> None:
    reference = random_pair(kind, seed, tmp_path)
    model = mizarr.Model.from_pretrained(tmp_path)
    for source in LENGTHS:
        for target in LENGTHS:
            pair = (torch.randint(5, VOCABULARY, (2, length)) for length in (source, target))
            found = _differences(model, reference, *pair)
            assert max(found.values()) < 1e-4, (source, target, found)


@pytest.mark.parametrize("kind", ["t5", *BARTS])
def test_pairs_of_one_length_that_begin_elsewhere_are_computed_as_alone(kind: str, tmp_path: Path) -> None:
    random_pair(kind, 3, tmp_path)
    model = mizarr.Model.from_pretrained(tmp_path)
    drawn = random.Random(4)
    pairs = [
        model.pair(*([drawn.randrange(5, VOCABULARY) for _ in range(n)] for n in sizes))
        for sizes in ((1, 6), (4, 3), (7, 0), (2, 1), (20, 12))
    ]
    together = model.forward(pairs)
    for number, ids in enumerate(pairs):
        alone = model.forward([ids]).logits[0]
        assert (together.logits[number, : len(ids)] - alone).abs().max() < 1e-5


def _change(point: mizarr.HookPoint, model: mizarr.Model, length: int, drawn: random.Random) -> Any:
    """A change at one position of the point's."""
    if "query_position" in point.dims:
        return mizarr.Scale(0.5) if point.kind.endswith("pattern") else None
    position = (drawn.randrange(length),)
    if point.dims[-1] == "one":
        return mizarr.Scale(1.5, positions=position)
    return mizarr.Add(torch.randn(model.config.axis_sizes[point.dims[-1]]) * 2, positions=position)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", ["t5", "umt5", *BARTS])
def test_runs_that_are_planned_together_give_what_each_gives_alone(
    kind: str, seed: int, tmp_path: Path
) -> None:
    random_pair(kind, 10 + seed, tmp_path)
    model = mizarr.Model.from_pretrained(tmp_path)
    drawn = random.Random(seed)
    pairs = [
        model.pair(*([drawn.randrange(5, VOCABULARY) for _ in range(n)] for n in sizes))
        for sizes in ((1, 0), (5, 4), (4, 5), (2, 9))
    ]
    runs, points = [], [point for point in model.hook_points if point.kind != "embed"]
    for _ in range(60):
        ids, spec = drawn.choice(pairs), mizarr.HookSpec()
        for point in drawn.sample(points, 2):
            change = _change(point, model, len(ids), drawn)
            if change is not None:
                spec = spec.intervene(point, change)
        seen = drawn.sample(points, 3)
        for point in seen:
            spec = spec.capture(point)
        runs.append((seen, mizarr.Run(ids, spec, want=mizarr.logits())))
    moved = 0
    for (seen, each), planned in zip(runs, mizarr.run(model, [one for _, one in runs]), strict=True):
        alone = model.forward([list(each.prompt)], each.hooks)
        plain = model.forward([list(each.prompt)])
        assert planned.logits is not None and alone.logits is not None and plain.logits is not None
        scale = float(alone.logits.abs().max())
        assert (planned.logits - alone.logits).abs().max() <= 1e-5 * scale + 1e-5, each
        moved += bool((alone.logits - plain.logits).abs().max() > 1e-3)
        for point in seen:
            ours, theirs = (_tensor(cache, str(point)) for cache in (planned, alone))
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert moved > 20


def test_a_change_of_the_target_is_planned_from_there_on(tmp_path: Path) -> None:
    random_pair("t5", 1, tmp_path)
    model = mizarr.Model.from_pretrained(tmp_path)
    config: Any = model.config
    ids = model.pair([7, 8, 9], [10, 11, 12])
    assert config.reaches_from(ids, 1) == 0
    assert config.reaches_from(ids, 5) == 5


@pytest.mark.parametrize("kind", ["t5", "mt5", *BARTS])
def test_targets_go_on_as_transformers_goes_on(kind: str, tmp_path: Path) -> None:
    reference = random_pair(kind, 5, tmp_path)
    model = mizarr.Model.from_pretrained(tmp_path)
    config: Any = model.config
    source = [9, 17, 33, 21]
    ids = torch.tensor([[config.pair.start_token]])
    for _ in range(6):
        with torch.no_grad():
            logits = reference(input_ids=torch.tensor([source]), decoder_input_ids=ids).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    found = mizarr.generate(model, [source], max_tokens=6, eos=())
    assert list(found[0].generated_ids) == ids[0, 1:].tolist()


def test_a_target_does_not_grow_beyond_its_positions(tmp_path: Path) -> None:
    random_pair("bart", 5, tmp_path)
    model = mizarr.Model.from_pretrained(tmp_path)
    told = f"a source and a target of at most {LONGEST} tokens each, found one of {LONGEST + 1} tokens"
    with pytest.raises(PromptError, match=told):
        mizarr.generate(model, [[9, 8]], max_tokens=LONGEST + 6, eos=())


def test_a_capture_holds_what_a_forward_pass_gives(tmp_path: Path) -> None:
    random_pair("bart", 6, tmp_path)
    model = mizarr.Model.from_pretrained(tmp_path)
    pairs = [model.pair([7, 8, 9], [10, 11]), model.pair([6], [12, 13, 14, 15]), model.pair([5, 6])]
    hooks = mizarr.HookSpec().capture("blocks.*.hook_cross_attn_out").capture("blocks.*.hook_resid_post")
    store = mizarr.open_store(str(tmp_path / "store"))
    held = mizarr.capture(model, pairs, hooks, store=store)
    layers = held["resid_post"].layer.values.tolist()
    ends = np.cumsum([len(ids) for ids in pairs])
    for ids, end in zip(pairs, ends, strict=True):
        alone = model.forward([ids], hooks)
        for layer in layers:
            kept = held["resid_post"].sel(layer=layer).transpose("token", "hidden").values
            ours = _tensor(alone, f"blocks.{layer}.hook_resid_post")[0]
            assert np.abs(kept[end - len(ids) : end] - ours.numpy()).max() < 1e-5


def test_what_is_no_pair_is_refused(tmp_path: Path) -> None:
    random_pair("bart", 7, tmp_path)
    model = mizarr.Model.from_pretrained(tmp_path)
    start = model.config.target_start
    assert start == VOCABULARY + 2
    assert model.tokenize([7, 8]) == [[7, 8, start]]
    for bad in ([start, 7], [7, start, start]):
        with pytest.raises(PromptError, match=r"model\.pair"):
            model.tokenize(bad)
    told = f"at most {LONGEST} tokens in the source .* found {LONGEST + 1}"
    with pytest.raises(PromptError, match=told):
        model.pair([7] * (LONGEST + 1))
    with pytest.raises(PromptError, match="token ids"):
        model.pair([7, 8], [-1])
    with pytest.raises(ConfigError, match="an encoder and a decoder"):
        model.embed(torch.tensor([[7, 8]]))
    with pytest.raises(ConfigError, match="which reads one sequence"):
        mizarr.Model.from_pretrained("specimen").pair("a", "b")


def test_tables_of_biases_are_read_once_for_all_layers_that_share_them(tmp_path: Path) -> None:
    name = "{}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    for kind, seed in (("t5", 1), ("umt5", 1)):
        random_pair(kind, seed, tmp_path / kind)
        model = mizarr.Model.from_pretrained(tmp_path / kind)
        depth, tensors = model.config.pair.encoder_layers, model.config.tensors
        sides = {"encoder": depth, "decoder": model.config.num_layers - depth}
        shared = {name.format(side) for side, layers in sides.items() if layers > 1 and kind == "t5"}
        assert tensors.shared == shared
        assert sum("relative_attention_bias" in name for name in tensors.shapes) == (
            2 if kind == "t5" else model.config.num_layers
        )


def test_matrices_of_a_pair_form_no_circuits(tmp_path: Path) -> None:
    random_pair("t5", 7, tmp_path)
    files = resolve(str(tmp_path))
    with pytest.raises(ConfigError, match="found t5, an encoder with a decoder"):
        PlainMatrices(files.checkpoint, files.architecture())


def test_texts_are_sources_and_their_pairs_have_targets(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    random_pair("t5", 8, tmp_path)
    words = ["<pad>", "</s>", "<unk>", *["one", "two", "three", "four", "five", "six"]]
    text = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    text.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    text.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    text.save(str(tmp_path / "tokenizer.json"))
    model = mizarr.Model.from_pretrained(tmp_path)
    start = model.config.target_start
    assert model.tokenize("one two") == [[3, 4, 1, start]]
    assert model.pair("one two", "four five") == [3, 4, 1, start, 6, 7]
    store = mizarr.open_store(str(tmp_path / "store"))
    held = mizarr.capture(
        model, ["one two", "three"], mizarr.HookSpec().capture("blocks.*.hook_resid_post"), store=store
    )
    ids = held["token_id"].values.tolist()
    assert ids == [3, 4, 1, start, 5, 1, start]
    found = mizarr.generate(model, ["one two"], max_tokens=3, eos=())
    assert found[0].prompt_ids == (3, 4, 1, start) and len(found[0].generated_ids) == 3


@pytest.mark.parametrize(
    ("kind", "changes", "told"),
    [
        (
            "marian",
            {"share_encoder_decoder_embeddings": False},
            "share_encoder_decoder_embeddings to be true",
        ),
        ("mvp", {"use_prompt": True}, "use_prompt to be false, found true"),
        (
            "m2m_100",
            {"d_model": 15, "encoder_attention_heads": 1, "decoder_attention_heads": 1},
            "even d_model",
        ),
        (
            "pegasus",
            {"decoder_attention_heads": 1},
            "encoder_attention_heads and decoder_attention_heads to be equal",
        ),
        ("blenderbot", {"activation_function": "tanh"}, "expected an activation among"),
        ("pegasus", {"model_type": "bigbird_pegasus"}, "bigbird_pegasus"),
        ("bart", {"model_type": "led"}, "led"),
        ("m2m_100", {"model_type": "nllb-moe"}, "nllb-moe"),
    ],
)
def test_what_has_no_axis_here_is_refused(
    kind: str, changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    random_pair(kind, 9, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConfigError, match=told):
        mizarr.Model.from_pretrained(tmp_path)


def test_padding_has_no_position_in_m2m(tmp_path: Path) -> None:
    random_pair("m2m_100", 9, tmp_path)
    model = mizarr.Model.from_pretrained(tmp_path)
    padding = json.loads((tmp_path / "config.json").read_text())["pad_token_id"]
    for pair in (([7, padding, 8], []), ([7], [padding])):
        with pytest.raises(
            PromptError, match=f"expected no padding in the prompt, found the padding token {padding}"
        ):
            model.pair(*pair)
    with pytest.raises(PromptError, match="expected no padding token in a source or a target"):
        model.forward([[7, 8, VOCABULARY + padding]])
