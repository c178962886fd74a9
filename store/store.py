"""A store: the folder that keeps what runs and stages leave behind, and the one object through which it is
used.

Border: keys and labelled data; which stage made them, and when it should run, is decided in the pipeline.

    store.json            format version; its presence makes a folder a store
    keys/<ab>/<K>.json    what has been published (`records.py`); readers start here and nowhere else
    data/<ab>/<D>/        one run: shards on a packed token axis (`entries.py`)
    data/<ab>/<K>.<x>/    one attempt at a derived result (`results.py`)
    pins/<name>.json      keys that gc must keep
    annotations/          what people say of what is stored (`upkeep/annotations.py`)
    quarantine/           what `verify` found damaged
    vocabularies/         token strings by tokenizer digest
    index.sqlite          a cache of lookups (`index.py`); may be deleted at any time

Any number of processes and threads may use one store at once. Small files are created, never changed; whoever
comes second finds the first one's and takes it.
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
"""Number of the layout of files that this version reads and writes."""
_SHARD, _CORPUS_SHARD = 64 << 20, 256 << 20  # bytes of a shard below and above
_CORPUS = 10_000_000  # tokens
_TOKENS = ("tokenizer", "token_ids")  # of what is noted about a run, what decides how its tokens are shown
_INDEXED = 100_000  # prompts up to which an entry's prompts are indexed one by one

Mode = Literal["a", "r"]
Durability = Literal["disk", "process"]


def open_store(path: str | Path, mode: Mode = "a", durability: Durability = "disk") -> Store:
    """Open the store in a folder, or create it there.

    mode: "a" reads, writes and creates; "r" only reads and leaves no trace in the folder.
    durability: "disk" survives a power cut; "process" skips fsync and survives any kill of the process.
    Raises ConfigError for another mode or durability, StoreError for a path that cannot be a folder's, and
    StoreFormatError when the folder holds something else, or a store of another format.
    """
    if mode not in ("a", "r"):
        raise ConfigError(
            f"expected mode 'a' (read, write, create) or 'r' (read only), found {mode!r:.80}; nothing "
            "that is stored is ever written over"
        )
    if durability not in ("disk", "process"):
        raise ConfigError(f"expected durability 'disk' or 'process', found {durability!r:.80}")
    files = open_folder(path, durability, mode == "r")
    _check_format(files)
    return Store(files.as_store())


@contextmanager
def requested_store(path: str | Path, durability: Durability = "disk") -> Iterator[Store]:
    """The store in a folder, or a new one, for a request that may still be refused.

    A store that was created here, and in which nothing is stored, is removed again when the block raises.
    Another process that opened it meanwhile is told so at its next write.
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
    """Raise ConfigError unless a value is a store that was opened."""
    require_kind(
        value,
        Store,
        "an open store",
        "write store=mizarr.open_store('activations'), with the folder it lies in",
    )


class Store(Catalog):
    """Runs and results by key. Made by `open_store`; cheap to send to another process."""

    def __repr__(self) -> str:
        return f"Store({self.address!r}, mode={'r' if self.read_only else 'a'!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Store) and self.files == other.files

    def __hash__(self) -> int:
        return hash(self.files)

    # -- what is there

    def names_run(self, prefix: str) -> bool:
        """Whether some run's digest starts so, and no key does."""
        return not self.key_names(prefix) and bool(self._entry_names(prefix))

    def __getitem__(self, key: Key) -> xr.Dataset:
        """The labelled data under a key or a unique prefix of one, lazy.

        A prefix of no key may be one of a run's digest (DATA of `mizarr ls`): then all that the run holds.
        The key of scales of int8 gives what they are scales of.
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
        """Store a labelled result; returns the record that stands, which is the first one ever published.

        Chunked variables are computed and written chunk by chunk, in bounded memory. Text may be any kind of
        string array; times are refused (numbers with a unit in attrs["units"] instead).
        provenance: plain values on how it came about (code hash, seconds); recorded beside it, never
        digested. confirm: called when all is written and nothing visible yet; what it raises withdraws the
        attempt, as when what the key was made of has changed meanwhile.
        """
        from .results import write_result

        return write_result(self.files, key, dataset, provenance or {}, confirm)

    def open_result(self, key: Key | Record) -> xr.Dataset:
        """A stored result, labelled and lazy; large ones come chunked."""
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
        """The entry that holds a run's activations, made if it is new; arrays it does not have yet are added.

        segment_tokens: length of a segment; by default as long as makes files of about 64 MiB (256 MiB from
        ten million tokens on). An entry keeps the length it was made with.
        attrs: plain values for people (model name, hooks, versions), recorded as provenance and never
        digested; "tokenizer", a digest, also leads to the token strings (`put_vocabulary`); "token_ids":
        "unknown" says that the ids are none, and are not to be shown.
        codec: "zstd" for new arrays in fewer bytes, as `copy_to` makes them.
        Raises PromptError when `tokens` are not those the run was keyed by, ShapeError for arrays that do not
        fit.
        """
        from .reading.labelled import LabelledEntry
        from .runs.coordinates import record_metadata, write_coordinates
        from .runs.entries import dtype_of, entry_digest, entry_path, with_scales

        names = [spec.variable for spec in with_scales(arrays)]  # refuses before anything is written
        if tokens.digest != run.prompt:
            raise PromptError(
                f"expected the tokens the run is keyed by ({run.prompt}), found tokens {tokens.digest}"
            )
        path = entry_path(entry_digest(run, dtype_of(arrays))) if arrays else ""
        is_new = not arrays or self.files.get(f"{path}/zarr.json") is None
        length = segment_tokens or default_segment_tokens(tokens, arrays)
        if is_new and arrays:
            layers = next((spec.layers for spec in arrays if spec.layers is not None), None)
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
        """The entry that `create_entry` would make where there is none yet; writes nothing."""
        from .reading.labelled import LabelledEntry

        return LabelledEntry.planned(self.files, run, tokens, arrays, segment_tokens=segment_tokens)

    def entry(self, run: RunKey | str, dtype: str | None = None) -> LabelledEntry:
        """The entry of a run, by its key and storage dtype, or by a unique prefix of the entry's digest.

        A RunKey without `dtype` finds the one entry there is. Raises EntryNotFound.
        """
        from .runs.entries import entry_digest, entry_path
        from .runs.shards import DTYPES

        if isinstance(run, str):
            return self._entry_in(self._run_path(run))
        tried = [entry_path(entry_digest(run, kind)) for kind in ([dtype] if dtype else sorted(DTYPES))]
        there = [path for path in tried if self.files.get(f"{path}/zarr.json") is not None]
        if len(there) != 1:
            self.files.require_store()
            found = (
                f"{len(there)} entries, in several dtypes: name one" if there else "nothing: capture it first"
            )
            raise EntryNotFound(f"expected one entry of run {run.short} in {self.address}, found {found}")
        return self._entry_in(there[0])

    def entries(self) -> Iterator[LabelledEntry]:
        """Every run that has been begun, in order of digest."""
        from .runs.entries import entry_path

        for name in self._entry_names(""):
            yield self._entry_in(entry_path(name))

    def find_prompts(
        self, run: RunKey, tokens: PackedTokens, dtype: str, wanted: Iterable[tuple[str, int | None]] = ()
    ) -> tuple[LabelledEntry, list[int]] | None:
        """An entry of another run of the same kind that holds all these prompts, and their rows in it.

        Same model, same interventions, other or more prompts; `wanted` (variable, layer)s must be published
        in it.
        None when there is none, or the index has forgotten: then the run is computed, no more.
        """
        if tokens.n_prompts > _INDEXED:
            return None
        digests = [tokens.prompt_digest(i) for i in range(tokens.n_prompts)]
        asked = list(wanted)
        for path, rows in self.index.find_prompts(_family(run, dtype), digests).items():
            if len(rows) < len(set(digests)):
                continue
            try:
                entry = self._entry_in(path)
                chosen = [rows[digest] for digest in digests]
                # The index may lie; the ids do not.
                if entry.tokens.select(chosen) == tokens and all(entry.record(*cell) for cell in asked):
                    return entry, chosen
            except (EntryNotFound, PromptError):
                self.index.forget(path)
        return None

    def find_start(self, run: RunKey, tokens: PackedTokens, dtype: str) -> LabelledEntry | None:
        """The run of the same kind that shares the most prompts with this one, from the first on; None where
        none does. Looks at every run, which is no use of it."""
        from .runs.entries import entry_path, group_attributes

        best, most = None, 0
        for name in self._entry_names(""):
            path = entry_path(name)
            about = group_attributes(self.files, path)["mizarr"]
            if (about["run"]["model"], about["run"]["hooks"], about["dtype"]) != (
                run.model,
                run.hooks,
                dtype,
            ):
                continue
            entry = self._look_at(path)
            if entry.run != run and (shared := tokens.shared_start(entry.tokens)) > most:
                best, most = entry, shared
        return best

    def rebuild_index(self) -> None:
        """Fill the index again from the entries; after it was deleted, or when it seems to lie."""
        self.index.clear()
        for entry in self.entries():
            self._remember(entry)

    def put_vocabulary(self, tokenizer: str, tokens: Sequence[str]) -> None:
        """Keep the token strings of a tokenizer (by digest), so that datasets show them without it."""
        put_vocabulary(self.files, tokenizer, tokens)

    def vocabulary(self, tokenizer: str) -> list[str] | None:
        """Token strings by id, as kept; None if they are not."""
        return read_vocabulary(self.files, tokenizer)

    # -- what people say

    def annotate(self, subject: str, said: Mapping[str, str], author: str = "") -> None:
        """Keep short texts, by item, about a subject (a digest): upkeep/annotations.py. In no key."""
        from .upkeep.annotations import annotate

        annotate(self.files, subject, said, author)

    def annotations(self, subject: str) -> list[Annotation]:
        """Everything said about a subject, oldest first."""
        from .upkeep.annotations import said_of

        return said_of(self.files, subject)

    # -- where it came from

    def provenance(self, key: Key | Record) -> list[dict[str, Any]]:
        """What is noted about the data under a key, or a run's, oldest first: requests, parents, versions,
        times."""
        if isinstance(key, str) and self.names_run(key):
            return get_provenance(self.files, self._run_path(key))
        record = key if isinstance(key, Record) else self.record(key)
        return get_provenance(self.files, record.data)

    def lineage(self, content: str) -> dict[str, Any]:
        """Where a content digest R came from: its record, its request and, in turn, each of its inputs."""
        from .upkeep.lineage import lineage

        return lineage(self, content)

    # -- upkeep (`upkeep/`)

    def verify(self, quick: bool = False, progress: Callable[[int, int], None] | None = None) -> list[Damage]:
        """Files that are not what was committed; `quick` looks at existence and size only.

        progress: called with bytes done and bytes in all.
        """
        from .upkeep.verify import verify

        require_flag(quick, "quick")
        return verify(self, quick=quick, progress=progress)

    def quarantine(self, damage: Damage) -> None:
        """Set a damaged file aside and withdraw what it belonged to; the next run computes just that."""
        from .upkeep.quarantine import quarantine

        quarantine(self, damage)

    def gc(self, grace: float = 24 * 3600.0, quota: int | None = None, dry_run: bool = False) -> GcReport:
        """Remove leftovers older than `grace` seconds; above `quota` bytes, what was unused for longest."""
        from .upkeep.collect import gc

        require_flag(dry_run, "dry_run")
        return gc(self, grace=grace, quota=quota, dry_run=dry_run)

    def runs(self, measured: Sequence[Usage] | None = None) -> list[ListedRun]:
        """Runs with their model, prompts, hook points and sizes, the one used last first. measured: `usage`,
        where it is known already, as it looks at every file."""
        from .upkeep.listing import runs

        return runs(self, self.usage() if measured is None else measured)

    def copy_to(
        self,
        target: Store,
        keys: Iterable[Key | Record] | None = None,
        progress: Callable[[int], None] = lambda done: None,
        codec: str | None = None,
    ) -> Copied:
        """Put what is published here into another store, by default all; what is there already stays.

        A run's keys go with its labels, every file compared with its digest; cut off, it resumes. progress:
        called with bytes written. codec: "zstd" for runs in fewer bytes, which are decoded when they are read
        instead of mapped, "none" for plain ones again; keys and contents stay. Raises ConfigError for another
        codec, CorruptEntry for a file that is not what was recorded.
        """
        from .upkeep.copying import copy

        asked = (
            self.records() if keys is None else (k if isinstance(k, Record) else self.record(k) for k in keys)
        )
        before = set(target._entry_names(""))
        done = copy(self, target, asked, progress, codec)
        for name in set(target._entry_names("")) - before:
            target._remember(target.entry(name))
        return done

    def usage(self) -> list[Usage]:
        """Bytes by run and result, largest first."""
        from .upkeep.collect import usage

        return usage(self)

    @contextmanager
    def lease(self, key: Key | Record) -> Iterator[None]:
        """Within: gc leaves what is stored under the key alone; for scans that take hours."""
        from .upkeep.collect import lease

        with lease(self, key if isinstance(key, Record) else self.record(key)):
            yield

    def remove_unused(self) -> None:
        """Remove this store if nothing was ever stored in it: neither data, keys nor vocabularies."""
        self.index.close()
        own = (DESCRIPTION, "leases", "index.sqlite", "index.sqlite-journal")
        others = [name for name in self.files.children("") if name not in own]
        folders = set(self.files.subfolders(""))
        if all(name in folders and next(iter(self.files.list(name)), None) is None for name in others):
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
        """Where the one run lies whose digest starts so."""
        from .runs.entries import entry_path

        return entry_path(unique_name(prefix, self._entry_names(prefix), "run", self))

    def _entry_names(self, prefix: str) -> list[str]:
        if not may_begin_digest(prefix):
            return []
        tops = [prefix[:2]] if len(prefix) >= 2 else list(self.files.subfolders("data"))
        found = ((top, name) for top in tops for name in self.files.subfolders(f"data/{top}"))
        # The name of a result's folder has a dot in it.
        runs = [(top, name) for top, name in found if name.startswith(prefix) and "." not in name]
        return sorted(
            name for top, name in runs if self.files.size(f"data/{top}/{name}/zarr.json") is not None
        )

    def _remember(self, entry: LabelledEntry) -> None:
        tokens = entry.tokens
        if tokens.n_prompts <= _INDEXED and not self.read_only:
            digests = (tokens.prompt_digest(i) for i in range(tokens.n_prompts))
            self.index.add_prompts(_family(entry.run, entry.dtype), entry.path, digests)


def default_segment_tokens(tokens: PackedTokens, arrays: Sequence[ArraySpec]) -> int:
    """Tokens per segment: the power of two whose largest shard is nearest 64 MiB, 256 MiB for large corpora.

    Fewer prompts than that are one segment.
    """
    target = _SHARD if tokens.n_tokens < _CORPUS else _CORPUS_SHARD
    per_token = [spec.row_bytes * spec.rows_per_token(tokens) for spec in arrays]
    best = 2 ** max(0, round(math.log2(target / max(per_token, default=1))))
    return int(min(best, 2 ** (tokens.n_tokens - 1).bit_length()))


def _family(run: RunKey, dtype: str) -> str:
    """What two runs share that differ in their prompts only."""
    from .runs.entries import entry_digest

    return entry_digest(replace(run, prompt=""), dtype)


def _group_attributes(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of the Zarr group: which arrays are labels, and whose tokens. The rest is provenance."""
    from .runs.coordinates import NAMES

    return {"coordinates": " ".join(NAMES), **{k: v for k, v in attrs.items() if k in _TOKENS}}


def _description(files: Folder) -> bytes:
    """The text of `store.json`, made where there is none and that is allowed."""
    if (text := files.get(DESCRIPTION)) is not None:
        return text
    if files.read_only:
        raise StoreFormatError(f"expected a store in {files.address}, found no {DESCRIPTION}; check the path")
    # Hidden names are ignored: they may be another process's store.json on its way.
    other = list(files.children(""))
    if other and DESCRIPTION not in other:
        raise StoreFormatError(
            f"expected a store or an empty folder at {files.address}, found {len(other)} other things "
            f"({', '.join(sorted(other)[:3])}); name a new folder"
        )
    files.put_new(DESCRIPTION, sealed({"format": FORMAT, "digest": "sha256", "created": now()}))
    return files.get(DESCRIPTION) or b""


def _check_format(files: Folder) -> None:
    """Make sure the folder is a store of the format we read, creating it where that is allowed."""
    try:
        text = _description(files)
        number = int(read_json(text)["format"])
        # Another format may describe itself otherwise: its number is all that is read.
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
    """What was expected and found; a store that cannot be opened cannot be mended from within."""
    return str(error).partition("; ")[0]
