"""Servers that answer each request with its X-Gw-Request-Id, method and target, and log the same: one line of JSON per
request, with its content (nginx) or the SHA-256 of the content.
"""

import hashlib
import json
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
  log_format ids escape=json '{{"id":"$http_x_gw_request_id","method":"$request_method","target":"$request_uri",'
    '"content":"$request_body","status":"$status"}}';
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  underscores_in_headers on;
  ignore_invalid_headers off;
  client_max_body_size 0;
  client_body_buffer_size 1m;
  client_body_in_single_buffer on;
  large_client_header_buffers 8 64k;
  keepalive_requests {requests};
  keepalive_timeout {idle};
  server {{
    listen unix:{folder}/nginx.sock;
    access_log {log} ids;
    proxy_set_header X-Seen "$http_x_gw_request_id $request_method $request_uri";
    proxy_method GET;
    # nginx reads content only to forward it, here to itself.
    location / {{ proxy_pass http://unix:{folder}/itself.sock; }}
  }}
  server {{
    listen unix:{folder}/itself.sock;
    location / {{ return 200 $http_x_seen; }}
  }}
}}
"""

NODE = r"""
const { createHash } = require("crypto"), fs = require("fs"), http = require("http");
const [log, requests, idle, insecureHTTPParser] = process.argv.slice(1);
const seen = fs.openSync(log, "a");
const note = (entry) => fs.writeSync(seen, JSON.stringify(entry) + "\n");
const answer = (request, response) => {
  const [id, content] = [request.headers["x-gw-request-id"] ?? "", createHash("sha256")];
  const entry = { id, method: request.method, target: request.url };
  request.on("data", (data) => content.update(data));
  request.on("error", () => {});
  request.on("close", () => request.complete || note({ ...entry, cut: true }));
  request.on("end", () => {
    note({ ...entry, sha256: content.digest("hex") });
    const line = `${id} ${request.method} ${request.url}`;
    response.setHeader("Content-Length", Buffer.byteLength(line));
    response.end(line);
  });
};
const server = http.createServer({ insecureHTTPParser: insecureHTTPParser === "lenient" }, answer);
// Requests with an unknown Expect value get the same answer.
server.on("checkExpectation", answer);
server.on("clientError", ({ code, rawPacket }, socket) => {
  // An incomplete request has no packet. The others are malformed, for example with a method that Node does not know.
  const start = rawPacket?.toString("latin1");
  const [, id = ""] = /^x-gw-request-id: (.*)$/im.exec(start) ?? [];
  if (rawPacket) note({ malformed: code, id, start: start.slice(0, 80) });
  socket.destroy();
});
server.keepAliveTimeout = Number(idle) * 1000;
server.maxRequestsPerSocket = Number(requests);
server.listen(0, "127.0.0.1", 1024, () => console.log(`http://127.0.0.1:${server.address().port}`));
"""


def serve(kind, log, requests="1000", idle="60"):
    """Serves at most `requests` per connection, with at most `idle` seconds between two."""
    pathlib.Path(log).touch()
    {"nginx": nginx, "node": node, "node-lenient": lenient_node, "uvicorn": uvicorn}[kind](log, requests, idle)


def nginx(log, requests, idle):
    folder = tempfile.mkdtemp(dir=pathlib.Path(log).parent)
    config = pathlib.Path(folder, "nginx.conf")
    config.write_text(NGINX.format(folder=folder, log=log, requests=requests, idle=f"{float(idle) * 1000:.0f}ms"))
    print(f"unix:{folder}/nginx.sock", flush=True)
    os.execvp("nginx", ["nginx", "-c", str(config)])


def node(log, requests, idle, parser="strict"):
    os.execvp("node", ["node", "-e", NODE, log, requests, idle, parser])


def lenient_node(*arguments):
    node(*arguments, "lenient")


def uvicorn(log, requests, idle):
    from uvicorn import Config, Server

    seen = open(log, "a", buffering=1)

    async def application(scope, receive, send):
        content, event = b"", {"type": scope["type"], "more_body": scope["type"] == "http"}
        while event.get("more_body"):
            event = await receive()
            content += event.get("body", b"")
        target = scope["raw_path"].decode() + ("?" + scope["query_string"].decode() if scope["query_string"] else "")
        request_id = dict(scope["headers"]).get(b"x-gw-request-id", b"").decode()
        entry = {"id": request_id, "method": scope.get("method", "GET"), "target": target}
        if scope["type"] == "websocket":
            seen.write(json.dumps(entry) + "\n")
            await send({"type": "websocket.accept"})
            while (await receive())["type"] != "websocket.disconnect":
                pass
            return
        if event["type"] == "http.disconnect":
            seen.write(json.dumps(entry | {"cut": True}) + "\n")
            return
        seen.write(json.dumps(entry | {"sha256": hashlib.sha256(content).hexdigest()}) + "\n")
        line = f"{request_id} {scope['method']} {target}"
        headers = [(b"content-length", b"%d" % len(line))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else line.encode()})

    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = Config(application, log_level="warning", lifespan="off", http="h11", timeout_keep_alive=int(float(idle)))
    Server(config).run(sockets=[listener])
