"""A backend on some ports of the loopback address: events at /events and /sse, an error at /checkout, otherwise a text."""

import http.server
import sys
import threading


class Backend(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        events = self.path in ("/events", "/sse")
        body = b"data: one\n\ndata: two\n\n" if events else f"{self.command} {self.path}\n".encode()
        self.send_response(500 if self.path == "/checkout" else 200)
        self.send_header("Content-Type", "text/event-stream" if events else "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer

    def log_message(self, *_):
        pass


for port in sys.argv[1:]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Backend)
    threading.Thread(target=server.serve_forever).start()
