"""`mizarr browse` and `mizarr site`: a store as pages, served to this machine or written as files."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from ....store.display.terminal import echo
from ..options import json_option, print_json, quiet_option, store_option


@click.command(epilog="Example: mizarr browse --store activations")
@store_option
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    metavar="N",
    help="Port to listen on; default any free port.",
)
@click.option("--no-open", is_flag=True, help="Only print the address; do not open a browser.")
def browse(store_path: str, port: int, no_open: bool) -> None:
    """Show a store in a browser.

    What it holds by model, prompts and hook points; a run's prompts and tokens, and of a token norms, most
    similar tokens, what a lens reads and which features are active; every result with its recipe and lineage;
    harvests in progress, live. Nothing is changed. The pages are served to this machine alone, at an address
    that is printed and holds a random word; Ctrl-C ends it. Needs the extra `browse`.
    """
    from ....stages.extras import require
    from ....store import open_store
    from ...browse.server import address_of, application, listening, new_word, serve

    require("browse", "mizarr browse")
    from ...browse.connections import redirecting_file

    store = open_store(store_path, mode="r")
    with listening(port) as held:
        word = new_word()
        answers = application(store, word, held.getsockname()[1])
        address = address_of(held.getsockname()[1], word)
        echo(address)
        echo("Ctrl-C ends it", err=True)
        with contextlib.ExitStack() as stack:
            if not no_open:
                stack.enter_context(_ended_orderly())
                click.launch(str(stack.enter_context(redirecting_file(address))))
            serve(answers, held)


@contextlib.contextmanager
def _ended_orderly() -> Iterator[None]:
    """Signals that end the process let it clean up before."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@click.command(epilog="Example: mizarr site pages --store activations")
@click.argument("folder", type=click.Path(path_type=Path), metavar="FOLDER")
@store_option
@click.option(
    "--pages",
    type=click.IntRange(2),
    default=1000,
    show_default=True,
    metavar="N",
    help="Largest number of pages.",
)
@click.option(
    "--prompts",
    type=click.IntRange(0),
    default=20,
    show_default=True,
    metavar="N",
    help="Largest number of prompts per run.",
)
@click.option(
    "--tokens",
    type=click.IntRange(0),
    default=32,
    show_default=True,
    metavar="N",
    help="Largest number of tokens per prompt.",
)
@json_option
@quiet_option
def site(
    folder: Path, store_path: str, pages: int, prompts: int, tokens: int, as_json: bool, quiet: bool
) -> None:
    """Write the pages of `mizarr browse` into FOLDER, to open them or to serve them.

    Links beyond the limits lead to a page that says what was left out. A site that is there is replaced when
    the new one is whole; a folder with other things in it is refused.
    """
    from ....pipeline.progress import Progress
    from ....store import open_store
    from ...browse.site import Limits, check_folder, write_site

    check_folder(folder)
    with Progress(quiet=quiet) as bars:
        task = bars.task("writing", unit="pages")

        def seen(done: int, known: int) -> None:
            task.total = known
            task.advance(done - task.done)

        limits = Limits(pages, prompts, tokens)
        written = write_site(open_store(store_path, mode="r"), folder, limits, seen)
    if as_json:
        print_json({"site": str(folder / "index.html"), **vars(written)})
        return
    echo(folder / "index.html")
    echo(f"{written.pages:,} pages, {written.left_out:,} links to what was left out", err=True)
