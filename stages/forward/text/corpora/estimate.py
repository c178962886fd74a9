"""About how large a corpus is, from the sizes of its files and a look at some of them."""

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
"""Files that are looked into, evenly among all."""
LOOK = 1 << 18
"""Characters, or token ids, that are read of each."""
PLACES = 8
"""Places of a large file of lines that are looked at, as lines may get longer from one end to the other."""
LINES = (".txt", ".jsonl", ".ndjson")
"""Files whose lines can be read from any place on."""


@dataclass(frozen=True)
class CorpusSize:
    """tokens, prompts: about as many. files, bytes: of all that would be read. looked_at: bytes of these.
    sample: the prompts that were found there."""

    tokens: int
    prompts: int
    files: int
    bytes: int
    looked_at: int
    sample: PackedTokens


def estimated_size(corpus: Corpus, tokenizer: Tokenizer | None) -> CorpusSize:
    """Tokens and prompts of a corpus, in seconds whatever its size. Raises what reading its files does."""
    paths = corpus.files
    sizes = [path.stat().st_size for path in paths]
    chosen = np.unique(np.linspace(0, len(paths) - 1, min(FILES, len(paths))).round().astype(int))
    framing, looked_at = corpus.framing(tokenizer), 0.0
    prompts: list[Ids] = []
    for place in chosen:
        path, size = paths[place], sizes[place]
        with path.open("rb") as raw:
            reading = Reading(corpus.column, tuple(corpus.labels), corpus.whole_files)
            is_lines = path.suffix in LINES and not corpus.whole_files
            part: IO[bytes] = _some_lines(raw, size) if is_lines and size > 2 * LOOK else raw
            some = _some(documents_in(part, ending(path), reading, str(path)))
            prompts += (ids for ids, _ in framed_prompts(encoded(iter(some), tokenizer, path), framing))
            looked_at += size * _share_of_rows(path, len(some)) if path.suffix == ".parquet" else part.tell()
    if not prompts:
        raise PromptError(f"expected at least one token at the beginning of {paths[0]}, found none")
    sample, times = PackedTokens.from_lists(prompts), sum(sizes) / max(looked_at, 1.0) * corpus.share
    tokens, count = round(sample.n_tokens * times), round(sample.n_prompts * times)
    return CorpusSize(tokens, count, len(paths), sum(sizes), round(looked_at), sample)


def _some_lines(raw: IO[bytes], size: int) -> BytesIO:
    """`LOOK` bytes of whole lines, from evenly spaced places of a file of `size` bytes."""
    sample = BytesIO()
    for place in range(PLACES):
        raw.seek(size * (2 * place + 1) // (2 * PLACES) - LOOK // PLACES // 2)
        raw.readline(LOOK)  # the end of a line that began before
        sample.writelines(raw.readlines(LOOK // PLACES))
    sample.seek(0)
    return sample


def _some(documents: Iterator[Document]) -> list[Document]:
    """The first documents of a file."""
    found, held = [], 0
    for document in documents:
        found.append(document)
        held += len(document.content)
        if held >= LOOK:
            break
    return found


def _share_of_rows(path: Path, rows: int) -> float:
    from pyarrow.parquet import ParquetFile

    return rows / max(int(ParquetFile(path).metadata.num_rows), 1)
