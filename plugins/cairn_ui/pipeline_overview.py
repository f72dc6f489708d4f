"""Compute the values of two pages: the list of pipelines, and the overview of one pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple

from cairn_ui.broken_since import GRACE, lag_of
from cairn_ui.next_steps import Step, after_failed_read
from cairn_ui.pipelines_of_dags import PipelineRef
from cairn_ui.read_logs import Look, Reading, Stored
from cairn_ui.run_bars import Bars
from state_backend.checkpoint.log import Log
from state_backend.checkpoint.newest_state import newest_of, newest_state, valid_states
from state_backend.inspection.describe import describe_entry, load_states, origin_of, state_of
from state_backend.inspection.pipeline_status import describe_status
from state_backend.values.airflow_commands import backfill_command, heal_command, local_command
from state_backend.values.airflow_runs import DagSchedule
from state_backend.values.frozen import frozen
from state_backend.values.human_units import plural, span
from state_backend.values.intervals import format_instant
from state_backend.values.records import Kept, Record, SweepRecord

Tone = Literal["good", "info", "warn", "bad"]
_COUNTED = ("completed", "stale", "replaced", "quarantined", "descends", "dropped")


class Chip(NamedTuple):
    tone: Tone
    text: str
    # Explanation, shown beside the label; empty for none.
    title: str = ""


@frozen
class OverviewRow:
    ref: PipelineRef
    look: Look
    # The last checkpoint: `furthest`. None without checkpoints, or if the pipeline was never read.
    last: Record | None = None
    # Time at which the last checkpoint was committed; None if it is not known.
    committed: datetime | None = None
    # Label such as "on time" or "late by 3 h"; None if Airflow has no schedule.
    due: Chip | None = None
    health: tuple[Chip, ...] = ()
    # Size of the pipeline's folder; None before the first count.
    stored: Stored | None = None
    # Time from the end of the last interval with a usable checkpoint to now; None without one.
    lag: timedelta | None = None
    # The bars of the DAG's last runs; None without a DAG.
    bars: Bars | None = None

    @property
    def read(self) -> datetime | None:
        """Time of the newest successful read; None if the pipeline was never read."""
        return None if self.look.reading is None else datetime.fromtimestamp(self.look.reading.read_s, UTC)

    @property
    def next(self) -> Step | None:
        return after_failed_read(self.ref)


class Pointer(NamedTuple):
    title: str
    # The checkpoint; None if there is no such checkpoint.
    checkpoint: int | None
    # The checkpoint's row of `describe_entry`; None if it is not retained.
    row: Mapping[str, Any] | None
    # A remark about the checkpoint, or why there is none.
    note: str


@frozen
class Overview:
    # The status as `describe_status` describes it.
    status: Mapping[str, Any]
    pointers: tuple[Pointer, ...]
    counts: tuple[tuple[str, int], ...]
    health: tuple[Chip, ...]
    # Label such as "on time" or "late by 3 h"; None if Airflow has no schedule.
    due: Chip | None
    # Paths of pages of Data Docs, by checkpoint.
    docs: Mapping[int, str]
    # Since when the pipeline is broken, its lag and its last runs; None before they are read.
    runs: Mapping[str, Any] | None = None


def lateness(furthest: datetime | None, schedule: DagSchedule | None, now: datetime) -> Chip | None:
    """Return a chip such as "on time" or "late by 3 h"; None without a schedule."""
    if schedule is None:
        return None
    behind = schedule.asked_end if furthest is None or (schedule.asked_end or now) > furthest else None
    if schedule.running and behind is not None:
        return Chip("info", "running", f"{plural(schedule.running, 'run')} in progress")
    if schedule.paused:
        return Chip("warn", "paused", "The DAG is paused: Airflow creates no runs")
    if behind is not None and schedule.next_due is None:
        # After the last run, the time until now says nothing. The runs of the demo, for instance, used another root.
        title = "The schedule has no more runs, and this root has no checkpoint of the last run's interval"
        return Chip("warn", "incomplete", title)
    if behind is not None and now - behind > GRACE:
        late = span((now - behind).total_seconds())
        return Chip("bad", f"late by {late}", "A run was due, but its interval has no checkpoint")
    if schedule.next_due is not None and now - schedule.next_due > GRACE:
        late = span((now - schedule.next_due).total_seconds())
        return Chip(
            "bad",
            f"late by {late}",
            "A run is due, but Airflow has not created it. Check that the scheduler is running",
        )
    if schedule.next_due is None:
        return Chip("info", "no run due", "The schedule has no more runs")
    return Chip("good", "on time", "Each interval that was due has a checkpoint")


def health_of(reading: Reading) -> tuple[Chip, ...]:
    """Return the problems of a pipeline, worst first. Without problems the only chip is `no problems`.

    A pipeline without any commit and without problems has no chip.
    """
    return (*_problems(reading),) or ((Chip("good", "no problems"),) if reading.log.head_id else ())


def _problems(reading: Reading) -> Iterator[Chip]:
    status = reading.status
    if status.problem is not None:
        yield Chip("bad", "next interval can't start", status.problem)
    if refused := [str(n) for n, _ in status.quarantined]:
        yield Chip("bad", f"{len(refused)} quarantined", f"Validation refused these checkpoints: {', '.join(refused)}")
    if status.unpublished:
        title = "The output of these intervals is committed, but the sink has not taken it"
        yield Chip("warn", f"{len(status.unpublished)} unpublished", title)
    if stale := [f"{n} (changed by {by})" for n, by in status.stale]:
        title = "Computed from state that has changed since. Run the intervals of these checkpoints again: "
        yield Chip("warn", f"{len(stale)} stale", title + ", ".join(stale))
    if status.outdated:
        title = "; ".join(f"{interval} is {verdict.kind}: {verdict.why}" for interval, verdict in status.outdated[:10])
        yield Chip("warn", f"{len(status.outdated)} out of date by inputs", title)
    number, last = unvalidated_since(reading) or (0, None)
    if number:
        title = "No valid checkpoint was validated" if last is None else f"The last validated checkpoint is {last}"
        yield Chip("info", f"{number} not validated", title)


def unvalidated_since(reading: Reading) -> tuple[int, int | None] | None:
    """Return how many valid checkpoints are newer than the newest validated state, and the id of that one.

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
    schedule: DagSchedule | None,
    stored: Stored | None,
    written_ms: int | None,
    now: datetime,
    bars: Bars | None = None,
) -> OverviewRow:
    reading = look.reading
    if reading is None:
        return OverviewRow(ref=ref, look=look)
    newest, usable = furthest(reading), latest_usable(reading)
    return OverviewRow(
        ref=ref,
        look=look,
        last=newest,
        committed=None if written_ms is None else datetime.fromtimestamp(written_ms / 1000, UTC),
        due=lateness(newest.content.interval.end if newest is not None else None, schedule, now),
        health=health_of(reading),
        stored=stored,
        lag=lag_of(usable.content.interval.end if usable is not None else None, reading.newest_end, schedule, now),
        bars=bars,
    )


def worst_first(rows: list[OverviewRow]) -> list[OverviewRow]:
    """Sort pipelines by the severity of their problems, then by name.

    First come pipelines that can't be read, then those with a chip of tone bad, then those with a chip of tone warn or
    a problem, and those whose root is a Jinja template.
    """

    def rank(row: OverviewRow) -> int:
        tones = {c.tone for c in (*row.health, *((row.due,) if row.due is not None else ()))}
        if row.look.reading is None:
            return 2 if row.ref.unreadable else 0  # A root that is a Jinja template can't be read, but nothing failed.
        return 1 if "bad" in tones else 2 if "warn" in tones or row.look.problem is not None else 3

    return sorted(rows, key=lambda row: (rank(row), row.ref.name))


def command_of(ref: PipelineRef, reading: Reading, airflow: str | None = None) -> str | None:
    """Return the command after which the next interval can start; None if it can, or if no command helps."""
    rerun, code = reading.status.rerun, ref.code or reading.log.code
    if (to := reading.status.heal_to) is not None:
        local = code if ref.dag_id is None else None
        return heal_command(ref.root, ref.name, to, ref.dag_id, airflow, code=local, chain=True)
    if rerun is None:
        return None
    if ref.dag_id is None:
        return local_command(ref.root, ref.name, rerun, code)
    if rerun.replace_overlapping:  # `cairn heal` does not replace output of overlapping intervals.
        return backfill_command(ref.dag_id, rerun, airflow)
    return heal_command(ref.root, ref.name, format_instant(rerun.last), ref.dag_id, airflow)


def overview(
    ref: PipelineRef,
    reading: Reading,
    schedule: DagSchedule | None,
    savepoint: Mapping[str, Any] | None,
    written_ms: Mapping[int, int],
    docs: Mapping[int, str],
    now: datetime,
    airflow: str | None = None,
) -> Overview:
    log, newest, passed = reading.log, furthest(reading), newest_validated(reading)
    counts = counts_of(log)
    done = {c.id: c for c in log.completed()}
    restored = done.get(max((n for n, c in done.items() if c.content.kind == "restore"), default=0))

    ago = ""
    if newest is not None and newest.id in written_ms:
        ago = f"committed {span(now.timestamp() - written_ms[newest.id] / 1000)} ago"
    by = "" if passed is None else " and ".join(sorted(reading.validated[passed.id])) + " validation"
    completed, validated, back = (None if found is None else found.id for found in (newest, passed, restored))
    taken = savepoint["checkpoint"] if savepoint and isinstance(savepoint.get("checkpoint"), int) else None
    where = str(savepoint.get("savepoint") or "") if savepoint else ""
    came = "" if restored is None else origin_of(restored) or ""
    # The title of a card, its checkpoint, a remark, and the remark if there is none.
    cards = [
        ("Latest completed", completed, ago, "No checkpoint was committed yet"),
        ("Latest validated", validated, by, "No valid checkpoint was validated"),
        ("Last restored", back, came, "No retained checkpoint comes from a restore"),
        ("Last savepoint", taken, where, "Airflow's database has no savepoint of this DAG"),
    ]
    return Overview(
        status=describe_status(reading.status, command_of(ref, reading, airflow)),
        pointers=tuple(
            Pointer(title, n, describe_entry(log, n) if n in done else None, nothing if n is None else note)
            for title, n, note, nothing in cards
        ),
        counts=counts,
        health=health_of(reading),
        due=lateness(newest.content.interval.end if newest else None, schedule, now),
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
    """Return the newest state, which the next interval starts from; None if no checkpoint is valid."""
    newest = newest_state(reading.log)
    return None if newest is None else reading.log.whole(newest.id)


def counts_of(log: Log) -> tuple[tuple[str, int], ...]:
    """Return the number of checkpoints in each state that occurs, such as ("completed", 12).

    The count of `dropped` also includes the sweeps, since each sweep adds a record without a checkpoint to the log. To
    tell these records from those of dropped checkpoints, all old records would have to be read.
    """
    known = sorted({*log.retained, *(n for n in log.quarantined if n <= log.head_id)})
    load_states(log, known)
    entries = [log.entries[n] for n in known]
    counts = Counter(state_of(log, e).partition(" ")[0] for e in entries if not isinstance(e, SweepRecord))
    counts["dropped"] += log.head_id - len(known)
    return tuple((word, counts[word]) for word in _COUNTED if counts[word])
