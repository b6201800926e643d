"""Settings of a test run: marker over command-line option over environment variable over ini file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

CHECKS = ("marked", "all", "off")
ON_LEAK = ("fail", "quarantine", "exit", "restart")
GPUS = ("auto", "off")
CACHES = ("shared", "worker")
ISOLATE = ("marked", "all", "leaky", "off")
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
            start because of it ("quarantine"), end the run ("exit"), or replace the worker of pytest-xdist ("restart").
        isolate: which tests run in a process of their own: those with the marker, all, those with the marker and
            those that leaked in an earlier run ("leaky"), or none.
        isolate_timeout: how long such a process may take, in seconds; None: any time.
        isolate_warm: whether the next such process is started ahead, and imports torch and vLLM meanwhile.
        gpus: whether each worker of pytest-xdist gets a GPU of its own ("auto", and always with ``-n gpu``).
        workers_per_gpu: how many workers ``-n gpu`` and ``-n auto`` start for each GPU.
        caches: whether workers share the caches of compiled code, or each has its own ("worker").
        no_workers: whether an ini file or the environment said "restart", and ``on_leak`` is "quarantine" instead,
            since no worker runs the tests.
    """

    check: str = "marked"
    strict: bool = False
    tolerance: int | None = None
    timeout: float = DEFAULT_TIMEOUT
    start_timeout: float | None = None
    record: bool = False
    on_leak: str = "quarantine"
    isolate: str = "marked"
    isolate_timeout: float | None = None
    isolate_warm: bool = False
    gpus: str = "off"
    workers_per_gpu: int = 1
    caches: str = "shared"
    no_workers: bool = False

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
        if self.no_workers:
            parts.append("on-leak=quarantine (restart is for workers of pytest-xdist)")
        if self.isolate != "marked":
            parts.append(f"isolate={self.isolate}")
        if self.isolate_timeout is not None:
            parts.append(f"isolate-timeout={self.isolate_timeout:g}s")
        if self.isolate_warm:
            parts.append("isolate-warm")
        if self.gpus != "off":
            parts.append(f"gpus={self.gpus}")
        if self.workers_per_gpu != 1:
            parts.append(f"workers-per-gpu={self.workers_per_gpu}")
        if self.caches != "shared":
            parts.append(f"caches={self.caches}")
        return f"vllm-cleanup: {', '.join(parts)}" if parts else ""


def parse_count(value: object) -> int:
    """Return a number of at least 1. Raises ``ValueError`` for anything else."""
    text = str(value).strip()
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"expected a number from 1 on, got {value!r}")
    return int(text)


def one_of(values: tuple[str, ...]) -> Callable[[object], str]:
    """Return what lets these values pass, and raises a ``ValueError`` that names them for any other."""

    def parse(value: object) -> str:
        if value not in values:
            raise ValueError(f"expected one of {', '.join(values)}, got {value!r}")
        return str(value)

    return parse


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
        ("on-leak", "{fail,quarantine,exit,restart}", "what a leak does beside failing its test (default: quarantine)"),
        ("isolate", "{marked,all,leaky,off}", "which tests run in a process of their own (default: marked)"),
        ("isolate-timeout", "SECONDS", "how long such a process may take (default: any time)"),
        ("gpus", "{auto,off}", "give each worker of pytest-xdist a GPU of its own (default: off, auto with -n gpu)"),
        ("workers-per-gpu", "NUMBER", "how many workers -n gpu and -n auto start for each GPU (default: 1)"),
        ("caches", "{shared,worker}", "who shares caches of compiled code under pytest-xdist (default: shared)"),
    ):
        group.addoption(f"--vllm-cleanup-{name}", metavar=metavar, default=None, help=text)
        parser.addini(f"vllm_cleanup_{name.replace('-', '_')}", text, default=None)
    for name, text in (
        ("strict", "fail tests whose GPU memory cannot be measured"),
        ("record", "note down where GPU memory is allocated, for the report of a leak"),
        ("isolate-warm", "start the process of the next isolated test ahead, and import torch and vLLM in it"),
    ):
        group.addoption(f"--vllm-cleanup-{name}", action="store_true", default=None, help=text)
        parser.addini(f"vllm_cleanup_{name.replace('-', '_')}", text, default=None)


def load(config: pytest.Config) -> Settings:
    """Read the settings of a run.

    Raises:
        pytest.UsageError: a value is invalid; the text names where it stands and the valid values.
    """
    return Settings(
        check=_setting(config, "check", one_of(CHECKS), "marked"),
        strict=_setting(config, "strict", parse_flag, False),
        tolerance=_setting(config, "tolerance", parse_tolerance, None),
        timeout=_setting(config, "timeout", parse_timeout, DEFAULT_TIMEOUT),
        start_timeout=_setting(config, "start_timeout", parse_timeout, None),
        record=_setting(config, "record", parse_flag, False),
        on_leak=_setting(config, "on_leak", one_of(ON_LEAK), "quarantine"),
        isolate=_setting(config, "isolate", one_of(ISOLATE), "marked"),
        isolate_timeout=_setting(config, "isolate_timeout", parse_timeout, None),
        isolate_warm=_setting(config, "isolate_warm", parse_flag, False),
        gpus=_setting(config, "gpus", one_of(GPUS), "off"),
        workers_per_gpu=_setting(config, "workers_per_gpu", parse_count, 1),
        caches=_setting(config, "caches", one_of(CACHES), "shared"),
    )


def gpus_of(config: pytest.Config) -> tuple[str | None, int]:
    """Return whether workers get GPUs, None if nothing says so, and how many workers each GPU has.

    For pytest-xdist, which asks before the run is configured. Raises ``pytest.UsageError``.
    """
    return _setting(config, "gpus", one_of(GPUS), None), _setting(config, "workers_per_gpu", parse_count, 1)


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
