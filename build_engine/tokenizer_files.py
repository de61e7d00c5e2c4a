"""Hugging Face tokenizer files of gpt-oss, made from the shipped vocabulary, for benchmark tools and transformers.

Invariant: text encodes to the same ids through these files as through tiktoken, and no network is used. Must not know
engines or checkpoints. Standard library only.

A tiktoken vocabulary merges two neighbours whenever their bytes together are a token, the lowest rank first. Hugging
Face's BPE merges listed pairs only, so every split of every token into two tokens is listed, in the order of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from gptoss_trt.build_engine import vocabulary

MAX_CONTEXT = 131_072
BEGIN, END_OF_TURN, PADDING = "<|startoftext|>", "<|return|>", "<|endoftext|>"
FILE_NAMES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def write_tokenizer_files(folder: Path) -> list[Path]:
    """Writes tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja into `folder`.

    `folder` is made if it is missing. About 3 s. Returns the paths. Raises OSError or VocabularyError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    template = chat_template()
    contents = {
        "tokenizer.json": json.dumps(tokenizer_json(), ensure_ascii=False, separators=(",", ":")),
        "tokenizer_config.json": json.dumps(_tokenizer_config(template), ensure_ascii=False, indent=1) + "\n",
        "special_tokens_map.json": json.dumps(_special_tokens_map(), indent=1) + "\n",
        "chat_template.jinja": template,
    }
    for name in FILE_NAMES:
        (folder / name).write_text(contents[name], encoding="utf-8")
    return [folder / name for name in FILE_NAMES]


def chat_template() -> str:
    """The Harmony chat template in Jinja: what `render_chat` lays out, with two limits. `$ref` in a tool's schema is
    printed as `any`, and special-token text in messages becomes special tokens, as in every Hugging Face template."""
    source = resources.files("gptoss_trt.build_engine") / "data" / "chat_template.jinja"
    return source.read_text(encoding="utf-8")


def tokenizer_json() -> dict[str, Any]:
    """`tokenizer.json` as an object: byte-level BPE behind o200k's split pattern, all special tokens added."""
    tokens = vocabulary.token_bytes()
    ranks = {token: rank for rank, token in enumerate(tokens)}
    alphabet = _byte_alphabet()
    texts = [token.decode("latin-1").translate(alphabet) for token in tokens]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {
        "type": "Split",
        "pattern": {"Regex": vocabulary.SPLIT_PATTERN},
        "behavior": "Isolated",
        "invert": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(text, number) for text, number in vocabulary.SPECIAL_TOKENS.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # a piece that is a token is that token, as in tiktoken
            "vocab": {text: rank for rank, text in enumerate(texts)},
            "merges": [f"{texts[left]} {texts[right]}" for left, right in _merges(tokens, ranks)],
        },
    }


def _merges(tokens: tuple[bytes, ...], ranks: dict[bytes, int]) -> Iterator[tuple[int, int]]:
    """(left, right) ids of every split of every token into two tokens, by the token's rank, then by the parts'."""
    find = ranks.get
    for token in tokens:
        if len(token) == 1:
            continue
        pairs = []
        for cut in range(1, len(token)):
            left = find(token[:cut])
            if left is None:
                continue
            right = find(token[cut:])
            if right is not None:
                pairs.append((left, right))
        yield from sorted(pairs)


def _byte_alphabet() -> dict[int, str]:
    """Byte -> the character that stands for it in byte-level BPE: itself where it prints, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + place) for place, byte in enumerate(others)}


def _added_token(text: str, number: int) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": text, **flags}


def _tokenizer_config(template: str) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END_OF_TURN,
        "pad_token": PADDING,
        "model_max_length": MAX_CONTEXT,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "chat_template": template,
    }


def _special_tokens_map() -> dict[str, str]:
    return {"bos_token": BEGIN, "eos_token": END_OF_TURN, "pad_token": PADDING}
