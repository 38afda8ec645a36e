//! Distributed tracing: trace context of requests (W3C Trace Context) and export of spans to a
//! collector (OTLP).
//!
//! Without a collector nothing here runs. With one, each thread that serves requests has a
//! [`Tracer`], which collects finished spans and sends them in batches to one exporting thread.
//! Sending never waits: a batch for which the queue has no room is dropped and counted.

mod collector;
pub mod context;
mod export;
mod settings;
mod span;
mod tracer;

pub use context::TraceContext;
pub use export::{Exporter, ExporterError, ProgramIdentity, SpanCounts, SpanQueue};
pub use opentelemetry::KeyValue;
pub use opentelemetry::trace::SpanKind;
pub use settings::{Collector, CollectorSettings, CollectorUrl};
pub use span::{Finished, Span, http_method, masked_path, path, server};
pub use tracer::{SpanContext, Tracer};
