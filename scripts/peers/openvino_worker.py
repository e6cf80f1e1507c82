"""Runs OpenVINO GenAI's pipeline on the file, which its own reader converts, with its own defaults.

The times are those at which the pipeline hands each token to a streamer, the choice of the token included.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from peers.protocol import LoadRequest, PeerFacts, Run, serve


class OpenvinoGenai:
    """See `Peer`."""

    def __init__(self, request: LoadRequest) -> None:
        import openvino_genai  # type: ignore[import-not-found, unused-ignore]

        self._pipeline = openvino_genai.LLMPipeline(request.checkpoint, "CPU", INFERENCE_NUM_THREADS=request.threads)
        self.facts = PeerFacts(
            version=openvino_genai.__version__,
            settings="weights as its GGUF reader converts them, defaults of OpenVINO",
        )

    def generate(self, prompt_ids: Sequence[int], new_tokens: int) -> Run:
        """See `Peer.generate`."""
        import numpy as np
        import openvino  # type: ignore[import-not-found, unused-ignore]

        config = self._pipeline.get_generation_config()
        config.max_new_tokens = new_tokens
        config.do_sample = False
        config.ignore_eos = True
        clock = make_clock()
        prompt = openvino.Tensor(np.array([prompt_ids], dtype=np.int64))
        start = time.perf_counter()
        result = self._pipeline.generate(prompt, config, clock)
        first, last = clock.times[0], clock.times[-1]
        own = result.perf_metrics
        return Run(
            list(result.tokens[0]),
            prefill_s=first - start,
            decode_s=last - first,
            own_prefill_s=own.get_ttft().mean / 1e3,
            own_decode_s=own.get_tpot().mean / 1e3 * (new_tokens - 1),
        )


def make_clock() -> Any:
    """A streamer that notes when each token comes."""
    import openvino_genai

    class Clock(openvino_genai.StreamerBase):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.times: list[float] = []

        def write(self, token: int | Sequence[int]) -> Any:
            count = 1 if isinstance(token, int) else len(token)
            self.times += [time.perf_counter()] * count
            return openvino_genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    return Clock()


if __name__ == "__main__":
    serve("openvino_genai", OpenvinoGenai)
