"""The two libraries behind `Tokenizer`: `tokenizers` and `tiktoken`, made to agree on what control tokens are.

Both are asked for the ids of ordinary text only. Control tokens come from nowhere but `encode`'s BOS and the
template text that `encode_rendered` is given.
"""

from __future__ import annotations

import abc
import functools
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gptfast.errors import CheckpointError, PromptError

if TYPE_CHECKING:
    import tokenizers

_SPACE = "▁"  # U+2581, how sentencepiece writes a space inside a token
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")

# Meta's names for the first of the 256 control tokens; Llama 3.1 named some slots that 3.0 held in reserve.
_META_SLOTS = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}
_META_SLOT_COUNT = 256
_LONG_SPACE = re.compile(r"\s{25000}")
_META_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TokenizerBackend(abc.ABC):
    """What the back ends share: see `gptfast.tokenizer.Tokenizer` for the methods.

    `eats_left` and `eats_right` are the control tokens that swallow the spaces before and after them.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        control_tokens: Mapping[str, int],
        bos_id: int | None,
        adds_bos: bool,
        eos_id: int | None = None,
        eats_left: frozenset[int] = frozenset(),
        eats_right: frozenset[int] = frozenset(),
    ) -> None:
        self.vocab_size = vocab_size
        self.control_tokens = control_tokens
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.adds_bos = adds_bos
        self._control_ids = frozenset(control_tokens.values())
        self._eats_left = eats_left
        self._eats_right = eats_right
        self._control_spelling = compile_alternatives(control_tokens)
        self._known_bytes: dict[int, bytes] = dict.fromkeys(self._control_ids, b"")

    @abc.abstractmethod
    def _encode_ordinary(self, text: str, *, at_start: bool) -> list[int]:
        """The ids of text without control tokens; `at_start` tells the first piece of a text from later ones."""

    @abc.abstractmethod
    def _look_up_bytes(self, token_id: int) -> bytes:
        """The bytes of a token that isn't a control token; empty for an id without one."""

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """See `Tokenizer.encode`."""
        _check_unicode(text)
        ids = self._encode_ordinary(text, at_start=True)
        if self.adds_bos if add_bos is None else add_bos:
            ids.insert(0, self._get_bos())
        if not ids:
            raise PromptError(
                "the prompt is empty and this model puts no beginning-of-sequence token before it; give it some text"
            )
        return ids

    def encode_rendered(self, text: str, guard: str = "") -> list[int]:
        """See `Tokenizer.encode_rendered`."""
        _check_unicode(text)
        ids: list[int] = []
        end = 0
        for spelling in self._control_spelling.finditer(text):
            token_id = self.control_tokens[spelling.group()]
            ids += self._encode_between(text[end : spelling.start()], guard, ids[-1:], token_id)
            ids.append(token_id)
            end = spelling.end()
        ids += self._encode_between(text[end:], guard, ids[-1:], None)
        if self.bos_id is not None:
            ids = self._settle_bos(ids, self.bos_id)
        if not ids:
            raise PromptError("the chat template renders these messages as an empty prompt; give them some text")
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """See `Tokenizer.token_bytes`."""
        known = self._known_bytes.get(token_id)
        if known is None:
            known = self._known_bytes[token_id] = self._look_up_bytes(token_id)
        return known

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def _encode_between(self, text: str, guard: str, before: list[int], after: int | None) -> list[int]:
        if guard:
            text = text.replace(guard, "")
        if not self._eats_right.isdisjoint(before):
            text = text.lstrip()
        if after in self._eats_left:
            text = text.rstrip()
        return self._encode_ordinary(text, at_start=not before)

    def _settle_bos(self, ids: list[int], bos_id: int) -> list[int]:
        leading = next((n for n, token_id in enumerate(ids) if token_id != bos_id), len(ids))
        wanted = 1 if leading or self.adds_bos else 0
        return [bos_id] * wanted + ids[leading:]

    def _get_bos(self) -> int:
        if self.bos_id is None:
            raise PromptError("this model has no beginning-of-sequence token to put before the prompt; ask for none")
        return self.bos_id


class FastTokenizer(TokenizerBackend):
    """A `tokenizers.Tokenizer`, as read from `tokenizer.json`."""

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        *,
        named_control: Iterable[str] = (),
        bos_token: str | None = None,
        eos_token: str | None = None,
        adds_bos: bool | None = None,
    ) -> None:
        """Take over `library`, which is changed so that it parses no control token and cuts nothing off.

        `named_control` are tokens that are control by what the checkpoint says, even where `tokenizer.json` has
        them as ordinary; `bos_token` and `adds_bos` default to what the post-processor of `library` does.
        """
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = True
        self._library = library
        self._is_byte_level = _is_byte_level(library)
        self._puts_space_first = _stop_space_before_first(library)
        control = self._collect_control_tokens(named_control)
        added = library.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items() if not token.special}
        unknown = control.get(getattr(library.model, "unk_token", None) or "")
        self._forbidden_ids = frozenset(control.values()) - {unknown}
        first = _find_first_template_token(library)
        bos_token = bos_token or first
        bos_id = None if bos_token is None else library.token_to_id(bos_token)
        adds_bos = first is not None if adds_bos is None else adds_bos
        if bos_id is None and (bos_token is not None or adds_bos):
            raise CheckpointError(
                f"the tokenizer asks for the beginning-of-sequence token {bos_token!r}, which is not in its "
                "vocabulary; correct bos_token or add_bos_token in tokenizer_config.json"
            )
        super().__init__(
            vocab_size=_count_ids(library),
            control_tokens=control,
            bos_id=bos_id,
            adds_bos=adds_bos,
            eos_id=None if eos_token is None else library.token_to_id(eos_token),
            eats_left=frozenset(token_id for token_id, token in added.items() if token.lstrip),
            eats_right=frozenset(token_id for token_id, token in added.items() if token.rstrip),
        )

    def _collect_control_tokens(self, named: Iterable[str]) -> dict[str, int]:
        import tokenizers

        added = {token.content: token for token in self._library.get_added_tokens_decoder().values()}
        for content in named:
            if self._library.token_to_id(content) is not None and not (content in added and added[content].special):
                self._library.add_special_tokens([tokenizers.AddedToken(content, special=True, normalized=False)])
        # A token of one character is text: no spelling of it could be told from the character.
        return {
            token.content: token_id
            for token_id, token in self._library.get_added_tokens_decoder().items()
            if token.special and len(token.content) > 1
        }

    def _encode_ordinary(self, text: str, *, at_start: bool) -> list[int]:
        if not text:
            return []
        if self._puts_space_first and at_start and not text.startswith((" ", _SPACE, *self._added.values())):
            text = " " + text
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        if self._forbidden_ids.isdisjoint(ids):
            return ids
        return [part for token_id in ids for part in self._spell_out(token_id)]

    def _spell_out(self, token_id: int) -> list[int]:
        """A control token that the merges arrived at, as the tokens of its characters."""
        if token_id not in self._forbidden_ids:
            return [token_id]
        characters = map(self._library.token_to_id, self._library.id_to_token(token_id) or "")
        return [part for part in characters if part is not None]

    def _look_up_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._library.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            known = _get_byte_alphabet()
            return bytes(map(known.__getitem__, token)) if known.keys() >= set(token) else token.encode()
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.replace(_SPACE, " ").encode()


class MetaTokenizer(TokenizerBackend):
    """Byte-pair ranks in Meta's layout: the ranks first, then 256 control tokens, with Llama 3's word pattern."""

    def __init__(self, ranks: Mapping[bytes, int]) -> None:
        import tiktoken

        self._library = tiktoken.Encoding(
            "llama3", pat_str=_META_PATTERN, mergeable_ranks=dict(ranks), special_tokens={}
        )
        control = {spelling: len(ranks) + slot for slot, spelling in enumerate(_list_meta_slots())}
        super().__init__(vocab_size=len(ranks) + len(control), control_tokens=control, bos_id=len(ranks), adds_bos=True)

    def _encode_ordinary(self, text: str, *, at_start: bool) -> list[int]:
        # As Meta's own code does: the library's regular expressions overflow their stack on longer runs.
        cuts = [0, *(run.end() for run in _LONG_SPACE.finditer(text)), len(text)]
        return [i for start, stop in itertools.pairwise(cuts) for i in self._library.encode_ordinary(text[start:stop])]

    def _look_up_bytes(self, token_id: int) -> bytes:
        return self._library.decode_single_token_bytes(token_id) if token_id < self._library.n_vocab else b""


def compile_alternatives(spellings: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds the longest of `spellings` at a place; it matches nothing if there are none."""
    longest_first = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the text holds {text[error.start]!a} at position {error.start}, which is no Unicode character; "
            "give it in UTF-8"
        ) from error


def _list_parts(component: Any, kind: str) -> list[dict[str, Any]]:
    """The steps of a component of `tokenizers`, which may be None, one step or a Sequence of steps (`kind`)."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    return list(state.get(kind, [state]))


def _is_byte_level(library: tokenizers.Tokenizer) -> bool:
    """Whether tokens are spelled in the byte alphabet, rather than in characters with `▁` for a space."""
    parts = _list_parts(library.decoder, "decoders") + _list_parts(library.pre_tokenizer, "pretokenizers")
    kinds = {part["type"] for part in parts}
    if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
        raise CheckpointError(
            f"the tokenizer's decoder is of kind {', '.join(sorted(kinds)) or 'none'}, which isn't supported; "
            "byte-level (ByteLevel) and sentencepiece-like ones (Metaspace, ByteFallback) are"
        )
    return "ByteLevel" in kinds


def _stop_space_before_first(library: tokenizers.Tokenizer) -> bool:
    """Have `library` put no space before the first word of a text; whether it would have.

    It takes each text that it is given for the start of one, which the pieces of a chat are not.
    """
    component: Any = library.pre_tokenizer
    if component is None:
        return False
    state = json.loads(component.__getstate__())
    firsts = [step for step in state.get("pretokenizers", [state]) if step.get("prepend_scheme") == "first"]
    if firsts:
        for step in firsts:
            step["prepend_scheme"] = "never"
        component.__setstate__(json.dumps(state).encode())
        library.pre_tokenizer = component
    return bool(firsts)


def _find_first_template_token(library: tokenizers.Tokenizer) -> str | None:
    """The token that the post-processor puts before a text."""
    for part in _list_parts(library.post_processor, "processors"):
        if part["type"] == "TemplateProcessing" and "SpecialToken" in part["single"][0]:
            return str(part["single"][0]["SpecialToken"]["id"])
    return None


def _count_ids(library: tokenizers.Tokenizer) -> int:
    """One more than the largest id that has a token."""
    count = library.get_vocab_size()
    has_gaps = library.id_to_token(count - 1) is None
    return max(library.get_vocab().values()) + 1 if has_gaps else count


@functools.cache
def _get_byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for (Radford et al. 2019).

    Bytes that print in Latin-1 stand for themselves; the others are numbered from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def _list_meta_slots() -> list[str]:
    reserved = (f"<|reserved_special_token_{n}|>" for n in itertools.count())
    return [_META_SLOTS.get(slot) or next(reserved) for slot in range(_META_SLOT_COUNT)]
