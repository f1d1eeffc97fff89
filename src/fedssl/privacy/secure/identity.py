"""The key pair by which a client is known to the others, such as the key of its SuperNode.

Public keys are written as OpenSSH does: ``ssh-ed25519 AAAA…``, without a comment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA384

from fedssl.util.files import make_folders, replace_file

LONGEST = 1024  # bytes of a public key or a signature, far above those in use

PrivateKey: TypeAlias = Ed25519PrivateKey | EllipticCurvePrivateKey


@dataclass(frozen=True)
class Identity:
    """A key pair that signs."""

    private: PrivateKey = field(default_factory=Ed25519PrivateKey.generate, repr=False)

    @property
    def public(self) -> bytes:
        """The public key, as one line of text."""
        encoding, kind = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        return self.private.public_key().public_bytes(encoding, kind)

    def sign(self, statement: bytes) -> bytes:
        """Sign a statement."""
        if isinstance(self.private, Ed25519PrivateKey):
            return self.private.sign(statement)
        return self.private.sign(statement, ECDSA(SHA384()))


def has_signed(public: bytes, statement: bytes, signature: bytes) -> bool:
    """Return whether the owner of a public key signed the statement."""
    try:
        key = serialization.load_ssh_public_key(public)
        if isinstance(key, Ed25519PublicKey):
            key.verify(signature, statement)
        elif isinstance(key, EllipticCurvePublicKey):
            key.verify(signature, statement, ECDSA(SHA384()))
        else:
            return False
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        return False
    return True


def load_identity(path: Path) -> Identity:
    """Read a private key that ``ssh-keygen -t ecdsa`` or ``-t ed25519`` wrote."""
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
    except (UnsupportedAlgorithm, TypeError) as error:  # TypeError: it has a passphrase
        raise ValueError(str(error)) from None
    if not isinstance(key, PrivateKey):
        raise ValueError("not an ecdsa or ed25519 key")
    return Identity(key)


def make_identity(path: Path) -> Identity:
    """Read the private key of a client, which is made the first time; beside it, the public one."""
    if not path.exists():
        make_folders(path.parent, 0o700)
        new = Identity()
        written = new.private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
        with replace_file(path.with_name(f"{path.name}.pub")) as file:
            file.write_bytes(new.public + b"\n")
        with replace_file(path, private=True) as file:
            file.write_bytes(written)
    return load_identity(path)


def read_public_keys(path: Path) -> set[bytes]:
    """Read public keys, one per line, such as ``cat *.pub`` of ``ssh-keygen`` gives."""
    keys = set()
    for line in path.read_bytes().splitlines():
        if line.strip() and not line.lstrip().startswith(b"#"):
            key = b" ".join(line.split()[:2])
            try:
                serialization.load_ssh_public_key(key)
            except (UnsupportedAlgorithm, ValueError) as error:
                raise ValueError(f"a line is no public key ({error})") from None
            keys.add(key)
    return keys
