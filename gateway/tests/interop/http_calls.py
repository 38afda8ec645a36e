"""httpx, aiohttp and curl, over HTTP/1.1 and HTTP/2, in front of an ASGI application on uvicorn."""

import asyncio
import hashlib
import json
import os
import socket
import subprocess
import tempfile

import aiohttp
import httpx
import uvicorn

from relay import main

LARGE = 3_000_000
events = asyncio.Queue()


async def application(scope, receive, send):
    assert scope["type"] in ("http", "lifespan")
    if scope["type"] == "lifespan":
        return

    async def begin(status, *headers):
        await send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def body(data, more=False):
        await send({"type": "http.response.body", "body": data, "more_body": more})

    async def pieces():
        while True:
            message = await receive()
            yield message.get("body", b"")
            if not message.get("more_body"):
                return

    match scope["path"]:
        case "/digest":
            digest, length = hashlib.sha256(), 0
            async for piece in pieces():
                digest.update(piece)
                length += len(piece)
            seen = {"method": scope["method"], "length": length, "sha256": digest.hexdigest()}
            seen["cookie"] = [value.decode() for name, value in scope["headers"] if name == b"cookie"]
            answer = json.dumps(seen).encode()
            await begin(200, (b"content-length", b"%d" % len(answer)))
            await body(answer)
        case "/mirror":
            await begin(200)
            async for piece in pieces():
                await body(piece, more=True)
            await body(b"")
        case "/refuse":
            # Answers before it reads the request's content.
            await begin(413, (b"content-length", b"0"))
            await body(b"")
        case "/events":
            await begin(200, (b"content-type", b"text/event-stream"))
            for number in range(20):
                await body(b"data: %d\n\n" % number, more=True)
                # Waits until the caller confirms this event.
                assert await events.get() == number
            await body(b"")
        case "/got":
            await events.put(int(scope["query_string"]))
            await begin(204)
            await body(b"")
        case _:
            await begin(404)
            await body(b"")


def serve():
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(application, log_level="warning", lifespan="off", timeout_keep_alive=30)
    uvicorn.Server(config).run(sockets=[listener])


CONTENT = os.urandom(LARGE)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def halves():
    yield CONTENT[: LARGE // 2]
    yield CONTENT[LARGE // 2 :]


async def async_halves():
    for half in halves():
        yield half


def with_httpx(relay, http2):
    version = "HTTP/2" if http2 else "HTTP/1.1"
    with httpx.Client(
        base_url=relay.url, headers=relay.headers, verify=relay.tls(), http1=not http2, http2=http2, timeout=60
    ) as client:
        for content in (CONTENT, halves()):
            answer = client.put("/digest", content=content)
            assert answer.http_version == version, answer.http_version
            assert (answer.json()["sha256"], answer.json()["method"]) == (SHA256, "PUT")
        assert client.post("/mirror", content=halves()).content == CONTENT
        # HTTP/2 may split cookies; an HTTP/1.1 backend gets one field.
        cookies = [("cookie", "a=1"), ("cookie", "b=2")] if http2 else [("cookie", "a=1; b=2")]
        assert client.get("/digest", headers=cookies).json()["cookie"] == ["a=1; b=2"]
        with client.stream("GET", "/events") as answer:
            for number, line in enumerate(line for line in answer.iter_lines() if line):
                assert line == f"data: {number}"
                assert client.get(f"/got?{number}").status_code == 204
        assert number == 19
        assert client.head("/digest").headers["content-length"] != "0"


async def with_aiohttp(relay):
    connector = aiohttp.TCPConnector(ssl=relay.tls())
    async with aiohttp.ClientSession(relay.url, headers=relay.headers, connector=connector) as session:
        for content in (CONTENT, async_halves()):
            async with session.put("/digest", data=content, expect100=True) as answer:
                assert (await answer.json(content_type=None))["sha256"] == SHA256
        async with session.post("/mirror", data=async_halves()) as answer:
            assert await answer.read() == CONTENT
        async with session.get("/events") as answer:
            for number in range(20):
                assert await answer.content.readuntil(b"\n\n") == b"data: %d\n\n" % number
                async with session.get(f"/got?{number}") as got:
                    assert got.status == 204


def with_curl(relay, version):
    [(name, value)] = relay.headers.items()
    with tempfile.NamedTemporaryFile() as file:
        file.write(CONTENT)
        file.flush()

        def curl(path, *options):
            command = ["curl", "--silent", "--show-error", f"--http{version}", "--cacert", relay.ca_file]
            command += ["--resolve", f"{relay.host}:{relay.port}:127.0.0.1", "-H", f"{name}: {value}", "--max-time", "60"]
            command += ["--write-out", "\n%{http_code} %{http_version}", *options, relay.url + path]
            output = subprocess.run(command, check=True, capture_output=True).stdout
            content, _, status = output.rpartition(b"\n")
            return content, status.decode()

        # Status and version as curl prints them. HTTP/2 has no chunked coding.
        ok = f"200 {version}"
        for options in ((), ("-H", "Expect: 100-continue"), ("-H", "Transfer-Encoding: chunked", "-H", "Expect:")):
            if version == "2" and "Transfer-Encoding: chunked" in options:
                continue
            content, status = curl("/digest", "--upload-file", file.name, *options)
            assert (status, json.loads(content)["sha256"]) == (ok, SHA256), (status, options)
        content, status = curl("/mirror", "--data-binary", f"@{file.name}")
        assert (status, content == CONTENT) == (ok, True), status
        # Refused while curl waits for 100: no content is sent.
        options = ["--upload-file", file.name, "-H", "Expect: 100-continue", "--expect100-timeout", "50"]
        content, status = curl("/refuse", *options)
        assert (content, status) == (b"", f"413 {version}"), (content, status)


def call(relay):
    with_httpx(relay, http2=False)
    with_httpx(relay, http2=True)
    asyncio.run(with_aiohttp(relay))
    with_curl(relay, "1.1")
    with_curl(relay, "2")


main(serve, call)
