"""Another tenant of the device: takes and gives memory back all the time, until it is ended."""

from __future__ import annotations

import random
import time

import torch

random.seed(0)
print("ready", flush=True)
while True:
    held = [torch.empty(random.randrange(1 << 20, 1 << 30), dtype=torch.uint8, device="cuda") for _ in range(3)]
    time.sleep(random.uniform(0, 0.2))
    del held
    torch.cuda.empty_cache()
    time.sleep(random.uniform(0, 0.1))
