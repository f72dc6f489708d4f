"""Send the user's code and values from the driver to Spark's workers."""
