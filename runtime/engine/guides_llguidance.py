"""Guided decoding with llguidance: grammars compiled once, and one matcher for each sequence.

Invariant: a token that a guide forbids is never chosen while it holds: a matcher that cannot go on forbids everything,
so its request fails instead of running free. Must not know channels: what a trigger, a grammar or an end id stands for
is the text layers' business.

A grammar of kind "ebnf" is llguidance's Lark, in which `<[200005]>` is the token of that id and `%json {...}` a schema.
Where a grammar has neither trigger nor end ids, it describes the whole output, its last token included.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from gptoss_trt.build_engine import vocabulary
from gptoss_trt.runtime.engine.guides import GuideError, GuideMatcher
from gptoss_trt.runtime.engine.messages import Guide

MAX_GRAMMAR_BYTES = 1 << 20
MAX_CHOICES = 4096
CACHE_SIZE = 256
# Bounds of llguidance itself; with them the worst schema tried compiles in under a second.
INITIAL_FUEL = 1_000_000
MAX_LEXER_STATES = 50_000
MAX_GRAMMAR_SIZE = 200_000
# Blanks and line breaks between a JSON text's parts: without a bound a model can go on with them for ever.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
_UNUSED_END = 199_998  # llguidance wants an end token of its own; no guide allows this one


class LlguidanceCompiler:
    """Compiles guides for a vocabulary of `vocab_size` ids. Thread-safe; the first use makes the token table (2 s)."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._lock = threading.Lock()  # guards the cache
        self._table_lock = threading.Lock()
        self._table: Any = None
        self._cache: OrderedDict[Guide, Any] = OrderedDict()  # Guide -> LLMatcher or GuideError

    def compile(self, guides: tuple[Guide, ...]) -> GuideMatcher:
        """A fresh matcher. Compiles what is not in the cache. Raises GuideError."""
        return SequenceMatcher(guides, [self._prototype(guide).deep_copy() for guide in guides], self._vocab_size)

    def warm(self) -> Any:
        """The token table. Raises GuideError when llguidance is not installed."""
        with self._table_lock:
            if self._table is None:
                self._table = _token_table(self._vocab_size)
            return self._table

    def _prototype(self, guide: Guide) -> Any:
        with self._lock:
            known = self._cache.get(guide)
            if known is not None:
                self._cache.move_to_end(guide)
        if known is None:
            known = self._compiled(guide)
            with self._lock:
                self._cache[guide] = known
                while len(self._cache) > CACHE_SIZE:
                    self._cache.popitem(last=False)
        if isinstance(known, GuideError):
            raise known
        return known

    def _compiled(self, guide: Guide) -> Any:
        table = self.warm()
        import llguidance

        size = len(guide.grammar.encode("utf-8", "replace"))
        if size > MAX_GRAMMAR_BYTES:
            return GuideError(f"a guide's grammar has {size} bytes; the limit is {MAX_GRAMMAR_BYTES}")
        try:
            grammar = _GRAMMARS[guide.kind](guide.grammar)
        except (ValueError, RecursionError) as error:
            return GuideError(f"the guide of kind {guide.kind!r} cannot be read: {error}")
        limits = llguidance.LLParserLimits(
            initial_lexer_fuel=INITIAL_FUEL,
            max_lexer_states=MAX_LEXER_STATES,
            max_grammar_size=MAX_GRAMMAR_SIZE,
            verbose_errors=False,
        )
        matcher = llguidance.LLMatcher(table, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            return GuideError(f"the guide of kind {guide.kind!r} cannot be compiled: {matcher.get_error()[:500]}")
        return matcher


class SequenceMatcher:
    """One sequence's guides: which of them holds now, and how far its grammar has come."""

    def __init__(self, guides: tuple[Guide, ...], fresh: list[Any], vocab_size: int) -> None:
        self._guides = guides
        self._fresh = fresh  # a matcher at its grammar's beginning, for each guide
        self._vocab_size = vocab_size
        self._longest = max((len(guide.trigger) for guide in guides), default=0)
        self._recent: list[int] = []
        self._active: Guide | None = None
        self._matcher: Any = None
        for guide, matcher in zip(guides, fresh, strict=True):
            if not guide.trigger:
                self._active, self._matcher = guide, matcher.deep_copy()
                break

    @property
    def failure(self) -> str:
        """What llguidance says of a grammar that it cannot follow any further; empty while it can."""
        if self._active is None or not self._matcher.is_error():
            return ""
        reason = self._matcher.get_error().splitlines()[0][:500]
        return f"the guide of kind {self._active.kind!r} cannot be followed any further: {reason}"

    def mask(self, logits: torch.Tensor) -> None:
        """Sets forbidden entries of `logits` ([vocabulary], fp32) to -inf."""
        if self._active is None:
            return
        allowed = np.zeros(self._vocab_size, dtype=np.uint8)
        if not self._matcher.is_error() and not self._matcher.is_stopped():
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            found = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
            allowed[: found.size] = found
            allowed[_UNUSED_END:][:1] = 0
        if self._matcher.is_accepting():
            allowed[list(self._active.end_ids)] = 1
        logits.masked_fill_(torch.from_numpy(allowed == 0).to(logits.device), -torch.inf)

    def accept(self, token: int) -> None:
        """Moves on by the token that was chosen."""
        if self._active is None:
            self._look_for_trigger(token)
        elif token in self._active.end_ids and self._matcher.is_accepting():
            self._active, self._recent = None, []
        else:
            self._matcher.consume_token(token)
            if not self._active.end_ids and self._matcher.is_stopped() and not self._matcher.is_error():
                self._active, self._recent = None, []

    def _look_for_trigger(self, token: int) -> None:
        if not self._longest:
            return
        self._recent = [*self._recent, token][-self._longest :]
        for guide, matcher in zip(self._guides, self._fresh, strict=True):
            size = len(guide.trigger)
            if size and tuple(self._recent[-size:]) == guide.trigger:
                self._active, self._matcher = guide, matcher.deep_copy()
                return


class _Vocabulary:
    """What llguidance wants to know of a tokenizer."""

    bos_token_id = None
    eos_token_id = _UNUSED_END

    def __init__(self, size: int) -> None:
        import tiktoken

        texts = {number: text.encode() for text, number in vocabulary.SPECIAL_TOKENS.items()}
        ordinary = vocabulary.token_bytes()[:size]
        self.tokens = [*ordinary, *(texts[number] for number in range(len(ordinary), size))]
        self.special_token_ids = [number for number in sorted(texts) if number < size]
        self._encoding = tiktoken.Encoding(
            "o200k_harmony",
            pat_str=vocabulary.SPLIT_PATTERN,
            mergeable_ranks=vocabulary.load_ranks(),
            special_tokens=vocabulary.SPECIAL_TOKENS,
        )

    def __call__(self, text: str) -> list[int]:
        ids = self._encoding.encode_ordinary(text)
        # A cut vocabulary (small test models) lacks long tokens: single bytes stand for them.
        return ids if all(number < len(self.tokens) for number in ids) else [self._byte(b) for b in text.encode()]

    def _byte(self, value: int) -> int:
        return self._encoding.encode_single_token(bytes([value]))


def _token_table(vocab_size: int) -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise GuideError(f"guided decoding needs the package llguidance: {error}") from error
    words = _Vocabulary(vocab_size)
    end = min(_UNUSED_END, vocab_size - 1)
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(words), n_vocab=vocab_size, eos_token=[end])


def _schema(text: str) -> str:
    import llguidance

    schema = json.loads(text)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON Schema is an object, not {type(schema).__name__}")
    return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})


def _choice(text: str) -> str:
    import llguidance

    choices = json.loads(text)
    if not isinstance(choices, list) or not 1 <= len(choices) <= MAX_CHOICES:
        raise ValueError(f"a choice is a list of 1 to {MAX_CHOICES} strings")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("every choice must be a non-empty string")
    alternatives = " | ".join(json.dumps(choice) for choice in choices)
    return llguidance.LLMatcher.grammar_from_lark(f"start: {alternatives}\n")


def _regex(text: str) -> str:
    import llguidance

    return llguidance.LLMatcher.grammar_from_regex(text)


def _lark(text: str) -> str:
    import llguidance

    return llguidance.LLMatcher.grammar_from_lark(text)


_GRAMMARS = {
    "json_schema": _schema,
    "json_object": lambda _: _schema('{"type": "object"}'),
    "regex": _regex,
    "choice": _choice,
    "ebnf": _lark,
}
