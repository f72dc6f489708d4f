"""Connections of the operators: where Spark is, who the storage sees, and that no secret is shown."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from airflow.sdk import BaseHook, BaseOperator
from airflow.sdk.execution_time.task_runner import _serialize_rendered_fields
from moto import mock_aws

import cairn_operators
from cairn_operators import driver_operator
from cairn_operators.airflow_versions import AirflowFailException, AirflowNotFoundException
from cairn_operators.hidden_settings import hide_secrets
from cairn_operators.spark_location import _texts, spark_location, spark_url
from cairn_operators.storage_connection import as_storage_identity, storage_credentials
from cairn_provider import get_provider_info
from state_backend.values.operation_parameters import Call, Validate, from_json
from tests.support.airflow_names import DagSerialization, as_object, needs
from tests.support.operator_calls import (
    OF_CODE,
    Events,
    checkpoint,
    connection,
    context,
    micro_batch,
    pipeline_dag,
    record,
    run,
)

AZURE = "spark.hadoop.fs.azure.account.key.store.dfs.core.windows.net"


@pytest.mark.parametrize(
    ("uri", "url"),
    [
        ("spark://host:7077", "spark://host:7077"),
        ("spark://host", "spark://host"),
        ("spark://[::1]:7077", "spark://[::1]:7077"),
        ("spark://spark%3A%2F%2Fhost:7077", "spark://host:7077"),
        ("spark://local%5B2%5D", "local[2]"),
        ("spark://yarn", "yarn"),
        ("yarn://", "yarn"),
        ("k8s://host:6443", "k8s://host:6443"),
        ("k8s://https://host:443", "k8s://https://host:443"),
        ("spark://k8s://host:443", "k8s://host:443"),
        ("spark://k8s%3A%2F%2Fhttps%3A%2F%2Fhost:443", "k8s://https://host:443"),
        ("sc://host:15002", "sc://host:15002"),
        ("sc://host", "sc://host:15002"),
        ("sc://[::1]", "sc://[::1]:15002"),
        ("sc://host:9/;use_ssl=true;user_id=me", "sc://host:9/;use_ssl=true;user_id=me"),
        ("sc://host:9/?use_ssl=true", "sc://host:9/;use_ssl=true"),
        ("spark-connect://host:9", "sc://host:9"),
    ],
)
def test_a_connection_uri_keeps_its_scheme(monkeypatch: pytest.MonkeyPatch, uri: str, url: str) -> None:
    """Airflow takes the URI apart, and stores the scheme as the type of the connection."""
    monkeypatch.setenv("AIRFLOW_CONN_CAIRN_SPARK", uri)
    assert spark_location("cairn_spark").url == url


@pytest.mark.parametrize(
    ("name", "value", "hidden"),
    [
        (AZURE, "k", True),
        ("spark.hadoop.fs.s3a.access.key", "k", True),
        ("spark.hadoop.fs.s3a.secret.key", "k", True),
        ("spark.ssl.keyStorePassword", "k", True),
        ("spark.authenticate.secret", "k", True),
        ("spark.hadoop.fs.gs.auth.access.token", "k", True),
        ("spark.driver.extraJavaOptions", "-Djdbc.password=k", True),
        ("spark.executorEnv.DATABASE", "jdbc:postgresql://h/d?user=u&password=k", True),
        ("spark.executorEnv.PIN", "1234", False),
        ("spark.sql.shuffle.partitions", "8", False),
        ("spark.executor.memory", "4g", False),
        ("spark.task.maxFailures", 4, False),
        ("spark.speculation", True, False),
    ],
)
def test_airflow_shows_no_secret_of_spark_conf(name: str, value: Any, hidden: bool) -> None:
    """As the worker sends rendered fields to the API, and as the database stores the DAG."""
    dag = pipeline_dag(spark_conf={name: value})
    task = dag.get_task("process")
    expected = {name: "***" if hidden else value}
    stored = DagSerialization.to_dict(dag)["dag"]["tasks"]
    assert [as_object(t["__var"]["spark_conf"]) for t in stored if "spark_conf" in t["__var"]] == [expected]
    for day in ("a", "b"):  # two runs of one process
        copy = task.prepare_for_execution()
        copy.render_template_fields({"day": day, "params": dict(dag.params)})
        assert as_object(_serialize_rendered_fields(copy)["spark_conf"]) == expected
        assert _texts("spark_conf", copy.spark_conf) == {name: str(value).lower() if value is True else str(value)}


def test_secrets_are_found_by_the_pattern_that_spark_would_use() -> None:
    conf = {"spark.redaction.regex": "(?i)pin", "spark.executorEnv.PIN": "1234", "spark.a.password": "p", "spark.b": ""}
    shown = {name: str(value) for name, value in hide_secrets(conf).items()}
    assert shown == {**conf, "spark.executorEnv.PIN": "***", "spark.a.password": "***"}
    assert str(hide_secrets({"spark.redaction.regex": "(", "spark.a.token": "t"})["spark.a.token"]) == "***"
    by_value = {"spark.a.url": "jdbc:postgresql://host?password=p", "spark.b.url": "jdbc:postgresql://host"}
    shown = {name: str(value) for name, value in hide_secrets(by_value).items()}
    assert shown == {**by_value, "spark.a.url": "***"}


def test_templates_of_hidden_settings_are_rendered_for_each_run() -> None:
    task = micro_batch(spark_conf={AZURE: "key-of-{{ day }}"})
    for day in ("a", "b"):
        copy = task.prepare_for_execution()
        copy.render_template_fields({"day": day})
        assert _texts("spark_conf", copy.spark_conf) == {AZURE: f"key-of-{day}"}


def test_a_secret_that_another_task_returned_is_hidden() -> None:
    result = SimpleNamespace(resolve=lambda context: context["key"])  # what Airflow asks of an XComArg
    copy = micro_batch(spark_conf={AZURE: result, "spark.task.cpus": result}).prepare_for_execution()
    copy.render_template_fields({"key": "k"})
    assert as_object(_serialize_rendered_fields(copy)["spark_conf"]) == {AZURE: "***", "spark.task.cpus": "k"}
    assert _texts("spark_conf", copy.spark_conf) == {AZURE: "k", "spark.task.cpus": "k"}


def test_a_token_and_configuration_reach_the_driver_by_its_stdin_only(
    fake: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fake('ok {"attempt": "a"}')
    driver = folder / "fake_driver.py"
    driver.write_text(
        driver.read_text().replace('print("a line"', '(folder / "stdin").write_text(sys.stdin.read())\nprint("a line"')
    )
    extra = {"use_ssl": True, "conf": '{"spark.hadoop.fs.secret": "s3cret", "spark.sql.shuffle.partitions": 4}'}
    connection(monkeypatch, conn_type="spark_connect", host="sc://h", port=7, login="me", password="t0ken", extra=extra)
    given = {"spark.sql.shuffle.partitions": 8, "spark.speculation": True, AZURE: "{{ p }}"}
    task = micro_batch(spark_conf=given)
    task.render_template_fields({"p": "azure=key"})
    result, logged = run(task), capsys.readouterr().out  # Airflow's log does not reach caplog.
    asked = json.loads((folder / "arguments.json").read_text())
    assert from_json(Call, asked[asked.index("--call") + 1]).spark == "sc://h:7/;use_ssl=true;user_id=me"
    assert json.loads((folder / "stdin").read_text()) == {
        "token": "t0ken",
        "conf": {
            "spark.hadoop.fs.secret": "s3cret",
            "spark.sql.shuffle.partitions": "8",
            "spark.speculation": "true",
            AZURE: "azure=key",
        },
    }
    assert "a line" in logged
    for secret in ("t0ken", "s3cret", "azure=key"):
        assert all(secret not in told for told in (*asked, logged, json.dumps(result)))


@pytest.mark.parametrize(
    ("parts", "url", "token"),
    [
        (
            {"conn_type": "spark_connect", "host": "sc://h:9/;token=t0ken;use_ssl=true"},
            "sc://h:9/;use_ssl=true",
            "t0ken",
        ),
        ({"conn_type": "spark_connect", "host": "h", "extra": {"token": "t0ken"}}, "sc://h:15002", "t0ken"),
        ({"conn_type": "generic", "host": "sc://h", "port": 9}, "sc://h:9", None),
        ({"conn_type": "generic", "host": "spark://h", "port": 7077}, "spark://h:7077", None),
        ({"conn_type": "spark", "host": "h1:7077,h2:7077"}, "spark://h1:7077,h2:7077", None),
        ({"conn_type": "spark", "host": "mesos://zk://host", "port": 2181}, "mesos://zk://host:2181", None),
        ({"conn_type": "spark", "host": "local-cluster[2,1,1024]"}, "local-cluster[2,1,1024]", None),
        ({"conn_type": "spark"}, "local[*]", None),
    ],
)
def test_each_usual_form_of_a_spark_connection_gives_its_url_and_token(
    monkeypatch: pytest.MonkeyPatch, parts: dict[str, Any], url: str, token: str | None
) -> None:
    connection(monkeypatch, **parts)
    found = spark_location("cairn_spark")
    assert (found.url, found.token) == (url, token)
    assert "t0ken" not in repr(found)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"conn_type": "spark", "host": "local[2]", "password": "t"}, "a Spark master such as .* takes none"),
        ({"conn_type": "spark", "host": "local[2]", "extra": {"conf": "spark.a=b"}}, "conf is not a JSON object like"),
        ({"conn_type": "spark", "host": "local[2]", "extra": {"conf": {"spark.a": None}}}, "spark.a is a NoneType"),
    ],
)
def test_a_spark_connection_with_a_useless_password_or_malformed_conf_is_refused(
    monkeypatch: pytest.MonkeyPatch, parts: dict[str, Any], says: str
) -> None:
    connection(monkeypatch, **parts)
    with pytest.raises(AirflowFailException, match=says):
        spark_location("cairn_spark")


@needs("form of a connection")
@pytest.mark.long("seconds", runs_in="ci")
def test_airflow_finds_the_providers_connection_types_form_fields_links_and_plugins() -> None:
    """What `airflow providers list`, `airflow connections add` and the form in the UI ask. A type that nobody declares is stored as
    generic."""
    script = """
import json, warnings
warnings.simplefilter("ignore")
from airflow.plugins_manager import get_plugin_info
from airflow.providers_manager import ProvidersManager
found = ProvidersManager()
print(json.dumps([
    found.providers["cairn-state"].version, sorted({"spark", "spark_connect"} & {*found.hooks}),
    sorted(name for name in found.connection_form_widgets if "spark" in name), found.field_behaviours["spark_connect"]["relabeling"],
    [link for link in found.extra_links_class_names if "cairn" in link], sorted(p["name"] for p in get_plugin_info(["name"]) if p["name"].startswith("cairn")),
]))
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    version, types, fields, labels, links, plugins = json.loads(ran.stdout.splitlines()[-1])
    assert version == importlib.metadata.version("cairn-state")
    assert types == ["spark", "spark_connect"]
    assert fields == ["extra__spark__conf", "extra__spark_connect__conf", "extra__spark_connect__use_ssl"]
    assert labels == {"password": "Token", "login": "User id"}
    assert links == ["cairn_operators.data_docs_link.DataDocsLink"]
    assert plugins == ["cairn_checkpoints", "cairn_data_docs"]


def test_the_provider_lists_the_modules_of_all_operators() -> None:
    (operators,) = get_provider_info()["operators"]
    listed = operators["python-modules"]
    for module in listed:
        importlib.import_module(module)
    public = [getattr(cairn_operators, name) for name in cairn_operators.__all__]
    made = {thing.__module__ for thing in public if isinstance(thing, type) and issubclass(thing, BaseOperator)}
    assert listed == sorted(made)


def test_connection_types_that_sparks_provider_declares_are_not_declared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn_provider.find_spec", lambda _: object())
    assert get_provider_info()["connection-types"] == []


def test_spark_without_connection_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(conn_id: str) -> None:
        raise AirflowNotFoundException(conn_id)

    monkeypatch.setattr(BaseHook, "get_connection", missing)
    assert spark_location("cairn_spark").url == "local[*]"
    with pytest.raises(AirflowFailException) as raised:
        spark_location("big spark")
    (command,) = (line for line in str(raised.value).splitlines() if line.startswith("airflow connections add"))
    assert "no connection 'big spark'" in str(raised.value) and shlex.split(command)[3] == "big spark"
    with pytest.raises(AirflowFailException, match="has type 'http'; expected spark_connect or spark"):
        spark_url("http", "h", 1)


SECRET = "s3cret-of-the-key"
KEY = {"type": "service_account", "client_email": "me@project", "private_key": SECRET}


@pytest.mark.parametrize(
    "extra",
    [
        {"keyfile_dict": KEY, "project": "mine"},
        {"keyfile_dict": json.dumps(KEY), "project": "mine"},
        {
            "extra__google_cloud_platform__keyfile_dict": json.dumps(KEY),
            "extra__google_cloud_platform__project": "mine",
        },
    ],
)
def test_a_google_key_reaches_the_driver_only_by_a_private_file(
    fake: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, extra: dict[str, Any]
) -> None:
    """Not the log, the command line, the result, the templated fields; and nothing is left of it."""
    (tmp_path / "fake_driver.py").write_text(
        "import json, os, stat, sys\nfrom pathlib import Path\n"
        "key = Path(os.environ['GOOGLE_APPLICATION_CREDENTIALS'])\n"
        "seen = {'path': str(key), 'mode': stat.S_IMODE(key.stat().st_mode), 'folder': stat.S_IMODE(key.parent.stat().st_mode),"
        " 'key': json.loads(key.read_text()), 'project': os.environ['GOOGLE_CLOUD_PROJECT'],"
        " 'cmdline': Path('/proc/self/cmdline').read_text(), 'environ': Path('/proc/self/environ').read_text()}\n"
        "Path(os.environ['FAKE_DRIVER_DIR'], 'seen.json').write_text(json.dumps(seen))\n"
        "print('a line', flush=True)\n"
        "Path(sys.argv[sys.argv.index('--result') + 1]).write_text(json.dumps({'ok': {'input_rows': 1, 'sink': ''}}))\n"
    )
    fake("")
    monkeypatch.setenv("AIRFLOW_CONN_MY_GOOGLE", json.dumps({"conn_type": "google_cloud_platform", "extra": extra}))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    lines: list[str] = []
    operator = micro_batch(storage_conn_id="my_google")
    monkeypatch.setattr(type(operator), "log", SimpleNamespace(info=lambda text, *more: lines.append(text % more)))
    result = run(operator)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert (seen["key"], seen["project"], seen["mode"], seen["folder"]) == (KEY, "mine", 0o600, 0o700)
    templated = [str(getattr(operator, name)) for name in type(operator).template_fields]
    environ = seen["environ"].replace(os.environ["AIRFLOW_CONN_MY_GOOGLE"], "")
    for told in (*lines, seen["cmdline"], environ, json.dumps(result), *templated):
        assert SECRET not in told
    assert not Path(seen["path"]).parent.exists()
    assert "GOOGLE_APPLICATION_CREDENTIALS" not in os.environ


def test_the_connection_key_is_set_only_while_checkpoint_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key = str(tmp_path / "key.json")
    extra = {"key_path": key}
    monkeypatch.setenv("AIRFLOW_CONN_MY_GOOGLE", json.dumps({"conn_type": "google_cloud_platform", "extra": extra}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "another")
    operator, asked = checkpoint(
        monkeypatch,
        lambda: asked.append(os.environ["GOOGLE_APPLICATION_CREDENTIALS"]) or record(),
        storage_conn_id="my_google",
    )
    run(operator, context(outlet_events=Events()))
    assert key in asked
    assert os.environ["GOOGLE_APPLICATION_CREDENTIALS"] == "another"


def test_a_misspelt_parameter_of_a_run_is_refused_before_a_driver_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Airflow would take `{"dryrun": true}` for a configuration of something else, and run for real."""
    params = ["from", "to", "reprocess", "replace_overlapping", "dry_run"]
    for conf, meant in (
        ({"dryrun": True}, "dry_run"),
        ({"Dry-Run": True}, "dry_run"),
        ({"form": "2024-01-01"}, "from"),
    ):
        asked = context(dag_run=SimpleNamespace(conf=conf), dag=SimpleNamespace(params=params))
        monkeypatch.setattr(driver_operator, "get_current_context", lambda asked=asked: asked)
        with pytest.raises(AirflowFailException, match=f"no parameter of this DAG\nDid you mean '{meant}'"):
            micro_batch().run_driver(Validate(**OF_CODE))
    for fine in ({}, {"from": "2024-01-01", "ticket": "OPS-1"}):
        driver_operator.check_conf(fine, params)


def test_a_connection_without_a_key_leaves_the_default_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_MY_GOOGLE", json.dumps({"conn_type": "google_cloud_platform"}))
    for conn_id in (None, "my_google"):
        with storage_credentials(conn_id) as environment:
            assert environment == {}


def amazon(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    """Declare the connection `my_amazon`."""
    monkeypatch.setenv("AIRFLOW_CONN_MY_AMAZON", json.dumps({"conn_type": "aws", **fields}))
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)


def test_the_keys_of_an_amazon_connection_are_in_a_private_file(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = {"region_name": "eu-west-1", "endpoint_url": "http://store", "aws_session_token": "a-token"}
    amazon(monkeypatch, login="AKIA", password=SECRET, extra=extra)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of the worker")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the worker")
    with storage_credentials("my_amazon") as environment:
        assert SECRET not in str(environment) and "a-token" not in str(environment)
        file = Path(environment["AWS_CONFIG_FILE"])
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        # The next task deletes it if this one is killed.
        assert file.parent.parent.name == f"cairn-work-{os.geteuid()}"
    assert not file.exists()
    with as_storage_identity("my_amazon"):
        session = boto3.session.Session()
        found = session.get_credentials().get_frozen_credentials()
        assert (found.access_key, found.secret_key, found.token) == ("AKIA", SECRET, "a-token")
        assert (session.region_name, session.client("s3").meta.endpoint_url) == ("eu-west-1", "http://store")
    assert os.environ["AWS_ACCESS_KEY_ID"] == "of the worker" and "AWS_CONFIG_FILE" not in os.environ


@pytest.mark.long("half a second", runs_in="ci")
def test_the_role_of_an_amazon_connection_is_taken_with_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    role = "arn:aws:iam::123456789012:role/state"
    amazon(monkeypatch, extra={"aws_access_key_id": "AKIA", "aws_secret_access_key": SECRET, "role_arn": role})
    with mock_aws(), as_storage_identity("my_amazon"):
        session = boto3.session.Session(region_name="us-east-1")
        assumed = role.replace(":iam:", ":sts:").replace(":role/", ":assumed-role/")
        assert session.client("sts").get_caller_identity()["Arn"].startswith(assumed)
        assert session.get_credentials().method == "assume-role"


def test_an_amazon_connection_without_keys_sets_at_most_profile_and_region(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = {"verify": None, "use_ssl": True}
    amazon(monkeypatch, extra={"profile_name": "state", "region_name": "eu-west-1", **defaults})
    wanted = {"AWS_PROFILE": "state", "AWS_DEFAULT_REGION": "eu-west-1", "AWS_REGION": "eu-west-1"}
    with storage_credentials("my_amazon") as environment:
        assert environment == wanted
    amazon(monkeypatch)
    with storage_credentials("my_amazon") as environment:
        assert environment == {}


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"login": "acc", "password": SECRET}, {"AZURE_STORAGE_ACCOUNT": "acc", "AZURE_STORAGE_KEY": SECRET}),
        ({"login": "acc", "extra": {"sas_token": SECRET}}, {"AZURE_STORAGE_ACCOUNT": "acc", "AZURE_STORAGE_SAS_TOKEN": SECRET}),
        ({"extra": {"connection_string": SECRET}}, {"AZURE_STORAGE_CONNECTION_STRING": SECRET}),
        (
            {"host": "https://acc.blob.core.windows.net", "login": "app", "password": SECRET, "extra": {"tenant_id": "t"}},
            {
                "AZURE_STORAGE_ACCOUNT": "acc", "AZURE_TENANT_ID": "t", "AZURE_CLIENT_ID": "app",
                "AZURE_CLIENT_SECRET": SECRET,
            },
        ),
        (
            {"host": "acc.blob.core.windows.net", "extra": {"managed_identity_client_id": "m"}},
            {"AZURE_STORAGE_ACCOUNT": "acc", "AZURE_CLIENT_ID": "m"},
        ),
    ],
)  # fmt: skip
def test_the_login_of_a_microsoft_connection_is_in_a_private_file(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], wanted: dict[str, str]
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_MY_MICROSOFT", json.dumps({"conn_type": "wasb", **fields}))
    with storage_credentials("my_microsoft") as environment:
        file = Path(environment.pop("CAIRN_AZURE_LOGIN"))
        assert json.loads(file.read_text()) == wanted and environment == {}
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert not file.exists()


@pytest.mark.parametrize("kind", ["aws", "wasb", "google_cloud_platform"])
def test_airflow_masks_the_secret_of_a_storage_connection(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    given = {"conn_type": kind, "login": "a", "password": SECRET, "extra": {"keyfile_dict": KEY}}
    monkeypatch.setenv("AIRFLOW_CONN_MINE", json.dumps(given))
    masked: list[str] = []
    monkeypatch.setattr("cairn_operators.storage_connection.mask_secret", masked.append)
    with storage_credentials("mine"):
        assert masked == [SECRET]


GOOGLE_IS_UNUSABLE: list[tuple[dict[str, Any], str]] = [
    ({"keyfile_dict": f"no json {SECRET}"}, "keyfile_dict is not the JSON of a key file"),
    ({"keyfile_dict": f'["{SECRET}"]'}, "keyfile_dict is not the JSON of a key file"),
    ({"key_secret_name": "x"}, "key_secret_name, which Cairn does not support. Give key_path or keyfile_dict"),
    ({"impersonation_chain": "x"}, "impersonation_chain"),
]
NOT_OURS = {"verify": False, "use_ssl": True, "config_kwargs": {"a": 1}}


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        *(("google_cloud_platform", {"extra": extra}, says) for extra, says in GOOGLE_IS_UNUSABLE),
        ("aws", {"password": SECRET}, "has one key of two: give an access key"),
        ("aws", {"extra": {"role_arn": "arn"}}, "role_arn but no keys"),
        ("aws", {"extra": NOT_OURS}, "has config_kwargs, verify, which Cairn does not support. Give login"),
        ("aws", {"login": "A", "password": f"{SECRET}\nrole_arn = x"}, "a line break in a key or in role_arn"),
        ("wasb", {}, "names no account: give its name as login"),
        ("wasb", {"host": "acc.blob.core.usgovcloudapi.net"}, "Leave the host out, and give a root that names it"),
        ("wasb", {"login": "acc", "extra": {"proxies": SECRET}}, "proxies, which Cairn does not support. Give login"),
        ("ftp", {}, "has the type 'ftp'; storage_conn_id takes a connection of type google_cloud_platform or aws or"),
    ],
)
def test_an_unusable_storage_connection_is_refused_without_its_keys_in_the_error(
    monkeypatch: pytest.MonkeyPatch, kind: str, fields: dict[str, Any], says: str
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_MINE", json.dumps({"conn_type": kind, **fields}))
    with pytest.raises(AirflowFailException, match=says) as raised, storage_credentials("mine"):
        pass
    assert SECRET not in str(raised.value)
