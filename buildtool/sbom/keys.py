"""Key files: Ed25519 keys in PEM, as `openssl genpkey -algorithm ed25519` makes them.

One kind of key: its signatures are the same bytes each time, and no document chooses how it is checked. This
is the only module that imports `cryptography`, which the extra `sign` installs.
"""

import hashlib
import os
import select
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buildtool.core.errors import ConfigError, EnvironmentMissing
from buildtool.core.files import reading
from probes.core.quoting import command

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ed25519

_MOST_BYTES = 64 << 10
_WAIT_S = 10.0  # for the next bytes of a key that comes through a pipe
_MAKE = (
    "make one: openssl genpkey -algorithm ed25519 -out key.pem; openssl pkey -in key.pem -pubout -out key.pub"
)


@dataclass(frozen=True)
class PublicKey:
    """A key that signatures are checked with. `key_id` is the SHA-256 of its DER form, in hex."""

    key_id: str
    _key: "ed25519.Ed25519PublicKey"

    @classmethod
    def read(cls, path: Path) -> "PublicKey":
        """The public key in a file. Raises ConfigError for anything else, a private key among it."""
        text = _text(path)
        if b"PRIVATE KEY" in text:
            public = command("openssl", "pkey", "-in", str(path), "-pubout", "-out", f"{path}.pub")
            raise ConfigError(
                f"{path} is a private key, which verifying doesn't need", f"take its public half: {public}"
            )
        key: ed25519.Ed25519PublicKey = _parsed(path, text, "Public")
        return cls(_key_id(key), key)

    def verifies(self, signature: bytes, message: bytes) -> bool:
        """Whether a signature is this key's of this message."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(signature, message)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True)
class PrivateKey:
    """A key that signs."""

    key_id: str
    _key: "ed25519.Ed25519PrivateKey"

    @classmethod
    def read(cls, path: Path) -> "PrivateKey":
        """The private key in a file. Raises ConfigError for anything else, and for an encrypted one."""
        text = _text(path)
        if b"ENCRYPTED" in text:
            plain = command("openssl", "pkey", "-in", str(path), "-out", "plain.pem")
            raise ConfigError(
                f"{path} is encrypted, and nobody is asked for its password", f"decrypt it first: {plain}"
            )
        key: ed25519.Ed25519PrivateKey = _parsed(path, text, "Private")
        return cls(_key_id(key.public_key()), key)

    def sign(self, message: bytes) -> bytes:
        """The signature of a message, the same each time."""
        return self._key.sign(message)


def _text(path: Path) -> bytes:
    text = b""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe may have no writer
    with reading(path, "name the key's file, in PEM"), os.fdopen(os.open(path, flags), "rb", 0) as file:
        while len(text) <= _MOST_BYTES:
            if not select.select([file], [], [], _WAIT_S)[0]:
                raise ConfigError(f"{path} is a pipe that nothing comes from", _MAKE)
            piece = file.read(_MOST_BYTES + 1)
            if not piece:
                break
            text += piece
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"{path} is no key: it is longer than {_MOST_BYTES:,} bytes", _MAKE)
    return text


def _parsed(path: Path, text: bytes, half: str) -> Any:  # noqa: ANN401
    """The `Public` or `Private` half of a key in PEM. Raises ConfigError, EnvironmentMissing."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519

        no_password = {"password": None} if half == "Private" else {}
        key = getattr(serialization, f"load_pem_{half.lower()}_key")(text, **no_password)
    except ImportError as error:
        raise EnvironmentMissing(
            "signatures need the Python package cryptography", "install it: pip install 'gpu-weir[sign]'"
        ) from error
    except Exception as error:  # its own errors, ValueError, TypeError: for every damage another
        raise ConfigError(f"{path} holds no key in PEM that can be read", _MAKE) from error
    if not isinstance(key, getattr(ed25519, f"Ed25519{half}Key")):
        raise ConfigError(f"{path} holds a key of another kind than Ed25519", _MAKE)
    return key


def _key_id(key: "ed25519.Ed25519PublicKey") -> str:
    from cryptography.hazmat.primitives import serialization

    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()
