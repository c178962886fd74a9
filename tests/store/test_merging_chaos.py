"""Merges into one store at once, killed and started again, while it is captured into and read."""

import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import xarray as xr

from mizarr.store import PackedTokens, ResultKey, RunKey, open_store
from mizarr.store.errors import StoreFormatError
from mizarr.store.runs.entries import ArraySpec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MIZARR = "import sys; from mizarr.workflows.cli import main; main(sys.argv[1:])"
CELLS = [(name, layer) for name in ("resid_post", "mlp_out") for layer in range(3)]
PROMPTS = [[(i * 7 + j) % 50 for j in range(3 + i % 9)] for i in range(60)]


def harvest(root, model, word, cells=CELLS, pause=0.0):
    """A run whose prompts read `word`, and a few results."""
    store = open_store(root, durability="process")
    spans = [[(j, j + 1) for j in range(len(prompt))] for prompt in PROMPTS]
    tokens = PackedTokens.from_lists(PROMPTS, [f"{word} {i}" for i in range(len(PROMPTS))], spans)
    axes = ("layer", "token", "hidden"), {"hidden": 8}
    specs = [ArraySpec(name, f"blocks.{{}}.hook_{name}", *axes, "float32", 3) for name in dict(CELLS)]
    run = RunKey(model, tokens.digest, "none")
    entry = store.create_entry(run, tokens, specs, segment_tokens=64, attrs={"tokenizer": f"sha256:{word}"})
    for n, missing in entry.missing(cells).items():
        rows = {}
        for name, layer in missing:
            drawn = np.random.default_rng([n, layer, len(name), *model.encode()])
            rows[name, layer] = drawn.standard_normal((entry.rows(name, n), 8)).astype("f4")
        entry.write_segment(n, rows)
        time.sleep(pause)
    entry.publish(cells)
    for k in range(4):
        key = ResultKey(f"of {model}", 1, {"k": k}, {})
        if store.lookup(key) is None:
            store.put_result(key, xr.Dataset({"x": ("a", np.arange(9.0) + k)}))
    return store


def held(store):
    """Content and values of everything, by key."""
    found = {}
    for record in store.records():
        dataset = store[record.key]
        values = {str(name): array.values.tobytes() for name, array in dataset.data_vars.items()}
        found[record.key] = record.content, values
    return found


class Reader(threading.Thread):
    """Compares all that is there with what it should be, again and again."""

    def __init__(self, root, expected):
        super().__init__(daemon=True)
        self.root, self.expected, self.over = root, expected, threading.Event()
        self.read, self.wrong = 0, []

    def run(self):
        seen = set()
        while not self.over.is_set():
            try:
                found = held(open_store(self.root, mode="r"))
            except StoreFormatError:  # not made yet
                continue
            except Exception as error:  # noqa: BLE001 - told at the end
                self.wrong.append(repr(error))
                break
            if not found.items() <= self.expected.items() or not seen <= found.keys():
                self.wrong.append("something else, or less than before")
            seen, self.read = set(found), self.read + len(found)


def start(*command):
    return subprocess.Popen([sys.executable, "-c", MIZARR, *map(str, command), "--quiet"])


@pytest.mark.parametrize("seed", range(3))
def test_merges_at_once_that_are_killed_end_as_one_that_is_not(tmp_path, seed):
    """Both sources hold a part of one run, under texts of their own: the first of them stay."""
    drawn, killed = random.Random(seed), 0
    one, other, target = tmp_path / "one", tmp_path / "other", tmp_path / "target"
    for root, word, some, own in ((one, "a", CELLS[:4], "m1"), (other, "b", CELLS[2:], "m2")):
        harvest(root, "shared", word, some)
        harvest(root, own, word)
    for model in ("shared", "m1", "m2", "m3"):
        harvest(tmp_path / "whole", model, "a")
    expected = held(open_store(tmp_path / "whole"))
    reader = Reader(target, expected)
    reader.start()
    writer = threading.Thread(target=harvest, args=(target, "m3", "a", CELLS, 0.1))
    writer.start()
    orders = [(one, other), (other, one)]
    running = {n: start("merge", *order, target) for n, order in enumerate(orders)}
    until = {n: time.monotonic() + drawn.uniform(0.2, 0.9) for n in running}
    while running:
        for n, process in list(running.items()):
            if process.poll() is not None:
                assert process.returncode == 0
                del running[n]
            elif killed < 8 and time.monotonic() > until[n]:
                process.kill()
                process.wait()
                killed += 1
                running[n] = start("merge", *orders[n], target)
                until[n] = time.monotonic() + drawn.uniform(0.2, 0.9)
        time.sleep(0.01)
    writer.join()
    reader.over.set()
    reader.join()
    assert killed and reader.read and reader.wrong == []
    store = open_store(target)
    assert held(store) == expected and store.verify() == []
    done = [open_store(root, mode="r").copy_to(store) for root in (one, other)]
    assert not any(each.copied or each.different for each in done)
    for entry in store.entries():  # texts of one of them, or of none where its merge was killed among them
        labels = entry.open().coords
        words = {text.partition(" ")[0] for text in labels["text"].values} if "text" in labels else set()
        assert len(words) <= 1
