"""Typed access to a checkpoint's JSON metadata, where anybody may have written anything."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from gptfast.errors import CheckpointError

LARGEST_SIZE = 2**31 - 1
LARGEST_NUMBER = sys.float_info.max


class Fields:
    """The fields of one JSON object; `source` names it in errors.

    A field that is absent or null has the default; one of another kind raises CheckpointError, as does one that is
    missing and has no default.
    """

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.raw = raw
        self.source = source

    def get_size(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 on."""
        value = self._get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_SIZE:
            raise self.refuse(key, "a whole number from 1 on")
        return value

    def get_number(self, key: str, default: float | None = None) -> float:
        """A finite number above or equal to 0."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST_NUMBER:
            raise self.refuse(key, "a number from 0 on")
        return float(value)

    def get_positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.get_number(key, default)
        if value == 0:
            raise self.refuse(key, "a number above 0")
        return value

    def get_flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def get_fields(self, key: str) -> Fields | None:
        """An object within this one; None if it is absent, null or empty."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(key, "an object")
        return Fields(value, f"{key} of {self.source}") if value else None

    def get_numbers(self, key: str) -> list[float]:
        """A list of positive numbers."""
        value = self.raw.get(key)
        if not isinstance(value, list) or not all(
            isinstance(item, int | float) and 0 < item <= LARGEST_NUMBER for item in value
        ):
            raise self.refuse(key, "a list of numbers")
        return value

    def get_ids(self, key: str) -> list[int]:
        """One token id or a list of them; empty if absent or null."""
        value = self.raw.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
            raise self.refuse(key, "a token id or a list of them")
        return ids

    def refuse(self, key: str, needed: str) -> CheckpointError:
        """The error for a field that is not what is needed."""
        found = f"has {key} = {self.raw[key]!r:.80}" if self.raw.get(key) is not None else f"lacks {key}"
        return CheckpointError(f"{self.source} {found} where {needed} is needed; correct it or download it again")

    def _get(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        return default if value is None else value
