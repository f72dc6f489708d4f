"""Processors that need an input, an output or an initial state of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import Row

from tests.conformance.shapes import plain, text

# Keys of many types. A column of an input has a key's name and its own, so that handlers can compare.
KEY_TYPES = "i int, l long, d double, f float, da date, t timestamp, dec decimal(10,2), b binary, ok boolean, s string"
KEY_NAMES = [part.split()[0] for part in KEY_TYPES.split(", ")]


class Keys(StatefulProcessor):
    """What keys are, type by type, with rows and with timers."""

    frames = False

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.count = handle.getValueState("count", "n int")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        rows = list(rows)
        count = (self.count.get() or (0,))[0] + len(rows)
        self.count.update((count,))
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs())
        yield self.out(rows, f"rows {text(key)}")

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield self.out(None, f"timer {type(key).__name__} {[text(part) for part in key]} {self.count.get()}", key)

    def out(self, rows: Any, line: str, key: Any = None) -> Any:
        s = key[-1] if key is not None else (rows[0]["s"].iloc[0] if self.frames else rows[0].s)
        return pd.DataFrame({"s": [s], "out": [line]}) if self.frames else Row(s=s, out=line)


class KeysInFrames(Keys):
    frames = True


class Equal(StatefulProcessor):
    """How many rows equal the key, column by column: a key is comparable with its column."""

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[pd.DataFrame]:
        for frame in rows:
            equal = {name: int((frame[name] == part).sum()) for name, part in zip(KEY_NAMES, key, strict=True)}
            yield pd.DataFrame({"s": [key[-1]], "out": [str(equal)]})


class Initial(StatefulProcessor):
    """Values, lists and timers from the initial state; rows come after it."""

    frames = False

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.total = handle.getValueState("total", "value int")
        self.all = handle.getListState("all", "value int, s string")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        if self.frames:
            self.total.update((initialState.at[0, "start"],))
            for start, s in zip(initialState["start"].tolist(), initialState["s"].tolist(), strict=True):
                self.all.appendValue((start, s))
        else:
            self.total.update((initialState.start,))
            self.all.appendValue((initialState.start, initialState.s))
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() - 1)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        total = self.total.get()[0] if self.total.exists() else -1
        for item in rows:
            total += item["n"].astype(int).sum() if self.frames else item.n
        self.total.update((total,))
        yield self.out(key, f"{int(total)} {sorted(self.all.get())}")

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        late = timerValues.getCurrentProcessingTimeInMs() - expiredTimerInfo.getExpiryTimeInMs()
        self.handle.deleteTimer(expiredTimerInfo.getExpiryTimeInMs())
        yield self.out(key, f"timer {late} {self.total.get()}")

    def out(self, key: Any, line: str) -> Any:
        return pd.DataFrame({"k": [key[0]], "out": [line]}) if self.frames else Row(k=key[0], out=line)


class InitialInFrames(Initial):
    frames = True


COMPOSITE_OUTPUT = (
    "k string, words array<string>, pairs map<string,string>, structs array<struct<n:int,x:double,a:array<string>>>, "
    "named map<string,struct<n:int,m:map<string,bigint>>>, total bigint, mean double, day date, t timestamp"
)


class Outputs(StatefulProcessor):
    """Rows of nested types, columns by name in any order; frames have one too many."""

    frames = False

    def init(self, handle: Any) -> None:
        self.count = handle.getValueState("count", "value int")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        count = (self.count.get() or (0,))[0]
        records = [r for item in rows for r in (item.to_dict("records") if self.frames else [item.asDict()])]
        count += len(records)
        self.count.update((count,))
        last = records[-1]
        row = {
            "t": last["t"],
            "day": last["day"],
            "mean": last["x"],
            "total": plain(last["n"]),
            "named": {f"k{i}": {"n": i, "m": {"a": i, "b": None}} for i in range(count)},
            "structs": [{"n": i, "x": i / 2, "a": [str(i)] * i} for i in range(count)],
            "pairs": {f"k{i}": None if i % 2 else f"v{i}" for i in range(count)},
            "words": [f"w{i}" for i in range(count)] if count % 2 else None,
            "k": key[0],
        }
        if self.frames:
            yield pd.DataFrame({name: [value] for name, value in {**row, "extra": 1}.items()})
        else:
            yield Row(**{**row, "structs": [Row(**fields) for fields in row["structs"]]})


class OutputsInFrames(Outputs):
    frames = True


class Deleting(StatefulProcessor):
    """Deletes a state right after it was asked for, and before."""

    frames = False

    def init(self, handle: Any) -> None:
        self.kept = handle.getValueState("kept", "value int")
        self.gone = handle.getValueState("gone", "value int")
        handle.deleteIfExists("gone")
        handle.deleteIfExists("never")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        try:
            gone = str(self.gone.exists())
        except Exception as error:
            gone = type(error).__name__
        count = (self.kept.get() or (0,))[0] + sum(len(r) if self.frames else 1 for r in rows)
        self.kept.update((count,))
        line = f"{count} {gone}"
        yield pd.DataFrame({"k": [key[0]], "out": [line]}) if self.frames else Row(k=key[0], out=line)


class DeletingInFrames(Deleting):
    frames = True


class ZerosInMaps(StatefulProcessor):
    """The entries of a map with the user keys 0.0 and -0.0."""

    def init(self, handle: Any) -> None:
        self.map = handle.getMapState("zeros", "x double", "n int")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        self.map.updateValue((0.0,), (1,))
        self.map.updateValue((-0.0,), (2,))
        yield Row(k=key[0], out=str(sorted((repr(k[0]), v[0]) for k, v in self.map.iterator())))
