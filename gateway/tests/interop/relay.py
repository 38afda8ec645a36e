"""Shared code of the programs: the relay's address, and the start of a backend."""

import json
import socket
import ssl
import sys

_getaddrinfo = socket.getaddrinfo


def _resolve(host, *args, **kwargs):
    # Names under .localhost are loopback (RFC 6761 §6.3), but not all resolvers support that.
    name = host.decode() if isinstance(host, bytes) else host
    return _getaddrinfo("127.0.0.1" if name and name.endswith(".localhost") else host, *args, **kwargs)


socket.getaddrinfo = _resolve


class Relay:
    """The relay described by a demo's JSON."""

    def __init__(self, about):
        self.url = about["tenant_url"]
        self.host, port = self.url.removeprefix("https://").split(":")
        self.port = int(port)
        self.ca_file = about["ca_file"]
        self.headers = {"X-Gw-Service-Key": about["service_key"]}

    def tls(self):
        """A new context, because clients set their protocols in it."""
        return ssl.create_default_context(cafile=self.ca_file)


def main(serve, call):
    """`serve` prints the URL of a backend and serves it; `call ABOUT` calls it through the relay."""
    if sys.argv[1] == "serve":
        serve(*sys.argv[2:])
    else:
        call(Relay(json.loads(sys.argv[2])), *sys.argv[3:])
