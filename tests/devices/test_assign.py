from __future__ import annotations

import pytest

from pytest_vllm_cleanup.devices import assign

TWO = ["2", "0"]


def test_neighbouring_workers_have_different_devices_and_none_has_two_more_than_another():
    assert [assign.home(TWO, rank) for rank in range(5)] == ["2", "0", "2", "0", "2"]


@pytest.mark.parametrize(
    ("devices", "workers", "expected"),
    [(2, 2, [1, 1]), (2, 4, [2, 2, 2, 2]), (2, 3, [2, 1, 2]), (1, 4, [4, 4, 4, 4]), (8, 2, [1, 1])],
)
def test_each_worker_knows_how_many_have_its_device(devices, workers, expected):
    assert [assign.sharers(devices, rank, workers) for rank in range(workers)] == expected
    homes = [assign.home(range(devices), rank) for rank in range(workers)]
    assert expected == [homes.count(home) for home in homes]


def test_a_worker_that_was_not_expected_counts_itself():
    assert assign.sharers(2, 2, 2) == 2


def test_several_devices_begin_with_the_workers_own():
    assert assign.widened(["5", "3", "4"], 1, 1) == ("3",)
    assert assign.widened(["5", "3", "4"], 1, 3) == ("3", "4", "5")
    assert assign.widened(["5", "3", "4"], 4, 2) == ("3", "4")
    assert assign.widened(["5", "3", "4"], 0, 4) is None


def test_the_number_of_workers_follows_from_the_devices():
    assert assign.worker_count(2, 3) == 6
    for devices, per_device in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="make no worker"):
            assign.worker_count(devices, per_device)
