//! The tunnel's handshake and its control messages.

use ::http::header;
use bytes::Bytes;
use gw_shared::http::head;
use gw_shared::identity::program;
use gw_shared::tunnel::control::{
    ControlMessage, InvalidMessage, ToAgent, ToGateway, decode, encode,
};
use gw_shared::tunnel::handshake::{self, Purpose};
use gw_shared::version::{AgentVersions, Version};

/// A part of the handshake: a head, or a value of `Authorization` or `WWW-Authenticate`.
pub fn handshake(data: &[u8]) {
    let received = Bytes::copy_from_slice(data);
    if let Ok(request) = head::parse_request(&received, handshake::HEAD_LIMITS) {
        if let Ok(checked) = handshake::check(&request, AgentVersions::Same) {
            assert_eq!(
                (request.method.as_str(), checked.version.line),
                ("GET", Version::own().line)
            );
            match checked.purpose {
                Purpose::Tunnel => {
                    // Names of protocols have no case (RFC 9110 §7.8).
                    let protocol = request.headers[header::UPGRADE].as_bytes();
                    assert!(protocol.eq_ignore_ascii_case(handshake::PROTOCOL.as_bytes()));
                }
                Purpose::Program(target) => {
                    assert_eq!(request.target.path(), format!("{}{target}", program::PATH));
                }
            }
        }
        request
            .headers
            .values()
            .filter_map(|value| value.to_str().ok())
            .for_each(proof_and_challenge);
    }
    if let Ok(field) = std::str::from_utf8(data) {
        proof_and_challenge(field);
    }
}

fn proof_and_challenge(field: &str) {
    if let Some(challenge) = handshake::parse_challenge(field) {
        assert_eq!(
            handshake::parse_challenge(&handshake::challenge_field(challenge)),
            Some(challenge)
        );
    }
    let Some(proof) = handshake::Proof::parse(field) else {
        return;
    };
    assert_eq!(
        handshake::Proof::parse(&proof.field()).as_ref(),
        Some(&proof)
    );
    let request = Bytes::from(handshake::request(
        "acme--api.eu1.example.com",
        Some(&proof),
    ));
    // Without a limit on the head: the received proof may have had all of it.
    let request = head::parse_request(
        &request,
        head::HeadLimits {
            head: usize::MAX,
            ..handshake::HEAD_LIMITS
        },
    );
    let request = request.expect("the own request is valid");
    assert!(handshake::check(&request, AgentVersions::Same).is_ok());
    assert_eq!(
        request.headers[header::AUTHORIZATION],
        proof.field().as_str()
    );
}

/// A control message as read by either end.
pub fn control_message(data: &[u8]) {
    assert_encodes_back::<ToAgent>(data);
    assert_encodes_back::<ToGateway>(data);
}

fn assert_encodes_back<M: ControlMessage + PartialEq + std::fmt::Debug>(data: &[u8]) {
    let Ok(message) = decode::<M>(data) else {
        return;
    };
    match encode(&message) {
        Ok(encoded) => assert_eq!(
            decode::<M>(&encoded).expect("a sent message can be read"),
            message
        ),
        // Escapes may make a message longer than it was received.
        Err(InvalidMessage::TooLong(_)) => {}
        Err(InvalidMessage::Json(error)) => panic!("a received message cannot be sent: {error}"),
    }
}
