"""Runs llama.cpp through the low-level API of llama-cpp-python: its own defaults, a greedy loop around `llama_decode`.

A step is counted from the call of `llama_decode` to the choice of the token in its logits by numpy. llama.cpp's own
clock stops when the logits are ready, so it leaves out that choice and the call through ctypes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from peers.protocol import LoadRequest, PeerFacts, Run, serve


class LlamaCpp:
    """See `Peer`."""

    def __init__(self, request: LoadRequest) -> None:
        import llama_cpp  # type: ignore[import-not-found, unused-ignore]

        self._api: Any = llama_cpp
        llama_cpp.llama_backend_init()
        model_parameters = llama_cpp.llama_model_default_params()
        model_parameters.n_gpu_layers = 0
        model = llama_cpp.llama_model_load_from_file(request.checkpoint.encode(), model_parameters)
        if not model:
            raise RuntimeError(f"llama.cpp cannot load {request.checkpoint}")
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = request.context
        parameters.n_batch = max(parameters.n_batch, request.context)  # the longest prompt in one call
        parameters.n_threads = parameters.n_threads_batch = request.threads
        parameters.no_perf = False  # its own clock runs
        self._context = llama_cpp.llama_init_from_model(model, parameters)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context of {request.context} tokens")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.facts = PeerFacts(
            version=llama_cpp.__version__,
            settings="weights as in the file, defaults of llama.cpp",
        )

    def generate(self, prompt_ids: Sequence[int], new_tokens: int) -> Run:
        """See `Peer.generate`."""
        api, context = self._api, self._context
        api.llama_memory_clear(api.llama_get_memory(context), True)
        api.llama_perf_context_reset(context)
        start = time.perf_counter()
        token_ids = [self._choose_next(prompt_ids)]
        first = time.perf_counter()
        while len(token_ids) < new_tokens:
            token_ids.append(self._choose_next(token_ids[-1:]))
        last = time.perf_counter()
        own = api.llama_perf_context(context)
        return Run(
            token_ids,
            prefill_s=first - start,
            decode_s=last - first,
            own_prefill_s=own.t_p_eval_ms / 1e3 or None,  # it counts a prompt of one token as a decoding step
            own_decode_s=own.t_eval_ms / 1e3,
        )

    def _choose_next(self, token_ids: Sequence[int]) -> int:
        """Append the tokens to the cache; the likeliest next one."""
        import numpy as np

        api = self._api
        tokens = (api.llama_token * len(token_ids))(*token_ids)
        if code := api.llama_decode(self._context, api.llama_batch_get_one(tokens, len(token_ids))):
            raise RuntimeError(f"llama_decode failed with code {code}")
        logits = api.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())


if __name__ == "__main__":
    serve("llama_cpp", LlamaCpp)
