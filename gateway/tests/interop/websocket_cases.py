"""Cases of Autobahn's test suite for WebSocket servers (RFC 6455, RFC 7692), as bytes: through the relay a server must send
the same bytes as over a direct connection, and close the connection in the same cases.

Autobahn's own programs need Python 2. The families of cases and their numbers are Autobahn's.
"""

import asyncio
import json
import os
import socket
import struct
import zlib

from aiohttp import WSMsgType, web

from relay import main

TEXT, BINARY, CLOSE, PING, PONG, CONTINUATION = 1, 2, 8, 9, 10, 0
MASK = b"\x11\x22\x33\x44"


def frame(opcode, payload=b"", fin=True, reserved=0, masked=True):
    head = bytes([fin << 7 | reserved << 4 | opcode])
    length, mask = len(payload), 128 if masked else 0
    if length < 126:
        head += bytes([mask | length])
    elif length < 65536:
        head += bytes([mask | 126]) + struct.pack(">H", length)
    else:
        head += bytes([mask | 127]) + struct.pack(">Q", length)
    if not masked:
        return head + payload
    key = (MASK * (length // 4 + 1))[:length]
    return head + MASK + (int.from_bytes(payload, "big") ^ int.from_bytes(key, "big")).to_bytes(length, "big")


def close(code=1000, reason=b""):
    return frame(CLOSE, struct.pack(">H", code) + reason)


def deflated(payload):
    deflate = zlib.compressobj(wbits=-15)
    return (deflate.compress(payload) + deflate.flush(zlib.Z_SYNC_FLUSH))[:-4]


def cases():
    """(name, pieces to send, extension offered)"""
    plain = lambda name, *pieces: (name, list(pieces), None)
    # 1: framing
    for opcode in (TEXT, BINARY):
        for length in (0, 125, 126, 127, 128, 65535, 65536):
            yield plain(f"1 {opcode} {length}", frame(opcode, b"*" * length), close())
        whole = frame(opcode, b"*" * 65536)
        yield plain(f"1 {opcode} chopped", *(whole[at : at + 997] for at in range(0, len(whole), 997)), close())
    yield plain("1 unmasked", frame(TEXT, b"x", masked=False), close())
    # 2: pings and pongs
    for payload in (b"", b"Hello", b"\x00\xff\xfe", b"x" * 125, b"x" * 126):
        yield plain(f"2 ping {payload[:9]!r}", frame(PING, payload), close())
        yield plain(f"2 pong {payload[:9]!r}", frame(PONG, payload), frame(PING, b"after"), close())
    yield plain("2 octets", *(bytes([byte]) for byte in frame(PING, b"x" * 125)), close())
    yield plain("2 ten", *(frame(PING, b"%d" % number) for number in range(10)), close())
    # 3: reserved bits
    for reserved in range(1, 8):
        yield plain(f"3 text {reserved}", frame(TEXT, b"x", reserved=reserved), frame(PING), close())
        yield plain(f"3 between {reserved}", frame(TEXT, b"x"), frame(PING, reserved=reserved), close())
        yield plain(f"3 close {reserved}", frame(CLOSE, b"", reserved=reserved))
    # 4: undefined opcodes
    for opcode in (3, 4, 5, 6, 7, 11, 12, 13, 14, 15):
        yield plain(f"4 {opcode}", frame(opcode), close())
        yield plain(f"4 after {opcode}", frame(TEXT, b"x"), frame(opcode, b"y"), frame(PING), close())
    # 5: fragments
    parts = [frame(TEXT, b"frag", fin=False), frame(CONTINUATION, b"ment")]
    yield plain("5 ping in two", frame(PING, b"a", fin=False), frame(CONTINUATION, b"b"), close())
    yield plain("5 pong in two", frame(PONG, b"a", fin=False), frame(CONTINUATION, b"b"), close())
    yield plain("5 two", *parts, close())
    yield plain("5 ping between", parts[0], frame(PING, b"p"), parts[1], close())
    yield plain("5 one write", b"".join([*parts, frame(PING), close()]))
    yield plain("5 octets", *(bytes([byte]) for byte in b"".join(parts)), close())
    yield plain("5 continues nothing", frame(CONTINUATION, b"x"), frame(TEXT, b"y"), close())
    yield plain("5 continues nothing, open", frame(CONTINUATION, b"x", fin=False), frame(TEXT, b"y"), close())
    yield plain("5 text in text", parts[0], frame(TEXT, b"x"), close())
    yield plain("5 many", *([frame(TEXT, b"a", fin=False)] + [frame(CONTINUATION, b"b", fin=False)] * 100 + parts[1:]), close())
    yield plain("5 empty", frame(TEXT, fin=False), frame(CONTINUATION, fin=False), frame(CONTINUATION), close())
    # 6: UTF-8, whole, in two, and octet by octet
    texts = ["κόσμε", "ᅣ", "\u0000", "\u007f", "\u0080", "߿", "ࠀ", "\ufffd", "\uffff", "𐀀", "\U0010ffff", "\U0001f600"]
    invalid = [b"\xce\xba\xe1\xbd\xb9\xcf\x83\xce\xbc\xce\xb5\xed\xa0\x80edited", b"\xf8\x88\x80\x80\x80", b"\xc0\xaf", b"\xe0\x80\xaf", b"\xf4\x90\x80\x80", b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\x80", b"\xbf", b"\xfe", b"\xff", b"\xce", b"\xe1\xbd", b"\xf0\x90\x80", b"\xc0\x80", b"\xed\xad\xbf\xed\xb0\x80", b"\xfc\x84\x80\x80\x80\x80"]
    for payload in [text.encode() for text in texts] + invalid:
        half = len(payload) // 2
        yield plain(f"6 whole {payload!r}", frame(TEXT, payload), close())
        yield plain(f"6 two {payload!r}", frame(TEXT, payload[:half], fin=False), frame(CONTINUATION, payload[half:]), close())
        octets = [frame(TEXT, fin=False)] + [frame(CONTINUATION, bytes([byte]), fin=False) for byte in payload]
        yield plain(f"6 octets {payload!r}", *octets, frame(CONTINUATION), close())
        yield plain(f"6 binary {payload!r}", frame(BINARY, payload), close())
    # 7: closing
    codes = [0, 999, 1000, 1001, 1002, 1003, 1004, 1005, 1006, 1007, 1008, 1009, 1010, 1011, 1012, 1013, 1014, 1015, 1016, 1100, 2000, 2999, 3000, 3999, 4000, 4999, 5000, 65535]
    for code in codes:
        yield plain(f"7 code {code}", close(code))
        yield plain(f"7 code {code} with a reason", close(code, b"why"))
    for payload in (b"", b"\x03", b"\x03\xe8" + b"*" * 123, b"\x03\xe8" + b"*" * 124, b"\x03\xe8\xff", b"\x03\xe8\xce\xba"):
        yield plain(f"7 payload {payload[:5]!r} {len(payload)}", frame(CLOSE, payload))
    for after in (frame(TEXT, b"late"), frame(PING, b"late"), close(), frame(BINARY, b"*" * 300)):
        # Sent together: bytes that arrive after the server has closed reset the connection and may discard its answer.
        yield plain(f"7 after {after[:2]!r}", close() + after)
    yield plain("7 after much", frame(BINARY, b"*" * 262_144), close() + frame(PING))
    yield plain("7 in fragments", parts[0], close(), parts[1])
    # 9: large messages, whole and in fragments
    for length in (64, 256, 1024, 4096):
        payload = os.urandom(1024) * length
        yield plain(f"9 {length} KiB", frame(BINARY, payload), close())
        pieces = [payload[at : at + 65536] for at in range(0, len(payload), 65536)]
        fragments = [frame(CONTINUATION, piece, fin=False) for piece in pieces[1:]]
        yield plain(f"9 {length} KiB in fragments", frame(BINARY, pieces[0], fin=False), *fragments, frame(CONTINUATION), close())
    # 12, 13: compression, with what can be offered
    offers = ["permessage-deflate", "permessage-deflate; client_no_context_takeover; server_no_context_takeover", "permessage-deflate; server_max_window_bits=9", "permessage-deflate; client_max_window_bits", "permessage-deflate; client_max_window_bits=8", "permessage-deflate; nonsense", "permessage-deflate; server_max_window_bits=99", "x-other"]
    for offer in offers:
        for length in (16, 1000, 100_000):
            text = (b'{"key": "value", "list": [1, 2, 3]} ' * (length // 30 + 1))[:length]
            yield f"12 {offer} {length}", [frame(TEXT, deflated(text), reserved=4), close()], offer
            yield f"13 {offer} {length} plain", [frame(TEXT, text), close()], offer
    yield "12 not deflated", [frame(TEXT, b"\xff\xff\xff", reserved=4), close()], offers[0]


def verdict(stream, relay, pieces, offer, address):
    """Bytes that the server sends on this connection, and its part of the response to the upgrade."""
    head = f"GET / HTTP/1.1\r\nHost: {relay.host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    head += "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in relay.headers.items())
    if offer:
        head += f"Sec-WebSocket-Extensions: {offer}\r\n"
    stream.sendall(head.encode() + b"\r\n")
    received = b""
    while b"\r\n\r\n" not in received:
        piece = stream.recv(65536)
        assert piece, (address, received)
        received += piece
    answer, _, received = received.partition(b"\r\n\r\n")
    fields = sorted(line for line in answer.lower().split(b"\r\n")[1:] if line.startswith(b"sec-websocket-"))
    try:
        for piece in pieces:
            stream.sendall(piece)
    except OSError:
        # The server has closed the connection.
        pass
    try:
        while piece := stream.recv(1 << 20):
            received += piece
    except OSError:
        # The connection ends with or without a reset, depending on whether the server has read everything.
        pass
    return answer.split(b" ", 2)[1], fields, received


async def echo(request):
    # Handles frames strictly in order, so that its answers do not depend on their arrival times.
    connection = web.WebSocketResponse(max_msg_size=8 << 20, timeout=1)
    await connection.prepare(request)
    async for message in connection:
        if message.type == WSMsgType.TEXT:
            await connection.send_str(message.data)
        elif message.type == WSMsgType.BINARY:
            await connection.send_bytes(message.data)
    return connection


async def serve_for_ever():
    application = web.Application()
    application.router.add_get("/", echo)
    runner = web.AppRunner(application)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listener).start()
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    await asyncio.get_running_loop().create_future()


def call(relay, direct):
    address, tls = ("127.0.0.1", int(direct.rsplit(":")[-1])), relay.tls()
    compared, differences = 0, []
    for name, pieces, offer in cases():
        with socket.create_connection(address, timeout=20) as stream:
            expected = verdict(stream, relay, pieces, offer, address)
        with socket.create_connection(("127.0.0.1", relay.port), timeout=20) as tcp:
            with tls.wrap_socket(tcp, server_hostname=relay.host, suppress_ragged_eofs=False) as stream:
                relayed = verdict(stream, relay, pieces, offer, address)
        compared += 1
        if relayed != expected:
            show = lambda it: (it[0], it[1], len(it[2]), it[2][:60], it[2][-40:])
            differences.append(f"{name}: directly {show(expected)}, relayed {show(relayed)}")
    assert compared >= 300, compared
    assert not differences, "\n".join([f"{len(differences)} of {compared} differ", *differences])
    print(json.dumps({"cases": compared, "differences": 0}))


main(lambda: asyncio.run(serve_for_ever()), call)
