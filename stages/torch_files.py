"""Safe reading of files written by torch.save: tensors only, and no storage longer than the file.

A pickle is a program. torch's weights-only loader runs only the instructions that build tensors; any other
content is an error here, and no setting turns this off.

That loader trusts the storage sizes in a file: a storage that is longer than its bytes, or absent, becomes a
tensor of uninitialised memory. So the pickle is first parsed without running it, and the size of every
storage is compared with the bytes in the file.

Border: a path in, tensors and plain values out; callers interpret their names.
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

ADVICE = "if you trust the file, load it with torch.load(path, weights_only=False) and save it as safetensors"
"""Advice in messages about a file that contains more than tensors."""
_MAGIC = 0x1950A86A20F9469CFC6C
"""First pickle of a file in the format before torch 1.6, which is no zip."""
_AT_ONCE = 1 << 20
"""Bytes of a zip member read at a time."""
_ITEMSIZES = {
    **dict.fromkeys(("Untyped", "Byte", "Char", "Bool", "QInt8", "QUInt8", "QUInt4x2", "QUInt2x4"), 1),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Float", "Int", "QInt32"), 4),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}
"""Bytes per element of torch's storage classes; newer dtypes have no class of their own and are untyped."""


def load_pickled(
    path: Path, error: type[MizarrError], advice: str = "fetch it again", *, mmap: bool = True
) -> Any:
    """Load a file written by torch.save: tensors on the CPU, in containers of plain values.

    Arguments:
        path: an existing file.
        error: class of the error that is raised.
        advice: next step in the message about a damaged file.
        mmap: whether to memory-map a zip file (torch 1.6 and later); such tensors change if the file does.

    Raises:
        error: for a pickle that does more than build tensors, and for a damaged file.
    """
    import torch

    require_content(path, error, advice)
    is_zip = zipfile.is_zipfile(path)
    try:
        if is_zip:
            _require_whole(path, stamp(path.stat()))
        else:
            _require_storages(path)
    # zipfile and the unpickler raise errors of many types for damaged bytes.
    except Exception as reason:
        raise error(_damaged(path, reason, advice)) from reason
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and is_zip)
    except pickle.UnpicklingError as reason:
        raise error(
            f"expected only tensors in {path}, found a pickle that would run other code "
            f"({_reason(reason)}); {ADVICE}"
        ) from reason
    # torch raises errors of many types for impossible shapes, strides and dtypes.
    except Exception as reason:
        raise error(_damaged(path, reason, advice)) from reason


def _damaged(path: Path, reason: Exception, advice: str) -> str:
    """Message about a file that cannot be read; reason: the error that reading raised."""
    return (
        f"expected a file that torch.save wrote at {path}, found one that cannot be read "
        f"({_reason(reason)}); {advice}"
    )


@lru_cache(maxsize=256)
def _require_whole(path: Path, stamp: Any) -> None:
    """Check that a zip file of torch.save has all bytes of its tensors.

    Arguments:
        path: the file.
        stamp: size and times of the file, a part of the cache key: an unchanged file is checked once.

    Raises:
        ValueError: for a damaged member, and for one whose size differs from that of its storage.
    """
    with zipfile.ZipFile(path) as archive:
        # The dict keeps the last of members with equal names; torch could read another, unchecked one.
        members = {member.filename: member for member in archive.infolist()}
        if len(members) < len(archive.infolist()):
            raise ValueError("its zip archive has two members of the same name")
        # With mmap torch takes a storage from its offset in the file, so its bytes must be there as they are.
        if any(member.compress_type != zipfile.ZIP_STORED for member in members.values()):
            raise ValueError("its zip archive has a compressed member, which torch.save never writes")
        if sum(member.file_size for member in members.values()) > path.stat().st_size:
            raise ValueError("the members of its zip archive are longer than the file")
        has_checksums = any(member.CRC for member in members.values())
        for member in members.values():
            # Without checksums (torch.serialization.set_crc32_options(False)) every CRC is 0; zipfile skips
            # the comparison only where the attribute is missing.
            if not has_checksums:
                del member.CRC
            with archive.open(member) as stream:
                # Reading to the end is the check: zipfile compares the CRC there.
                while stream.read(_AT_ONCE):
                    pass
        program = next((name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")), "")
        if not program:
            raise ValueError("its zip archive has no data.pkl")
        reader = _Storages(io.BytesIO(archive.read(program)))
        reader.load()
    folder = program.removesuffix(".pkl")
    for key, nbytes in reader.nbytes.items():
        stored_member = members.get(f"{folder}/{key}")
        if stored_member is None or stored_member.file_size != nbytes:
            present = "none" if stored_member is None else f"{stored_member.file_size} bytes"
            raise ValueError(
                f"its tensors need a storage {key!r:.40} of {nbytes} bytes, of which the file has {present}"
            )


def _require_storages(path: Path) -> None:
    """Raise ValueError for a file in the format before torch 1.6 whose storages are incomplete."""
    with path.open("rb") as file:
        # Pickles in order: magic number, protocol, system info, the object, the keys of the storages; then
        # the bytes of the storages.
        if _Storages(file).load() != _MAGIC:
            raise ValueError("it does not begin with the magic number of torch.save")
        for _ in range(2):
            _Storages(file).load()
        reader = _Storages(file)
        reader.load()
        keys = _Storages(file).load()
        remaining = path.stat().st_size - file.tell()
    if not isinstance(keys, list) or {_text(key) for key in keys} != set(reader.nbytes):
        raise ValueError("its list of storages does not match its tensors")
    # 8 bytes before each storage are its number of elements, which torch itself compares.
    if len(keys) != len(reader.nbytes) or sum(reader.nbytes.values()) + 8 * len(keys) > remaining:
        raise ValueError("the storages of its tensors are longer than the file")


class _StandIn:
    """Substitute for the objects that a pickle names: accepts what the unpickler does, and does nothing."""

    def __init__(self, *args: Any) -> None:
        pass

    def __call__(self, *args: Any) -> _StandIn:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """Accept an item, as the unpickler appends to lists."""

    def extend(self, values: Any) -> None:
        """Accept items, as the unpickler extends lists."""


@dataclass(frozen=True)
class _StorageKind:
    """A storage or tensor class that a pickle names.

    It is not callable: a pickle that calls such a class makes a tensor of uninitialised memory.
    """

    name: str
    """Name of the class in torch, such as "FloatStorage"."""


# The Python implementation: the C one allocates a memo table of whatever size the file states.
_Unpickler: Any = pickle._Unpickler


class _Storages(_Unpickler):  # type: ignore[misc]  # its base is a value to mypy
    """Parses a pickle without running it, and records the size of every storage."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, encoding="utf-8")
        self.nbytes: dict[str, int] = {}
        """Key of a storage in the file -> its size in bytes."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a substitute for the class or function that the pickle names, instead of importing it.

        Arguments:
            module: name of the module in the pickle.
            name: name of the object in the pickle.
        """
        is_kind = module in ("torch", "torch.storage") and (name.endswith("Storage") or name == "Tensor")
        return _StorageKind(name) if is_kind else _StandIn

    def persistent_load(self, saved: Any) -> Any:
        """Record the size of a tensor storage that the pickle refers to, and return a substitute.

        Arguments:
            saved: torch's persistent id: ("storage", class, key, device, number of elements).

        Raises:
            ValueError: for another entry, and for a storage with two sizes.
        """
        label, kind, key, _, count = saved[:5]
        if _text(label) != "storage" or not isinstance(kind, _StorageKind) or type(count) is not int:
            raise ValueError(f"its pickle refers to {_text(label)!r:.40} instead of the storage of a tensor")
        nbytes = count * _ITEMSIZES[kind.name.removesuffix("Storage")]
        if count < 0 or self.nbytes.setdefault(_text(key), nbytes) != nbytes:
            raise ValueError(f"its pickle gives two lengths for the storage {_text(key)!r:.40}")
        return _StandIn()


def _text(value: Any) -> str:
    """A string of a pickle as str; the pickle may store it as bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _reason(error: BaseException) -> str:
    """The sentence of an error that names the cause; torch's messages surround it with advice."""
    # The Python unpickler looks instructions up in a dict, so an unknown one is a KeyError.
    if isinstance(error, KeyError):
        return "its bytes are no pickle"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = next((line for line in lines if "Unsupported" in line or "not an allowed" in line), "")
    return (cause or next(iter(lines), type(error).__name__)).split(". ")[0][:200]
