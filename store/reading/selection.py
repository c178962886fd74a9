"""Resolve texts, token strings, character spans, labels and layer ranges to indices of a packed dataset.

Used by `ds.mi` (accessor.py). Nothing is guessed: an unknown value is an error that names the nearest one, or
the command that captures it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..arrays import as_index, as_indices, as_list, is_several, ranges
from ..errors import EntryNotFound, HookPointNotFound, PromptError, TokenizerError, did_you_mean, nearest
from ..identity import model_name
from .characters import CharacterSpans, find_span

if TYPE_CHECKING:
    import xarray as xr

Prompt = int | str
Token = int | str
Label = str | float
"""Value of a prompt label."""
Chars = tuple[int, int] | range | str
"""Half-open character span, or a phrase that occurs once in each text."""
Position = int | slice | Sequence[int]
LayerChoice = int | slice | range | Sequence[int]
Indices = npt.NDArray[np.int64]

_SHOWN = 6  # label values listed in an error message
_CLOSE = 2  # largest difference in length between an unknown token and the one suggested for it


def prompt_rows(dataset: xr.Dataset, prompts: Prompt | Sequence[Prompt], count: int) -> Indices:
    """Row numbers of prompts.

    Arguments:
        dataset: Packed dataset.
        prompts: Numbers (negative from the end) or whole texts.
        count: Number of prompts.

    Raises:
        PromptError: A number is out of range, or a text does not exist; the message names the nearest.
    """
    texts: list[str] | None = None
    rows = []
    for prompt in as_list(prompts):
        if isinstance(prompt, str):
            texts = _texts(dataset) if texts is None else texts
            rows.append(_row_of(prompt, texts))
        elif -count <= as_index(prompt, "prompts", PromptError) < count:
            rows.append(int(prompt) % count)
        else:
            raise PromptError(f"expected a prompt index below {count}, found {prompt}")
    return np.array(rows, np.int64)


def labelled_rows(dataset: xr.Dataset, labels: Mapping[str, Any]) -> npt.NDArray[np.bool_]:
    """Boolean mask [prompt_id] of prompts that match every label.

    Arguments:
        dataset: Packed dataset.
        labels: Label -> value or values.

    Raises:
        PromptError: The run has no such label, or no prompt has any of the values; the message lists the
            existing ones.
    """
    sizes = {"row_start", "row_size", "pair_start", "text", "prompt_id"}
    stored = {
        str(name): c for name, c in dataset.coords.items() if c.dims == ("prompt_id",) and name not in sizes
    }
    has_all = np.ones(dataset.sizes["prompt_id"], bool)
    for name, values in labels.items():
        if name not in stored:
            choices = ", ".join([*stored, "prompt", "token", "chars", "position", "layer"])
            raise PromptError(
                f"expected a selector among {choices}, found {name!r}; labels of prompts are "
                "kept by mizarr capture --label, and by capture of a Corpus with labels="
            )
        requested = as_list(values)
        prompt_values = stored[name].values.tolist()
        has_value = np.array([value in requested for value in prompt_values], bool)
        if not has_value.any():
            shown = [repr(value) for value in dict.fromkeys(prompt_values)]
            more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
            raise PromptError(
                f"expected a value of {name} that some prompt has, {', '.join(shown[:_SHOWN])}{more}, found "
                f"{', '.join(map(repr, requested)) or 'none'}"
            )
        has_all &= has_value
    return has_all


def token_ids(tokens: Token | Sequence[Token], vocabulary: Sequence[str] | None) -> list[int]:
    """Token ids of exact token strings, spaces included. Several ids may have the same string.

    Arguments:
        tokens: Token ids or strings.
        vocabulary: Token strings by id; None if unknown.

    Raises:
        TokenizerError: A string is no token (the message names the nearest), or there is no vocabulary.
    """
    ids: list[int] = []
    for token in as_list(tokens):
        if not isinstance(token, str):
            ids.append(as_index(token, "tokens", TokenizerError))
            continue
        if vocabulary is None:
            raise TokenizerError(
                f"expected stored token strings to look {token!r} up in, found none; give token ids instead"
            )
        matches = [i for i, string in enumerate(vocabulary) if string == token]
        if not matches:
            # The usual mistake is a missing leading space: "Paris" instead of " Paris".
            near = _nearest_token(token, vocabulary)
            hint = f"; did you mean {near!r}?" if near is not None else ""
            raise TokenizerError(
                f"expected a token of the vocabulary, found {token!r}{hint}; strings are exact, a word "
                "inside a sentence mostly begins with its space, and one of several tokens is selected by "
                f"chars={token.strip()!r}"
            )
        ids.extend(matches)
    return ids


def spans_of(dataset: xr.Dataset, tokens: slice) -> CharacterSpans:
    """Character spans of the tokens of one prompt; PromptError if no character offsets are stored.

    Arguments:
        dataset: Packed dataset.
        tokens: The prompt's tokens on the token axis.
    """
    if "char_start" not in dataset.coords or "char_end" not in dataset.coords:
        raise PromptError(
            "expected character offsets of the tokens, found none stored; capture from texts, not token "
            "ids, or select by position"
        )
    return CharacterSpans(dataset["char_start"][tokens].values, dataset["char_end"][tokens].values)


def characters_to_positions(dataset: xr.Dataset, row: int, tokens: slice, chars: Chars) -> list[int]:
    """Positions, within a prompt, of the tokens that overlap a character span or phrase.

    Arguments:
        dataset: Packed dataset.
        row: Number of the prompt.
        tokens: The prompt's tokens on the token axis.
        chars: Half-open span, or a phrase.

    Raises:
        PromptError: The span is outside the text, or no token covers it.
    """
    spans = spans_of(dataset, tokens)
    text = _texts(dataset)[row] if "text" in dataset.coords else None
    if isinstance(chars, str):
        if text is None:
            raise PromptError(
                "expected the texts of the prompts to look a phrase up in, found none; give a span"
            )
        start, end = find_span(text, chars)
    else:
        start, end = (chars.start, chars.stop) if isinstance(chars, range) else chars
    length = len(text) if text is not None else int(spans.end.max(initial=0))
    number = int(dataset["prompt_id"].values[row]) if "prompt_id" in dataset.coords else row
    if not 0 <= start < end <= length:
        raise PromptError(
            f"expected a span within the {length} characters of prompt {number}, found {start}..{end}; spans "
            "are half-open and count characters, not bytes"
        )
    positions = spans.char_range_to_tokens(start, end)
    if not positions:
        raise PromptError(f"no token of prompt {number} covers characters {start}..{end}; select others")
    return positions


def in_prompt(position: Position, size: int) -> Indices:
    """Resolve positions in a prompt.

    Arguments:
        position: Numbers (negative from the end), or a slice with Python's rules.
        size: Tokens of the prompt.

    Raises:
        PromptError: The prompt has no such position.
    """
    if isinstance(position, slice):
        return np.arange(size)[position]
    positions = np.array(as_indices(position, "positions", PromptError), np.int64)
    for index in positions:
        if not -size <= index < size:
            raise PromptError(
                f"expected positions in 0..{size - 1} (or negative, from the end), found {index} in a prompt "
                f"of {size} tokens; select the longer prompts, or a slice"
            )
    return positions % size


def select_layers(dataset: xr.Dataset, layer: LayerChoice) -> xr.Dataset:
    """Select layers of every variable that has a layer axis.

    Arguments:
        dataset: Packed dataset.
        layer: A number drops the axis; a range or list keeps it and must exist as a whole; a slice includes
            both ends and takes the layers that exist, as `.sel` does.

    Raises:
        EntryNotFound: Layers were not captured.
    """
    selected = dataset
    for dim in [dim for dim in dataset.dims if str(dim).startswith("layer")]:
        available = [int(i) for i in dataset[dim].values]
        # Label-based like `.sel`, hence both ends included, unlike Python slices.
        if isinstance(layer, slice):
            index_slice = dataset[dim].to_index().slice_indexer(layer.start, layer.stop, layer.step)
            if not available[index_slice]:
                raise EntryNotFound(
                    _missing_layers(dataset, str(dim), available, f"{layer.start}-{layer.stop}")
                )
            selected = selected.isel({dim: index_slice})
            continue
        requested = as_indices(layer, "layers", EntryNotFound)
        if absent := [i for i in requested if i not in available]:
            raise EntryNotFound(_missing_layers(dataset, str(dim), available, ", ".join(map(str, absent))))
        indices = [available.index(i) for i in requested]
        selected = selected.isel({dim: indices if is_several(layer) else indices[0]})
    return selected


def at_hook(dataset: xr.Dataset, hook: str) -> xr.DataArray:
    """Activations captured at a hook point.

    Arguments:
        dataset: Packed dataset.
        hook: Such as "blocks.5.hook_resid_post", or with "*" in place of the layer for all layers.

    Raises:
        HookPointNotFound: It was not captured; the message has the command that captures it.
    """
    captured = {
        str(array.attrs["hook"]): as_layer(array)
        for array in dataset.data_vars.values()
        if "hook" in array.attrs
    }
    for path, array in captured.items():
        prefix, layered, suffix = path.partition("{}")
        if not layered and hook == path:
            return array
        if not layered or not (hook.startswith(prefix) and hook.endswith(suffix)):
            continue
        layer = hook[len(prefix) : len(hook) - len(suffix)]
        if layer == "*":
            return array
        if layer.isdecimal() and int(layer) in np.atleast_1d(array["layer"].values):
            return array.sel(layer=int(layer)) if "layer" in array.dims else array
    paths = [path.replace("{}", "*") for path in captured]
    near = nearest(hook, paths)
    raise HookPointNotFound(
        f"{hook!r} was not captured in this run, which holds {_captured_text(dataset) or 'no hook points'}"
        f"{f'; nearest is {near!r}' if near else ''}. Capture it: {capture_command(dataset, hook)}"
    )


def layer_dim(array: xr.DataArray) -> str | None:
    """Name of an array's layer axis, `layer` or `layer_<variable>`; None without one."""
    return next((str(dim) for dim in array.dims if str(dim).startswith("layer")), None)


def as_layer(array: xr.DataArray) -> xr.DataArray:
    """Rename `layer_<variable>` to `layer`: a single array has no conflict with the layers of other
    variables."""
    dim = layer_dim(array)
    if dim is None or dim == "layer":
        return array
    return array.drop_vars("layer", errors="ignore").rename({dim: "layer"})


def capture_command(dataset: xr.Dataset, hook: str) -> str:
    """Command line that adds a hook point to a run.

    Arguments:
        dataset: The opened run.
        hook: Hook point, possibly with "*" in place of the layer.
    """
    return f"mizarr capture {model_name(dataset) or 'MODEL'} PROMPTS --hooks '{hook}'"


def _missing_layers(dataset: xr.Dataset, dim: str, available: list[int], requested: str) -> str:
    arrays = [array for array in dataset.data_vars.values() if dim in array.dims]
    names = ", ".join(str(array.name) for array in arrays) or "no variable"
    hook = next(
        (str(array.attrs["hook"]) for array in arrays if "hook" in array.attrs), "blocks.{}.hook_resid_post"
    )
    first_layer = requested.split(",", maxsplit=1)[0].split("-", maxsplit=1)[0]
    command = capture_command(dataset, hook.replace("{}", first_layer if first_layer.isdecimal() else "*"))
    return (
        f"expected layers {requested} of {names}, found {ranges(available)}; leave the others out, or "
        f"capture them: {command}"
    )


def _captured_text(dataset: xr.Dataset) -> str:
    """List of the captured hook points with their layers, for messages."""
    parts = []
    for array in dataset.data_vars.values():
        if "hook" in array.attrs:
            dim = layer_dim(array)
            layers = f" (layers {ranges(array[dim].values.tolist())})" if dim is not None else ""
            parts.append(f"{str(array.attrs['hook']).replace('{}', '*')}{layers}")
    return ", ".join(parts)


def _row_of(text: str, texts: list[str]) -> int:
    rows = [row for row, prompt_text in enumerate(texts) if prompt_text == text]
    if len(rows) == 1:
        return rows[0]
    if rows:
        raise PromptError(f"expected a prompt's text once, found {text!r} at {rows}; give its number")
    raise PromptError(
        f"expected the whole text of one of {len(texts)} prompts, found {text!r}{did_you_mean(text, texts)}"
    )


def _texts(dataset: xr.Dataset) -> list[str]:
    if "text" not in dataset.coords:
        raise PromptError(
            "expected the texts of the prompts, found none stored; give prompts by their numbers"
        )
    return [str(text) for text in np.atleast_1d(dataset["text"].values)]


def _nearest_token(string: str, vocabulary: Sequence[str]) -> str | None:
    """Suggest a token: the string with or without its leading space, in another case, or of similar
    spelling."""
    variants = (
        f" {string}",
        f"\u2581{string.strip()}",  # SentencePiece's space
        string.strip(),
        string.lower(),
        string.capitalize(),
        f" {string.strip().lower()}",
        f" {string.strip().capitalize()}",
    )
    tokens = set(vocabulary)
    for variant in variants:
        if variant and variant in tokens:
            return variant
    # Only tokens of the same first letter and a similar length: difflib on a whole vocabulary takes seconds.
    first_letter = string.strip()[:1]
    similar = [
        token
        for token in tokens
        if abs(len(token) - len(string)) <= _CLOSE and token.strip()[:1] == first_letter
    ]
    return nearest(string, sorted(similar))
