"""The code of a user on its way to the workers."""
