// Node's fetch and http2, and a page in Chromium, through the relay to a server on Node.
//
//     node_calls.cjs serve          prints the URL of a backend, then serves it
//     node_calls.cjs call ABOUT     calls it through the relay that ABOUT, the demo's JSON, describes
"use strict";
const assert = require("node:assert/strict");
const crypto = require("node:crypto");
const dns = require("node:dns");
const fs = require("node:fs");
const http = require("node:http");
const http2 = require("node:http2");

const RESOURCES = 100;
const EVENTS = 10;
const LARGE = 3_000_000;

const PAGE = `<!doctype html><title>loading</title><script type="module">
  const get = async (path) => (await (await fetch(path)).text());
  const resources = Promise.all(Array.from({ length: ${RESOURCES} }, (_, number) => get("/resource/" + number)));
  const events = new Promise((done, failed) => {
    const seen = [];
    const source = new EventSource("/events");
    source.onerror = () => failed(new Error("EventSource failed after " + seen.length));
    source.onmessage = async ({ data }) => {
      seen.push(data);
      if (seen.length === ${EVENTS}) source.close(), done(seen);
      // The server sends the next event after this request.
      await get("/got?" + data);
    };
  });
  try {
    const [texts, seen] = await Promise.all([resources, events]);
    const protocols = performance.getEntriesByType("resource").map((entry) => entry.nextHopProtocol);
    window.result = { texts, seen, protocols: [...new Set(protocols)] };
  } catch (error) {
    window.result = { error: String(error) };
  }
</script>`;

function serve() {
  let next;
  const routes = {
    "/": (_, response) => response.setHeader("Content-Type", "text/html").end(PAGE),
    "/got": (_, response) => (next?.(), response.end()),
    "/events": async (request, response) => {
      response.setHeader("Content-Type", "text/event-stream");
      for (let number = 0; number < EVENTS && !request.socket.destroyed; number++) {
        const got = new Promise((resolve) => (next = resolve));
        response.write(`data: ${number}\n\n`);
        await got;
      }
      response.end();
    },
    "/mirror": (request, response) => request.pipe(response),
    "/hints": (_, response) => {
      response.writeEarlyHints({ link: "</style.css>; rel=preload; as=style" });
      response.setHeader("Trailer", "X-Sum");
      response.write("hinted");
      response.addTrailers({ "X-Sum": "6" });
      response.end();
    },
  };
  const server = http.createServer((request, response) => {
    const path = request.url.split("?")[0];
    const resource = path.match(/^\/resource\/(\d+)$/);
    if (resource) return response.end(`resource ${resource[1]}`);
    (routes[path] ?? ((_, response) => response.writeHead(404).end()))(request, response);
  });
  server.listen(0, "127.0.0.1", () => console.log(`http://127.0.0.1:${server.address().port}`));
}

async function withFetch(url, headers) {
  const content = crypto.randomBytes(LARGE);
  const mirrored = await fetch(`${url}/mirror`, { method: "POST", headers, body: content });
  assert.deepEqual(Buffer.from(await mirrored.arrayBuffer()), content);
  const streamed = new ReadableStream({
    async start(controller) {
      for (let at = 0; at < LARGE; at += 100_000) controller.enqueue(content.subarray(at, at + 100_000));
      controller.close();
    },
  });
  const answer = await fetch(`${url}/mirror`, { method: "POST", headers, body: streamed, duplex: "half" });
  assert.deepEqual(Buffer.from(await answer.arrayBuffer()), content);
  // A reader that disconnects early does not affect other requests.
  const leaving = new AbortController();
  const events = await fetch(`${url}/events`, { headers, signal: leaving.signal });
  await events.body.getReader().read();
  leaving.abort();
  assert.equal(await (await fetch(`${url}/resource/7`, { headers })).text(), "resource 7");
}

async function withHttp2(url, headers, ca) {
  const session = http2.connect(url, { ca });
  const content = crypto.randomBytes(LARGE);
  const stream = session.request({ ":method": "POST", ":path": "/mirror", ...headers });
  const pieces = [];
  stream.on("data", (piece) => pieces.push(piece));
  stream.end(content);
  await new Promise((done, failed) => stream.on("end", done).on("error", failed));
  assert.deepEqual(Buffer.concat(pieces), content);
  const hinted = session.request({ ":path": "/hints", ...headers });
  const seen = {};
  hinted.on("headers", (fields) => (seen.early = [fields[":status"], fields.link]));
  hinted.on("trailers", (fields) => (seen.trailers = fields["x-sum"]));
  hinted.resume();
  await new Promise((done, failed) => hinted.on("end", done).on("error", failed));
  assert.deepEqual(seen, { early: [103, "</style.css>; rel=preload; as=style"], trailers: "6" });
  session.close();
}

async function withChromium(url, headers) {
  const { chromium } = require("playwright-core");
  const args = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"];
  args.push("--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP *.localhost 127.0.0.1");
  const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", chromiumSandbox: false, args });
  const context = await browser.newContext({ ignoreHTTPSErrors: true, extraHTTPHeaders: headers });
  const page = await context.newPage();
  await page.goto(url);
  const result = await (await page.waitForFunction(() => window.result, null, { timeout: 60_000 })).jsonValue();
  await browser.close();
  assert.deepEqual(result.texts, Array.from({ length: RESOURCES }, (_, number) => `resource ${number}`), result.error);
  assert.deepEqual(result.seen, Array.from({ length: EVENTS }, (_, number) => `${number}`));
  assert.deepEqual(result.protocols, ["h2"]);
}

async function call(about) {
  // Names under .localhost are loopback (RFC 6761 §6.3), but not all resolvers support that.
  const lookup = dns.lookup;
  dns.lookup = (host, ...rest) => lookup(host.endsWith(".localhost") ? "127.0.0.1" : host, ...rest);
  const headers = { "x-gw-service-key": about.service_key };
  await withFetch(about.tenant_url, headers);
  await withHttp2(about.tenant_url, headers, fs.readFileSync(about.ca_file));
  await withChromium(about.tenant_url, headers);
}

const [mode, about] = process.argv.slice(2);
if (mode === "serve") serve();
else call(JSON.parse(about));
