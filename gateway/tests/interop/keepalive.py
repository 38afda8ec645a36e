"""Servers that close idle connections: no request may fail because of it."""

import asyncio
import json
import random

from relay import main
from servers import serve

CALLERS = 32


async def caller(relay, tls, idle, counted, total):
    """Sends requests with pauses about as long as the server keeps idle connections."""
    reader, writer = await asyncio.open_connection("127.0.0.1", relay.port, ssl=tls, server_hostname=relay.host)
    [(name, value)] = relay.headers.items()
    request = f"GET / HTTP/1.1\r\nHost: {relay.host}\r\n{name}: {value}\r\n\r\n".encode()
    while next(counted) < total:
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        content = (await reader.readexactly(int(fields["content-length"]))).decode()
        assert head.startswith("http/1.1 200 "), head + content
        assert content.split(" ")[0] == fields["x-gw-request-id"], (head, content)
        await asyncio.sleep(random.uniform(0, 2 * idle))
    writer.close()


async def call(relay, kind, idle, total):
    tls, counted = relay.tls(), iter(range(10**9))
    await asyncio.gather(*(caller(relay, tls, float(idle), counted, int(total)) for _ in range(CALLERS)))
    print(json.dumps({"server": kind, "requests": int(total), "failed": 0}))


main(serve, lambda *arguments: asyncio.run(call(*arguments)))
