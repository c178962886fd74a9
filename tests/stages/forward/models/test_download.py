"""Fetching from a hub, here a small server of our own: only what is needed, resumed, and each failure in one
line.
"""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mizarr.stages.forward.models import download
from mizarr.stages.forward.models.download import fetch, remote_files, wanted_files
from mizarr.stages.forward.models.files import resolve
from mizarr.store.errors import DownloadError, ModelNotFound

COMMIT = "c" * 40
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"\0" * 100_000,
    "pytorch_model.bin": b"\1" * 100_000,
    "README.md": b"# a card",
    "onnx/model.onnx": b"\2" * 100_000,
}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's protocol as its client needs to take one repository."""

    files = FILES
    status = 200
    refusal = ""
    asked: list[str] = []  # noqa: RUF012 - reset by the fixture
    cut: list[str] = []  # noqa: RUF012 - files whose connection breaks half-way, once
    broken: list[str] = []  # noqa: RUF012 - files that are not delivered

    def log_message(self, *arguments):
        """Quiet."""

    def do_HEAD(self):
        self.do_GET(head=True)

    def do_GET(self, head=False):
        path = self.path.partition("?")[0]
        if not head:
            self.asked.append(path)
        if self.status != 200:
            return self.answer(
                self.status, b"{}", head, {"X-Error-Code": self.refusal, "X-Error-Message": self.refusal}
            )
        if path.startswith("/api/models/org/name/tree"):
            listed = [
                {"type": "file", "path": n, "size": len(c), "oid": sha1(c), **lfs(n, c)}
                for n, c in self.files.items()
            ]
            return self.answer(200, json.dumps(listed).encode(), head)
        if path.startswith("/api/models/org/name"):
            siblings = [
                {"rfilename": n, "size": len(c), "blobId": sha1(c), **lfs(n, c)}
                for n, c in self.files.items()
            ]
            found = {
                "id": "org/name",
                "sha": COMMIT,
                "siblings": siblings,
                "private": False,
                "tags": [],
                "downloads": 0,
            }
            return self.answer(200, json.dumps(found).encode(), head)
        name = path.partition(f"/resolve/{COMMIT}/")[2]
        content = self.files[name]
        etag = hashlib.sha256(content).hexdigest() if lfs(name, content) else sha1(content)
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        if name in self.broken and not head:
            return self.answer(404, b"", head, {"X-Error-Code": "EntryNotFound"})
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        return self.answer(206 if start else 200, content[start:], head, headers)

    def answer(self, status, body, head, headers=None):
        self.send_response(status)
        for key, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(key, value)
        self.end_headers()
        if not head:
            name = self.path.rpartition("/")[2]
            half = name in self.cut
            self.wfile.write(body[: len(body) // 2] if half else body)
            if half:
                self.cut.remove(name)
                self.close_connection = True


def sha1(content):
    return hashlib.sha1(content).hexdigest()


def lfs(name, content):
    large = name.endswith((".safetensors", ".bin", ".onnx"))
    return (
        {
            "lfs": {
                "oid": hashlib.sha256(content).hexdigest(),
                "sha256": hashlib.sha256(content).hexdigest(),
                "size": len(content),
                "pointerSize": 130,
            }
        }
        if large
        else {}
    )


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The server, as the hub's client sees the real one; yields the handler to change what it answers."""
    handler = type("Handler", (Hub,), {"asked": [], "cut": [], "broken": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    from huggingface_hub import constants, hf_api

    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hf_api.api, "endpoint", endpoint)
    yield handler
    server.shutdown()
    server.server_close()


def test_only_what_a_forward_pass_reads_is_fetched_and_then_found(hub):
    found = fetch("org/name", progress=False)
    assert {path.name for path in found.directory.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
    }
    assert found.revision == COMMIT and found.weight_files[0].stat().st_size == 100_000
    assert resolve("org/name").directory == found.directory, "found again without the hub"


def test_what_is_there_is_not_fetched_again(hub):
    fetch("org/name", progress=False)
    hub.asked.clear()
    fetch("org/name", progress=False)
    assert not any("/resolve/" in path for path in hub.asked)


def test_the_commit_a_tag_stood_for_is_remembered(hub):
    fetch("org/name", "v1", progress=False)
    assert resolve("org/name", "v1").revision == COMMIT


def test_shards_are_taken_only_without_a_single_file():
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = "model.safetensors.index.json"
    others = ["consolidated.safetensors", "original/params.json", "optimizer.pt"]
    assert wanted_files(["config.json", index, *shards, *others]) == ["config.json", index, *shards]
    assert wanted_files(["config.json", index, *shards, "model.safetensors"]) == [
        "config.json",
        "model.safetensors",
    ]


def test_a_world_vocabulary_is_taken_only_without_a_tokenizer_json():
    world = "rwkv_vocab_v20230424.txt"
    others = [f"old/{world}", "rwkv_vocab/notes.txt", "hf_rwkv_tokenizer.py", "merges.txt"]
    found = wanted_files(["config.json", world, *others, "model.safetensors"])
    assert found == ["config.json", world, "model.safetensors"]
    assert wanted_files(["tokenizer.json", world]) == ["tokenizer.json"]


def test_files_of_torch_are_taken_only_without_safetensors():
    index, shards = "pytorch_model.bin.index.json", [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    others = ["config.json", "training_args.bin", "optimizer.bin"]
    assert wanted_files([*others, "pytorch_model.bin", "model.safetensors"])[1:] == ["model.safetensors"]
    assert wanted_files([*others, "pytorch_model.bin"])[1:] == ["pytorch_model.bin"]
    assert wanted_files([*others, index, *shards])[1:] == [index, *shards]


def test_a_repository_without_weights_is_refused_before_anything_is_fetched(hub):
    hub.files = {name: it for name, it in FILES.items() if not name.endswith((".safetensors", ".bin"))}
    hub.files["consolidated.pth"] = b"1"
    with pytest.raises(
        DownloadError, match=r"in the hub repository org/name, found consolidated.pth; look on the hub"
    ):
        fetch("org/name", progress=False)
    assert not any("/resolve/" in path for path in hub.asked)


@pytest.mark.parametrize(
    ("status", "refusal", "message"),
    [
        (
            404,
            "RepoNotFound",
            "found none named 'org/name'; check the spelling, and set HF_TOKEN",
        ),
        (
            403,
            "GatedRepo",
            "org/name is gated on the Hugging Face hub: accept its terms at https://huggingface.co/org/name",
        ),
        (404, "RevisionNotFound", "expected a branch, tag or commit of org/name, found 'v9'"),
    ],
)
def test_what_the_hub_refuses_is_told_apart(hub, status, refusal, message):
    hub.status, hub.refusal = status, refusal
    with pytest.raises(ModelNotFound, match=message):
        fetch("org/name", "v9", progress=False)


def test_a_name_that_is_no_hub_id_is_refused():
    with pytest.raises(ModelNotFound, match="expected a hub id such as org/name, found 'a/b/c'"):
        fetch("a/b/c", progress=False)


def test_without_a_connection_the_error_is_one_line(hub, monkeypatch):
    from huggingface_hub import HfApi

    def unreachable(*arguments, **options):
        raise ConnectionError("Name or service not known\n  a long traceback follows")

    monkeypatch.setattr(HfApi, "model_info", unreachable)
    with pytest.raises(DownloadError) as error:
        fetch("org/name", progress=False)
    assert str(error.value) == (
        "the download of org/name from the Hugging Face hub failed: Name or service not known; finished "
        "files are kept, so run the same command again when you are online"
    )


def test_a_disk_too_small_is_noticed_before_the_download(hub, monkeypatch):
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(
        DownloadError, match=r"expected 100kB of free disk space in .* to download org/name, found 1kB"
    ):
        fetch("org/name", progress=False)
    assert not any("/resolve/" in path for path in hub.asked)


def test_a_connection_that_breaks_is_tried_again(hub):
    hub.cut.append("model.safetensors")
    found = fetch("org/name", progress=False)
    assert found.weight_files[0].read_bytes() == FILES["model.safetensors"]
    assert sum(path.endswith("/model.safetensors") for path in hub.asked) == 2


def test_files_that_arrived_before_an_interruption_are_kept(hub):
    hub.broken.append("model.safetensors")
    with pytest.raises(DownloadError, match="finished files are kept"):
        fetch("org/name", progress=False)
    hub.broken.clear()
    hub.asked.clear()
    fetch("org/name", progress=False)
    assert [path.rpartition("/")[2] for path in hub.asked if "/resolve/" in path] == ["model.safetensors"]


def test_sizes_are_known_before_anything_is_fetched(hub):
    commit, sizes = remote_files("org/name")
    assert commit == COMMIT and sizes["model.safetensors"] == 100_000 and "README.md" not in sizes
