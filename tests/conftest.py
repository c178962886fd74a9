"""What every test gets: an environment of its own, no network, and property tests that repeat."""

from __future__ import annotations

import os
import socket

import pytest
from hypothesis import settings

# Derandomised, so that a red run is red for everybody; HYPOTHESIS_PROFILE=explore looks for new examples.
settings.register_profile("repeat", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))

LOOPBACK = ("127.", "localhost", "::1")


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests neither read nor write the store of whoever runs them, and look the same in every terminal."""
    for name in [name for name in os.environ if name.startswith("MIZARR_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture(autouse=True)
def no_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that is not marked `network` and connects beyond this machine fails at once."""
    if request.node.get_closest_marker("network"):
        return
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: object) -> None:
        host = address[0] if isinstance(address, tuple) else "localhost"
        if not str(host).startswith(LOOPBACK):
            # Not an OSError: clients would take that for a hiccup and try again for a minute.
            pytest.fail(f"the test connects to {address!r}; mark it `network` or give it local files")
        connect(self, address)  # type: ignore[arg-type]

    monkeypatch.setattr(socket.socket, "connect", guarded)
