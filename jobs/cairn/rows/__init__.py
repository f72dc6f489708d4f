"""Rows on their way to the state: which shard gets them, in which order, and how they are read."""
