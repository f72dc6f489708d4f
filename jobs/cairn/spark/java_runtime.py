"""Check for the Java runtime that a Spark driver on this machine needs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from state_backend.values.errors import UsageError


def is_clone() -> bool:
    """Return True if this code runs in a clone of the repository: only a clone has the folder `.ci/java`."""
    return (Path(__file__).parents[3] / ".ci" / "java").exists()


def require_java(user: str) -> None:
    """Raise `UsageError` if the PATH has no `java` and JAVA_HOME is not set."""
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        raise UsageError(
            f"{user} needs a Java 17+ runtime, but the PATH has no java\n"
            + (
                "Run: make java"
                if is_clone()
                else "Install OpenJDK 17 or later (the package openjdk-17-jre-headless of Debian and Ubuntu), or set JAVA_HOME"
            )
        )
