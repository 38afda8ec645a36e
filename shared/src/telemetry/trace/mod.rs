//! Distributed tracing: trace contexts of requests (W3C Trace Context), and export of spans to a collector (OTLP).
//!
//! With a collector, each thread that serves requests has a [`Tracer`], which collects finished spans and passes them
//! in batches to the exporting thread. This never waits: spans that find no room in the queue are dropped and counted.

mod collector;
pub mod context;
mod export;
mod settings;
mod span;
mod tracer;

pub use context::TraceContext;
pub use export::{Exporter, Identity, Queue, SpanCounts, StartError};
pub use opentelemetry::KeyValue;
pub use opentelemetry::trace::SpanKind;
pub use settings::{Collector, Endpoint, Settings};
pub use span::{Finished, Span, http_method, masked_path, path, server};
pub use tracer::{SpanContext, Tracer};
