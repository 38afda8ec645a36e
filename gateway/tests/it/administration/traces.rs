//! Exported spans of requests, from the caller to the backend.

use std::fs;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};

use gw_shared::http::Fields;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use rcgen::{CertificateParams, KeyPair};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use rustls_pki_types::PrivateKeyDer;

use crate::collector::{self, Collector, Received, TAKEN};
use crate::support::SOON;
use crate::support::peers::backend;
use crate::support::peers::caller::{HOST, connect_to};
use crate::support::processes::prepared;
use crate::support::processes::process::{gw_gateway, start_demo};
use crate::support::scene::Scene;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER: &str = "00f067aa0ba902b7";

/// A scene that exports spans to `collector`, in front of a backend that reports the fields it
/// receives.
fn traced(collector: &Collector, sample_ratio: f64) -> (Scene, Receiver<Fields>) {
    let (url, seen) = telling_backend();
    let plan = Scene::service().agent_to(url);
    (plan.traces(collector.url(), sample_ratio).start(), seen)
}

fn telling_backend() -> (String, Receiver<Fields>) {
    let (sender, seen) = mpsc::channel();
    let url = backend::start(move |mut peer| {
        while let Ok((head, _, _)) = peer.request() {
            sender.send(head.headers).unwrap();
            peer.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
        }
    });
    (url, seen)
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Trace, parent span and flags of the `traceparent` of a request.
fn traceparent(fields: &Fields) -> [&str; 3] {
    let value = fields["traceparent"].to_str().unwrap();
    let parts: Vec<&str> = value.split('-').collect();
    let ["00", trace, span, flags] = parts[..] else {
        panic!("{value}");
    };
    [trace, span, flags]
}

fn is_agents(received: &Received) -> bool {
    received.service() == "gw-agent"
}

#[test]
fn a_callers_trace_continues_at_gateway_agent_and_backend() {
    let mut collector = collector::start();
    let (scene, seen) = traced(&collector, 0.0);
    let mut caller = scene.connect();
    let fields = format!("traceparent: 00-{TRACE}-{CALLER}-01\r\ntracestate: vendor=1\r\n\r\n");
    caller.send(scene.request("GET /a?secret=1", &fields));
    let id = caller.response().header("x-gw-request-id").to_owned();
    let at_backend = seen.recv_timeout(SOON).unwrap();
    let gateways = collector.span(|received| received.service() == "gw-gateway");
    let agents = collector.span(is_agents);
    for received in [&gateways, &agents] {
        assert_eq!(hexadecimal(&received.span.trace_id), TRACE);
        assert_eq!(received.span.name, "GET");
        for (name, value) in [
            ("gw.request_id", id.as_str()),
            ("gw.service", "echo"),
            ("url.path", "/a"),
        ] {
            assert_eq!(received.attribute(name), value, "{name}");
        }
        assert!(!format!("{received:?}").contains("secret"));
    }
    assert_eq!(gateways.span.kind(), SpanKind::Server);
    assert_eq!(agents.span.kind(), SpanKind::Client);
    assert_eq!(hexadecimal(&gateways.span.parent_span_id), CALLER);
    assert_eq!(agents.span.parent_span_id, gateways.span.span_id);
    let span = hexadecimal(&agents.span.span_id);
    assert_eq!(traceparent(&at_backend), [TRACE, &span, "01"]);
    assert_eq!(at_backend["tracestate"], "vendor=1");
    let agent = &agents.resource["service.instance.id"];
    assert_eq!(gateways.attribute("gw.agent_id"), agent);
    let events = gateways.span.events.iter();
    let names: Vec<_> = events.map(|event| event.name.as_str()).collect();
    assert_eq!(names, ["gw.authenticated", "gw.opened", "gw.response_head"]);
    scene.stop();
}

#[test]
fn the_agents_span_is_the_parent_of_the_backend() {
    let mut collector = collector::start();
    let (scene, seen) = traced(&collector, 0.0);
    let mut caller = scene.connect();
    for connection in ["new", "kept"] {
        let field = format!("traceparent: 00-{TRACE}-{CALLER}-01\r\n\r\n");
        caller.send(scene.request("GET /a?secret=1", &field));
        let id = caller.response().header("x-gw-request-id").to_owned();
        let at_backend = seen.recv_timeout(SOON).unwrap();
        let agents = collector.span(is_agents);
        assert_eq!(hexadecimal(&agents.span.trace_id), TRACE);
        let span = hexadecimal(&agents.span.span_id);
        assert_eq!(traceparent(&at_backend), [TRACE, &span, "01"]);
        for (name, value) in [
            ("gw.request_id", id.as_str()),
            ("gw.backend.connection", connection),
            ("gw.account", "demo"),
            ("gw.service", "echo"),
            ("http.response.status_code", "200"),
            ("server.address", "127.0.0.1"),
            ("error.type", ""),
        ] {
            assert_eq!(agents.attribute(name), value, "{name}");
        }
        assert_eq!(agents.resource["gw.region"], "eu1");
    }
    scene.stop();
}

#[test]
fn failures_and_upgrades_have_spans() {
    let mut collector = collector::start();
    let (_closed, refusing) = backend::refusing();
    let scene = Scene::service()
        .agent_to(format!("http://{refusing}"))
        .traces(collector.url(), 1.0)
        .start();
    let mut caller = scene.connect();
    let upgrade = "Connection: upgrade\r\nUpgrade: foo\r\n\r\n";
    for (line, fields, method) in [("GET /", "\r\n", "GET"), ("PUT /ws", upgrade, "PUT")] {
        caller.send(scene.request(line, fields));
        assert_eq!(caller.response().code(), "GW_BACKEND_UNREACHABLE");
        let agents = collector.span(is_agents);
        assert_eq!(agents.attribute("error.type"), "GW_BACKEND_UNREACHABLE");
        assert_eq!(agents.attribute("http.request.method"), method);
        assert_eq!(agents.attribute("server.address"), "", "{method}");
    }
    scene.stop();
}

#[test]
fn an_unsampled_trace_keeps_its_id() {
    let collector = collector::start();
    let (scene, seen) = traced(&collector, 1.0);
    let value = format!("00-{TRACE}-{CALLER}-00");
    let mut caller = scene.connect();
    let fields = format!("traceparent: {value}\r\ntracestate: v=1\r\n\r\n");
    caller.send(scene.request("GET /", &fields));
    caller.response();
    let at_backend = seen.recv_timeout(SOON).unwrap();
    assert_eq!(at_backend["traceparent"], value);
    assert_eq!(at_backend["tracestate"], "v=1");
    // A stop flushes pending spans.
    scene.stop();
    for received in collector.rest() {
        assert_ne!(hexadecimal(&received.span.trace_id), TRACE);
    }
}

#[test]
fn without_a_collector_trace_fields_pass_unchanged() {
    let (url, seen) = telling_backend();
    let scene = Scene::service().agent_to(url).start();
    let mut caller = scene.connect();
    for fields in [
        &[
            (
                "traceparent",
                "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-ff",
            ),
            ("tracestate", "a=1,b=2"),
        ][..],
        &[
            ("tracestate", "a=1"),
            ("traceparent", "nonsense \u{e9}"),
            ("traceparent", "00-"),
            ("tracestate", "b=2"),
        ],
        &[],
    ] {
        let lines: String = fields
            .iter()
            .map(|(name, value)| format!("{name}: {value}\r\n"))
            .collect();
        caller.send(scene.request("GET /", &format!("{lines}\r\n")));
        caller.response();
        let at_backend = seen.recv_timeout(SOON).unwrap();
        for name in ["traceparent", "tracestate"] {
            let sent: Vec<_> = fields
                .iter()
                .filter(|field| field.0 == name)
                .map(|field| field.1.as_bytes())
                .collect();
            let got: Vec<_> = at_backend
                .get_all(name)
                .map(http::HeaderValue::as_bytes)
                .collect();
            assert_eq!(got, sent);
        }
    }
    scene.stop();
}

#[test]
fn an_unreachable_collector_does_not_affect_requests() {
    let (_closed, refusing) = backend::refusing();
    let scene = Scene::service()
        .agent()
        .traces(format!("http://{refusing}"), 1.0)
        .start();
    let mut caller = scene.connect();
    for _ in 0..300 {
        caller.send(scene.get("/status/204"));
        assert_eq!(caller.response().status, 204);
    }
    scene.stop();
}

#[test]
fn opentelemetry_variables_are_used_and_spans_are_flushed_on_exit() {
    let directory = tempfile::tempdir().unwrap();
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(vec!["127.0.0.1".to_owned()])
        .unwrap()
        .self_signed(&key)
        .unwrap();
    let authorities = directory.path().join("authorities.pem");
    fs::write(&authorities, certificate.pem()).unwrap();
    let private = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap();
    let config = config
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], private)
        .unwrap();
    let config = Arc::new(config);
    let accept =
        move |stream| StreamOwned::new(ServerConnection::new(Arc::clone(&config)).unwrap(), stream);
    let collector = collector::start_with(accept, |_| TAKEN.to_owned());

    let mut command = gw_gateway();
    command
        .arg("demo")
        .env("SSL_CERT_FILE", &authorities)
        .env(
            "OTEL_EXPORTER_OTLP_ENDPOINT",
            format!("https://{}/otlp/", collector.address),
        )
        .env("OTEL_EXPORTER_OTLP_HEADERS", "x-api-key=secret%20key")
        .env("OTEL_TRACES_SAMPLER_ARG", "1")
        .env("OTEL_SERVICE_NAME", "relay");
    let (mut running, description) = start_demo(&mut command);
    let text = |name: &str| description[name].as_str().unwrap();
    let (_, port) = text("base_url").rsplit_once(':').unwrap();
    let address = ([127, 0, 0, 1], port.parse::<u16>().unwrap()).into();
    let key = text("service_key");
    let about = prepared::about(address, key, text("ca_file").into());
    let mut caller = connect_to(&about, HOST, &[b"http/1.1"], None);
    caller.send(format!(
        "GET /status/204 HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\n\r\n"
    ));
    assert_eq!(caller.response().status, 204);
    running.signal("TERM");
    assert_eq!(running.exit_code(), Some(0));

    let export = collector.export();
    assert_eq!(export.head[0], "POST /otlp/v1/traces HTTP/1.1");
    assert!(
        export.head.contains(&"x-api-key: secret key".to_owned()),
        "{:?}",
        export.head
    );
    assert_eq!(export.spans[0].service(), "relay");
}
