"""Looking into checkpoints and savepoints without changing them."""
