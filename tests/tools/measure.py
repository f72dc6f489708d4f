"""How many planted faults the tests find, without a whole run for each fault.

One run of `make test` notes which tests reach which statement, in any process: a probe stands before the statement of each fault, and this module
is a plugin of pytest that notes when each test ran. Then each fault is planted alone, and the tests that reach its statement run, the cheapest file
first, until one fails. This edits the tree, so run it in a copy. A second copy that gets the same folder shares the work.
Another environment than the copy's own (that of a wheel) has no probes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.tools.plant import ROOT, Fault, Source, edit, find, plant, undo

FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
CAP_S = 360  # of a fault
# Each Python of the environment runs this at its start.
HIT = """
import builtins, os, time
def hit(site, now=time.time, get=os.environ.get, seen={}):
    key = site, os.getpid(), get("PYTEST_CURRENT_TEST"), get("PYTEST_XDIST_WORKER")
    if now() > seen.get(key, 0) + 1:
        seen[key] = now()
        out = os.open(PATH, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.write(out, "\\t".join(map(str, (*key, now(), ""))).encode() + b"\\n")
        os.close(out)
builtins._planted_probe = hit
"""
PROBE = '__import__("builtins").__dict__.get("_planted_probe", int)({site})\n'


class Ran(NamedTuple):
    """A test, the process and xdist's worker that ran it, and when."""

    test: str
    pid: str
    worker: str
    began_s: float
    ended_s: float

    @property
    def file(self) -> str:
        return self.test.partition("::")[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    began_s = time.time()
    try:
        return (yield)
    finally:
        line = (item.nodeid, os.getpid(), os.environ.get("PYTEST_XDIST_WORKER"), began_s, time.time())
        with Path(os.environ["PLANTED_TESTS"]).open("a") as out:
            out.write("\t".join(map(str, line)) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """What the import of a file reaches counts as a setup."""
    if isinstance(collector, pytest.Module):
        os.environ["PYTEST_CURRENT_TEST"] = f"{collector.nodeid} (setup)"
    try:
        return (yield)
    finally:
        os.environ.pop("PYTEST_CURRENT_TEST", None)


def measure(sample: Sequence[Fault], folder: Path) -> None:
    """Measure what the folder has no result of, and write its table. Tests that fail without a fault don't count."""
    folder.mkdir(parents=True, exist_ok=True)
    said = folder / "make-test.txt"
    if not said.exists() or " passed" not in said.read_text():
        for file in ("hits.tsv", "tests.tsv"):
            (folder / file).unlink(missing_ok=True)
        run_with_probes(sample, folder.resolve())
    if " passed" not in said.read_text():
        raise SystemExit(f"make test did not end: {said}")
    fails = set(FAILED.findall(said.read_text()))
    ran = [Ran(*of, float(a), float(b)) for *of, a, b in _lines(folder / "tests.tsv") if of[0] not in fails]
    hits = _lines(folder / "hits.tsv")
    for n, fault in enumerate(sample):
        with contextlib.suppress(FileExistsError), (folder / f"{n}.json").open("x") as out:
            tests = covering([hit for hit in hits if hit[0] == str(n)], ran)
            result = {"result": "survived", "by": "no test reaches it"}
            if tests:
                result = run_fault(fault, tests, f"{folder.resolve()}/{n}")
            json.dump(result, out)
            print(n, fault.path, fault.function, fault.operator, result, flush=True)
    results = [
        json.loads((folder / f"{n}.json").read_text() or '{"result": "not measured", "by": ""}')
        for n in range(len(sample))
    ]
    (folder / "found.md").write_text(table(sample, results))


def _lines(file: Path) -> list[list[str]]:
    return [line.split("\t") for line in file.read_text().splitlines()] if file.exists() else []


def run_with_probes(sample: Sequence[Fault], folder: Path) -> None:
    changed: dict[str, bytes] = {}
    for path in {fault.path for fault in sample}:
        source = (ROOT / path).read_bytes()
        statements, lines = Source(path, source).statements(), source.splitlines(keepends=True)
        places = [
            (one.line, n) for n, fault in enumerate(sample) if fault.path == path and (one := find(fault, statements))
        ]
        for line, n in sorted(places, reverse=True):
            indent = len(lines[line - 1]) - len(lines[line - 1].lstrip())
            lines.insert(line - 1, b" " * indent + PROBE.format(site=n).encode())
        changed[path] = b"".join(lines)
    at_start = Path(sysconfig.get_path("purelib")) / "_planted_probe.pth"
    at_start.with_suffix(".py").write_text(f"PATH = {str(folder / 'hits.tsv')!r}\n{HIT}")
    at_start.write_text("import _planted_probe\n")
    edit(changed)
    try:
        command = ["make", "test", "PYTEST_ARGS=-p tests.tools.measure"]
        with (folder / "make-test.txt").open("w") as out:
            subprocess.run(
                command,
                cwd=ROOT,
                env=os.environ | {"PLANTED_TESTS": str(folder / "tests.tsv")},
                stdout=out,
                stderr=out,
                check=False,
            )
    finally:
        undo()
        at_start.unlink()
        at_start.with_suffix(".py").unlink()


def covering(hits: Iterable[Sequence[str]], ran: Sequence[Ran]) -> dict[str, float]:
    """Return the tests that reach a statement, with their seconds: the cheapest file first, in each file as they ran.

    What the setup of a test reaches counts for its file, because other tests may use what it made. A server or worker names the test that started
    it; later it works for the tests that xdist's worker runs meanwhile.
    """
    workers = {one.pid for one in ran}
    chosen: set[Ran] = set()
    for _, pid, test, worker, at_s, _ in hits:
        node, _, phase = test.rpartition(" ")
        chosen |= {
            one for one in ran if one.test == node or (phase == "(setup)" and one.file == node.partition("::")[0])
        }
        if pid not in workers:
            chosen |= {
                one for one in ran if one.began_s <= float(at_s) <= one.ended_s and worker in {one.worker, "None"}
            }
    costs = Counter[str]()
    for one in chosen:
        costs[one.file] += one.ended_s - one.began_s  # type: ignore[assignment]
    return {
        one.test: one.ended_s - one.began_s
        for one in sorted(chosen, key=lambda one: (costs[one.file], one.file, one.began_s))
    }


def run_fault(fault: Fault, tests: dict[str, float], mark: str) -> dict[str, Any]:
    """Plant a fault and run tests until one fails. A test that hangs fails too."""
    limit = f"faulthandler_timeout={60 + 3 * max(tests.values()):.0f}"
    command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", "-o", limit, *tests]
    environment = os.environ | {"CAIRN_TESTS": "ci", "TZ": "UTC", "PLANTED": mark}
    began_s = time.monotonic()
    plant(fault)
    with Path(f"{mark}.txt").open("w+") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True)
        try:
            code = process.wait(CAP_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill_marked(mark)
            process.wait()
            undo()
        out.seek(0)
        failed = FAILED.search(out.read())
    result = {None: "not within the cap", 0: "survived"}.get(code, "found")
    by = failed[1] if failed else "" if result == "survived" else f"exit code {code}"
    return {"result": result, "by": by, "tests": len(tests), "seconds": round(time.monotonic() - began_s)}


def _kill_marked(mark: str) -> None:
    """End the tests, and servers that they left behind: all that inherited the mark."""
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"PLANTED={mark}".encode() in environment.read_bytes().split(b"\0"):
                os.kill(int(environment.parent.name), signal.SIGKILL)


def table(sample: Sequence[Fault], results: Sequence[dict[str, Any]]) -> str:
    """Return the counts by room and a line for each fault, as Markdown."""
    kinds = sorted({result["result"] for result in results})
    counts = Counter((fault.room, result["result"]) for fault, result in zip(sample, results, strict=True))
    found = sum(n for (_, kind), n in counts.items() if kind == "found")
    rows = [["room", *kinds], ["---"] * (len(kinds) + 1)]
    rows += [[room, *(str(counts[room, kind]) for kind in kinds)] for room in sorted({fault.room for fault in sample})]
    rows += [[], ["#", "file", "function", "operator", "result", "by"], ["---"] * 6]
    for n, (one, of) in enumerate(zip(sample, results, strict=True)):
        rows += [[str(n), one.path, f"`{one.function}`", one.operator, of["result"], of["by"]]]
    lines = [f"| {' | '.join(row)} |" if row else "" for row in rows]
    return "\n".join([f"`make test` finds {found} of {len(sample)} planted faults.", "", *lines, ""])
