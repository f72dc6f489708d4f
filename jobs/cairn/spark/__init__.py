"""Sessions with Spark."""
