"""WebSockets through the relay, with `websockets` at both ends and aiohttp's client."""

import asyncio
import contextlib
import hashlib
import json

import aiohttp
import websockets
from websockets.asyncio.client import connect
from websockets.asyncio.server import serve

from relay import main

LARGE = 1024 * 1024
MANY = 1000


async def handle(socket):
    if socket.request.path == "/close":
        await socket.close(4001, "the backend's reason")
        return
    if socket.request.path == "/told":
        await socket.wait_closed()
        told.append([socket.close_code, socket.close_reason])
        return
    if socket.request.path == "/what-was-told":
        await socket.send(json.dumps(told))
        return
    with contextlib.suppress(websockets.ConnectionClosed):
        async for message in socket:
            await socket.send(message)


told = []


async def serve_for_ever():
    def choose(_, offered):
        return "chat.v2" if "chat.v2" in offered else None

    async with serve(handle, "127.0.0.1", 0, select_subprotocol=choose, max_size=2 * LARGE, backlog=2048) as server:
        print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        await asyncio.get_running_loop().create_future()


async def call(relay):
    tls = relay.tls()

    def dial(path, **options):
        options = {"max_size": 2 * LARGE, "open_timeout": 60, **options}
        uri = f"wss://{relay.host}:{relay.port}{path}"
        return connect(uri, ssl=tls, additional_headers=relay.headers, **options)

    # Text, bytes, an empty message and 1 MB; with and without compression; in fragments.
    for compression in ("deflate", None):
        async with dial("/echo", subprotocols=["chat.v1", "chat.v2"], compression=compression) as socket:
            assert socket.subprotocol == "chat.v2"
            large = hashlib.sha256(b"seed").digest() * (LARGE // 32)
            for message in ("text ü", b"\x00\xff", "", b"", large, "x" * LARGE):
                await socket.send(message)
                assert await socket.recv() == message
            await socket.send(["in ", "three ", "fragments"])
            assert await socket.recv() == "in three fragments"
            latency = await (await socket.ping())
            assert latency >= 0

    # Close codes and reasons, from either side.
    async with dial("/close") as socket:
        try:
            await socket.recv()
            raise AssertionError("not closed")
        except websockets.ConnectionClosed as closed:
            assert (closed.rcvd.code, closed.rcvd.reason) == (4001, "the backend's reason"), closed
    socket = await dial("/told")
    await socket.close(4002, "the caller's reason")
    for _ in range(500):
        async with dial("/what-was-told") as socket:
            if json.loads(await socket.recv()) == [[4002, "the caller's reason"]]:
                break
        await asyncio.sleep(0.01)
    else:
        raise AssertionError("the backend was not told why the caller left")

    # aiohttp's client.
    async with aiohttp.ClientSession(headers=relay.headers) as session:
        async with session.ws_connect(f"{relay.url}/echo", ssl=tls, max_msg_size=2 * LARGE) as socket:
            await socket.send_bytes(b"y" * LARGE)
            assert (await socket.receive()).data == b"y" * LARGE
            await socket.close(code=4003)

    # Many connections at the same time, open until all have exchanged messages.
    dialling = asyncio.Semaphore(50)

    async def dial_in_turn():
        async with dialling:
            return await dial("/echo", ping_interval=None)

    sockets = await asyncio.gather(*(dial_in_turn() for _ in range(MANY)))
    for turn in range(3):
        await asyncio.gather(*(socket.send(f"{turn} {number}") for number, socket in enumerate(sockets)))
        answers = await asyncio.gather(*(socket.recv() for socket in sockets))
        assert answers == [f"{turn} {number}" for number in range(MANY)]
    await asyncio.gather(*(socket.close() for socket in sockets))


main(lambda: asyncio.run(serve_for_ever()), lambda relay: asyncio.run(call(relay)))
