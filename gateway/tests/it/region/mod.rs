//! A region of several nodes.

// Once:
mod control;

// Once, slow:
mod commands;
mod console;
mod logs;
mod members;
mod moves;
mod refusals;
mod session_tickets;

// On each driver:
mod apex;
mod strangers;

// On each driver, slow:
mod requests;
mod tunnels;
