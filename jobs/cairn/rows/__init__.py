"""Bring input rows to the shards: place them in shards, sort them, and read them in batches."""
