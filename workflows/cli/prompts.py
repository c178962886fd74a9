"""Prompts as people keep them: files, stdin, or words on the command line; and corpora, which are streamed.

A text file holds one prompt per line; blank lines are skipped. A JSONL file (.jsonl, .ndjson) holds one JSON
value per line: a string, or an object with `text` or with `ids` (token ids), or with both `source` and
`target` where a model reads pairs. A Parquet file holds a column `text` or `ids`.
"""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from glob import has_magic
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import click

from ...stages.forward.text.corpora.formats import Document, Reading, read_documents, read_lines
from ...store.errors import PromptError
from .options import with_options

if TYPE_CHECKING:
    from ...stages.forward.models.source import ModelSource
    from ...stages.forward.text.corpora.corpus import Corpus

STREAMED = (".tar", ".tgz", ".gz", ".arrow")
COUNTED = 4 << 20
"""Bytes of files up to which a dry run reads all prompts; beyond, it estimates."""


@dataclass(frozen=True)
class PromptSources:
    """What a command runs a model over, as its command line says it."""

    sources: tuple[str, ...]
    """Files, folders, globs, `-` for stdin; or prompts."""
    are_prompts: bool = False
    """Whether the sources are the prompts themselves."""
    documents: Mapping[str, Any] = field(default_factory=dict)
    """How documents become prompts, by the arguments of `Corpus`; what was left out is None, () or False."""

    @contextmanager
    def corpus(self) -> Iterator[Corpus | None]:
        """The sources as a corpus, where one of them is more than a file of prompts (a folder, a glob, an
        archive), or something is said of how documents become prompts; else None. Stdin is a file for as long
        as it is read, since a corpus is known by its content.

        Raises UsageError for that beside prompts that are given themselves.
        """
        from ...stages.forward.text.corpora.corpus import Corpus

        said = {
            name: value
            for name, value in self.documents.items()
            if value is not None and value is not False and value != ()  # but 0, which is a seed
        }
        if self.are_prompts and said:
            raise click.UsageError(
                f"expected files with {_option(next(iter(said)))}, found --text; give prompts themselves as "
                "they are to be"
            )
        large = any(
            Path(each).is_dir() or has_magic(each) or each.endswith(STREAMED) for each in self.sources
        )
        if self.are_prompts or not (large or said):
            yield None
            return
        with ExitStack() as stack:

            def spooled() -> str:
                file = stack.enter_context(NamedTemporaryFile(suffix=".txt"))
                shutil.copyfileobj(sys.stdin.buffer, file)
                file.flush()
                return file.name

            yield Corpus([spooled() if source == "-" else source for source in self.sources], **said)

    def sampled(self) -> Corpus | None:
        """The files as a corpus with a prompt per document, whose size is estimated from a sample.

        Returns None where they are small enough to be counted, and for what is no file of single prompts:
        prompts themselves, stdin, pairs of a source and a target.
        """
        from ...stages.forward.text.corpora.corpus import Corpus

        paths = [Path(source) for source in self.sources]
        if self.are_prompts or not all(path.is_file() for path in paths):
            return None
        if sum(path.stat().st_size for path in paths) < COUNTED:
            return None
        first = (next(iter(read_documents(path, Reading(pairs=True))), None) for path in paths)
        has_pairs = any(document is not None and document.target is not None for document in first)
        return None if has_pairs else Corpus(self.sources)

    def read(self, model: ModelSource | None = None) -> list[str] | list[list[int]]:
        """Prompts of sources that are no corpus. model: as for `read_prompts`."""
        return read_prompts(self.sources, literal=self.are_prompts, model=model)


def prompt_options(command: Callable[..., int | None]) -> Callable[..., None]:
    """What a model is run over, for every command that does so; it is called with it as `prompts`."""

    @functools.wraps(command)
    def gathered(
        prompts: tuple[str, ...],
        text: bool,
        context: int | None,
        pack: bool,
        column: str | None,
        labels: tuple[str, ...],
        whole_files: bool,
        share: float | None,
        seed: int | None,
        **options: Any,
    ) -> None:
        said = {"context": context, "pack": pack, "column": column, "labels": labels}
        documents = {**said, "whole_files": whole_files, "share": share, "seed": seed}
        command(prompts=PromptSources(prompts, text, documents), **options)

    share = click.FloatRange(0, 1, min_open=True)
    return with_options(
        gathered,
        click.argument("prompts", nargs=-1, required=True),
        click.option("--text", is_flag=True, help="PROMPTS are texts, not files."),
        click.option(
            "--context", type=click.IntRange(min=1), help="Tokens per prompt: longer documents are cut."
        ),
        click.option("--pack", is_flag=True, help="Fill each prompt with as many documents as fit."),
        click.option(
            "--column", metavar="NAME", help="Column of texts or token ids; default text, else ids."
        ),
        click.option(
            "--label",
            "labels",
            multiple=True,
            metavar="NAME",
            help="Column to store as a label of each prompt; repeatable.",
        ),
        click.option(
            "--whole-files", is_flag=True, help="Read a text file as one document instead of one per line."
        ),
        click.option("--share", type=share, help="Share of the documents to read, drawn at random."),
        click.option("--seed", type=int, help="Seed of the draw by --share; default 0."),
    )


def _option(name: str) -> str:
    return "--label" if name == "labels" else f"--{name.replace('_', '-')}"


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
