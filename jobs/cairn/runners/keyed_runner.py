"""Runner of a row-API or pandas-API processor over one shard, which calls the processor in Spark's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo

from cairn.rows.routing import INITIAL
from cairn.runners.input_rows import KeyedInput
from cairn.runners.mutable_values import all_immutable
from cairn.runners.processor_handle import Clock, HandleState, ProcessorHandle, row_maker
from cairn.runners.user_code import UserCode, iterable
from state_backend.formats.key_codec import KeyCodec
from state_backend.state.shard_state import ShardState
from state_backend.state.timers import due_timers

_KEYS_PER_CHECK = 256


class Output(Protocol):
    """A buffer for the rows or frames that handlers yield.

    After each handler, the runner calls `settle`. This method copies values that the processor could still change. When
    `full` is true after a key, the runner calls `flush`, which writes the buffer to the output file.
    """

    @property
    def full(self) -> bool:
        """True if the buffer holds so much that the runner should call `flush`."""

    def add(self, item: Any) -> None: ...

    def settle(self) -> None:
        """Copy the cells that the processor could still change. The runner calls this after each handler."""

    def flush(self) -> None: ...


class KeyedRunner:
    """Runner of a row-API or pandas-API processor over the keys of one shard: it calls the handlers."""

    def __init__(
        self,
        processor: Callable[[], Any],
        state: ShardState,
        keys: KeyCodec,
        output: Output,
        user_code: UserCode,
        clock: Clock,
    ) -> None:
        self._state = state
        self._keys = keys
        self._output = output
        self._user_code = user_code
        self._clock = clock
        self._row_key = row_maker(keys.schema.names)
        with user_code.call("init"):
            self._processor = processor()
            self._handle = ProcessorHandle(state, clock.mode)
            self._processor.init(self._handle)
            self._handle.end_init()

    def process(self, rows: KeyedInput) -> None:
        state, output, add, settle = self._state, self._output, self._output.add, self._output.settle
        handler, timer_values = self._processor.handleInputRows, self._clock.now
        for count, (kind, key_group, key, encoded_key, items) in enumerate(rows):
            # `set_key` is inlined here, because it runs once for each key.
            state.key_group, state.key = key_group, encoded_key
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
                self._user_code.fail(call, key, error)
            if count % _KEYS_PER_CHECK == 0 and output.full:
                self._write_output()
        self._handle.state = HandleState.DATA_PROCESSED

    def fire_timers(self) -> None:
        """Call `handleExpiredTimer` for each due timer, in the order of time, key group and key."""
        if self._clock.mode != "none":
            handler, timer_values = self._processor.handleExpiredTimer, self._clock.expired
            output, add, settle = self._output, self._output.add, self._output.settle
            last_key, key = None, self._row_key(())
            for count, (expiry_ms, _, encoded_key, _) in enumerate(due_timers(self._state, self._clock.due_ms)):
                if encoded_key != last_key:
                    key = self._row_key(self._keys.decode(encoded_key))
                    # Decode the key again for its next timer if a handler could change an array or a struct in the key.
                    last_key = encoded_key if all_immutable(key) else None
                try:
                    results = handler(key=key, timerValues=timer_values, expiredTimerInfo=ExpiredTimerInfo(expiry_ms))
                    for result in iterable(results, "handleExpiredTimer"):
                        add(result)
                    settle()
                except BaseException as error:
                    self._user_code.fail("handleExpiredTimer", key, error)
                if count % _KEYS_PER_CHECK == 0 and output.full:
                    self._write_output()
        self._handle.state = HandleState.TIMER_PROCESSED

    def close(self) -> None:
        """Call the processor's `close`, and write the remaining state and output."""
        self._state.set_key(-1, b"")
        with self._user_code.call("close"):
            self._processor.close()
        self._handle.state = HandleState.CLOSED
        self._state.flush()
        self._write_output()

    def _write_output(self) -> None:
        # The buffer holds rows of many keys, so an error names the row instead of the key.
        with self._user_code.call("output"):
            self._output.flush()
