"""Small tokenizers of the kinds that checkpoints bring, as directories."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "Once upon a time, there was a little girl. She loved to play; she played every day in the park with her dog.",
    "Hello world! How are you? I'm fine, and they're fine too. You are a helpful assistant who is not the user.",
    "user assistant system 1234567890 () [] {} <> || naïve café 你好 🙂",
]
BYTE_LEVEL_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SENTENCEPIECE_CONTROL = ("<unk>", "<s>", "</s>")


def train_byte_level() -> tokenizers.Tokenizer:
    """A byte-level BPE with ChatML's control tokens and the ordinary added token `<think>`; no BOS."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=list(BYTE_LEVEL_CONTROL), show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    library.add_tokens([tokenizers.AddedToken("<think>", special=False, normalized=False)])
    return library


def train_sentencepiece(scheme: str = "first") -> tokenizers.Tokenizer:
    """A BPE with byte fallback that puts BOS first.

    `scheme` says where a space is put first: Metaspace's "first", "always" or "never", "legacy" for the normalizer
    that does it for every piece between control tokens, or "sequence" for "first" as one of several steps.
    """
    library = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if scheme == "legacy":
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif scheme == "sequence":
        steps = [pre_tokenizers.Digits(), pre_tokenizers.Metaspace(prepend_scheme="first", split=False)]
        library.pre_tokenizer = pre_tokenizers.Sequence(steps)
    else:
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = [*SENTENCEPIECE_CONTROL, *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [word for line in CORPUS for word in line.split() if word.isascii()]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    library.train_from_iterator(words, trainer)
    state = json.loads(library.to_str())
    state["added_tokens"] = state["added_tokens"][: len(SENTENCEPIECE_CONTROL)]
    library = tokenizers.Tokenizer.from_str(json.dumps(state))
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return library


def write_tokenizer(directory: Path, library: tokenizers.Tokenizer, **config: Any) -> Path:
    """A directory with `tokenizer.json` and, if anything is in it, `tokenizer_config.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    library.save(str(directory / "tokenizer.json"))
    if config:
        (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def write_meta_tokenizer(directory: Path) -> Path:
    """A directory with Meta's `tokenizer.model`: every byte and a few merges."""
    directory.mkdir(parents=True, exist_ok=True)
    merged = [b"ab", b"  ", b"\n\n", b"He", b"llo", b"Hello", b"us", b"er", b"user", " Việt".encode()]
    lines = [base64.b64encode(token) for token in [*(bytes([byte]) for byte in range(256)), *merged]]
    content = b"".join(b"%s %d\n" % (line, rank) for rank, line in enumerate(lines))
    (directory / "tokenizer.model").write_bytes(content)
    return directory
