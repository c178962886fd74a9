"""Tasks on GPT-2's own vocabulary, which openai-whisper ships (`pip install --no-deps openai-whisper`)."""

from __future__ import annotations

import base64
import importlib.util
import json
from itertools import pairwise
from pathlib import Path

import pytest

from mizarr.stages.circuits.tasks.table import TASKS, task_pairs
from mizarr.stages.forward.text.library import LibraryTokenizer

PAIRS = 40


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """GPT-2's tokenizer, made of the ranks of its byte strings: a merge is the last step of putting one
    together from those of lower rank."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    found = importlib.util.find_spec("whisper")
    file = Path(found.origin).parent / "assets" / "gpt2.tiktoken" if found and found.origin else None
    if file is None or not file.is_file():
        pytest.skip("openai-whisper, which ships GPT-2's vocabulary, is not installed")
    lines = (line.split() for line in file.read_text().splitlines() if line)
    ranks = {base64.b64decode(piece): int(rank) for piece, rank in lines}
    letters = _letters()
    spelled = {piece: "".join(letters[byte] for byte in piece) for piece in ranks}
    vocabulary = {spelled[piece]: rank for piece, rank in ranks.items()}
    merges = [_parts(piece, ranks) for piece in sorted(ranks, key=ranks.get) if len(piece) > 1]
    made = Tokenizer(models.BPE(vocabulary, [tuple(map(spelled.get, pair)) for pair in merges]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    folder = tmp_path_factory.mktemp("gpt2")
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return LibraryTokenizer(folder / "tokenizer.json")


def _letters():
    """The printable character that stands for each byte in GPT-2's files."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def _parts(piece, ranks):
    """The two pieces that a piece is merged of."""
    parts = [bytes([byte]) for byte in piece]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
        place = pairs.index(min(pairs))
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return tuple(parts)


def test_it_is_gpt2s(gpt2):
    """Ids that are printed in many places, of its own vocabulary."""
    assert list(gpt2.encode("Hello world").ids) == [15496, 995]
    assert list(gpt2.encode(" Mary and John went").ids) == [5335, 290, 1757, 1816]
    assert list(gpt2.encode("The capital of France is Paris").ids) == [464, 3139, 286, 4881, 318, 6342]


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_pairs_of_equal_length_and_answers_of_one_token(gpt2, task):
    pairs = task_pairs(gpt2, task, PAIRS, seed=1)
    assert len({(pair.clean, pair.corrupted) for pair in pairs}) == PAIRS
    for pair in pairs:
        assert len(pair.clean) == len(pair.corrupted) and pair.clean != pair.corrupted
        if task == "greater_than":
            start = int(gpt2.decode(list(pair.clean)).split(" to ")[0][-2:])
            metric = pair.metric
            right, wrong = ([gpt2.decode([each]) for each in said] for said in (metric.right, metric.wrong))
            assert right == [f"{year:02d}" for year in range(start + 1, 100)]
            assert wrong == [f"{year:02d}" for year in range(1, start + 1)]
            continue
        right, wrong = (gpt2.decode([token]) for token in (pair.metric.correct, pair.metric.wrong))
        assert right != wrong and right.strip() and wrong.strip()


def test_an_indirect_object_is_named_once_and_who_gives_twice(gpt2):
    for pair in task_pairs(gpt2, "ioi", 10, seed=2):
        text = gpt2.decode(list(pair.clean))
        right, wrong = (gpt2.decode([each]) for each in (pair.metric.correct, pair.metric.wrong))
        assert text.count(right) == 1 and text.count(wrong) == 2


@pytest.mark.parametrize("task", TASKS)
def test_how_many_there_are_at_least(gpt2, task):
    """Enough for a circuit to be chosen on some and run on others."""
    assert len(task_pairs(gpt2, task, 500, seed=0)) == 500
