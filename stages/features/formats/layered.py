"""What formats with one or two numbered safetensors files per layer share: numbering, hooks, shapes.

Border: names and headers; what a tensor means is the format's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ....store.errors import DictionaryError, nearest
from ..layers.files import CONFIG_YAML, DictionaryFiles, parse_reference
from ..layers.names import HOW_TO_SAY, hook_kind

__all__ = ["hooks_of", "numbered", "require_kind", "require_shapes", "scan_of"]


def numbered(files: DictionaryFiles, pattern: str) -> tuple[int, ...]:
    """Layers of the root files that match `pattern` (its group is the number), which must be 0 to the last.

    Raises DictionaryError naming the first layer that is missing.
    """
    found = sorted(int(m[1]) for name in files.listing if (m := re.fullmatch(pattern, name)))
    missing = next((layer for layer in range(len(found)) if found[layer] != layer), None)
    if missing is not None:
        raise DictionaryError(
            f"expected a file for every layer from 0 to {found[-1]} in {files.directory}, found none for "
            f"layer {missing}; fetch it again"
        )
    return tuple(found)


def hooks_of(files: DictionaryFiles, read: str | None, write: str | None) -> tuple[str, str]:
    """Hook kinds that are read and written: as given, else as config.yaml says.

    Raises DictionaryError when neither says it: a layout alone does not tell.
    """
    said = files.yaml
    names = (read or said.get("feature_input_hook"), write or said.get("feature_output_hook"))
    for name, what in zip(names, ("feature_input_hook", "feature_output_hook"), strict=True):
        if not isinstance(name, str):
            raise DictionaryError(
                f"expected {what} in {files.directory / CONFIG_YAML}, found {name!r}; {HOW_TO_SAY}"
            )
    return hook_kind(str(names[0])), hook_kind(str(names[1]))


def require_kind(files: DictionaryFiles, expected: str) -> None:
    """Raise DictionaryError where config.yaml says that the files are something else than they look like."""
    said = files.yaml.get("model_kind", expected)
    if said != expected:
        raise DictionaryError(
            f"expected model_kind to be {expected} in {files.directory / CONFIG_YAML}, as its files are "
            f"named, found {said!r}; correct it, or fetch the files again"
        )


def scan_of(files: DictionaryFiles) -> Any:
    """The identifier of the feature dashboards: as config.yaml says, or, of hub references, as
    circuit-tracer makes it: repo[//subfolder][@revision].
    """
    if files.revision is None:
        return files.yaml.get("scan")
    repository, subfolder, revision = parse_reference(files.name)
    return repository + (f"//{subfolder}" if subfolder else "") + (f"@{revision}" if revision else "")


def require_shapes(
    files: DictionaryFiles,
    name: str,
    expected: Mapping[str, Sequence[int | None]],
    optional: Mapping[str, Sequence[int | None]] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a file, checked; None stands for any size.

    Raises DictionaryError for the first tensor that is missing or of another shape.
    """
    found, place = files.shapes(name), files.path(name)
    for tensor, shape in {**expected, **(optional or {})}.items():
        if tensor not in found:
            if tensor in expected:
                near = nearest(tensor, found)
                raise DictionaryError(
                    f"expected a tensor {tensor!r} in {place}, found "
                    f"{', '.join(sorted(found))}" + (f"; nearest is {near!r}" if near else "")
                )
            continue
        got = found[tensor]
        if len(got) != len(shape) or any(s is not None and s != g for s, g in zip(shape, got, strict=True)):
            told = ["any" if size is None else size for size in shape]
            raise DictionaryError(f"expected {tensor!r} of shape {told} in {place}, found {list(got)}")
    return found
