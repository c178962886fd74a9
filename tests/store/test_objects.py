"""Files of a store as objects, in memory and on servers of S3, Azure and Google: the contract, and faults."""

import secrets
import traceback
from urllib.parse import parse_qs, unquote

import pytest
from files_contract import FilesContract  # conftest.py says where

pytest.importorskip("obstore")
pytest.importorskip("moto.server")

from object_servers import Proxy, shared_access  # conftest.py says where

from mizarr.store import open_store
from mizarr.store.errors import StoreError, StoreFormatError, StoreUnreachable
from mizarr.store.files import cloud, objects, open_folder

SLOW = pytest.mark.slow
SCHEMES = ("s3", "az", "gs")


class TestMemory(FilesContract):
    @pytest.fixture
    def files(self):
        return open_folder(f"memory://{secrets.token_hex(4)}/prefix")


class TestS3(FilesContract):
    scheme = "s3"

    @pytest.fixture
    def files(self, provider, speaks):
        server = provider(self.scheme)
        speaks(server)
        return open_folder(server.new_address("some/prefix"))


class TestAzure(TestS3):
    scheme = "az"


class TestGoogle(TestS3):
    scheme = "gs"


class TestS3WithoutCache(FilesContract):
    @pytest.fixture
    def files(self, provider, speaks, monkeypatch):
        monkeypatch.setenv("MIZARR_CACHE_QUOTA", "0")
        server = provider("s3")
        speaks(server)
        return open_folder(server.new_address(""))


# -- what goes wrong


@pytest.fixture
def faulty(request, provider, speaks, monkeypatch):
    """A folder behind a proxy that fails as it is told."""
    monkeypatch.setattr(objects, "_PAUSE", 0.01)
    server = provider(request.param)
    with Proxy(server.endpoint) as proxy:
        speaks(server, proxy.endpoint, MIZARR_TIMEOUT="2")
        proxy.secret = server.secret
        yield open_folder(server.new_address("p")), proxy


def everywhere(*whats, fast=()):
    """Each fault on each server; on others than S3 only those of `fast` in the usual run."""
    return [
        pytest.param(scheme, what, marks=[SLOW] if scheme != "s3" and what not in fast else [])
        for scheme in SCHEMES
        for what in whats
    ]


def the_first(count, what, method):
    """The fault `what`, for the first requests of this method."""
    left = [count]

    def fault(found, path):
        if found != method or left[0] == 0:
            return None
        left[0] -= 1
        return what

    return fault


PUTS = everywhere("503", "lost", "before", "slow", fast=["lost", "503"])
READS = everywhere("503", "lost", "before", "half", "slow", fast=["half"])


@pytest.mark.parametrize(("faulty", "what"), PUTS, indirect=["faulty"])
def test_a_put_that_fails_on_the_way_is_put_once_and_known_as_ours(faulty, what):
    files, proxy = faulty
    proxy.fault = the_first(1, what, "PUT")
    assert files.put_new("a", b"one")
    assert next(fault for method, _, fault in proxy.seen if method == "PUT") == what
    proxy.fault = lambda method, path: None
    assert not files.put_new("a", b"two")
    assert files.get("a") == b"one"


@pytest.mark.parametrize("faulty", SCHEMES, indirect=True)
def test_a_lost_reply_of_somebody_elses_put_is_not_taken_for_ours(faulty):
    files, proxy = faulty
    assert files.put_new("a", b"one")
    proxy.fault = the_first(1, "lost", "PUT")
    assert not files.put_new("a", b"one")  # the same bytes, and still not ours


@pytest.mark.parametrize(("faulty", "what"), READS, indirect=["faulty"])
def test_a_read_that_fails_on_the_way_is_read_again(faulty, what):
    files, proxy = faulty
    data = secrets.token_bytes(300_000)
    files.put_new("a", data)
    proxy.fault = the_first(1, what, "GET")
    assert files.get("a") == data
    proxy.fault = the_first(1, what, "GET")
    assert files.get_range("a", 1000, 200_000) == data[1000:200_000]
    proxy.fault = the_first(1, what, "GET")
    assert files.measure("a")[0] == len(data)


@pytest.mark.parametrize("faulty", SCHEMES, indirect=True)
def test_one_that_is_gone_already_keeps_none_of_the_others(faulty):
    """Its reply was lost, or somebody else removed it: of that Google and Azure make an error."""
    files, proxy = faulty
    for n in range(30):
        files.put_new(f"d/{n}", b"")
    names = [name for name, _ in files.walk("d")]
    files._delete(["d/none", *names[:10]])
    assert sorted(files.list("d")) == sorted(names[10:])
    for method in ("DELETE", "POST"):
        proxy.fault = the_first(1, "lost", method)
        files.remove_tree("d")
        assert list(files.list("d")) == []
        files.put_new("d/0", b"")
        files.put_new("d/1", b"")


AWAY = [
    pytest.param(scheme, what, marks=[] if what == "503" and scheme == "s3" else [SLOW])
    for scheme in SCHEMES
    for what in ("503", "before", "slow")
]


@pytest.mark.parametrize(("faulty", "what"), AWAY, indirect=["faulty"])
def test_a_server_that_stays_away_is_told_in_one_line(faulty, what):
    files, proxy = faulty
    proxy.fault = lambda method, path: what
    for ask in (lambda: files.get("c/403/0"), lambda: files.put_new("c/403/0", b"")):
        with pytest.raises(StoreUnreachable) as told:
            ask()
        assert "\n" not in str(told.value)
        assert not any(secret in str(told.value) for secret in proxy.secret)
        assert ("did not answer in time" if what == "slow" else "the object store failed") in str(told.value)


@pytest.mark.parametrize("faulty", SCHEMES, indirect=True)
def test_what_would_be_answered_the_same_is_asked_once_and_what_may_not_again(faulty, monkeypatch):
    files, proxy = faulty
    files.put_new("c/503/0", b"one")
    monkeypatch.setattr(cloud, "_RETRIES", 0)  # of obstore's own
    cloud._bucket_client.cache_clear()
    files = open_folder(files.address)
    for what in ("400", "403"):
        proxy.fault = lambda method, path, what=what: what
        proxy.seen.clear()
        with pytest.raises(StoreUnreachable):
            files.get("c/503/0")
        assert len(proxy.seen) == 1
    for what in ("429", "500", "503", "before", "half"):
        proxy.fault = the_first(1, what, "GET")
        proxy.seen.clear()
        assert files.get("c/503/0") == b"one"
        assert len(proxy.seen) == 2


def test_a_shared_access_signature_writes_reads_and_lists_and_is_in_no_message(provider, speaks, monkeypatch):
    """Deleting is left out: Azurite answers 500 to a batch that is signed so."""
    server = provider("az")
    address = server.new_address("p")
    signed = shared_access("rwdlac", "2100-01-01T00:00:00Z")
    with Proxy(server.endpoint) as proxy:
        speaks(server, proxy.endpoint, AZURE_STORAGE_SAS_TOKEN=signed)
        monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
        files = open_folder(address)
        for name in ("d/a", "d/b"):
            assert files.put_new(name, b"one") and not files.put_new(name, b"one")
        assert files.get("d/a") == b"one" and files.stat("d/a").size == 3
        assert sorted(files.list("")) == ["d/a", "d/b"]
        assert any("sig=" in path for _, path, _ in proxy.seen)
        monkeypatch.setattr(cloud, "_RETRIES", 0)
        monkeypatch.setattr(objects, "_PAUSE", 0.01)
        cloud._bucket_client.cache_clear()
        files = open_folder(address)
        asked = [files.get, files.stat, files.delete, lambda name: list(files.children(name))]
        for what in ("400", "403", "409", "503", "before"):
            proxy.fault = lambda method, path, what=what: what
            for ask in (*asked, lambda name: files.put_new(name, b"")):
                with pytest.raises(StoreError) as told:
                    ask("a")
                said = "".join(traceback.format_exception(told.value))  # its causes as well
                assert "sig=" not in said and parse_qs(signed)["sig"][0] not in unquote(said)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_no_bucket_is_told_in_one_line(provider, speaks, scheme):
    speaks(provider(scheme))
    for mode in ("a", "r"):
        with pytest.raises(StoreFormatError, match="no bucket of this name"):
            open_store(f"{scheme}://no-such-bucket-here/x", mode=mode)


def test_what_is_no_address_is_told_in_one_line():
    for address in ("s3://key:secret@bucket/x", "s3://bucket/x?versionId=1", "az://c/x?sig=abc"):
        with pytest.raises(StoreFormatError, match="credentials") as told:
            open_store(address)
        assert "secret" not in str(told.value) and "abc" not in str(told.value)
