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

_LISTED_VALUES = 6  # label values listed in an error message
_MOST_LENGTH_DIFFERENCE = 2  # between an unknown token and the one suggested for it, in characters


def prompt_rows(dataset: xr.Dataset, prompts: Prompt | Sequence[Prompt], count: int) -> Indices:
    """Numbers, from 0, of prompts that are given by number or by text; int64 [prompt].

    Arguments:
        dataset: Dataset whose prompts lie end to end on the token axis.
        prompts: Numbers (negative from the end) or whole texts.
        count: Number of prompts in the dataset.

    Raises:
        PromptError: A number is out of range, or no prompt has the text; the message names the most similar.
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
            raise PromptError(f"there is no prompt {prompt}; prompts are numbered 0 to {count - 1}")
    return np.array(rows, np.int64)


def labelled_rows(dataset: xr.Dataset, labels: Mapping[str, Any]) -> npt.NDArray[np.bool_]:
    """Which prompts have the given values of all given labels, bool [prompt_id].

    Arguments:
        dataset: Dataset whose prompts lie end to end on the token axis.
        labels: Name of a label -> value or values of which a prompt must have one.

    Raises:
        PromptError: The run has no such label, or no prompt has any of the values; the message lists those
            that exist.
    """
    other_coords = {"row_start", "row_size", "pair_start", "text", "prompt_id"}
    stored = {
        str(name): coord
        for name, coord in dataset.coords.items()
        if coord.dims == ("prompt_id",) and name not in other_coords
    }
    has_all = np.ones(dataset.sizes["prompt_id"], bool)
    for name, values in labels.items():
        if name not in stored:
            choices = ", ".join([*stored, "prompt", "token", "chars", "position", "layer"])
            raise PromptError(
                f"ds.mi.sel selects by {choices}, found {name!r}; store labels of prompts with `mizarr "
                "capture --label`, or by capturing a Corpus with labels="
            )
        requested = as_list(values)
        prompt_values = stored[name].values.tolist()
        has_value = np.array([value in requested for value in prompt_values], bool)
        if not has_value.any():
            shown = [repr(value) for value in dict.fromkeys(prompt_values)]
            more = f" and {len(shown) - _LISTED_VALUES} more" if len(shown) > _LISTED_VALUES else ""
            raise PromptError(
                f"no prompt has {name}={', '.join(map(repr, requested)) or 'none'}; values of {name} are "
                f"{', '.join(shown[:_LISTED_VALUES])}{more}"
            )
        has_all &= has_value
    return has_all


def token_ids(tokens: Token | Sequence[Token], vocabulary: Sequence[str] | None) -> list[int]:
    """Look up token ids of token strings, which must match exactly, spaces included.

    Several ids may have the same string.

    Arguments:
        tokens: Token ids or strings.
        vocabulary: Token strings by id; None if unknown.

    Raises:
        TokenizerError: A string is no token (the message names the most similar), or there is no vocabulary.
    """
    ids: list[int] = []
    for token in as_list(tokens):
        if not isinstance(token, str):
            ids.append(as_index(token, "tokens", TokenizerError))
            continue
        if vocabulary is None:
            raise TokenizerError(
                f"the token {token!r} cannot be looked up, because no token strings of the tokenizer are "
                "stored; give token ids instead"
            )
        matches = [i for i, string in enumerate(vocabulary) if string == token]
        if not matches:
            # The usual mistake is a missing leading space: "Paris" instead of " Paris".
            near = _nearest_token(token, vocabulary)
            hint = f"; did you mean {near!r}?" if near is not None else ""
            raise TokenizerError(
                f"the vocabulary has no token {token!r}{hint}; token strings are exact, and words inside a "
                "sentence mostly begin with a space; select a word of several tokens by "
                f"chars={token.strip()!r}"
            )
        ids.extend(matches)
    return ids


def spans_of(dataset: xr.Dataset, tokens: slice) -> CharacterSpans:
    """Which characters the tokens of one prompt cover; PromptError if no character offsets are stored.

    Arguments:
        dataset: Dataset whose prompts lie end to end on the token axis.
        tokens: Slice of the token axis with the prompt's tokens.
    """
    if "char_start" not in dataset.coords or "char_end" not in dataset.coords:
        raise PromptError(
            "this run has no character offsets of its tokens, because it was captured from token ids; "
            "capture it from texts, or select by position"
        )
    return CharacterSpans(dataset["char_start"][tokens].values, dataset["char_end"][tokens].values)


def characters_to_positions(dataset: xr.Dataset, row: int, tokens: slice, chars: Chars) -> list[int]:
    """Positions, within a prompt, of the tokens that overlap a character span or a phrase.

    Arguments:
        dataset: Dataset whose prompts lie end to end on the token axis.
        row: Number of the prompt.
        tokens: Slice of the token axis with the prompt's tokens.
        chars: Span (start, end) with the end excluded, or a phrase that occurs once in the text.

    Raises:
        PromptError: The span is outside the text, or no token covers it.
    """
    spans = spans_of(dataset, tokens)
    text = _texts(dataset)[row] if "text" in dataset.coords else None
    if isinstance(chars, str):
        if text is None:
            raise PromptError(
                f"the phrase {chars!r} cannot be found, because the run is stored without texts of its "
                "prompts; give a character span (start, end)"
            )
        start, end = find_span(text, chars)
    else:
        start, end = (chars.start, chars.stop) if isinstance(chars, range) else chars
    length = len(text) if text is not None else int(spans.end.max(initial=0))
    number = int(dataset["prompt_id"].values[row]) if "prompt_id" in dataset.coords else row
    if not 0 <= start < end <= length:
        raise PromptError(
            f"expected a character span (start, end) within the {length} characters of prompt {number}, "
            f"found ({start}, {end}); spans exclude the end and count characters, not bytes"
        )
    positions = spans.char_range_to_tokens(start, end)
    if not positions:
        raise PromptError(
            f"no token of prompt {number} covers the characters ({start}, {end}); select other characters"
        )
    return positions


def in_prompt(position: Position, size: int) -> Indices:
    """Convert selected positions of a prompt to numbers from its start, int64.

    Arguments:
        position: Numbers (negative from the end), or a slice by Python's rules.
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
                f"a prompt of {size} tokens has no position {index}; select prompts that are longer, or give "
                "position as a slice"
            )
    return positions % size


def select_layers(dataset: xr.Dataset, layer: LayerChoice) -> xr.Dataset:
    """Select layers of every variable that has a layer axis.

    Arguments:
        dataset: Dataset whose prompts lie end to end on the token axis.
        layer: A number, which drops the axis; a range or list, which keeps it, and all of whose layers must
            exist; or a slice, which includes both ends and takes the layers that exist, as `.sel` does.

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
    """Activations captured at a hook point, [token, …], or [layer, token, …] for all layers.

    Arguments:
        dataset: Dataset whose prompts lie end to end on the token axis.
        hook: Such as "blocks.5.hook_resid_post", or with "*" in place of the layer for all layers.

    Raises:
        HookPointNotFound: The hook point was not captured; the message has the command that captures it.
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
        f"the hook point {hook!r} was not captured in this run, which has "
        f"{_captured_text(dataset) or 'no hook points'}{f'; the most similar is {near!r}' if near else ''}; "
        f"capture it: {capture_command(dataset, hook)}"
    )


def layer_dim(array: xr.DataArray) -> str | None:
    """Name of an array's layer axis, `layer` or `layer_<variable>`; None without one."""
    return next((str(dim) for dim in array.dims if str(dim).startswith("layer")), None)


def as_layer(array: xr.DataArray) -> xr.DataArray:
    """Rename an array's axis `layer_<variable>` to `layer`; the long name is needed only beside other
    variables."""
    dim = layer_dim(array)
    if dim is None or dim == "layer":
        return array
    return array.drop_vars("layer", errors="ignore").rename({dim: "layer"})


def capture_command(dataset: xr.Dataset, hook: str) -> str:
    """Command line that captures another hook point of a run's model, for messages.

    Arguments:
        dataset: The opened run.
        hook: Hook point, possibly with "*" in place of the layer.
    """
    return f"mizarr capture {model_name(dataset) or 'MODEL'} PROMPTS --hooks '{hook}'"


def _missing_layers(dataset: xr.Dataset, dim: str, available: list[int], requested: str) -> str:
    """Error message for uncaptured layers, with the command that captures them."""
    arrays = [array for array in dataset.data_vars.values() if dim in array.dims]
    names = ", ".join(str(array.name) for array in arrays) or "no variable"
    hook = next(
        (str(array.attrs["hook"]) for array in arrays if "hook" in array.attrs), "blocks.{}.hook_resid_post"
    )
    first_layer = requested.split(",", maxsplit=1)[0].split("-", maxsplit=1)[0]
    command = capture_command(dataset, hook.replace("{}", first_layer if first_layer.isdecimal() else "*"))
    return (
        f"layers {requested} of {names} were not captured, only {ranges(available)}; leave them out, or "
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
    """Number of the prompt with this text; PromptError unless exactly one prompt has the text."""
    rows = [row for row, prompt_text in enumerate(texts) if prompt_text == text]
    if len(rows) == 1:
        return rows[0]
    if rows:
        raise PromptError(f"the prompts {rows} have the same text {text!r}; give the number of one")
    raise PromptError(
        f"none of {len(texts)} prompts has exactly the text {text!r}{did_you_mean(text, texts)}"
    )


def _texts(dataset: xr.Dataset) -> list[str]:
    if "text" not in dataset.coords:
        raise PromptError("this run is stored without texts of its prompts; give prompts by their numbers")
    return [str(text) for text in np.atleast_1d(dataset["text"].values)]


def _nearest_token(string: str, vocabulary: Sequence[str]) -> str | None:
    """Token to suggest for an unknown string: a variant with or without a leading space, in another case, or
    of similar spelling; None without a similar token."""
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
        if abs(len(token) - len(string)) <= _MOST_LENGTH_DIFFERENCE and token.strip()[:1] == first_letter
    ]
    return nearest(string, sorted(similar))
