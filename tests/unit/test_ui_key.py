"""The look-up of a key on a checkpoint's page: over HTTP, and in a browser."""

from __future__ import annotations

import html
import logging
import re
import shlex
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from cairn.testing import PipelineTester
from cairn_ui import key_lookup
from cairn_ui.find_pipelines import PipelineRef
from cairn_ui.key_lookup import Busy, found_in
from cairn_ui.limited_process import Ended
from state_backend.adapters.local_storage import LocalStorage
from tests.support.accounts import DAYS, SCHEMA, accounts, at, day

pytestmark = pytest.mark.filterwarnings("ignore:Using `httpx` with")
SCRIPT = "<script>document.title='owned'</script>"
BIG_KEY = "big" * 1_700_000  # 5.1 MB


def key_ref(root: Path, name: str = "accounts") -> PipelineRef:
    return PipelineRef(name=name, root=f"file://{root}", dag_id=name, code="tests.support.replayed:ROW")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("root")
    tester = PipelineTester(accounts(), input_schema=SCHEMA, root=f"file://{folder}")
    for n, rows in DAYS.items():
        if n < 4:
            tester.run([*rows, (SCRIPT, n, at(n)), (BIG_KEY, 1, at(n))], day(n))
    return folder


class Notes(StatefulProcessor):
    """Keeps a text of five megabytes for each account."""

    def init(self, handle: Any) -> None:
        self._note = handle.getValueState("note", "text string, rows long")
        self._last = handle.getMapState("last", "text string", "rows long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        count = (self._note.get() or ("", 0))[1] + len([*rows])
        self._note.update((f"{count}{SCRIPT}" + "ö" * 2_500_000, count))
        self._last.updateValue(("x" * 60_000,), (count,))
        yield Row(account=key[0], kind="note", balance=count, rows=count)


@pytest.fixture(scope="module")
def big_values(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a pipeline whose values are 5 MB long."""
    folder = tmp_path_factory.mktemp("big")
    tester = PipelineTester(accounts(name="notes", processor=Notes), input_schema=SCHEMA, root=f"file://{folder}")
    for n in (1, 2):
        tester.run(DAYS[n], day(n))
    return folder


@pytest.fixture
def shown(root: Path) -> Iterator[Any]:
    with showing(root) as client:
        yield client


@contextmanager
def showing(root: Path, name: str = "accounts") -> Iterator[Any]:
    from starlette.testclient import TestClient

    from tests.support.shown_app import shown_app

    ref = key_ref(root, name)
    storages = {name: LocalStorage(root / name)}
    with shown_app(storages, [ref], refused={"nils": "accounts"}) as app:
        client = TestClient(app, cookies={"_token": "admin"})
        client.at = f"/cairn/checkpoints/p/{quote(ref.key)}/checkpoint/2"  # type: ignore[attr-defined]
        yield client


def text(answer: Any) -> str:
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", answer.text.partition("</head>")[2])))


@pytest.mark.long("seconds", runs_in="ci")
def test_state_history_and_the_replay_command(shown: Any, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert 'name="key"' in shown.get(shown.at).text
    with caplog.at_level(logging.DEBUG):
        page = text(shown.post(f"{shown.at}/key", data={"key": "ann"}))
    assert '{"total": 16, "due_ms": 1704412800000}' in page and '{"account": "ann"}' in page
    assert page.index("checkpoint 2 [2024-01-02") < page.index("checkpoint 1 [2024-01-01")
    assert "~ balance: total 5 -> 16" in page
    command = next(shlex.split(c) for c in re.findall(r"cairn replay [^\n]*?:ROW", page))
    assert command == [
        "cairn",
        "replay",
        '{"account": "ann"}',
        "2",
        "--root",
        f"file://{root}",
        "--code",
        "tests.support.replayed:ROW",
    ]
    assert "ann" not in caplog.text
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


@pytest.mark.long("seconds", runs_in="ci")
def test_a_key_without_state_and_a_key_that_does_not_fit(shown: Any) -> None:
    page = text(shown.post(f"{shown.at}/key", data={"key": "dora"}))
    assert "The checkpoint has no state of this key." in page and "No retained checkpoint changed this key." in page
    assert "The look-up failed" in text(shown.post(f"{shown.at}/key", data={"key": '{"user": 1}'}))


@pytest.mark.long("half a second", runs_in="ci")
def test_a_script_in_a_key_is_text(shown: Any) -> None:
    answer = shown.post(f"{shown.at}/key", data={"key": SCRIPT})
    assert SCRIPT not in answer.text and html.escape(SCRIPT, quote=False)[:10] in answer.text
    assert '{"total": 3, ' in text(answer)


def test_a_user_without_rights_and_a_log_in(shown: Any) -> None:
    from starlette.testclient import TestClient

    nils = TestClient(shown.app, cookies={"_token": "nils"})
    refused = nils.post(f"{shown.at}/key", data={"key": "ann"})
    assert refused.status_code == 404 and "total" not in refused.text
    assert TestClient(shown.app).post(f"{shown.at}/key", data={"key": "ann"}).status_code == 401


@pytest.mark.long("seconds", runs_in="ci")
def test_a_value_of_five_megabytes_is_cut(big_values: Path) -> None:
    with showing(big_values, "notes") as client:
        answer = client.post(f"{client.at}/key", data={"key": "ann"})
    page = text(answer)
    assert f'{{"text": "3{SCRIPT}ööö' in page and f"ö… ({2_500_026 + len(SCRIPT):,} characters)" in page
    assert SCRIPT not in answer.text
    assert "x… (60,012 characters)" in page and "~ note: text " in page and "rows 1 -> 3" not in page
    assert len(answer.text) < 100_000


def test_a_key_of_five_megabytes_is_refused(shown: Any) -> None:
    answer = shown.post(f"{shown.at}/key", data={"key": "x" * 5_000_000})
    assert answer.status_code == 413 and "The key is longer than 64 KiB" in text(answer)


def test_show_values_switches_the_look_up_off(shown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("cairn_ui.key_routes.conf.getboolean", lambda *given, **_: asked.append(given))
    assert 'name="key"' not in shown.get(shown.at).text
    answer = shown.post(f"{shown.at}/key", data={"key": "ann"})
    assert answer.status_code == 404 and "show_values is false" in text(answer)
    assert {*asked} == {("cairn", "show_values")}


def test_a_dropped_checkpoint_has_no_look_up(shown: Any) -> None:
    answer = shown.post(f"{shown.at.removesuffix('2')}9/key", data={"key": "ann"})
    assert answer.status_code == 404 and "Checkpoint 9 is not retained" in text(answer)


def test_one_look_up_at_a_time(shown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: Any) -> Any:
        raise Busy

    monkeypatch.setattr(key_lookup, "look_up", busy)
    assert "Another look-up is running" in text(shown.post(f"{shown.at}/key", data={"key": "ann"}))


@pytest.mark.parametrize(
    ("ended", "problem", "too_much"),
    [
        ({"code": None}, "longer than 30 s", True),
        ({"code": -9}, "more than 1.0 GiB of memory", True),
        ({"code": 1, "errors": "MemoryError"}, "more than 1.0 GiB of memory", True),
        ({"code": 1, "errors": "the key 'x' does not fit"}, "does not fit", False),
        ({"code": 2}, "exit code 2", False),
        ({"code": 0, "said": b" " * (1 << 21)}, "take more than 1.0 MiB", True),
    ],
)
def test_how_a_look_up_ends(tmp_path: Path, ended: dict[str, Any], problem: str, too_much: bool) -> None:
    found = found_in(key_ref(tmp_path), "x", Ended(**{"said": b"", "errors": "", "seconds": 1.0, **ended}))
    assert problem in (found.problem or "") and found.too_much is too_much


@pytest.mark.browser
def test_the_look_up_in_a_browser(root: Path, big_values: Path) -> None:
    import uvicorn
    from selenium.webdriver.common.by import By

    from tests.support.browser import browser, log_in, wait_for
    from tests.support.shown_app import shown_app

    refs = [key_ref(root), key_ref(big_values, "notes")]
    storages = {"accounts": LocalStorage(root / "accounts"), "notes": LocalStorage(big_values / "notes")}
    with (
        shown_app(storages, refs, refused={"nils": "accounts"}) as app,
        socket.socket() as listening,
    ):
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        try:
            while not server.started:
                time.sleep(0.05)
            with browser() as chrome:
                log_in(chrome, url, "admin")
                page, notes = (f"{url}/cairn/checkpoints/p/{quote(ref.key)}/checkpoint/2" for ref in refs)
                for where, key, says in (
                    (page, "ann", "total 5 -> 16"),
                    (page, SCRIPT, "<script>"),
                    (page, BIG_KEY, "64 KiB"),
                    (notes, "ann", f"{2_500_026 + len(SCRIPT):,} characters"),
                ):
                    chrome.get(where)
                    # A page whose storage needs more than five seconds has no form, and refreshes by itself.
                    field = wait_for(lambda: chrome.find_element(By.NAME, "key"))
                    chrome.execute_script("arguments[0].value = arguments[1]", field, key)
                    field.submit()
                    wait_for(lambda says=says: says in chrome.find_element(By.TAG_NAME, "body").text, 60)
                    assert "owned" not in chrome.title
                    assert key[:10] not in chrome.current_url
                log_in(chrome, url, "nils")
                chrome.get(page)
                assert not chrome.find_elements(By.NAME, "key")
        finally:
            server.should_exit = True
            thread.join(30)
