"""Options of `keyed_state` and `keyed_output`: an unknown one is refused with the nearest name, before anything is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from cairn.data_sources.keyed_output import KeyedOutput
from cairn.data_sources.keyed_state import KeyedState
from state_backend.values.errors import UsageError
from tests.support.savepoints import SmallPipeline

WHERE = {"root": "memory://options", "pipeline": "p"}


@pytest.mark.parametrize(
    ("source", "given", "says"),
    [
        (KeyedState, {"state": "s", "keys": "[]"}, "no option 'keys'\nDid you mean 'key'"),
        (KeyedState, {"state": "s", "checkpiont": "1"}, "no option 'checkpiont'\nDid you mean 'checkpoint'"),
        (KeyedState, {"State": "s", "Shards": "1"}, "no option 'Shards'\nDid you mean 'shard'"),
        (KeyedState, {"state": "s", "late": "true"}, "no option 'late'"),
        (
            KeyedOutput,
            {"begin": "2024-01-01T00:00Z"},
            "no option 'begin'\nThese exist: checkpoints, end, group, interval_column, late, pipeline, root, start, valid",
        ),
        (KeyedOutput, {"ends": "2024-01-01T00:00Z"}, "no option 'ends'\nDid you mean 'end'"),
        (KeyedOutput, {"path": "/data/p"}, "no option 'path'; load() takes no path"),
        (KeyedOutput, {"late": "yes"}, "late 'yes' is neither true nor false"),
    ],
)
def test_an_option_that_the_format_does_not_have_is_refused(
    source: type[KeyedState | KeyedOutput], given: dict[str, str], says: str
) -> None:
    with pytest.raises(UsageError) as refused:
        source({**WHERE, **given}).schema()
    assert says in str(refused.value)


def test_option_names_are_case_insensitive() -> None:
    with pytest.raises(Exception, match="has no committed output yet"):
        KeyedOutput({**WHERE, "START": "2024-01-01T00:00Z", "late": "TRUE"}).schema()


@pytest.mark.parametrize(("state", "may"), [("list", "expires_at"), ("map", "expires_at"), ("$check", "finding")])
def test_one_column_of_a_state_s_table_may_be_null(tmp_path: Path, state: str, may: str) -> None:
    schema = KeyedState({"path": SmallPipeline(tmp_path).url, "state": state}).schema()
    assert [field.name for field in schema if field.nullable] == [may]
