"""Tests are no package: folders with what they share, contracts and a writer to kill, have to be named."""

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "contracts")]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """The entry that crash_writer.py harvests, by one process that nobody kills; only read."""
    from crash_writer import harvest, open_entry

    root = tmp_path_factory.mktemp("undisturbed")
    harvest(root, "undisturbed")
    return open_entry(root)


@pytest.fixture(scope="session")
def provider():
    """By scheme the server that speaks it (object_servers.py); started once. Skips where there is none."""
    pytest.importorskip("obstore")
    pytest.importorskip("moto.server")
    import object_servers

    started = {}
    with ExitStack() as stack:

        def of(scheme):
            if scheme not in started:
                started[scheme] = stack.enter_context(object_servers.provider(scheme))
            return started[scheme]

        yield of


@pytest.fixture
def speaks(monkeypatch, tmp_path):
    """Says in the environment where a server is, and with which keys; nothing else is known of any."""
    from mizarr.store.files import cloud

    def speak(server, endpoint=None, **more):
        for name, value in {**server.settings(endpoint), **more}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MIZARR_CACHE", str(tmp_path / "cache"))
        cloud._bucket_client.cache_clear()

    yield speak
    cloud._bucket_client.cache_clear()
