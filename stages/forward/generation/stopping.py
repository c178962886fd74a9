"""End of a generation, and its text so far. Knows token ids and a tokenizer; never imports torch.

A generation ends at an end-of-sequence id, at a stop id, at a stop string in its text, after a number of
tokens, or when the context is full. Ids that end it stay among the tokens but not in the text. A stop string
is cut off, together with what its last token holds after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ....store.arrays import as_list
from ....store.errors import ConfigError
from ....store.exchange.outside import json_object, require_content

if TYPE_CHECKING:
    from ..models.files import ModelFiles
    from ..text.tokens import Tokenizer

Reason = Literal["eos", "stop", "max_tokens", "context"]
"""Why a generation ended."""
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_ANCHOR = 16
"""Prompt tokens decoded together with the generated ones, because decoders treat the first token of a text
differently (SentencePiece drops its leading space)."""


@dataclass(frozen=True)
class Stop:
    """Token ids and strings that end a generation."""

    eos: frozenset[int] = frozenset()
    """End-of-sequence token ids of the model."""
    ids: frozenset[int] = frozenset()
    """Token ids at which the user wants to stop."""
    strings: tuple[str, ...] = ()
    """Strings in the generated text at which the user wants to stop."""

    @classmethod
    def of(cls, stop: str | int | Sequence[str | int], eos: int | Iterable[int]) -> Stop:
        """Sort stop strings and token ids, as a user passes them, into a `Stop`.

        Arguments:
            stop: stop strings and token ids, in any order.
            eos: end-of-sequence token ids.

        Raises:
            ConfigError: for an empty string, or ids that are no integers of at least 0.
        """
        ends = as_list(eos)
        for token in ends:
            if isinstance(token, bool) or not isinstance(token, int | np.integer) or token < 0:
                raise ConfigError(
                    f"eos: expected token ids, found {token!r}; pass eos=() to generate past every end token"
                )
        stops = as_list(stop)
        for item in stops:
            if isinstance(item, bool) or not isinstance(item, str | int) or item == "":
                raise ConfigError(f"stop: expected texts and token ids, found {item!r}; remove it")
            if isinstance(item, int) and item < 0:
                raise ConfigError(f"stop: expected token ids of at least 0, found {item}; remove it")
        strings = tuple(dict.fromkeys(item for item in stops if isinstance(item, str)))
        ids = frozenset(item for item in stops if isinstance(item, int))
        return cls(frozenset(map(int, ends)), ids, strings)

    def reason(self, token: int) -> Reason | None:
        """Why a generated token ends the generation: "eos" or "stop"; None if generation continues."""
        if token in self.eos:
            return "eos"
        return "stop" if token in self.ids else None


class GeneratedText:
    """Text of the tokens generated so far.

    A character, or a stop string, may be spread over several tokens. Text that may still become part of
    one of them is held back, so that nothing is shown that the final text does not contain.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        """Begin an empty text that follows a prompt.

        Arguments:
            tokenizer: tokenizer of the model.
            prompt: token ids of the prompt.
            stops: strings that end the text.
        """
        self._tokenizer, self._stops = tokenizer, stops
        # Special tokens have no text and would only confuse the decoder.
        self._ids = [token for token in prompt[-_ANCHOR:] if self._has_text(token)]
        self._anchor, self._settled = 0, len(self._ids)
        self._shown = 0
        self.text = ""
        """Generated text without special tokens and unfinished characters, up to a stop string."""
        self.is_stopped = False
        """Whether the text contained a stop string."""

    def push(self, token: int) -> str:
        """Add a token, and return the text that can be shown now; it may be empty.

        Arguments:
            token: id of the generated token.
        """
        if self._has_text(token):
            self._ids.append(token)
        decoded = self._decoded(None)
        # A trailing replacement character may become a real one with the next token.
        if not decoded.endswith(_UNFINISHED):
            self._append_new_text(decoded)
        self._cut_at_stop_string()
        return self._take_shown(len(self.text) - self._held_back())

    def finish(self) -> str:
        """Return the text that was held back, including an unfinished character."""
        if not self.is_stopped:
            self._append_new_text(self._decoded(None))
        # Nothing can complete a stop string any more, so text that was held back is shown.
        return self._take_shown(len(self.text))

    def _has_text(self, token: int) -> bool:
        return self._tokenizer.decode_token(token) != ""

    def _decoded(self, end: int | None) -> str:
        return self._tokenizer.decode(self._ids[self._anchor : end], keep_special=False)

    def _append_new_text(self, decoded: str) -> None:
        earlier = self._decoded(self._settled)
        # A prompt may end inside a character: its replacement character then turns into a real one.
        if not decoded.startswith(earlier):
            earlier = earlier.rstrip(_UNFINISHED)
        self.text += decoded[len(earlier) :]
        self._anchor, self._settled = self._settled, len(self._ids)

    def _cut_at_stop_string(self) -> None:
        # Text already shown contains no start of a stop string, as that would have been held back.
        starts = [at for at in (self.text.find(stop, self._shown) for stop in self._stops) if at >= 0]
        if starts:
            self.text, self.is_stopped = self.text[: min(starts)], True

    def _held_back(self) -> int:
        """Number of characters at the end that may be the start of a stop string."""
        if self.is_stopped:
            return 0
        sizes = (k for stop in self._stops for k in range(1, len(stop)) if self.text.endswith(stop[:k]))
        return max(sizes, default=0)

    def _take_shown(self, end: int) -> str:
        """The text up to `end` that was not returned before; it then counts as shown."""
        new, self._shown = self.text[self._shown : end], max(self._shown, end)
        return new


def end_ids(files: ModelFiles, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """End-of-sequence token ids in config.json, generation_config.json and the tokenizer of a model, sorted.

    Arguments:
        files: files of the model.
        tokenizer: tokenizer of the model; None without one.
    """
    ids = _eos_token_ids(files.config)
    path = files.directory / "generation_config.json"
    if require_content(path, ConfigError):
        # Chat models often name their end-of-turn token only there.
        ids |= _eos_token_ids(json_object(path, ConfigError))
    if tokenizer is not None and tokenizer.eos_id is not None:
        ids.add(tokenizer.eos_id)
    return tuple(sorted(ids))


def _eos_token_ids(config: Any) -> set[int]:
    value = config.get("eos_token_id") if isinstance(config, dict) else None
    values = value if isinstance(value, list) else [value]
    # null and missing keys name no token.
    return {token for token in values if isinstance(token, int)}
