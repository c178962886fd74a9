"""What the specimen reads: wrapped prose, short facts, repeated sequences - and its tokenizer.

Border: text, integers and numpy; knows no model and no torch.

Idea. Each kind of row teaches something that can be looked at inside a model:
  prose     words of a chapter wrapped greedily (stages/corpus/text.py) at one random width per row. Earlier
            lines show the width, so predicting the line break needs a count of the characters in this line
            (Gurnee et al. 2025, "When Models Manipulate Manifolds").
  facts     "<s>prompt target.</s>", many per row; only memory can complete them.
  repeats   spans of random tokens, or of shuffled words, repeated within the row; only copying from earlier
            in the row predicts the later occurrences (Olsson et al. 2022, induction heads).
  refrains  a few words over and over, wrapped; as words are copied, only the count is left to learn.
  couplets  two lines, many per row; the end of the second must rhyme with that of the first (couplets.py).

Every batch is a pure function of (seed, step, mixture): a run that resumes at step n reads what it would have
read.

Axes: row, token. A row of length T gives T inputs and, shifted by one, T targets, each with a loss weight.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from mizarr.store.errors import PromptError

from .couplets import Couplet, couplet

__all__ = [
    "BOS", "EOS", "HELD_OUT", "WATCHED", "Batch", "Batches", "Chapter", "Fact", "Mixture", "Prose",
    "couplet_tokens", "read_chapters", "read_facts", "repeated_row", "shuffled_row", "token_id",
    "train_tokenizer", "wrapped_row",
]  # fmt: skip

BOS, EOS = "<s>", "</s>"
HELD_OUT = (
    "CHAPTER_V_The_Wine_shop",
    "CHAPTER_XII_The_Fellow_of_Delicacy",
    "CHAPTER_XVI_Still_Knitting",
    "CHAPTER_XIX_An_Opinion",
)
"""Chapters neither the model nor its tokenizer ever sees; they are the test set and the demo's prose."""
WATCHED = ("CHAPTER_X_Two_Promises",)
"""A chapter never trained on either, on which the held-out loss is watched while training."""

Ids = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float32]
_Row = tuple[list[int], list[float]]
"""Tokens, and the loss weight of each as a target."""


@dataclass(frozen=True)
class Chapter:
    """A stretch of prose: its name and its paragraphs, one string each, without line breaks inside."""

    name: str
    paragraphs: tuple[str, ...]

    @property
    def text(self) -> str:
        """The paragraphs, one blank line between them."""
        return "\n\n".join(self.paragraphs)


@dataclass(frozen=True)
class Fact:
    """A statement without its end, and its end."""

    prompt: str
    target: str


def read_chapters(folder: Path) -> list[Chapter]:
    """One chapter per *.txt of `folder`, sorted by name; straight quotes become typographic ones."""
    chapters = []
    for path in sorted(folder.glob("*.txt")):
        text = _typographic(path.read_text(encoding="utf-8-sig"))
        paragraphs = (" ".join(block.split()) for block in re.split(r"\n\s*\n", text))
        chapters.append(Chapter(path.stem, tuple(p for p in paragraphs if p)))
    return chapters


def read_facts(folder: Path) -> list[Fact]:
    """The facts of the counterfact files, one per prompt, in order of first appearance.

    A prompt is the text before the first blank line. Where the files give one prompt two targets, the first
    is kept: a model cannot answer both.
    """
    facts: dict[str, str] = {}
    for path in sorted(folder.glob("*.json")):
        for entry in json.loads(path.read_text("utf-8")):
            for side in ("original", "counterfactual"):
                prompt = entry[f"{side}_prompt"].split("\n\n")[0].strip()
                facts.setdefault(prompt, entry[f"gt_{side}_target"].strip())
    return [Fact(prompt, target) for prompt, target in facts.items()]


def train_tokenizer(
    chapters: Sequence[Chapter], facts: Sequence[Fact], *, vocabulary: int, seed: int
) -> Tokenizer:
    """A byte-level BPE tokenizer of `vocabulary` tokens in which every line break is a token of its own.

    It reads the prose, the facts and some couplets. A word at the start of a line has no space before it, so
    it is another token than the same word inside a line; hence prose is wrapped here as it is in training.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("\n"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[BOS, EOS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(_tokenizer_text(chapters, facts, seed), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, token_id(tokenizer, BOS))]
    )
    return tokenizer


def token_id(tokenizer: Tokenizer, text: str) -> int:
    """The id of a text that is one token. Raises PromptError if it is none or several."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    if len(ids) != 1:
        raise PromptError(f"expected {text!r} to be one token, found {len(ids)}; train the tokenizer anew")
    return ids[0]


class Batch(NamedTuple):
    """Rows to train on.

    ids: int64 [row, token + 1]; inputs are all but the last token, targets all but the first.
    weights: float32 [row, token], loss weight of each target.
    """

    ids: Ids
    weights: Weights


class Prose:
    """A chapter cut into words, each with its length in characters and its tokens in both forms.

    `first` and `inner` are the tokens of each word at the start of a line and inside it. The pre-tokenizer
    splits at white space, so the tokens of a word do not depend on its neighbours.
    """

    def __init__(self, text: str, tokenizer: Tokenizer):
        self.words = text.split()
        self.lengths = [len(word) for word in self.words]
        forms: dict[str, list[int]] = {}
        wanted = sorted(set(self.words))
        for prefix in ("", " "):
            codes = tokenizer.encode_batch([prefix + word for word in wanted], add_special_tokens=False)
            forms |= {prefix + word: code.ids for word, code in zip(wanted, codes, strict=True)}
        self.first = [forms[word] for word in self.words]
        self.inner = [forms[" " + word] for word in self.words]

    def __len__(self) -> int:
        return len(self.words)


def wrapped_row(
    prose: Prose, order: Sequence[int], width: int, size: int, *, bos: int, newline: int
) -> tuple[list[int], list[int]]:
    """`size` tokens of the words `order`, greedily wrapped at `width` characters, after a BOS.

    The rule is that of `mizarr.stages.corpus.text.wrap`. Fewer tokens when the words run out.
    Returns the ids and the column of each token (characters of the line up to and including its word; 0 for
    BOS and line breaks).
    """
    ids, columns, used = [bos], [0], 0
    for i in order:
        if len(ids) >= size:
            break
        length = prose.lengths[i]
        if used and used + 1 + length > width:
            ids.append(newline)
            columns.append(0)
            used = 0
        tokens = prose.inner[i] if used else prose.first[i]
        ids += tokens
        used += length + (used > 0)
        columns += [used] * len(tokens)
    return ids[:size], columns[:size]


def repeated_row(
    rng: np.random.Generator,
    draw: Callable[[int], Sequence[int]],
    size: int,
    *,
    bos: int,
    shortest: int = 6,
    longest: int = 80,
) -> tuple[list[int], list[bool]]:
    """`size` tokens: spans that occur 2 to 4 times, one right after the other.

    draw(n): n tokens of a fresh span. Returns the ids and, for each, whether it can be copied: it can in
    every occurrence after the first, but for the first token, which nothing announces.
    """
    ids, copied = [bos], [False]
    while len(ids) < size:
        span = draw(int(np.exp(rng.uniform(np.log(shortest), np.log(longest)))))
        times = int(rng.integers(2, 5))
        for time in range(times):
            ids += span
            copied += [time > 0 and k > 0 for k in range(len(span))]
    return ids[:size], copied[:size]


def shuffled_row(
    rng: np.random.Generator, tokens: Sequence[int], size: int, *, bos: int
) -> tuple[list[int], list[bool]]:
    """`size` tokens: `tokens` cut into spans of 2 to 4, then these spans over and over, in random order.

    Returns the ids and, for each, whether it can be copied, as `repeated_row` does: only the token before
    says where from, as one span comes at all distances.
    """
    spans, start = [], 0
    while start < len(tokens):
        spans.append(tokens[start : start + int(rng.integers(2, 5))])
        start += len(spans[-1])
    ids, copied = [bos], [False]
    seen: set[int] = set()
    for which in rng.integers(0, len(spans), size).tolist():
        ids += spans[which]
        copied += [which in seen and k > 0 for k in range(len(spans[which]))]
        seen.add(which)
    return ids[:size], copied[:size]


@dataclass(frozen=True)
class Mixture:
    """Shares of the kinds of row, row sizes and loss weights of a stretch of training."""

    prose: float = 0.54
    facts: float = 0.22
    random_repeats: float = 0.1
    word_repeats: float = 0.04
    couplets: float = 0.1
    rows: int = 32
    size: int = 256
    long_share: float = 0.1
    """Share of the steps with rows twice as long, and half as many."""
    narrowest: int = 30
    widest: int = 80
    shortest_span: int = 6
    longest_span: int = 80
    shuffled: float = 0.0
    """Share of the rows of random repeats that show `alphabet` tokens in short spans, in random order."""
    alphabet: int = 16
    """Different tokens of such a row, drawn from the first n of the vocabulary, n log-uniform from `alphabet`
    to `pool`: where rows share their tokens, copying pays, and knowing which tokens a row has does not."""
    pool: int = 0
    """The largest such n; 0: the vocabulary."""
    echoes: float = 0.0
    """Share of the rows that teach the token before alone: x y x, and only the second x counts."""
    refrains: float = 0.0
    """Share of the rows that hold a few words of prose over and over, wrapped: who copies knows the words, so
    where lines end is all that is left to tell."""
    prompt_weight: float = 0.1
    """Loss weight of what leads up to a target: a fact's prompt, a couplet but its end."""
    end_weight: float = 1.0
    """Loss weight of a couplet's end, one token of some twenty; a fact's target weighs 1."""
    line_end_weight: float = 1.0
    """Loss weight of the tokens within `line_end` characters of the width."""
    line_end: int = 12
    own_prose: float = 0.5
    """Share of the prose rows taken from the main chapters rather than the additional prose."""


class Batches:
    """The batches of a run; `batches(step, mixture)` is a pure function of (seed, step, mixture)."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chapters: Sequence[Chapter],
        additional: Sequence[Chapter],
        facts: Sequence[Fact],
        *,
        seed: int,
    ):
        self.tokenizer = tokenizer
        self.seed = seed
        self.vocabulary = tokenizer.get_vocab_size()
        self.bos = token_id(tokenizer, BOS)
        self.eos = token_id(tokenizer, EOS)
        self.newline = token_id(tokenizer, "\n")
        self.prose = [Prose(chapter.text, tokenizer) for chapter in chapters]
        self.additional = [Prose(chapter.text, tokenizer) for chapter in additional]
        self.facts = [_fact_tokens(fact, tokenizer) for fact in facts]

    def __call__(self, step: int, mixture: Mixture) -> Batch:
        """The batch of a step."""
        rng = np.random.default_rng([self.seed, step])
        stretch = 2 if rng.random() < mixture.long_share else 1
        size = mixture.size * stretch + 1
        makers = {
            self._prose_row: mixture.prose,
            self._fact_row: mixture.facts,
            self._random_row: mixture.random_repeats,
            self._word_row: mixture.word_repeats,
            self._couplet_row: mixture.couplets,
            self._echo_row: mixture.echoes,
            self._refrain_row: mixture.refrains,
        }
        shares = np.array(list(makers.values()))
        kinds = rng.choice(len(makers), mixture.rows // stretch, p=shares / shares.sum())
        rows = [list(makers)[kind](rng, size, mixture) for kind in kinds]
        return Batch(
            ids=np.array([ids for ids, _ in rows], np.int64),
            weights=np.array([weights for _, weights in rows], np.float32)[:, 1:],
        )

    def _prose_row(self, rng: np.random.Generator, size: int, mixture: Mixture) -> _Row:
        prose = self._some_prose(rng, mixture)
        start = int(rng.integers(max(1, len(prose) - size // 2)))
        order = [i % len(prose) for i in range(start, start + size)]
        return self._wrapped(rng, prose, order, size, mixture)

    def _refrain_row(self, rng: np.random.Generator, size: int, mixture: Mixture) -> _Row:
        prose = self._some_prose(rng, mixture)
        start, words = int(rng.integers(len(prose))), int(rng.integers(4, 17))
        phrase = [i % len(prose) for i in range(start, start + words)]
        ids, weights = self._wrapped(rng, prose, phrase * (size // words + 1), size, mixture)
        told = 1 + sum(len(prose.inner[i]) for i in phrase)  # about: by then the words are known
        return ids, [0.0] * told + weights[told:]

    def _wrapped(
        self, rng: np.random.Generator, prose: Prose, order: Sequence[int], size: int, mixture: Mixture
    ) -> _Row:
        """Words in an order, wrapped at a width of the mixture's."""
        width = int(rng.integers(mixture.narrowest, mixture.widest + 1))
        ids, columns = wrapped_row(prose, order, width, size, bos=self.bos, newline=self.newline)
        edge = width - mixture.line_end
        # Whether the line ends after this token is decided by the token after it: weigh all such decisions,
        # breaks and words alike, or the model would learn wrong odds.
        near = [False, *(column >= edge for column in columns[:-1])]
        return ids, [mixture.line_end_weight if n else 1.0 for n in near]

    def _fact_row(self, rng: np.random.Generator, size: int, mixture: Mixture) -> _Row:
        return self._told(lambda: self.facts[int(rng.integers(len(self.facts)))], size, mixture)

    def _couplet_row(self, rng: np.random.Generator, size: int, mixture: Mixture) -> _Row:
        def draw() -> tuple[list[int], list[int]]:
            return couplet_tokens(couplet(rng), self.tokenizer)

        return self._told(draw, size, mixture, mixture.end_weight)

    def _told(
        self, draw: Callable[[], tuple[list[int], list[int]]], size: int, mixture: Mixture, high: float = 1.0
    ) -> _Row:
        """BOS, what leads up to a target, the target and EOS, over and over."""
        ids: list[int] = []
        weights: list[float] = []
        low = mixture.prompt_weight
        while len(ids) < size:
            prompt, target = draw()
            ids += [self.bos, *prompt, *target, self.eos]
            weights += [0.0] + [low] * len(prompt) + [high] * len(target) + [low]
        return ids[:size], weights[:size]

    def _random_row(self, rng: np.random.Generator, size: int, mixture: Mixture) -> _Row:
        if mixture.shuffled and rng.random() < mixture.shuffled:
            most = mixture.pool or self.vocabulary - 2
            pool = int(np.exp(rng.uniform(np.log(mixture.alphabet), np.log(most + 1))))
            tokens = (2 + rng.choice(pool, mixture.alphabet, replace=False)).tolist()
            return _counting(shuffled_row(rng, tokens, size, bos=self.bos))
        return self._repeats(rng, lambda n: rng.integers(2, self.vocabulary, n).tolist(), size, mixture)

    def _echo_row(self, rng: np.random.Generator, size: int, mixture: Mixture) -> _Row:
        first, second = rng.integers(2, self.vocabulary, (2, size // 3 + 1))
        ids = np.stack([first, second, first], axis=1).flatten().tolist()
        return [self.bos, *ids][:size], [0.0, *([0.0, 0.0, 1.0] * len(first))][:size]

    def _word_row(self, rng: np.random.Generator, size: int, mixture: Mixture) -> _Row:
        prose = self._some_prose(rng, mixture)

        def draw(n: int) -> list[int]:
            tokens: list[int] = []
            while len(tokens) < n:
                tokens += prose.inner[int(rng.integers(len(prose)))]
            return tokens[:n]

        return self._repeats(rng, draw, size, mixture)

    def _repeats(
        self, rng: np.random.Generator, draw: Callable[[int], Sequence[int]], size: int, mixture: Mixture
    ) -> _Row:
        lengths = {"shortest": mixture.shortest_span, "longest": mixture.longest_span}
        return _counting(repeated_row(rng, draw, size, bos=self.bos, **lengths))

    def _some_prose(self, rng: np.random.Generator, mixture: Mixture) -> Prose:
        """A chapter, each as likely as it is long."""
        own = not self.additional or rng.random() < mixture.own_prose
        shelf = self.prose if own else self.additional
        sizes = np.array([len(prose) for prose in shelf], np.float64)
        return shelf[int(rng.choice(len(shelf), p=sizes / sizes.sum()))]


def _counting(row: tuple[list[int], list[bool]]) -> _Row:
    """A row of repeats of which only what can be copied counts."""
    ids, copied = row
    return ids, [float(c) for c in copied]


def couplet_tokens(lines: Couplet, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Tokens of the couplet up to its end, and of the end."""
    prompt: list[int] = tokenizer.encode(f"{lines.first}\n{lines.second}", add_special_tokens=False).ids
    return prompt, [token_id(tokenizer, f" {lines.end}")]


def _fact_tokens(fact: Fact, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Tokens of the prompt, and of the target with the full stop after it."""
    prompt: list[int] = tokenizer.encode(fact.prompt, add_special_tokens=False).ids
    target: list[int] = tokenizer.encode(f" {fact.target}.", add_special_tokens=False).ids
    return prompt, target


def _tokenizer_text(chapters: Sequence[Chapter], facts: Sequence[Fact], seed: int) -> Iterator[str]:
    from mizarr.stages.corpus.text import wrap

    rng = np.random.default_rng(seed)
    for chapter in chapters:
        yield wrap(chapter.text, int(rng.integers(30, 81)))
    for fact in facts:
        yield f"{fact.prompt} {fact.target}."
    # Every end of a couplet has to be one token, however much prose there is.
    yield from (couplet(rng).text for _ in range(6000))


def _typographic(text: str) -> str:
    """Straight quotes as opening and closing ones, so that all prose is spelled alike."""
    text = re.sub(r"(?<=[\w.,;:!?-])'", "’", text).replace("'", "‘")
    return re.sub(r'(?<=[\w.,;:!?’-])"', "”", text).replace('"', "“")
