from __future__ import annotations

import pytest

from pytest_vllm_cleanup.memory.units import format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4 GiB", 4 << 30),
        ("64 MiB", 64 << 20),
        ("1.5GB", 1_500_000_000),
        ("1.5 gib", 3 << 29),
        ("1048576", 1 << 20),
        (" 12 kib ", 12 << 10),
        ("0", 0),
        (0, 0),
        (7, 7),
        ("7 bytes", 7),
        ("9007199254740993", 9007199254740993),
        (".5 KiB", 512),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes_are_read_in_bytes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["-1", -1, "", "GiB", "4G", "4 gibibytes", "1e9", "nan", "4 4 GiB", None, True, 1.5, [1]]
)
def test_what_is_no_size_is_refused_with_examples(text):
    with pytest.raises(ValueError, match=r"4 GiB.*64 MiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (-512, "-512 B"),
        (1024, "1 KiB"),
        (64 << 20, "64 MiB"),
        (15_246_981_324, "14.2 GiB"),
        (-15_246_981_324, "-14.2 GiB"),
        ((1 << 30) - 1, "1.0 GiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_sizes_are_written_in_binary_units(size, text):
    assert format_size(size) == text


@pytest.mark.parametrize("size", [0, 1, 1024, 64 << 20, 3 << 30])
def test_exact_sizes_survive_writing_and_reading(size):
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("2 min", 120), (30, 30), (1.5, 1.5), ("500 ms", 0.5), ("1h", 3600), ("0", 0), ("90", 90)],
)
def test_durations_are_read_in_seconds(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["-1s", -1, "", "s", "soon", float("nan"), float("inf"), True, None, "1 fortnight"])
def test_what_is_no_duration_is_refused_with_examples(text):
    with pytest.raises(ValueError, match=r"30s.*2 min"):
        parse_duration(text)
