"""Loading: which device and dtype are chosen, what is refused, and what a session then knows."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from gptfast import session as session_module
from gptfast.cache import CACHE_VARIABLE
from gptfast.checkpoint import presets
from gptfast.errors import CheckpointError, UserError
from gptfast.generation import generate, stream
from gptfast.kernels.ops import Kernels
from gptfast.model import Transformer
from gptfast.runner import INITIAL_CAPACITY, Runner
from gptfast.session import (
    CUDA_GRAPHS,
    DTYPES,
    Session,
    check_cuda_graphs,
    check_step,
    choose_device,
    choose_dtype,
    load,
    records_graphs,
)
from tests.reference.sessions import (
    CONTEXT,
    random_prompt,
    run_process,
    tiny_config,
    write_tiny_model,
)

pytestmark = pytest.mark.usefixtures("tiny_cache")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", eos_ids=[2, 0])


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)


# What a session knows


@pytest.mark.parametrize("as_text", [False, True])
def test_a_session_knows_its_model(as_text: bool, directory: Path) -> None:
    session = load(str(directory) if as_text else directory, dtype="float32")
    assert session.runner.model.config == tiny_config()
    assert session.runner.context == CONTEXT
    assert session.runner.batch_size == 1
    assert not session.runner.is_compiled
    assert set(session.defaults.eos_ids) == {0, 2}
    assert session.tokenizer is not None
    assert session.chat_template is not None
    assert session.load_s > 0
    assert session.cached_ids == []


def test_a_base_model_has_no_chat_template(tmp_path: Path) -> None:
    assert load(write_tiny_model(tmp_path / "base", template=None), dtype="float32").chat_template is None


def test_a_home_directory_may_be_written_as_a_tilde(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(directory.parent))
    assert load(f"~/{directory.name}", dtype="float32").runner.context == CONTEXT


@pytest.mark.parametrize(("weights", "bytes_per_weight"), [("fp32", 4), ("bf16", 2), ("int8", 1), ("int4", 0.5)])
def test_bytes_per_token_count_all_weights_but_one_row_of_the_embedding(
    weights: str, bytes_per_weight: float, directory: Path
) -> None:
    config = tiny_config()
    attention = config.dim * (2 * config.n_heads + 2 * config.n_kv_heads) * config.head_dim
    layer = attention + 3 * config.dim * config.ffn_dim
    head = config.vocab_size * config.dim
    norms = (2 * config.n_layers + 1) * config.dim * 4
    head_bytes = min(bytes_per_weight, 4) if bytes_per_weight >= 1 else 1
    expected = config.n_layers * layer * bytes_per_weight + head * head_bytes + norms
    counted = load(directory, dtype="float32", weights=weights).weight_bytes_per_token
    # Beside them: scales, a header of 64 bytes and padding in each matrix, and the row.
    scales = 0 if bytes_per_weight >= 2 else config.n_layers * layer // 16 + 2 * config.vocab_size
    assert expected < counted < expected + scales + 16_384


def test_bytes_per_token_of_a_tied_head_count_the_matrix_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tied = replace(tiny_config(), tie_word_embeddings=True)
    monkeypatch.setattr(presets, "PRESETS", {"tied": tied, "apart": tiny_config()})
    counts = [load(preset=name, dtype="float32").weight_bytes_per_token for name in ("tied", "apart")]
    # The row that the other reads beside its head, and that row's share of what a matrix is padded with.
    assert tied.dim <= counts[1] - counts[0] <= 4 * tied.dim * 1.1


def test_random_weights_have_no_tokenizer_and_are_the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "PRESETS", {"tiny": tiny_config()})
    texts = []
    for _ in range(2):
        session = load(preset="tiny", dtype="float32")
        assert session.tokenizer is None
        assert session.chat_template is None
        texts.append(generate(session, [5, 6, 7], max_new_tokens=10)[0])
    assert texts[0].token_ids == texts[1].token_ids
    assert texts[0].text == ""


def test_without_a_path_the_default_model_is_loaded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptfast.download.get_default_model", lambda: directory)
    assert load(dtype="float32").runner.model.config == tiny_config()


def test_threads_are_set_or_left_alone(directory: Path) -> None:
    load(directory, dtype="float32", threads=2)
    assert torch.get_num_threads() == 2
    load(directory, dtype="float32")
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ("float32", "float32", "fp32", "bfloat16")),
        ({"dtype": "bfloat16"}, ("bfloat16", "float32", "fp32", "bfloat16")),
        ({"dtype": "float32"}, ("float32", "float32", "fp32", "float32")),
        ({"weights": "bf16", "kv_dtype": "int8"}, ("float32", "bfloat16", "fp32", "int8")),
        ({"weights": "int8"}, ("float32", "int8 channel", "int8", "bfloat16")),
        ({"weights": "int4", "activations": "fp32"}, ("float32", "int4 g32 + int8 channel", "fp32", "bfloat16")),
    ],
)
def test_a_session_tells_the_precisions_that_it_runs_in(
    settings: dict[str, str], expected: tuple[str, ...], directory: Path
) -> None:
    session = load(directory, **settings)  # type: ignore[arg-type]
    assert (session.dtype, session.weights, session.activations, session.kv_dtype) == expected


def test_rounding_activations_without_quantized_weights_is_said_to_do_nothing(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(directory, activations="int8").activations == "fp32"
    assert "quantized weights only" in caplog.text


# With a draft


@pytest.mark.parametrize("is_behind_ngram", [False, True])
def test_a_draft_may_be_a_path_or_its_text(is_behind_ngram: bool, directory: Path) -> None:
    """Behind `ngram,` a path is text in any case."""
    draft = f"ngram,{directory}" if is_behind_ngram else directory
    session = load(directory, dtype="float32", draft=draft, speculate_k=3)
    assert session.speculator is not None
    assert [lane.name for lane in session.speculator.lanes] == str(draft).split(",")
    result = generate(session, random_prompt(20), max_new_tokens=20)[0]
    assert (
        result.token_ids
        == generate(load(directory, dtype="float32"), random_prompt(20), max_new_tokens=20)[0].token_ids
    )
    assert session.speculator.rounds > 0


def test_a_draft_that_is_no_path_is_refused_as_text_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"draft .*nowhere does not exist; give ngram"):
        load(tmp_path, dtype="float32", draft=tmp_path / "nowhere")


@pytest.mark.parametrize("k", ["auto", "3", 2.5, 0, 16])
def test_a_k_that_is_no_number_of_tokens_in_range_is_refused(k: object, directory: Path) -> None:
    with pytest.raises(UserError) as refused:
        load(directory, dtype="float32", draft="ngram", speculate_k=k)  # type: ignore[arg-type]
    assert str(refused.value) == f"{k!r} tokens cannot be speculated at once; use 1 to 15, or None for auto"


def test_a_draft_s_settings_are_refused_before_the_checkpoint_is_opened(tmp_path: Path) -> None:
    for settings, words in (
        ({"draft": "ngram", "batch_size": 2}, "one text at a time"),
        ({"draft": "bogus"}, "draft bogus does not exist"),
        ({"speculate_k": 3}, "nothing proposes them"),
    ):
        with pytest.raises(UserError, match=words):
            load(tmp_path / "nothing.gguf", dtype="float32", **settings)  # type: ignore[arg-type]


def test_torch_s_graphs_need_compiled_steps() -> None:
    with pytest.raises(UserError, match="compile the steps"):
        check_cuda_graphs("trees", CUDA, compile=False)
    for name in (*CUDA_GRAPHS, None):
        check_cuda_graphs(name, CUDA, compile=True)


@pytest.mark.parametrize("kernels", ["triton", None])
def test_steps_are_recorded_where_they_are_compiled_or_that_is_asked_for(
    kernels: Kernels | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = cast(Transformer, SimpleNamespace(device=CUDA, kernels=kernels))
    has_kernels = kernels is not None
    assert records_graphs(None, model, compile=True) == records_graphs("manual", model, compile=False) == has_kernels
    assert not records_graphs(None, model, compile=False)
    assert not records_graphs("trees", model, compile=True)
    assert not records_graphs("off", model, compile=True)
    assert ("not recorded" in caplog.text) != has_kernels
    assert not records_graphs(None, cast(Transformer, SimpleNamespace(device=CPU, kernels="cpp")), compile=True)


def test_a_fused_step_is_recorded_by_us() -> None:
    for graphs in ("trees", "off"):
        with pytest.raises(UserError, match=f"cuda-graphs is {graphs}; use manual"):
            check_step("fused", CUDA, graphs, compile=True)
        check_step("compiled", CUDA, graphs, compile=True)
    for graphs in ("manual", None):
        check_step("fused", CUDA, graphs, compile=False)
    with pytest.raises(UserError, match="not compiled"):
        check_step("compiled", CUDA, None, compile=False)


def get_draft(session: Session) -> Runner:
    assert session.speculator is not None
    [draft] = session.speculator.list_runners()
    return draft


def test_both_caches_have_room_before_the_first_token(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INITIAL_CAPACITY, "cpu", 64)
    session = load(directory, dtype="float32", draft=directory)
    draft = get_draft(session)
    assert session.runner.capacity == draft.capacity == 64
    stream(session, random_prompt(50), max_new_tokens=150)
    assert session.runner.capacity == draft.capacity == 200
    assert draft.model.list_caches()[0] is not session.runner.model.list_caches()[0]


def test_a_draft_of_a_shorter_context_has_room_for_that(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(INITIAL_CAPACITY, "cpu", 64)
    session = load(directory, dtype="float32", draft=write_tiny_model(tmp_path / "short", context=96))
    session.reserve(200)
    assert (session.runner.capacity, get_draft(session).capacity) == (200, 96)


def test_compiling_counts_the_steps_of_a_draft(directory: Path) -> None:
    session = load(directory, dtype="float32", draft="layers:1", compile=True)
    target, draft = session.runner, get_draft(session)
    assert session.list_runners() == [target, draft]
    assert (session.compile_s, session.compile_kind) == (0, "cached")
    draft.warm_up(1)
    assert session.compile_s == draft.compile_statistics.seconds > 0
    target.warm_up(1)
    assert session.compile_s == target.compile_statistics.seconds + draft.compile_statistics.seconds
    assert target.compile_statistics.seconds > 0


@pytest.mark.parametrize(
    ("target", "draft", "expected"),
    [("cold", "cached", "cold"), ("cached", "cold", "cold"), ("cached", "cached", "cached")],
)
def test_one_cold_step_makes_a_start_cold(target: str, draft: str, expected: str, directory: Path) -> None:
    session = load(directory, dtype="float32", draft="layers:1", compile=True)
    for runner, kind in ((session.runner, target), (get_draft(session), draft)):
        statistics = runner.compile_statistics
        statistics.compiled, statistics.loaded = (1, 2) if kind == "cold" else (0, 3)
    assert session.compile_kind == expected


def test_nothing_is_compiled_of_an_eager_target_or_its_draft(directory: Path) -> None:
    session = load(directory, dtype="float32", draft="layers:1")
    session.warm_up(20)
    assert (session.compile_s, session.compile_kind) == (0, "none")


# What is refused


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch_size": 0}, "batch size is 0; it must be at least 1"),
        ({"threads": 0}, "0 threads"),
        ({"threads": -2}, "-2 threads"),
        ({"device": "tpu"}, "'tpu' is not supported; use cpu, cuda or auto"),
        ({"dtype": "int3"}, "'int3' is not supported; use float32"),
        ({"dtype": "float16", "device": "cpu"}, "float16 is not supported on cpu"),
        ({"preset": "tiny"}, "both"),
        ({"weights": "int3"}, "weights 'int3' is not supported; use stored, fp32, bf16, fp8, int8, int4"),
        ({"activations": "int4"}, "activations 'int4' is not supported; use fp32, int8"),
        ({"kv_dtype": "fp16"}, "kv-dtype 'fp16' is not supported; use float32"),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_refused_by_name(
    settings: dict[str, object], words: str, directory: Path
) -> None:
    threads = torch.get_num_threads()
    with pytest.raises(UserError) as refused:
        load(directory, **settings)  # type: ignore[arg-type]
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert torch.get_num_threads() == threads


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(CheckpointError, match=r"llama-3\.2-1b"):
        load(preset="llama-3.2-1")


def test_a_missing_path_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing\.gguf does not exist"):
        load(tmp_path / "nothing.gguf", dtype="float32")


# Device and dtype


def test_the_device_is_what_is_asked_for_or_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == CPU
    with pytest.raises(UserError, match="no CUDA GPU; use --device cpu"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == choose_device("cuda") == CUDA
    assert choose_device("cpu") == CPU


@pytest.mark.parametrize("name", DTYPES)
def test_a_dtype_that_is_named_is_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, (8, 0))
    assert choose_dtype(name, CUDA) == DTYPES[name]


def test_dtypes_that_a_device_has_no_arithmetic_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, (7, 5))
    with pytest.raises(UserError, match=r"bfloat16 is not supported .* use float16"):
        choose_dtype("bfloat16", CUDA)
    assert choose_dtype("fp16", CUDA) == torch.float16
    with pytest.raises(UserError, match="float16 is not supported on cpu"):
        choose_dtype("fp16", CPU)


@pytest.mark.parametrize(("capability", "expected"), [((9, 0), torch.bfloat16), ((7, 5), torch.float16)])
def test_a_gpus_own_dtype_is_one_that_it_can_compute_in(
    capability: tuple[int, int], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, capability)
    assert choose_dtype(None, CUDA) == expected


class Stopwatch:
    """Takes the place of the measurement; `seconds` is what it finds."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds
        self.calls = 0

    def __call__(self, *_: object) -> dict[str, float]:
        self.calls += 1
        return self.seconds


@pytest.fixture
def stopwatch(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    stopwatch = Stopwatch(float32=1.0, bfloat16=2.0)
    monkeypatch.setattr(session_module, "time_matrix_vector", stopwatch)
    return stopwatch


def test_with_the_kernels_a_cpu_computes_in_float32_and_measures_nothing(
    own_cache: Path, stopwatch: Stopwatch, directory: Path
) -> None:
    session = load(directory)
    assert (session.dtype, session.kv_dtype) == ("float32", "bfloat16")
    assert stopwatch.calls == 0


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(("bfloat16_s", "expected"), [(0.5, torch.bfloat16), (2.0, torch.float32)])
def test_the_faster_dtype_of_a_cpu_is_measured_once_and_kept(
    bfloat16_s: float, expected: torch.dtype, own_cache: Path, stopwatch: Stopwatch, directory: Path
) -> None:
    stopwatch.seconds["bfloat16"] = bfloat16_s
    assert load(directory).runner.model.tok_embeddings.weight.dtype == expected
    assert choose_dtype(None, CPU) == expected
    assert stopwatch.calls == 1
    assert len(list((own_cache / "cpu-dtype").iterdir())) == 1


@pytest.mark.usefixtures("no_kernels")
def test_another_number_of_threads_is_measured_anew(own_cache: Path, stopwatch: Stopwatch) -> None:
    for threads in (1, 2, 1, 2):
        torch.set_num_threads(threads)
        choose_dtype(None, CPU)
    assert stopwatch.calls == 2


@pytest.mark.usefixtures("no_kernels")
def test_a_dtype_that_is_named_is_not_measured(own_cache: Path, stopwatch: Stopwatch, directory: Path) -> None:
    load(directory, dtype="bf16")
    assert stopwatch.calls == 0
    assert not own_cache.exists()


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("content", ["", "{}", '{"float32": "fast"}'])
def test_a_damaged_measurement_is_made_again(content: str, own_cache: Path, stopwatch: Stopwatch) -> None:
    choose_dtype(None, CPU)
    (kept,) = (own_cache / "cpu-dtype").iterdir()
    kept.write_text(content)
    assert choose_dtype(None, CPU) == torch.float32
    assert json.loads(kept.read_text()) == stopwatch.seconds


@pytest.mark.usefixtures("no_kernels")
def test_a_measurement_that_cannot_be_kept_still_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopwatch: Stopwatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    assert choose_dtype(None, CPU) == torch.float32


@pytest.mark.usefixtures("no_kernels")
def test_the_measurement_times_both_dtypes(own_cache: Path) -> None:
    choose_dtype(None, CPU)
    (kept,) = (own_cache / "cpu-dtype").iterdir()
    seconds = json.loads(kept.read_text())
    assert set(seconds) == {"float32", "bfloat16"}
    assert all(0 < value < 10 for value in seconds.values())


def test_an_end_token_outside_the_vocabulary_is_ignored_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "gptfast"):
        session = load(write_tiny_model(tmp_path / "model", eos_ids=[2, 5000]), dtype="float32")
    assert session.defaults.eos_ids == (2,)
    assert any("5000" in record.getMessage() for record in caplog.records)


# Import


def test_importing_the_package_imports_no_torch_and_reads_no_file() -> None:
    program = "import sys, gptfast; print(sorted({'torch', 'tokenizers', 'gguf', 'jinja2'} & set(sys.modules)))"
    outcome = run_process("-c", program)
    assert outcome.stdout == "[]\n", outcome.stderr


def test_the_public_names_are_imported_when_they_are_used() -> None:
    program = "import gptfast; print(gptfast.load.__module__, gptfast.generate.__module__, gptfast.Message.__module__)"
    assert run_process("-c", program).stdout == "gptfast.session gptfast.generation gptfast.chat\n"
