"""A tokenizer.json: ids, offsets and chat texts are those of the reference tokenizer."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies as st

from mizarr import Model
from mizarr.stages.forward.text.library import LibraryTokenizer
from mizarr.store.errors import PromptError, TokenizerError

from .. import random_models

PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
TEXTS = [
    "The capital of France is Paris.",
    "naïve 🙂 café",
    " two  spaces\nand a line",
    "",
    "<s>written out</s>",
]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no "
    "tools') }}"
    "{% endif %}[{{ message.role }}] {{ message.content | tojson }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    random_models.save_tokenizer(directory)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return directory


@pytest.fixture(scope="module")
def tokenizer(folder):
    return LibraryTokenizer(folder / "tokenizer.json")


@pytest.fixture(scope="module")
def reference(folder):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A tokenizer that adds nothing and knows no BOS, as Qwen's."""
    directory = tmp_path_factory.mktemp("bare")
    random_models.save_tokenizer(directory, bos=False)
    (directory / "tokenizer_config.json").unlink()
    return LibraryTokenizer(directory / "tokenizer.json")


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    """A tokenizer whose pieces carry their space as ▁, as Llama 2's and Gemma's do."""
    from tokenizers import Tokenizer as Raw, decoders, models, normalizers

    pieces = ["<unk>", "▁", "▁Paris", "Paris", "a", "P", "i", "s", "r", "▁a"]
    raw = Raw(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    directory = tmp_path_factory.mktemp("sentencepiece")
    raw.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"unk_token": "<unk>"}')
    return LibraryTokenizer(directory / "tokenizer.json")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_ids_and_character_offsets_are_those_of_the_reference_tokenizer(tokenizer, reference, text, special):
    found = tokenizer.encode(text, add_special=special)
    expected = reference(text, add_special_tokens=special, return_offsets_mapping=True)
    assert found.ids == expected["input_ids"]
    assert found.offsets == [tuple(span) for span in expected["offset_mapping"]]
    assert found.tokens == reference.convert_ids_to_tokens(found.ids)
    assert tokenizer.decode(found.ids) == reference.decode(found.ids)


@given(text=st.text(max_size=40))
def test_a_text_comes_back_from_its_tokens_and_offsets_cut_it_up(tokenizer, text):
    found = tokenizer.encode_raw(text)
    assert tokenizer.decode(found.ids) == text
    encoded = text.encode()
    for (start, end), (first, last) in zip(found.offsets, found.byte_offsets, strict=True):
        assert text[start:end].encode() == encoded[first:last]


def test_many_texts_encode_as_each_alone(tokenizer):
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


def test_bos_is_placed_where_it_is_asked(tokenizer, bare):
    plain = tokenizer.encode_raw("Paris").ids
    assert tokenizer.encode("Paris").ids == [0, *plain]
    assert tokenizer.encode("Paris", prepend_bos=False).ids == plain
    assert tokenizer.encode("Paris", prepend_bos=True).ids == [0, *plain], "not twice"
    raw = tokenizer.encode("Paris", add_special=False, prepend_bos=True)
    assert raw.ids == [0, *plain] and raw.offsets[0] == (0, 0) and raw.special[0]
    written = tokenizer.encode("<s>Paris", add_special=False, prepend_bos=False)
    assert written.ids[0] == 0, "a BOS in the text is text"
    assert bare.encode("Paris").ids == bare.encode("Paris", prepend_bos=False).ids
    with pytest.raises(TokenizerError, match=r"expected a BOS token in tokenizer_config.json of .*"):
        bare.encode("Paris", prepend_bos=True)


def test_truncation_and_padding_saved_by_a_trainer_are_off(folder, tmp_path):
    from tokenizers import Tokenizer as Raw

    raw = Raw.from_file(str(folder / "tokenizer.json"))
    raw.enable_truncation(3)
    raw.enable_padding(length=50)
    raw.save(str(tmp_path / "tokenizer.json"))
    assert len(LibraryTokenizer(tmp_path / "tokenizer.json").encode(TEXTS[0])) == len(
        Raw.from_file(str(folder / "tokenizer.json")).encode(TEXTS[0]).ids
    )


@pytest.mark.parametrize("word", ["Paris", " Paris", "France"])
def test_a_word_is_found_with_its_space(tokenizer, bare, word):
    expected = f"Ġ{word.strip()}"
    assert tokenizer.pieces([tokenizer.find_token_id(word)]) == [expected]
    assert bare.pieces([bare.find_token_id(word)]) == [expected]


def test_a_word_of_several_pieces_is_an_error_that_lists_them(tokenizer, bare):
    """Its last piece would be another word: "myself" is not "self"."""
    for one in (tokenizer, bare):
        with pytest.raises(
            TokenizerError, match=r"expected 'Parisian' to be one token of .*'ĠParis', 'i', 'an'"
        ):
            one.find_token_id("Parisian")
    with pytest.raises(TokenizerError, match="found nothing"):
        tokenizer.find_token_id("")


def test_a_word_outside_the_vocabulary_is_no_unknown_token(sentencepiece):
    with pytest.raises(TokenizerError, match="to be one token"):
        sentencepiece.find_token_id("Z")


def test_a_words_bare_form_is_found_where_the_tokenizer_brings_its_own_space(sentencepiece):
    assert sentencepiece.pieces([sentencepiece.find_token_id("Paris")]) == ["▁Paris"]


def test_a_token_reads_as_it_stands_in_a_sentence(tokenizer, sentencepiece):
    assert tokenizer.decode_token(tokenizer.find_token_id("Paris")) == " Paris"
    assert [sentencepiece.decode_token(i) for i in (2, 3)] == [" Paris", "Paris"]
    assert tokenizer.to_str_tokens("is Paris") == ["<s>", "is", " Paris"]
    assert tokenizer.decode_token(10_000) == "" and tokenizer.decode_token(-1) == ""


def test_the_vocabulary_is_every_tokens_text_by_id(tokenizer):
    assert len(tokenizer.vocabulary) == tokenizer.vocab_size
    assert (
        tokenizer.vocabulary[tokenizer.find_token_id("Paris")] == " Paris"
        and tokenizer.vocabulary[0] == "<s>"
    )


def test_ids_without_a_token_are_not_dropped_in_silence(tokenizer):
    with pytest.raises(
        TokenizerError, match=rf"expected ids of the {tokenizer.vocab_size} tokens of .*, found 9999"
    ):
        tokenizer.decode([1, 9999])


@pytest.mark.parametrize("prompt", [True, False])
def test_a_conversation_reads_as_the_reference_renders_it(tokenizer, reference, prompt):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": 'Say "é"\n'}]
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert tokenizer.chat(messages, add_generation_prompt=prompt) == expected
    assert tokenizer.chat('Say "é"\n', system="Be brief.", add_generation_prompt=prompt) == expected


CHATML = """{%- if messages[0].role == 'system' -%}
    {%- set first = messages[0].content -%}{%- set messages = messages[1:] -%}
{%- else -%}{%- set first = 'You are helpful.' -%}{%- endif -%}
{{- '<|im_start|>system\\n' + first + '<|im_end|>\\n' }}
{%- if tools %}{{ '# Tools\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
    {%- generation %}{{ '<|im_start|>assistant\\n' + message.content + '<|im_end|>\\n' }}{%- endgeneration %}
    {%- else %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}
{%- endif %}"""
INST = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"""
HEADERS = """{{- bos_token }}
{%- if tools is not none %}{{- 'Environment: ipython' }}{%- endif %}
{%- set ns = namespace(turns=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{%- continue %}{%- endif %}
    {%- set ns.turns = ns.turns + 1 %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}
{%- endfor %}
{{- ns.turns }}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant' }}{%- endif %}"""
EOS = {"eos_token": "</s>"}
TALK = [
    {"role": "user", "content": " The capital? "},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": 'naïve "é"\n'},
]


@pytest.mark.parametrize("template", [CHATML, INST, HEADERS], ids=["chatml", "inst", "headers"])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"tools": [{"name": "é", "a": [1]}]}])
@pytest.mark.parametrize("prompt", [True, False])
def test_templates_as_models_ship_them_give_the_ids_of_the_reference(
    folder, reference, template, variables, prompt
):
    ours = LibraryTokenizer(folder / "tokenizer.json", {"chat_template": template, "bos_token": "<s>"} | EOS)
    how = {"add_generation_prompt": prompt, **variables}
    expected = reference.apply_chat_template(TALK, chat_template=template, tokenize=False, **how)
    assert ours.chat(TALK, **how) == expected
    ids = reference.apply_chat_template(TALK, chat_template=template, tokenize=True, return_dict=False, **how)
    assert ours.encode_raw(expected).ids == ids


def test_a_model_chats_in_ids_that_are_a_prompt_like_any_other(folder, tmp_path, reference):
    random_models.save_random_model(tmp_path, "llama", 1)
    (tmp_path / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    model = Model.from_pretrained(tmp_path, device="cpu")
    ids = reference.apply_chat_template(TALK, tokenize=True, return_dict=False, add_generation_prompt=True)
    assert model.chat(TALK) == ids and model.forward(model.chat(TALK)).logits.shape[1] == len(ids)
    ended = model.chat(TALK, add_generation_prompt=False)
    assert ended == ids[: len(ended)] and len(ended) < len(ids)
    with pytest.raises(PromptError, match="reads at most 128 positions"):
        model.chat("long " * 200)


def test_a_template_that_wants_other_roles_refuses_as_the_reference_does(folder, reference):
    ours = LibraryTokenizer(folder / "tokenizer.json", {"chat_template": INST})
    with pytest.raises(TokenizerError, match="does not accept these messages: roles must alternate"):
        ours.chat(TALK[1:])


def test_a_chat_template_in_a_file_of_its_own_is_read(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert LibraryTokenizer(tmp_path / "tokenizer.json").chat("hi") == "hi!"


def test_templates_can_refuse_and_cannot_escape(tokenizer, bare, folder):
    with pytest.raises(TokenizerError, match="does not accept these messages: no tools"):
        tokenizer.chat([{"role": "tool", "content": ""}])
    with pytest.raises(TokenizerError, match=r"expected a chat template of .* in tokenizer_config.json"):
        bare.chat("hi")
    evil = LibraryTokenizer(folder / "tokenizer.json", {"chat_template": "{{ messages.__class__.__mro__ }}"})
    with pytest.raises(TokenizerError, match="unsafe"):
        evil.chat("hi")


def test_a_missing_or_broken_tokenizer_says_that_ids_can_be_given(tmp_path):
    with pytest.raises(TokenizerError, match=r"No such file or directory; add the file, or pass token ids"):
        LibraryTokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"cannot be read as one .* or pass token ids"):
        LibraryTokenizer(tmp_path / "tokenizer.json")


def test_the_digest_is_of_the_files_bytes(folder, tokenizer, bare):
    assert tokenizer.digest == LibraryTokenizer(folder / "tokenizer.json").digest != bare.digest


# Token id 0


@pytest.mark.parametrize(
    "role", ["bos_token", "eos_token", "pad_token", "mask_token", "sep_token", "cls_token"]
)
def test_a_special_token_may_have_id_0(folder, tmp_path, role):
    name = "[MASK]" if role == "mask_token" else "<first>"
    described = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = described["model"]["vocab"]
    (before,) = (text for text, token in vocabulary.items() if token == 0)
    vocabulary[name] = vocabulary.pop(before)
    described["added_tokens"] = [each for each in described["added_tokens"] if each["id"] != 0]
    described["added_tokens"].insert(0, {"id": 0, "content": name, "special": True, **PLAIN})
    described["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    settings = {} if role == "mask_token" else {role: name}
    found = LibraryTokenizer(tmp_path / "tokenizer.json", settings)
    assert found.encode(f"a{name}b").ids.count(0) == 1
    if role == "mask_token":
        assert found.mask_id == 0  # by its usual name
    else:
        assert found.special_id(role) == 0
