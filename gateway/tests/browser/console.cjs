// Tests the console in Chromium, with a demo in a separate process.
//
//     console.cjs ABOUT AGENT FOLDER
//
// ABOUT is the demo's JSON, AGENT the agent's program, FOLDER a working folder. GW_CONSOLE_SCREENSHOTS names a folder for
// screenshots of every page.
"use strict";
const assert = require("node:assert/strict");
const { execFile, spawn } = require("node:child_process");
const fs = require("node:fs");
const http = require("node:http");
const path = require("node:path");
const { promisify } = require("node:util");
const axe = require("axe-core");
const { chromium } = require("playwright-core");
const buttons = require("./buttons.cjs");
const records = require("./records.cjs");

const [ABOUT, AGENT, FOLDER] = [JSON.parse(process.argv[2]), process.argv[3], process.argv[4]];
const SCREENSHOTS = process.env.GW_CONSOLE_SCREENSHOTS;
const SOON = 30_000;
const WIDTHS = [1280, 375];
const SCHEMES = ["light", "dark"];

/** Errors and warnings of the browser, by page. Must be empty at the end. */
const complaints = [];
/** True while a test makes requests fail; their statuses and errors of the browser are then ignored. */
let isProvoking = false;
const running = [];

async function launch() {
  const args = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"];
  args.push("--disable-component-update", "--disable-sync");
  return chromium.launch({ executablePath: "/usr/bin/chromium", chromiumSandbox: false, args });
}

async function open(browser, options = {}) {
  const context = await browser.newContext({ baseURL: ABOUT.admin_url, viewport: { width: 1280, height: 900 }, ...options });
  context.setDefaultTimeout(SOON);
  await context.addInitScript(() => {
    document.addEventListener("securitypolicyviolation", (event) =>
      console.error(`policy: ${event.violatedDirective} ${event.blockedURI} ${event.sample}`));
  });
  await buttons.watch(context);
  const page = await context.newPage();
  page.on("console", (message) => {
    if (["error", "warning"].includes(message.type()) && !isProvoking) complaints.push(`${page.url()}: ${message.text()}`);
  });
  page.on("response", (response) => {
    if (response.status() >= 400 && !isProvoking) complaints.push(`${response.status()} of ${response.url()} on ${page.url()}`);
  });
  page.on("pageerror", (error) => complaints.push(`${page.url()}: ${error}`));
  return page;
}

/** Does something whose requests fail on purpose. */
async function provoking(work) {
  isProvoking = true;
  await work();
  isProvoking = false;
}

async function signIn(page) {
  await page.goto("/");
  await page.getByLabel("Admin token").fill(ABOUT.admin_token);
  await page.getByRole("button", { name: "Sign in" }).click();
  await page.getByRole("heading", { name: "Overview" }).waitFor();
}

/** Runs a command that a page proposes, in a shell. */
async function runInShell(command) {
  const { stdout } = await promisify(execFile)("bash", ["-euc", command], { cwd: FOLDER, timeout: SOON });
  return stdout;
}

async function eventually(what, look) {
  const deadline = Date.now() + SOON;
  for (;;) {
    const found = await look();
    if (found) return found;
    assert(Date.now() < deadline, `still not: ${what}`);
    await new Promise((done) => setTimeout(done, 100));
  }
}

/** A backend that answers with the request. */
async function startBackend() {
  const server = http.createServer((request, response) => {
    const pieces = [];
    request.on("data", (piece) => pieces.push(piece)).on("end", () => {
      response.setHeader("content-type", "application/json");
      response.end(JSON.stringify({ method: request.method, url: request.url, body: Buffer.concat(pieces).toString() }));
    });
  });
  await new Promise((done) => server.listen(0, "127.0.0.1", done));
  running.push({ kill: () => server.close() });
  return `http://127.0.0.1:${server.address().port}`;
}

async function wrongTokensAreRefused(browser) {
  const page = await open(browser);
  await page.goto("/tunnels");
  await provoking(async () => {
    await page.getByLabel("Admin token").fill("guess");
    await page.getByRole("button", { name: "Sign in" }).click();
    await page.getByRole("alert").getByText("not the admin token").waitFor();
  });
  await page.getByLabel("Admin token").fill(ABOUT.admin_token);
  await page.keyboard.press("Enter");
  // Sign-in leads to the requested page.
  await page.getByRole("heading", { name: "Live tunnels" }).waitFor();
  await page.getByRole("button", { name: "Sign out" }).click();
  await page.getByRole("heading", { name: "Sign in" }).waitFor();
  await page.context().close();
}

/** Servers on other ports of this machine do not get the session, even if they have the name of the printed address. */
async function otherPortsDoNotGetTheSession(browser) {
  const stolen = [];
  const thief = http.createServer((request, response) => {
    stolen.push(request.headers.cookie ?? "");
    response.setHeader("content-type", "text/html");
    // A request of the page itself is not cross-site: SameSite does not hold back cookies.
    response.end(request.url === "/" ? '<title>other</title><img src="/again">' : "");
  });
  await new Promise((done) => thief.listen(0, "127.0.0.1", done));
  const page = await open(browser);
  await page.goto(ABOUT.console_url);
  await page.getByLabel("Admin token").fill(ABOUT.admin_token);
  await page.getByRole("button", { name: "Sign in" }).click();
  await page.getByRole("heading", { name: "Overview" }).waitFor();
  const own = new URL(page.url());
  assert.match(own.hostname, /^[0-9a-z]{26}\.console\.gw\.localhost$/);
  await page.getByRole("link", { name: "Live tunnels" }).first().click();
  await page.getByRole("heading", { name: "Live tunnels" }).waitFor();
  const visit = async (hostname) => {
    await page.goto(`http://${hostname}:${thief.address().port}/`, { waitUntil: "load" });
    return stolen.splice(0).join(";");
  };
  isProvoking = true;
  for (const hostname of ["localhost", "127.0.0.1", "console.gw.localhost", "gw.localhost"]) {
    assert.doesNotMatch(await visit(hostname), /gw_session/, hostname);
  }
  assert.match(await visit(own.hostname), /gw_session/, "the browser has the session");
  isProvoking = false;
  await page.context().close();
  thief.close();
  thief.closeAllConnections();
}

/** A page whose session ends asks for sign-in and returns afterwards. */
async function anEndedSessionResumesAfterSignIn(browser) {
  const page = await open(browser);
  await signIn(page);
  await page.goto("/tunnels");
  await provoking(async () => {
    await page.context().clearCookies({ name: "gw_session" });
    await page.getByRole("status").getByText("Your session has ended").waitFor();
  });
  await page.getByLabel("Admin token").fill(ABOUT.admin_token);
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { name: "Live tunnels" }).waitFor();
  // Edits of a form are kept, and sent after the sign-in.
  await page.goto("/accounts/demo/settings");
  await page.getByLabel("Own domains, at most").fill("11");
  await provoking(async () => {
    await page.context().clearCookies({ name: "gw_session" });
    await page.getByRole("button", { name: "Save" }).click();
    await page.getByRole("status").getByText("Your edits are kept").waitFor();
  });
  await page.getByLabel("Admin token").fill(ABOUT.admin_token);
  await page.keyboard.press("Enter");
  await page.getByRole("button", { name: "Send the form now" }).click();
  await page.getByRole("status").getByText("Saved").waitFor();
  assert.equal(await page.getByLabel("Own domains, at most").inputValue(), "11");
  await page.context().close();
}

/** Sets up an account until requests are answered, with only the instructions of the pages. */
async function anAccountIsSetUp(page) {
  await page.getByRole("link", { name: "Accounts", exact: true }).first().click();
  await page.getByLabel("Account ID").fill("acme");
  await page.getByLabel("Capture allowed").check();
  await page.getByRole("button", { name: "Create account" }).click();
  await page.getByRole("status").getByText("Created").waitFor();

  await page.getByRole("link", { name: "New service" }).click();
  await provoking(async () => {
    await page.getByLabel("Service ID").fill("Not An Id");
    await page.getByRole("button", { name: "Create service" }).click();
    await page.locator("#id-error").waitFor();
  });
  assert.equal(await page.getByLabel("Service ID").getAttribute("aria-invalid"), "true");
  assert.equal(await page.evaluate(() => document.activeElement.id), "id");
  await page.getByLabel("Service ID").fill("api");
  await page.getByLabel("Capture request body").check();
  await page.getByLabel("Capture backend response").check();
  await page.getByRole("button", { name: "Create service" }).click();
  await page.getByRole("heading", { name: /^api/ }).waitFor();
  assert(await page.getByLabel("Capture request body").isChecked());

  const token = await createCallerSecret(page, "Credentials", "New credential", "Create credential");
  const key = await createCallerSecret(page, "Service keys", "New service key", "Create service key");

  await page.goto("/accounts/acme/agents");
  await page.getByRole("link", { name: "Enroll an agent" }).click();
  await page.getByLabel("api").check();
  await page.getByLabel("By hand").check();
  const backend = await startBackend();
  await page.getByLabel("Backend port").fill(new URL(backend).port);
  await page.getByRole("button", { name: "Create token" }).click();
  // `exec`: the agent ends with the test, not only its shell.
  const command = (await page.locator("#command").textContent()).replace("gw-agent", "exec gw-agent");
  await takeScreenshot(page, "enrollment-secret");
  const env = {
    ...process.env,
    GW_STATE_DIR: path.join(FOLDER, "agent"),
    PATH: `${path.dirname(AGENT)}:${process.env.PATH}`,
  };
  running.push(spawn("bash", ["-c", command], { stdio: "ignore", cwd: FOLDER, env }));
  await page.getByRole("link", { name: "Done" }).click();
  await eventually("the agent waits", async () => {
    await page.reload();
    return (await page.getByRole("button", { name: /^Approve/ }).count()) > 0;
  });
  await page.getByRole("button", { name: /^Approve/ }).click();
  await page.getByText("Approved. The agent gets").waitFor();

  // The tunnels page lists the new tunnel.
  await page.goto("/tunnels");
  await page.getByRole("cell", { name: "demo--echo" }).waitFor();
  await page.getByRole("cell", { name: "acme--api" }).waitFor();

  assert.deepEqual(JSON.parse(await runInShell(key)), { method: "GET", url: "/", body: "" });
  assert.deepEqual(JSON.parse(await runInShell(token)), { method: "GET", url: "/", body: "" });
  return key;
}

/** Adds an own domain, which is not in DNS, and shows the records to set. */
async function aDomainIsAdded(page) {
  // An unreachable DNS server takes half a minute.
  const patient = { timeout: 90_000 };
  await page.goto("/accounts/acme/services/api");
  const name = page.getByLabel("Add a domain of the customer");
  await provoking(async () => {
    await name.fill("No Name");
    await page.getByRole("button", { name: "Add domain" }).click();
    await page.locator("#name-error").waitFor();
  });
  assert.equal(await name.getAttribute("aria-invalid"), "true");
  assert.equal(await page.evaluate(() => document.activeElement.id), "name");
  await name.fill("api.customer.example");
  await page.getByRole("button", { name: "Add domain" }).click(patient);
  await page.getByRole("heading", { name: /^api.customer.example/ }).waitFor(patient);
  await page.getByText("waiting for DNS").waitFor();
  const record = await page.locator("#cname").textContent();
  assert(record.startsWith("api.customer.example CNAME acme--api."), record);
  await page.getByRole("button", { name: /^Copy: CNAME record/ }).getByText("Copy").waitFor();
}

/** Creates a credential or key for the service, and returns the commands that its page proposes. */
async function createCallerSecret(page, tab, link, button) {
  await page.goto("/accounts/acme");
  await page.getByRole("link", { name: tab, exact: true }).click();
  await page.getByRole("link", { name: link }).click();
  await page.getByLabel("Name").fill("ci");
  await page.getByLabel("api").check();
  await page.getByRole("button", { name: button }).click();
  await page.getByText("Shown only this once").waitFor();
  const [secret, commands] = [await page.locator("#secret").textContent(), await page.locator("#commands").textContent()];
  assert(commands.includes(secret));
  await page.getByRole("button", { name: /^Copy: Example/ }).click();
  await page.getByRole("button", { name: /^Copy: Example/ }).getByText(/Copied|Selected/).waitFor();
  await page.getByRole("status").getByText(/^Example: (Copied|Selected)/).waitFor({ state: "attached" });
  await takeScreenshot(page, link.replace("New ", "").replace(" ", "-") + "-secret");
  // A reload neither creates another one nor shows the secret again.
  await page.reload();
  assert.equal(await page.getByText(secret).count(), 0);
  await page.getByRole("heading", { name: /^ci/ }).waitFor();
  return commands;
}

/** Finds a request by its id, shows its capture, and replays it with edits. */
async function aRequestIsFoundAndReplayed(page, command) {
  const head = await runInShell(`${command} -o /dev/null -D - -H 'content-type: application/json' -d '{"order":[1,2]}'`);
  const id = /x-gw-request-id: (\S+)/i.exec(head)[1];
  await eventually("the request is in the log", async () => {
    await page.goto("/requests");
    return (await page.locator(`a[href="/requests/${id}"]`).count()) > 0;
  });
  await page.goto("/tunnels");
  await page.getByLabel("Request ID").fill(` ${id} `);
  await page.getByRole("button", { name: "Find" }).click();
  assert.equal(await page.locator("#request-id").textContent(), id);
  await page.getByText("service key").first().waitFor();
  assert.equal(await page.getByLabel("Body of the Request").textContent(), '{\n  "order": [\n    1,\n    2\n  ]\n}');
  assert(await page.locator(".waterfall rect.backend").count());
  const address = new URL(page.url()).pathname;

  await page.getByRole("link", { name: "Replay…" }).click();
  await page.getByLabel("Path and query").fill("/again?x=1");
  await page.getByLabel("Method").fill("PATCH");
  // An edit selects the edited body; a choice of the recorded body undoes it.
  assert(await page.getByLabel("As recorded").isChecked());
  await page.getByLabel("Text of the body").fill("undone");
  assert(await page.getByLabel("This text").isChecked());
  await page.getByLabel("As recorded").check();
  assert.equal(await page.getByLabel("Text of the body").inputValue(), '{"order":[1,2]}');
  await page.getByLabel("Text of the body").fill("one\ntwo");
  assert(await page.getByLabel("This text").isChecked());
  await page.getByRole("button", { name: "Preview" }).click();
  await page.getByText("Nothing has been sent yet.").waitFor();
  assert.equal(await page.getByLabel("Body that will be sent").textContent(), "one\ntwo");
  await takeScreenshot(page, "replay-edited");
  await page.getByRole("button", { name: "Send it again" }).click();
  await page.getByRole("status").getByText("Replayed").waitFor();
  const answer = JSON.parse(await page.getByLabel("Body of the Backend response").textContent());
  assert.deepEqual(answer, { method: "PATCH", url: "/again?x=1", body: "one\ntwo" });
  await page.getByRole("link", { name: id }).click();
  await page.getByRole("heading", { name: "POST /" }).waitFor();
  return address;
}

/** Live parts of a page keep their content while updates fail, and show a notice until updates succeed. */
async function livePartsSurviveErrors(page) {
  const stale = page.getByRole("status").getByText(/^Not refreshed since \d\d:\d\d:\d\d UTC$/);
  const answers = {
    "an error": (route) => route.fulfill({ status: 503, contentType: "text/html", body: "<!doctype html><main>no</main>" }),
    "a page of somebody else": (route) => route.fulfill({ contentType: "text/html", body: "<!doctype html><main>who?</main>" }),
    "nothing at all": (route) => route.abort(),
  };
  isProvoking = true;
  for (const [what, answer] of Object.entries(answers)) {
    await page.goto("/tunnels");
    await page.route("**/tunnels", answer);
    await stale.waitFor();
    assert.equal(await page.getByRole("cell", { name: "demo--echo" }).count(), 1, what);
    await page.unroute("**/tunnels");
    await stale.waitFor({ state: "detached" });
    assert.equal(await page.getByRole("cell", { name: "demo--echo" }).count(), 1, what);
  }
  await page.route("**/traffic/series?*", answers["an error"]);
  await page.goto("/traffic");
  await stale.waitFor();
  await page.unroute("**/traffic/series?*");
  await page.goto("/traffic");
  await page.locator(".u-legend").first().waitFor();
  assert.equal(await stale.count(), 0);
  isProvoking = false;
}

/** The contents of images are hidden from screen readers. */
async function emptyChartsShowANotice(page) {
  await page.goto("/traffic?service=acme--none");
  await page.locator(".frame > .absent").nth(4).waitFor();
  assert.equal(await page.locator("[role=img] .absent").count(), 0);
}

/** Charts show the same times as tables in every time zone. */
async function chartsAreInUtc(browser) {
  const page = await open(browser, { timezoneId: "Asia/Kathmandu" });
  await signIn(page);
  await page.goto("/traffic");
  await page.locator(".u-legend").first().waitFor();
  await page.locator(".u-over").first().hover();
  const shown = await page.locator(".u-legend .u-value").first().textContent();
  const { at, step_seconds, last_seconds } = await page.evaluate(() => fetch("/traffic/series").then((reply) => reply.json()));
  const utc = (second) => {
    const [date, options] = [new Date(second * 1000), { timeZone: "UTC" }];
    const day = date.toLocaleDateString("en-GB", { ...options, day: "numeric", month: "short" });
    return `${day} ${date.toISOString().slice(11, 16)}`;
  };
  assert(at.map(utc).includes(shown), `${shown} is not between ${utc(at[0])} and ${utc(at.at(-1))}`);
  assert(last_seconds >= 10 && last_seconds <= step_seconds, `${last_seconds} of ${step_seconds}`);
  await page.context().close();
}

async function aKeyIsDisabledAndDeleted(page, command) {
  await page.goto("/accounts/acme/service-keys");
  await page.getByRole("link", { name: "ci" }).click();
  await page.getByRole("button", { name: "Disable" }).click();
  await page.getByText("disabled", { exact: true }).waitFor();
  await eventually("the key is refused", async () => (await runInShell(command)).includes("GW_SERVICE_KEY_INVALID"));
  await page.getByText("Delete this service key…").click();
  await provoking(async () => {
    await page.getByRole("button", { name: "Delete service key" }).click();
    await page.getByText(/^type \w+ to confirm$/).waitFor();
  });
  assert.equal(await page.evaluate(() => document.activeElement.getAttribute("aria-describedby")), "confirm-error");
  assert.equal(await page.locator("#confirm-error").count(), 1);
  await page.getByLabel(/to confirm/).fill(new URL(page.url()).pathname.split("/").at(-2));
  await page.getByRole("button", { name: "Delete service key" }).click();
  await page.getByRole("status").getByText("Deleted").waitFor();
}

/** The essential functions work without scripts. */
async function scriptsAreNotNeeded(browser) {
  const page = await open(browser, { javaScriptEnabled: false });
  await signIn(page);
  await page.goto("/accounts");
  await page.getByLabel("Account ID").fill("plain");
  await page.getByRole("button", { name: "Create account" }).click();
  await page.getByRole("status").getByText("Created").waitFor();
  await page.getByRole("link", { name: "Settings", exact: true }).click();
  await page.getByText("Delete this account…").click();
  await page.getByLabel(/to confirm/).fill("plain");
  await page.getByRole("button", { name: "Delete account" }).click();
  await page.getByRole("status").getByText("Deleted").waitFor();
  await page.getByRole("button", { name: "dark" }).click();
  assert.equal(await page.locator("html").getAttribute("data-theme"), "dark");
  await page.context().close();
}

async function theKeyboardSuffices(page) {
  await page.goto("/requests");
  await page.keyboard.press("Tab");
  assert.equal(await page.evaluate(() => document.activeElement.textContent), "Skip to content");
  await page.keyboard.press("Enter");
  assert.equal(await page.evaluate(() => document.activeElement.id), "main");
  await page.keyboard.press("Tab");
  assert.equal(await page.evaluate(() => document.activeElement.id), "account");
  const outline = await page.evaluate(() => getComputedStyle(document.activeElement).outlineWidth);
  assert.notEqual(outline, "0px");
}

async function takeScreenshot(page, name) {
  if (SCREENSHOTS) await page.screenshot({ path: path.join(SCREENSHOTS, `${name}.png`), fullPage: true });
}

/** Checks every page in each width and color scheme: no horizontal overflow and no accessibility violations. */
async function pagesAreAccessible(page, addresses) {
  const faults = [];
  for (const [name, address] of Object.entries(addresses)) {
    for (const width of WIDTHS) {
      for (const colorScheme of SCHEMES) {
        await page.setViewportSize({ width, height: 900 });
        await page.emulateMedia({ colorScheme });
        await page.goto(address);
        const charts = page.locator("[data-chart]");
        if (await charts.count()) await page.locator("[data-chart] canvas").first().waitFor();
        const wide = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
        if (wide > 0) faults.push(`${address} is ${wide} px too wide at ${width}`);
        const narrow = await page.evaluate(() => [...document.querySelectorAll(".list td, .facts dd")]
          .filter((cell) => cell.clientWidth > 0 && cell.clientWidth < 60 && cell.clientHeight > 80)
          .map((cell) => `${cell.dataset.label ?? "fact"}: ${cell.textContent.trim()}`));
        if (narrow.length) faults.push(`${address} wraps after each character at ${width}: ${narrow.slice(0, 3)}`);
        // Evaluated, because the content security policy of the page forbids script tags.
        await page.evaluate(axe.source);
        const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
        for (const { id, impact, nodes } of violations) {
          const where = nodes.map((node) => `${node.target} ${node.any.map((check) => check.message)}`).slice(0, 3);
          if (["serious", "critical"].includes(impact)) faults.push(`${address} ${width} ${colorScheme}: ${id}: ${where}`);
        }
        await takeScreenshot(page, `${name}-${width}-${colorScheme}`);
      }
    }
  }
  assert.deepEqual([...new Set(faults)], []);
}

async function main() {
  if (SCREENSHOTS) fs.mkdirSync(SCREENSHOTS, { recursive: true });
  const browser = await launch();
  try {
    await wrongTokensAreRefused(browser);
    await anEndedSessionResumesAfterSignIn(browser);
    await otherPortsDoNotGetTheSession(browser);
    const page = await open(browser);
    await signIn(page);
    const key = await anAccountIsSetUp(page);
    const request = await aRequestIsFoundAndReplayed(page, key);
    await aDomainIsAdded(page);
    // A failed request, for the error pages.
    await runInShell(key.replace("acme--api", "acme--none"));
    const href = (of, selector) => page.goto(of).then(() => page.locator(selector).first().getAttribute("href"));
    const addresses = {
      overview: "/",
      accounts: "/accounts",
      services: "/accounts/acme",
      "service-new": "/accounts/acme/new-service",
      service: "/accounts/acme/services/api",
      credentials: "/accounts/acme/credentials",
      credential: await href("/accounts/acme/credentials", ".list td a"),
      "credential-new": "/accounts/acme/new-credentials",
      "service-keys": "/accounts/acme/service-keys",
      "service-key": await href("/accounts/acme/service-keys", ".list td a"),
      agents: "/accounts/acme/agents",
      agent: await href("/accounts/acme/agents", ".list td a"),
      "agent-new": "/accounts/acme/new-agent",
      domain: "/accounts/acme/domains/api.customer.example",
      settings: "/accounts/acme/settings",
      tunnels: "/tunnels",
      requests: "/requests",
      request,
      replay: `${request}/replay`,
      traffic: "/traffic",
      usage: "/usage",
      "audit-log": "/audit-log",
    };
    await eventually("charts have what happened", async () => {
      await page.goto("/traffic?service=acme--api");
      return (await page.locator(".tiles dd").first().textContent()) !== "0";
    });
    await page.locator(".u-legend").first().waitFor();
    await pagesAreAccessible(page, addresses);
    const outside = await open(browser);
    await pagesAreAccessible(outside, { "sign-in": "/sign-in" });
    await provoking(async () => {
      await pagesAreAccessible(outside, { "not-found": "/nowhere" });
      await pagesAreAccessible(page, { "requests-none": "/requests?status=418&min_ms=x" });
    });
    await page.setViewportSize({ width: 1280, height: 900 });
    await theKeyboardSuffices(page);
    await emptyChartsShowANotice(page);
    await chartsAreInUtc(browser);
    await livePartsSurviveErrors(page);
    await aKeyIsDisabledAndDeleted(page, key);
    await scriptsAreNotNeeded(browser);
    await records.searchesAndThemesAreChosen(page);
    await records.eachRecordIsCreatedChangedAndDeleted(page, { runInShell, provoking });
    assert.deepEqual(complaints, []);
    assert.deepEqual(buttons.neverPressed(), []);
  } finally {
    running.forEach((process) => process.kill());
    await browser.close();
  }
}

main().catch((error) => {
  console.error(error, complaints);
  process.exit(1);
});
