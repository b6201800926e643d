"""The markers. Each is a function: its signature says what it takes, its docstring what it means."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from pytest_vllm_cleanup import config


class MarkerError(ValueError):
    """A marker was given arguments that it does not take."""


@dataclass(frozen=True)
class Requirement:
    """What a marked test has to fulfil; None where the settings of the run decide.

    Attributes:
        tolerance: bytes that may stay.
        timeout: seconds to wait for memory to come back.
        devices: names of the devices that count ("cuda:0"), None for all visible ones.
        check: whether the test is checked at all.
        reason: why it is not, or why the values are what they are.
    """

    tolerance: int | None = None
    timeout: float | None = None
    devices: tuple[str, ...] | None = None
    check: bool = True
    reason: str | None = None


@dataclass(frozen=True)
class Isolated:
    """How a test is to run in a process of its own.

    Attributes:
        timeout: seconds that the process has, its start included; None where the settings of the run decide.
        reason: why the test is isolated.
    """

    timeout: float | None = None
    reason: str | None = None


def gpu_released(
    tolerance: int | str | None = None,
    timeout: float | str | None = None,
    devices: Iterable[int | str] | int | str | None = None,
    check: bool = True,
    reason: str | None = None,
) -> Requirement:
    """Fail the test as LEAKED if GPU memory has not come back when its last fixture is torn down.

    tolerance: memory that may stay, in bytes or as text ("8 MiB"). timeout: how long to wait for it, in seconds or as
    text ("2 min"). devices: which ones count, such as 0, "cuda:1" or a list; all visible ones by default.
    check=False: do not check this test, because of reason.
    """
    if not isinstance(check, bool):
        raise MarkerError(f"check={check!r}: expected True or False")
    return Requirement(
        tolerance=None if tolerance is None else _parsed("tolerance", config.parse_tolerance, tolerance),
        timeout=None if timeout is None else _parsed("timeout", config.parse_timeout, timeout),
        devices=None if devices is None else _parsed("devices", config.parse_devices, devices),
        check=check,
        reason=_text("reason", reason),
    )


def vllm_isolated(timeout: float | str | None = None, reason: str | None = None) -> Isolated:
    """Run the test, with its fixtures, in a fresh Python process that ends with it.

    timeout: how long the process may take, its start included, in seconds or as text ("10 min"); then it and its
    engines are ended. reason: why the test is isolated.
    """
    return Isolated(
        timeout=None if timeout is None else _parsed("timeout", config.parse_timeout, timeout),
        reason=_text("reason", reason),
    )


def gpus(n: int) -> int:
    """Give the test n GPUs, and skip it where there are fewer.

    Under pytest-xdist with a GPU for each worker, a test with n > 1 takes others beside its worker's own, alone: it
    waits until no other test is on them. The fixture gpu_devices has what the test got.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise MarkerError(f"n={n!r}: expected a number from 1 on")
    return n


MARKERS: dict[str, Callable[..., Requirement]] = {
    "gpu_released": gpu_released,
    "assert_gpu_released": gpu_released,
}
ISOLATED = "vllm_isolated"
GPUS = "gpus"
ALL: dict[str, Callable[..., Any]] = {**MARKERS, ISOLATED: vllm_isolated, GPUS: gpus}


def descriptions(names: Iterable[str] = tuple(ALL)) -> list[str]:
    """Return markers as ``pytest --markers`` shows them."""
    lines = []
    for name in names:
        marker = ALL[name]
        parameters = ", ".join(
            parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
            for parameter in inspect.signature(marker).parameters.values()
        )
        text = " ".join((marker.__doc__ or "").split())
        lines.append(f"{name}({parameters}): {text if marker.__name__ == name else f'alias of {marker.__name__}.'}")
    return lines


def requirement_of(item: pytest.Item) -> Requirement | None:
    """Return what the closest marker of a test asks for, None if it has none.

    Raises:
        MarkerError: its arguments are not valid; the text names the valid ones.
    """
    # iter_markers goes from the closest outwards; the two names are one marker, so the first in that order counts.
    marks = [mark for mark in item.iter_markers() if mark.name in MARKERS]
    return evaluate(marks[0]) if marks else None


def isolated_of(item: pytest.Item) -> Isolated | None:
    """Return how the closest marker asks for a test to be isolated, None if it has none. Raises ``MarkerError``."""
    mark = item.get_closest_marker(ISOLATED)
    return None if mark is None else evaluate(mark)


def gpus_of(item: pytest.Item) -> int | None:
    """Return how many devices the closest marker asks for, None if it has none of ours. Raises ``MarkerError``."""
    mark = item.get_closest_marker(GPUS)
    wanted: int | None = None if mark is None or not gpus_is_ours(item.config) else evaluate(mark)
    return wanted


def gpus_is_ours(run: pytest.Config) -> bool:
    """Whether ``gpus``, a name that others may use too, means our marker: not if told off, or described otherwise."""
    return config.gpus_of(run)[0] != "off" and not described_otherwise(GPUS, run)


def described_otherwise(name: str, run: pytest.Config) -> bool:
    """Whether the suite describes a marker of this name itself, in its ini file or a conftest.py."""
    [ours] = descriptions([name])
    return any(re.split(r"[:(]", line, maxsplit=1)[0].strip() == name for line in run.getini("markers") if line != ours)


def required_of(item: pytest.Item, check: str) -> Requirement | None:
    """Return what a test has to fulfil, None if it is not checked.

    Args:
        item: the test.
        check: which tests are checked: "marked", "all" or "off".

    Raises:
        MarkerError: its marker's arguments are not valid.
    """
    if check == "off":
        return None
    requirement = requirement_of(item)
    if requirement is None and check == "all":
        requirement = Requirement()
    return requirement if requirement is not None and requirement.check else None


def evaluate(mark: pytest.Mark) -> Any:
    """Turn one marker into what it asks for. Raises ``MarkerError``."""
    marker = ALL[mark.name]
    try:
        return marker(*mark.args, **mark.kwargs)
    except TypeError:
        valid = ", ".join(inspect.signature(marker).parameters)
        given = ", ".join([*map(repr, mark.args), *(f"{key}={value!r}" for key, value in mark.kwargs.items())])
        raise MarkerError(f"@pytest.mark.{mark.name}({given}): the arguments are {valid}") from None
    except MarkerError as problem:
        raise MarkerError(f"@pytest.mark.{mark.name}: {problem}") from None


def _parsed(name: str, parse: Callable[[Any], Any], value: Any) -> Any:
    try:
        return parse(value)
    except (ValueError, TypeError) as problem:
        raise MarkerError(f"{name}: {problem}") from None


def _text(name: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise MarkerError(f"{name}={value!r}: expected text")
    return value
