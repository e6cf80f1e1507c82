"""Runs transformers' `generate` on the file: eagerly with the default cache, or compiled with the static one.

`generate` compiles the decoding step alone, so prefill is eager either way. The times are those at which it hands the
prompt and then each token to a streamer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.protocol import LoadRequest, PeerFacts, Run, serve


class Clock:
    """A streamer that notes what comes when; the first thing that comes is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.token_ids: list[int] = []

    def put(self, value: Any) -> None:
        """Called by `generate` with a tensor of ids."""
        self.times.append(time.perf_counter())
        self.token_ids += value.flatten().tolist()

    def end(self) -> None:
        """Called by `generate` when all is said."""


class Transformers:
    """See `Peer`."""

    def __init__(self, request: LoadRequest, *, compiles: bool) -> None:
        import torch
        import transformers

        torch.set_num_threads(request.threads)
        path = Path(request.checkpoint)
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=request.dtype
        )
        # Without an end-of-sequence token nothing but the length ends a text.
        self._model.generation_config.eos_token_id = None
        self._settings: dict[str, Any] = {}
        if compiles:
            compilation: Any = transformers.CompileConfig()
            compilation._compile_all_devices = True  # else it compiles on a GPU only
            self._settings = {"cache_implementation": "static", "compile_config": compilation}
        dtype = str(self._model.dtype).removeprefix("torch.")
        how = "static cache, decoding compiled" if compiles else "eager, default cache"
        self.facts = PeerFacts(version=transformers.__version__, settings=f"{dtype}, {how}", dtype=dtype)

    def generate(self, prompt_ids: Sequence[int], new_tokens: int) -> Run:
        """See `Peer.generate`."""
        import torch

        ids = torch.tensor([prompt_ids])
        clock = Clock()
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=clock,
            **self._settings,
        )
        start, first, *_ = clock.times
        return Run(
            clock.token_ids[len(prompt_ids) :],
            prefill_s=first - start,
            decode_s=clock.times[-1] - first,
        )


if __name__ == "__main__":
    serve("transformers", lambda request: Transformers(request, compiles=sys.argv[1:] == ["compiled"]))
