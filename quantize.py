"""Quantize a checkpoint: `python quantize.py --mode int4`. The command itself is quantize/cli.py."""

from gptfast.cli.main import execute
from quantize.cli import command

execute(command, "quantize.py")
