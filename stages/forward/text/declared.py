"""DeclaredTokens: tokens that files beside tokenizer.json declare, merged by the rules of transformers.

tokenizer_config.json names tokens by role (`bos_token`, also `image_token` and similar), lists more of them
(`extra_special_tokens`, formerly `additional_special_tokens`: a list, or a dict by role) and all that were
added (`added_tokens_decoder`). Where it lists none, the older special_tokens_map.json and added_tokens.json
count as well. A token that tokenizer.json does not have is added after its last id, whatever id these files
give it, in the order of those ids; otherwise its text would be cut into pieces.

The rules are those of transformers 5 (`PreTrainedTokenizerBase._from_pretrained`, `TokenizersBackend`), also
where declarations contradict each other; tests/stages/forward/text/test_declared.py compares the two. Works
on JSON values; library.py applies the result to the `tokenizers` library.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....store.errors import TokenizerError
from ....store.exchange.outside import json_object, read_outside, require_content

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Standard special-token roles, in the order in which tokens are added to a vocabulary."""
CONFIG, SPECIAL, ADDED, TEMPLATE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
FILES = (CONFIG, SPECIAL, ADDED, TEMPLATE)
"""Files beside tokenizer.json that declare tokens or the chat template."""
_DECODER, _EXTRA, _ADDITIONAL, _BY_ROLE = (
    "added_tokens_decoder",
    "extra_special_tokens",
    "additional_special_tokens",
    "model_specific_special_tokens",
)
_OLD_ADDED = "added_tokens"
"""Key under which `read_settings` stores added_tokens.json."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class AddedToken:
    """A token that a tokenizer matches in a text before it cuts the rest into pieces."""

    # Field names are those of `tokenizers.AddedToken` and enter the digest of a tokenizer.
    content: str
    """Text of the token."""
    single_word: bool = False
    """Whether the token only matches where no letter or digit touches it."""
    lstrip: bool = False
    """Whether a match includes the white space before it."""
    rstrip: bool = False
    """Whether a match includes the white space after it."""
    normalized: bool = True
    """Whether the token is matched in the normalised text instead of the original."""
    special: bool = False
    """Whether decoding can leave the token out, as it does for BOS."""

    def __str__(self) -> str:
        return self.content


Declaration = str | AddedToken
"""A declared token: text, or text with matching flags."""


@dataclass(frozen=True)
class DeclaredTokens:
    """Tokens that the settings of a tokenizer declare."""

    named: Mapping[str, Declaration]
    """Role, e.g. "bos_token" -> token: standard roles first, then roles that only this model has."""
    extra: Sequence[Declaration]
    """Special tokens without a role."""
    listed: Sequence[AddedToken]
    """Tokens that the settings add to the vocabulary, by ascending id."""
    splits_special: bool
    """Whether special tokens in a text are cut into pieces like other text."""

    @classmethod
    def of(
        cls, settings: Mapping[str, Any], file_tokens: Mapping[int, AddedToken], pad: str | None = None
    ) -> DeclaredTokens:
        """Collect the declared tokens from the settings that `read_settings` returns.

        Arguments:
            settings: keys of tokenizer_config.json, and what `read_settings` adds.
            file_tokens: id -> token, of the tokens that tokenizer.json itself adds.
            pad: padding token of tokenizer.json; the `pad_token` where settings have no such key.

        Raises:
            TokenizerError: for a malformed declaration.
        """
        values = {key: _typed(value, key) for key, value in settings.items()}
        # A list of added tokens hides both older files (transformers 5).
        if values.get(_DECODER) is not None:
            by_id = _tokens_by_id(values[_DECODER])
        else:
            by_id = {**values.get(_OLD_ADDED, {}), **file_tokens}
        by_text = {token.content: token for token in by_id.values()}
        if pad is not None:
            # Only where the settings have no such key: an explicit null means no padding token.
            values.setdefault("pad_token", pad)
        # A role that is overwritten keeps its place, which decides the order in which tokens are added.
        named: dict[str, Declaration | None] = dict.fromkeys(ROLES)
        for role in ROLES:
            if values.get(role) is not None:
                token = _declaration(values[role], role)
                named[role] = by_text.get(str(token), token)
        named |= {key: value for key, value in values.items() if _is_role(key) and _is_declaration(value)}
        by_role = values.get(_BY_ROLE) or {}
        if not isinstance(by_role, Mapping):
            raise TokenizerError(
                f'{CONFIG}: expected {_BY_ROLE} as an object such as {{"image_token": "<image>"}}, found '
                f"{by_role!r}; correct the file, or fetch it again"
            )
        named |= {str(role): _declaration(value, str(role)) for role, value in by_role.items()}
        extra = values[_EXTRA] if _EXTRA in values else values.get(_ADDITIONAL)
        if not isinstance(extra or (), list | tuple):
            raise TokenizerError(
                f"{CONFIG}: expected {_EXTRA} as a list of tokens, or an object of tokens by role, found "
                f"{extra!r}; correct the file, or fetch it again"
            )
        return cls(
            {role: token for role, token in named.items() if token is not None},
            tuple(_declaration(value, _EXTRA) for value in extra or ()),
            tuple(by_id[token] for token in sorted(by_id)),
            bool(values.get("split_special_tokens")),
        )

    @property
    def texts(self) -> dict[str, str]:
        """Role, e.g. "bos_token" -> text of the token."""
        return {role: str(token) for role, token in self.named.items()}

    def to_add(self, file_tokens: Collection[AddedToken]) -> list[AddedToken]:
        """Tokens to add to the vocabulary of tokenizer.json, in the order of their new ids.

        A token that exists already keeps its id, and gets these flags.

        Arguments:
            file_tokens: tokens that tokenizer.json itself adds.
        """
        # In this order, listed tokens before named ones: the order decides their new ids.
        tokens: list[Declaration] = list(self.listed)
        present = {str(token) for token in (*file_tokens, *tokens)}
        for token in (*self.named.values(), *self.extra):
            if str(token) not in present and token not in tokens:
                tokens.append(token)
        roles = {text for text in self.texts.values() if text}
        return [_as_added_token(token, is_named=str(token) in roles) for token in tokens]


def read_settings(folder: Path) -> dict[str, Any]:
    """Read the settings of a tokenizer: tokenizer_config.json and chat_template.jinja.

    special_tokens_map.json and added_tokens.json, which older versions wrote, are read only if
    tokenizer_config.json does not list the added tokens.

    Arguments:
        folder: folder of the tokenizer.

    Raises:
        TokenizerError: for a file that is not a JSON object, or a template that is not UTF-8.
    """
    settings = _with_keys_of_version_5(_json_or_empty(folder / CONFIG))
    if settings.get(_DECODER) is None:
        _add_older_files(settings, _json_or_empty(folder / SPECIAL), _json_or_empty(folder / ADDED))
    template = folder / TEMPLATE
    if require_content(template, TokenizerError):
        try:
            settings["chat_template"] = read_outside(template, TokenizerError).decode("utf-8")
        except UnicodeDecodeError as error:
            raise TokenizerError(f"expected UTF-8 in {template}, found {error}; fetch it again") from error
    return settings


def _with_keys_of_version_5(config: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json with the keys of transformers 5; roles that only this model has are one key."""
    settings = dict(config)
    if _ADDITIONAL in settings and not settings.get(_EXTRA):
        # The name of transformers 4 for the same key.
        settings[_EXTRA] = settings.pop(_ADDITIONAL)
    by_role = {
        key: settings.pop(key) for key in list(settings) if _is_role(key) and isinstance(settings[key], str)
    }
    if isinstance(settings.get(_EXTRA), dict):
        by_role |= settings.pop(_EXTRA)
    if by_role:
        settings[_BY_ROLE] = by_role
    return settings


def _add_older_files(settings: dict[str, Any], special: Mapping[str, Any], added: Mapping[str, Any]) -> None:
    """Merge special_tokens_map.json and added_tokens.json into the settings of a tokenizer.

    Arguments:
        settings: changed in place.
        special: content of special_tokens_map.json, which overrides tokenizer_config.json.
        added: text -> id, content of added_tokens.json.
    """
    for key, value in special.items():
        if isinstance(value, dict) and key != _EXTRA:
            # transformers treats every token of special_tokens_map.json as special, whatever its flags say.
            settings[key] = replace(_from_fields(value, key), special=True)
        elif key == _EXTRA and isinstance(value, list):
            listed = list(settings.get(_EXTRA) or ())
            for entry in value:
                token = replace(_from_fields(entry, key), special=True) if isinstance(entry, dict) else entry
                if token not in listed:
                    listed.append(token)
            settings[_EXTRA] = listed
        else:
            settings[key] = value
    if isinstance(settings.get(_EXTRA), dict):
        settings[_BY_ROLE] = {**(settings.get(_BY_ROLE) or {}), **settings.pop(_EXTRA)}
    names = {str(settings[role]) for role in ROLES if settings.get(role)}
    names |= {str(token) for token in settings.get(_EXTRA) or ()}
    tokens = {}
    for text, number in added.items():
        if not isinstance(number, int) or isinstance(number, bool):
            raise TokenizerError(
                f"expected {ADDED} to give the id of {text!r} as an integer, found {number!r}; correct the "
                "file, or fetch it again"
            )
        tokens[number] = AddedToken(text, normalized=text not in names, special=text in names)
    settings[_OLD_ADDED] = tokens


def _typed(value: Any, key: str) -> Any:
    """A JSON value with every object marked as a token turned into an AddedToken, at any depth."""
    if isinstance(value, dict):
        if value.get("__type") == "AddedToken":
            return _from_fields(value, key)
        return {name: _typed(inner, key) for name, inner in value.items()}
    return [_typed(inner, key) for inner in value] if isinstance(value, list) else value


def _from_fields(fields: Mapping[str, Any], key: str) -> AddedToken:
    flags = {name: fields[name] for name in _FLAGS if fields.get(name) is not None}
    unknown = [name for name in fields if name not in (*_FLAGS, "content", "__type", "id")]
    content = fields.get("content")
    if unknown or not isinstance(content, str) or not all(isinstance(flag, bool) for flag in flags.values()):
        raise TokenizerError(
            f"tokenizer settings: expected {key} as a text, or as an object with content and "
            f"{', '.join(_FLAGS)} (true or false), found {dict(fields)!r}; correct {CONFIG}"
        )
    # As in `tokenizers`: special tokens are matched in the text as it was written.
    flags.setdefault("normalized", not flags.get("special", False))
    return AddedToken(content, **flags)


def _tokens_by_id(decoder: Any) -> dict[int, AddedToken]:
    if not isinstance(decoder, Mapping) or not all(str(token).isdecimal() for token in decoder):
        raise TokenizerError(
            f"{CONFIG}: expected {_DECODER} as an object with a token for each id, found "
            f"{str(decoder)[:60]}; fetch the tokenizer again"
        )
    tokens = {}
    for number, value in decoder.items():
        if not isinstance(value, Mapping | AddedToken):
            raise TokenizerError(
                f"{CONFIG}: expected each entry of {_DECODER} as an object with content, found {value!r:.80} "
                f"for token id {number}; fetch the tokenizer again"
            )
        token = value if isinstance(value, AddedToken) else _from_fields(value, _DECODER)
        tokens[int(number)] = token
    return tokens


def _declaration(value: Any, key: str) -> Declaration:
    # transformers refuses unmarked objects where texts are usual, but version 4 wrote them.
    if isinstance(value, Mapping):
        return _from_fields({"special": True, **value}, key)
    if not _is_declaration(value):
        raise TokenizerError(
            f"tokenizer settings: expected {key} as the text of a token, found {value!r}; correct {CONFIG}"
        )
    declaration: Declaration = value
    return declaration


def _as_added_token(token: Declaration, *, is_named: bool) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, normalized=False, special=True)
    return replace(token, special=token.special or is_named)


def _is_role(key: str) -> bool:
    # Roles that only this model has, such as image_token.
    return key.endswith("_token") and key not in ROLES


def _is_declaration(value: Any) -> bool:
    return isinstance(value, str | AddedToken)


def _json_or_empty(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty dict if there is no file."""
    if not require_content(path, TokenizerError):
        return {}
    # large_integers: model_max_length is often 10^30, "no limit" in transformers.
    return json_object(path, TokenizerError, large_integers=True)
