"""Spark data sources that read states and outputs."""
