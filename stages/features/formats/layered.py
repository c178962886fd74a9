"""Helpers for formats with one or two numbered safetensors files per layer: layers, hook points, shapes.

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
    """Layers of the files in the root folder, which must be 0, 1, 2, ... without a gap.

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
            f"layer {missing}; fetch the dictionary again"
        )
    return tuple(layers)


def hooks_of(files: DictionaryFiles, read: str | None, write: str | None) -> tuple[str, str]:
    """Kinds of the hook points (read, written), such as ("resid_mid", "mlp_out").

    Arguments:
        files: Files of the dictionary.
        read: Name of the hook point that features read; None: the one that config.yaml names.
        write: Name of the hook point that features write to; None: the one that config.yaml names.

    Raises:
        DictionaryError: Neither the arguments nor config.yaml name a hook point.
    """
    config = files.yaml
    names = (read or config.get("feature_input_hook"), write or config.get("feature_output_hook"))
    # Not guessed from the layout of files: resid_mid and mlp_pre have the same width.
    for name, field in zip(names, ("feature_input_hook", "feature_output_hook"), strict=True):
        if not isinstance(name, str):
            raise DictionaryError(
                f"expected the name of a hook point as {field} in {files.directory / CONFIG_YAML}, found "
                f"{name!r}; {HOOKS_ADVICE}"
            )
    return hook_kind(str(names[0])), hook_kind(str(names[1]))


def require_kind(files: DictionaryFiles, expected: str) -> None:
    """Raise DictionaryError if `model_kind` in config.yaml contradicts the names of the files."""
    stated = files.yaml.get("model_kind", expected)
    if stated != expected:
        raise DictionaryError(
            f"expected model_kind {expected} in {files.directory / CONFIG_YAML}, as the names of its files "
            f"imply, found {stated!r}; correct the entry, or fetch the dictionary again"
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
    """Check the shapes of tensors in a safetensors file, and return the shapes of all its tensors.

    Arguments:
        files: Files of the dictionary.
        name: Name of the file.
        expected: By tensor name, the shape it must have, where None allows any size.
        optional: The same for tensors that may be missing.

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
    """Check the shapes of tensors that were read from a file of any format.

    Arguments:
        shapes: Shapes of all tensors of the file, by name.
        place: Path of the file, for messages.
        expected: By tensor name, the shape it must have, where None allows any size.
        optional: The same for tensors that may be missing.

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
                    f"{', '.join(sorted(shapes))}" + (f"; is {near!r} meant?" if near else "")
                )
            continue
        actual = shapes[tensor]
        if len(actual) != len(shape) or any(
            size is not None and size != actual_size for size, actual_size in zip(shape, actual, strict=True)
        ):
            expected_shape = ["any" if size is None else size for size in shape]
            raise DictionaryError(
                f"expected the tensor {tensor!r} of shape {expected_shape} in {place}, found {list(actual)}"
            )
    return shapes
