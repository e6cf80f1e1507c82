"""The runs: every peer once, then every peer again, so that a machine whose speed drifts slows all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from peers.process import KINDS, PeerFailedError, PeerMissingError, PeerProcess
from peers.protocol import LoadRequest, PeerFacts, Run

PAUSE_S = 0.3
"""Before every run, as thread pools spin on for a while after their last task: Intel's OpenMP for 0.2 s, those of the
peers for 0.01 s or less (2 cores of an AMD EPYC, 2026-11-30). An idle worker then uses no CPU at all."""

OnMessage = Callable[[str], None]


@dataclass(frozen=True)
class Workload:
    """What every peer is to do alike.

    Attributes:
        name: for messages.
        prompts: token ids for the run that is not counted, then for each that is. Those of a prefill differ: some
            peers remember a prompt and would not compute it a second time.
        new_tokens: to generate after each of them; 1 where prefill is what is measured.
    """

    name: str
    prompts: Sequence[Sequence[int]]
    new_tokens: int

    @property
    def decodes(self) -> bool:
        """Whether decoding is what is measured."""
        return self.new_tokens > 1

    def get_tokens_per_s(self, run: Run) -> float:
        """New tokens after the first, which prefill yields, per second of decoding; else prompt tokens per second."""
        return self._divide(run.decode_s if self.decodes else run.prefill_s)

    def get_own_tokens_per_s(self, run: Run) -> float | None:
        """The same by the peer's own clock; None if it has none."""
        seconds = run.own_decode_s if self.decodes else run.own_prefill_s
        return None if seconds is None else self._divide(seconds)

    def _divide(self, seconds: float) -> float:
        return (self.new_tokens - 1 if self.decodes else len(self.prompts[0])) / seconds


@dataclass
class PeerRecord:
    """What became of a peer.

    Attributes:
        status: `missing` if it is not installed; `failed` if it ended before all was measured.
        reason: why it is missing or failed.
        facts: None until it has loaded.
        runs: by workload, and only of those in which it did not fail.
    """

    status: Literal["measured", "missing", "failed"] = "measured"
    reason: str | None = None
    facts: PeerFacts | None = None
    runs: dict[str, list[Run]] = field(default_factory=dict)

    def load(self, name: str, process: PeerProcess, request: LoadRequest) -> None:
        """Load the peer and note what comes of it."""
        try:
            self.facts = process.load(request)
        except PeerMissingError:
            self.status, self.reason = "missing", f"not installed: {KINDS[name].install}"
        except PeerFailedError as error:
            self.status, self.reason = "failed", f"loading failed: {error}"


def take_turns(
    processes: Mapping[str, PeerProcess],
    records: Mapping[str, PeerRecord],
    workload: Workload,
    on_message: OnMessage,
) -> None:
    """Let every peer that still works do each run of the workload, and add the counted ones to its record."""
    runs: dict[str, list[Run]] = {name: [] for name, record in records.items() if record.status == "measured"}
    for number, prompt_ids in enumerate(workload.prompts):
        on_message(f"{workload.name}: " + (f"run {number} of {len(workload.prompts) - 1}" if number else "warm-up"))
        for name in list(runs):
            time.sleep(PAUSE_S)
            try:
                runs[name].append(processes[name].generate(prompt_ids, workload.new_tokens))
            except PeerFailedError as error:
                records[name].status = "failed"
                records[name].reason = f"{workload.name} failed: {error}"
                del runs[name]
    for name, finished in runs.items():
        records[name].runs[workload.name] = finished[1:]
