"""Servers that answer each request with its X-Gw-Request-Id, method and target, and write the same into a log."""

import os
import pathlib
import socket
import tempfile

NGINX = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/nginx.err info;
events {{ worker_connections 1024; }}
http {{
  map $status $well_formed {{ 400 ""; default $http_x_gw_request_id; }}
  log_format ids "$well_formed $request_method $request_uri $status";
  access_log {log} ids;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  underscores_in_headers on;
  ignore_invalid_headers off;
  client_max_body_size 0;
  keepalive_requests {requests};
  keepalive_timeout {idle};
  server {{
    listen unix:{folder}/nginx.sock;
    location / {{ return 200 "$http_x_gw_request_id $request_method $request_uri"; }}
  }}
}}
"""

NODE = """
const fs = require("fs"), http = require("http");
const [log, requests, idle] = process.argv.slice(1);
const seen = fs.openSync(log, "a");
const server = http.createServer((request, response) => {
  const line = `${request.headers["x-gw-request-id"] ?? ""} ${request.method} ${request.url}`;
  fs.writeSync(seen, line + "\\n");
  request.resume();
  response.setHeader("Content-Length", Buffer.byteLength(line));
  response.end(line);
});
server.on("clientError", (error, socket) => {
  // What breaks off is no message.
  if (!["ECONNRESET", "HPE_INVALID_EOF_STATE"].includes(error.code)) fs.writeSync(seen, ` malformed ${error.code}\\n`);
  socket.destroy();
});
server.keepAliveTimeout = Number(idle) * 1000;
server.maxRequestsPerSocket = Number(requests);
server.listen(0, "127.0.0.1", 1024, () => console.log(`http://127.0.0.1:${server.address().port}`));
"""


def serve(kind, log, requests="1000", idle="60"):
    """`requests` on one connection at most, `idle` seconds between two."""
    pathlib.Path(log).touch()
    {"nginx": nginx, "node": node, "uvicorn": uvicorn}[kind](log, requests, idle)


def nginx(log, requests, idle):
    folder = tempfile.mkdtemp(dir=pathlib.Path(log).parent)
    config = pathlib.Path(folder, "nginx.conf")
    config.write_text(NGINX.format(folder=folder, log=log, requests=requests, idle=f"{float(idle) * 1000:.0f}ms"))
    print(f"unix:{folder}/nginx.sock", flush=True)
    os.execvp("nginx", ["nginx", "-c", str(config)])


def node(log, requests, idle):
    os.execvp("node", ["node", "-e", NODE, log, requests, idle])


def uvicorn(log, requests, idle):
    import logging

    from uvicorn import Config, Server

    seen = open(log, "a", buffering=1)

    class Malformed(logging.Handler):
        def emit(self, record):
            if "Invalid HTTP request" in record.getMessage():
                seen.write(" malformed request\n")

    async def application(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        request_id = dict(scope["headers"]).get(b"x-gw-request-id", b"").decode()
        target = scope["raw_path"].decode() + ("?" + scope["query_string"].decode() if scope["query_string"] else "")
        line = f"{request_id} {scope['method']} {target}"
        seen.write(line + "\n")
        headers = [(b"content-length", b"%d" % len(line))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else line.encode()})

    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = Config(application, log_level="warning", lifespan="off", http="h11", timeout_keep_alive=int(float(idle)))
    logging.getLogger("uvicorn.error").addHandler(Malformed())
    Server(config).run(sockets=[listener])
