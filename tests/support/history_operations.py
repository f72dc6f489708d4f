"""What the processes of a random history do. Each operation chooses by its own seed, from what is there when it begins."""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from cairn import testing
from cairn.operations.export_state import REPORT, export_state
from cairn.operations.intervals.plan_interval import Attempt
from cairn.operations.intervals.process_interval import process_interval
from cairn.operations.intervals.run_interval import finish_commit
from cairn.operations.intervals.run_intervals import run_intervals
from cairn.operations.savepoints import restore_savepoint as restoring
from cairn.operations.savepoints import take_savepoint as taking
from cairn.pipeline import Pipeline
from cairn.trials.compare_trial import compare_trial
from cairn.trials.promote_trial import plan_promotion, promote_past
from cairn.trials.try_code import try_code
from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint import leases
from state_backend.checkpoint import prepare_content as preparing
from state_backend.checkpoint.leases import holding
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.log import Log, read_log
from state_backend.checkpoint.rewind import fork, rewind
from state_backend.checkpoint.sweep_files import sweep
from state_backend.checkpoint.trials import (
    list_trials,
    read_trial,
    remove_trial,
    root_of_trial,
    sweep_trials,
    trials_url,
)
from state_backend.formats import paths
from state_backend.inspection.state_source import StateSource
from state_backend.inspection.verify import verify_pipeline
from state_backend.shard import changelog_store, manifest, snapshot
from state_backend.values.errors import CairnError, CheckpointDropped, CorruptFile, NotFound, StorageUnavailable
from state_backend.values.intervals import to_ms
from state_backend.values.records import Permissions, Record, RunRef
from tests.support.coordinator import coordinator_of
from tests.support.counting import START, day
from tests.support.disturbed_storage import note, noted
from tests.support.history_oracle import Difference, Oracle, note_origin, read_states, same, savepoints
from tests.support.history_pipeline import pipeline_of, shown
from tests.support.in_process import run_here

SESSION: Any = testing.PlanningSession("UTC")
MAIN, FORKS = "main", ("fork1", "fork2")
DAYS = 9
# No file of a history is so old, whatever the clocks of its processes say.
LONG_AGO = timedelta(hours=5)


@dataclass(kw_only=True)
class Work:
    """One operation of one process. ``history``: the folder; ``codes``: what is deployed, by pipeline; ``told``: what was handed on."""

    history: Path
    chosen: random.Random
    codes: dict[str, int]
    cached: bool
    host: str
    told: dict[str, Any]

    @property
    def root(self) -> Path:
        return self.history / "root"

    def declared(self, name: str, code: int | None = None) -> Pipeline:
        """With any number of shards: intervals, restores, savepoints, forks and trials continue from checkpoints of other numbers."""
        disk, parallelism = self.history / "disk", self.chosen.choice([1, 2, 2, 3, 4])
        return pipeline_of(name, code or self.codes.get(name, 1), disk, cached=self.cached, parallelism=parallelism)

    def log(self, name: str) -> Log:
        """As it is, for choosing."""
        return read_log(LocalStorage(self.root / name))

    def days_done(self, name: str) -> int:
        ends = [r.content.interval.end for r in self.log(name).completed()]
        return (max(ends) - START).days if ends else 0

    def first_day(self, name: str) -> int:
        """A day that an interval may start from: behind a usable checkpoint, mostly the last one."""
        log = self.log(name)
        usable = [
            r for r in log.completed() if log.quarantine_above(r.id) is None and log.retained[r.id].stale_by is None
        ]
        ends = [0, *((r.content.interval.end - START).days for r in usable)]
        return min(
            self.chosen.choice([max(ends), max(ends), self.chosen.choice(ends), self.chosen.randint(0, max(ends))]),
            DAYS - 1,
        )

    def some_pipeline(self) -> str:
        there = [name for name in FORKS if (self.root / name / "HEAD.json").exists()]
        return self.chosen.choice([MAIN, MAIN, *there])

    def some_checkpoint(self, name: str) -> Record | None:
        return self.chosen.choice(self.log(name).completed() or [None])

    def oracle(self, name: str, root: Path | None = None) -> Oracle:
        return Oracle(self.history, root or self.root, name)

    def on_shards(self, pipeline: Pipeline) -> Any:
        return partial(testing._on_shards, pipeline.processor)

    def run(self, what: str) -> RunRef:
        return RunRef(run_id=f"{what}-{uuid.uuid4()}", clear_number=0, try_number=1)


Operation = Callable[[Work], Any]


# --- intervals ----------------------------------------------------------------------------------------------------------------------


def run_range(work: Work) -> Any:
    """Some days in one go, from the next one or from an earlier one."""
    name = work.some_pipeline()
    first = work.first_day(name)
    last = min(first + work.chosen.randint(1, 3), DAYS)
    mode = work.chosen.choice(["incremental", "incremental", "full", "changelog"])
    reprocess: Any = work.chosen.choice(["changed", "all", "none"])
    return name, first, last, mode, reprocess, run_days(work, name, first, last, mode, reprocess)


def run_days(work: Work, name: str, first: int, last: int, mode: str, reprocess: Any) -> list[bool]:
    pipeline = work.declared(name)
    outcomes = run_intervals(
        SESSION,
        pipeline,
        [day(n) for n in range(first, last)],
        str(work.root),
        mode,
        reprocess=reprocess,
        run=work.run("range"),
        on_shards=work.on_shards(pipeline),
    )
    return [outcome.computed for outcome in outcomes]


def process(work: Work) -> Any:
    """What the `process` task does; another operation commits it."""
    if (run := work.told.get("retry")) is None:
        name = work.some_pipeline()
        run = {"pipeline": name, "day": work.first_day(name), "run_id": str(uuid.uuid4()), "try": 1}
    pipeline, attempt = work.declared(run["pipeline"]), str(uuid.uuid4())
    process_interval(
        SESSION,
        pipeline,
        locate(str(work.root), pipeline.name),
        Attempt(
            id=attempt,
            interval=day(run["day"]),
            mode=work.chosen.choice(["incremental", "incremental", "full", "changelog"]),
            run=RunRef(run_id=run["run_id"], clear_number=0, try_number=run["try"]),
            permissions=Permissions(allow_stale_base=work.chosen.random() < 0.1),
        ),
        on_shards=work.on_shards(pipeline),
    )
    return run | {"attempt": attempt, "try": run["try"] + 1}


def commit(work: Work) -> Any:
    """What the `checkpoint` task does."""
    told = work.told["prepared"]
    pipeline = work.declared(told["pipeline"])
    coordinator = coordinator_of(pipeline, str(work.root), remembers=True)
    result = coordinator.commit(told["attempt"])
    finish_commit(SESSION, pipeline, coordinator.at, result.id, result.log)
    return told, result.id, result.outcome


# --- other states -------------------------------------------------------------------------------------------------------------------


def go_back(work: Work) -> Any:
    """A rewind to any completed checkpoint."""
    name = work.some_pipeline()
    target = work.some_checkpoint(name)
    if target is None:
        return None
    allowed = Permissions(allow_stale_base=work.chosen.random() < 0.5, allow_quarantined=work.chosen.random() < 0.1)
    coordinator = coordinator_of(work.declared(name), str(work.root), remembers=True)
    made = rewind(coordinator.at, target.id, run=work.run("rewind"), attempt=str(uuid.uuid4()), permissions=allowed)
    coordinator.publish(None)
    coordinator.clean_up()
    return name, target.id, made.id


def quarantine(work: Work) -> Any:
    name = work.some_pipeline()
    target = work.some_checkpoint(name)
    if target is not None:
        coordinator_of(work.declared(name), str(work.root)).quarantine(target.id, "a person does not like it")
    return name, target and target.id


def fork_off(work: Work) -> Any:
    """Another pipeline that starts from a checkpoint of this one."""
    into = work.chosen.choice(FORKS)
    name = work.chosen.choice([MAIN, MAIN, *(f for f in FORKS if f != into and (work.root / f).exists())])
    target = work.some_checkpoint(name)
    if target is None:
        return None
    attempt = str(uuid.uuid4())
    note_origin(work.history, attempt, work.root, name, target.id)
    coordinator = coordinator_of(work.declared(into, work.codes.get(name, 1)), str(work.root))
    source = open_storage(join_url(str(work.root), name))
    made = fork(
        source, target.id, coordinator.at, run=work.run("fork"), attempt=attempt, pipeline_start_ms=to_ms(START)
    )
    coordinator.publish(None)
    coordinator.clean_up()
    return name, target.id, into, made.id


def take_savepoint(work: Work) -> Any:
    name = work.some_pipeline()
    target = work.some_checkpoint(name)
    if target is None:
        return None
    to = work.history / "savepoints" / str(work.chosen.randrange(10**6))
    pipeline, url = work.declared(name), join_url(str(work.root), name)
    format: Any = work.chosen.choice(["native", "canonical"])
    with reading(name, target.id):
        taken = taking.take_savepoint(SESSION, pipeline, url, target, str(to), format)
    found = read_states(StateSource.of_savepoint(str(to), taken), open_storage(str(to)))
    check_rows(work.oracle(name), target.id, found, f"savepoint {to.name}")
    return name, target.id, format, str(to)


def restore_savepoint(work: Work) -> Any:
    """A savepoint into the pipeline that it is of, or into another one."""
    folder, saved = work.chosen.choice([*savepoints(work.history)] or [(None, None)])
    if folder is None or saved is None:
        return None
    name, attempt = work.chosen.choice([saved.content.pipeline, *FORKS]), str(uuid.uuid4())
    note_origin(work.history, attempt, work.root, saved.content.pipeline, saved.checkpoint_id)
    made = restoring.restore_savepoint(SESSION, work.declared(name), str(work.root), str(folder), attempt=attempt)
    return str(folder), name, made.id


# --- trials -------------------------------------------------------------------------------------------------------------------------


def try_changed(work: Work) -> Any:
    """Some days with the other code, compared with production."""
    name = MAIN
    done = work.days_done(name)
    if not done:
        return None
    first = work.chosen.randint(0, done - 1)
    last, code = work.chosen.randint(first + 1, done), 3 - work.codes.get(name, 1)
    pipeline, called = work.declared(name, code), f"t{work.chosen.randrange(2)}"

    def note_plan(plan: Any) -> None:
        if plan.trial.base is not None:
            note_origin(work.history, plan.trial.attempt, work.root, name, plan.trial.base.id)

    removals = len(noted(work.history, work.root, f"removed/{called}"))
    tried = try_code(
        SESSION,
        pipeline,
        [day(n) for n in range(first, last)],
        str(work.root),
        code=f"code:{code}",
        trial=called,
        keep_for=timedelta(hours=24),
        on_plan=note_plan,
        on_shards=work.on_shards(pipeline),
    )
    try:
        _check_trial(work, name, called)
        compare_trial(str(work.root), name, called, (), 3)
    except (CairnError, Difference, OSError, ValueError, AssertionError) as error:
        # A removal deletes the trial's record last, so its files may be gone while the trial is still listed.
        removed = len(noted(work.history, work.root, f"removed/{called}")) > removals
        now = read_trial(str(work.root), name, called)
        if (
            not removed
            and now is not None
            and now.attempt == tried.trial.attempt
            and not isinstance(error, CheckpointDropped)
        ):
            raise
    return called, first, last, code


def _check_trial(work: Work, name: str, called: str) -> None:
    root = Path(root_of_trial(str(work.root), name, called))
    oracle, storage = work.oracle(name, root), LocalStorage(root / name)
    log = read_log(storage)
    for record in log.completed():
        oracle.check_state(record, storage)
    for checkpoint_id, files in oracle.check_current(log).values():
        oracle.check_output(checkpoint_id, files, storage)
    oracle.check_rules()


def deploy(work: Work) -> Any:
    """Production takes the code of a trial for the past."""
    trials = list_trials(str(work.root), MAIN)
    if not trials:
        return None
    trial = work.chosen.choice(trials)
    pipeline = work.declared(MAIN, int(trial.code.partition(":")[2]))
    plan = plan_promotion(SESSION, pipeline, str(work.root), trial=trial.name, past=True)
    outcomes = promote_past(SESSION, pipeline, str(work.root), plan, on_shards=work.on_shards(pipeline))
    return {"deployed": int(trial.code.partition(":")[2]), "intervals": len(outcomes)}


def remove_trials(work: Work) -> Any:
    trials = list_trials(str(work.root), MAIN)
    if not trials:
        return None
    trial = work.chosen.choice(trials)
    note(work.history, work.root, f"removed/{trial.name}", b"")
    return remove_trial(str(work.root), trial).name


# --- reading ------------------------------------------------------------------------------------------------------------------------


@contextmanager
def reading(name: str, checkpoint_id: int) -> Iterator[None]:
    """Around what reads a checkpoint by a lease. Raises: Difference if a file was missing or damaged while the lease was there."""
    LEASED.clear()
    try:
        yield
    except (CheckpointDropped, CorruptFile, NotFound) as error:
        if not LEASED:
            raise
        what = f"checkpoint {checkpoint_id} of {name} was read by a lease, and failed"
        raise Difference(f"{what}: {type(error).__name__}: {error}") from error


LEASED: list[str] = []


def _noting_leases() -> None:
    take = leases.take_lease

    def noting(*arguments: Any, **more: Any) -> str | None:
        path = take(*arguments, **more)
        if path is not None:
            LEASED.append(path)
        return path

    leases.take_lease = noting


def read_leased(work: Work) -> Any:
    """All of a checkpoint's state, and again a while after others dropped it."""
    name = work.some_pipeline()
    there = sorted(work.log(name).completed(), key=lambda r: r.id)
    if not there:
        return None
    target = work.chosen.choice([there[0], *there])
    storage = open_storage(join_url(str(work.root), name))
    with reading(name, target.id), holding(storage, target.id, "a test"):
        for _ in range(2):
            found = read_states(StateSource.of_record(storage.url, target), storage)
            check_rows(work.oracle(name), target.id, found, f"a read of {name}")
            time.sleep(work.chosen.uniform(0, 0.5))
            for _ in range(20):
                if target.id not in work.log(name).retained:
                    break
                time.sleep(0.1)
    return name, target.id, "retained" if target.id in work.log(name).retained else "dropped"


def export(work: Work) -> Any:
    name = work.some_pipeline()
    target = work.some_checkpoint(name)
    if target is None:
        return None
    to = work.history / "exports" / str(uuid.uuid4())
    url = join_url(str(work.root), name)
    with reading(name, target.id):
        export_state(StateSource.of_record(url, target), str(to))
    report = json.loads((to / REPORT).read_text())
    users, last = work.oracle(name).state(target.id)
    expected = {state: rows.total() for state, rows in shown(users, last).items()}
    same(expected, report["rows"], f"rows of an export of checkpoint {target.id} of {name}")
    return name, target.id


def read_output(work: Work) -> Any:
    """All that is current. Replaced output may be deleted while it is read."""
    name = work.some_pipeline()
    storage = open_storage(join_url(str(work.root), name))
    oracle, log = work.oracle(name), read_log(storage)
    for checkpoint_id, files in oracle.check_current(log).values():
        try:
            oracle.check_output(checkpoint_id, files, storage)
        except NotFound as error:
            if (
                oracle.current(work.log(name).head_id).get(oracle.commit(checkpoint_id).content.interval)
                == checkpoint_id
            ):
                raise Difference(f"current output of checkpoint {checkpoint_id} of {name}: {error}") from error
    return name, log.head_id


def check_rows(oracle: Oracle, checkpoint_id: int, found: Any, what: str) -> None:
    users, last = oracle.state(checkpoint_id)
    for state, rows in shown(users, last).items():
        same(rows, found[state], f"{what}: state {state!r} of checkpoint {checkpoint_id}")


def verify(work: Work) -> Any:
    """What is committed or dropped meanwhile is no finding."""
    name = work.some_pipeline()
    if not (work.root / name / "HEAD.json").exists():
        return None
    storage = open_storage(join_url(str(work.root), name))
    with work_folder("verify") as folder:
        found = verify_pipeline(storage, work=folder if work.chosen.random() < 0.5 else None)
    if not found.success:
        raise Difference(f"verify of {name}: {found.findings[:3]} {[c for c in found.checkpoints if c.findings][:3]}")
    return name


# --- cleaning -----------------------------------------------------------------------------------------------------------------------


def sweep_some(work: Work) -> Any:
    """Sweeps a pipeline and the trials. What a long age abandons is a difference."""
    name = work.some_pipeline()
    min_age = work.chosen.choice([timedelta(seconds=work.chosen.uniform(0.3, 3)), LONG_AGO])
    done = sweep(open_storage(join_url(str(work.root), name)), name, min_age=min_age)
    if min_age == LONG_AGO and (done.record is not None or done.deleted_bytes):
        raise Difference(f"a sweep of {name} with age {min_age} took {done.plan.abandon} {done.plan.delete}")
    if work.chosen.random() < 0.3:
        _sweep_trials(work)
    return name, str(min_age), done.deleted_files, done.record and done.record.abandoned


def _sweep_trials(work: Work) -> None:
    """None of the trials is over, so that a sweep removes only what people removed."""
    before = {t.name: t.attempt for t in list_trials(str(work.root), MAIN)}
    plain = LocalStorage(Path(trials_url(str(work.root), MAIN)))
    there = {name for name in ("t0", "t1") if plain.stat(paths.trial(name)) is not None}
    for removed in sweep_trials(str(work.root), MAIN):
        if removed.name in there and not noted(work.history, work.root, f"removed/{removed.name}"):
            raise Difference(f"a sweep removed trial {removed.name}, which is not over; it saw {before}")


def clean_up(work: Work) -> Any:
    name = work.some_pipeline()
    return name, coordinator_of(work.declared(name), str(work.root)).clean_up().deleted_files


def change_input(work: Work) -> Any:
    """Another version of some day's input."""
    file = work.history / "inputs" / str(work.chosen.randrange(DAYS))
    part = file.with_suffix(f".{uuid.uuid4().hex}")
    part.write_text(str(int(file.read_text()) + 1 if file.exists() else 2))
    part.replace(file)
    return file.name


def prepare_process(layout: str) -> None:
    """Jobs of shards run in this process, and leases are noted. ``layout``: "records" hold small states and manifests; "files": state
    lies in files of its own, however small; "manifests": these do too."""
    if layout != "records":
        snapshot.INLINE_FILE_BYTES = changelog_store.INLINE_FILE_BYTES = 0
    if layout == "manifests":
        manifest.INLINE_MANIFESTS_BYTES = preparing.INLINE_MANIFESTS_BYTES = 0
    taking.run_on_shards = run_here  # type: ignore[assignment]
    restoring.run_on_shards = run_here  # type: ignore[assignment]
    _noting_leases()


# --- at the end ---------------------------------------------------------------------------------------------------------------------


def finish(work: Work) -> Any:
    """Brings a pipeline to an end: all days that it has are run, if they are not what they should be."""
    name = work.told["pipeline"]
    log = work.log(name)
    ends = [f.interval.end for f in log.facts(None) if f.kind != "replaced"]
    last = (max(ends) - START).days if ends else 0
    if not last:
        return None
    with suppress(CairnError):
        run_days(work, name, 0, last, "incremental", "changed")
        return name, "changed"
    run_days(work, name, 0, last, "incremental", "all")
    return name, "all"


# What an operation may be refused with. A class stands for itself alone: what derives from it means something else.
NOT_BASE = {"StateGapError", "StaleStateError", "StateUnusable", "NoSuchCheckpoint"}
LOST = {"Fenced", "BaseMoved", "Swept"}
BUSY = {"CheckpointDropped", StorageUnavailable.__name__}
ALLOWED: dict[str, tuple[Operation, int, set[str]]] = {
    "run_range": (run_range, 16, NOT_BASE | LOST | BUSY),
    "process": (process, 6, NOT_BASE | LOST | BUSY),
    "commit": (commit, 8, LOST | BUSY | {"StateUnusable"}),
    "go_back": (go_back, 2, NOT_BASE | LOST | BUSY),
    "quarantine": (quarantine, 1, BUSY),
    "fork_off": (fork_off, 2, NOT_BASE | LOST | BUSY | {"UsageError"}),
    "take_savepoint": (take_savepoint, 2, NOT_BASE | BUSY),
    "restore_savepoint": (restore_savepoint, 1, NOT_BASE | LOST | BUSY | {"UsageError"}),
    "try_changed": (try_changed, 3, NOT_BASE | LOST | BUSY | {"UsageError"}),
    "deploy": (deploy, 2, NOT_BASE | LOST | BUSY | {"UsageError", "NotAsTried"}),
    "remove_trials": (remove_trials, 1, BUSY),
    "read_leased": (read_leased, 6, BUSY),
    "export": (export, 2, BUSY),
    "read_output": (read_output, 3, BUSY),
    "verify": (verify, 2, BUSY),
    "sweep_some": (sweep_some, 4, BUSY),
    "clean_up": (clean_up, 1, BUSY),
    "change_input": (change_input, 4, set()),
}
