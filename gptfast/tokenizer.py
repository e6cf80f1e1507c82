"""Text to token ids and back, whichever library and file a checkpoint's vocabulary needs."""

from __future__ import annotations

import base64
import binascii
import codecs
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from gptfast.errors import CheckpointError
from gptfast.files import read_head, read_json
from gptfast.tokenizer_backends import FastTokenizer, MetaTokenizer

_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\s*$", re.MULTILINE)
_SENTENCEPIECE_START = b"\n"  # the tag of the first piece in sentencepiece's protobuf


class Tokenizer(Protocol):
    """What turns text into token ids and ids into bytes.

    User text never becomes a control token: only BOS and the control tokens that a chat template writes do.
    """

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that has a token; a model's logits may be padded beyond it."""

    @property
    def bos_id(self) -> int | None:
        """The beginning-of-sequence token, if there is one."""

    @property
    def eos_id(self) -> int | None:
        """The token that the tokenizer's own files call the end of a text, if they name one."""

    @property
    def adds_bos(self) -> bool:
        """Whether the checkpoint wants BOS before every text."""

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """The tokens that steer a model instead of being text, by their spelling."""

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Return the ids of ordinary text, in which the spelling of a control token is mere characters.

        BOS comes first if `add_bos`, by default if the checkpoint wants it. Raises PromptError if that leaves
        no id at all, if BOS is asked for and there is none, or if the text cannot be written in UTF-8.
        """

    def encode_rendered(self, text: str, guard: str = "") -> list[int]:
        """Return the ids of a rendered chat template, in which the spelling of a control token becomes that token.

        `guard` is a character that is dropped after the control tokens are found: put inside a spelling, it
        keeps the spelling text. There is one BOS at the start if the text or the checkpoint has one there, else
        none. Raises PromptError if there is no id at all or if the text cannot be written in UTF-8.
        """

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of a token, perhaps part of a character; empty for a control token or no token."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the joined bytes, with U+FFFD for what isn't UTF-8.

        The text is taken for the continuation of another one: a space at its start is kept.
        """


class StreamDecoder:
    """Turns ids into text one at a time, never into half a character.

    What `feed` returned and what `flush` returns add up to what `Tokenizer.decode` gives for all the ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """Return the text that this id completes, perhaps none yet."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """Return what is left at the end: U+FFFD for a character that was never completed."""
        return self._decoder.decode(b"", final=True)


def open_tokenizer(directory: Path) -> Tokenizer:
    """Open the tokenizer of a checkpoint directory: `tokenizer.json`, else Meta's `tokenizer.model`.

    Raises CheckpointError if there is neither, or if the file isn't what its name says.
    """
    fast, ranks = directory / "tokenizer.json", directory / "tokenizer.model"
    if fast.is_file():
        return _open_fast(fast)
    if ranks.is_file():
        return MetaTokenizer(_read_ranks(ranks))
    raise CheckpointError(
        f"{directory} has neither tokenizer.json nor tokenizer.model; download the model's tokenizer files into it"
    )


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """Read `tokenizer_config.json`, with what only `special_tokens_map.json` says added to it.

    Both may be missing. Raises CheckpointError if one isn't a JSON object.
    """
    files = [directory / name for name in ("special_tokens_map.json", "tokenizer_config.json")]
    return {key: value for file in files if file.is_file() for key, value in read_json(file).items()}


def read_token_text(config: Mapping[str, Any], name: str) -> str | None:
    """Read a token such as `bos_token` from a tokenizer's config, where it is a string, an object or null."""
    value = config.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def _open_fast(path: Path) -> Tokenizer:
    import tokenizers

    if not read_head(path).lstrip().startswith(b"{"):
        raise CheckpointError(f"{path} is not JSON; download the model's tokenizer.json again")
    try:
        library = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        if type(error) is not Exception:  # the library's own errors are of no narrower class
            raise
        raise CheckpointError(
            f"{path} cannot be read as a tokenizer ({error}); download it again or update the tokenizers package"
        ) from error
    config = read_tokenizer_config(path.parent)
    texts = {name: read_token_text(config, name) for name in ("bos_token", "eos_token")}
    return FastTokenizer(
        library,
        named_control=[text for text in texts.values() if text],
        bos_token=texts["bos_token"],
        eos_token=texts["eos_token"],
        adds_bos=config.get("add_bos_token"),
    )


def _read_ranks(path: Path) -> dict[bytes, int]:
    head = read_head(path)
    if head.startswith(_SENTENCEPIECE_START):
        raise CheckpointError(
            f"{path} is a sentencepiece model, which isn't supported; use the tokenizer.json of the same model "
            "or a GGUF file of it"
        )
    if not _RANK_LINE.match(head):
        raise CheckpointError(f"{path} is not a tiktoken vocabulary; download the model's tokenizer.model again")
    try:
        lines = (line.split() for line in path.read_bytes().splitlines() if line.strip())
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (ValueError, binascii.Error) as error:
        raise CheckpointError(f"{path} is damaged ({error}); download it again") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{path} lacks some of its ranks; download it again")
    return ranks
