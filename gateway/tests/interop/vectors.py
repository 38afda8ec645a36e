"""Requests that recipients are known to parse differently (RFC 9112, known smuggling attacks), and ordinary ones.

Each is a `Case`. In its bytes `<host>`, `<key>` and `<n>` stand for the tenant's host, the authentication field, and the
number of the case; all targets of a case begin with /<n>/. Most are followed by `NEXT`, a request that is legitimate if the
message before it ends there, and smuggled otherwise.
"""

from typing import NamedTuple

REFUSED = "refused"
EITHER = "either"


class Case(NamedTuple):
    name: str
    data: bytes
    # REFUSED, EITHER, or the body that must arrive at the backend.
    expected: str | bytes


FIELDS = b"Host: <host>\r\n<key>\r\n"
NEXT = b"GET /<n>/next HTTP/1.1\r\n" + FIELDS + b"Connection: close\r\n\r\n"
SMUGGLED = b"GET /<n>/smuggled HTTP/1.1\r\n" + FIELDS + b"\r\n"
CHUNKED = b"5\r\nhello\r\n0\r\n\r\n"


def post(fields, body=b"", line=b"POST /<n>/case HTTP/1.1"):
    """A request with these field lines (each with its line end), then `NEXT`."""
    return line + b"\r\n" + FIELDS + fields + b"\r\n" + body + NEXT


def cases():
    for make in [lengths, codings, both, chunk_sizes, chunk_data, trailers, nominations, request_lines, hosts, versions]:
        for name, expected, data in make():
            yield Case(f"{make.__name__}: {name}", data, expected)
    for make in [field_bytes, field_lines, line_ends, expectations, upgrades, pipelines, sizes, pseudo_fields]:
        for name, expected, data in make():
            yield Case(f"{make.__name__}: {name}", data, expected)


def lengths():
    for value in [b"5", b" 5", b"5 ", b"\t5\t", b"  5  "]:
        yield f"{value}", b"hello", post(b"Content-Length:" + value + b"\r\n", b"hello")
    yield "none", b"", post(b"", line=b"POST /<n>/case HTTP/1.1")
    yield "0", b"", post(b"Content-Length: 0\r\n")
    for value in [b"05", b"0" * 30 + b"5", b"5,5", b"5, 5", b"9223372036854775813"]:
        yield f"{value}", EITHER, post(b"Content-Length: " + value + b"\r\n", b"hello")
    wrong = [b"+5", b"-5", b"-0", b"+0", b"0x5", b"0X0", b"5.0", b"5e0", b"", b" ", b"5;", b"five", b"5 5", b"\x0b5", b"5\x0b", b"5\x0c"]
    wrong += [b"\xa05", b"5\xa0", b"5\x85", b"\xef\xbc\x95", b"5_0", b"5,6", b"6,5", b"5,", b",5", b"5\x00", b"'5'", b'"5"', b"5\r", b"0\n5"]
    wrong += [b"18446744073709551621", b"99999999999999999999999", b"0b101", b"0o5", b"5h", b"5\\", b"[5]"]
    for value in wrong:
        yield f"{value}", REFUSED, post(b"Content-Length: " + value + b"\r\n", b"hello")
    length = b"Content-Length: 5\r\n"
    yield "twice the same", EITHER, post(length + length, b"hello")
    for first, second in [(b"5", b"6"), (b"0", b"5"), (b"5", b"0"), (b"5", b"+5"), (b"5", b"05"), (b"5", b""), (b"", b"5"), (b"5", b"x")]:
        for name in [b"Content-Length", b"content-length", b"CONTENT-LENGTH"]:
            fields = b"Content-Length: " + first + b"\r\nX: y\r\n" + name + b": " + second + b"\r\n"
            yield f"{first} and {name} {second}", REFUSED, post(fields, b"hello")
    for method in [b"GET", b"HEAD", b"DELETE", b"OPTIONS", b"PATCH", b"QUERY"]:
        yield f"{method}", b"hello", post(length, b"hello", line=method + b" /<n>/case HTTP/1.1")
    # Bytes that look like a request are a body according to the length.
    yield "a request as body", EITHER, post(b"Content-Length: <smuggled>\r\n", SMUGGLED)
    yield "longer than what follows", EITHER, post(b"Content-Length: 9999\r\n", b"hello")


def codings():
    """Values of Transfer-Encoding before a chunked body, and spellings that hide the field from some recipients."""
    for value in [b"chunked", b"Chunked", b"CHUNKED", b" chunked", b"chunked ", b"\tchunked\t"]:
        yield f"{value}", b"hello", post(b"Transfer-Encoding:" + value + b"\r\n", CHUNKED)
    wrong = [b"xchunked", b"chunkedx", b"chunked, chunked", b"chunked;q=1", b"chunked;a=b", b"chunked, gzip", b"identity", b"chun ked"]
    wrong += [b"chunked, identity", b"", b" ", b",", b"\x0bchunked", b"chunked\x0b", b"chunked\x0c", b'"chunked"', b"'chunked'", b"chunked\x00"]
    wrong += [b"chunked\xa0", b"\xa0chunked", b"c\xc5\xabhunked", b"trailers", b"x", b"gzip", b"deflate", b"compress", b"chunked\r", b"cHuNkEd;"]
    wrong += [b"gzip, chunked, gzip", b"chunk", b"chunkedchunked", b"chunked\\", b"chunked/", b"chunked#", b"[chunked]", b"chunked=1", b"\x00"]
    for value in wrong:
        yield f"{value}", REFUSED, post(b"Transfer-Encoding: " + value + b"\r\n", CHUNKED)
    for value in [b"gzip, chunked", b"identity, chunked", b",chunked", b"chunked,", b" , ,chunked"]:
        yield f"{value}", EITHER, post(b"Transfer-Encoding: " + value + b"\r\n", CHUNKED)
    for first, second in [(b"chunked", b"chunked"), (b"chunked", b"identity"), (b"identity", b"chunked"), (b"chunked", b"x"), (b"x", b"chunked")]:
        fields = b"Transfer-Encoding: " + first + b"\r\nTransfer-Encoding: " + second + b"\r\n"
        yield f"{first} and {second}", REFUSED, post(fields, CHUNKED)
    hidden = [
        b"Transfer-Encoding : chunked",
        b"Transfer-Encoding\t: chunked",
        b" Transfer-Encoding: chunked",
        b"\tTransfer-Encoding: chunked",
        b"Transfer-Encoding:\r\n chunked",
        b"Transfer-Encoding: \r\n\tchunked",
        b"Transfer-Encoding\r\n: chunked",
        b"Transfer-Encoding: chunked\r\n ",
        b"Transfer-Encoding: chunked\r\n , identity",
        b"Transfer\x00-Encoding: chunked",
        b"Transfer-Encoding\x00: chunked",
        b"Transfer-Encoding\xa0: chunked",
        b"X: y\nTransfer-Encoding: chunked",
        b"X: y\rTransfer-Encoding: chunked",
        b"X: y\r\rTransfer-Encoding: chunked",
        b"X: y\n\rTransfer-Encoding: chunked",
        b"Transfer-Encoding chunked",
        b"Transfer-Encoding: chunked\nX: y",
        b"Transfer Encoding: chunked",
        b":Transfer-Encoding: chunked",
        b"Transfer-Encoding:: chunked",
    ]
    for line in hidden:
        for size in [b"", b"Content-Length: 15\r\n", b"Content-Length: <chunked-and-next>\r\n"]:
            yield f"{line} {size}", REFUSED, post(line + b"\r\n" + size, CHUNKED)
            yield f"{size} {line}", REFUSED, post(size + line + b"\r\n", CHUNKED)
    # Other field names do not frame.
    for name in [b"Transfer_Encoding", b"X-Transfer-Encoding", b"TransferEncoding", b"Transfer-Encodin", b"Content-Transfer-Encoding"]:
        yield f"{name} with a length", CHUNKED, post(b"Content-Length: 15\r\n" + name + b": chunked\r\n", CHUNKED)
    for name in [b"Content_Length", b"X-Content-Length", b"ContentLength", b"Content-Length-"]:
        yield f"{name} with a coding", b"hello", post(name + b": 3\r\nTransfer-Encoding: chunked\r\n", CHUNKED)


def both():
    """CL.TE and TE.CL: the bytes after the body depend on which field counts."""
    for coding in [b"chunked", b"Chunked", b"xchunked", b"chunked ", b"identity", b"gzip, chunked"]:
        te = b"Transfer-Encoding: " + coding + b"\r\n"
        for size, body in [
            (b"15", CHUNKED),
            (b"4", b"3c\r\nhello"),
            (b"<chunked-and-smuggled>", CHUNKED + SMUGGLED),
            (b"5", b"0\r\n\r\nG"),
            (b"0", b"0\r\n\r\n"),
        ]:
            length = b"Content-Length: " + size + b"\r\n"
            yield f"{coding}, then {size}", REFUSED, post(te + length, body)
            yield f"{size}, then {coding}", REFUSED, post(length + te, body)


def chunk_sizes():
    te = b"Transfer-Encoding: chunked\r\n"
    body = lambda size: size + b"\r\nhello\r\n0\r\n\r\n"
    for size in [b"5", b"5;ext", b"5;ext=value", b'5;ext="quoted"', b"5;a=1;b=2", b"05", b"0005"]:
        yield f"{size}", b"hello", post(te, body(size))
    odd = [b"5 ;ext", b"5; ext", b"5;", b"5 ", b"5\t", b"5;ext = x", b'5;ext="a;b"', b'5;ext="a\\"b"', b"5;;", b"5;=", b"0" * 20 + b"5"]
    odd += [b"5;" + b"x" * 5000, b"5;\x7f", b"5;\xff"]
    for size in odd:
        yield f"{size[:20]}", EITHER, post(te, body(size))
    wrong = [b" 5", b"\t5", b"+5", b"-5", b"0x5", b"0X5", b"5h", b"x5", b"g", b"", b"5,5", b"5_0", b"5 5", b"5\x00", b"\x005", b"5\r", b"5=x"]
    wrong += [b"\xef\xbc\x95", b"5.0", b"5e", b"10000000000000005", b"100000000000000005", b"FFFFFFFFFFFFFFFFF5", b"ffffffffffffffff", b"-0"]
    wrong += [b"5;a\nb", b"5;a\rb", b"5\x0b", b"5\xa0", b"5:ext", b"'5'", b"5;\x00", b"5;a\n", b"5\nhello"]
    for size in wrong:
        # A valid size, larger than the following data.
        expected = EITHER if size in (b"5e", b"ffffffffffffffff") else REFUSED
        yield f"{size}", expected, post(te, body(size))
    for end in [b"0\n\n", b"0\r\n\n", b"0\n\r\n", b"0\r\r", b"0\r\n\r", b"\r\n\r\n", b"-0\r\n\r\n", b"0x0\r\n\r\n", b" 0\r\n\r\n", b"+0\r\n\r\n"]:
        yield f"last chunk {end}", REFUSED, post(te, b"5\r\nhello\r\n" + end)
    for end in [b"00\r\n\r\n", b"0;x\r\n\r\n", b"0;x=y\r\n\r\n", b"000000\r\n\r\n"]:
        yield f"last chunk {end}", b"hello", post(te, b"5\r\nhello\r\n" + end)
    for end in [b"0 \r\n\r\n", b"0" * 40 + b"\r\n\r\n"]:
        yield f"last chunk {end}", EITHER, post(te, b"5\r\nhello\r\n" + end)
    yield "no last chunk", REFUSED, post(te, b"5\r\nhello\r\n")


def chunk_data():
    te = b"Transfer-Encoding: chunked\r\n"
    for data in [b"hello\n", b"hello", b"helloXX", b"hello\r", b"hello \r\n", b"hello\r\n\r\n", b"hell\r\n", b"hello\n\r", b"hello\x00\r\n", b"hellooo\r\n"]:
        yield f"{data}", REFUSED, post(te, b"5\r\n" + data + b"0\r\n\r\n")
    yield "bytes one by one", b"hello", post(te, b"".join(b"1\r\n%c\r\n" % byte for byte in b"hello") + b"0\r\n\r\n")
    yield "a last chunk inside", b"0\r\n\r\n", post(te, b"5\r\n0\r\n\r\n\r\n0\r\n\r\n")
    yield "a request inside", EITHER, post(te, b"<smuggled-hex>\r\n" + SMUGGLED + b"\r\n0\r\n\r\n")
    for method in [b"GET", b"DELETE", b"OPTIONS", b"HEAD"]:
        yield f"{method}", b"hello", post(te, CHUNKED, line=method + b" /<n>/case HTTP/1.1")


def trailers():
    start = lambda fields: post(b"Transfer-Encoding: chunked\r\nTE: trailers\r\n", b"5\r\nhello\r\n0\r\n" + fields + b"\r\n")
    yield "plain", b"hello", start(b"X-Sum: 1\r\nX-Other: 2\r\n")
    forbidden = [b"Content-Length: 3", b"Transfer-Encoding: chunked", b"Host: other", b"Authorization: x", b"X-Gw-Service-Key: x"]
    forbidden += [b"X-Gw-Request-Id: forged", b"Trailer: x", b"TE: x", b"Connection: close", b"Connection: content-length", b"Upgrade: x"]
    forbidden += [b"Content-Type: x", b"Content-Encoding: gzip", b"Cache-Control: x", b"Expect: 100-continue", b"Cookie: a", b"Keep-Alive: x"]
    for line in forbidden:
        yield f"{line}", EITHER, start(line + b"\r\n")
    wrong = [b"no colon", b" folded: x", b"X: y\r\n folded", b"X : y", b"X: a\nY: b", b"X: a\rb", b"X: \x00", b": x", b"X Y: z", b"X\x00: y"]
    for line in wrong:
        yield f"{line}", REFUSED, start(line + b"\r\n")
    yield "ends in a bare line feed", REFUSED, post(b"Transfer-Encoding: chunked\r\n", b"0\r\nX: y\n\n")
    yield "huge", REFUSED, start(b"X: " + b"y" * 70000 + b"\r\n")
    yield "many", EITHER, start(b"".join(b"X%d: y\r\n" % number for number in range(90)))
    yield "a request", REFUSED, start(SMUGGLED)


def nominations():
    """`Connection` may name fields to drop, but not fields that define the message."""
    names = [b"content-length", b"transfer-encoding", b"host", b"x-gw-request-id", b"x-gw-service-key", b"x-forwarded-for", b"authorization"]
    names += [b"via", b"te", b"trailer", b"expect", b"connection", b"keep-alive, host", b"close, content-length", b"Content-Length , Host", b"date"]
    for name in names:
        for option, fields, body in [("length", b"Content-Length: 5\r\n", b"hello"), ("chunked", b"Transfer-Encoding: chunked\r\n", CHUNKED)]:
            # `close` ends the connection, so the next request is not served.
            yield f"{name} with {option}", b"hello", post(b"Connection: " + name + b"\r\n" + fields, body)
    for value in [b"", b",", b" ,,x", b"x" * 300, b"a b", b"\xff", b'"content-length"', b"content-length;q=1", b":path", b"upgrade"]:
        yield f"{value[:20]}", EITHER, post(b"Connection: " + value + b"\r\nContent-Length: 5\r\n", b"hello")
    yield "proxy-connection", b"hello", post(b"Proxy-Connection: close\r\nContent-Length: 5\r\n", b"hello")
    yield "keep-alive", b"hello", post(b"Keep-Alive: timeout=0, max=0\r\nContent-Length: 5\r\n", b"hello")


def request_lines():
    line = lambda text: text + b"\r\n" + FIELDS + b"\r\n" + NEXT
    yield "plain", b"", line(b"GET /<n>/case HTTP/1.1")
    yield "empty lines before", b"", b"\r\n\r\n" + line(b"GET /<n>/case HTTP/1.1")
    wrong = [b"GET  /<n>/case HTTP/1.1", b"GET /<n>/case  HTTP/1.1", b"GET\t/<n>/case HTTP/1.1", b"GET /<n>/case\tHTTP/1.1", b" GET /<n>/case HTTP/1.1"]
    wrong += [b"GET /<n>/case HTTP/1.1 ", b"GET /<n>/case HTTP/1.1\t", b"GET /<n>/case", b"GET /<n>/case HTTP/2.0", b"GET /<n>/case HTTP/0.9", b"GET /<n>/case"]
    wrong += [b"GET /<n>/case HTTP/1.10", b"GET /<n>/case http/1.1", b"GET /<n>/case HTTP/01.1", b"GET /<n>/case HTTP/1.", b"GET /<n>/case HTTP/1", b"GET"]
    wrong += [b"GET /<n>/case HTTP/1.1x", b"GET /<n>/case HTTPS/1.1", b"GET /<n>/case\x00 HTTP/1.1", b"GET /<n>/a b HTTP/1.1", b"GET HTTP/1.1", b"\x00"]
    wrong += [b"GET <n>/case HTTP/1.1", b"G=T\x00 /<n>/case HTTP/1.1", b"GE\tT /<n>/case HTTP/1.1", b"GET( /<n>/case HTTP/1.1", b"GET: /<n>/case HTTP/1.1"]
    wrong += [b"GET\\ /<n>/case HTTP/1.1", b"\xffGET /<n>/case HTTP/1.1", b"PRI * HTTP/2.0", b"GET /<n>/case\x7f HTTP/1.1", b"GET /<n>/case\x0bHTTP/1.1", b"GET\x0b/<n>/case HTTP/1.1"]
    wrong += [b"GET /<n>/case HTTP/1.1\x0b", b"GET /<n>/case HTTP/1,1", b"GET /<n>/case HTTP/+1.1", b"GET /<n>/case HTTP/1.-1", b"GET ../<n>/case HTTP/1.1"]
    wrong += [b"GET :/<n>/case HTTP/1.1", b"GET /<n>/case\rHTTP/1.1", b"GET /<n>/case HTTP/1.1\r", b"CONNECT <host>:443 HTTP/1.1", b"CONNECT /<n>/case HTTP/1.1"]
    for text in wrong:
        yield f"{text}", REFUSED, line(text)
    odd = [b"GET /<n>/case HTTP/1.2", b"GET /<n>/case HTTP/1.9", b"GET /<n>/case#fragment HTTP/1.1", b"GET /<n>/\xff HTTP/1.1", b'GET /<n>/"<>\\^`{|} HTTP/1.1']
    odd += [b"get /<n>/case HTTP/1.1", b"FOO /<n>/case HTTP/1.1", b"M-SEARCH /<n>/case HTTP/1.1", b"TRACE /<n>/case HTTP/1.1", b"G!#$%&'*+-.^_`|~T /<n>/case HTTP/1.1"]
    odd += [b"x" * 300 + b" /<n>/case HTTP/1.1", b"GET /<n>/../case HTTP/1.1", b"GET /<n>/%00 HTTP/1.1", b"GET /<n>/%0d%0aX HTTP/1.1", b"GET /<n>/%zz HTTP/1.1"]
    odd += [b"GET //<n>/case HTTP/1.1", b"GET /<n>/case?a=b?c#d HTTP/1.1", b"GET /<n>/case? HTTP/1.1", b"GET /<n>/\xc3\xa9 HTTP/1.1", b"PATCH /<n>/case HTTP/1.1"]
    odd += [b"GET http://<host>/<n>/case HTTP/1.1", b"GET https://<host>/<n>/case HTTP/1.1", b"GET HTTP://<host>/<n>/case HTTP/1.1", b"GET http://other/<n>/case HTTP/1.1"]
    odd += [b"GET ftp://<host>/<n>/case HTTP/1.1", b"GET http://user@<host>/<n>/case HTTP/1.1", b"GET http://<host>:80/<n>/case HTTP/1.1", b"GET http:///<n>/case HTTP/1.1"]
    odd += [b"GET http:/<host>/<n>/case HTTP/1.1", b"GET http://<host>?<n> HTTP/1.1", b"GET http://<host> HTTP/1.1", b"GET //<host>/<n>/case HTTP/1.1"]
    odd += [b"OPTIONS * HTTP/1.1", b"GET * HTTP/1.1", b"OPTIONS /<n>/case HTTP/1.1", b"OPTIONS http://<host> HTTP/1.1", b"HEAD /<n>/case HTTP/1.1", b"GET *<n> HTTP/1.1"]
    odd += [b"GET ?<n> HTTP/1.1", b"GET #<n> HTTP/1.1"]
    for text in odd:
        yield f"{text[:40]}", EITHER, line(text)
    for before in [b"\n", b"\r", b"\n\n", b"\r\n\n", b"\r\r\n", b" \r\n", b"\x00", b"\r\n \r\n"]:
        yield f"{before} before", REFUSED if before != b"\n" else EITHER, before + line(b"GET /<n>/case HTTP/1.1")
    yield "HTTP/0.9", REFUSED, b"GET /<n>/case\r\n" + NEXT
    yield "HTTP/0.9 with a line feed", REFUSED, b"GET /<n>/case\n" + NEXT


def hosts():
    line = lambda fields, start=b"GET /<n>/case HTTP/1.1": start + b"\r\n" + fields + b"<key>\r\n\r\n" + NEXT
    yield "with port", b"", line(b"Host: <host>:443\r\n")
    yield "in capitals", b"", line(b"HOST: <HOST>\r\n")
    wrong = [b"", b"Host: <host>\r\nHost: <host>\r\n", b"Host: <host>\r\nHost: other\r\n", b"Host: other\r\nHost: <host>\r\n", b"Host: <host>\r\nhost: <host>\r\n"]
    wrong += [b"Host:\r\n", b"Host: <host>, other\r\n", b"Host: <host> other\r\n", b"Host: <host>/x\r\n", b"Host: <host>/../x\r\n", b"Host: user@<host>\r\n"]
    wrong += [b"Host : <host>\r\n", b"Host: <host>\r\n folded\r\n", b" Host: <host>\r\n", b"Host: <host>\x00\r\n", b"Host: <host>:x\r\n", b"Host: <host>#x\r\n", b"Host: <host>?x\r\n"]
    wrong += [b"Host: http://<host>\r\n", b"Host: <host>\\x\r\n", b"Host: <host>\t.x\r\n", b"Host: [::1\r\n", b"Host: other.example\r\n", b"Host: <host>\xff\r\n", b"Host: \x00\r\n"]
    for fields in wrong:
        yield f"{fields}", REFUSED, line(fields)
    odd = [b"Host: <host>.\r\n", b"Host: <host>:\r\n", b"Host: <host>:99999\r\n", b"Host: <host>:00443\r\n", b"Host: <host>:-1\r\n", b"Host:<host>\r\n", b"Host:\t<host>\t\r\n"]
    for fields in odd:
        yield f"{fields}", EITHER, line(fields)
    for host in [b"other.example", b"<host>", b"", b"a b"]:
        for target in [b"http://<host>/<n>/case", b"http://other.example/<n>/case"]:
            yield f"{host} and {target}", EITHER, line(b"Host: " + host + b"\r\n", b"GET " + target + b" HTTP/1.1")


def versions():
    old = lambda fields, body=b"", after=NEXT: b"POST /<n>/case HTTP/1.0\r\n" + FIELDS + fields + b"\r\n" + body + after
    yield "length", b"hello", old(b"Content-Length: 5\r\nConnection: keep-alive\r\n", b"hello")
    yield "length without keep-alive", b"hello", old(b"Content-Length: 5\r\n", b"hello")
    for fields in [b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: chunked\r\nConnection: keep-alive\r\n", b"Transfer-Encoding: chunked\r\nContent-Length: 15\r\n"]:
        yield f"{fields}", REFUSED, old(fields, CHUNKED)
    for fields in [b"Expect: 100-continue\r\nContent-Length: 5\r\n", b"Connection: close, keep-alive\r\nContent-Length: 5\r\n", b"Connection: Keep-Alive, x\r\nContent-Length: 5\r\n"]:
        yield f"{fields}", b"hello", old(fields, b"hello")
    yield "no Host", REFUSED, b"GET /<n>/case HTTP/1.0\r\n<key>\r\n\r\n" + NEXT
    yield "no length", EITHER, old(b"", b"hello")
    yield "close, then more", b"hello", post(b"Connection: close\r\nContent-Length: 5\r\n", b"hello")


def field_bytes():
    """Every byte in a field name, and selected bytes in a value."""
    token = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    for byte in range(256):
        if byte not in token and byte != ord(":"):
            yield f"name {byte:#04x}", REFUSED, post(b"X%cY: v\r\nContent-Length: 5\r\n" % byte, b"hello")
            yield f"name's end {byte:#04x}", REFUSED, post(b"Content-Length%c: 7\r\nContent-Length: 5\r\n" % byte, b"hello")
    for byte in [*range(33), *range(126, 162), 255]:
        # RFC 9110 §5.5: CR, LF and NUL are dangerous; other controls may be refused too.
        expected = REFUSED if byte in b"\r\n\0" else b"hello" if byte in b"\t ~" or byte >= 160 else EITHER
        yield f"value {byte:#04x}", expected, post(b"X: v%cw\r\nContent-Length: 5\r\n" % byte, b"hello")
        yield f"value ends in {byte:#04x}", EITHER, post(b"X: v%c\r\nContent-Length: 5\r\n" % byte, b"hello")


def field_lines():
    wrong = [b"no colon", b": no name", b"X : y", b"X\t: y", b" X: y", b"\tX: y", b"X: y\r\n z", b"X: y\r\n\tz", b"X: y\r\n ", b"\r", b"X: y\r", b" ", b"X Y: z", b"X: y\n", b"\x00: x"]
    for line in wrong:
        yield f"{line}", REFUSED, post(line + b"\r\nContent-Length: 5\r\n", b"hello")
        yield f"{line} last", REFUSED, post(b"Content-Length: 5\r\n" + line + b"\r\n", b"hello")
    for line in [b"X:", b"X: ", b"X:y", b"X:: y", b"X: y: z", b"X_Y: z", b"X: \xc3\xa9", b"0: 1", b"X: " + b"y" * 8000, b"X-\xc3\xa9: y"[:2] + b": y"]:
        yield f"{line[:20]}", b"hello", post(line + b"\r\nContent-Length: 5\r\n", b"hello")
    yield "field before the first is folded", REFUSED, b"GET /<n>/case HTTP/1.1\r\n X: y\r\n" + FIELDS + b"\r\n" + NEXT


def line_ends():
    head = b"POST /<n>/case HTTP/1.1\r\n" + FIELDS + b"Content-Length: 5\r\n\r\n"
    yield "all bare line feeds", REFUSED, head.replace(b"\r\n", b"\n") + b"hello" + NEXT
    yield "all bare carriage returns", REFUSED, head.replace(b"\r\n", b"\r") + b"hello" + NEXT
    yield "doubled carriage returns", REFUSED, head.replace(b"\r\n", b"\r\r\n") + b"hello" + NEXT
    for end in [b"\n", b"\r", b"\n\r", b"\r\r\n", b"\r\n\r", b"\x85", b"\x0b", b"\xe2\x80\xa8"]:
        for position in range(head.count(b"\r\n")):
            parts = head.split(b"\r\n")
            changed = b"\r\n".join(parts[: position + 1]) + end + b"\r\n".join(parts[position + 1 :])
            # Two empty lines belong to the next message, unless a body follows.
            yield f"{end} at line {position}", REFUSED if end in (b"\n", b"\r", b"\n\r", b"\r\r\n") else EITHER, changed + b"hello" + NEXT


def expectations():
    length = b"Content-Length: 5\r\n"
    for value in [b"100-continue", b"100-Continue", b"100-continue "]:
        yield f"{value}", b"hello", post(b"Expect: " + value + b"\r\n" + length, b"hello")
        yield f"{value} chunked", b"hello", post(b"Expect: " + value + b"\r\nTransfer-Encoding: chunked\r\n", CHUNKED)
        yield f"{value} without a body", EITHER, post(b"Expect: " + value + b"\r\n")
    for value in [b"200-ok", b"100-continue, x", b"", b"x=y", b"100-continue;q=1", b"100", b"\xff", b"100-continue\r\nExpect: 100-continue", b"100-continue\r\nExpect: x"]:
        yield f"{value}", EITHER, post(b"Expect: " + value + b"\r\n" + length, b"hello")
    for method in [b"GET", b"HEAD", b"OPTIONS"]:
        yield f"{method}", EITHER, post(b"Expect: 100-continue\r\n" + length, b"hello", line=method + b" /<n>/case HTTP/1.1")


def upgrades():
    """Upgrade requests followed by smuggled requests, as in h2c and WebSocket smuggling."""
    websocket = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: "
    h2c = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
    get = b"GET /<n>/case HTTP/1.1"
    for name, fields in [("websocket", websocket + b"13\r\n"), ("websocket of a wrong version", websocket + b"777\r\n"), ("h2c", h2c), ("tls", b"Connection: Upgrade\r\nUpgrade: TLS/1.0\r\n")]:
        yield name, EITHER, post(fields, line=get)
        yield f"{name} with a body", EITHER, post(fields + b"Content-Length: 5\r\n", b"hello")
        yield f"{name} with chunks", EITHER, post(fields + b"Transfer-Encoding: chunked\r\n", CHUNKED)
        yield f"{name} and a request behind", EITHER, post(fields, SMUGGLED, line=get)
        yield f"{name} and a preface behind", EITHER, post(fields, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", line=get)
    yield "not announced", b"hello", post(b"Upgrade: websocket\r\nContent-Length: 5\r\n", b"hello")
    yield "announced, but none", b"hello", post(b"Connection: upgrade\r\nContent-Length: 5\r\n", b"hello")
    yield "HTTP/1.0", EITHER, post(websocket + b"13\r\n", line=b"GET /<n>/case HTTP/1.0")


def pipelines():
    one = lambda number: b"POST /<n>/%d HTTP/1.1\r\n" % number + FIELDS + b"Content-Length: 5\r\n\r\nhello"
    yield "ten", b"hello", b"".join(map(one, range(10))) + NEXT
    yield "ten chunked", b"hello", b"".join(post(b"Transfer-Encoding: chunked\r\n", CHUNKED)[: -len(NEXT)] for _ in range(10)) + NEXT
    yield "empty lines between", b"hello", one(0) + b"\r\n\r\n" + NEXT
    yield "a refused one between", b"hello", one(0) + b"GET /<n>/bad HTTP/9.9\r\n\r\n" + NEXT
    yield "rubbish after", b"hello", one(0) + b"\x00\x01\x02\r\n\r\n" + NEXT
    yield "body longer than its length", b"hello", one(0) + b" world" + NEXT
    yield "body shorter than its length", EITHER, b"POST /<n>/case HTTP/1.1\r\n" + FIELDS + b"Content-Length: 20\r\n\r\nhello" + NEXT
    yield "HEAD, then another", b"", b"HEAD /<n>/case HTTP/1.1\r\n" + FIELDS + b"\r\n" + NEXT
    yield "without authentication", REFUSED, b"POST /<n>/case HTTP/1.1\r\nHost: <host>\r\nContent-Length: 5\r\n\r\nhello" + NEXT
    yield "chunked without authentication", REFUSED, b"POST /<n>/case HTTP/1.1\r\nHost: <host>\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKED + NEXT


def sizes():
    yield "field over 32 KiB", REFUSED, post(b"X: " + b"y" * 33000 + b"\r\n")
    yield "target over 8 KiB", REFUSED, post(b"", line=b"GET /<n>/" + b"x" * 9000 + b" HTTP/1.1")
    yield "101 fields", REFUSED, post(b"".join(b"X%d: y\r\n" % number for number in range(101)))
    yield "90 fields", b"hello", post(b"".join(b"X%d: y\r\n" % number for number in range(90)) + b"Content-Length: 5\r\n", b"hello")


def pseudo_fields():
    """Field names that are pseudo-header fields on an HTTP/2 tunnel."""
    for name in [b":method", b":path", b":authority", b":scheme", b":protocol", b":status"]:
        yield f"{name}", REFUSED, post(name + b": /<n>/smuggled\r\nContent-Length: 5\r\n", b"hello")
    for field in [b"X-Gw-Upgrade-Method: PUT", b"X-Gw-Upgrade: websocket", b"X-Gw-Agent-Error: x", b"X-Gw-Request-Id: forged", b"HTTP2-Settings: AAAA"]:
        yield f"{field}", b"hello", post(field + b"\r\nContent-Length: 5\r\n", b"hello")
