"""Generate text: `python generate.py --compile`. The command itself is gptfast/cli/generate.py."""

from gptfast.cli.main import run

run("generate")
