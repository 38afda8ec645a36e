//! Distributed tracing: where in a trace a request is (W3C Trace Context), and spans on their way to a collector (OTLP).
//!
//! A program without a collector touches nothing of this. With one, each thread that serves requests has a [`Tracer`],
//! which collects finished spans and hands them in batches to the one thread that exports them. Handing over never
//! waits: what the exporter does not get rid of is dropped and counted.

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
