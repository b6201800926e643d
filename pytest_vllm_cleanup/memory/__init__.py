"""Numbers and decisions: what is in use on a device, and whether it came back."""

from __future__ import annotations

from .expectation import Adjustment, Grants, context_bytes, growth_of
from .gauge import Gauge, choose_gauge
from .reading import HOST, ProcessUse, Reading, Snapshot
from .rules import DeviceVerdict, Outcome
from .settle import Settled, settle
from .tenants import Change
from .units import format_size, parse_duration, parse_size
from .verdict import Verdict, combine, judge, judge_all

__all__ = [
    "HOST",
    "Adjustment",
    "Change",
    "DeviceVerdict",
    "Gauge",
    "Grants",
    "Outcome",
    "ProcessUse",
    "Reading",
    "Settled",
    "Snapshot",
    "Verdict",
    "choose_gauge",
    "combine",
    "context_bytes",
    "format_size",
    "growth_of",
    "judge",
    "judge_all",
    "parse_duration",
    "parse_size",
    "settle",
]
