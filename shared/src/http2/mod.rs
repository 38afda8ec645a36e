//! Bodies on streams of the h2 crate, for HTTP/2 callers and backends.

pub mod stream;
