"""Every length in a GGUF file is compared with the file's own, and what is whole is read as the format's
package reads it.
"""

from __future__ import annotations

import random
import struct
import tracemalloc
from time import perf_counter

import numpy as np
import pytest

from mizarr.stages.forward.models.files import resolve
from mizarr.store.errors import MizarrError, WeightsError

gguf = pytest.importorskip("gguf")
from mizarr.stages.forward.checkpoints.gguf.header import header_of  # noqa: E402 - needs gguf
from mizarr.stages.forward.checkpoints.gguf.parsing import read_gguf  # noqa: E402

HUGE = (2**23, 2**40, 2**63, 2**64 - 1)


def text(value):
    return struct.pack("<Q", len(value)) + value


def field(name, kind, value):
    return text(name) + struct.pack("<I", kind) + value


def tensor(name, shape, kind=0, offset=0, *, axes=None):
    sizes = b"".join(struct.pack("<Q", size) for size in shape)
    count = struct.pack("<I", len(shape) if axes is None else axes)
    return text(name) + count + sizes + struct.pack("<IQ", kind, offset)


def whole(fields=(), tensors=(), *, counts=None, version=3, data=bytes(256), magic=b"GGUF"):
    n_tensors, n_fields = counts or (len(tensors), len(fields))
    head = magic + struct.pack("<IQQ", version, n_tensors, n_fields) + b"".join(fields) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def head_of(array):
    """A file that ends behind its one field, an array."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field(b"a", 9, array)


ARRAY = struct.Struct("<IQ")
DAMAGED = {
    **{f"array of {n} numbers": whole([field(b"a", 9, ARRAY.pack(4, n))]) for n in HUGE},
    **{f"array of {n} bytes": whole([field(b"a", 9, ARRAY.pack(0, n))]) for n in HUGE},
    **{f"array of {n} texts": whole([field(b"a", 9, ARRAY.pack(8, n))]) for n in HUGE},
    **{f"text of {n} bytes": whole([field(b"a", 8, struct.pack("<Q", n))]) for n in HUGE},
    **{f"name of {n} bytes": whole([struct.pack("<Q", n)], counts=(0, 1)) for n in HUGE},
    **{f"{n} fields": whole(counts=(0, n)) for n in HUGE},
    **{f"{n} tensors": whole(counts=(n, 0)) for n in HUGE},
    **{f"{n} numbers": whole(tensors=[tensor(b"t", (n,))]) for n in HUGE},
    **{f"offset {n}": whole(tensors=[tensor(b"t", (4,), offset=n)]) for n in HUGE},
    "offset that wraps to the header": whole(tensors=[tensor(b"t", (4,), offset=2**64 - 96)]),
    "sizes that wrap": whole(tensors=[tensor(b"t", (2**32, 2**32))]),
    "sizes that wrap to four": whole(tensors=[tensor(b"t", (2**62 + 1, 4))]),
    "huge beside an empty axis": whole(tensors=[tensor(b"t", (2**40, 0, 2**40))]),
    "part of a block without axes": whole(tensors=[tensor(b"t", (), kind=8)]),
    "many axes": whole(tensors=[tensor(b"t", (1,) * 5)]),
    "2**32 axes": whole(tensors=[tensor(b"t", (1,), axes=2**32 - 1)]),
    "behind the end": whole(tensors=[tensor(b"t", (60,), offset=32)]),
    "overlapping": whole(tensors=[tensor(b"t", (16,)), tensor(b"u", (16,), offset=32)]),
    "the same bytes": whole(tensors=[tensor(b"t", (16,)), tensor(b"u", (16,))]),
    "part of a block": whole(tensors=[tensor(b"t", (33,), kind=8)]),
    "a kind there is not": whole(tensors=[tensor(b"t", (4,), kind=99)]),
    "a type there is not": whole([field(b"a", 99, b"")]),
    "arrays in arrays": whole([field(b"a", 9, ARRAY.pack(9, 1) + ARRAY.pack(9, 1) * 1000)]),
    "two fields of a name": whole([field(b"a", 0, b"1"), field(b"a", 0, b"2")]),
    "two tensors of a name": whole(tensors=[tensor(b"t", (4,)), tensor(b"t", (4,), offset=32)]),
    "no UTF-8 in an array": whole([field(b"a", 9, ARRAY.pack(8, 2) + text(b"a") + text(b"\xff"))]),
    "a file that ends in a length of an array": head_of(ARRAY.pack(8, 2) + text(b"a" * 9) + b"12"),
    "a file that ends in a text of an array": head_of(ARRAY.pack(8, 2) + text(b"") + text(b"a" * 9)[:-1]),
    "no UTF-8": whole([field(b"\xff", 0, b"1")]),
    "alignment 0": whole([field(b"general.alignment", 4, bytes(4))]),
    "alignment 24": whole([field(b"general.alignment", 4, struct.pack("<I", 24))]),
    "alignment 2**40": whole(
        [field(b"general.alignment", 10, struct.pack("<Q", 2**40))], [tensor(b"t", (4,))]
    ),
    "alignment of text": whole([field(b"general.alignment", 8, text(b"32"))]),
    "version 1": whole(version=1),
    "version 4": whole(version=4),
    "big-endian": whole(version=3 << 24),
    "another format": whole(magic=b"GGML"),
    "a letter": b"G",
    "a version": b"GGUF\x03",
    "the head alone": b"GGUF" + struct.pack("<IQ", 3, 1),
}  # fmt: skip


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_lengths_beyond_the_file_are_refused_at_once(data, tmp_path):
    (tmp_path / "a.gguf").write_bytes(data)
    tracemalloc.start()
    start = perf_counter()
    try:
        with pytest.raises(WeightsError, match=r"expected a GGUF file at .*a\.gguf") as caught:
            header_of((tmp_path / "a.gguf",))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20 and perf_counter() - start < 5
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def save_every_kind(path):
    """A file with values of every type, arrays of them, and tensors plain and quantised."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -3)
    writer.add_uint16("a.u16", 65_000)
    writer.add_int32("a.i32", -70_000)
    writer.add_uint64("a.u64", 2**63 + 1)
    writer.add_float32("a.f32", 0.1)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "día")
    writer.add_array("a.texts", ["one", "", "três"])
    writer.add_array("a.numbers", [1.5, 2.5])
    writer.add_array("a.flags", [True, False])
    writer.add_tensor("plain", rng.standard_normal((3, 4)).astype("f4"))
    writer.add_tensor("half", rng.standard_normal((2, 3, 5)).astype("f2"))
    for kind in ("Q8_0", "Q4_1", "BF16"):
        number = gguf.GGMLQuantizationType[kind]
        rows = gguf.quantize(rng.standard_normal((4, 64)).astype("f4"), number)
        writer.add_tensor(kind, rows, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def same_as_the_package(path):
    """Metadata and tensors of a file are those the format's package reads."""
    fields, tensors = read_gguf(path)
    expected = gguf.GGUFReader(path)
    values = {name: entry.contents() for name, entry in expected.fields.items() if name[:5] != "GGUF."}
    assert list(fields) == list(values)
    for name, value in values.items():
        ours = fields[name].tolist() if isinstance(fields[name], np.ndarray) else fields[name]
        # 1, 1.0 and True are equal, and NaN is not.
        assert repr(ours) == repr(value)
    assert list(tensors) == [entry.name for entry in expected.tensors]
    for entry in expected.tensors:
        ours = tensors[entry.name]
        assert ours.kind == entry.tensor_type.name
        assert ours.shape == tuple(int(size) for size in reversed(entry.shape.tolist()))
        assert ours.data.dtype == entry.data.dtype
        np.testing.assert_array_equal(ours.data, entry.data)
    return fields


def test_what_is_whole_is_read_as_the_package_of_the_format_reads_it(tmp_path):
    save_every_kind(tmp_path / "a.gguf")
    fields = same_as_the_package(tmp_path / "a.gguf")
    assert fields["a.texts"] == ["one", "", "três"] and fields["a.u64"] == 2**63 + 1
    assert fields["a.numbers"].tolist() == [1.5, 2.5] and fields["a.flags"].tolist() == [True, False]
    assert fields["a.bool"] is True and type(fields["a.u8"]) is int


def mutated(data, end, rng):
    """A file with one change or two among the first `end` bytes: bytes, lengths, pieces lost or repeated."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(end)
        match rng.choice([0, 0, 0, 1, 1, 1, 2, 3, 4, 5]):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                number = rng.choice([0, 1, 2, 9, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1])
                data[at : at + 8] = struct.pack("<Q", number)
            case 3:
                data[at : at + 4] = struct.pack("<I", rng.randrange(16))
            case 4:
                del data[at : at + rng.randint(1, 40)]
            case 5:
                data[at:at] = data[at : at + rng.randint(1, 40)]
    return bytes(data[: rng.randrange(len(data))] if rng.random() < 0.05 else data)


def test_headers_changed_at_random_are_read_as_the_package_reads_them_or_refused_in_a_line(tmp_path):
    save_every_kind(tmp_path / "whole.gguf")
    data = (tmp_path / "whole.gguf").read_bytes()
    end = data.index(b"BF16") + 40
    rng, accepted, path = random.Random(0), 0, tmp_path / "a.gguf"
    for _ in range(2000):
        path.write_bytes(mutated(data, end, rng) or b"G")
        tracemalloc.start()
        start, is_read = perf_counter(), False
        try:
            read_gguf(path)
        except (ValueError, KeyError) as error:
            line = str(error)
        else:
            is_read, line = True, ""
            accepted += 1
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert "\n" not in line and len(line) < 400
        assert peak < 10 * path.stat().st_size + (64 << 10) and perf_counter() - start < 2
        if is_read:
            same_as_the_package(path)
    assert 100 < accepted < 1900


def test_arrays_take_the_memory_of_the_file(tmp_path):
    """Numbers of Python's own would take 8 to 20 times as much."""
    count = 1 << 20
    path = tmp_path / "a.gguf"
    path.write_bytes(whole([field(b"a", 9, ARRAY.pack(2, count) + np.arange(count, dtype="<u2").tobytes())]))
    read_gguf(path)  # imports
    tracemalloc.start()
    try:
        fields, _ = read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 3 * path.stat().st_size
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(fields["a"], np.arange(count, dtype="<u2"))


@pytest.mark.parametrize("place", ["one", "part"])
@pytest.mark.parametrize(
    "content", [None, "link", "folder", b"", b"version https://git-lfs.github.com/spec/v1"]
)
def test_a_file_without_content_is_told_in_one_line(place, content, tmp_path):
    name = "m.gguf" if place == "one" else "m-00001-of-00002.gguf"
    path = tmp_path / ("m.gguf" if place == "one" else "m-00002-of-00002.gguf")
    if place == "part":
        (tmp_path / name).write_bytes(whole())
    if content == "link":
        path.symlink_to(tmp_path / "nowhere")
    elif content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(MizarrError) as caught:
        _ = resolve(tmp_path / name).checkpoint.entries
    assert "\n" not in str(caught.value) and path.name in str(caught.value)
