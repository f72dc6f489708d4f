"""Trials of changed code."""
