"""Run the demo and check that it went as planned: one test leaks, and the one after it passes all the same."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
PLAN = {
    "test_engine_of_the_fixture": "released",
    "test_engine_in_a_global": "leaked",
    "test_after_the_leak": "released",
}


def main() -> int:
    """Return 0 if the demo went as planned. pytest itself ends with 1, as it does after every leak."""
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "demo.xml"
        pytest = [sys.executable, "-m", "pytest", str(HERE), "-v", "--disable-warnings", "-p", "no:cacheprovider"]
        status = subprocess.run([*pytest, f"--junitxml={junit}"], check=False).returncode
        surprises = [] if status == 1 else [f"pytest ended with {status} instead of 1"]
        surprises += compare(junit) if junit.exists() else ["pytest wrote no report"]
    if surprises:
        print("\nNOT as expected: " + "; ".join(surprises), file=sys.stderr)
        return 1
    print("\nas expected: 1 leaked, the test after it passed")
    return 0


def compare(junit: Path) -> list[str]:
    """Return what is different from the plan, one phrase for each test."""
    suite = next(ElementTree.parse(junit).iter("testsuite"))
    cases = {case.get("name", ""): case for case in suite.iter("testcase")}
    if cases.keys() != PLAN.keys():
        return [f"the tests are {', '.join(cases) or 'none'} instead of {', '.join(PLAN)}"]
    surprises = [f"{name} failed" for name, case in cases.items() if case.find("failure") is not None]
    for name, planned in PLAN.items():
        properties = {entry.get("name"): entry.get("value") for entry in cases[name].iter("property")}
        outcome = properties.get("gpu_memory_outcome", "not checked")
        if outcome != planned:
            surprises.append(f"{name}: memory {outcome} instead of {planned}")
    return surprises


if __name__ == "__main__":
    sys.exit(main())
