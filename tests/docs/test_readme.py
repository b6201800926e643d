"""What the documentation says against what the code does."""

from __future__ import annotations

import configparser
import inspect
import re
import subprocess
import sys

import pages
import pytest

import pytest_vllm_cleanup
from pytest_vllm_cleanup import markers, plugin, testing
from pytest_vllm_cleanup.checks import ledger, message
from pytest_vllm_cleanup.checks.result import Result
from pytest_vllm_cleanup.diagnosis.findings import Diagnosis, Finding
from pytest_vllm_cleanup.memory import DeviceVerdict, Verdict, expectation, format_size, rules
from pytest_vllm_cleanup.memory.units import parse_size

REFERENCE = pages.ROOT / "docs" / "reference.md"
CONCEPTS = pages.ROOT / "docs" / "concepts.md"
EXAMPLES = [path.read_text(encoding="utf-8") for path in sorted((pages.ROOT / "examples").rglob("*.py"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in pages.PAGES
    for number, block in enumerate(pages.blocks(page, "python"), start=1)
]


@pytest.fixture(scope="module")
def help_text():
    """What ``pytest --help`` says, with this plugin."""
    command = [sys.executable, "-m", "pytest", "--help", "-p", "no:cacheprovider"]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=pages.ROOT).stdout


@pytest.fixture(scope="module")
def environments():
    """Names of the environments of tox.ini."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(pages.ROOT / "tox.ini", encoding="utf-8")
    return {name.removeprefix("testenv:") for name in tox.sections() if name.startswith("testenv:")}


@pytest.mark.parametrize("block", BLOCKS)
def test_a_python_block_compiles_and_is_cut_from_an_example(block):
    compile(block, "block", "exec")
    assert any(block in example for example in EXAMPLES), "cut it from a file in examples/, which the tests run"


@pytest.mark.parametrize("pages_", [[pages.README], [REFERENCE]], ids=["README", "reference"])
def test_the_documented_options_are_those_that_exist(help_text, pages_):
    existing = set(re.findall(r"--vllm-cleanup-([\w-]+)", help_text))
    assert existing
    assert pages.words(r"`--vllm-cleanup-([\w-]+)`", *pages_) == existing
    assert pages.words(r"`vllm_cleanup_(\w+)`", *pages_) == set(re.findall(r"^  vllm_cleanup_(\w+)", help_text, re.M))
    assert {name.lower().replace("_", "-") for name in pages.words(r"`PYTEST_VLLM_CLEANUP_(\w+)`", *pages_)} == existing


def test_no_page_names_an_option_that_does_not_exist(help_text):
    for option in pages.words(r"--vllm-cleanup-\w+"):
        assert option in help_text
    for key in pages.words(r"\bvllm_cleanup_\w+"):
        assert key in help_text


def test_the_documented_fixtures_are_those_that_exist():
    documented = {name.strip("`") for name, *_ in pages.rows(REFERENCE, "## Fixtures")}
    assert documented == set(plugin.__all__)
    for name in documented:
        assert f"`{name}`" in pages.README.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("page", "heading"), [(REFERENCE, "## Marker"), (pages.README, "### Check tests: `gpu_released`")]
)
def test_the_documented_arguments_of_the_marker_are_its_own(page, heading):
    documented = [name.strip("`") for name, *_ in pages.rows(page, heading)]
    assert documented == list(inspect.signature(markers.gpu_released).parameters)


def test_the_documented_markers_are_those_that_exist():
    used = pages.words(r"pytest\.mark\.(\w+)") - {"skipif", "parametrize"}
    assert used == set(markers.ALL) - {"assert_gpu_released"}
    for name in markers.ALL:
        assert f"`{name}`" in REFERENCE.read_text(encoding="utf-8") or name in used


@pytest.mark.parametrize("name", [*pytest_vllm_cleanup.__all__, *testing.__all__])
def test_a_public_name_is_documented_with_its_own_arguments(name):
    value = getattr(testing if name in testing.__all__ else pytest_vllm_cleanup, name)
    section = REFERENCE.read_text(encoding="utf-8").split("\n## Public names\n")[1]
    signature = re.search(rf"^\| `{name}(?:\((.*?)\))?` \|", section, re.M)
    assert signature is not None, f"{name} is missing in reference.md"
    if signature[1] is not None:
        documented = re.findall(r"(\*{0,2}\w+)(?:=[^,]*)?(?:, |$)", signature[1])
        stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
        actual = inspect.signature(value).parameters.values()
        assert documented == [stars.get(parameter.kind, "") + parameter.name for parameter in actual]


def test_the_two_commands_are_those_that_run_for_every_change(environments):
    assert re.findall(r"^(tox run.*?)(?:  |$)", pages.blocks(pages.README, "")[1], re.M) == [
        "tox run -e demo",
        "tox run",
    ]
    ci = (pages.ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.findall(r"bin/(tox run.*?) <", ci) == ["tox run", "tox run -e demo"]
    assert pages.words(r"tox (?:run|exec) -e (\w+)") == environments


def test_the_leak_in_the_readme_is_what_the_code_says():
    report = next(block for block in pages.blocks(pages.README, "text") if "LEAKED" in block)
    line = next(line for line in report.splitlines() if "; waited " in line)
    size, unit = r"([\d.]+ [KMGT]?i?B)", r"\((\d+) bytes\)"
    found = re.fullmatch(
        rf"(\S+) left {size} {unit} on (\S+) by (.+) \({size} before, {size} after, tolerance {size}\); "
        r"waited ([\d.]+) s \(stuck: flat for ([\d.]+) s\)\. (?:It left (an engine|\d+ engines) alive\. )?"
        r"(?:Held by (.+?)\. )?.+",
        line,
    )
    assert found is not None
    name, stayed, exact, device, meter, before, after, tolerance, waited, stood, engines, holder = found.groups()
    assert format_size(int(exact)) == stayed
    leak = DeviceVerdict(
        "leaked", "host", device, meter, int(exact), parse_size(before), parse_size(after), parse_size(tolerance)
    )
    alive = {None: 0, "an engine": 1}.get(engines) if not str(engines)[:1].isdigit() else int(engines.split()[0])
    verdict = Verdict("leaked", "host", int(exact), (leak,))
    diagnosis = Diagnosis((Finding("engine", None, "", (holder,)),)) if holder else None
    result = Result(
        verdict,
        {},
        {},
        float(waited),
        "flat",
        stood=float(stood),
        abandoned=("engine",) * alive,
        diagnosis=diagnosis,
    )
    assert message.sentence(name, result) == line


def test_the_documented_limits_are_those_of_the_code():
    table = {row[0].partition(":")[0]: row[1:] for row in pages.rows(CONCEPTS, "## What is compared")}
    exact, overhead = format_size(rules.EXACT_TOLERANCE), format_size(expectation.Grants().overhead)
    assert [row[0] for row in table.values()] == [exact] * 4 + [
        format_size(rules.DEVICE_TOLERANCE),
        format_size(rules.HOST_TOLERANCE),
    ]
    assert overhead in table["free blocks of the torch allocator that it cannot hand back"][1]
    below = table["this process below its allocator"][1]
    assert overhead in below
    assert format_size(expectation.CONTEXT_LIMIT) in below
    assert format_size(ledger.FIRST_ENGINE_LIMIT) in table["private host memory, with vLLM's build for CPUs"][1]
    text = " ".join(CONCEPTS.read_text(encoding="utf-8").split())
    here, elsewhere = format_size(ledger.WORKING_ALLOWANCE), format_size(ledger.WORKING_ALLOWANCE_ELSEWHERE)
    assert f"{here} more in this process, or {elsewhere} in host memory or a child process" in text


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_a_link_leads_to_a_file(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_figures_in_the_readme_are_measured_or_said_to_be_missing():
    text = pages.README.read_text(encoding="utf-8")
    measured = re.search(r"<!-- measured:begin.*?-->\n(.*?)<!-- measured:end -->", text, re.DOTALL)
    assert measured is not None
    results = {path.name for path in (pages.ROOT / "benchmarks" / "results").glob("*.json")}
    if "|" in measured[1]:
        assert any(name in measured[1] for name in results), "name the file in benchmarks/results/ that has them"
    else:
        assert "No results are recorded yet" in measured[1]
