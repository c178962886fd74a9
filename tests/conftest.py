"""What every test gets: its own environment, no network, property tests that repeat. A tiny checkpoint."""

from __future__ import annotations

import gc
import json
import os
import shutil
import socket
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Derandomised, so that a red run is red for everybody; HYPOTHESIS_PROFILE=explore looks for new examples.
settings.register_profile("repeat", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))

# Workers of pytest-xdist share the cores: with as many threads each as there are cores, they wait for each
# other, and small products take twice the time. Set before torch is imported, so for what tests start, too.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    threads = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))

# A test writes hundreds of small files and folders, and removes them: more than half of the processor time
# of a stored result on a disk, a tenth in memory. No test cuts the power, so none asks what a disk keeps.
IN_MEMORY = Path("/dev/shm")
ROOM = 4 << 30  # bytes; a few hundred million lie there at once


def _room_in_memory() -> bool:
    """Whether there is a file system in memory, with room, and as much memory behind it."""
    try:
        told = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(told["MemAvailable"].split()[0]) << 10
        return os.access(IN_MEMORY, os.W_OK) and min(available, shutil.disk_usage(IN_MEMORY).free) > ROOM
    except (OSError, KeyError, ValueError):
        return False


# Where pytest makes its folders unless --basetemp says so; workers get theirs from whoever starts them.
if "PYTEST_DEBUG_TEMPROOT" not in os.environ and _room_in_memory():
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(IN_MEMORY)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """No garbage is looked for among two million objects that stay: neither now nor by the tests.

    Measured: a third of the time to collect them all, and a second for each full look afterwards.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


LOOPBACK = ("127.", "localhost", "::1")


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests neither read nor write the store of whoever runs them, and look the same in every terminal."""
    for name in [name for name in os.environ if name.startswith("MIZARR_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture(autouse=True, scope="session")
def no_power_cut() -> Iterator[None]:
    """No test cuts the power, so none waits for the disk; those of when files are synced count calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # as before, a closed handle is an error
        yield


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


TINY = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., str]:
    """A directory with a random Llama of two layers, 16 wide; it reads the words `w0` to `w30`.

    checkpoint() is sound; `words=False` leaves the tokenizer out, `leave_out` a tensor; keywords change
    config.json only.
    """

    def write(leave_out: str = "", words: bool = True, **config: object) -> str:
        import numpy as np
        from safetensors.numpy import save_file
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import Whitespace

        from mizarr.stages.forward.architectures.known import from_hf_config
        from mizarr.stages.forward.networks.weights import expected_tensors

        folder = tmp_path / "tiny"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(TINY | config))
        rng = np.random.default_rng(0)
        shapes = expected_tensors(from_hf_config(TINY))
        tensors = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
        tensors.pop(leave_out, None)
        save_file(tensors, folder / "model.safetensors")
        if words:
            vocabulary = {"<unk>": 0} | {f"w{n}": n + 1 for n in range(31)}
            tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
            tokenizer.pre_tokenizer = Whitespace()
            tokenizer.save(str(folder / "tokenizer.json"))
        return str(folder)

    return write
