"""Compute the values of two pages: the list of pipelines, and the overview of one pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from cairn_ui.airflow_values import Schedule
from cairn_ui.broken_since import GRACE, lag_of
from cairn_ui.find_pipelines import PipelineRef
from cairn_ui.human_units import plural, span
from cairn_ui.next_steps import Step, after_failed_read
from cairn_ui.pipeline_runs import PipelineRuns
from cairn_ui.run_bars import Bars
from cairn_ui.values import Look, Reading, Stored
from state_backend.checkpoint.log import Log, base_of, interval_of, kind_of
from state_backend.checkpoint.newest_state import newest_of, newest_state, valid_states
from state_backend.inspection.describe import state_of
from state_backend.values.airflow_commands import backfill_command, heal_command, local_command
from state_backend.values.intervals import Interval, format_instant
from state_backend.values.records import Kept, Record, SweepRecord

Tone = Literal["good", "info", "warn", "bad"]
_REFUSALS = 3
_COUNTED = ("completed", "stale", "replaced", "quarantined", "descends", "dropped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A coloured label on a page."""

    tone: Tone
    text: str
    # Explanation, shown beside the label; empty for none.
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewRow:
    """One pipeline in the list of pipelines."""

    ref: PipelineRef
    # Why the pipeline could not be read now; None if the read succeeded.
    problem: str | None
    # Time of the newest successful read; None if the pipeline was never read.
    read: datetime | None
    # Id of the last checkpoint: the usable checkpoint (not stale, replaced, quarantined or dropped) whose interval ends
    # last, or the retained checkpoint whose interval ends last if none is usable. None without checkpoints.
    last_id: int | None = None
    # Interval of the last checkpoint; None without checkpoints.
    interval: Interval | None = None
    # Time at which the last checkpoint was committed; None if it is not known.
    committed: datetime | None = None
    age: str = "–"
    # Label such as "on time" or "late by 3 h"; None if Airflow has no schedule.
    due: Chip | None = None
    # Bytes of the last checkpoint's state; None without checkpoints.
    state_bytes: int | None = None
    # Number of keys with a value state in the last checkpoint; None if the processor declares no value state.
    keys: int | None = None
    health: tuple[Chip, ...] = ()
    # Size of the pipeline's folder; None before the first count.
    stored: Stored | None = None
    # Time from the end of the last interval with a usable checkpoint to now; None without one.
    lag: timedelta | None = None
    # The bars of the DAG's last runs; None without a DAG.
    bars: Bars | None = None

    @property
    def next(self) -> Step | None:
        """The next step if the pipeline can't be read."""
        return after_failed_read(self.ref)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """A card of the overview that names one checkpoint."""

    title: str
    # Id of the checkpoint; None if there is no such checkpoint.
    checkpoint: int | None
    # The checkpoint's interval; None if it is not known.
    interval: Interval | None
    note: str
    # Text of the card if `checkpoint` is None.
    nothing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A quarantined checkpoint."""

    id: int
    reason: str
    findings: tuple[str, ...]
    # Path of the checkpoint's newest page of Data Docs; None without a page.
    docs: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Next:
    """Whether the pipeline's next interval can start now."""

    # The next interval; None before the first checkpoint.
    interval: Interval | None
    # Id of the checkpoint that the interval would start from; None for empty state, or if it can't start.
    base: int | None
    # First line of the reason why the interval can't start; None if it can.
    headline: str | None
    rest: str
    # Command after which the interval can start; None if no command helps.
    command: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The values of a pipeline's overview page."""

    next: Next
    pointers: tuple[Pointer, ...]
    counts: tuple[tuple[str, int], ...]
    health: tuple[Chip, ...]
    # Label such as "on time" or "late by 3 h"; None if Airflow has no schedule.
    due: Chip | None
    unpublished: tuple[tuple[Interval, int], ...]
    quarantined: tuple[Refusal, ...]
    more_quarantined: int
    # Since when the pipeline is broken, its lag and its last runs; None before `routes` adds them.
    runs: PipelineRuns | None = None

    @property
    def chips(self) -> tuple[Chip, ...]:
        """All labels of the overview: the problems, then the lateness."""
        return (*self.health, *(() if self.due is None else (self.due,)))


def lateness(furthest: datetime | None, schedule: Schedule | None, now: datetime) -> Chip | None:
    """Return a chip such as "on time" or "late by 3 h"; None without a schedule."""
    if schedule is None:
        return None
    behind = schedule.asked_end if furthest is None or (schedule.asked_end or now) > furthest else None
    if schedule.running and behind is not None:
        return Chip(tone="info", text="running", title=f"{plural(schedule.running, 'run')} in progress")
    if schedule.paused:
        return Chip(tone="warn", text="paused", title="The DAG is paused: Airflow creates no runs")
    if behind is not None and schedule.next_due is None:
        # After the last run, the time until now says nothing. The runs of the demo, for instance, used another root.
        title = "The schedule has no more runs, and this root has no checkpoint of the last run's interval"
        return Chip(tone="warn", text="incomplete", title=title)
    if behind is not None and now - behind > GRACE:
        late = span((now - behind).total_seconds())
        return Chip(tone="bad", text=f"late by {late}", title="A run was due, but its interval has no checkpoint")
    if schedule.next_due is not None and now - schedule.next_due > GRACE:
        late = span((now - schedule.next_due).total_seconds())
        return Chip(
            tone="bad",
            text=f"late by {late}",
            title="A run is due, but Airflow has not created it. Check that the scheduler is running",
        )
    if schedule.next_due is None:
        return Chip(tone="info", text="no run due", title="The schedule has no more runs")
    return Chip(tone="good", text="on time", title="Each interval that was due has a checkpoint")


def health_of(reading: Reading) -> tuple[Chip, ...]:
    """Return the problems of a pipeline, worst first. Without problems the only chip is `no problems`.

    A pipeline without any commit and without problems has no chip.
    """
    status, log = reading.status, reading.log
    found = []
    if status.problem is not None:
        found.append(Chip(tone="bad", text="next interval can't start", title=status.problem))
    if status.quarantined:
        ids = ", ".join(str(n) for n, _ in status.quarantined)
        found.append(
            Chip(
                tone="bad",
                text=f"{len(status.quarantined)} quarantined",
                title=f"Validation refused these checkpoints: {ids}",
            )
        )
    if status.unpublished:
        title = "The output of these intervals is committed, but the sink has not taken it"
        found.append(Chip(tone="warn", text=f"{len(status.unpublished)} unpublished", title=title))
    if stale := status.stale:
        title = (
            "Computed from state that has changed since. Run the intervals of these checkpoints again: "
            + ", ".join(f"{n} (changed by {by})" for n, by in stale)
        )
        found.append(Chip(tone="warn", text=f"{len(stale)} stale", title=title))
    since = unvalidated_since(reading)
    if since is not None and since[0]:
        title = (
            "No valid checkpoint was validated" if since[1] is None else f"The last validated checkpoint is {since[1]}"
        )
        found.append(Chip(tone="info", text=f"{since[0]} not validated", title=title))
    if not found and log.head_id:
        found.append(Chip(tone="good", text="no problems"))
    return tuple(found)


def unvalidated_since(reading: Reading) -> tuple[int, int | None] | None:
    """Return how many valid checkpoints are newer than the newest validated state, and the id of that one.

    If no valid checkpoint was validated, all of them count and the id is None. Without valid checkpoints, the whole result
    is None.
    """
    valid, last = valid_states(reading.log), newest_validated(reading)
    if not valid:
        return None
    return sum(last is None or newest_of((c, last)) is not last for c in valid), None if last is None else last.id


def newest_validated(reading: Reading) -> Kept | None:
    """Return the newest state that was validated; None if no valid checkpoint was."""
    return newest_of(kept for kept in valid_states(reading.log) if kept.id in reading.validated)


def overview_row(
    ref: PipelineRef,
    look: Look,
    schedule: Schedule | None,
    stored: Stored | None,
    written_ms: int | None,
    now: datetime,
    bars: Bars | None = None,
) -> OverviewRow:
    """Return one pipeline for the list of pipelines."""
    reading = look.reading
    if reading is None:
        return OverviewRow(ref=ref, problem=look.problem, read=None)
    usable = latest_usable(reading)
    newest = usable or reading.newest
    committed = None if written_ms is None else datetime.fromtimestamp(written_ms / 1000, UTC)
    totals = newest.content.totals if newest is not None else None
    return OverviewRow(
        ref=ref,
        problem=look.problem,
        read=datetime.fromtimestamp(reading.read_s, UTC),
        last_id=newest.id if newest is not None else None,
        interval=newest.content.interval if newest is not None else None,
        committed=committed,
        age=span(None if committed is None else (now - committed).total_seconds()),
        due=lateness(newest.content.interval.end if newest is not None else None, schedule, now),
        state_bytes=totals.state_bytes if totals is not None else None,
        keys=keys_of(newest) if newest is not None else None,
        health=health_of(reading),
        stored=stored,
        lag=lag_of(usable.content.interval.end if usable is not None else None, reading.newest_end, schedule, now),
        bars=bars,
    )


def worst_first(rows: list[OverviewRow]) -> list[OverviewRow]:
    """Sort pipelines by the severity of their problems, then by name.

    First come pipelines that can't be read, then pipelines with a chip of tone bad, then with a chip of tone warn.
    """

    def rank(row: OverviewRow) -> int:
        tones = {c.tone for c in (*row.health, *((row.due,) if row.due is not None else ()))}
        if row.problem is not None and row.read is None:
            return 2 if row.ref.unreadable else 0  # A root that is a Jinja template can't be read, but nothing failed.
        return 1 if "bad" in tones else 2 if "warn" in tones or row.problem is not None else 3

    return sorted(rows, key=lambda row: (rank(row), row.ref.name))


def keys_of(record: Record) -> int | None:
    """Return the number of keys with a value state; None if the processor declares no value state."""
    return record.content.totals.keys if any(s.kind == "value" for s in record.content.states) else None


def next_of(ref: PipelineRef, reading: Reading, airflow: str | None = None) -> Next:
    """Return whether the next interval can start now, and if not, the reason and the command that helps."""
    status = reading.status
    headline, _, rest = (status.problem or "").partition("\n")
    if status.rerun is None:
        command = None
    elif ref.dag_id is None:
        command = local_command(ref.root, ref.name, status.rerun, ref.code or reading.log.code)
    elif status.rerun.replace_overlapping:  # `cairn heal` does not replace output of overlapping intervals.
        command = backfill_command(ref.dag_id, status.rerun, airflow)
    else:
        command = heal_command(ref.root, ref.name, format_instant(status.rerun.last), ref.dag_id, airflow)
    return Next(interval=status.next, base=status.base, headline=headline or None, rest=rest, command=command)


def overview(
    ref: PipelineRef,
    reading: Reading,
    schedule: Schedule | None,
    savepoint: Mapping[str, Any] | None,
    written_ms: Mapping[int, int],
    docs: Mapping[int, str],
    now: datetime,
    airflow: str | None = None,
) -> Overview:
    """Return the values of a pipeline's overview page."""
    log, newest = reading.log, furthest(reading)
    done = {c.id: c for c in log.completed()}
    passed = newest_validated(reading)
    validated = None if passed is None else passed.id
    restored = max((n for n, c in done.items() if c.content.kind == "restore"), default=None)

    def committed(n: int) -> str:
        if n not in written_ms:
            return ""
        ago = span(now.timestamp() - written_ms[n] / 1000)
        return f"committed {ago} ago"

    pointers = [
        _pointer("Latest completed", newest, committed(newest.id) if newest else "", "No checkpoint was committed yet"),
        _pointer(
            "Latest validated",
            done.get(validated) if validated else None,
            " and ".join(sorted(reading.validated[validated])) + " validation" if validated else "",
            "No valid checkpoint was validated",
        ),
        _pointer(
            "Last restored",
            done.get(restored) if restored else None,
            _restored_from(done[restored]) if restored else "",
            "No retained checkpoint comes from a restore",
        ),
        _savepoint(savepoint, done),
    ]
    return Overview(
        next=next_of(ref, reading, airflow),
        pointers=tuple(pointers),
        counts=counts_of(log),
        health=health_of(reading),
        due=lateness(newest.content.interval.end if newest else None, schedule, now),
        unpublished=reading.status.unpublished,
        quarantined=tuple(
            Refusal(id=n, reason=reason, findings=log.quarantined[n].findings, docs=docs.get(n))
            for n, reason in reading.status.quarantined[: -_REFUSALS - 1 : -1]
        ),
        more_quarantined=max(0, len(reading.status.quarantined) - _REFUSALS),
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


def _pointer(title: str, record: Record | None, note: str, nothing: str) -> Pointer:
    if record is None:
        return Pointer(title=title, checkpoint=None, interval=None, note="", nothing=nothing)
    return Pointer(title=title, checkpoint=record.id, interval=record.content.interval, note=note)


def _restored_from(record: Record) -> str:
    content = record.content
    if content.restored_from is not None:
        return f"from savepoint {content.restored_from}"
    return f"back to checkpoint {content.base_id}" if content.base_id is not None else "from another pipeline"


def _savepoint(savepoint: Mapping[str, Any] | None, done: Mapping[int, Record]) -> Pointer:
    title = "Last savepoint"
    if not savepoint or not isinstance(savepoint.get("checkpoint"), int):
        nothing = "Airflow's database has no savepoint of this DAG"
        return Pointer(title=title, checkpoint=None, interval=None, note="", nothing=nothing)
    taken = savepoint["checkpoint"]
    record = done.get(taken)
    interval = record.content.interval if record is not None else None
    return Pointer(title=title, checkpoint=taken, interval=interval, note=str(savepoint.get("savepoint") or ""))


def counts_of(log: Log) -> tuple[tuple[str, int], ...]:
    """Return the number of checkpoints in each state that occurs, such as ("completed", 12).

    The count of `dropped` also includes the sweeps, since each sweep adds a record without a checkpoint to the log. To
    tell these records from those of dropped checkpoints, all old records would have to be read.
    """
    prefetch(log, [*log.retained])
    known = sorted({*log.retained, *(n for n in log.quarantined if n <= log.head_id)})
    counts = Counter(first_word(log, n) for n in known)
    counts["dropped"] += log.head_id - len(known)
    return tuple((word, counts[word]) for word in _COUNTED if counts[word])


def prefetch(log: Log, ids: list[int]) -> None:
    """Load what `state_of` needs about the given log entries, with many requests at the same time.

    Without this call, `state_of` would send the requests one after the other.
    """
    log.entries.load(ids)
    intervals = [i for n in ids if (i := _interval(log, n)) is not None]
    if intervals:
        span = Interval(min(i.start for i in intervals), max(i.end for i in intervals))
        log.entries.facts(span, log.summary.levels)


def _interval(log: Log, checkpoint_id: int) -> Interval | None:
    entry = log.entry(checkpoint_id)
    return None if entry is None or isinstance(entry, SweepRecord) else interval_of(entry)


def state_word(log: Log, checkpoint_id: int) -> str:
    """Return the state of a log entry in words, such as `completed` or `stale by 12`; `sweep` for a sweep."""
    entry = log.entries[checkpoint_id]
    return "sweep" if isinstance(entry, SweepRecord) else state_of(log, entry)


def first_word(log: Log, checkpoint_id: int) -> str:
    """Return the first word of `state_word`, such as `stale` for `stale by 12`."""
    return state_word(log, checkpoint_id).partition(" ")[0]


def tone_of(word: str) -> Tone:
    """Return the tone, and so the colour, of a chip that shows a state such as `stale by 12`."""
    first = word.partition(" ")[0]
    if first in ("quarantined", "descends"):
        return "bad"
    if first == "stale":
        return "warn"
    return "good" if first == "completed" else "info"


def source_of(log: Log, checkpoint_id: int) -> tuple[str, int | None]:
    """Return the kind of a log entry, such as interval or sweep, and the id of its base or None."""
    entry = log.entries[checkpoint_id]
    if isinstance(entry, SweepRecord):
        return "sweep", None
    return kind_of(entry), base_of(entry)
