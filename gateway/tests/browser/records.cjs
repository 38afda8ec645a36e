// One record of each kind is created, changed and deleted by clicking.
"use strict";
const assert = require("node:assert/strict");

/** A DNS server that cannot be reached takes half a minute. */
const PATIENT = { timeout: 90_000 };
const DOMAIN = "shop.customer.example";

const press = (page, name, options) => page.getByRole("button", { name, exact: true }).click(options);
const follow = (page, name) => page.getByRole("link", { name, exact: true }).first().click();
const said = (page, text, options) => page.getByRole("status").getByText(text).waitFor(options);

async function confirm(page, summary, button, id) {
  await page.getByText(summary).click();
  await page.getByLabel(/to confirm/).fill(id);
  await press(page, button);
}

async function pressCopies(page) {
  for (const button of await page.getByRole("button", { name: /^Copy: / }).all()) {
    await button.click();
    await button.getByText(/Copied|Selected/).waitFor();
  }
}

async function anAccountAndAService(page) {
  await page.goto("/accounts");
  await page.getByLabel("Account ID").fill("clicks");
  await press(page, "Create account");
  await said(page, "Created");
  await follow(page, "Settings");
  await page.getByLabel("Capture allowed").check();
  await press(page, "Save");
  await said(page, "Saved");
  assert(await page.getByLabel("Capture allowed").isChecked());
  await follow(page, "Services");
  await follow(page, "New service");
  await page.getByLabel("Service ID").fill("web");
  await press(page, "Create service");
  await said(page, "Created");
  await page.locator("#burst").fill("7");
  await page.locator("#hsts_max_age_seconds").fill("300");
  await press(page, "Save");
  await said(page, "Saved");
  assert.equal(await page.locator("#burst").inputValue(), "7");
  assert.equal(await page.locator("#hsts_max_age_seconds").inputValue(), "300");
}

async function aDomain(page, { runInShell, provoking }) {
  await page.goto("/accounts/clicks/services/web");
  await page.getByLabel("Add a domain of the customer").fill(DOMAIN);
  await press(page, "Add domain", PATIENT);
  await said(page, "Created", PATIENT);
  await pressCopies(page);
  await press(page, "Look up in DNS now", PATIENT);
  await said(page, "Looked up in DNS", PATIENT);
  await provoking(async () => {
    await press(page, "Order a certificate now");
    await page.getByRole("alert").getByText("no authority issues its certificate").waitFor();
  });
  const pem = await runInShell(`openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 90 \
    -subj /CN=${DOMAIN} -addext subjectAltName=DNS:${DOMAIN} -addext basicConstraints=CA:FALSE \
    -keyout own.key -out own.crt 2>/dev/null; cat own.key own.crt`);
  const part = (name) => new RegExp(`-----BEGIN ${name}-----[^]*-----END ${name}-----\n`).exec(pem)[0];
  await page.getByLabel("Certificates").fill(part("CERTIFICATE"));
  await page.getByLabel("Private key").fill(part("PRIVATE KEY"));
  await press(page, "Upload");
  await said(page, "Uploaded");
  await confirm(page, "Remove this domain…", "Remove domain", DOMAIN);
  await said(page, "Deleted");
}

async function aCallerSecret(page, tab, link, one) {
  await page.goto("/accounts/clicks");
  await follow(page, tab);
  await follow(page, link);
  await page.getByLabel("Name").fill("bot");
  await page.getByLabel("web").check();
  await press(page, `Create ${one}`);
  const secret = await page.locator("#secret").textContent();
  await pressCopies(page);
  await follow(page, "Done");
  const id = new URL(page.url()).pathname.split("/").at(-1);
  await page.getByLabel("Name").fill("robot");
  await press(page, "Save");
  await said(page, "Saved");
  await page.getByRole("heading", { name: /^robot/ }).waitFor();
  for (const [button, state] of [["Disable", "disabled"], ["Enable", "enabled"]]) {
    await press(page, button);
    await page.getByText(state, { exact: true }).waitFor();
  }
  await press(page, "Rotate secret");
  await page.getByText("Shown only this once").waitFor();
  assert.notEqual(await page.locator("#secret").textContent(), secret);
  await follow(page, "Done");
  await confirm(page, `Delete this ${one}…`, `Delete ${one}`, id);
  await said(page, "Deleted");
}

async function anEnrollmentToken(page) {
  await page.goto("/accounts/clicks/agents");
  await follow(page, "Enroll an agent");
  await page.getByLabel("web").check();
  await press(page, "Create token");
  await pressCopies(page);
  await follow(page, "Done");
  await page.getByRole("button", { name: /^Withdraw / }).click();
  await said(page, "Deleted");
}

/** Renames, revokes and deletes the agent of an account. */
async function anAgent(page, account) {
  await page.goto(`/accounts/${account}/agents`);
  await page.locator(".list td a").first().click();
  const id = new URL(page.url()).pathname.split("/").at(-1);
  await page.getByLabel("Name").fill("renamed");
  await press(page, "Save");
  await said(page, "Saved");
  await confirm(page, "Revoke this agent…", "Revoke agent", id);
  await said(page, "Revoked");
  await confirm(page, "Delete this agent…", "Delete agent", id);
  await said(page, "Deleted");
}

/** `tools`: `runInShell`, and `provoking`, which allows errors while it runs. */
async function eachRecordIsCreatedChangedAndDeleted(page, tools) {
  await anAccountAndAService(page);
  await aDomain(page, tools);
  await aCallerSecret(page, "Credentials", "New credential", "credential");
  await aCallerSecret(page, "Service keys", "New service key", "service key");
  await anEnrollmentToken(page);
  await anAgent(page, "acme");
  await page.goto("/accounts/clicks/services/web");
  await confirm(page, "Delete this service…", "Delete service", "web");
  await said(page, "Deleted");
  await page.goto("/accounts/clicks/settings");
  await confirm(page, "Delete this account…", "Delete account", "clicks");
  await said(page, "Deleted");
}

async function searchesAndThemesAreChosen(page) {
  for (const [address, button] of [["/requests", "Search"], ["/usage", "Show"], ["/traffic", "Show"], ["/audit-log", "Show"]]) {
    await page.goto(address);
    await press(page, button);
    await page.waitForURL(`**${address}?*`);
  }
  for (const theme of ["light", "dark", "system"]) {
    await press(page, theme);
    await page.locator(`html[data-theme=${theme}]`).waitFor();
  }
}

module.exports = { eachRecordIsCreatedChangedAndDeleted, searchesAndThemesAreChosen };
