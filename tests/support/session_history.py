"""Sessions by the hour, the load that leaves most behind: nearly all that is written is deleted some hours later.

A user's events open a session: a value, a list of the events, a map of pages, and a timer that every event moves. The timer closes
the session, which clears all of them. Two more states live by expiry alone. Days and nights differ, so that state grows and shrinks.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.types import parse_struct
from state_backend.shard.changelog_store import ChangelogOptions
from state_backend.state.expiry import expire
from state_backend.state.shard_state import ShardState
from state_backend.state.state_variables import ListState, MapState, ValueState
from state_backend.state.timers import delete_timer, due_timers, register_timer, timers
from state_backend.values.records import SchemaVersion, StateDescriptor, StateKind
from tests.support.state_history import MAX_PARALLELISM, Batch, History

HOUR_MS = 3_600_000
GAP_MS = 2 * HOUR_MS


def _schema(*fields: tuple[str, str]) -> dict[str, object]:
    return {
        "type": "struct",
        "fields": [{"name": name, "type": type_, "nullable": True, "metadata": {}} for name, type_ in fields],
    }


_KEYS = KeyCodec(parse_struct(_schema(("user", "string"))))


def _descriptor(state_id: int, name: str, kind: StateKind, ttl_ms: int | None = None) -> StateDescriptor:
    version = SchemaVersion(
        version=1,
        value=_schema(("at_ms", "long"), ("what", "string")),
        user_key=_schema(("page", "string")) if kind == "map" else None,
    )
    return StateDescriptor(name=name, kind=kind, state_id=state_id, ttl_ms=ttl_ms, versions=(version,))


STATES = (
    _descriptor(1, "session", "value"),
    _descriptor(2, "events", "list"),
    _descriptor(3, "pages", "map"),
    _descriptor(4, "recent", "list", 3 * HOUR_MS),
    _descriptor(5, "seen", "map", 5 * HOUR_MS),
)


class SessionHistory(History):
    """Grows by ``hour``. ``keys`` is the number of users; a third of them is active in a busy hour."""

    def hour(self) -> Batch:
        """The next hour: events, then timers, then expiry, as an interval's task does it."""
        number = len(self.batches)
        now_ms = number * HOUR_MS
        rng = random.Random(self.seed * 1_000_003 + number)
        # From a twentieth of the busiest hour, at night, to all of it.
        active = round(self.keys / 3 * (0.525 - 0.475 * math.cos(2 * math.pi * number / 24)))
        users = sorted(rng.sample(range(self.keys), active), key=lambda user: user % MAX_PARALLELISM)

        def change(state: ShardState, shard: int) -> None:
            session, events, pages = (
                ValueState(state, "session"),
                ListState(state, "events"),
                MapState(state, "pages"),
            )
            recent, seen = ListState(state, "recent"), MapState(state, "seen")
            for user in users:
                key_group = user % MAX_PARALLELISM
                if key_group * self.parallelism // MAX_PARALLELISM != shard:
                    continue
                state.set_key(key_group, _KEYS.encode((f"user-{user}",)))
                for _ in range(rng.randint(1, 6)):
                    page = f"/page/{rng.randint(0, 500)}"
                    row = (now_ms, f"{page}?{rng.getrandbits(rng.choice((32, 256))):x}")
                    events.append_value(row)
                    pages.update_value((page,), row)
                    recent.append_value(row)
                    seen.update_value((page,), (now_ms, None))
                for expiry_ms in list(timers(state)):
                    delete_timer(state, expiry_ms)
                register_timer(state, now_ms + GAP_MS + rng.randrange(HOUR_MS))
                session.update((now_ms, f"{rng.getrandbits(128):x}"))
            state.flush()
            for _ in due_timers(state, now_ms):
                session.clear()
                events.clear()
                pages.clear()
            expire(state)

        return self.run_interval(change, now_ms=now_ms)


def session_history(
    folder: Path, users: int, parallelism: int, changelog: ChangelogOptions | None = None
) -> SessionHistory:
    """An empty one in ``folder``, without a cache."""
    return SessionHistory(folder=folder, keys=users, parallelism=parallelism, states=STATES, changelog=changelog)
