"""Prompts as people keep them: files, stdin, or words on the command line; and corpora, which are streamed.

A text file holds one prompt per line; blank lines are skipped. A JSONL file (.jsonl, .ndjson) holds one JSON
value per line: a string, or an object with `text` or with `ids` (token ids), or with both `source` and
`target` where a model reads pairs. A Parquet file holds a column `text` or `ids`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from glob import has_magic
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from ...stages.forward.text.corpora.formats import Document, Reading, read_documents, read_lines
from ...store.errors import PromptError

if TYPE_CHECKING:
    from ...stages.forward.models.source import ModelSource
    from ...stages.forward.text.corpora.corpus import Corpus

STREAMED = (".tar", ".tgz", ".gz", ".arrow")


def corpus_of(sources: Sequence[str], **given: Any) -> Corpus | None:
    """Sources as a corpus, where one of them is more than a file of prompts (a folder, a glob, an archive),
    or something is said of how documents become prompts; else None. given: as `Corpus` has it."""
    from ...stages.forward.text.corpora.corpus import Corpus

    said = {
        name: value
        for name, value in given.items()
        if value is not None and value is not False and value != ()  # but 0, which is a seed
    }
    large = any(Path(each).is_dir() or has_magic(each) or each.endswith(STREAMED) for each in sources)
    return Corpus(sources, **said) if large or said else None


@contextmanager
def as_files(corpus: Corpus) -> Iterator[Corpus]:
    """The same corpus, stdin as a file for as long as it is read: a corpus is known by its content."""
    with ExitStack() as stack:

        def spooled() -> str:
            file = stack.enter_context(NamedTemporaryFile(suffix=".txt"))
            shutil.copyfileobj(sys.stdin.buffer, file)
            file.flush()
            return file.name

        yield replace(corpus, sources=[spooled() if source == "-" else source for source in corpus.sources])


def read_prompts(
    sources: Sequence[str], *, literal: bool = False, model: ModelSource | None = None
) -> list[str] | list[list[int]]:
    """All prompts of all sources in order; `-` is stdin, `literal` takes the sources themselves as prompts.

    model: whose token ids pairs of a source and a target become; None where none are read.
    Raises PromptError naming file and line for anything that is not a prompt, and for no prompt at all;
    ConfigError for pairs of a model that reads one sequence.
    """
    found: list[Any] = (
        list(sources) if literal else [prompt for source in sources for prompt in _read(source, model)]
    )
    if not found:
        raise PromptError(f"expected at least one prompt, found none in {', '.join(sources)}")
    if len({isinstance(prompt, str) for prompt in found}) > 1:
        raise PromptError(
            "expected prompts that are all text or all token ids, found both; capture them in two calls"
        )
    return found


def _read(source: str, model: ModelSource | None) -> Iterator[str | list[int]]:
    if source == "-":
        yield from (document.content for document in read_lines(sys.stdin))
        return
    path = Path(source)
    if not path.is_file():
        state = "a directory" if path.is_dir() else "nothing"
        raise PromptError(
            f"expected a file of prompts at {source!r}, found {state}; to give the prompt itself add --text"
        )
    for document in read_documents(path, Reading(pairs=model is not None)):
        yield document.content if model is None else _prompt(document, model)


def _prompt(document: Document, model: ModelSource) -> str | list[int]:
    from ...stages.forward.text.prompts import pair_ids

    if document.target is None:
        return document.content
    return pair_ids(document.content, document.target, model.tokenizer, model.config, model.name)
