//! The tunnel's handshake and its control messages.

use ::http::header;
use bytes::Bytes;
use gw_shared::http::fields::X_GW_VERSION;
use gw_shared::http::head;
use gw_shared::tunnel::control::{InvalidMessage, Message, ToAgent, ToGateway, decode, encode};
use gw_shared::tunnel::handshake;
use gw_shared::version::VERSION;

/// A part of the handshake: a head, or a value of `Authorization` or `WWW-Authenticate`.
pub fn handshake(data: &[u8]) {
    let received = Bytes::copy_from_slice(data);
    if let Ok(request) = head::parse_request(&received, handshake::HEAD_LIMITS) {
        if handshake::check(&request).is_ok() {
            assert_eq!((request.method.as_str(), request.target.as_str()), ("GET", handshake::PATH));
            assert_eq!(request.headers[header::UPGRADE], handshake::PROTOCOL);
            assert_eq!(request.headers[X_GW_VERSION], VERSION);
        }
        request.headers.values().filter_map(|value| value.to_str().ok()).for_each(proof_and_challenge);
    }
    if let Ok(field) = std::str::from_utf8(data) {
        proof_and_challenge(field);
    }
}

fn proof_and_challenge(field: &str) {
    if let Some(challenge) = handshake::parse_challenge(field) {
        assert_eq!(handshake::parse_challenge(&handshake::challenge_field(challenge)), Some(challenge));
    }
    let Some(proof) = handshake::Proof::parse(field) else { return };
    assert_eq!(handshake::Proof::parse(&proof.field()).as_ref(), Some(&proof));
    let request = Bytes::from(handshake::request("acme--api.eu1.example.com", Some(&proof)));
    // Without a limit on the head: the received proof may have had all of it.
    let request = head::parse_request(&request, head::HeadLimits { head: usize::MAX, ..handshake::HEAD_LIMITS });
    let request = request.expect("the own request is valid");
    assert_eq!(handshake::check(&request), Ok(()));
    assert_eq!(request.headers[header::AUTHORIZATION], proof.field().as_str());
}

/// A control message as read by either end.
pub fn control_message(data: &[u8]) {
    assert_encodes_back::<ToAgent>(data);
    assert_encodes_back::<ToGateway>(data);
}

fn assert_encodes_back<M: Message + PartialEq + std::fmt::Debug>(data: &[u8]) {
    let Ok(message) = decode::<M>(data) else { return };
    match encode(&message) {
        Ok(encoded) => assert_eq!(decode::<M>(&encoded).expect("a sent message can be read"), message),
        // Escapes may make a message longer than it was received.
        Err(InvalidMessage::TooLong(_)) => {}
        Err(InvalidMessage::Json(error)) => panic!("a received message cannot be sent: {error}"),
    }
}
