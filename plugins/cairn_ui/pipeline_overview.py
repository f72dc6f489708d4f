"""Compute the values of two pages: the list of pipelines, and the overview of one pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from cairn_ui.health_facts import lag_of, newest_results, unusable_checkpoints
from cairn_ui.interval_strip import Strip, strip_of
from cairn_ui.next_steps import Step, after_failed_read
from cairn_ui.pipelines_of_dags import PipelineRef
from cairn_ui.read_logs import Look, Reading, Stored
from cairn_ui.trends import Figures, figures_of
from state_backend.checkpoint.choose_base import why_stale
from state_backend.checkpoint.log import Log
from state_backend.checkpoint.newest_state import newest_of, newest_state, valid_states
from state_backend.checkpoint.quarantine_consequences import plan_consequences
from state_backend.inspection.describe import describe_entry, load_states, origin_of, state_of
from state_backend.inspection.pipeline_health import Broken, Facts, Finding, broken, due_intervals, findings
from state_backend.inspection.pipeline_status import describe_status
from state_backend.values.airflow_commands import repair_command
from state_backend.values.airflow_runs import DagRun, DagSchedule, FailingTask
from state_backend.values.errors import Rerun
from state_backend.values.frozen import frozen
from state_backend.values.human_units import span
from state_backend.values.records import Kept, Record, SweepRecord

_COUNTED = ("completed", "stale", "replaced", "quarantined", "descends", "dropped")


@frozen
class FromAirflow:
    """What Airflow's database says about a pipeline's DAG. All fields are empty for a pipeline without a DAG."""

    schedule: DagSchedule | None = None
    # The DAG's newest runs. On the overview page also the first runs after the newest usable checkpoint.
    runs: tuple[DagRun, ...] = ()
    failing: tuple[FailingTask, ...] = ()


@frozen
class OverviewRow:
    ref: PipelineRef
    look: Look
    # The checkpoint that `furthest` returns; None without checkpoints, or if the pipeline was never read.
    last: Record | None = None
    # Time at which `last` was committed; None if it is not known.
    committed: datetime | None = None
    # Findings about the pipeline, the worst first.
    health: tuple[Finding, ...] = ()
    # Size of the pipeline's folder; None before the first count of its bytes.
    stored: Stored | None = None
    # Time from the end of the last interval with a usable checkpoint to now; None without such an interval.
    lag: timedelta | None = None
    # The strip of the last intervals' states; None if the pipeline was never read.
    strip: Strip | None = None

    @property
    def fine(self) -> bool:
        """True if nobody has to look at the pipeline."""
        return bool(self.health) and self.health[0].tone in ("good", "info")

    @property
    def read(self) -> datetime | None:
        """Time of the newest successful read; None if the pipeline was never read."""
        return None if self.look.reading is None else datetime.fromtimestamp(self.look.reading.read_s, UTC)

    @property
    def next(self) -> Step | None:
        return after_failed_read(self.ref)


class Pointer(NamedTuple):
    title: str
    # Id of the checkpoint that the card names; None if there is no such checkpoint.
    checkpoint: int | None
    # What `describe_entry` returns for the checkpoint; None if the checkpoint is not retained.
    row: Mapping[str, Any] | None
    # A remark about the checkpoint, or why there is none.
    note: str


@frozen
class Overview:
    # What `describe_status` returns.
    status: Mapping[str, Any]
    # The checkpoint up to which the pipeline is processed (`furthest`); None without checkpoints.
    last: Record | None
    # Command to use if a failing task has no retries left; None if no task fails, or if `status` has a command.
    later: str | None
    strip: Strip
    # The bars below the cells of the strip.
    figures: Figures
    pointers: tuple[Pointer, ...]
    counts: tuple[tuple[str, int], ...]
    # Findings about the pipeline, the worst first.
    health: tuple[Finding, ...]
    broken: Broken | None
    # Why the checkpoint of the first broken interval is stale, as a clause; None if the checkpoint is not stale.
    why: str | None
    # Number of intervals with current output that was computed from the first broken interval's checkpoint.
    affected: int
    # Paths of pages of Data Docs, by checkpoint id.
    docs: Mapping[int, str]
    # Since when the pipeline is broken, its lag, failed tries, and DAGs that wait for it; None until they are read.
    runs: Mapping[str, Any] | None = None


def facts_of(look: Look, airflow: FromAirflow, now: datetime) -> Facts:
    """Return what the log and Airflow's database say about a pipeline, from which findings and strip are computed."""
    reading = look.reading
    if reading is None:
        return Facts(now=now, unreadable=look.problem, schedule=airflow.schedule, failing=airflow.failing)
    usable = latest_usable(reading)
    last = None if usable is None else usable.content.interval
    return Facts(
        now=now,
        unreadable=look.problem,
        status=reading.status,
        begun=reading.log.head_id > 0,
        until=None if last is None else last.end,
        due=due_intervals(reading.log, last, airflow.schedule, now),
        unusable=[one for one in unusable_checkpoints(reading.log) if last is None or one.interval.start >= last.end],
        unvalidated=unvalidated_since(reading),
        schedule=airflow.schedule,
        runs=airflow.runs,
        failing=airflow.failing,
    )


def _strip_of(log: Log, facts: Facts, runs: tuple[DagRun, ...]) -> Strip:
    results = newest_results(log, unusable_checkpoints(log))
    # A result may be out of date because its inputs changed. The pipeline's own log does not show this.
    for interval, verdict in () if facts.status is None else facts.status.outdated:
        if interval in results and not results[interval].trouble:
            results[interval] = results[interval]._replace(trouble=verdict.kind)
    return strip_of(facts, results, runs)


def unvalidated_since(reading: Reading) -> tuple[int, int | None] | None:
    """Return (number, id): the number of valid checkpoints after the newest validated one, and that one's id.

    If no valid checkpoint was validated, all of them count and the id is None. Without valid checkpoints, the whole
    result is None.
    """
    valid, last = valid_states(reading.log), newest_validated(reading)
    if not valid:
        return None
    return sum(last is None or newest_of((c, last)) is not last for c in valid), None if last is None else last.id


def newest_validated(reading: Reading) -> Kept | None:
    return newest_of(kept for kept in valid_states(reading.log) if kept.id in reading.validated)


def overview_row(
    ref: PipelineRef,
    look: Look,
    airflow: FromAirflow,
    stored: Stored | None,
    written_ms: int | None,
    now: datetime,
) -> OverviewRow:
    reading, facts = look.reading, facts_of(look, airflow, now)
    health = findings(facts)
    if ref.unreadable:  # The root or name is a Jinja template: this is no failure, so the tone is "info".
        health = (Finding("info", "not read here", ref.unreadable),)
    if reading is None:
        return OverviewRow(ref=ref, look=look, health=health)
    newest, usable = furthest(reading), latest_usable(reading)
    return OverviewRow(
        ref=ref,
        look=look,
        last=newest,
        committed=None if written_ms is None else datetime.fromtimestamp(written_ms / 1000, UTC),
        health=health,
        stored=stored,
        lag=lag_of(
            usable.content.interval.end if usable is not None else None, reading.newest_end, airflow.schedule, now
        ),
        strip=_strip_of(reading.log, facts, airflow.runs),
    )


def worst_first(rows: list[OverviewRow]) -> list[OverviewRow]:
    """Return the rows sorted by the tone of the worst finding about the pipeline, then by name."""
    rank = ("bad", "warn", "info", "good").index
    return sorted(
        rows, key=lambda r: (rank(r.health[0].tone if r.health else "info"), r.look.reading is not None, r.ref.name)
    )


def command_of(
    ref: PipelineRef, reading: Reading, airflow: str | None = None, broken: Broken | None = None
) -> str | None:
    """Return the command that repairs a pipeline, up to the end of `broken`; None if no re-run is needed or helps."""
    again, to = reading.status.rerun, reading.status.heal_to
    lasts = [again.last] if again is not None else []
    lasts += [to] if to is not None else []
    lasts += [broken.last.start] if broken is not None and ref.dag_id is not None else []
    if not lasts:
        return None
    first = min(lasts) if again is None else again.first
    overlapping = again is not None and again.replace_overlapping
    code = (ref.code or reading.log.code) if ref.dag_id is None else None
    return repair_command(
        ref.root,
        ref.name,
        Rerun(first=first, last=max(lasts), replace_overlapping=overlapping),
        dag_id=ref.dag_id,
        code=code,
        airflow=airflow,
        chain=to is not None,
    )


def overview(
    ref: PipelineRef,
    look: Look,
    facts: Facts,
    runs: tuple[DagRun, ...],
    savepoint: Mapping[str, Any] | None,
    written_ms: Mapping[int, int],
    docs: Mapping[int, str],
    airflow: str | None = None,
) -> Overview:
    reading, now = look.reading, facts.now
    assert reading is not None
    found = broken(facts)
    now_command = command_of(ref, reading, airflow, found)
    later, failing = None, next((one.interval for one in facts.failing if one.interval is not None), None)
    if failing is not None and now_command is None:
        again = Rerun(first=failing.start, last=failing.start)
        later = repair_command(ref.root, ref.name, again, dag_id=ref.dag_id, airflow=airflow)
    log, newest, passed = reading.log, furthest(reading), newest_validated(reading)
    strip = _strip_of(log, facts, runs)
    refused = 0 if found is None else found.first.checkpoint
    affected = len(plan_consequences(log, refused).published) if refused else 0
    done = {c.id: c for c in log.completed()}
    restored = done.get(max((n for n, c in done.items() if c.content.kind == "restore"), default=0))

    ago = ""
    if newest is not None and newest.id in written_ms:
        ago = f"committed {span(now.timestamp() - written_ms[newest.id] / 1000)} ago"
    by = "" if passed is None else " and ".join(sorted(reading.validated[passed.id])) + " validation"
    completed, validated, back = (None if found is None else found.id for found in (newest, passed, restored))
    saved = savepoint or {}
    taken = saved["checkpoint"] if isinstance(saved.get("checkpoint"), int) else None
    where = str(saved.get("savepoint") or "")
    came = "" if restored is None else origin_of(restored) or ""
    # For each card: title, checkpoint id or None, remark about the checkpoint, and remark if there is no checkpoint.
    cards = [
        ("Latest completed", completed, ago, "No checkpoint was committed yet"),
        ("Latest validated", validated, by, "No valid checkpoint was validated"),
        ("Last restored", back, came, "No retained checkpoint comes from a restore"),
        ("Last savepoint", taken, where, "Airflow's database has no savepoint of this DAG"),
    ]
    return Overview(
        status=describe_status(reading.status, now_command),
        broken=found,
        why=None if found is None or found.first.by is None else why_stale(log, found.first.by),
        affected=affected,
        last=newest,
        later=later,
        strip=strip,
        figures=figures_of([done[cell.checkpoint] for cell in strip.cells if cell.checkpoint]),
        pointers=tuple(
            Pointer(title, n, describe_entry(log, n) if n in done else None, nothing if n is None else note)
            for title, n, note, nothing in cards
        ),
        counts=counts_of(log),
        health=findings(facts),
        docs=docs,
    )


def furthest(reading: Reading) -> Record | None:
    """Return the checkpoint up to which a pipeline is processed; None without checkpoints.

    The pages show its age, and compare the end of its interval with the schedule. It is the usable checkpoint (not
    stale, replaced, quarantined or dropped) whose interval ends last. If no checkpoint is usable, it is the retained
    checkpoint whose interval ends last.
    """
    return latest_usable(reading) or reading.newest


def latest_usable(reading: Reading) -> Record | None:
    """Return the record of the checkpoint that the next interval starts from; None if no checkpoint is valid."""
    newest = newest_state(reading.log)
    return None if newest is None else reading.log.whole(newest.id)


def counts_of(log: Log) -> tuple[tuple[str, int], ...]:
    """Return the number of checkpoints in each state that occurs, such as ("completed", 12).

    The count of `dropped` includes sweeps, each of which adds a record without a checkpoint to the log. To tell sweeps
    from dropped checkpoints, all old records would have to be read.
    """
    known = sorted({*log.retained, *(n for n in log.quarantined if n <= log.head_id)})
    load_states(log, known)
    entries = [log.entries[n] for n in known]
    counts = Counter(state_of(log, e).partition(" ")[0] for e in entries if not isinstance(e, SweepRecord))
    counts["dropped"] += log.head_id - len(known)
    return tuple((word, counts[word]) for word in _COUNTED if counts[word])
