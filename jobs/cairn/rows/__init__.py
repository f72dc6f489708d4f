"""Input rows on their way to the state: their shard, their order, and the batches that a shard reads."""
