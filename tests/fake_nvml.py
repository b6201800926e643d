"""A stand-in for the driver on machines without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

GIB = 1 << 30


class FakeNvml:
    """The part of the module ``pynvml`` that the meter uses, over a table of devices."""

    nvmlMemory_v2 = 0x02000028

    class NVMLError(Exception):
        """Base of the library's errors."""

    class NVMLError_Uninitialized(NVMLError):
        """Not initialised in this process, or shut down."""

    class NVMLError_NoPermission(NVMLError):
        """Refused."""

    class NVMLError_NotSupported(NVMLError):
        """This device has no such figure."""

    def __init__(self, *cards):
        self.cards = cards
        self.inits = 0
        self.users = 0
        self.up = False
        self.calls = []
        self.hang = None

    def nvmlInit(self):
        if self.hang is not None:
            self.hang.wait(30)
        self.inits += 1
        self.users += 1
        self.up = True

    def nvmlShutdown(self):
        self.users -= 1
        self.up = self.users > 0

    def _checked(self):
        if not self.up:
            raise self.NVMLError_Uninitialized("Uninitialized")

    def nvmlDeviceGetCount(self):
        self._checked()
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self._checked()
        for card in self.cards:
            for device in (card, *card.instances):
                if device.uuid == uuid:
                    return device
        raise self.NVMLError("Not Found")

    def nvmlDeviceGetUUID(self, device):
        return device.uuid

    def nvmlDeviceGetName(self, device):
        return device.model

    def nvmlDeviceGetMigMode(self, device):
        return [int(bool(device.instances) or device.locked), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, _device):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device, index):
        if device.locked:
            raise self.NVMLError_NoPermission("Insufficient Permissions")
        if index >= len(device.instances):
            raise self.NVMLError("Not Found")
        return device.instances[index]

    def nvmlDeviceGetMemoryInfo(self, device, version=None):
        self.calls.append(("memory", version))
        if device.memory_error is not None:
            raise device.memory_error
        if version is not None and not device.second_version:
            raise self.NVMLError_NotSupported("Not Supported")
        # The first version counts what the driver reserves as used.
        return SimpleNamespace(used=device.used + (0 if version else 900 << 20), total=device.total)

    def nvmlDeviceGetComputeRunningProcesses(self, device):
        if device.list_error is not None:
            raise device.list_error
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in device.compute]

    def nvmlDeviceGetGraphicsRunningProcesses(self, device):
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in device.graphics]


def make_card(uuid="GPU-aaaa0000", **values):
    fields = {
        "uuid": uuid,
        "model": "NVIDIA H200",
        "used": 0,
        "total": 140 * GIB,
        "compute": (),
        "graphics": (),
        "instances": (),
        "second_version": True,
        "memory_error": None,
        "list_error": None,
        "locked": False,  # partitioned, and this user may not list its instances
    }
    return SimpleNamespace(**{**fields, **values})
