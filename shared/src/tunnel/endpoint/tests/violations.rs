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
        assert_violation(
            &mut agent,
            &frame(kind, end, stream, payload),
            Violation::Role(kind),
        );
    }
    for (kind, stream) in [(Kind::Request, STREAM), (Kind::Window, 0)] {
        let (mut gateway, _) = gateway_with_a_stream(false);
        assert_violation(
            &mut gateway,
            &frame(kind, false, stream, &[0; 4]),
            Violation::Role(kind),
        );
    }
}

#[test]
fn headers_are_checked_before_their_payload() {
    let (mut gateway, _) = gateway_with_a_stream(false);
    assert_violation(
        &mut gateway,
        &[0x7f, 0xff, 0xff, 0xff, 0, 0, 0, 0],
        Violation::Header(InvalidFrameHeader::Type(0x7f)),
    );
    let (mut gateway, _) = gateway_with_a_stream(false);
    assert_violation(
        &mut gateway,
        &[Kind::Data as u8, 0xff, 0xff, 0xff, 0, 1, 0, 0],
        Violation::Header(InvalidFrameHeader::Length(Kind::Data, 0xff_ffff)),
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
            assert_violation(
                &mut gateway,
                &frame(kind, end, stream, payload),
                Violation::NotOpen(kind, stream),
            );
        }
    }
    // RESET and CREDIT of a slot that was never open.
    for (kind, payload) in [(Kind::Reset, &b""[..]), (Kind::Credit, &[0; 4])] {
        for (mut endpoint, _) in [gateway_with_a_stream(false), agent_with_a_stream(false)] {
            assert_violation(
                &mut endpoint,
                &frame(kind, false, 0x0001_0003, payload),
                Violation::NotOpen(kind, 0x0001_0003),
            );
        }
    }
}

#[test]
fn reset_and_credit_of_closed_streams_count_as_overhead() {
    let (mut gateway, key) = gateway_with_a_stream(true);
    receive(&mut gateway, frame(Kind::Response, true, STREAM, &[0; 8]));
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
    assert_violation(&mut gateway, &data, Violation::NotOpen(Kind::Data, STREAM));
}

#[test]
fn small_grants_count_as_overhead() {
    let (mut gateway, key) = gateway_with_a_stream(false);
    for bytes in [1, 0, 16 * 1024u32] {
        receive(
            &mut gateway,
            frame(Kind::Credit, false, STREAM, &bytes.to_be_bytes()),
        );
    }
    assert_eq!(gateway.take_overhead(), 2);
    let sent = send(&mut gateway, key, &[0; 2 * LEAST]);
    assert_eq!(sent, LEAST + 1 + 16 * 1024);
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
        receive(&mut gateway, frame(Kind::Response, true, STREAM, &[0; 8]));
        assert_violation(
            &mut gateway,
            &frame(kind, end, STREAM, payload),
            Violation::Order(kind, STREAM),
        );
    }
    let (mut agent, _) = agent_with_a_stream(true);
    assert_violation(
        &mut agent,
        &frame(Kind::Data, true, STREAM, b"x"),
        Violation::Order(Kind::Data, STREAM),
    );
}

#[test]
fn parts_of_a_response_have_an_order() {
    for (begins, kind, end, payload) in [
        (false, Kind::Data, false, &b"x"[..]),
        (false, Kind::Data, true, b""),
        (false, Kind::Trailers, true, b""),
        (true, Kind::Response, false, &[0; 8]),
        (true, Kind::Interim, false, b""),
        (true, Kind::Refused, true, &[0; 9]),
    ] {
        let (mut gateway, _) = gateway_with_a_stream(false);
        if begins {
            receive(&mut gateway, frame(Kind::Response, false, STREAM, &[0; 8]));
        }
        assert_violation(
            &mut gateway,
            &frame(kind, end, STREAM, payload),
            Violation::Order(kind, STREAM),
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
        assert_violation(&mut agent, &request(stream), Violation::Slot(slot));
    }
    let (mut agent, key) = agent_with_a_stream(true);
    respond(&mut agent, key, true);
    drop_both(&mut agent, key);
    assert_violation(&mut agent, &request(STREAM), Violation::Slot(0));
    agent.receive(&request(0x0002_0000)).unwrap();
}

#[test]
fn data_beyond_the_credit_is_refused_with_its_header() {
    let (mut gateway, key) = gateway_with_a_stream(false);
    receive(&mut gateway, frame(Kind::Response, false, STREAM, &[0; 8]));
    for _ in 0..4 {
        receive(
            &mut gateway,
            frame(Kind::Data, false, STREAM, &[0; LEAST / 4 - 8]),
        );
    }
    receive(&mut gateway, frame(Kind::Data, false, STREAM, &[0; 32]));
    let header = &frame(Kind::Data, false, STREAM, b"x")[..8];
    assert_violation(&mut gateway, header, Violation::Credit(STREAM));
    assert_eq!(take(&mut gateway, key).data.len(), LEAST);

    // Discarded data counts too.
    let (mut agent, key) = agent_with_a_stream(false);
    agent.drop_receiver(key);
    let data = frame(Kind::Data, false, STREAM, &[0; LEAST / 8]);
    agent.receive(&data.repeat(8)).unwrap();
    assert_violation(&mut agent, &data, Violation::Credit(STREAM));
}

#[test]
fn credit_above_the_largest_window_is_refused() {
    let most = window::MOST;
    let (mut gateway, _) = gateway_with_a_stream(false);
    let rest = most - window::LEAST;
    receive(
        &mut gateway,
        frame(Kind::Credit, false, STREAM, &rest.to_be_bytes()),
    );
    assert_violation(
        &mut gateway,
        &frame(Kind::Credit, false, STREAM, &1u32.to_be_bytes()),
        Violation::CreditTooLarge(most as usize + 1),
    );
    let mut agent = Endpoint::agent(1);
    assert_violation(
        &mut agent,
        &frame(Kind::Request, true, STREAM, &u32::MAX.to_be_bytes()),
        Violation::CreditTooLarge(u32::MAX as usize),
    );
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
    for (kind, length) in [
        (Kind::Response, 8 + RESPONSE_HEAD.head),
        (Kind::Trailers, RESPONSE_HEAD.head),
    ] {
        let payload = vec![b'x'; length];
        receive(
            &mut gateway,
            frame(kind, kind == Kind::Trailers, STREAM, &payload),
        );
    }
}

#[test]
fn control_messages_are_bounded() {
    for (mut endpoint, longest) in [
        (Endpoint::gateway(), control::TO_GATEWAY_MAX),
        (Endpoint::agent(1), control::MESSAGE_MAX),
    ] {
        let message = frame(Kind::Message, false, 0, &vec![b'x'; longest]);
        endpoint.receive(&message.repeat(4)).unwrap();
        assert_violation(&mut endpoint, &message, Violation::TooManyMessages);
    }
    let mut gateway = Endpoint::gateway();
    let long = frame(
        Kind::Message,
        false,
        0,
        &vec![b'x'; control::TO_GATEWAY_MAX + 1],
    );
    assert_violation(
        &mut gateway,
        &long,
        Violation::MessageTooLong(control::TO_GATEWAY_MAX + 1),
    );
    // Small messages: many, but not without bound. Those that were read do not count.
    let mut gateway = Endpoint::gateway();
    let small = frame(Kind::Message, false, 0, b"x");
    for _ in 0..100 {
        gateway.receive(&small.repeat(100)).unwrap();
        while gateway.poll_message(&mut context()).is_ready() {}
    }
    assert_violation(
        &mut gateway,
        &small.repeat(1100),
        Violation::TooManyMessages,
    );
}

#[test]
fn the_number_of_streams_is_sent_once_and_is_not_0() {
    let hello = |streams: u32| frame(Kind::Hello, false, 0, &streams.to_be_bytes());
    assert_violation(&mut Endpoint::gateway(), &hello(0), Violation::Hello);
    assert_violation(
        &mut Endpoint::gateway(),
        &[hello(1), hello(1)].concat(),
        Violation::Hello,
    );
}
