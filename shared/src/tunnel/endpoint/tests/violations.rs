//! Every error of a peer, made by hand.

use super::util::*;
use crate::tunnel::control;
use crate::tunnel::endpoint::{Endpoint, Violation};
use crate::tunnel::frame::{InvalidFrameHeader, Kind, RESPONSE_HEAD};
use crate::tunnel::window;

const STREAM: u32 = 0x0001_0000;

#[test]
fn frames_of_the_other_end_are_refused() {
    let timing = [0; 9];
    for (kind, end, payload) in [
        (Kind::Hello, false, &timing[..4]),
        (Kind::Response, false, &timing[..8]),
        (Kind::Interim, false, &[]),
        (Kind::Refused, true, &timing[..]),
    ] {
        let (mut agent, _) = agent_with_a_stream(false);
        let stream = if kind == Kind::Hello { 0 } else { STREAM };
        assert_eq!(
            violation(&mut agent, &frame(kind, end, stream, payload)),
            Violation::Role(kind)
        );
    }
    for (kind, stream) in [(Kind::Request, STREAM), (Kind::Window, 0)] {
        let (mut gateway, _) = gateway_with_a_stream(false);
        assert_eq!(
            violation(&mut gateway, &frame(kind, false, stream, &[0; 4])),
            Violation::Role(kind)
        );
    }
}

#[test]
fn headers_are_checked_before_their_payload() {
    let (mut gateway, _) = gateway_with_a_stream(false);
    let unknown = violation(&mut gateway, &[0x7f, 0xff, 0xff, 0xff, 0, 0, 0, 0]);
    assert_eq!(unknown, Violation::Header(InvalidFrameHeader::Type(0x7f)));
    let (mut gateway, _) = gateway_with_a_stream(false);
    let long = violation(
        &mut gateway,
        &[Kind::Data as u8, 0xff, 0xff, 0xff, 0, 1, 0, 0],
    );
    assert_eq!(
        long,
        Violation::Header(InvalidFrameHeader::Length(Kind::Data, 0xff_ffff))
    );
}

#[test]
fn frames_of_streams_that_are_not_open_are_refused() {
    for stream in [0x0002_0000, 0x0001_0001, 0xffff_ffff] {
        for (kind, end, payload) in [
            (Kind::Data, false, &b"x"[..]),
            (Kind::Data, true, b""),
            (Kind::Response, false, &[0; 8]),
            (Kind::Trailers, true, b""),
        ] {
            let (mut gateway, _) = gateway_with_a_stream(false);
            let found = violation(&mut gateway, &frame(kind, end, stream, payload));
            assert_eq!(found, Violation::NotOpen(kind, stream));
        }
    }
    // RESET and CREDIT of a slot that was never open.
    for (kind, payload) in [(Kind::Reset, &b""[..]), (Kind::Credit, &[0; 4])] {
        for (mut endpoint, _) in [gateway_with_a_stream(false), agent_with_a_stream(false)] {
            let found = violation(&mut endpoint, &frame(kind, false, 0x0001_0003, payload));
            assert_eq!(found, Violation::NotOpen(kind, 0x0001_0003));
        }
    }
}

#[test]
fn reset_and_credit_of_closed_streams_count_as_overhead() {
    let (mut gateway, key) = gateway_with_a_stream(true);
    gateway
        .receive(&frame(Kind::Response, true, STREAM, &[0; 8]))
        .unwrap();
    drop_both(&mut gateway, key);
    gateway.take_overhead();
    let late = [
        frame(Kind::Reset, false, STREAM, b""),
        frame(Kind::Credit, false, STREAM, &[0, 1, 0, 0]),
    ]
    .concat();
    gateway.receive(&late).unwrap();
    assert_eq!(gateway.take_overhead(), 2);
    assert!(!transmit_all(&mut gateway, &mut Vec::new()), "no answer");
    let data = frame(Kind::Data, false, STREAM, b"x");
    assert_eq!(
        violation(&mut gateway, &data),
        Violation::NotOpen(Kind::Data, STREAM)
    );
}

#[test]
fn small_grants_count_as_overhead() {
    let (mut gateway, key) = gateway_with_a_stream(false);
    gateway
        .receive(&frame(Kind::Credit, false, STREAM, &1u32.to_be_bytes()))
        .unwrap();
    gateway
        .receive(&frame(Kind::Credit, false, STREAM, &0u32.to_be_bytes()))
        .unwrap();
    gateway
        .receive(&frame(
            Kind::Credit,
            false,
            STREAM,
            &(16 * 1024u32).to_be_bytes(),
        ))
        .unwrap();
    assert_eq!(gateway.take_overhead(), 2);
    assert_eq!(
        send(&mut gateway, key, &[0; 2 * LEAST]),
        LEAST + 1 + 16 * 1024
    );
}

#[test]
fn frames_behind_the_end_of_their_direction_are_refused() {
    for (kind, end, payload) in [
        (Kind::Data, false, &b"x"[..]),
        (Kind::Data, true, b""),
        (Kind::Trailers, true, b""),
        (Kind::Interim, false, b""),
        (Kind::Response, false, &[0; 8]),
    ] {
        let (mut gateway, _) = gateway_with_a_stream(false);
        gateway
            .receive(&frame(Kind::Response, true, STREAM, &[0; 8]))
            .unwrap();
        let found = violation(&mut gateway, &frame(kind, end, STREAM, payload));
        assert_eq!(found, Violation::Order(kind, STREAM));
    }
    let (mut agent, _) = agent_with_a_stream(true);
    let found = violation(&mut agent, &frame(Kind::Data, true, STREAM, b"x"));
    assert_eq!(found, Violation::Order(Kind::Data, STREAM));
}

#[test]
fn parts_of_a_response_have_an_order() {
    let response = || frame(Kind::Response, false, STREAM, &[0; 8]);
    let cases = [
        (vec![frame(Kind::Data, false, STREAM, b"x")], Kind::Data),
        (vec![frame(Kind::Data, true, STREAM, b"")], Kind::Data),
        (
            vec![frame(Kind::Trailers, true, STREAM, b"")],
            Kind::Trailers,
        ),
        (vec![response(), response()], Kind::Response),
        (
            vec![response(), frame(Kind::Interim, false, STREAM, b"")],
            Kind::Interim,
        ),
        (
            vec![response(), frame(Kind::Refused, true, STREAM, &[0; 9])],
            Kind::Refused,
        ),
    ];
    for (sent, kind) in cases {
        let (mut gateway, _) = gateway_with_a_stream(false);
        assert_eq!(
            violation(&mut gateway, &sent.concat()),
            Violation::Order(kind, STREAM)
        );
    }
}

#[test]
fn requests_need_a_free_slot_and_another_generation() {
    let request = |stream| frame(Kind::Request, true, stream, &[0, 1, 0, 0]);
    for (stream, slot) in [
        (STREAM, 0),
        (0x0002_0000, 0),
        (0x0001_0004, 4),
        (0x0001_ffff, 0xffff),
    ] {
        let (mut agent, _) = agent_with_a_stream(false);
        assert_eq!(
            violation(&mut agent, &request(stream)),
            Violation::Slot(slot)
        );
    }
    let (mut agent, key) = agent_with_a_stream(true);
    respond(&mut agent, key, true);
    drop_both(&mut agent, key);
    assert_eq!(violation(&mut agent, &request(STREAM)), Violation::Slot(0));
    agent.receive(&request(0x0002_0000)).unwrap();
}

#[test]
fn data_beyond_the_credit_is_refused_with_its_header() {
    let (mut gateway, key) = gateway_with_a_stream(false);
    gateway
        .receive(&frame(Kind::Response, false, STREAM, &[0; 8]))
        .unwrap();
    for _ in 0..4 {
        gateway
            .receive(&frame(Kind::Data, false, STREAM, &[0; LEAST / 4 - 8]))
            .unwrap();
    }
    gateway
        .receive(&frame(Kind::Data, false, STREAM, &[0; 32]))
        .unwrap();
    let header = &frame(Kind::Data, false, STREAM, b"x")[..8];
    assert_eq!(violation(&mut gateway, header), Violation::Credit(STREAM));
    assert_eq!(take(&mut gateway, key).data.len(), LEAST);

    // Discarded data counts too.
    let (mut agent, key) = agent_with_a_stream(false);
    agent.drop_receiver(key);
    let data = frame(Kind::Data, false, STREAM, &[0; LEAST / 8]);
    agent.receive(&data.repeat(8)).unwrap();
    assert_eq!(violation(&mut agent, &data), Violation::Credit(STREAM));
}

#[test]
fn credit_above_the_largest_window_is_refused() {
    let most = window::MOST;
    let (mut gateway, _) = gateway_with_a_stream(false);
    let rest = most - window::LEAST;
    gateway
        .receive(&frame(Kind::Credit, false, STREAM, &rest.to_be_bytes()))
        .unwrap();
    let found = violation(
        &mut gateway,
        &frame(Kind::Credit, false, STREAM, &1u32.to_be_bytes()),
    );
    assert_eq!(found, Violation::CreditTooLarge(most as usize + 1));
    let mut agent = Endpoint::agent(1);
    let found = violation(
        &mut agent,
        &frame(Kind::Request, true, STREAM, &u32::MAX.to_be_bytes()),
    );
    assert_eq!(found, Violation::CreditTooLarge(u32::MAX as usize));
}

#[test]
fn heads_of_a_stream_are_bounded_even_if_nothing_reads_them() {
    for dropped in [false, true] {
        let (mut gateway, key) = gateway_with_a_stream(false);
        if dropped {
            drop_both(&mut gateway, key);
        }
        let interim = frame(Kind::Interim, false, STREAM, &[b'x'; 100]);
        let mut received = 0;
        let found = loop {
            match gateway.receive(&interim) {
                Ok(()) => received += 1,
                Err(violation) => break violation,
            }
        };
        assert_eq!(found, Violation::Heads(STREAM));
        assert!((1000..2000).contains(&received), "{received}");
    }
    // All that a response may have fits.
    let (mut gateway, _) = gateway_with_a_stream(false);
    let interim = frame(Kind::Interim, false, STREAM, &[b'x'; 64]);
    gateway.receive(&interim.repeat(1000)).unwrap();
    gateway
        .receive(&frame(
            Kind::Response,
            false,
            STREAM,
            &vec![b'x'; 8 + RESPONSE_HEAD.head],
        ))
        .unwrap();
    gateway
        .receive(&frame(
            Kind::Trailers,
            true,
            STREAM,
            &vec![b'x'; RESPONSE_HEAD.head],
        ))
        .unwrap();
}

#[test]
fn control_messages_are_bounded() {
    for (mut endpoint, longest) in [
        (Endpoint::gateway(), control::TO_GATEWAY_MAX),
        (Endpoint::agent(1), control::MESSAGE_MAX),
    ] {
        let message = frame(Kind::Message, false, 0, &vec![b'x'; longest]);
        endpoint.receive(&message.repeat(4)).unwrap();
        assert_eq!(
            violation(&mut endpoint, &message),
            Violation::TooManyMessages
        );
    }
    let mut gateway = Endpoint::gateway();
    let long = frame(
        Kind::Message,
        false,
        0,
        &vec![b'x'; control::TO_GATEWAY_MAX + 1],
    );
    assert_eq!(
        violation(&mut gateway, &long),
        Violation::MessageTooLong(control::TO_GATEWAY_MAX + 1)
    );
    // Small messages: many, but not without bound. Those that were read do not count.
    let mut gateway = Endpoint::gateway();
    let small = frame(Kind::Message, false, 0, b"x");
    for _ in 0..100 {
        gateway.receive(&small.repeat(100)).unwrap();
        while gateway.poll_message(&mut context()).is_ready() {}
    }
    assert_eq!(
        violation(&mut gateway, &small.repeat(1100)),
        Violation::TooManyMessages
    );
}

#[test]
fn the_number_of_streams_is_sent_once_and_is_not_0() {
    let hello = |streams: u32| frame(Kind::Hello, false, 0, &streams.to_be_bytes());
    assert_eq!(
        violation(&mut Endpoint::gateway(), &hello(0)),
        Violation::Hello
    );
    assert_eq!(
        violation(&mut Endpoint::gateway(), &[hello(1), hello(1)].concat()),
        Violation::Hello
    );
}
