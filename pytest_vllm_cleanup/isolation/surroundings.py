"""The environment of an isolated function: the caller's, with its changes, and with some of the devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_vllm_cleanup.devices.offered import Offer, Offered


def changed(environ: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return an environment with changes; None removes a variable.

    Raises:
        TypeError: a name or a value is no text.
    """
    for name, value in changes.items():
        if not isinstance(name, str) or not (value is None or isinstance(value, str)):
            raise TypeError(f"env: {name!r}: {value!r}: names and values are text, or None to remove a variable")
    merged = {**environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def chosen(offer: Offer, gpus: int | Sequence[int | str]) -> dict[str, str]:
    """Return the variables that show some of the devices alone.

    Args:
        offer: the devices that the caller sees.
        gpus: how many of them, or which: ordinals among them, or UUIDs.

    Raises:
        ValueError: there are not so many, or one of them is not there, or is named twice.
        TypeError: it is neither a number nor a list of such.
    """
    devices = offer.devices
    number = "1 device" if len(devices) == 1 else f"{len(devices)} devices"
    there = f"{number} that this process sees" + (f" ({offer.reason})" if offer.reason else "")
    if isinstance(gpus, int) and not isinstance(gpus, bool):
        if gpus < 0:
            raise ValueError(f"gpus={gpus}: give how many devices, 0 or more, or a list of ordinals or UUIDs")
        if gpus > len(devices):
            raise ValueError(f"gpus={gpus}: more than the {there}")
        return offer.environment(devices[:gpus])
    if isinstance(gpus, (str, bytes, bool)) or not isinstance(gpus, Sequence):
        raise TypeError(f"gpus={gpus!r}: give a number of devices, or a list of ordinals or UUIDs")
    picked = [_pick(devices, wanted, there) for wanted in gpus]
    if len(set(picked)) < len(picked):
        raise ValueError(f"gpus={list(gpus)!r}: names a device twice")
    return offer.environment(picked)


def _pick(devices: Sequence[Offered], wanted: int | str, there: str) -> Offered:
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        if not 0 <= wanted < len(devices):
            raise ValueError(f"gpus: no device {wanted} among the {there}; they are numbered from 0")
        return devices[wanted]
    if not isinstance(wanted, str):
        raise TypeError(f"gpus: {wanted!r} is neither an ordinal nor a UUID")
    found = [device for device in devices if _is(device, wanted)]
    if len(found) != 1:
        known = ", ".join(device.uuid or device.text for device in devices)
        raise ValueError(f"gpus: {wanted!r} names {len(found)} of the {there}" + (f": {known}" if known else ""))
    return found[0]


def _is(device: Offered, wanted: str) -> bool:
    prefix = wanted.lower()
    names = (name.lower() for name in (device.uuid, device.text) if name is not None)
    return prefix.startswith(("gpu-", "mig-")) and any(name.startswith(prefix) for name in names)
