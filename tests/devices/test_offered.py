from __future__ import annotations

import pytest

from pytest_vllm_cleanup.devices import NvmlDevice
from pytest_vllm_cleanup.devices.offered import offer

A, B, C = "GPU-aaaa0000-1", "GPU-aabb0000-2", "GPU-cccc0000-3"
SAME = tuple(NvmlDevice(index, uuid, "H200") for index, uuid in enumerate((A, B, C)))
MIXED = (NvmlDevice(0, A, "T4"), NvmlDevice(1, B, "H200"), NvmlDevice(2, C, "T4"))
SPLIT = (NvmlDevice(0, A, "H200", ("MIG-1", "MIG-2"), partitioned=True), NvmlDevice(1, B, "H200"))
LOCKED = (NvmlDevice(0, A, "H200", partitioned=True), NvmlDevice(1, B, "H200"))
PCI = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def texts(inventory, environ):
    return [device.text for device in offer(environ, inventory).devices]


def keys(inventory, environ):
    return [device.key for device in offer(environ, inventory).devices]


@pytest.mark.parametrize(
    ("inventory", "environ", "named", "locked"),
    [
        pytest.param(SAME, {}, ["0", "1", "2"], [A, B, C], id="everything"),
        pytest.param(SAME, {"CUDA_VISIBLE_DEVICES": "2,0"}, ["2", "0"], [C, A], id="indices"),
        pytest.param(SAME, {"CUDA_VISIBLE_DEVICES": " 2 , 0 "}, ["2", "0"], [C, A], id="blanks"),
        pytest.param(SAME, {"CUDA_VISIBLE_DEVICES": f"{C},{A}"}, [C, A], [C, A], id="UUIDs"),
        pytest.param(SAME, {"CUDA_VISIBLE_DEVICES": "GPU-cc,GPU-aab"}, [C, B], [C, B], id="short UUIDs"),
        pytest.param(SAME, {"CUDA_VISIBLE_DEVICES": "GPU-aa"}, [], [], id="UUID of two"),
        pytest.param(SAME, {"CUDA_VISIBLE_DEVICES": ""}, [], [], id="empty"),
        pytest.param(SAME, {"CUDA_VISIBLE_DEVICES": "-1"}, [], [], id="minus one"),
        pytest.param(SAME, {"CUDA_VISIBLE_DEVICES": "1,-1,0"}, ["1"], [B], id="cut by minus one"),
        pytest.param(SAME, {"CUDA_VISIBLE_DEVICES": "1,7,0"}, ["1"], [B], id="cut by one too many"),
        pytest.param(SAME, {"CUDA_VISIBLE_DEVICES": "1,1"}, [], [], id="twice"),
        pytest.param(MIXED, {}, [A, B, C], [A, B, C], id="two models by UUID, as numbers are by speed"),
        pytest.param(MIXED, PCI, ["0", "1", "2"], [A, B, C], id="two models by bus"),
        pytest.param(MIXED, {"CUDA_VISIBLE_DEVICES": "0,1"}, ["0", "1"], ["index-0", "index-1"], id="two models named"),
        pytest.param(MIXED, {**PCI, "CUDA_VISIBLE_DEVICES": "1"}, ["1"], [B], id="two models named by bus"),
        pytest.param(SPLIT, {}, ["MIG-1", "MIG-2", B], ["MIG-1", "MIG-2", B], id="instances"),
        pytest.param(SPLIT, {"CUDA_VISIBLE_DEVICES": "MIG-2,MIG-1"}, ["MIG-2", "MIG-1"], ["MIG-2", "MIG-1"], id="MIG"),
        pytest.param(LOCKED, {}, [], [], id="instances that may not be listed"),
        pytest.param(LOCKED, {"CUDA_VISIBLE_DEVICES": "MIG-9"}, ["MIG-9"], ["MIG-9"], id="one of them by name"),
        pytest.param(SAME, {"NVIDIA_VISIBLE_DEVICES": "all"}, ["0", "1", "2"], [A, B, C], id="container with all"),
        pytest.param(SAME, {"NVIDIA_VISIBLE_DEVICES": "void"}, ["0", "1", "2"], [A, B, C], id="void"),
        pytest.param(SAME, {"NVIDIA_VISIBLE_DEVICES": "1"}, ["0", "1", "2"], [A, B, C], id="an index of the host"),
        pytest.param(SAME, {"NVIDIA_VISIBLE_DEVICES": f"{C},{A}"}, ["0", "2"], [A, C], id="privileged container"),
        pytest.param(
            SAME, {"NVIDIA_VISIBLE_DEVICES": C, "CUDA_VISIBLE_DEVICES": "0"}, ["0"], [A], id="CUDA's variable first"
        ),
        pytest.param((), {"HIP_VISIBLE_DEVICES": "1,0"}, ["1", "0"], ["index-1", "index-0"], id="HIP"),
        pytest.param((), {"ROCR_VISIBLE_DEVICES": "0,GPU-77"}, ["0", "GPU-77"], ["index-0", "GPU-77"], id="ROCR"),
        pytest.param((), {"GPU_DEVICE_ORDINAL": "0,2"}, ["0", "2"], ["index-0", "index-2"], id="ordinal"),
        pytest.param((), {"HIP_VISIBLE_DEVICES": ""}, [], [], id="HIP, none"),
        pytest.param((), {"HIP_VISIBLE_DEVICES": "0,0"}, [], [], id="HIP, twice"),
        pytest.param(
            (),
            {"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "1"},
            ["1"],
            ["index-4.5-1"],
            id="HIP within ROCR",
        ),
        pytest.param((), {"CUDA_VISIBLE_DEVICES": "3"}, ["3"], ["index-3"], id="CUDA's variable under ROCm"),
        pytest.param((), {}, [], [], id="no driver"),
    ],
)
def test_what_is_offered_is_what_the_caller_made_visible_in_the_callers_words(inventory, environ, named, locked):
    assert texts(inventory, environ) == named
    assert keys(inventory, environ) == locked


def test_where_nothing_is_offered_a_sentence_says_why():
    assert "names no device of this machine" in offer({"CUDA_VISIBLE_DEVICES": "-1"}, SAME).reason
    assert "partitioned (MIG)" in offer({}, LOCKED).reason
    assert offer({}, (), "NVML: no driver").reason == "NVML: no driver"
    assert "names no device" in offer({"HIP_VISIBLE_DEVICES": "none"}, ()).reason
    assert offer({}, SAME).reason == ""


def test_a_worker_gets_the_variable_in_which_the_device_was_named():
    offered = offer({"CUDA_VISIBLE_DEVICES": "2,0"}, SAME)
    assert offered.environment(offered.devices[:1]) == {"CUDA_VISIBLE_DEVICES": "2"}
    assert offered.environment(offered.devices) == {"CUDA_VISIBLE_DEVICES": "2,0"}
    offered = offer({"ROCR_VISIBLE_DEVICES": "3"}, ())
    assert offered.environment(offered.devices) == {"ROCR_VISIBLE_DEVICES": "3"}


def test_with_hip_both_variables_agree_as_vllm_wants_them():
    offered = offer({"HIP_VISIBLE_DEVICES": "1,0", "CUDA_VISIBLE_DEVICES": "1,0"}, ())
    assert offered.environment(offered.devices[1:]) == {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0"}
