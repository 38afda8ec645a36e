"""The release key: an Ed25519 key in the file that `gw-gateway agent-program new-key` writes. openssl signs with it."""

import base64
import os
import pathlib
import subprocess

# PKCS#8 of an Ed25519 key (RFC 8410), up to the 32 bytes of the key; its second version has the public half behind them.
PREFIX = bytes.fromhex("302e020100300506032b657004220420")
ALGORITHM = PREFIX[7:]
# SubjectPublicKeyInfo, up to the public half.
PUBLIC_PREFIX = bytes.fromhex("302a300506032b6570032100")


class ReleaseKey:
    def __init__(self, file: pathlib.Path) -> None:
        content = file.read_bytes()
        at = content.find(ALGORITHM)
        seed = content[at + len(ALGORITHM) :][:32]
        if at < 0 or len(seed) < 32:
            raise SystemExit(f"{file}: not a release key, as `gw-gateway agent-program new-key` makes one")
        # In memory alone, for openssl, which does not read the second version.
        self.document = os.memfd_create("release key")
        os.write(self.document, PREFIX + seed)
        self.public = self._openssl("pkey", "-pubout", "-outform", "DER", key="-in")[len(PUBLIC_PREFIX) :]

    def _openssl(self, *arguments: str, key: str) -> bytes:
        command = ["openssl", *arguments, key, f"/proc/self/fd/{self.document}"]
        form = ["-keyform" if key == "-inkey" else "-inform", "DER"]
        os.lseek(self.document, 0, os.SEEK_SET)
        return subprocess.run(command + form, check=True, stdout=subprocess.PIPE, pass_fds=[self.document]).stdout

    def sign(self, message: bytes) -> bytes:
        """The signature (RFC 8032) of 64 bytes."""
        file = os.memfd_create("message")
        try:
            os.write(file, message)
            os.set_inheritable(file, True)
            path = f"/proc/{os.getpid()}/fd/{file}"
            return self._openssl("pkeyutl", "-sign", "-rawin", "-in", path, key="-inkey")
        finally:
            os.close(file)

    def pem(self) -> str:
        """The public half, for openssl and cosign."""
        text = base64.b64encode(PUBLIC_PREFIX + self.public).decode()
        return f"-----BEGIN PUBLIC KEY-----\n{text}\n-----END PUBLIC KEY-----\n"
