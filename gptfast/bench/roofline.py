"""What a decode step must read, and the time that this takes at the measured bandwidth.

Counted are, once each: the weights with their scales as they are stored (of an embedding that is not the head too,
one row), and the keys and values of every token attended to, the step's own included. Activations, logits and what is
written are not counted: they are small and stay in caches.
"""

from __future__ import annotations

from gptfast.runner import Runner


def count_kv_bytes(runner: Runner, depth: int, steps: int) -> int:
    """Bytes of keys and values that the middle one of `steps` steps reads when the first finds `depth` tokens cached.

    A sliding window bounds what is attended to.
    """
    attended = depth + (steps + 1) // 2
    window = runner.model.config.sliding_window
    if window is not None:
        attended = min(attended, window)
    return runner.batch_size * attended * runner.kv_bytes_per_token


def compute_floor_ms(bytes_per_step: int, gb_per_s: float) -> float:
    """Milliseconds that reading the bytes takes."""
    return bytes_per_step / gb_per_s / 1e6
