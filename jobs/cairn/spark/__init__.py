"""Open Spark sessions, explain Spark's errors, and parse schemas in Spark's DDL."""
