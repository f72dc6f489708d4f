"""The pages over HTTP, without a browser and without Airflow's database: what each view says, who gets what, and that nothing in it is markup."""

from __future__ import annotations

import asyncio
import html
import itertools
import json
import re
import shlex
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from typer.testing import CliRunner

from cairn.command.cli import app
from cairn_ui import chain_graph, interval_strip, render_template
from cairn_ui.pipelines_of_dags import PipelineRef
from cairn_ui.read_logs import Reader
from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.inspection.chain_of import without_cycles
from state_backend.values.airflow_runs import TaskTry
from state_backend.values.inputs import Edge
from tests.support.browser import browser
from tests.support.chain_world import World, write_code
from tests.support.shown_airflow import HOSTILE, write_docs
from tests.support.shown_pipelines import eventful, run_id, steady
from tests.support.waiting import wait_until
from tests.tools import pictures

pytestmark = pytest.mark.filterwarnings("ignore:Using `httpx` with")
BASE = "/cairn/checkpoints"


def ref_of(name: str, root: Path, **more: Any) -> PipelineRef:
    who = {
        "dag_id": name if name != HOSTILE else "hostile",
        "code": "m:X",
        "process": "process",
        "savepoint": "savepoint",
    }
    return PipelineRef(name=name, root=f"file://{root}", **(who | more))


def client_of(served: Any, who: str | None = "admin", **more: Any) -> Any:
    from starlette.testclient import TestClient

    return TestClient(served, cookies={"_token": who} if who else None, **more)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from tests.support.shown_app import shown_app  # imports Airflow's API, which warns

    root = tmp_path_factory.mktemp("shown")
    storages = {name: LocalStorage(root / name) for name in ("rides", "secret", HOSTILE)}
    eventful(storages["rides"])
    steady(storages["secret"], 2)
    steady(storages[HOSTILE], 2)
    (root / "damaged" / "checkpoints").mkdir(parents=True)
    (root / "damaged" / "checkpoints" / f"{1:020d}.json").write_text("{")
    storages["damaged"] = LocalStorage(root / "damaged")
    storages["empty"] = LocalStorage(root / "empty")
    write_docs(root / "docs", 11)
    refs = [ref_of(name, root, restore_dags=("rides_restore",) if name == "rides" else ()) for name in storages]
    refs.append(ref_of("unowned", root, dag_id=None))
    storages["unowned"] = storages["secret"]
    with pytest.MonkeyPatch.context() as patch, shown_app(storages, refs, refused={"nils": "secret"}) as app:
        patch.setenv("CAIRN_DOCS", str(root / "docs"))
        client = client_of(app)
        client.keys = {ref.name: quote(ref.key) for ref in refs}
        yield client


def text(page: str) -> str:
    """What a page says, without its markup."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page.partition("</head>")[2]))


VIEWS = {
    "/p/{rides}/": [
        "UTC : 1 interval quarantined",
        "cause Checkpoint 14 is quarantined: ",
        "Remove the cause. To run the intervals again in order (--to is the start of the last one):",
        "1 published interval is affected. Nothing after 2024-01-",
        "is processed. 2 DAGs wait for it: report, secret.",
        "cairn heal --root",
        "--pipeline rides --to",
        "--airflow http://127.0.0.1:8081",
        "full validation: 2 findings",
        "Latest validated 11",
        "processed up to 2024-01-09 00:00 UTC",
        "DAGs that depend on it DAG report , for asset cairn://rides DAG secret",
        "Last intervals, oldest first",
        "! 1 quarantined",
    ],
    "/p/{rides}/history": ["quarantined", "stale by 13", "replaced by 7", "Data Docs", "781 KiB", "5 + 11"],
    "/p/{rides}/history?before=3": ["2024-01-01 00:00 UTC", "newer"],
    "/p/{rides}/lineage": ["went back to checkpoint 11"],
    "/p/{rides}/trends": ["From top to bottom: state up to", "files"],
    "/p/{rides}/trends?first=3&last=5": ["3 checkpoints"],
    "/p/{rides}/checkpoint/11": [
        "<i>visits</i>",
        "n long, last timestamp",
        "airflow dags trigger rides_restore",
        "2.0",
        "events.parquet",
        "the largest shard has 1.9 × the mean bytes",
    ],
    "/p/{rides}/checkpoint/14": ["Validation refused this checkpoint", "<b>visits</b> is empty"],
    "/p/{rides}/compare": ["Choose two retained checkpoints"],
    "/p/{rides}/compare?first=4&second=7": [
        "different state",
        "same code",
        "Key groups that differ",
        "4 440 440 20 396 396 36 1,144 1,144",
        "state bytes 44 MiB 44 MiB =",
        "cairn diff --root",
    ],
    "/p/{empty}/": ["No checkpoint was committed yet", "Open DAG empty", "cairn status --root"],
    "/p/{empty}/trials": ["No checkpoint was committed yet"],
    "/p/{rides}/trials": ["No trial yet", "cairn try --code m:X --from 2024-01-09T00:00:00Z"],
    "/p/{damaged}/": ["could not be read", "which checkpoints are usable", "cairn status --root"],
    "/": ["rides", "damaged", "no problems", "unowned"],
    "/dag/rides_restore": [
        "Remove the cause. To run the intervals again in order (--to is the start of the last one):"
    ],
    f"/run/rides/{quote(run_id(9))}": [
        "Committed: checkpoint 14",
        "Committed by an earlier try: checkpoint 12",
        "Restored: checkpoint 13",
        "after 1 clear",
        "Why a try failed, before the run succeeded",
        "process, try 1 failed 2024-01-10 00:00:20 UTC : AirflowException: <killed> ( log of process, try 1 )",
        "the run took 1 min 30 s",
        "Before its start, the run waited 10 s for its turn",
        "process 40 s checkpoint 20 s",
    ],
    f"/task/rides/process/{quote(run_id(9))}": ["This try", "Restored: checkpoint 11", "32 MiB from the hosts' caches"],
}


@pytest.mark.parametrize("path", VIEWS)
def test_each_page_shows_its_main_facts_and_commands(pages: Any, path: str) -> None:
    answer = pages.get(BASE + path.format_map(pages.keys))
    assert answer.status_code == 200, answer.text
    shown = text(answer.text).replace("&#39;", "'").replace("&lt;", "<").replace("&gt;", ">").replace("&#34;", '"')
    for part in VIEWS[path]:
        assert part in shown, (part, shown)


class Counted:
    """A storage that counts the requests."""

    def __init__(self) -> None:
        self.storage, self.calls = MemoryStorage("memory://ui/rides"), 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.storage, name)

        def call(*given: Any, **named: Any) -> Any:
            self.calls += 1
            return value(*given, **named)

        return call if callable(value) else value


# Counted before the pages read what the commands print; 62 records are read, and a page of the history has 50 rows.
REQUESTS = {
    "history": 166,
    "history?before=11": 86,
    "lineage": 126,
    "trends": 65,
    "checkpoint/50": 68,
    "compare?first=50&second=51": 65,
}


@pytest.mark.long("seconds", runs_in="ci")
def test_no_page_exceeds_its_limit_of_storage_requests() -> None:
    from tests.support.shown_app import shown_app

    storage, ref = Counted(), PipelineRef(name="rides", root="memory://ui", dag_id="rides", code="m:X")
    steady(storage.storage, 60)
    sent = {}
    for path in REQUESTS:
        with shown_app({"rides": storage}, [ref], refused={}) as shown:  # type: ignore[dict-item]
            storage.calls = 0
            assert client_of(shown).get(f"{BASE}/p/{quote(ref.key)}/{path}").is_success
            sent[path] = storage.calls
    assert {path: sent[path] for path in sent if sent[path] > REQUESTS[path]} == {}


def test_pages_forbid_inline_scripts_and_content_of_other_hosts(pages: Any) -> None:
    answer = pages.get(BASE + "/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "://" not in policy
    for path in ("/", f"/p/{pages.keys['rides']}/checkpoint/11"):
        shown = pages.get(BASE + path).text
        assert not re.search(r"(?:src|href)=\"(?:https?:)?//", shown), "something of another host"
        assert not re.search(r"\s(?:style|on[a-z]+)=", shown)
    for name in re.findall(r"/static/([a-z.]+)", answer.text):
        assert pages.get(f"{BASE}/static/{name}").status_code == 200
    facet = pages.get(f"{BASE}/static/CairnCheckpointRunFacet-1-0-0.json")
    assert facet.headers["content-type"] == "application/json" and "CairnCheckpointRunFacet" in facet.json()["$defs"]
    assert pages.get(f"{BASE}/static/..%2fpages.py").status_code == 404
    assert pages.get(f"{BASE}/static/pages.py").status_code == 404


def test_html_in_a_pipeline_name_is_escaped(pages: Any) -> None:
    for path in ("/", f"/p/{pages.keys[HOSTILE]}/", f"/p/{pages.keys[HOSTILE]}/checkpoint/2"):
        shown = pages.get(BASE + path).text
        assert HOSTILE not in shown and "&lt;script&gt;pwned=1&lt;!--" in shown


def test_who_may_not_read_a_dag_does_not_see_its_pipeline(pages: Any) -> None:
    paths = [
        f"/p/{pages.keys['secret']}{view}"
        for view in ("/", "/history", "/lineage", "/trends", "/compare", "/checkpoint/1")
    ]
    for path in paths:
        assert pages.get(BASE + path).status_code == 200
    nils = client_of(pages.app, "nils")
    assert "secret" in text(pages.get(BASE + "/").text)
    shown = text(nils.get(BASE + "/").text)
    assert "rides" in shown and "secret" not in shown and "unowned" not in shown
    assert [nils.get(BASE + path).status_code for path in paths] == [404] * len(paths)
    assert "No pipeline to show" in text(nils.get(BASE + "/dag/secret").text)
    assert nils.get(f"{BASE}/run/secret/{quote(run_id(9))}").status_code == 403
    assert nils.get(f"{BASE}/p/{pages.keys['unowned']}/").status_code == 404


def test_pages_answer_401_without_login_and_403_without_rights(pages: Any) -> None:
    everything = [*(path.format_map(pages.keys) for path in VIEWS), "/p/x/docs/y"]
    stranger, barred = client_of(pages.app, None), client_of(pages.app, "nobody")
    for path in everything:
        assert stranger.get(BASE + path).status_code == 401, path
        assert barred.get(BASE + path).status_code == 403, path
    assert stranger.get("/cairn/docs/").status_code == 401


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/p/none/", 404),
        ("/p/{rides}/checkpoint/99", 404),
        ("/p/{rides}/checkpoint/0", 404),
        ("/p/{rides}/compare?first=4&second=99", 404),
        ("/p/{rides}/history?before=x", 422),
        ("/run/rides/none", 404),
        ("/p/{rides}/docs/secret/x", 404),
        ("/nothing/here", 404),
    ],
)
def test_an_error_page_shows_its_status_and_a_link_to_a_working_page(pages: Any, path: str, status: int) -> None:
    answer = pages.get(BASE + path.format_map(pages.keys))
    assert answer.status_code == status
    said = text(answer.text)
    assert ("All pipelines" in said or "History of rides" in said) and f"Status {status}" in said
    (link,) = re.findall(r'<a class="button" href="([^"]*)"', answer.text)
    assert pages.get(link).status_code == 200 and ("History" in said) == (("99" in path) or path.endswith("/0"))
    assert status != 422 or "before: Input should be a valid integer" in said


def test_a_failing_page_answers_500_and_hides_the_exception(pages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from cairn_ui import pages_of_log

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(pages_of_log, "place", fail)
    client = client_of(pages.app, raise_server_exceptions=False)
    answer = client.get(f"{BASE}/p/{pages.keys['rides']}/lineage")
    assert answer.status_code == 500 and "The page failed" in text(answer.text) and "a secret" not in answer.text


def test_failure_reasons_and_dags_are_hidden_without_rights(pages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from cairn_ui.access import Rights

    nils = client_of(pages.app, "nils")
    shown = text(nils.get(f"{BASE}/p/{pages.keys['rides']}/").text)
    assert "DAG report" in shown and "secret" not in shown
    monkeypatch.setattr(Rights, "may_read_logs", lambda *_: False)
    shown = text(pages.get(f"{BASE}/run/rides/{quote(run_id(9))}").text)
    assert "no reason is known here" in shown and "killed" not in shown


def test_the_page_of_a_run_says_which_pipeline_it_waits_for(pages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "InputNotReady: it reads sales\nTo see what sales waits for: cairn status --pipeline sales"
    waiting = TaskTry(task_id="process", try_number=1, state="deferred", began=None, ended=None, waits=said)
    monkeypatch.setattr("cairn_ui.database_runs.tries_of", lambda *_: (waiting,))
    shown = text(pages.get(f"{BASE}/run/rides/{quote(run_id(9))}").text)
    assert "Task process waits" in shown and "cairn status --pipeline sales" in shown


def test_data_docs_have_the_frame_of_their_pipeline(pages: Any) -> None:
    listed = pages.get("/cairn/docs/").text
    (link,) = re.findall(r'href="([^"]*checkpoint[^"]*html)"', listed)
    assert "checkpoint 11, total" in text(listed)
    framed = pages.get(link).text
    assert (
        f'href="{BASE}/p/{pages.keys["rides"]}/checkpoint/11"' in framed and "Data Docs: total, checkpoint 11" in framed
    )
    (inner,) = re.findall(r'<iframe[^>]* src="([^"]*)"', framed)
    page = pages.get(inner)
    assert "Expectations of total" in page.text and '.fa-times::before { content: "\\2718" }' in page.text
    assert page.headers["content-security-policy"].startswith("sandbox ")


def test_the_page_with_all_checks_is_linked_and_served_as_it_is(
    pages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Great Expectations' pages get styles; Cairn's own page has its own."""
    monkeypatch.setenv("CAIRN_DOCS", str(tmp_path))
    own = tmp_path / "rides/checks/checkpoint 11 a_b.html"
    own.parent.mkdir(parents=True)
    own.write_text("<html><head></head><body>all of them</body></html>")
    checkpoint = pages.get(f"{BASE}/p/{pages.keys['rides']}/checkpoint/11").text
    (link,) = re.findall(r'href="([^"]*)">Data Docs</a>', checkpoint)
    framed = pages.get(link).text
    assert "<h2>Data Docs: checkpoint 11</h2>" in framed and "checkpoint 11, all checks" in text(
        pages.get("/cairn/docs/").text
    )
    (inner,) = re.findall(r'<iframe[^>]* src="([^"]*)"', framed)
    page = pages.get(inner)
    assert page.text == own.read_text() and page.headers["content-security-policy"].startswith("sandbox ")


def test_data_docs_follow_the_rights_on_the_dag(pages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAIRN_DOCS", str(tmp_path))
    page = tmp_path / "secret/validations/secret/<b>state/checkpoint 1 a_b/1/h.html"
    page.parent.mkdir(parents=True)
    page.write_text("<html><head></head><body>well</body></html>")
    (tmp_path / "secret" / "styles.css").write_text("<head>")
    path = "/cairn/docs/" + quote(page.relative_to(tmp_path).as_posix())
    nils = client_of(pages.app, "nils")
    assert "well" in pages.get(path).text and nils.get(path).status_code == 403
    assert "&lt;b&gt;state" in pages.get("/cairn/docs/").text and "secret" not in text(nils.get("/cairn/docs/").text)
    assert [one.get("/cairn/docs/secret/styles.css").text == "<head>" for one in (pages, nils)] == [True, False]
    missing = pages.get("/cairn/docs/..%2fsecret")
    assert missing.status_code == 404 and f'<a class="button" href="{BASE}/">All pipelines</a>' in missing.text


def test_data_docs_of_a_name_without_a_pipeline_are_denied(
    pages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a DAG that was deleted or is stale; a file beside the pipelines' folders; a pipeline whose name another DAG uses too."""
    from cairn_ui import shown_page

    monkeypatch.setenv("CAIRN_DOCS", str(tmp_path))
    path = "validations/gone/total/checkpoint 1 a_b/1/h.html"
    for name in ("gone", "secret", "rides"):
        (tmp_path / name / path).parent.mkdir(parents=True)
        (tmp_path / name / path).write_text("<html><head></head><body>amounts of clients</body></html>")
    (tmp_path / "index.html").write_text("amounts of clients")
    nils, vera = (client_of(pages.app, name) for name in ("nils", "vera"))
    for client in (pages, nils, vera):
        for hidden in (f"/cairn/docs/gone/{quote(path)}", "/cairn/docs/index.html"):
            answer = client.get(hidden)
            assert answer.status_code == 403 and "amounts" not in answer.text, hidden
        assert "gone" not in text(client.get("/cairn/docs/").text)
    assert "CAIRN_UI_PIPELINES" in pages.get(f"/cairn/docs/gone/{quote(path)}").text

    # Two DAGs write Data Docs into one folder: who may not read one of the DAGs reads none of them.
    refs = shown_page.dags.pipelines()
    own = ref_of("secret", tmp_path / "own", dag_id="own")
    monkeypatch.setattr(shown_page.dags, "pipelines", lambda: [*refs, own])
    shared, framed = f"/cairn/docs/secret/{quote(path)}", f"{BASE}/p/{quote(own.key)}/docs/secret/{quote(path)}"
    assert nils.get(f"{BASE}/p/{quote(own.key)}/").status_code == 200
    assert [client.get(shared).status_code for client in (nils, vera)] == [403, 200]
    assert [client.get(framed).status_code for client in (nils, vera)] == [404, 200]


@pytest.mark.parametrize(
    ("stored", "read"),
    [
        ({"checkpoint": 3, "savepoint": "file:///s"}, {"checkpoint": 3, "savepoint": "file:///s"}),
        ('{"checkpoint": 3}', {"checkpoint": 3}),
        ({"__classname__": "builtins.tuple", "__version__": 1, "__data__": [1]}, None),
        ('{"__classname__": "airflow.sdk.Asset", "__version__": 1, "__data__": {}}', None),
        ("checkpoint", None),
        ("[3]", None),
        (3, None),
        (None, None),
    ],
)
def test_only_json_of_an_xcom_is_read(stored: Any, read: Any) -> None:
    from cairn_ui.airflow_database import json_object

    assert json_object(stored) == read


@pytest.mark.long("half a second", runs_in="ci")
def test_the_commands_that_a_page_prints_are_right(pages: Any) -> None:
    """As they are printed: the difference of two, and what going back would discard."""
    shown = pages.get(f"{BASE}/p/{pages.keys['secret']}/compare?first=1&second=2").text
    shown += pages.get(f"{BASE}/p/{pages.keys['secret']}/checkpoint/1").text
    printed = {
        command.split()[1]: html.unescape(command) for command in re.findall(r'data-copy="(cairn [^"]*)"', shown)
    }
    assert printed.keys() == {"diff", "restore", "savepoint", "validate", "quarantine", "key", "replay"}
    refused = CliRunner().invoke(app, shlex.split(printed["quarantine"])[1:])
    assert refused.exit_code == 0 and "would quarantine checkpoint 1 of" in refused.output, refused.output
    rewound = CliRunner().invoke(app, shlex.split(printed["restore"])[1:])
    assert rewound.exit_code == 0 and "discards" in rewound.output, rewound.output
    # These folders hold no files of RocksDB, so that entries can't be read: the checkpoints are found.
    differ = CliRunner().invoke(app, [*shlex.split(printed["diff"])[1:], "--fast"])
    assert differ.exit_code == 0 and re.match(r"checkpoint 1 of .* to 2 of .*state", differ.output), differ.output


def test_links_stay_below_the_path_that_airflow_is_served_at(pages: Any) -> None:
    proxied = client_of(pages.app, root_path="/airflow")
    for path in ("/", f"/p/{pages.keys['rides']}/history"):
        links = re.findall(r'(?:href|src)="([^"#][^"]*)"', proxied.get(f"/airflow{BASE}{path}").text)
        inner = [link for link in links if "/dags/" not in link]
        assert len(inner) > 5 and all(link.startswith(f"/airflow{BASE}/") for link in inner)


def test_no_link_leads_to_a_run_that_airflow_does_not_have(pages: Any) -> None:
    """Runs are deleted, and `cairn run` makes checkpoints without one."""
    history = pages.get(f"{BASE}/p/{pages.keys['rides']}/history").text
    assert f"/runs/{quote(run_id(9), safe='')}" in history and f"/runs/{quote(run_id(8), safe='')}" not in history
    for checkpoint, day_number, linked in ((12, 9, True), (11, 8, False)):
        page = pages.get(f"{BASE}/p/{pages.keys['rides']}/checkpoint/{checkpoint}").text
        assert run_id(day_number) in html.unescape(page)
        assert ("/runs/" in page) == linked


def test_a_mounted_application_answers_the_request_that_imports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from cairn_ui.plugin import Mounted

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send(scope)

    monkeypatch.setitem(sys.modules, "mounted_by_a_test", SimpleNamespace(app=application))
    asyncio.run(Mounted("mounted_by_a_test")("request", send, send))
    assert sent == ["request"]


def test_nobody_gets_a_command_with_the_host_of_another_request(pages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from cairn_ui import airflow_database, shown_page

    class Running(dict[Any, Any]):
        def __delitem__(self, _: Any) -> None: ...  # Each read is still running when the next request comes.

    monkeypatch.setattr(shown_page.reader, "_calls", Running())
    monkeypatch.setattr(airflow_database, "airflow_url", str)
    for host, path in itertools.product(("other", "own"), ("", "checkpoint/14")):
        shown = pages.get(f"{BASE}/p/{pages.keys['rides']}/{path}", headers={"host": host}).text
        assert re.findall('--airflow ([^ "<]+)', shown)[:1] == [f"http://{host}"], path


def test_pages_refuse_http_methods_that_write(pages: Any) -> None:
    for method in ("post", "put", "patch", "delete"):
        assert getattr(pages, method)(f"{BASE}/p/{pages.keys['rides']}/").status_code == 405


def test_one_request_at_a_time_reads_the_dags(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a start, when all DAGs are read, each of many requests would hold all of them."""
    from cairn_ui.airflow_database import DagsInDatabase

    dags, waits = DagsInDatabase(), list[bool]()
    monkeypatch.setattr(dags, "_read", lambda: waits.append(not dags._lock.acquire(blocking=False)))
    assert (dags.pipelines(), waits) == ([], [True])


def test_a_root_is_opened_with_its_dags_airflow_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key's file is gone when the first page is read."""
    from cairn_ui.airflow_database import open_folder
    from state_backend.values.errors import UsageError

    key = {"type": "authorized_user", "client_id": "i", "client_secret": "s", "refresh_token": "of-clicks"}
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    for name, given in (("GOOGLE", key), ("BROKEN", {"type": "unknown"})):
        connection = {"conn_type": "google_cloud_platform", "extra": {"keyfile_dict": json.dumps(given)}}
        monkeypatch.setenv(f"AIRFLOW_CONN_{name}", json.dumps(connection))
    ref = PipelineRef(name="clicks", root="gs://bucket/state", storage_conn_id="google")
    opened: Any = open_folder(ref)
    assert opened.url == "gs://bucket/state/clicks"
    assert opened.cloud._client()._credentials.refresh_token == "of-clicks"
    with pytest.raises(UsageError, match="key file is not usable"):
        open_folder(replace(ref, storage_conn_id="broken"))
    amazon = {"conn_type": "aws", "login": "AKIA", "password": "s", "extra": {"region_name": "eu-west-1"}}
    microsoft = {"conn_type": "wasb", "login": "acc", "password": "a2V5"}
    for name, given in (("AMAZON", amazon), ("MICROSOFT", microsoft)):
        monkeypatch.setenv(f"AIRFLOW_CONN_{name}", json.dumps(given))
    opened = open_folder(replace(ref, root="s3://bucket/state", storage_conn_id="amazon"))
    client = opened.cloud._clients.of_this_process()
    assert (client._request_signer._credentials.access_key, client.meta.region_name) == ("AKIA", "eu-west-1")
    with pytest.raises(UsageError, match="ProfileNotFound; expected credentials"):
        monkeypatch.setenv("AIRFLOW_CONN_NOBODY", json.dumps({"conn_type": "aws", "extra": {"profile_name": "nobody"}}))
        open_folder(replace(ref, root="s3://bucket/state", storage_conn_id="nobody"))
    opened = open_folder(replace(ref, root="az://box/state", storage_conn_id="microsoft"))
    assert opened.cloud._container().url == "https://acc.blob.core.windows.net/box"


def test_the_age_on_the_list_is_that_of_the_checkpoint_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoint 14 is newer and quarantined. The row shows checkpoint 13, so its age must be that of checkpoint 13 too."""
    from tests.support.shown_app import shown_app

    storage, now = LocalStorage(tmp_path / "rides"), time.time()
    eventful(storage)
    ages_s = {13: 3 * 86_400 + 7_300, 14: 60}
    monkeypatch.setattr(
        Reader, "written", lambda self, ref, log, ids: {n: round((now - ages_s[n]) * 1000) for n in ids}
    )
    with shown_app({"rides": storage}, [ref_of("rides", tmp_path)], refused={}) as shown:
        said = text(client_of(shown).get(f"{BASE}/").text)
    assert re.search(r"\b13 .*\b3 d 2 h\b", said), said


def test_the_list_draws_which_pipelines_read_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page does not list `sold`."""
    from tests.support.shown_app import shown_app

    write_code(tmp_path, monkeypatch, "sales", "sold", "report", "mail")
    edges = {
        "sales": (),
        "sold": (),
        "report": (Edge(pipeline="sales"), Edge(pipeline="sold", back=1)),
        "mail": (Edge(pipeline="report"), Edge(pipeline="sales", reads="late", back=1, tracked=False)),
    }
    world = World(edges, root=f"file://{tmp_path}/root", code="three")
    for name in edges:
        for n in (1, 2):
            world.run(name, n)
    world.raw["sales", 2] = 4
    world.run("sales", 2)
    storages = {name: world.folders[name].storage for name in edges}
    refs = [ref_of(n, tmp_path / "root", dag_id=None, code=f"three:{n}") for n in ("report", "mail")]
    refs.append(ref_of("sales", tmp_path / "root"))
    with shown_app(storages, refs, refused={}) as shown:  # type: ignore[arg-type]
        client = client_of(shown)
        html_ = client.get(f"{BASE}/").text
        page = client.get(f"{BASE}/p/{quote(refs[1].key)}/").text
    drawn = re.findall(r'class="pipeline (\w+)" data-node="(\w+)"', html_)
    assert sorted(drawn) == [("pending", "mail"), ("stale", "report"), ("stale", "sales"), ("unlisted", "sold")]
    (section,) = re.findall(r'<section class="chain".*?</section>', html_, re.DOTALL)
    listed = [re.sub(r"<[^>]*>", "", item) for item in re.findall(r"<li>(.*?)</li>", section)]
    assert "report: 1 stale; reads sales, sold (1 back)" in listed and "sales: incomplete" in listed
    assert "mail: 1 pending; reads report, sales (late rows, 1 back, not tracked)" in listed
    assert sorted(re.findall(r'<text class="edge-words"[^>]*>([^<]+)', section)) == [
        "1 back",
        "late rows, 1 back, not tracked",
    ]
    assert section.count('class="edge loose"') == 1 and section.count('class="edge"') == 3
    assert section.count(f'href="{BASE}/p/{quote(refs[0].key)}/"') == 2 and 'data-node="sold" href' not in section
    # The command of the page, as it is printed, for a pipeline that waits for another one.
    (command,) = {html.unescape(one) for one in re.findall(r'data-copy="(cairn heal[^"]*)"', page)}
    typed = CliRunner().invoke(app, [*shlex.split(command)[1:], "--dry-run", "--json"])
    assert [one["pipeline"] for one in json.loads(typed.stdout)] == ["sales", "sold", "report", "mail"]


def test_a_wide_graph_has_no_line_through_a_pipeline() -> None:
    """Each line that crosses columns gets a row of its own there."""
    at = {name: ("r", name) for name in "abcde"}
    reads = {"b": "a", "c": "b", "d": "abc", "e": "a"}
    order = without_cycles({at[name]: dict.fromkeys((at[up] for up in ups), 0) for name, ups in reads.items()})
    places, ways = chain_graph._places(order)
    assert len({*places.values()}) == len(places) and [places[at[name]][0] for name in "abcde"] == [0, 1, 2, 3, 1]
    assert {edge: len(way) for edge, way in ways.items() if way} == {(at["a"], at["d"]): 2, (at["b"], at["d"]): 1}


@pytest.mark.long("seconds", runs_in="ci")
def test_each_pictured_overview_names_its_problem_and_prints_a_heal_command(tmp_path: Path) -> None:
    said = {
        "overview": "with another result. Checkpoint 6 and those that follow from it were built on the old one.",
        "overview-clicks": "try 3 of 4 of task process",
        "overview-orders": "was due, but has no run and no checkpoint. effect Nothing after 2024-01-06",
        "overview-visits": "is quarantined: full validation: 2 findings. total: 14 of 2,162 values of n are not between 0",
        "overview-weather": "A run is due, but Airflow has not created it. Check that the scheduler is running first.",
    }
    shown = {}
    for served, paths in (pictures.situations(), pictures.views()), *pictures.extremes(tmp_path, many=40):
        with pictures.served(served) as url:
            for name, path in paths.items():
                request = urllib.request.Request(url + path, headers={"Cookie": "_token=admin"})
                with urllib.request.urlopen(request) as answer:
                    shown[name] = html.unescape(text(answer.read().decode()))
    for name, sentence in said.items():
        assert sentence in shown[name], (name, shown[name])
        assert "cairn heal --root gs://shop-data/state --pipeline" in shown[name]
    assert "On time" in shown["healthy"] and "cairn heal" not in shown["healthy"]
    assert "5 of 33 need you." in shown["pipelines"]
    assert "report 1 stale, 4 pending" in shown["pipelines-chain"]
    assert "5 intervals are out of date intervals 2024-01-05" in shown["overview-chain"]
    assert "✓ 4 done" in shown["overview-chain"] and "~ 4 pending" in shown["overview-chain"]
    assert "No checkpoint was committed yet" in shown["overview-empty"] and "30 done" in shown["overview-many"]


def test_states_of_intervals_differ_by_their_contrast_or_by_their_sign() -> None:
    css = (render_template.STATIC / "cairn.css").read_text()
    shown = dict(re.findall(r"\.run\.\w+, \.sign\.(\w+) { --of: var\(--(\w+)\) }", css))
    signs = {(tone, sign) for _, tone, sign in interval_strip._STATES.values() if tone not in ("stale", "next")}
    assert shown.keys() == {tone for tone, _ in signs}, "stale is hatched, next is dotted"

    def contrast(*colours: str) -> float:
        parts = [[int(one[n : n + 2], 16) / 255 for n in (1, 3, 5)] for one in colours]
        linear = [[p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in one] for one in parts]
        low, high = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in linear)
        return (high + 0.05) / (low + 0.05)

    for theme in re.findall(r":root[^{]*{\s*color-scheme[^}]*}", css):
        of = dict(re.findall(r"--(\w+): (#\w{6})", theme.replace("#fff;", "#ffffff;")))
        assert [tone for tone, name in shown.items() if contrast(of[name], of["back"]) < 3] == []
        for (one, sign), (other, another) in itertools.combinations(signs, 2):
            assert one == other or sign != another or contrast(of[shown[one]], of[shown[other]]) >= 3
    assert css.count("color-scheme: ") == 2


@pytest.mark.browser
def test_the_list_of_33_pipelines_fits_into_one_screen_and_each_trouble_has_a_sign() -> None:
    with pictures.served(pictures.situations()) as url, browser(1440, 900) as chrome:
        chrome.get(f"{url}/static/cairn.css")
        chrome.add_cookie({"name": "_token", "value": "admin", "path": "/"})

        def fits() -> bool:  # On a busy host the first pages lack logs, and say so in more lines.
            chrome.get(f"{url}/")
            return bool(chrome.execute_script("return document.documentElement.scrollHeight <= 900"))

        wait_until(fits, 30, "the list of pipelines fits")
        count = "return document.querySelectorAll(arguments[0]).length"
        signs, bars = (chrome.execute_script(count, one) for one in (".signed", ".run:not(.good, .stale, .next)"))
        assert signs == bars > 5
