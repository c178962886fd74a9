"""`ds.mi`: prompts, tokens and attention patterns out of a packed dataset.

Border: labels only; works on any dataset with the packed layout - opened by us, by plain `xr.open_zarr`, or
returned by a stage that kept the token axis. Only `numpy` needs to know where the shards lie. What a text, a
token's string or a span of characters means is told in selection.py.

Axes in: token (packed), pair (packed lower triangles), square (packed whole matrices), prompt_id. Axes out:
position; query_position, key_position; prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from ..errors import EntryNotFound, PromptError, ShapeError, nearest
from ..runs.coordinates import ABOUT
from ..runs.packed import MATRICES, rows_before
from ..runs.vocabularies import registered_vocabulary
from .direct import entry_of, unchunked
from .repacking import (
    exclusive_sum,
    matrix_starts,
    position_labels,
    prompt_of_selections,
    repacked,
    squared,
)
from .selection import (
    Chars,
    Indices,
    Label,
    LayerChoice,
    Position,
    Prompt,
    Token,
    as_layer,
    at_hook,
    capture_command,
    characters_to_positions,
    in_prompt,
    labelled_rows,
    prompt_rows,
    select_layers,
    spans_of,
    token_ids,
)

if TYPE_CHECKING:
    from .characters import CharacterSpans

Rows = Sequence[int] | npt.NDArray[np.integer[Any]]


@xr.register_dataset_accessor("mi")  # type: ignore[no-untyped-call]
class PackedAccessor:
    """Ways into a dataset whose prompts lie end to end on the `token` axis."""

    def __init__(self, dataset: xr.Dataset) -> None:
        self._ds = dataset

    def sel(
        self,
        *,
        prompt: Prompt | Sequence[Prompt] | None = None,
        token: Token | Sequence[Token] | None = None,
        chars: Chars | None = None,
        position: Position | None = None,
        layer: LayerChoice | None = None,
        **labels: Label | Sequence[Label],
    ) -> xr.Dataset:
        """Those tokens and layers that meet all that is said; lazy, packed as before.

        prompt: numbers (negative from the end) or whole texts.  token: ids, or strings exactly as the
        vocabulary has them, with their leading space.  chars: (start, end), half-open, or a phrase that
        stands once in each text; tokens that overlap it.  position: numbers (negative from the end) or a
        slice, counted among the tokens held of each prompt.  layer: a number drops the axis; a range or list
        keeps it; a slice includes both ends, as in `.sel`.  labels: values of labels of prompts, such as
        label="pos" or label=["pos", "neg"], which a capture kept (`--label`, or the columns of a `Corpus`).
        Prompts no token is left of are dropped; `prompt_id` and `position` keep the numbers of the others. A
        choice of tokens leaves out attention patterns, which have two tokens per number: see `attn`.
        Raises PromptError, TokenizerError, EntryNotFound for what is not there, naming what is nearest.
        """
        ds = self._ds if layer is None else select_layers(self._ds, layer)
        every = range(len(self._sizes))
        rows: Indices = np.array(every, np.int64) if prompt is None else prompt_rows(ds, prompt, len(every))
        if labels:
            rows = rows[labelled_rows(ds, labels)[rows]]
        if token is None and chars is None and position is None:
            return ds if prompt is None and not labels else ds.mi.prompts(rows)
        kept = [self._kept(int(row), token, chars, position) for row in rows]
        if not any(map(len, kept)):
            said = {"token": token, "chars": chars, "position": position}
            named = ", ".join(f"{name}={value!r}" for name, value in said.items() if value is not None)
            raise PromptError(
                f"expected at least one token with {named}, found none in {len(rows)} prompts; say less, or "
                "select other prompts"
            )
        full = np.array([len(some) > 0 for some in kept])
        return self._repacked(
            self._on_token(ds), rows[full], [some for some in kept if len(some)], whole=False
        )

    def hook(self, name: str) -> xr.DataArray:
        """What was captured at a hook point: "blocks.5.hook_resid_post" [token, …], or with "*" in place of
        the layer [layer, token, …]; lazy.

        Raises HookPointNotFound, with the command that captures it, for one that was not.
        """
        return at_hook(self._ds, name)

    def characters(self, i: int) -> CharacterSpans:
        """Where the tokens of prompt `i` lie in its text: `char_to_token(5)`, `char_range_to_tokens(4, 16)`,
        …
        """
        start, size = self._row(i)
        return spans_of(self._ds, slice(start, start + size))

    def prompt(self, i: Prompt) -> xr.Dataset:
        """One prompt, by number or by its whole text: [layer, position, …], lazy, with `token_string` where
        the vocabulary is known.

        Patterns stay packed as [layer, pair, head]; see `attn`.
        """
        i = int(prompt_rows(self._ds, i, len(self._sizes))[0])
        start, size = self._row(i)
        picked: dict[str, Any] = {"token": slice(start, start + size), "prompt_id": i}
        for axis in MATRICES:
            if axis in self._ds.dims:
                picked[axis] = self._pairs(axis, i)
        picked |= prompt_of_selections(self._ds, [i])
        part = self._ds.drop_vars("prompt", errors="ignore").isel(picked)
        position = part["position"].values if "position" in part else np.arange(size, dtype=np.int32)
        part = part.drop_vars(["row_start", "row_size", "pair_start", "position"], errors="ignore")
        part = part.rename(token="position").assign_coords(position=("position", position, ABOUT["position"]))
        return self._with_strings(part, "position")

    def prompts(self, rows: Rows) -> xr.Dataset:
        """The given prompts, in the given order, packed anew; lazy. `prompt_id` keeps their numbers."""
        chosen: Indices = np.asarray(rows, np.int64)
        return self._repacked(self._ds, chosen, [np.arange(n) for n in self._sizes[chosen]], whole=True)

    def unpack(self) -> xr.Dataset:
        """All prompts as one block in memory, [prompt, position] in place of token, where they are equally
        long.

        Raises ShapeError where they are not: see `pad`.
        """
        sizes = self._sizes
        if len(np.unique(sizes)) > 1:
            short, long = int(sizes.argmin()), int(sizes.argmax())
            names = self._ds["prompt_id"].values if "prompt_id" in self._ds.coords else np.arange(len(sizes))
            raise ShapeError(
                f"expected the same number of tokens of every prompt, found {sizes[short]} of prompt "
                f"{names[short]} and {sizes[long]} of prompt {names[long]}; ds.mi.pad() fills up and adds a "
                "mask, or select as many of each: ds.mi.sel(position=…)"
            )
        return self.pad().drop_vars("mask")

    def tokens(self, indices: Rows) -> xr.Dataset:
        """The given packed tokens of every variable on the token axis, in memory: [layer, token, …].

        Goes to the mapped shards even where the dataset is chunked: a scattered row costs a page, not a
        chunk.
        """
        return self._on_token(unchunked(self._ds)).isel(token=np.asarray(indices)).load()

    def pad(self, max_len: int | None = None, *, cut: bool = False, fill: float = np.nan) -> xr.Dataset:
        """All prompts as a block in memory, [prompt, position] in place of token, and `mask`, True = a token.

        max_len: length of the position axis, by default that of the longest prompt; ShapeError when a prompt
        is longer, unless `cut` keeps its first max_len tokens.  fill: value of the padding; the default, NaN,
        is skipped by reductions and cannot pass for a zero.  Texts of the prompts stay, and where the
        vocabulary is known `token_string`, "" in the padding.
        """
        longest = int(self._sizes.max())
        max_len = longest if max_len is None else max_len
        if longest > max_len and not cut:
            raise ShapeError(
                f"expected prompts of at most max_len={max_len} tokens, the longest has {longest}; "
                f"pass max_len={longest}, or cut=True to drop what is beyond"
            )
        position = np.arange(max_len, dtype=np.int32)
        mask = xr.DataArray(position < self._sizes[:, None], dims=("prompt", "position"))
        at = (self._starts[:, None] + position).clip(max=self._starts[:, None] + self._sizes[:, None] - 1)
        block = self._on_token(unchunked(self._ds)).drop_vars(["prompt", "position"], errors="ignore")
        block = block.isel(token=xr.DataArray(at, dims=("prompt", "position"))).load()
        own = self._ds["position"].values[at] if "position" in self._ds.coords else None
        about = self._ds.drop_vars(["row_start", "row_size", "pair_start"], errors="ignore").coords
        columns: dict[str, Any] = {
            str(name): ("prompt", c.values, c.attrs) for name, c in about.items() if c.dims == ("prompt_id",)
        }
        if (strings := self.token_strings) is not None:
            shown = np.where(mask, strings[at], "").astype(str)
            columns["token_string"] = (("prompt", "position"), shown, {"long_name": "token"})
        block = block.where(mask, fill).assign_coords(mask=mask, **columns)
        return block.assign_coords(position_labels(own, mask.values))

    def attn(self, i: int, variable: str = "pattern") -> xr.DataArray:
        """Attention matrix of prompt `i`: [layer, head, query_position, key_position], in memory.

        Row = attending position, column = attended position; what a pass gives, above the diagonal as well:
        weights of 0 where positions see no later ones, scores of -inf where they are masked. variable:
        "pattern", "attn_scores", "scores", or another one with two positions.
        """
        packed = as_layer(self._variable(variable))
        axis = "square" if "square" in packed.dims else "pair"
        return squared(packed.isel({axis: self._pairs(axis, i)}), axis, self._row(i)[1])

    def numpy(self, variable: str, layer: int | None, segment: int) -> npt.NDArray[Any]:
        """One shard in its stored dtype, [tokens of the segment, …]: a read-only memory map where it is one
        chunk of at most 1 MiB, copied otherwise, as checksums lie between the chunks.

        int8 comes as the float32 it stands for, copied; bfloat16 as ml_dtypes.bfloat16. For torch:
        `torch.from_numpy(a)`, or for bfloat16
        `torch.from_numpy(a.view("u2")).view(torch.bfloat16)`, which share the memory (torch warns of arrays
        that must not be written). Raises CorruptEntry where a chunk is not what its checksum says.
        """
        return np.asarray(entry_of(self._ds).values(variable, layer, segment))

    @property
    def token_strings(self) -> npt.NDArray[np.object_] | None:
        """The string of every token, [token]; None where the vocabulary, or the ids, are not known."""
        if "token_id" not in self._ds.coords or (vocabulary := self._vocabulary) is None:
            return None
        return np.array([_string(vocabulary, i) for i in self._ds["token_id"].values.tolist()], object)

    @cached_property
    def _sizes(self) -> npt.NDArray[np.int64]:
        if "row_size" not in self._ds.variables or "token" not in self._ds.dims:
            raise ShapeError(
                "expected a packed dataset (dimension 'token', variable 'row_size'), found dimensions "
                f"{', '.join(map(str, self._ds.dims)) or 'none'}; .mi is for runs before they are reduced"
            )
        sizes = self._ds["row_size"].values.astype(np.int64)
        held = self._ds.sizes["token"]
        if sizes.ndim != 1 or int(sizes.sum()) != held:
            raise ShapeError(
                f"row sizes sum to {int(sizes.sum())}, but the token axis has {held}: it was cut. "
                "Select whole prompts with ds.mi.prompts([...]), or use .mi before .isel(token=...)"
            )
        return sizes

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        return exclusive_sum(self._sizes)

    def _row(self, i: int) -> tuple[int, int]:
        if not -len(self._sizes) <= i < len(self._sizes):
            raise PromptError(f"expected a prompt index below {len(self._sizes)}, found {i}")
        return int(self._starts[i]), int(self._sizes[i])

    def _pairs(self, axis: str, i: int) -> slice:
        """Where the attention matrix of a prompt lies on one of `MATRICES`."""
        first = int(matrix_starts(self._ds, axis)[i])
        return slice(first, first + int(rows_before(axis, self._sizes[i], self._sizes[i])))

    def _variable(self, name: str) -> xr.DataArray:
        if name not in self._ds.data_vars:
            held = [str(n) for n in self._ds.data_vars]
            hook = "blocks.*.attn.hook_pattern" if name == "pattern" else f"*hook_{name}"
            raise EntryNotFound(
                f"no variable {name!r}; the dataset holds {', '.join(held) or 'none'}, nearest is "
                f"{nearest(name, held)!r}. Name another, or capture it: {capture_command(self._ds, hook)}"
            )
        return self._ds[name]

    def _kept(self, row: int, token: Any, chars: Chars | None, position: Position | None) -> Indices:
        """Which tokens of a prompt meet all conditions, counted from its first."""
        start, size = self._row(row)
        here = slice(start, start + size)
        kept = np.ones(size, bool)
        if token is not None:
            if "token_id" not in self._ds.coords:
                raise PromptError("expected token ids, found none stored; select by position instead")
            kept &= np.isin(self._ds["token_id"][here].values, self._token_ids(token))
        if chars is not None:
            over = np.zeros(size, bool)
            over[characters_to_positions(self._ds, row, here, chars)] = True
            kept &= over
        if position is None:
            return np.flatnonzero(kept)
        chosen = in_prompt(position, size)
        return chosen[kept[chosen]]

    def _token_ids(self, token: Any) -> list[int]:
        if (found := self._looked_up.get(repr(token))) is None:
            found = self._looked_up[repr(token)] = token_ids(token, self._vocabulary)
        return found

    @cached_property
    def _looked_up(self) -> dict[str, list[int]]:
        return {}

    def _repacked(self, ds: xr.Dataset, rows: Indices, kept: Sequence[Indices], *, whole: bool) -> xr.Dataset:
        """Some tokens of some prompts, packed anew. kept: per row, places from its first; whole: all of
        them.
        """
        part = repacked(ds, self._starts, rows, kept, whole=whole)
        return part if whole else self._with_strings(part, "token")

    def _on_token(self, dataset: xr.Dataset) -> xr.Dataset:
        names = [name for name, variable in dataset.data_vars.items() if "token" in variable.dims]
        if not names:
            raise ShapeError(
                "expected a variable with a token axis, found "
                f"{', '.join(map(str, dataset.data_vars)) or 'none'}; attention patterns have two tokens per "
                "number: see ds.mi.attn(prompt)"
            )
        return dataset[names].drop_vars(["row_start", "row_size", "pair_start"], errors="ignore")

    @property
    def _vocabulary(self) -> Sequence[str] | None:
        load = registered_vocabulary(self._ds.attrs.get("tokenizer", ""))
        return load() if load is not None else None

    def _with_strings(self, part: xr.Dataset, dim: str) -> xr.Dataset:
        """With the strings of the tokens beside their ids, where the vocabulary is known."""
        strings = part.mi.token_strings
        if strings is None:
            return part
        return part.assign_coords(token_string=(dim, strings.astype(str), {"long_name": "token"}))


def _string(vocabulary: Sequence[str], token: int) -> str:
    return vocabulary[token] if token < len(vocabulary) else f"<{token}>"
