"""`gptfast generate --interactive`: a conversation that keeps its key/value cache between turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gptfast.chat import Message
from gptfast.cli.generate import INTERRUPTED, Options, print_stream
from gptfast.errors import PromptError
from gptfast.generation import Stream, encode_prompt

if TYPE_CHECKING:
    from gptfast.config import SamplingConfig
    from gptfast.generation import GenerationResult
    from gptfast.session import Session

ROOM_FOR_REPLY = 64
"""Tokens: older turns make way when less than this, or than --max-new-tokens, is left for a reply."""


def chat(session: Session, sampling: SamplingConfig, options: Options) -> tuple[list[GenerationResult], int]:
    """Talk until the end of input, or Ctrl-C at the prompt; the replies, and the exit code."""
    if session.chat_template is None:
        raise PromptError("this model has no chat template, so it cannot chat; leave out --interactive")
    session.warm_up()
    system = [] if options.system is None else [Message("system", options.system)]
    turns: list[Message] = []
    results: list[GenerationResult] = []
    click.echo("Ask away; Ctrl-C ends a reply, Ctrl-D the conversation.", err=True)
    while True:
        try:
            question = Message("user", click.prompt("", prompt_suffix="> ", err=True))
        except click.Abort as end:  # which click makes of both keys
            click.echo(err=True)
            return results, INTERRUPTED if isinstance(end.__context__, KeyboardInterrupt) else 0
        try:
            turns, result = answer(session, system, [*turns, question], sampling, options)
            results.append(result)
        except PromptError as error:
            click.echo(f"[{error}]", err=True)


def answer(
    session: Session, system: list[Message], turns: list[Message], sampling: SamplingConfig, options: Options
) -> tuple[list[Message], GenerationResult]:
    """Print the reply to the last turn; the turns that are remembered, the reply among them, and its figures."""
    room = ROOM_FOR_REPLY if options.max_new_tokens is None else min(options.max_new_tokens, ROOM_FOR_REPLY)
    kept, left = forget_oldest(session, system, turns, room)
    if len(kept) < len(turns):
        click.echo("[the conversation is longer than the context; its oldest turns are forgotten]", err=True)
    reply = Stream(
        session,
        [*system, *kept],
        max_new_tokens=None if options.max_new_tokens is None else min(options.max_new_tokens, left),
        sampling=sampling,
        stop=options.stop,
        reuse_cache=True,
    )
    print_stream(reply)
    result = reply.result
    click.echo(
        f"[{result.prompt_tokens - result.reused_tokens} tokens read, {result.reused_tokens} kept; "
        f"{result.new_tokens} new, {result.decode_tokens_per_s:.1f} tokens/s]",
        err=True,
    )
    return [*kept, Message("assistant", result.text)], result


def forget_oldest(
    session: Session, system: list[Message], turns: list[Message], room: int
) -> tuple[list[Message], int]:
    """Drop the oldest question and answer until `room` tokens are left for a reply.

    Returns the turns that stay and the tokens left. Raises PromptError if the last question alone is too long.
    """
    context = session.runner.context
    while True:
        left = context - len(encode_prompt(session, [*system, *turns]))
        if left >= room:
            return turns, left
        if len(turns) == 1:
            raise PromptError(f"this question alone does not fit the model's context of {context} tokens; shorten it")
        turns = turns[2:]
