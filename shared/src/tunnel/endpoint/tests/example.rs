//! The example in `docs/tunnel.md`, byte by byte.

use bytes::Bytes;
use http::header::{ACCEPT, CONTENT_TYPE};
use http::uri::{Authority, PathAndQuery};
use http::{HeaderValue, Method, StatusCode};

use super::util::*;
use crate::http::Fields;
use crate::http::Framing;
use crate::tunnel::endpoint::Endpoint;
use crate::tunnel::frame::Kind;
use crate::tunnel::head::{self, OutboundRequest};
use crate::tunnel::timing::AgentTiming;

/// Bytes of the blocks with hexadecimal digits, in the order of the document. A comment follows
/// each line's bytes.
fn documented() -> Vec<Vec<u8>> {
    let text =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/tunnel.md")).unwrap();
    let (_, example) = text.split_once("## Example\n").unwrap();
    let blocks = example
        .split("```text\n")
        .skip(1)
        .map(|rest| rest.split("```").next().unwrap());
    let line = |line: &str| -> Vec<u8> {
        let digits = line.split(';').next().unwrap().split_whitespace();
        digits
            .map(|byte| u8::from_str_radix(byte, 16).unwrap())
            .collect()
    };
    blocks
        .map(|block| block.lines().flat_map(line).collect())
        .collect()
}

fn request_of_example() -> OutboundRequest {
    OutboundRequest {
        method: Method::GET,
        target: PathAndQuery::from_static("/a?b=1"),
        authority: Authority::from_static("acme--api.eu1.example.com"),
        headers: Fields::from_iter([(ACCEPT, HeaderValue::from_static("*/*"))]),
        framing: Framing::None,
        upgrade: None,
        caller_connection: None,
    }
}

#[test]
fn the_documented_example_is_what_both_ends_send() {
    let [hello, request, response] = documented().try_into().unwrap();
    let mut gateway = Endpoint::gateway();
    let mut agent = Endpoint::agent(128);
    let mut sent = Vec::new();
    transmit_all(&mut agent, &mut sent);
    assert_eq!(sent, hello);
    gateway.receive(&hello).unwrap();

    let outbound = request_of_example();
    let write = |out: &mut Vec<u8>| outbound.write(out, None);
    let opened = gateway.open(512 * 1024, !outbound.has_body(), write);
    let key = opened.unwrap();
    sent.clear();
    transmit_all(&mut gateway, &mut sent);
    assert_eq!(sent, request);
    agent.receive(&request).unwrap();
    let accepted = accept(&mut agent).unwrap();
    let (kind, head) = read_head(&mut agent, accepted);
    assert_eq!(kind, Kind::Request);
    let received = head::parse_request(&head.into(), true).unwrap();
    assert_eq!(received.method, Method::GET);

    let timing = AgentTiming {
        agent_us: 120,
        backend_first_byte_us: Some(4000),
    };
    let headers = Fields::from_iter([(CONTENT_TYPE, HeaderValue::from_static("text/plain"))]);
    let framing = Framing::Length(5);
    let mut payload = Vec::new();
    head::write_response(
        &mut payload,
        timing,
        StatusCode::OK,
        &headers,
        framing,
        None,
    );
    send_head(&mut agent, accepted, Kind::Response, false, &payload);
    let body = Bytes::from_static(b"hello");
    agent.send_data(accepted, body, true).unwrap();
    sent.clear();
    transmit_all(&mut agent, &mut sent);
    assert_eq!(sent, response);
    gateway.receive(&response).unwrap();
    let (kind, head) = read_head(&mut gateway, key);
    assert_eq!(kind, Kind::Response);
    let received = head::parse_response(head.into(), &Method::GET).unwrap();
    assert_eq!(received.timing, timing);
    assert_eq!(read(&mut gateway, key).whole(), b"hello");
    drop_both(&mut gateway, key);
    drop_both(&mut agent, accepted);
    assert_eq!((gateway.open_streams(), agent.open_streams()), (0, 0));
}
