"""`mizarr browse` and `mizarr site`: a store as HTML pages, served to this machine or written as files."""

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

    The pages list runs by model, prompts and hook points; the prompts and tokens of a run; the norms, most
    similar tokens, lens predictions and active features of a token; each result with its settings and
    lineage; and captures in progress, live. The store is not changed. The pages are served to this machine
    only, at a printed address that contains a random word; Ctrl-C stops the server. Needs the extra `browse`.
    """
    from ....stages.extras import require
    from ....store import open_store
    from ...browse.server import address_of, application, listening, new_word, serve

    require("browse", "mizarr browse")
    from ...browse.connections import redirecting_file

    store = open_store(store_path, mode="r")
    with listening(port) as server_socket:
        word = new_word()
        # The port that the system chose, if --port is 0.
        app = application(store, word, server_socket.getsockname()[1])
        address = address_of(server_socket.getsockname()[1], word)
        echo(address)
        echo("press Ctrl-C to stop the server", err=True)
        with contextlib.ExitStack() as stack:
            if not no_open:
                stack.enter_context(_exit_on_signals())
                # A file that redirects to the address: as an argument of the browser's process, the address
                # with its secret word could be read by every user of the machine.
                click.launch(str(stack.enter_context(redirecting_file(address))))
            serve(app, server_socket)


@contextlib.contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that the redirecting file is removed."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    previous_handlers = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


@click.command(epilog="Example: mizarr site pages --store activations")
@click.argument("folder", type=click.Path(path_type=Path), metavar="FOLDER")
@store_option
@click.option(
    "--pages",
    # The first page and the search page are always written.
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
    help="Largest number of tokens per page of a prompt.",
)
@json_option
@quiet_option
def site(
    folder: Path, store_path: str, pages: int, prompts: int, tokens: int, as_json: bool, quiet: bool
) -> None:
    """Write the pages of `mizarr browse` into FOLDER as static files.

    A link beyond the limits leads to a page that says what was left out. An existing site in FOLDER is
    replaced when the new one is complete; a folder with other files is refused.
    """
    from ....pipeline.progress import Progress
    from ....store import open_store
    from ...browse.site import Limits, check_folder, write_site

    check_folder(folder)
    with Progress(quiet=quiet) as bars:
        task = bars.task("writing", unit="pages")

        def show_progress(n_written: int, n_known: int) -> None:
            task.total = n_known
            task.advance(n_written - task.done)

        limits = Limits(pages, prompts, tokens)
        written = write_site(open_store(store_path, mode="r"), folder, limits, show_progress)
    if as_json:
        print_json({"site": str(folder / "index.html"), **vars(written)})
        return
    echo(folder / "index.html")
    echo(f"{written.pages:,} pages; {written.left_out:,} links lead to pages beyond the limits", err=True)
