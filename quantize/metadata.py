"""Everything of a checkpoint directory that is not a weight: config, tokenizer, template, generation settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from gptfast.checkpoint.base import Checkpoint
from gptfast.checkpoint.gguf import GgufCheckpoint
from gptfast.checkpoint.gguf_metadata import open_metadata_directory
from gptfast.checkpoint.hf import HuggingFaceCheckpoint
from gptfast.files import read_json
from quantize.hf_config import change_hf_config, make_hf_config
from quantize.plan import Plan

HF_PATTERNS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.json",
    "merges.txt",
)
META_PATTERNS = ("tokenizer.model",)
FAST_CLASS = "PreTrainedTokenizerFast"
"""The class of transformers that takes `tokenizer.json` as it is; others rebuild parts of it."""


def make_config(checkpoint: Checkpoint, plan: Plan) -> dict[str, Any]:
    """The result's `config.json`; raises CheckpointError where Hugging Face has no words for the model."""
    if isinstance(checkpoint, HuggingFaceCheckpoint):
        return change_hf_config(read_json(checkpoint.path / "config.json"), plan)
    return change_hf_config(make_hf_config(checkpoint.config) | describe_ends(checkpoint), plan)


def describe_ends(checkpoint: Checkpoint) -> dict[str, Any]:
    """The ids that begin and end a text, as both of Hugging Face's config files spell them."""
    return {"bos_token_id": checkpoint.generation.bos_id, "eos_token_id": list(checkpoint.generation.eos_ids) or None}


def write_companions(checkpoint: Checkpoint, directory: Path) -> None:
    """Write what transformers and gptfast read beside weights and config.

    Of a Hugging Face directory that is a copy. Of a GGUF file it is the tokenizer that its metadata describes. Of
    Meta's layout it is `tokenizer.model`, which gptfast reads, and Meta's chat format.
    """
    if isinstance(checkpoint, HuggingFaceCheckpoint):
        copy_files(checkpoint.path, HF_PATTERNS, directory)
        return
    write_json(directory / "generation_config.json", describe_ends(checkpoint))
    if isinstance(checkpoint, GgufCheckpoint):
        write_fast_tokenizer(open_metadata_directory(checkpoint.path), directory)
        return
    copy_files(checkpoint.path, META_PATTERNS, directory)
    template = checkpoint.read_chat_template()
    if template is not None:
        (directory / "chat_template.jinja").write_text(template.source, encoding="utf-8")


def copy_files(source: Path, patterns: tuple[str, ...], directory: Path) -> None:
    """Copy the files of `source` that match."""
    for file in sorted({file for pattern in patterns for file in source.glob(pattern) if file.is_file()}):
        shutil.copyfile(file, directory / file.name)


def write_fast_tokenizer(source: Path, directory: Path) -> None:
    """Write the tokenizer of a GGUF file's metadata so that transformers gives the ids that gptfast gives.

    gptfast puts the beginning-of-sequence token first by `add_bos_token`; transformers by the post-processor.
    """
    tokenizer, config = read_json(source / "tokenizer.json"), read_json(source / "tokenizer_config.json")
    if config["add_bos_token"]:
        tokenizer["post_processor"] = make_bos_processor(config["bos_token"], tokenizer["model"]["vocab"])
    settings = {"tokenizer_class": FAST_CLASS, "clean_up_tokenization_spaces": False}
    write_json(directory / "tokenizer.json", tokenizer)
    write_json(directory / "tokenizer_config.json", settings | config)


def make_bos_processor(token: str, vocabulary: dict[str, int]) -> dict[str, Any]:
    """The post-processor of `tokenizer.json` that puts a token before every text."""
    bos = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, second],
        "special_tokens": {token: {"id": token, "ids": [vocabulary[token]], "tokens": [token]}},
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object as indented JSON."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
