from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gptfast.chat import LLAMA3_CHAT_TEMPLATE, ChatTemplate, Message, encode_chat, read_chat_template
from gptfast.errors import CheckpointError, PromptError
from gptfast.tokenizer import Tokenizer, open_tokenizer
from tests.reference.tokenizers import train_byte_level, train_sentencepiece, write_meta_tokenizer, write_tokenizer

CHATML = """\
{% for message in messages %}
{% if loop.first and message.role != 'system' %}
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{% endif %}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}"""
INST = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}"""
SPELLED = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "</s>", "<s>"]
CONVERSATION = [
    Message("user", "Hello! How are you?"),
    Message("assistant", "I'm fine.  And you?\n"),
    Message("user", " <think> 1 < 2 > 0 é🙂"),
]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("byte-level")
    return write_tokenizer(directory, train_byte_level(), eos_token="<|im_end|>", chat_template=CHATML)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sentencepiece")
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return write_tokenizer(directory, train_sentencepiece(), chat_template=INST, **tokens)


@pytest.fixture(scope="module")
def chatml(byte_level: Path) -> Tokenizer:
    return open_tokenizer(byte_level)


def read_template(directory: Path) -> ChatTemplate:
    template = read_chat_template(directory)
    assert template is not None
    return template


def find_control(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return [token_id for token_id in ids if token_id in tokenizer.control_tokens.values()]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_ids_are_those_of_transformers(kind: str, turns: int, request: pytest.FixtureRequest) -> None:
    import transformers

    directory: Path = request.getfixturevalue(kind)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    messages = CONVERSATION[:turns]
    expected = reference.apply_chat_template(
        [{"role": message.role, "content": message.content} for message in messages],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
    )
    assert encode_chat(open_tokenizer(directory), read_template(directory), messages) == expected


contents = st.lists(
    st.sampled_from([*SPELLED, "<", "<|", "|>", ">", "im_end|>", "<|im_", "start|>", " ", "\n", "X", "ab"])
    | st.text(max_size=3)
).map("".join)
TEMPLATES = {
    "plain": "{{ '<|im_start|>' + a + '<|im_end|>' + b }}",
    "adjacent": "{{ a }}{{ b }}<|endoftext|>",
    "trimmed": "<|im_start|>{{ a | trim }}{{ b.strip() }}<|im_end|>",
    "stripped": "<|im_start|>{{ a.lstrip() }}{{ b.rstrip() }}<|im_end|>",
    "sliced": "<|im_start|>{{ a[:9] }}{{ b[3:] }}<|im_end|>",
    "iterated": "<|im_start|>{% for c in a %}{{ c }}{% endfor %}{{ b | list | join }}<|im_end|>",
    "cut": "<|im_start|>{{ a.replace('X', '') }}{{ b.split('X') | join }}<|im_end|>",
    "last": "<|im_start|>{{ a.split('</think>')[-1] }}{{ b | replace('ab', '') }}<|im_end|>",
    "upper": "<|im_start|>{{ a | lower }}{{ b | upper | lower }}<|im_end|>",
}


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
@settings(deadline=None)
@given(first=contents, second=contents)
@example(first="<|im_end", second="|>")
@example(first="<|im_end ", second="\n|>")
@example(first="x<", second="|im_end|>")
@example(first="<|im_Xend|>", second="<|im_endX|>")
@example(first="<|im_abend|>", second="<|im_enabd|>")
def test_no_message_becomes_a_control_token(chatml: Tokenizer, source: str, first: str, second: str) -> None:
    template = ChatTemplate("{% set a = messages[0].content %}{% set b = messages[1].content %}" + source)

    def encode(*texts: str) -> list[int]:
        return encode_chat(chatml, template, [Message("user", text) for text in texts])

    assert find_control(chatml, encode(first, second)) == find_control(chatml, encode("", ""))


@settings(deadline=None)
@given(text=contents)
def test_a_message_is_read_as_it_stands(chatml: Tokenizer, text: str) -> None:
    template = ChatTemplate("<|im_start|>{{ messages[0].content }}<|im_end|>")
    assert chatml.decode(encode_chat(chatml, template, [Message("user", text)])) == text


def test_a_message_may_hold_the_guard_itself(chatml: Tokenizer) -> None:
    text = "".join(map(chr, range(0xFDD0, 0xFDF0))) + "<|im_end|>\U000f0000"
    test = ChatTemplate("<|im_start|>{{ messages[0].content }}")
    assert chatml.decode(encode_chat(chatml, test, [Message("user", text)])) == text


@pytest.mark.parametrize("thought", ["a < b > c", "the end is spelled <|im_end|> here", "<|im_"])
def test_templates_can_compare_what_a_message_says(chatml: Tokenizer, thought: str) -> None:
    template = ChatTemplate(
        "{% if '</think>' in messages[0].content %}{{ messages[0].content.split('</think>')[-1].lstrip('\\n') }}"
        "{% endif %}{% if messages[0].content.startswith('<think>') %}!{% endif %}"
    )
    ids = encode_chat(chatml, template, [Message("assistant", f"<think>{thought}</think>\n\nanswer {thought}")])
    assert chatml.decode(ids) == f"answer {thought}!"


def test_an_added_token_that_is_not_control_is_found_in_messages(chatml: Tokenizer) -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    assert len(encode_chat(chatml, template, [Message("user", "<think>")])) == 1


@pytest.mark.parametrize("adds_bos", [True, False, None])
@pytest.mark.parametrize("source", [INST, "{{ bos_token }}" + INST, INST.replace("{{ bos_token }}", "")])
def test_there_is_one_bos_or_none(tmp_path: Path, adds_bos: bool | None, source: str) -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": source}
    config = tokens if adds_bos is None else {**tokens, "add_bos_token": adds_bos}
    directory = write_tokenizer(tmp_path, train_sentencepiece(), **config)
    ids = encode_chat(open_tokenizer(directory), read_template(directory), CONVERSATION)
    wanted = adds_bos is not False or "bos_token" in source
    assert ids.count(1) == wanted
    assert ids.index(1) == 0 if wanted else ids[0] != 1


def test_metas_format_is_the_published_one(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(write_meta_tokenizer(tmp_path))
    control = tokenizer.control_tokens

    def header(role: str) -> list[int]:
        words = tokenizer.encode(role, add_bos=False)
        newlines = tokenizer.encode("\n\n", add_bos=False)
        return [control["<|start_header_id|>"], *words, control["<|end_header_id|>"], *newlines]

    messages = [Message("system", "ab"), Message("user", "  Hello <|eot_id|>\n")]
    user_text = tokenizer.encode("Hello <|eot_id|>", add_bos=False)
    assert encode_chat(tokenizer, ChatTemplate(LLAMA3_CHAT_TEMPLATE), messages) == [
        control["<|begin_of_text|>"],
        *header("system"),
        *tokenizer.encode("ab", add_bos=False),
        control["<|eot_id|>"],
        *header("user"),
        *user_text,
        control["<|eot_id|>"],
        *header("assistant"),
    ]
    last = encode_chat(tokenizer, ChatTemplate(LLAMA3_CHAT_TEMPLATE), messages, add_generation_prompt=False)[-1]
    assert last == control["<|eot_id|>"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ {'a': '<é>', 'b': [1, none]} | tojson }}", '{"a": "<é>", "b": [1, null]}'),
        ("{{ {'a': 1} | tojson(indent=1) }}", '{\n "a": 1\n}'),
        ("{{ strftime_now('%Y') }}", str(datetime.datetime.now().year)),
        ("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m['content'] }}{% endfor %}", "one"),
        ("{% for m in messages %}{% if not loop.last %}{% continue %}{% endif %}{{ m.content }}{% endfor %}", "two"),
        ("a{% generation %}{{ messages[0].content }}{% endgeneration %}b", "aoneb"),
        ("{% if tools %}x{% endif %}{% if documents is not none %}y{% endif %}{{ tools is none }}", "True"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("{{ bos_token }}{{ eos_token }}{{ unknown_name }}", "<s>"),
        ("{% if x is defined %}{{ x }}{% endif %}", ""),
        ("  {% if true %}\n  kept\n  {% endif %}\n", "  kept\n"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
    ],
)
def test_what_templates_call_is_there(source: str, expected: str) -> None:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render([Message("user", "one"), Message("user", "two")]) == expected


def test_further_variables_reach_the_template() -> None:
    template = ChatTemplate("{{ enable_thinking }}{{ tools | length }}{{ add_generation_prompt }}")
    assert template.render([], add_generation_prompt=False, enable_thinking=False, tools=["a"]) == "False1False"


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", "roles must alternate"),
        ("\n{% if %}", "line 2"),
        ("{% unknown_tag %}", "unknown_tag"),
        ("{{ messages[0].content.missing.deeper }}", "missing"),
        ("{{ messages.pop() }}", "pop"),
        ("{{ ''.__class__.__mro__ }}", "__class__"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ 1 // 0 }}", "division"),
        ("{% for i in range(1000000) %}{% endfor %}", "range"),
        ("{{ {}['x'].y }}", "x"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 'a'.encode('no such') }}", "no such"),
        ("{{ namespace | tojson }}", "JSON"),
    ],
)
def test_a_template_that_fails_is_one_sentence(source: str, word: str) -> None:
    with pytest.raises(PromptError, match="chat template") as caught:
        ChatTemplate(source).render([Message("user", "hi")])
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_template_that_renders_nothing_is_refused(chatml: Tokenizer) -> None:
    with pytest.raises(PromptError, match="empty prompt"):
        encode_chat(chatml, ChatTemplate(""), CONVERSATION)


def write_config(directory: Path, **config: Any) -> Path:
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def test_a_template_is_found_in_every_place(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tool"}, {"name": "default", "template": "default"}]
    assert read_chat_template(tmp_path) is None
    assert read_chat_template(write_config(tmp_path, bos_token="<s>")) is None
    assert read_template(write_config(tmp_path, chat_template="plain")).render([]) == "plain"
    assert read_template(write_config(tmp_path, chat_template=named)).render([]) == "default"
    assert read_template(write_config(tmp_path, chat_template=named[:1])).render([]) == "tool"
    tokens = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    (tmp_path / "chat_template.jinja").write_text("é{{ bos_token }}{{ eos_token }}{{ pad_token }}", encoding="utf-8")
    assert read_template(write_config(tmp_path, chat_template="plain", **tokens)).render([]) == "é<s></s>"


def test_templates_of_which_none_is_the_default_are_refused(tmp_path: Path) -> None:
    named = [{"name": name, "template": name} for name in ("tool_use", "rag")]
    with pytest.raises(CheckpointError, match="tool_use, rag"):
        read_chat_template(write_config(tmp_path, chat_template=named))
