"""The counters benchmark without `ncu`: its table is read in our units, and what is missing is said."""

import csv
import io
import subprocess

import pytest

from examples.benchmarks import counters


def answer(monkeypatch, rows):
    """What `ncu` prints: the program's own lines, then a table."""
    table = io.StringIO()
    csv.writer(table, quoting=csv.QUOTE_ALL).writerows([("ID", "Metric Name", "Metric Unit", "Metric Value"), *rows])
    printed = "==PROF== Connected\n" + table.getvalue()
    run = subprocess.CompletedProcess([], 0, stdout=printed, stderr="no right to read counters")
    monkeypatch.setattr(counters.subprocess, "run", lambda *_, **__: run)


def test_values_come_in_our_units(monkeypatch):
    units = {"microseconds": ("nsecond", "246,688"), "megabytes_read": ("Mbyte", "1,074.46")}
    rows = [("0", name, *units.get(ours, ("", "7"))) for ours, name in counters.COUNTERS.items()]
    answer(monkeypatch, rows)
    measured = counters.count("64 x 4096")
    assert measured["microseconds"] == pytest.approx(246.688)
    assert measured["megabytes_read"] == pytest.approx(1074.46)
    assert measured["registers"] == 7


def test_without_counters_it_says_what_was_printed(monkeypatch):
    answer(monkeypatch, [])
    with pytest.raises(RuntimeError, match=r"expected a value of gpu__time_duration.sum, got .*no right to read"):
        counters.count("64 x 4096")
