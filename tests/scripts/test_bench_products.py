from __future__ import annotations

import pytest

from tests.reference.sessions import ROOT, run_process

SCRIPT = ROOT / "scripts" / "bench_products.py"
TINY = ("--threads", 1, "--repeats", 2, "--rows", 256, "--columns", 128, "--megabytes", 1)


def test_every_kind_of_weights_is_measured_against_the_same_bandwidth(tiny_cache: None) -> None:
    outcome = run_process(SCRIPT, *TINY, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    facts = outcome.json
    products = facts["products"]
    kinds = [("int4 g32", "fp32"), ("int4 g32", "int8"), ("int8 channel", "fp32"), ("int8 channel", "int8")]
    kinds.append(("bfloat16", "fp32"))
    assert [(each["weights"], each["activations"], each["rows"]) for each in products] == [
        (*kind, rows) for kind in kinds for rows in (1, 5, 16)
    ]
    for each in products:
        bits = {"int4 g32": 4.5, "int8 channel": 8, "bfloat16": 16}[each["weights"]]
        assert each["read_bytes"] >= 1_000_000
        assert each["read_bytes"] == pytest.approx(each["matrices"] * 256 * 128 * bits / 8, rel=0.05)
        assert each["gb_per_s"] == pytest.approx(each["read_bytes"] / each["p50_ms"] / 1e6)
        assert each["share"] == pytest.approx(each["gb_per_s"] / facts["bandwidth"]["ceiling_gb_per_s"])
    for first, *others in (products[i : i + 3] for i in range(0, len(products), 3)):
        assert [each["ratio"] for each in others] == [each["p50_ms"] / first["p50_ms"] for each in others]
    assert facts["environment"]["threads"] == 1
    table = outcome.stdout.splitlines()
    assert sum(line.startswith(("int", "bfloat16")) for line in table) == len(products)
    assert any(line.startswith("memory is read at ") for line in table)


def test_columns_that_no_group_divides_are_refused() -> None:
    run_process(SCRIPT, "--columns", 100).assert_refused("--columns is 100", "32")
