from __future__ import annotations

import dataclasses

import pytest

from pytest_vllm_cleanup.memory.reading import Reading, merge


def test_figures_are_unknown_until_a_meter_has_them():
    fields = dataclasses.asdict(Reading("cuda:0"))
    assert set(fields.values()) == {"cuda:0", (), None}


def test_meters_complete_each_other():
    driver = Reading("cuda:0", ("nvml",), used=7, own=0, identity="GPU-a")
    allocator = Reading("cuda:0", ("torch",), allocated=3, reserved=5)
    assert merge([driver, allocator]) == Reading(
        "cuda:0", ("nvml", "torch"), used=7, own=0, allocated=3, reserved=5, identity="GPU-a"
    )


def test_of_two_meters_with_the_same_figure_the_first_wins_also_with_zero():
    merged = merge([Reading("cuda:0", ("a",), used=0), Reading("cuda:0", ("b",), used=9)])
    assert merged.used == 0


def test_readings_of_different_devices_are_not_merged():
    with pytest.raises(ValueError, match="cuda:1"):
        merge([Reading("cuda:0"), Reading("cuda:1")])
