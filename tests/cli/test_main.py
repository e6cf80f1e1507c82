"""The `gptfast` command as a whole: subcommands, help, exit codes."""

from __future__ import annotations

import logging

import pytest

import gptfast
from gptfast.cli import main as main_module
from gptfast.cli.main import COMMANDS, accept_snake_case, import_command
from gptfast.errors import UserError
from tests.reference.sessions import CommandLine, run_process


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


def test_help_lists_every_command(cli: CommandLine) -> None:
    outcome = cli("--help")
    assert outcome.exit_code == 0
    assert outcome.stderr == ""
    for name in COMMANDS:
        assert f"  {name} " in outcome.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_a_sentence(name: str, cli: CommandLine) -> None:
    outcome = cli(name, "--help")
    assert outcome.exit_code == 0
    assert outcome.stdout.startswith(f"Usage: gptfast {name} ")
    assert import_command(name).help


def test_every_option_says_what_it_does() -> None:
    for name in COMMANDS:
        for parameter in import_command(name).params:
            assert parameter.param_type_name == "argument" or getattr(parameter, "help", None), parameter.name


def test_the_version_is_the_packages(cli: CommandLine) -> None:
    assert cli("--version").stdout.split()[-1] == gptfast.__version__


def test_help_and_refusals_do_not_wait_for_torch() -> None:
    program = """
import sys
from gptfast.cli.main import run
for arguments in (["--help"], ["generate", "--help"], ["generate", "--top-p", "7"], ["inspect", "--help"]):
    sys.argv = ["gptfast", *arguments]
    try:
        run()
    except SystemExit:
        pass
print("torch" in sys.modules)
"""
    outcome = run_process("-c", program)
    assert outcome.stdout.splitlines()[-1] == "False", outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("generat",), "generat"),
        (("generate", "--no-such-flag"), "--no-such-flag"),
        (("generate", "--max-new-tokens", "many"), "many"),
        (("generate", "stray"), "stray"),
        (("--no-such-flag",), "--no-such-flag"),
    ],
)
def test_what_click_refuses_is_named_and_ends_with_code_2(
    arguments: tuple[str, ...], word: str, cli: CommandLine
) -> None:
    outcome = cli(*arguments)
    assert outcome.exit_code == 2
    assert outcome.stdout == ""
    assert word in outcome.stderr.splitlines()[-1]
    assert "Traceback" not in outcome.stderr


def test_without_a_command_the_help_is_shown(cli: CommandLine) -> None:
    outcome = cli()
    assert outcome.exit_code == 2
    assert "Commands:" in outcome.stdout + outcome.stderr


def test_a_user_error_is_one_line_and_code_2(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise UserError("the thing is wrong; mend it")

    monkeypatch.setattr("gptfast.download.get_default_model", refuse)
    outcome = cli("download")
    outcome.assert_refused()
    assert outcome.stderr == "error: the thing is wrong; mend it\n"


def test_a_fault_of_our_own_is_not_hidden(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("a fault")

    monkeypatch.setattr("gptfast.download.get_default_model", fail)
    with pytest.raises(ValueError, match="a fault"):
        cli("download")


def test_what_the_library_logs_is_shown_as_lines(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(*_: object, **__: object) -> str:
        logging.getLogger("gptfast.somewhere").warning("mind the %s", "gap")
        logging.getLogger("gptfast.somewhere").debug("unseen")
        return "path"

    monkeypatch.setattr("gptfast.download.get_default_model", warn)
    outcome = cli("download")
    assert outcome.stderr.splitlines()[0] == "mind the gap"
    assert "unseen" not in outcome.stderr
    assert outcome.stdout == "path\n"


def test_only_what_was_asked_for_is_imported() -> None:
    assert main_module.LazyGroup().list_commands(None) == list(COMMANDS)  # type: ignore[arg-type]
    assert main_module.LazyGroup().get_command(None, "nothing") is None  # type: ignore[arg-type]


def test_snake_case_becomes_kebab_case() -> None:
    assert accept_snake_case("max_new_tokens") == "max-new-tokens"
    assert accept_snake_case("top-k") == "top-k"
