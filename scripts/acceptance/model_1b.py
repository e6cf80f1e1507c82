"""A model of the shape of Llama 3.2 1B: whether replayed steps are right in whatever may go wrong, and their time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from acceptance.decoding import Case, time_cases
from acceptance.device import find_bandwidth
from acceptance.findings import Findings
from acceptance.random_weights import BF16, INT4_G32, INT8, build_model, expand_model
from acceptance.steps import (
    SwitchedGraphs,
    begin_text,
    compute_logits,
    draw_prompt,
    extend_text,
    iterate_text,
    make_session,
    measure_difference,
    write_text,
)
from acceptance.timing import find_device
from gptfast.checkpoint.presets import get_preset
from gptfast.config import SamplingConfig
from gptfast.kernels.cuda.timing import free_memory, open_graphs
from gptfast.model import Transformer
from gptfast.runner import Runner
from gptfast.session import Session
from gptfast.speculation.controller import SpeculationController
from gptfast.speculation.draft import DraftModel
from gptfast.speculation.speculator import Lane, Speculator

GREEDY = SamplingConfig()
SAMPLINGS = (GREEDY, SamplingConfig(temperature=1.0, seed=7), SamplingConfig(temperature=0.8, top_k=40, top_p=0.9))
SAME_STEPS = 2e-2
"""Relative difference of logits that another order of rounding explains."""
SAME_WEIGHTS = 5e-2
"""The same, with weights rounded to bfloat16 and torch's own operators."""
DRAFTED = 4
LEAST_ACCEPTANCE = 0.3
SPARE_BYTES = 2**20
SETTLED = 0.25
"""The share of the prompts after which nothing new is allocated."""
FORMS = (Case(INT4_G32, INT8), Case(BF16), Case(INT8))
CASES = tuple(replace(case, fuses=fuses) for case in FORMS for fuses in (False, True))
DEPTHS = (0, 2048)
COMPILED_S = 60
"""Seconds that must be left for compiled steps to be tried."""


@dataclass(frozen=True)
class Sizes:
    """How much is generated: tokens of a text and a short one, prompts in turn, and tokens of the longest of these."""

    text_tokens: int = 256
    short_tokens: int = 32
    prompts: int = 200
    longest_prompt: int = 2000


def run(findings: Findings) -> None:
    """Check int4 and bfloat16, recorded eagerly, then int4 compiled; then time all forms while there is time."""
    device, config, sizes = find_device(), get_preset("llama-3.2-1b"), Sizes()
    with torch.no_grad():
        int4 = build_model(config, INT4_G32, dtype=torch.bfloat16, device=device, head=INT8)
        check_model(findings, int4, "int4", SwitchedGraphs(open_graphs(device)), sizes)
        check_isolation(findings, int4, SwitchedGraphs(open_graphs(device)), sizes.short_tokens)
        check_memory_of(findings, int4, sizes)
        check_speculation(findings, int4, SwitchedGraphs(open_graphs(device)), sizes)
        free_memory(device)
        bf16 = expand_model(int4, "bf16")
        check_model(findings, bf16, "bf16", SwitchedGraphs(open_graphs(device)), sizes)
        del bf16
        free_memory(device)
        if findings.get_remaining_s() > COMPILED_S:
            name = "int4, compiled"
            check_model(findings, int4, name, SwitchedGraphs(open_graphs(device)), sizes, compile=True)
        else:
            findings.note(left_out=f"compiled steps, as {findings.get_remaining_s():.0f} s were left")
        del int4
        free_memory(device)
    bandwidth = find_bandwidth(findings, device)
    findings.note(read_gb_per_s=bandwidth)
    time_cases(findings, device, "llama-3.2-1b", CASES, DEPTHS, bandwidth)


def check_model(
    findings: Findings,
    model: Transformer,
    name: str,
    graphs: SwitchedGraphs,
    sizes: Sizes,
    *,
    compile: bool = False,
) -> None:
    """All checks of a model alone; `name` is for reports."""
    prompt = draw_prompt(20, model.config.vocab_size)
    following = draw_prompt(13, model.config.vocab_size, seed=1)
    verified = 0 if compile else 5
    torch_logits = compute_logits(Runner(expand_model(model, "dense")), prompt, following, verified)
    free_memory(model.device)
    eager_logits = compute_logits(Runner(model), prompt, following, verified)
    check_difference(
        findings, f"{name}: eager logits are those of torch's own operators", eager_logits, torch_logits, SAME_WEIGHTS
    )
    runner = Runner(model, compile=compile, graphs=graphs)
    logits = compute_logits(runner, prompt, following, verified)
    check_difference(findings, f"{name}: replayed logits are those of eager steps", logits, eager_logits, SAME_STEPS)
    with graphs.direct():
        direct = compute_logits(runner, prompt, following, verified)
    findings.check(
        f"{name}: replayed logits are those of the same steps without a graph to the bit",
        torch.equal(logits, direct),
        f"relative difference {measure_difference(logits, direct):.2g}",
        "gptfast/graphs.py and what a step in gptfast/decode.py reads that moves",
    )
    for sampling in SAMPLINGS[: 1 if compile else None]:
        check_text(findings, name, runner, graphs, prompt, sampling, sizes.text_tokens)
    if not compile:
        check_parameters(findings, name, runner, graphs, prompt, sizes.short_tokens)
        check_seeds(findings, name, runner, prompt, sizes.short_tokens)
        check_end(findings, name, runner, prompt, sizes.short_tokens)
    check_synchronization(findings, name, runner, prompt, sizes.short_tokens)


def check_difference(
    findings: Findings, name: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float
) -> None:
    """Logits within a tolerance, all of them numbers."""
    difference = measure_difference(found, expected)
    findings.check(
        name,
        difference < tolerance,
        f"relative difference {difference:.2g}, allowed {tolerance:.2g}",
        "section `kernels` first, then gptfast/model.py on CUDA",
    )


def check_text(
    findings: Findings,
    name: str,
    runner: Runner,
    graphs: SwitchedGraphs,
    prompt: Sequence[int],
    sampling: SamplingConfig,
    count: int,
) -> None:
    """A text of replayed steps is that of the same steps launched by the host, and every step was a replay."""
    before = graphs.replayed
    replayed = extend_text(runner, prompt, sampling, count)
    n_replays = graphs.replayed - before
    with graphs.direct():
        direct = extend_text(runner, prompt, sampling, count)
    differing = [i for i, (a, b) in enumerate(zip(replayed, direct, strict=True)) if a != b]
    kind = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}"
    findings.check(
        f"{name}: {count} tokens ({kind}) are those of the same steps without a graph",
        not differing and n_replays == count - 1,
        f"{n_replays} replays; " + (f"token {differing[0]} differs first" if differing else "no token differs"),
        "gptfast/replay.py: what is in flight, or the ring of chosen tokens",
    )


def check_parameters(
    findings: Findings, name: str, runner: Runner, graphs: SwitchedGraphs, prompt: Sequence[int], count: int
) -> None:
    """Other temperatures, cuts and seeds give other texts, those of the same steps, and record nothing again."""
    kind = SamplingConfig(temperature=0.8, top_k=40, top_p=0.9)
    settings = [
        replace(kind, temperature=temperature, top_k=top_k, seed=seed)
        for temperature, top_k, seed in ((0.8, 40, 0), (1.5, 1000, 0), (1.5, 1000, 2**62))
    ]
    extend_text(runner, prompt, kind, 2)
    recorded = graphs.recorded
    replayed = [extend_text(runner, prompt, sampling, count) for sampling in settings]
    with graphs.direct():
        direct = [extend_text(runner, prompt, sampling, count) for sampling in settings]
    n_texts, n_recorded = len(set(map(tuple, replayed))), graphs.recorded - recorded
    findings.check(
        f"{name}: sampling parameters change without another recording",
        (replayed, n_texts, n_recorded) == (direct, len(settings), 0),
        f"{n_texts} texts of {len(settings)}, equal: {replayed == direct}, {n_recorded} recordings",
        "gptfast/sampling.py, `SamplingTensors.load`",
    )


def check_seeds(findings: Findings, name: str, runner: Runner, prompt: Sequence[int], count: int) -> None:
    """The same seed gives the same text, and another seed another."""
    texts = [extend_text(runner, prompt, SamplingConfig(temperature=1.0, seed=seed), count) for seed in (1, 2, 1)]
    findings.check(
        f"{name}: a text depends on its seed alone",
        texts[0] == texts[2] != texts[1],
        f"same seed equal: {texts[0] == texts[2]}, another seed equal: {texts[0] == texts[1]}",
        "gptfast/sampling.py, SamplingTensors",
    )


def check_end(findings: Findings, name: str, runner: Runner, prompt: Sequence[int], count: int) -> None:
    """A text ends at its EOS though more steps were under way, and the next text is not touched by them."""
    sampling = SamplingConfig(temperature=1.0, seed=3)
    whole = write_text(make_session(runner), prompt, sampling, count).result.token_ids
    end = next(i for i in range(2, len(whole)) if whole[i] not in whole[:i])
    ended = write_text(make_session(runner, eos_ids=[whole[end]]), prompt, sampling, count).result
    again = write_text(make_session(runner), prompt, sampling, count).result.token_ids
    findings.check(
        f"{name}: a text ends at EOS and leaves nothing for the next",
        (ended.token_ids, ended.finish_reason, again) == (whole[: end + 1], "eos", whole),
        f"{len(ended.token_ids)} tokens ({ended.finish_reason}) of {end + 1}, the next text equal: {again == whole}",
        "gptfast/replay.py, `extend`: steps in flight when a text ends",
    )


def check_synchronization(findings: Findings, name: str, runner: Runner, prompt: Sequence[int], count: int) -> None:
    """The loop of replays asks the device for nothing that waits for it; on a CPU there is nothing to ask."""
    sampler, token = begin_text(runner, prompt, GREEDY)
    list(runner.extend(sampler, token, len(prompt), 4))
    found = "no call that waits"
    is_cuda = runner.device.type == "cuda"
    if is_cuda:
        torch.cuda.set_sync_debug_mode("error")
    try:
        list(runner.extend(sampler, token, len(prompt), count))
    except RuntimeError as error:
        found = str(error).splitlines()[0]
    finally:
        if is_cuda:
            torch.cuda.set_sync_debug_mode("default")
    findings.check(
        f"{name}: replays never wait for the device",
        found == "no call that waits",
        found,
        "gptfast/replay.py, `extend`",
    )


def check_isolation(findings: Findings, model: Transformer, graphs: SwitchedGraphs, count: int) -> None:
    """Two texts that grow in turns, of two runners with the same weights, are what they are one after the other."""
    runners = [Runner(expand_model(model, "packed"), graphs=graphs) for _ in range(2)]
    prompts = [draw_prompt(length, model.config.vocab_size, seed) for seed, length in enumerate((20, 33))]
    alone = [extend_text(runner, prompt, GREEDY, count) for runner, prompt in zip(runners, prompts, strict=True)]
    texts = [iterate_text(runner, prompt, GREEDY, count) for runner, prompt in zip(runners, prompts, strict=True)]
    together = [list(text) for text in zip(*zip(*texts, strict=True), strict=True)]
    addresses = [{cache.k.data_ptr() for cache in runner.model.list_caches()} for runner in runners]
    findings.check(
        "two sessions share no buffer",
        together == alone and not addresses[0] & addresses[1],
        f"texts in turns equal: {together == alone}, caches in common: {len(addresses[0] & addresses[1])}",
        "gptfast/replay.py: states of a recording; gptfast/graphs.py: the pool that recordings share",
    )


def check_memory_of(findings: Findings, model: Transformer, sizes: Sizes) -> None:
    """Memory and recordings stay as they are over many prompts."""
    graphs = SwitchedGraphs(open_graphs(model.device))
    session = make_session(Runner(model, graphs=graphs))
    generator = random.Random(0)
    lengths = [sizes.longest_prompt] + [generator.randint(1, sizes.longest_prompt) for _ in range(sizes.prompts - 1)]
    check_memory(findings, session, graphs, lengths, lambda: torch.cuda.memory_allocated(model.device))


def check_memory(
    findings: Findings, session: Session, graphs: SwitchedGraphs, lengths: Sequence[int], measure: Callable[[], int]
) -> None:
    """After the first prompts of these lengths, each with a short text, the measured bytes grow no more."""
    held, recorded = [], []
    for seed, length in enumerate(lengths):
        write_text(session, draw_prompt(length, session.runner.vocab_size, seed), GREEDY, 8)
        held.append(measure())
        recorded.append(graphs.recorded)
    settled = int(SETTLED * len(lengths))
    growth = max(held[settled:]) - held[settled]
    findings.note(allocated_bytes=held[-1])
    findings.check(
        f"memory stays flat over {len(lengths)} prompts of random length",
        growth <= SPARE_BYTES and recorded[-1] == recorded[0],
        f"{growth} bytes more than after prompt {settled}, {recorded[-1]} recordings",
        "gptfast/runner.py, `reserve`, and gptfast/replay.py: what each text leaves",
    )


def check_speculation(findings: Findings, draft: Transformer, graphs: SwitchedGraphs, sizes: Sizes) -> None:
    """A bfloat16 model that its int4 form speculates for writes the text that it writes alone."""
    target = expand_model(draft, "bf16", exact_rows=True)
    runner, draft_runner = Runner(target, graphs=graphs), Runner(draft, graphs=graphs)
    controller = SpeculationController(max_k=DRAFTED, fixed_k=DRAFTED)
    speculator = Speculator(runner, [Lane("int4", DraftModel(draft_runner, runner.vocab_size), controller)])
    session = make_session(runner, speculator=speculator)
    prompt = draw_prompt(40, runner.vocab_size)
    for sampling in SAMPLINGS[:2]:
        speculated, plain = (
            write_text(session, prompt, sampling, sizes.text_tokens, speculates=speculates).result.token_ids
            for speculates in (True, False)
        )
        differing = [i for i, (a, b) in enumerate(zip(speculated, plain, strict=True)) if a != b]
        findings.check(
            f"a speculated text is the plain one (temperature {sampling.temperature:g})",
            not differing,
            f"token {differing[0]} differs first" if differing else f"{len(plain)} tokens",
            "`exact_rows` in gptfast/kernels/cuda/ops.py, and section `kernels`",
        )
    statistics = speculator.statistics["int4"]
    findings.note(acceptance=statistics.acceptance)
    findings.check(
        "a draft of the same weights in int4 is often right",
        statistics.acceptance > LEAST_ACCEPTANCE,
        f"{statistics.acceptance:.0%} of {statistics.proposed} proposed tokens accepted",
        "gptfast/speculation/draft.py: the draft's cache or positions",
    )
