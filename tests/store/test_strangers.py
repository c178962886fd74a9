"""What lies in the place of a file and is none - a folder, a pipe, a link to nothing - is found, set aside
and waited for by nobody."""

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from exchanged import CELLS, put_run

from mizarr.store import ResultKey, open_store
from mizarr.store.content import content_of
from mizarr.store.errors import CorruptEntry, MizarrError, StoreError, StoreFormatError
from mizarr.store.files import LocalFolder
from mizarr.store.runs.claims import SegmentClaim
from mizarr.workflows.cli import run

pytestmark = pytest.mark.timeout(60)
RESULT = ResultKey("lens", 1, {}, {})
SUBJECT = "ab" * 32
WORDS = "sha256:words"

FILES = {
    "a key": "keys/*/{result}.json",
    "a manifest of a result": "data/*/{result}.*/manifest.json",
    "a chunk of a result": "data/*/{result}.*/dataset/x/c/0",
    "a note": "data/*/{run}/provenance/2*.json",
    "a list of labels": "data/*/{run}/coordinates/" + "[0-9a-f]" * 12 + ".json",
    "which labels": "data/*/{run}/coordinates/labels.json",
    "the digest of a description": "data/*/{run}/coordinates/embed.zarr.json",
    "a group of bookkeeping": "data/*/{run}/coordinates/zarr.json",
    "a run": "data/*/{run}/zarr.json",
    "an array": "data/*/{run}/embed/zarr.json",
    "a label": "data/*/{run}/token_id/c/0",
    "a shard": "data/*/{run}/resid_post/c/2/1/0",
    "a manifest": "data/*/{run}/manifest/resid_post.2.json",
    "a segment": "data/*/{run}/seg/1.*.json",
    "a pin": "pins/figure.json",
    "a text": "annotations/*/*.json",
    "a vocabulary": "vocabularies/words.json",
}  # fmt: skip
FOUND = {"folder": "a folder", "pipe": "a pipe", "link": "a link, which is not followed"}


def make(store):
    """Everything a store holds, where it is missing."""
    entry = put_run(store)
    if store.lookup(RESULT) is None:
        store.put_result(RESULT, xr.Dataset({"x": ("a", np.arange(6.0))}))
    if "figure" not in store.pins():
        store.pin("figure", RESULT)
    if not store.annotations(SUBJECT):
        store.annotate(SUBJECT, {"feature 3": "numbers"})
    return entry


def put(kind, path):
    """What is no file, there."""
    if kind == "folder":
        path.mkdir()
        (path / "x").write_bytes(b"x")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path.parent / "nowhere")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    root = tmp_path_factory.mktemp("sound") / "store"
    make(open_store(root, durability="process"))
    return root


@pytest.fixture
def root(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "store")
    return tmp_path / "store"


def held(root):
    """What can be read of a store."""
    store = open_store(root, mode="r")
    entry = store.entry("")
    labels = {name: c.values.tolist() for name, c in entry.open(chunks=None).coords.items()}
    contents = [entry.content(*cell) for cell in CELLS]
    said = [(each.item, each.text) for each in store.annotations(SUBJECT)]
    return (
        contents,
        labels,
        content_of(store.open_result(RESULT)),
        store.vocabulary(WORDS),
        store.pins(),
        said,
    )


def place(root, what):
    (run,) = (path.parent.name for path in root.glob("data/*/*/zarr.json"))
    (found,) = root.glob(FILES[what].format(result=RESULT.digest, run=run))
    return found


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.wide] * (kind != "folder")) for kind in FOUND]
)
@pytest.mark.parametrize("what", FILES)
def test_it_is_found_set_aside_and_what_it_was_is_made_again(root, sound, what, kind):
    path = place(root, what)
    path.unlink()
    put(kind, path)
    store = open_store(root, durability="process")
    (damage,) = store.verify(quick=True)
    assert f"{damage.data}/{damage.file}" == str(path.relative_to(root))
    in_array = what in ("a chunk of a result", "a label", "a shard")  # whose names are those of folders, too
    assert damage.found == ("no file that can be read" if in_array and kind == "folder" else FOUND[kind])
    assert store.verify() == [damage]
    for ask in (held, lambda root: list(open_store(root).records()), lambda root: open_store(root).runs()):
        with suppress(MizarrError):
            ask(root)
    assert run(["verify", "--quiet", "--store", str(root)]) == 1
    store.quarantine(damage)
    assert store.verify() == []
    make(store)
    assert store.verify() == [] and held(root) == held(sound)
    assert path.is_file() or not os.path.lexists(path)


def test_a_variable_of_a_result_may_be_named_as_a_file(tmp_path):
    store = open_store(tmp_path / "store")
    store.put_result(RESULT, xr.Dataset({"x.json": ("a", np.arange(3.0))}))
    assert store.verify() == []


@pytest.mark.parametrize("kind", FOUND)
def test_a_store_described_by_it_is_told_and_left_alone(root, kind):
    (root / "store.json").unlink()
    put(kind, root / "store.json")
    for mode in "ra":
        with pytest.raises(StoreFormatError) as told:
            open_store(root, mode=mode)
        assert "quarantine" not in str(told.value)
    assert run(["verify", "--store", str(root)]) == 2


@pytest.mark.parametrize("kind", FOUND)
def test_an_index_that_is_none_is_forgotten(root, sound, kind):
    (root / "index.sqlite").unlink(missing_ok=True)
    put(kind, root / "index.sqlite")
    for mode in "ra":
        assert open_store(root, mode=mode).index.last_used() == {}
    assert held(root) == held(sound)


@pytest.mark.parametrize("kind", FOUND)
def test_a_claim_that_is_none_makes_nobody_wait(root, kind):
    (entry,) = open_store(root).entries()
    put(kind, root / entry.path / "seg/0.claim")
    claim = SegmentClaim(entry.folder, f"{entry.path}/seg/0.claim")
    with pytest.raises(CorruptEntry, match="verify --quarantine"):
        claim.acquire()
    store = open_store(root)
    (damage,) = store.verify()
    store.quarantine(damage)
    assert claim.acquire()
    claim.release()


@pytest.mark.parametrize("what", ["a shard", "a segment"])
def test_in_the_way_of_a_shard_it_ends_a_harvest_in_a_line(sound, tmp_path, what):
    """Nobody has committed it: neither is it taken for done, nor is it computed again and again."""
    root = tmp_path / "store"
    entry = make(open_store(root, durability="process"))
    path = place(root, what)
    shutil.rmtree(root / entry.path / "manifest")
    shutil.rmtree(root / "keys")
    for record in (root / entry.path / "seg").glob("1.*.json"):
        record.unlink()
    path.unlink(missing_ok=True)
    put("link", path)
    with pytest.raises(CorruptEntry, match="a link, which is not followed; move it away"):
        make(open_store(root, durability="process"))
    store = open_store(root, durability="process")
    (damage,) = store.verify()
    store.quarantine(damage)
    assert [entry.digest for entry in store.entries()] == [entry.digest]  # and not the run with it
    make(store)
    assert store.verify() == [] and held(root) == held(sound)


def test_labels_that_no_record_lists_are_damage(root, sound):
    place(root, "a list of labels").unlink()
    store = open_store(root, durability="process")
    (damage,) = store.verify()
    assert (damage.file, damage.found) == ("coordinates", "missing")
    store.quarantine(damage)
    make(store)
    assert store.verify() == [] and held(root) == held(sound)


def test_a_lease_that_cannot_be_read_stops_gc_as_nobody_knows_what_it_keeps(root):
    lease = root / "leases/ab.json"
    lease.parent.mkdir(exist_ok=True)
    lease.write_bytes(b"{")
    with pytest.raises(CorruptEntry, match=r"ab\.json is damaged.*remove the file"):
        open_store(root).gc(dry_run=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_this_user_may_not_read_is_told_and_is_no_damage(root):
    path = place(root, "a manifest")
    path.chmod(0)
    with pytest.raises(StoreError, match=r"may not read.*chmod") as told:
        open_store(root).verify()
    assert not isinstance(told.value, CorruptEntry)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs /proc")
def test_a_file_that_the_system_cannot_read_is_damage():
    """As of a disk with bad blocks: the memory of a process cannot be read at its start."""
    with pytest.raises(CorruptEntry, match="cannot be read"):
        LocalFolder(Path("/proc/self")).get("mem")


@pytest.mark.parametrize("when", [0.0, 2.0**33, -(2.0**30)], ids=["1970", "2242", "1935"])
def test_files_of_any_date_are_listed_kept_and_collected(root, sound, when, capsys):
    stray = next(root.glob("data/*/*/zarr.json")).with_name(".stray")
    stray.write_bytes(b"x")
    for path in [*root.rglob("*"), root]:
        os.utime(path, (when, when), follow_symlinks=False)
    assert run(["ls", "--store", str(root)]) == 0
    assert "lens/1" in capsys.readouterr().out
    store = open_store(root)
    assert all(0 <= each.used <= time.time() + 1 for each in store.usage())
    assert store.gc().removed == ()
    assert stray.exists() == (when > 0)
    assert store.verify() == [] and held(root) == held(sound)


def test_a_claim_from_the_future_is_nobodys(root):
    (entry,) = open_store(root).entries()
    name = f"{entry.path}/seg/0.claim"
    entry.folder.mark(name, b"elsewhere 1 abcd")
    assert not SegmentClaim(entry.folder, name).acquire()
    late = time.time() + 3600
    os.utime(root / name, (late, late))
    with SegmentClaim(entry.folder, name) as mine:
        assert mine


def test_the_clock_is_that_of_whoever_stamps_the_files(tmp_path, monkeypatch):
    """Of a network disk that is another machine's."""
    folder = LocalFolder(tmp_path)
    monkeypatch.setattr(time, "time", lambda: 1e6)
    assert folder.now() > 1e9
    assert list(folder.list("")) == [] and not list(tmp_path.rglob(".clock*"))
    assert LocalFolder(tmp_path, read_only=True).now() == 1e6
