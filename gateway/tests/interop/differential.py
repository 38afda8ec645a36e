"""Sends unusual raw requests to the relay in front of a real server, and checks that both see the same messages.

The relay adds an X-Gw-Request-Id to each forwarded request, and its caller gets the same id. A request smuggled in the
content of another therefore has no id, a repeated id, or an id that no caller received. The id also reveals a response
that belongs to another request. Requests that must arrive must arrive unchanged.
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

# Seconds without an answer after which a request counts as waiting for more bytes.
PATIENCE = 5
AT_ONCE = 24
# Statuses that servers send without logging the request: invalid requests and wrong WebSocket versions.
OWN = (400, 426)
# A request with one of these methods is sent once more if its connection ends without a response.
SAFE = ("GET ", "HEAD ", "OPTIONS ", "TRACE ")


class Response(NamedTuple):
    status: int
    fields: dict
    content: bytes

    @property
    def id(self):
        return self.fields.get("x-gw-request-id")

    @property
    def is_refusal(self):
        """Whether the gateway or the agent produced the response."""
        return "x-gw-status" in self.fields


class Result(NamedTuple):
    name: str
    expected: str | bytes
    number: int
    responses: list
    # Neither answered nor closed.
    waits: bool


async def exchange(relay, tls, data, to_head):
    """Bytes received until the relay closes, and whether it stays open."""
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
    """Parses the final responses; the first may answer HEAD, without content. Anything else is an error."""
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
            # Uses connections to the server that the case may have left in a wrong state.
            good = await exchange(relay, tls, fill(vectors.NEXT, number, relay), False)
            return [
                Result(case.name, case.expected, number, *tried),
                Result(f"a good one after {case.name}", b"", number, *good),
            ]

    return sum(await asyncio.gather(*(one(number, case) for number, case in enumerate(cases))), [])


def seen(log):
    """Requests that the server logged."""
    for line in pathlib.Path(log).read_text("latin-1").splitlines():
        entry = json.loads(line)
        if "content" in entry:
            entry["sha256"] = hashlib.sha256(entry.pop("content").encode("latin-1")).hexdigest()
        yield entry


def is_repetition(entry, before):
    """Whether the server saw a safe request again that it had broken off without a response."""
    return "malformed" in entry and entry == before and entry["start"].startswith(SAFE)


def differences(results, entries):
    """Differences between these results and the server's log."""
    told = {response.id for result in results for response in result.responses}
    waiting = {result.number for result in results if result.waits}
    # nginx refuses some request lines before it reads fields; there are at most as many as callers received.
    unread = [entry for entry in entries if entry.get("status") == "400" and not entry["id"]]
    refused = [it for result in results for it in result.responses if it.status == 400 and not it.is_refusal]
    if len(unread) > len(refused):
        yield f"the server received bytes that are not a request: {unread}"
    by_id = {}
    repeated = set()
    for entry in entries:
        if entry in unread:
            continue
        if not entry["id"]:
            yield f"saw what the relay did not: {entry}"
        elif entry["id"] not in repeated and is_repetition(entry, by_id.get(entry["id"])):
            repeated.add(entry["id"])
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
    """Whether this is a request whose caller disconnected before its end."""
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
