"""Stands for the module pynvml in inner test runs: GPUs that are folders, and processes that hold memory by a file.

``FAKE_GPUS`` names the folder. Each GPU is a folder in it, named ``NUMBER_UUID``; a file in that, named by a process,
has the bytes that it holds. As with the real driver, a process that has ended holds nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

from fake_nvml import FakeNvml, make_card

FOLDER = Path(os.environ["FAKE_GPUS"])
TOTAL = 80 << 30
RESERVED = 500 << 20


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Card(SimpleNamespace):
    @property
    def compute(self):
        held = []
        for file in self.folder.iterdir():
            try:
                text = file.read_text()
            except FileNotFoundError:
                continue
            if text and runs(int(file.name)):
                held.append((int(file.name) + self.hidden * 3_000_000, int(text)))
        return held

    @property
    def used(self):
        return RESERVED + sum(size for _, size in self.compute)


def card_of(folder):
    fields = vars(make_card(folder.name.partition("_")[2], total=TOTAL))
    del fields["compute"], fields["used"]
    return Card(folder=folder, hidden=bool(os.environ.get("FAKE_GPUS_HIDDEN")), **fields)


library = FakeNvml(*(card_of(folder) for folder in sorted(FOLDER.iterdir())))


def __getattr__(name):
    return getattr(library, name)
