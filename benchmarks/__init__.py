"""Benchmarks of Cairn, alone and beside other engines on the same machine."""
