"""Find the DAGs and assets that wait for a pipeline's asset, directly or through other DAGs."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from state_backend.values.frozen import frozen


@frozen
class WaitingDag:
    dag_id: str
    waits_for: tuple[str, ...]
    writes: tuple[str, ...]


def waiting_dags(
    asset: str, scheduled_by: Mapping[str, Collection[str]], writes: Mapping[str, Collection[str]], own_dag: str | None
) -> tuple[WaitingDag, ...]:
    """Return the DAGs that wait for an asset, directly or through assets of other waiting DAGs, but not `own_dag`.

    `scheduled_by`: The ids of the DAGs that each asset schedules. `writes`: The assets that each DAG writes. The DAGs
    with the fewest assets in between come first.
    """
    late, waiting, reached = {asset}, dict[str, set[str]](), [asset]
    for uri in reached:  # The loop appends to this list, and also visits what it has appended.
        for dag_id in sorted(scheduled_by.get(uri, ())):
            if dag_id == own_dag:
                continue
            waiting.setdefault(dag_id, set()).add(uri)
            for written in sorted(writes.get(dag_id, ())):
                if written not in late:
                    late.add(written)
                    reached.append(written)
    return tuple(
        WaitingDag(dag_id=dag_id, waits_for=tuple(sorted(uris)), writes=tuple(sorted(writes.get(dag_id, ()))))
        for dag_id, uris in waiting.items()
    )
