"""Spark sessions, errors of Spark, and schemas in Spark's DDL."""
