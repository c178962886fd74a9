"""Prompts as token ids a model can read, in lists or packed end to end. What values are prompts is told in
rows.py. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ....store.errors import ConfigError, PromptError, TokenizerError
from ....store.runs.packed import PackedTokens
from ..architectures.architecture import Architecture
from .rows import as_rows, is_nothing, one_row
from .world import WORLD

if TYPE_CHECKING:
    from .tokens import Encoding, Tokenizer


def tokenize(prompts: Any, tokenizer: Tokenizer | None, config: Architecture, model: str) -> list[list[int]]:
    """Token ids of prompts, one list each, as given or as the tokenizer encodes them (with its BOS rule).

    Arguments:
        prompts: as for `as_rows`.
        tokenizer: of the model; None where it has none.
        config: what says which ids and lengths the model reads.
        model: its name, for errors.

    Raises:
        PromptError: as `as_rows` and `check_prompts`.
        TokenizerError: texts without a tokenizer.
    """
    rows = [_encoding(row, tokenizer, model).ids if isinstance(row, str) else row for row in as_rows(prompts)]
    ids = as_pairs(rows, config, model)
    check_prompts(ids, config.known_ids, config.context_length, model, config.unknown_token)
    return ids


def _encoding(text: str, tokenizer: Tokenizer | None, model: str, *, add_special: bool = True) -> Encoding:
    if tokenizer is None:
        raise no_tokenizer(model)
    return tokenizer.encode(text, add_special=add_special)


def pack(prompts: Any, tokenizer: Tokenizer | None, config: Architecture, model: str) -> PackedTokens:
    """Prompts as token ids end to end, texts with their character offsets.

    Raises PromptError for an empty prompt, also one to which the tokenizer adds a BOS, an id out of range, a
    prompt longer than the context; TokenizerError for texts without a tokenizer.
    """
    if isinstance(prompts, PackedTokens):
        if config.target_start is not None:
            as_pairs(list(prompts), config, model, given=True)
        _check_packed(prompts, config.known_ids, config.context_length, model, config.unknown_token)
        return prompts
    rows = as_rows(prompts)
    texts = [row for row in rows if isinstance(row, str)]
    if not texts:
        return PackedTokens.from_lists(tokenize(rows, tokenizer, config, model))
    if tokenizer is None:
        raise no_tokenizer(model)
    encodings = [with_target(encoding, config) for encoding in tokenizer.encode_batch(texts)]
    as_pairs([found.ids for found in encodings], config, model)
    check_prompts(
        [encoding.ids for encoding in encodings],
        config.known_ids,
        config.context_length,
        model,
        config.unknown_token,
    )
    return pack_encodings(encodings)


def with_target(found: Encoding, config: Architecture) -> Encoding:
    """A text as the source of a pair whose target is its start alone; as it is where prompts are no pairs."""
    start = config.target_start
    if start is None:
        return found
    spans = None if found.byte_spans is None else [*found.byte_spans, (0, 0)]
    return replace(
        found,
        ids=[*found.ids, start],
        tokens=[*found.tokens, ""],
        offsets=[*found.offsets, (0, 0)],
        special=[*found.special, True],
        byte_spans=spans,
    )


def pair_ids(
    source: str | Sequence[int],
    target: str | Sequence[int],
    tokenizer: Tokenizer | None,
    config: Architecture,
    model: str,
) -> list[int]:
    """Token ids of a source and what its target goes on with behind its start, see `Model.pair`; whether they
    are a prompt of the model is not looked at."""
    start = config.target_start
    if start is None:
        raise ConfigError(
            f"expected a model with an encoder and a decoder to read pairs, found {model}, which reads one "
            "sequence; join the two texts"
        )

    row = one_row(source, "source")
    before = _encoding(row, tokenizer, model).ids if isinstance(row, str) else row
    behind: list[int] = []
    # Nothing behind the start is a target, too: that of a decoder which has written nothing yet.
    if not is_nothing(target):
        row = one_row(target, "target")
        behind = _encoding(row, tokenizer, model, add_special=False).ids if isinstance(row, str) else row
    return [*before, start, *behind]


def as_pairs(rows: Sequence[Any], config: Architecture, model: str, *, given: bool = False) -> list[Any]:
    """Prompts as pairs where the model reads pairs: a source without a target gets the start of one; as they
    are where it does not. given: whether nothing can be added to them.

    Raises PromptError for two targets, a pair without source, or a side longer than the model has positions.
    """
    start = config.target_start
    return list(rows) if start is None else [_as_pair(row, start, config, model, given=given) for row in rows]


def _as_pair(row: Any, start: int, config: Architecture, model: str, *, given: bool) -> list[int]:
    ids = [int(token) for token in row]
    begins = [place for place, token in enumerate(ids) if token >= config.vocab_size]
    if not begins and not given:
        begins, ids = [len(ids)], [*ids, start]
    if len(begins) != 1 or begins[0] == 0:
        raise PromptError(
            f"expected a source and one target in each prompt of {model}, found targets that begin at "
            f"{begins}; make prompts by model.pair(source, target)"
        )
    longest, most = max(begins[0], len(ids) - begins[0]), config.side_length
    if most is not None and longest > most:
        raise PromptError(
            f"{model} reads at most {most} positions of a source or a target, found {longest}; shorten it"
        )
    return ids


def pack_encodings(encodings: Sequence[Encoding]) -> PackedTokens:
    """Texts as token ids end to end, with their character offsets.

    Raises PromptError for a text without a token of its own: what would be stored under it is that of a BOS.
    """
    for number, encoding in enumerate(encodings):
        if all(encoding.special):
            added = f"only the {len(encoding)} that the tokenizer adds" if encoding.ids else "none"
            raise PromptError(
                f"expected prompt {number} to have a token of its own, found {added} in {encoding.text!r}; "
                "leave it out, or give token ids to read a BOS alone"
            )
    return PackedTokens.from_lists(
        [e.ids for e in encodings], texts=[e.text for e in encodings], offsets=[e.offsets for e in encodings]
    )


def check_prompts(
    rows: Sequence[Any], vocab_size: int, context: int, model: str, unknown: int | None = None
) -> None:
    """Raise PromptError naming the first prompt that is empty, out of range or too long, or holds a token
    that is unknown to the model (`Architecture.unknown_token`)."""
    if not rows:
        raise PromptError("expected at least one prompt, found none")
    for number, ids in enumerate(rows):
        where = f"prompt {number}" if len(rows) > 1 else "the prompt"
        if len(ids) == 0:
            raise PromptError(f"expected at least one token, found {where} empty")
        if len(ids) > context:
            raise PromptError(
                f"{model} reads at most {context} positions, found {len(ids)} in {where}; shorten or split it"
            )
        low, high = min(ids), max(ids)
        if low < 0 or high >= vocab_size:
            raise PromptError(
                f"expected token ids in 0..{vocab_size - 1}, found {low if low < 0 else high} in {where}; "
                "was it encoded with another tokenizer?"
            )
        if unknown is not None and unknown in ids:
            raise PromptError(
                f"expected no padding in {where}, found token {unknown}, which has no position in {model}; "
                "leave it out: prompts are never padded here"
            )


def _check_packed(
    tokens: PackedTokens, vocab_size: int, context: int, model: str, unknown: int | None
) -> None:
    """As `check_prompts`, without a look at each prompt unless one of them is wrong."""
    is_wrong = tokens.row_size.max() > context or tokens.largest >= vocab_size
    if is_wrong or (unknown is not None and tokens.holds(unknown)):
        check_prompts(list(tokens), vocab_size, context, model, unknown)


def no_tokenizer(model: str) -> TokenizerError:
    """What to say when a model without tokenizer is given text."""
    return TokenizerError(
        f"expected a tokenizer.json, or an {WORLD}, beside the weights of {model} to read text, found "
        "neither; add the file, or pass token ids"
    )
