"""`Store`: reads and writes a folder (or bucket prefix) of stored model runs and analysis results.

    store.json            format version; its presence makes a folder a store
    keys/<ab>/<key>.json  one record per published array or result (`records.py`); readers start here only
    data/<ab>/<digest>/   one run: shards on a packed token axis (`runs/entries.py`)
    data/<ab>/<key>.<x>/  one attempt to write a result (`results.py`)
    pins/<name>.json      keys that garbage collection must keep
    annotations/          labels that people give to stored things (`upkeep/annotations.py`)
    quarantine/           damaged files that were set aside
    vocabularies/         token strings by tokenizer digest
    index.sqlite          a cache of lookups (`index.py`); may be deleted at any time

Any number of processes and threads may use one store at once. Small files are created and never changed; the
first writer of a file wins, and the others use its file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .arrays import require_flag, require_kind
from .catalog import Catalog, Key, may_begin_digest, unique_name
from .errors import ConfigError, CorruptEntry, EntryNotFound, PromptError, StoreFormatError
from .files import DESCRIPTION, Folder, open_folder
from .keys import ResultKey, RunKey
from .provenance import get_provenance, put_provenance
from .records import RESULT, Record, now
from .runs.packed import PackedTokens
from .runs.vocabularies import put_vocabulary, read_vocabulary
from .sealed import read_json, sealed, unsealed

if TYPE_CHECKING:
    import xarray as xr

    from .reading.labelled import LabelledEntry
    from .runs.entries import ArraySpec
    from .upkeep.annotations import Annotation
    from .upkeep.collect import GcReport, Usage
    from .upkeep.copying import Copied
    from .upkeep.listing import ListedRun
    from .upkeep.verify import Damage

FORMAT = 1
"""Version of the on-disk format that this package reads and writes."""
_CORPUS_TOKENS = 10_000_000  # runs of at least so many tokens get larger files
_SHARD_BYTES, _CORPUS_SHARD_BYTES = 64 << 20, 256 << 20  # for runs below and from _CORPUS_TOKENS on
# attributes of a run that decide how its tokens are shown; stored with its Zarr group
_TOKEN_ATTRIBUTES = ("tokenizer", "token_ids")
_MOST_INDEXED_PROMPTS = 100_000  # runs with more prompts are not indexed, which would take one row per prompt

Mode = Literal["a", "r"]
Durability = Literal["disk", "process"]


def open_store(path: str | Path, mode: Mode = "a", durability: Durability = "disk") -> Store:
    """Open the store of runs and results in a folder; create the store if the folder is empty or missing.

    Arguments:
        path: A folder, or a URL such as s3://BUCKET/PREFIX.
        mode: "a" reads, writes and creates; "r" only reads and leaves no trace in the folder.
        durability: "disk": what was stored survives a power cut. "process": fsync is skipped, and what was
            stored survives only the end of the process.

    Raises:
        ConfigError: Unknown mode or durability.
        StoreError: The path cannot be a folder.
        StoreFormatError: The folder holds other files, or a store of another format version.
    """
    if mode not in ("a", "r"):
        raise ConfigError(
            f"open_store: expected mode='a' (read, write and create) or mode='r' (read only), found "
            f"{mode!r:.80}; there is no mode that overwrites"
        )
    if durability not in ("disk", "process"):
        raise ConfigError(
            f"open_store: expected durability='disk' or durability='process', found {durability!r:.80}"
        )
    # The format is checked before `as_store`, which would refuse to create store.json.
    files = open_folder(path, durability, mode == "r")
    _check_format(files)
    return Store(files.as_store())


@contextmanager
def requested_store(path: str | Path, durability: Durability = "disk") -> Iterator[Store]:
    """Context manager: open or create a store, and remove it again if it is new and the `with` block fails.

    A store is removed only if it was created here and is still empty, so that a mistyped command leaves no
    folder behind. Another process that opened it in the meantime gets an error at its next write.

    Arguments:
        path: See `open_store`.
        durability: See `open_store`.
    """
    is_new = open_folder(path, read_only=True).get(DESCRIPTION) is None
    store = open_store(path, durability=durability)
    try:
        yield store
    except BaseException:
        if is_new:
            store.remove_unused()
        raise


def require_store(value: Any) -> None:
    """Raise ConfigError unless a value is an open `Store`; a path, for example, is refused."""
    require_kind(
        value,
        Store,
        "store to be an open store",
        "write store=mizarr.open_store('activations'), with the folder of your store",
    )


class Store(Catalog):
    """Stored activations of runs and results of stages, found by key. Create with `open_store`; can be
    pickled cheaply for another process."""

    def __repr__(self) -> str:
        return f"Store({self.address!r}, mode={'r' if self.read_only else 'a'!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Store) and self.files == other.files

    def __hash__(self) -> int:
        return hash(self.files)

    # -- lookup

    def names_run(self, prefix: str) -> bool:
        """Whether at least one run's digest, and no published key, starts with these hex digits."""
        return not self.key_names(prefix) and bool(self._entry_names(prefix))

    def __getitem__(self, key: Key) -> xr.Dataset:
        """Open what is stored under a key, as a labelled and lazy dataset.

        Arguments:
            key: A key, or the first hex digits of one if no other key starts with them. Where no key starts
                with these digits, the run whose digest (column DATA of `mizarr ls`) does is opened whole. The
                key of the scales of an int8 array opens that array.

        Raises:
            EntryNotFound: Nothing is stored under the key, or several keys start with these digits.
        """
        if isinstance(key, str) and self.names_run(key):
            return self.entry(key).open()
        record = self.record(key)
        if record.kind == RESULT:
            return self.open_result(record)
        variable, _, layer = record.label.partition("/")
        entry = self._entry_in(record.data)
        return entry.open([entry.presented(variable)], [int(layer)] if layer else None)

    # -- results

    def put_result(
        self,
        key: ResultKey,
        dataset: xr.Dataset,
        *,
        provenance: Mapping[str, Any] | None = None,
        confirm: Callable[[], None] = lambda: None,
    ) -> Record:
        """Store the labelled result of a stage, unless one is stored under this key already.

        Dask variables are computed and written chunk by chunk, in bounded memory. Any kind of string array is
        allowed; times are refused (store numbers, with the unit in attrs["units"]).

        Arguments:
            key: Key of the result.
            dataset: The result.
            provenance: Plain values on how the result was computed (code hash, seconds); stored beside it,
                part of no digest.
            confirm: Called after everything is written and before readers can see it; if it raises, nothing
                is stored. Used to check that the files which the key names are unchanged.

        Returns:
            Record of the stored result, which is the earlier one if the key was stored already.

        Raises:
            ShapeError: The dataset cannot be stored.
            StoreFull: The disk or quota is full.
            ReadOnlyStore: The store cannot be written.
        """
        from .results import write_result

        return write_result(self.files, key, dataset, provenance or {}, confirm)

    def open_result(self, key: Key | Record) -> xr.Dataset:
        """Open a stored result, labelled and lazy; a result above 64 MiB has dask arrays."""
        from .results import read_result

        record = key if isinstance(key, Record) else self.record(key)
        self.index.touch(record.data)
        return read_result(self.files, record)

    # -- runs

    def create_entry(
        self,
        run: RunKey,
        tokens: PackedTokens,
        arrays: Sequence[ArraySpec],
        *,
        segment_tokens: int | None = None,
        attrs: Mapping[str, Any] | None = None,
        codec: str = "",
    ) -> LabelledEntry:
        """Open the folder of a run for writing activations; create it, and declare arrays that it lacks.

        Arguments:
            run: Key of the run.
            tokens: Prompts of the run.
            arrays: Variables to declare, all of one storage dtype.
            segment_tokens: Tokens per segment of a new run (a segment is computed and committed at once); by
                default such that files have about 64 MiB (256 MiB from ten million tokens on).
            attrs: Plain values (model name, hooks, versions), stored as provenance and part of no digest.
                "tokenizer" is the digest under which `put_vocabulary` stored the token strings;
                "token_ids": "unknown" says that the ids are meaningless and must not be shown.
            codec: "zstd" compresses new arrays, as `copy_to` does; "" does not compress.

        Raises:
            PromptError: `tokens` have another digest than the prompts in the key.
            ShapeError: The arrays have different dtypes, or contradict those declared before.
        """
        from .reading.labelled import LabelledEntry
        from .runs.coordinates import record_metadata, write_coordinates
        from .runs.entries import dtype_of, entry_digest, entry_path, with_scales

        names = [spec.variable for spec in with_scales(arrays)]  # raises before anything is written
        # A wrong pairing would publish correct-looking activations under the key of other prompts.
        if tokens.digest != run.prompt:
            raise PromptError(
                f"cannot store run {run.short}: expected the prompts of its key, whose digest is "
                f"{run.prompt}, found prompts of digest {tokens.digest}; make the key with "
                "prompt=tokens.digest"
            )
        path = entry_path(entry_digest(run, dtype_of(arrays))) if arrays else ""
        is_new = not arrays or self.files.get(f"{path}/zarr.json") is None
        length = segment_tokens or default_segment_tokens(tokens, arrays)
        if is_new and arrays:
            layers = next((spec.layers for spec in arrays if spec.layers is not None), None)
            # Before the Zarr group: readers take a run that has a group as begun, and read its tokens.
            write_coordinates(self.files, path, tokens, layers, pairs=length >= tokens.n_tokens)
        entry = LabelledEntry.create(
            self.files,
            run,
            tokens,
            arrays,
            segment_tokens=length,
            attributes=_group_attributes(attrs or {}),
            codec=codec,
        )
        record_metadata(self.files, entry.path, names)
        if is_new:
            put_provenance(
                self.files, entry.path, {"run": run.request(), "entry": entry.digest, **(attrs or {})}
            )
        self._index_prompts(entry)
        self.index.touch(entry.path)
        return entry

    def planned_entry(
        self, run: RunKey, tokens: PackedTokens, arrays: Sequence[ArraySpec], segment_tokens: int
    ) -> LabelledEntry:
        """Describe the run that `create_entry` would create, for a plan or a dry run; writes nothing.

        Arguments:
            run: Key of the run.
            tokens: Prompts of the run.
            arrays: Variables, all of one storage dtype.
            segment_tokens: Tokens per segment (a segment is computed and committed at once).
        """
        from .reading.labelled import LabelledEntry

        return LabelledEntry.planned(self.files, run, tokens, arrays, segment_tokens=segment_tokens)

    def entry(self, run: RunKey | str, dtype: str | None = None) -> LabelledEntry:
        """Open one stored run, complete or not.

        Arguments:
            run: Key of the run, or the first hex digits of its digest (column DATA of `mizarr ls`).
            dtype: Storage dtype, such as "float32"; may be None if the run is stored in only one.

        Raises:
            EntryNotFound: No such run is stored, or several are.
        """
        from .runs.entries import entry_digest, entry_path
        from .runs.shards import DTYPES

        if isinstance(run, str):
            return self._entry_in(self._run_path(run))
        paths = {kind: entry_path(entry_digest(run, kind)) for kind in ([dtype] if dtype else sorted(DTYPES))}
        stored = {
            kind: path for kind, path in paths.items() if self.files.get(f"{path}/zarr.json") is not None
        }
        if len(stored) != 1:
            self.files.require_store()
            problem = (
                f"is stored in {self.address} as {' and as '.join(stored)}; name one of these dtypes"
                if stored
                else f"is not stored in {self.address}{f' as {dtype}' if dtype else ''}; capture it first"
            )
            raise EntryNotFound(f"run {run.short} {problem}")
        return self._entry_in(next(iter(stored.values())))

    def entries(self) -> Iterator[LabelledEntry]:
        """Iterate over all stored runs, complete or not, in order of their digests."""
        from .runs.entries import entry_path

        for name in self._entry_names(""):
            yield self._entry_in(entry_path(name))

    def find_prompts(
        self, run: RunKey, tokens: PackedTokens, dtype: str, cells: Iterable[tuple[str, int | None]] = ()
    ) -> tuple[LabelledEntry, list[int]] | None:
        """Find a stored run of the same model and interventions that contains all these prompts.

        Arguments:
            run: Key of the requested run.
            tokens: Prompts of the requested run.
            dtype: Storage dtype.
            cells: Variable and layer of each array that must be published in the stored run; layer None for
                an array without a layer axis.

        Returns:
            The stored run, and the index of each prompt in it. None if the index finds no such run; the
            prompts then have to be computed.
        """
        if tokens.n_prompts > _MOST_INDEXED_PROMPTS:
            return None
        digests = [tokens.prompt_digest(i) for i in range(tokens.n_prompts)]
        required = list(cells)
        for path, rows in self.index.find_prompts(_family(run, dtype), digests).items():
            # This run contains only some of the prompts.
            if len(rows) < len(set(digests)):
                continue
            try:
                entry = self._entry_in(path)
                prompt_rows = [rows[digest] for digest in digests]
                # The index is only a cache, so its answer is checked against the stored ids.
                has_tokens = entry.tokens.select(prompt_rows) == tokens
                if has_tokens and all(entry.record(*cell) for cell in required):
                    return entry, prompt_rows
            except (EntryNotFound, PromptError):
                self.index.forget(path)
        return None

    def find_start(self, run: RunKey, tokens: PackedTokens, dtype: str) -> LabelledEntry | None:
        """Find the other run of the same model and interventions with the longest common prefix of prompts.

        Its files can be reused for these prompts. Reads the description of every run; none is marked as used.

        Arguments:
            run: Key of the requested run.
            tokens: Prompts of the requested run.
            dtype: Storage dtype.

        Returns:
            The stored run, or None if no other run begins with the same prompt.
        """
        from .runs.entries import entry_path, group_attributes

        best, longest = None, 0
        for name in self._entry_names(""):
            path = entry_path(name)
            stored = group_attributes(self.files, path)["mizarr"]
            is_comparable = stored["run"]["model"] == run.model and stored["run"]["hooks"] == run.hooks
            if not is_comparable or stored["dtype"] != dtype:
                continue
            entry = self._unmarked_entry(path)
            n_shared = tokens.shared_start(entry.tokens)
            if entry.run != run and n_shared > longest:
                best, longest = entry, n_shared
        return best

    def rebuild_index(self) -> None:
        """Enter the prompts of all stored runs into the index again, after `index.sqlite` was deleted or
        damaged."""
        self.index.clear()
        for entry in self.entries():
            self._index_prompts(entry)

    def put_vocabulary(self, tokenizer: str, tokens: Sequence[str]) -> None:
        """Store the token strings of a tokenizer, so that datasets can show tokens as text.

        Arguments:
            tokenizer: Digest of the tokenizer.
            tokens: Token strings by id.
        """
        put_vocabulary(self.files, tokenizer, tokens)

    def vocabulary(self, tokenizer: str) -> list[str] | None:
        """Token strings of a tokenizer (by digest), indexed by token id; None if not stored."""
        return read_vocabulary(self.files, tokenizer)

    # -- annotations

    def annotate(self, subject: str, texts: Mapping[str, str], author: str = "") -> None:
        """Store short texts about items, such as labels of the features of a dictionary; part of no key.

        Arguments:
            subject: Digest of what the items belong to, such as the dictionary.
            texts: Text by the item's name, such as "feature 120"; an empty text removes
                the earlier one.
            author: Name of the person or program that wrote the texts.
        """
        from .upkeep.annotations import annotate

        annotate(self.files, subject, texts, author)

    def annotations(self, subject: str) -> list[Annotation]:
        """All texts stored by `annotate` for a subject (a digest, such as a dictionary's), oldest first."""
        from .upkeep.annotations import annotations_of

        return annotations_of(self.files, subject)

    # -- provenance

    def provenance(self, key: Key | Record) -> list[dict[str, Any]]:
        """Notes on how the data under a key, or a run, was computed: requests, inputs, versions, times.

        Arguments:
            key: Key, first digits of a key or of a run's digest, or record.

        Returns:
            One mapping of plain values per note, oldest first.
        """
        if isinstance(key, str) and self.names_run(key):
            return get_provenance(self.files, self._run_path(key))
        record = key if isinstance(key, Record) else self.record(key)
        return get_provenance(self.files, record.data)

    def lineage(self, content: str) -> dict[str, Any]:
        """Trace data, given by its content digest "sha256:…", back to its record, its request and,
        recursively, its inputs."""
        from .upkeep.lineage import lineage

        return lineage(self, content)

    # -- maintenance (`upkeep/`)

    def verify(self, quick: bool = False, progress: Callable[[int, int], None] | None = None) -> list[Damage]:
        """Compare all committed files with their recorded sizes and checksums.

        Arguments:
            quick: Whether to check only existence and size.
            progress: Called with (bytes verified, bytes in total).

        Returns:
            The damaged files; empty if there are none.
        """
        from .upkeep.verify import verify

        require_flag(quick, "quick")
        return verify(self, quick=quick, progress=progress)

    def quarantine(self, damage: Damage) -> None:
        """Move a damaged file to `quarantine/` and withdraw the arrays stored in it; the next capture
        computes only these again."""
        from .upkeep.quarantine import quarantine

        quarantine(self, damage)

    def gc(self, grace: float = 24 * 3600.0, quota: int | None = None, dry_run: bool = False) -> GcReport:
        """Collect garbage: remove leftovers of killed writers, then the least recently used data above a
        quota.

        Arguments:
            grace: Age in seconds below which no file is removed.
            quota: Bytes that may remain; None for no limit.
            dry_run: Whether to report what would be removed, and remove nothing.
        """
        from .upkeep.collect import gc

        require_flag(dry_run, "dry_run")
        return gc(self, grace=grace, quota=quota, dry_run=dry_run)

    def runs(self, measured: Sequence[Usage] | None = None) -> list[ListedRun]:
        """List the stored runs with model, prompts, hook points and sizes, most recently used first.

        Arguments:
            measured: Result of `usage`, if the caller has it already; None computes it, which looks at every
                file.
        """
        from .upkeep.listing import runs

        return runs(self, self.usage() if measured is None else measured)

    def copy_to(
        self,
        target: Store,
        keys: Iterable[Key | Record] | None = None,
        progress: Callable[[int], None] = lambda done: None,
        codec: str | None = None,
    ) -> Copied:
        """Copy published data to another store; data that exists there stays, an interrupted copy resumes.

        Arguments:
            target: The other store.
            keys: Keys or records to copy; None for all.
            progress: Called with the bytes written so far.
            codec: "zstd" compresses shards of runs (smaller, but decoded instead of mapped on reading),
                "none" decompresses them, None keeps them as they are. Keys and contents stay the same.

        Raises:
            ConfigError: The codec is unknown.
            CorruptEntry: A file does not match its checksum.
        """
        from .upkeep.copying import copy

        records = (
            self.records() if keys is None else (k if isinstance(k, Record) else self.record(k) for k in keys)
        )
        runs_before = set(target._entry_names(""))
        outcome = copy(self, target, records, progress, codec)
        for name in set(target._entry_names("")) - runs_before:
            target._index_prompts(target.entry(name))
        return outcome

    def usage(self) -> list[Usage]:
        """Disk usage in bytes of each run and each result, largest first."""
        from .upkeep.collect import usage

        return usage(self)

    @contextmanager
    def lease(self, key: Key | Record) -> Iterator[None]:
        """Context manager: keep garbage collection from removing the data under a key, for reads that take
        hours."""
        from .upkeep.collect import lease

        with lease(self, key if isinstance(key, Record) else self.record(key)):
            yield

    def remove_unused(self) -> None:
        """Remove this store if nothing was ever stored in it: no data, keys or vocabularies."""
        self.index.close()
        internal = (DESCRIPTION, "leases", "index.sqlite", "index.sqlite-journal")
        other_names = [name for name in self.files.children("") if name not in internal]
        folders = set(self.files.subfolders(""))
        has_files = (name not in folders or any(True for _ in self.files.list(name)) for name in other_names)
        if not any(has_files):
            self.files.remove_tree("")

    def _entry_in(self, path: str) -> LabelledEntry:
        """Open the run in a folder and mark it as used, which garbage collection goes by."""
        entry = self._unmarked_entry(path)
        self.index.touch(path)
        return entry

    def _unmarked_entry(self, path: str) -> LabelledEntry:
        """Open the run in a folder without marking it as used."""
        from .reading.labelled import LabelledEntry
        from .runs.coordinates import read_tokens

        return LabelledEntry.load(self.files, path, read_tokens(self.files, path))

    def _run_path(self, prefix: str) -> str:
        """Folder of the run whose digest starts with `prefix`; EntryNotFound unless exactly one does."""
        from .runs.entries import entry_path

        return entry_path(unique_name(prefix, self._entry_names(prefix), "run", self))

    def _entry_names(self, prefix: str) -> list[str]:
        """Digests of the stored runs that start with `prefix`, sorted; they are the names of their
        folders."""
        if not may_begin_digest(prefix):
            return []
        # data/<ab>/<digest>: a prefix of two digits or more needs only one of the 256 subfolders.
        tops = [prefix[:2]] if len(prefix) >= 2 else list(self.files.subfolders("data"))
        folders = ((top, name) for top in tops for name in self.files.subfolders(f"data/{top}"))
        # Folders of results have a dot in their names, folders of runs do not.
        runs = [(top, name) for top, name in folders if name.startswith(prefix) and "." not in name]
        return sorted(
            name for top, name in runs if self.files.size(f"data/{top}/{name}/zarr.json") is not None
        )

    def _index_prompts(self, entry: LabelledEntry) -> None:
        """Enter the prompts of a run into the index, so that `find_prompts` finds them."""
        tokens = entry.tokens
        if tokens.n_prompts <= _MOST_INDEXED_PROMPTS and not self.read_only:
            digests = (tokens.prompt_digest(i) for i in range(tokens.n_prompts))
            self.index.add_prompts(_family(entry.run, entry.dtype), entry.path, digests)


def default_segment_tokens(tokens: PackedTokens, arrays: Sequence[ArraySpec]) -> int:
    """Choose how many tokens of a run are computed and committed at once, as one file per array and layer.

    Arguments:
        tokens: Prompts of the run.
        arrays: Variables of the run.

    Returns:
        The power of two for which the largest file is nearest to 64 MiB (256 MiB from ten million tokens on).
        For a shorter run, its number of tokens, rounded up to a power of two.
    """
    target_bytes = _SHARD_BYTES if tokens.n_tokens < _CORPUS_TOKENS else _CORPUS_SHARD_BYTES
    bytes_per_token = max((spec.row_bytes * spec.rows_per_token(tokens) for spec in arrays), default=1)
    # A power of two, so that inner chunks of a power of two divide it.
    n_tokens = 2 ** max(0, round(math.log2(target_bytes / bytes_per_token)))
    return int(min(n_tokens, 2 ** (tokens.n_tokens - 1).bit_length()))


def _family(run: RunKey, dtype: str) -> str:
    """Digest of a run's model, interventions and dtype: equal for runs that differ only in their prompts."""
    from .runs.entries import entry_digest

    return entry_digest(replace(run, prompt=""), dtype)


def _group_attributes(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes to write into a run's Zarr group: names of its coordinates, and which tokenizer it used."""
    from .runs.coordinates import NAMES

    token_attributes = {name: value for name, value in attrs.items() if name in _TOKEN_ATTRIBUTES}
    return {"coordinates": " ".join(NAMES), **token_attributes}


def _description(files: Folder) -> bytes:
    """Content of `store.json`; created if it is missing and the store may be written."""
    if (text := files.get(DESCRIPTION)) is not None:
        return text
    if files.read_only:
        raise StoreFormatError(
            f"expected a store of mizarr in {files.address}, found no {DESCRIPTION} there; check the path"
        )
    # Temporary files are not counted: they may be another process's store.json being written.
    existing = list(files.children(""))
    if existing and DESCRIPTION not in existing:
        raise StoreFormatError(
            f"expected a store of mizarr or an empty folder at {files.address}, found {len(existing)} other "
            f"files or folders ({', '.join(sorted(existing)[:3])}); name a new folder"
        )
    # put_new: of two processes that create one store at once, both then read the same description.
    files.put_new(DESCRIPTION, sealed({"format": FORMAT, "digest": "sha256", "created": now()}))
    return files.get(DESCRIPTION) or b""


def _check_format(files: Folder) -> None:
    """Check that the folder is a store of our format; create the store if allowed."""
    try:
        text = _description(files)
        number = int(read_json(text)["format"])
        # A later format may seal its description differently, so only the number is read of other formats.
        if number == FORMAT:
            unsealed(DESCRIPTION, text)
    except (ValueError, KeyError, TypeError, OverflowError, CorruptEntry) as error:
        raise StoreFormatError(
            f"{files.where(DESCRIPTION)} is damaged, or does not describe a store of mizarr "
            f"({_before_advice(error)}); name another folder, or copy this file from another store of this "
            "version of mizarr"
        ) from error
    if number != FORMAT:
        raise StoreFormatError(
            f"expected a store of format version {FORMAT}, found version {number} in {files.address}, "
            "written by another version of mizarr; upgrade (pip install -U mizarr), or use another folder"
        )


def _before_advice(error: Exception) -> str:
    """Message of an error up to the advice after ";", as `mizarr verify` cannot repair a store that does
    not open."""
    return str(error).partition("; ")[0]
