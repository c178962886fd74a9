"""The logits a graph explains: the likeliest next tokens, given ones, or directions of one's own.

Border: `choose` is planning and imports no torch; `Choice.resolve` meets the model's logits and unembedding.

As in circuit-tracer: a token's target is its unembedding row minus the mean row over the vocabulary, which
reads the normalised last residual stream, before any soft cap; its weight is its probability after the cap.
Directions of one's own are taken as they are, with their own weights, and get ids from the number of logits
on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ....store.arrays import as_count, as_list, as_number
from ....store.digest import LARGEST, array_digest
from ....store.errors import PromptError, ShapeError, TokenizerError
from ...forward.text.rows import one_row

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ...forward.text.tokens import Tokenizer

__all__ = ["TargetChoice", "Direction", "Targets", "choose", "prompt_text", "prompt_tokens", "token_text"]

_ROLES = ("bos_token", "pad_token", "eos_token", "unk_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, eq=False)
class Direction:
    """A target of one's own: what reads the normalised last stream, float32 [hidden], and its weight."""

    label: str
    weight: float
    vector: npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Targets:
    """Logit nodes: ids int64 [logit], labels, weights float64 [logit], vectors [logit, hidden]."""

    ids: Tensor
    labels: tuple[str, ...]
    weights: Tensor
    vectors: Tensor


@dataclass(frozen=True, eq=False)
class TargetChoice:
    """Which logits: `tokens`, or `directions`, or else at most `most` of the likeliest tokens, as many as
    reach `probability` together."""

    tokens: tuple[int, ...] = ()
    directions: tuple[Direction, ...] = ()
    most: int = 10
    probability: float = 0.95

    def canonical(self) -> dict[str, Any]:
        """Plain values for a key."""
        if self.tokens:
            return {"tokens": list(self.tokens)}
        if self.directions:
            told = [(d.label, d.weight, array_digest(d.vector)) for d in self.directions]
            return {"directions": [list(each) for each in told]}
        return {"most": self.most, "probability": self.probability}

    def resolve(
        self, logits: Tensor, unembed: Tensor, tokenizer: Tokenizer | None, dtype: torch.dtype
    ) -> Targets:
        """The targets of a prompt with these logits [vocab], by an unembedding [vocab, hidden]."""
        import torch

        if self.directions:
            first = len(logits)
            return Targets(
                torch.arange(first, first + len(self.directions)),
                tuple(each.label for each in self.directions),
                torch.tensor([each.weight for each in self.directions], dtype=torch.float64),
                torch.stack([torch.from_numpy(each.vector) for each in self.directions]).to(
                    unembed.device, dtype
                ),
            )
        shares = logits.double().softmax(-1).cpu()
        if self.tokens:
            ids = torch.tensor(self.tokens)
        else:
            ranked, order = shares.sort(descending=True, stable=True)
            reached = int(torch.searchsorted(ranked[: self.most].cumsum(0), self.probability))
            ids = order[: min(reached + 1, self.most)]
        place = ids.to(unembed.device)
        vectors = unembed[place].to(dtype) - unembed.mean(0, dtype=dtype)
        labels = tuple(token_text(int(i), tokenizer) for i in ids)
        return Targets(ids, labels, shares[ids], vectors)


def choose(
    given: Any,
    *,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    hidden_size: int,
    most: int = 10,
    probability: float = 0.95,
) -> TargetChoice:
    """A choice from None, token ids, strings of one token each, or (label, weight, vector) triples.

    Raises PromptError for ids out of range and an empty list, TokenizerError for strings that are not one
    token, ShapeError for vectors of another width.
    """
    most, probability = (
        as_count(most, "max_n_logits", least=-LARGEST, error=PromptError),
        as_number(probability, "desired_logit_prob", PromptError),
    )
    if most < 1 or not 0 < probability <= 1:
        raise PromptError(
            f"expected max_n_logits of 1 or more and desired_logit_prob in (0, 1], found {most} and "
            f"{probability}"
        )
    if given is None:
        return TargetChoice(most=most, probability=probability)
    items = as_list(given)
    if not items:
        raise PromptError(
            "expected at least one target, found none; leave targets out for the likeliest tokens"
        )
    if all(isinstance(item, str) for item in items):
        return TargetChoice(tokens=tuple(_one_token(item, tokenizer) for item in items))
    if all(isinstance(item, int) for item in items):
        outside = [item for item in items if not 0 <= item < vocab_size]
        if outside:
            raise PromptError(f"expected target ids in 0..{vocab_size - 1}, found {outside[0]}")
        return TargetChoice(tokens=tuple(items))
    return TargetChoice(directions=tuple(_direction(item, hidden_size) for item in items))


def prompt_tokens(prompt: Any, tokenizer: Tokenizer | None) -> list[int]:
    """Ids of a prompt, with a special token first: the position whose activations are out of all proportion,
    and which has no features in a graph.

    A text that does not begin with a special token gets BOS in front, or the first of pad, EOS and others
    that the tokenizer names. Ids are taken as they are. Raises PromptError for several prompts.
    """
    row = one_row(prompt)
    if not isinstance(row, str):
        return row
    if tokenizer is None:
        raise TokenizerError("expected token ids for a model without a tokenizer, found text")
    special = [i for role in _ROLES if (i := tokenizer.special_id(role)) is not None]
    ids = tokenizer.encode_raw(row).ids
    return ids if not special or (ids[:1] and ids[0] in special) else [special[0], *ids]


def prompt_text(tokens: Sequence[int], tokenizer: Tokenizer | None) -> str:
    """A prompt decoded, special tokens included; ids without a token are left out."""
    if tokenizer is None:
        return ""
    return tokenizer.decode([token for token in tokens if tokenizer.decode_token(token)])


def token_text(token: int, tokenizer: Tokenizer | None) -> str:
    """A token decoded by itself, as circuit-tracer shows it; "" where there is no text for it."""
    if tokenizer is None or not tokenizer.decode_token(token):
        return ""
    return tokenizer.decode([token])


def _one_token(text: str, tokenizer: Tokenizer | None) -> int:
    if tokenizer is None:
        raise TokenizerError(f"expected token ids as targets of a model without a tokenizer, found {text!r}")
    ids = tokenizer.encode_raw(text).ids
    if len(ids) != 1:
        raise TokenizerError(
            f"expected target {text!r} to be one token of {tokenizer.name}, found {len(ids)} "
            f"({tokenizer.pieces(ids)}); spaces count, ' word' is another token than 'word'"
        )
    return ids[0]


def _direction(item: Any, hidden_size: int) -> Direction:
    if not isinstance(item, Sequence) or len(item) != 3 or not isinstance(item[0], str):
        raise PromptError(
            f"expected targets as ids, strings, or (label, weight, vector) triples, found {item!r}"
        )
    label, weight, vector = item
    values = (
        vector.detach().cpu().float().numpy() if hasattr(vector, "detach") else np.asarray(vector, np.float32)
    )
    if values.shape != (hidden_size,) or not np.isfinite(values).all():
        raise ShapeError(
            f"expected the direction of target {label!r} as {hidden_size} finite numbers, found shape "
            f"{list(values.shape)}"
        )
    return Direction(label, float(weight), np.array(values, np.float32))  # a copy: its digest is in a key
