"""The `cairn` command."""
