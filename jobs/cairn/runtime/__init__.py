"""How an interval runs on Spark: routing to shards, the shard task, and the data sources."""
