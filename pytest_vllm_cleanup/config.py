"""Settings of a test run: marker over command-line option over environment variable over ini file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

CHECKS = ("marked", "all", "off")
ON_LEAK = ("fail", "quarantine", "exit")
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "")

DEFAULT_TIMEOUT = 60.0


@dataclass(frozen=True)
class Settings:
    """The effective settings of a test run.

    Attributes:
        check: which tests are checked: those with the marker, all of them, or none.
        strict: whether a test whose memory could not be measured fails.
        tolerance: bytes that may stay without being a leak; None: the default of the meter.
        timeout: how long to wait for memory to come back, in seconds.
        start_timeout: how long an engine of ``vllm_runner`` may take to start, in seconds; 0: any time, None: the
            runner's own default.
        record: whether torch notes down where GPU memory is allocated, so that a leak's report can tell.
        on_leak: what a leak does that stays, beside failing its test: nothing ("fail"), refuse engines that cannot
            start because of it ("quarantine"), or end the run ("exit").
    """

    check: str = "marked"
    strict: bool = False
    tolerance: int | None = None
    timeout: float = DEFAULT_TIMEOUT
    start_timeout: float | None = None
    record: bool = False
    on_leak: str = "quarantine"

    def header(self) -> str:
        """Return the settings that differ from the default, for the report header; "" if none does."""
        parts = []
        if self.check != "marked":
            parts.append(f"check={self.check}")
        if self.strict:
            parts.append("strict")
        if self.tolerance is not None:
            from pytest_vllm_cleanup.memory.units import format_size

            parts.append(f"tolerance={format_size(self.tolerance)}")
        if self.timeout != DEFAULT_TIMEOUT:
            parts.append(f"timeout={self.timeout:g}s")
        if self.start_timeout is not None:
            parts.append(f"start-timeout={self.start_timeout:g}s")
        if self.record:
            parts.append("record")
        if self.on_leak != "quarantine":
            parts.append(f"on-leak={self.on_leak}")
        return f"vllm-cleanup: {', '.join(parts)}" if parts else ""


def parse_check(value: object) -> str:
    """Return which tests are checked. Raises ``ValueError`` naming the valid values."""
    return _one_of(CHECKS, value)


def parse_on_leak(value: object) -> str:
    """Return what a leak does that stays. Raises ``ValueError`` naming the valid values."""
    return _one_of(ON_LEAK, value)


def _one_of(values: tuple[str, ...], value: object) -> str:
    if value not in values:
        raise ValueError(f"expected one of {', '.join(values)}, got {value!r}")
    return str(value)


def parse_flag(value: object) -> bool:
    """Return a yes or no. Raises ``ValueError`` naming the valid values."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"expected one of {', '.join((*_TRUE, *_FALSE[:-1]))}, got {value!r}")


def parse_tolerance(value: Any) -> int:
    """Return a tolerance in bytes from a number of bytes or text such as "64 MiB"."""
    from pytest_vllm_cleanup.memory.units import parse_size

    return parse_size(value)


def parse_timeout(value: Any) -> float:
    """Return a time in seconds from a number of seconds or text such as "2 min"."""
    from pytest_vllm_cleanup.memory.units import parse_duration

    return parse_duration(value)


def parse_devices(value: Any) -> tuple[str, ...]:
    """Return names of devices from numbers, names, or several of them."""
    from pytest_vllm_cleanup.devices.names import parse_devices

    return parse_devices(value)


def add_options(parser: pytest.Parser) -> None:
    """Declare command-line options and ini keys."""
    group = parser.getgroup("vllm-cleanup", "GPU memory of vLLM engines")
    for name, metavar, text in (
        ("check", "{marked,all,off}", "which tests must release their GPU memory (default: marked)"),
        ("tolerance", "SIZE", "memory that may stay, such as '8 MiB' (default: by meter)"),
        ("timeout", "SECONDS", f"how long to wait for memory to come back (default: {DEFAULT_TIMEOUT:g} s)"),
        ("start-timeout", "SECONDS", "how long an engine may take to start, 0: any time (default: 30 min)"),
        ("on-leak", "{fail,quarantine,exit}", "what a leak does beside failing its test (default: quarantine)"),
    ):
        group.addoption(f"--vllm-cleanup-{name}", metavar=metavar, default=None, help=text)
        parser.addini(f"vllm_cleanup_{name.replace('-', '_')}", text, default=None)
    for name, text in (
        ("strict", "fail tests whose GPU memory cannot be measured"),
        ("record", "note down where GPU memory is allocated, for the report of a leak"),
    ):
        group.addoption(f"--vllm-cleanup-{name}", action="store_true", default=None, help=text)
        parser.addini(f"vllm_cleanup_{name}", text, default=None)


def load(config: pytest.Config) -> Settings:
    """Read the settings of a run.

    Raises:
        pytest.UsageError: a value is invalid; the text names where it stands and the valid values.
    """
    return Settings(
        check=_setting(config, "check", parse_check, "marked"),
        strict=_setting(config, "strict", parse_flag, False),
        tolerance=_setting(config, "tolerance", parse_tolerance, None),
        timeout=_setting(config, "timeout", parse_timeout, DEFAULT_TIMEOUT),
        start_timeout=_setting(config, "start_timeout", parse_timeout, None),
        record=_setting(config, "record", parse_flag, False),
        on_leak=_setting(config, "on_leak", parse_on_leak, "quarantine"),
    )


def _setting(config: pytest.Config, name: str, parse: Callable[[Any], T], default: T) -> T:
    variable = f"PYTEST_VLLM_CLEANUP_{name.upper()}"
    for source, value in (
        (f"--vllm-cleanup-{name.replace('_', '-')}", config.getoption(f"vllm_cleanup_{name}")),
        (f"environment variable {variable}", os.environ.get(variable)),
        (f"ini key vllm_cleanup_{name}", config.getini(f"vllm_cleanup_{name}")),
    ):
        if value is None or value == "" or value == []:
            continue
        try:
            return parse(value)
        except (ValueError, TypeError) as problem:
            raise pytest.UsageError(f"{source}: {problem}") from None
    return default
