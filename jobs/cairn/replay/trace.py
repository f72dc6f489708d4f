"""Record the calls into a processor: rows in, reads and writes of state, timers, rows out.

`TracedProcessor` stands between the runner and the user's processor. It replaces methods of the handle and of the state
objects by functions that also record. The user's code needs no change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import pyarrow as pa

from cairn.arrow_processor import BatchResult, KeyedBatch
from cairn.runners.mutable_values import copy_of
from cairn.runners.user_code import iterable
from cairn.shipping.ship_processor import processor_on_driver

_READS = {"exists", "get", "getValue", "containsKey", "iterator", "keys", "values"}
_TIMERS = ("registerTimer", "deleteTimer", "listTimers")
_STATES = ("getValueState", "getListState", "getMapState")


@dataclass(slots=True, kw_only=True)
class Use:
    """One use of a state or of a timer within a call into the processor."""

    what: str  # Name of the state, or "timer".
    method: str
    arguments: tuple[Any, ...] = ()
    # The result of a read. For an iterator: the list of the elements that were read. None for a write.
    result: Any = None
    reads: bool = False  # True if the method only reads.


@dataclass(slots=True, kw_only=True)
class Call:
    """One call into the processor."""

    handler: str  # Name of the method, such as `handleInputRows`.
    # The processing time that the processor saw, in milliseconds since the epoch.
    processing_time_ms: int
    # The watermark that the processor saw, in milliseconds since the epoch.
    watermark_ms: int
    # The time of the expired timer, in milliseconds since the epoch; None for other calls.
    timer_ms: int | None = None
    rows: list[Any] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    output: list[Any] = field(default_factory=list)


class Trace:
    """The calls into a processor in one replay, in order, with the uses of states and timers in each."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._open: list[Call] = []
        # Depth of nested calls. Methods of state objects call one another, and only the outermost call is recorded.
        self._depth = 0

    def begin(self, handler: str, time: Any, timer_ms: int | None = None) -> Call:
        """Add a call of a handler, and return it. Uses of states and timers until the next `begin` belong to it."""
        call = Call(
            handler=handler,
            processing_time_ms=time.getCurrentProcessingTimeInMs(),
            watermark_ms=time.getCurrentWatermarkInMs(),
            timer_ms=timer_ms,
        )
        self.calls.append(call)
        self._open = [call]
        return call

    def watch(self, owner: Any, name: str, what: str) -> None:
        """Replace a method of `owner`, a state or handle, by one that also records its call as a `Use` of `what`."""
        method = getattr(owner, name, None)
        if method is None:
            return

        @functools.wraps(method)
        def watched(*arguments: Any, **named: Any) -> Any:
            if self._depth or not self._open:
                return method(*arguments, **named)
            given = (*arguments, *named.values())
            use = Use(what=what, method=name, arguments=tuple(map(plain_value, given)), reads=name in _READS)
            self._open[0].uses.append(use)
            with self._inside():
                result = method(*arguments, **named)
            if hasattr(result, "__next__"):
                use.result, use.reads = [], True
                return self._follow(result, use)
            use.result = plain_value(result)
            return result

        with suppress(AttributeError):  # An object with `__slots__` takes no new method: its uses are not recorded.
            setattr(owner, name, watched)

    def _follow(self, results: Iterator[Any], use: Use) -> Iterator[Any]:
        while True:
            with self._inside():
                result = next(results, self)
            if result is self:
                return
            use.result.append(plain_value(result))
            yield result

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


class TracedProcessor:
    """A wrapper of a user's processor that records the calls of its handlers, states and timers."""

    def __init__(self, processor: Any, trace: Trace) -> None:
        self._processor, self._trace = processor, trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)

    def init(self, handle: Any) -> None:
        for name in _STATES:
            setattr(handle, name, self._declaring(getattr(handle, name)))
        self._processor.init(handle)
        for name in _TIMERS:
            self._trace.watch(handle, name, "timer")

    def _declaring(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def declare(stateName: str, *arguments: Any, **named: Any) -> Any:
            state = method(stateName, *arguments, **named)
            for name in dir(state) if state is not None else ():
                if not name.startswith("_") and callable(getattr(state, name)):
                    self._trace.watch(state, name, stateName)
            return state

        return declare

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        call = self._trace.begin("handleInputRows", timerValues)
        results = self._processor.handleInputRows(key, _record(rows, call.rows), timerValues)
        return _record(iterable(results, "handleInputRows"), call.output)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        call = self._trace.begin("handleInitialState", timerValues)
        call.rows += rows_of(initialState)
        self._processor.handleInitialState(key, initialState, timerValues)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        call = self._trace.begin("handleExpiredTimer", timerValues, expiredTimerInfo.getExpiryTimeInMs())
        results = self._processor.handleExpiredTimer(
            key=key, timerValues=timerValues, expiredTimerInfo=expiredTimerInfo
        )
        return _record(iterable(results, "handleExpiredTimer"), call.output)

    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        return self._batch("handleBatch", batch)

    def handleExpiredTimers(self, batch: KeyedBatch) -> BatchResult:
        return self._batch("handleExpiredTimers", batch)

    def _batch(self, handler: str, batch: KeyedBatch) -> BatchResult:
        call = self._trace.begin(handler, batch.time)
        call.rows += batch.rows.to_pylist()
        for name, table in batch.states.items():
            held = [row if there else None for row, there in zip(table.to_pylist(), batch.exists[name], strict=True)]
            call.uses.append(Use(what=name, method="get", result=held[0] if len(held) == 1 else held, reads=True))
        result: BatchResult = getattr(self._processor, handler)(batch)
        if isinstance(result, BatchResult):
            for name, table in result.states.items():
                written = table.to_pylist() if isinstance(table, pa.Table) else [*table]
                call.uses.append(Use(what=name, method="update", arguments=(*written,)))
            for name, cleared in result.cleared.items():
                call.uses += [Use(what=name, method="clear") for gone in cleared if gone]
            if result.output is not None:
                call.output += result.output.to_pylist()
        return result


@dataclass(frozen=True, slots=True)
class TracedFactory:
    """A factory of traced processors. Like `InProcess`, it uses modules that this process has already imported."""

    processor: Any
    pipeline: str
    trace: Trace
    made: Callable[[Any], None] = lambda processor: None

    def __call__(self) -> TracedProcessor:
        processor = processor_on_driver(self.processor, self.pipeline)
        self.made(processor)
        return TracedProcessor(processor, self.trace)


def _record(items: Any, into: list[Any]) -> Iterator[Any]:
    for item in items:
        into += rows_of(item)
        yield item


def rows_of(item: Any) -> list[Any]:
    """Return the rows of `item`, a row or a DataFrame, as dicts which the processor can't change any more."""
    if isinstance(item, pd.DataFrame):
        return [*map(copy_of, item.to_dict("records"))]
    return [plain_value(item)]


def plain_value(value: Any) -> Any:
    """Return a copy of a value, with a dict for each PySpark row, and a list of dicts for an Arrow table."""
    if hasattr(value, "asDict"):
        return copy_of(value.asDict(True))
    if isinstance(value, pa.Table | pa.RecordBatch):
        return value.to_pylist()
    return copy_of(value)
