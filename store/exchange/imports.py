"""Import activations that another program computed, as a run with a declared identity.

How such numbers were computed cannot be verified. So the key of the run is a digest of what the user
declared, in a namespace of its own, and of the files: it never equals the key of a run computed here, or of
an import of other files.

Which hook point an array belongs to is decided in workflows/exchange.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..arrays import Array
from ..digest import content_digest, digest, raw_bytes
from ..errors import PromptError, ShapeError, SourceChanged
from ..keys import RunKey
from ..reading.labelled import LabelledEntry
from ..runs.committed import VariableLayer
from ..runs.entries import ArraySpec
from ..runs.packed import PackedTokens
from .tensors import release

if TYPE_CHECKING:
    from ..store import Store

__all__ = ["Imported", "declared_arrays", "declared_run", "pack_imported", "store_imported"]

FLOATS = ("float32", "bfloat16", "float16", "float64")
"""Dtypes of activations that can be imported."""
MOST_LAYERS = 10_000
"""Limit on the number of layers: a larger number is a misread name."""
_MEMORY_BYTES = 128 << 20  # bytes of a segment's arrays that are in memory together
_BLOCK_BYTES = 4 << 20  # bytes that are read from a memory map before its pages are released


@dataclass(frozen=True)
class Imported:
    """One array of activations in a file to be imported, with its hook point and layer."""

    name: str
    """Name in the file."""
    variable: str
    """Name of the array's variable in the store, such as "resid_post"."""
    layer: int | None
    """Layer number; None for an array without a layer."""
    hook: str
    """Hook point with "{}" for the layer, such as "blocks.{}.hook_resid_post"."""
    meaning: str
    """Description of the activations, stored as `long_name`."""
    dims: tuple[str, ...]
    """Dimensions of one token's values: ("hidden",), ("head", "d_head"), () for a number."""
    values: Array
    """[token, *dims], or [prompt, position, *dims] padded on the right."""

    @property
    def cell(self) -> VariableLayer:
        """(variable, layer): what identifies the array in the stored run."""
        return self.variable, self.layer

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's values."""
        return math.prod(self.tail) * self.values.dtype.itemsize

    @property
    def is_batch(self) -> bool:
        """Whether the values are [prompt, position, ...] and padded, rather than [token, ...]."""
        return self.values.ndim == len(self.dims) + 2

    @property
    def tail(self) -> tuple[int, ...]:
        """Shape of the values of one token."""
        return self.values.shape[self.values.ndim - len(self.dims) :]

    def spec(self, layers: int) -> ArraySpec:
        """Describe the array to store: variable, hook point, axes, and the dtype of the file.

        Arguments:
            layers: Number of layers of the model.
        """
        layer_dims = () if self.layer is None else ("layer",)
        sizes = dict(zip(self.dims, self.tail, strict=True))
        return ArraySpec(
            self.variable, self.hook, (*layer_dims, "token", *self.dims), sizes, self.values.dtype.name,
            None if self.layer is None else layers, self.meaning, "1",
        )  # fmt: skip

    def blocks(self, tokens: PackedTokens, token_range: range) -> Iterator[Array]:
        """Yield copies of the values of a token range in blocks [token, ...] of about 4 MiB, without padding.

        Arguments:
            tokens: All prompts of the run.
            token_range: Range of tokens, counted over all prompts.
        """
        step = max(1, _BLOCK_BYTES // max(1, self.row_bytes))
        for start in range(token_range.start, token_range.stop, step):
            token_slice = slice(start, min(start + step, token_range.stop))
            index = (
                (tokens.prompt_of(token_slice), tokens.position_of(token_slice))
                if self.is_batch
                else token_slice
            )
            # A copy: digest and write must see the same bytes, even if the file changes in between.
            yield np.array(self.values[index], self.values.dtype.newbyteorder("="), order="C", subok=False)
            # Otherwise pages of the whole file would stay in memory while it is streamed.
            release(self.values)

    def digest(self, tokens: PackedTokens, token_range: range) -> str:
        """Content digest of the values of a token range; arguments as for `blocks`."""
        return content_digest(*(raw_bytes(block) for block in self.blocks(tokens, token_range)))

    def rows(self, tokens: PackedTokens, token_range: range, digest: str) -> Array:
        """Copy the values of a token range into one array [token, ...].

        Arguments:
            tokens: All prompts of the run.
            token_range: Range of tokens, counted over all prompts.
            digest: Digest that the values must have.

        Raises:
            SourceChanged: The digest differs, as the file was overwritten meanwhile.
        """
        rows = np.empty((len(token_range), *self.tail), self.values.dtype.newbyteorder("="))
        start = 0
        for block in self.blocks(tokens, token_range):
            rows[start : start + len(block)] = block
            start += len(block)
        if content_digest(raw_bytes(rows)) != digest:
            raise SourceChanged(
                f"the file with array {self.name!r} was overwritten while it was being imported; import it "
                "again"
            )
        return rows


def declared_identity(model: str, revision: str | None) -> str:
    """Model digest for activations that another program computed, made of the declared name and revision.

    It never equals the digest of a model whose files were read.

    Arguments:
        model: Declared name of the model.
        revision: Declared revision; None for none.
    """
    return digest("declared-model", model, revision)


def pack_imported(
    arrays: Sequence[Imported],
    ids: Array | Sequence[Sequence[int]] | None,
    row_size: Array | Sequence[int] | None,
    texts: Sequence[str] | None,
    offsets: tuple[Array | None, Array | None] = (None, None),
) -> tuple[PackedTokens, bool]:
    """Work out the prompts and tokens that imported arrays belong to.

    Arguments:
        arrays: Arrays of the files.
        ids: Token ids: [token], [prompt, position] padded on the right, or a list per prompt; None if
            unknown.
        row_size: Tokens per prompt. None counts them in lists of ids; otherwise arrays [token, ...] are one
            prompt, and every position of arrays [prompt, position, ...] is a token.
        texts: Prompts as text; None if unknown.
        offsets: First character and end of each token in its text; None if unknown.

    Returns:
        The tokens, and whether their ids are known (unknown ids are 0 and must not be shown).

    Raises:
        ShapeError: Arrays do not fit together or to the tokens.
        PromptError: Token ids or sizes are invalid.
    """
    prompt_ids = ids if ids is None or isinstance(ids, np.ndarray) else [np.asarray(row) for row in ids]
    if isinstance(prompt_ids, list) and (not prompt_ids or any(row.ndim != 1 for row in prompt_ids)):
        raise PromptError(
            "expected the token ids to import as one list of ids per prompt, such as [[5, 8], [5]], found "
            "another nesting; write them so"
        )
    first_array = arrays[0]
    for array in arrays:
        axes = array.values.ndim - len(array.dims)
        if axes not in (1, 2) or array.is_batch != first_array.is_batch:
            raise ShapeError(
                f"expected array {array.name!r} as [token, {', '.join(array.dims)}] or [prompt, position, "
                f"{', '.join(array.dims)}], and all arrays of the import alike, found shape "
                f"{list(array.values.shape)}; transpose it, positions before heads"
            )
    sizes = _row_sizes(first_array, prompt_ids, row_size)
    if sizes.ndim != 1 or sizes.dtype.kind not in "iu" or not sizes.size:
        raise PromptError(
            "expected row_size as a list of integers, the number of tokens of each prompt, found "
            f"{sizes.dtype} of shape {list(sizes.shape)}"
        )
    for array in arrays:
        if not _fits_prompts(array.values.shape, sizes, array.is_batch, padded=row_size is not None):
            raise ShapeError(
                f"expected array {array.name!r} for {len(sizes)} prompts with {int(sizes.sum())} tokens in "
                f"all and {int(sizes.max())} in the longest, found shape {list(array.values.shape)}; check "
                "token ids and row_size (or attention_mask)"
            )
    tokens = PackedTokens(
        _flat_ids(prompt_ids, sizes), sizes, None if texts is None else list(texts), *offsets
    )
    return tokens, prompt_ids is not None


def declared_arrays(arrays: Sequence[Imported], n_layers: int | None) -> list[ArraySpec]:
    """Describe the arrays to store, one per variable with all its layers; check that the files agree.

    Arguments:
        arrays: Arrays of the files.
        n_layers: Number of layers of the model; None for the highest layer + 1.

    Raises:
        ShapeError: Several dtypes, no floats, unequal or empty shapes, or two arrays for one hook point and
            layer.
    """
    dtypes = sorted({array.values.dtype.name for array in arrays})
    if len(dtypes) != 1 or dtypes[0] not in FLOATS:
        raise ShapeError(
            f"expected the arrays to import in one dtype among {', '.join(FLOATS)}, found "
            f"{', '.join(dtypes)}; convert them, or say dtype='bfloat16' for raw 2-byte values"
        )
    layers = [array.layer for array in arrays if array.layer is not None]
    layer_count = n_layers if n_layers is not None else max(layers, default=-1) + 1
    if layers and max(layers) >= layer_count:
        raise ShapeError(
            f"the files have an array for layer {max(layers)}, and n_layers={layer_count} allows layers up "
            f"to {layer_count - 1}; give the number of layers of the model as n_layers"
        )
    if layer_count > MOST_LAYERS:
        raise ShapeError(
            f"expected a model of at most {MOST_LAYERS} layers, found {layer_count}; check the names of the "
            "arrays and n_layers"
        )
    # The first array of a variable defines its shape; the layers must agree.
    specs: dict[str, ArraySpec] = {}
    array_of_cell: dict[VariableLayer, Imported] = {}
    for array in arrays:
        earlier = array_of_cell.setdefault(array.cell, array)
        if earlier is not array:
            raise ShapeError(
                f"the arrays {earlier.name!r} and {array.name!r} are both for hook point {array.hook}; leave "
                "one of them out"
            )
        spec = specs.setdefault(array.variable, array.spec(layer_count))
        if array.spec(layer_count) != spec:
            raise ShapeError(
                f"expected array {array.name!r} with values of shape {list(spec.tail)} per token, as in the "
                f"other layers, found {list(array.tail)}"
            )
    _require_one_length_per_axis(arrays)
    return list(specs.values())


def _require_one_length_per_axis(arrays: Sequence[Imported]) -> None:
    """Raise ShapeError if an axis such as "hidden" is empty, or differs in length between arrays: they are
    then of different models."""
    lengths: dict[str, tuple[int, str]] = {}
    for array in arrays:
        for dim, length in zip(array.dims, array.tail, strict=True):
            expected_length, name = lengths.setdefault(dim, (length, array.name))
            if length != expected_length or not length:
                raise ShapeError(
                    f"expected axis {dim!r} with the same length, at least 1, in all arrays, found {length} "
                    f"in {array.name!r} and {expected_length} in {name!r}; leave out the array that is of "
                    "another model"
                )


def declared_run(
    tokens: PackedTokens, model: str, revision: str | None, content: Mapping[str, Any]
) -> RunKey:
    """Key of a run of imported activations, made of what the user declared and the files' content.

    Arguments:
        tokens: Prompts of the run.
        model: Declared name of the model.
        revision: Declared revision of the model; None for none.
        content: Digests of the files, and how names were mapped to hook points.
    """
    return RunKey(declared_identity(model, revision), tokens.digest, digest("imported", dict(content)))


def store_imported(
    store: Store,
    run: RunKey,
    tokens: PackedTokens,
    arrays: Sequence[Imported],
    specs: Sequence[ArraySpec],
    attrs: Mapping[str, Any],
    require_unchanged: Callable[[], None],
) -> LabelledEntry:
    """Write imported arrays as a run, at most 128 MiB in memory at once; parts that exist are not written
    again.

    The arrays are memory maps, and somebody may overwrite the files while they are read. So the rows of each
    segment (range of tokens) are digested while the files still have the digests in the key, and digested
    again as they are written.

    Arguments:
        store: Where to store the run.
        run: Key of the run.
        tokens: Prompts of the run.
        arrays: Arrays of the files.
        specs: Result of `declared_arrays`.
        attrs: See `Store.create_entry`.
        require_unchanged: Raises SourceChanged if the files no longer have the digests in the key.

    Raises:
        SourceChanged: A file was overwritten; nothing is published.
    """
    array_of = {array.cell: array for array in arrays}  # by (variable, layer)
    entry = store.create_entry(run, tokens, specs, attrs=attrs)
    missing = entry.missing(array_of)
    digests = {
        (n, cell): array_of[cell].digest(tokens, entry.segments[n]) for n in missing for cell in missing[n]
    }
    # After the digests and before the first write: from here on `rows` compares with these digests.
    require_unchanged()
    for n, missing_cells in missing.items():
        token_range = entry.segments[n]
        sizes = [array_of[cell].row_bytes * len(token_range) for cell in missing_cells]
        for group in _groups_for_memory(missing_cells, sizes):
            rows = {cell: array_of[cell].rows(tokens, token_range, digests[n, cell]) for cell in group}
            entry.write_segment(n, rows)
    entry.publish(array_of)
    return entry


def _groups_for_memory(cells: Sequence[VariableLayer], sizes: Sequence[int]) -> Iterator[list[VariableLayer]]:
    """Yield groups of consecutive (variable, layer) with at most 128 MiB together, or a single larger one.

    Arguments:
        cells: Variable and layer of each array.
        sizes: Bytes of each array.
    """
    group: list[VariableLayer] = []
    group_bytes = 0
    for cell, size in zip(cells, sizes, strict=True):
        if group and group_bytes + size > _MEMORY_BYTES:
            yield group
            group, group_bytes = [], 0
        group.append(cell)
        group_bytes += size
    yield group


def _fits_prompts(shape: tuple[int, ...], sizes: npt.NDArray[Any], is_batch: bool, *, padded: bool) -> bool:
    """Whether an array of this shape can hold activations of prompts with these numbers of tokens.

    Arguments:
        shape: Shape of the array.
        sizes: Tokens per prompt.
        is_batch: Whether the array has a prompt axis.
        padded: Whether padding was declared. Otherwise the longest prompt must fill the position axis: ids
            that are shorter usually lack a start token.
    """
    if not is_batch:
        return shape[0] == int(sizes.sum())
    longest = int(sizes.max())
    return shape[0] == len(sizes) and (longest <= shape[1] if padded else longest == shape[1])


def _row_sizes(first_array: Imported, ids: Array | list[Array] | None, row_size: Any) -> Array:
    """Tokens per prompt, from the most explicit source: row_size, lists of ids, shape of the array, or of
    the ids."""
    if row_size is not None:
        return np.asarray(row_size)
    if isinstance(ids, list):
        return np.array([len(row) for row in ids], np.int64)
    if first_array.is_batch:
        return np.full(first_array.values.shape[0], first_array.values.shape[1], np.int64)
    if ids is not None and ids.ndim == 2:
        return np.full(ids.shape[0], ids.shape[1], np.int64)
    return np.array([first_array.values.shape[0]], np.int64)


def _flat_ids(ids: Array | list[Array] | None, sizes: npt.NDArray[Any]) -> Array:
    """Token ids of all prompts one after another, [token]; zeros if the ids are unknown."""
    total = int(sizes.sum())
    if ids is None:
        return np.zeros(total, np.int32)
    if isinstance(ids, list):
        lengths = [len(row) for row in ids]
        ids_text = f"{sum(lengths)} ids in {len(lengths)} lists"
        # Compared by lengths per prompt, as an equal total could still be cut differently.
        flat = np.concatenate(ids) if lengths == sizes.tolist() else None
    else:
        ids_text = f"ids of shape {list(ids.shape)}"
        if ids.ndim == 2 and len(ids) == len(sizes) and ids.shape[1] >= sizes.max():
            ids = ids[np.arange(ids.shape[1]) < sizes[:, None]]
        flat = ids if ids.shape == (total,) else None
    if flat is None:
        raise PromptError(
            f"expected one token id for each of the {total} tokens in {len(sizes)} prompts, found "
            f"{ids_text}; check row_size and the number of ids of each prompt"
        )
    return flat
