"""The lineage of a checkpoint in the classes of OpenLineage's client.

Only Airflow's OpenLineage provider needs this module: operators import it when the provider asks them. So Cairn runs
without the provider.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import attr
from airflow.providers.openlineage.extractors import OperatorLineage
from openlineage.client.event_v2 import InputDataset, OutputDataset
from openlineage.client.facet_v2 import (
    DatasetFacet,
    RunFacet,
    dataset_version_dataset,
    datasource_dataset,
    output_statistics_output_dataset,
    schema_dataset,
)

from cairn_operators.airflow_versions import conf
from cairn_operators.lineage_datasets import Dataset, Field, all_inputs_of, checkpoint_facet, outputs_of
from state_backend.values.records import Record
from state_backend.values.release import RELEASE

# `FACET` is the facet's key in a run. `SCHEMA` is the path of its JSON schema, which Airflow's API server serves to
# everybody. If the facet changes, add a new file with a new number.
FACET = "cairn_checkpoint"
SCHEMA = "/cairn/checkpoints/static/CairnCheckpointRunFacet-1-0-0.json"
PRODUCER = f"pkg:generic/cairn-state@{quote(RELEASE)}"
_OURS: dict[str, Any] = {"producer": PRODUCER}


@attr.define
class CairnCheckpointRunFacet(RunFacet):  # type: ignore[misc]  # OpenLineage is not type-checked here
    """The checkpoint that a task committed. `CairnCheckpointRunFacet-1-0-0.json` describes the attributes."""

    pipeline: str
    checkpoint: int
    baseCheckpoint: int | None
    attempt: str
    stateDigest: str
    intervalStart: str
    intervalEnd: str

    @staticmethod
    def _get_schema() -> str:
        base = conf.get("api", "base_url", fallback="") or "http://localhost:8080"
        return f"{base.rstrip('/')}{SCHEMA}#/$defs/CairnCheckpointRunFacet"


def lineage_of(record: Record, pipeline_url: str, tables: Sequence[tuple[str, bool]] = ()) -> OperatorLineage:
    return OperatorLineage(
        inputs=[
            InputDataset(namespace=d.namespace, name=d.name, facets=_facets(d))
            for d in all_inputs_of(record.content, pipeline_url)
        ],
        outputs=[
            OutputDataset(
                namespace=d.namespace,
                name=d.name,
                facets=_facets(d),
                outputFacets={
                    "outputStatistics": output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(
                        rowCount=d.rows, size=d.size_bytes, fileCount=d.files, **_OURS
                    )
                },
            )
            for d in outputs_of(record, pipeline_url, tables)
        ],
        run_facets={FACET: CairnCheckpointRunFacet(**checkpoint_facet(record), **_OURS)},
    )


def _facets(dataset: Dataset) -> dict[str, DatasetFacet]:
    uri = dataset.namespace if "://" in dataset.namespace else None
    source = datasource_dataset.DatasourceDatasetFacet(name=dataset.namespace, uri=uri, **_OURS)
    facets: dict[str, Any] = {"dataSource": source}
    if dataset.version is not None:
        facets["version"] = dataset_version_dataset.DatasetVersionDatasetFacet(dataset.version, **_OURS)
    if dataset.fields is not None:
        facets["schema"] = schema_dataset.SchemaDatasetFacet(
            fields=[_field(field) for field in dataset.fields], **_OURS
        )
    return facets


def _field(field: Field) -> schema_dataset.SchemaDatasetFacetFields:
    parts = [_field(part) for part in field.fields]
    return schema_dataset.SchemaDatasetFacetFields(name=field.name, type=field.type, fields=parts)
