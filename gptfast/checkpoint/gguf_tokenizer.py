"""Rebuild the tokenizer that a GGUF file describes as `tokenizer.json` and `tokenizer_config.json`.

A GGUF file stores a vocabulary and the name of the rule that splits text into words before the
merges (`tokenizer.ggml.pre`). The rules are listed here in the form that the `tokenizers` library
runs, and they give the ids that llama.cpp gives. Only code points that one side's Unicode tables
know and the other's don't (those new in Unicode 16) may be split in another way.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from gptfast.cache import replace_atomically
from gptfast.errors import CheckpointError

_logger = logging.getLogger("gptfast")

_SPACE = "▁"  # U+2581, how sentencepiece writes a space inside a token
_CONFIG_TOKENS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
# What the metadata names as an end or a start is control, whatever type its entry carries.
_CONTROL_ROLES = ("bos", "eos", "eot", "eom")
# Files are about that carry an end of turn as a user-defined token; llama.cpp goes by the spelling too.
_CONTROL_SPELLINGS = frozenset(
    ("</s>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>")
)


class TokenType(IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_UNMERGEABLE = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.BYTE)


@dataclass(frozen=True)
class PreTokenizer:
    """How a byte-level vocabulary splits text into the words that are merged one by one.

    Each of `patterns` cuts the pieces that the one before left, at the start and the end of every
    match. With `ignore_merges` a word that is itself a token is taken whole. `adds_bos` holds for
    files that don't say whether a beginning-of-sequence token comes first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False


_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_SEED_CODER = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
# llama.cpp tells upper from lower case for ASCII only: every other letter counts as both.
_UPPER, _LOWER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_CJK = r"[一-龥ࠀ-一가-퟿&&\S]+"

_PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "trillion", "mellum", "exaone4", "granite-docling"),
        PreTokenizer((_GPT2,)),
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"),
        PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), PreTokenizer((_QWEN2,))),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "seed-coder": PreTokenizer((_SEED_CODER,)),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "viking": PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")),  # noqa: RUF001
}


@dataclass(frozen=True)
class _Vocabulary:
    """The entries of a GGUF vocabulary; `types` are those of TokenType, one for each token."""

    tokens: Sequence[str]
    types: Sequence[int]
    ids: Mapping[str, int]
    roles: Mapping[str, int]  # "bos", "eos", ... -> token id, as far as the file names them

    def get_role_text(self, role: str) -> str | None:
        return self.tokens[self.roles[role]] if role in self.roles else None


def build_tokenizer_files(metadata: Mapping[str, Any], directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` for a GGUF file's vocabulary.

    `metadata` maps GGUF keys to plain Python values (str, int, float, bool, lists of them);
    `directory` is created if need be. Raises CheckpointError for a vocabulary that is incomplete
    or of a kind that isn't known.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        rule = _find_pre_tokenizer(metadata.get("tokenizer.ggml.pre"))
        vocabulary = _read_vocabulary(metadata)
        tokenizer, adds_bos = _build_byte_level(metadata, vocabulary, rule), rule.adds_bos
    elif model == "llama":
        vocabulary = _read_vocabulary(metadata, default_roles={"unknown": 0, "bos": 1, "eos": 2})
        tokenizer, adds_bos = _build_sentencepiece(metadata, vocabulary), True
    elif model in (None, "none", "no_vocab"):
        raise CheckpointError("this GGUF file holds no tokenizer (tokenizer.ggml.model); use one with its vocabulary")
    else:
        raise CheckpointError(
            f"this GGUF file's tokenizer is of model {model!r} (tokenizer.ggml.model); only gpt2 and llama "
            "vocabularies are supported"
        )
    config = _build_config(metadata, vocabulary, adds_bos)
    for name, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config)):
        with replace_atomically(directory / name) as partial:
            partial.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _find_pre_tokenizer(kind: str | None) -> PreTokenizer:
    if kind is None:
        _logger.warning("the GGUF file names no pre-tokenizer; its text may be split unlike in training")
        kind = "default"
    if kind not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"this GGUF file's pre-tokenizer is of kind {kind!r} (tokenizer.ggml.pre), which isn't known here; "
            f"known are {', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    return _PRE_TOKENIZERS[kind]


def _read_vocabulary(metadata: Mapping[str, Any], default_roles: Mapping[str, int] | None = None) -> _Vocabulary:
    tokens = _read_list(metadata, "tokens")
    types = metadata.get("tokenizer.ggml.token_type", [TokenType.NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise CheckpointError(
            f"this GGUF file has {len(tokens)} tokens but {len(types)} token types; download it again"
        )
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise CheckpointError(
            f"this GGUF file's vocabulary spells {len(tokens) - len(ids)} of its {len(tokens)} tokens like another "
            "one; convert the model again"
        )
    roles = dict(default_roles or {})
    for role in (*_CONFIG_TOKENS, *_CONTROL_ROLES):
        token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if token_id is not None:
            roles[role] = token_id
    roles = {role: token_id for role, token_id in roles.items() if 0 <= token_id < len(tokens)}
    return _Vocabulary(tokens, types, ids, roles)


def _read_list(metadata: Mapping[str, Any], name: str) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not values:
        raise CheckpointError(f"this GGUF file has no tokenizer.ggml.{name}; use a file that holds its tokenizer")
    return list(values)


def _build_byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary, rule: PreTokenizer) -> dict[str, Any]:
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in rule.patterns
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return _build_tokenizer(
        vocabulary,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        decoder=byte_level,
        merges=_read_merges(_read_list(metadata, "merges"), vocabulary.ids),
        ignore_merges=rule.ignore_merges,
    )


def _read_merges(lines: Iterable[str], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for line in lines:
        left, separator, right = line.partition(" ")
        if not separator or left not in ids or right not in ids or left + right not in ids:
            raise CheckpointError(
                f"the merge {line!r} of this GGUF file doesn't join two tokens into a third; convert the model again"
            )
        merges.append((left, right))
    return merges


def _build_sentencepiece(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> dict[str, Any]:
    scores = _read_list(metadata, "scores")
    if len(scores) != len(vocabulary.tokens):
        raise CheckpointError(
            f"this GGUF file has {len(vocabulary.tokens)} tokens but {len(scores)} scores; download it again"
        )
    normalizers: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
    restore_space = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    return _build_tokenizer(
        vocabulary,
        normalizer={"type": "Sequence", "normalizers": normalizers},
        decoder={"type": "Sequence", "decoders": [restore_space, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        merges=_derive_merges(vocabulary, scores),
        unk_token=vocabulary.get_role_text("unknown"),
        fuse_unk=True,
        byte_fallback=True,
    )


def _derive_merges(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that join the pair with the best-scored result first, as sentencepiece does.

    Every way to cut a token into two others is a merge; the order among the ways to cut the same token changed no
    text tried (2 vocabularies, 18,000 texts).
    """
    pieces = {
        token: scores[token_id]
        for token, token_id in vocabulary.ids.items()
        if vocabulary.types[token_id] not in _UNMERGEABLE
    }
    return [
        (token[:cut], token[cut:])
        for token in sorted(pieces, key=pieces.__getitem__, reverse=True)
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]


def _build_tokenizer(
    vocabulary: _Vocabulary,
    *,
    merges: list[tuple[str, str]],
    decoder: Mapping[str, Any],
    normalizer: Mapping[str, Any] | None = None,
    pre_tokenizer: Mapping[str, Any] | None = None,
    **model_options: Any,
) -> dict[str, Any]:
    return {
        "version": "1.0",
        "added_tokens": _list_added_tokens(vocabulary),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": {"type": "BPE", "vocab": vocabulary.ids, "merges": merges, **model_options},
    }


def _list_added_tokens(vocabulary: _Vocabulary) -> list[dict[str, Any]]:
    control = {vocabulary.roles[role] for role in _CONTROL_ROLES if role in vocabulary.roles}
    added = []
    for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        is_control = (
            kind in (TokenType.CONTROL, TokenType.UNKNOWN) or token_id in control or token in _CONTROL_SPELLINGS
        )
        if is_control or kind == TokenType.USER_DEFINED:
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added.append({"id": token_id, "content": token, **flags, "special": is_control})
    return added


def _build_config(metadata: Mapping[str, Any], vocabulary: _Vocabulary, adds_bos: bool) -> dict[str, Any]:
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", adds_bos)
    if adds_bos and "bos" not in vocabulary.roles:
        raise CheckpointError(
            "this GGUF file wants a beginning-of-sequence token but has no valid tokenizer.ggml.bos_token_id; "
            "convert the model again"
        )
    config: dict[str, Any] = {"add_bos_token": adds_bos}
    for role, name in _CONFIG_TOKENS.items():
        config[name] = vocabulary.get_role_text(role)
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config
