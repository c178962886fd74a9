"""Prompts as token ids, in lists or packed end to end; rows.py says which values are prompts. Torch-free."""

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
    """Token ids of prompts, one list each; the tokenizer adds BOS to texts where its model expects it.

    Arguments:
        prompts: texts, token ids or a tokenizer's output, in any form that `as_rows` accepts.
        tokenizer: tokenizer of the model; None where it has none.
        config: architecture of the model, which knows vocabulary and context.
        model: name of the model, for messages.

    Raises:
        PromptError: for prompts of another form, and for a prompt that is empty, too long for the model or
            has an id out of range.
        TokenizerError: for texts without a tokenizer.
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
    """Concatenate the token ids of prompts into one array; texts are kept with their character offsets.

    Arguments:
        prompts: texts, token ids or a tokenizer's output, in any form that `as_rows` accepts; or
            `PackedTokens`, which are checked and returned.
        tokenizer: tokenizer of the model; None where it has none.
        config: architecture of the model.
        model: name of the model, for messages.

    Raises:
        PromptError: for an empty prompt (also one that is only a BOS), an id out of range, or a prompt longer
            than the context.
        TokenizerError: for texts without a tokenizer.
    """
    if isinstance(prompts, PackedTokens):
        # Packed ids are final (`fixed`): nothing may be added to a run that may be stored already.
        if config.target_start is not None:
            as_pairs(list(prompts), config, model, fixed=True)
        _check_packed(prompts, config.known_ids, config.context_length, model, config.unknown_token)
        return prompts
    rows = as_rows(prompts)
    texts = [row for row in rows if isinstance(row, str)]
    if not texts:
        return PackedTokens.from_lists(tokenize(rows, tokenizer, config, model))
    if tokenizer is None:
        raise no_tokenizer(model)
    # In one call: the `tokenizers` library encodes a batch on all cores.
    encodings = [with_target(encoding, config) for encoding in tokenizer.encode_batch(texts)]
    as_pairs([encoding.ids for encoding in encodings], config, model)
    check_prompts(
        [encoding.ids for encoding in encodings],
        config.known_ids,
        config.context_length,
        model,
        config.unknown_token,
    )
    return pack_encodings(encodings)


def with_target(encoding: Encoding, config: Architecture) -> Encoding:
    """For an encoder-decoder, append the decoder's start token to an encoded source text.

    Arguments:
        encoding: the encoded source.
        config: architecture of the model.

    Returns:
        The encoding with the start token; the encoding itself for a model that reads one sequence.
    """
    start = config.target_start
    if start is None:
        return encoding
    spans = None if encoding.byte_spans is None else [*encoding.byte_spans, (0, 0)]
    return replace(
        encoding,
        ids=[*encoding.ids, start],
        tokens=[*encoding.tokens, ""],
        offsets=[*encoding.offsets, (0, 0)],
        special=[*encoding.special, True],
        byte_spans=spans,
    )


def pair_ids(
    source: str | Sequence[int],
    target: str | Sequence[int],
    tokenizer: Tokenizer | None,
    config: Architecture,
    model: str,
) -> list[int]:
    """Token ids of a source, the decoder's start token, and a target, for an encoder-decoder model.

    Arguments:
        source: text or token ids for the encoder.
        target: text or token ids that the decoder continues; may be empty.
        tokenizer: tokenizer of the model; None where it has none.
        config: architecture of the model.
        model: name of the model, for messages.

    Raises:
        ConfigError: for a model that reads one sequence.
    """
    start = config.target_start
    if start is None:
        raise ConfigError(
            f"model.pair: expected an encoder-decoder model, found {model}, which reads one sequence; join "
            "the two texts into one prompt"
        )
    row = one_row(source, "source")
    source_ids = _encoding(row, tokenizer, model).ids if isinstance(row, str) else row
    target_ids: list[int] = []
    # An empty target is valid: the decoder then has only its start token.
    if not is_nothing(target):
        row = one_row(target, "target")
        target_ids = _encoding(row, tokenizer, model, add_special=False).ids if isinstance(row, str) else row
    return [*source_ids, start, *target_ids]


def as_pairs(rows: Sequence[Any], config: Architecture, model: str, *, fixed: bool = False) -> list[Any]:
    """For an encoder-decoder, check that each prompt is a source followed by a target.

    Arguments:
        rows: token ids of each prompt; a source without a target gets the decoder's start token.
        config: architecture of the model.
        model: name of the model, for messages.
        fixed: whether the rows must stay as they are, so that a missing start token is an error.

    Returns:
        The token ids of each prompt; `rows` unchanged for a model that reads one sequence.

    Raises:
        PromptError: for two targets, no source, or a source or target longer than the model's positions.
    """
    start = config.target_start
    return list(rows) if start is None else [_as_pair(row, start, config, model, fixed=fixed) for row in rows]


def _as_pair(row: Any, start: int, config: Architecture, model: str, *, fixed: bool) -> list[int]:
    ids = [int(token) for token in row]
    # The first id of a target is raised by the size of the vocabulary (DESIGN.md, "Encoders with decoders").
    starts = [position for position, token in enumerate(ids) if token >= config.vocab_size]
    if not starts and not fixed:
        starts, ids = [len(ids)], [*ids, start]
    if len(starts) != 1 or starts[0] == 0:
        raise PromptError(
            f"expected a source and one target in each prompt of {model}, found targets that begin at "
            f"positions {starts}; make prompts with model.pair(source, target)"
        )
    longer_side, limit = max(starts[0], len(ids) - starts[0]), config.side_length
    if limit is not None and longer_side > limit:
        raise PromptError(
            f"expected at most {limit} tokens in the source and in the target of a prompt of {model}, found "
            f"{longer_side}; shorten it"
        )
    return ids


def pack_encodings(encodings: Sequence[Encoding]) -> PackedTokens:
    """Concatenate the token ids of encoded texts into one array, with the texts and character offsets.

    Raises:
        PromptError: for a text whose only tokens are special, as its activations would be those of a BOS.
    """
    for number, encoding in enumerate(encodings):
        if all(encoding.special):
            added = f"only the {len(encoding)} that the tokenizer adds" if encoding.ids else "none"
            raise PromptError(
                f"expected prompt {number} to have a token of its own, found {added} in {encoding.text!r}; "
                "leave this prompt out, or pass token ids to read special tokens alone"
            )
    return PackedTokens.from_lists(
        [e.ids for e in encodings], texts=[e.text for e in encodings], offsets=[e.offsets for e in encodings]
    )


def check_prompts(
    rows: Sequence[Any], vocab_size: int, context: int, model: str, unknown: int | None = None
) -> None:
    """Check that the token ids of prompts can be read by a model.

    Arguments:
        rows: token ids of each prompt.
        vocab_size: one more than the largest valid id.
        context: most positions of a prompt.
        model: name of the model, for messages.
        unknown: id of the padding token where the model computes no position for it; None without one.

    Raises:
        PromptError: for the first prompt that is empty, too long, out of range, or contains `unknown`.
    """
    if not rows:
        raise PromptError("expected at least one prompt, found none; pass a text or token ids")
    for number, ids in enumerate(rows):
        where = f"prompt {number}" if len(rows) > 1 else "the prompt"
        if len(ids) == 0:
            raise PromptError(f"expected at least one token in {where}, found none; leave it out")
        if len(ids) > context:
            raise PromptError(
                f"{model} reads at most {context} positions, found {len(ids)} in {where}; shorten or split it"
            )
        low, high = min(ids), max(ids)
        if low < 0 or high >= vocab_size:
            raise PromptError(
                f"expected token ids in 0..{vocab_size - 1}, found {low if low < 0 else high} in {where}; "
                f"encode it with the tokenizer of {model}"
            )
        if unknown is not None and unknown in ids:
            raise PromptError(
                f"expected no padding in {where}, found the padding token {unknown} of {model}; remove it, "
                "because prompts of any length can be passed together"
            )


def _check_packed(
    tokens: PackedTokens, vocab_size: int, context: int, model: str, unknown: int | None
) -> None:
    """Raise PromptError for the first prompt of packed tokens that the model cannot read."""
    # Two numbers of the whole corpus decide: a loop over prompts would take longer than reading them.
    is_out_of_range = tokens.row_size.max() > context or tokens.largest >= vocab_size
    if is_out_of_range or (unknown is not None and tokens.holds(unknown)):
        check_prompts(list(tokens), vocab_size, context, model, unknown)


def no_tokenizer(model: str) -> TokenizerError:
    """Make the TokenizerError for text prompts of a model without tokenizer files."""
    return TokenizerError(
        f"to read text, expected tokenizer.json or {WORLD} in the folder of the model {model}, found "
        "neither; add the file, or pass token ids"
    )
