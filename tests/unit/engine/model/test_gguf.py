"""Reading GGUF: what is there, and every way of not being whole."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.engine.model.gguf import GgufFile
from shared.errors import ModelFault
from tests.support.models import TinyGguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return TinyGguf().write(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


def read(tmp_path: Path, content: bytes) -> GgufFile:
    (tmp_path / "some.gguf").write_bytes(content)
    return GgufFile(tmp_path / "some.gguf")


def test_metadata_and_tensors(tmp_path: Path) -> None:
    tiny = TinyGguf()
    file = GgufFile(tiny.write(tmp_path / "tiny.gguf"))
    for key, value in tiny.fields.items():
        assert file.metadata[key] == (pytest.approx(value) if isinstance(value, float) else value)
    assert file.tensors.keys() == tiny.tensors.keys()
    for name, values in tiny.tensors.items():
        assert file.tensors[name].shape == values.shape
        assert np.array_equal(file.raw(file.tensors[name]).view(np.float32).reshape(values.shape), values)


@pytest.mark.parametrize("field", ["uint8", "int8", "uint16", "int16", "uint32", "int32", "float32", "bool", "uint64", "int64", "float64"])
def test_every_kind_of_field(tmp_path: Path, field: str) -> None:
    kinds = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "float32", "bool", None, None, "uint64", "int64", "float64"]
    kind = kinds.index(field)
    packed = struct.pack({7: "<?"}.get(kind, "<" + "BbHhIif?  Qqd"[kind]), 1)
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 2)
    one = struct.pack("<Q", 1) + b"a" + struct.pack("<I", kind) + packed
    many = struct.pack("<Q", 1) + b"b" + struct.pack("<IIQ", 9, kind, 3) + packed * 3
    assert read(tmp_path, header + one + many).metadata == {"a": 1, "b": [1, 1, 1]}


def test_not_a_gguf(tmp_path: Path) -> None:
    with pytest.raises(ModelFault, match=r"some\.gguf: not a GGUF file"):
        read(tmp_path, b"PK\3\4" + bytes(100))
    with pytest.raises(ModelFault, match="cannot be read"):
        read(tmp_path, b"")
    with pytest.raises(ModelFault, match="cannot be read"):
        GgufFile(tmp_path / "absent.gguf")


@pytest.mark.parametrize("version", [1, 4, 0x03000000])
def test_other_versions_and_byte_orders(tmp_path: Path, whole: bytes, version: int) -> None:
    with pytest.raises(ModelFault, match=f"version {version}"):
        read(tmp_path, whole[:4] + struct.pack("<I", version) + whole[8:])


def test_an_unknown_storage_type(tmp_path: Path, whole: bytes) -> None:
    name = b"output_norm.weight"
    at = whole.index(name) + len(name) + 4 + 8
    with pytest.raises(ModelFault, match="storage type 99") as fault:
        read(tmp_path, whole[:at] + struct.pack("<I", 99) + whole[at + 4 :])
    assert "Q4_K" in fault.value.remedy


@pytest.mark.parametrize("length", [2**63, 2**40])
def test_a_length_that_cannot_be(tmp_path: Path, length: int) -> None:
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    for field in (struct.pack("<Q", length), struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 4, length)):
        with pytest.raises(ModelFault, match="not a whole GGUF file"):
            read(tmp_path, header + field)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_truncated_file_is_never_believed(tmp_path: Path, whole: bytes, data: st.DataObject) -> None:
    with pytest.raises(ModelFault):
        read(tmp_path, whole[: data.draw(st.integers(0, len(whole) - 1))])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_headers_raise_nothing_else(tmp_path: Path, whole: bytes, data: st.DataObject) -> None:
    damaged = bytearray(whole[:20_000])
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(4, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        read(tmp_path, bytes(damaged) + whole[20_000:])
    except ModelFault as fault:
        assert fault.remedy
        assert "\n" not in fault.message
