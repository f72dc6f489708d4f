"""Take and restore savepoints, and move state to and from Spark's streaming checkpoints."""
