"""The errors that a user can cause, each one sentence that names the thing and the fix."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input: the command line prints its message as one line and exits with code 2."""


class CheckpointError(UserError):
    """A file or directory that cannot be read as the model it claims to be."""


class PromptError(UserError):
    """A prompt that cannot be encoded or does not fit the model."""
