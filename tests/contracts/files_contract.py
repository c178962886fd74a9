"""What every place that keeps a store's files must do, as a class to subclass: supply the `files` fixture.

The rules on which commit rests (`store/DESIGN.md`): a file appears whole or not at all, the first to create
it wins, and nothing is ever changed.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from mizarr.store.digest import content_digest


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

    def test_a_made_folder_is_new(self, files):
        files.make_folder("a/b")
        with pytest.raises(FileExistsError):
            files.make_folder("a/b")

    def test_settling_tells_size_and_digest_of_all_below(self, files):
        files.put_new("d/a", b"one")
        files.put_new("d/b/c", b"three")
        assert files.settle("d") == {"a": [3, content_digest(b"one")], "b/c": [5, content_digest(b"three")]}

    def test_a_tree_is_removed_whole(self, files):
        files.put_new("d/b/c", b"three")
        files.put_new("e", b"")
        files.remove_tree("d")
        files.remove_tree("d")
        assert list(files.list("")) == ["e"]
