"""Make `llama_cpp_ids.json`: what llama.cpp gives for two small vocabularies, under every kind of pre-tokenizer.

Needs llama-cpp-python, gguf and tokenizers: `python tests/data/make_llama_cpp_ids.py <default model's file>`. The small
vocabularies are trained on the texts themselves without any splitting, so that a text split in the wrong place gets
other ids.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import tokenizers

KINDS = ("default", "gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "tekken", "seed-coder", "deepseek-coder", "viking")
TEXTS = [
    "Hello world, how are you? I'm fine; they'll say we've won. DON'T SHOUT! It'S O'Clock, y'all'D",
    "1 12 123 1234 12345 1234567890 3.14159 1,000,000 2024-01-31 0x1F 10% ¼ ½ x² ①② ٣٤ Ⅷ 𝟘𝟙",
    "   three leading and trailing   ",
    "tabs\t\tand  double   triple    quadruple",
    "line\n\nbreaks\r\n\r\n  indented\n\t\n \n end\n",
    "def f(x):\n    return x**2  # 100%\n\n\tif a != b and c[0] == {'k': \"v\"}:\n        pass\n",
    "你好世界，再见。中文字符123个！「引号」（括号）",
    "こんにちは、カタカナー漢字 안녕하세요 한국어",
    "🙂🚀👨‍👩‍👧‍👦🇩🇪🏽❤️‍🔥 emoji🙂text 🙂 12🙂34",
    "naïve café ÉCOLE Zürich ŁÓDŹ straße İstanbul ǅ ﬁ ſ",
    "e\u0301te\u0301 n\u0303o o\u20dd हिन्दी ไทย বাংলা עברית العربية ٱلسَّلَام",
    "Привет МИР, здравствуй-те! αβγ ΣΩ ∑∫√≠∞ ℝ",
    "camelCaseWord HTTPServer XMLHttpRequest iPhone McDonald",
    "a\u00a0b\u2003c\u3000d\u202fe\u200bf\u0085g\u2028h \u3000 \u3000x\ufeff",
    "\x00\x01\x1b[0m\x1c\x7f\ufffd\ue000",
    "!!!??? ... --- ___ === +++ <<< >>> ^^^ ~~~ ||| $$$ ``` @@@ /// \\\\\\ “quoted” ‘single’ — en–dash …",
    "http://example.com/a/b?c=1&d=2#e user@mail.org $5.00 #tag @name",
    "/// path/to//file/\n//\n comment /\r\n",
    "f();\n}\n};\nf();\n}\n};\nf();\n}\n};\n",
    "<|endoftext|> is text, <think> is not </s> [INST] <0x0A> ▁under▁scores ▁",
    "aaaaaaaaaaaaaaaa ababababab      bbbb",
    "",
    " ",
    "  ",
    "\n",
    " \n",
    "\n ",
    "a",
    " a",
    "a ",
    "1",
    " 1",
    "'",
    "'s",
    " 's",
    "''S",
    "'ll'LL'lL",
    "x'Re y'vE",
    " !",
    "! ",
    " ! \n\n",
    "。\n",
    "你",
    " 你",
    "🙂",
    " 🙂",
    "\u3000",
    "\t",
    "9a9 a9a",
    ".5 5. a.b",
]
CONTROL, USER_DEFINED = 3, 4


def train(texts: list[str], *, byte_level: bool, size: int) -> tuple[list[str], list[str]]:
    """The tokens that BPE learns in order, and the merges."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    alphabet = []
    if byte_level:
        library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    else:
        texts = [text.replace(" ", "▁") for text in texts]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, max_token_length=12)
    library.train_from_iterator(texts, trainer)
    model = json.loads(library.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [" ".join(merge) for merge in model["merges"]]


def make_byte_level() -> dict[str, Any]:
    """A vocabulary of the GGUF model "gpt2"; the last tokens have no merge, as some of Llama 3's haven't."""
    tokens, merges = train(TEXTS * 2 + [part for text in TEXTS for part in text.split()] * 3, byte_level=True, size=900)
    added = {"<|endoftext|>": CONTROL, "<think>": USER_DEFINED}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*added, *tokens],
        "tokenizer.ggml.token_type": [*added.values(), *[1] * len(tokens)],
        "tokenizer.ggml.merges": merges[:-100],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }


def make_sentencepiece() -> dict[str, Any]:
    """A vocabulary of the GGUF model "llama", with byte fallback for most of the characters."""
    common = [text for text in TEXTS if text.isascii()]
    tokens, _ = train(common * 2, byte_level=False, size=300)
    added = {"<unk>": 2, "<s>": CONTROL, "</s>": CONTROL, "<think>": USER_DEFINED}
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    scores = [-float(rank) for rank in range(len(tokens))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*added, *byte_tokens, *tokens],
        "tokenizer.ggml.token_type": [*added.values(), *[6] * 256, *[1] * len(tokens)],
        "tokenizer.ggml.scores": [0.0] * (len(added) + 256) + scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def write_gguf(path: Path, metadata: dict[str, Any]) -> None:
    """A file without tensors: the vocabulary and the least that llama.cpp wants to know beside it."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def tokenize(path: Path) -> list[list[int]]:
    """The ids of every text, without BOS and with control tokens read as text."""
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    return [model.tokenize(text.encode(), add_bos=False, special=False) for text in TEXTS]


def tokenize_with(metadata: dict[str, Any]) -> list[list[int]]:
    """What `tokenize` gives for a file with this vocabulary."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "vocabulary.gguf"
        write_gguf(path, metadata)
        return tokenize(path)


def main() -> None:
    """Write the file beside this one."""
    default_model = Path(sys.argv[1])
    byte_level, sentencepiece = make_byte_level(), make_sentencepiece()
    prefix = "tokenizer.ggml."
    content = {
        "made_with": f"tests/data/make_llama_cpp_ids.py, llama-cpp-python {llama_cpp.__version__}, special=False",
        "texts": TEXTS,
        "default_model": {"file": default_model.name, "ids": tokenize(default_model)},
        "byte_level": {
            "metadata": byte_level,
            "ids": {kind: tokenize_with({**byte_level, prefix + "pre": kind}) for kind in KINDS},
        },
        "sentencepiece": {
            "metadata": sentencepiece,
            "ids": {
                "space first": tokenize_with({**sentencepiece, prefix + "add_space_prefix": True}),
                "no space first": tokenize_with({**sentencepiece, prefix + "add_space_prefix": False}),
            },
        },
    }
    text = json.dumps(content, ensure_ascii=True, separators=(",", ":"))
    Path(__file__).with_name("llama_cpp_ids.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
