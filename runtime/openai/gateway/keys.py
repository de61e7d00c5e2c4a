"""API keys: who may call, and whose a stored response is.

Invariant: a comparison takes the same time whichever key is nearest, and no key is logged or stored: owners are named
by a digest. Must not know HTTP servers.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from gptoss_trt.runtime.openai.errors import RequestError
from gptoss_trt.runtime.openai.gateway.options import OptionsError

EVERYBODY = "everybody"
"""The owner of all requests to a gateway without keys."""


class Keys:
    """The keys of one gateway; none of them means that no key is asked for."""

    def __init__(self, keys: list[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @classmethod
    def read(cls, path: Path | None) -> Keys:
        """One key a line; empty lines and lines that begin with # are left out. Raises OptionsError."""
        if path is None:
            return cls([])
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise OptionsError(f"api_key_file {path}: {error}") from error
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise OptionsError(f"api_key_file {path} holds no key; leave the option out to ask for none")
        return cls(keys)

    def owner(self, authorization: str) -> str:
        """The owner that an Authorization header names. Raises RequestError 401."""
        if not self._digests:
            return EVERYBODY
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise RequestError(
                401, None, "no API key is given; send the header Authorization: Bearer KEY", "missing_api_key"
            )
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise RequestError(401, None, "the API key is not valid", "invalid_api_key")
        return digest.hex()
