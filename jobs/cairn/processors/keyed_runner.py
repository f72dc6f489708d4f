"""Drives a processor of the row or the pandas API over one shard, in Spark's order of calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, TimerValues

from cairn.processors.input_rows import KeyedInput
from cairn.processors.mutable_values import all_immutable
from cairn.processors.processor_handle import HandleState, ProcessorHandle, row_maker
from cairn.processors.user_code import UserCode, iterable
from cairn.rows.routing import INITIAL
from state_backend.formats.key_codec import KeyCodec
from state_backend.state.shard_state import ShardState
from state_backend.values.records import TimeMode

_KEYS_PER_CHECK = 256


class Output(Protocol):
    """Takes what handlers yield: ``settle`` ends the rows of a key, and ``flush`` writes, between keys, when ``full``."""

    @property
    def full(self) -> bool:
        """Whether so much waits that it should be written now."""

    def add(self, item: Any) -> None:
        """Takes one thing that a handler yielded. Raises: ProcessorError for what is no row."""

    def settle(self) -> None:
        """Copies the cells that the processor could still change. Call it after every handler that yielded rows."""

    def flush(self) -> None:
        """Writes what waits."""


class KeyedRunner:
    """``timer_values`` are for the handlers of rows; ``expired_values`` for those of timers, which fire up to ``due_ms``."""

    def __init__(
        self,
        processor: Callable[[], Any],
        state: ShardState,
        keys: KeyCodec,
        output: Output,
        user_code: UserCode,
        *,
        time_mode: TimeMode,
        timer_values: TimerValues,
        expired_values: TimerValues,
        due_ms: int,
    ) -> None:
        self._state = state
        self._keys = keys
        self._output = output
        self._user_code = user_code
        self._timed = time_mode != "none"
        self._timer_values = timer_values
        self._expired_values = expired_values
        self._due_ms = due_ms
        self._row_key = row_maker(keys.schema.names)
        with user_code.call("init"):
            self._processor = processor()
            self._handle = ProcessorHandle(state, time_mode)
            self._processor.init(self._handle)
            self._handle.initialized()

    def process(self, rows: KeyedInput) -> None:
        """Calls ``handleInputRows`` key by key. Raises: ProcessorError from its code."""
        state, output, add, settle = self._state, self._output, self._output.add, self._output.settle
        handler, timer_values = self._processor.handleInputRows, self._timer_values
        for count, (kind, key_group, key, encoded_key, items) in enumerate(rows):
            state.key_group, state.key = key_group, encoded_key  # `set_key`, written out: this runs once per key
            call = "handleInputRows"
            try:
                if kind == INITIAL:
                    call = "handleInitialState"
                    for item in items:
                        self._processor.handleInitialState(key, item, timer_values)
                else:
                    for result in iterable(handler(key, items, timer_values), call):
                        add(result)
                    settle()
            except BaseException as error:
                self._user_code.failed(call, key, error)
            if count % _KEYS_PER_CHECK == 0 and output.full:
                self._write_output()
        self._handle.state = HandleState.DATA_PROCESSED

    def fire_timers(self) -> None:
        """Calls ``handleExpiredTimer`` for what is due, in the order of time, key group and key."""
        if self._timed:
            handler, timer_values = self._processor.handleExpiredTimer, self._expired_values
            output, add, settle = self._output, self._output.add, self._output.settle
            last_key, key = None, self._row_key(())
            for count, (expiry_ms, _, encoded_key, _) in enumerate(self._state.due_timers(self._due_ms)):
                if encoded_key != last_key:
                    key = self._row_key(self._keys.decode(encoded_key))
                    # The handler may change the arrays and structs of a key, which the key's next timer gets too.
                    last_key = encoded_key if all_immutable(key) else None
                try:
                    results = handler(key=key, timerValues=timer_values, expiredTimerInfo=ExpiredTimerInfo(expiry_ms))
                    for result in iterable(results, "handleExpiredTimer"):
                        add(result)
                    settle()
                except Exception as error:
                    self._user_code.failed("handleExpiredTimer", key, error)
                if count % _KEYS_PER_CHECK == 0 and output.full:
                    self._write_output()
        self._handle.state = HandleState.TIMER_PROCESSED

    def close(self) -> None:
        """Calls the processor's ``close``, and writes what waits."""
        self._state.set_key(-1, b"")
        with self._user_code.call("close"):
            self._processor.close()
        self._handle.state = HandleState.CLOSED
        self._state.flush()
        self._write_output()

    def _write_output(self) -> None:
        # Of many keys: an error names the row.
        with self._user_code.call("output"):
            self._output.flush()
