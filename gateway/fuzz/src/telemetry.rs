//! The request log and trace context.

use gw_shared::id::RequestId;
use gw_shared::telemetry::trace::TraceContext;
use gw_telemetry::request_log;

/// A block of the request log. A damaged block is refused or shows valid requests.
pub fn log_block(data: &[u8]) {
    for view in request_log::show_block(data).unwrap_or_default() {
        assert!(
            view.id.parse::<RequestId>().is_ok()
                && view.time.len() >= "2026-11-21T04:15:32.123Z".len(),
            "{view:?}"
        );
    }
}

/// A value of `traceparent`.
pub fn trace_context(data: &[u8]) {
    let Some(context) = TraceContext::parse(data) else {
        return;
    };
    let written = context.to_value();
    assert_eq!(TraceContext::parse(written.as_bytes()), Some(context));
    assert_eq!(written.as_bytes()[2..53], data[2..53]);
    let child = context.child(7);
    assert_eq!(
        (child.trace_id, child.sampled),
        (context.trace_id, context.sampled)
    );
}
