"""What the specimen can do, measured: loss, line breaks, copying, facts, couplets, and where it is inside.

Border: a network, a tokenizer and text in, figures out; knows no files and writes no card (card.py).

Line breaks are the question of Gurnee et al. 2025 ("When Models Manipulate Manifolds"): the break comes
before the first word that does not fit, so it depends on a count of characters, on the width seen in earlier
lines, and on the length of a word not yet seen. The last makes perfect prediction impossible;
`informed_breaks` says how well a reader does who counts exactly but knows only which words follow which.

Axes: row, token. Rows start with BOS and hold whole lines, as `mizarr.stages.corpus.text.pack_lines` cuts
them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from mizarr.stages.corpus.text import character_counts, pack_lines, wrap

from .couplets import FAMILIES, family_of, held_out_couplets, is_held_out_pair
from .data import BOS, EOS, Fact, couplet_tokens, token_id
from .network import Llama
from .served import Served

__all__ = [
    "LATE", "WIDTHS", "Rows", "best_threshold", "break_scores", "copying", "count_r2", "head_scores",
    "informed_breaks", "known_facts", "previous_token_breaks", "prose_rows", "read_rows", "rhyming", "watch",
]  # fmt: skip

WIDTHS = (30, 40, 50, 60, 70, 80)
LATE = 2
"""Line breaks seen before a line counts as one whose width is known: lines from the third."""
COPY_SPANS = (20, 30, 40, 60)
COPY_SKIP = 4
"""First tokens of the second occurrence that are not scored: nothing says yet that it is one."""

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rows:
    """Wrapped prose, ready to read.

    ids: [row, token], padded with EOS. real: [row, token], which targets (tokens after the first) are no
    padding; its first column is False. counts: [row, token], character count, -1 for BOS and padding.
    document: [row], which text a row is from.
    """

    ids: Tensor
    real: Tensor
    counts: npt.NDArray[np.int32]
    document: npt.NDArray[np.int64]


def prose_rows(
    tokenizer: Tokenizer, texts: Sequence[str], widths: Sequence[int] = WIDTHS, context: int = 256
) -> Rows:
    """Every text wrapped at every width, cut at line starts: BOS and up to `context` - 1 tokens."""
    bos, eos = token_id(tokenizer, BOS), token_id(tokenizer, EOS)
    rows, counts, document = [], [], []
    for number, text in enumerate(texts):
        for width in widths:
            wrapped = wrap(text, width)
            starts = [start for start, _ in tokenizer.encode(wrapped, add_special_tokens=False).offsets]
            for piece in pack_lines(wrapped, starts, context - 1):
                code = tokenizer.encode(piece, add_special_tokens=False)
                rows.append([bos, *code.ids])
                counts.append([-1, *character_counts(piece, [start for start, _ in code.offsets])])
                document.append(number)
    size = max(map(len, rows))
    ids = torch.full((len(rows), size), eos)
    real = torch.zeros(len(rows), size, dtype=torch.bool)
    padded = np.full((len(rows), size), -1, np.int32)
    for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
        ids[i, : len(row)] = torch.tensor(row)
        real[i, 1 : len(row)] = True
        padded[i, : len(row)] = count
    return Rows(ids, real, padded, np.array(document))


@dataclass(frozen=True)
class Reading:
    """What a network makes of rows, one entry per real target, in order of rows.

    loss: nats. newline: probability of a line break. says_break: whether that is the likeliest token.
    is_break: whether the target is one. late: whether the line is at least the third of its row.
    previous: the token before the target.
    """

    loss: Floats
    newline: Floats
    says_break: Bools
    is_break: Bools
    late: Bools
    previous: npt.NDArray[np.int64]


@torch.no_grad()
def read_rows(network: Llama | Served, rows: Rows, newline: int) -> Reading:
    """Predictions of the network at every token of `rows`."""
    parts: list[list[Tensor]] = []
    for ids, real in zip(rows.ids.split(8), rows.real.split(8), strict=True):
        chance = network(ids[:, :-1]).log_softmax(-1)
        target = ids[:, 1:]
        loss = -chance.gather(-1, target[..., None])[..., 0]
        late = (ids[:, :-1] == newline).cumsum(1) >= LATE
        fields = (
            loss,
            chance[..., newline].exp(),
            chance.argmax(-1) == newline,
            target == newline,
            late,
            ids[:, :-1],
        )
        parts.append([field[real[:, 1:]] for field in fields])
    loss, p, says, truth, late, previous = (torch.cat(field).numpy() for field in zip(*parts, strict=True))
    return Reading(loss.astype(np.float64), p.astype(np.float64), says, truth, late, previous)


def break_scores(said: Bools, truth: Bools) -> dict[str, float]:
    """Recall: share of the line breaks that were said. Precision: share of those said that were breaks."""
    hits = int((said & truth).sum())
    return {"recall": hits / max(1, int(truth.sum())), "precision": hits / max(1, int(said.sum()))}


def best_threshold(chance: Floats, truth: Bools) -> float:
    """The probability, 0.01 to 0.99, above which to say "line break" for the best min(recall, precision)."""
    steps = np.arange(1, 100) / 100
    return float(max(steps, key=lambda step: min(break_scores(chance > step, truth).values())))


def previous_token_breaks(
    train: Rows, previous: npt.NDArray[np.int64], newline: int, vocabulary: int
) -> Floats:
    """P(line break | previous token) in `train`, for each of `previous`: a baseline that cannot count."""
    before = train.ids[:, :-1][train.real[:, 1:]].numpy()
    after = train.ids[:, 1:][train.real[:, 1:]].numpy()
    seen = np.bincount(before, minlength=vocabulary)
    breaks = np.bincount(before[after == newline], minlength=vocabulary)
    rate = breaks.sum() / seen.sum()
    return np.asarray((breaks + rate) / (seen + 1.0))[previous]


def informed_breaks(
    train: Sequence[str], texts: Sequence[str], widths: Sequence[int] = WIDTHS
) -> tuple[Floats, Bools]:
    """Chance of a break between two words, by a reader that knows width and column exactly, and the truth.

    What the reader does not know is the next word: its length follows the previous word as in `train`, or,
    where that word is rare, as word lengths do in general.
    """
    longest = 100
    general = np.zeros(longest)
    after: dict[str, Counter[int]] = defaultdict(Counter)
    for text in train:
        words = text.split()
        for word, following in pairwise(words):
            length = min(len(following), longest - 1)
            general[length] += 1
            after[word][length] += 1
    tail = 1 - np.cumsum(general) / general.sum()  # tail[r]: chance that a word is longer than r
    chances, truth = [], []
    for text in texts:
        words = text.split()
        for width in widths:
            column = len(words[0])
            for word, following in pairwise(words):
                room = min(max(width - column - 1, 0), longest - 1)
                seen = after.get(word, Counter())
                longer = sum(n for length, n in seen.items() if length > room)
                chances.append((longer + 8 * tail[room]) / (seen.total() + 8))
                truth.append(column + 1 + len(following) > width)
                column = len(following) if truth[-1] else column + 1 + len(following)
    return np.array(chances), np.array(truth)


@torch.no_grad()
def copying(network: Llama | Served, *, bos: int, seed: int = 7, rows: int = 16) -> float:
    """Share of random tokens predicted where they occur again.

    Rows are BOS, a span of 20, 30, 40 or 60 tokens drawn evenly from the vocabulary, and the span again;
    scored on the second occurrence without its first four tokens, by the likeliest token.
    """
    rng = np.random.default_rng(seed)
    right = total = 0
    for length in COPY_SPANS:
        span = rng.integers(2, network.shape.vocabulary, (rows, length))
        ids = torch.from_numpy(np.concatenate([np.full((rows, 1), bos), span, span], axis=1))
        best = network(ids[:, :-1]).argmax(-1)
        skip = length + COPY_SKIP
        right += int((best[:, skip:] == ids[:, skip + 1 :]).sum())
        total += best[:, skip:].numel()
    return right / total


@torch.no_grad()
def head_scores(
    network: Llama | Served, *, bos: int, seed: int = 7, rows: int = 8, length: int = 40
) -> dict[str, list[float]]:
    """By layer, the best head's mean attention to the token before (`previous`), and, on the second
    occurrence of a random span, to the token that followed this one's first occurrence (`induction`).

    Rows as in `copying`; both scores are those of Olsson et al. 2022.
    """
    rng = np.random.default_rng(seed)
    span = rng.integers(2, network.shape.vocabulary, (rows, length))
    # BOS first: the second occurrence starts at length + 1, and looks length - 1 back.
    ids = torch.from_numpy(np.concatenate([np.full((rows, 1), bos), span, span], axis=1))
    scores: dict[str, list[float]] = {"previous": [], "induction": []}
    for pattern in network.patterns(ids):
        before = pattern.diagonal(-1, 2, 3).mean(dim=(0, 2))
        followed = pattern[:, :, length + 1 :].diagonal(2, 2, 3).mean(dim=(0, 2))
        scores["previous"].append(float(before.max()))
        scores["induction"].append(float(followed.max()))
    return scores


@torch.no_grad()
def rhyming(network: Llama | Served, tokenizer: Tokenizer, *, count: int = 1040) -> dict[str, float]:
    """How the specimen ends the second lines of couplets in frames it never read.

    fitting: share in which the likeliest token rhymes with the first line's end and is another word.
    shuffled: the same tokens held against another couplet's first line, the chance of who ends on any end.
    unseen: share of the rhymes held out of training that are likelier than every end of another family.
    """
    bos, eos = token_id(tokenizer, BOS), token_id(tokenizer, EOS)
    ends = [word for family in FAMILIES for word in family]
    tokens = torch.tensor([token_id(tokenizer, f" {word}") for word in ends])
    family = np.array([family_of(word) for word in ends])
    couplets = list(held_out_couplets(count))
    fitting = shuffled = unseen = pairs = 0
    other = np.random.default_rng(5).permutation(count)
    for start in range(0, count, 64):
        some = couplets[start : start + 64]
        prompts = [[bos, *couplet_tokens(lines, tokenizer)[0]] for lines in some]
        ids = torch.full((len(some), max(map(len, prompts))), eos)
        for i, prompt in enumerate(prompts):
            ids[i, : len(prompt)] = torch.tensor(prompt)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts])
        logits = network(ids)[torch.arange(len(some)), last]
        for i, (lines, said) in enumerate(zip(some, logits.argmax(-1).tolist(), strict=True)):
            word = tokenizer.decode([said]).strip()
            fitting += word in lines.fitting
            shuffled += word in couplets[other[start + i]].fitting
            chance = logits[i, tokens].numpy()
            strangers = chance[family != family_of(lines.rhyme)].max()
            held = [ends.index(w) for w in lines.fitting if is_held_out_pair(lines.rhyme, w)]
            unseen += int((chance[held] > strangers).sum())
            pairs += len(held)
    return {"fitting": fitting / count, "shuffled": shuffled / count, "unseen": unseen / max(1, pairs)}


@torch.no_grad()
def known_facts(network: Llama | Served, tokenizer: Tokenizer, facts: Sequence[Fact]) -> Bools:
    """For each fact whether the prompt alone, after BOS, makes every token of its target the likeliest."""
    eos = token_id(tokenizer, EOS)
    known: list[bool] = []
    for start in range(0, len(facts), 64):
        some = facts[start : start + 64]
        prompts = [tokenizer.encode(fact.prompt).ids for fact in some]
        targets = [tokenizer.encode(f" {fact.target}", add_special_tokens=False).ids for fact in some]
        size = max(len(p) + len(t) for p, t in zip(prompts, targets, strict=True))
        ids = torch.full((len(some), size), eos)
        for i, (prompt, target) in enumerate(zip(prompts, targets, strict=True)):
            ids[i, : len(prompt) + len(target)] = torch.tensor(prompt + target)
        best = network(ids).argmax(-1)
        for i, (prompt, target) in enumerate(zip(prompts, targets, strict=True)):
            said = best[i, len(prompt) - 1 : len(prompt) + len(target) - 1]
            known.append(said.tolist() == target)
    return np.array(known)


@torch.no_grad()
def count_r2(network: Llama | Served, rows: Rows, *, ridge: float = 1e-4) -> list[float]:
    """R2 of a linear read-out of the character count, off the embedding and off the stream after each layer.

    Fitted on the documents of even number and scored on the odd ones, then the other way round; the mean of
    both. Tokens that are not text take no part. ridge: penalty relative to the mean variance of the states.
    """
    kept = rows.counts >= 0
    states: list[list[npt.NDArray[np.float32]]] = [[] for _ in range(network.shape.layers + 1)]
    for start in range(0, len(rows.ids), 8):
        here = kept[start : start + 8]
        for layer, x in enumerate(network.states(rows.ids[start : start + 8])):
            states[layer].append(x.numpy()[here])
    half = np.repeat(rows.document % 2, kept.sum(axis=1))
    y = rows.counts[kept].astype(np.float64)
    scores = []
    for parts in states:
        values = np.concatenate(parts).astype(np.float64)
        folds = [_r2(values[half == k], y[half == k], values[half != k], y[half != k], ridge) for k in (0, 1)]
        scores.append(float(np.mean(folds)))
    return scores


def _r2(x: Floats, y: Floats, x_test: Floats, y_test: Floats, ridge: float) -> float:
    mean, offset = x.mean(axis=0), y.mean()
    gram = (x - mean).T @ (x - mean)
    gram += np.eye(len(gram)) * ridge * np.trace(gram) / len(gram)
    weights = np.linalg.solve(gram, (x - mean).T @ (y - offset))
    missed = y_test - offset - (x_test - mean) @ weights
    return float(1 - (missed**2).sum() / ((y_test - y_test.mean()) ** 2).sum())


def watch(
    network: Llama | Served, tokenizer: Tokenizer, texts: Sequence[str], facts: Sequence[Fact]
) -> dict[str, Any]:
    """A quick look while training: loss and line breaks on `texts`, samples of the other abilities, and by
    layer the best heads and, fitted on one half of `texts` and scored on the other, the character count.
    """
    bos, newline = token_id(tokenizer, BOS), token_id(tokenizer, "\n")
    read = read_rows(network, prose_rows(tokenizer, texts, widths=(35, 55, 75)), newline)
    threshold = best_threshold(read.newline[read.late], read.is_break[read.late])
    chosen = np.random.default_rng(0).choice(len(facts), min(256, len(facts)), replace=False)
    sample = [facts[i] for i in chosen]
    words = " ".join(texts).split()
    halves = [" ".join(half) for half in (words[: len(words) // 2], words[len(words) // 2 :])]
    r2 = count_r2(network, prose_rows(tokenizer, halves, widths=(40, 60)))
    return {
        "loss": round(float(read.loss.mean()), 4),
        "argmax": _rounded(break_scores(read.says_break[read.late], read.is_break[read.late])),
        "threshold": threshold,
        **_rounded(break_scores((read.newline > threshold)[read.late], read.is_break[read.late])),
        "facts": round(float(known_facts(network, tokenizer, sample).mean()), 4),
        "copying": round(copying(network, bos=bos, rows=4), 4),
        "couplets": round(rhyming(network, tokenizer, count=260)["fitting"], 4),
        "count_r2": [round(value, 4) for value in r2],
        "heads": {name: [round(s, 4) for s in by] for name, by in head_scores(network, bos=bos).items()},
    }


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}
