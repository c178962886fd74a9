"""What every place that keeps a store's files must do, as a class to subclass: supply the `files` fixture.

The rules on which commit rests (`store/DESIGN.md`): a file appears whole or not at all, the first to create
it wins, and nothing is ever changed.
"""

import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xarray as xr
import zarr

from mizarr.store.digest import content_digest
from mizarr.store.files import open_folder


class FilesContract:
    """Subclass with a fixture `files`: an empty, writable place."""

    def test_what_is_put_is_got(self, files):
        assert files.put_new("a/b/c.json", b"one")
        assert files.get("a/b/c.json") == b"one"

    def test_what_is_not_there_is_none(self, files):
        files.put_new("a/b", b"")
        assert files.get("a/x") is None
        assert files.get("x/y/z") is None
        assert files.get("a/b/c") is None
        assert files.get("a/b") == b""

    def test_the_first_wins_and_nothing_changes(self, files):
        assert files.put_new("a", b"one")
        assert not files.put_new("a", b"two")
        assert files.get("a") == b"one"

    def test_of_many_at_once_exactly_one_wins(self, files):
        texts = [f"{i}".encode() * 1000 for i in range(16)]
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda text: files.put_new("deep/in/a", text), texts))
        assert won.count(True) == 1
        assert files.get("deep/in/a") == texts[won.index(True)]

    def test_parts_are_laid_end_to_end(self, files):
        parts = [b"ab", bytearray(b"cd"), memoryview(b"ef"), b"", *[b"g"] * 200]
        assert files.put_all({"a": parts}) == {"a"}
        assert files.get("a") == b"abcdef" + b"g" * 200

    def test_listing_names_every_file_below(self, files):
        names = {"d/a", "d/b/c", "d/b/e/f"}
        for name in names | {"other"}:
            files.put_new(name, b"")
        assert set(files.list("d")) == names
        assert set(files.children("d")) == {"a", "b"}
        assert (
            list(files.list("nowhere"))
            == list(files.children("nowhere"))
            == list(files.children("other"))
            == []
        )

    def test_deleting_makes_room_for_another(self, files):
        files.put_new("a", b"one")
        files.delete("a")
        files.delete("a")
        assert files.get("a") is None
        assert files.put_new("a", b"two")

    def test_a_built_folder_is_new_and_tells_size_and_digest_of_all_below(self, files):
        def fill(folder):
            (folder / "a").write_bytes(b"one")
            (folder / "b").mkdir()
            (folder / "b/c").write_bytes(b"three")

        told = {"a": [3, content_digest(b"one")], "b/c": [5, content_digest(b"three")]}
        assert files.build("x/d", fill) == told
        assert (files.get("x/d/a"), files.get("x/d/b/c")) == (b"one", b"three")
        with pytest.raises(FileExistsError):
            files.build("x/d", fill)
        assert {name: list(files.measure(f"x/d/{name}")) for name in told} == told
        assert files.sizes("x/d", ["a", "b/c", "none"]) == {"a": 3, "b/c": 5, "none": None}

    def test_a_range_is_what_a_slice_takes(self, files):
        data = bytes(range(100))
        files.put_new("a/b", data)
        for start, stop in [(0, 10), (10, None), (90, 200), (-7, None), (50, 50), (0, 0)]:
            assert files.get_range("a/b", start, stop) == data[start:stop], (start, stop)
        assert files.get_range("a/none", 0, 1) is None

    def test_a_stat_tells_size_and_age_and_another_file_of_the_same_name(self, files):
        before = files.now()
        files.put_new("a/b", b"one")
        first = files.stat("a/b")
        assert first.size == files.size("a/b") == 3
        assert abs(first.modified - before) < 5
        assert dict(files.stamps("a"))["b"].stamp == first.stamp
        files.delete("a/b")
        assert files.stat("a/b") is files.size("a/b") is None
        files.put_new("a/b", b"two")
        assert files.stat("a/b").stamp != first.stamp

    def test_a_file_as_memory(self, files):
        data = np.random.default_rng(5).integers(0, 256, 3 << 20, np.uint8).tobytes()
        files.put_new("a/b", data)
        mapped = files.mapped("a/b")
        mapped.fetch([(7, 1000), (2 << 20, (2 << 20) + 5)])
        assert mapped.size == len(data)
        assert mapped.data[7:1000] == data[7:1000]
        assert mapped.data[2 << 20 : (2 << 20) + 5] == data[2 << 20 : (2 << 20) + 5]
        mapped.fetch([(0, len(data))])
        assert mapped.data[: len(data)] == data
        with pytest.raises(FileNotFoundError):
            files.mapped("a/none")

    def test_folders_are_told_from_files(self, files):
        for name in ("d/a", "d/b/c", "d/e/f/g"):
            files.put_new(name, b"")
        assert set(files.subfolders("d")) == {"b", "e"}
        assert {name for name, _ in files.stamps("d")} >= {"a"}
        assert {name for name, _ in files.walk("d")} == {"d/a", "d/b/c", "d/e/f/g"}
        assert list(files.subfolders("none")) == list(files.stamps("none")) == list(files.walk("none")) == []

    def test_a_mark_is_taken_once_and_touched(self, files):
        assert files.mark("d/claim", b"mine")
        assert not files.mark("d/claim", b"yours")
        assert files.get("d/claim") == b"mine"
        before = files.stat("d/claim").modified
        time.sleep(1.1)  # object stores tell whole seconds
        files.touch("d/claim")
        assert files.stat("d/claim").modified > before
        assert files.get("d/claim") == b"mine"
        files.delete("d/claim")
        files.touch("d/claim")
        assert files.get("d/claim") is None

    def test_a_further_name_is_the_same_bytes_and_the_first_wins(self, files):
        files.put_new("a", b"one")
        files.put_new("taken", b"two")
        assert files.link_all({"d/b": "a", "taken": "a"}) == {"d/b"}
        assert (files.get("d/b"), files.get("taken")) == (b"one", b"two")
        with pytest.raises(FileNotFoundError):
            files.link_all({"d/c": "none"})

    def test_what_is_moved_is_elsewhere(self, files):
        files.put_new("d/a", b"one")
        files.put_new("d/b/c", b"two")
        files.move("d/a", "q/d/a")
        files.move("d", "q/e")
        files.move("none", "q/none")
        assert sorted(files.list("")) == ["q/d/a", "q/e/b/c"]
        assert (files.get("q/d/a"), files.get("q/e/b/c")) == (b"one", b"two")

    def test_arrays_are_read_by_zarr(self, files):
        values = np.arange(60, dtype=np.float32).reshape(6, 10)
        dataset = xr.Dataset({"a": (("i", "j"), values)})
        files.build("x/d", lambda folder: dataset.to_zarr(folder / "g", consolidated=False))
        opened = xr.open_zarr(files.zarr("x/d/g"), consolidated=False, chunks=None)
        np.testing.assert_array_equal(opened["a"].values, values)
        np.testing.assert_array_equal(zarr.open_array(files.zarr("x/d/g/a"), mode="r")[2:4], values[2:4])

    def test_in_another_guise_it_is_the_same_place(self, files):
        files.put_new("a", b"one")
        assert pickle.loads(pickle.dumps(files)).get("a") == b"one"
        assert open_folder(files.address).get("a") == b"one"
        assert files.where("a").startswith(files.address)

    def test_a_tree_is_removed_whole(self, files):
        files.put_new("d/b/c", b"three")
        files.put_new("e", b"")
        files.remove_tree("d")
        files.remove_tree("d")
        assert list(files.list("")) == ["e"]
