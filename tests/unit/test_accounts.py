"""The account of a shard's entries."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from state_backend.state.accounts import Accounts
from state_backend.values.errors import InvariantViolated
from state_backend.values.records import KeyGroupState


def group(number: int, size_bytes: int | None, digest: int = 7, **entries: int) -> KeyGroupState:
    return KeyGroupState(key_group=number, entries=entries, digest=digest, size_bytes=size_bytes)


@pytest.mark.parametrize(
    ("before", "change", "after"),
    [
        ([group(3, 50, total=2)], lambda a: a.change(3, "total", -3, -1, -20), [group(3, 30, digest=4, total=1)]),
        ([group(3, 50, total=2)], lambda a: a.change(3, "total", -7, -2, -50), []),
        ([], lambda a: a.change(1, "total", -1, 1, 9), [group(1, 9, digest=2**64 - 1, total=1)]),
        ([group(3, 50, total=2)], lambda a: a.resize(3, 12), [group(3, 62, total=2)]),
        # What no record counted, or what was counted wrongly, counts as not counted.
        ([group(3, None, total=2)], lambda a: a.resize(3, 12), [group(3, None, total=2)]),
        ([group(3, 50, total=2)], lambda a: a.resize(3, -51), [group(3, None, total=2)]),
    ],
)
def test_an_account_changes(
    before: list[KeyGroupState], change: Callable[[Accounts], None], after: list[KeyGroupState]
) -> None:
    accounts = Accounts(before)
    change(accounts)
    assert list(accounts.states()) == after
    assert accounts.key_groups() == accounts.key_groups("total") == [state.key_group for state in after]
    assert accounts.entries("total") == sum(state.entries["total"] for state in after)
    assert accounts.key_groups("other") == [] and accounts.entries("other", 3) == 0


@pytest.mark.parametrize(
    ("count", "says"),
    [(-3, "the entry count of state 'total' in key group 3 is -1"), (-2, "key group 3 is empty, but its digest is")],
)
def test_an_account_that_can_not_be_is_refused(count: int, says: str) -> None:
    accounts = Accounts([group(3, 50, total=2)])
    accounts.change(3, "total", 0, count, 0)
    with pytest.raises(InvariantViolated, match=says):
        accounts.states()
