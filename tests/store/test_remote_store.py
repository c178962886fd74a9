"""A store in object storage does what one in a folder does: the same numbers, keys, damage, leftovers."""

import json
import os
import pickle
import secrets
import subprocess
import sys
import time
from collections import Counter
from urllib.parse import unquote

import numpy as np
import pytest
import xarray as xr

pytest.importorskip("obstore")
pytest.importorskip("moto.server")

from object_servers import ACCOUNT, ACCOUNT_KEY, Proxy  # conftest.py says where

import mizarr
from mizarr.store import PackedTokens, ResultKey, RunKey, open_store
from mizarr.store.errors import CorruptEntry, EntryNotFound, ReadOnlyStore, StoreFormatError
from mizarr.store.files import cloud, objects
from mizarr.store.reading.direct import entry_of
from mizarr.store.runs.entries import ArraySpec
from mizarr.store.runs.quantised import quantise, restored

VARIABLES = ("resid_post", "mlp_out")
CELLS = [(name, layer) for name in VARIABLES for layer in (0, 1)]
TOKENS = PackedTokens.from_lists([list(range(n, n + n % 7 + 900)) for n in range(3)], texts=["a", "b", "c"])
DAY = 24 * 3600.0


SLOW = pytest.mark.slow
EVERYWHERE = ["memory", "s3", pytest.param("s3 without cache", marks=SLOW), "az", "gs"]
ALL_SLOW = [*EVERYWHERE[:3], *(pytest.param(scheme, marks=SLOW) for scheme in ("az", "gs"))]
"""Where the seam is the same as S3's, which the contract shows, and the store cannot tell."""
SERVERS = ["s3", "az", "gs"]
SLOW_SERVERS = ["s3", *(pytest.param(scheme, marks=SLOW) for scheme in ("az", "gs"))]
each_place = pytest.mark.parametrize("address", EVERYWHERE, indirect=True)


@pytest.fixture(params=ALL_SLOW)
def address(request, provider, speaks, monkeypatch, tmp_path):
    """Where nothing is yet."""
    scheme, _, how = request.param.partition(" ")
    if scheme == "memory":
        monkeypatch.setenv("MIZARR_CACHE", str(tmp_path / "cache"))
        cloud._bucket_client.cache_clear()
        yield f"memory://{secrets.token_hex(4)}/store"
        cloud._bucket_client.cache_clear()
        return
    if how:
        monkeypatch.setenv("MIZARR_CACHE_QUOTA", "0")
    speaks(provider(scheme))
    yield provider(scheme).new_address()


@pytest.fixture(params=SLOW_SERVERS)
def server(request, provider, speaks):
    """One that is spoken to."""
    speaks(provider(request.param))
    return provider(request.param)


@pytest.fixture
def far(server):
    """An address there where nothing is yet."""
    return server.new_address()


@pytest.fixture
def s3(provider, speaks):
    speaks(provider("s3"))
    return provider("s3").new_address()


def rows_of(variable, layer, at):
    rng = np.random.default_rng([layer, at.start, len(variable)])
    return rng.standard_normal((len(at), 600)).astype("f4")


def harvest(store, tokens=TOKENS, model="m", dtype="float32"):
    specs = [
        ArraySpec(name, f"blocks.*.hook_{name}", ("layer", "token", "hidden"), {"hidden": 600}, dtype, 2)
        for name in VARIABLES
    ]
    entry = store.create_entry(
        RunKey(model, tokens.digest, "none"), tokens, specs, segment_tokens=1024, attrs={"model": model}
    )
    for n, cells in entry.missing(CELLS).items():
        entry.write_segment(n, {cell: rows_of(*cell, entry.segments[n]) for cell in cells})
    return entry, entry.publish(CELLS)


def result(store, name, inputs=None, size=10):
    key = ResultKey(name, 1, {}, inputs or {})
    values = np.arange(size) + sum(map(ord, name)) * 1.0
    words = np.array([f"word {n}" for n in range(size)], dtype=object)
    return store.put_result(key, xr.Dataset({"x": ("a", values)}, {"word": ("a", words)}))


def overwritten(store, name, change):
    """An object put again with other bytes, past the store."""
    import obstore

    raw = bytearray(store.files.get(name))
    change(raw)
    obstore.put(store.files._store, name, bytes(raw))
    store.files._stats.clear()


def flip(raw):
    raw[len(raw) // 3] ^= 0xFF


@pytest.mark.parametrize(
    ("address", "dtype", "arrays"),
    [
        *(("memory", *kind) for kind in (("float32", 4), ("int8", 8))),
        *(("s3", *kind) for kind in (("float32", 4), ("int8", 8))),
        *((scheme, "float32", 4) for scheme in ("az", "gs")),
        *(
            pytest.param(place, *kind, marks=SLOW)
            for place, kind in (
                ("s3 without cache", ("float32", 4)),
                ("s3 without cache", ("int8", 8)),
                ("az", ("int8", 8)),
                ("gs", ("int8", 8)),
            )
        ),
    ],
    indirect=["address"],
)
def test_runs_and_results_are_those_of_a_folder(address, tmp_path, dtype, arrays):
    near, far = open_store(tmp_path / "near"), open_store(address)
    for store in (near, far):
        harvest(store, dtype=dtype)
        result(store, "pca")
    here, there = ([(r.key, r.content, r.label) for r in store.records()] for store in (near, far))
    assert here == there and len(here) == arrays + 1
    again = open_store(address, mode="r")
    (entry,), (local,) = again.entries(), near.entries()
    xr.testing.assert_identical(entry.open().load(), local.open().load())
    xr.testing.assert_identical(entry.open(chunks="segment").compute(), local.open().load())
    scattered = [0, 5, 1500, 2000, 2600]
    np.testing.assert_array_equal(
        entry.open()["resid_post"].isel(token=scattered).values,
        local.open()["resid_post"].isel(token=scattered).values,
    )
    record = next(r for r in again.records() if r.kind == "result")
    xr.testing.assert_identical(again[record.key].load(), near[record.key].load())
    assert again.verify() == []
    assert entry_of(entry.open()).digest == local.digest
    assert [run.tokens for run in again.runs()] == [run.tokens for run in near.runs()]
    assert {u.kind for u in again.usage()} == {"activation", "result"}


def test_a_store_and_what_it_opens_travel_within_their_reach(address):
    store = open_store(address)
    entry, _ = harvest(store)
    assert pickle.loads(pickle.dumps(store)) == store
    array = entry.open(chunks="segment")["mlp_out"]
    again = pickle.loads(pickle.dumps(array))
    np.testing.assert_array_equal(again.values, array.values)
    opened = xr.open_dataset(store.files.where(entry.path), engine="mizarr")
    np.testing.assert_array_equal(opened["mlp_out"].values, array.values)
    record = result(store, "pca")
    held = xr.open_dataset(store.files.where(record.data), engine="mizarr")
    xr.testing.assert_equal(held.load(), store[record.key].load())


@pytest.mark.parametrize(
    ("dtype", "file"),
    [
        ("float32", "resid_post/c/1/1/0"),
        ("int8", "resid_post/c/1/1/0"),
        ("int8", "resid_post__scale/c/1/1/0"),
    ],
)
def test_a_flipped_byte_is_found_by_readers_and_by_verify_and_mended(address, dtype, file):
    store = open_store(address)
    entry, records = harvest(store, dtype=dtype)
    name = f"{entry.path}/{file}"
    overwritten(store, name, flip)
    fresh = open_store(address)
    with pytest.raises(CorruptEntry, match="crc32c"):
        next(fresh.entries()).open()["resid_post"].sel(layer=1).values  # noqa: B018
    (damage,) = fresh.verify()
    assert damage.file == file
    fresh.quarantine(damage)
    withdrawn = f"{file.partition('/')[0]}/1"
    assert fresh.lookup(next(r.key for r in records if r.label == withdrawn)) is None
    assert next(fresh.entries()).record("resid_post", 1) is None
    _, again = harvest(open_store(address), dtype=dtype)
    assert sorted(r.content for r in again) == sorted(r.content for r in records)
    assert open_store(address).verify() == []


def test_int8_goes_to_a_bucket_and_back_with_its_scales(address, tmp_path):
    """What comes back is, in float32, what int8 makes of the rows."""
    near, back = open_store(tmp_path / "near"), open_store(tmp_path / "back")
    harvest(near, dtype="int8")
    near.copy_to(open_store(address))
    open_store(address, mode="r").copy_to(back)
    (entry,) = back.entries()
    for variable, layer in CELLS:
        rows = np.concatenate([rows_of(variable, layer, at) for at in entry.segments])
        expected = restored(*quantise(rows, "rows"))
        np.testing.assert_array_equal(entry.open()[variable].sel(layer=layer).values, expected)
    assert [(r.key, r.content) for r in back.records()] == [(r.key, r.content) for r in near.records()]
    assert open_store(address).verify() == [] == back.verify()


@each_place
def test_gc_takes_leftovers_and_what_is_over_quota_and_no_more(address):
    store = open_store(address)
    entry, _ = harvest(store)
    kept, gone = result(store, "kept"), result(store, "gone")
    store.pin("mine", kept)
    store.files.mark(f"{entry.path}/seg/0.claim", b"elsewhere 1 abc")
    store.files.put_new("data/ab/" + "ab" * 32 + ".1234/dataset/x/c/0", b"torn")
    dry = store.gc(grace=0.0, quota=0, dry_run=True)
    assert store.verify() == [] and store.lookup(gone.key) is not None
    time.sleep(1.5)
    assert store.gc(grace=DAY).removed == ()
    store.files.delete(f"{entry.path}/seg/0.claim")
    report = store.gc(grace=-5.0, quota=0)
    assert gone.data in report.removed and kept.data not in report.removed
    assert any(".1234" in name for name in report.removed)
    assert dry.dry_run
    assert [r.key for r in open_store(address).records()] == [kept.key]
    assert not list(store.files.list(gone.data))


def test_a_lease_keeps_what_is_read(address):
    store = open_store(address)
    record = result(store, "read")
    with store.lease(record):
        assert store.gc(grace=-5.0, quota=0).removed == ()
    assert store.gc(grace=-5.0, quota=0).removed == (record.data,)


def test_a_store_opened_for_reading_writes_nothing(address):
    with pytest.raises(StoreFormatError, match=r"found no store\.json"):
        open_store(address, mode="r")
    result(open_store(address), "pca")
    reader = open_store(address, mode="r")
    before = sorted(reader.files.list(""))
    with pytest.raises(ReadOnlyStore, match="mode='a'"):
        result(reader, "other")
    assert sorted(reader.files.list("")) == before


def test_a_claim_is_held_once_and_taken_over_when_its_holder_is_gone(address):
    store = open_store(address)
    entry, _ = harvest(store)
    first, second = entry.claim(0), entry.claim(0)
    assert first.acquire() and not second.acquire()
    first.release()
    assert second.acquire()
    second.release()
    name = f"{entry.path}/seg/0.claim"
    store.files.mark(name, b"elsewhere 1 abcd")
    stale = type(first)(store.files, name, ttl=1.0)
    assert not stale.acquire()
    time.sleep(2.5)
    assert stale.acquire()
    stale.release()


@each_place
def test_a_run_that_is_gone_is_told_so(address):
    store = open_store(address)
    entry, _ = harvest(store)
    opened = entry.open()
    store.files.remove_tree(entry.path)
    with pytest.raises(EntryNotFound):
        opened["resid_post"].values  # noqa: B018


# -- through the cache


def test_what_was_read_is_not_fetched_again_and_a_single_row_fetches_one_chunk(server, far, speaks):
    harvest(open_store(far))
    with Proxy(server.endpoint) as proxy:
        speaks(server, proxy.endpoint)

        def fetched(read):
            proxy.seen.clear()
            with_cache = next(open_store(far, mode="r").entries()).open(chunks=None)
            proxy.seen.clear()
            read(with_cache)
            return [path for method, path, _ in proxy.seen if method == "GET" and "/c/" in unquote(path)]

        def one_row(ds):
            return ds["resid_post"].sel(layer=1).isel(token=1500).values

        def layer(ds):
            return ds["resid_post"].sel(layer=1).values

        assert len(fetched(one_row)) == 2  # the index, the chunk
        assert fetched(one_row) == []
        assert 0 < len(fetched(layer)) <= 2 * 3 + 1
        assert fetched(layer) == []


def test_a_damaged_cache_costs_a_request_and_changes_nothing(s3, tmp_path):
    store = open_store(s3)
    entry, _ = harvest(store)
    told = entry.open(chunks=None)["mlp_out"].values.copy()
    kept = [path for path in (tmp_path / "cache/objects").rglob("*") if path.is_file()]
    assert kept
    for path in kept:
        raw = bytearray(path.read_bytes())
        for at in range(0, len(raw), 4096):
            raw[at] ^= 0xFF
        path.write_bytes(raw)
    objects_again = next(open_store(s3).entries()).open(chunks=None)["mlp_out"].values
    np.testing.assert_array_equal(objects_again, told)


def test_the_cache_stays_within_its_quota(s3, tmp_path, monkeypatch):
    monkeypatch.setenv("MIZARR_CACHE_QUOTA", "6MB")
    store = open_store(s3)
    entry, _ = harvest(store)
    held = entry.open(chunks=None)
    for variable, layer in CELLS:
        assert np.isfinite(held[variable].sel(layer=layer).values).all()
    taken = sum(p.stat().st_blocks * 512 for p in (tmp_path / "cache/objects").rglob("*") if p.is_file())
    assert 0 < taken <= 6e6 * (1 + 1 / 16) + (3 << 20)
    assert sum(u.bytes for u in store.usage()) > 20e6


# -- the whole way, and other processes


def test_capture_stages_report_and_the_command_line_on_a_server(server, far, tmp_path, capsys):
    from mizarr.workflows.cli import run

    def said(*arguments):
        assert run([*arguments, "--store", far]) == 0
        return capsys.readouterr().out

    prompts = ["a prompt", "another one"]
    captured = mizarr.capture(
        "specimen", prompts, ["blocks.*.hook_resid_post"], store=open_store(far), progress=False
    )
    near = mizarr.capture(
        "specimen", prompts, ["blocks.*.hook_resid_post"], store=open_store(tmp_path / "near"), progress=False
    )
    xr.testing.assert_equal(captured.load(), near.load())
    assert "specimen" in said("ls")
    said("compute", "logit_lens", "--model", "specimen", "--set", 'prompts=["a prompt"]', "--quiet")
    assert "cached" in said("explain", "logit_lens", "--model", "specimen", "--set", 'prompts=["a prompt"]')
    page = tmp_path / "page.html"
    said(
        "report",
        "logit_lens",
        "--model",
        "specimen",
        "--set",
        'prompts=["a prompt"]',
        "--quiet",
        "--output",
        str(page),
    )
    text = page.read_text()
    assert not any(secret in text for secret in server.secret)
    assert said("verify", "--quiet") == ""
    assert json.loads(said("gc", "--dry-run", "--json"))["dry_run"]
    copied = tmp_path / "copied"
    assert run(["copy", far, str(copied), "--quiet"]) == 0
    assert [r.content for r in open_store(copied).records()] == [r.content for r in open_store(far).records()]
    assert open_store(copied).verify() == []
    for name in open_store(far).files.list(""):
        raw = open_store(far).files.get(name)
        assert not any(secret.encode() in raw for secret in server.secret), name


DENIED = {
    "everything": lambda method, path: True,
    "writing": lambda method, path: method == "PUT",
    "writing shards": lambda method, path: method == "PUT" and "/c/" in path,
    "writing records": lambda method, path: method == "PUT" and "/seg/" in path and path.endswith(".json"),
}
DENIALS = [
    pytest.param(scheme, what, marks=[] if scheme == "s3" or what == "writing shards" else [SLOW])
    for scheme in SERVERS
    for what in DENIED
]


@pytest.mark.parametrize(("server", "what"), DENIALS, indirect=["server"])
def test_what_is_denied_is_told_in_one_line_and_leaves_nothing_half_written(server, speaks, capsys, what):
    """Credentials that may not do all of it; once they may, the same command goes on."""
    from mizarr.workflows.cli import run

    with Proxy(server.endpoint) as proxy:
        speaks(server, proxy.endpoint, MIZARR_TIMEOUT="20")
        at = server.new_address()
        asked = [
            "capture",
            "specimen",
            "a prompt",
            "--text",
            "--hooks",
            "blocks.0.hook_resid_post",
            "--quiet",
        ]
        proxy.fault = lambda method, path: "403" if DENIED[what](method, unquote(path)) else None
        assert run([*asked, "--store", at]) == 2
        said = capsys.readouterr()
        denied = Counter(seen for seen in proxy.seen if seen[2] == "403")
        assert denied
        assert max(denied.values()) == 1, denied  # asked again it would be denied again
        assert said.out == ""
        assert said.err.count("\n") == 1 and "denied" in said.err and at in said.err
        assert not any(secret in said.err for secret in server.secret)
        proxy.fault = lambda method, path: None
        if what.startswith("writing "):
            store = open_store(at)
            assert not list(store.records())  # nothing that looks finished
            assert store.verify() == []
        assert run([*asked, "--store", at]) == 0
        assert open_store(at).verify() == []


@pytest.mark.parametrize("server", SERVERS, indirect=True)
def test_a_bucket_that_is_missing_is_told_in_one_line(server, capsys):
    from mizarr.workflows.cli import run

    asked = ["capture", "specimen", "a prompt", "--text", "--hooks", "blocks.0.hook_resid_post", "--quiet"]
    assert run([*asked, "--store", f"{server.scheme}://no-such-bucket-anywhere/store"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert "no bucket of this name" in said.err


def test_two_processes_harvest_one_run_and_agree(far):
    program = """
import sys
sys.path[:0] = sys.argv[2:]
from test_remote_store import harvest, open_store
print(*sorted(r.content for r in harvest(open_store(sys.argv[1]))[1]))
"""
    here = os.path.dirname(__file__)  # noqa: PTH120
    paths = [here, os.path.join(here, "..", "contracts")]  # noqa: PTH118
    both = [
        subprocess.Popen(
            [sys.executable, "-c", program, far, *paths],
            stdout=subprocess.PIPE,
            text=True,
            env=dict(os.environ),
        )
        for _ in range(2)
    ]
    said = [one.communicate(timeout=120)[0] for one in both]
    assert [one.returncode for one in both] == [0, 0]
    assert said[0] == said[1] != ""
    assert open_store(far).verify() == []


def said_to(capsys, address):
    """What `ls` of a store says that cannot be looked into: one line, and exit code 2."""
    from mizarr.workflows.cli import run

    assert run(["ls", "--store", address]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    return said.err


WRONG = {
    "az": {"AZURE_STORAGE_ACCOUNT_KEY": "V1JPTkdLRVk="},
    "gs": {"GOOGLE_BEARER_TOKEN": "WRONGKEY"},
}


@pytest.mark.parametrize("server", ["az", "gs"], indirect=True)
def test_credentials_that_are_refused_are_one_line(server, speaks, capsys):
    """Not of S3: its server looks at none."""
    address = server.new_address()
    wrong = WRONG[server.scheme]
    speaks(server, **wrong)
    said = said_to(capsys, address)
    assert "denied the credentials" in said and next(iter(wrong))[:6] in said
    assert not any(secret in said for secret in [*wrong.values(), *server.secret])
    speaks(server)
    assert open_store(address).verify() == []


AMISS = {
    "az no account": ("az", {}, "AZURE_STORAGE_ACCOUNT_NAME"),
    "az bad key": (
        "az",
        {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": "SECRET it is"},
        "AZURE_STORAGE_ACCOUNT_KEY",
    ),
    "az no server": (
        "az",
        {
            "AZURE_STORAGE_ACCOUNT_NAME": "a",
            "AZURE_STORAGE_SAS_TOKEN": "sv=2021-08-06&sp=r&sig=SECRET%3D",
            "AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:1/a",
        },
        "no server was reached",
    ),
    "gs no file": ("gs", {"GOOGLE_APPLICATION_CREDENTIALS": "/nowhere/key.json"}, "No such file"),
    "gs key where its file should be": (
        "gs",
        {"GOOGLE_APPLICATION_CREDENTIALS": "-----BEGIN PRIVATE KEY----- SECRET: it is"},
        "No such file",
    ),
    "gs no key": ("gs", {"GOOGLE_SERVICE_ACCOUNT_KEY": '"SECRET"'}, "GOOGLE_APPLICATION_CREDENTIALS"),
    "gs no address": (
        "gs",
        {"GOOGLE_BEARER_TOKEN": "SECRET", "GOOGLE_BASE_URL": "user:SECRET@host"},
        "GOOGLE_BASE_URL",
    ),
    "s3 no address": (
        "s3",
        {
            "AWS_ACCESS_KEY_ID": "SECRET",
            "AWS_SECRET_ACCESS_KEY": "SECRET",
            "AWS_ENDPOINT_URL": "http://user:SECRET@host",
        },
        "AWS_ENDPOINT_URL",
    ),
    "s3 no server": (
        "s3",
        {
            "AWS_ACCESS_KEY_ID": "SECRET",
            "AWS_SECRET_ACCESS_KEY": "SECRET",
            "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        },
        "no server was reached",
    ),
}


@pytest.mark.parametrize("what", AMISS)
def test_settings_that_lead_nowhere_are_one_line_and_no_secret_is_in_it(monkeypatch, capsys, what):
    scheme, settings, expected = AMISS[what]
    monkeypatch.setattr(objects, "_PAUSE", 0.01)
    monkeypatch.setattr(cloud, "_RETRIES", 0)
    for name in os.environ:
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    cloud._bucket_client.cache_clear()
    said = said_to(capsys, f"{scheme}://bucket/store")
    assert expected in said and "SECRET" not in said


def test_the_emulator_of_azure_is_found_by_its_switch(provider, speaks, monkeypatch):
    """As the tools of Azure find it; its account is the one that every emulator has."""
    server = provider("az")
    address = server.new_address()
    speaks(server)
    files = objects.ObjectFolder(address)
    files.put_new("a", b"one")
    for name in server.settings():
        monkeypatch.delenv(name)
    told = {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": server.endpoint}
    for name, value in {
        **told,
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
    }.items():
        monkeypatch.setenv(name, value)
    cloud._bucket_client.cache_clear()
    assert objects.ObjectFolder(address).get("a") == b"one"
