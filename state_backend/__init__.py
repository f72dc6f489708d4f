"""Keyed state, snapshots, restore, checkpoint lifecycle and storage. Knows neither Spark nor Airflow.

The floors, each importing only from those above it: values, formats, ports, adapters, state, snapshot and restore,
checkpoint.
"""
