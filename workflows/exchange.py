"""Bring in activations harvested elsewhere: which array of a file holds which hook point, and of which model.

Border: names and axes; files are read in store/exchange/tensors.py, stored in store/exchange/imports.py.
Never imports torch.

Names of arrays are hook points ("blocks.5.hook_resid_post"), or mapped to them by patterns with `{layer}`,
or, with "*" in place of the layer, one array whose first axis is all layers:

    {"model.layers.{layer}.output": "blocks.{layer}.hook_resid_post", "hidden_states":
    "blocks.*.hook_resid_pre"}
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
"""Names under which a file may hold token ids."""
LABELS = ("row_size", "char_start", "char_end", "position", "text", "attention_mask")
DERIVED = ("layer", "prompt", "prompt_id", "row_start", "pair_start", "token_string")
"""Labels an export writes for other readers, which follow from the others."""
SIZES = ("hidden", "head", "kv_head", "d_head", "mlp")


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
    """Store activations from safetensors or npz files as a run, and open it: labelled, lazy.

    files: one or several, which together hold the run.  model, revision: which model they are of, as far as
    you know; recorded as declared, and never mixed with what was computed here.  names: array -> hook point,
    where arrays are not named after hook points already.  tokens: ids per prompt, else taken from an array
    token_ids (or input_ids, tokens, token_id); may be unknown.  texts: per prompt.  dtype: "bfloat16" to
    read 2-byte values so.  n_layers: of the model, by default up to the last one in the files.  skip: arrays
    to leave out, by name or glob.
    Arrays are [token, …] (with an array row_size, tokens per prompt; else one prompt) or [prompt, position,
    …] (with row_size or attention_mask: without the padding, which is on the right); positions come before
    heads.
    Raises HookPointNotFound for a name that is no hook point, ShapeError, PromptError for what does not fit,
    SourceChanged for a file that is written over meanwhile.
    """
    if not isinstance(model, str) or not model:
        raise ConfigError(
            f"expected the name of the model the arrays are of, found {shown(model)}; name it as you know it"
        )
    paths = [as_path(path, "files") for path in as_list(files)]
    if names is not None:
        require_kind(names, Mapping, "names as a mapping", "write {'array': 'blocks.5.hook_resid_post'}")
    for argument, value in (("skip", skip), ("tokens", tokens), ("texts", texts)):
        if value is not None and not is_several(value):
            raise ConfigError(f"expected {argument} as a list, found {shown(value)}; write [{value!r:.40}]")
    for text in () if texts is None else texts:
        require_kind(text, str, "texts as a list of texts", "leave them out where there are none")
    if n_layers is not None:
        as_count(n_layers, "n_layers")
    if strange := [path for path in paths if path.suffix not in (".safetensors", ".npz")]:
        raise ConfigError(f"expected a .safetensors or .npz file, found {strange[0].name!r}; convert it")
    pinned = PinnedFiles("what is imported", "it was overwritten meanwhile; start again once it is whole")
    for path in paths:
        if not require_content(path, ConfigError, "write it again"):
            raise ConfigError(f"expected a file at {str(path)!r}, found none; check the path")
        pinned.note(path)
    held, note = _read(paths, skip)
    arrays, labels = _sorted_out(held, names or {}, dtype)
    if not arrays:
        raise HookPointNotFound(
            f"expected activations in {', '.join(map(str, paths))}, found {', '.join(held) or 'no arrays'}; "
            "say what they hold: names={'array': 'blocks.5.hook_resid_post'}"
        )
    ids = tokens if tokens is not None else next((labels[name] for name in TOKEN_IDS if name in labels), None)
    known_texts = texts if texts is not None else _texts(labels)
    spans = labels.get("char_start"), labels.get("char_end")
    packed, known = pack_imported(arrays, ids, _row_size(labels, arrays), known_texts, spans)
    _expect_whole(labels, packed.position_of(slice(None)))
    content: dict[str, Any] = {
        "files": sorted(map(pinned.digest, paths)),
        # Pairs in their order: of two patterns that fit an array the first one counts.
        "names": [list(pair) for pair in (names or {}).items()],
        "skip": sorted(skip),
        "dtype": dtype,
        "n_layers": n_layers,
    }
    content |= {"note": note} if note else {}
    run, specs = declared_run(packed, model, revision, content), declared_arrays(arrays, n_layers)
    about = {"model": model, "declared": True, "revision": revision, "imported": content}
    if not known or note.get("token_ids") == "unknown":
        about["token_ids"] = "unknown"

    # Opened last, as this may create a folder: input that is no good leaves nothing behind.
    with nullcontext(store) if isinstance(store, Store) else requested_store(store) as opened:
        return store_imported(opened, run, packed, arrays, specs, about, pinned.check).open()


def _read(paths: Sequence[Path], skip: Sequence[str]) -> tuple[dict[str, Array], dict[str, Any]]:
    """All arrays of all files by name, and what the file says of itself where it was exported from a
    store.
    """
    found: dict[str, Array] = {}
    note: dict[str, Any] = {}
    for path in paths:
        if path.suffix == ".safetensors":
            arrays, metadata = read_safetensors(path)
            note = note or _note(metadata.get(NOTE, "{}"), path)
        else:
            arrays = read_npz(path)
            if (text := arrays.pop(f"{NOTE}{TEXT_SUFFIX}", None)) is not None:
                note = note or _note(text.tobytes(), path)
        if twice := sorted(set(arrays) & set(found)):
            raise ConfigError(
                f"expected every array once, found {twice[0]!r} in several files; leave one out"
            )
        found |= arrays
    left_out = {name for pattern in skip for name in _matching(pattern, found)}
    kept = ("run", "key", "content", "label", "token_ids")
    wanted = {name: array for name, array in found.items() if name not in left_out}
    return wanted, {name: note[name] for name in kept if name in note}


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names a glob stands for; HookPointNotFound for none."""
    held = list(names)
    found = [name for name in held if fnmatch.fnmatchcase(name, pattern)]
    if not found:
        raise HookPointNotFound(_no_array(pattern, held))
    return found


def _sorted_out(
    held: Mapping[str, Array], names: Mapping[str, str], dtype: str | None
) -> tuple[list[Imported], dict[str, Array]]:
    """Arrays at hook points, and labels."""
    if dtype not in (None, "bfloat16"):
        raise ConfigError(
            f"expected dtype 'bfloat16' or none, found {dtype!r}; other dtypes are those of the file"
        )
    arrays: list[Imported] = []
    labels: dict[str, Array] = {}
    unused = set(names)
    for name, values in held.items():
        hook, pattern = _hook_of(name, names)
        unused.discard(pattern)
        if not pattern and _is_label(name.removesuffix(TEXT_SUFFIX)):
            labels[name] = np.array(values)  # not a mapping, which changes with its file
            continue
        if values.dtype.kind == "V" and dtype is None and values.dtype.name != "bfloat16":
            raise ShapeError(
                f"expected numbers in {name!r}, found raw values of {values.dtype.itemsize} bytes; numpy "
                "writes bfloat16 so: say dtype='bfloat16'"
            )
        raw = as_bfloat16(values, name) if dtype == "bfloat16" and values.dtype.itemsize == 2 else values
        arrays += _imported(name, hook, raw)
    if unused:
        raise HookPointNotFound(_no_array(min(unused), held))
    return arrays, labels


def _no_array(name: str, held: Iterable[str]) -> str:
    near = nearest(name, held)
    hint = f"; did you mean {near!r}?" if near else ""
    return f"no array is named {name!r}; there are {', '.join(sorted(held)) or 'none'}{hint}"


def _is_label(name: str) -> bool:
    from ..stages.forward.architectures.points import BY_NAME

    of_a_variable = name.startswith("layer_") and name.removeprefix("layer_") in BY_NAME
    return name in (*TOKEN_IDS, *LABELS, *DERIVED) or of_a_variable


def _hook_of(name: str, names: Mapping[str, str]) -> tuple[str, str]:
    """The hook point of an array, and the pattern that says so ("" where it is its own name)."""
    for pattern, target in names.items():
        expression = re.escape(pattern).replace(re.escape("{layer}"), r"(\d{1,18})")
        if found := re.fullmatch(expression, name):
            return target.replace("{layer}", str(int(found[1]))) if found.groups() else target, pattern
    return name, ""


def _imported(name: str, hook: str, values: Array) -> list[Imported]:
    """The arrays behind a name: one, or one per layer for a hook point with "*"."""
    from ..stages.forward.architectures.points import BY_NAME, HookPoint

    if "*" in hook:
        if not values.ndim or not len(values):
            raise ShapeError(f"expected {name!r} with an axis of layers first, found {list(values.shape)}")
        stacked = [(hook.replace("*", str(layer)), values[layer]) for layer in range(len(values))]
        return [one for at, part in stacked for one in _imported(name, at, part)]
    try:
        point = HookPoint.parse(hook)
    except HookPointNotFound as error:
        raise HookPointNotFound(
            f"array {name!r}: {error}; say what it is (names={{{name!r}: 'blocks.5.hook_resid_post'}}), or "
            f"leave it out (skip={name!r})"
        ) from error
    kind = BY_NAME[point.kind]
    if "query_position" in kind.dims:
        raise ShapeError(
            f"array {name!r}: {hook} has two positions per number, and only activations per token are "
            f"imported; leave it out (skip={name!r})"
        )
    dims = tuple(dim for dim in kind.dims if dim in SIZES)
    if kind.dims[-1] == "one" and values.ndim > 1 and values.shape[-1] == 1:
        values = values[..., 0]
    return [Imported(name, kind.name, point.layer, kind.path, kind.meaning, dims, values)]


def _row_size(labels: Mapping[str, Array], arrays: Sequence[Imported]) -> Array | None:
    """Tokens per prompt, as said, or as a mask of a padded batch shows; PromptError for padding on the
    left.
    """
    if "row_size" in labels or "attention_mask" not in labels:
        return labels.get("row_size")
    mask = np.asarray(labels["attention_mask"], bool)
    sizes: Array = mask.sum(-1)
    if mask.ndim != 2 or not np.array_equal(mask, np.arange(mask.shape[1]) < sizes[:, None]):
        raise PromptError(
            "expected attention_mask as [prompt, position] with padding on the right, found another; repack "
            "the arrays, or leave it out (skip) where nothing is padding"
        )
    if unlike := [one for one in arrays if one.is_batch and one.values.shape[:2] != mask.shape]:
        raise ShapeError(
            f"expected attention_mask of the prompts and positions of {unlike[0].name!r}, "
            f"{list(unlike[0].values.shape[:2])}, found {list(mask.shape)}; give that of the whole batch"
        )
    return sizes


def _texts(labels: Mapping[str, Array]) -> list[str] | None:
    """Texts as an array, as a list of JSON, or that of one prompt alone."""
    if "text" in labels:
        return [str(text) for text in np.ravel(labels["text"])]
    raw = labels.get(f"text{TEXT_SUFFIX}")
    if raw is None:
        return None
    found = _parsed(raw.tobytes(), f"text{TEXT_SUFFIX}")
    return [found] if isinstance(found, str) else [str(text) for text in found]


def _note(text: str | bytes, path: Path) -> dict[str, Any]:
    found = _parsed(text, path)
    if not isinstance(found, dict):
        raise ConfigError(
            f"expected named values in the note of {path}, found {found!r}; write it without `{NOTE}`"
        )
    return found


def _parsed(text: str | bytes, where: object) -> Any:
    """What JSON says; ConfigError for what is none."""
    try:
        return json_value(text.encode() if isinstance(text, str) else text)
    except ValueError as error:
        raise ConfigError(f"expected JSON in {where}, found {error}; export it again") from error


def _expect_whole(labels: Mapping[str, Array], positions: Array) -> None:
    """PromptError for a selection of tokens: a run holds every token of its prompts."""
    if "position" in labels and not np.array_equal(labels["position"], positions):
        raise PromptError(
            "expected all tokens of every prompt, found a selection (its positions have gaps); export the "
            "whole run, or import the arrays without 'position' as prompts of their own"
        )
