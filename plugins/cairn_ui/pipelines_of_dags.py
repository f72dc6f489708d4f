"""Find the pipelines of serialized DAGs and of the setting CAIRN_UI_PIPELINES. No user code is imported.

A task is recognised as Cairn's by its template fields. So tasks of subclasses of Cairn's operators are found too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from state_backend.values.frozen import frozen

_COMMITS = {"pipeline", "root", "attempt", "sink_of"}
_PROCESSES = {"pipeline", "root", "mode", "permissions"}
_SAVEPOINTS = {"checkpoint", "folder", "code"}
_RESTORES = {"pipeline", "root", "target", "fork_as"}
_NOT_SLUG = re.compile(r"[^A-Za-z0-9_.-]+")


@frozen
class PipelineRef:
    """A pipeline, and the DAG and tasks that run it."""

    name: str
    root: str
    # The DAG that commits the checkpoints; None if only the setting CAIRN_UI_PIPELINES names the pipeline.
    dag_id: str | None = None
    # Connection of type `google_cloud_platform`, `aws` or `wasb` for the root. None: the host's own identity.
    storage_conn_id: str | None = None
    # The `Pipeline`, as `module:NAME`; None if it is not known.
    code: str | None = None
    # Id of the DAG's task that processes intervals; None if the DAG has no such task.
    process: str | None = None
    # Id of the DAG's task that takes savepoints; None if the DAG has no such task.
    savepoint: str | None = None
    restore_dags: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The text that identifies the pipeline in URLs of pages: its name and a hash of DAG, root and name."""
        text = "\n".join((self.dag_id or "", self.root, self.name))
        slug = _NOT_SLUG.sub("-", self.name).strip("-.")[:40] or "pipeline"
        return f"{slug}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    def is_of(self, dag_id: str) -> bool:
        return dag_id == self.dag_id or dag_id in self.restore_dags

    @property
    def folder(self) -> str:
        return f"{self.root.rstrip('/')}/{self.name}"

    @property
    def unreadable(self) -> str | None:
        """The reason why the pages can't read the pipeline: its root or name is a Jinja template. None otherwise."""
        if "{{" in self.root or "{{" in self.name:
            return (
                f"The DAG gives the pipeline's folder by a template ({self.folder}), which Airflow renders only when a task runs.\n"
                "To see this pipeline here, add the URL of its folder to CAIRN_UI_PIPELINES."
            )
        return None


def pipelines_of(dag_id: str, serialized: Mapping[str, Any]) -> list[PipelineRef]:
    """Return the pipelines that a serialized DAG commits, in the order of its tasks."""
    operators = [(o, set(o.get("template_fields", ()))) for o in _operators(serialized)]
    found = []
    for operator, fields in operators:
        if not fields >= _COMMITS:
            continue
        ref = PipelineRef(
            name=_text(operator, "pipeline"),
            root=_text(operator, "root"),
            dag_id=dag_id,
            storage_conn_id=operator.get("storage_conn_id") or None,
        )
        for other, theirs in operators:
            if theirs >= _PROCESSES and _text(other, "pipeline") == ref.name:
                ref = replace(ref, process=str(other["task_id"]), code=_text(other, "code") or None)
        for other, theirs in operators:
            if theirs >= _SAVEPOINTS and ref.code in (None, _text(other, "code")):
                ref = replace(ref, savepoint=str(other["task_id"]))
        found.append(ref)
    return found


def parse_configured(setting: str) -> list[PipelineRef]:
    found = []
    for word in setting.split():
        conn, at, url = word.rpartition("@") if "@" in word.partition("://")[0] else ("", "", word)
        root, _, name = url.rstrip("/").rpartition("/")
        found.append(PipelineRef(name=name, root=root, storage_conn_id=conn if at else None))
    return found


def all_pipelines(dags: Iterable[tuple[str, Mapping[str, Any]]], setting: str) -> list[PipelineRef]:
    """Return every pipeline of a DAG or of the setting CAIRN_UI_PIPELINES, each once, ordered by name.

    A pipeline belongs to a DAG if a task of the DAG commits it. If the setting lists such a pipeline too, the result
    has it only with the DAG. So only users who may read the DAG may read the pipeline.
    """
    every = list(dags)
    found = [ref for dag_id, data in every for ref in pipelines_of(dag_id, data)]
    owned = {ref.folder for ref in found}
    for extra in parse_configured(setting):
        templated = [n for n, ref in enumerate(found) if ref.unreadable and ref.name == extra.name]
        for n in templated:
            found[n] = replace(
                found[n], root=extra.root, storage_conn_id=extra.storage_conn_id or found[n].storage_conn_id
            )
        if not templated and extra.folder not in owned:
            found.append(extra)
    restores = {
        (f"{_text(operator, 'root').rstrip('/')}/{_text(operator, 'pipeline')}", dag_id)
        for dag_id, data in every
        for operator in _operators(data)
        if {*operator.get("template_fields", ())} >= _RESTORES
    }
    named = (
        replace(ref, restore_dags=tuple(sorted(dag_id for folder, dag_id in restores if folder == ref.folder)))
        for ref in found
    )
    return sorted(named, key=lambda ref: (ref.name, ref.dag_id or "", ref.root))


def _operators(serialized: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [task.get("__var", task) for task in serialized.get("dag", {}).get("tasks", [])]


def _text(operator: Mapping[str, Any], name: str) -> str:
    value = operator.get(name)
    return value if isinstance(value, str) else ""
