"""The memory that the kinds take."""

from __future__ import annotations

import torch
from zoo_expect import DEVICE, SIZE


def logits(size: int = SIZE) -> torch.Tensor:
    """Return a tensor of so many bytes, each written, since pages that nobody has touched take no memory."""
    return torch.ones((size // 4096, 1024), device=DEVICE)
