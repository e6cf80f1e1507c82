"""The `gptfast` command: subcommands imported when they are called, and one place that ends the process."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
from typing import NoReturn

import click

import gptfast
from gptfast.errors import UserError

COMMANDS = ("generate", "bench", "eval", "inspect", "download", "tune")
USAGE_ERROR = 2


class LazyGroup(click.Group):
    """A group whose commands live in modules of their names, so that `--help` waits for no torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every subcommand, in the order of the help text."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the subcommand, or return None for an unknown name."""
        return import_command(cmd_name) if cmd_name in COMMANDS else None


def import_command(name: str) -> click.Command:
    """The subcommand of that name; only it imports what it needs."""
    command: click.Command = importlib.import_module(f"gptfast.cli.{name}").command
    return command


def accept_snake_case(name: str) -> str:
    """The kebab-case spelling of an option's name; gpt-fast's users know the other one."""
    return name.replace("_", "-")


@click.group(cls=LazyGroup)
@click.version_option(gptfast.__version__, prog_name="gptfast")
def main() -> None:
    """Decode Llama-family models one user at a time, every token as soon as the memory allows."""


def run(command: str | None = None) -> NoReturn:
    """Run the command line and exit; `command` is a subcommand to run as if it were the program."""
    if command is None:
        execute(main, "gptfast")
    execute(import_command(command), os.path.basename(sys.argv[0]))


def execute(entry: click.Command, program: str) -> NoReturn:
    """Run a command of that name and exit: 0, 2 for what the user can mend, 130 after Ctrl-C.

    A closed pipe ends the program without a word, by click's doing.
    """
    show_log_lines()
    try:
        result = entry.main(
            prog_name=program,
            standalone_mode=False,
            token_normalize_func=accept_snake_case,
            max_content_width=100,
        )
        sys.exit(result if isinstance(result, int) else 0)
    except UserError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(USAGE_ERROR)
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        click.echo(f"error: {name}{error.strerror or error}; check the path, its permissions and the disk", err=True)
        discard_unwritten()
        sys.exit(USAGE_ERROR)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(128 + signal.SIGINT)


def discard_unwritten() -> None:
    """Have Python not try again, at its end, to write what a full disk has refused, and complain a second time."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_log_lines() -> None:
    """Print what the library logs as single lines on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("gptfast")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
