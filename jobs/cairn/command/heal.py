"""The command `cairn heal`: run everything that is stale, failed, quarantined or missing, in order."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from cairn.command.airflow_rest import AirflowRest
from cairn.command.heal_in_airflow import InAirflow
from cairn.command.options import LOCAL_SPARK, Airflow, Json, spark_option
from cairn.command.progress import Stopped
from cairn.command.repair_command import ran_here
from cairn.command.terminal import Terminal
from cairn.operations.intervals.plan_heal import (
    Adopt,
    EndRun,
    GiveUp,
    HealPlan,
    Health,
    RunIntervals,
    Step,
    WaitFor,
    calendar_until,
    health_of,
    plan_heal,
)
from cairn.operations.intervals.plan_range import boundaries_of
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.chains.judge_inputs import Chains
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.log import Log, last_facts, read_log
from state_backend.checkpoint.publish_output import unpublished
from state_backend.checkpoint.trials import check_no_trial
from state_backend.inspection.chain_of import At, chain_order
from state_backend.ports.storage import Storage
from state_backend.values.airflow_commands import backfill_command, command_line, heal_command
from state_backend.values.day_or_instant import format_duration, last_instant, needs_zone
from state_backend.values.environment import Variable
from state_backend.values.errors import CairnError, Rerun, UsageError
from state_backend.values.hide_secrets import hide
from state_backend.values.intervals import Interval, format_instant
from state_backend.values.operation_parameters import Heal
from state_backend.values.records import Permissions
from state_backend.values.schedule import Every, interval_around, schedule_of
from state_backend.values.zones import zone_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_POLL_S = 3.0
_QUIET_S = 60.0


class _Place(Protocol):
    """The place where intervals run, up to the one that starts at `last`: Airflow, or this process."""

    own_backfills: set[int]  # Ids of the backfills that this command has created in Airflow.
    last: datetime

    def plan(self, now: datetime, *, fresh: bool) -> tuple[HealPlan, Health]:
        """Return (plan, health): the next steps, and the state of the results. `fresh`: Ask for the schedule again."""

    def carry_out(self, step: Step) -> None: ...

    def publish(self) -> None:
        """Call the sink for output that a killed `cairn heal` has committed. In Airflow, a task's retry does this."""


def heal(
    request: Heal,
    spark: Annotated[str, spark_option(" without Airflow")] = LOCAL_SPARK,
    airflow: Airflow = Variable.AIRFLOW.default,
    as_json: Json = False,
) -> int:
    """The intervals run in Airflow, or without it in this process: see --code. In Airflow, the command waits for queued
    and running runs, adopts or ends open backfills, and unpauses the DAG. If it is killed, call it again: it continues.
    """
    check_no_trial(request.root, "heal")
    last_instant("--to", request.last)  # A wrong date fails here, before the first request to the storage or Airflow.
    named, at = _healing(request, spark, airflow, as_json=as_json), (request.root.rstrip("/"), request.pipeline)
    worst, shown, command = 0, list[dict[str, Any]](), f"{named.command}{' --chain' if request.chain else ''}"
    chain = TopologicalSorter(chain_order(*at) if request.chain else {at: []})
    last = _last_of_others(read_log(open_storage(join_url(*at))), named.place.last) if request.chain else request.last
    chain.prepare()
    begun, under_way = list[_Healing](), dict[At, tuple[_Healing, Iterator[None]]]()
    try:
        while chain.is_active():
            for root, pipeline in chain.get_ready():
                one = named
                if (root, pipeline) != at:
                    other = replace(request, root=root, pipeline=pipeline, code="", dag=None, every=None, last=last)
                    try:
                        one = _healing(other, spark, airflow, as_json=as_json, recorded=True)
                    except CairnError as error:
                        left, worst = command_line("heal", root=root, pipeline=pipeline, to=last), 1
                        why = f"{pipeline} is left out: {str(error).splitlines()[0]}\nTo heal it alone, add --code or --dag to:\n{left}"
                        shown.append({"pipeline": pipeline, "healthy": False, "verdict": why, "command": left})
                        if not as_json:
                            typer.echo(why)
                        chain.done((root, pipeline))
                        continue
                one.command = command
                begun.append(one)
                under_way[root, pipeline] = one, one.run()
            ended = [place for place, (_, steps) in under_way.items() if next(steps, True)]
            for place in ended:
                one, _ = under_way.pop(place)
                worst = max(worst, 0 if one.shown["healthy"] else 1)
                shown.append(one.shown)
            chain.done(*ended)
            if under_way and not ended:
                time.sleep(_POLL_S)
    except KeyboardInterrupt as stop:
        runs_on = any(isinstance(one.place, InAirflow) for one, _ in under_way.values())
        left = "what Airflow has begun goes on" if runs_on else "their commits stay"
        ran = _count(sum(one.progress.healed for one in begun))
        raise Stopped(f"{ran} ran; {left}\nTo continue, run:\n{command}") from stop
    if as_json:
        typer.echo(json.dumps(shown if request.chain else shown[0], indent=2))
    return worst


def _last_of_others(log: Log, last: datetime) -> str:
    """Return `--to` for the other pipelines of a chain: a second before the named pipeline's interval at `last` ends.

    If this interval is a month, it also reads days that start later than the month. The result is an instant, since a
    day would be another one in the zones of the other pipelines.
    """
    ends = [fact.interval.end for fact in last_facts(log.facts(None)) if fact.interval.start <= last]
    if not isinstance(log.schedule, Every | None):  # Under `Every`, an interval begins at any instant.
        ends.append(interval_around(log.schedule, last).end)
    end = max(ends, default=last) - timedelta(seconds=1)
    return format_instant(max(end, last))


def _healing(request: Heal, spark: str, airflow: str, *, as_json: bool, recorded: bool = False) -> _Healing:
    """Prepare to heal one pipeline. `recorded`: Take the code that its newest checkpoint names, not CAIRN_CODE."""
    root, pipeline, to, dag = request.root, request.pipeline, request.last, request.dag
    storage = open_storage(join_url(root, pipeline))
    log = read_log(storage)
    if request.code and dag is not None:
        raise UsageError("--code runs the intervals here, --dag runs them in Airflow; give one of them")
    progress = _Progress(f"{pipeline}: " if request.chain else "", quiet=as_json)
    if request.code or (dag is None and ran_here(log)):
        given = None if recorded else Variable.CODE.given
        code = request.code or given or (log.newest.content.code if log.newest else None)
        if code is None:
            raise UsageError(
                f"the newest checkpoint of {pipeline} was made without Airflow; add --code module:NAME to run the "
                "intervals here, or --dag ID to run them in Airflow"
            )
        request = replace(request, code=code)
        place: _Place = _Here(request, storage, Terminal(spark, silent=as_json), progress.done)
        command = command_line(
            "heal",
            code=code,
            root=root,
            pipeline=pipeline,
            to=to,
            every=None if request.every is None else format_duration(request.every),
            spark=None if spark == LOCAL_SPARK else spark,
        )
    else:
        rest = AirflowRest(airflow)
        zone = rest.zone_of_days(dag or pipeline, log.schedule) if needs_zone(to) else zone_of("UTC")
        place = InAirflow(rest, dag or pipeline, storage, last_instant("--to", to, zone.rules), progress.say)
        command = heal_command(root, pipeline, to, dag, airflow)
    return _Healing(place, request, hide(command), progress, as_json)


class _Progress:
    """Prints the lines of `cairn heal` for one pipeline, and counts healed intervals. `quiet`: Print nothing."""

    def __init__(self, name: str, *, quiet: bool) -> None:
        self.healed = 0
        self.wanted = 0
        self._name, self._quiet = name, quiet
        self._said: list[str] = []

    def done(self, interval: Interval) -> None:
        self.healed += 1
        self.say(f"{interval}: done, {self.healed} of {self.wanted}")

    def say(self, text: str) -> None:
        """Print a line, unless the line before was the same. In a chain, the line begins with the pipeline's name."""
        text = text if text.startswith(self._name) else f"{self._name}{text.strip()}"
        if self._said[-1:] != [text]:
            self._said.append(text)
            if not self._quiet:
                typer.echo(text)


class _Healing:
    def __init__(self, place: _Place, request: Heal, command: str, progress: _Progress, as_json: bool) -> None:
        self.place = place
        self.request = request
        self.command = command
        self.progress = progress
        self.as_json = as_json
        self.steps: list[str] = []
        # The pipeline's result as `--json` prints it. `run` sets it at its end.
        self.shown: dict[str, Any] = {}
        # Ids of the backfills that a printed line has named, or that this command has created.
        self._adopted: set[int] = set()
        # Texts of the steps that were printed with the plan and have not begun yet.
        self._announced: set[str] = set()

    def run(self) -> Iterator[None]:
        """Heal the pipeline, step by step. Yield whenever the next step must wait for a run of Airflow."""
        plan, health = self.place.plan(_now(), fresh=True)
        self._announce(plan, health)
        what = "nothing was changed"
        if not self.request.dry_run:
            try:
                plan, health = yield from self._until_healthy(plan, health)
            except CairnError as error:
                error.args, error.rerun = (f"{error}\nRepair the cause, then go on with:\n{self.command}",), None
                raise
            what = f"{_count(self.progress.healed)} ran"
        self._end(plan, health, what, healthy=not plan.steps)

    def _until_healthy(self, plan: HealPlan, health: Health) -> Generator[None, None, tuple[HealPlan, Health]]:
        """Carry out steps and plan again until none is left, or the plan gives up. Return the last (plan, health)."""
        fresh, changed_s = True, time.monotonic()
        while True:
            self.progress.wanted = self.progress.healed + len(plan.unfinished)
            waits = self._carry_out(plan)
            if any(isinstance(step, GiveUp) for step in plan.steps) or (not plan.steps and fresh):
                self.place.publish()  # Not before the repair: a re-run replaces output that the sink may refuse.
                return plan, health
            if waits:
                yield
            before = plan
            # If no step is left, the next plan asks for the schedule again: more intervals may have ended since then.
            fresh = not plan.steps
            plan, health = self.place.plan(_now(), fresh=fresh)
            if self._tell_progress(before, plan) or not waits:
                changed_s = time.monotonic()
            elif time.monotonic() - changed_s > _QUIET_S and plan.steps:
                changed_s = time.monotonic()
                self.progress.say(f"still: {plan.steps[0]} (for another minute)")

    def _carry_out(self, plan: HealPlan) -> bool:
        """Carry out the steps that need no waiting. Return True if the next plan must wait for a run of Airflow."""
        for step in plan.steps:
            if not isinstance(step, WaitFor | GiveUp):
                self._note(str(step))
                self.place.carry_out(step)
            elif isinstance(step, WaitFor) and step.backfill is not None and step.backfill.id not in self._adopted:
                self._adopted.add(step.backfill.id)
                self._note(str(step))
            if isinstance(step, RunIntervals):
                self._adopted.update(self.place.own_backfills)
                return False
            if isinstance(step, Adopt | EndRun | WaitFor):
                return True
        return bool(plan.steps)

    def _note(self, text: str) -> None:
        if text not in self.steps[-1:]:
            self.steps.append(text)
            if text not in self._announced:
                self.progress.say(text)
        self._announced.discard(text)

    def _tell_progress(self, before: HealPlan, after: HealPlan) -> bool:
        left = {interval.start for interval in after.unfinished}
        done = [interval for interval in before.unfinished if interval.start not in left]
        if isinstance(self.place, InAirflow):  # Without Airflow, `_Here` reports each interval itself.
            for interval in done:
                self.progress.done(interval)
        return bool(done)

    def _announce(self, plan: HealPlan, health: Health) -> None:
        say = self.progress.say
        if plan.steps:
            working = f", {plan.running} queued or running" if plan.running else ""
            say(f"{self.request.pipeline}: {_count(len(plan.to_run))} to run{working}, up to {self.request.last}")
        for step in plan.steps:
            say(f"  {step}")
        self._announced = {str(step) for step in plan.steps}
        if health.waiting:
            first = min(health.waiting)
            say(
                f"  {_count(len(health.waiting))} from {first} on must wait, and run afterwards if the input differs: {health.waiting[first]}"
            )
        if plan.skipped:
            first, last = plan.skipped[0], plan.skipped[-1]
            say(f"skipped by a run with allow_gap, and skipped again: {Interval(first.start, last.end)}")
        for run in plan.not_repeatable:
            say(f"run {run.run_id} failed, but its interval has a result and its base is dropped: it is not run again")

    def _end(self, plan: HealPlan, health: Health, what: str, *, healthy: bool) -> None:
        """Print whether the pipeline is healthy, `what` was done, and, if not, the command to type next."""
        verdict, command = f"{self.request.pipeline} is healthy up to {self.request.last}; {what}", None
        given_up = next((step for step in plan.steps if isinstance(step, GiveUp)), None)
        later = [start for start in health.spoilt if start > self.place.last]
        if given_up is not None and isinstance(self.place, InAirflow):
            page = self.place.page_of(given_up.run)
            verdict = f"{given_up}; {what}\nIts log says why: {page}\nRepair the cause, then go on with:"
            command = self.command
        elif not healthy:
            verdict = f"{self.request.pipeline} is not healthy up to {self.request.last}; {what}\nTo heal it:"
            command = self.command
        elif waits := sorted(i for i in health.waiting if i.start <= self.place.last):
            healthy, command = False, f"{self.command.removesuffix(' --chain')} --chain"
            verdict = f"{self.request.pipeline} is not healthy up to {self.request.last}; {what}\n{waits[0]} waits: {health.waiting[waits[0]]}\nTo heal its upstreams first:"
        elif plan.off_schedule:
            healthy, other = False, plan.off_schedule[0]
            verdict = (
                f"{other} has a result that is {health.spoilt[other.start]}, but is no interval of the schedule any more; {what}\n"
                "Replace its output by intervals of the schedule, with --replace-overlapping"
            )
            command = self._replacing(plan.off_schedule)
        elif later:
            verdict += f"\n{_count(len(later))} after it {'is' if len(later) == 1 else 'are'} stale or quarantined. To heal them, give --to {format_instant(max(later))}"
        self.shown = {
            "pipeline": self.request.pipeline,
            "healthy": healthy,
            "ran": self.progress.healed,
            "verdict": verdict,
            "command": command,
            "to_run": [{"start": format_instant(s.interval.start), "reason": s.reason} for s in plan.to_run],
            "steps": self.steps or [str(step) for step in plan.steps],
        }
        if not self.as_json:
            typer.echo(verdict if command is None else f"{verdict}\n{command}")

    def _replacing(self, off_schedule: tuple[Interval, ...]) -> str | None:
        if not isinstance(self.place, InAirflow):
            return None
        last = max(off_schedule[0].start, off_schedule[-1].end - timedelta(seconds=1))
        again = Rerun(first=off_schedule[0].start, last=last, replace_overlapping=True)
        return backfill_command(self.place.dag_id, again, self.place.rest.url)


class _Here:
    """The place that runs intervals in this process, as `cairn run` does."""

    def __init__(
        self, request: Heal, storage: Storage, terminal: Terminal, on_done: Callable[[Interval], None]
    ) -> None:
        self.request = request
        self.storage = storage
        self.terminal = terminal
        self.on_done = on_done
        self.pipeline = terminal.load(request)
        self.own_backfills: set[int] = set()
        declared = None if request.every is not None else self.pipeline.declared_schedule or read_log(storage).schedule
        self.last = last_instant("--to", request.last, UTC if declared is None else declared.rules)

    def plan(self, now: datetime, *, fresh: bool) -> tuple[HealPlan, Health]:
        """Read the log, and return (plan, health): the next steps, and the state of the results."""
        log = read_log(self.storage)
        health = health_of(log, Chains().judged(self.request.root, self.pipeline.name, log))
        rule = boundaries_of(self.pipeline, log, self.request.every)
        schedule = schedule_of(rule, "UTC") if isinstance(rule, timedelta) else rule
        begin = health.begin or self.pipeline.start
        return plan_heal(health, calendar_until(health, begin, schedule, self.last, now), None), health

    @cached_property
    def _session(self) -> SparkSession:
        return self.terminal.connect(self.pipeline, "heal")

    def publish(self) -> None:
        at = locate(self.request.root, self.pipeline.name)
        if self.pipeline.sink is not None and self.pipeline.group is None and unpublished(at):
            self.pipeline.call_sink(at, self._session, code=self.request.code)

    def carry_out(self, step: Step) -> None:
        from cairn.operations.intervals.run_intervals import run_intervals

        if isinstance(step, RunIntervals):
            run_intervals(
                self._session,
                self.pipeline,
                [to_run.interval for to_run in step.to_run],
                self.request.root,
                reprocess="all",
                permissions=Permissions(allow_gap=step.allow_gap),
                on_outcome=lambda outcome, _: self.on_done(outcome.interval),
            )


def _count(intervals: int) -> str:
    return "1 interval" if intervals == 1 else f"{intervals:,} intervals"


def _now() -> datetime:
    return datetime.now(tz=UTC)
