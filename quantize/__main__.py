"""`python -m quantize`."""

from gptfast.cli.main import execute
from quantize.cli import command

execute(command, "python -m quantize")
