"""The decorator of Cairn's values: dataclasses with slots that never change, and are made with named arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass with slots, whose constructor takes keyword arguments only."""
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)
