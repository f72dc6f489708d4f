"""Independent computations of what a pipeline must produce, for tests to compare with."""
