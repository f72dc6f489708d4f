"""A worker that a signal ends: what it was doing is in the file that Spark reads, and the driver says it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from pyspark import util

from cairn.spark.first_cause import first_cause
from cairn.spark.last_words import explain_death, last_words
from cairn.testing import PipelineTester
from state_backend.values.doing import doing, heard_by, say_part
from state_backend.values.errors import WorkerDied
from tests.support.counting import DAY, counting

CRASHED = """An error occurred while calling o49.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 0.0 failed 1 times, most recent failure: Lost task 0.0 \
in stage 0.0 (TID 0) (192.0.2.2 executor driver): org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)"""
JAVA = "\n\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator\nCaused by: java.io.EOFException\n\t... 21 more\n\nDriver stacktrace:"
STACK = 'Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent call first):\n  File "rocks.py", line 212 in __init__'


@pytest.mark.parametrize(
    ("told", "says", "stack"),
    [
        (
            f": cairn: shard 3: restoring from checkpoint 5, opening RocksDB\n{STACK}\n",
            "the Python worker of shard 3 crashed by SIGSEGV while restoring from checkpoint 5, opening RocksDB; nothing was committed\nThe stack of Python's fault handler",
            [STACK],
        ),
        (
            ": cairn: shard 3: processing keys from key group 17 on\n",
            "the Python worker of shard 3 was killed while processing keys from key group 17 on; nothing was committed\nIt left no stack, as after SIGKILL",
            [],
        ),
        (f": {STACK}\n", "a Python worker of Spark crashed by SIGSEGV; nothing was committed", [STACK]),
        (
            ". Consider setting 'spark.sql.execution.pyspark.udf.faulthandler.enabled' or ...",
            "a Python worker of Spark was killed; nothing was committed",
            [],
        ),
    ],
    ids=["crash", "kill", "crash elsewhere", "without the setting"],
)
def test_a_dead_python_worker_is_reported_with_its_phase_and_stack(told: str, says: str, stack: list[str]) -> None:
    with pytest.raises(WorkerDied) as raised, first_cause():
        raise RuntimeError(CRASHED + told + JAVA)
    assert str(raised.value).startswith(says)
    assert getattr(raised.value, "__notes__", []) == stack
    assert ("faulthandler.enabled=true" in str(raised.value)) == ("Consider" in told)


def test_other_errors_are_not_reported_as_a_dead_worker() -> None:
    assert explain_death("java.io.EOFException\n\tat org.apache.spark") is None


def test_the_worker_file_holds_only_the_newest_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault handler has the file open and writes on where the words end."""
    with (tmp_path / "worker").open("w") as file:
        monkeypatch.setattr(util, "_faulthandler_helper", SimpleNamespace(_log_file=file), raising=False)
        with last_words("shard 2"):
            with doing("restoring from checkpoint 12345"):
                pass
            with doing("processing rows"):
                say_part("processing keys from key group 9 on")
                file.write("Fatal Python error")
                file.flush()
                read = (tmp_path / "worker").read_text()
                assert read == "cairn: shard 2: processing keys from key group 9 on\nFatal Python error"
        assert (tmp_path / "worker").read_text() == ""


def test_each_phase_of_an_interval_is_reported() -> None:
    tester = PipelineTester(counting(parallelism=1), input_schema="user string, item string, amount long", every=DAY)
    tester.run([("ann", "fig", 1)])
    said: list[str] = []
    with heard_by(said.append):
        tester.run([("ann", "fig", 1)])
    assert said[0] == "restoring from checkpoint 1"
    assert "restoring from checkpoint 1, opening RocksDB" in said
    assert any(words.startswith("processing keys from key group ") for words in said)
    assert {"firing timers", "taking the checkpoint", "taking the checkpoint, merging files"} <= {*said}
    assert said[-1] == "" and len(said) < 30
