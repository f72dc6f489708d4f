"""Plain values that all other packages share. Nothing here uses a disk, a clock or a client."""
