"""Validate a checkpoint: its files, the restored state, and the expectations of the pipeline's code."""
