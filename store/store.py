"""`Store`: the folder (or bucket prefix) with all runs and results, and the object through which they are
used.

    store.json            format version; its presence makes a folder a store
    keys/<ab>/<K>.json    what is published (`records.py`); readers start here only
    data/<ab>/<D>/        one run: shards on a packed token axis (`runs/entries.py`)
    data/<ab>/<K>.<x>/    one attempt at a derived result (`results.py`)
    pins/<name>.json      keys that gc must keep
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
_SHARD, _CORPUS_SHARD = 64 << 20, 256 << 20  # bytes of a shard for runs below and above _CORPUS
_CORPUS = 10_000_000  # tokens
_TOKENS = ("tokenizer", "token_ids")  # run attributes that decide how tokens are shown, stored with the group
_INDEXED = 100_000  # runs with more prompts are not indexed, which would take one row per prompt

Mode = Literal["a", "r"]
Durability = Literal["disk", "process"]


def open_store(path: str | Path, mode: Mode = "a", durability: Durability = "disk") -> Store:
    """Open the store in a folder, or create one.

    Arguments:
        path: A folder, or a URL such as s3://BUCKET/PREFIX.
        mode: "a" reads, writes and creates; "r" only reads and leaves no trace in the folder.
        durability: "disk" survives a power cut; "process" skips fsync and survives a kill of the process
            only.

    Raises:
        ConfigError: Unknown mode or durability.
        StoreError: The path cannot be a folder.
        StoreFormatError: The folder holds other things, or a store of another format.
    """
    if mode not in ("a", "r"):
        raise ConfigError(
            f"expected mode 'a' (read, write, create) or 'r' (read only), found {mode!r:.80}; nothing "
            "that is stored is ever overwritten"
        )
    if durability not in ("disk", "process"):
        raise ConfigError(f"expected durability 'disk' or 'process', found {durability!r:.80}")
    # The format is checked before `as_store`, which would refuse to create store.json.
    files = open_folder(path, durability, mode == "r")
    _check_format(files)
    return Store(files.as_store())


@contextmanager
def requested_store(path: str | Path, durability: Durability = "disk") -> Iterator[Store]:
    """Open or create a store for a request that may still fail.

    A store that was created here and is still empty is removed again if the block raises. Another process
    that opened it in the meantime gets an error at its next write.

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
    """Raise ConfigError unless a value is an open store."""
    require_kind(
        value,
        Store,
        "an open store",
        "write store=mizarr.open_store('activations'), with the folder it lies in",
    )


class Store(Catalog):
    """Runs and results by key. Create with `open_store`; cheap to pickle for another process."""

    def __repr__(self) -> str:
        return f"Store({self.address!r}, mode={'r' if self.read_only else 'a'!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Store) and self.files == other.files

    def __hash__(self) -> int:
        return hash(self.files)

    # -- lookup

    def names_run(self, prefix: str) -> bool:
        """Whether a digest prefix belongs to some run and to no key."""
        return not self.key_names(prefix) and bool(self._entry_names(prefix))

    def __getitem__(self, key: Key) -> xr.Dataset:
        """Labelled lazy data under a key, or a unique prefix of one.

        If no key has the prefix, it may be one of a run's digest (DATA of `mizarr ls`), which opens the whole
        run. The key of an int8 scale array opens the variable it belongs to.
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
        """Store a labelled result.

        Dask variables are computed and written chunk by chunk, in bounded memory. Any kind of string array is
        allowed; times are refused (store numbers, with the unit in attrs["units"]).

        Arguments:
            key: Key of the result.
            dataset: The result.
            provenance: Plain values on how it was computed (code hash, seconds); stored beside it, never
                digested.
            confirm: Called when all is written and nothing is visible yet; an exception withdraws the
                attempt. Used to check that the sources in the key are unchanged.

        Returns:
            The published record: this one, or that of an earlier writer.

        Raises:
            ShapeError: The dataset cannot be stored.
            StoreFull: The disk or quota is full.
            ReadOnlyStore: The store cannot be written.
        """
        from .results import write_result

        return write_result(self.files, key, dataset, provenance or {}, confirm)

    def open_result(self, key: Key | Record) -> xr.Dataset:
        """Open a stored result, labelled and lazy; large ones as dask arrays."""
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
        """Open the entry for a run's activations; create it if it is new, and declare arrays that it lacks.

        Arguments:
            run: Key of the run.
            tokens: Its prompts.
            arrays: Variables to declare, all of one storage dtype.
            segment_tokens: Tokens per segment of a new entry; by default such that files have about 64 MiB
                (256 MiB from ten million tokens on).
            attrs: Plain values (model name, hooks, versions), stored as provenance and never digested.
                "tokenizer", a digest, leads to the token strings (`put_vocabulary`); "token_ids": "unknown"
                says that the ids are meaningless and must not be shown.
            codec: "zstd" compresses new arrays, as `copy_to` does.

        Raises:
            PromptError: `tokens` are not those in the key.
            ShapeError: Arrays do not fit.
        """
        from .reading.labelled import LabelledEntry
        from .runs.coordinates import record_metadata, write_coordinates
        from .runs.entries import dtype_of, entry_digest, entry_path, with_scales

        names = [spec.variable for spec in with_scales(arrays)]  # raises before anything is written
        # A wrong pairing would publish correct-looking activations under the key of other prompts.
        if tokens.digest != run.prompt:
            raise PromptError(
                f"expected the tokens the run is keyed by ({run.prompt}), found tokens {tokens.digest}"
            )
        path = entry_path(entry_digest(run, dtype_of(arrays))) if arrays else ""
        is_new = not arrays or self.files.get(f"{path}/zarr.json") is None
        length = segment_tokens or default_segment_tokens(tokens, arrays)
        if is_new and arrays:
            layers = next((spec.layers for spec in arrays if spec.layers is not None), None)
            # Before the group, which marks a run as begun: from then on its tokens can be read.
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
        self._remember(entry)
        self.index.touch(entry.path)
        return entry

    def planned_entry(
        self, run: RunKey, tokens: PackedTokens, arrays: Sequence[ArraySpec], segment_tokens: int
    ) -> LabelledEntry:
        """The entry that `create_entry` would make if none exists yet; writes nothing.

        Arguments:
            run: Key of the run.
            tokens: Its prompts.
            arrays: Variables, all of one storage dtype.
            segment_tokens: Tokens per segment.
        """
        from .reading.labelled import LabelledEntry

        return LabelledEntry.planned(self.files, run, tokens, arrays, segment_tokens=segment_tokens)

    def entry(self, run: RunKey | str, dtype: str | None = None) -> LabelledEntry:
        """Open the entry of a run.

        Arguments:
            run: Key of the run, or a unique prefix of the entry's digest.
            dtype: Storage dtype; may be None if the run is stored in only one.

        Raises:
            EntryNotFound: There is no such entry, or there are several.
        """
        from .runs.entries import entry_digest, entry_path
        from .runs.shards import DTYPES

        if isinstance(run, str):
            return self._entry_in(self._run_path(run))
        candidates = [entry_path(entry_digest(run, kind)) for kind in ([dtype] if dtype else sorted(DTYPES))]
        existing = [path for path in candidates if self.files.get(f"{path}/zarr.json") is not None]
        if len(existing) != 1:
            self.files.require_store()
            description = (
                f"{len(existing)} entries, in several dtypes: name one"
                if existing
                else "nothing: capture it first"
            )
            raise EntryNotFound(
                f"expected one entry of run {run.short} in {self.address}, found {description}"
            )
        return self._entry_in(existing[0])

    def entries(self) -> Iterator[LabelledEntry]:
        """All runs, complete or not, in order of digest."""
        from .runs.entries import entry_path

        for name in self._entry_names(""):
            yield self._entry_in(entry_path(name))

    def find_prompts(
        self, run: RunKey, tokens: PackedTokens, dtype: str, cells: Iterable[tuple[str, int | None]] = ()
    ) -> tuple[LabelledEntry, list[int]] | None:
        """Look up an entry containing all these prompts, for equal model and interventions.

        Arguments:
            run: Key of the requested run.
            tokens: Its prompts.
            dtype: Storage dtype.
            cells: Cells (variable, layer) that must be published in the entry.

        Returns:
            The entry and the rows of the prompts in it. None if the index knows none; the run is then
            computed.
        """
        if tokens.n_prompts > _INDEXED:
            return None
        digests = [tokens.prompt_digest(i) for i in range(tokens.n_prompts)]
        required = list(cells)
        for path, rows in self.index.find_prompts(_family(run, dtype), digests).items():
            # The index found only some of the prompts in that entry.
            if len(rows) < len(set(digests)):
                continue
            try:
                entry = self._entry_in(path)
                rows_found = [rows[digest] for digest in digests]
                # The index is only a cache, so its answer is checked against the stored ids.
                if entry.tokens.select(rows_found) == tokens and all(
                    entry.record(*cell) for cell in required
                ):
                    return entry, rows_found
            except (EntryNotFound, PromptError):
                self.index.forget(path)
        return None

    def find_start(self, run: RunKey, tokens: PackedTokens, dtype: str) -> LabelledEntry | None:
        """Another run of the same model and interventions with the longest common prefix of prompts.

        Reads the description of every run, without marking them as used.

        Arguments:
            run: Key of the requested run.
            tokens: Its prompts.
            dtype: Storage dtype.

        Returns:
            None if no run has the first prompt in common.
        """
        from .runs.entries import entry_path, group_attributes

        best, longest = None, 0
        for name in self._entry_names(""):
            path = entry_path(name)
            attributes = group_attributes(self.files, path)["mizarr"]
            if (attributes["run"]["model"], attributes["run"]["hooks"], attributes["dtype"]) != (
                run.model,
                run.hooks,
                dtype,
            ):
                continue
            entry = self._look_at(path)
            if entry.run != run and (shared := tokens.shared_start(entry.tokens)) > longest:
                best, longest = entry, shared
        return best

    def rebuild_index(self) -> None:
        """Index the prompts of all runs again, after `index.sqlite` was deleted or damaged."""
        self.index.clear()
        for entry in self.entries():
            self._remember(entry)

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
        """Attach short texts to stored things, such as labels to features of a dictionary. Part of no key.

        Arguments:
            subject: Digest of what the items belong to, such as the dictionary.
            texts: Text by item; an empty text removes the one before.
            author: Who wrote the texts.
        """
        from .upkeep.annotations import annotate

        annotate(self.files, subject, texts, author)

    def annotations(self, subject: str) -> list[Annotation]:
        """All annotations of a subject, oldest first."""
        from .upkeep.annotations import annotations_of

        return annotations_of(self.files, subject)

    # -- provenance

    def provenance(self, key: Key | Record) -> list[dict[str, Any]]:
        """Provenance notes on the data under a key, or on a run, oldest first: requests, parents, versions,
        times."""
        if isinstance(key, str) and self.names_run(key):
            return get_provenance(self.files, self._run_path(key))
        record = key if isinstance(key, Record) else self.record(key)
        return get_provenance(self.files, record.data)

    def lineage(self, content: str) -> dict[str, Any]:
        """Trace a content digest R back: its record, its request and, recursively, its inputs."""
        from .upkeep.lineage import lineage

        return lineage(self, content)

    # -- maintenance (`upkeep/`)

    def verify(self, quick: bool = False, progress: Callable[[int, int], None] | None = None) -> list[Damage]:
        """Compare committed files with their recorded sizes and checksums.

        Arguments:
            quick: Whether to check only existence and size.
            progress: Called with (bytes verified, bytes in total).
        """
        from .upkeep.verify import verify

        require_flag(quick, "quick")
        return verify(self, quick=quick, progress=progress)

    def quarantine(self, damage: Damage) -> None:
        """Move a damaged file aside and withdraw what depended on it; the next capture recomputes only
        that."""
        from .upkeep.quarantine import quarantine

        quarantine(self, damage)

    def gc(self, grace: float = 24 * 3600.0, quota: int | None = None, dry_run: bool = False) -> GcReport:
        """Remove leftovers of killed writers, then the least recently used data above the quota.

        Arguments:
            grace: Seconds for which new files are safe.
            quota: Bytes that may remain; None for no limit.
            dry_run: Whether to report only.
        """
        from .upkeep.collect import gc

        require_flag(dry_run, "dry_run")
        return gc(self, grace=grace, quota=quota, dry_run=dry_run)

    def runs(self, measured: Sequence[Usage] | None = None) -> list[ListedRun]:
        """Runs with model, prompts, hook points and sizes, most recently used first.

        Arguments:
            measured: Result of `usage`, if the caller has it, as computing it looks at every file.
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
        """Copy published data to another store. What exists there stays; an interrupted copy resumes.

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
            target._remember(target.entry(name))
        return outcome

    def usage(self) -> list[Usage]:
        """Disk usage by run and result, largest first."""
        from .upkeep.collect import usage

        return usage(self)

    @contextmanager
    def lease(self, key: Key | Record) -> Iterator[None]:
        """Protect what is stored under a key from gc within the block, for scans that take hours."""
        from .upkeep.collect import lease

        with lease(self, key if isinstance(key, Record) else self.record(key)):
            yield

    def remove_unused(self) -> None:
        """Remove this store if nothing was ever stored in it: no data, keys or vocabularies."""
        self.index.close()
        internal = (DESCRIPTION, "leases", "index.sqlite", "index.sqlite-journal")
        other_names = [name for name in self.files.children("") if name not in internal]
        folders = set(self.files.subfolders(""))
        if all(name in folders and next(iter(self.files.list(name)), None) is None for name in other_names):
            self.files.remove_tree("")

    def _entry_in(self, path: str) -> LabelledEntry:
        entry = self._look_at(path)
        self.index.touch(path)
        return entry

    def _look_at(self, path: str) -> LabelledEntry:
        from .reading.labelled import LabelledEntry
        from .runs.coordinates import read_tokens

        return LabelledEntry.load(self.files, path, read_tokens(self.files, path))

    def _run_path(self, prefix: str) -> str:
        """Folder of the run whose digest starts with a prefix; EntryNotFound unless there is exactly one."""
        from .runs.entries import entry_path

        return entry_path(unique_name(prefix, self._entry_names(prefix), "run", self))

    def _entry_names(self, prefix: str) -> list[str]:
        if not may_begin_digest(prefix):
            return []
        tops = [prefix[:2]] if len(prefix) >= 2 else list(self.files.subfolders("data"))
        folders = ((top, name) for top in tops for name in self.files.subfolders(f"data/{top}"))
        # Folders of results have a dot in their names, folders of runs do not.
        runs = [(top, name) for top, name in folders if name.startswith(prefix) and "." not in name]
        return sorted(
            name for top, name in runs if self.files.size(f"data/{top}/{name}/zarr.json") is not None
        )

    def _remember(self, entry: LabelledEntry) -> None:
        tokens = entry.tokens
        if tokens.n_prompts <= _INDEXED and not self.read_only:
            digests = (tokens.prompt_digest(i) for i in range(tokens.n_prompts))
            self.index.add_prompts(_family(entry.run, entry.dtype), entry.path, digests)


def default_segment_tokens(tokens: PackedTokens, arrays: Sequence[ArraySpec]) -> int:
    """Tokens per segment: the power of two whose largest shard is nearest 64 MiB (256 MiB for large corpora).

    A run with fewer tokens than that is a single segment.

    Arguments:
        tokens: The run's prompts.
        arrays: Variables of the run.
    """
    target = _SHARD if tokens.n_tokens < _CORPUS else _CORPUS_SHARD
    per_token = [spec.row_bytes * spec.rows_per_token(tokens) for spec in arrays]
    # A power of two, so that inner chunks of a power of two divide it.
    n_tokens = 2 ** max(0, round(math.log2(target / max(per_token, default=1))))
    return int(min(n_tokens, 2 ** (tokens.n_tokens - 1).bit_length()))


def _family(run: RunKey, dtype: str) -> str:
    """Digest of what runs share that differ in their prompts only."""
    from .runs.entries import entry_digest

    return entry_digest(replace(run, prompt=""), dtype)


def _group_attributes(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of a run's Zarr group: names of coordinates, and the tokenizer. The rest is provenance."""
    from .runs.coordinates import NAMES

    return {"coordinates": " ".join(NAMES), **{k: v for k, v in attrs.items() if k in _TOKENS}}


def _description(files: Folder) -> bytes:
    """Content of `store.json`; created if it is missing and the store may be written."""
    if (text := files.get(DESCRIPTION)) is not None:
        return text
    if files.read_only:
        raise StoreFormatError(f"expected a store in {files.address}, found no {DESCRIPTION}; check the path")
    # Temporary files are not counted: they may be another process's store.json being written.
    existing = list(files.children(""))
    if existing and DESCRIPTION not in existing:
        raise StoreFormatError(
            f"expected a store or an empty folder at {files.address}, found {len(existing)} other things "
            f"({', '.join(sorted(existing)[:3])}); name a new folder"
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
            f"{files.where(DESCRIPTION)} is not the description of a store ({_before_advice(error)}); "
            "name another folder, or copy the file from another store of this version of mizarr"
        ) from error
    if number != FORMAT:
        raise StoreFormatError(
            f"expected a store of format {FORMAT}, found format {number} in {files.address}; it was written "
            "by another version of mizarr: upgrade (pip install -U mizarr), or use another folder"
        )


def _before_advice(error: Exception) -> str:
    """Message of an error without its advice: `mizarr verify` cannot repair a store that does not open."""
    return str(error).partition("; ")[0]
