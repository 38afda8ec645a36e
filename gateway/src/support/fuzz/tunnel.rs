//! The tunnel's handshake and its control stream.

use ::http::header;
use bytes::Bytes;
use gw_shared::http::fields::X_GW_VERSION;
use gw_shared::http::head;
use gw_shared::tunnel::control::{Decoder, InvalidMessage, MESSAGE_MAX, ToAgent, ToGateway, encode};
use gw_shared::tunnel::handshake;
use gw_shared::version::VERSION;
use serde::{Deserialize, Serialize};

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

/// The control stream as read by either end, whole and in pieces of as many bytes as the first byte says.
pub fn control_stream(data: &[u8]) {
    let Some((step, stream)) = data.split_first() else { return };
    let step = usize::from(*step).max(1);
    assert_split_does_not_matter::<ToAgent>(stream, step);
    assert_split_does_not_matter::<ToGateway>(stream, step);
}

fn assert_split_does_not_matter<M>(stream: &[u8], step: usize)
where
    M: Serialize + for<'de> Deserialize<'de> + PartialEq + std::fmt::Debug,
{
    let whole = read_messages::<M>([stream]);
    if stream.split(|byte| *byte == b'\n').all(|line| line.len() < MESSAGE_MAX) {
        assert_eq!(read_messages::<M>(stream.chunks(step)), whole);
    }
    for message in whole.0 {
        let line = encode(&message).expect("a message can be sent");
        assert_eq!(read_messages::<M>([&line[..]]), (vec![message], false));
    }
}

/// Messages up to the first error, and whether there was an error.
fn read_messages<'a, M: for<'de> Deserialize<'de>>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (Vec<M>, bool) {
    let (mut decoder, mut messages) = (Decoder::default(), Vec::new());
    for piece in pieces {
        decoder.push(piece);
        loop {
            match decoder.next_message() {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => break,
                Err(InvalidMessage::TooLong(_) | InvalidMessage::Json(_)) => return (messages, true),
            }
        }
    }
    (messages, false)
}
