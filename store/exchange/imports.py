"""Activations that were harvested elsewhere, stored as a run like any other, under an identity somebody
declared.

Border: named arrays in memory or mapped, with the hook point each holds already told
(workflows/exchange.py); files in, an entry out.

What such numbers were computed with cannot be checked. So the key of the run is made of what was declared,
in a namespace of its own, together with the digests of the files: it can never be taken for a run that was
computed here, nor for an import of another file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..arrays import Array
from ..digest import content_digest, digest
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
MOST_LAYERS = 10_000
"""Layers of a model at most: more is a layer's number misread."""
_AT_ONCE = 128 << 20  # bytes of a segment's arrays in memory at once
_BLOCK = 4 << 20  # bytes of a mapping that are read before its pages are let go of


@dataclass(frozen=True)
class Imported:
    """One array of a file and what it holds.

    name: in the file.  values: [token, *tail] or [prompt, position, *tail], positions before heads.
    """

    name: str
    variable: str
    layer: int | None
    hook: str
    meaning: str
    dims: tuple[str, ...]
    """Of one token: ("hidden",), ("head", "d_head"), () for a number."""
    values: Array

    @property
    def cell(self) -> VariableLayer:
        """What it is in a run: variable and layer."""
        return self.variable, self.layer

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return math.prod(self.tail) * self.values.dtype.itemsize

    @property
    def is_batch(self) -> bool:
        """Whether prompts are an axis of their own."""
        return self.values.ndim == len(self.dims) + 2

    @property
    def tail(self) -> tuple[int, ...]:
        """Shape of one token's values."""
        return self.values.shape[self.values.ndim - len(self.dims) :]

    def spec(self, layers: int) -> ArraySpec:
        """How it is stored: in the file's dtype, without a unit. layers: of the model."""
        front = () if self.layer is None else ("layer",)
        sizes = dict(zip(self.dims, self.tail, strict=True))
        return ArraySpec(
            self.variable, self.hook, (*front, "token", *self.dims), sizes, self.values.dtype.name,
            None if self.layer is None else layers, self.meaning, "1",
        )  # fmt: skip

    def blocks(self, tokens: PackedTokens, here: range) -> Iterator[Array]:
        """The values of a range of packed tokens, some after the other, in memory of their own; of a batch,
        without its padding.
        """
        step = max(1, _BLOCK // max(1, self.row_bytes))
        for start in range(here.start, here.stop, step):
            at = slice(start, min(start + step, here.stop))
            index = (tokens.prompt_of(at), tokens.position_of(at)) if self.is_batch else at
            yield np.array(self.values[index], self.values.dtype.newbyteorder("="), order="C", subok=False)
            release(self.values)

    def digest(self, tokens: PackedTokens, here: range) -> str:
        """Digest of the values of a range of packed tokens."""
        return content_digest(*(_bytes(block) for block in self.blocks(tokens, here)))

    def rows(self, tokens: PackedTokens, here: range, digest: str) -> Array:
        """The values of a range of packed tokens, in memory of their own. Raises SourceChanged unless they
        have this digest.
        """
        rows = np.empty((len(here), *self.tail), self.values.dtype.newbyteorder("="))
        start = 0
        for block in self.blocks(tokens, here):
            rows[start : start + len(block)] = block
            start += len(block)
        if content_digest(_bytes(rows)) != digest:
            raise SourceChanged(
                f"expected {self.name!r} as it was when its file was digested, found other numbers: the file "
                "was written over meanwhile; import it again"
            )
        return rows


def _bytes(rows: Array) -> memoryview:
    return rows.reshape(-1).view(np.uint8).data


def declared_identity(model: str, revision: str | None) -> str:
    """Digest of a model somebody names; never equal to that of one whose files were seen."""
    return digest("declared-model", model, revision)


def pack_imported(
    arrays: Sequence[Imported],
    ids: Array | Sequence[Sequence[int]] | None,
    row_size: Array | Sequence[int] | None,
    texts: Sequence[str] | None,
    offsets: tuple[Array | None, Array | None] = (None, None),
) -> tuple[PackedTokens, bool]:
    """The tokens the arrays are of, and whether their ids are known (else they are 0, and not to be shown).

    ids: packed, [prompt, position] with padding on the right, or a list per prompt.  row_size: tokens per
    prompt; without it they are counted in the lists of ids, or else packed arrays are one prompt and every
    position of a batch is a token.  offsets: (start, end) of the tokens in
    their texts.
    Raises ShapeError, PromptError for what does not fit together.
    """
    given = ids if ids is None or isinstance(ids, np.ndarray) else [np.asarray(one) for one in ids]
    if isinstance(given, list) and (not given or any(one.ndim != 1 for one in given)):
        raise PromptError("expected token ids as one list per prompt, found another shape; nest them so")
    first = arrays[0]
    for array in arrays:
        axes = array.values.ndim - len(array.dims)
        if axes not in (1, 2) or array.is_batch != first.is_batch:
            raise ShapeError(
                f"expected {array.name!r} as [token, {', '.join(array.dims)}] or [prompt, position, "
                f"{', '.join(array.dims)}], all alike, found {list(array.values.shape)}; positions come "
                "before heads"
            )
    sizes = _row_sizes(first, given, row_size)
    if sizes.ndim != 1 or sizes.dtype.kind not in "iu" or not sizes.size:
        raise PromptError(
            f"expected row_size as a row of integers, found {sizes.dtype} of shape {list(sizes.shape)}; give "
            "the tokens of each prompt"
        )
    for array in arrays:
        if not _fits(array.values.shape, sizes, array.is_batch, padded=row_size is not None):
            raise ShapeError(
                f"expected {array.name!r} for {len(sizes)} prompts of {int(sizes.sum())} tokens, the longest "
                f"of {int(sizes.max())}, found {list(array.values.shape)}; check token ids and row_size (or "
                "attention_mask)"
            )
    tokens = PackedTokens(_flat_ids(given, sizes), sizes, None if texts is None else list(texts), *offsets)
    return tokens, given is not None


def declared_arrays(arrays: Sequence[Imported], n_layers: int | None) -> list[ArraySpec]:
    """How the arrays are stored.

    n_layers: of the model, by default up to the last one there is.
    Raises ShapeError for arrays of several dtypes, of one that is no float, of unlike or empty shapes, or
    that hold the same.
    """
    dtypes = sorted({array.values.dtype.name for array in arrays})
    if len(dtypes) != 1 or dtypes[0] not in FLOATS:
        raise ShapeError(
            f"expected arrays of one dtype among {', '.join(FLOATS)}, found {', '.join(dtypes)}; convert "
            "them, or say dtype='bfloat16' for raw 2-byte values"
        )
    numbers = [array.layer for array in arrays if array.layer is not None]
    count = n_layers if n_layers is not None else max(numbers, default=-1) + 1
    if numbers and max(numbers) >= count:
        raise ShapeError(
            f"expected layers below {count}, found layer {max(numbers)}; give n_layers of the model"
        )
    if count > MOST_LAYERS:
        raise ShapeError(f"expected at most {MOST_LAYERS} layers, found {count}; check names and n_layers")
    specs: dict[str, ArraySpec] = {}
    first: dict[VariableLayer, Imported] = {}
    for array in arrays:
        same = first.setdefault(array.cell, array)
        if same is not array:
            raise ShapeError(f"{same.name!r} and {array.name!r} both hold {array.hook}; leave one out")
        spec = specs.setdefault(array.variable, array.spec(count))
        if array.spec(count) != spec:
            raise ShapeError(
                f"expected {array.name!r} of shape {list(spec.tail)} per token like the other layers, found "
                f"{list(array.tail)}"
            )
    _expect_one_length_per_axis(arrays)
    return list(specs.values())


def _expect_one_length_per_axis(arrays: Sequence[Imported]) -> None:
    """ShapeError for axes of one name and several lengths, or of none: those arrays are of several models."""
    lengths: dict[str, tuple[int, str]] = {}
    for array in arrays:
        for dim, length in zip(array.dims, array.tail, strict=True):
            other, name = lengths.setdefault(dim, (length, array.name))
            if length != other or not length:
                raise ShapeError(
                    f"expected axis {dim!r} of one length, at least 1, in all arrays, found {length} in "
                    f"{array.name!r} and {other} in {name!r}; leave one of them out, or check what they hold"
                )


def declared_run(
    tokens: PackedTokens, model: str, revision: str | None, content: Mapping[str, Any]
) -> RunKey:
    """The key of a run somebody brings. content: digests of its files, and how their names were read."""
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
    """Write the arrays as a run, some of a segment at a time; what stands already is not written again.

    The arrays are mappings of files that somebody may write over meanwhile, and the key digests these files.
    So the numbers are digested while the files are still those of the key, and again as they are written.

    specs: as `declared_arrays` gives them.
    attrs: of `Store.create_entry`.
    require_unchanged: raises SourceChanged where the files are not those of the key any more.
    Raises SourceChanged, with nothing of it published, for a file that is written over meanwhile.
    """
    cells = {array.cell: array for array in arrays}
    entry = store.create_entry(run, tokens, specs, attrs=attrs)
    missing = entry.missing(cells)
    digests = {
        (n, cell): cells[cell].digest(tokens, entry.segments[n]) for n in missing for cell in missing[n]
    }
    require_unchanged()
    for n, absent in missing.items():
        here = entry.segments[n]
        for some in _together(absent, [cells[cell].row_bytes * len(here) for cell in absent]):
            entry.write_segment(n, {cell: cells[cell].rows(tokens, here, digests[n, cell]) for cell in some})
    entry.publish(cells)
    return entry


def _together(cells: Sequence[VariableLayer], sizes: Sequence[int]) -> Iterator[list[VariableLayer]]:
    """Consecutive cells of at most `_AT_ONCE` bytes, at least one."""
    group: list[VariableLayer] = []
    held = 0
    for cell, size in zip(cells, sizes, strict=True):
        if group and held + size > _AT_ONCE:
            yield group
            group, held = [], 0
        group.append(cell)
        held += size
    yield group


def _fits(shape: tuple[int, ...], sizes: npt.NDArray[Any], is_batch: bool, *, padded: bool) -> bool:
    """Whether arrays of this shape hold prompts of these sizes.

    padded: somebody said that there may be padding. Ids that end before the positions do are else mostly
    those of a start token missing.
    """
    if not is_batch:
        return shape[0] == int(sizes.sum())
    longest = int(sizes.max())
    return shape[0] == len(sizes) and (longest <= shape[1] if padded else longest == shape[1])


def _row_sizes(first: Imported, ids: Array | list[Array] | None, row_size: Any) -> Array:
    """Tokens per prompt, from what says so most directly."""
    if row_size is not None:
        return np.asarray(row_size)
    if isinstance(ids, list):
        return np.array([len(one) for one in ids], np.int64)
    if first.is_batch:
        return np.full(first.values.shape[0], first.values.shape[1], np.int64)
    if ids is not None and ids.ndim == 2:
        return np.full(ids.shape[0], ids.shape[1], np.int64)
    return np.array([first.values.shape[0]], np.int64)


def _flat_ids(ids: Array | list[Array] | None, sizes: npt.NDArray[Any]) -> Array:
    """Packed token ids; zeros where none are known."""
    total = int(sizes.sum())
    if ids is None:
        return np.zeros(total, np.int32)
    if isinstance(ids, list):
        held = [len(one) for one in ids]
        found = f"{sum(held)} in {len(held)}"
        flat = np.concatenate(ids) if held == sizes.tolist() else None
    else:
        found = f"ids of shape {list(ids.shape)}"
        if ids.ndim == 2 and len(ids) == len(sizes) and ids.shape[1] >= sizes.max():
            ids = ids[np.arange(ids.shape[1]) < sizes[:, None]]
        flat = ids if ids.shape == (total,) else None
    if flat is None:
        raise PromptError(
            f"expected a token id for each of {total} tokens of {len(sizes)} prompts, found {found}; check "
            "row_size and the lengths of the prompts"
        )
    return flat
