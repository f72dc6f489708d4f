"""docs/kubernetes: what the files say to each other, to Cairn and to docs/clusters.md. Their schemas are not here."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from cairn.spark.session import master_conf
from cairn_operators.spark_location import spark_url
from tests.support.layout import REPOSITORY

FOLDER = REPOSITORY / "docs/kubernetes"


def values() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / "airflow-values.yaml").read_text())
    return found


def environment() -> dict[str, dict[str, Any]]:
    return {variable["name"]: variable for variable in yaml.safe_load(values()["extraEnv"])}


def conf() -> dict[str, str]:
    connection = json.loads(environment()["AIRFLOW_CONN_CAIRN_SPARK"]["value"])
    assert spark_url(connection["conn_type"], connection["host"], None) == "k8s://https://kubernetes.default.svc"
    found: dict[str, str] = connection["extra"]["conf"]
    assert all(isinstance(value, str) for value in found.values())
    return found


def test_the_memory_of_an_executor_is_that_of_the_docs() -> None:
    template = yaml.safe_load((FOLDER / "executor-pod-template.yaml").read_text())
    (shm_mib,) = (
        int(volume["emptyDir"]["sizeLimit"].removesuffix("Mi"))
        for volume in template["spec"]["volumes"]
        if volume["emptyDir"].get("medium") == "Memory"
    )
    page = (REPOSITORY / "docs/clusters.md").read_text()
    jvm_mib, cores, worker_mib, example_mib = map(
        int, re.findall(r"(\d+) MiB for the JVM, .*With (\d) cores and (\d+) MiB, this is `(\d+)m`", page)[0]
    )
    assert jvm_mib + cores * worker_mib == example_mib
    assert f"| {worker_mib} MiB; 892 MiB" in (REPOSITORY / "docs/cost.md").read_text()
    wanted = jvm_mib + worker_mib * int(conf()["spark.executor.cores"]) + shm_mib
    assert conf()["spark.executor.memoryOverhead"] == f"{wanted}m"


def test_names_in_the_kubernetes_files_match_each_other() -> None:
    template = yaml.safe_load((FOLDER / "executor-pod-template.yaml").read_text())
    accounts = {
        part["metadata"]["name"]
        for part in yaml.safe_load_all((FOLDER / "rbac.yaml").read_text())
        if part["kind"] == "ServiceAccount"
    }
    authenticate = "spark.kubernetes.authenticate"
    driver, executor = (
        conf()[f"{authenticate}.serviceAccountName"],
        conf()[f"{authenticate}.executor.serviceAccountName"],
    )
    assert {driver, executor} == accounts and template["spec"]["serviceAccountName"] == executor
    worker = values()["workers"]["celery"]
    assert worker["serviceAccount"]["name"] == driver
    (mount,) = worker["extraVolumeMounts"]
    folder, _, file = conf()["spark.kubernetes.executor.podTemplateFile"].rpartition("/")
    (volume,) = worker["extraVolumes"]
    config_map = values()["extraConfigMaps"][volume["configMap"]["name"]]
    assert mount["mountPath"] == folder and file in yaml.safe_load(config_map["data"])
    mounts = {m["mountPath"] for m in template["spec"]["containers"][0]["volumeMounts"]}
    assert {conf()["spark.executorEnv.TMPDIR"], "/dev/shm"} == mounts
    # Spark replaces ${env:NAME} by a variable of the worker.
    assert set(re.findall(r"\$\{env:(\w+)\}", json.dumps(conf()))) <= environment().keys()
    stages = re.findall(r"^FROM .* AS (\w+)$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    images = [values()["images"]["airflow"]["repository"], conf()["spark.kubernetes.container.image"].partition(":")[0]]
    assert [image.rpartition("-")[2] for image in images] == stages


def test_clusters_md_names_the_settings_and_ports_of_the_kubernetes_files() -> None:
    page = (REPOSITORY / "docs/clusters.md").read_text()
    for name in ("driver.port", "driver.blockManager.port", "blockManager.port"):
        first = int(conf()[f"spark.{name}"])
        assert f"{first} to {first + int(conf()['spark.port.maxRetries'])}" in page and f"`spark.{name}`" in page
    assert not conf().keys() & master_conf("k8s://https://host").keys()
    timeout = values()["config"]["workers"]["execution_api_timeout"]
    assert f"execution_api_timeout = {timeout}" in page
    assert f"execution_api_timeout = {timeout}" in (REPOSITORY / "airflow.cfg").read_text()
