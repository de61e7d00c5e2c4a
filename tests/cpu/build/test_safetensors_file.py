"""Files by position: what is refused, and that pieces in any order give the file that the safetensors library reads."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptoss_trt.build_engine.safetensors_file import CheckpointError, TensorReader, TensorWriter, open_file


def write_raw(path: Path, header: Any, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(first: int, last: int, shape: list[int], dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry(0, 4, [4])}, b"123", r"truncated: the header describes \d+ bytes, the file has"),
        ({"a": entry(0, 4, [4])}, b"12345", "data after the last tensor"),
        ({"a": entry(0, 4, [4]), "b": entry(2, 6, [4])}, b"123456", "tensor b at byte .* overlaps a"),
        ({"a": entry(0, 2, [2]), "b": entry(4, 6, [2])}, b"123456", "tensor b .* leaves a gap after a"),
        ({"a": entry(0, 4, [3])}, b"1234", r"tensor a: U8 \[3\] takes 3 bytes, data_offsets give 4"),
        ({"a": entry(0, 4, [-4])}, b"1234", r"corrupt shape \[-4\]"),
        ({"a": entry(0, 4, [True])}, b"1234", "corrupt shape"),
        ({"a": entry(0, 4, [4], "FP4")}, b"1234", "unknown dtype 'FP4'"),
        ({"a": {"dtype": "U8"}}, b"", "corrupt header entry"),
        (b'{"a": 1', b"", "corrupt header"),
        (b"\xff\xfe", b"", "corrupt header"),
        (b"[]", b"", "list, not an object"),
        (b'{"a": {}, "a": {}}', b"", "names 'a' twice"),
    ],
)
def test_bad_files_are_refused(header: Any, data: bytes, message: str, tmp_path: Path) -> None:
    path = write_raw(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as error:
        open_file(path)
    assert "bad.safetensors" in str(error.value)


@pytest.mark.parametrize("content", [b"", b"1234", struct.pack("<Q", 1000) + b"{}", struct.pack("<Q", 2**63)])
def test_files_without_a_whole_header(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "short.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="truncated or not safetensors"):
        open_file(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.safetensors: No such file"):
        open_file(tmp_path / "none.safetensors")


def test_reads_what_the_library_wrote(tmp_path: Path) -> None:
    tensors = {
        "bf16": torch.randn(5, 3).to(torch.bfloat16),
        "e4m3": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5),
        "bytes": torch.arange(7, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    entries = open_file(tmp_path / "x.safetensors")
    reader = TensorReader()
    for name, tensor in tensors.items():
        assert torch.equal(reader.read(name, entries[name]).float(), tensor.float())
    assert torch.equal(reader.read("bf16", entries["bf16"], 1, 4), tensors["bf16"][1:4])
    assert reader.bytes_read == sum(tensor.nbytes for tensor in tensors.values()) + 18
    reader.close()


def test_a_dtype_that_no_model_uses(tmp_path: Path) -> None:
    save_file({"i": torch.arange(3)}, tmp_path / "i.safetensors")
    with pytest.raises(CheckpointError, match="tensor i: dtype I64"):
        TensorReader().read("i", open_file(tmp_path / "i.safetensors")["i"])


def test_pieces_in_any_order(tmp_path: Path) -> None:
    values = torch.randn(6, 4).to(torch.bfloat16)
    writer = TensorWriter(tmp_path / "w.safetensors", {"v": ((6, 4), "BF16"), "s": ((1,), "F32")})
    writer.write("v", values[4:], 16)
    writer.write("s", torch.ones(1))
    writer.write("v", values[:4], 0)
    writer.close()
    loaded = load_file(tmp_path / "w.safetensors")
    assert torch.equal(loaded["v"], values)
    assert loaded["s"].tolist() == [1.0]


def test_a_file_with_holes_is_not_closed(tmp_path: Path) -> None:
    writer = TensorWriter(tmp_path / "w.safetensors", {"v": ((6, 4), "BF16"), "s": ((1,), "F32")})
    writer.write("s", torch.ones(1))
    with pytest.raises(CheckpointError, match=r"not produced, by tensor: \{'v': 48\}"):
        writer.close()
    writer.abandon()


def test_pieces_that_do_not_fit(tmp_path: Path) -> None:
    writer = TensorWriter(tmp_path / "w.safetensors", {"v": ((6, 4), "BF16")})
    with pytest.raises(CheckpointError, match=r"torch.float32 \(4,\) from element 0 does not fit BF16 \[6, 4\]"):
        writer.write("v", torch.ones(4))
    with pytest.raises(CheckpointError, match="from element 21"):
        writer.write("v", torch.ones(4, dtype=torch.bfloat16), 21)
    writer.abandon()
