"""Random histories of a few pipelines: real processes on one folder, stopped, killed, with skewed clocks and stale listings.

    python -m tests.support.histories FOLDER FIRST COUNT [--without kill,stop,skew,stale] [--plant NAME] [--keep]

It prints a line of JSON for each history. The histories run in processes that are forked from this one, which has imported everything
and has no other thread.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from state_backend.adapters.rocks import EngineOptions, RocksStore
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.sweep_files import sweep
from state_backend.checkpoint.trials import sweep_trials
from state_backend.formats import paths
from state_backend.values.errors import CairnError
from tests.support import history_pipeline
from tests.support.disturbed_storage import Disturbances, DisturbedStorage, Process, disturb, drawn
from tests.support.history_operations import ALLOWED, FORKS, MAIN, Work, finish, prepare_process
from tests.support.history_oracle import Difference, Oracle, check_at_rest, check_files
from tests.support.planted_faults import PLANTED

KINDS = ("kill", "stop", "skew", "stale")
OPERATIONS, HOSTS = 40, 2
OP_LIMIT_S = 60.0
LATER_MS = 30 * 86_400_000


@dataclass(kw_only=True)
class Running:
    """A process at work. ``resume_s``: when it goes on if it stopped; ``kill_s``: when it is killed; by the monotonic clock."""

    number: int
    name: str
    told: dict[str, Any]
    began_s: float
    kill_s: float | None
    resume_s: float | None = None


@dataclass(kw_only=True)
class Report:
    """What became of a history. ``differences``: none, if all is as the oracle says."""

    seed: int
    differences: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    stops: int = 0
    commits: int = 0
    seconds: float = 0.0

    def line(self) -> str:
        return json.dumps(vars(self) | {"outcomes": dict(self.outcomes), "seconds": round(self.seconds, 2)})


class History:
    """One history in an empty folder."""

    def __init__(self, folder: Path, seed: int, kinds: tuple[str, ...], plant: str | None, operations: int) -> None:
        self.folder = folder
        self.chosen = random.Random(seed)
        self.kinds = kinds
        self.plant = plant
        self.operations = operations
        self.report = Report(seed=seed)
        self.codes = {MAIN: 1}
        self.cached = self.chosen.random() < 0.5
        self.layout = self.chosen.choice(["records", "files", "files", "manifests"])
        self.stale_s = self.chosen.choice([0.3, 1.0, 3.0])
        self.skews_s = [self.chosen.choice([0.0, 3600.0, -3600.0]) for _ in range(HOSTS)]
        self.prepared: list[dict[str, Any]] = []
        self.retries: list[dict[str, Any]] = []
        self.running: dict[int, Running] = {}
        self.killed: set[int] = set()
        for name in ("root", "savepoints", "exports", "inputs", "journal", "ops", "disk/tmp", "disk/memory"):
            (folder / name).mkdir(parents=True)
        for n in range(HOSTS):
            (folder / f"hosts/h{n}").mkdir(parents=True)
        history_pipeline.INPUTS["folder"] = folder / "inputs"

    def go(self) -> Report:
        began_s, number, width = time.monotonic(), 0, self.chosen.randint(3, 5)
        names, weights = zip(*((name, weight) for name, (_, weight, _) in ALLOWED.items()), strict=True)
        while number < self.operations or self.running:
            if number < self.operations and len(self.running) < width:
                number += 1
                self._start(number, self.chosen.choices(names, weights)[0])
            self._watch()
            time.sleep(0.001)
        self._end(number)
        self.report.seconds = time.monotonic() - began_s
        return self.report

    # --- processes ------------------------------------------------------------------------------------------------------------------

    def _start(self, number: int, name: str) -> None:
        told: dict[str, Any] = {}
        if name == "commit":
            if not self.prepared:
                name = "process"
            else:
                at = self.chosen.randrange(len(self.prepared))
                told["prepared"] = self.prepared[at] if self.chosen.random() < 0.3 else self.prepared.pop(at)
        if name == "process" and self.retries and self.chosen.random() < 0.5:
            told["retry"] = self.retries.pop()
        host = self.chosen.randrange(HOSTS)
        how = drawn(self.chosen, self.kinds, self.stale_s, self.skews_s[host])
        kill_s = self.chosen.uniform(0, 0.5) if "kill" in self.kinds and self.chosen.random() < 0.1 else None
        seed = self.chosen.random()

        def work() -> Any:
            disturb(Process(folder=self.folder, host=f"h{host}", number=number, disturbances=how))
            return ALLOWED[name][0](self._work(seed, told, f"h{host}"))

        pid = self._fork(number, name, work)
        now_s = time.monotonic()
        kill_at_s = None if kill_s is None else now_s + kill_s
        self.running[pid] = Running(number=number, name=name, told=told, began_s=now_s, kill_s=kill_at_s)

    def _work(self, seed: float, told: dict[str, Any], host: str = "h0") -> Work:
        chosen = random.Random(seed)
        return Work(history=self.folder, chosen=chosen, codes=self.codes, cached=self.cached, host=host, told=told)

    def _fork(self, number: int, name: str, work: Callable[[], Any]) -> int:
        pid = os.fork()
        if pid:
            return pid
        told: dict[str, Any]
        try:
            tempfile.tempdir = str(self.folder / "disk/tmp")
            descriptor = os.open(self.folder / f"ops/{number}-{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            prepare_process(self.layout)
            if self.plant:
                PLANTED[self.plant]()
            told = {"outcome": "ok", "value": work()}
        except CairnError as error:
            told = {"outcome": type(error).__name__, "value": str(error), "trace": traceback.format_exc()}
        except Difference as error:
            told = {"outcome": "DIFFERENCE", "value": str(error), "trace": traceback.format_exc()}
        except BaseException as error:
            told = {"outcome": "CRASH", "value": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        part = self.folder / f"ops/{number}-{name}.part"
        part.write_text(json.dumps(told, default=str, indent=1))
        part.replace(part.with_suffix(".json"))
        os._exit(0)

    def _watch(self) -> None:
        now_s = time.monotonic()
        for pid, running in [*self.running.items()]:
            ended, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if ended and os.WIFSTOPPED(status):
                self.report.stops += 1
                running.resume_s = now_s + self.chosen.choice([0.05, 0.3, 1.0, 2.0])
            elif ended:
                del self.running[pid]
                self._ended(pid, running, status)
                continue
            if running.resume_s is not None and now_s > running.resume_s:
                running.resume_s = None
                os.kill(pid, signal.SIGCONT)
            if running.kill_s is not None and now_s > running.kill_s:
                os.kill(pid, signal.SIGKILL)
            if now_s - running.began_s > OP_LIMIT_S:
                self.report.differences.append(f"{running.number}-{running.name} hangs")
                os.kill(pid, signal.SIGKILL)

    def _ended(self, pid: int, running: Running, status: int) -> None:
        told = self._told(running.number, running.name)
        if told is None:
            assert os.WIFSIGNALED(status), (running, status)
            if os.WTERMSIG(status) != signal.SIGKILL:
                crashed = signal.Signals(os.WTERMSIG(status)).name
                self.report.differences.append(f"{running.number}-{running.name} crashed by {crashed}")
            self.killed.add(pid)
            self.report.kills += 1
            self.report.outcomes[f"{running.name}: killed"] += 1
            outcome, value = "killed", None
        else:
            outcome, value = told["outcome"], told["value"]
            self.report.outcomes[f"{running.name}: {outcome}"] += 1
            if outcome != "ok" and outcome not in ALLOWED[running.name][2]:
                self.report.differences.append(f"{running.number}-{running.name}: {outcome}: {value}")
        if running.name == "process":
            if outcome == "ok":
                self.prepared.append(value)
                if self.chosen.random() < 0.2:
                    self.retries.append(value)
            elif "retry" in running.told:
                self.retries.append(running.told["retry"] | {"try": running.told["retry"]["try"] + 1})
        if running.name == "deploy" and outcome == "ok" and value is not None:
            self.codes[MAIN] = value["deployed"]

    def _told(self, number: int, name: str) -> dict[str, Any] | None:
        file = self.folder / f"ops/{number}-{name}.json"
        return json.loads(file.read_text()) if file.exists() else None

    # --- the end --------------------------------------------------------------------------------------------------------------------

    def _end(self, number: int) -> None:
        """Everything is let finish by processes that nothing disturbs, then swept, then compared."""
        there = [name for name in (MAIN, *FORKS) if (self.folder / "root" / name).exists()]
        calm = Disturbances()

        def alone(name: str, work: Callable[[], Any]) -> None:
            nonlocal number
            number += 1

            def undisturbed() -> Any:
                disturb(Process(folder=self.folder, host="calm", number=number, disturbances=calm))
                return work()

            pid = self._fork(number, name, undisturbed)
            os.waitpid(pid, 0)
            told = self._told(number, name) or {"outcome": "died", "value": ""}
            if told["outcome"] != "ok":
                self.report.differences.append(f"{number}-{name}: {told['outcome']}: {told['value']}")

        for name in there:
            alone(f"rest-{name}", lambda name=name: self._at_rest(name))
        for name in there:
            alone(f"finish-{name}", lambda name=name: finish(self._work(0.0, {"pipeline": name})))
        alone("leases", lambda: self._end_leases(there))
        alone("sweep", lambda: self._sweep(there))
        for name in there:
            alone(f"end-{name}", lambda name=name: self._at_end(name))
        alone("disk", self._check_disk)
        for name in there:
            with suppress(OSError):
                self.report.commits += len([*(self.folder / "root" / name / "checkpoints").iterdir()])

    def _at_rest(self, name: str) -> None:
        if (self.folder / "root" / name / paths.record(1)).exists():
            with work_folder("verify") as work:
                check_at_rest(Oracle(self.folder, self.folder / "root", name), work)

    def _at_end(self, name: str) -> None:
        oracle = Oracle(self.folder, self.folder / "root", name)
        if (oracle.folder / paths.record(1)).exists():
            self._at_rest(name)
            check_files(oracle)
        else:
            left = [p for p in oracle.folder.rglob("*") if p.is_file() and ".tmp" not in p.parts]
            if left:
                raise Difference(f"{oracle.folder}: without a record, files are left over: {left[:8]}")

    def _end_leases(self, there: list[str]) -> None:
        """What fifteen minutes would do to the leases of readers that were killed. Others gave theirs back."""
        for name in there:
            for file in (self.folder / "root" / name / "leases").glob("*.json"):
                pid = int(json.loads(file.read_text())["body"]["holder"].rpartition(" ")[2])
                if pid not in self.killed:
                    raise Difference(f"process {pid} was not killed, and left {file}")
                file.unlink()

    def _sweep(self, there: list[str]) -> None:
        later_ms = time.time_ns() // 1_000_000 + LATER_MS
        sweep_trials(str(self.folder / "root"), MAIN, now_ms=later_ms)
        for name in there:
            storage = DisturbedStorage(self.folder / "root" / name, leftover_min_age_s=-LATER_MS)
            with suppress(CairnError):
                storage.create("unnamed", b"")  # the first write removes what killed processes were writing
                storage.delete("unnamed")
            sweep(storage, name, min_age=timedelta(0))

    def _check_disk(self) -> None:
        """Nothing is left of trials, and nothing on the hosts' own disks."""
        options = EngineOptions(cache_dir=None, metadata_dir=str(self.folder / "disk/memory"))
        with work_folder("last") as work, RocksStore(work / "db", options):
            pass  # who opens a store next removes what a killed process had in memory
        while left := [*_files_below(self.folder / "disk/tmp")] and _removes_some(self.folder / "disk/tmp"):
            pass
        left = [
            p for p in [*(self.folder / "disk/tmp").rglob("*"), *(self.folder / "disk/memory").rglob("*")] if p.name
        ]
        left = [p for p in left if p.parent.name != "tmp"]
        trials = [*(self.folder / "root" / ".trials").rglob("*")]
        if trials:
            raise Difference(f"of trials are left over: {[str(p) for p in trials[:8]]}")
        if left:
            raise Difference(f"on the disk are left over: {[str(p) for p in left[:8]]}")


def _files_below(folder: Path) -> Iterator[Path]:
    return (p for p in folder.rglob("*") if p.is_file())


def _removes_some(folder: Path) -> bool:
    """Whether one more task takes some abandoned folders away."""
    before = {*folder.rglob("*")}
    with work_folder("last"):
        pass
    return {*folder.rglob("*")} < before


def run(folder: Path, seed: int, kinds: tuple[str, ...], plant: str | None, *, keep: bool, operations: int) -> Report:
    """One history in a folder of its own, which stays if there is a difference or ``keep`` is true."""
    where = folder / f"history-{seed}"
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(parents=True)
    report = History(where, seed, kinds, plant, operations).go()
    (where / "report.json").write_text(report.line())
    if not report.differences and not keep:
        shutil.rmtree(where)
    return report


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--without", default="")
    parser.add_argument("--plant")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--until-found", action="store_true")
    parser.add_argument("--operations", type=int, default=OPERATIONS)
    given = parser.parse_args(arguments)
    kinds = tuple(kind for kind in KINDS if kind not in given.without.split(","))
    gc.freeze()
    found = 0
    for seed in range(given.first, given.first + given.count):
        report = run(given.folder, seed, kinds, given.plant, keep=given.keep, operations=given.operations)
        print(report.line(), flush=True)
        found += bool(report.differences)
        if found and given.until_found:
            break
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
