"""Read-only views of checkpoints, savepoints and logs."""
