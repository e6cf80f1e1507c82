"""Compare decoding with and without speculation on the same prompts: whole times in alternating pairs, and the ratios.

    python scripts/compare_speculation.py --draft ngram --draft int4 --weights bf16 --threads 2

One process holds two sessions of the same weights, of which one speculates. Both get the same prompts and choose
greedily, so their texts must be equal. The runs of a pair follow each other, the plain one first in every other pair,
so that a machine whose speed drifts slows both alike.

A pair's ratio is plain over speculative seconds, from the first step to the last token: prefill and decoding, the
draft's own prefill included. Loading, compiling, tokenizing, detokenizing and a first short pair are not counted. What
chooses the number of tokens to speculate learns from text to text, as it does in a session.

A prompt's number is its place in its set in tests/data/speculation_prompts.json, from 1 on.
"""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gptfast.cli.main import execute
from gptfast.cli.options import checkpoint_option, eager_option, execution_options, speculate_k_option
from gptfast.cli.tables import format_table
from gptfast.speculation.controller import SpeculationStatistics

if TYPE_CHECKING:
    from gptfast.generation import GenerationResult
    from gptfast.session import Session
    from gptfast.speculation.speculator import Speculator

PROMPTS_FILE = Path(__file__).parents[1] / "tests" / "data" / "speculation_prompts.json"
PROMPT_SETS = ("mixed", "free_writing", "copy_edit")
WARM_UP_TOKENS = 16
TEXTS_DIFFER, INTERRUPTED = 1, 130


@dataclass(frozen=True)
class Pair:
    """A plain and a speculative run of the prompt of that number; `run` counts the prompt's pairs from 1 on."""

    prompt: int
    run: int
    plain: GenerationResult
    speculative: GenerationResult

    @property
    def ratio(self) -> float:
        """How many times as fast the speculative run was, prefill included."""
        return get_whole_s(self.plain) / get_whole_s(self.speculative)

    @property
    def is_equal(self) -> bool:
        """Whether both texts have the same tokens."""
        return self.plain.token_ids == self.speculative.token_ids

    @property
    def equal_tokens(self) -> int:
        """How many tokens both texts begin with."""
        from gptfast.generation import count_common

        return count_common(self.plain.token_ids, self.speculative.token_ids)


@dataclass
class Comparison:
    """What is known of a draft so far: its pairs, and by name what its proposers did in them."""

    draft: str
    pairs: list[Pair] = field(default_factory=list)
    proposers: dict[str, SpeculationStatistics] = field(default_factory=dict)


def get_whole_s(result: GenerationResult) -> float:
    """Seconds from the first step to the last token."""
    return result.prefill_s + result.decode_s


def read_prompts(name: str, limit: int | None) -> list[str]:
    """The first prompts of a set, all of them without a limit."""
    prompts: list[str] = json.loads(PROMPTS_FILE.read_text(encoding="utf-8"))[name]
    return prompts[:limit]


def encode_prompts(session: Session, texts: Sequence[str], max_new_tokens: int) -> list[list[int]]:
    """Each text as a user's message; raises PromptError without a chat template, or where the context is too short."""
    from gptfast.chat import Message
    from gptfast.generation import encode_prompt, resolve_max_new_tokens

    prompts = [encode_prompt(session, [Message("user", text)]) for text in texts]
    for prompt in prompts:
        resolve_max_new_tokens(session, len(prompt), max_new_tokens)
    return prompts


def open_speculators(session: Session, drafts: Sequence[str], k: int | None) -> dict[str, Speculator]:
    """By draft; all are opened before the first is measured, so that a wrong name is told at once."""
    from gptfast.speculation.selection import open_speculator

    return {
        draft: open_speculator(draft, session.runner, session.checkpoint, session.tokenizer, k=k)
        for draft in dict.fromkeys(drafts)
    }


def decode(session: Session, prompt: Sequence[int], new_tokens: int, ignore_eos: bool = True) -> GenerationResult:
    """Greedy, and as many tokens as asked for, unless the text may end."""
    from gptfast.config import SamplingConfig
    from gptfast.generation import generate

    [result] = generate(
        session, prompt, max_new_tokens=new_tokens, sampling=SamplingConfig(temperature=0), ignore_eos=ignore_eos
    )
    return result


def run_pairs(
    plain: Session,
    speculating: Session,
    prompts: Sequence[Sequence[int]],
    runs: int,
    new_tokens: int,
    ignore_eos: bool,
) -> Iterator[Pair]:
    """So many pairs of each prompt in turn."""
    sessions = {"plain": plain, "speculative": speculating}
    for number, prompt in enumerate(prompts, start=1):
        for run in range(1, runs + 1):
            # The prompt's number counts too, so that both orders occur where a prompt has a single pair.
            order = ("plain", "speculative") if (number + run) % 2 == 0 else ("speculative", "plain")
            results = {name: decode(sessions[name], prompt, new_tokens, ignore_eos) for name in order}
            yield Pair(number, run, **results)


def compare(
    plain: Session,
    speculating: Session,
    speculators: Mapping[str, Speculator],
    prompts: Sequence[Sequence[int]],
    runs: int,
    new_tokens: int,
    ignore_eos: bool,
    comparisons: list[Comparison],
) -> None:
    """Measure the speculators by draft and add to `comparisons`, which has all finished pairs at any time."""
    for draft, speculator in speculators.items():
        speculating.speculator = speculator
        for session in (plain, speculating):
            decode(session, prompts[0], min(WARM_UP_TOKENS, new_tokens))
        before = speculator.statistics
        comparison = Comparison(draft)
        comparisons.append(comparison)
        for pair in run_pairs(plain, speculating, prompts, runs, new_tokens, ignore_eos):
            now = speculator.statistics
            comparison.proposers = {name: subtract(now[name], before[name]) for name in now}
            comparison.pairs.append(pair)
            outcome = f"{pair.ratio:.2f}" if pair.is_equal else "texts differ"
            click.echo(
                f"{draft}, prompt {pair.prompt} of {len(prompts)}, pair {pair.run} of {runs}: {outcome}", err=True
            )


def subtract(after: SpeculationStatistics, before: SpeculationStatistics) -> SpeculationStatistics:
    """What was done in between; the break-even acceptances are those of the last steps before `after`."""
    return replace(
        after,
        rounds=after.rounds - before.rounds,
        plain_steps=after.plain_steps - before.plain_steps,
        proposed_counts=subtract_each(after.proposed_counts, before.proposed_counts),
        accept_counts=subtract_each(after.accept_counts, before.accept_counts),
        draft_s=after.draft_s - before.draft_s,
        verify_s=after.verify_s - before.verify_s,
        plain_s=after.plain_s - before.plain_s,
    )


def subtract_each(after: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    """The differences of the counts at the same index."""
    return tuple(a - b for a, b in zip(after, before, strict=True))


def build_fields(comparison: Comparison) -> dict[str, Any]:
    """A draft's part of the report, from at least one pair."""
    pairs = comparison.pairs
    ratios: dict[int, list[float]] = {}
    for pair in pairs:
        ratios.setdefault(pair.prompt, []).append(pair.ratio)
    medians = {prompt: statistics.median(values) for prompt, values in ratios.items()}
    worst = min(medians, key=lambda prompt: medians[prompt])
    plain_steps_s = [pair.plain.decode_s / max(1, pair.plain.decode_steps) for pair in pairs]  # a text may end at once
    return {
        "draft": comparison.draft,
        "ratio": statistics.median(medians.values()),
        "worst_ratio": medians[worst],
        "worst_prompt": worst,
        "plain_tokens_per_s": statistics.median(pair.plain.decode_tokens_per_s for pair in pairs),
        "speculative_tokens_per_s": statistics.median(pair.speculative.decode_tokens_per_s for pair in pairs),
        "plain_step_ms": 1e3 * statistics.median(plain_steps_s),
        "ratios": [{"prompt": prompt, "runs": values} for prompt, values in ratios.items()],
        "proposers": {name: build_proposer_fields(each) for name, each in comparison.proposers.items()},
        "differences": [
            {"prompt": pair.prompt, "run": pair.run, "equal_tokens": pair.equal_tokens}
            for pair in pairs
            if not pair.is_equal
        ],
    }


def build_proposer_fields(done: SpeculationStatistics) -> dict[str, Any]:
    """What a proposer did and what it cost; null where it had no round."""
    k = done.usual_k
    return {
        "rounds": done.rounds,
        "proposed_counts": done.proposed_counts,
        "accept_counts": done.accept_counts,
        "acceptance": done.acceptance if k else None,
        "mean_accepted_length": done.mean_accepted_length if k else None,
        "draft_ms_per_token": done.draft_ms_per_token if k else None,
        "verify_ms_per_round": done.verify_ms if k else None,
        "usual_k": k or None,
        "break_even_acceptance": done.break_even_acceptances[k - 1] if k else None,
    }


def format_report(fields: Mapping[str, Any]) -> str:
    """When and how it was measured, the table, what its columns are, and where texts differ."""
    before, after = (fields["bandwidth"][f"{name}_gb_per_s"]["median"] for name in ("before", "after"))
    lines = [
        f"{fields['date'][:16]}, memory read at {before:.1f} GB/s before and {after:.1f} after",
        f"{fields['prompt_count']} {fields['prompts']} prompts, {'' if fields['ignore_eos'] else 'at most '}"
        f"{fields['new_tokens']} new tokens, speculate-k "
        f"{fields['speculate_k']}, pairs of runs per prompt: {fields['runs']}",
        f"\n{format_drafts(fields['drafts'])}\n\n{LEGEND}",
    ]
    if fields["interrupted"]:
        lines.append("interrupted: some pairs are missing")
    lines += [
        f"texts differ: {draft['draft']}, prompt {each['prompt']}, pair {each['run']}, "
        f"after {each['equal_tokens']} equal tokens"
        for draft in fields["drafts"]
        for each in draft["differences"]
    ]
    return "\n".join(lines)


def format_drafts(drafts: Sequence[Mapping[str, Any]]) -> str:
    """A row per draft, and one more for each further proposer that it has."""
    header = (
        *("draft", "ratio", "worst", "prompt", "plain tokens/s", "speculative", "plain ms"),
        *("rounds", "accepted", "length", "draft ms", "verify ms", "break-even"),
    )
    rows: list[Sequence[str]] = [header]
    for draft in drafts:
        speed = (
            *(draft["draft"], f"{draft['ratio']:.2f}", f"{draft['worst_ratio']:.2f}", str(draft["worst_prompt"])),
            *(f"{draft['plain_tokens_per_s']:.1f}", f"{draft['speculative_tokens_per_s']:.1f}"),
            f"{draft['plain_step_ms']:.2f}",
        )
        for i, (name, proposer) in enumerate(draft["proposers"].items()):
            first = (f"  then {name}", *[""] * (len(speed) - 1)) if i else speed
            rows.append((*first, *format_proposer(proposer)))
    return format_table(rows, left_columns=(0,))


def format_proposer(proposer: Mapping[str, Any]) -> tuple[str, ...]:
    """Its cells; dashes for what was not measured."""
    if not proposer["rounds"]:
        return ("0", *"-----")
    break_even = proposer["break_even_acceptance"]
    return (
        f"{proposer['rounds']:,}",
        f"{proposer['acceptance']:.1%}",
        f"{proposer['mean_accepted_length']:.2f}",
        f"{proposer['draft_ms_per_token']:.3f}",
        f"{proposer['verify_ms_per_round']:.2f}",
        f"{'-' if break_even is None else f'{break_even:.1%}'} (k = {proposer['usual_k']})",
    )


LEGEND = """\
ratio       plain over speculative seconds with prefill, median of the prompts' medians; worst: the least of those
tokens/s    of decoding alone, median of all runs; plain ms: a step of that
length      tokens that a round yields, one of them the target's own
ms          draft: for each proposed token; verify: for each round
break-even  the acceptance of every token, given those before it, from which rounds of the usual k pay"""


@click.command()
@checkpoint_option
@execution_options
@eager_option
@click.option(
    "--draft", "drafts", multiple=True, required=True, metavar="WHAT", help="As of gptfast generate; may be repeated."
)
@speculate_k_option
@click.option("--prompts", "prompt_set", type=click.Choice(PROMPT_SETS), default="mixed", show_default=True)
@click.option("--limit", type=click.IntRange(min=1), help="Only so many prompts of the set, its first.")
@click.option("--runs", type=click.IntRange(min=1), default=5, show_default=True, help="Pairs of runs per prompt.")
@click.option("--max-new-tokens", "new_tokens", type=click.IntRange(min=2), default=200, show_default=True)
@click.option("--ignore-eos", is_flag=True, help="Decode all new tokens, also where the text has ended.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures there.")
def main(
    checkpoint: str | None,
    drafts: Sequence[str],
    speculate_k: int | None,
    prompt_set: str,
    limit: int | None,
    runs: int,
    new_tokens: int,
    ignore_eos: bool,
    json_file: Path | None,
    **execution: Any,
) -> int:
    """Compare the speed of decoding with and without speculation, in alternating pairs of runs."""
    import torch

    from gptfast.bench.bandwidth import compare_probes, probe_bandwidth
    from gptfast.bench.environment import describe_environment
    from gptfast.bench.measure import make_clock
    from gptfast.bench.summary import describe_model
    from gptfast.cli.bench_report import format_environment, format_model
    from gptfast.session import load

    if json_file is not None:
        json_file.open("ab").close()  # a path that cannot be written is refused now
    plain, speculating = (load(checkpoint, **execution) for _ in range(2))
    prompts = encode_prompts(plain, read_prompts(prompt_set, limit), new_tokens)
    speculators = open_speculators(speculating, drafts, speculate_k)
    device = plain.runner.device
    clock = make_clock(device)
    before = probe_bandwidth(device, clock)
    comparisons: list[Comparison] = []
    is_interrupted = False
    try:
        compare(plain, speculating, speculators, prompts, runs, new_tokens, ignore_eos, comparisons)
    except KeyboardInterrupt:
        is_interrupted = True
    bandwidth = compare_probes(before, probe_bandwidth(device, clock))
    environment, model = describe_environment(device, torch.get_num_threads()), describe_model(plain)
    measured = [build_fields(comparison) for comparison in comparisons if comparison.pairs]
    fields = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "environment": asdict(environment),
        "bandwidth": asdict(bandwidth),
        "model": asdict(model),
        "compiled": plain.runner.is_compiled,
        "prompts": prompt_set,
        "prompt_count": len(prompts),
        "runs": runs,
        "new_tokens": new_tokens,
        "ignore_eos": ignore_eos,
        "speculate_k": speculate_k or "auto",
        "interrupted": is_interrupted,
        "drafts": measured,
    }
    click.echo(f"{format_model(model)}\n{format_environment(environment)}, {format_report(fields)}")
    if json_file is not None:
        json_file.write_text(json.dumps(fields) + "\n", encoding="utf-8")
    if any(draft["differences"] for draft in measured):
        return TEXTS_DIFFER
    return INTERRUPTED if is_interrupted else 0


if __name__ == "__main__":
    execute(main, "compare_speculation.py")
