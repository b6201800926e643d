from __future__ import annotations

import pytest

from pytest_vllm_cleanup import markers
from pytest_vllm_cleanup.markers import MarkerError, Requirement, evaluate

pytestmark = pytest.mark.usefixtures("hasty")


def mark(name="gpu_released", *args, **kwargs):
    return getattr(pytest.mark, name)(*args, **kwargs).mark


def test_values_are_parsed_into_bytes_seconds_and_device_names():
    assert evaluate(mark("gpu_released", "4 KiB", "2 min", [0, "1", "cuda:2", "host"], True, "why")) == Requirement(
        tolerance=4096, timeout=120.0, devices=("cuda:0", "cuda:1", "cuda:2", "host"), check=True, reason="why"
    )


def test_nothing_given_leaves_everything_to_the_settings():
    assert evaluate(mark()) == Requirement(None, None, None, True, None)


def test_zero_is_a_tolerance_and_not_nothing():
    assert evaluate(mark(tolerance=0)).tolerance == 0
    assert evaluate(mark(devices=0)).devices == ("cuda:0",)


BAD = [
    ({"tolerence": 1}, "the arguments are tolerance, timeout, devices, check, reason"),
    ({"tolerance": -1}, "tolerance: not a size: -1"),
    ({"tolerance": "many"}, "tolerance: not a size: 'many'"),
    ({"tolerance": 1.5}, "tolerance: not a size: 1.5"),
    ({"timeout": "never"}, "timeout: not a duration: 'never'"),
    ({"timeout": -1}, "timeout: not a duration: -1"),
    ({"devices": -1}, "devices: not a device: -1. Write for example 0, 'cuda:1', 'host'"),
    ({"devices": True}, "devices: not a device: True"),
    ({"devices": 1.5}, "devices: not a device: 1.5"),
    ({"devices": []}, "devices: no device: name at least one"),
    ({"check": "no"}, "check='no': expected True or False"),
    ({"reason": 3}, "reason=3: expected text"),
]


@pytest.mark.parametrize(("arguments", "text"), BAD)
def test_bad_arguments_are_refused_with_what_is_valid(arguments, text):
    with pytest.raises(MarkerError) as caught:
        evaluate(mark(**arguments))
    assert str(caught.value).startswith("@pytest.mark.gpu_released")
    assert text in str(caught.value)


def test_an_error_names_the_marker_as_it_was_written():
    with pytest.raises(MarkerError, match=r"^@pytest.mark.assert_gpu_released\(1, 2, size=3\): the arguments are tol"):
        evaluate(mark("assert_gpu_released", 1, 2, size=3))


def test_all_are_described():
    lines = markers.descriptions()
    assert [line.partition("(")[0] for line in lines] == list(markers.ALL)
    assert "alias of gpu_released" in lines[1]


def test_both_names_check_a_test(run):
    result = run("""
@pytest.mark.gpu_released
def test_one():
    gpu.allocated += 2 * MIB
@pytest.mark.assert_gpu_released
def test_other():
    gpu.allocated += 2 * MIB
def test_none():
    gpu.allocated += 2 * MIB
""")
    assert result.parseoutcomes() == {"passed": 3, "leaked": 2}


def test_the_closest_marker_decides_whatever_its_name(run):
    result = run("""
pytestmark = pytest.mark.gpu_released(tolerance="1 GiB")
def test_of_module():
    gpu.allocated += 3 * MIB
@pytest.mark.assert_gpu_released(tolerance="2 MiB")
def test_of_function_leaks():
    gpu.allocated += 3 * MIB
@pytest.mark.gpu_released(tolerance="2 MiB")
class TestIt:
    def test_of_class_leaks(self):
        gpu.allocated += 3 * MIB
    @pytest.mark.assert_gpu_released(check=False)
    def test_of_method(self):
        gpu.allocated += 3 * MIB
    @pytest.mark.parametrize("kind", [
        pytest.param("own", marks=pytest.mark.gpu_released(tolerance="4 MiB")),
        "leaks by class",
    ])
    def test_of_parameter(self, kind):
        gpu.allocated += 3 * MIB
""")
    assert result.parseoutcomes() == {"passed": 6, "leaked": 3}
    leaks = [line.split(" left ")[0] for line in result.outlines if " left " in line]
    assert leaks == [
        "test_inner.py::test_of_function_leaks",
        "test_inner.py::TestIt::test_of_class_leaks",
        "test_inner.py::TestIt::test_of_parameter[leaks by class]",
    ]


def test_bad_arguments_are_an_error_of_exactly_that_test(run):
    result = run("""
@pytest.fixture
def fixture():
    print("the fixture ran")
@pytest.mark.gpu_released(tolerence=1)
def test_typo(fixture):
    pass
@pytest.mark.gpu_released(check="no")
def test_flag():
    pass
@pytest.mark.gpu_released(devices="cuda:7")
def test_device():
    pass
@pytest.mark.gpu_released
def test_good():
    pass
def test_other():
    pass
""")
    assert result.ret == 1
    assert result.parseoutcomes() == {"passed": 2, "errors": 3}
    result.stdout.fnmatch_lines(
        [
            "*ERROR at setup of test_typo*",
            "@pytest.mark.gpu_released(tolerence=1): the arguments are tolerance, timeout, devices, check, reason",
            "@pytest.mark.gpu_released: check='no': expected True or False",
            "device cuda:7 cannot be measured here; these can: cuda:0, cuda:1",
        ]
    )
    assert "the fixture ran" not in result.stdout.str()
    assert "During handling" not in result.stdout.str()


OTHERS_GPUS = """
@pytest.mark.gpus(64)
def test_many(gpu_devices):
    pass
@pytest.mark.gpus("a100")
def test_kind():
    pass
@pytest.mark.gpus
def test_bare():
    pass
"""


@pytest.mark.parametrize("described", ["ini", "conftest", "off"])
def test_a_gpus_marker_of_the_suites_own_is_left_alone(run, pytester, described):
    if described == "ini":
        pytester.makeini("[pytest]\nmarkers =\n    gpus(kind): runs on such a GPU\n")
    line = 'config.addinivalue_line("markers", "gpus: needs GPUs")' if described == "conftest" else "pass"
    off = ["--vllm-cleanup-gpus=off"] if described == "off" else []
    conftest = f"def pytest_configure(config):\n    {line}\n"
    result = run(OTHERS_GPUS, "--strict-markers", *off, conftest=conftest)
    assert result.parseoutcomes() == {"passed": 3}
    if described == "ini":
        shown = run(OTHERS_GPUS, "--markers").stdout.str()
        assert shown.count("@pytest.mark.gpus") == 1


def test_wrong_arguments_of_the_gpus_marker_stay_an_error_where_it_is_ours(run):
    assert run(OTHERS_GPUS, "-k", "kind").parseoutcomes()["errors"] == 1
