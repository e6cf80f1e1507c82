"""gptfast: latency-first decoding of Llama-family models in native PyTorch.

session = gptfast.load(compile=True)
for piece in gptfast.stream(session, "The history of the Roman Empire begins with"):
    print(piece, end="")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gptfast.chat import Message
    from gptfast.config import SamplingConfig
    from gptfast.generation import GenerationResult, Stream, generate, stream
    from gptfast.session import Session, load

__version__ = "0.1.0"
__all__ = ["GenerationResult", "Message", "SamplingConfig", "Session", "Stream", "generate", "load", "stream"]

_HOMES = {
    "Message": "chat",
    "SamplingConfig": "config",
    "GenerationResult": "generation",
    "Stream": "generation",
    "generate": "generation",
    "stream": "generation",
    "Session": "session",
    "load": "session",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that `gptfast --help` does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'gptfast' has no attribute {name!r}")
    return getattr(importlib.import_module(f"gptfast.{_HOMES[name]}"), name)
