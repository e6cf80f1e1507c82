"""The fused step at the shape of Llama 3.2 1B: whether it computes what the model does, in any order of its kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from acceptance.findings import Findings
from acceptance.kernels import check_resources, list_loaded
from acceptance.model_1b import SAME_STEPS, SAMPLINGS, check_difference, check_synchronization, check_text
from acceptance.random_weights import INT4_G32, INT8, build_model, expand_model
from acceptance.steps import SwitchedGraphs, compute_logits, draw_prompt, measure_difference
from acceptance.timing import find_device
from gptfast.checkpoint.presets import get_preset
from gptfast.fused import FusedTransformer, has_pdl
from gptfast.kernels.cuda.timing import free_memory, open_graphs
from gptfast.model import Transformer
from gptfast.runner import Runner

LENGTHS = (20, 300)
"""Of prompts: one chunk of attention, and two."""
N_FOLLOWING, N_VERIFIED = 13, 5
REPEATS = 20
TEXT_TOKENS = 256


def run(findings: Findings) -> None:
    """Check int4 with an int8 head, which is tied, and bfloat16."""
    device, config = find_device(), get_preset("llama-3.2-1b")
    with torch.no_grad():
        int4 = build_model(config, INT4_G32, dtype=torch.bfloat16, device=device, head=INT8)
        check_fused(findings, int4, "int4", SwitchedGraphs(open_graphs(device)))
        exact = build_model(config, INT4_G32, dtype=torch.bfloat16, device=device, head=INT8, exact_rows=True)
        check_rows(findings, exact, "int4")
        del exact
        free_memory(device)
        bf16 = expand_model(int4, "bf16")
        check_fused(findings, bf16, "bf16", SwitchedGraphs(open_graphs(device)))
    check_resources(findings, list_loaded(device))


def open_fused(model: Transformer, graphs: SwitchedGraphs, *, pdl: bool) -> Runner:
    """Of the model's fused pass, recorded."""
    return Runner(model, graphs=graphs, fused=FusedTransformer(model, pdl=pdl))


def check_fused(
    findings: Findings,
    model: Transformer,
    name: str,
    graphs: SwitchedGraphs,
    *,
    lengths: Sequence[int] = LENGTHS,
    repeats: int = REPEATS,
    text_tokens: int = TEXT_TOKENS,
) -> None:
    """All checks of a model's fused pass; `name` is for reports."""
    following = draw_prompt(N_FOLLOWING, model.config.vocab_size, seed=1)
    plain, runner = Runner(model), open_fused(model, graphs, pdl=has_pdl(model.device))
    for length in lengths:
        prompt = draw_prompt(length, model.config.vocab_size)
        expected, found = (compute_logits(each, prompt, following, N_VERIFIED) for each in (plain, runner))
        case = f"{name}, after {length} tokens"
        check_difference(findings, f"{case}: the fused step's logits are the model's", found, expected, SAME_STEPS)
        check_same(
            findings,
            f"{case}: {repeats} more times its bits",
            found,
            [compute_logits(runner, prompt, following, N_VERIFIED) for _ in range(repeats)],
        )
        with graphs.direct():
            direct = compute_logits(runner, prompt, following, N_VERIFIED)
        check_same(findings, f"{case}: its bits without a graph", found, [direct])
        if has_pdl(model.device):
            # With caches of its own: another runner of the same model would take the first one's away.
            alike = expand_model(model, "packed")
            other = compute_logits(open_fused(alike, graphs, pdl=False), prompt, following, N_VERIFIED)
            check_same(findings, f"{case}: its bits without dependent launch", found, [other])
    for sampling in SAMPLINGS:
        check_text(findings, f"{name}, fused", runner, graphs, prompt, sampling, text_tokens)
    check_synchronization(findings, f"{name}, fused", runner, prompt, min(text_tokens, 32))


def check_same(findings: Findings, name: str, expected: Tensor, found: Sequence[Tensor]) -> None:
    """Logits that must be equal to the bit."""
    differences = [measure_difference(each, expected) for each in found if not torch.equal(each, expected)]
    findings.check(
        name,
        not differences,
        f"{len(differences)} of {len(found)} differ, by {max(differences, default=0):.2g} at most",
        "gptfast/kernels/cuda/fused.py and fused_attention.py: what is read before `gdc_wait`, and the tickets",
    )


def check_rows(findings: Findings, model: Transformer, name: str, *, length: int = LENGTHS[-1]) -> None:
    """A token's logits alone are those that it has among several, which speculation builds on."""
    prompt, following = (draw_prompt(count, model.config.vocab_size, seed=count) for count in (length, N_FOLLOWING))
    runner = open_fused(model, SwitchedGraphs(open_graphs(model.device)), pdl=has_pdl(model.device))
    alone, together = (compute_logits(runner, prompt, following, n_verified) for n_verified in (0, N_VERIFIED))
    check_same(findings, f"{name}: the fused step gives a row its bits whatever is beside it", alone, [together])
