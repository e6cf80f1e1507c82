"""`python -m gptfast`."""

from gptfast.cli.main import run

run()
