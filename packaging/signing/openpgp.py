"""The release key as an OpenPGP key (RFC 4880), for apt, which takes no other signatures.

The same Ed25519 key signs: one key has to be kept and replaced, not two.
"""

import base64
import hashlib

from release_key import ReleaseKey

USER = b"Gw release key"
# Part of the fingerprint, so it never changes: 2026-01-01.
CREATED = (1767225600).to_bytes(4, "big")
EDDSA, SHA512 = b"\x16", b"\x0a"
CURVE = bytes.fromhex("092b06010401da470f01")
PUBLIC_KEY, USER_ID, SIGNATURE = 6, 13, 2
# Types of signatures: of lines of text; of a user by its own key.
TEXT, SELF = b"\x01", b"\x13"


def packet(tag: int, body: bytes) -> bytes:
    return bytes([0xC0 | tag, 0xFF]) + len(body).to_bytes(4, "big") + body


def number(content: bytes) -> bytes:
    value = int.from_bytes(content, "big")
    return value.bit_length().to_bytes(2, "big") + value.to_bytes((value.bit_length() + 7) // 8, "big")


def field(kind: int, content: bytes) -> bytes:
    return bytes([len(content) + 1, kind]) + content


def armor(title: str, content: bytes) -> str:
    crc = 0xB704CE
    for byte in content:
        crc ^= byte << 16
        for _ in range(8):
            crc = (crc << 1) ^ (0x1864CFB if crc & 0x800000 else 0)
    text = base64.b64encode(content).decode()
    lines = [text[at : at + 64] for at in range(0, len(text), 64)]
    check = base64.b64encode(crc.to_bytes(3, "big")).decode()
    return "\n".join([f"-----BEGIN PGP {title}-----", "", *lines, f"={check}", f"-----END PGP {title}-----", ""])


class OpenPgpKey:
    def __init__(self, key: ReleaseKey) -> None:
        self.key = key
        self.body = b"\x04" + CREATED + EDDSA + CURVE + number(b"\x40" + key.public)
        self.hashed = b"\x99" + len(self.body).to_bytes(2, "big") + self.body
        self.fingerprint = hashlib.sha1(self.hashed).digest()

    def _signature(self, kind: bytes, when: bytes, message: bytes, fields: bytes = b"") -> bytes:
        fields = field(2, when) + field(33, b"\x04" + self.fingerprint) + fields
        head = b"\x04" + kind + EDDSA + SHA512 + len(fields).to_bytes(2, "big") + fields
        digest = hashlib.sha512(message + head + b"\x04\xff" + len(head).to_bytes(4, "big")).digest()
        signature = self.key.sign(digest)
        issuer = field(16, self.fingerprint[-8:])
        tail = len(issuer).to_bytes(2, "big") + issuer + digest[:2] + number(signature[:32]) + number(signature[32:])
        return packet(SIGNATURE, head + tail)

    def public(self) -> str:
        """The public half, for `signed-by` of apt."""
        user = b"\xb4" + len(USER).to_bytes(4, "big") + USER
        # It may certify and sign.
        signature = self._signature(SELF, CREATED, self.hashed + user, field(27, b"\x03"))
        return armor("PUBLIC KEY BLOCK", packet(PUBLIC_KEY, self.body) + packet(USER_ID, USER) + signature)

    def sign_text(self, text: str, when: int) -> str:
        """The text with its signature below. None of its lines begins with a dash, or ends with a space."""
        lines = text.splitlines()
        assert all(line == line.rstrip() and not line.startswith("-") for line in lines), text
        signature = self._signature(TEXT, when.to_bytes(4, "big"), "\r\n".join(lines).encode())
        return "\n".join(["-----BEGIN PGP SIGNED MESSAGE-----", "Hash: SHA512", "", *lines, ""]) + armor("SIGNATURE", signature)
