"""The DAGs of the pages' tests: they are parsed and never run. An Airflow DAG file."""

import os
from datetime import UTC, datetime

from cairn_operators import restore_pipeline, stateful_pipeline

ROOT = f"file://{os.environ['CAIRN_SHOWN']}"
START = datetime(2024, 1, 1, tzinfo=UTC)


def _dag(dag_id, name, root=ROOT):
    return stateful_pipeline(
        dag_id,
        f"pipelines.{dag_id}:{dag_id.upper()}",
        root,
        pipeline=name,
        schedule="@daily",
        start_date=START,
        end_date=datetime(2024, 1, 31, tzinfo=UTC),
        validate={"docs": os.environ["CAIRN_DOCS"]} if "CAIRN_DOCS" in os.environ else False,
        savepoint={"folder": f"{ROOT}/savepoints"},
    )


rides = _dag("rides", "rides")
rides_restore = restore_pipeline("rides_restore", "pipelines.rides:RIDES", ROOT, pipeline="rides")
clicks = _dag("clicks", "clicks")
secret = _dag("secret", "secret")
hostile = _dag("hostile", "<script>pwned=1<!--")
silent = _dag("silent", "silent", "gs://no-answer/state")
templated = _dag("templated", "templated", "{{ var.value.root }}")
