"""Runs the whole: the demo, and the servers that it and the integration tests start."""
