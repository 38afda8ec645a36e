// The buttons of all pages: which were shown, and which were pressed.
"use strict";

/** Names of buttons that were shown, each with a page. */
const shown = new Map();
const pressed = new Set();

/** Runs in each page, before its scripts. */
function observe() {
  const WORDS = new Set(["", "accounts", "services", "domains", "credentials", "service-keys", "agents", "new-agent",
    "enrollment-tokens", "settings", "delete", "rotate", "enable", "disable", "approve", "revoke", "check", "certificate",
    "renew", "requests", "replay", "theme", "sign-in", "sign-out", "usage", "traffic", "audit-log"]);
  // Text and address of the form, with * in place of ids.
  const nameOf = (button) => {
    if (!button.form) return button.getAttribute("aria-label") ?? button.textContent.trim();
    // Not the property: a button can have its name.
    const parts = button.form.getAttribute("action").split("/").map((part) => (WORDS.has(part) ? part : "*"));
    return `${button.textContent.trim()} ${parts.join("/")}`;
  };
  document.addEventListener("DOMContentLoaded", () => {
    for (const button of document.querySelectorAll("button, summary")) window.noteButton("shown", nameOf(button));
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button, summary");
    if (button) window.noteButton("pressed", nameOf(button));
  }, true);
}

/** Notes the buttons of all pages of a context. */
async function watch(context) {
  await context.exposeBinding("noteButton", ({ frame }, how, name) => {
    if (how === "pressed") pressed.add(name);
    else if (!shown.has(name)) shown.set(name, frame.url());
  });
  await context.addInitScript(observe);
}

/** Buttons that were shown and not pressed, with the page that has shown them. */
function neverPressed() {
  return [...shown].filter(([name]) => !pressed.has(name)).map(([name, page]) => `${name} on ${page}`);
}

module.exports = { watch, neverPressed };
