"""What becomes of a store that was captured compressed: killed, collected, merged, read from a bucket. Each
time contents are those of a plain capture in a store of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import xarray as xr

from mizarr import capture, open_store
from mizarr.store.files import cloud
from mizarr.store.runs import shards
from mizarr.store.runs.packed import PackedTokens
from mizarr.workflows.cli import run
from tests.store.object_servers import KEYS, Proxy, new_bucket, s3_server

from ..random_models import VOCAB

HOOKS = ["blocks.*.hook_resid_post", "blocks.*.attn.hook_z"]
OPTIONS = {"segment_tokens": 16, "batch_tokens": 32, "progress": False}


def made(model, tokens, address, hooks=HOOKS, codec="zstd", **options):
    store = open_store(address, durability="process")
    return store, capture(model, tokens, hooks, store=store, codec=codec, **{**OPTIONS, **options})


def contents(store):
    return {record.key: (record.label, record.content) for record in store.records()}


def codecs(store):
    return {entry.layout(name).codec for entry in store.entries() for name in entry.specs}


@pytest.fixture(scope="module")
def plain(model, tokens, tmp_path_factory):
    """Contents and numbers of a plain capture."""
    store, found = made(model, tokens, tmp_path_factory.mktemp("plain"), codec=None)
    assert codecs(store) == {""}
    return contents(store), found.load()


@pytest.mark.parametrize("options", [{"order": "layer"}, {"batch_tokens": 7}], ids=str)
def test_in_any_order_of_computing(model, tokens, tmp_path, plain, options):
    store, found = made(model, tokens, tmp_path, **options)
    assert contents(store) == plain[0]
    assert codecs(store) == {"zstd"}
    xr.testing.assert_identical(found.load(), plain[1])
    assert store.verify() == []


LIVES = """
import json, os, signal, sys
import mizarr
from mizarr.store.files.local import LocalFolder

folder, address, prompts, hooks, options = json.loads(sys.argv[1])
model = mizarr.Model.from_pretrained(folder)

def life(calls, codec):
    '''Capture in a process of its own, which is killed before it names its calls-th record.'''
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    put, left = LocalFolder.put_new, [calls]

    def counted(self, name, data):
        if "/seg/" in name and name.endswith(".json"):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
        return put(self, name, data)

    LocalFolder.put_new = counted
    store = mizarr.open_store(address, durability="process")
    mizarr.capture(model, prompts, hooks, store=store, codec=codec, **options)
    os._exit(0)

ends = [life(1, "zstd"), life(2, None)]
store = mizarr.open_store(address)
told = len(store.gc(grace=0).removed)
print(json.dumps([ends + [life(1, "none"), life(99, "zstd")], told]))
"""


def test_killed_again_and_again_collected_and_resumed_whatever_codec_is_asked(model, tokens, tmp_path, plain):
    """Shards stand without their record; gc comes between the lives, with no grace."""
    prompts = [tokens.prompt(n).tolist() for n in range(tokens.n_prompts)]
    told = json.dumps([model.name, str(tmp_path / "s"), prompts, HOOKS, OPTIONS])
    command = [sys.executable, "-c", LIVES, told]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0] == [*[-signal.SIGKILL] * 3, 0], done.stderr
    store = open_store(tmp_path / "s")
    assert contents(store) == plain[0]
    assert codecs(store) == {"zstd"}
    assert store.verify() == []
    xr.testing.assert_identical(next(store.entries()).open().load(), plain[1])


def test_gc_takes_what_is_unused_and_a_capture_makes_it_again(model, tokens, tmp_path, plain):
    store, _ = made(model, tokens, tmp_path)
    (entry,) = store.entries()
    stray = store.path / entry.path / "resid_post/c/0/0/.0.123.abcd"
    stray.write_bytes(b"left behind")
    for file in store.path.rglob("*"):
        os.utime(file, (0, 0))
    store.index.clear()
    assert store.gc().leftovers == (str(stray.relative_to(store.path)),)
    assert contents(store) == plain[0]
    assert store.verify() == []
    assert store.gc(quota=0).removed == (entry.path,)
    assert contents(store) == {}
    store, found = made(model, tokens, tmp_path)
    assert contents(store) == plain[0]
    xr.testing.assert_identical(found.load(), plain[1])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_merged_with_a_plain_store_it_is_the_whole(model, tokens, tmp_path, plain, capsys, order):
    """Of the run each source has one array, in its own codec; the first source makes the run."""
    made(model, tokens, tmp_path / "0", hooks=HOOKS[0])
    made(model, tokens, tmp_path / "1", hooks=HOOKS[1], codec=None)
    sources = [str(tmp_path / str(number)) for number in order]
    assert run(["merge", *sources, str(tmp_path / "all"), "--quiet"]) == 0, capsys.readouterr().err
    store = open_store(tmp_path / "all")
    assert contents(store) == plain[0]
    (entry,) = store.entries()
    assert [entry.layout(name).codec for name in ("resid_post", "z")] == ["zstd", ""]
    xr.testing.assert_identical(entry.open().load(), plain[1])
    assert store.verify() == []


def test_a_bucket_is_written_and_read_by_ranges(model, tmp_path, monkeypatch):
    """Of rows here and there come their chunks, not the shard; it is large enough that ranges stay apart."""
    monkeypatch.setattr(shards, "CHUNK_BYTES", 1 << 16)
    monkeypatch.setenv("MIZARR_CACHE", str(tmp_path / "cache"))
    cloud._bucket_client.cache_clear()
    drawn = np.random.default_rng(3)
    prompts = PackedTokens.from_lists(drawn.integers(0, VOCAB, (320, 50)).tolist())
    how = {"hooks": "hook_embed", "segment_tokens": 16_000, "batch_tokens": 8000}
    near, whole = made(model, prompts, tmp_path / "near", codec=None, **how)
    with s3_server() as endpoint, Proxy(endpoint) as proxy:
        for name, value in {"AWS_ENDPOINT_URL": proxy.endpoint, "AWS_REGION": "us-east-1", **KEYS}.items():
            monkeypatch.setenv(name, value)
        address = f"s3://{new_bucket(endpoint)}/store"
        store, _ = made(model, prompts, address, **how)
        assert contents(store) == contents(near)
        assert codecs(store) == {"zstd"}
        cloud._bucket_client.cache_clear()
        monkeypatch.setenv("MIZARR_CACHE", str(tmp_path / "fresh"))
        far = next(open_store(address, mode="r").entries()).open()
        far["token_id"].load()
        before, some = proxy.sent, [3, 40, 15_999]
        found = far["embed"].isel(token=some).load()
        np.testing.assert_array_equal(found, whole["embed"].isel(token=some))
        (entry,) = near.entries()
        (size,) = (near.files.measure(name)[0] for name in near.files.list(f"{entry.path}/embed/c"))
        assert 0 < proxy.sent - before < size / 4
        xr.testing.assert_equal(far["embed"].load(), whole["embed"].load())
        assert open_store(address).verify() == []
    cloud._bucket_client.cache_clear()
