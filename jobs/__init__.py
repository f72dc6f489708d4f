"""What runs on Spark: the runtime, and the pipelines themselves."""
