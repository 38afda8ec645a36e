"""Odd requests, raw, to the relay in front of a real server: do both see the same messages?

What the relay passes on has an X-Gw-Request-Id of its own, which its caller gets too. So a request that the server takes
for one and the relay did not, smuggled in another's content, has none, or one that was seen before, or one that no caller
was told; and a response that belongs to another request shows by its id. What must arrive, must arrive as it was sent.
"""

import asyncio
import hashlib
import json
import pathlib
import re
from typing import NamedTuple

import vectors
from relay import main
from servers import serve
from vectors import EITHER, REFUSED

# How long an answer may take before a request counts as one that waits for more, in seconds.
PATIENCE = 5
AT_ONCE = 24
# What servers answer without taking note: not valid, or a wrong version of WebSocket.
OWN = (400, 426)


class Response(NamedTuple):
    status: int
    fields: dict
    content: bytes

    @property
    def id(self):
        return self.fields.get("x-gw-request-id")

    @property
    def is_refusal(self):
        """The gateway's or the agent's own."""
        return "x-gw-status" in self.fields


class Result(NamedTuple):
    name: str
    expected: str | bytes
    number: int
    responses: list
    # Neither answered nor closed.
    waits: bool


async def exchange(relay, tls, data, to_head):
    """What comes back until the relay closes, and whether it does not."""
    stream = asyncio.open_connection("127.0.0.1", relay.port, ssl=tls, server_hostname=relay.host, limit=1 << 24)
    reader, writer = await stream
    received, waits = b"", False
    try:
        writer.write(data)
        while piece := await asyncio.wait_for(reader.read(65536), PATIENCE):
            received += piece
    except TimeoutError:
        waits = True
    except OSError:
        pass
    writer.transport.abort()
    return list(responses(received, to_head)), waits


def responses(received, to_head):
    """Each final response; the first may be one to HEAD, without content. What is none is an error."""
    while received:
        head, end, received = received.partition(b"\r\n\r\n")
        assert end, head
        line, *lines = head.decode("latin-1").split("\r\n")
        version, status = line.split(" ")[:2]
        assert version == "HTTP/1.1", line
        fields = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in lines)}
        if status == "101":
            yield Response(101, fields, received)
            return
        if status.startswith("1"):
            continue
        content = b""
        if fields.get("transfer-encoding") == "chunked" and not to_head:
            while True:
                size, _, received = received.partition(b"\r\n")
                piece, received = received[: int(size, 16)], received[int(size, 16) + 2 :]
                content += piece
                if not piece:
                    break
        elif not to_head:
            length = int(fields.get("content-length", 0 if status in ("204", "304") else len(received)))
            assert len(received) >= length, f"cut short: {head}"
            content, received = received[:length], received[length:]
        to_head = False
        yield Response(int(status), fields, content)


def fill(data, number, relay):
    [(name, value)] = relay.headers.items()
    plain = {
        b"<host>": relay.host.encode(),
        b"<HOST>": relay.host.upper().encode(),
        b"<key>": f"{name}: {value}".encode(),
        b"<n>": b"%06d" % number,
    }

    def replaced(data, values):
        return re.sub(rb"<[\w-]+>", lambda match: values.get(match[0], match[0]), data)

    smuggled, following = replaced(vectors.SMUGGLED, plain), replaced(vectors.NEXT, plain)
    lengths = {
        b"<smuggled>": b"%d" % len(smuggled),
        b"<smuggled-hex>": b"%x" % len(smuggled),
        b"<chunked-and-smuggled>": b"%d" % len(vectors.CHUNKED + smuggled),
        b"<chunked-and-next>": b"%d" % len(vectors.CHUNKED + following),
    }
    return replaced(data, plain | lengths)


async def try_all(relay, cases):
    tls, turns = relay.tls(), asyncio.Semaphore(AT_ONCE)
    tls.set_alpn_protocols(["http/1.1"])

    async def one(number, case):
        async with turns:
            data = fill(case.data, number, relay)
            tried = await exchange(relay, tls, data, data.lstrip().startswith(b"HEAD "))
            # Over connections to the server that the case may have left poisoned.
            good = await exchange(relay, tls, fill(vectors.NEXT, number, relay), False)
            return [
                Result(case.name, case.expected, number, *tried),
                Result(f"a good one after {case.name}", b"", number, *good),
            ]

    return sum(await asyncio.gather(*(one(number, case) for number, case in enumerate(cases))), [])


def seen(log):
    """What the server took for requests."""
    for line in pathlib.Path(log).read_text("latin-1").splitlines():
        entry = json.loads(line)
        if "content" in entry:
            entry["sha256"] = hashlib.sha256(entry.pop("content").encode("latin-1")).hexdigest()
        yield entry


def differences(results, entries):
    """What is wrong with these results, given what the server saw."""
    told = {response.id for result in results for response in result.responses}
    waiting = {result.number for result in results if result.waits}
    # nginx refuses some request lines, and is not at the fields then: at most as many as callers were told of.
    unread = [entry for entry in entries if entry.get("status") == "400" and not entry["id"]]
    refused = [it for result in results for it in result.responses if it.status == 400 and not it.is_refusal]
    if len(unread) > len(refused):
        yield f"saw what is not even a request: {unread}"
    by_id = {}
    for entry in entries:
        if entry in unread:
            continue
        if not entry["id"]:
            yield f"saw what the relay did not: {entry}"
        elif entry["id"] in by_id:
            yield f"saw one request twice: {entry}, {by_id[entry['id']]}"
        elif entry["id"] not in told and not entry.get("cut") and not is_cut_short(entry, waiting):
            yield f"saw what no caller heard of: {entry}"
        by_id[entry["id"]] = entry
    for name, expected, _, answers, _ in results:
        for answer in answers:
            if not answer.id:
                yield f"{name}: a response without an id: {answer}"
            elif not answer.is_refusal and answer.status not in OWN and answer.id not in by_id:
                yield f"{name}: a response to what it never saw: {answer}"
            elif answer.status == 200 and answer.content and answer.content.split(b" ")[0] != answer.id.encode():
                yield f"{name}: the response to another request: {answer}"
        first = answers[0] if answers else None
        if expected == REFUSED and (first is None or not first.is_refusal):
            yield f"{name}: not refused: {first}"
        elif expected not in (REFUSED, EITHER):
            entry = first and by_id.get(first.id)
            if not entry or first.is_refusal:
                yield f"{name}: not relayed: {first}"
            elif entry["sha256"] != hashlib.sha256(expected).hexdigest():
                yield f"{name}: relayed with other content: {entry}"


def is_cut_short(entry, waiting):
    """A request whose caller left before the end that the relay waited for."""
    number, name = re.search(r"(\d{6})/?(\w*)", entry["target"]).groups()
    return int(number) in waiting and name not in ("next", "smuggled")


def call(relay, kind, log):
    cases = list(vectors.cases())
    results = asyncio.run(try_all(relay, cases))
    entries = list(seen(log))
    refusals = sum(response.is_refusal for result in results for response in result.responses)
    found = list(differences(results, entries))
    assert len(entries) > len(cases) > 1000 and refusals > 500, (len(entries), len(cases), refusals)
    assert not found, "\n".join([f"{kind}: {len(found)} differences", *found])
    print(json.dumps({"server": kind, "cases": len(cases), "refusals": refusals, "requests_seen": len(entries)}))


main(serve, call)
