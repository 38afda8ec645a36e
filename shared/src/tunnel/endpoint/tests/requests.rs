//! Requests and responses that both ends complete.

use std::task::{Context, Poll};

use bytes::Bytes;

use super::util::*;
use crate::tunnel::endpoint::{Endpoint, OpenError, OutgoingFull};
use crate::tunnel::frame::{Kind, REQUEST_HEAD, RESPONSE_HEAD};

#[test]
fn the_agent_tells_how_many_streams_it_serves() {
    let mut gateway = Endpoint::gateway();
    assert_eq!(refused(&mut gateway), OpenError::StreamLimit);
    let (wakes, waker) = Wakes::new();
    let cx = &mut Context::from_waker(&waker);
    assert!(gateway.poll_hello(cx).is_pending());
    receive(
        &mut gateway,
        frame(Kind::Hello, false, 0, &7u32.to_be_bytes()),
    );
    assert_eq!(wakes.take(), 1);
    assert_eq!(gateway.streams_max(), 7);
    assert_eq!(Pair::new(1 << 20).gateway.streams_max(), 32 * 1024);
}

fn refused(gateway: &mut Endpoint) -> OpenError {
    gateway.open(LEAST, true, |_| {}).unwrap_err()
}

#[test]
fn a_request_and_its_response_without_bodies() {
    let mut pair = Pair::new(4);
    let (at_gateway, at_agent) = pair.open(true);
    assert_eq!(take(&mut pair.agent, at_agent).end, Some(Ok(())));
    respond(&mut pair.agent, at_agent, true);
    pair.run();
    let response = read(&mut pair.gateway, at_gateway);
    let head = super::util::response(b"response");
    assert_eq!(response.heads, [(Kind::Response, head)]);
    assert_eq!(response.whole(), b"");
    assert!(pair.gateway.is_received(at_gateway) && pair.agent.is_received(at_agent));
    pair.close(at_gateway, at_agent);
    pair.transmit();
    assert!(pair.to_agent.is_empty() && pair.to_gateway.is_empty());
}

#[test]
fn bodies_in_both_directions_in_pieces_of_any_size() {
    let body: Vec<u8> = (0..300_000u32).flat_map(|n| n.to_le_bytes()).collect();
    for step in [1, 7, 8, 9, 1000, 16 * 1024, usize::MAX] {
        let body = &body[..if step < 10 { 5_000 } else { body.len() }];
        let mut pair = Pair::new(4);
        let (at_gateway, at_agent) = pair.open_with_response(false);
        let mut up = Vec::new();
        let mut down = Vec::new();
        let mut sent_up = 0;
        let mut sent_down = 0;
        while up.len() < body.len() || down.len() < body.len() {
            sent_up += send(&mut pair.gateway, at_gateway, &body[sent_up..]);
            sent_down += send(&mut pair.agent, at_agent, &body[sent_down..]);
            pair.transmit();
            for piece in std::mem::take(&mut pair.to_agent).chunks(step) {
                pair.agent.receive(piece).unwrap();
                up.extend(read(&mut pair.agent, at_agent).data);
            }
            for piece in std::mem::take(&mut pair.to_gateway).chunks(step) {
                pair.gateway.receive(piece).unwrap();
                down.extend(read(&mut pair.gateway, at_gateway).data);
            }
        }
        assert!(up == body && down == body, "step {step}");
    }
}

#[test]
fn each_direction_ends_on_its_own() {
    for gateway_first in [true, false] {
        let mut pair = Pair::new(4);
        let (at_gateway, at_agent) = pair.open_with_response(false);
        for by_gateway in [gateway_first, !gateway_first] {
            let gateway = (&mut pair.gateway, at_gateway);
            let agent = (&mut pair.agent, at_agent);
            let ((sender, key), data) = match by_gateway {
                true => (gateway, &b"up"[..]),
                false => (agent, &b"down"[..]),
            };
            send(sender, key, data);
            finish(sender, key);
            pair.run();
            let parts = match by_gateway {
                true => read(&mut pair.agent, at_agent),
                false => read(&mut pair.gateway, at_gateway),
            };
            assert_eq!(parts.whole(), data);
        }
        pair.agent.report_upload(at_agent, Some(2));
        pair.run();
        assert_eq!(pair.open_streams(), (0, 0));
    }
}

#[test]
fn an_upgraded_stream_carries_bytes_both_ways_after_one_direction_has_ended() {
    let mut pair = Pair::new(4);
    let (at_gateway, at_agent) = pair.open_with_response(false);
    finish(&mut pair.gateway, at_gateway);
    pair.run();
    assert_eq!(read(&mut pair.agent, at_agent).end, Some(Ok(())));
    for round in 0..10u8 {
        send(&mut pair.agent, at_agent, &[round; 50_000]);
        pair.run();
        assert_eq!(read(&mut pair.gateway, at_gateway).data, [round; 50_000]);
        pair.run();
    }
    finish(&mut pair.agent, at_agent);
    pair.run();
    assert_eq!(pair.end(at_gateway), Some(Ok(())));
}

#[test]
fn interim_responses_and_trailers_keep_their_place() {
    let mut pair = Pair::new(4);
    let (at_gateway, at_agent) = pair.open(false);
    send(&mut pair.gateway, at_gateway, b"upload");
    let trailers = Bytes::from_static(b"a: 1\r\n\r\n");
    pair.gateway.send_trailers(at_gateway, trailers).unwrap();
    for _ in 0..2 {
        send_head(&mut pair.agent, at_agent, Kind::Interim, false, b"103");
    }
    respond(&mut pair.agent, at_agent, false);
    send(&mut pair.agent, at_agent, b"body");
    let trailers = Bytes::from_static(b"b: 2\r\n\r\n");
    pair.agent.send_trailers(at_agent, trailers).unwrap();
    pair.run();
    let request = read(&mut pair.agent, at_agent);
    assert_eq!(request.trailers.as_deref(), Some(&b"a: 1\r\n\r\n"[..]));
    assert_eq!(request.whole(), b"upload");
    let response = read(&mut pair.gateway, at_gateway);
    let kinds: Vec<Kind> = response.heads.iter().map(|(kind, _)| *kind).collect();
    assert_eq!(kinds, [Kind::Interim, Kind::Interim, Kind::Response]);
    assert_eq!(response.trailers.as_deref(), Some(&b"b: 2\r\n\r\n"[..]));
    assert_eq!(response.whole(), b"body");
    pair.close(at_gateway, at_agent);
}

#[test]
fn the_gateway_opens_as_many_streams_as_the_agent_serves() {
    let mut pair = Pair::new(3);
    let streams: Vec<_> = (0..3).map(|_| pair.open(true)).collect();
    assert_eq!(refused(&mut pair.gateway), OpenError::StreamLimit);
    respond(&mut pair.agent, streams[1].1, true);
    pair.run();
    // Open streams count, not handles.
    assert!(pair.gateway.open(LEAST, true, |_| {}).is_ok());
    assert_eq!(refused(&mut pair.gateway), OpenError::StreamLimit);
}

#[test]
fn no_stream_opens_while_too_many_heads_wait() {
    let mut pair = Pair::new(1000);
    let mut opened = 0;
    let large = |head: &mut Vec<u8>| head.extend_from_slice(&[b'x'; 60_000]);
    let refused = loop {
        match pair.gateway.open(LEAST, true, large) {
            Ok(_) => opened += 1,
            Err(error) => break error,
        }
    };
    assert_eq!((refused, opened), (OpenError::Congested, 9));
    pair.run();
    assert!(pair.gateway.open(LEAST, true, |_| {}).is_ok());
}

#[test]
fn request_heads_that_the_agent_would_not_accept_are_not_sent() {
    let mut pair = Pair::new(4);
    let head_of = |length| move |out: &mut Vec<u8>| out.resize(out.len() + length, b'x');
    let refused = pair
        .gateway
        .open(LEAST, true, head_of(REQUEST_HEAD.head + 1));
    assert_eq!(refused.unwrap_err(), OpenError::HeadTooLarge);
    let largest = pair.gateway.open(LEAST, true, head_of(REQUEST_HEAD.head));
    largest.unwrap();
    pair.run();
    let accepted = accept(&mut pair.agent).unwrap();
    let (_, head) = read_head(&mut pair.agent, accepted);
    assert_eq!(head.len(), REQUEST_HEAD.head);
}

#[test]
fn response_heads_that_the_gateway_would_not_accept_are_not_sent() {
    let mut pair = Pair::new(4);
    let (at_gateway, at_agent) = pair.open(true);
    let too_large = |out: &mut Vec<u8>| out.resize(out.len() + 70_000, b'x');
    let refused = pair
        .agent
        .send_head(at_agent, Kind::Interim, false, too_large);
    assert!(refused.is_err());
    pair.run();
    assert_eq!(pair.end(at_gateway), Some(Err(reset(""))));
}

#[test]
fn trailers_that_the_agent_would_not_accept_are_not_sent() {
    let mut pair = Pair::new(4);
    let (at_gateway, at_agent) = pair.open(false);
    send(&mut pair.gateway, at_gateway, b"upload");
    let trailers = Bytes::from(vec![b'x'; RESPONSE_HEAD.head + 1]);
    assert!(pair.gateway.send_trailers(at_gateway, trailers).is_err());
    pair.run();
    let request = read(&mut pair.agent, at_agent);
    assert_eq!(request.data, b"upload");
    assert_eq!(request.end, Some(Err(reset(""))));
}

#[test]
fn control_messages_arrive_in_order_and_their_queues_are_bounded() {
    let mut pair = Pair::new(4);
    let message = |number: u8| Bytes::copy_from_slice(&[number; 100]);
    for number in 0..10 {
        pair.gateway.send_message(message(number), 1000).unwrap();
    }
    let further = Bytes::from_static(b"x");
    let refused = pair.gateway.send_message(further.clone(), 1000);
    assert_eq!(refused, Err(OutgoingFull));
    pair.run();
    let mut next = || pair.agent.poll_message(&mut context());
    for number in 0..10 {
        assert_eq!(next(), Poll::Ready(Some(message(number))));
    }
    assert!(next().is_pending());
    assert!(pair.gateway.send_message(further, 1000).is_ok());
    pair.agent.lose();
    let end = pair.agent.poll_message(&mut context());
    assert_eq!(end, Poll::Ready(None));
}

#[test]
fn pings_are_answered_with_the_last_payload() {
    let mut pair = Pair::new(4);
    for payload in [1, 2, u64::MAX] {
        pair.gateway.ping(payload);
        pair.run();
        assert_eq!(pair.gateway.take_pong(), Some(payload));
    }
    assert_eq!(pair.gateway.take_pong(), None);
    // Three pings in one read get one answer.
    let pings: Vec<u8> = (0..3u64)
        .flat_map(|n| frame(Kind::Ping, false, 0, &n.to_be_bytes()))
        .collect();
    pair.agent.receive(&pings).unwrap();
    pair.transmit();
    let pong = (Kind::Pong, false, 0, 2u64.to_be_bytes().to_vec());
    assert_eq!(frames(&pair.to_gateway), [pong]);
    // In addition to the three pings before.
    assert_eq!(pair.agent.take_overhead(), 6);
    assert_eq!(pair.agent.take_overhead(), 0);
}

#[test]
fn the_window_of_the_gateway_reaches_the_agent() {
    let mut pair = Pair::new(4);
    assert_eq!(pair.agent.announced_window(), None);
    pair.gateway.send_window(123_456);
    pair.run();
    assert_eq!(pair.agent.announced_window(), Some(123_456));
}
