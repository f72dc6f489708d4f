"""What can be done with a pipeline: run an interval, take and restore savepoints, validate, export, move in from a stream."""
