"""The checkpoint lifecycle: what the log says, what may be committed, what is kept, and the shell that does it."""
