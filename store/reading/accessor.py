"""`ds.mi`: prompts, tokens and attention patterns of a packed dataset.

Works on any dataset in the packed layout: opened by mizarr, by plain `xr.open_zarr`, or returned by a stage
that kept the token axis. Only `numpy` needs to know where the shards are. How texts, token strings and
character spans are resolved to tokens: selection.py.

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
from ..runs.packed import MATRICES, exclusive_sum, rows_before
from ..runs.vocabularies import registered_vocabulary
from .direct import entry_of, unchunked
from .repacking import (
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
    """`ds.mi`: select prompts, tokens and layers of a dataset whose prompts lie end to end on the `token`
    axis."""

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
        """Select the tokens and layers that meet all given conditions; lazy, with prompts still end to end.

        Prompts without a selected token are dropped; `prompt_id` and `position` keep the original numbers.
        Any condition on tokens leaves out attention patterns, which have two tokens per number: see `attn`.

        Arguments:
            prompt: Numbers (negative from the end) or whole texts of prompts.
            token: Token ids, or token strings exactly as in the vocabulary, with their leading space.
            chars: Character span (start, end) with the end excluded, or a phrase that occurs once in each
                text;
                selects all tokens that overlap it.
            position: Positions (negative from the end) or a slice, among the tokens that each prompt has in
                this dataset.
            layer: Layer number, which drops the axis; a range or list, which keeps it; or a slice, which
                includes both ends, as in `.sel`.
            labels: Values of prompt labels, such as label="pos" or label=["pos", "neg"]. Labels are stored by
                `mizarr capture --label`, or are columns of a `Corpus`.

        Returns:
            Dataset with the selected tokens on the `token` axis.

        Raises:
            PromptError: A prompt, label, position, phrase or span does not exist; the message names the
                most similar one.
            TokenizerError: A string is no token; the message names the most similar one.
            EntryNotFound: A layer was not captured.
        """
        ds = self._ds if layer is None else select_layers(self._ds, layer)
        n_prompts = len(self._sizes)
        rows = np.arange(n_prompts) if prompt is None else prompt_rows(ds, prompt, n_prompts)
        if labels:
            rows = rows[labelled_rows(ds, labels)[rows]]
        if token is None and chars is None and position is None:
            return ds if prompt is None and not labels else ds.mi.prompts(rows)
        selected = [self._selected_positions(int(row), token, chars, position) for row in rows]
        # An empty dataset would only fail later, in a reduction, with a message about axes.
        if not any(map(len, selected)):
            conditions = {"token": token, "chars": chars, "position": position}
            named = ", ".join(f"{name}={value!r}" for name, value in conditions.items() if value is not None)
            raise PromptError(
                f"no token in {len(rows)} prompts meets the conditions {named}; drop a condition, or select "
                "other prompts"
            )
        has_tokens = np.array([len(positions) > 0 for positions in selected])
        kept_positions = [positions for positions in selected if len(positions)]
        return self._repacked(self._token_variables(ds), rows[has_tokens], kept_positions, whole=False)

    def hook(self, name: str) -> xr.DataArray:
        """Activations captured at a hook point, lazy.

        Arguments:
            name: "blocks.5.hook_resid_post" for [token, …], or "*" in place of the layer for [layer, token,
                …].

        Raises:
            HookPointNotFound: The hook point was not captured; the message has the command that captures it.
        """
        return at_hook(self._ds, name)

    def characters(self, i: int) -> CharacterSpans:
        """Which characters of prompt `i` each of its tokens covers.

        `ds.mi.characters(0).char_range_to_tokens(4, 16)` are the tokens of characters 4 to 15.
        """
        start, size = self._row(i)
        return spans_of(self._ds, slice(start, start + size))

    def prompt(self, i: Prompt) -> xr.Dataset:
        """Select one prompt, lazy: [layer, position, …], with `token_string` if the vocabulary is known.

        Attention patterns stay packed as [layer, pair, head]; see `attn`.

        Arguments:
            i: Number of the prompt (negative from the end), or its whole text.
        """
        i = int(prompt_rows(self._ds, i, len(self._sizes))[0])
        start, size = self._row(i)
        indexers: dict[str, Any] = {"token": slice(start, start + size), "prompt_id": i}
        for axis in MATRICES:
            if axis in self._ds.dims:
                indexers[axis] = self._pairs(axis, i)
        indexers |= prompt_of_selections(self._ds, [i])
        prompt = self._ds.drop_vars("prompt", errors="ignore").isel(indexers)
        position = prompt["position"].values if "position" in prompt else np.arange(size, dtype=np.int32)
        prompt = prompt.drop_vars(["row_start", "row_size", "pair_start", "position"], errors="ignore")
        prompt = prompt.rename(token="position").assign_coords(
            position=("position", position, ABOUT["position"])
        )
        return self._with_strings(prompt, "position")

    def prompts(self, rows: Rows) -> xr.Dataset:
        """Select prompts by number, in the order of `rows`; lazy. `prompt_id` keeps the original numbers."""
        prompt_numbers: Indices = np.asarray(rows, np.int64)
        return self._repacked(
            self._ds, prompt_numbers, [np.arange(n) for n in self._sizes[prompt_numbers]], whole=True
        )

    def unpack(self) -> xr.Dataset:
        """Load all prompts as one block in memory, with axes [prompt, position] in place of token.

        Raises:
            ShapeError: The prompts differ in length; then use `pad`.
        """
        sizes = self._sizes
        if len(np.unique(sizes)) > 1:
            short, long = int(sizes.argmin()), int(sizes.argmax())
            names = self._ds["prompt_id"].values if "prompt_id" in self._ds.coords else np.arange(len(sizes))
            raise ShapeError(
                f"ds.mi.unpack() is for prompts of one length, found {sizes[short]} tokens in prompt "
                f"{names[short]} and {sizes[long]} in prompt {names[long]}; use ds.mi.pad(), which fills up "
                "and adds a mask, or select as many of each: ds.mi.sel(position=…)"
            )
        return self.pad().drop_vars("mask")

    def tokens(self, indices: Rows) -> xr.Dataset:
        """Load tokens, given by index on the token axis, of every variable that has one: [layer, token, …].

        Reads the files directly even if the dataset has dask arrays, as a scattered token of a dask array
        costs a whole chunk.
        """
        return self._token_variables(unchunked(self._ds)).isel(token=np.asarray(indices)).load()

    def pad(self, max_len: int | None = None, *, cut: bool = False, fill: float = np.nan) -> xr.Dataset:
        """Load all prompts as one padded block in memory, with axes [prompt, position] in place of token.

        Adds the coordinates `mask` (True at tokens) and, if the vocabulary is known, `token_string` ("" in
        the padding).

        Arguments:
            max_len: Length of the position axis; None for the longest prompt.
            cut: Whether longer prompts are cut to their first `max_len` tokens.
            fill: Value of the padding. NaN is skipped by reductions and cannot be mistaken for a zero
                activation.

        Raises:
            ShapeError: A prompt is longer than `max_len`, and `cut` is False.
        """
        longest = int(self._sizes.max())
        max_len = longest if max_len is None else max_len
        if longest > max_len and not cut:
            raise ShapeError(
                f"ds.mi.pad: the longest prompt has {longest} tokens, more than max_len={max_len}; pass "
                f"max_len={longest}, or cut=True to cut prompts"
            )
        position = np.arange(max_len, dtype=np.int32)
        # Made from sizes rather than from values: an activation may itself be NaN.
        mask = xr.DataArray(position < self._sizes[:, None], dims=("prompt", "position"))
        # Padding columns repeat the prompt's last token, so that the index stays valid; `where` replaces them
        # below.
        last_token = self._starts + self._sizes - 1
        indices = (self._starts[:, None] + position).clip(max=last_token[:, None])
        block = self._token_variables(unchunked(self._ds)).drop_vars(["prompt", "position"], errors="ignore")
        block = block.isel(token=xr.DataArray(indices, dims=("prompt", "position"))).load()
        positions = self._ds["position"].values[indices] if "position" in self._ds.coords else None
        labels = self._ds.drop_vars(["row_start", "row_size", "pair_start"], errors="ignore").coords
        columns: dict[str, Any] = {
            str(name): ("prompt", c.values, c.attrs) for name, c in labels.items() if c.dims == ("prompt_id",)
        }
        if (strings := self.token_strings) is not None:
            shown = np.where(mask, strings[indices], "").astype(str)
            columns["token_string"] = (("prompt", "position"), shown, {"long_name": "token"})
        block = block.where(mask, fill).assign_coords(mask=mask, **columns)
        return block.assign_coords(position_labels(positions, mask.values))

    def attn(self, i: int, variable: str = "pattern") -> xr.DataArray:
        """Load the attention matrix of prompt `i`: [layer, head, query_position, key_position].

        Above the diagonal are the values that the model computed: weights of 0 under a causal mask, scores of
        -inf where they are masked.

        Arguments:
            i: Number of the prompt.
            variable: Name of the variable: "pattern", "attn_scores", "scores", or another one with a value
                per
                query and key.
        """
        packed = as_layer(self._variable(variable))
        axis = "square" if "square" in packed.dims else "pair"
        return squared(packed.isel({axis: self._pairs(axis, i)}), axis, self._row(i)[1])

    def numpy(self, variable: str, layer: int | None, segment: int) -> npt.NDArray[Any]:
        """One segment (range of tokens stored in one file) of an array, as a numpy array [token, …].

        It is a read-only view of the memory-mapped file if that has one chunk (at most 1 MiB); otherwise a
        copy, as checksums lie between the chunks. int8 is dequantised to float32; bfloat16 has the dtype
        `ml_dtypes.bfloat16`.

        To torch without a copy (torch warns of read-only arrays): `torch.from_numpy(a)`, for bfloat16
        `torch.from_numpy(a.view("u2")).view(torch.bfloat16)`.

        Arguments:
            variable: Name of the stored array.
            layer: Layer number; None for an array without a layer axis.
            segment: Number of the segment.

        Raises:
            CorruptEntry: A chunk does not match its checksum.
        """
        return np.asarray(entry_of(self._ds).values(variable, layer, segment))

    @property
    def token_strings(self) -> npt.NDArray[np.object_] | None:
        """Token strings, [token]; None if the vocabulary or the token ids are unknown."""
        if "token_id" not in self._ds.coords or (vocabulary := self._vocabulary) is None:
            return None
        return np.array([_string(vocabulary, i) for i in self._ds["token_id"].values.tolist()], object)

    @cached_property
    def _sizes(self) -> npt.NDArray[np.int64]:
        """Tokens per prompt, [prompt]; ShapeError if the dataset no longer has whole prompts end to end."""
        if "row_size" not in self._ds.variables or "token" not in self._ds.dims:
            raise ShapeError(
                "ds.mi is for datasets of prompts end to end (dimension 'token', variable 'row_size'), found "
                f"dimensions {', '.join(map(str, self._ds.dims)) or 'none'}; use it before the token axis is "
                "reduced"
            )
        sizes = self._ds["row_size"].values.astype(np.int64)
        n_tokens = self._ds.sizes["token"]
        # isel(token=…) on the plain dataset cuts the token axis but leaves row_size, after which prompts
        # cannot be located.
        if sizes.ndim != 1 or int(sizes.sum()) != n_tokens:
            raise ShapeError(
                f"the token axis was cut: it has {n_tokens} tokens, and the prompts have {int(sizes.sum())} "
                "(row_size); select whole prompts with ds.mi.prompts([...]), or use .mi before "
                ".isel(token=...)"
            )
        return sizes

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        return exclusive_sum(self._sizes)

    def _row(self, i: int) -> tuple[int, int]:
        """First token and number of tokens of prompt `i`; a negative `i` counts from the end."""
        if not -len(self._sizes) <= i < len(self._sizes):
            raise PromptError(f"there is no prompt {i}; prompts are numbered 0 to {len(self._sizes) - 1}")
        return int(self._starts[i]), int(self._sizes[i])

    def _pairs(self, axis: str, i: int) -> slice:
        """Rows of a prompt's attention matrix on the "pair" or "square" axis."""
        start = int(matrix_starts(self._ds, axis)[i])
        return slice(start, start + int(rows_before(axis, self._sizes[i], self._sizes[i])))

    def _variable(self, name: str) -> xr.DataArray:
        """A variable of the dataset; EntryNotFound, with the capture command, for a missing variable."""
        if name not in self._ds.data_vars:
            variables = [str(n) for n in self._ds.data_vars]
            hook = "blocks.*.attn.hook_pattern" if name == "pattern" else f"*hook_{name}"
            raise EntryNotFound(
                f"the dataset has no variable {name!r}; it has {', '.join(variables) or 'none'}, the most "
                f"similar is {nearest(name, variables)!r}; name another, or capture it: "
                f"{capture_command(self._ds, hook)}"
            )
        return self._ds[name]

    def _selected_positions(
        self, row: int, token: Any, chars: Chars | None, position: Position | None
    ) -> Indices:
        """Positions, within the prompt of this number, of the tokens that meet all conditions of `sel`."""
        start, size = self._row(row)
        tokens = slice(start, start + size)
        is_selected = np.ones(size, bool)
        if token is not None:
            if "token_id" not in self._ds.coords:
                raise PromptError(
                    "ds.mi.sel(token=…) needs token ids, and this run is stored without; select by position="
                )
            is_selected &= np.isin(self._ds["token_id"][tokens].values, self._token_ids(token))
        if chars is not None:
            overlaps = np.zeros(size, bool)
            overlaps[characters_to_positions(self._ds, row, tokens, chars)] = True
            is_selected &= overlaps
        if position is None:
            return np.flatnonzero(is_selected)
        positions = in_prompt(position, size)
        return positions[is_selected[positions]]

    def _token_ids(self, token: Any) -> list[int]:
        """Token ids of the argument `token` of `sel`; cached, as `sel` needs them for every prompt."""
        if (ids := self._ids_of_argument.get(repr(token))) is None:
            ids = self._ids_of_argument[repr(token)] = token_ids(token, self._vocabulary)
        return ids

    @cached_property
    def _ids_of_argument(self) -> dict[str, list[int]]:
        return {}

    def _repacked(
        self, ds: xr.Dataset, rows: Indices, positions: Sequence[Indices], *, whole: bool
    ) -> xr.Dataset:
        """Select tokens of prompts, end to end again, with `token_string` if the vocabulary is known.

        Arguments:
            ds: The dataset.
            rows: Numbers of the prompts.
            positions: Per prompt, positions of the selected tokens.
            whole: Whether all tokens are selected, so that attention matrices stay.
        """
        result = repacked(ds, self._starts, rows, positions, whole=whole)
        return result if whole else self._with_strings(result, "token")

    def _token_variables(self, dataset: xr.Dataset) -> xr.Dataset:
        """Dataset of the variables with a token axis; ShapeError without such variables."""
        names = [name for name, variable in dataset.data_vars.items() if "token" in variable.dims]
        if not names:
            raise ShapeError(
                "no variable of the dataset has a token axis, found "
                f"{', '.join(map(str, dataset.data_vars)) or 'none'}; for attention patterns, which have two "
                "tokens per number, use ds.mi.attn(prompt)"
            )
        return dataset[names].drop_vars(["row_start", "row_size", "pair_start"], errors="ignore")

    @property
    def _vocabulary(self) -> Sequence[str] | None:
        load = registered_vocabulary(self._ds.attrs.get("tokenizer", ""))
        return load() if load is not None else None

    def _with_strings(self, dataset: xr.Dataset, dim: str) -> xr.Dataset:
        """Add the coordinate `token_string`, if the vocabulary is known."""
        strings = dataset.mi.token_strings
        if strings is None:
            return dataset
        return dataset.assign_coords(token_string=(dim, strings.astype(str), {"long_name": "token"}))


def _string(vocabulary: Sequence[str], token: int) -> str:
    return vocabulary[token] if token < len(vocabulary) else f"<{token}>"
