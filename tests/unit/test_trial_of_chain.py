"""A trial that covers a pipeline and those that read it, and its promotion, without Spark."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from cairn import testing, upstream, upstreams
from cairn.command.cli import app
from cairn.operations.intervals import read_upstreams
from cairn.operations.intervals.run_intervals import run_intervals
from cairn.rows.local_rows import LocalRows
from cairn.shipping.ship_processor import code_hash
from cairn.spark.ddl import parse_ddl_locally
from cairn.trials.try_code import intervals_that_read
from state_backend.adapters.local_storage import LocalStorage
from state_backend.chains.judge_inputs import Chains
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.log import read_log
from state_backend.inspection.compare_logs import made_within
from state_backend.values.inputs import Edge
from state_backend.values.intervals import Interval
from state_backend.values.zones import zone_of
from tests.support.counting import DAYS, INPUT_SCHEMA, START, day
from tests.support.faulty_storage import StopHere
from tests.support.trials import Averaging, Doubling, bytes_of, pipeline_of

CODE, HALF = "tests.unit.test_trial_of_chain", timedelta(hours=12)
HALVES = [Interval(START + n * HALF, START + (n + 1) * HALF) for n in range(8)]
Results = dict[str, dict[Interval, tuple[Any, ...]]]


class Rows(LocalRows):
    def unionByName(self, other: Rows, allowMissingColumns: bool = False) -> Rows:
        return rows_of(*(tuple(row.values()) for one in (self, other) for row in one.table.to_pylist()))


def rows_of(*rows: tuple[Any, ...]) -> Rows:
    return Rows([*rows], parse_ddl_locally(INPUT_SCHEMA), zone_of("UTC"))


SESSION: Any = testing.PlanningSession("UTC")
SESSION.createDataFrame = lambda data, schema: rows_of(*data)
YESTERDAY = {"yesterday": upstream("report", back=1), "own": upstream("board", back=1)}
SALES, REPORT = pipeline_of(name="sales"), pipeline_of(name="report", source=upstream("sales"))
THREE = upstreams(lambda _, __, **of: reduce(Rows.unionByName, of.values()), today=upstream("report"), **YESTERDAY)
BOARD = pipeline_of(name="board", source=THREE)
NEW_SALES, NEW_BOARD = replace(SALES, processor=Doubling), replace(BOARD, processor=Averaging)
CHAIN = {"sales": SALES, "report": REPORT, "board": BOARD}
PROCESSORS = {code_hash(p.processor, p.name): p.processor for p in (*CHAIN.values(), NEW_SALES, NEW_BOARD)}
# The trial begins in the middle of the second day, and ends in the middle of the fourth.
TRY = f"try twice --code {CODE}:NEW_SALES --from 2024-01-02T12:00 --to 2024-01-04T00:00 --every 12h"
TRY_REPORT = f"try twice --code {CODE}:REPORT --from 2024-01-02 --to 2024-01-03 --every 1d"
PROMOTE = f"promote twice --code {CODE}:NEW_SALES --past"
CHAINED, COMPARE = f"{PROMOTE} --chain", "compare twice --chain --pipeline sales"


@pytest.fixture(autouse=True, scope="module")
def _without_spark() -> Iterator[None]:
    def frame(spark: Any, reader: Any, pinned: Any, state: str | None) -> Rows:
        at = locate(pinned[0].edge.root or reader.root, pinned[0].edge.pipeline)
        found = read_log(at.storage).current_outputs(pinned[0].span)
        assert sorted(n for n, _ in found.values()) == [*pinned[1]]
        files = [file for _, made in found.values() for file in made]
        rows = [row for file in files for row in pq.read_table(f"{at.url}/{file.handle.path}").to_pylist()]
        return rows_of(*((row["user"], row["kind"], row["total"]) for row in rows))

    def on_shards(spark: Any, job: Any, inputs: Any) -> Any:
        return testing._on_shards(PROCESSORS[job.content.code_hash], spark, job, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAIRN_SPARK", "sc://none")
        patch.setattr("cairn.spark.session.connect", lambda *_, **__: SESSION)
        patch.setattr(read_upstreams, "_frame", frame)
        patch.setattr(read_upstreams, "register_data_sources", lambda _: None)
        patch.setattr("cairn.operations.intervals.process_interval._on_spark", on_shards)
        yield


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    """Production with a trial of the chain, and what a computation from scratch with the changed code gives."""
    fill()
    made, scratch = tmp_path_factory.mktemp("tried"), tmp_path_factory.mktemp("scratch")
    for name in CHAIN:
        run(made, name, 0)
    before = {name: bytes_of(made / name) for name in CHAIN}
    cairn(made, f"{TRY} --chain --code-of board={CODE}:NEW_BOARD")
    assert {name: bytes_of(made / name) for name in CHAIN} == before
    for name, new, first in (("sales", NEW_SALES, 3), ("report", REPORT, 1), ("board", NEW_BOARD, 1)):
        run(scratch, name, 0)
        run(scratch, name, first, new)
    return made, results(scratch)


@pytest.fixture
def root(tried: tuple[Path, Results], tmp_path: Path) -> Iterator[Path]:
    """The root keeps its path: the records of the trial name it."""
    saved = Path(shutil.copytree(tried[0], tmp_path / "saved"))
    fill()
    yield tried[0]
    shutil.rmtree(tried[0])
    saved.rename(tried[0])


def fill() -> None:
    DAYS.update({half.start: [("ann", "pear", n + 1), ("bob", "fig", 5)] for n, half in enumerate(HALVES)})


def run(root: Path, name: str, first: int, pipeline: Any = None) -> None:
    every = HALVES if name == "sales" else [day(n) for n in range(4)]
    run_intervals(SESSION, pipeline or CHAIN[name], every[first:], str(root))


def cairn(root: Path, typed: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, [*typed.split(), "--root", str(root)], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.output


def results(root: Path) -> Results:
    """The digests of state and output of each interval."""
    span, logs = Interval(START, day(3).end), {name: read_log(locate(str(root), name).storage) for name in CHAIN}
    made = {name: made_within(log, span) for name, log in logs.items()}
    return {
        n: {i: (m.digest, sorted(f.digest or 0 for f in m.outputs)) for i, m in of.items()} for n, of in made.items()
    }


def flagged(root: Path, name: str) -> set[Interval]:
    chains = Chains()
    return {*chains.judged(str(root), name), *chains.node(str(root), name).spoilt}


@pytest.mark.long("seconds", runs_in="ci")
def test_a_chain_is_tried_compared_promoted_and_taken_back(root: Path, tried: tuple[Path, Results]) -> None:
    before, files = results(root), bytes_of(root)
    compared = json.loads(cairn(root, f"{COMPARE} --match user --match board=user --json"))
    # A column is of the first pipeline, or of the named one; the rows of `report` are compared as a whole.
    shown = [(c["trial"]["pipeline"], len(c["intervals"]), c["outputs"][0]["changed"], c["outdated"]) for c in compared]
    assert shown == [("sales", 4, 1, []), ("report", 2, 0, []), ("board", 2, 1, [])]
    assert cairn(root, CHAINED).count("and 1 later intervals") == 3 and bytes_of(root) == files
    said = cairn(root, f"{CHAINED} --yes")
    assert results(root) == tried[1] != before and not any(flagged(root, name) for name in CHAIN)
    assert cairn(root, COMPARE).count("no difference: every digest is equal") == 3
    back = [line for line in said.splitlines() if line.startswith("cairn restore")]
    assert len(back) == 3 and said.index(back[2]) < said.index("checkpoint 9"), "a kill would leave no way back"
    files = bytes_of(root / "board" / "commits")
    cairn(root, f"{CHAINED} --yes")
    assert bytes_of(root / "board" / "commits") == files, "the same call again has nothing to do"
    for command, name, first in zip(back, CHAIN, (3, 1, 1), strict=True):
        assert CliRunner().invoke(app, shlex.split(command)[1:]).exit_code == 0
        run(root, name, first)
    assert results(root) == before


def check_killed_at(root: Path, patched: pytest.MonkeyPatch, scratch: Results, before: Results, at: int) -> bool:
    """Kills the promotion before its write of that number. True if it came to this write."""
    calls = 0

    def counted(call: Any) -> Any:
        def made(self: LocalStorage, *args: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > at:  # also in the threads that still run
                raise StopHere
            return call(self, *args, **more)

        return made

    with patched.context() as patch, suppress(StopHere):  # A read changes nothing.
        for name in ("create", "upload", "replace", "copy_from", "delete", "remove_all"):
            patch.setattr(LocalStorage, name, counted(getattr(LocalStorage, name)))
        cairn(root, f"{CHAINED} --yes")
    now = results(root)
    for name, above in (("report", "sales"), ("board", "report")):
        new = [i for i in now[above] if now[above][i] == scratch[above][i] != before[above][i]]
        for interval in {*now[name]} - flagged(root, name):
            wanted = scratch if any(one.start < interval.end for one in new) else before
            assert now[name][interval] == wanted[name][interval], f"{name} {interval} passes for fresh"
    cairn(root, f"{CHAINED} --yes")
    assert results(root) == scratch and not any(flagged(root, name) for name in CHAIN)
    return calls > at


@pytest.mark.parametrize("numbers", [[3], [40], [70], pytest.param(range(999), marks=pytest.mark.long("some minutes"))])
@pytest.mark.long("seconds", runs_in="ci")
def test_a_promotion_that_is_killed_leaves_stale_dependants_and_goes_on(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: tuple[Path, Results], numbers: Any
) -> None:
    before, saved = results(root), shutil.copytree(root, tmp_path / "again")
    for at in numbers:
        shutil.rmtree(root)
        shutil.copytree(saved, root)
        if not check_killed_at(root, monkeypatch, tried[1], before, at):
            assert at > numbers[0] == 0, at
            break


@pytest.mark.parametrize(
    ("corrected", "typed", "noticed", "refused"),
    [
        (4, [], "input: the source's position differs in 1 ", "read other input than the source has now"),
        (2, [], "the trial's result is stale: sales ", "is not the state that trial 'twice' began from"),
        (
            None,
            [TRY.replace("NEW_SALES", "SALES")],
            "the trial's result is stale: sales ",
            "Only tried code can be promoted",
        ),
        (
            None,
            ["trials --pipeline report --remove twice", TRY_REPORT],
            "",
            "it read production's sales, which the same call would replace",
        ),
    ],
)
@pytest.mark.long("seconds", runs_in="ci")
def test_a_trial_whose_inputs_or_base_changed_since_is_not_promoted(
    root: Path, corrected: int | None, typed: list[list[str]], noticed: str, refused: str
) -> None:
    for name in CHAIN if corrected is not None else ():
        DAYS[HALVES[corrected or 0].start] = [("ann", "pear", 100)]
        run(root, name, (corrected or 0) // (1 if name == "sales" else 2))
    for command in typed:
        cairn(root, command)
    assert noticed in cairn(root, COMPARE)
    before = bytes_of(root)
    assert refused in cairn(root, f"{CHAINED} --yes", code=2) and bytes_of(root) == before


@pytest.mark.long("seconds", runs_in="ci")
def test_a_dependant_alone_is_promoted_after_the_pipeline_whose_trial_it_read(root: Path) -> None:
    report = f"promote twice --code {CODE}:REPORT --past --yes"
    assert "it read trial 'twice' of 'sales', whose results are not those of production" in cairn(root, report, code=2)
    cairn(root, f"{PROMOTE} --yes")
    assert flagged(root, "report") == {day(1), day(2), day(3)}
    assert "report: 2 intervals have the results of the trial" in cairn(root, report)


def test_a_trial_that_was_only_partly_tried_again_is_not_promoted(root: Path) -> None:
    lone = f"try lone --code {CODE}:REPORT --every 1d --from 2024-01-02"
    cairn(root, f"{lone} --to 2024-01-03")
    DAYS[HALVES[2].start] = [*DAYS[HALVES[2].start], ("eve", "fig", 1)]
    run(root, "sales", 2)
    cairn(root, f"{lone} --to 2024-01-02")
    assert f"{day(2)}: the trial's result is stale: checkpoint" in cairn(root, "compare lone --pipeline report")
    before = bytes_of(root)
    said = cairn(root, f"promote lone --code {CODE}:REPORT --past --yes", code=2)
    assert "trial 'lone' of 'report' is out of date" in said and bytes_of(root) == before


def test_a_trial_runs_only_those_intervals_of_a_dependant_that_read_its_span() -> None:
    """The trial of `up` goes from noon of day 1 to noon of day 3. Days run that read it and end before its end."""
    span, plain = Interval(day(1).start + HALF, day(3).start + HALF), Edge(pipeline="up")
    back = replace(plain, back=1)
    for edges, days, expected in (
        ([plain], [0, 1, 2, 3], [1, 2]),
        ([back], [0, 1, 2, 3], [2, 3]),
        ([replace(plain, mapping="all")], [0, 1, 2, 3], [1, 2]),
        ([plain, back], [0, 1, 3], [1]),
        ([plain], [0], []),
    ):
        found = intervals_that_read([(edge, span) for edge in edges], [day(n) for n in days], None)
        assert found == tuple(day(n) for n in expected), (edges, days)


def test_refusals_of_a_chain_come_before_the_first_interval(root: Path) -> None:
    before = bytes_of(root)
    for word, says in (
        ("board", "--code-of is 'board'; expected PIPELINE=module:NAME"),
        (f"bored={CODE}:BOARD", "--code-of names bored, which does not read sales below"),
        (f"board={CODE}:REPORT", "is named 'report', but 'board' is expected"),
    ):
        assert says in cairn(root, f"{TRY} --chain --code-of {word}", code=2)
    assert bytes_of(root) == before
    assert "it read sales from its trial 'twice', but this call reads production" in cairn(root, TRY_REPORT, code=2)
    for command in ("trials --pipeline report --remove twice", TRY_REPORT, "trials --pipeline sales --remove twice"):
        cairn(root, command)
    before, said = bytes_of(root), cairn(root, f"{TRY} --chain --code-of board={CODE}:NEW_BOARD", code=2)
    assert "it read sales from production, but this call reads its trial" in said and bytes_of(root) == before


def test_a_dependant_whose_records_do_not_name_its_code_is_refused(tmp_path: Path) -> None:
    fill()
    run(tmp_path, "sales", 0)
    with mock.patch("cairn.operations.intervals.plan_interval.code_reference", return_value=None):
        run(tmp_path, "report", 0)
    said = cairn(tmp_path, f"{TRY} --chain", code=2)
    assert "the records of report do not name its code; add --code-of report=module:NAME" in said
