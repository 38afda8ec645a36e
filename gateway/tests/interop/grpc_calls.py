"""gRPC through the relay, with grpcio at both ends: every kind of call, metadata, status and cancellation."""

import threading
import time
from concurrent import futures

import grpc

from relay import main

SERVICE = "interop.Echo"
LARGE = 4 * 1024 * 1024
cancelled = threading.Semaphore(0)


class Handler(grpc.GenericRpcHandler):
    """Messages are plain bytes, so no code is generated."""

    METHODS = {
        "Unary": lambda: grpc.unary_unary_rpc_method_handler(unary),
        "Fail": lambda: grpc.unary_unary_rpc_method_handler(fail),
        "Count": lambda: grpc.unary_stream_rpc_method_handler(count),
        "Sum": lambda: grpc.stream_unary_rpc_method_handler(total),
        "Chat": lambda: grpc.stream_stream_rpc_method_handler(chat),
        "Hang": lambda: grpc.unary_stream_rpc_method_handler(hang),
        "Cancelled": lambda: grpc.unary_unary_rpc_method_handler(was_cancelled),
    }

    def service(self, details):
        method = self.METHODS.get(details.method.removeprefix(f"/{SERVICE}/"))
        return method() if method else None


def unary(request, context):
    metadata = dict(context.invocation_metadata())
    context.send_initial_metadata((("x-initial", metadata.get("x-asked", "")), ("x-bin-bin", b"\x00\xff")))
    context.set_trailing_metadata((("x-trailing", "after"),))
    return request


def fail(request, context):
    context.set_trailing_metadata((("x-detail-bin", b"\x01\x02"),))
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"not now: {request.decode()} ü")


def count(request, context):
    for number in range(int(request)):
        yield str(number).encode()


def total(requests, context):
    return str(sum(len(request) for request in requests)).encode()


def chat(requests, context):
    # Each answer is sent after its question has arrived.
    for request in requests:
        yield request[::-1]


def hang(request, context):
    context.add_callback(cancelled.release)
    yield b"begun"
    while context.is_active():
        time.sleep(0.01)


def was_cancelled(request, context):
    return b"yes" if cancelled.acquire(timeout=20) else b"no"


def serve():
    options = [("grpc.max_receive_message_length", 2 * LARGE), ("grpc.max_send_message_length", 2 * LARGE)]
    server = grpc.server(futures.ThreadPoolExecutor(32), handlers=(Handler(),), options=options)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"h2c://127.0.0.1:{port}", flush=True)
    server.wait_for_termination()


def call(relay):
    [(name, value)] = relay.headers.items()
    key = (name.lower(), value)
    options = [
        ("grpc.max_receive_message_length", 2 * LARGE),
        ("grpc.max_send_message_length", 2 * LARGE),
        ("grpc.default_authority", relay.host),
        ("grpc.ssl_target_name_override", relay.host),
    ]
    with open(relay.ca_file, "rb") as file:
        credentials = grpc.ssl_channel_credentials(file.read())
    with grpc.secure_channel(f"127.0.0.1:{relay.port}", credentials, options) as channel:
        unary_unary = lambda name: channel.unary_unary(f"/{SERVICE}/{name}")
        chats = channel.stream_stream(f"/{SERVICE}/Chat")
        hangs = channel.unary_stream(f"/{SERVICE}/Hang")

        # Unary calls with metadata in both directions: an empty message, a small one, and 4 MB.
        for message in (b"", b"hello", bytes(range(256)) * (LARGE // 256)):
            answer, rpc = unary_unary("Unary").with_call(message, metadata=(key, ("x-asked", "42")), timeout=30)
            assert answer == message, len(answer)
            initial, trailing = dict(rpc.initial_metadata()), dict(rpc.trailing_metadata())
            assert (initial["x-initial"], initial["x-bin-bin"]) == ("42", b"\x00\xff"), initial
            assert trailing["x-trailing"] == "after", trailing

        # Compressed messages, which the relay must not change.
        text = b"the same again and again " * 10_000
        answer = unary_unary("Unary")(text, metadata=(key,), compression=grpc.Compression.Gzip, timeout=30)
        assert answer == text

        # A status with message and details, only in trailers.
        try:
            unary_unary("Fail")(b"why", metadata=(key,), timeout=30)
            raise AssertionError("did not fail")
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.FAILED_PRECONDITION, error
            assert error.details() == "not now: why ü", error
            assert dict(error.trailing_metadata())["x-detail-bin"] == b"\x01\x02"
        try:
            unary_unary("Nothing")(b"", metadata=(key,), timeout=30)
            raise AssertionError("did not fail")
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.UNIMPLEMENTED, error

        # Streams in each direction, and both at the same time, one answer per question.
        numbers = list(channel.unary_stream(f"/{SERVICE}/Count")(b"1000", metadata=(key,), timeout=30))
        assert numbers == [str(number).encode() for number in range(1000)]
        pieces = (b"x" * 10_000 for _ in range(500))
        assert channel.stream_unary(f"/{SERVICE}/Sum")(pieces, metadata=(key,), timeout=30) == b"5000000"
        answered = threading.Semaphore(1)

        def questions():
            for number in range(200):
                assert answered.acquire(timeout=20), f"no answer to {number - 1}: messages are delayed"
                yield f"question {number}".encode()

        for number, answer in enumerate(chats(questions(), metadata=(key,), timeout=60)):
            assert answer == f"question {number}"[::-1].encode()
            answered.release()
        assert number == 199

        # Cancellation and an expired deadline reach the server.
        rpc = hangs(b"", metadata=(key,))
        assert next(rpc) == b"begun"
        rpc.cancel()
        assert unary_unary("Cancelled")(b"", metadata=(key,), timeout=30) == b"yes"
        rpc = hangs(b"", metadata=(key,), timeout=0.5)
        try:
            for answer in rpc:
                assert answer == b"begun"
            raise AssertionError("outlived its deadline")
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED, error
        assert unary_unary("Cancelled")(b"", metadata=(key,), timeout=30) == b"yes"

        # Many concurrent calls on one connection.
        calls = [unary_unary("Unary").future(b"%d" % number, metadata=(key,), timeout=60) for number in range(500)]
        assert [rpc.result() for rpc in calls] == [b"%d" % number for number in range(500)]

        # Without the key the relay answers with a gRPC status.
        try:
            unary_unary("Unary")(b"", timeout=30)
            raise AssertionError("let in without a key")
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.UNAVAILABLE, error


main(serve, call)
