"""Safetensors files of any size, written without holding them in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qflux.data.store import write_chunks


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file, written tensor by tensor: it takes no memory of its own. Equal contents give equal bytes."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # aligned, as readers want it
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)

    def content() -> Iterator[bytes | memoryview]:
        yield len(encoded).to_bytes(8, "little") + encoded
        for name in order:
            flat = tensors[name].detach().cpu().contiguous().flatten()
            if flat.numel():
                yield memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]

    write_chunks(path, content())


_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
