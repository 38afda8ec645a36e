"""The network of a machine, and a backend on it: backend.py PORT BODY

Runs in a network namespace of its own. Brings loopback up, answers every GET with BODY, and prints a line once it listens.
"""

import fcntl
import http.server
import socket
import struct
import sys

# SIOCSIFFLAGS with IFF_UP and IFF_RUNNING.
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh14x", b"lo", 0x41))
body = sys.argv[2].encode()


class Backend(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Backend)
print("listening", flush=True)
server.serve_forever()
