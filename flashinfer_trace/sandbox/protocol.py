"""The messages between the harness and a worker: headers in JSON, and the raw bytes of tensors.

A message is the header's length (4 bytes, little-endian), the header, and the bytes of the values that the header
describes, in order. A value is a tensor (dtype, shape, and for inputs the stride) or a Python number. Nothing is
pickled. Messages from a worker are untrusted: `read_values` checks each header before it allocates.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

#: Longest header, in bytes. A request's holds the source of a reference; the dataset's longest has 6 kB.
MAX_HEADER = 4 << 20

#: Bytes of a message that is copied to be sent at once.
SHORT = 1 << 18

#: Most values, and most dimensions of one, in an answer.
MAX_VALUES, MAX_DIMENSIONS = 64, 16

#: dtypes by name; a number crosses as a tensor without dimensions.
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

_NUMBERS: dict[str, Callable[[Any], Any]] = {"bool": bool, "int64": int, "float64": float}

#: Fills a piece of memory with the next bytes.
Read = Callable[[memoryview], None]


class ProtocolError(ValueError):
    """A message that does not follow the protocol."""


def pack_header(header: Mapping[str, Any]) -> bytes:
    """A header with its length before it."""
    text = json.dumps(header).encode()
    if len(text) > MAX_HEADER:
        raise ProtocolError(f"a header of {len(text)} bytes; at most {MAX_HEADER} are sent")
    return struct.pack("<I", len(text)) + text


def in_few_pieces(pieces: Sequence[memoryview | bytes]) -> Sequence[memoryview | bytes]:
    """A message in one piece if it is short: each piece wakes the process that reads it."""
    return [b"".join(pieces)] if sum(map(len, pieces)) <= SHORT else pieces


def read_header(read: Read, limit: int = MAX_HEADER) -> dict[str, Any]:
    """The next header.

    Raises:
        ProtocolError: it is longer than `limit`, or no JSON object.
    """
    prefix = bytearray(4)
    read(memoryview(prefix))
    (length,) = struct.unpack("<I", prefix)
    if length > limit:
        raise ProtocolError(f"a header of {length} bytes; at most {limit} are read")
    text = bytearray(length)
    read(memoryview(text))
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a header that is not JSON") from error
    if not isinstance(header, dict):
        raise ProtocolError("a header that is not an object")
    return header


def describe_value(value: Any, strided: bool) -> tuple[dict[str, Any], memoryview | bytes]:
    """The header of a value and its bytes.

    A strided tensor keeps its strides: the bytes are those of its memory from the first element to the last.

    Raises:
        TypeError: the value is neither a dense tensor on a CPU nor a Python number.
    """
    if isinstance(value, (bool, int, float)):
        dtype = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float64
        header, data = describe_value(torch.tensor(value, dtype=dtype), strided=False)
        return {**header, "number": True}, data
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        shown = f"a tensor on {value.device}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise TypeError(f"{shown} crosses no pipe; only dense tensors on a CPU and numbers do")
    value = value.detach()
    header = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if strided and not value.is_contiguous():
        header["stride"] = list(value.stride())
        value = value.as_strided((span(value.shape, value.stride()),), (1,))
    flat = value.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return header, memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def value_bytes(header: Any, limit: int, strided: bool) -> int:
    """Bytes that a value of this header takes. Only inputs are strided.

    Raises:
        ProtocolError: the header is malformed, or describes more than `limit` bytes.
    """
    if not isinstance(header, dict):
        raise ProtocolError("a value without header")
    dtype, shape = header.get("dtype"), header.get("shape")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ProtocolError("a value of an unknown dtype")
    _check_sizes(shape)
    assert isinstance(shape, list)
    if "stride" in header:
        if not strided:
            raise ProtocolError("an output with strides")
        _check_sizes(header["stride"])
        if len(header["stride"]) != len(shape):
            raise ProtocolError("a value whose strides do not fit its shape")
    if header.get("number") and (shape != [] or dtype not in _NUMBERS):
        raise ProtocolError("a number that is a tensor")
    # Sizes whose product overflows are refused even if one of them is 0: torch has no such tensor.
    if math.prod(max(size, 1) for size in shape) >= 2**62:
        raise ProtocolError("a shape that is too large")
    count = span(shape, header["stride"]) if "stride" in header else math.prod(shape)
    size = count * _DTYPES[dtype].itemsize
    if size > limit:
        raise ProtocolError(f"outputs of {size} bytes; at most {limit} are read")
    return size


def read_values(headers: Any, read: Read, limit: int, strided: bool = False) -> list[Any]:
    """The values that the headers of a message describe, `limit` bytes of them at most.

    Raises:
        ProtocolError: a header is malformed, or there are too many values or bytes. Nothing is read then.
    """
    if not isinstance(headers, list) or len(headers) > MAX_VALUES:
        raise ProtocolError(f"values that are not a list of at most {MAX_VALUES}")
    sizes: list[int] = []
    for header in headers:
        sizes.append(value_bytes(header, limit - sum(sizes), strided))
    return [_read_value(header, read, size) for header, size in zip(headers, sizes, strict=True)]


def _read_value(header: Mapping[str, Any], read: Read, size: int) -> Any:
    dtype, shape = _DTYPES[header["dtype"]], header["shape"]
    if size == 0:
        return torch.zeros(shape, dtype=dtype)
    flat = torch.empty(size, dtype=torch.uint8)  # aligned as torch aligns its own: products round alike
    data: Any = flat.numpy()
    read(memoryview(data))
    flat = flat != 0 if dtype == torch.bool else flat.view(dtype)  # a byte beyond 1 is not a bool
    if header.get("number"):
        return _NUMBERS[header["dtype"]](flat.item())
    if "stride" in header:
        return flat.as_strided(shape, header["stride"])
    return flat.reshape(shape)


def _check_sizes(sizes: Any) -> None:
    if not isinstance(sizes, list) or len(sizes) > MAX_DIMENSIONS:
        raise ProtocolError(f"a shape that is not a list of at most {MAX_DIMENSIONS} sizes")
    if not all(type(size) is int and 0 <= size < 2**62 for size in sizes):
        raise ProtocolError("a shape whose sizes are not whole numbers")


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of memory from the first of a strided tensor to its last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
