"""`cairn key`: keys as people write them, and the state of one key against the tables of the whole state."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cairn.command.cli import app
from cairn.command.key import look_up
from cairn.spark.ddl import parse_ddl_locally
from state_backend.formats.json_keys import parse_key, similar_keys
from state_backend.formats.types import StructType, parse_struct
from state_backend.inspection.describe import plain
from state_backend.values.errors import UsageError
from state_backend.values.intervals import format_instant
from tests.support.accounts import read_only
from tests.support.checkpoints import PIPELINE
from tests.support.layout import REPOSITORY
from tests.support.real_shards import RealPipeline
from tests.support.state_sources import NAMES, USERS, StateChain, random_changes, rows
from tests.unit import test_replay_cases as cases


def schema_of(columns: str) -> StructType:
    return parse_struct(parse_ddl_locally(columns).jsonValue())


@pytest.mark.parametrize(
    ("columns", "text", "key"),
    [
        ("k string", "u1", ("u1",)),
        ("k string", "k=u1", ("u1",)),
        ("k string", "4711", ("4711",)),
        ("k string", '{"k": "u=1,x"}', ("u=1,x",)),
        ("k string", '{"k": null}', (None,)),
        ("k long", "4711", (4711,)),
        ("k boolean", "True", (True,)),
        ("k double", "NaN", None),
        ("k decimal(5,2)", "1.50", (Decimal("1.50"),)),
        ("k date", "2024-01-31", (date(2024, 1, 31),)),
        ("k timestamp", "2024-01-31T01:00:00+01:00", (datetime(2024, 1, 31),)),
        ("k binary", "00ff", (b"\x00\xff",)),
        ("k struct<a: long, b: string>", '{"k": {"a": 1, "b": "x"}}', ((1, "x"),)),
        ("user string, day date", "day=2024-01-31,user=u=1", ("u=1", date(2024, 1, 31))),
    ],
)
def test_a_key_is_written_as_a_value_as_columns_or_as_json(columns: str, text: str, key: Any) -> None:
    found = parse_key(text, schema_of(columns))
    assert found == key if key is not None else found[0] != found[0]


@pytest.mark.parametrize(
    ("columns", "text", "says"),
    [
        ("k long", "u1", "invalid literal"),
        ("k byte", "300", "300"),
        ("k boolean", "perhaps", "perhaps"),
        ("k date", "yesterday", "yesterday"),
        ("k timestamp", "2024-01-31", "has no time zone"),
        ("k string", '{"user": "u1"}', 'expected {"k": string}'),
        ("k string", "{nonsense", "does not fit"),
        ("user string, day date", "u1", "write user=…,day=…"),
    ],
)
def test_a_key_that_does_not_fit_is_refused_with_the_columns(columns: str, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=r"does not fit: .*; expected {") as raised:
        parse_key(text, schema_of(columns))
    assert says in str(raised.value)


def test_similar_keys_differ_in_case_spaces_or_zeros() -> None:
    of = schema_of("user string, n long")
    found = {*similar_keys((" n14228", 7), of)}
    assert {("n14228", 7), (" N14228", 7)} <= found and (" n14228", 7) not in found
    assert {("42", 7), ("000042", 7)} <= {*similar_keys(("0042", 7), of)}
    assert not [*similar_keys((None, 7), of)]


@pytest.mark.parametrize("form", ["checkpoint", "native", "canonical"])
@pytest.mark.long("half a second", runs_in="ci")
def test_a_key_lookup_equals_the_rows_of_the_whole_state_table(tmp_path: Path, form: Any) -> None:
    chain = StateChain(tmp_path)
    for seed, parallelism in ((1, 2), (2, 3), (3, 3)):
        source = chain.step(parallelism, "incremental", random_changes(seed))
    if form != "checkpoint":
        source = chain.savepoint(form, form)
    work = tmp_path / "table"
    work.mkdir()
    wanted: dict[str, dict[str, list[Any]]] = {}
    for state in NAMES:
        for row in rows(source, state, work):
            entry = {name: plain(row[name]) for name in ("user_key", "pos", "value") if name in row}
            if row["expires_at"] is not None:
                entry["expires_at"] = format_instant(row["expires_at"])
            wanted.setdefault(json.dumps([row["key"]["k"]]), {}).setdefault(state, []).append(entry)
    assert len(wanted) > 50
    assert look_up(source, [(user,) for user in USERS]) == wanted
    for user in USERS[:8]:
        assert look_up(source, [(user,)]).get(json.dumps([user]), {}) == wanted.get(json.dumps([user]), {})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("root")
    pipeline = RealPipeline(made)
    pipeline.run(1, "a1", {"Ada": 1})
    pipeline.run(2, "a2", {"Ada": 2})
    return made


def get(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["key", *arguments, "--root", f"file://{root}", "--pipeline", PIPELINE])


def test_cairn_key_prints_each_state_entry_of_the_key(root: Path) -> None:
    result = get(root, "Ada")
    assert result.exit_code == 0
    first, columns, value = result.stdout.splitlines()
    assert first == ('checkpoint 2 of \'counting\', [2024-01-02T00:00:00Z, 2024-01-03T00:00:00Z), key {"k": "Ada"}')
    assert columns.split() == ["state", "entry", "expires", "value"] and value.split(maxsplit=1) == [
        "value",
        '{"n": 2, "s": "Ada"}',
    ]
    assert json.loads(get(root, "Ada", "1", "--json").stdout)["states"] == {"value": [{"value": {"n": 1, "s": "Ada"}}]}


def test_a_key_without_state_is_reported_with_similar_keys(root: Path) -> None:
    result = get(root, "ada")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        'checkpoint 2 of \'counting\', [2024-01-02T00:00:00Z, 2024-01-03T00:00:00Z) has no state of the key {"k": "ada"}',
        'it has state of the key {"k": "Ada"}',
    ]
    assert json.loads(get(root, "ada", "--json").stdout)["similar_keys"] == [{"k": "Ada"}]
    assert get(root, "Bob").stdout.splitlines()[0].endswith('has no state of the key {"k": "Bob"}')


def test_a_wrong_state_or_checkpoint_is_refused(root: Path) -> None:
    assert "has no state 'valu'" in get(root, "Ada", "--state", "valu").stderr
    assert get(root, "Ada", "9").exit_code != 0


DROPPED = "has no usable checkpoint 1: its state is dropped\nUsable checkpoints: 3 (to 2024-01-04T00:00:00Z), 4"
STATUS: list[tuple[Callable[[cases.History], None], str, int, str]] = [
    (cases.rerun, "latest", 0, "checkpoint 3 of 'accounts', [2024-01-01T00"),
    (cases.rerun, "1", 0, "2024-01-02T00:00:00Z), replaced by 3, key"),
    (cases.rerun, "2", 0, "2024-01-03T00:00:00Z), stale by 3, key"),
    (cases.dropped, "1", 2, DROPPED),
    (cases.restored, "4", 0, "checkpoint 4 of 'accounts', [2024-01-02T00"),
    (cases.restored, "2", 0, "2024-01-03T00:00:00Z), replaced by 4, key"),
    (cases.quarantined, "1", 0, "2024-01-02T00:00:00Z), quarantined, key"),
    (cases.quarantined, "2", 0, "2024-01-03T00:00:00Z), descends from quarantined 1, key"),
    (
        cases.quarantined,
        "latest",
        2,
        "latest: checkpoint 1 is quarantined, checkpoint 2 descends from checkpoint 1, which is quarantined, checkpoint 3",
    ),
    (cases.new_schema, "latest", 0, '{"total": 16, "due_ms": null, "note": "new"}'),
    (cases.new_schema, "1", 0, '{"total": 5, "due_ms": 1704326400000}'),
    (cases.rescaled, "latest", 0, '{"total": 16, "due_ms": 1704412800000}'),
]


@pytest.mark.parametrize(("act", "which", "code", "says"), STATUS)
def test_cairn_key_prints_the_checkpoint_status_and_writes_nothing(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    act: Callable[[cases.History], None],
    which: str,
    code: int,
    says: str,
) -> None:
    act(cases.History(tmp_path))
    caplog.clear()
    with read_only(tmp_path), caplog.at_level(logging.DEBUG):
        asked = ["key", "ann", which, "--root", f"file://{tmp_path}", "--pipeline", "accounts"]
        result = CliRunner().invoke(app, asked)
    assert result.exit_code == code and says in result.output, result.output
    behind = (
        "the newest state is checkpoint 3 of [2024-01-01T00:00:00Z, 2024-01-02T00:00:00Z). The checkpoints of later"
    )
    assert all(behind in line for line in caplog.messages) and len(caplog.messages) == (
        act is cases.rerun and which == "latest"
    )
    if code == 0:
        status = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)["status"]
        assert status == "completed" or f", {status}, key" in result.output


@pytest.mark.long("seconds", runs_in="ci")
def test_cairn_key_works_with_read_permission_only(tmp_path: Path) -> None:
    """Another process looks the key up in folders and files that it may only read."""
    folder = tmp_path / "root"
    folder.mkdir()
    cases.rerun(cases.History(folder))
    made = [folder, *folder.rglob("*")]
    # A process of root may write everywhere, unless it gives this right up.
    weak = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.getuid() == 0 else []
    more = ["--root", f"file://{folder}", "--pipeline", "accounts"]
    asked = [["key", "ann", *more], ["key", "ANN", *more], ["key", "ann", "--history", "--all", *more]]
    for path in made:
        path.chmod(path.stat().st_mode & ~0o222)
    try:
        assert subprocess.run([*weak, "touch", folder / "new"], check=False, capture_output=True).returncode == 1
        for words, code in zip(asked, (0, 1, 0), strict=True):
            command = [*weak, sys.executable, "-m", "cairn.command.cli", *words]
            ran = subprocess.run(command, check=False, cwd=REPOSITORY, capture_output=True, text=True)
            assert ran.returncode == code and "Traceback" not in ran.stderr, ran
            assert '"ann"' in ran.stdout
    finally:
        for path in made:
            path.chmod(path.stat().st_mode | 0o200)
