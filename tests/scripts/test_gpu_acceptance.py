from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gpu_acceptance
import pytest
import torch
from acceptance import schedule
from acceptance.report import PROOF, choose_step, format_report, list_failures, list_goals, read_sections
from acceptance.schedule import Section, choose_limit, has_passed, plan_ends, run_sections

from gptfast.cache import CACHE_VARIABLE
from gptfast.errors import UserError
from gptfast.kernels.cuda import configurations
from tests.reference.sessions import ROOT, run_process

SCRIPT = ROOT / "scripts" / "gpu_acceptance.py"

MODULES = {
    "passing": """
        def run(findings):
            findings.note(gb_per_s=2.5)
            findings.check("water is wet", True, "it is", "the sea")
            findings.add_row("Tides", {"place": "a|b", "m": "3"})
        """,
    "wrong": """
        def run(findings):
            findings.check("one is two", False, "1 != 2", "arithmetic")
        """,
    "failing": """
        def run(findings):
            findings.check("it began", True, "yes", "")
            raise RuntimeError("out of luck")
        """,
    "hanging": """
        import subprocess, sys, time
        def run(findings):
            findings.note(child=subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid)
            time.sleep(60)
        """,
    "killed": """
        import os, signal
        def run(findings):
            os.kill(os.getpid(), signal.SIGKILL)
        """,
}


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("modules")
    for name, text in MODULES.items():
        (directory / f"{name}.py").write_text(textwrap.dedent(text))
    return directory


@pytest.fixture(scope="module")
def out(modules: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What five sections leave, of which one hangs."""
    directory = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(modules))
        parts = dict.fromkeys(MODULES, 30.0) | {"hanging": 5.0}
        sections = [Section(name, name, part_s, least_s=0.1) for name, part_s in parts.items()]
        for section in sections:
            run_sections([section], directory, section.part_s, tell=lambda line: None)
    return directory


def read(out: Path, name: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    return fields


def test_a_section_leaves_what_it_found(out: Path) -> None:
    fields = read(out, "passing")
    assert (fields["status"], fields["error"], fields["facts"]) == ("passed", [], {"gb_per_s": 2.5})
    assert [check["name"] for check in fields["checks"]] == ["water is wet"]
    assert fields["tables"] == [{"title": "Tides", "columns": ["place", "m"], "rows": [["a|b", "3"]]}]


def test_a_section_fails_with_a_check_of_it(out: Path) -> None:
    assert read(out, "wrong")["status"] == "failed"


def test_a_section_that_raises_is_recorded_with_its_last_lines_and_what_it_had(out: Path) -> None:
    fields = read(out, "failing")
    assert fields["status"] == "failed"
    assert (fields["error"][0], fields["error"][-1]) == ("exit code 1", "RuntimeError: out of luck")
    assert [check["name"] for check in fields["checks"]] == ["it began"]


def test_a_section_that_hangs_is_ended_with_all_it_started(out: Path) -> None:
    fields = read(out, "hanging")
    assert fields["status"] == "timed_out"
    assert fields["seconds"] < 30
    child = fields["facts"]["child"]
    for _ in range(50):
        status = Path(f"/proc/{child}/status")
        if not status.exists() or "\nState:\tZ" in status.read_text():
            break
        time.sleep(0.1)
    else:
        raise AssertionError(f"{child} still runs")


def test_a_section_that_is_killed_says_by_what(out: Path) -> None:
    fields = read(out, "killed")
    assert (fields["status"], fields["error"][0]) == ("failed", "ended by SIGKILL")


def test_nothing_but_results_and_logs_is_left(out: Path) -> None:
    assert {path.name for path in out.iterdir()} == {f"{name}{end}" for name in MODULES for end in (".json", ".log")}


def test_the_report_has_the_tables_and_what_failed(out: Path) -> None:
    sections = read_sections([*MODULES, "absent"], out)
    report = format_report(sections)
    assert "| place | m |\n| --- | --- |\n| a\\|b | 3 |" in report
    assert "wrong: one is two: 1 != 2; look at arithmetic" in report
    assert "RuntimeError: out of luck" in report
    assert report.count("not measured") == 6
    failed = {failure.partition(":")[0] for failure in list_failures(sections)}
    assert failed == {"wrong", "failing", "hanging", "killed"}


def measure(model: str, kind: str, depth: int, share: float, weights: str = "") -> dict[str, Any]:
    return {"model": model, "kind": kind, "depth": depth, "share": share, "weights": weights}


def test_the_report_says_of_every_goal_whether_it_is_reached() -> None:
    large, small = "llama-3.1-8b", "llama-3.2-1b"
    lines = [
        measure(large, "int4", 0, 0.74, "int4 g32"),
        measure(large, "int4", 0, 0.76, "int4 g128"),
        measure(large, "int8", 0, 0.79),
        measure(large, "bf16", 2048, 0.99),
        measure(small, "bf16", 0, 0.75),
    ]
    goals = list_goals([{"facts": {"measured": lines[:2]}}, {"facts": {}}, {"facts": {"measured": lines[2:]}}])
    assert len(goals) == 6
    ends = {tuple(goal.partition(":")[0].split(", ")): goal.rpartition(" of the read bandwidth, ")[2] for goal in goals}
    assert ends[large, "int4"] == "76.0% measured (int4 g128): reached"
    assert ends[large, "int8"] == "79.0% measured (): not reached"
    assert ends[large, "bf16"] == "not measured"
    assert ends[small, "bf16"] == "75.0% measured (): reached"
    assert ends[small, "int4"] == "not measured"


def test_only_what_passed_counts_as_done(out: Path) -> None:
    passed = [name for name in [*MODULES, "absent"] if has_passed(Section(name, name, 1, 1), out)]
    assert passed == ["passing"]


def test_time_that_is_left_is_passed_on_and_none_is_begun_without_its_least(tmp_path: Path) -> None:
    first, second = Section("a", "a", part_s=10, least_s=4), Section("b", "b", part_s=30, least_s=8)
    assert plan_ends([first, second], 80) == [20, 80]
    assert choose_limit(first, 0, 20, 80) == 20
    assert choose_limit(second, 2, 80, 80) == 78  # the first one took 2 of its 20
    assert plan_ends([first, second], 12) == [3, 12]
    assert choose_limit(first, 0, 3, 12) == 4  # more than its part
    assert choose_limit(second, 4, 12, 12) == 8
    assert choose_limit(second, 5, 12, 12) is None


def test_a_section_without_its_least_time_is_recorded_as_not_begun(tmp_path: Path) -> None:
    run_sections([Section("late", "absent", 10, least_s=5)], tmp_path, 4, tell=lambda line: None)
    assert read(tmp_path, "late")["status"] == "not_begun"
    assert list_failures(read_sections(["late"], tmp_path))


def test_ctrl_c_keeps_what_is_there(modules: Path, tmp_path: Path) -> None:
    program = """
        from pathlib import Path
        from acceptance.schedule import Section, run_sections
        sections = [Section(name, name, 60, 0.1) for name in ("passing", "hanging", "wrong")]
        run_sections(sections, Path("out"), 180, tell=lambda line: print(line, flush=True))
        """
    paths = os.pathsep.join(map(str, (modules, SCRIPT.parent, ROOT)))
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_until(lambda: "child" in json.dumps(read_if_there(tmp_path / "out" / "hanging.partial.json")))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert read(tmp_path / "out", "passing")["status"] == "passed"
    interrupted = read(tmp_path / "out", "hanging")
    assert interrupted["status"] == "interrupted"
    assert "child" in interrupted["facts"]
    assert not (tmp_path / "out" / "wrong.json").exists()


def read_if_there(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(300):
        if holds():
            return
        time.sleep(0.1)
    raise AssertionError("it does not come true")


def test_a_machine_without_a_gpu_is_refused(tmp_path: Path) -> None:
    run_process(SCRIPT, "--out", tmp_path, CUDA_VISIBLE_DEVICES="").assert_refused("finds no NVIDIA GPU")


def test_what_is_missing_or_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"2\.10\.1.*2\.11"):
        gpu_acceptance.check_torch("2.10.1+cu128")
    gpu_acceptance.check_torch("2.11.0a0")
    gpu_acceptance.check_torch("3.0")
    monkeypatch.setattr(gpu_acceptance, "PACKAGES", ("torch", "tritonless"))
    with pytest.raises(UserError, match="pip install tritonless"):
        gpu_acceptance.check_machine()


def test_the_command_knows_every_section() -> None:
    assert tuple(section.name for section in schedule.SECTIONS) == gpu_acceptance.NAMES


# The step that is taken


def make_sections(fused_ms: float, *, failed: str = "", is_usual: bool = True) -> list[dict[str, Any]]:
    """What sections found: two forms in both steps, the second of which takes the fused one so long."""
    lines = [
        {"model": "8b", "matrices": form, "depth": 0, "fused": fused, "is_usual": is_usual, "ms_per_token": ms}
        for form, fused, ms in (
            ("int4", False, 2.0),
            ("int4", True, 1.5),
            ("bf16", False, 4.0),
            ("bf16", True, fused_ms),
        )
    ]
    proof = [{"section": name, "status": "failed" if name == failed else "passed", "facts": {}} for name in PROOF]
    return [*proof, {"section": "model_8b", "status": "passed", "facts": {"measured": lines}}]


@pytest.mark.parametrize(
    ("sections", "step"),
    [
        (make_sections(3.5), "fused"),
        (make_sections(3.99), "compiled"),
        (make_sections(5.0), "compiled"),
        *[(make_sections(3.5, failed=name), "compiled") for name in sorted(PROOF)],
        (make_sections(3.5, is_usual=False), None),
        ([], None),
    ],
)
def test_the_fused_step_is_taken_where_it_is_right_and_always_faster(
    sections: list[dict[str, Any]], step: str | None
) -> None:
    assert choose_step(sections) == step


@pytest.mark.parametrize("has_own_cache", [False, True])
def test_the_step_is_kept_in_the_user_s_cache(
    has_own_cache: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = str(tmp_path / "own") if has_own_cache else None
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "of the run"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    kept: list[tuple[str, str | None, int]] = []

    def keep(device: torch.device, step: str, products: Sequence[Any]) -> None:
        kept.append((step, os.environ.get(CACHE_VARIABLE), len(products)))

    monkeypatch.setattr(configurations, "set_step", keep)
    gpu_acceptance.keep_step("fused", own, tmp_path)
    shipped = configurations.load_shipped("sm_90")
    configurations.write_tuning(tmp_path / "configurations.json", shipped)
    gpu_acceptance.keep_step("compiled", own, tmp_path)
    assert kept == [("fused", own, 0), ("compiled", own, len(shipped.products))]


@pytest.fixture
def command(modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the command with two sections, of which the second fails, on a machine that will do."""
    monkeypatch.setenv("PYTHONPATH", str(modules))
    monkeypatch.setattr(gpu_acceptance, "check_machine", lambda: None)
    sections = (Section("device", "passing", 30, 0.1), Section("kernels", "wrong", 30, 0.1))
    monkeypatch.setattr(schedule, "SECTIONS", sections)

    def run(*options: str) -> int:
        code: int = gpu_acceptance.main(["--out", str(tmp_path), *options], standalone_mode=False)
        return code

    return run


def read_dates(out: Path, names: Sequence[str]) -> list[int]:
    return [(out / f"{name}.json").stat().st_mtime_ns for name in names]


def test_the_command_fails_with_a_section_and_resumes_with_what_has_not_passed(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command() == gpu_acceptance.FAILED
    assert "one is two" in capsys.readouterr().out
    assert "one is two" in (tmp_path / "report.md").read_text()
    before = read_dates(tmp_path, ("device", "kernels"))
    assert command("--resume") == gpu_acceptance.FAILED
    after = read_dates(tmp_path, ("device", "kernels"))
    assert (before[0] == after[0], before[1] == after[1]) == (True, False)


def test_one_section_is_run_alone(command: Callable[..., int], tmp_path: Path) -> None:
    assert command("--only", "device") == 0
    assert not (tmp_path / "kernels.json").exists()
