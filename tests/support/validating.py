"""Validate a checkpoint, an attempt or a savepoint as ``cairn validate`` does, without loading code by its name."""

from __future__ import annotations

from typing import Any

from cairn.operations.validation import validate_checkpoint as validate
from cairn.operations.validation.validate_checkpoint import Spark, Validation
from cairn.pipeline import Pipeline
from state_backend.values.operation_parameters import Validate
from state_backend.values.records import Record


def validate_checkpoint(spark: Spark | None, pipeline: Pipeline, root: str, record: Record, **more: Any) -> Validation:
    return validate.validate_checkpoint(spark, pipeline, record, Validate(root=root, code="", **more))


def validate_attempt(spark: Spark | None, pipeline: Pipeline, root: str, attempt: str, **more: Any) -> Validation:
    return validate.validate_attempt(spark, pipeline, Validate(root=root, code="", attempt=attempt, **more))


def validate_savepoint(spark: Spark | None, pipeline: Pipeline, folder: str, **more: Any) -> Validation:
    return validate.validate_savepoint(spark, pipeline, Validate(root="", code="", savepoint=folder, **more))
