"""A gRPC server whose connections have a greatest age, and its callers, both with grpcio, the C core of gRPC.

grpc_age.py serve aged|unlimited                              prints its URL
grpc_age.py call PORT HOST CA_FILE KEY CALLERS CALLS          each call once, back to back
grpc_age.py silent PORT HOST CA_FILE KEY SECONDS              one stream without a message for so long
"""

import sys
import threading
import time
from collections import Counter
from concurrent import futures

import grpc

AGE_MS = 700
calls = Counter()
connections = set()
lock = threading.Lock()


def once(request, context):
    with lock:
        calls[request] += 1
        connections.add(context.peer())
    return request


def figures(request, context):
    """Calls, those that arrived more than once, and connections."""
    again = sum(times > 1 for times in calls.values())
    return f"{len(calls)} {again} {len(connections)}".encode()


def silent(request, context):
    context.send_initial_metadata(())
    time.sleep(float(request))
    yield b"after"


class Handler(grpc.GenericRpcHandler):
    METHODS = {
        "/age/Once": grpc.unary_unary_rpc_method_handler(once),
        "/age/Figures": grpc.unary_unary_rpc_method_handler(figures),
        "/age/Silent": grpc.unary_stream_rpc_method_handler(silent),
    }

    def service(self, details):
        return self.METHODS.get(details.method)


def serve(kind):
    # A server that enforces keep-alive ends a connection with more than two PINGs within five minutes (too_many_pings).
    options = [("grpc.max_connection_age_ms", AGE_MS)] if kind == "aged" else []
    server = grpc.server(futures.ThreadPoolExecutor(32), handlers=(Handler(),), options=options)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"h2c://127.0.0.1:{port}", flush=True)
    server.wait_for_termination()


def connect(port, host, ca_file):
    with open(ca_file, "rb") as file:
        credentials = grpc.ssl_channel_credentials(file.read())
    options = [("grpc.default_authority", host), ("grpc.ssl_target_name_override", host), ("grpc.enable_retries", 0)]
    return grpc.secure_channel(f"127.0.0.1:{port}", credentials, options)


def call_all(port, host, ca_file, key, callers, count):
    """Prints the failures, and what the server has counted."""
    key = (("x-gw-service-key", key),)
    numbers = iter(range(int(count)))
    failures = Counter()
    with connect(port, host, ca_file) as channel:
        unary = channel.unary_unary("/age/Once")

        def caller():
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                try:
                    unary(b"%d" % number, metadata=key, timeout=30)
                except grpc.RpcError as error:
                    with lock:
                        failures[f"{error.code().name} {error.details()}"] += 1

        threads = [threading.Thread(target=caller) for _ in range(int(callers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counted = channel.unary_unary("/age/Figures")(b"", metadata=key, timeout=30).decode()
    for failure, times in failures.most_common(3):
        print(f"{times} times {failure}", file=sys.stderr)
    print(sum(failures.values()), counted)


def call_silent(port, host, ca_file, key, seconds):
    key = (("x-gw-service-key", key),)
    with connect(port, host, ca_file) as channel:
        stream = channel.unary_stream("/age/Silent")(seconds.encode(), metadata=key, timeout=float(seconds) + 30)
        assert list(stream) == [b"after"]


{"serve": serve, "call": call_all, "silent": call_silent}[sys.argv[1]](*sys.argv[2:])
