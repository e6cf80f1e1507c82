"""Which matrix is rounded how, and what is said of those that are not rounded as asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gptfast.checkpoint import open_checkpoint
from gptfast.config import ModelConfig
from gptfast.errors import UserError
from gptfast.quantization import FLOAT8, WeightScheme
from quantize.plan import KeepRule, Plan, list_default_rules, make_plan, parse_keep_rule
from tests.reference.checkpoints import write_hf
from tests.reference.families import FAMILIES, random_weights
from tests.reference.gguf_files import write_gguf

INT4 = WeightScheme(4, 32)
INT8 = WeightScheme(8, None)


def plan_hf(
    directory: Path, config: ModelConfig, scheme: WeightScheme = INT4, rules: list[KeepRule] | None = None
) -> Plan:
    path = write_hf(directory / "model", random_weights(config), config)
    return make_plan(open_checkpoint(path), scheme, list_default_rules(scheme) if rules is None else rules)


def precisions(plan: Plan) -> dict[str, str]:
    return {tensor.name: tensor.precision for tensor in plan.tensors}


def test_blocks_get_the_scheme_and_the_head_8_bits(tmp_path: Path) -> None:
    found = precisions(plan_hf(tmp_path, FAMILIES["llama-8-2"]))
    matrices = [name for name in found if name.startswith("layers.") and not name.endswith("norm.weight")]
    assert {found[name] for name in matrices} == {"int4 g32"}
    assert found["output.weight"] == "int8 channel"
    assert found["tok_embeddings.weight"] == found["norm.weight"] == "float32"


def test_with_floats_the_head_gets_int8_unless_a_rule_says_otherwise(tmp_path: Path) -> None:
    config = FAMILIES["llama-8-2"]
    assert precisions(plan_hf(tmp_path / "own", config, FLOAT8))["output.weight"] == "int8 channel"
    rules = [*list_default_rules(FLOAT8), KeepRule("lm_head", "fp8"), KeepRule("re:.*down_proj", "bf16")]
    found = precisions(plan_hf(tmp_path / "asked", config, FLOAT8, rules))
    assert found["output.weight"] == found["layers.0.attention.wq.weight"] == "fp8 channel"
    assert found["layers.0.feed_forward.w2.weight"] == "bfloat16"


def test_a_tied_head_gets_a_tensor_of_its_own_only_if_it_is_rounded(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_hf(tmp_path, random_weights(FAMILIES["llama-tied"]), FAMILIES["llama-tied"]))
    plan = make_plan(checkpoint, INT4, list_default_rules(INT4))
    assert precisions(plan)["output.weight"] == "int8 channel"
    assert {tensor.name: tensor.source for tensor in plan.tensors}["output.weight"] == "tok_embeddings.weight"
    assert plan.tied_head is None
    asymmetric = WeightScheme(4, 32, symmetric=False)
    plan = make_plan(checkpoint, asymmetric, list_default_rules(asymmetric))
    assert "output.weight" not in precisions(plan)
    assert plan.tied_head is not None
    assert plan.tied_head.source == "tok_embeddings.weight"


def test_the_last_rule_for_a_layer_counts(tmp_path: Path) -> None:
    rules = [
        KeepRule("re:.*down_proj", "int8"),
        KeepRule("model.layers.1.mlp.down_proj", "bf16"),
        KeepRule("layers.0.attention.wq", "fp32"),
    ]
    found = precisions(plan_hf(tmp_path, FAMILIES["llama-tied"], rules=rules))
    assert found["layers.0.feed_forward.w2.weight"] == "int8 channel"
    assert found["layers.1.feed_forward.w2.weight"] == "bfloat16"
    assert found["layers.0.attention.wq.weight"] == "float32"
    assert found["layers.1.attention.wq.weight"] == "int4 g32"


def test_a_smaller_group_is_taken_where_the_one_asked_for_does_not_divide(tmp_path: Path) -> None:
    plan = plan_hf(tmp_path, FAMILIES["qwen3"], WeightScheme(4, 128))  # inputs of 64, 128 and 160
    found = precisions(plan)
    assert found["layers.0.attention.wq.weight"] == "int4 g64"
    assert found["layers.0.attention.wo.weight"] == "int4 g128"
    assert found["layers.0.feed_forward.w2.weight"] == "int4 g32"
    notes = {tensor.name: tensor.note for tensor in plan.tensors if tensor.note}
    assert notes["layers.0.feed_forward.w2.weight"] == "groups of 32, as 128 does not divide its 160 inputs"
    assert "layers.0.attention.wo.weight" not in notes
    assert not plan.skipped


def test_a_matrix_that_no_group_divides_stays_dense_and_is_told(tmp_path: Path) -> None:
    plan = plan_hf(tmp_path, replace(FAMILIES["llama-8-2"], ffn_dim=72))
    assert [tensor.name for tensor in plan.skipped] == [f"layers.{i}.feed_forward.w2.weight" for i in range(3)]
    assert "divides its 72" in str(plan.skipped[0].note)
    [warning] = plan.list_warnings()
    assert warning.startswith("3 layers stay dense")


@pytest.mark.parametrize("family", ["llama-8-2", "llama-tied"])
def test_the_head_of_an_asymmetric_file_stays_dense_with_a_note_and_counts_as_asked(
    family: str, tmp_path: Path
) -> None:
    plan = plan_hf(tmp_path, FAMILIES[family], WeightScheme(4, 32, symmetric=False))
    head = plan.layers[-1]
    assert (head.name, head.precision) == ("output.weight", "float32")
    assert "transformers opens asymmetric files only" in str(head.note)
    assert not plan.skipped


def test_a_tied_head_that_no_group_divides_stays_tied_and_is_told(tmp_path: Path) -> None:
    config = replace(FAMILIES["llama-tied"], dim=80)
    plan = plan_hf(tmp_path, config, WeightScheme(8, 32))
    assert plan.tied_head in plan.skipped


def test_a_scale_per_channel_fits_any_matrix(tmp_path: Path) -> None:
    plan = plan_hf(tmp_path, replace(FAMILIES["llama-8-2"], ffn_dim=90), INT8)
    assert len(plan.rounded) == 3 * 7 + 1
    assert not plan.skipped


def test_what_stays_dense_keeps_its_dtype_and_blocks_become_bfloat16(tmp_path: Path) -> None:
    config = FAMILIES["llama-tied"]
    half = open_checkpoint(write_hf(tmp_path / "half", random_weights(config), config, dtype=torch.float16))
    assert precisions(make_plan(half, INT4, []))["norm.weight"] == "float16"
    write_gguf(tmp_path / "model.gguf", random_weights(config), config, types="Q8_0")
    plan = make_plan(open_checkpoint(tmp_path / "model.gguf"), INT4, [])
    assert precisions(plan)["tok_embeddings.weight"] == "bfloat16"
    assert precisions(plan)["norm.weight"] == "float32"


def test_rounding_what_is_rounded_is_worth_a_warning(tmp_path: Path) -> None:
    config = FAMILIES["llama-tied"]
    write_gguf(tmp_path / "model.gguf", random_weights(config), config, types="Q8_0")
    [warning] = make_plan(open_checkpoint(tmp_path / "model.gguf"), INT4, []).list_warnings()
    assert "already rounded (15 Q8_0)" in warning


def test_a_file_that_transformers_will_not_open_is_worth_a_warning(tmp_path: Path) -> None:
    config, scheme = FAMILIES["llama-8-2"], WeightScheme(4, 32, symmetric=False)
    assert plan_hf(tmp_path / "one", config, scheme).list_warnings() == []
    [warning] = plan_hf(tmp_path / "two", config, scheme, [KeepRule("lm_head", "int8")]).list_warnings()
    assert "transformers will not open" in warning


@pytest.mark.parametrize("text", ["lm_head", "lm_head=int4", "=int8", "re:(=int8"])
def test_a_rule_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="keep"):
        parse_keep_rule(text)


@pytest.mark.parametrize("target", ["lm-head", "model.embed_tokens", "layers.7.attention.wq", "re:experts"])
def test_a_rule_for_no_layer_is_refused(target: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no linear layer"):
        plan_hf(tmp_path, FAMILIES["llama-8-2"], rules=[KeepRule(target, "int8")])


def test_planned_bytes_are_those_of_the_weights(family_directory: Callable[[str], Path]) -> None:
    plan = make_plan(open_checkpoint(family_directory("llama-tied")), INT4, [])
    sizes = plan.compute_stored_bytes()
    assert sizes["model.embed_tokens.weight"] == 288 * 64 * 4
    assert sizes["model.layers.0.mlp.down_proj.weight_packed"] == 64 * 192 // 2
    assert sizes["model.layers.0.mlp.down_proj.weight_scale"] == 64 * 192 // 32 * 2
