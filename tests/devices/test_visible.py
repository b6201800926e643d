from __future__ import annotations

import pytest

from pytest_vllm_cleanup.devices import NvmlDevice, from_cuda, from_environment, parse_visible

A, B, C = "GPU-aaaa0000-1", "GPU-aabb0000-2", "GPU-cccc0000-3"
SAME = tuple(NvmlDevice(index, uuid, "H200") for index, uuid in enumerate((A, B, C)))
MIXED = (NvmlDevice(0, A, "T4"), NvmlDevice(1, B, "H200"), NvmlDevice(2, C, "T4"))
SPLIT = (NvmlDevice(0, A, "H200", ("MIG-1111-x", "MIG-1222-y")), NvmlDevice(1, B, "H200"))


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, None),
        ("", ()),
        ("-1", ()),
        ("none", ()),
        ("2,3", (2, 3)),
        (" 1 , 0 ", (1, 0)),
        ("1,-1,0", (1,)),
        ("0,,1", (0,)),
        ("1gpu2,2ampere", (1, 2)),
        ("0,1,0", ()),
        ("GPU-aa,GPU-cc", ("GPU-aa", "GPU-cc")),
        ("GPU-aa,1", ("GPU-aa",)),
        ("GPU-aa,GPU-aa", ()),
        ("MIG-1111-x", ("MIG-1111-x",)),
        ("MIG-GPU-aaaa/1/0", ("MIG-GPU-aaaa/1/0",)),
        ("0,GPU-aa", (0,)),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(value, wanted):
    assert parse_visible(value) == wanted


def seen(inventory, visible=None, **environ):
    if visible is not None:
        environ["CUDA_VISIBLE_DEVICES"] = visible
    return [(device.name, device.uuid) for device in from_environment(environ, inventory)]


def test_without_the_variable_all_devices_are_visible():
    assert seen(SAME) == [("cuda:0", A), ("cuda:1", B), ("cuda:2", C)]


def test_ordinals_count_visible_devices_only():
    assert seen(SAME, "2,1") == [("cuda:0", C), ("cuda:1", B)]


def test_an_empty_variable_hides_every_device():
    assert seen(SAME, "") == []


def test_an_index_that_does_not_exist_ends_the_list():
    assert seen(SAME, "1,7,0") == [("cuda:0", B)]


def test_devices_are_found_by_abbreviated_uuid():
    assert seen(SAME, "GPU-cc,GPU-aab") == [("cuda:0", C), ("cuda:1", B)]
    assert seen(SAME, "GPU-CCCC") == [("cuda:0", C)]


def test_an_abbreviation_of_two_devices_ends_the_list():
    assert seen(SAME, "GPU-cc,GPU-aa") == [("cuda:0", C)]


def test_a_uuid_that_does_not_exist_ends_the_list():
    assert seen(SAME, "GPU-ffff,GPU-cc") == []


def test_instances_are_found_by_full_or_abbreviated_uuid():
    assert seen(SPLIT, "MIG-12") == [("cuda:0", "MIG-1222-y")]


def test_an_instance_that_is_not_listed_keeps_its_name():
    assert seen(SAME, "MIG-GPU-aaaa/1/0") == [("cuda:0", "MIG-GPU-aaaa/1/0")]


def test_a_partitioned_card_stands_for_its_first_instance():
    assert seen(SPLIT) == [("cuda:0", "MIG-1111-x"), ("cuda:1", B)]


def test_which_of_two_models_a_number_means_is_not_guessed():
    assert seen(MIXED, "0,1") == [("cuda:0", None), ("cuda:1", None)]


def test_devices_of_two_models_are_known_by_bus_order_by_uuid_or_all_together():
    assert seen(MIXED, "1", CUDA_DEVICE_ORDER="PCI_BUS_ID") == [("cuda:0", B)]
    assert seen(MIXED, "GPU-aab") == [("cuda:0", B)]
    assert {uuid for _, uuid in seen(MIXED)} == {A, B, C}
    assert {uuid for _, uuid in seen(MIXED, "2,1,0")} == {A, B, C}


def test_once_cuda_is_up_its_own_order_counts():
    devices = from_cuda(["aabb0000-2", "aaaa0000-1"], MIXED)
    assert [(device.name, device.uuid) for device in devices] == [("cuda:0", B), ("cuda:1", A)]


def test_what_cuda_names_with_prefix_or_as_instance_is_found():
    assert [device.uuid for device in from_cuda([A, "1222-y", "MIG-1111-x"], SPLIT)] == [
        A,
        "MIG-1222-y",
        "MIG-1111-x",
    ]
    assert from_cuda(["9999-z"], SAME)[0].uuid == "MIG-9999-z"
