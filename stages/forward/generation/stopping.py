"""When a generation ends, and the text it has given by then.

Border: token ids, texts and a tokenizer; knows no model and never imports torch.

A generation ends at an end-of-sequence id, at a stop id, at a stop string in its text, after a number of
tokens, or when the context is full. Ids that end it are kept among the tokens and left out of the text; a
stop string is cut off, together with what its last token holds beyond it.
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
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_ANCHOR = 16
"""Tokens of the prompt decoded along with what follows it: decoders treat the first of a text apart."""


@dataclass(frozen=True)
class Stop:
    """What ends a generation beside its length: ids of the model, ids and strings of the user's choice."""

    eos: frozenset[int] = frozenset()
    ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()

    @classmethod
    def of(cls, stop: str | int | Sequence[str | int], eos: int | Iterable[int]) -> Stop:
        """From strings and ids in any order. Raises ConfigError for an empty string, and for ids that are no
        whole numbers of at least 0."""
        ends = as_list(eos)
        for token in ends:
            if isinstance(token, bool) or not isinstance(token, int | np.integer) or token < 0:
                raise ConfigError(f"expected eos to hold token ids, found {token!r}; eos=() ends at none")
        stops = as_list(stop)
        for item in stops:
            if isinstance(item, bool) or not isinstance(item, str | int) or item == "":
                raise ConfigError(f"expected stop to hold texts and token ids, found {item!r}; leave it out")
            if isinstance(item, int) and item < 0:
                raise ConfigError(f"expected stop ids counted from 0, found {item}")
        strings = tuple(dict.fromkeys(item for item in stops if isinstance(item, str)))
        return cls(frozenset(map(int, ends)), frozenset(i for i in stops if isinstance(i, int)), strings)

    def reason(self, token: int) -> Reason | None:
        """Why this token ends a generation; None if it does not."""
        if token in self.eos:
            return "eos"
        return "stop" if token in self.ids else None


class GeneratedText:
    """The text of generated tokens, as it grows.

    A character may be spread over tokens, and so may a stop string: what could still become either is held
    back, so that nothing is shown that is not in the text at the end.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._ids = [token for token in prompt[-_ANCHOR:] if self._has_text(token)]
        self._anchor, self._settled = 0, len(self._ids)
        self._shown = 0
        self.text = ""
        """All of it that is settled, without special tokens, up to a stop string."""
        self.is_stopped = False

    def push(self, token: int) -> str:
        """The text that can be shown now that this token has come."""
        if self._has_text(token):
            self._ids.append(token)
        whole = self._decoded(None)
        if not whole.endswith(_UNFINISHED):
            self._settle(whole)
        self._cut()
        return self._show(len(self.text) - self._held_back())

    def finish(self) -> str:
        """The rest of the text, unfinished characters included."""
        if not self.is_stopped:
            self._settle(self._decoded(None))
        return self._show(len(self.text))

    def _has_text(self, token: int) -> bool:
        return self._tokenizer.decode_token(token) != ""

    def _decoded(self, end: int | None) -> str:
        return self._tokenizer.decode(self._ids[self._anchor : end], keep_special=False)

    def _settle(self, whole: str) -> None:
        before = self._decoded(self._settled)
        if not whole.startswith(before):  # a prompt that ended in the middle of a character
            before = before.rstrip(_UNFINISHED)
        self.text += whole[len(before) :]
        self._anchor, self._settled = self._settled, len(self._ids)

    def _cut(self) -> None:
        # What is shown already begins no stop string, or it would have been held back.
        found = [at for at in (self.text.find(stop, self._shown) for stop in self._stops) if at >= 0]
        if found:
            self.text, self.is_stopped = self.text[: min(found)], True

    def _held_back(self) -> int:
        """Characters at the end that may turn out to begin a stop string."""
        if self.is_stopped:
            return 0
        sizes = (k for stop in self._stops for k in range(1, len(stop)) if self.text.endswith(stop[:k]))
        return max(sizes, default=0)

    def _show(self, end: int) -> str:
        new, self._shown = self.text[self._shown : end], max(self._shown, end)
        return new


def end_ids(files: ModelFiles, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Ids that end a sequence, as a model's config.json, generation_config.json and tokenizer name them."""
    found = _ids(files.config)
    path = files.directory / "generation_config.json"
    if require_content(path, ConfigError):
        found |= _ids(json_object(path, ConfigError))
    if tokenizer is not None and tokenizer.eos_id is not None:
        found.add(tokenizer.eos_id)
    return tuple(sorted(found))


def _ids(config: Any) -> set[int]:
    named = config.get("eos_token_id") if isinstance(config, dict) else None
    listed = named if isinstance(named, list) else [named]
    return {token for token in listed if isinstance(token, int)}
