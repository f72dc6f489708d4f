"""Operations on a pipeline: run intervals, take and restore savepoints, validate, export, import a stream's state."""
