"""`digest_of`: fingerprints of what ranks compare, and the texts of the last ones, for errors."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

__all__ = ["digest_of", "text_of"]

_KEPT = 64
"""How many texts are kept."""

_LONGEST = 300
"""The letters of the longest text that is told in an error."""

_TEXTS: OrderedDict[str, str] = OrderedDict()


def digest_of(text: str) -> str:
    """A hexadecimal fingerprint of a text."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    if len(text) <= _LONGEST:
        _TEXTS[digest] = text
        _TEXTS.move_to_end(digest)
        if len(_TEXTS) > _KEPT:
            _TEXTS.popitem(last=False)
    return digest


def text_of(digest: str) -> str:
    """The text of a fingerprint, in one line; of an old one or a long one, the fingerprint."""
    text = _TEXTS.get(digest)
    return f"fingerprint {digest[:12]}" if text is None else " ".join(text.split())
