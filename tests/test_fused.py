"""The fused pass against the model's own, under Triton's interpreter and on recorded steps that keep to their rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gptfast import session as session_module
from gptfast.checkpoint import open_checkpoint
from gptfast.config import SamplingConfig
from gptfast.decode import Decoder
from gptfast.errors import UserError
from gptfast.fused import FusedTransformer, explain_unfusable, get_linear, list_blocks
from gptfast.kernels import ops
from gptfast.kernels.cuda import configurations
from gptfast.kernels.cuda.configurations import MAX_ROWS
from gptfast.kernels.ops import KernelChoice
from gptfast.linear import TritonLinear
from gptfast.loading import Weights, load_model
from gptfast.model import Transformer
from gptfast.runner import INITIAL_CAPACITY, Runner
from gptfast.sampling import Sampler
from gptfast.session import fuse
from tests.reference.checkpoints import write_hf
from tests.reference.families import FAMILIES, random_weights
from tests.reference.graphs import BrokenRule, CheckedGraphs

pytestmark = [
    pytest.mark.usefixtures("tiny_cache"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, tests/gpu runs the fused step on it"),
]

TOLERANCE = 2e-4
VOCAB = 24
PROMPT = 17


@pytest.fixture(scope="module", autouse=True)
def _operators() -> None:
    assert ops.has_triton_kernels()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A short cache, and few programs, each of which takes the interpreter milliseconds."""
    monkeypatch.setitem(INITIAL_CAPACITY, "cpu", 64)
    monkeypatch.setattr(configurations, "MIN_PROGRAMS", 1)
    # Of what was chosen with other programs, and then of what is chosen here.
    configurations.forget_files()
    yield
    configurations.forget_files()


@pytest.fixture(scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Transformer]:
    """A random member of a family, of two layers and few ids."""

    def make(
        family: str = "llama-8-2",
        weights: Weights = "int4",
        kernels: KernelChoice | None = "triton",
        *,
        exact_rows: bool = False,
    ) -> Transformer:
        config = replace(FAMILIES[family], n_layers=2, vocab_size=VOCAB, ffn_dim=64)
        directory = write_hf(tmp_path_factory.mktemp("fused") / "model", random_weights(config), config)
        return load_model(open_checkpoint(directory), weights=weights, kernels=kernels, exact_rows=exact_rows)

    return make


def make_ids(count: int) -> Tensor:
    return torch.tensor([(7 * place + 3) % VOCAB for place in range(count)])


@torch.no_grad()
def read(decoder: Decoder, runner: Runner, *counts: int, batch_size: int = 1) -> Tensor:
    """Logits after each token that follows a prompt, read in passes over so many."""
    place, rows = PROMPT, []
    ids = make_ids(PROMPT + sum(counts))
    runner.prefill(ids[:PROMPT].tolist())
    for count in counts:
        tokens = ids[place : place + count].repeat(batch_size, 1)
        tokens[-1] = (tokens[-1] + batch_size - 1) % VOCAB
        rows.append(decoder(tokens, torch.arange(place, place + count), torch.arange(place + count)))
        place += count
    return torch.cat(rows, dim=1)


@pytest.mark.parametrize(
    ("family", "weights"),
    [
        ("llama-8-2", "int4"),
        pytest.param("llama-tied", "int8", marks=pytest.mark.slow),
        pytest.param("qwen2", "int8", marks=pytest.mark.slow),
        pytest.param("mistral", "int4", marks=pytest.mark.slow),
        pytest.param("llama-8-2", "fp8", marks=pytest.mark.slow),
    ],
)
def test_logits_keys_and_values_are_those_of_the_model(
    family: str, weights: Weights, make_model: Callable[..., Transformer]
) -> None:
    """With the same weights, expanded."""
    expanded, model = make_model(family, weights, None), make_model(family, weights)
    expected = read(expanded, Runner(expanded), 1, 2)
    found = read(FusedTransformer(model, pdl=False), Runner(model), 1, 2)
    assert (found - expected).abs().max() < TOLERANCE
    for cache, other in zip(model.list_caches(), expanded.list_caches(), strict=True):
        for keys, expected_keys in ((cache.k, other.k), (cache.v, other.v)):
            assert (keys - expected_keys).abs().max() < TOLERANCE
            assert keys[:, :, PROMPT : PROMPT + 3].abs().amin(dim=-1).gt(0).all()


@pytest.mark.slow
def test_rows_of_a_batch_have_keys_of_their_own(make_model: Callable[..., Transformer]) -> None:
    model = make_model(weights="int8")
    runner = Runner(model, batch_size=2)
    expected = read(model, runner, 1, 2, batch_size=2)
    found = read(FusedTransformer(model, pdl=False), runner, 1, 2, batch_size=2)
    assert (found - expected).abs().max() < TOLERANCE
    assert (found[0] - found[1]).abs().max() > TOLERANCE


@pytest.mark.slow
def test_rows_do_not_depend_on_what_is_beside_them(make_model: Callable[..., Transformer]) -> None:
    """The kernels' own tests compare bits; the interpreter's products round otherwise in other places of a tile."""
    model = make_model(weights="int8", exact_rows=True)
    runner, decoder = Runner(model), FusedTransformer(model, pdl=False)
    assert (read(decoder, runner, 1, 1, 1) - read(decoder, runner, 3)).abs().max() < 1e-5


@pytest.mark.slow
def test_texts_are_recorded_and_grow_beyond_the_first_cache(
    make_model: Callable[..., Transformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(INITIAL_CAPACITY, "cpu", 20)
    model, prompt = make_model(weights="int8"), make_ids(PROMPT).tolist()
    sampling, texts = SamplingConfig(temperature=0.7, seed=3), []
    graphs = CheckedGraphs()
    for fused in (None, FusedTransformer(model, pdl=False)):
        runner = Runner(model, graphs=None if fused is None else graphs, fused=fused)
        sampler = Sampler(sampling, prompt, VOCAB)
        token = sampler.choose(runner.prefill(prompt), PROMPT)
        texts.append([values[0] for values in runner.extend(sampler, token, PROMPT, 2)])
        last = torch.tensor(texts[-1][-1:])
        texts[-1] += [values[0] for values in runner.extend(sampler, last, PROMPT + 2, 3)]
    assert texts[0] == texts[1]
    # Once for each length of the cache.
    assert (graphs.recorded, graphs.replayed) == (2, 5)


# What has no fused pass


@pytest.mark.parametrize(
    ("family", "weights", "kernels", "words"),
    [
        ("qwen3", "int8", "triton", "heads of queries and keys are normed"),
        ("llama-8-2", "stored", "triton", "is not packed"),
        ("llama-8-2", "int8", None, "needs the Triton kernels"),
    ],
)
def test_a_model_without_one_has_a_reason(
    family: str, weights: Weights, kernels: str | None, words: str, make_model: Callable[..., Transformer]
) -> None:
    model = make_model(family, weights)
    model.set_kernels(kernels)  # type: ignore[arg-type]
    assert words in str(explain_unfusable(model))


def test_parts_that_are_stored_in_different_ways_are_a_reason(make_model: Callable[..., Transformer]) -> None:
    model = make_model(weights="int8")
    assert explain_unfusable(model) is None
    wqkv = get_linear(list_blocks(model)[1].attention.wqkv)
    list_blocks(model)[1].attention.wqkv = TritonLinear([*wqkv.matrices, *wqkv.matrices], exact_rows=False)
    assert "parts of layers.1.attention.wqkv" in str(explain_unfusable(model))


def test_more_tokens_than_it_takes_are_left_to_the_model(make_model: Callable[..., Transformer]) -> None:
    model = make_model(weights="int8")
    steps = Runner(model, batch_size=5, graphs=CheckedGraphs(), fused=FusedTransformer(model, pdl=False))._recorded
    assert steps is not None
    assert isinstance(steps._get_decoder(MAX_ROWS), FusedTransformer)
    assert steps._get_decoder(MAX_ROWS + 1) is model


# Which step is taken


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize(("asked", "found"), [("fused", "compiled"), ("auto", "fused")])
def test_a_step_is_fused_that_is_asked_for_or_was_found_faster(
    asked: str,
    found: str,
    is_new: bool,
    make_model: Callable[..., Transformer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_module, "find_step", lambda device: found)
    monkeypatch.setattr(session_module, "has_pdl", lambda device: is_new)
    model = make_model(weights="int8")
    fused = fuse(asked, model, torch.float32, 1, pdl=True)
    assert fused is not None
    assert fused.pdl == is_new
    without = fuse(asked, model, torch.float32, 1, pdl=False)
    assert without is not None
    assert not without.pdl


@pytest.mark.parametrize(("asked", "found"), [("compiled", "fused"), ("auto", "compiled")])
def test_other_steps_are_the_model_s(
    asked: str, found: str, make_model: Callable[..., Transformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "find_step", lambda device: found)
    assert fuse(asked, make_model(weights="int8"), torch.float32, 1, pdl=True) is None


def test_a_fused_step_that_there_is_not_is_refused_if_it_is_asked_for(
    make_model: Callable[..., Transformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "find_step", lambda device: "fused")
    model = make_model(weights="int8")
    assert fuse("auto", model, torch.int8, 1, pdl=True) is None
    with pytest.raises(UserError, match="keys and values are rounded to int8; use --step compiled"):
        fuse("fused", model, torch.int8, 1, pdl=True)


# As an operator


@pytest.mark.slow
def test_the_pass_is_one_operator_to_a_compiler(make_model: Callable[..., Transformer]) -> None:
    model = make_model(weights="int8")
    Runner(model)
    decoder = FusedTransformer(model, pdl=False)
    calls: list[str] = []

    def note(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        calls.extend(str(node.target) for node in graph.graph.nodes if "gptfast" in str(node.target))
        return graph.forward

    def compute(tokens: Tensor, input_pos: Tensor) -> Tensor:
        return 2 * decoder(tokens, input_pos, None)

    inputs = torch.tensor([[5]]), torch.tensor([0])
    with torch.no_grad():
        found = torch.compile(compute, fullgraph=True, dynamic=False, backend=note)(*inputs)
        assert torch.equal(found, compute(*inputs))
    assert calls == ["gptfast.fused_pass.default"]
    torch.library.opcheck(
        torch.ops.gptfast.fused_pass.default,
        (*inputs, decoder._handle),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.slow
def test_a_recording_whose_caches_moved_is_noticed(make_model: Callable[..., Transformer]) -> None:
    """A kernel that is launched by no operator is watched too."""
    model, graphs = make_model(weights="int8"), CheckedGraphs()
    Runner(model)
    state = torch.tensor([[5]]), torch.tensor([0]), torch.empty(1, 1, VOCAB)
    decoder = FusedTransformer(model, pdl=False)
    replay = graphs.record(lambda: (state[2].copy_(decoder(state[0], state[1], None)), None)[1])
    replay()
    model.setup_caches(1, model.list_caches()[0].k.shape[2])
    with pytest.raises(BrokenRule, match="differs from the recording"):
        replay()
