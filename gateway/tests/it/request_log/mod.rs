//! The request log, the access log, and captured requests.

// Once:
mod access_log;
mod captures;
mod disk;
mod names;
mod records;
mod replay;
mod usage;
