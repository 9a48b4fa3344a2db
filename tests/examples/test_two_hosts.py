"""Two processes decode with one model: the same tokens as one, and no waiting for a peer that has stopped."""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from examples import two_hosts

SCRIPT = Path(__file__).parents[2] / "examples" / "two_hosts.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *options]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.full
def test_two_processes_give_the_tokens_of_one_device() -> None:
    done = run("--max-tokens", "8", "--tokens-per-call", "4")
    rows = [line.split(",") for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert [len(row) for row in rows] == [8, 8, 8]
    assert len({token for row in rows for token in row}) > 5
    assert "one device gives the same 24 tokens" in done.stderr


def test_a_peer_that_does_not_come_ends_the_run_with_an_error() -> None:
    done = run("--process", "0", "--coordinator", f"127.0.0.1:{two_hosts.free_port()}", "--timeout", "2")
    assert done.returncode == 1
    assert "two_hosts.py: error: process 0: meeting the other process: " in done.stderr
    assert "The other process has ended, hangs, or is slower than --timeout 2 allows" in done.stderr
    assert "process 0 of 2 was ended with status 3" in done.stderr


def test_a_process_that_is_killed_ends_the_other(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, sys, time\n"
        "if sys.argv[sys.argv.index('--process') + 1] == '1': os.kill(os.getpid(), 9)\n"
        "time.sleep(100)\n"
    )
    monkeypatch.setattr(two_hosts, "__file__", str(script))
    begin = time.monotonic()
    assert two_hosts.main(["--timeout", "1"]) == 1
    assert time.monotonic() - begin < 20
    error = capfd.readouterr().err
    assert "process 0 of 2 was stopped, as it did not end by itself" in error
    assert "process 1 of 2 was ended by SIGKILL" in error


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """With what this process would have been ended, had it been."""
    statuses: list[int] = []
    monkeypatch.setattr(two_hosts.os, "_exit", statuses.append)
    return statuses


def test_waiting_ends_at_the_limit(ended: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    with two_hosts.time_limit(argparse.Namespace(process=1, timeout=0.05), "reading the prompts"):
        time.sleep(0.5)
    assert ended == [two_hosts.LOST]
    assert "process 1: reading the prompts: expected an end within 0.05 s, got none" in capsys.readouterr().err


def test_a_collective_that_fails_ends_the_run(ended: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    with two_hosts.time_limit(argparse.Namespace(process=0, timeout=60), "decoding"):
        raise jax.errors.JaxRuntimeError("Gloo all-reduce failed: connection closed\nmore")
    assert ended == [two_hosts.LOST]
    assert "process 0: decoding: Gloo all-reduce failed: connection closed. The other" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--process", "0"], ["--coordinator", "127.0.0.1:1"], ["--timeout", "0"]])
def test_bad_arguments_are_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        two_hosts.main(options)
