"""Counterparts of TransformerLens' `test_prompt` (utils.py) and `tokens_to_residual_directions`
(HookedTransformer.py): how likely an answer is after a prompt, and unembedding directions of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...pipeline.ambient import plain_torch
from ...store.errors import PromptError
from ..forward.text.rows import one_row
from .lens import format_probability, format_text

if TYPE_CHECKING:
    from torch import Tensor

    from ..forward.models.model import Model

__all__ = ["AnswerToken", "Likely", "PromptTest", "test_prompt", "tokens_to_residual_directions"]


@dataclass(frozen=True)
class Likely:
    """A token with its logit and probability at one position."""

    token: str
    """Text of the token."""
    token_id: int
    """Index in the vocabulary."""
    logit: float
    """Logit, after a soft cap."""
    probability: float
    """Probability, 0 to 1."""


@dataclass(frozen=True)
class AnswerToken:
    """A token of an answer with its rank, logit and probability at its position, and the likeliest tokens
    there."""

    token: str
    """Text of the token."""
    token_id: int
    """Index in the vocabulary."""
    rank: int
    """Rank among all tokens, 0 for the most likely."""
    logit: float
    """Logit, after a soft cap."""
    probability: float
    """Probability, 0 to 1."""
    top: tuple[Likely, ...]
    """Most likely tokens at this position, in descending order."""


@dataclass(frozen=True)
class PromptTest:
    """Probabilities of answers after a prompt."""

    prompt: str
    """Text of the prompt."""
    prompt_tokens: tuple[str, ...]
    """Text of each token of the prompt, special tokens included."""
    answers: tuple[str, ...]
    """The answers as they were passed."""
    tokens: tuple[AnswerToken, ...]
    """All tokens of a single answer, or the first token of each of several answers."""

    @property
    def ranks(self) -> list[tuple[str, int]]:
        """(token, rank) for each of `tokens`; ranks count from 0."""
        return [(token.token, token.rank) for token in self.tokens]

    def to_json(self) -> dict[str, Any]:
        """Fields by name; nested records as dicts."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"prompt: {format_text(self.prompt)} ({len(self.prompt_tokens)} tokens)"]
        for answer in self.tokens:
            score = f"rank {answer.rank}, logit {answer.logit:.2f}, {format_probability(answer.probability)}"
            lines.append(f"answer {answer.token!r}: {score}")
            lines += [
                f"  {i}: {format_probability(likely.probability)} {likely.logit:.2f} {likely.token!r}"
                for i, likely in enumerate(answer.top)
            ]
        return "\n".join(lines)


@plain_torch()
def test_prompt(
    model: Model,
    prompt: str | Sequence[int],
    answer: str | Sequence[str],
    *,
    prepend_space: bool = True,  # noqa: PT028 - no test of ours: the name is TransformerLens's
    top_k: int = 10,  # noqa: PT028
) -> PromptTest:
    """Rank, logit and probability of an answer's tokens after a prompt, and the most likely alternatives.

    Arguments:
        model: The model.
        prompt: One prompt, see `Model.tokenize`.
        answer: A text, of which every token is scored given the ones before; or several texts, of which the
            first token is scored.
        prepend_space: Whether to add a space before an answer that has none.
        top_k: Number of alternatives per position.

    Raises:
        PromptError: An answer has no token.
    """
    answers = (answer,) if isinstance(answer, str) else tuple(answer)
    if not answers:
        raise PromptError("test_prompt needs an answer, found none; pass a text, or a list of texts")
    row = one_row(prompt)
    (prompt_ids,) = model.tokenize(row)
    text = row if isinstance(row, str) else model.tokenizer.decode(row)
    answer_ids = [_answer_ids(model, text_of_answer, prepend_space) for text_of_answer in answers]
    last_prompt_position = len(prompt_ids) - 1
    if len(answer_ids) == 1:
        # The model reads the answer's tokens except the last, to predict each token from those before.
        scored_ids = answer_ids[0]
        answer_context = scored_ids[:-1]
        positions: Sequence[int] = range(last_prompt_position, last_prompt_position + len(scored_ids))
    else:
        # Several answers are alternatives for the same position, so none of them is read.
        scored_ids, answer_context = [ids[0] for ids in answer_ids], []
        positions = [last_prompt_position] * len(scored_ids)
    # float64: probabilities of a vocabulary are summed, and ranks compare nearly equal logits.
    logits = model.forward([*prompt_ids, *answer_context]).logits[0].double()
    tokens = tuple(
        _scored_token(model, logits[position].cpu().numpy(), token, top_k)
        for position, token in zip(positions, scored_ids, strict=True)
    )
    prompt_tokens = tuple(model.tokenizer.decode_token(token) for token in prompt_ids)
    return PromptTest(text, prompt_tokens, answers, tokens)


@plain_torch()
def tokens_to_residual_directions(model: Model, tokens: str | int | Sequence[Any] | Tensor) -> Tensor:
    """Rows of the unembedding: the directions along which the LM head reads tokens from the residual stream.

    The weight of the final norm is not folded in.

    Arguments:
        model: The model.
        tokens: A text of exactly one token, a token id, several of either, or a tensor of ids of any shape.

    Returns:
        Tensor [..., hidden].

    Raises:
        PromptError: A text has several tokens, or an id is out of range.
    """
    import torch

    model.config.require_linear_head()
    if isinstance(tokens, str | int):
        ids = torch.tensor(_single_token_id(model, tokens))
    elif isinstance(tokens, torch.Tensor):
        ids = tokens.long()
    else:
        ids = torch.tensor([_single_token_id(model, item) for item in tokens])
    size = model.config.vocab_size
    outside = ids[(ids < 0) | (ids >= size)]
    if len(outside):
        raise PromptError(
            f"expected token ids in 0..{size - 1}, as the vocabulary has {size} tokens, found "
            f"{int(outside[0])}"
        )
    return model.network.unembedding[ids.to(model.device)]


def _single_token_id(model: Model, token: str | int) -> int:
    """Token id of a text that is exactly one token; an id is returned unchanged."""
    if not isinstance(token, str):
        return int(token)
    ids = model.tokenizer.encode(token, add_special=False).ids
    if len(ids) != 1:
        raise PromptError(
            f"expected a text of one token, found {token!r}, which has {len(ids)}; pass the token ids instead"
        )
    return int(ids[0])


def _answer_ids(model: Model, answer: str, prepend_space: bool) -> list[int]:
    """Token ids of an answer, without special tokens; PromptError if it has none."""
    # Most tokenizers have one token for " Paris" within a text, and another for "Paris" at its start.
    text = f" {answer}" if prepend_space and not answer.startswith(" ") else answer
    ids = model.tokenizer.encode(text, add_special=False).ids
    if not answer or not ids:
        raise PromptError(f"expected an answer of at least one token, found {answer!r}")
    return list(ids)


def _scored_token(model: Model, logits: Any, token: int, top_k: int) -> AnswerToken:
    """Score a token at one position; among equal logits the smaller token id ranks first.

    Arguments:
        model: The model, whose tokenizer decodes tokens.
        logits: Logits at the position, [vocab].
        token: Token id to score.
        top_k: Number of most likely tokens to list.
    """
    # logaddexp is stable for large logits.
    probabilities = np.exp(logits - np.logaddexp.reduce(logits))
    # Stable, so that equal logits are ranked by token id on every machine.
    order = np.argsort(-logits, kind="stable")

    def likely(token_id: int) -> Likely:
        return Likely(
            model.tokenizer.decode_token(token_id),
            token_id,
            float(logits[token_id]),
            float(probabilities[token_id]),
        )

    target, rank = likely(token), int(np.flatnonzero(order == token)[0])
    top = tuple(likely(int(token_id)) for token_id in order[:top_k])
    return AnswerToken(target.token, token, rank, target.logit, target.probability, top)
