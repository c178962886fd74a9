"""Prompts and expected answers of workflows: defaults, and their tokens.

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
    "number",
    "require_next",
    "target_json",
    "top_changed_json",
    "word_id",
]

KNOWN = 2
"""Smallest number of known facts, among those for selection and among those for scoring, for a claim:
interventions also change the output of an untrained model, and one right answer may be luck."""
FIRST_KNOWN = {"specimen": 0, "specimen-guided": 0, "specimen-rwkv": 1, "specimen-experts": 0}
"""Index of the first shipped fact that each shipped model knows
(tests/specimen_training/test_specimen_training.py)."""
FRANCE = ("The capital of France is", "Paris")
"""Default prompt and answer for models that do not ship with mizarr, those of candle-mi."""
COUNTRIES = ("Germany", "Poland", "Brazil", "Russia", "Canada")
"""Countries that replace France in the default prompt to make a contrasting one."""


def fact(model: str, prompt: str, target: str) -> tuple[str, str]:
    """Prompt and target of a workflow: from the settings, or the model's defaults.

    Arguments:
        model: name of the model.
        prompt: prompt of the settings; empty for a default, which is the first shipped fact that a shipped
            model knows, or the capital of France for other models.
        target: target of the settings; may be empty.

    Raises:
        ConfigError: a target without a prompt.
    """
    if prompt:
        return prompt, target
    if target:
        raise ConfigError(f"expected a prompt for the target {target!r}, found none; set both or neither")
    if model not in SHIPPED:
        return FRANCE
    default = shipped_facts()[FIRST_KNOWN[model]]
    return default["prompt"], default["target"]


def counterpart(subject: Subject, model: str, prompt: str, target: str) -> str:
    """Contrasting prompt with as many tokens: about another country or, for shipped models, the shipped fact
    with another answer that shares most characters with the prompt at its beginning and end.

    Arguments:
        subject: the model.
        model: its name.
        prompt: the prompt.
        target: its answer.

    Raises:
        ConfigError: no such prompt is found.
    """
    length = len(subject.tokenizer.encode(prompt))
    if prompt == FRANCE[0]:
        candidates = [prompt.replace("France", country) for country in COUNTRIES]
    else:
        facts = shipped_facts() if model in SHIPPED else []
        prompts = [fact["prompt"] for fact in facts if fact["target"] != target]
        candidates = sorted(prompts, key=lambda candidate: -_alike(prompt, candidate))
    for candidate in candidates:
        if candidate != prompt and len(subject.tokenizer.encode(candidate)) == length:
            return candidate
    raise ConfigError(
        f"expected a contrasting prompt with as many tokens as {prompt!r} ({length}), found none among the "
        "default ones; name one: contrastive=…"
    )


def encoded(subject: Subject, prompt: str, *, chat: bool = False) -> Encoding:
    """Tokens of a prompt, checked against the vocabulary and the context length of the model.

    Arguments:
        subject: the model.
        prompt: the prompt.
        chat: whether the prompt is a user's message, to be put into the model's chat template.

    Raises:
        PromptError: the prompt is empty or too long for the model.
        TokenizerError: the model has no chat template.
    """
    tokenizer = subject.tokenizer
    # A chat template writes the special tokens itself; `encode` would add them once more.
    encoding = tokenizer.encode_raw(tokenizer.chat(prompt)) if chat else tokenizer.encode(prompt)
    config = subject.config
    check_prompts(
        [encoding.ids], config.vocab_size, config.context_length, subject.name, config.unknown_token
    )
    return encoding


def answer_pieces(subject: Subject, prompt: str, answer: str, *, at_mask: bool = False) -> tuple[int, ...]:
    """Token ids of an answer to a prompt (`Subject.answer_pieces`); empty for an empty answer.

    Arguments:
        subject: the model.
        prompt: the prompt.
        answer: the answer.
        at_mask: whether the workflow supports masked language models.

    Raises:
        ConfigError: the model predicts masks, and the workflow does not support that.
    """
    if not at_mask or subject.mask is None:
        require_next(subject)
    return tuple(subject.answer_pieces(prompt, answer))


def require_next(subject: Subject) -> None:
    """Raise ConfigError for a model that does not predict the next token: logits at its last token predict no
    answer."""
    if subject.mask is not None:
        raise ConfigError(
            f"expected a model that predicts the next token, found {subject.name}, which fills in masks; use "
            "logit_lens or activation_patching, which read such models at the mask"
        )
    subject.config.require_next_token()


def target_json(subject: Subject, target: str, pieces: tuple[int, ...]) -> dict[str, Any]:
    """JSON fields of a target and its tokens; the logit of the target is that of its first token.

    Arguments:
        subject: the model.
        target: the target as text.
        pieces: its token ids.
    """
    return {
        "target_token": target or None,
        "target_token_id": pieces[0] if pieces else None,
        "target_token_ids": list(pieces),
        "target_pieces": subject.token_texts(pieces),
    }


def top_changed_json(subject: Subject, effect: Any, other: str = "other_prob") -> list[dict[str, Any]]:
    """JSON records of the tokens whose probability changes most in one run, largest change first.

    Arguments:
        subject: the model, for the texts of tokens.
        effect: dataset with changed_id, changed_baseline and changed_other [rank].
        other: name of the field with the probability in the run.
    """
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
    """The value as a float for JSON; None for NaN."""
    converted = float(value)
    return None if math.isnan(converted) else converted


def word_id(subject: Subject, word: str) -> int:
    """Token id of a word that is a single token, preferably with a leading space.

    Arguments:
        subject: the model.
        word: the word.

    Raises:
        ConfigError: the word has several tokens; the probability of its first token is not that of the word.
    """
    # Within a text, a word and the space before it are usually another token than the word alone.
    pieces = []
    for text in (f" {word.strip()}", word.strip()):
        pieces = subject.tokenizer.encode(text, add_special=False).ids
        if len(pieces) == 1:
            return pieces[0]
    raise ConfigError(
        f"expected a word that is one token of {subject.name}, found {word!r}, which is "
        f"{' + '.join(map(repr, subject.token_texts(pieces)))}; choose another word"
    )


def is_one_token(subject: Subject, word: str) -> bool:
    """Whether the tokenizer encodes a word as a single token, with or without a leading space.

    Arguments:
        subject: the model.
        word: the word.
    """
    texts = (f" {word.strip()}", word.strip())
    # Special tokens such as BOS are no part of the word.
    return any(len(subject.tokenizer.encode(text, add_special=False).ids) == 1 for text in texts)


def _alike(a: str, b: str) -> int:
    """Number of characters that two prompts share at their beginning and at their end, together."""
    return _shared_prefix(a, b) + _shared_prefix(a[::-1], b[::-1])


def _shared_prefix(a: str, b: str) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (char_a, char_b) in pairs if char_a != char_b), min(len(a), len(b)))
