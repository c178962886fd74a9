"""Downloads the files of a model from the Hugging Face hub into its usual local cache.

Only files that a forward pass reads are downloaded, into the cache that other tools share. A broken
connection is retried; after an interruption the files that had arrived stay. huggingface_hub does the work,
and follows HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE.
"""

from __future__ import annotations

import fnmatch
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ....pipeline.progress import Bar, Progress, short
from ....store.errors import DownloadError, ModelNotFound
from ....store.repeated import Repeated
from ..text.declared import FILES as DECLARED_IN
from ..text.world import WORLD
from .files import (
    CONFIG,
    INDEX,
    MODULES,
    PICKLED,
    PICKLED_INDEX,
    TOKENIZER,
    WEIGHTS,
    ModelFiles,
    hub_cache,
    reference_file,
    repository_folder,
    resolve,
)

SMALL = (
    CONFIG,
    TOKENIZER,
    *DECLARED_IN,
    "generation_config.json",
)
FORMATS = (
    (WEIGHTS, INDEX, re.compile(r"model-\d+-of-\d+\.safetensors")),
    (PICKLED, PICKLED_INDEX, re.compile(r"pytorch_model-\d+-of-\d+\.bin")),
)
"""(single file, index, shards) of each checkpoint format, in order of preference."""
SENTENCE = re.compile(
    r"modules\.json|sentence_bert_config\.json|config_sentence_transformers\.json"
    r"|[1-9]\d*_\w+/(config\.json|model\.safetensors|pytorch_model\.bin)"
)
"""Files of a sentence encoder beside those of its transformer: settings, and modules behind it."""
LOOK_EVERY = 0.5  # seconds between looks at what has arrived


def fetch(name: str, revision: str | None = None, *, progress: bool = True) -> ModelFiles:
    """Download config, tokenizer and weight files of a model that are not in the cache yet.

    Arguments:
        name: hub id such as "org/name".
        revision: branch, tag or commit; None for "main".
        progress: whether to show bytes, rate and remaining time on stderr.

    Raises:
        ModelNotFound: for an unknown, private or gated repository.
        DownloadError: if the hub cannot be reached, has no readable weights, or the disk is too small.
    """
    with hub_errors(name, revision):
        commit, sizes = remote_files(name, revision)
    fetch_files(name, revision, commit, sizes, progress=progress)
    return resolve(name, revision)


def fetch_files(
    name: str, revision: str | None, commit: str, sizes: Mapping[str, int], *, progress: bool = True
) -> Path:
    """Download files of a repository into the cache.

    Arguments:
        name: hub id.
        revision: branch, tag or commit; None for "main".
        commit: commit of the revision, from `listed_files`.
        sizes: file -> bytes, from `listed_files`.
        progress: whether to show bytes, rate and remaining time on stderr.

    Returns:
        Folder of the files.

    Raises:
        ModelNotFound, DownloadError: as `fetch`.
    """
    from huggingface_hub import snapshot_download

    cache, repository = hub_cache(), repository_folder(name)
    with hub_errors(name, revision):
        blobs = repository / "blobs"
        _require_space(name, cache, sum(sizes.values()) - _bytes_in_cache(blobs, unfinished=False))
        with Progress(quiet=not progress) as bars, _quiet_hub():
            task = bars.task(f"fetching {name}", total=sum(sizes.values()), unit="B")
            with _progress_from_disk(blobs, task):
                # By the commit just listed: a branch that moves meanwhile must not mix two checkpoints.
                snapshot_download(name, revision=commit, cache_dir=cache, allow_patterns=sorted(sizes))
    _write_reference(repository, revision or "main", commit)
    return repository / "snapshots" / commit


def remote_files(name: str, revision: str | None = None) -> tuple[str, dict[str, int]]:
    """List the files of a repository that `fetch` would download.

    Arguments:
        name: hub id.
        revision: branch, tag or commit; None for "main".

    Returns:
        (commit, file name -> bytes).

    Raises:
        DownloadError: for a repository without weight files that can be read.
    """
    commit, sizes = listed_files(name, revision)
    needed = set(wanted_files(list(sizes)))
    if not any(file.endswith((".safetensors", ".bin")) for file in needed):
        weights = sorted(
            file for file in sizes if file.endswith((".bin", ".pt", ".pth", ".gguf", ".safetensors"))
        )
        raise DownloadError(
            f"expected {WEIGHTS}, {INDEX} or {PICKLED} in the hub repository {name}, found "
            f"{', '.join(weights[:4]) or 'no weight files'}; look on the hub for a copy in safetensors"
        )
    return commit, {file: size for file, size in sizes.items() if file in needed}


def listed_files(name: str, revision: str | None = None) -> tuple[str, dict[str, int]]:
    """List all files of a hub repository.

    Arguments:
        name: hub id.
        revision: branch, tag or commit; None for "main".

    Returns:
        (commit, file name -> bytes).
    """
    from huggingface_hub import HfApi

    info = HfApi().model_info(name, revision=revision, files_metadata=True)
    return str(info.sha), {file.rfilename: file.size or 0 for file in info.siblings or ()}


def wanted_files(names: Sequence[str]) -> list[str]:
    """Select the files of a repository that a forward pass reads.

    Shards count only if there is no single weight file, an RWKV World vocabulary only if there is no
    tokenizer.json.

    Arguments:
        names: all file names of the repository.
    """
    # Folders of a repository hold other formats (onnx, original weights) of the same model.
    top_level = [name for name in names if "/" not in name]
    vocabularies = [] if TOKENIZER in names else fnmatch.filter(top_level, WORLD)
    modules = [name for name in names if MODULES in names and SENTENCE.fullmatch(name)]
    return [*(name for name in SMALL if name in names), *vocabularies, *_weight_files(names), *modules]


def _weight_files(names: Sequence[str]) -> list[str]:
    """The weight file, or index and shards, of the first format in `FORMATS` that the repository has."""
    # safetensors first: pickles need torch even to list their tensors.
    for single, index, shard in FORMATS:
        if single in names:
            return [single]
        if shards := [name for name in names if shard.fullmatch(name)]:
            return [*(name for name in names if name == index), *shards]
    return []


@contextmanager
def hub_errors(name: str, revision: str | None) -> Iterator[None]:
    """In this block, errors of the hub client become ModelNotFound or DownloadError with one line of text.

    Arguments:
        name: hub id.
        revision: branch, tag or commit; None for "main".
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except (DownloadError, ModelNotFound):
        raise
    except GatedRepoError as error:
        raise ModelNotFound(
            f"{name} is gated on the Hugging Face hub: accept its terms at https://huggingface.co/{name}, "
            "then set HF_TOKEN to an access token of that account"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelNotFound(
            f"expected a branch, tag or commit of {name}, found {revision!r}; leave it out for main"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"expected a model on the Hugging Face hub, found none named {name!r}; check the spelling, and "
            "set HF_TOKEN if it is private"
        ) from error
    except HFValidationError as error:
        raise ModelNotFound(f"expected a hub id such as org/name, found {name!r}") from error
    except _connection_errors() as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DownloadError(
            f"the download of {name} from the Hugging Face hub failed: {reason}; finished files are kept, "
            "so run the same command again when you are online"
        ) from error


def _connection_errors() -> tuple[type[Exception], ...]:
    """Errors that the hub client raises without a connection: OSError, and those of its HTTP library."""
    # Only libraries that are imported can have raised the error.
    libraries = [sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules]
    return (OSError, *(library.HTTPError for library in libraries))


def _require_space(name: str, cache: Path, needed: int) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache).free
    if needed > free:
        raise DownloadError(
            f"expected {short(needed)}B of free disk space in {cache} to download {name}, found "
            f"{short(free)}B; delete files there, or set HF_HOME to a folder on a larger disk"
        )


def _bytes_in_cache(blobs: Path, *, unfinished: bool = True) -> int:
    """Bytes of a hub repository that are in the local cache.

    Arguments:
        blobs: folder of the repository's files in the cache.
        unfinished: whether to count incomplete files, too.
    """
    total = 0
    for path in blobs.glob("*"):
        if path.suffix == ".incomplete" and not unfinished:
            continue
        try:
            total += path.stat().st_size
        except OSError:  # a file was renamed as it was finished
            continue
    return total


@contextmanager
def _progress_from_disk(blobs: Path, task: Bar) -> Iterator[None]:
    """In this block, advance a progress bar by the bytes that arrive on disk.

    Each version of the hub client reports its progress differently; files on disk are the same for all.
    """
    counted = 0

    def advance_bar() -> None:
        nonlocal counted
        # The cache may hold blobs of other revisions as well.
        arrived = min(_bytes_in_cache(blobs), task.total or 0)
        task.advance(max(arrived - counted, 0))
        counted = max(arrived, counted)

    with Repeated(LOOK_EVERY, advance_bar, "mizarr-fetch"):
        yield
    # Once more: files may have arrived since the last look.
    advance_bar()


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Turn the progress bars of the hub client off in this block."""
    from huggingface_hub import utils

    hub: Any = utils
    # A user who has switched them off keeps them off.
    were_off = hub.are_progress_bars_disabled()

    def restore_bars() -> None:
        if not were_off:
            hub.enable_progress_bars()

    try:
        hub.disable_progress_bars()
        yield
    finally:
        try:
            restore_bars()
        except BaseException:  # interrupted while restoring: the setting of the process must not stay changed
            restore_bars()
            raise


def _write_reference(repository: Path, revision: str, commit: str) -> None:
    """Write the commit of a branch or tag into the cache, as the hub client does."""
    # `snapshot_download` got the commit, so it wrote no file for the branch.
    if revision != commit:
        reference = reference_file(repository, revision)
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(commit)
