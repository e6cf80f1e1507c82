"""`gptfast generate --interactive`: a conversation that keeps its key/value cache between turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gptfast.chat import Message
from gptfast.cli.generate import Options, print_stream
from gptfast.errors import PromptError
from gptfast.generation import Stream, encode_prompt

if TYPE_CHECKING:
    from gptfast.config import SamplingConfig
    from gptfast.session import Session

ROOM_FOR_REPLY = 64
"""Tokens: older turns make way when less than this is left for a reply."""


def chat(session: Session, sampling: SamplingConfig, options: Options) -> int:
    """Talk until the end of input; the exit code. Ctrl-C ends a reply, and at the prompt the conversation."""
    if session.chat_template is None:
        raise PromptError("this model has no chat template, so it cannot chat; leave out --interactive")
    session.runner.warm_up()
    system = [] if options.system is None else [Message("system", options.system)]
    turns: list[Message] = []
    click.echo("Ask away; Ctrl-C ends a reply, Ctrl-D the conversation.", err=True)
    while True:
        try:
            question = click.prompt("", prompt_suffix="> ", err=True)
        except click.Abort:
            click.echo(err=True)
            return 0
        turns.append(Message("user", question))
        turns = forget_oldest(session, system, turns)
        reply = Stream(
            session,
            [*system, *turns],
            max_new_tokens=options.max_new_tokens,
            sampling=sampling,
            stop=options.stop,
            reuse_cache=True,
        )
        print_stream(reply)
        result = reply.result
        turns.append(Message("assistant", result.text))
        click.echo(
            f"[{result.prompt_tokens - result.reused_tokens} tokens read, {result.reused_tokens} kept; "
            f"{result.new_tokens} new, {result.decode_tokens_per_s:.1f} tokens/s]",
            err=True,
        )


def forget_oldest(session: Session, system: list[Message], turns: list[Message]) -> list[Message]:
    """Drop the oldest question and answer until the rest leaves room for a reply; say so."""
    while len(encode_prompt(session, [*system, *turns])) + ROOM_FOR_REPLY > session.runner.context:
        if len(turns) == 1:
            raise PromptError(
                f"this question alone does not fit the model's context of {session.runner.context} tokens; shorten it"
            )
        turns = turns[2:]
        click.echo("[the conversation is longer than the context; its oldest turn is forgotten]", err=True)
    return turns
