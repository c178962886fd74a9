"""Every function that takes prompts takes the same values, and refuses all others in one line."""

from __future__ import annotations

import io
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import mizarr
from mizarr.stages.causal.grids.patching_metrics import KL
from mizarr.stages.circuits.pairs import Pair
from mizarr.stages.forward.models.model import Model
from mizarr.stages.forward.models.source import ModelSource
from mizarr.stages.forward.runs.experiment import Experiment, ExperimentNode
from mizarr.stages.forward.text.rows import as_rows, one_row
from mizarr.stages.graph.rows.targets import prompt_tokens
from mizarr.stages.logits.prompt_test import test_prompt as answer_ranks
from mizarr.store.errors import MizarrError, PlanError, PromptError

TEXT = "The capital of France is"
HOOK = "blocks.0.hook_resid_post"
PAD = 0
"""Of the shipped model also BOS: a mask filtered by truth, or ids filtered by it, would show."""


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.from_pretrained("specimen")


@pytest.fixture(scope="module")
def ids(model) -> list[int]:
    (row,) = model.tokenize(TEXT)
    return row


def captured(model: Model, prompts: Any, folder: Path) -> list[list[int]]:
    store = mizarr.open_store(folder / "store")
    found = mizarr.capture(model, prompts, HOOK, store=store, progress=False)
    token_id, prompt = found["token_id"].values, found["prompt"].values
    return [token_id[prompt == number].tolist() for number in range(prompt.max() + 1)]


def ranked(model: Model, prompt: Any, _: Path) -> list[int]:
    texts = "".join(answer_ranks(model, prompt, "Paris").prompt_tokens)
    return model.tokenizer.encode(texts, add_special=False).ids


SEVERAL: dict[str, Callable[[Model, Any, Path], list[list[int]]]] = {
    "tokenize": lambda model, prompts, _: model.tokenize(prompts),
    "forward": lambda model, prompts, _: [list(row) for row in model.forward(prompts).tokens],
    "generate": lambda model, prompts, _: [
        list(result.prompt_ids) for result in mizarr.generate(model, prompts, max_tokens=1)
    ],
    "capture": captured,
}
"""Functions that take several prompts -> the token ids that they read."""


def planned_run(model: Model, prompt: Any, _: Path) -> list[int]:
    (cache,) = mizarr.run(model, [mizarr.Run(prompt)])
    return list(cache.tokens[0])


ONE: dict[str, Callable[[Model, Any, Path], list[int]]] = {
    "run": planned_run,
    "graph": lambda model, prompt, _: prompt_tokens(prompt, model.tokenizer),
    "test_prompt": ranked,
}
"""Functions that take one prompt."""
DOORS = {**SEVERAL, **ONE}


def spellings(ids: list[int]) -> Iterator[Any]:
    """The same prompt in every form that is taken."""
    right, left = [1] * len(ids) + [0] * 3, [0] * 3 + [1] * len(ids)
    yield from (ids, tuple(ids), deque(ids), [ids], (tuple(ids),), iter(ids), (row for row in [ids]))
    for dtype in (np.uint16, np.int32, np.int64):
        yield from (
            np.array(ids, dtype),
            np.array([ids], dtype),
            [np.array(ids, dtype)],
            list(np.array(ids, dtype)),
        )
    for kind in (torch.int16, torch.int32, torch.int64):
        yield from (
            torch.tensor(ids, dtype=kind),
            torch.tensor([ids], dtype=kind),
            [torch.tensor(ids, dtype=kind)],
        )
    yield list(torch.tensor(ids))
    yield pd.Series([ids])
    yield pd.Series(ids)
    yield pd.Series(ids, dtype="Int64")
    for make in (list, np.array, torch.tensor):
        yield {"input_ids": make(ids)}
        yield {"input_ids": make(ids), "attention_mask": make([1] * len(ids))}
        yield {
            "input_ids": make([ids]),
            "attention_mask": make([[1] * len(ids)]),
            "token_type_ids": make([[0] * len(ids)]),
        }
        yield UserDict({"input_ids": make([[*ids, *[PAD] * 3]]), "attention_mask": make([right])})
        yield {"input_ids": make([[*[PAD] * 3, *ids]]), "attention_mask": make([left])}
        yield {"input_ids": make([*[PAD] * 3, *ids]), "attention_mask": make(left)}
        yield [{"input_ids": make([*[PAD] * 3, *ids]), "attention_mask": make(left)}]
    yield {"input_ids": [[*ids, *[PAD] * 3]], "attention_mask": np.array([right], bool)}
    yield {"input_ids": [[*ids, *[PAD] * 3]], "attention_mask": torch.tensor([right]).float()}
    yield pd.DataFrame({"input_ids": [ids], "attention_mask": [[1] * len(ids)]})


@pytest.mark.parametrize("door", DOORS)
def test_a_prompt_is_the_same_in_every_spelling(model, ids, door, tmp_path):
    expected = [ids] if door in SEVERAL else ids
    for spelling in spellings(ids):
        assert DOORS[door](model, spelling, tmp_path) == expected, repr(spelling)
    for text in (TEXT, [TEXT], (TEXT,), np.array([TEXT]), np.array(TEXT), pd.Series([TEXT]), iter([TEXT]),
                 np.array([TEXT], object), [np.str_(TEXT)]):  # fmt: skip
        assert DOORS[door](model, text, tmp_path) == expected, repr(text)


@pytest.mark.parametrize("door", SEVERAL)
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_output_of_a_tokenizer_of_transformers_is_read_without_its_padding(model, door, side, tmp_path):
    transformers = pytest.importorskip("transformers")
    from mizarr.stages.forward.models.files import resolve

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(resolve("specimen").directory / "tokenizer.json"),
        pad_token="<s>",
        padding_side=side,
    )
    texts = [TEXT, "Rome is", "A longer prompt, so that others are padded"]
    expected = [tokenizer(text)["input_ids"] for text in texts]
    for kind in ("pt", "np", None):
        assert DOORS[door](model, tokenizer(texts, padding=True, return_tensors=kind), tmp_path) == expected
    assert DOORS[door](model, tokenizer(texts), tmp_path) == expected
    assert DOORS[door](model, [tokenizer(text) for text in texts], tmp_path) == expected
    assert DOORS[door](model, [tokenizer._tokenizer.encode(text) for text in texts], tmp_path) == expected
    assert DOORS[door](model, tokenizer(TEXT), tmp_path) == expected[:1]


NO_PROMPTS = {
    "float ids": [5.7, 2.0],
    "rows of floats": [[1.0, 2.7]],
    "a tensor of floats": torch.tensor([[1.0, 2.0]]),
    "an array of floats": np.array([1.0]),
    "bools": [True, False],
    "a mask": torch.tensor([True]),
    "bytes": b"abc",
    "a bytearray": bytearray(b"abc"),
    "a memoryview": memoryview(b"abc"),
    "texts of bytes": [b"abc"],
    "an array of bytes": np.array([b"abc"]),
    "a text and None": ["a", None],
    "None and a text": [None, "a"],
    "a missing value of pandas": pd.Series(["a", np.nan]),
    "pandas NA": pd.Series([pd.NA, "a"]),
    "a missing id": pd.Series([1, None], dtype="Int64"),
    "a conversation": [{"role": "user", "content": "a"}],
    "a message": {"role": "user", "content": "a"},
    "rows with a text": [{"text": "a"}],
    "a dict": {"text": "a"},
    "an empty dict": {},
    "a dict of numbers": {1: 2},
    "a table": pd.DataFrame({"text": ["a"]}),
    "a path": Path("prompts.txt"),
    "an open file": io.StringIO("a"),
    "None": None,
    "an int": 5,
    "a float": 5.5,
    "NaN": float("nan"),
    "a complex": 1j,
    "an array without axes": np.array(5),
    "half a surrogate pair": "a\ud800",
    "half a surrogate pair in a list": ["a", "\ud800"],
    "nested texts": [["a"]],
    "nested ids": [[1, [2]]],
    "three axes": np.zeros((2, 2, 2), int),
    "ids and a text": [1, "a"],
    "ids beside a text": [[1, 2], "a"],
    "a text beside ids": ["a", [1, 2]],
    "a set": {"a"},
    "a function": len,
    "an object": object(),
    "nothing": [],
    "an empty array": np.array([]),
    "a tensor without values": torch.zeros(3, dtype=torch.long, device="meta"),
    "a negative id": [-1],
    "an id of another vocabulary": [10**30],
    "a mask of another shape": {"input_ids": [1, 2], "attention_mask": [1]},
    "a mask of other rows": {"input_ids": [[1, 2]], "attention_mask": [[1, 1], [1, 1]]},
    "a mask with a hole": {"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]},
    "a mask of nothing": {"input_ids": [1, 2], "attention_mask": [0, 0]},
    "a mask of weights": {"input_ids": [1, 2], "attention_mask": [0.5, 1]},
    "a mask of None": {"input_ids": [1, 2], "attention_mask": [None, None]},
    "a second segment": {"input_ids": [1, 2], "token_type_ids": [0, 1]},
    "an image": {"input_ids": [1, 2], "pixel_values": [0.0]},
    "input_ids of a text": {"input_ids": "abc"},
    "input_ids of texts": {"input_ids": ["abc"]},
    "input_ids of None": {"input_ids": None},
    "input_ids of floats": {"input_ids": torch.tensor([1.5])},
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", NO_PROMPTS)
def test_what_is_no_prompt_is_refused_in_a_line(model, name, door, tmp_path):
    if door == "graph" and name in ("a negative id", "an id of another vocabulary"):
        pytest.skip("GraphNode compares ids with the model's vocabulary")
    with pytest.raises(PromptError, match=r"expected .*found ") as caught:
        DOORS[door](model, NO_PROMPTS[name], tmp_path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 320
    assert not list(tmp_path.glob("store/data/*"))


@pytest.mark.parametrize("door", ONE)
def test_several_prompts_are_not_one(model, door, tmp_path):
    for several in (["a", "b"], [[1], [2]], {"input_ids": [[1], [2]]}):
        with pytest.raises(PromptError, match=r"expected one prompt .*found 2 prompts"):
            DOORS[door](model, several, tmp_path)


def test_a_run_keeps_the_prompt_it_was_made_with(ids):
    given = list(ids)
    run = mizarr.Run(given)
    given.clear()
    assert run.prompt == tuple(ids)
    assert mizarr.Run(iter(ids)).prompt == tuple(ids)


def test_where_there_is_no_tokenizer_a_text_is_no_prompt(ids):
    spec = mizarr.HookSpec().capture(HOOK)
    with pytest.raises(PromptError, match="a baseline of token ids, found the text 'a'"):
        spec.gradient_of(KL(), baseline="a")
    with pytest.raises(PromptError, match=r"or token ids, found 1\.5"):
        spec.gradient_of(KL(), baseline=[1.5])
    with pytest.raises(PromptError, match="expected token ids as clean prompt, found 'a'"):
        Pair("a", (1,), KL())
    with pytest.raises(PromptError, match=r"expected token ids \(whole numbers\)"):
        Pair((1,), (1, 1.5), KL())
    assert Pair(torch.tensor(ids), np.array([ids]), KL()).corrupted == tuple(ids)


def test_a_tokenizer_reads_texts_alone(model):
    for wrong in (None, 5, b"a", "\ud800"):
        for read in (model.tokenizer.encode, lambda text: model.tokenizer.encode_batch([text])):
            with pytest.raises(PromptError, match=r"specimen: expected (a|valid Unicode) text, found"):
                read(wrong)


def test_pages_of_messages_make_their_ids_by_the_chat_template():
    with pytest.raises(MizarrError, match=r"model\.chat\(messages\) turns a conversation into token ids"):
        as_rows([{"role": "user", "content": "hello"}])


class ByText(Experiment):
    """An experiment whose runs are of a text."""

    name, version, outputs = "by_text", 1, {}

    def cells(self, config):
        return [{"layer": 0}]

    def runs(self, prepared, cell):
        return [mizarr.Run(TEXT)]

    def sketch(self, config, cell):
        return [mizarr.Run(TEXT)]

    def measure(self, prepared, cell, result):
        return 0.0

    def dataset(self, prepared, cell, measured):
        raise NotImplementedError


def test_runs_of_texts_are_planned(ids, tmp_path):
    node = ExperimentNode(ByText(), ModelSource("specimen"))
    planned = node.plan(mizarr.open_store(tmp_path / "store"))
    assert planned is not None and planned.runs == 1


def test_plain_rows_are_read_as_they_are(ids):
    rows = [list(ids), list(ids)]
    assert as_rows(rows) == rows and as_rows(rows)[0] is not rows[0]
    assert one_row([[0]]) == [0] and as_rows([0, 0]) == [[0, 0]]


def test_a_budget_of_no_bytes_is_not_the_default(model, ids):
    with pytest.raises(PlanError, match="memory"):
        mizarr.run(model, [mizarr.Run(ids)], memory=0)


def test_ids_that_are_decoded_are_whole_numbers(model, ids):
    for spelling in (ids, tuple(ids), np.array(ids), torch.tensor(ids), pd.Series(ids), iter(ids)):
        assert model.tokenizer.decode(spelling).endswith(TEXT)
    assert model.tokenizer.decode([]) == ""
    for read in (model.tokenizer.decode, model.tokenizer.pieces):
        for wrong in ([1.7], ["a"], None, 5, [True], torch.tensor([1.5]), b"a"):
            with pytest.raises(PromptError, match=r"whole numbers\)? in the ids, found|whole numbers, found"):
                read(wrong)


@pytest.mark.parametrize(
    "messages", [None, 5, ["hello"], [None], b"a", {"role": "user"}, [[{"role": "user"}]]]
)
def test_a_conversation_that_is_none_is_refused(tmp_path, messages):
    from mizarr.stages.forward.text.library import LibraryTokenizer

    from .. import random_models

    random_models.save_tokenizer(tmp_path)
    tokenizer = LibraryTokenizer(tmp_path / "tokenizer.json", {"chat_template": "{{ messages[0].content }}"})
    with pytest.raises(PromptError, match="expected messages as a text, or as"):
        tokenizer.chat(messages)
    assert tokenizer.chat("hello") == tokenizer.chat([{"role": "user", "content": "hello"}]) == "hello"
