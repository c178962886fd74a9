"""Tokens declared beside tokenizer.json: ids, special tokens and conversations are those of transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mizarr.stages.forward.models.download import wanted_files
from mizarr.stages.forward.text.library import LibraryTokenizer
from mizarr.store.errors import TokenizerError

from .. import random_models

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ im_token }}{{ message.role }}\n{{ message.content }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ sep_token }}{% endif %}"
    "{{ image_token }}"
)
CONVERSATION = [
    {"role": "user", "content": "hello <x> World"},
    {"role": "assistant", "content": "<|im_end|> b"},
]
NEW = ("<x>", "<|im_start|>", "<|im_end|>", "[EOT]", "<pad>", "the", "Word", "<image>", "<é>", "a b")
"""Texts of tokens that are declared; "the" is in the vocabulary."""
TEXTS = (
    "<s>hello </s> the World</s>",
    "a <x> b<x>c  <x>  d",
    "<|im_start|>user\nthe THE <|im_end|>\n[EOT]<pad><pad>",
    "wordWord Word WORD sword Word.",
    " [eot] [EOT] <IMAGE> <image> <é><É>",
    "a b  a  b A B",
    "<unk><mask>plain text, naïve 🙂",
    "",
)


def described(base: Path, *, lowercase: bool = False, **changes: Any) -> dict[str, Any]:
    file = json.loads((base / "tokenizer.json").read_text())
    if lowercase:
        file["normalizer"] = {"type": "Lowercase"}
    return file | changes


def token(content: str, **flags: bool) -> dict[str, Any]:
    """An added token as tokenizer_config.json writes it."""
    usual = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {"content": content, **usual, **flags}


def marked(content: str, **flags: bool) -> dict[str, Any]:
    """The same as older versions marked it."""
    return {"__type": "AddedToken", **token(content, **flags)}


def unmarked(content: str, **flags: bool) -> dict[str, Any]:
    """The same as special_tokens_map.json writes it."""
    return {key: value for key, value in token(content, **flags).items() if key != "special"}


Files = Mapping[str, Any]
PADDING = {
    "strategy": "BatchLongest",
    "direction": "Left",
    "pad_to_multiple_of": None,
    "pad_id": 3,
    "pad_type_id": 0,
    "pad_token": "<pad>",
}
CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
FOLDERS: dict[str, Files] = {
    "nothing": {},
    "an empty config": {CONFIG: {}},
    "named as texts": {CONFIG: {"bos_token": "<s>", "eos_token": "[EOT]", "pad_token": "<pad>"}},
    "every role": {
        CONFIG: {f"{role}_token": f"<{role}>" for role in ("cls", "mask", "sep", "unk", "eos", "pad", "bos")}
    },
    "named, marked": {CONFIG: {"bos_token": marked("<s>"), "eos_token": marked("[EOT]", lstrip=True)}},
    "named, marked, not special": {CONFIG: {"eos_token": marked("[EOT]", special=False, normalized=True)}},
    "named, null": {CONFIG: {"bos_token": None, "eos_token": "</s>"}},
    "named, empty": {CONFIG: {"bos_token": "", "eos_token": "</s>"}},
    "two roles of one token": {CONFIG: {"eos_token": "[EOT]", "pad_token": "[EOT]"}},
    "two roles, one marked": {CONFIG: {"eos_token": "[EOT]", "pad_token": marked("[EOT]", rstrip=True)}},
    "named, in the vocabulary": {CONFIG: {"eos_token": "the"}},
    "decoder": {CONFIG: {"added_tokens_decoder": {"900": token("<|im_start|>"), "901": token("<|im_end|>")}}},
    "decoder, in another order": {
        CONFIG: {
            "added_tokens_decoder": {"901": token("<|im_end|>"), "20": token("<x>"), "900": token("[EOT]")}
        }
    },
    "decoder, ids of others": {
        CONFIG: {"added_tokens_decoder": {"0": token("<x>"), "5": token("<|im_end|>")}}
    },
    "decoder, strips": {
        CONFIG: {
            "added_tokens_decoder": {
                "900": token("<x>", lstrip=True, rstrip=True),
                "901": token("Word", single_word=True),
            }
        }
    },
    "decoder, normalised": {
        CONFIG: {
            "added_tokens_decoder": {
                "900": token("Word", special=False, normalized=True),
                "901": token("[EOT]", normalized=True),
            }
        }
    },
    "decoder, not special": {
        CONFIG: {
            "added_tokens_decoder": {"900": token("<x>", special=False), "901": token("the", special=False)}
        }
    },
    "decoder, the file's own": {
        CONFIG: {"added_tokens_decoder": {"0": token("<s>"), "1": token("</s>")}, "bos_token": "<s>"}
    },
    "decoder, the file's own otherwise": {
        CONFIG: {"added_tokens_decoder": {"0": token("<s>", lstrip=True), "1": token("</s>", rstrip=True)}}
    },
    "decoder, empty": {CONFIG: {"added_tokens_decoder": {}, "eos_token": "[EOT]"}, MAP: {"eos_token": "<x>"}},
    "decoder and named": {
        CONFIG: {
            "added_tokens_decoder": {"900": token("<|im_end|>", lstrip=True)},
            "eos_token": "<|im_end|>",
            "pad_token": "<pad>",
        }
    },
    "decoder, not special, named": {
        CONFIG: {"added_tokens_decoder": {"900": token("[EOT]", special=False)}, "eos_token": "[EOT]"}
    },
    "decoder hides the map": {
        CONFIG: {"added_tokens_decoder": {"900": token("<x>")}, "eos_token": "<x>"},
        MAP: {"eos_token": "[EOT]", "bos_token": "<s>"},
        ADDED: {"<pad>": 950},
    },
    "additional": {CONFIG: {"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<s>"]}},
    "additional, marked": {CONFIG: {"additional_special_tokens": [marked("<x>", lstrip=True), "[EOT]"]}},
    "additional, twice": {CONFIG: {"additional_special_tokens": ["<x>", "<x>", "</s>"]}},
    "additional, null": {CONFIG: {"additional_special_tokens": None, "eos_token": "[EOT]"}},
    "extra": {CONFIG: {"extra_special_tokens": ["<|im_start|>", "<é>"]}},
    "extra, marked": {
        CONFIG: {"extra_special_tokens": [marked("<x>", rstrip=True), marked("Word", single_word=True)]}
    },
    "extra by role": {
        CONFIG: {"extra_special_tokens": {"image_token": "<image>", "im_token": "<|im_start|>"}}
    },
    "extra by role, marked": {
        CONFIG: {"extra_special_tokens": {"image_token": marked("<image>", lstrip=True)}}
    },
    "extra by role of all": {CONFIG: {"eos_token": "</s>", "extra_special_tokens": {"eos_token": "[EOT]"}}},
    "extra and additional": {
        CONFIG: {"extra_special_tokens": ["<x>"], "additional_special_tokens": ["[EOT]"]}
    },
    "extra empty, additional": {CONFIG: {"extra_special_tokens": [], "additional_special_tokens": ["[EOT]"]}},
    "extra by role, additional": {
        CONFIG: {"extra_special_tokens": {"image_token": "<image>"}, "additional_special_tokens": ["[EOT]"]}
    },
    "roles of its own": {
        CONFIG: {"image_token": "<image>", "im_token": "<|im_start|>", "add_bos_token": True}
    },
    "roles of its own, marked": {CONFIG: {"image_token": marked("<image>", rstrip=True), "im_token": "<x>"}},
    "roles of its own, saved again": {
        CONFIG: {"model_specific_special_tokens": {"image_token": "<image>"}, "eos_token": "</s>"}
    },
    "roles of its own, both": {
        CONFIG: {"im_token": "<x>", "model_specific_special_tokens": {"image_token": "<image>"}}
    },
    "map": {
        CONFIG: {},
        MAP: {
            "bos_token": "<s>",
            "eos_token": unmarked("[EOT]"),
            "pad_token": unmarked("<pad>", lstrip=True),
        },
    },
    "map alone": {MAP: {"eos_token": "[EOT]", "cls_token": unmarked("<x>", normalized=True)}},
    "map against config": {
        CONFIG: {"eos_token": "</s>", "bos_token": "<x>"},
        MAP: {"eos_token": "[EOT]", "bos_token": None},
    },
    "map, additional": {CONFIG: {}, MAP: {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}},
    "map, additional, config extra": {
        CONFIG: {"extra_special_tokens": ["<x>"]},
        MAP: {"additional_special_tokens": ["[EOT]"]},
    },
    "map, extra": {
        CONFIG: {"extra_special_tokens": ["<x>"]},
        MAP: {"extra_special_tokens": ["<x>", "[EOT]", unmarked("<é>", lstrip=True)]},
    },
    "map, extra by role": {
        CONFIG: {"im_token": "<x>"},
        MAP: {"extra_special_tokens": {"image_token": "<image>"}},
    },
    "map, roles of its own": {
        CONFIG: {},
        MAP: {"image_token": "<image>", "im_token": unmarked("<x>", rstrip=True)},
    },
    "added": {
        CONFIG: {"eos_token": "<|im_end|>"},
        ADDED: {"<|im_end|>": 905, "<|im_start|>": 900, "[EOT]": 903},
    },
    "added alone": {ADDED: {"<x>": 900, "the": 901}},
    "added, ids of the file's": {CONFIG: {}, ADDED: {"<x>": 0, "[EOT]": 1, "<pad>": 4}},
    "added, normalised": {CONFIG: {}, ADDED: {"Word": 900, "<IMAGE>": 901}},
    "added, the file's own": {CONFIG: {"eos_token": "</s>"}, ADDED: {"<s>": 0, "</s>": 1, "<unk>": 950}},
    "added and extra": {CONFIG: {"additional_special_tokens": ["[EOT]", "<x>"]}, ADDED: {"[EOT]": 900}},
    "added and a marked name": {CONFIG: {"eos_token": marked("[EOT]", lstrip=True)}, ADDED: {"[EOT]": 900}},
    "added and map": {
        CONFIG: {},
        MAP: {"eos_token": unmarked("[EOT]", rstrip=True)},
        ADDED: {"[EOT]": 900, "<x>": 899},
    },
    "all of them": {
        CONFIG: {
            "bos_token": "<s>",
            "image_token": "<image>",
            "additional_special_tokens": ["<x>"],
            "extra_special_tokens": None,
        },
        MAP: {"eos_token": unmarked("<|im_end|>"), "unk_token": "<unk>"},
        ADDED: {"<|im_start|>": 901, "<|im_end|>": 900},
    },
    "special tokens are cut": {
        CONFIG: {
            "split_special_tokens": True,
            "eos_token": "[EOT]",
            "added_tokens_decoder": {"900": token("<x>", special=False)},
        }
    },
    "padding names a pad": {"tokenizer.json": {"padding": PADDING}, CONFIG: {"eos_token": "</s>"}},
    "padding against a pad": {"tokenizer.json": {"padding": PADDING}, CONFIG: {"pad_token": "[EOT]"}},
    "padding against null": {"tokenizer.json": {"padding": PADDING}, CONFIG: {"pad_token": None}},
    "no post-processor": {
        "tokenizer.json": {"post_processor": None},
        CONFIG: {"bos_token": "<s>", "add_bos_token": True},
    },
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    random_models.save_tokenizer(folder)
    return folder


def write(folder: Path, base: Path, files: Files, *, lowercase: bool = False) -> Path:
    for name, content in files.items():
        if name != "tokenizer.json":
            value = {"chat_template": TEMPLATE, **content} if name == CONFIG else content
            (folder / name).write_text(json.dumps(value))
    file = described(base, lowercase=lowercase, **files.get("tokenizer.json", {}))
    (folder / "tokenizer.json").write_text(json.dumps(file))
    return folder


def require_equal(folder: Path, *, by_auto: bool) -> None:
    """Raise AssertionError where this tokenizer and that of transformers differ."""
    import transformers

    ours = LibraryTokenizer(folder / "tokenizer.json")
    references = [transformers.PreTrainedTokenizerFast.from_pretrained(folder)]
    if by_auto:
        references.append(transformers.AutoTokenizer.from_pretrained(folder))
    for reference in references:
        for text in TEXTS:
            for special in (True, False):
                expected = reference(text, add_special_tokens=special)["input_ids"]
                assert ours.encode(text, add_special=special).ids == expected, text
                assert ours.ids_of([text], add_special=special) == [expected]
            ids = ours.encode(text).ids
            assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=False)
            assert ours.decode(ids, keep_special=False) == reference.decode(ids, skip_special_tokens=True)
        assert ours.vocab_size == len(reference)
        for role, content in reference.special_tokens_map.items():
            expected = reference.convert_tokens_to_ids(content) if content else None
            assert ours.special_id(role) == expected, role
        assert ours._declared.texts == reference.special_tokens_map
        assert (ours.bos_id, ours.eos_id) == (
            reference.bos_token_id if reference.bos_token else None,
            reference.eos_token_id if reference.eos_token else None,
        )
        if reference.chat_template:
            for prompt in (True, False):
                expected = reference.apply_chat_template(
                    CONVERSATION, tokenize=False, add_generation_prompt=prompt
                )
                assert ours.chat(CONVERSATION, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_read_as_transformers_reads_it(base, tmp_path, name, lowercase):
    pytest.importorskip("transformers")
    files = dict(FOLDERS[name])
    by_auto = CONFIG in files
    if by_auto:
        files[CONFIG] = {**files[CONFIG], "tokenizer_class": "PreTrainedTokenizerFast"}
        files["config.json"] = {"model_type": "llama"}
    require_equal(write(tmp_path, base, files, lowercase=lowercase), by_auto=by_auto)


def drawn_files(rng: random.Random) -> Files:
    """Declarations of every kind, drawn at random, also such that contradict each other."""

    def content() -> str:
        return rng.choice((*NEW, "<s>", "</s>", "<unk>"))

    def flags() -> dict[str, bool]:
        names = ("lstrip", "rstrip", "single_word", "normalized", "special")
        return {name: rng.random() < 0.3 for name in names if rng.random() < 0.5}

    def declaration() -> Any:
        return content() if rng.random() < 0.6 else marked(content(), **flags())

    def several() -> list[Any]:
        return [declaration() for _ in range(rng.randrange(4))]

    def by_role() -> dict[str, Any]:
        roles = rng.sample(("image_token", "im_token", "eos_token", "audio_token"), rng.randrange(3))
        return {role: declaration() for role in roles}

    config: dict[str, Any] = {}
    for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "image", "im"):
        if rng.random() < 0.3:
            config[f"{role}_token"] = declaration() if rng.random() < 0.9 else None
    if rng.random() < 0.4:
        config["additional_special_tokens"] = several()
    if rng.random() < 0.4:
        config["extra_special_tokens"] = rng.choice((several, by_role))()
    if rng.random() < 0.4:
        ids = rng.sample(range(1200), rng.randrange(5))
        config["added_tokens_decoder"] = {str(number): token(content(), **flags()) for number in ids}
    if rng.random() < 0.1:
        config["split_special_tokens"] = True
    files: dict[str, Any] = {CONFIG: config} if rng.random() < 0.9 else {}
    if rng.random() < 0.4:
        chosen = rng.sample(("bos_token", "eos_token", "pad_token", "im_token"), rng.randrange(4))
        files[MAP] = {
            role: content() if rng.random() < 0.5 else unmarked(content(), **flags()) for role in chosen
        }
        for value in files[MAP].values():
            if isinstance(value, dict):
                value.pop("special", None)
        if rng.random() < 0.3:
            files[MAP]["additional_special_tokens"] = [content() for _ in range(rng.randrange(3))]
        if rng.random() < 0.3:
            files[MAP]["extra_special_tokens"] = [content() for _ in range(rng.randrange(3))]
    if rng.random() < 0.4:
        chosen = rng.sample((*NEW, "<s>", "</s>"), rng.randrange(4))
        files[ADDED] = dict(zip(chosen, rng.sample(range(1200), len(chosen)), strict=True))
    return files


@pytest.mark.parametrize("seed", range(60))
def test_folders_drawn_at_random_are_read_as_transformers_reads_them(base, tmp_path, seed):
    transformers = pytest.importorskip("transformers")
    rng = random.Random(seed)
    files = drawn_files(rng)
    folder = write(tmp_path, base, files, lowercase=rng.random() < 0.5)
    try:
        transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:  # noqa: BLE001 - what it cannot read is read here, or refused in a line
        pytest.skip(f"transformers refuses this folder: {error}")
    require_equal(folder, by_auto=False)


CORPUS = [
    *TEXTS,
    "hello world, the quick brown fox jumps over the lazy dog",
    "user assistant a b c d e f g",
] * 3
KINDS = ("byte-level BPE", "BPE with byte fallback", "Unigram", "WordPiece", "WordLevel")


def save_kind(folder: Path, kind: str, rng: random.Random) -> None:
    """A tokenizer.json of another kind of model, with the parts that go with it, trained on a few lines."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    special = ["<unk>", "<s>", "</s>", "[CLS]", "[SEP]"]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=rng.random() < 0.5)
    scheme = rng.choice(("always", "first", "never"))
    if kind == "byte-level BPE":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = byte_level, decoders.ByteLevel()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=330, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        )
    elif kind == "BPE with byte fallback":
        made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        parts = [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
        made.decoder = decoders.Sequence(parts)
        every = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=[*special, *every])
    elif kind == "Unigram":
        made = Tokenizer(models.Unigram())
        made.normalizer = normalizers.NFKC() if rng.random() < 0.5 else normalizers.NFC()
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        made.decoder = decoders.Metaspace(prepend_scheme=scheme)
        trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>")
    elif kind == "WordPiece":
        made = Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.normalizer = normalizers.BertNormalizer(lowercase=rng.random() < 0.5)
        made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=special)
    else:
        made = Tokenizer(models.WordLevel(unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.WordLevelTrainer(vocab_size=120, special_tokens=special)
    made.train_from_iterator(CORPUS, trainer)
    if rng.random() < 0.7:
        ids = [("<s>", made.token_to_id("<s>")), ("[SEP]", made.token_to_id("[SEP]"))]
        made.post_processor = processors.TemplateProcessing(
            single=rng.choice(("<s> $A", "<s> $A [SEP]", "$A [SEP]")), special_tokens=ids
        )
    made.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", KINDS)
def test_folders_of_every_kind_of_tokenizer_are_read_as_transformers_reads_them(tmp_path, kind, seed):
    """Forty folders: kinds of models, normalisers and post-processors, with declarations drawn at random."""
    transformers = pytest.importorskip("transformers")
    rng = random.Random(f"{kind} {seed}")
    base, folder = tmp_path / "base", tmp_path / "folder"
    base.mkdir()
    folder.mkdir()
    save_kind(base, kind, rng)
    for _ in range(20):
        for path in folder.iterdir():
            path.unlink()
        write(folder, base, drawn_files(rng))
        try:
            transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        except Exception:  # noqa: BLE001 - what transformers refuses is drawn again
            continue
        return require_equal(folder, by_auto=False)
    raise AssertionError("expected a folder that transformers reads, found none in twenty")


def test_the_end_of_a_text_is_one_token_also_where_a_list_of_objects_declares_it(base, tmp_path):
    """As version 4 of transformers wrote special_tokens_map.json, which version 5 refuses."""
    files = {
        CONFIG: {},
        MAP: {"additional_special_tokens": [unmarked("<|im_start|>"), unmarked("<|im_end|>")]},
    }
    ours = LibraryTokenizer(write(tmp_path, base, files) / "tokenizer.json")
    assert len(ours.encode_raw("<|im_start|><|im_end|>")) == 2
    plain = write(tmp_path, base, {CONFIG: {"eos_token": unmarked("[EOT]")}})
    (tmp_path / MAP).unlink()
    ours = LibraryTokenizer(plain / "tokenizer.json")
    assert ours.encode_raw("[EOT]").ids == [ours.eos_id]


def test_the_digest_is_of_every_token_that_is_read(base, tmp_path):
    digests = {}
    for number, (name, files) in enumerate(FOLDERS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        ours = LibraryTokenizer(write(folder, base, files) / "tokenizer.json")
        behaviour = (
            files.get("tokenizer.json") is not None and name,
            tuple(tuple(ours.encode(text).ids) for text in TEXTS),
            tuple(ours.vocabulary),
            tuple(ours.decode(ours.encode(text).ids, keep_special=False) for text in TEXTS),
        )
        digests.setdefault(ours.digest, set()).add(behaviour)
        assert LibraryTokenizer(folder / "tokenizer.json").digest == ours.digest
    assert all(len(behaviours) == 1 for behaviours in digests.values())
    assert len(digests) > 30


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({CONFIG: {"eos_token": 5}}, "expected eos_token as the text of a token, found 5"),
        ({CONFIG: {"eos_token": ["a"]}}, "expected eos_token as the text of a token"),
        ({CONFIG: {"eos_token": {"content": 5}}}, "expected eos_token as a text, or as an object"),
        ({CONFIG: {"eos_token": {"content": "a", "lstrip": "no"}}}, "true or false"),
        ({CONFIG: {"eos_token": {"content": "a", "strip": True}}}, "expected eos_token as a text, or as an"),
        ({CONFIG: {"extra_special_tokens": "a"}}, "expected extra_special_tokens as a list"),
        ({CONFIG: {"extra_special_tokens": [5]}}, "expected extra_special_tokens as the text"),
        ({CONFIG: {"extra_special_tokens": {"a_token": 5}}}, "expected a_token as the text"),
        (
            {CONFIG: {"added_tokens_decoder": ["a"]}},
            "expected added_tokens_decoder as an object with a token",
        ),
        (
            {CONFIG: {"added_tokens_decoder": {"a": token("a")}}},
            "expected added_tokens_decoder as an object with a token",
        ),
        (
            {CONFIG: {"added_tokens_decoder": {"5": "a"}}},
            "expected each entry of added_tokens_decoder as an object",
        ),
        ({CONFIG: {"model_specific_special_tokens": []}, MAP: []}, "expected a JSON object in"),
        ({CONFIG: {"model_specific_special_tokens": ["a"]}}, "expected model_specific_special_tokens"),
        ({CONFIG: {}, ADDED: {"a": "b"}}, "to give the id of 'a'"),
        ({CONFIG: {}, ADDED: ["a"]}, "expected a JSON object in"),
    ],
)
def test_a_declaration_that_is_none_is_refused_in_a_line(base, tmp_path, files, said):
    with pytest.raises(TokenizerError, match=said) as caught:
        LibraryTokenizer(write(tmp_path, base, files) / "tokenizer.json")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_json_is_refused_in_a_line(base, tmp_path):
    for name in (CONFIG, MAP, ADDED):
        folder = write(tmp_path, base, {})
        for content in (b"{", b"\xff\xfe{", b"[" * 100_000):
            (folder / name).write_bytes(content)
            with pytest.raises(TokenizerError, match=f"expected JSON in .*{name}"):
                LibraryTokenizer(folder / "tokenizer.json")
        (folder / name).unlink()


def test_every_file_that_declares_tokens_is_fetched():
    names = [CONFIG, MAP, ADDED, "tokenizer.json", "chat_template.jinja", "config.json", "model.safetensors"]
    assert set(wanted_files([*names, "vocab.json", "merges.txt"])) == set(names)
