"""Files of a store as objects, in memory and on a server that speaks S3: the contract, and faults."""

import secrets

import pytest
from files_contract import FilesContract  # conftest.py says where

pytest.importorskip("obstore")
pytest.importorskip("moto.server")

from object_servers import KEYS, Proxy, new_bucket, s3_server  # conftest.py says where

from mizarr.store import open_store
from mizarr.store.errors import StoreFormatError, StoreUnreachable
from mizarr.store.files import cloud, objects, open_folder

SLOW = pytest.mark.slow


class TestMemory(FilesContract):
    @pytest.fixture
    def files(self):
        return open_folder(f"memory://{secrets.token_hex(4)}/prefix")


@pytest.fixture(scope="module")
def endpoint():
    with s3_server() as found:
        yield found


@pytest.fixture
def speaks_s3(monkeypatch, tmp_path):
    """Says how: where the server is, and with which keys."""

    def speak(endpoint, **more):
        told = {"AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1", **KEYS, **more}
        for name, value in told.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MIZARR_CACHE", str(tmp_path / "cache"))
        cloud.connected.cache_clear()

    yield speak
    cloud.connected.cache_clear()


@pytest.fixture
def bucket(endpoint, speaks_s3):
    speaks_s3(endpoint)
    return new_bucket(endpoint)


class TestS3(FilesContract):
    @pytest.fixture
    def files(self, bucket):
        return open_folder(f"s3://{bucket}/some/prefix")


class TestS3WithoutCache(FilesContract):
    @pytest.fixture
    def files(self, bucket, monkeypatch):
        monkeypatch.setenv("MIZARR_CACHE_QUOTA", "0")
        return open_folder(f"s3://{bucket}")


# -- what goes wrong


@pytest.fixture
def faulty(endpoint, speaks_s3, monkeypatch):
    """A folder behind a proxy that fails as it is told."""
    monkeypatch.setattr(objects, "_PAUSE", 0.01)
    bucket = new_bucket(endpoint)
    with Proxy(endpoint) as proxy:
        speaks_s3(proxy.endpoint, MIZARR_TIMEOUT="2")
        yield open_folder(f"s3://{bucket}/p"), proxy


def the_first(count, what, method):
    """The fault `what`, for the first requests of this method."""
    left = [count]

    def fault(found, path):
        if found != method or left[0] == 0:
            return None
        left[0] -= 1
        return what

    return fault


@pytest.mark.parametrize("what", ["503", "lost", "before", "slow"])
def test_a_put_that_fails_on_the_way_is_put_once_and_known_as_ours(faulty, what):
    files, proxy = faulty
    proxy.fault = the_first(1, what, "PUT")
    assert files.put_new("a", b"one")
    assert next(fault for method, _, fault in proxy.seen if method == "PUT") == what
    proxy.fault = lambda method, path: None
    assert not files.put_new("a", b"two")
    assert files.get("a") == b"one"


def test_a_lost_reply_of_somebody_elses_put_is_not_taken_for_ours(faulty):
    files, proxy = faulty
    assert files.put_new("a", b"one")
    proxy.fault = the_first(1, "lost", "PUT")
    assert not files.put_new("a", b"one")  # the same bytes, and still not ours


@pytest.mark.parametrize("what", ["503", "lost", "before", "half", "slow"])
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


@pytest.mark.parametrize("what", ["503", *(pytest.param(each, marks=SLOW) for each in ("before", "slow"))])
def test_a_server_that_stays_away_is_told_in_one_line(faulty, what):
    files, proxy = faulty
    proxy.fault = lambda method, path: what
    for ask in (lambda: files.get("a"), lambda: files.put_new("a", b"")):
        with pytest.raises(StoreUnreachable) as told:
            ask()
        assert "\n" not in str(told.value)
        assert not any(secret in str(told.value) for secret in KEYS.values())


def test_what_is_no_bucket_or_no_address_is_told_in_one_line(endpoint, speaks_s3):
    speaks_s3(endpoint)
    for mode in ("a", "r"):
        with pytest.raises(StoreFormatError, match="bucket that exists"):
            open_store("s3://no-such-bucket-here/x", mode=mode)
    for address in ("s3://key:secret@bucket/x", "s3://bucket/x?versionId=1", "az://c/x?sig=abc"):
        with pytest.raises(StoreFormatError, match="credentials") as told:
            open_store(address)
        assert "secret" not in str(told.value) and "abc" not in str(told.value)
