"""Keyed state, snapshots, restore, checkpoint lifecycle and storage, without Spark or Airflow.

The layers, lowest first: `values`, `formats`, `ports`, `adapters`, `state`, `shard`, `checkpoint`, `inspection`. A
layer imports only from the layers before it in this list.
"""
