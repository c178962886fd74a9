"""Prompts with their answers, as workflows on attention ask for them: which by default, and in which tokens.

Border: texts and token ids; loads no model and never imports torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ...stages.forward.models.files import SHIPPED
from ...stages.forward.text.prompts import check_prompts
from ...store.errors import ConfigError
from ..subject import shipped_facts

if TYPE_CHECKING:
    from ...stages.forward.text.tokens import Encoding
    from ..subject import Subject

__all__ = [
    "KNOWN",
    "answer_pieces",
    "counterpart",
    "encoded",
    "fact",
    "is_one_token",
    "named",
    "number",
    "require_next",
    "target_json",
    "top_changed_json",
    "word_id",
]

KNOWN = 2
"""Facts a model must know, of those to choose on and of those to score on, before anything is claimed: any
network changes what it says when it is changed, an untrained one too, and one answer may be luck."""
FIRST_KNOWN = {"specimen": 0, "specimen-guided": 0, "specimen-rwkv": 1, "specimen-experts": 0}
"""The first shipped fact that each model says (tests/specimen_training/test_specimen_training.py)."""
FRANCE = ("The capital of France is", "Paris")
COUNTRIES = ("Germany", "Poland", "Brazil", "Russia", "Canada")
"""candle-mi's default prompt, and what takes France's place in its counterparts."""


def fact(model: str, prompt: str, target: str) -> tuple[str, str]:
    """The prompt and target asked for; by default the first fact that a specimen says, and for other
    models the capital of France."""
    if prompt:
        return prompt, target
    if target:
        raise ConfigError(f"expected a prompt for the target {target!r}, found none; set both or neither")
    if model not in SHIPPED:
        return FRANCE
    told = shipped_facts()[FIRST_KNOWN[model]]
    return told["prompt"], told["target"]


def counterpart(subject: Subject, model: str, prompt: str, target: str) -> str:
    """A prompt to contrast with, of as many tokens: another country, or, for the specimen, the shipped fact
    of another answer that begins and ends most like this one.

    Raises ConfigError if there is none.
    """
    length = len(subject.tokenizer.encode(prompt))
    if prompt == FRANCE[0]:
        tried = [prompt.replace("France", country) for country in COUNTRIES]
    else:
        others = [f["prompt"] for f in shipped_facts() if f["target"] != target] if model in SHIPPED else []
        tried = sorted(others, key=lambda other: -_alike(prompt, other))
    for other in tried:
        if other != prompt and len(subject.tokenizer.encode(other)) == length:
            return other
    raise ConfigError(
        f"expected a counterpart of {length} tokens for {prompt!r}, found none by default; "
        "name one: contrastive=…"
    )


def encoded(subject: Subject, prompt: str, *, chat: bool = False) -> Encoding:
    """Tokens of a prompt; of what a user says (chat), by the model's chat template, up to where it answers.
    Raises PromptError for one that is empty or too long for the model, TokenizerError without a template."""
    tokenizer = subject.tokenizer
    found = tokenizer.encode_raw(tokenizer.chat(prompt)) if chat else tokenizer.encode(prompt)
    config = subject.config
    check_prompts([found.ids], config.vocab_size, config.context_length, subject.name, config.unknown_token)
    return found


def answer_pieces(subject: Subject, prompt: str, answer: str, *, at_mask: bool = False) -> tuple[int, ...]:
    """All tokens of an answer to a prompt, none for an empty one; see `Subject.answer_pieces`. at_mask:
    whether who asks reads what a model that fills in masks says there; refused (`require_next`) where not."""
    if not at_mask or subject.mask is None:
        require_next(subject)
    return tuple(subject.answer_pieces(prompt, answer))


def require_next(subject: Subject) -> None:
    """Raise ConfigError for a model whose positions see later ones: the logits at its last token are of no
    answer."""
    if subject.mask is not None:
        raise ConfigError(
            f"expected a model that says what comes next, found {subject.name}, which fills in masks; of "
            "such models logit_lens and activation_patching are asked at the mask"
        )
    subject.config.require_next_token()


def named(subject: Subject, tokens: Any) -> list[str]:
    """Text of each token id, as it reads inside a sentence."""
    return [subject.tokenizer.decode_token(int(token)) for token in tokens]


def target_json(subject: Subject, target: str, pieces: tuple[int, ...]) -> dict[str, Any]:
    """The target and its tokens: what is called its logit is that of the first piece."""
    return {
        "target_token": target or None,
        "target_token_id": pieces[0] if pieces else None,
        "target_token_ids": list(pieces),
        "target_pieces": named(subject, pieces),
    }


def top_changed_json(subject: Subject, effect: Any, other: str = "other_prob") -> list[dict[str, Any]]:
    """The tokens changed most by one run, from its changed_id, changed_baseline, changed_other [rank]."""
    columns = (effect[name].values.tolist() for name in ("changed_id", "changed_baseline", "changed_other"))
    return [
        {
            "rank": rank,
            "token_id": token,
            "token": subject.tokenizer.decode_token(token),
            "baseline_prob": before,
            other: after,
            "abs_diff": abs(after - before),
        }
        for rank, (token, before, after) in enumerate(zip(*columns, strict=True), start=1)
    ]


def number(value: Any) -> float | None:
    """A number for JSON; None for one there is not (NaN)."""
    found = float(value)
    return None if math.isnan(found) else found


def word_id(subject: Subject, word: str) -> int:
    """The token of a word, with a space before it or else bare.

    Raises ConfigError for a word of several tokens: the probability of a piece is not that of the word.
    """
    pieces = []
    for text in (f" {word.strip()}", word.strip()):
        pieces = subject.tokenizer.encode(text, add_special=False).ids
        if len(pieces) == 1:
            return pieces[0]
    raise ConfigError(
        f"expected a word that is one token of {subject.name}, found {word!r}, which is "
        f"{' + '.join(map(repr, named(subject, pieces)))}; choose another word"
    )


def is_one_token(subject: Subject, word: str) -> bool:
    """Whether a word is a single token, with a space before it or bare."""
    texts = (f" {word.strip()}", word.strip())
    return any(len(subject.tokenizer.encode(text, add_special=False).ids) == 1 for text in texts)


def _alike(one: str, other: str) -> int:
    """Characters two prompts share at their beginning and at their end."""
    return _shared(one, other) + _shared(one[::-1], other[::-1])


def _shared(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
