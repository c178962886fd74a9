"""The logits that a graph explains: the likeliest next tokens, given tokens, or custom directions.

As in circuit-tracer: the vector of a token is its unembedding row minus the mean row over the vocabulary. It
reads the normalised final residual stream, before any soft cap; its weight is the token's probability after
the cap. Custom directions are used unchanged, with their own weights, and get ids from the vocabulary size
on.

`choose` imports no torch, for planning; `TargetChoice.resolve` needs the logits and unembedding of the model.
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

# As circuit-tracer: BOS, pad, EOS, then the other special tokens.
_ROLES = ("bos_token", "pad_token", "eos_token", "unk_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, eq=False)
class Direction:
    """A custom direction that a graph explains in place of a token's logit."""

    label: str
    """Name of the direction."""
    weight: float
    """Weight of the direction among the targets, in place of a probability."""
    vector: npt.NDArray[np.float32]
    """Vector that reads the normalised final residual stream, float32 [hidden]."""


@dataclass(frozen=True, eq=False)
class Targets:
    """The logit nodes of a graph, with the vectors that read them."""

    ids: Tensor
    """Token ids, int64 [logit]; from the vocabulary size on for custom directions."""
    labels: tuple[str, ...]
    """Text of each token, or label of each direction."""
    weights: Tensor
    """Probability of each token, or weight of each direction, float64 [logit]."""
    vectors: Tensor
    """Vectors that read the normalised final residual stream, [logit, hidden]."""


@dataclass(frozen=True, eq=False)
class TargetChoice:
    """Which logits a graph explains: `tokens`, `directions`, or if both are empty the most likely tokens."""

    tokens: tuple[int, ...] = ()
    """Ids of the tokens whose logits are explained; empty for the most likely ones."""
    directions: tuple[Direction, ...] = ()
    """Custom directions that are explained in place of tokens."""
    most: int = 10
    """Largest number of tokens, if the most likely ones are explained."""
    probability: float = 0.95
    """Total probability at which no further most likely token is added."""

    def canonical(self) -> dict[str, Any]:
        """The choice as JSON values, which enter the key of the graph."""
        if self.tokens:
            return {"tokens": list(self.tokens)}
        if self.directions:
            directions = [[d.label, d.weight, array_digest(d.vector)] for d in self.directions]
            return {"directions": directions}
        return {"most": self.most, "probability": self.probability}

    def resolve(
        self, logits: Tensor, unembed: Tensor, tokenizer: Tokenizer | None, dtype: torch.dtype
    ) -> Targets:
        """The logit nodes for a prompt, given its logits.

        Arguments:
            logits: Logits of the prompt's last position [vocab].
            unembed: Unembedding matrix [vocab, hidden].
            tokenizer: Tokenizer that decodes the labels; None for empty labels.
            dtype: dtype of the vectors.
        """
        import torch

        if self.directions:
            first_id = len(logits)
            vectors = torch.stack([torch.from_numpy(direction.vector) for direction in self.directions])
            return Targets(
                torch.arange(first_id, first_id + len(self.directions)),
                tuple(direction.label for direction in self.directions),
                torch.tensor([direction.weight for direction in self.directions], dtype=torch.float64),
                vectors.to(unembed.device, dtype),
            )
        probabilities = logits.double().softmax(-1).cpu()
        if self.tokens:
            ids = torch.tensor(self.tokens)
        else:
            # Stable: ties go to the lower id. The token that reaches the share belongs to the targets.
            ranked, order = probabilities.sort(descending=True, stable=True)
            reached = int(torch.searchsorted(ranked[: self.most].cumsum(0), self.probability))
            ids = order[: min(reached + 1, self.most)]
        place = ids.to(unembed.device)
        # Softmax ignores a common shift of logits; without the mean, edges would show it.
        vectors = unembed[place].to(dtype) - unembed.mean(0, dtype=dtype)
        labels = tuple(token_text(int(i), tokenizer) for i in ids)
        return Targets(ids, labels, probabilities[ids], vectors)


def choose(
    given: Any,
    *,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    hidden_size: int,
    most: int = 10,
    probability: float = 0.95,
) -> TargetChoice:
    """Check the option `targets` of an attribution graph, and convert it.

    Arguments:
        given: None for the most likely tokens; token ids; strings of one token each; or triples of label,
            weight and vector.
        tokenizer: Tokenizer that encodes strings.
        vocab_size: Size of the vocabulary.
        hidden_size: Width of the residual stream.
        most: Largest number of most likely tokens.
        probability: Total probability that the most likely tokens reach, if `most` allows.

    Raises:
        PromptError: An id is out of range, the list is empty, or a number is invalid.
        TokenizerError: A string is not one token.
        ShapeError: A vector has another width than the residual stream.
    """
    # Only types are checked here; the ranges of both below, in one message.
    most, probability = (
        as_count(most, "max_n_logits", least=-LARGEST, error=PromptError),
        as_number(probability, "desired_logit_prob", PromptError),
    )
    if most < 1 or not 0 < probability <= 1:
        raise PromptError(
            "expected max_n_logits to be at least 1, and desired_logit_prob to be above 0 and at most 1, "
            f"found {most} and {probability}"
        )
    if given is None:
        return TargetChoice(most=most, probability=probability)
    items = as_list(given)
    if not items:
        raise PromptError(
            "expected at least one entry in targets, found none; leave targets out for the most likely tokens"
        )
    if all(isinstance(item, str) for item in items):
        return TargetChoice(tokens=tuple(_one_token(item, tokenizer) for item in items))
    # A list of ids; triples start with a text.
    if all(isinstance(item, int) for item in items):
        outside = [item for item in items if not 0 <= item < vocab_size]
        if outside:
            raise PromptError(f"expected token ids from 0 to {vocab_size - 1} as targets, found {outside[0]}")
        return TargetChoice(tokens=tuple(items))
    return TargetChoice(directions=tuple(_direction(item, hidden_size) for item in items))


def prompt_tokens(prompt: Any, tokenizer: Tokenizer | None) -> list[int]:
    """Token ids of a prompt that begins with a special token.

    The first position of a prompt has unusually large activations, and no features in a graph; so it should
    be a special token.

    Arguments:
        prompt: Text or token ids. A text that does not begin with a special token gets BOS, or else the first
            of pad, EOS and others that the tokenizer has. Token ids are used unchanged.
        tokenizer: Tokenizer of the model; None if it has none.

    Raises:
        PromptError: There are several prompts.
        TokenizerError: The prompt is a text, and the model has no tokenizer.
    """
    row = one_row(prompt)
    if not isinstance(row, str):
        return row
    if tokenizer is None:
        raise TokenizerError("expected token ids as prompt of a model without a tokenizer, found a text")
    special = [i for role in _ROLES if (i := tokenizer.special_id(role)) is not None]
    ids = tokenizer.encode_raw(row).ids
    return ids if not special or (ids[:1] and ids[0] in special) else [special[0], *ids]


def prompt_text(tokens: Sequence[int], tokenizer: Tokenizer | None) -> str:
    """Text of a prompt, including special tokens.

    Arguments:
        tokens: Token ids; ids that the tokenizer does not know are left out.
        tokenizer: Tokenizer of the model; None gives "".
    """
    if tokenizer is None:
        return ""
    # Embeddings padded to a round size have ids without a token.
    return tokenizer.decode([token for token in tokens if tokenizer.decode_token(token)])


def token_text(token: int, tokenizer: Tokenizer | None) -> str:
    """Text of a single token, as circuit-tracer shows it.

    Arguments:
        token: Token id; an unknown one gives "".
        tokenizer: Tokenizer of the model; None gives "".
    """
    if tokenizer is None or not tokenizer.decode_token(token):
        return ""
    return tokenizer.decode([token])


def _one_token(text: str, tokenizer: Tokenizer | None) -> int:
    """Token id of a text; TokenizerError for a text that is not exactly one token."""
    if tokenizer is None:
        raise TokenizerError(f"expected token ids as targets of a model without a tokenizer, found {text!r}")
    ids = tokenizer.encode_raw(text).ids
    if len(ids) != 1:
        raise TokenizerError(
            f"expected the target {text!r} to be one token of {tokenizer.name}, found {len(ids)} tokens "
            f"({tokenizer.pieces(ids)}); a leading space belongs to a token, so try {' ' + text.strip()!r}"
        )
    return ids[0]


def _direction(item: Any, hidden_size: int) -> Direction:
    """Custom direction from a (label, weight, vector) triple, after checking it."""
    if not isinstance(item, Sequence) or len(item) != 3 or not isinstance(item[0], str):
        raise PromptError(
            f"expected targets as token ids, strings, or (label, weight, vector) triples, found {item!r}"
        )
    label, weight, vector = item
    values = (
        vector.detach().cpu().float().numpy() if hasattr(vector, "detach") else np.asarray(vector, np.float32)
    )
    if values.shape != (hidden_size,) or not np.isfinite(values).all():
        raise ShapeError(
            f"expected the vector of the target {label!r} to be {hidden_size} finite numbers, the width of "
            f"the residual stream, found shape {list(values.shape)} or numbers that are infinite or NaN"
        )
    # A copy, as its digest is part of a key: the caller may change the array afterwards.
    return Direction(label, float(weight), np.array(values, np.float32))
