"""A model's files: where they lie, which there are, and which model they are.

A name is a directory, "specimen" (the model that ships with mizarr), or a hub id whose snapshot is in the local Hugging Face cache;
nothing is downloaded here (`download.py` does). Torch-free. The identity of a model is the content of its files, never its name: two
models under one name are two models, and one model under two names is one.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...store.digest import digest
from ...store.errors import ConfigError, ModelNotFound, WeightsError
from ...store.index import file_digests
from ...store.keys import ModelIdentity
from .config import TransformerConfig
from .tokens import Tokenizer

SPECIMEN = Path(__file__).parent / "specimen"
FORWARD_VERSION = "transformer/1"
"""Declared version of the forward pass: moves when its numbers move."""
_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$|^[\w-]+$")
_SHA256 = re.compile(r"^[0-9a-f]{64}$")


@dataclass(frozen=True)
class ModelFiles:
    """The directory of a model, found."""

    name: str
    """As it was asked for; part of no key."""
    directory: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json, parsed; ConfigError if it is missing or no JSON object."""
        path = self.directory / "config.json"
        if not path.is_file():
            raise ConfigError(f"expected a config.json in {self.directory}, found none; is this a model's directory?")
        try:
            parsed = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"expected JSON in {path}, found {error}") from error
        if not isinstance(parsed, dict):
            raise ConfigError(f"expected a JSON object in {path}, found {type(parsed).__name__}")
        return parsed

    @cached_property
    def weight_files(self) -> tuple[Path, ...]:
        """The safetensors files, in the order of their names; WeightsError naming what is missing."""
        index, single = self.directory / "model.safetensors.index.json", self.directory / "model.safetensors"
        if index.is_file():
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values()))
            missing = [shard for shard in shards if not (self.directory / shard).is_file()]
            if missing or not shards:
                raise WeightsError(f"{index} names {len(shards)} shards, of which {len(missing)} are missing: expected {missing[0] if missing else 'some'!r} beside it; fetch the model again")
            return tuple(self.directory / shard for shard in shards)
        if single.is_file():
            return (single,)
        others = sorted(path.name for path in self.directory.glob("*") if path.suffix in (".bin", ".safetensors", ".gguf", ".pth"))
        raise WeightsError(f"expected model.safetensors or model.safetensors.index.json in {self.directory}, found {', '.join(others) or 'no weights'}; convert the checkpoint to safetensors")

    def transformer_config(self) -> TransformerConfig:
        """The axes of this model: of its family, or worked out from config.json and tensor names (ConfigError lists what did not fit)."""
        from .autoconfig import transformer_config

        return transformer_config(self.config, self.weight_files, source=str(self.directory / "config.json"))

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer beside the weights, or None."""
        return Tokenizer.from_directory(self.directory)

    def identity(self, dtype: str = "float32", attention: str = "sdpa") -> ModelIdentity:
        """What results of this model are keyed by; files are hashed once and remembered."""
        return ModelIdentity(self.weights_digest, self.transformer_config().digest, FORWARD_VERSION, dtype, attention)

    @cached_property
    def weights_digest(self) -> str:
        """Digest of the weight files by content, whatever they are called."""
        return "sha256:" + digest("weights", sorted(_file_digest(path) for path in self.weight_files))


def resolve(name: str, revision: str | None = None) -> ModelFiles:
    """Find a model's directory by path, "specimen" or hub id; ModelNotFound says how to get it otherwise."""
    directory = Path(name).expanduser()
    if name == "specimen":
        return ModelFiles(name, SPECIMEN)
    if directory.is_dir():
        return ModelFiles(name, directory)
    if directory.exists():
        raise ModelNotFound(f"expected a model's directory, found the file {name!r}; give the directory it is in")
    if not _HUB_ID.match(name):
        raise ModelNotFound(f"expected a directory or a hub id such as 'org/name', found {name!r}, which is neither")
    snapshot = cached_snapshot(name, revision)
    if snapshot is None:
        at = f" at revision {revision!r}" if revision else ""
        raise ModelNotFound(f"model {name!r}{at} is neither a directory nor in the local hub cache; get it with `mizarr models fetch {name}`")
    return ModelFiles(name, snapshot)


def cached_snapshot(name: str, revision: str | None) -> Path | None:
    """The directory of a hub model in the local cache, None if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def _file_digest(path: Path) -> str:
    """sha256 of a file: the hub cache names large files by it; others are hashed and remembered by inode, size and times."""
    target = path.resolve()
    if path.is_symlink() and target.parent.name == "blobs" and _SHA256.match(target.name):
        return f"sha256:{target.name}"
    return file_digests().digest(target)
