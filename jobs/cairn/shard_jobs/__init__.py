"""Jobs that run once on each shard of a pipeline, and the code that sends them to the workers."""
