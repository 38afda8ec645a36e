"""Odd requests, raw, to the relay in front of a real server: do both see the same messages?

What the relay passes on has an X-Gw-Request-Id of its own, which its caller gets too. So a request that the server takes
for one and the relay did not, smuggled in another's content, has none, or one that was seen before; and a response that
belongs to another request shows by its id. What the server finds malformed is a difference too.
"""

import itertools
import json
import pathlib
import re
import socket

from relay import main
from servers import serve

# Content that no part of can begin a method, which may have any name.
BODY = b"((((("
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: %(host)s\r\nX-Gw-Service-Key: %(key)s\r\n\r\n"
LAST = SMUGGLED.replace(b"/smuggled", b"/last").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")


def cases():
    """(name, bytes); %(host)s and %(key)s are filled in."""
    host, key = b"Host: %(host)s\r\n", b"X-Gw-Service-Key: %(key)s\r\n"

    def request(line=b"POST /%(case)s HTTP/1.1\r\n", fields=b"", body=b"", host=host):
        return line + host + key + fields + b"\r\n" + body

    smuggled = SMUGGLED
    chunked = b"0\r\n\r\n"

    # Lengths: one, several, odd; each with content that is a request if the length is read otherwise.
    lengths = [b"0", b"1", b"5", b"+5", b"-1", b"0x5", b"5 ", b" 5", b"5,5", b"5, 6", b"05", b"5.0", b"5e0", b"", b"\t5", b"5;", b"five"]
    lengths += [b"18446744073709551616", b"9" * 40, b"5\x00", b"\x0b5", b"5\x0c", "５".encode()]
    for length in lengths:
        yield f"length {length!r}", request(fields=b"Content-Length: " + length + b"\r\n", body=BODY + smuggled)
    for first, second in itertools.product([b"0", b"5", b"6"], repeat=2):
        fields = b"Content-Length: %s\r\nContent-Length: %s\r\n" % (first, second)
        yield f"lengths {first!r} {second!r}", request(fields=fields, body=BODY + smuggled)
    for name in [b"content-length", b"CONTENT-LENGTH", b"Content_Length", b"Content-Length ", b" Content-Length", b"Content-Length\t", b"Content\x00-Length", b"X: y\rContent-Length", b"X: y\nContent-Length"]:
        yield f"name {name!r}", request(fields=name + b": 5\r\n", body=BODY + smuggled)

    # Codings, alone and beside a length, in every disguise that is known.
    codings = [b"chunked", b"Chunked", b"CHUNKED", b" chunked", b"chunked ", b"\tchunked", b"chunked\t", b"xchunked", b"chunkedx", b"chunked,", b",chunked", b"chunked, chunked", b"identity", b"identity, chunked", b"chunked, identity", b"gzip, chunked", b"gzip", b"'chunked'", b'"chunked"', b"chunked;q=1", b"\x0bchunked", b"chunked\x00", b"chunk", b"c\rhunked", b"", b"\xffchunked"]
    for coding, length in itertools.product(codings, [None, b"4", b"0", b"100"]):
        fields = b"Transfer-Encoding: " + coding + b"\r\n"
        if length is not None:
            fields = b"Content-Length: " + length + b"\r\n" + fields
        yield f"coding {coding!r} length {length!r}", request(fields=fields, body=chunked + smuggled)
    for name in [b"Transfer-Encoding ", b" Transfer-Encoding", b"Transfer_Encoding", b"Transfer-Encoding\t", b"transfer-encoding", b"TRANSFER-ENCODING", b"X: y\nTransfer-Encoding", b"X: y\rTransfer-Encoding", b"X:\r\n Transfer-Encoding", b"Transfer-Encoding\x00", b"Transfer\x0b-Encoding"]:
        for length in (b"", b"Content-Length: 5\r\n"):
            yield f"name {name!r} {length!r}", request(fields=length + name + b": chunked\r\n", body=chunked + smuggled)
    for pair in itertools.product([b"chunked", b"identity", b"x"], repeat=2):
        fields = b"Transfer-Encoding: %s\r\nTransfer-Encoding: %s\r\n" % pair
        yield f"codings {pair!r}", request(fields=fields, body=chunked + smuggled)
    for version in (b"1.0", b"1.1", b"1.2", b"0.9", b"2.0", b"1.01", b"01.1", b"1", b"11"):
        line = b"POST /%(case)s HTTP/" + version + b"\r\n"
        yield f"version {version!r} chunked", request(line, b"Transfer-Encoding: chunked\r\n", chunked + smuggled)
        yield f"version {version!r} length", request(line, b"Content-Length: 5\r\n", BODY + smuggled)
        yield f"version {version!r}", request(line, body=smuggled)

    # Chunks.
    sizes = [b"5", b"05", b"0000000000000005", b"00000000000000005", b"+5", b"-5", b"0x5", b" 5", b"5 ", b"5\t", b"5;a", b"5;a=b", b'5;a="b"', b"5 ;a", b"5;\n", b"5\n", b"5\r", b"5;a\rb", b"5\x00", b"5,5", b"", b"g", b"5;" + b"a" * 5000, b"fffffffffffffffff", b"ffffffffffffffff", b"8000000000000005", b"100000005", "５".encode()]
    for size in sizes:
        body = size + b"\r\n" + BODY + b"\r\n0\r\n\r\n"
        yield f"size {size[:30]!r}", request(fields=b"Transfer-Encoding: chunked\r\n", body=body + smuggled)
    for end in [b"\r\n", b"\n", b"\r", b"", b"\n\n", b"X\r\n", b"\r\r\n", b" \r\n"]:
        for last in [b"0\r\n\r\n", b"0\n\n", b"0\r\n\n", b"0\n\r\n", b"00\r\n\r\n", b"0;a\r\n\r\n", b"0 \r\n\r\n"]:
            if end != b"\r\n" and last != b"0\r\n\r\n":
                continue
            body = b"5\r\n" + BODY + end + last
            yield f"ends {end!r} {last!r}", request(fields=b"Transfer-Encoding: chunked\r\n", body=body + smuggled)
    trailers = [b"X: 1", b"Content-Length: 50", b"Transfer-Encoding: chunked", b"Host: other", b"X", b" X: 1", b"X : 1", b"X: 1\n", b"X: 1\r\n Y: 2", b"\x00: 1", b"X: \x00", b"Connection: close", b"Upgrade: h2c"]
    for trailer in trailers:
        body = b"5\r\n" + BODY + b"\r\n0\r\n" + trailer + b"\r\n\r\n"
        yield f"trailer {trailer!r}", request(fields=b"Transfer-Encoding: chunked\r\n", body=body + smuggled)
    fields = b"Content-Length: %(length)s\r\n"
    yield "content that is a request", request(fields=fields, body=smuggled)
    chunk = b"%(length_hex)s\r\n" + smuggled + b"\r\n" + chunked
    yield "a chunk that is a request", request(fields=b"Transfer-Encoding: chunked\r\n", body=chunk)

    # What Connection may not take away, and must.
    for named in [b"Content-Length", b"Transfer-Encoding", b"Host", b"X-Gw-Service-Key", b"close, Content-Length", b"keep-alive", b"upgrade", b"TE", b"X-A,,X-B", b",", b"\x00"]:
        fields = b"Connection: " + named + b"\r\nContent-Length: 5\r\n"
        yield f"connection {named!r} length", request(fields=fields, body=BODY + smuggled)
        fields = b"Connection: " + named + b"\r\nTransfer-Encoding: chunked\r\n"
        yield f"connection {named!r} chunked", request(fields=fields, body=chunked + smuggled)

    # Lines, folds, bare ends, names.
    for field in [b"X: a\r\n b\r\n", b"X: a\r\n\tb\r\n", b"X : a\r\n", b"X\t: a\r\n", b"X: a\n", b"X: a\r", b"X: a\rb\r\n", b"X: a\x00b\r\n", b": a\r\n", b"X\r\n", b"X a\r\n", b"X(: a\r\n", b"X: \x7f\r\n", b"X: \xff\r\n", b"\xc3\xbc: a\r\n", b"X: " + b"a" * 40_000 + b"\r\n", b"X: a\r\n" * 120, b" X: a\r\n", b"\tX: a\r\n", b"\r\nX: a\r\n", b"\nX: a\r\n", b"X@y: z\r\n", b'X"y: z\r\n']:
        yield f"field {field[:30]!r}", request(fields=field + b"Content-Length: 5\r\n", body=BODY + smuggled)
    for line in [b"POST  /%(case)s HTTP/1.1\r\n", b"POST\t/%(case)s\tHTTP/1.1\r\n", b" POST /%(case)s HTTP/1.1\r\n", b"POST /%(case)s HTTP/1.1 \r\n", b"POST /%(case)s  HTTP/1.1\r\n", b"POST /%(case)s HTTP/1.1\n", b"POST /%(case)s HTTP/1.1\r", b"POST /%(case)s\r\n", b"POST /%(case)s http/1.1\r\n", b"POST /%(case)s HTTP /1.1\r\n", b"POST /%(case)s HTTP/1.1\x00\r\n", b"\r\nPOST /%(case)s HTTP/1.1\r\n", b"\r\n\r\nPOST /%(case)s HTTP/1.1\r\n", b"\nPOST /%(case)s HTTP/1.1\r\n", b"P(ST /%(case)s HTTP/1.1\r\n", b"POST /%(case)s#f HTTP/1.1\r\n", b"POST /%(case)s\x00 HTTP/1.1\r\n", b"POST /%(case)s\x7f HTTP/1.1\r\n", b"POST /%(case)s\xff HTTP/1.1\r\n", b"POST /%(case)s?a b HTTP/1.1\r\n", b"POST %(case)s HTTP/1.1\r\n", b"POST * HTTP/1.1\r\n", b"POST http://%(host)s/%(case)s HTTP/1.1\r\n", b"POST http://elsewhere/%(case)s HTTP/1.1\r\n", b"POST ftp://%(host)s/%(case)s HTTP/1.1\r\n", b"POST //%(case)s HTTP/1.1\r\n", b"POST /%(case)s HTTP/1.1\r\n\r\n", b"CONNECT %(host)s:443 HTTP/1.1\r\n", b"CONNECT /%(case)s HTTP/1.1\r\n", b"PRI * HTTP/2.0\r\n", b"TRACE /%(case)s HTTP/1.1\r\n", b"OPTIONS * HTTP/1.1\r\n", b"OPTIONS /%(case)s HTTP/1.1\r\n"]:
        yield f"line {line!r}", request(line, b"Content-Length: 5\r\n", BODY + smuggled)
    for method in [b"GET", b"HEAD", b"DELETE", b"PATCH", b"PURGE"]:
        line = method + b" /%(case)s HTTP/1.1\r\n"
        yield f"{method!r} with a length", request(line, b"Content-Length: 5\r\n", BODY + smuggled)
        yield f"{method!r} with chunks", request(line, b"Transfer-Encoding: chunked\r\n", b"5\r\n" + BODY + b"\r\n" + chunked + smuggled)
        yield f"{method!r} and another", request(line, b"", smuggled)
    for hosts in [b"", b"Host:\r\n", b"Host: %(host)s\r\nHost: %(host)s\r\n", b"Host: %(host)s\r\nHost: other\r\n", b"Host: other\r\n", b"Host: %(host)s, other\r\n", b"Host: a b\r\n", b"Host: u@%(host)s\r\n", b"Host: %(host)s/x\r\n", b"Host : %(host)s\r\n", b"Host: %(host)s:x\r\n", b"Host: %(host)s.\r\n", b"host: %(host)s\r\n", b"Host: %(host)s\x00\r\n"]:
        yield f"host {hosts!r}", request(fields=b"Content-Length: 5\r\n", body=BODY + smuggled, host=hosts)

    # Asking to go on, to change protocols, and leaving early.
    for expect in [b"100-continue", b"100-Continue", b"200-ok", b"", b"100-continue, x"]:
        fields = b"Expect: " + expect + b"\r\nContent-Length: 5\r\n"
        yield f"expect {expect!r}", request(fields=fields, body=BODY + smuggled)
    for protocol in [b"h2c", b"websocket", b"TLS/1.0", b"HTTP/2.0", b"x, h2c", b""]:
        fields = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\nUpgrade: " + protocol + b"\r\n"
        yield f"upgrade {protocol!r}", request(b"GET /%(case)s HTTP/1.1\r\n", fields, smuggled)
        yield f"upgrade {protocol!r} with a body", request(fields=fields + b"Content-Length: 5\r\n", body=BODY + smuggled)
    for cut in (1, 20, 60, 100):
        whole = request(fields=b"Content-Length: 50\r\n", body=b"only this")
        yield f"cut at {cut}", whole[: len(whole) - cut]


HEAD = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n((?:[^\r\n]+\r\n)*)\r\n")


def responses(received, to_head):
    """(status, request id, content) of each final response; the first may be one to HEAD, without content."""
    position = 0
    while match := HEAD.match(received, position):
        fields = dict(line.lower().split(b": ", 1) for line in match[2].split(b"\r\n") if line)
        final = int(match[1]) >= 200
        length = 0 if to_head and final else int(fields.get(b"content-length", b"0"))
        if b"transfer-encoding" in fields:
            # Only a server's own errors are.
            length = received.index(b"0\r\n\r\n", match.end()) + 5 - match.end()
        to_head = to_head and not final
        position = match.end() + length
        if final:
            content = received[match.end() : position]
            yield int(match[1]), fields.get(b"x-gw-request-id", b"").decode(), content.decode()


def exchange(relay, tls, data):
    """What comes back until the relay closes; or for a moment, if it waits for more."""
    received = b""
    with socket.create_connection(("127.0.0.1", relay.port)) as tcp:
        tcp.settimeout(0.3)
        with tls.wrap_socket(tcp, server_hostname=relay.host) as stream:
            try:
                stream.sendall(data)
                while piece := stream.recv(65536):
                    received += piece
            except OSError:
                pass
    return received


def seen(log):
    """What the server took for requests: (id, method, target), and what it found malformed."""
    for line in pathlib.Path(log).read_text(errors="replace").splitlines():
        yield tuple(line.split(" ", 2))


def call(relay, kind, log):
    [key] = relay.headers.values()
    host = relay.host.encode()
    smuggled = SMUGGLED % {b"host": host, b"key": key.encode()}
    values = {b"host": host, b"key": key.encode(), b"length": b"%d" % len(smuggled), b"length_hex": b"%x" % len(smuggled)}
    tls = relay.tls()
    good = (SMUGGLED.replace(b"/smuggled", b"/good") % values).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    tried, answered, differences = 0, {}, []
    for number, (name, case) in enumerate(cases()):
        if kind == "nginx" and b"OPTIONS * " in case:
            # Knows no such target.
            continue
        tried += 1
        filled = re.sub(rb"%\((\w+)\)s", lambda match: {**values, b"case": b"%d" % number}[match[1]], case + LAST)
        for data in (filled, good):
            for status, request_id, content in responses(exchange(relay, tls, data), data.startswith(b"HEAD ")):
                if not request_id or request_id in answered:
                    differences.append(f"{name}: a response without an id of its own")
                answered[request_id] = name
                # What the server answered, it answered to this request.
                if status == 200 and content and content.split(" ")[0] != request_id:
                    differences.append(f"{name}: got the response to another request: {content!r}")
                if data is good and (status, content.split(" ")[1:]) != (200, ["GET", "/good"]):
                    differences.append(f"{name}: after it, a good request got {status} {content!r}")
    ids = set()
    for request_id, method, target in seen(log):
        if len(request_id) != 36 or request_id in ids:
            differences.append(f"{kind} saw {method} {target} as a request with the id {request_id!r}, which the relay did not")
        ids.add(request_id)
    assert tried >= 300, tried
    assert len(ids) > tried, f"{kind} saw {len(ids)} requests"
    assert not differences, "\n".join(differences)
    print(json.dumps({"server": kind, "cases": tried, "requests_seen": len(ids), "responses": len(answered)}))


main(serve, call)
