"""One shard's files: restoring them, capturing them, and what says which there are."""
