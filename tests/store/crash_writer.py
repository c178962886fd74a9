"""A process that harvests one entry until nothing is missing; `test_crash.py` starts it and kills it.

python crash_writer.py STORE SEED
"""

import random
import sys
import time

import numpy as np

from mizarr.store import PackedTokens, RunKey
from mizarr.store.files import LocalFolder
from mizarr.store.runs.entries import ArraySpec, Entry

TOKENS = PackedTokens.from_lists([[1] * n for n in range(3, 90)])  # 3915 tokens
RUN = RunKey("m", TOKENS.digest, "none")
RESID = ArraySpec(
    "resid_post", "blocks.*.hook_resid_post", ("layer", "token", "hidden"), {"hidden": 1024}, "float32", 3
)
PATTERN = ArraySpec(
    "pattern", "blocks.*.attn.hook_pattern", ("layer", "pair", "head"), {"head": 4}, "float32", 3
)
CELLS = [("resid_post", 0), ("resid_post", 2), ("pattern", 1)]
TTL = 0.1  # seconds: claims of the dead, and of the slow, are soon taken over


def open_entry(root):
    """The entry under harvest, made if it is new."""
    return entry_in(LocalFolder(root, "disk"))  # with fsync, so that many kills hit a file half written


def entry_in(folder, ttl=TTL):
    """The same, in any folder."""
    return Entry.create(folder, RUN, TOKENS, [RESID, PATTERN], segment_tokens=64, claim_ttl=ttl)


def values(entry, cell, n):
    """What a deterministic forward pass would give."""
    shape = (entry.rows(cell[0], n), *entry.spec(cell[0]).tail)
    return np.random.default_rng([n, *repr(cell).encode()]).random(shape, "f4")


def harvest(root, seed):
    """Compute what is missing in an order of one's own, until nothing is; then publish."""
    harvest_entry(open_entry(root), seed)


def harvest_entry(entry, seed):
    """The same, of an entry in hand."""
    order = random.Random(seed)
    while missing := entry.missing(CELLS):
        for n in order.sample(sorted(missing), len(missing)):
            claim = entry.claim(n)
            if not claim.acquire():
                continue
            cells = order.sample(missing[n], len(missing[n]))  # now and then in two passes
            cut = order.choice([len(cells), 1])
            for part in filter(None, (cells[:cut], cells[cut:])):
                entry.write_segment(n, {cell: values(entry, cell, n) for cell in part})
            claim.release()
            print(n, flush=True)
        time.sleep(0.01)
    entry.publish(CELLS)


if __name__ == "__main__":
    from pathlib import Path

    harvest(Path(sys.argv[1]), sys.argv[2])
