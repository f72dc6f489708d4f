"""The checkpoint lifecycle: read the log, decide commits and retention, and create and delete the files."""
