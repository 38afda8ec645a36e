"""A WSGI application that answers with the requests it has had, and how many paths came more than once."""

import threading
from collections import Counter

paths = Counter()
lock = threading.Lock()


def application(environ, start_response):
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    with lock:
        if environ["REQUEST_METHOD"] == "POST":
            paths[environ["PATH_INFO"]] += 1
        again = sum(times > 1 for times in paths.values())
        answer = f"{len(paths)} {again}".encode()
    start_response("200 OK", [("Content-Length", str(len(answer)))])
    return [answer]
