"""The gpt-oss vocabulary (o200k_harmony): ranks, special tokens, and the folder that openai-harmony reads it from.

Invariant: bytes that leave this module have the sha256 of MODEL.md, wherever they were cached. Standard library only,
so that every package may import it. Knows no tokenizer and no Harmony message.
"""

from __future__ import annotations

import binascii
import functools
import gzip
import hashlib
import os
import tempfile
from importlib import resources
from pathlib import Path

FILE_NAME = "o200k_base.tiktoken"
SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"  # of the decompressed file
ORDINARY_TOKENS = 199_998
VOCABULARY_SIZE = 201_088  # rows of the embedding; every id from ORDINARY_TOKENS on is special
TIKTOKEN_VARIABLE = "TIKTOKEN_ENCODINGS_BASE"  # where openai-harmony and tiktoken look before they download

# How o200k cuts text before byte pairs are merged. A word is a run of capitals and then small letters, with one leading
# character that is neither letter, digit nor line break, and an English contraction; digits go by three; punctuation
# takes a leading blank and the line breaks and slashes behind it; blanks leave their last one to the word that follows.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD, _CONTRACTION = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    (
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

_NAMED_SPECIALS = {
    "<|startoftext|>": 199998,
    "<|endoftext|>": 199999,
    "<|return|>": 200002,
    "<|constrain|>": 200003,
    "<|channel|>": 200005,
    "<|start|>": 200006,
    "<|end|>": 200007,
    "<|message|>": 200008,
    "<|call|>": 200012,
}


class VocabularyError(RuntimeError):
    """The shipped vocabulary is absent or damaged, or no folder can hold a copy; the text names the path."""


def _special_tokens() -> dict[str, int]:
    named = {token_id: text for text, token_id in _NAMED_SPECIALS.items()}
    return {
        named.get(token_id, f"<|reserved_{token_id}|>"): token_id
        for token_id in range(ORDINARY_TOKENS, VOCABULARY_SIZE)
    }


SPECIAL_TOKENS: dict[str, int] = _special_tokens()
"""Text -> id of all 1,090 special tokens. 200018 is `<|reserved_200018|>` as in openai-harmony (`<|endofprompt|>` in
tiktoken's own table: one id, two spellings)."""


def _check(data: bytes, where: object) -> bytes:
    digest = hashlib.sha256(data).hexdigest()
    if digest != SHA256:
        raise VocabularyError(f"{where}: sha256 is {digest}, expected {SHA256}")
    return data


def read_vocabulary() -> bytes:
    """The decompressed `o200k_base.tiktoken` from the package. Raises VocabularyError when absent or damaged."""
    source = resources.files("gptoss_trt.build_engine") / "data" / f"{FILE_NAME}.gz"
    if not source.is_file():
        raise VocabularyError(f"{source} is missing: the installation is incomplete")
    try:
        data = gzip.decompress(source.read_bytes())
    except (OSError, EOFError) as error:
        raise VocabularyError(f"{source} cannot be decompressed: {error}") from error
    return _check(data, source)


@functools.lru_cache(maxsize=1)
def token_bytes() -> tuple[bytes, ...]:
    """The bytes of every ordinary token, by id (0 to 199,997). Cached; about 0.15 s the first time."""
    fields = read_vocabulary().split()  # token, rank, token, rank, ... : the file is in the order of ranks
    return tuple(map(binascii.a2b_base64, fields[::2]))


def load_ranks() -> dict[bytes, int]:
    """Token bytes -> rank, which is the token's id. 199,998 entries, a new dictionary each call."""
    return {token: rank for rank, token in enumerate(token_bytes())}


def _is_intact(path: Path) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == SHA256


def _cache_folders() -> list[Path]:
    folders = []
    if os.environ.get("XDG_CACHE_HOME"):
        folders.append(Path(os.environ["XDG_CACHE_HOME"]))
    home = os.path.expanduser("~")  # noqa: PTH111 -- Path.home() raises where there is no home at all
    if home != "~":
        folders.append(Path(home) / ".cache")
    folders.append(Path(tempfile.gettempdir()) / f"gptoss-trt-{os.getuid()}")
    return [folder / "gptoss-trt" / f"vocabulary-{SHA256[:12]}" for folder in folders]


def _write_copy(folder: Path, data: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{FILE_NAME}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(temporary).replace(folder / FILE_NAME)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def ensure_tiktoken_dir() -> Path:
    """A folder that holds an intact `o200k_base.tiktoken`, for `TIKTOKEN_ENCODINGS_BASE`.

    The folder that the variable names already, if its file is intact; else a cache folder ($XDG_CACHE_HOME, ~/.cache or
    the temporary folder, the first that can be written), filled from the package by an atomic rename, so processes that
    start together do not disturb each other. Raises VocabularyError naming every folder tried.
    """
    named = os.environ.get(TIKTOKEN_VARIABLE)
    if named and _is_intact(Path(named) / FILE_NAME):
        return Path(named)
    failures = []
    for folder in _cache_folders():
        try:
            if not _is_intact(folder / FILE_NAME):
                _write_copy(folder, read_vocabulary())
            return folder
        except OSError as error:
            failures.append(f"{folder}: {error}")
    raise VocabularyError("no folder can hold the vocabulary; tried " + "; ".join(failures))
