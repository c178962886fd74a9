"""A tokenizer written into a GGUF file, as llama.cpp's converter writes it, comes back with the same ids.

Tokenizers are trained here, on prose where there is any. What the converter does to each kind of vocabulary
is written out from its source: types of tokens, SentencePiece's scores, marks of WordPiece.
"""

from __future__ import annotations

import itertools
import json
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from mizarr import Model, capture, open_store
from mizarr.stages.forward.models.files import resolve
from mizarr.store.errors import TokenizerError

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")
from ..checkpoints.gguf_files import draw_config, save_gguf  # noqa: E402 - needs gguf
from ..random_models import draw_weights  # noqa: E402

DICKENS = Path(__file__).parents[5] / "shared" / "data" / "dickens"
ODD = [
    "",
    " ",
    "  two  spaces\tand\ttabs   \n\n and lines\r\n  end  ",
    "naïve café — “quotes”… Ærøskøbing, ﬁne ½",
    "e\u0301 decomposed, 한국어 日本語 русский العربية हिन्दी",
    "🙂👩‍👩‍👧 \u200b zero",
    "3 33 333 3333 3.14159 1,000,000 x86_64",
    "I'M he'll THEY'VE don't 'tis rock'n'roll",
    "if (a<=b) { return a[i]++; } // done\n\n\n#include <x.h>",
    "CamelCaseWords HTTPServer iOS",
    "<s>written out</s> [CLS] <|end|> [MASK]",
]
ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace("{1,3}", "")
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = GPT4O.replace(ENDINGS + "?", "").replace("{1,3}", "")
TYPES = gguf.TokenType


def prose():
    """Paragraphs: of Dickens where they are, else of words made up."""
    if DICKENS.is_dir():
        text = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(DICKENS.glob("*.txt"))[:6])
        return text.split("\n\n")[:400]
    rng = random.Random(0)
    made = ["".join(rng.choices("abcdeghilmnorstuAT", k=rng.randint(1, 9))) for _ in range(400)]
    return [" ".join(rng.choices(made, k=40)) + ". 1775!" for _ in range(200)]


def texts():
    rng = random.Random(1)
    drawn = ["".join(rng.choices("ab Zé\n\t'.,12(日 ", k=rng.randint(1, 60))) for _ in range(40)]
    return [*ODD, *drawn, *prose()[::7]]


def split(*patterns):
    cuts = [pre_tokenizers.Split(tokenizers.Regex(one), "isolated") for one in patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def gpt2():
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def digits():
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2()])


CUTS = {
    "gpt-2": gpt2,
    "starcoder": digits,
    "smollm": digits,
    "llama-bpe": lambda: split(LLAMA3),
    "smaug-bpe": lambda: split(LLAMA3),
    "qwen2": lambda: split(QWEN2),
    "tekken": lambda: split(TEKKEN),
    "gpt-4o": lambda: split(GPT4O),
}
"""tokenizer.ggml.pre -> how the publisher's tokenizer.json cuts words."""
WHOLE_WORDS = ("llama-bpe", "tekken")
ADD_BOS = ("llama-bpe", "tekken")


def byte_level(pre):
    found = tokenizers.Tokenizer(models.BPE(ignore_merges=pre in WHOLE_WORDS))
    if pre == "qwen2":
        found.normalizer = normalizers.NFC()
    found.pre_tokenizer = CUTS[pre]()
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        show_progress=False,
        special_tokens=["<s>", "</s>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    found.train_from_iterator(prose(), trainer)
    found.add_tokens([tokenizers.AddedToken("   ", normalized=False)])
    if pre in ADD_BOS:
        found.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return found


def sentence_piece(*, prefix=True):
    """BPE as the conversion of SentencePiece models makes it: pieces in the order of their merges."""
    learned = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    space = normalizers.Replace(" ", "▁")
    learned.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space] if prefix else [space])
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, special_tokens=special)
    # SentencePiece merges within words, each with the space before it.
    learned.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    learned.train_from_iterator(prose(), trainer)
    told = json.loads(learned.to_str())["model"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [one for one in sorted(told["vocab"], key=told["vocab"].get) if one not in special]
    vocab = {piece: i for i, piece in enumerate([*special, *fallback, *pieces])}
    merges = [tuple(one) for one in told["merges"]]
    # What SentencePiece scores is the piece: of several pairs that give it, all are merges.
    scored = sorted(pieces, key=lambda piece: vocab[piece])
    every = [
        (piece[:at], piece[at:])
        for piece in scored
        for at in range(1, len(piece))
        if piece[:at] in vocab and piece[at:] in vocab
    ]
    assert set(merges) <= set(every)
    every.sort(key=lambda pair: (vocab["".join(pair)], vocab[pair[0]], vocab[pair[1]]))
    found = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=every, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    found.normalizer = learned.normalizer
    ends = [decoders.Strip(" ", 1, 0)] if prefix else []
    found.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    found.add_special_tokens(special)
    found.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return found


def word_piece(*, lowercase):
    found = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    found.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    found.decoder = decoders.WordPiece()
    special = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=600, show_progress=False, special_tokens=special)
    found.train_from_iterator(prose(), trainer)
    found.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 3), ("[SEP]", 4)]
    )
    return found


def listed(tokenizer, rows):
    """Tokens and their types, as `get_vocab_base` of the converter lists them for an embedding of so many
    rows."""
    added = tokenizer.get_added_tokens_decoder()
    by_id = {i: token for token, i in tokenizer.get_vocab().items()}
    for i in range(rows):
        if i not in by_id:
            yield f"[PAD{i}]", TYPES.UNUSED
        elif i in added:
            yield by_id[i], TYPES.CONTROL if added[i].special else TYPES.USER_DEFINED
        else:
            yield by_id[i], TYPES.NORMAL


def metadata(tokenizer, kind, pre, *, spare=5):
    """Keys of the file."""
    pairs = list(listed(tokenizer, tokenizer.get_vocab_size() + spare))
    tokens, types = [token for token, _ in pairs], [int(each) for _, each in pairs]
    keys = {"model": kind, "pre": pre}
    model = json.loads(tokenizer.to_str())["model"]
    if kind == "gpt2":
        keys["merges"] = [" ".join(pair) for pair in model["merges"]]
    if kind == "llama":
        types[3:259] = [int(TYPES.BYTE)] * 256
        types[0] = int(TYPES.UNKNOWN)
        keys["scores"] = [0.0 if i < 259 else 259.0 - i for i in range(len(tokens))]
        keys["scores"][len(tokens) - spare :] = [-10000.0] * spare
    if kind == "bert":
        tokens = [
            token if each == TYPES.CONTROL else token[2:] if token.startswith("##") else f"▁{token}"
            for token, each in zip(tokens, types, strict=True)
        ]
    return keys | {"tokens": tokens, "token_type": types}


def save(path, keys, **more):
    """A file of one tensor."""
    writer = gguf.GGUFWriter(path, "llama")
    write_words(writer, keys | more)
    import numpy as np

    writer.add_tensor("token_embd.weight", np.zeros((4, 32), "f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return resolve(path)


def write_words(writer, keys):
    add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
    for key, value in keys.items():
        if value is not None:
            add[type(value)](f"tokenizer.{key}" if "chat" in key else f"tokenizer.ggml.{key}", value)


def same(found, reference, *, added=True):
    for text in texts():
        assert (
            found.encode(text, add_special=added).ids == reference.encode(text, add_special_tokens=added).ids
        )
        ids = reference.encode(text, add_special_tokens=False).ids
        assert found.decode(ids) == reference.decode(ids, skip_special_tokens=False)
    assert found.vocab_size == reference.get_vocab_size()


@pytest.mark.parametrize("pre", CUTS)
def test_byte_level_vocabularies_give_the_ids_of_the_tokenizer_they_were_made_of(pre, tmp_path):
    reference = byte_level(pre)
    files = save(tmp_path / "m.gguf", metadata(reference, "gpt2", pre), bos_token_id=0, eos_token_id=1)
    found = files.tokenizer()
    same(found, reference)
    assert (found.bos_id, found.eos_id) == (0, 1)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_piece_vocabularies_join_by_their_scores_and_fall_back_to_bytes(prefix, tmp_path):
    reference = sentence_piece(prefix=prefix)
    keys = metadata(reference, "llama", "default")
    files = save(tmp_path / "m.gguf", keys, bos_token_id=1, add_space_prefix=prefix)
    found = files.tokenizer()
    same(found, reference)
    assert "<0xF0>" in found.encode("🙂").tokens and found.decode(found.encode_raw("🙂 x").ids) == "🙂 x"


def joined(text, scores):
    """SentencePiece's BPE as its source has it: of all neighbours that make a piece those of the highest
    score are joined, the leftmost first, until none do; what is no piece goes as bytes."""
    found = list(text)
    while True:
        pairs = [
            (-scores[left + right], at)
            for at, (left, right) in enumerate(itertools.pairwise(found))
            if left + right in scores
        ]
        if not pairs:
            break
        at = min(pairs)[1]
        found[at : at + 2] = [found[at] + found[at + 1]]
    return [
        each
        for piece in found
        for each in ([piece] if piece in scores else [f"<0x{byte:02X}>" for byte in piece.encode()])
    ]


def test_sentence_piece_joins_what_its_own_algorithm_joins(tmp_path):
    keys = metadata(sentence_piece(), "llama", "default")
    found = save(tmp_path / "m.gguf", keys, bos_token_id=1).tokenizer()
    scores = {
        token: score
        for token, score, kind in zip(keys["tokens"], keys["scores"], keys["token_type"], strict=True)
        if kind == TYPES.NORMAL
    }
    asked = [text[:300] for text in texts() if text and "<s>" not in text]
    for text in asked:
        assert found.encode_raw(text).tokens == joined("▁" + text.replace(" ", "▁"), scores)
    assert len(asked) > 50


@pytest.mark.parametrize("lowercase", [True, False])
def test_word_pieces_begin_and_go_on_as_they_did(lowercase, tmp_path):
    reference = word_piece(lowercase=lowercase)
    keys = metadata(reference, "bert", "jina-v2-en")
    ids = {"bos_token_id": 3, "unknown_token_id": 2, "seperator_token_id": 4, "mask_token_id": 5}
    found = save(tmp_path / "m.gguf", keys, **ids).tokenizer()
    same(found, reference)
    assert found.mask_id == 5


def test_what_is_put_around_a_text_is_what_the_file_says(tmp_path):
    reference = byte_level("llama-bpe")
    keys = metadata(reference, "gpt2", "llama-bpe") | {"bos_token_id": 0, "eos_token_id": 1}
    plain = reference.encode("Paris", add_special_tokens=False).ids

    def ids(**said):
        return save(tmp_path / "m.gguf", keys, **said).tokenizer().encode("Paris").ids

    assert ids() == [0, *plain] and ids(add_bos_token=False) == plain
    assert ids(add_eos_token=True) == [0, *plain, 1]
    assert ids(add_bos_token=False, add_eos_token=True) == [*plain, 1]


def test_chat_templates_are_kept(tmp_path):
    keys = metadata(byte_level("qwen2"), "gpt2", "qwen2") | {"eos_token_id": 1}
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    files = save(tmp_path / "m.gguf", keys, chat_template=template)
    assert files.tokenizer().chat("hi") == "user: hi</s>"
    more = {"chat_templates": ["tool_use"], "chat_template.tool_use": "T"}
    assert (
        save(tmp_path / "m.gguf", keys, chat_template=template, **more).tokenizer().chat("hi")
        == "user: hi</s>"
    )


def test_the_digest_is_of_the_vocabulary_and_not_of_the_file(tmp_path):
    keys = metadata(byte_level("qwen2"), "gpt2", "qwen2")
    first = save(tmp_path / "m.gguf", keys).tokenizer().digest
    assert first == save(tmp_path / "other.gguf", keys).tokenizer().digest
    fewer = keys | {"merges": keys["merges"][:-1]}
    assert first != save(tmp_path / "m.gguf", fewer).tokenizer().digest
    assert first != save(tmp_path / "m.gguf", keys | {"pre": "smaug-bpe"}).tokenizer().digest


def test_a_tokenizer_beside_the_file_comes_first(tmp_path):
    keys = metadata(byte_level("qwen2"), "gpt2", "nobody-knows")
    byte_level("gpt-2").save(str(tmp_path / "tokenizer.json"))
    files = save(tmp_path / "m.gguf", keys)
    assert files.tokenizer_file == tmp_path / "tokenizer.json" and files.tokenizer().vocab_size > 256


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"pre": "qwen9"},
            r"tokenizer\.ggml\.pre to be one of .*found 'qwen9' \(nearest is 'qwen2'\).*tokenizer\.json",
        ),
        ({"pre": None}, r"found None.*tokenizer\.json"),
        ({"pre": "default"}, "found 'default'"),
        ({"model": "t5"}, r"gpt2, llama, bert, found 't5'; put the tokenizer\.json"),
        ({"merges": None}, "a list tokenizer.ggml.merges, found none"),
        ({"merges": ["ab"]}, "expected two pieces .* found 'ab'"),
        ({"merges": ["a \u0100"]}, "cannot be read .*fetch the file again"),
        ({"token_type": [1, 1]}, r"token_type with a number for each of \d+ tokens, found 2"),
        ({"token_type": None}, "token_type with a number for each of .*found none"),
        ({"tokens": ["a", "a"]}, "a list of different tokens .*, found one of them twice"),
        ({"add_bos_token": True}, "bos_token_id, because this token is added to every text, found none"),
        ({"bos_token_id": 99999}, "expected the id of bos in 0.."),
    ],
)
def test_what_is_not_read_is_one_clear_line(said, message, tmp_path):
    keys = metadata(byte_level("qwen2"), "gpt2", "qwen2") | said
    with pytest.raises(TokenizerError, match=message) as raised:
        save(tmp_path / "m.gguf", keys).tokenizer().encode("a")
    assert "\n" not in str(raised.value) and str(tmp_path / "m.gguf") in str(raised.value)


def test_a_file_without_vocabulary_has_no_tokenizer(tmp_path):
    assert save(tmp_path / "m.gguf", {}).tokenizer() is None
    assert save(tmp_path / "m.gguf", {"model": "no_vocab"}).tokenizer() is None


def test_a_model_reads_texts_through_its_own_vocabulary(tmp_path):
    """Captured by text and by ids it is one run; another process finds it."""
    from transformers import AutoModelForCausalLM

    reference = byte_level("qwen2")
    config = draw_config("qwen2", 3, vocab_size=reference.get_vocab_size() + 5)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    draw_weights(model)
    path = tmp_path / "model.gguf"
    save_gguf(path, model, words=lambda writer: write_words(writer, metadata(reference, "gpt2", "qwen2")))
    text = "It was the best of times, it was 1775."
    loaded = Model.from_pretrained(path)
    ids = reference.encode(text).ids
    assert (loaded.forward(text).logits == loaded.forward(ids).logits).all()
    store = open_store(tmp_path / "store")
    capture(path, [text], "blocks.0.hook_resid_post", store=store, progress=False)
    again = capture(path, [ids], "blocks.0.hook_resid_post", store=store, progress=False)
    assert len(store.runs()) == 1 and again.sizes["token"] == len(ids)


REAL = Path.home() / ".cache" / "mizarr-real"
"""Where GGUF files of real models lie, on machines that have them."""
ALPHABETS = {
    "latin": (0xC0, 0x24F),
    "greek": (0x391, 0x3CE),
    "cyrillic": (0x410, 0x451),
    "hebrew": (0x5D0, 0x5EA),
    "arabic": (0x627, 0x64A),
    "devanagari": (0x905, 0x94D),
    "thai": (0xE01, 0xE4E),
    "kana": (0x3041, 0x30FA),
    "han": (0x4E00, 0x9FA5),
    "hangul": (0xAC00, 0xD7A3),
}
"""Script -> first and last character. None has a fraction such as ¼: SmolLM2 was trained with every digit cut
off, fractions too, and llama.cpp and we do so; transformers' reader of GGUF files does not."""


def scripts(count):
    """Texts of ten scripts, with digits, marks, white space and prose between."""
    rng, paragraphs = random.Random(2), prose()
    between = [
        " ",
        " ",
        " ",
        "  ",
        "\n",
        "\t",
        "-",
        "'",
        ", ",
        ". ",
        "2024",
        " 7",
        "🙂",
        "\u0301",
        "\u200d",
        "_",
    ]
    for number in range(count):
        first, last = list(ALPHABETS.values())[number % len(ALPHABETS)]
        words = [
            "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 9)))
            for _ in range(rng.randint(1, 12))
        ]
        text = "".join(word + rng.choice(between) for word in words)
        start = rng.randrange(200)
        yield text + (rng.choice(paragraphs)[start : start + 80] if rng.random() < 0.3 else "")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf"])
def test_real_files_give_the_ids_that_transformers_makes_of_them(name):
    if not (REAL / name).is_file():
        pytest.skip(f"needs {name} in {REAL}")
    import transformers

    reference = transformers.AutoTokenizer.from_pretrained(str(REAL), gguf_file=name)
    ours = resolve(REAL / name).tokenizer()
    asked = list(scripts(2000))
    found = ours.ids_of(asked, add_special=True)
    expected = reference(asked)["input_ids"]
    different = [n for n in range(2000) if found[n] != expected[n]]
    assert not different, [(asked[n], found[n], expected[n]) for n in different[:3]]
    assert [ours.encode(text).ids for text in asked[:50]] == expected[:50]


def test_texts_are_encoded_once_for_all_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("MIZARR_CACHE", str(tmp_path / "cache"))
    keys = metadata(byte_level("llama-bpe"), "gpt2", "llama-bpe") | {"bos_token_id": 0}
    first = save(tmp_path / "m.gguf", keys).tokenizer()
    told = ["I'll be there", "naïve 日本", "<s>x", ""]
    encodings = [*first.encode_batch(told), first.encode("y"), first.encode_raw("y")]
    with monkeypatch.context() as patch:
        again = save(tmp_path / "other.gguf", keys).tokenizer()
        patch.setattr(type(again), "_backend", property(lambda _: pytest.fail("a tokenizer is made")))
        assert [*again.encode_batch(told), again.encode("y"), again.encode_raw("y")] == encodings
        assert again.encode_batch(told[:1])[0].byte_offsets == encodings[0].byte_offsets
    # Of another vocabulary, and of longer texts, nothing is known.
    other = save(tmp_path / "m.gguf", keys | {"add_bos_token": False}).tokenizer()
    assert other.encode("y").ids == encodings[-1].ids
    size = (tmp_path / "cache" / "encodings.sqlite").stat().st_size
    assert len(other.encode("y" * 70_000)) > 1000
    assert (tmp_path / "cache" / "encodings.sqlite").stat().st_size == size


@pytest.mark.parametrize(
    "row", ["", "[]", "[[1],[],[],[]]", '[["a"],["a"],[[0,1]],[false]]', "[[1],[1],[[0]],[0]]"]
)
def test_a_damaged_memo_of_encodings_is_encoded_anew(row, tmp_path, monkeypatch):
    monkeypatch.setenv("MIZARR_CACHE", str(tmp_path / "cache"))
    tokenizer = save(tmp_path / "m.gguf", metadata(byte_level("qwen2"), "gpt2", "qwen2")).tokenizer()
    expected = tokenizer.encode("Paris")
    with closing(sqlite3.connect(tmp_path / "cache" / "encodings.sqlite")) as db, db:
        assert db.execute("UPDATE verdicts SET verdict = ?", (row,)).rowcount == 1
    assert tokenizer.encode("Paris") == expected
    (tmp_path / "cache" / "encodings.sqlite").write_bytes(b"no database")
    assert tokenizer.encode("Paris") == expected


def test_pieces_that_would_take_forever_to_pair_are_refused(tmp_path):
    keys = metadata(sentence_piece(), "llama", "default")
    keys["tokens"][300] = "x" * 300
    with pytest.raises(TokenizerError, match=r"tokens of at most 256 characters, found one of 300; put the"):
        save(tmp_path / "m.gguf", keys, bos_token_id=1).tokenizer().encode("a")
