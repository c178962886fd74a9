"""A process that harvests one entry under a clock that is wrong, or files that may not grow; `test_chaos.py`.

python chaos_writer.py ADDRESS SEED SKEW LIMIT PAUSE

SKEW: seconds its clock is ahead. LIMIT: bytes a file may have, 0 for any number. Prints a line per segment,
and "stole" where it took the claim of a process that is alive. PAUSE: seconds it stands still with its first
claim. Exit code 3: no room.
"""

import resource
import sys
import time

from crash_writer import entry_in, harvest_entry

from mizarr.store.errors import StoreFull
from mizarr.store.files import open_folder
from mizarr.store.runs.claims import SegmentClaim, _is_orphan
from mizarr.store.runs.entries import Entry

TTL = 5.0  # seconds: longer than any segment takes, so that only a wrong clock finds a claim too old


def ahead(folder, skew):
    """The folder, in a process whose clock is `skew` seconds ahead of the one that stamps its files."""
    right = type(folder).now
    type(folder).now = lambda self: right(self) + skew
    return folder


def tell_thefts():
    """Have claims print when they are taken from a living holder."""
    acquire = SegmentClaim.acquire

    def told(self):
        holder = (self._folder.get(self._name) or b"").decode()
        mine = acquire(self)
        if mine and holder and not _is_orphan(holder):
            print("stole", flush=True)
        return mine

    SegmentClaim.acquire = told


def stall(seconds):
    """Have the first segment take so long, as on a machine that stands still for a while."""
    write, left = Entry.write_segment, [seconds]

    def stalled(self, *args, **kwargs):
        time.sleep(left.pop() if left else 0.01)
        return write(self, *args, **kwargs)

    Entry.write_segment = stalled


if __name__ == "__main__":
    address, seed, skew, limit, pause = sys.argv[1:]
    tell_thefts()
    stall(float(pause))
    entry = entry_in(ahead(open_folder(address), float(skew)), TTL)
    if int(limit):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit),) * 2)
    try:
        harvest_entry(entry, seed)
    except StoreFull as error:
        print(error, file=sys.stderr)
        sys.exit(3)
