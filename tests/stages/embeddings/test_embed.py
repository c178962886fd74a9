"""Embeddings of folders as sentence-transformers writes them equal literal computations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import mizarr
from mizarr.stages.embeddings.modules import POOLINGS
from mizarr.stages.forward.capture import harvest
from mizarr.stages.geometry.similarity import cosine
from mizarr.store.errors import ConfigError, MizarrError, ModelNotFound, PromptError, ShapeError

from ..forward import random_heads

transformers = pytest.importorskip("transformers")
FAMILIES = {"bert": "BertModel", "mpnet": "MPNetModel", "llama": "LlamaModel", "qwen3": "Qwen3Model"}
WORDS = ("red", "blue", "green", "query", ":", "two", "Long", "long", "words", "here")
TEXTS = [
    "red",
    "blue two long words here",
    "two green",
    "red",
    "Long : words long words red blue green two two two",
]
PREFIX = "query : "
FLAGS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
ACTIVATIONS = {"Tanh": torch.tanh, "Identity": lambda x: x, "GELU": torch.nn.functional.gelu}


def write(folder: Path, content: Any) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text(json.dumps(content))


def save_words(folder: Path, pad: int, **settings: Any) -> dict[str, int]:
    """A tokenizer of words between [CLS] and [SEP]; returns the ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    names = ["[A]", "[B]", "[UNK]", "[CLS]", "[MASK]", "[SEP]", *WORDS]
    names[pad] = "[PAD]"
    ids = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [(name, ids[name]) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    roles = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles, **settings)
    fast.save_pretrained(folder)
    return ids


class Encoder:
    """A made-up folder of a sentence encoder, and its literal computation."""

    def __init__(self, folder: Path, family: str, poolings: tuple[str, ...] = ("mean",), **how: Any) -> None:
        self.folder, self.poolings, self.how = folder, poolings, how
        inner = how.get("inner", "")
        self.model = random_heads.save(folder / inner, family, "base", FAMILIES[family])
        self.width = self.model.config.hidden_size
        self.ids = save_words(folder / inner, self.model.config.pad_token_id, **how.get("settings", {}))
        pooling: dict[str, Any] = {"word_embedding_dimension": self.width}
        pooling |= {key: name in poolings for name, key in FLAGS.items()}
        if how.get("is_new"):
            pooling = {"embedding_dimension": self.width, "pooling_mode": poolings[0]}
        write(folder / "1_Pooling/config.json", pooling | {"include_prompt": how.get("include_prompt", True)})
        modules = [("Transformer", inner), ("Pooling", "1_Pooling")]
        self.layers: list[Any] = []
        width = self.width * len(poolings)
        for number, layer in enumerate(how.get("layers", ()), start=2):
            kind = "Normalize" if layer == "Normalize" else "Dense"
            modules.append((kind, f"{number}_{kind}"))
            if kind == "Normalize":
                self.layers.append(None)
                continue
            drawn = torch.Generator().manual_seed(number)
            tensors = {"linear.weight": torch.randn(7, width, generator=drawn) / 3}
            tensors["linear.bias"] = torch.randn(7, generator=drawn)
            self.layers.append((*tensors.values(), ACTIVATIONS[layer]))
            dense = {"in_features": width, "out_features": 7, "bias": True}
            place = "linear" if layer == "Identity" else "activation"
            dense["activation_function"] = f"torch.nn.modules.{place}.{layer}"
            path = folder / f"{number}_Dense"
            write(path / "config.json", dense)
            if number % 2:
                torch.save(tensors, path / "pytorch_model.bin")
            else:
                save_file(tensors, path / "model.safetensors")
            width = 7
        listed = [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for number, (kind, path) in enumerate(modules)
        ]
        write(folder / "modules.json", listed)
        write(folder / inner / "sentence_bert_config.json", how.get("text", {"max_seq_length": 9}))
        prompts = {"prompts": {"query": PREFIX, "none": ""}, "default_prompt_name": how.get("default")}
        write(folder / "config_sentence_transformers.json", prompts)

    def expected(self, text: str, prefix: str = "", most: int = 9) -> torch.Tensor:
        """The embedding of one text, step by step."""
        words = (prefix + text).split()[: most - 2]
        ids = [self.ids.get(word, 2) for word in ("[CLS]", *words, "[SEP]")]
        with torch.no_grad():
            states = self.model(input_ids=torch.tensor([ids])).last_hidden_state[0].double()
        skipped = 0 if self.how.get("include_prompt", True) or not prefix else 1 + len(prefix.split())
        states, weights = states[skipped:], torch.arange(len(states)).double()[skipped:, None] + 1
        pooled = {
            "cls": states[0],
            "max": states.max(0).values,
            "mean": states.mean(0),
            "mean_sqrt_len_tokens": states.sum(0) / len(states) ** 0.5,
            "weightedmean": (states * weights).sum(0) / weights.sum(),
            "lasttoken": states[-1],
        }
        value = torch.cat([pooled[name] for name in POOLINGS if name in self.poolings])
        for layer in self.layers:
            if layer is None:
                value = value / value.norm()
            else:
                weight, bias, activation = layer
                value = activation(weight.double() @ value + bias.double())
        return value


def embed(folder: Any, texts: Any, store: Any, **how: Any) -> Any:
    return mizarr.embed(folder, texts, store=store, device="cpu", progress=False, **how)


def assert_agrees(encoder: Encoder, store: Any, prefix: str = "", **how: Any) -> None:
    """Texts alone and together, and every text at its place."""
    together = embed(encoder.folder, TEXTS, store, **how)
    expected = torch.stack([encoder.expected(text, prefix) for text in TEXTS]).numpy()
    assert together.dims == ("prompt", "hidden")
    assert together.dtype == np.float32
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(together.values, expected, atol=1e-5 * scale)
    alone = embed(encoder.folder, TEXTS[1:2], store, **how)
    np.testing.assert_allclose(alone.values, expected[1:2], atol=1e-5 * scale)


@pytest.fixture
def store(tmp_path):
    return mizarr.open_store(tmp_path / "store", durability="process")


LAYERS = ((), ("Normalize",), ("Tanh",), ("Identity", "GELU", "Normalize"))
CASES = [
    *(("bert", (pooling,), {"layers": LAYERS[i % 4]}) for i, pooling in enumerate(POOLINGS)),
    *(("qwen3", (pooling,), {"layers": LAYERS[(i + 1) % 4]}) for i, pooling in enumerate(POOLINGS)),
    ("mpnet", ("mean",), {"layers": ("Normalize",)}),
    ("llama", ("lasttoken",), {"layers": ("Tanh", "Normalize")}),
    ("bert", ("cls", "mean", "max"), {"layers": ("Identity",)}),
    ("mpnet", ("cls",), {"is_new": True, "inner": "0_Transformer"}),
    ("bert", ("mean",), {"text": {"do_lower_case": True}, "settings": {"model_max_length": 9}}),
]


@pytest.mark.parametrize(("family", "poolings", "how"), CASES)
@pytest.mark.filterwarnings("ignore:1 of 5 texts are cut")
def test_embeddings_are_what_a_literal_computation_gives(family, poolings, how, tmp_path, store):
    encoder = Encoder(tmp_path / "encoder", family, poolings, **how)
    if how.get("text"):
        encoder.ids["Long"] = encoder.ids["long"]
    assert_agrees(encoder, store)


@pytest.mark.parametrize(("pooling", "includes"), [("mean", True), *((name, False) for name in POOLINGS)])
@pytest.mark.filterwarnings("ignore:.* of . texts are cut")
def test_a_prompt_is_read_and_pooled_only_if_the_files_say_so(pooling, includes, tmp_path, store):
    encoder = Encoder(tmp_path / "encoder", "bert", (pooling,), include_prompt=includes, default="query")
    assert_agrees(encoder, store, PREFIX)
    for prefix, how in (("two ", {"prompt": "two "}), ("", {"prompt_name": "none"})):
        found = embed(encoder.folder, TEXTS[:1], store, **how)
        np.testing.assert_allclose(found.values[0], encoder.expected(TEXTS[0], prefix), atol=1e-4)


@pytest.mark.parametrize(("family", "poolings", "how"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_embeddings_are_those_of_sentence_transformers(family, poolings, how, tmp_path, store):
    reference = pytest.importorskip("sentence_transformers")
    how = {**how, "default": "query", "include_prompt": len(poolings) > 1}
    encoder = Encoder(tmp_path / "encoder", family, poolings, **how)
    model = reference.SentenceTransformer(str(encoder.folder), device="cpu")
    for name in ("query", "none"):
        expected = model.encode(TEXTS, prompt_name=name)
        found = embed(encoder.folder, TEXTS, store, prompt_name=name).values
        np.testing.assert_allclose(found, expected, atol=1e-5 * max(1.0, np.abs(expected).max()))


def test_a_plain_model_takes_the_pooling_of_the_caller(tmp_path, store):
    encoder = Encoder(tmp_path / "encoder", "llama")
    (tmp_path / "encoder/modules.json").unlink()
    with pytest.raises(ConfigError, match=r'found neither; pass pooling="mean"'):
        embed(encoder.folder, TEXTS, store)
    with pytest.raises(ConfigError, match="nearest is 'lasttoken'"):
        embed(encoder.folder, TEXTS, store, pooling="last_token")
    model = mizarr.Model.from_pretrained(encoder.folder, device="cpu", progress=False)
    found = mizarr.embed(model, TEXTS, store=store, pooling="mean", progress=False)
    expected = [encoder.expected(text, most=99).numpy() for text in TEXTS]
    np.testing.assert_allclose(found.values, expected, atol=1e-5)
    ids = mizarr.embed(model, [[3, 6, 5]], store=store, pooling="mean", progress=False)
    np.testing.assert_allclose(ids.values, found.values[:1], atol=1e-6)


def test_embeddings_are_stored_and_labelled_and_no_token_state_is(tmp_path, store, monkeypatch):
    encoder = Encoder(tmp_path / "encoder", "bert", layers=("Tanh",))
    with pytest.warns(UserWarning, match="1 of 5 texts are cut to the 9 tokens"):
        first = embed(encoder.folder, TEXTS, store)
    assert first["text"].values.tolist() == TEXTS
    assert first.attrs["model_digest"]
    (entry,) = store.entries()
    assert [name.rpartition("__")[2] for name in entry.specs] == ["mean"]

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(harvest, "fill", refuse)
    with pytest.warns(UserWarning, match="cut"):
        np.testing.assert_array_equal(embed(encoder.folder, TEXTS, store), first)
    # Another dense layer is another embedding of the same pooled states.
    tensors = {"linear.weight": torch.ones(7, encoder.width), "linear.bias": torch.zeros(7)}
    save_file(tensors, encoder.folder / "2_Dense/model.safetensors")
    encoder.layers = [(*tensors.values(), torch.tanh)]
    changed = embed(encoder.folder, TEXTS[:1], store)
    np.testing.assert_allclose(changed.values[0], encoder.expected(TEXTS[0]), atol=1e-5)


def test_a_call_that_was_stopped_continues_with_the_segments_that_are_missing(tmp_path, store, monkeypatch):
    encoder, texts, filled = Encoder(tmp_path / "encoder", "bert"), TEXTS[:4], []
    fill = harvest.fill

    def stop_at_third(model: Any, entry: Any, n: int, *rest: Any) -> None:
        if len(filled) == 2:
            raise KeyboardInterrupt
        filled.append(n)
        fill(model, entry, n, *rest)

    monkeypatch.setattr(harvest, "fill", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        embed(encoder.folder, texts, store, segment_tokens=4)
    before = list(filled)
    filled.insert(0, -1)  # the count is 3 from here on, so that nothing is stopped
    found = embed(encoder.folder, texts, store, segment_tokens=4)
    assert len(before) == 2
    assert sorted(filled[1:]) == list(range(5))
    expected = [encoder.expected(text).numpy() for text in texts]
    np.testing.assert_allclose(found.values, expected, atol=1e-5)


def changed(folder: Path, name: str, **keys: Any) -> None:
    path = folder / name
    held = json.loads(path.read_text()) if path.is_file() else {}
    write(path, held | keys)


@pytest.mark.parametrize(
    ("name", "keys", "refusal"),
    [
        ("1_Pooling/config.json", {"pooling_mode_median": True}, "expected pooling_mode_median"),
        ("1_Pooling/config.json", {"pooling_mode": "median"}, "expected pooling_mode to be among cls, max"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": 1}, "to be true or false, found 1"),
        ("1_Pooling/config.json", {"word_embedding_dimension": 5}, "found word_embedding_dimension 5"),
        ("2_Dense/config.json", {"activation_function": "my.Own"}, "expected activation_function"),
        ("2_Dense/config.json", {"use_residual": True}, "expected use_residual to be False, found True"),
        ("2_Dense/config.json", {"in_features": 3}, "expected in_features to be"),
        ("2_Dense/config.json", {"out_features": 3}, "as its config.json states"),
        ("3_Normalize/config.json", {"module_input_name": "token_embeddings"}, "expected module_input_name"),
        ("sentence_bert_config.json", {"modality_config": {"image": {}}}, "expected modality_config"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "expected model_type"),
        ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "one of query, none"),
        ("config_sentence_transformers.json", {"prompts": {"query": 3}}, "texts by name"),
    ],
)
def test_what_is_not_implemented_is_refused_in_a_line_with_file_and_key(name, keys, refusal, tmp_path, store):
    encoder = Encoder(tmp_path / "encoder", "bert", layers=("Tanh", "Normalize"))
    changed(encoder.folder, name, **keys)
    with pytest.raises(ConfigError, match=refusal) as error:
        embed(encoder.folder, TEXTS[:2], store)
    assert "\n" not in str(error.value)
    assert Path(name).name in str(error.value) or "word_embedding_dimension" in str(error.value)
    assert not list(store.records())


@pytest.mark.parametrize("kind", ["sentence_transformers.models.LSTM", "my.Module", 3])
def test_other_modules_are_refused(kind, tmp_path, store):
    encoder = Encoder(tmp_path / "encoder", "bert")
    path = encoder.folder / "modules.json"
    listed = json.loads(path.read_text())
    write(path, [*listed, {"path": "2_Own", "type": kind}])
    with pytest.raises(ConfigError, match=r"modules\.json: expected type of .*not implemented"):
        embed(encoder.folder, TEXTS[:2], store)
    write(path, [{"type": listed[0]["type"], "path": "../other"}, *listed[1:]])
    with pytest.raises(MizarrError, match="to name a file inside the folder"):
        embed(encoder.folder, TEXTS[:2], store)


@pytest.mark.filterwarnings("ignore:1 of 1 texts are cut")
def test_wrong_requests_are_refused_in_a_line(tmp_path, store):
    encoder = Encoder(tmp_path / "encoder", "bert", include_prompt=False, default="query")
    folder = encoder.folder
    for how, refusal in (
        ({"pooling": "mean"}, "found both; leave pooling out"),
        ({"prompt": "a", "prompt_name": "query"}, "found both; leave one of them out"),
        ({"prompt_name": "passage"}, r"\(query, none\), found 'passage'"),
    ):
        with pytest.raises((ConfigError, PromptError), match=refusal) as error:
            embed(folder, TEXTS[:1], store, **how)
        assert "\n" not in str(error.value)
    with pytest.raises(PromptError, match="found token ids; pass texts, or prompt="):
        embed(folder, [[3, 6, 5]], store)
    assert embed(folder, [[3, 6, 5]], store, prompt="").shape == (1, encoder.width)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"] = None
    write(folder / "tokenizer.json", tokenizer)
    with pytest.raises(PromptError, match=r"expected a token behind the 9 of the prompt .* in prompt 0"):
        embed(folder, TEXTS[:1], store, prompt="two " * 9)
    (folder / "config.json").rename(folder / "other.json")
    with pytest.raises(ModelNotFound, match=r"found no config\.json"):
        embed(folder, TEXTS[:1], store)


def test_the_cosine_of_embeddings_is_that_of_unit_vectors(tmp_path, store):
    encoder = Encoder(tmp_path / "encoder", "bert")
    found = embed(encoder.folder, TEXTS[:4], store)
    expected = torch.stack([encoder.expected(text) for text in TEXTS[:4]])
    expected = torch.nn.functional.cosine_similarity(expected[:, None], expected[None], dim=-1)
    alike = cosine(found)
    np.testing.assert_allclose(alike.values, expected, atol=1e-5)
    assert alike.sel(prompt=0, other_prompt=3) == pytest.approx(1)
    assert alike["other_text"].values.tolist() == TEXTS[:4]
    np.testing.assert_allclose(cosine(found[:2], found[2:]), alike[:2, 2:], rtol=1e-12)
    assert not cosine(found * 0).values.any()
    with pytest.raises(ShapeError, match="of one width"):
        cosine(found, found[:, 1:])
