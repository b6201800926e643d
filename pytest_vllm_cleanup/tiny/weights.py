"""The weights of the tiny models: seeded noise in bfloat16, in a safetensors file."""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pytest_vllm_cleanup.tiny.architectures import Tensor
from pytest_vllm_cleanup.tiny.folder import explained_import


def write_weights(path: Path, tensors: Iterator[Tensor], seed: int) -> None:
    """Write the safetensors format: the header's length (8 bytes), the header (JSON), the data.

    By hand, because the safetensors library changed how it takes bfloat16 bytes between releases.

    Raises:
        ImportError: ``numpy`` is missing.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blocks, offset = [], 0
    for tensor in tensors:
        block = _bfloat16_noise(tensor, seed)
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": tensor.shape,
            "data_offsets": (offset, offset + len(block)),
        }
        blocks.append(block)
        offset += len(block)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        file.writelines(blocks)


def _bfloat16_noise(tensor: Tensor, seed: int) -> bytes:
    with explained_import():
        import numpy as np
    # RandomState's stream is frozen, and uniform numbers need no libm: equal bytes everywhere.
    # A seed for each name keeps a tensor's values when others are added or left out.
    random = np.random.RandomState([seed, zlib.crc32(tensor.name.encode())])
    reach = tensor.deviation * math.sqrt(3)
    values = tensor.mean + reach * (2 * random.random_sample(tensor.shape) - 1)
    values[: tensor.zero_rows] = 0
    bits = values.astype("<f4").view("<u4")
    return bytes(((bits + 0x8000) >> 16).astype("<u2").tobytes())  # bfloat16 is float32's upper half
