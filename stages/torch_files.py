"""Files that torch.save wrote, read by torch's weights-only loader within the lengths of the file.

A pickle is a program. The loader runs none but what makes tensors, and whatever else stands in a file is an
error here; nothing in a setting turns that off.

The loader believes the lengths in a file, though: a storage longer than its bytes in the file, or one that
the file does not hold, becomes a tensor of whatever lies in memory. So the pickle is first read without
running it, and every storage it takes is compared with the bytes there are.

Border: a path in, tensors and plain values out; what they mean is known elsewhere.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..store.errors import MizarrError
from ..store.exchange.outside import require_content
from ..store.files import stamp

__all__ = ["ADVICE", "load_pickled"]

ADVICE = "load it where you trust it, and save it as safetensors"
"""What to do about a file that holds more than tensors."""
_MAGIC = 0x1950A86A20F9469CFC6C  # of files without a zip, before torch 1.6
_AT_ONCE = 1 << 20  # bytes of a member that are read at once
_ITEMSIZES = {
    **dict.fromkeys(("Untyped", "Byte", "Char", "Bool", "QInt8", "QUInt8", "QUInt4x2", "QUInt2x4"), 1),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Float", "Int", "QInt32"), 4),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}
"""Bytes of an element of torch's classes of storages; dtypes newer than these classes are stored untyped."""


def load_pickled(
    path: Path, error: type[MizarrError], advice: str = "fetch it again", *, mmap: bool = True
) -> Any:
    """What torch.save wrote, on the CPU: tensors, and plain values around them.

    path: of a file that is there.
    error: class of what is raised.
    advice: what to do about a file that is damaged.
    mmap: map the file where it is a zip (torch 1.6 and later); tensors then are what the file becomes.
    Raises `error` for a pickle that does more than make tensors, and for a file that is damaged.
    """
    import torch

    require_content(path, error, advice)
    is_zip = zipfile.is_zipfile(path)
    try:
        if is_zip:
            _require_whole(path, stamp(path.stat()))
        else:
            _require_storages(path)
    # Whatever zipfile and an unpickler raise for bytes of any kind.
    except Exception as reason:
        raise error(_damaged(path, reason, advice)) from reason
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and is_zip)
    except pickle.UnpicklingError as reason:
        raise error(
            f"expected nothing but tensors in {path}, found a pickle that does more ({_reason(reason)}); "
            f"{ADVICE}"
        ) from reason
    # Whatever torch raises for what a tensor cannot be.
    except Exception as reason:
        raise error(_damaged(path, reason, advice)) from reason


def _damaged(path: Path, reason: Exception, advice: str) -> str:
    return (
        f"expected a file that torch.save wrote at {path}, found one that cannot be read "
        f"({_reason(reason)}); {advice}"
    )


@lru_cache(maxsize=256)
def _require_whole(path: Path, stamp: Any) -> None:
    """ValueError for a zip of torch.save whose members are damaged, or shorter than the storages in it.

    stamp: of the file; one that keeps it is not read again.
    """
    with zipfile.ZipFile(path) as archive:
        members = {member.filename: member for member in archive.infolist()}
        if len(members) < len(archive.infolist()):
            raise ValueError("two members of one name")
        if any(member.compress_type != zipfile.ZIP_STORED for member in members.values()):
            raise ValueError("a compressed member, which torch.save writes none of")
        if sum(member.file_size for member in members.values()) > path.stat().st_size:
            raise ValueError("members that are longer than the file")
        has_checksums = any(member.CRC for member in members.values())
        for member in members.values():
            if not has_checksums:  # torch.serialization.set_crc32_options(False)
                del member.CRC
            with archive.open(member) as stream:  # zipfile compares the checksum at the end
                while stream.read(_AT_ONCE):
                    pass
        program = next((name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")), "")
        if not program:
            raise ValueError("no data.pkl")
        reader = _Storages(io.BytesIO(archive.read(program)))
        reader.load()
    folder = program.removesuffix(".pkl")
    for key, nbytes in reader.nbytes.items():
        stored = members.get(f"{folder}/{key}")
        if stored is None or stored.file_size != nbytes:
            there = "none" if stored is None else f"{stored.file_size} bytes"
            raise ValueError(f"a storage {key!r:.40} of {nbytes} bytes, of which the file has {there}")


def _require_storages(path: Path) -> None:
    """ValueError for a file of torch.save before torch 1.6 that does not hold the storages it speaks of."""
    with path.open("rb") as file:
        # Magic number, protocol, system, the object, and the keys of the storages that follow it.
        if _Storages(file).load() != _MAGIC:
            raise ValueError("no magic number of torch.save")
        for _ in range(2):
            _Storages(file).load()
        reader = _Storages(file)
        reader.load()
        keys = _Storages(file).load()
        rest = path.stat().st_size - file.tell()
    if not isinstance(keys, list) or {_text(key) for key in keys} != set(reader.nbytes):
        raise ValueError("other storages than its tensors take")
    # Each is written behind its length in 8 bytes, which torch compares.
    if len(keys) != len(reader.nbytes) or sum(reader.nbytes.values()) + 8 * len(keys) > rest:
        raise ValueError("storages that are longer than the file")


class _StandIn:
    """Whatever a pickle names: it takes what is done to it, and does nothing."""

    def __init__(self, *args: Any) -> None:
        pass

    def __call__(self, *args: Any) -> _StandIn:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """As a list takes it."""

    def extend(self, values: Any) -> None:
        """As a list takes them."""


@dataclass(frozen=True)
class _StorageKind:
    """A class of storages, or of tensors, that a pickle names. It cannot be called: whoever calls one without
    a file gets memory as it is."""

    name: str
    """In torch."""


# The unpickler in Python: that in C makes room for as many remembered values as a file says there are.
_Unpickler: Any = pickle._Unpickler


class _Storages(_Unpickler):  # type: ignore[misc]  # its base is a value to mypy
    """Reads which storages a pickle takes, and runs nothing of it."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, encoding="utf-8")
        self.nbytes: dict[str, int] = {}
        """Bytes of every storage by its key in the file."""

    def find_class(self, module: str, name: str) -> Any:
        """A stand-in for what a pickle names."""
        is_kind = module in ("torch", "torch.storage") and (name.endswith("Storage") or name == "Tensor")
        return _StorageKind(name) if is_kind else _StandIn

    def persistent_load(self, saved: Any) -> Any:
        """A stand-in for a storage; its length is noted. ValueError for one of two lengths."""
        label, kind, key, _, count = saved[:5]
        if _text(label) != "storage" or not isinstance(kind, _StorageKind) or type(count) is not int:
            raise ValueError(f"{_text(label)!r:.40} where a storage was expected")
        nbytes = count * _ITEMSIZES[kind.name.removesuffix("Storage")]
        if count < 0 or self.nbytes.setdefault(_text(key), nbytes) != nbytes:
            raise ValueError(f"a storage {_text(key)!r:.40} of several lengths")
        return _StandIn()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _reason(error: BaseException) -> str:
    """The one sentence of torch's advice that says what was found."""
    if isinstance(error, KeyError):  # an unpickler's, of an instruction that it does not have
        return "bytes that are no pickle"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if "Unsupported" in line or "not an allowed" in line), "")
    return (told or next(iter(lines), type(error).__name__)).split(". ")[0][:200]
