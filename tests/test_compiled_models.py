"""Models of several architectures and shapes, compiled one after another in one process, against eager steps.

Nothing makes the compiler forget between them: what it takes for dynamic, because the model before had another
size, must not reach the next model's code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gptfast.config import ModelConfig
from gptfast.runner import PREFILL_CHUNKS, Runner
from tests.reference.checkpoints import write_hf
from tests.reference.families import FAMILIES, random_tokens, random_weights
from tests.reference.product import load

pytestmark = pytest.mark.usefixtures("tiny_cache")

MODELS: dict[str, ModelConfig] = {
    "qwen3, dim 64": FAMILIES["qwen3"],
    "mistral, dim 96, window 16": replace(FAMILIES["mistral"], dim=96, sliding_window=16),
    "qwen2, dim 128": replace(FAMILIES["qwen2"], dim=128, ffn_dim=352),
}
PROMPTS = (3, 40, 140)
"""Tokens: less than a small chunk, two of them, and a large one that is padded by more than the window."""
BATCH_SIZES = (1, 3)
QUICK = {
    *(("qwen3, dim 64", 1, length) for length in (3, 40)),
    *(("mistral, dim 96, window 16", 1, length) for length in PROMPTS),
    *(("qwen2, dim 128", 3, length) for length in (3, 40)),
}
"""Every model, batch size and length, but not every pair of them: each step costs seconds to compile."""
N_STEPS = 6
TOLERANCE = 1e-4

RunnerMaker = Callable[[str, int], tuple[Runner, Runner]]


@pytest.fixture(scope="module")
def make_runners(tmp_path_factory: pytest.TempPathFactory) -> RunnerMaker:
    """A compiled and an eager runner of a model in `MODELS`, made once; a step is compiled when first needed."""
    made: dict[tuple[str, int], tuple[Runner, Runner]] = {}

    def make(name: str, batch_size: int) -> tuple[Runner, Runner]:
        if (name, batch_size) not in made:
            config = MODELS[name]
            directory = write_hf(tmp_path_factory.mktemp("model"), random_weights(config), config)
            compiled = Runner(load(directory, 1), batch_size=batch_size, compile=True)
            made[name, batch_size] = compiled, Runner(load(directory, 1), batch_size=batch_size)
        return made[name, batch_size]

    return make


def read(runner: Runner, prompt: list[int], following: Tensor) -> Tensor:
    """Logits (1 + steps, B, V) after the prompt and after each column of `following` (B, steps)."""
    rows = [runner.prefill(prompt).clone()]
    for step in range(following.shape[1]):
        rows.append(runner.decode(following[:, step], len(prompt) + step).clone())
    return torch.stack(rows)


CASES = [
    pytest.param(name, batch_size, length, marks=[] if (name, batch_size, length) in QUICK else [pytest.mark.slow])
    for name in MODELS
    for batch_size in BATCH_SIZES
    for length in PROMPTS
]


@pytest.mark.parametrize(("name", "batch_size", "length"), CASES)
def test_every_model_gives_the_logits_of_eager_steps(
    name: str, batch_size: int, length: int, make_runners: RunnerMaker
) -> None:
    compiled, eager = make_runners(name, batch_size)
    config = MODELS[name]
    prompt = random_tokens(config, length, seed=length)
    following = torch.tensor([random_tokens(config, N_STEPS, seed=row) for row in range(batch_size)])
    actual = read(compiled, prompt, following)
    assert compiled.is_compiled
    assert actual.shape == (1 + N_STEPS, batch_size, config.vocab_size)
    assert torch.isfinite(actual).all()
    assert (actual - read(eager, prompt, following)).abs().max() < TOLERANCE


def test_the_models_differ_in_what_the_compiler_could_take_for_dynamic() -> None:
    for field in ("architecture", "dim", "ffn_dim"):
        values = [getattr(config, field) for config in MODELS.values()]
        assert len(set(values)) > 1, field
    assert len({config.dim for config in MODELS.values()}) == len(MODELS)
    padding = max(PREFILL_CHUNKS) - max(PROMPTS)
    windows = [config.sliding_window for config in MODELS.values() if config.sliding_window is not None]
    assert min(windows) < padding
