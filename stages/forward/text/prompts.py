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
    """Token ids of prompts, one list each; texts are encoded with the tokenizer's BOS rule.

    Arguments:
        prompts: as for `as_rows`.
        tokenizer: tokenizer of the model; None where it has none.
        config: architecture of the model, which knows vocabulary and context.
        model: name of the model, for messages.

    Raises:
        PromptError: as `as_rows` and `check_prompts`.
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
    """Prompts as token ids end to end; texts with their character offsets.

    Arguments:
        prompts: as for `as_rows`, or packed tokens, which are checked and returned.
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
    """The encoding of a source with the start token of a target; unchanged unless prompts are pairs.

    Arguments:
        encoding: the encoded source.
        config: architecture of the model.
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
    """Token ids of a source and a target for an encoder-decoder; see `Model.pair`.

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
            f"expected a model with an encoder and a decoder to read pairs, found {model}, which reads one "
            "sequence; join the two texts"
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
    """Prompts as pairs where the model is an encoder-decoder; unchanged elsewhere.

    Arguments:
        rows: token ids of each prompt; a source without a target gets the start token of one.
        config: architecture of the model.
        model: name of the model, for messages.
        fixed: whether nothing may be added to the rows.

    Raises:
        PromptError: for two targets, a pair without source, or a side longer than the model's positions.
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
            f"{starts}; make prompts with model.pair(source, target)"
        )
    longest, most = max(starts[0], len(ids) - starts[0]), config.side_length
    if most is not None and longest > most:
        raise PromptError(
            f"expected at most {most} positions of a source or a target, found {longest} in a prompt of "
            f"{model}; shorten it"
        )
    return ids


def pack_encodings(encodings: Sequence[Encoding]) -> PackedTokens:
    """Encoded texts as token ids end to end, with their character offsets.

    Raises:
        PromptError: for a text whose only tokens are special, as its activations would be those of a BOS.
    """
    for number, encoding in enumerate(encodings):
        if all(encoding.special):
            added = f"only the {len(encoding)} that the tokenizer adds" if encoding.ids else "none"
            raise PromptError(
                f"expected prompt {number} to have a token of its own, found {added} in {encoding.text!r}; "
                "leave it out, or pass token ids to read a BOS alone"
            )
    return PackedTokens.from_lists(
        [e.ids for e in encodings], texts=[e.text for e in encodings], offsets=[e.offsets for e in encodings]
    )


def check_prompts(
    rows: Sequence[Any], vocab_size: int, context: int, model: str, unknown: int | None = None
) -> None:
    """Check token ids of prompts.

    Arguments:
        rows: token ids of each prompt.
        vocab_size: one more than the largest valid id.
        context: most positions of a prompt.
        model: name of the model, for messages.
        unknown: id that the model gives no position (`Architecture.unknown_token`); None without.

    Raises:
        PromptError: for the first prompt that is empty, too long, out of range, or holds the unknown id.
    """
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
    """As `check_prompts` for packed tokens; looks at single prompts only if some number is out of range."""
    # Two numbers of the whole corpus decide: a loop over prompts would take longer than reading them.
    is_wrong = tokens.row_size.max() > context or tokens.largest >= vocab_size
    if is_wrong or (unknown is not None and tokens.holds(unknown)):
        check_prompts(list(tokens), vocab_size, context, model, unknown)


def no_tokenizer(model: str) -> TokenizerError:
    """TokenizerError for text prompts of a model without tokenizer files."""
    return TokenizerError(
        f"expected a tokenizer.json, or an {WORLD}, beside the weights of {model} to read text, found "
        "neither; add the file, or pass token ids"
    )
