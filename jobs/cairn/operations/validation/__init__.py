"""Validate a checkpoint: its files, the restored state, and the expectations that the pipeline declares."""
