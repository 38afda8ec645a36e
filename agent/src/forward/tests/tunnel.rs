//! A tunnel in memory, and its gateway.

use std::io::IoSlice;

use gw_shared::http::{Fields, ResponseHead, UpgradeProtocol};
use gw_shared::tunnel::connection::Tunnel;
use gw_shared::tunnel::endpoint::{Endpoint, Outgoing};
use gw_shared::tunnel::head::{AgentResponse, OutboundRequest};
use gw_shared::tunnel::window;
use http::HeaderName;
use http::uri::{Authority, PathAndQuery};

use super::*;
use crate::forward::slots::Slots;

/// Runs a test with a tunnel to backends at `urls`.
pub(super) fn with_tunnel<F: Future<Output = ()>>(
    urls: &[String],
    test: impl FnOnce(Gateway) -> F,
) {
    let backends = Backends::from_urls("test", urls, &mut Vec::new()).unwrap();
    with_tunnel_to(&backends, test);
}

pub(super) fn with_tunnel_to<F: Future<Output = ()>>(
    backends: &Backends,
    test: impl FnOnce(Gateway) -> F,
) {
    let run = async {
        let gateway = Tunnel::new(Endpoint::gateway());
        let agent = Tunnel::new(Endpoint::agent(128));
        runtime::spawn(carry(gateway.clone(), agent.clone()));
        let pool = Rc::new(Pool::new("test", backends, 128));
        runtime::spawn(serve(agent, Rc::clone(&pool)));
        gateway.hello().await.unwrap();
        let tunnel = gateway;
        test(Gateway { tunnel, pool }).await;
    };
    let result = block_on(async { runtime::timeout(TIME_LIMIT, run).await });
    result.expect("the test exceeded its time limit");
}

/// Forwards the requests of a tunnel.
async fn serve(agent: Tunnel, pool: Rc<Pool>) {
    let slots = Slots::new(128);
    while let Some(halves) = std::future::poll_fn(|cx| agent.poll_accept(cx)).await {
        let Some(mut request) = TunnelRequest::read(halves) else {
            continue;
        };
        let pool = Rc::clone(&pool);
        let slot = slots.take().unwrap();
        let scope = RequestScope::begin(None, &Rc::default(), 0, &mut request.head);
        runtime::spawn(async move { forward(&pool, slot, scope, request).await });
    }
}

/// Carries frames between two ends.
async fn carry(one: Tunnel, other: Tunnel) {
    std::future::poll_fn(|cx| {
        while pass(&one, &other) | pass(&other, &one) {}
        for end in [&one, &other] {
            end.with(|endpoint| endpoint.register_driver(cx));
        }
        Poll::<()>::Pending
    })
    .await;
}

/// Passes waiting frames on. Returns whether there were any.
fn pass(from: &Tunnel, to: &Tunnel) -> bool {
    let mut frames = Outgoing::default();
    from.with(|endpoint| endpoint.transmit(&mut frames, 64 * 1024));
    let has_any = !frames.is_empty();
    while !frames.is_empty() {
        let mut slices = [IoSlice::new(&[])];
        frames.slices(&mut slices);
        to.with(|endpoint| endpoint.receive(&slices[0])).unwrap();
        let passed = slices[0].len();
        frames.advance(passed);
    }
    has_any
}

/// The gateway's end of a tunnel.
pub(super) struct Gateway {
    tunnel: Tunnel,
    /// The agent's backends.
    pub(super) pool: Rc<Pool>,
}

impl Gateway {
    pub(super) fn send(&self, request: OutboundRequest) -> Exchange {
        let write = |out: &mut Vec<u8>| request.write(out, request.caller_connection);
        let (up, down) = self.open(!request.has_body(), write);
        Exchange {
            method: request.method,
            up,
            down,
        }
    }

    /// Opens a stream with this head.
    pub(super) fn send_head(&self, head: &str, end: bool) -> Exchange {
        let (up, down) = self.open(end, |out| out.extend_from_slice(head.as_bytes()));
        Exchange {
            method: Method::GET,
            up,
            down,
        }
    }

    fn open(&self, end: bool, write: impl FnOnce(&mut Vec<u8>)) -> (StreamSender, StreamReceiver) {
        let opened = self.tunnel.open(window::FIRST as usize, end, write);
        opened.unwrap()
    }
}

/// A request that was sent, and its response.
pub(super) struct Exchange {
    method: Method,
    pub(super) up: StreamSender,
    pub(super) down: StreamReceiver,
}

impl Exchange {
    /// Sends a part of the request's body.
    pub(super) async fn upload(&self, body: &'static str, end: bool) {
        self.up
            .send(Bytes::from_static(body.as_bytes()), end)
            .await
            .unwrap();
    }

    pub(super) async fn interim(&self) -> ResponseHead {
        match self.down.receive().await.unwrap() {
            ReceivedPart::Head(Kind::Interim, payload) => head::parse_interim(&payload).unwrap(),
            other => panic!("{other:?}"),
        }
    }

    /// The final response.
    pub(super) async fn response(&self) -> AgentResponse {
        match self.down.receive().await.unwrap() {
            ReceivedPart::Head(Kind::Response, payload) => {
                head::parse_response(payload, &self.method).unwrap()
            }
            other => panic!("{other:?}"),
        }
    }

    /// The agent's refusal, which interim responses may precede.
    pub(super) async fn refusal(&self) -> head::Refusal {
        loop {
            match self.down.receive().await.unwrap() {
                ReceivedPart::Head(Kind::Interim, _) => {}
                ReceivedPart::Head(Kind::Refused, payload) => {
                    return head::parse_refusal(payload).unwrap();
                }
                other => panic!("{other:?}"),
            }
        }
    }

    /// The code and message of the agent's refusal.
    pub(super) async fn error(&self) -> (String, String) {
        let head::Refusal { code, message, .. } = self.refusal().await;
        let text = |bytes: Bytes| String::from_utf8(bytes.into()).unwrap();
        (text(code), text(message))
    }

    /// Asserts that the agent refuses the request as this error, with a message that has `part`.
    pub(super) async fn assert_error(&self, code: &str, part: &str) {
        let (found, message) = self.error().await;
        assert!(
            found == code && message.contains(part),
            "{found}: {message}"
        );
    }

    /// Asserts that the response breaks off as this error.
    pub(super) async fn assert_reset(&self, code: &'static str) {
        assert_eq!(self.body().await, Err(Closed::Reset(code.into())));
    }

    /// The rest of the response's body.
    pub(super) async fn body(&self) -> Result<String, Closed> {
        let mut whole = Vec::new();
        loop {
            match self.down.receive().await? {
                ReceivedPart::Data(data) => {
                    self.down.release(data.len());
                    whole.extend_from_slice(&data);
                }
                ReceivedPart::Head(Kind::Trailers, _) => {}
                ReceivedPart::End => return Ok(String::from_utf8(whole).unwrap()),
                ReceivedPart::Head(kind, _) => panic!("{kind:?}"),
            }
        }
    }

    /// The next `length` bytes of the response's body.
    pub(super) async fn bytes(&self, length: usize) -> Vec<u8> {
        let mut read = Vec::new();
        while read.len() < length {
            let ReceivedPart::Data(data) = self.down.receive().await.unwrap() else {
                panic!("ended after {read:?}");
            };
            self.down.release(data.len());
            read.extend_from_slice(&data);
        }
        read
    }
}

fn request(method: Method, path: &str) -> OutboundRequest {
    OutboundRequest {
        method,
        target: PathAndQuery::try_from(path).unwrap(),
        authority: Authority::from_static(HOST),
        headers: Fields::new(),
        framing: Framing::None,
        upgrade: None,
        caller_connection: None,
    }
}

pub(super) fn get(path: &str) -> OutboundRequest {
    request(Method::GET, path)
}

pub(super) fn post(framing: Framing) -> OutboundRequest {
    OutboundRequest {
        framing,
        ..request(Method::POST, "/")
    }
}

/// A request to upgrade to `protocol`.
pub(super) fn upgrade(protocol: &'static str) -> OutboundRequest {
    OutboundRequest {
        upgrade: Some(UpgradeProtocol::from_static(protocol)),
        ..request(Method::GET, "/chat")
    }
}

/// `request` with one more field.
pub(super) fn with_field(
    mut request: OutboundRequest,
    name: &'static str,
    value: &'static str,
) -> OutboundRequest {
    let value = HeaderValue::from_static(value);
    request.headers.append(HeaderName::from_static(name), value);
    request
}
