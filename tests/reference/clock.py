"""A clock that only moves when it is told to."""

from __future__ import annotations


class FakeClock:
    """Seconds since it was made; `tick` of them pass at every reading."""

    def __init__(self, tick: float = 0.0) -> None:
        self.seconds = 0.0
        self._tick = tick

    def __call__(self) -> float:
        self.seconds += self._tick
        return self.seconds

    def pass_by(self, seconds: float) -> None:
        """Let time pass."""
        self.seconds += seconds
