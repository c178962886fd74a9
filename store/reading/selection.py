"""Which tokens and layers of a packed dataset a person means by a text, a token's string, characters or a
range.

Border: labels in, indices out; `ds.mi` (accessor.py) cuts with them. Nothing is guessed: what is not there
is an error that names what is nearest, or the command that captures it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..arrays import as_index, as_indices, as_list, is_several
from ..errors import EntryNotFound, HookPointNotFound, PromptError, TokenizerError, nearest
from ..identity import model_name
from .characters import CharacterSpans, find_span

if TYPE_CHECKING:
    import xarray as xr

Prompt = int | str
Token = int | str
Label = str | float
"""A value of a label of prompts."""
Chars = tuple[int, int] | range | str
"""Characters: a half-open span, or a phrase that stands once in each text."""
Position = int | slice | Sequence[int]
LayerChoice = int | slice | range | Sequence[int]
Indices = npt.NDArray[np.int64]

_SHOWN = 6
_CLOSE = (
    2  # letters by which an offered token may be longer or shorter: difflib is slow on a whole vocabulary
)


def prompt_rows(dataset: xr.Dataset, wanted: Prompt | Sequence[Prompt], count: int) -> Indices:
    """Row of each prompt, by number (negative from the end) or by its whole text.

    Raises PromptError for a number out of range, and for a text that is not there, with the nearest.
    """
    texts: list[str] | None = None
    rows = []
    for one in as_list(wanted):
        if isinstance(one, str):
            texts = _texts(dataset) if texts is None else texts
            rows.append(_row_of(one, texts))
        elif -count <= as_index(one, "prompts", PromptError) < count:
            rows.append(int(one) % count)
        else:
            raise PromptError(f"expected a prompt index below {count}, found {one}")
    return np.array(rows, np.int64)


def labelled_rows(dataset: xr.Dataset, wanted: Mapping[str, Any]) -> npt.NDArray[np.bool_]:
    """Which prompts [prompt_id] have one of the values asked for, of every label that is named.

    Raises PromptError for a label that the run does not have, and for values that no prompt has, naming those
    there are.
    """
    sizes = {"row_start", "row_size", "pair_start", "text", "prompt_id"}
    held = {
        str(name): c for name, c in dataset.coords.items() if c.dims == ("prompt_id",) and name not in sizes
    }
    kept = np.ones(dataset.sizes["prompt_id"], bool)
    for name, values in wanted.items():
        if name not in held:
            known = ", ".join([*held, "prompt", "token", "chars", "position", "layer"])
            raise PromptError(
                f"expected something to select by among {known}, found {name!r}; labels of prompts are kept "
                "by mizarr capture --label, and by capture of a Corpus with labels="
            )
        asked = as_list(values)
        there = held[name].values.tolist()
        has = np.array([value in asked for value in there], bool)
        if not has.any():
            shown = [repr(value) for value in dict.fromkeys(there)]
            more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
            raise PromptError(
                f"expected a value of {name} that some prompt has, {', '.join(shown[:_SHOWN])}{more}, found "
                f"{', '.join(map(repr, asked)) or 'none'}"
            )
        kept &= has
    return kept


def token_ids(wanted: Token | Sequence[Token], vocabulary: Sequence[str] | None) -> list[int]:
    """Ids of the tokens that read exactly so, spaces included; several ids may read alike.

    Raises TokenizerError for a string that is no token, with the nearest.
    """
    ids: list[int] = []
    for one in as_list(wanted):
        if not isinstance(one, str):
            ids.append(as_index(one, "tokens", TokenizerError))
            continue
        if vocabulary is None:
            raise TokenizerError(
                f"expected stored token strings to look {one!r} up in, found none; give token ids instead"
            )
        found = [i for i, string in enumerate(vocabulary) if string == one]
        if not found:
            near = _nearest_token(one, vocabulary)
            hint = f"; did you mean {near!r}?" if near is not None else ""
            raise TokenizerError(
                f"expected a token of the vocabulary, found {one!r}{hint}; strings are exact, a word inside "
                "a sentence mostly begins with its space, and one of several tokens is selected by "
                f"chars={one.strip()!r}"
            )
        ids.extend(found)
    return ids


def spans_of(dataset: xr.Dataset, tokens: slice) -> CharacterSpans:
    """Where the given packed tokens, those of one prompt, lie in its text; PromptError if that is not
    stored.
    """
    if "char_start" not in dataset.coords or "char_end" not in dataset.coords:
        raise PromptError(
            "expected character offsets of the tokens, found none stored; capture from texts, not token "
            "ids, or select by position"
        )
    return CharacterSpans(dataset["char_start"][tokens].values, dataset["char_end"][tokens].values)


def characters_to_positions(dataset: xr.Dataset, row: int, tokens: slice, chars: Chars) -> list[int]:
    """Places, among the given tokens of a prompt, of those over a span of characters or a phrase.

    Raises PromptError for a span that is not within the text, or that no token stands for.
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
    found = spans.char_range_to_tokens(start, end)
    if not found:
        raise PromptError(f"no token of prompt {number} stands for characters {start}..{end}; select others")
    return found


def in_prompt(position: Position, size: int) -> Indices:
    """Positions meant in a prompt of this many tokens; a slice as Python slices.

    Raises PromptError for a position it does not have.
    """
    if isinstance(position, slice):
        return np.arange(size)[position]
    asked = np.array(as_indices(position, "positions", PromptError), np.int64)
    for one in asked:
        if not -size <= one < size:
            raise PromptError(
                f"expected positions in 0..{size - 1} (or negative, from the end), found {one} in a prompt "
                f"of {size} tokens; select the longer prompts, or a slice"
            )
    return asked % size


def select_layers(dataset: xr.Dataset, layer: LayerChoice) -> xr.Dataset:
    """The given layers of every variable that has any.

    A number drops the axis; a range or list keeps it and must be there whole; a slice includes both of its
    ends and takes what is there, as `.sel` does. Raises EntryNotFound for layers that were not captured.
    """
    chosen = dataset
    for dim in [dim for dim in dataset.dims if str(dim).startswith("layer")]:
        there = [int(i) for i in dataset[dim].values]
        if isinstance(layer, slice):
            found = dataset[dim].to_index().slice_indexer(layer.start, layer.stop, layer.step)
            if not there[found]:
                raise EntryNotFound(_missing_layers(dataset, str(dim), there, f"{layer.start}-{layer.stop}"))
            chosen = chosen.isel({dim: found})
            continue
        asked = as_indices(layer, "layers", EntryNotFound)
        if absent := [i for i in asked if i not in there]:
            raise EntryNotFound(_missing_layers(dataset, str(dim), there, ", ".join(map(str, absent))))
        at = [there.index(i) for i in asked]
        chosen = chosen.isel({dim: at if is_several(layer) else at[0]})
    return chosen


def at_hook(dataset: xr.Dataset, hook: str) -> xr.DataArray:
    """What was captured at a hook point: of one layer, or of all for "*" in its place.

    Raises HookPointNotFound with the command that captures it.
    """
    held = {
        str(array.attrs["hook"]): as_layer(array)
        for array in dataset.data_vars.values()
        if "hook" in array.attrs
    }
    for path, array in held.items():
        front, layered, back = path.partition("{}")
        if not layered and hook == path:
            return array
        if not layered or not (hook.startswith(front) and hook.endswith(back)):
            continue
        place = hook[len(front) : len(hook) - len(back)]
        if place == "*":
            return array
        if place.isdecimal() and int(place) in np.atleast_1d(array["layer"].values):
            return array.sel(layer=int(place)) if "layer" in array.dims else array
    known = [path.replace("{}", "*") for path in held]
    near = nearest(hook, known)
    raise HookPointNotFound(
        f"{hook!r} was not captured in this run, which holds {_told(dataset) or 'no hook points'}"
        f"{f'; nearest is {near!r}' if near else ''}. Capture it: {capture_command(dataset, hook)}"
    )


def as_layer(array: xr.DataArray) -> xr.DataArray:
    """An array by itself needs no layer axis of its own name, as it has in a dataset of unlike ones."""
    own = next((dim for dim in array.dims if str(dim).startswith("layer_")), None)
    return array if own is None else array.drop_vars("layer", errors="ignore").rename({own: "layer"})


def capture_command(dataset: xr.Dataset, hook: str) -> str:
    """The command that adds a hook point to a run."""
    return f"mizarr capture {model_name(dataset) or 'MODEL'} PROMPTS --hooks '{hook}'"


def _missing_layers(dataset: xr.Dataset, dim: str, there: list[int], asked: str) -> str:
    arrays = [array for array in dataset.data_vars.values() if dim in array.dims]
    names = ", ".join(str(array.name) for array in arrays) or "no variable"
    hook = next(
        (str(array.attrs["hook"]) for array in arrays if "hook" in array.attrs), "blocks.{}.hook_resid_post"
    )
    first = asked.split(",", maxsplit=1)[0].split("-", maxsplit=1)[0]
    return (
        f"expected layers {asked} of {names}, found {ranges(there)}; leave the others out, or capture them: "
        f"{capture_command(dataset, hook.replace('{}', first if first.isdecimal() else '*'))}"
    )


def _told(dataset: xr.Dataset) -> str:
    """The hook points of a dataset, with their layers."""
    parts = []
    for array in dataset.data_vars.values():
        if "hook" in array.attrs:
            dim = next((dim for dim in array.dims if str(dim).startswith("layer")), None)
            layers = f" (layers {ranges(array[dim].values.tolist())})" if dim is not None else ""
            parts.append(f"{str(array.attrs['hook']).replace('{}', '*')}{layers}")
    return ", ".join(parts)


def ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _row_of(text: str, texts: list[str]) -> int:
    found = [row for row, held in enumerate(texts) if held == text]
    if len(found) == 1:
        return found[0]
    if found:
        raise PromptError(f"expected a prompt's text once, found {text!r} at {found}; give its number")
    near = nearest(text, texts)
    hint = f"; did you mean {near!r}?" if near else ""
    raise PromptError(f"expected the whole text of one of {len(texts)} prompts, found {text!r}{hint}")


def _texts(dataset: xr.Dataset) -> list[str]:
    if "text" not in dataset.coords:
        raise PromptError(
            "expected the texts of the prompts, found none stored; give prompts by their numbers"
        )
    return [str(text) for text in np.atleast_1d(dataset["text"].values)]


def _nearest_token(string: str, vocabulary: Sequence[str]) -> str | None:
    """With or without its space, in other letters' case, else by spelling among tokens of about its
    length.
    """
    variants = (
        f" {string}",
        f"\u2581{string.strip()}",  # SentencePiece's space
        string.strip(),
        string.lower(),
        string.capitalize(),
        f" {string.strip().lower()}",
        f" {string.strip().capitalize()}",
    )
    there = set(vocabulary)
    for variant in variants:
        if variant and variant in there:
            return variant
    alike = [s for s in there if abs(len(s) - len(string)) <= _CLOSE and s.strip()[:1] == string.strip()[:1]]
    return nearest(string, sorted(alike))
