"""Jobs that run once on each shard of a pipeline, and how they travel there."""
