"""Transport of user code and data from the driver to the workers."""
