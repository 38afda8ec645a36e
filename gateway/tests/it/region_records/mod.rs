//! Records of a region: in PostgreSQL, and what nodes know of them.

// Once, slow:
mod acknowledgment;
mod clocks;
mod forgery;
mod pending;
mod records;
mod rekey;
mod replacements;
mod store;
mod unfinished_bodies;
