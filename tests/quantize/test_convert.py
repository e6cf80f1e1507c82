"""What we write, opened by transformers and by gptfast: both must compute the same logits from the same file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from torch import Tensor

from gptfast.checkpoint import open_checkpoint
from gptfast.config import ModelConfig, RopeScaling
from gptfast.quantization import FLOAT8, WeightScheme
from gptfast.rounding import round_to_nearest
from quantize import writer
from quantize.convert import Settings, convert
from quantize.names import get_hf_module
from quantize.plan import KeepRule, list_default_rules, make_plan
from quantize.report import Report
from tests.reference.checkpoints import write_hf, write_meta
from tests.reference.families import FAMILIES, random_tokens, random_weights
from tests.reference.gguf_files import write_gguf
from tests.reference.product import load_and_run
from tests.reference.tokenizers import write_meta_tokenizer

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

FamilyDirectory = Callable[[str], Path]
TOLERANCE = 1e-4
LENGTH = 64
INT4 = WeightScheme(4, 32)
INT8 = WeightScheme(8, None)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def quantize(source: Path, output: Path, scheme: WeightScheme, rules: list[KeepRule] | None = None) -> Report:
    checkpoint = open_checkpoint(source)
    plan = make_plan(checkpoint, scheme, list_default_rules(scheme) if rules is None else rules)
    settings = Settings("fp8" if scheme.is_float else "int8" if scheme.bits == 8 else "int4", scheme)
    return convert(checkpoint, output, plan, settings, lambda name: None)


@torch.no_grad()
def transformers_logits(directory: Path, tokens: list[int], **options: Any) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True, **options
    )
    logits: Tensor = model.eval()(torch.tensor([tokens])).logits[0]
    return logits


def assert_agree(directory: Path, config: ModelConfig, *, dequantize: bool = False) -> None:
    """Transformers and gptfast compute the same logits."""
    tokens = random_tokens(config, LENGTH)
    options = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if dequantize else {}
    theirs = transformers_logits(directory, tokens, **options)
    assert float((load_and_run(directory, tokens) - theirs).abs().max()) < TOLERANCE


def list_stored(directory: Path) -> Iterator[str]:
    for file in directory.glob("*.safetensors"):
        with safetensors.safe_open(file, framework="pt") as opened:
            yield from opened.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_symmetric_int4_of_every_family_opens_in_transformers(
    family: str, tmp_path: Path, family_directory: FamilyDirectory
) -> None:
    report = quantize(family_directory(family), tmp_path / "out", INT4)
    assert {layer.precision for layer in report.layers} == {"int4 g32", "int8 channel"}
    assert_agree(tmp_path / "out", FAMILIES[family])


@pytest.mark.parametrize("scheme", [INT8, WeightScheme(8, 32), WeightScheme(4, None), WeightScheme(4, 64)])
def test_other_symmetric_schemes_open_in_transformers(
    scheme: WeightScheme, tmp_path: Path, family_directory: FamilyDirectory
) -> None:
    quantize(family_directory("llama-tied"), tmp_path / "out", scheme)
    assert_agree(tmp_path / "out", FAMILIES["llama-tied"])


@pytest.mark.parametrize(
    ("scheme", "rules", "head"),
    [
        (FLOAT8, None, "int8 channel"),
        (FLOAT8, [], "fp8 channel"),
        (FLOAT8, [KeepRule("lm_head", "bf16")], "bfloat16"),
        (INT4, [KeepRule("lm_head", "fp8")], "fp8 channel"),
    ],
    ids=["int8 head", "fp8 head", "dense head", "int4 with an fp8 head"],
)
@pytest.mark.parametrize("family", ["llama-tied", "qwen3"])
def test_fp8_opens_in_transformers(
    scheme: WeightScheme,
    rules: list[KeepRule] | None,
    head: str,
    family: str,
    tmp_path: Path,
    family_directory: FamilyDirectory,
) -> None:
    report = quantize(family_directory(family), tmp_path / "out", scheme, rules)
    precisions = {layer.hf_name: layer.precision for layer in report.layers}
    assert precisions.pop("lm_head") == head
    assert set(precisions.values()) == {scheme.describe()}
    assert_agree(tmp_path / "out", FAMILIES[family])


def test_fp8_is_read_back_to_the_bit(tmp_path: Path, family_directory: FamilyDirectory) -> None:
    quantize(family_directory("llama-bias"), tmp_path / "out", FLOAT8)
    source, result = open_checkpoint(family_directory("llama-bias")), open_checkpoint(tmp_path / "out")
    name = "layers.1.feed_forward.w2.weight"
    rounded, read = round_to_nearest(source.read(name), FLOAT8), result.read_quantized(name)
    assert read is not None
    assert torch.equal(read.codes.view(torch.uint8), rounded.codes.view(torch.uint8))
    assert torch.equal(read.scales, rounded.scales)
    assert torch.equal(result.read(name), rounded.dequantize())


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("family", ["llama-8-2", "llama-tied", "qwen2"])
@pytest.mark.parametrize(
    "scheme", [WeightScheme(4, 32, False), WeightScheme(4, None, False), WeightScheme(8, None, False)]
)
def test_asymmetric_opens_in_transformers_if_told_to_dequantize(
    scheme: WeightScheme, family: str, tmp_path: Path, family_directory: FamilyDirectory
) -> None:
    quantize(family_directory(family), tmp_path / "out", scheme)
    assert_agree(tmp_path / "out", FAMILIES[family], dequantize=True)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_asymmetric_int8_with_its_head_opens_too(tmp_path: Path, family_directory: FamilyDirectory) -> None:
    report = quantize(
        family_directory("llama-8-2"), tmp_path / "out", WeightScheme(8, None, False), [KeepRule("lm_head", "int8")]
    )
    assert {layer.precision for layer in report.layers} == {"int8 channel asymmetric"}
    assert_agree(tmp_path / "out", FAMILIES["llama-8-2"], dequantize=True)


def test_a_tied_source_gets_a_head_of_its_own(tmp_path: Path, family_directory: FamilyDirectory) -> None:
    quantize(family_directory("qwen2"), tmp_path / "out", INT4)
    stored = set(list_stored(tmp_path / "out"))
    assert {"lm_head.weight_packed", "model.embed_tokens.weight"} <= stored
    assert "lm_head.weight" not in stored
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False


def test_mixed_groups_and_kept_layers_open_in_transformers(tmp_path: Path, family_directory: FamilyDirectory) -> None:
    rules = [
        KeepRule("lm_head", "int8"),
        KeepRule("layers.1.attention.wq", "int8"),
        KeepRule("re:.*0.*gate", "bf16"),
    ]
    report = quantize(family_directory("qwen3"), tmp_path / "out", WeightScheme(4, 128), rules)
    precisions = {layer.hf_name: layer.precision for layer in report.layers}
    assert precisions["model.layers.0.mlp.down_proj"] == "int4 g32"
    assert precisions["model.layers.0.mlp.gate_proj"] == "bfloat16"
    assert precisions["model.layers.1.self_attn.q_proj"] == "int8 channel"
    assert_agree(tmp_path / "out", FAMILIES["qwen3"])


def test_a_layer_that_no_group_divides_opens_in_transformers(tmp_path: Path) -> None:
    config = replace(FAMILIES["llama-8-2"], ffn_dim=72)
    quantize(write_hf(tmp_path / "in", random_weights(config), config), tmp_path / "out", INT4)
    ignored = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == [f"model.layers.{i}.mlp.down_proj" for i in range(3)]
    assert_agree(tmp_path / "out", config)


@pytest.mark.parametrize("family", ["llama3-rope", "llama-linear-rope", "qwen2", "qwen3", "mistral"])
def test_a_gguf_file_becomes_a_directory_that_transformers_opens(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family]
    write_gguf(tmp_path / "model.gguf", random_weights(config), config, types="Q8_0")
    quantize(tmp_path / "model.gguf", tmp_path / "out", INT4)
    assert_agree(tmp_path / "out", config)
    assert open_checkpoint(tmp_path / "out").generation == open_checkpoint(tmp_path / "model.gguf").generation


def test_the_tokenizer_of_a_gguf_file_gives_transformers_our_ids(tmp_path: Path) -> None:
    config = FAMILIES["llama-8-2"]
    for adds_bos in (False, True):
        source, output = tmp_path / f"{adds_bos}.gguf", tmp_path / f"out-{adds_bos}"
        facts = {"tokenizer.ggml.add_bos_token": adds_bos, "tokenizer.chat_template": "{{ messages[0].content }}"}
        write_gguf(source, random_weights(config), config, metadata=facts)
        quantize(source, output, INT4)
        ours, theirs = open_checkpoint(output).load_tokenizer(), transformers.AutoTokenizer.from_pretrained(output)
        assert ours is not None
        original = open_checkpoint(source).load_tokenizer()
        assert original is not None
        for text in ("Hello world 1234", "  naïve\n\n", "<|im_end|>x"):
            assert ours.encode(text) == original.encode(text)
        assert theirs("Hello world 1234").input_ids == ours.encode("Hello world 1234")
        assert theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_metas_layout_becomes_a_directory_that_both_open(tmp_path: Path) -> None:
    config = replace(
        FAMILIES["llama3-rope"],
        vocab_size=544,
        max_seq_len=131_072,
        rope_scaling=RopeScaling("llama3", factor=8.0, original_max_seq_len=8192),
    )
    write_meta(tmp_path / "in", random_weights(config), config, shards=2)
    write_meta_tokenizer(tmp_path / "in")
    quantize(tmp_path / "in", tmp_path / "out", INT4)
    source, result = open_checkpoint(tmp_path / "in"), open_checkpoint(tmp_path / "out")
    assert replace(result.config, tie_word_embeddings=False) == source.config
    assert result.generation == source.generation
    assert result.read_chat_template() == source.read_chat_template()
    tokenizers = source.load_tokenizer(), result.load_tokenizer()
    assert tokenizers[0] is not None
    assert tokenizers[1] is not None
    assert tokenizers[0].encode("Hello user") == tokenizers[1].encode("Hello user")
    assert_agree(tmp_path / "out", config)


def test_shards_hold_what_one_file_holds(
    tmp_path: Path, family_directory: FamilyDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(family_directory("llama-8-2"), tmp_path / "one", INT4)
    monkeypatch.setattr(writer, "SHARD_BYTES", 50_000)
    quantize(family_directory("llama-8-2"), tmp_path / "many", INT4)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    one, many = open_checkpoint(tmp_path / "one"), open_checkpoint(tmp_path / "many")
    assert one.names() == many.names()
    assert all(torch.equal(one.read(name), many.read(name)) for name in one.names())
    assert_agree(tmp_path / "many", FAMILIES["llama-8-2"])


def test_what_stays_dense_is_copied_bit_by_bit(tmp_path: Path) -> None:
    config = FAMILIES["llama-bias"]
    write_hf(tmp_path / "in", random_weights(config), config, dtype=torch.bfloat16)
    quantize(tmp_path / "in", tmp_path / "out", INT4)
    source, result = open_checkpoint(tmp_path / "in"), open_checkpoint(tmp_path / "out")
    dense = {name for name in source.names() if result.describe_type(name) == "BF16"}
    assert {"tok_embeddings.weight", "norm.weight", "layers.0.attention.wq.bias"} <= dense
    assert all(torch.equal(source.read(name), result.read(name)) for name in dense)


def test_the_report_tells_the_error_of_every_layer_and_the_size_of_the_file(
    tmp_path: Path, family_directory: FamilyDirectory
) -> None:
    source = family_directory("llama-8-2")
    report = quantize(source, tmp_path / "out", INT4)
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    assert len(report.layers) == 3 * 7 + 1
    for layer in report.layers:
        exact = before.read(layer.name)
        error = float((after.read(layer.name) - exact).norm() / exact.norm())
        assert layer.relative_error == pytest.approx(error, rel=1e-4)
        assert layer.hf_name == get_hf_module(layer.name)
    file_bytes = (tmp_path / "out/model.safetensors").stat().st_size
    assert report.stored_bytes == pytest.approx(file_bytes, rel=0.2)  # the header of a tiny file counts
    weights = sum(tensor.numel() for tensor in random_weights(FAMILIES["llama-8-2"]).values())
    assert report.bits_per_weight == 8 * report.stored_bytes / weights
