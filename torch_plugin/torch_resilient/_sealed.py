"""What a member keeps in the store for other members, with a seal that only members can make.

Others may write there too: who holds the token of the job, or reaches a store that asks for none.
What is read by pickle runs as code, so the seal is looked at before anything of it is. It is the
HMAC-SHA256 of the key and the content under the secret of the world, which the store tells its
members in their views and nobody else.
"""

import hashlib
import hmac

_DIGEST = hashlib.sha256
SEAL_BYTES = _DIGEST().digest_size


class ForgedError(Exception):
    """No member of this world has put that there."""


def seal(secret, key, content):
    """`content` with its seal in front; `secret`: of the world, bytes; `key`: where it is kept."""
    return _seal(secret, key, content) + content


def open_sealed(secret, key, sealed):
    """The content, as bytes. ForgedError: the seal is of another secret, key or content."""
    content = bytes(sealed[SEAL_BYTES:])
    if not hmac.compare_digest(_seal(secret, key, content), bytes(sealed[:SEAL_BYTES])):
        raise ForgedError(key)
    return content


def _seal(secret, key, content):
    made = hmac.new(secret, key.encode() + b"\0", _DIGEST)
    made.update(content)
    return made.digest()
