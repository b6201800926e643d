from __future__ import annotations

from pytest_vllm_cleanup.diagnosis.findings import Diagnosis, Finding, grouped

MIB = 1 << 20


def tensor(size, holder, **more):
    return Finding(f"uint8 tensor of shape ({size},)", size * MIB, "cuda:0", (holder,) if holder else (), **more)


def test_things_that_differ_in_numbers_only_are_one_mistake():
    findings = grouped([tensor(4, "KEPT[0] -> Tensor"), tensor(8, "KEPT[11] -> Tensor"), tensor(2, "CACHE['a']")])
    assert [(finding.count, finding.bytes, finding.holder) for finding in findings] == [
        (2, 12 * MIB, "KEPT[11] -> Tensor"),
        (1, 2 * MIB, "CACHE['a']"),
    ]
    assert findings[0].lines() == [
        "uint8 tensor of shape (8,) and 1 more, 12 MiB on cuda:0",
        "  held by KEPT[11] -> Tensor",
    ]


def test_things_on_different_devices_stay_apart():
    other = Finding("uint8 tensor", MIB, "cuda:1", ("KEPT[0]",))
    assert len(grouped([tensor(1, "KEPT[0]"), other])) == 2


def test_all_holders_and_the_allocation_are_shown():
    finding = Finding("tensor", None, "cuda:0", ("A[0]", "B.b"), stack=("a.py:1 f", "a.py:2 g"))
    assert finding.lines() == [
        "tensor on cuda:0",
        "  held by A[0]",
        "  and by B.b",
        "  allocated at",
        "    a.py:1 f",
        "    a.py:2 g",
    ]


def test_a_process_holds_memory_itself():
    finding = Finding("process 7 (python) with 2 MiB", 2 * MIB, "cuda:0", itself=True)
    assert finding.lines() == ["process 7 (python) with 2 MiB"]
    assert Diagnosis((tensor(4, ""), finding)).holder == "process 7 (python) with 2 MiB"


def test_the_first_holder_that_was_found_is_the_headline():
    assert Diagnosis((tensor(4, ""), tensor(2, "B.b"), tensor(1, "C.c"))).holder == "B.b"
    assert Diagnosis((tensor(4, ""),)).holder == ""


def test_what_two_searches_found_is_said_once():
    first = Diagnosis((tensor(4, "A"),), ("a remark",), 1.0)
    second = Diagnosis((tensor(4, "A"), tensor(2, "B")), ("a remark", "another"), 2.0, finished=False)
    both = first.plus(second)
    assert [finding.holder for finding in both.findings] == ["A", "B"]
    assert both.remarks == ("a remark", "another")
    assert both.lines()[-1] == "the search for holders was ended after 3.0 s; there may be more"
