"""Estimates the number of tokens and prompts of a corpus from samples of some of its files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from .....store.errors import PromptError
from .....store.runs.packed import PackedTokens
from .contexts import Ids, framed_prompts
from .corpus import Corpus, encoded
from .formats import Document, Reading, documents_in, ending

if TYPE_CHECKING:
    from ..tokens import Tokenizer

__all__ = ["CorpusSize", "estimated_size"]

FILES = 8
"""Most files that are sampled, evenly spaced among all."""
LOOK = 1 << 18
"""Characters, or token ids, read from each sampled file."""
PLACES = 8
"""Places at which a large file of lines is sampled, because line lengths may change within a file."""
LINES = (".txt", ".jsonl", ".ndjson")
"""Endings of files of lines, which can be read from any offset."""


@dataclass(frozen=True)
class CorpusSize:
    """Estimated number of tokens and prompts of a corpus, from samples of some of its files."""

    tokens: int
    """Estimated number of tokens."""
    prompts: int
    """Estimated number of prompts."""
    files: int
    """Number of files."""
    bytes: int
    """Bytes of all files."""
    looked_at: int
    """Bytes of the samples."""
    sample: PackedTokens
    """Prompts of the samples."""


def estimated_size(corpus: Corpus, tokenizer: Tokenizer | None) -> CorpusSize:
    """Estimate the number of tokens and prompts of a corpus; takes seconds, whatever its size.

    Arguments:
        corpus: the files, and how they are read.
        tokenizer: encodes texts; None if documents are token ids.

    Raises:
        PromptError: for a source without files, and for a file that cannot be read.
        TokenizerError: for texts without a tokenizer.
    """
    paths = corpus.files
    sizes = [path.stat().st_size for path in paths]
    sampled = np.unique(np.linspace(0, len(paths) - 1, min(FILES, len(paths))).round().astype(int))
    # Bytes of the samples: their ratio to all bytes scales the counted tokens.
    framing, looked_at = corpus.framing(tokenizer), 0.0
    prompts: list[Ids] = []
    for file_index in sampled:
        path, size = paths[file_index], sizes[file_index]
        with path.open("rb") as raw:
            reading = Reading(corpus.column, tuple(corpus.labels), corpus.whole_files)
            is_lines = path.suffix in LINES and not corpus.whole_files
            part: IO[bytes] = _sample_lines(raw, size) if is_lines and size > 2 * LOOK else raw
            sample_documents = _first_documents(documents_in(part, ending(path), reading, str(path)))
            token_ids = encoded(iter(sample_documents), tokenizer, path)
            prompts += (ids for ids, _ in framed_prompts(token_ids, framing))
            # Parquet is read from its end, so the offset in the file says nothing.
            if path.suffix == ".parquet":
                looked_at += size * _share_of_rows(path, len(sample_documents))
            else:
                looked_at += part.tell()
    if not prompts:
        raise PromptError(
            f"expected at least one token at the beginning of {paths[0]}, found none; name files with "
            "documents"
        )
    sample = PackedTokens.from_lists(prompts)
    # All bytes per sampled byte.
    scale = sum(sizes) / max(looked_at, 1.0) * corpus.share
    return CorpusSize(
        tokens=round(sample.n_tokens * scale),
        prompts=round(sample.n_prompts * scale),
        files=len(paths),
        bytes=sum(sizes),
        looked_at=round(looked_at),
        sample=sample,
    )


def _sample_lines(raw: IO[bytes], size: int) -> BytesIO:
    """Read about `LOOK` bytes of whole lines, from evenly spaced places of a file of `size` bytes."""
    sample = BytesIO()
    for place in range(PLACES):
        # The middle of each of `PLACES` equal parts of the file.
        raw.seek(size * (2 * place + 1) // (2 * PLACES) - LOOK // PLACES // 2)
        raw.readline(LOOK)  # skip the rest of a line that began earlier
        sample.writelines(raw.readlines(LOOK // PLACES))
    sample.seek(0)
    return sample


def _first_documents(documents: Iterator[Document]) -> list[Document]:
    """The first documents of a file, until they have `LOOK` characters or token ids together."""
    sample, n_characters = [], 0
    for document in documents:
        sample.append(document)
        n_characters += len(document.content)
        if n_characters >= LOOK:
            break
    return sample


def _share_of_rows(path: Path, rows: int) -> float:
    from pyarrow.parquet import ParquetFile

    return rows / max(int(ParquetFile(path).metadata.num_rows), 1)
