//! The administration API, commands, console and metrics, and what they refuse.

// Once:
mod access_tokens;
mod admin;
mod admin_abuse;
mod admin_tls;
mod cli_commands;
pub(crate) mod console;
mod documents;
mod error_messages;
mod hostile_text;
mod input_validation;
mod metrics;
mod sealed_secrets;
mod secrets;
mod traces;
