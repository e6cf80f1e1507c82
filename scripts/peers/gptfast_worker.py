"""Runs gptfast, compiled, on the file."""

from __future__ import annotations

from collections.abc import Sequence

from peers.protocol import LoadRequest, PeerFacts, Run, serve


class Gptfast:
    """See `Peer`."""

    def __init__(self, request: LoadRequest) -> None:
        import gptfast

        self._session = gptfast.load(
            request.checkpoint, device="cpu", dtype=request.dtype, compile=True, threads=request.threads
        )
        runner = self._session.runner
        runner.warm_up(1)  # only then is it known whether this machine can compile
        self.facts = PeerFacts(
            version=gptfast.__version__,
            settings=f"{self._session.dtype}, {'compiled' if runner.is_compiled else 'eager'}",
            dtype=self._session.dtype,
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
