"""Random processors and inputs, under real Spark and under Cairn: outputs, states and timers must be equal.

    python -m tests.conformance.generator --first 0 --seeds 20 [--zone America/New_York]

A seed is one streaming query: types of key and columns, API, clock, batches. Each key of it is a case of its own: a random
program, one call per row (row API) or per frame (pandas API). Seeds that differ are printed, with what differs.

``--zone`` sets the session's zone; TZ of the process is the caller's. Where they differ, Spark's naive values in state depend on
the machine, and the programs turn them into instants. What even then depends on the machine is not generated: TIMESTAMP_NTZ, whose
seconds since the epoch are asked for; in frames any instant, which comes in the session's zone and goes into state by TZ; and
an instant as key where there are timers, whose handlers get it by TZ and emit it in the session's zone.

``--outcomes`` runs the seeds only here, and prints a hash of what each gave: the same on every version of PySpark. PySpark 4.0
has no operator of rows; without ``--outcomes`` seeds of rows are left out there.

What differs by design is not generated, and each of it stands in docs/compared-with-spark.md: floats that are keys and -0.0 or NaN, null
keys and nulls among integers in frames and their cells, the order of a map's entries, the fold of a repeated hour, naive instants in
yielded rows.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyspark
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import Row

from tests.support.spark_streaming import Case, has_row_operator, write_batches

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KEYS_PER_SEED = 25
ZONES = ("UTC", "America/New_York", "Asia/Kolkata")

_WORDS = ["", "a", "ä", "日本", "\U0001f600", "a\0b", " x ", "Ab", "ab", "z" * 60]
_DAYS = [
    date(1970, 1, 1),
    date(1969, 12, 31),
    date(2024, 2, 29),
    date(1600, 3, 1),
    date(9998, 12, 31),
    date(2024, 11, 3),
]
# Around the hours that New York leaves out and repeats, and before 1970.
_INSTANTS = [
    datetime(2024, 3, 10, 6, 59, 59, 999999, tzinfo=UTC),
    datetime(2024, 3, 10, 7, 0, tzinfo=UTC),
    datetime(2024, 11, 3, 4, 30, tzinfo=UTC),
    datetime(2024, 11, 3, 7, 30, 0, 1, tzinfo=UTC),
    datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
    datetime(1970, 1, 1, tzinfo=UTC),
    datetime(2024, 7, 1, 12, tzinfo=UTC),
    datetime(1950, 6, 1, 1, 2, 3, 4, tzinfo=UTC),
]
Make = Callable[[random.Random], Any]


def _float32(value: float) -> float:
    return float(np.float32(value))


_NUMBERS = [0.0, -0.0, 1.5, -2.25, 1e30, 1e-30, float("inf"), float("-inf"), float("nan"), 0.1, 123456.789]
SCALARS: dict[str, Make] = {
    "boolean": lambda pick: pick.random() < 0.5,
    "tinyint": lambda pick: pick.choice([0, -128, 127, pick.randrange(-128, 128)]),
    "smallint": lambda pick: pick.choice([0, -32768, 32767, pick.randrange(-9000, 9000)]),
    "int": lambda pick: pick.choice([0, -(2**31), 2**31 - 1, pick.randrange(10**6)]),
    "bigint": lambda pick: pick.choice([0, -(2**63), 2**63 - 1, pick.randrange(100), 2**53 + 1]),
    "float": lambda pick: _float32(pick.choice(_NUMBERS)),
    "double": lambda pick: pick.choice(_NUMBERS),
    "string": lambda pick: pick.choice(_WORDS),
    "binary": lambda pick: pick.choice([b"", b"\0", b"\xff\0", bytes(range(40)), pick.randbytes(4)]),
    "date": lambda pick: pick.choice(_DAYS),
    "timestamp": lambda pick: pick.choice(_INSTANTS) + timedelta(0, 0, pick.choice([0, 0, 1, 999])),
    "timestamp_ntz": lambda pick: pick.choice(_INSTANTS).replace(tzinfo=None),
    "decimal(10,2)": lambda pick: Decimal(pick.randrange(-(10**10) + 1, 10**10)).scaleb(-2),
    "decimal(38,10)": lambda pick: Decimal(pick.randrange(10**30)).scaleb(-10),
}
NESTED: dict[str, Make] = {
    "array<int>": lambda pick: [pick.choice([None, 0, pick.randrange(1000)]) for _ in range(pick.randrange(4))],
    "array<string>": lambda pick: [pick.choice([None, *_WORDS]) for _ in range(pick.randrange(3))],
    "array<timestamp>": lambda pick: [pick.choice([None, *_INSTANTS]) for _ in range(pick.randrange(3))],
    "map<string,bigint>": lambda pick: {pick.choice(_WORDS): pick.randrange(9)} if pick.random() < 0.8 else {},
    "struct<p:int,q:string>": lambda pick: {"p": pick.choice([None, pick.randrange(9)]), "q": pick.choice(_WORDS)},
    "struct<p:timestamp,q:array<double>>": lambda pick: {
        "p": pick.choice(_INSTANTS),
        "q": [0.5, -0.0][: pick.randrange(3)],
    },
}
NOTHING = r"(?!)"
# What Spark's own operator does differently than that of 4.3, by version; docs/compared-with-spark.md says each. Lists and entries of maps pass
# through frames; frames and keys have Arrow's numbers; keys of timers are tuples; binary values in state are bytearray; a null makes
# floats of integers in structs; a struct in state is no Row, or can't be written as a Row (only mutations.py writes any).
ENTRIES, NUMBERS, TIMER_KEYS = "entries", "numbers", "timer keys"
BINARY, NULL_FIELDS, ROWS, WRITTEN_ROWS = "binary", "null fields", "rows", "written rows"
DIFFER_BY_VERSION = {
    "4.0": {ENTRIES, NUMBERS, TIMER_KEYS, BINARY, NULL_FIELDS, ROWS, WRITTEN_ROWS},
    "4.1": {NULL_FIELDS, WRITTEN_ROWS},
}
DIFFERENT = frozenset(DIFFER_BY_VERSION.get(pyspark.__version__[:3], ()))
# Calls that no program makes.
_CALLS = {
    ENTRIES: r"t?l\.(get|put|appendList)|t?m\.(iterator|keys|values)",
    NUMBERS: r"(x|y|key)$|type\(x\)|\[type|f\['x'\]($|\.iloc)|f\.dtypes|list\(f\['y'\]|f\['k0'\]|str\(f",
}
KEY_TYPES = [t for t in SCALARS if t not in ("float", "double")]
# A frame's user key would have to be hashed, or is NaN.
USER_KEY_TYPES = KEY_TYPES


def shown(value: Any, instants: bool = False, differ: frozenset[str] = frozenset()) -> str:
    """A repr that tells types apart and in which a dict's order does not matter. ``instants``: naive datetimes as seconds
    since the epoch, which is what they mean wherever the process is."""
    show = partial(shown, instants=instants, differ=differ)
    if BINARY in differ and isinstance(value, bytearray):
        return repr(bytes(value))
    if isinstance(value, Row):
        return f"Row({', '.join(f'{name}={show(v)}' for name, v in zip(value.__fields__, value, strict=True))})"
    if isinstance(value, dict):
        return "{" + ", ".join(sorted(f"{show(k)}: {show(v)}" for k, v in value.items())) + "}"
    if isinstance(value, list | tuple):
        inside = ", ".join(show(v) for v in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    if isinstance(value, np.ndarray):
        return f"ndarray<{value.dtype}>{show(list(value))}"
    if instants and type(value) is datetime and value.tzinfo is None and 1900 < value.year < 2100:
        return f"instant {value.timestamp()}"
    return repr(value)


class Pairs(list[Any]):
    """A map as rows have it: its pairs."""


def plain(value: Any) -> Any:
    """What state takes under both engines: of NumPy's arrays lists, of a row's pairs a dict, of NaN and NaT null."""
    if isinstance(value, np.ndarray):
        return [plain(v) for v in value]
    if isinstance(value, Pairs):
        return dict(value)
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return None if value is pd.NaT else value


class Machine(StatefulProcessor):
    """Evaluates the expression that each row carries, with the states v, l and m in scope."""

    def __init__(
        self,
        keys: tuple[str, str],
        x: str,
        y: str,
        user_key: str,
        expiring: bool,
        instants: bool,
        differ: frozenset[str],
    ) -> None:
        self.keys, self.x, self.y, self.user_key = keys, x, y, user_key
        self.expiring, self.differ, self.show = expiring, differ, partial(shown, instants=instants, differ=differ)

    def init(self, handle: Any) -> None:
        value, ttl = f"x {self.x}, y {self.y}", {"ttlDurationMs": 3_600_000} if self.expiring else {}
        self.scope: dict[str, Any] = {
            "h": handle,
            "v": handle.getValueState("v", value),
            "l": handle.getListState("l", value),
            "m": handle.getMapState("m", f"u {self.user_key}", value),
            "tv": handle.getValueState("tv", value, **ttl),
            "tl": handle.getListState("tl", value, **ttl),
            "tm": handle.getMapState("tm", f"u {self.user_key}", value, **ttl),
            "plain": plain,
            "np": np,
            "pd": pd,
        }

    def evaluate(self, op: str, scope: dict[str, Any]) -> str:
        result = eval(op, scope)
        if isinstance(result, Iterator):
            result = list(result)
        if op.startswith(("m.", "tm.")) and isinstance(result, list):
            return str(sorted(map(self.show, result)))
        return self.show(result)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        now, wm = timerValues.getCurrentProcessingTimeInMs(), timerValues.getCurrentWatermarkInMs()
        scope = self.scope | {"key": key, "now": now, "wm": wm}
        for item in rows:
            yield from self.step(key, item, scope)

    def step(self, key: Any, row: Any, scope: dict[str, Any]) -> Iterator[Any]:
        x, y = (
            plain(Pairs(value) if kind.startswith("map") and value is not None else value)
            for kind, value in ((self.x, row.x), (self.y, row.y))
        )
        result = self.evaluate(row.op, scope | {"row": row, "x": x, "y": y})
        yield Row(k0=row.k0, k1=row.k1, n=row.n, op=row.op, result=result, x=x, y=y)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        at = expiredTimerInfo.getExpiryTimeInMs()
        held = self.scope["v"].get()
        told = tuple(key) if TIMER_KEYS in self.differ else key
        result = self.show((told, sorted(self.scope["h"].listTimers()), held))
        yield from self.fired(key, at, result)

    def fired(self, key: Any, at: int, result: str) -> Iterator[Any]:
        # A timer's handler gets instants naive, by TZ. Put out so, Spark takes them for UTC, and Cairn for wall time.
        k0, k1 = (
            value.astimezone(UTC) if kind == "timestamp" and value is not None else value
            for kind, value in zip(self.keys, key, strict=True)
        )
        yield Row(k0=k0, k1=k1, n=None, op=f"timer {at}", result=result, x=None, y=None)


class FrameMachine(Machine):
    """The same for frames: every expression of a frame's rows is evaluated with the frame as ``f``."""

    def step(self, key: Any, f: pd.DataFrame, scope: dict[str, Any]) -> Iterator[Any]:
        results = []
        for n, op in enumerate(f["op"][:12]):
            x, y = plain(f["x"].iloc[n]), plain(f["y"].iloc[n])
            results.append(self.evaluate(op, scope | {"f": f, "x": x, "y": y}))
        out = f[["k0", "k1", "n", "op", "x", "y"]][:12].copy()
        out["result"] = results
        yield out

    def fired(self, key: Any, at: int, result: str) -> Iterator[Any]:
        row = {"k0": key[0], "k1": key[1], "n": None, "op": f"timer {at}", "result": result, "x": None, "y": None}
        yield pd.DataFrame({name: [value] for name, value in row.items()})


def _ops(pick: random.Random, frames: bool, timed: str, front_ms: int, without: str) -> str:
    p = pick.choice(["", "t"])
    calls = [
        *(f"{p}v.get()", f"{p}v.exists()", f"{p}v.update((x, y))", f"{p}v.update((x, None))", f"{p}v.clear()"),
        *(f"{p}v.update(e for e in [x, y])", f"[{p}v.update((x, y)), {p}v.get()]"),
        *(f"{p}l.appendValue((x, y))", f"{p}l.get()", f"{p}l.exists()", f"{p}l.clear()"),
        *(f"{p}l.put([(x, y), (None, None)])", f"{p}l.appendList(e for e in [(None, y), (x, y)])"),
        *(f"{p}m.updateValue((USER,), (x, y))", f"{p}m.getValue((USER,))", f"{p}m.containsKey((USER,))"),
        *(f"{p}m.iterator()", f"{p}m.keys()", f"{p}m.values()", f"{p}m.exists()", f"{p}m.removeKey((USER,))"),
        *("x", "y", "key", "(now, wm)", "type(key).__name__", "type(x).__name__"),
    ]
    if frames:
        calls += [
            *("f['x']", "f.dtypes.astype(str).tolist()", "len(f)", "list(f.index)[:3]", "list(f.columns)"),
            *("f['x'].iloc[0]", "list(f['y'])", "(f['k1'] == key[1]).sum()", "f['k0'].iloc[0]", "f['n'].sum()"),
            *("f['x'].isna().sum()", "str(f['x'].dtype)", "[type(e).__name__ for e in f['y']]"),
        ]
    else:
        calls += ["row", "row.x", "row.y", "type(row.x).__name__", "row.asDict(True)", "row['n']", "len(row)"]
    if timed != "none":
        at = front_ms + pick.choice([-60_000, -1, 0, 1, 4_000, 3_600_000])
        base = f"{at}" if timed == "event" else f"now + {pick.choice([-1000, -1, 0, 1, 3_600_000])}"
        calls += [f"h.registerTimer({base})"] * 3 + [f"h.deleteTimer({base})", "sorted(h.listTimers())"] * 2
    op = pick.choice([call for call in calls if not re.match(without, call)])
    return op.replace("USER", "row.u" if not frames else "plain(f['u'].iloc[0])") if "USER" in op else op


def make_case(seed: int, zone: str, process_zone: str, differ: frozenset[str] = frozenset()) -> Case:
    """The query of a seed, without what ``differ`` names."""
    without = "|".join(_CALLS[name] for name in sorted(differ & {*_CALLS})) or NOTHING
    pick = random.Random(seed)
    frames = pick.random() < 0.45
    timed = pick.choice(["none", "processing", "processing", "event"])
    mixed = ZoneInfo(zone) != ZoneInfo(process_zone)

    def some(kinds: list[str], unsure: str = "timestamp" if frames else "timestamp_ntz") -> str:
        return pick.choice([kind for kind in kinds if not (mixed and unsure in kind)])

    unsure_key = "timestamp" if frames or timed != "none" else "timestamp_ntz"
    k0, k1 = some(KEY_TYPES, unsure_key), some(KEY_TYPES, unsure_key)
    x, y = (some([*SCALARS, *SCALARS, *NESTED]) for _ in "xy")
    user_key = some(USER_KEY_TYPES)
    make = SCALARS | NESTED
    whole = {"boolean", "tinyint", "smallint", "int", "bigint"}
    # A null among integers makes floats of them, in Spark for every key that shares a batch.
    null_share = {
        name: 0.0 if frames and kind in whole else pick.choice([0.0, 0.3]) for name, kind in (("x", x), ("y", y))
    }

    def value(name: str, kind: str) -> Any:
        made = None if pick.random() < null_share[name] else make[kind](pick)
        if frames and NULL_FIELDS in differ and kind.startswith("struct<p:int"):
            made = {"p": (made or {}).get("p") or 0, "q": (made or {}).get("q", "")}
        return [item for item in made if item is not None] if frames and made and kind == "array<int>" else made

    keys: list[tuple[Any, Any]] = []
    while len(keys) < KEYS_PER_SEED:
        parts: list[Any] = [make[kind](pick) for kind in (k0, k1)]
        if not frames and pick.random() < 0.15:
            parts[pick.randrange(2)] = None
        if tuple(parts) not in keys:
            keys.append((parts[0], parts[1]))
        elif len(keys) > 2 and pick.random() < 0.3:
            break
    front_ms, batches, n = 1_710_054_000_000, [], 0
    for number in range(pick.choice([1, 2, 3])):
        rows: list[tuple[Any, ...]] = []
        front_ms += 60_000
        if not (number and pick.random() < 0.15):
            for key in keys:
                for _ in range(pick.choice([0, 1, 2, 5, 12]) if number else pick.choice([1, 3, 8])):
                    at = None
                    if pick.random() > 0.05 or not rows:
                        at = datetime.fromtimestamp(
                            (front_ms - pick.choice([0, 1, 20_000, 59_000, 100_000])) / 1000, UTC
                        )
                    op = _ops(pick, frames, timed, front_ms, without)
                    rows.append((*key, n, at, make[user_key](pick), value("x", x), value("y", y), op))
                    n += 1
            if pick.random() < 0.2:
                # Many rows of one key: frames of 10,000, and keys that go on in the next Arrow batch.
                key, op = pick.choice(keys), "len(f)" if frames else "row.n"
                at = datetime.fromtimestamp(front_ms / 1000, UTC)
                for _ in range(10_300):
                    rows.append((*key, n, at, make[user_key](pick), value("x", x), value("y", y), op))
                    n += 1
        batches.append(rows)
    machine = FrameMachine if frames else Machine
    processor = partial(
        machine,
        keys=(k0, k1),
        x=x,
        y=y,
        user_key=user_key,
        expiring=timed == "processing",
        instants=mixed,
        differ=differ,
    )
    changes: dict[str, Any] = {}
    if timed == "event":
        changes = {"event_time": "ts", "watermark_delay": timedelta(seconds=30)}
    return Case(
        processor=processor,  # type: ignore[arg-type]
        input_schema=f"k0 {k0}, k1 {k1}, n bigint, ts timestamp, u {user_key}, x {x}, y {y}, op string",
        output_schema=f"k0 {k0}, k1 {k1}, n bigint, op string, result string, x {x}, y {y}",
        key=("k0", "k1"),
        order_by=("n",),
        batches=batches,
        states={
            name: kind for p in ("", "t") for name, kind in ((f"{p}v", "value"), (f"{p}l", "list"), (f"{p}m", "map"))
        },
        api="pandas" if frames else "row",
        time_mode=timed,
        **changes,
    )


def run_seed(spark: SparkSession, seed: int, zone: str, process_zone: str, folder: Path) -> tuple[int, list[str]]:
    """How many cases the seed had, and what differs."""
    from tests.support.both_engines import run_both

    spark.conf.set("spark.sql.session.timeZone", zone)
    case = make_case(seed, zone, process_zone, DIFFERENT)
    if case.api == "row" and not has_row_operator():
        return 0, []
    cases = len({tuple(map(repr, row[:2])) for batch in case.batches for row in batch})
    return cases, run_both(spark, case, folder).differences()


def outcome_of_seed(spark: SparkSession, seed: int, zone: str, process_zone: str, folder: Path) -> str:
    """A hash of outputs, states and timers of a seed here; each batch is at a full minute."""
    from tests.support.both_engines import by_entry, by_key, run_under_cairn

    spark.conf.set("spark.sql.session.timeZone", zone)
    case = make_case(seed, zone, process_zone)
    ends_ms = [1_710_054_060_000 + 60_000 * n for n in range(len(case.batches))]
    files = write_batches(spark, case, folder / "input")
    ours, records = run_under_cairn(spark, case, files, folder / "root", ends_ms)
    rows = [sorted(by_key(rows, case.key).items()) for rows in ours.outputs]
    states = [sorted(by_entry(held, case.states.get(name, "")).items()) for name, held in sorted(ours.states.items())]
    found = [rows, states, [record.content.digest for record in records]]
    return hashlib.sha256(repr(found).encode()).hexdigest()


def main() -> int:
    """Runs the seeds; 1 if any differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--zone", choices=ZONES, default="UTC")
    parser.add_argument("--process-zone", default="UTC", help="what TZ is, for whoever starts this")
    parser.add_argument(
        "--outcomes", action="store_true", help="print a hash of what each seed gives here, and compare nothing"
    )
    options = parser.parse_args()
    from cairn.spark.session import connect

    spark = connect("local[2]", "conformance")
    spark.sparkContext.setLogLevel("OFF")
    total, failed = 0, []
    for seed in range(options.first, options.first + options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            if options.outcomes:
                print(seed, outcome_of_seed(spark, seed, options.zone, options.process_zone, Path(folder)), flush=True)
                continue
            try:
                cases, differences = run_seed(spark, seed, options.zone, options.process_zone, Path(folder))
            except Exception as error:
                cases, differences = 0, [f"{type(error).__name__}: {str(error)[:800]} ... {str(error)[-2500:]}"]
        total += cases
        print(f"seed {seed}, zone {options.zone}, TZ {options.process_zone}: {cases} cases", flush=True)
        if differences:
            failed.append(seed)
            for line in differences[:5]:
                print(f"  {line[:1500]}", flush=True)
    if not options.outcomes:
        print(f"{total} cases, seeds that differ: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
