"""Runs gptfast, compiled, on the file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from peers.protocol import LoadRequest, PeerFacts, Run, serve

if TYPE_CHECKING:
    from gptfast.loading import Weights


class Gptfast:
    """See `Peer`."""

    def __init__(self, request: LoadRequest) -> None:
        import gptfast
        from gptfast.bench.results import describe_precision

        self._session = session = gptfast.load(
            request.checkpoint,
            device="cpu",
            dtype=request.dtype,
            weights=cast("Weights", request.weights),
            activations=request.activations,
            compile=True,
            threads=request.threads,
        )
        runner = session.runner
        runner.warm_up(1)  # only then is it known whether this machine can compile
        precision = describe_precision(session.dtype, session.weights, session.activations, session.kv_dtype)
        self.facts = PeerFacts(
            version=gptfast.__version__,
            settings=f"{precision}, {'compiled' if runner.is_compiled else 'eager'}",
            dtype=session.dtype,
        )

    def generate(self, prompt_ids: Sequence[int], new_tokens: int) -> Run:
        """See `Peer.generate`."""
        from gptfast import SamplingConfig, generate

        [result] = generate(
            self._session, prompt_ids, max_new_tokens=new_tokens, sampling=SamplingConfig(), ignore_eos=True
        )
        return Run(list(result.token_ids), prefill_s=result.prefill_s, decode_s=result.decode_s)


if __name__ == "__main__":
    serve("gptfast", Gptfast)
