"""What a run of `generate` measured, for people and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gptfast.memory import get_peak_memory

if TYPE_CHECKING:
    from gptfast.generation import GenerationResult
    from gptfast.session import Session
    from gptfast.speculation.controller import SpeculationStatistics
    from gptfast.speculation.speculator import Speculator


@dataclass(frozen=True)
class RunReport:
    """The figures of one run: every batch of samples that was decoded, after one load and one warm-up.

    Prefill and decode rates are totals over the batches; loading, compiling and detokenizing are outside them.
    """

    session: Session
    results: Sequence[GenerationResult]
    import_s: float
    seed: int

    @property
    def device(self) -> str:
        """The kind of device that ran."""
        return self.session.runner.device.type

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after each row's first, over the time of the steps that made them."""
        return self._per_decode_s(sum(max(0, result.new_tokens - 1) for result in self.results))

    @property
    def bandwidth_gb_per_s(self) -> float:
        """Bytes of weights read per second while decoding, in GB = 1e9; a batch reads them once per step.

        A draft model's are read for every token that it proposes.
        """
        steps = sum(result.decode_steps / result.batch_size for result in self.results)
        read_bytes = steps * self.session.weight_bytes_per_token
        if self.session.speculator is not None:
            read_bytes += self.session.speculator.count_draft_bytes()
        return self._per_decode_s(read_bytes) / 1e9

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens computed, over the time of their steps; a batch shares one prefill."""
        seconds = sum(result.prefill_s / result.batch_size for result in self.results)
        return self.prefilled_tokens / seconds if seconds else 0.0

    @property
    def prefilled_tokens(self) -> float:
        """Prompt tokens that were computed and not reused."""
        return sum((result.prompt_tokens - result.reused_tokens) / result.batch_size for result in self.results)

    def _per_decode_s(self, count: float) -> float:
        seconds = sum(result.decode_s / result.batch_size for result in self.results)
        return count / seconds if seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """The documented fields; with several samples, the first one's text and all of them in `samples`."""
        first = self.results[0]
        fields = {
            "text": first.text,
            "token_ids": list(first.token_ids),
            "prompt_tokens": first.prompt_tokens,
            "new_tokens": first.new_tokens,
            "finish_reason": first.finish_reason,
            "import_s": self.import_s,
            "load_s": self.session.load_s,
            "compile_s": self.session.compile_s,
            "compile_kind": self.session.compile_kind,
            "ttft_s": first.ttft_s,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "weight_bytes_per_token": self.session.weight_bytes_per_token,
            "bandwidth_gb_per_s": self.bandwidth_gb_per_s,
            "peak_memory_bytes": get_peak_memory(self.session.runner.device),
            "device": self.device,
            "dtype": self.session.dtype,
            "weights": self.session.weights,
            "activations": self.session.activations,
            "kv_dtype": self.session.kv_dtype,
            "kernels": self.session.kernels,
            "step": self.session.step,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "seed": self.seed,
        }
        if self.session.speculator is not None:
            fields["speculation"] = {
                name: describe_speculation(statistics)
                for name, statistics in self.session.speculator.statistics.items()
            }
        if len(self.results) > 1:
            fields["samples"] = [
                {"text": r.text, "token_ids": list(r.token_ids), "finish_reason": r.finish_reason} for r in self.results
            ]
        return fields

    def to_text(self) -> str:
        """A few aligned lines."""
        from gptfast.bench.results import describe_precision

        session = self.session
        precision = describe_precision(session.dtype, session.weights, session.activations, session.kv_dtype)
        runs_on = f"{torch.get_num_threads()} threads" if self.device == "cpu" else f"{session.kernels} kernels"
        unit = "token" if session.speculator is None else "step"
        megabytes = session.weight_bytes_per_token / 1e6
        rows = [
            ("run", f"{self.device}, {precision}, {runs_on}, torch {torch.__version__}"),
            ("start", f"import {self.import_s:.2f} s, load {session.load_s:.2f} s, {self._describe_compile()}"),
        ]
        if self.results:
            first = self.results[0]
            new_tokens = sum(result.new_tokens for result in self.results)
            ends = ", ".join(dict.fromkeys(result.finish_reason for result in self.results))
            rows += [
                (
                    "prefill",
                    f"{self.prefilled_tokens:.0f} tokens, {self.prefill_tokens_per_s:.1f} tokens/s, "
                    f"first token after {first.ttft_s:.2f} s",
                ),
                ("decode", f"{new_tokens} tokens, {self.decode_tokens_per_s:.1f} tokens/s, ended by {ends}"),
                ("weights", f"{megabytes:,.1f} MB read per {unit}, {self.bandwidth_gb_per_s:.1f} GB/s"),
            ]
        if session.speculator is not None:
            rows += [("draft", line) for line in list_speculation_lines(session.speculator)]
        if len(self.results) > 1:
            rows.append(("texts", f"{len(self.results)}, {session.runner.batch_size} at once"))
        rows.append(("memory", f"{get_peak_memory(session.runner.device) / 1e9:.2f} GB peak"))
        return "\n".join(f"{name:8} {value}" for name, value in rows)

    def _describe_compile(self) -> str:
        runner = self.session.runner
        if not runner.is_compiled:
            return "not compiled" if runner.compiling_was_asked else "not compiled (--compile is faster)"
        return f"compile {self.session.compile_s:.2f} s ({self.session.compile_kind})"


def describe_speculation(statistics: SpeculationStatistics) -> dict[str, Any]:
    """What a proposer did, as JSON; times are means in milliseconds."""
    return dataclasses.asdict(statistics) | {
        "proposed": statistics.proposed,
        "accepted": statistics.accepted,
        "acceptance": statistics.acceptance,
        "mean_accepted_length": statistics.mean_accepted_length,
        "draft_ms_per_token": statistics.draft_ms_per_token,
        "verify_ms": statistics.verify_ms,
        "plain_ms": statistics.plain_ms,
    }


def list_speculation_lines(speculator: Speculator) -> Iterator[str]:
    """Lines on every proposer, the first of them with its name."""
    for name, found in speculator.statistics.items():
        if not found.rounds:
            yield f"{name}: no rounds in {found.plain_steps} steps"
            continue
        by_position = " ".join(str(count) for count in found.accept_counts if count)
        yield (
            f"{name}: {found.accepted} of {found.proposed} tokens accepted ({found.acceptance:.0%})"
            + (f", by position {by_position}" if by_position else "")
        )
        times = f"{found.verify_ms:.2f} ms to verify and {found.draft_ms_per_token:.2f} to propose each token"
        yield f"rounds: {found.rounds} of {found.mean_accepted_length:.2f} tokens, {times}"
        yield f"without: {found.plain_steps} steps, {found.plain_ms:.2f} ms a token"
        break_even = found.break_even_acceptances[found.usual_k - 1]
        if break_even is not None:
            needed = f"break even at an acceptance of {break_even:.0%}" if break_even <= 1 else "pay at no acceptance"
            yield f"rounds of {found.usual_k} proposed {needed}"
