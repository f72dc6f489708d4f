"""Plan and process intervals: one, a range, or what a pipeline needs to be healthy again."""
