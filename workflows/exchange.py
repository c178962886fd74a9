"""Import of activations computed by other tools: maps arrays of files to hook points of a named model.

Arrays are named after hook points ("blocks.5.hook_resid_post"), or mapped to them by patterns with `{layer}`,
or with "*" instead of the layer for one array whose first axis is all layers:

    {"model.layers.{layer}.output": "blocks.{layer}.hook_resid_post", "hidden_states":
    "blocks.*.hook_resid_pre"}

Border: names and axes; store/exchange/tensors.py reads files, store/exchange/imports.py stores them. Never
imports torch.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..pipeline.pinned import PinnedFiles
from ..store.arrays import Array, as_count, as_list, as_path, is_several, require_kind, shown
from ..store.errors import ConfigError, HookPointNotFound, PromptError, ShapeError, nearest
from ..store.exchange.exports import NOTE, TEXT_SUFFIX
from ..store.exchange.imports import Imported, declared_arrays, declared_run, pack_imported, store_imported
from ..store.exchange.outside import json_value, require_content
from ..store.exchange.tensors import as_bfloat16, read_npz, read_safetensors
from ..store.store import Store, requested_store

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["import_activations"]


TOKEN_IDS = ("token_id", "token_ids", "input_ids", "tokens")
"""Names of arrays in files that are read as token ids."""
LABELS = ("row_size", "char_start", "char_end", "position", "text", "attention_mask")
"""Names of arrays in files that are read as labels of tokens or prompts."""
DERIVED = ("layer", "prompt", "prompt_id", "row_start", "pair_start", "token_string")
"""Names of labels that an export writes for other readers; an import ignores and recomputes them."""
SIZES = ("hidden", "head", "kv_head", "d_head", "mlp")
"""Axes of activations besides token, prompt and position."""


def import_activations(
    files: str | Path | Sequence[str | Path],
    *,
    model: str,
    store: Store | str | Path,
    names: Mapping[str, str] | None = None,
    tokens: Sequence[Sequence[int]] | None = None,
    texts: Sequence[str] | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    n_layers: int | None = None,
    skip: Sequence[str] = (),
) -> xr.Dataset:
    """Store activations from safetensors or npz files as a run, and open it as a lazy labelled dataset.

    Arrays are [token, …], with an array row_size (tokens per prompt) for several prompts, or [prompt,
    position, …], where row_size or attention_mask marks padding on the right. Positions come before heads.

    Arguments:
        files: one file or several that together contain the run.
        model: name of the model, as far as known. It is recorded as declared, and the run is never mixed with
            activations computed by mizarr.
        store: a store, or its path or address.
        names: array name or pattern -> hook point, for arrays that are not named after hook points.
        tokens: token ids per prompt; None to read an array token_ids, input_ids, tokens or token_id, if any.
        texts: text of each prompt.
        dtype: "bfloat16" to read 2-byte values as such; None for the dtypes of the files.
        revision: revision of the model.
        n_layers: number of layers of the model; None for those up to the last layer in the files.
        skip: arrays to leave out, by name or glob.

    Raises:
        HookPointNotFound: a name is no hook point, or no array is left.
        ShapeError: an array does not have the axes of its hook point.
        PromptError: labels do not fit the arrays.
        SourceChanged: a file is overwritten during the import.
    """
    if not isinstance(model, str) or not model:
        raise ConfigError(
            f"expected model to name the model that computed the arrays, found {shown(model)}; set it to any "
            "name that you know the model by, such as its hub id"
        )
    paths = [as_path(path, "files") for path in as_list(files)]
    if names is not None:
        require_kind(names, Mapping, "names as a mapping", "write {'array': 'blocks.5.hook_resid_post'}")
    for argument, value in (("skip", skip), ("tokens", tokens), ("texts", texts)):
        if value is not None and not is_several(value):
            raise ConfigError(f"expected {argument} as a list, found {shown(value)}; write [{value!r:.40}]")
    for text in () if texts is None else texts:
        require_kind(text, str, "texts as a list of str", "leave texts out if there are none")
    if n_layers is not None:
        as_count(n_layers, "n_layers")
    if strange := [path for path in paths if path.suffix not in (".safetensors", ".npz")]:
        raise ConfigError(
            f"expected files that end in .safetensors or .npz, found {strange[0].name!r}; convert it to one "
            "of these formats"
        )
    pinned = PinnedFiles("what is imported", "it was overwritten meanwhile; start again once it is whole")
    for path in paths:
        if not require_content(path, ConfigError, "write it again"):
            raise ConfigError(f"expected a file at {str(path)!r}, found none; check the path")
        pinned.note(path)
    file_arrays, note = _read(paths, skip)
    arrays, labels = _split_arrays(file_arrays, names or {}, dtype)
    if not arrays:
        raise HookPointNotFound(
            f"expected activations in {', '.join(map(str, paths))}, found "
            f"{', '.join(file_arrays) or 'no arrays'}; "
            "map arrays to their hook points: names={'array': 'blocks.5.hook_resid_post'}"
        )
    ids = tokens if tokens is not None else next((labels[name] for name in TOKEN_IDS if name in labels), None)
    known_texts = texts if texts is not None else _texts(labels)
    spans = labels.get("char_start"), labels.get("char_end")
    packed, has_token_ids = pack_imported(arrays, ids, _row_size(labels, arrays), known_texts, spans)
    _expect_whole(labels, packed.position_of(slice(None)))
    content: dict[str, Any] = {
        # Sorted, as the same files in another order are the same run.
        "files": sorted(map(pinned.digest, paths)),
        # A list, as the order matters: the first pattern that fits an array is used.
        "names": [list(pair) for pair in (names or {}).items()],
        "skip": sorted(skip),
        "dtype": dtype,
        "n_layers": n_layers,
    }
    content |= {"note": note} if note else {}
    run, specs = declared_run(packed, model, revision, content), declared_arrays(arrays, n_layers)
    about = {"model": model, "declared": True, "revision": revision, "imported": content}
    if not has_token_ids or note.get("token_ids") == "unknown":
        about["token_ids"] = "unknown"

    # Opened last: it may create a folder, which invalid input should not leave behind.
    with nullcontext(store) if isinstance(store, Store) else requested_store(store) as opened:
        return store_imported(opened, run, packed, arrays, specs, about, pinned.check).open()


def _read(paths: Sequence[Path], skip: Sequence[str]) -> tuple[dict[str, Array], dict[str, Any]]:
    """All arrays of the files by name, without skipped ones, and the metadata that an export of mizarr
    contains."""
    arrays_by_name: dict[str, Array] = {}
    note: dict[str, Any] = {}
    for path in paths:
        if path.suffix == ".safetensors":
            arrays, metadata = read_safetensors(path)
            note = note or _note(metadata.get(NOTE, "{}"), path)
        else:
            arrays = read_npz(path)
            if (text := arrays.pop(f"{NOTE}{TEXT_SUFFIX}", None)) is not None:
                note = note or _note(text.tobytes(), path)
        if twice := sorted(set(arrays) & set(arrays_by_name)):
            raise ConfigError(
                f"expected each array name in one file only, found {twice[0]!r} in several files; leave out "
                "all of these files but one"
            )
        arrays_by_name |= arrays
    left_out = {name for pattern in skip for name in _matching(pattern, arrays_by_name)}
    fields = ("run", "key", "content", "label", "token_ids")
    remaining = {name: array for name, array in arrays_by_name.items() if name not in left_out}
    return remaining, {name: note[name] for name in fields if name in note}


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Names that match a glob; HookPointNotFound if none does."""
    names = list(names)
    matching = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if not matching:
        raise HookPointNotFound(_no_array(pattern, names))
    return matching


def _split_arrays(
    file_arrays: Mapping[str, Array], names: Mapping[str, str], dtype: str | None
) -> tuple[list[Imported], dict[str, Array]]:
    """Arrays of the files, split into activations with their hook points, and labels by name."""
    if dtype not in (None, "bfloat16"):
        raise ConfigError(
            f"expected dtype='bfloat16' or no dtype, found {dtype!r}; leave it out, as other dtypes are "
            "those of the file"
        )
    arrays: list[Imported] = []
    labels: dict[str, Array] = {}
    unused = set(names)
    for name, values in file_arrays.items():
        hook, pattern = _hook_of(name, names)
        unused.discard(pattern)
        if not pattern and _is_label(name.removesuffix(TEXT_SUFFIX)):
            labels[name] = np.array(values)  # a copy, as a memory map changes with its file
            continue
        if values.dtype.kind == "V" and dtype is None and values.dtype.name != "bfloat16":
            raise ShapeError(
                f"expected numbers in array {name!r}, found raw values of {values.dtype.itemsize} bytes, as "
                "numpy writes bfloat16; set dtype='bfloat16'"
            )
        raw = as_bfloat16(values, name) if dtype == "bfloat16" and values.dtype.itemsize == 2 else values
        arrays += _imported(name, hook, raw)
    if unused:
        raise HookPointNotFound(_no_array(min(unused), file_arrays))
    return arrays, labels


def _no_array(name: str, names: Iterable[str]) -> str:
    near = nearest(name, names)
    hint = f"; did you mean {near!r}?" if near else ""
    return f"no array is named {name!r}; there are {', '.join(sorted(names)) or 'none'}{hint}"


def _is_label(name: str) -> bool:
    from ..stages.forward.architectures.points import BY_NAME

    of_a_variable = name.startswith("layer_") and name.removeprefix("layer_") in BY_NAME
    return name in (*TOKEN_IDS, *LABELS, *DERIVED) or of_a_variable


def _hook_of(name: str, names: Mapping[str, str]) -> tuple[str, str]:
    """Hook point of an array, and the pattern of `names` that maps it; the array's own name and "" if no
    pattern does."""
    for pattern, target in names.items():
        # At most 18 digits, which fit in int64.
        expression = re.escape(pattern).replace(re.escape("{layer}"), r"(\d{1,18})")
        if match := re.fullmatch(expression, name):
            # Through int, as some files pad layer numbers with zeros.
            return target.replace("{layer}", str(int(match[1]))) if match.groups() else target, pattern
    return name, ""


def _imported(name: str, hook: str, values: Array) -> list[Imported]:
    """Activations of one array: one entry, or one per layer for a hook point with "*"."""
    from ..stages.forward.architectures.points import BY_NAME, HookPoint

    if "*" in hook:
        if not values.ndim or not len(values):
            raise ShapeError(
                f"expected array {name!r}, mapped to {hook!r}, with all layers along its first axis, found "
                f"shape {list(values.shape)}; map it to a single layer: {hook.replace('*', '0')!r}"
            )
        stacked = [(hook.replace("*", str(layer)), values[layer]) for layer in range(len(values))]
        return [entry for layer_hook, part in stacked for entry in _imported(name, layer_hook, part)]
    try:
        point = HookPoint.parse(hook)
    except HookPointNotFound as error:
        raise HookPointNotFound(
            f"array {name!r}: {error}; map it to a hook point (names={{{name!r}: "
            f"'blocks.5.hook_resid_post'}}), or leave it out (skip={name!r})"
        ) from error
    kind = BY_NAME[point.kind]
    if "query_position" in kind.dims:
        raise ShapeError(
            f"array {name!r}: expected activations with one value per token, found {hook}, which has one per "
            f"pair of positions; leave it out (skip={name!r})"
        )
    dims = tuple(dim for dim in kind.dims if dim in SIZES)
    if kind.dims[-1] == "one" and values.ndim > 1 and values.shape[-1] == 1:
        values = values[..., 0]
    return [Imported(name, kind.name, point.layer, kind.path, kind.meaning, dims, values)]


def _row_size(labels: Mapping[str, Array], arrays: Sequence[Imported]) -> Array | None:
    """Number of tokens of each prompt, [prompt], from the label row_size or from attention_mask; None if
    neither exists. Raises PromptError for padding on the left."""
    if "row_size" in labels or "attention_mask" not in labels:
        return labels.get("row_size")
    mask = np.asarray(labels["attention_mask"], bool)
    sizes: Array = mask.sum(-1)
    if mask.ndim != 2 or not np.array_equal(mask, np.arange(mask.shape[1]) < sizes[:, None]):
        raise PromptError(
            "expected attention_mask as [prompt, position] with padding on the right, found another shape or "
            "padding elsewhere; move the padding to the right, or leave the mask out if nothing is padded: "
            "skip='attention_mask'"
        )
    if unlike := [array for array in arrays if array.is_batch and array.values.shape[:2] != mask.shape]:
        raise ShapeError(
            f"expected attention_mask of shape {list(unlike[0].values.shape[:2])}, the prompts and positions "
            f"of array {unlike[0].name!r}, found {list(mask.shape)}; export the mask of the whole batch"
        )
    return sizes


def _texts(labels: Mapping[str, Array]) -> list[str] | None:
    """Text of each prompt, read from an array or from JSON (a list or a single text); None for files without
    texts."""
    if "text" in labels:
        return [str(text) for text in np.ravel(labels["text"])]
    raw = labels.get(f"text{TEXT_SUFFIX}")
    if raw is None:
        return None
    texts = _parsed(raw.tobytes(), f"text{TEXT_SUFFIX}")
    return [texts] if isinstance(texts, str) else [str(text) for text in texts]


def _note(text: str | bytes, path: Path) -> dict[str, Any]:
    note = _parsed(text, path)
    if not isinstance(note, dict):
        raise ConfigError(
            f"expected a JSON object in the metadata field {NOTE!r} of {path}, found {note!r}; write the "
            "file without this field"
        )
    return note


def _parsed(text: str | bytes, where: object) -> Any:
    """Value of a JSON text. Raises ConfigError if it is not valid. where: source of the text, for the
    message."""
    try:
        return json_value(text.encode() if isinstance(text, str) else text)
    except ValueError as error:
        raise ConfigError(f"expected valid JSON in {where}, found {error}; export the file again") from error


def _expect_whole(labels: Mapping[str, Array], positions: Array) -> None:
    """Raise PromptError if an array `position` shows that tokens of a prompt are missing, as a run contains
    every token."""
    if "position" in labels and not np.array_equal(labels["position"], positions):
        raise PromptError(
            "expected all tokens of every prompt, found gaps in the array 'position'; export the whole run, "
            "or import the selected tokens as prompts of their own: skip='position'"
        )
