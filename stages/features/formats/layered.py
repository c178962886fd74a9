"""Shared parts of formats with one or two numbered safetensors files per layer: numbering, hook points,
shapes.

Border: names and headers; the meaning of a tensor is defined by its format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ....store.errors import DictionaryError, nearest
from ..layers.files import CONFIG_YAML, DictionaryFiles, parse_reference
from ..layers.names import HOOKS_ADVICE, hook_kind

__all__ = ["check_shapes", "hooks_of", "numbered", "require_kind", "require_shapes", "scan_of"]


def numbered(files: DictionaryFiles, pattern: str) -> tuple[int, ...]:
    """Layers that have a file in the root folder.

    Arguments:
        files: Files of the dictionary.
        pattern: Regular expression of the file names, whose group is the layer number.

    Raises:
        DictionaryError: A layer between 0 and the last is missing.
    """
    layers = sorted(int(m[1]) for name in files.listing if (m := re.fullmatch(pattern, name)))
    missing = next((layer for layer in range(len(layers)) if layers[layer] != layer), None)
    if missing is not None:
        raise DictionaryError(
            f"expected a file for every layer from 0 to {layers[-1]} in {files.directory}, found none for "
            f"layer {missing}; fetch it again"
        )
    return tuple(layers)


def hooks_of(files: DictionaryFiles, read: str | None, write: str | None) -> tuple[str, str]:
    """Hook kinds that are read and written.

    Arguments:
        files: Files of the dictionary.
        read: Name of the hook point that is read; None for that in config.yaml.
        write: Name of the hook point that is written, likewise.

    Raises:
        DictionaryError: They are stated nowhere; they are not guessed from the layout.
    """
    config = files.yaml
    names = (read or config.get("feature_input_hook"), write or config.get("feature_output_hook"))
    # Not guessed from the layout of files: resid_mid and mlp_pre have the same width.
    for name, field in zip(names, ("feature_input_hook", "feature_output_hook"), strict=True):
        if not isinstance(name, str):
            raise DictionaryError(
                f"expected {field} in {files.directory / CONFIG_YAML}, found {name!r}; {HOOKS_ADVICE}"
            )
    return hook_kind(str(names[0])), hook_kind(str(names[1]))


def require_kind(files: DictionaryFiles, expected: str) -> None:
    """Raise DictionaryError if `model_kind` in config.yaml contradicts the names of the files."""
    stated = files.yaml.get("model_kind", expected)
    if stated != expected:
        raise DictionaryError(
            f"expected model_kind to be {expected} in {files.directory / CONFIG_YAML}, as its files are "
            f"named, found {stated!r}; correct it, or fetch the files again"
        )


def scan_of(files: DictionaryFiles) -> Any:
    """Identifier of the feature dashboards: the entry `scan` of config.yaml; for hub references the one that
    circuit-tracer builds, repo[//subfolder][@revision]."""
    if files.revision is None:
        return files.yaml.get("scan")
    # The same spelling as in circuit-tracer, so that its links to dashboards work.
    repository, subfolder, revision = parse_reference(files.name)
    return repository + (f"//{subfolder}" if subfolder else "") + (f"@{revision}" if revision else "")


def require_shapes(
    files: DictionaryFiles,
    name: str,
    expected: Mapping[str, Sequence[int | None]],
    optional: Mapping[str, Sequence[int | None]] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Check tensor shapes of a file, where None allows any size; returns the shapes of all tensors.

    Arguments:
        files: Files of the dictionary.
        name: The safetensors file.
        expected: Shapes of required tensors.
        optional: Shapes of tensors that may be missing.

    Raises:
        DictionaryError: A tensor is missing or has another shape.
    """
    return check_shapes(files.shapes(name), files.path(name), expected, optional)


def check_shapes(
    shapes: dict[str, tuple[int, ...]],
    place: object,
    expected: Mapping[str, Sequence[int | None]],
    optional: Mapping[str, Sequence[int | None]] | None = None,
) -> dict[str, tuple[int, ...]]:
    """As `require_shapes`, for tensors of any file.

    Arguments:
        shapes: Shapes of all tensors of the file.
        place: The file, for messages.
        expected: Shapes of required tensors.
        optional: Shapes of tensors that may be missing.

    Returns:
        `shapes`.

    Raises:
        DictionaryError: A tensor is missing or has another shape.
    """
    for tensor, shape in {**expected, **(optional or {})}.items():
        if tensor not in shapes:
            if tensor in expected:
                near = nearest(tensor, shapes)
                raise DictionaryError(
                    f"expected a tensor {tensor!r} in {place}, found "
                    f"{', '.join(sorted(shapes))}" + (f"; nearest is {near!r}" if near else "")
                )
            continue
        actual = shapes[tensor]
        if len(actual) != len(shape) or any(
            s is not None and s != g for s, g in zip(shape, actual, strict=True)
        ):
            expected_shape = ["any" if size is None else size for size in shape]
            raise DictionaryError(
                f"expected {tensor!r} of shape {expected_shape} in {place}, found {list(actual)}"
            )
    return shapes
