"""Chat templates: sandboxed Jinja that turns messages into a prompt, which only the template puts control tokens in."""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptfast.errors import CheckpointError, PromptError
from gptfast.tokenizer import Tokenizer, read_token_text, read_tokenizer_config
from gptfast.tokenizer_backends import compile_alternatives

if TYPE_CHECKING:
    import jinja2

# Meta's published prompt format, for checkpoints in Meta's own layout, which bring no template.
LLAMA3_CHAT_TEMPLATE = """\
<|begin_of_text|>
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
# Noncharacters, which no text should hold, and private characters in case one does.
_GUARDS = (range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFE))


@dataclass(frozen=True)
class Message:
    """One turn of a conversation; `role` is a word the template knows: system, user, assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class ChatTemplate:
    """The Jinja source of a chat template and the tokens, such as `bos_token`, that it may write."""

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """Return the prompt; `variables` are further names that the template may use.

        Raises PromptError if the template is broken or refuses the messages.
        """
        import jinja2

        # An expression of a template may raise what its operators do, sandboxed or not.
        python_errors = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
        names = {"tools": None, "documents": None, **self.special_tokens, **variables}
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._compiled.render(messages=turns, add_generation_prompt=add_generation_prompt, **names)
        except (jinja2.TemplateError, *python_errors) as error:
            line = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            reason = " ".join(str(error).split()) or type(error).__name__
            raise PromptError(f"the model's chat template fails on these messages{line}: {reason}") from error

    @functools.cached_property
    def _compiled(self) -> jinja2.Template:
        return _build_environment().from_string(self.source)


def read_chat_template(directory: Path) -> ChatTemplate | None:
    """Read the chat template of a checkpoint directory; None if it has none.

    It is in `chat_template.jinja`, else in `tokenizer_config.json` as a string or as a list of named templates,
    of which the one called "default" counts, or the only one.
    """
    config = read_tokenizer_config(directory)
    file = directory / "chat_template.jinja"
    try:
        source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is not text in UTF-8; download it again") from error
    if isinstance(source, list):
        source = _choose_named_template(source, directory / "tokenizer_config.json")
    if not source:
        return None
    texts = {name: read_token_text(config, name) for name in _TOKEN_NAMES}
    return ChatTemplate(source, {name: text for name, text in texts.items() if text})


def _choose_named_template(entries: list[Any], path: Path) -> str:
    named = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    if len(named) == 1:
        return str(*named.values())
    if "default" not in named:
        raise CheckpointError(
            f"{path} has the chat templates {', '.join(map(str, named)) or 'of no name'} but none called default; "
            "call one of them that"
        )
    return str(named["default"])


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> list[int]:
    """Return the ids of the rendered messages; control tokens in them are the template's own.

    A message that spells a control token is read as the characters of the spelling. Raises PromptError if the
    template fails or renders nothing.
    """
    spellings = _Spellings(tokenizer.control_tokens)
    guard = _choose_guard("".join([template.source, *(message.content for message in messages)]))

    def render(guarded: Sequence[Message]) -> str:
        return template.render(guarded, add_generation_prompt=add_generation_prompt, **variables)

    guarded = [Message(message.role, spellings.break_up(message.content, guard)) for message in messages]
    strict = [Message(message.role, spellings.break_all(message.content, guard)) for message in messages]
    text = render(guarded)
    if strict != guarded and spellings.find(strict_text := render(strict)) != spellings.find(text):
        text = strict_text  # parts of a spelling came together where the template cuts or joins contents
    return tokenizer.encode_rendered(text, guard)


class _Spellings:
    """The spellings of control tokens, and how to keep a message from putting one into a prompt."""

    def __init__(self, spellings: Collection[str]) -> None:
        self._whole = compile_alternatives(spellings)
        self._first_characters = re.compile(f"(?={self._whole.pattern}).", re.DOTALL)
        self._edges = compile_alternatives({edge for text in spellings for edge in (text[0], text[-1])})

    def find(self, text: str) -> list[str]:
        """The spellings in a text, in order."""
        return self._whole.findall(text)

    def break_up(self, text: str, guard: str) -> str:
        """Put `guard` into every spelling; all else stays as it is, for a template to compare and cut."""
        return self._first_characters.sub(lambda first: first.group() + guard, text)

    def break_all(self, text: str, guard: str) -> str:
        """Put `guard` around every character that a spelling starts or ends with.

        No spelling is left, nor one that more text could complete, whatever a template does with the parts.
        """
        return self._edges.sub(lambda edge: guard + edge.group() + guard, text)


def _choose_guard(text: str) -> str:
    """A character that isn't in `text`."""
    used = set(text)
    return next(character for character in map(chr, itertools.chain(*_GUARDS)) if character not in used)


@functools.cache
def _build_environment() -> jinja2.Environment:
    import jinja2.ext
    import jinja2.sandbox

    class IgnoreGeneration(jinja2.ext.Extension):
        """`{% generation %}` marks what a model is trained on, which makes no difference here."""

        tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[IgnoreGeneration, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _format_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it stands; Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _format_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
