"""Pipelines that read other pipelines: which intervals are read, and which results are out of date."""
