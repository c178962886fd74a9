"""Prompts of the command line: files, stdin or literal texts, read as a list, or streamed as a corpus.

A text file holds one prompt per line; blank lines are skipped. A JSONL file (.jsonl, .ndjson) holds one JSON
value per line: a string, or an object with `text` or with `ids` (token ids), or with both `source` and
`target` for an encoder-decoder model. A Parquet file has a column `text` or `ids`.
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
"""Suffixes of files that are always read as a corpus."""
DOCUMENT_OPTIONS = ("context", "pack", "column", "labels", "whole_files", "share", "seed")
"""Options that say how documents become prompts; they are keyword arguments of `Corpus`."""
COUNTED = 4 << 20
"""A dry run counts the prompts of files with fewer bytes than this in total; others it estimates from a
sample."""


@dataclass(frozen=True)
class PromptSources:
    """Argument PROMPTS of a command, with the options that say how documents become prompts."""

    sources: tuple[str, ...]
    """Files, folders, globs, `-` for stdin; or prompts."""
    are_prompts: bool = False
    """Whether `sources` are the prompts themselves (--text)."""
    documents: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `Corpus`: context, pack, column, ...; an omitted option is None, () or False."""

    @contextmanager
    def corpus(self) -> Iterator[Corpus | None]:
        """The sources as a corpus, within the `with` block; None if they are plain files of prompts.

        Sources are a corpus if one of them is a folder, a glob, an archive or an Arrow file, or if an option
        for documents was given. Stdin is copied into a temporary file, because a corpus is identified by a
        digest of its files.

        Raises:
            UsageError: An option for documents was given with literal prompts (--text).
        """
        from ...stages.forward.text.corpora.corpus import Corpus

        document_options = {
            name: value
            for name, value in self.documents.items()
            # Not a test of truth: 0 is a valid seed.
            if value is not None and value is not False and value != ()
        }
        if self.are_prompts and document_options:
            raise click.UsageError(
                f"{_option(next(iter(document_options)))} is an option for files of documents, but --text "
                "says that PROMPTS are the texts themselves; leave out one of the two"
            )
        is_corpus = any(
            Path(source).is_dir() or has_magic(source) or source.endswith(STREAMED) for source in self.sources
        )
        if self.are_prompts or not (is_corpus or document_options):
            yield None
            return
        with ExitStack() as stack:

            def copy_of_stdin() -> str:
                # The suffix selects the format: one prompt per line, as in a text file.
                file = stack.enter_context(NamedTemporaryFile(suffix=".txt"))
                shutil.copyfileobj(sys.stdin.buffer, file)
                # The corpus opens the file by name: buffered bytes must be on disk.
                file.flush()
                return file.name

            files = [copy_of_stdin() if source == "-" else source for source in self.sources]
            yield Corpus(files, **document_options)

    def sampled(self) -> Corpus | None:
        """Large files of prompts as a corpus with one prompt per document, for estimates from a sample.

        Returns:
            None if the files are small enough to be counted (COUNTED bytes), and for literal prompts, stdin
            and files of (source, target) pairs.
        """
        from ...stages.forward.text.corpora.corpus import Corpus

        paths = [Path(source) for source in self.sources]
        if self.are_prompts or not all(path.is_file() for path in paths):
            return None
        if sum(path.stat().st_size for path in paths) < COUNTED:
            return None
        first_documents = (next(iter(read_documents(path, Reading(pairs=True))), None) for path in paths)
        has_pairs = any(document is not None and document.target is not None for document in first_documents)
        return None if has_pairs else Corpus(self.sources)

    def read(self, model: ModelSource | None = None) -> list[str] | list[list[int]]:
        """All prompts: texts, or lists of token ids. For sources that are not a corpus.

        Arguments and errors are those of `read_prompts`.
        """
        return read_prompts(self.sources, literal=self.are_prompts, model=model)


def prompt_options(command: Callable[..., int | None]) -> Callable[..., None]:
    """Decorator that adds the argument PROMPTS and its options; the command gets `prompts: PromptSources`."""

    @functools.wraps(command)
    def with_prompts(prompts: tuple[str, ...], text: bool, **options: Any) -> None:
        documents = {name: options.pop(name) for name in DOCUMENT_OPTIONS}
        command(prompts=PromptSources(prompts, text, documents), **options)

    # A share of 0 would leave no document.
    share = click.FloatRange(0, 1, min_open=True)
    return with_options(
        with_prompts,
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
    """Command-line option for an argument of `Corpus`: "--whole-files" for "whole_files"."""
    return "--label" if name == "labels" else f"--{name.replace('_', '-')}"


def read_prompts(
    sources: Sequence[str], *, literal: bool = False, model: ModelSource | None = None
) -> list[str] | list[list[int]]:
    """Read all prompts of all sources, in order.

    Arguments:
        sources: Paths of files; `-` is stdin.
        literal: Whether `sources` are the prompts themselves.
        model: The model whose tokenizer encodes (source, target) pairs; None if pairs are not accepted.

    Returns:
        Texts, or lists of token ids; never both.

    Raises:
        PromptError: A file or line that is not a prompt (named in the message), texts mixed with token ids,
            or no prompt at all.
        ConfigError: Pairs for a model that is not an encoder-decoder.
    """
    prompts: list[Any] = (
        list(sources)
        if literal
        else [prompt for source in sources for prompt in _prompts_of_file(source, model)]
    )
    if not prompts:
        raise PromptError(f"expected at least one prompt, found none in {', '.join(sources)}")
    if len({isinstance(prompt, str) for prompt in prompts}) > 1:
        raise PromptError(
            "expected prompts that are all texts or all token ids, found both; run the command once for each "
            "kind"
        )
    return prompts


def _prompts_of_file(source: str, model: ModelSource | None) -> Iterator[str | list[int]]:
    """Prompts read from a file, or from stdin for "-"; arguments as in `read_prompts`.

    Raises:
        PromptError: The file does not exist.
    """
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
        yield document.content if model is None else _content_or_pair_ids(document, model)


def _content_or_pair_ids(document: Document, model: ModelSource) -> str | list[int]:
    """A document as a prompt: its text or token ids; for a (source, target) pair, the token ids of both."""
    from ...stages.forward.text.prompts import pair_ids

    if document.target is None:
        return document.content
    return pair_ids(document.content, document.target, model.tokenizer, model.config, model.name)
