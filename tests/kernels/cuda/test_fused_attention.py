"""On a machine with a GPU the kernel runs there, on others under Triton's interpreter, one program after another."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gptfast.kernels.cuda.packing import Kind, arrange_inputs, arrange_rows
from tests.kernels.cuda.test_attention import (
    ALL,
    BFLOAT,
    CHUNK,
    CUDA_NAMES,
    DEVICE,
    FLOAT,
    HALF,
    INT8,
    QUICK,
    Configuration,
    assert_reads_well,
    attend_by_kernel,
    attention,
    launch_attention,
    make_call,
    triton,
)
from tests.reference.attention import Cache
from tests.reference.triton_compilation import ARCHITECTURES, Launch, Program, compile_offline

fused = pytest.importorskip("gptfast.kernels.cuda.fused_attention")

UNSPILLED = [each for each in ALL if (each.dtype, each.dim) != (INT8, 80)]
"""Of int8 codes in heads of 80, over 16 rows, sm_80 keeps three registers in memory over the loop."""
MEMORY = r"(LD|ST|ATOM|RED)"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def make_scratch(q: Tensor, cache: Cache) -> fused.FusedScratch:
    """As the step makes it, but with sums that are seen in a result if a program reads what none has written."""
    batch, tokens, heads, dim = q.shape
    device = torch.device(DEVICE)
    _, kv_heads, slots, _ = cache.k.shape
    scratch = fused.make_fused_scratch(batch, tokens, heads, kv_heads, dim, slots, device=device)
    for sums in scratch.sums:
        sums.fill_(torch.nan)
    return scratch


def attend_fused(
    out: Tensor, q: Tensor, cache: Cache, input_pos: Tensor, scratch: fused.FusedScratch, **options: Any
) -> Tensor:
    """Into a copy of `out`; the tickets are handed back as they were."""
    q, k, v, input_pos, out = (x.to(DEVICE, copy=True) for x in (q, cache.k, cache.v, input_pos, out))
    k_scales, v_scales = (x if x is None else x.to(DEVICE) for x in (cache.k_scales, cache.v_scales))
    fused.attend_fused(out, q, k, v, input_pos, scratch, k_scales=k_scales, v_scales=v_scales, **options)
    assert not scratch.tickets.any()
    return out.cpu()


def assert_is_two_launches(q: Tensor, cache: Cache, input_pos: Tensor, sliding_window: int | None = None) -> None:
    """Twice, since the second call finds what the first has left."""
    expected = attend_by_kernel(q, cache, input_pos, sliding_window)
    scratch = make_scratch(q, cache)
    for _ in range(2):
        out = torch.full_like(expected, torch.nan)
        assert torch.equal(
            attend_fused(out, q, cache, input_pos, scratch, sliding_window=sliding_window),
            expected,
        )


@pytest.mark.parametrize("dtype", [FLOAT, INT8])
@pytest.mark.parametrize(
    ("position", "sliding_window"),
    [
        *((position, None) for position in (0, CHUNK - 1, CHUNK, 2 * CHUNK + 1)),
        *((CHUNK, 1), (CHUNK, 2), (2 * CHUNK + 9, CHUNK + 1)),
    ],
)
def test_it_has_the_bits_of_two_launches(dtype: torch.dtype, position: int, sliding_window: int | None) -> None:
    assert_is_two_launches(*make_call(dtype, start=position, dim=32), sliding_window)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tokens", "sliding_window"),
    [
        *((2, 2, 2, None), (4, 2, 5, 100), (3, 1, 16, None)),
        *(
            pytest.param(heads, kv_heads, tokens, sliding_window, marks=pytest.mark.slow)
            for heads, kv_heads in ((2, 2), (3, 1), (8, 2), (8, 1))
            for tokens in (1, 2, 5, 16)
            for sliding_window in (None, 100)
        ),
    ],
)
def test_rows_that_are_computed_by_several_programs_are_combined_by_as_many(
    heads: int, kv_heads: int, tokens: int, sliding_window: int | None
) -> None:
    sizes = {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "dim": 16, "batch": 1 if tokens > 5 else 2}
    assert_is_two_launches(*make_call(INT8, start=CHUNK - 1, query_dtype=HALF, **sizes), sliding_window)


@pytest.mark.parametrize(
    ("query_dtype", "dtype", "dim"), [(FLOAT, BFLOAT, 80), (HALF, FLOAT, 2), (BFLOAT, BFLOAT, 100), (BFLOAT, INT8, 256)]
)
def test_heads_may_be_of_any_width_and_dtype(query_dtype: torch.dtype, dtype: torch.dtype, dim: int) -> None:
    assert_is_two_launches(*make_call(dtype, start=CHUNK - 1, tokens=2, heads=2, dim=dim, query_dtype=query_dtype))


@pytest.mark.slow
def test_more_chunks_than_are_combined_at_once_are_combined() -> None:
    start = (attention.COMBINED + 1) * CHUNK
    q, cache, _ = make_call(HALF, start=start, tokens=2, heads=1, dim=16, query_dtype=HALF)
    assert_is_two_launches(q, cache, torch.tensor([CHUNK - 1, start + 1]))
    assert_is_two_launches(q, cache, torch.tensor([start - 3 * CHUNK, start + 1]), 2 * CHUNK)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU has an order of its own")
def test_any_program_may_be_the_last_and_others_come_between(monkeypatch: pytest.MonkeyPatch) -> None:
    q, cache, input_pos = make_call(FLOAT, start=CHUNK, tokens=5, heads=8, kv_heads=2, dim=16)
    expected = attend_by_kernel(q, cache, input_pos)
    builder = triton.runtime.interpreter.InterpreterBuilder
    run_program: Callable[..., None] = builder.set_grid_idx

    def run_chunk_by_chunk(self: Any, x: int, y: int, z: int) -> None:
        """The last chunk of all rows and heads first, instead of all chunks of the first rows."""
        blocks, heads, chunks = self.grid_dim
        assert (blocks, heads, chunks) == (2, 2, 2)
        number = (x * heads + y) * chunks + z
        run_program(self, number % blocks, number // blocks % heads, chunks - 1 - number // (blocks * heads))

    monkeypatch.setattr(builder, "set_grid_idx", run_chunk_by_chunk)
    assert torch.equal(
        attend_fused(torch.empty_like(expected), q, cache, input_pos, make_scratch(q, cache)),
        expected,
    )


@pytest.mark.parametrize("position", [5, CHUNK])
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp8", "int8", "int4"])
def test_a_result_may_be_the_inputs_of_a_product(kind: Kind, position: int) -> None:
    q, cache, input_pos = make_call(FLOAT, start=position, heads=3, dim=20, batch=2)
    rows = attend_by_kernel(q, cache, input_pos).view(2, 60)
    for arrange, is_vector in ((arrange_inputs, True), (arrange_rows, False)):
        expected = arrange(rows, kind).contiguous()
        scratch = make_scratch(q, cache)
        out = attend_fused(torch.zeros_like(expected), q, cache, input_pos, scratch, kind=kind, is_vector=is_vector)
        assert torch.equal(out, expected)


def test_inputs_of_a_product_with_several_rows_are_rounded_to_its_dtype() -> None:
    q, cache, input_pos = make_call(HALF, start=CHUNK, tokens=3, heads=2, dim=16, query_dtype=HALF)
    expected = arrange_rows(attend_by_kernel(q, cache, input_pos).view(3, 32), "int4").contiguous()
    out = attend_fused(torch.zeros_like(expected), q, cache, input_pos, make_scratch(q, cache), kind="int4")
    assert out.dtype == HALF
    assert torch.equal(out, expected)


@pytest.mark.slow
def test_a_scratch_for_more_serves_calls_of_less() -> None:
    larger = make_call(FLOAT, start=3 * CHUNK, tokens=16, heads=4, kv_heads=2, dim=16)
    scratch = make_scratch(*larger[:2])
    for tokens, position in ((5, 0), (1, CHUNK), (16, 0)):
        q, cache, input_pos = make_call(FLOAT, start=position, tokens=tokens, heads=4, kv_heads=2, dim=16)
        expected = attend_by_kernel(q, cache, input_pos)
        assert torch.equal(attend_fused(torch.empty_like(expected), q, cache, input_pos, scratch), expected)


def test_what_does_not_fit_is_refused() -> None:
    q, cache, pos = make_call(FLOAT, start=5, tokens=2, heads=8, kv_heads=2, dim=16)
    scratch, out = make_scratch(q, cache), torch.empty(1, 2, 128)
    planes = torch.zeros(2, 8, 16)
    refused: list[tuple[str, Tensor, fused.FusedScratch, dict[str, object]]] = [
        ("does not hold", out[:, :1], scratch, {}),
        ("does not hold", out.view(2, 1, 128), scratch, {}),
        ("does not hold", planes[:1], scratch, {"kind": "int4"}),
        ("does not hold", planes[:, :4], scratch, {"kind": "int4"}),
        ("does not hold", planes[:, :, :15].contiguous(), scratch, {"kind": "int4"}),
        ("does not hold", planes.mT.contiguous().mT, scratch, {"kind": "int4"}),
        ("must be float32", planes.half(), scratch, {"kind": "int4", "is_vector": True}),
        ("a scratch", out, make_scratch(q[:, :1], cache), {}),
        ("2 tickets", out, scratch._replace(tickets=scratch.tickets[:1]), {}),
        ("2 tickets", out, scratch._replace(tickets=scratch.tickets.long()), {}),
        ("sliding window", out, scratch, {"sliding_window": 0}),
    ]
    for words, memory, some, options in refused:
        with pytest.raises(ValueError, match=words):
            fused.attend_fused(memory, q, cache.k, cache.v, pos, some, **options)


@pytest.mark.parametrize(
    ("configurations", "rows", "architectures"),
    [(QUICK[:1], (16,), (90,)), pytest.param(UNSPILLED, (16, 32), ARCHITECTURES, marks=pytest.mark.slow)],
    ids=["quick", "all"],
)
def test_compiled_it_waits_first_and_combines_what_all_have_stored(
    configurations: list[Configuration], rows: tuple[int, ...], architectures: tuple[int, ...]
) -> None:
    cases = list(itertools.product(configurations, rows))
    for architecture in architectures:
        pdl = architecture >= 90
        launches = [launch_fused(*case, pdl=pdl) for case in cases]
        for (configuration, _), programs in zip(cases, compile_offline(launches, [architecture]), strict=True):
            assert_reads_well(programs[architecture], configuration)
            assert_combines_after_all(programs[architecture])
            assert_waits_first(programs[architecture], pdl=pdl)


def launch_fused(configuration: Configuration, rows: int, *, pdl: bool) -> Launch:
    """The kernel for so many rows of queries, as `attend_fused` launches it for a product with int4."""
    launch = launch_attention(configuration, rows)
    tile = attention.choose_tile(rows, configuration.dim, exact=configuration.is_exact)
    arguments = {
        **launch.arguments,
        "out": "*fp32" if rows == 16 else f"*{CUDA_NAMES[configuration.query_dtype]}",
        "tickets": "*i32",
        "block_chunks": attention.COMBINED,
        "combined_rows": fused.choose_combined_rows(tile, launch.arguments["block_dim"]),
        **{"W": 512, "P": 8, "kind": "int4", "is_vector": rows == 16},
        "pdl": pdl,
    }
    return Launch(
        "gptfast.kernels.cuda.fused_attention:attend_and_combine", arguments, launch.warps, launch.stages, fuses=False
    )


def assert_waits_first(program: Program, *, pdl: bool) -> None:
    """The next kernel is let go, then the one before waited for, and only then is memory looked at."""
    names = [each.name for each in program.instructions]
    marks = [name for name in names if re.match(rf"PREEXIT|ACQBULK|{MEMORY}G", name)]
    if pdl:
        assert marks[:2] == ["PREEXIT", "ACQBULK"]
    assert marks.count("ACQBULK") == marks.count("PREEXIT") == pdl


def assert_combines_after_all(program: Program) -> None:
    """Between a program's stores and the loads of all stands what orders them, once; see `attend_and_combine`."""
    names = [each.name for each in program.instructions]
    draw = next(index for index, name in enumerate(names) if name.startswith("ATOMG"))
    assert "ADD" in names[draw]
    assert sum(name.startswith("ATOM") for name in names) == 1
    # Backwards, the release and a barrier come before any store.
    before = [name for name in reversed(names[:draw]) if re.match(r"MEMBAR|BAR\.SYNC|STG", name)]
    # Triton 3.9 has two barriers in turn.
    kinds = [kind for kind, _ in itertools.groupby(name.split(".")[0] for name in before)]
    assert kinds[:3] == ["MEMBAR", "BAR", "STG"]
    assert before[0].endswith(".GPU")
    after = [name for name in names[draw + 1 :] if re.match(r"CCTL|BAR\.SYNC|LDG\S*STRONG", name)]
    assert after[0] == "CCTL.IVALL"
    assert after[1].startswith("BAR.SYNC")
    loads = after[2 : 2 + 3 * attention.COMBINED]
    assert len(loads) == 3 * attention.COMBINED
    assert all(name.startswith("LDG") for name in loads), "and no barrier among them"
    assert sum(".128" in name for name in loads) == attention.COMBINED
    assert not any("STRONG" in name for name in names[:draw] if name.startswith("LDG"))
