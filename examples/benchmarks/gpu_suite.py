"""Runs the tests that need a GPU and keeps what came out, since continuous integration has none.

python -m examples.benchmarks.gpu_suite --out examples/benchmarks/results/gpu-tests-h200.json
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from examples.benchmarks.environment import describe

ROOT = Path(__file__).parents[2]

# Several workers of pytest-xdist share one GPU: none may keep memory that its tests need no more.
_SHARED_GPU = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pytest", nargs=argparse.REMAINDER, default=[], help="further arguments for pytest, last")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        command = [sys.executable, "-m", "pytest", "tests", "-m", "gpu", f"--junitxml={report}"]
        command += ["--dist=load", *args.pytest]  # most are in a few files
        status = subprocess.run(command, cwd=ROOT, check=False, env=os.environ | _SHARED_GPU).returncode
        suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    outcomes = {f"{case.attrib['classname']}::{case.attrib['name']}": _outcome(case) for case in suite.iter("testcase")}
    results = {"benchmark": "gpu suite", "environment": describe("flax"), **counts, "outcomes": outcomes}
    args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print({name: results[name] for name in counts})
    return status


def _outcome(case: ElementTree.Element) -> str:
    """ "passed", or what else with the beginning of the reason."""
    for child in case:
        if child.tag in ("failure", "error", "skipped"):
            return f"{child.tag}: {child.attrib.get('message', '')[:300]}"
    return "passed"


if __name__ == "__main__":
    sys.exit(main())
