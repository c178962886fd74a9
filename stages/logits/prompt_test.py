"""What a model makes of a prompt and the answer that should follow; directions that stand for tokens.

As TransformerLens has them: `test_prompt` (utils.py) and `tokens_to_residual_directions`
(HookedTransformer.py).

Border: a model, texts and token ids in, plain values out; stores nothing.
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
    """A token, its logit and its probability at one position."""

    token: str
    token_id: int
    logit: float
    probability: float


@dataclass(frozen=True)
class AnswerToken:
    """A token of an answer: its rank among all, counted from 0, where it should come, and what is likely
    there, the likeliest first."""

    token: str
    token_id: int
    rank: int
    logit: float
    probability: float
    top: tuple[Likely, ...]


@dataclass(frozen=True)
class PromptTest:
    """How likely answers are behind a prompt.

    tokens: of one answer, every token in turn; of several answers, the first of each.
    """

    prompt: str
    prompt_tokens: tuple[str, ...]
    answers: tuple[str, ...]
    tokens: tuple[AnswerToken, ...]

    @property
    def ranks(self) -> list[tuple[str, int]]:
        """(token, rank) of each, ranks from 0, in the order of `tokens`."""
        return [(each.token, each.rank) for each in self.tokens]

    def to_json(self) -> dict[str, Any]:
        """The fields by name, tokens and what is likely there as dicts."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"prompt: {format_text(self.prompt)} ({len(self.prompt_tokens)} tokens)"]
        for each in self.tokens:
            told = f"rank {each.rank}, logit {each.logit:.2f}, {format_probability(each.probability)}"
            lines.append(f"answer {each.token!r}: {told}")
            lines += [
                f"  {i}: {format_probability(one.probability)} {one.logit:.2f} {one.token!r}"
                for i, one in enumerate(each.top)
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
    """Rank, logit and probability of the answer's tokens behind a prompt, and the likeliest in their place.

    prompt: as for `Model.tokenize`, one. answer: every token of it, each behind the ones before; of several
    answers, the first token of each. prepend_space: set answers off that begin with none. Raises PromptError
    for an answer of no token.
    """
    answers = (answer,) if isinstance(answer, str) else tuple(answer)
    if not answers:
        raise PromptError("expected an answer, found none; give a text, or several")
    row = one_row(prompt)
    (given,) = model.tokenize(row)
    text = row if isinstance(row, str) else model.tokenizer.decode(row)
    rows = [_ids(model, each, prepend_space) for each in answers]
    # All but the last token of an answer are read too; of several answers nothing is.
    read = rows[0][:-1] if len(rows) == 1 else []
    expected = rows[0] if len(rows) == 1 else [row[0] for row in rows]
    logits = model.forward([*given, *read]).logits[0].double()
    places = range(len(given) - 1, len(given) + len(read)) if len(rows) == 1 else [len(given) - 1] * len(rows)
    tokens = tuple(
        _answered(model, logits[place].cpu().numpy(), token, top_k)
        for place, token in zip(places, expected, strict=True)
    )
    named = tuple(model.tokenizer.decode_token(token) for token in given)
    return PromptTest(text, named, answers, tokens)


@plain_torch()
def tokens_to_residual_directions(model: Model, tokens: str | int | Sequence[Any] | Tensor) -> Tensor:
    """The directions in the residual stream that the LM head reads tokens along: rows of the unembedding.

    tokens: a text of exactly one token, a token id, several of either, or ids in a tensor of any shape.
    Returns [..., hidden]. The weight of the final norm is not folded in. Raises PromptError for a text of
    several tokens, or an id out of range.
    """
    import torch

    model.config.require_linear_head()
    if isinstance(tokens, str | int):
        ids = torch.tensor(_single(model, tokens))
    elif isinstance(tokens, torch.Tensor):
        ids = tokens.long()
    else:
        ids = torch.tensor([_single(model, each) for each in tokens])
    size = model.config.vocab_size
    outside = ids[(ids < 0) | (ids >= size)]
    if len(outside):
        raise PromptError(f"expected token ids in 0..{size - 1}, found {int(outside[0])}")
    return model.network.unembedding[ids.to(model.device)]


def _single(model: Model, token: str | int) -> int:
    if not isinstance(token, str):
        return int(token)
    ids = model.tokenizer.encode(token, add_special=False).ids
    if len(ids) != 1:
        raise PromptError(f"expected a text of one token, found {token!r} with {len(ids)}; give its ids")
    return int(ids[0])


def _ids(model: Model, answer: str, prepend_space: bool) -> list[int]:
    text = f" {answer}" if prepend_space and not answer.startswith(" ") else answer
    ids = model.tokenizer.encode(text, add_special=False).ids
    if not answer or not ids:
        raise PromptError(f"expected an answer of at least one token, found {answer!r}")
    return list(ids)


def _answered(model: Model, logits: Any, token: int, top_k: int) -> AnswerToken:
    """One token among the logits [vocab] at its place; of equals the smaller ids come first."""
    chances = np.exp(logits - np.logaddexp.reduce(logits))
    order = np.argsort(-logits, kind="stable")

    def likely(one: int) -> Likely:
        return Likely(model.tokenizer.decode_token(one), one, float(logits[one]), float(chances[one]))

    own, rank = likely(token), int(np.flatnonzero(order == token)[0])
    top = tuple(likely(int(one)) for one in order[:top_k])
    return AnswerToken(own.token, token, rank, own.logit, own.probability, top)
