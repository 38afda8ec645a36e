//! Order of frames, turns of streams, and wake-ups of the driver.

use std::collections::{BTreeMap, BTreeSet};
use std::task::Context;

use bytes::Bytes;

use super::util::*;
use crate::tunnel::endpoint::{Outgoing, StreamKey};
use crate::tunnel::frame::{DATA_MAX, HEADER, Kind};

/// Streams whose agent has as much data to send as fits.
fn endless_streams(pair: &mut Pair, count: usize) -> Vec<(StreamKey, StreamKey)> {
    let streams: Vec<_> = (0..count).map(|_| pair.open_with_response(true)).collect();
    for (_, at_agent) in &streams {
        send(&mut pair.agent, *at_agent, &[0; LEAST]);
    }
    streams
}

#[test]
fn a_small_response_leaves_within_one_round_of_frames() {
    let mut pair = Pair::new(200);
    let (at_gateway, at_agent) = pair.open(true);
    endless_streams(&mut pair, 100);
    assert!(transmit_turn(&mut pair.agent, &mut pair.to_gateway));
    pair.to_gateway.clear();
    respond(&mut pair.agent, at_agent, false);
    send(&mut pair.agent, at_agent, b"small");
    finish(&mut pair.agent, at_agent);
    transmit_turn(&mut pair.agent, &mut pair.to_gateway);
    // The head leaves at once.
    assert_eq!(kinds(&pair.to_gateway)[0], Kind::Response);
    let stream = pair.gateway.streams[at_gateway.0].id.0;
    let is_last = |(kind, end, id, _): &(Kind, bool, u32, Vec<u8>)| {
        (*kind, *end, *id) == (Kind::Data, true, stream)
    };
    while !frames(&pair.to_gateway).iter().any(is_last) {
        assert!(transmit_turn(&mut pair.agent, &mut pair.to_gateway));
    }
    assert!(frames(&pair.to_gateway).len() <= 1 + 101 + TURN / DATA_MAX);
}

#[test]
fn streams_take_turns_of_one_frame() {
    let mut pair = Pair::new(10);
    endless_streams(&mut pair, 5);
    transmit_all(&mut pair.agent, &mut pair.to_gateway);
    let order: Vec<u32> = frames(&pair.to_gateway)
        .into_iter()
        .map(|(.., stream, _)| stream & 0xffff)
        .collect();
    let rounds: Vec<&[u32]> = order.chunks(5).collect();
    assert!(rounds.len() >= LEAST / DATA_MAX, "{order:?}");
    assert!(rounds.iter().all(|round| *round == rounds[0]), "{order:?}");
}

#[test]
fn a_stream_that_replaces_a_reset_one_takes_one_turn_at_a_time() {
    let mut pair = Pair::new(3);
    let streams = endless_streams(&mut pair, 3);
    // Closed on both ends while it waits for its turn.
    pair.gateway.reset(streams[2].0, "");
    transmit_all(&mut pair.gateway, &mut pair.to_agent);
    pair.deliver_to_agent();
    drop_both(&mut pair.agent, streams[2].1);
    drop_both(&mut pair.gateway, streams[2].0);
    let mut answer = Vec::new();
    let mut out = Outgoing::default();
    pair.agent.transmit(&mut out, 0);
    let mut slices = [std::io::IoSlice::new(&[]); 8];
    let used = out.slices(&mut slices);
    for slice in &slices[..used] {
        answer.extend_from_slice(slice);
    }
    pair.gateway.receive(&answer).unwrap();

    let (at_gateway, at_agent) = open_without_a_turn(&mut pair);
    respond(&mut pair.agent, at_agent, false);
    send(&mut pair.agent, at_agent, &[0; LEAST]);
    let mut pipe = Vec::new();
    transmit_all(&mut pair.agent, &mut pipe);
    let data = frames(&pipe)
        .into_iter()
        .filter(|(kind, ..)| *kind == Kind::Data);
    let order: Vec<u32> = data.map(|(.., stream, _)| stream).collect();
    for (round, streams) in order.chunks(3).take(3).enumerate() {
        let streams: BTreeSet<&u32> = streams.iter().collect();
        assert_eq!(streams.len(), 3, "round {round}: {order:x?}");
    }
    drop_both(&mut pair.gateway, at_gateway);
}

#[test]
fn frames_without_data_leave_before_data() {
    let mut pair = Pair::new(10);
    let (upload, at_agent) = pair.open(false);
    let streams = endless_streams(&mut pair, 3);
    send(&mut pair.gateway, upload, &[0; LEAST]);
    transmit_all(&mut pair.gateway, &mut pair.to_agent);
    pair.deliver_to_agent();
    transmit_turn(&mut pair.agent, &mut Vec::new());

    read(&mut pair.agent, at_agent);
    pair.agent.reset(streams[0].1, "");
    pair.agent.ping(1);
    let message = Bytes::from_static(b"{}");
    pair.agent.send_message(message, 100).unwrap();
    receive(&mut pair.agent, frame(Kind::Ping, false, 0, &[0; 8]));
    respond(&mut pair.agent, at_agent, true);
    let mut pipe = Vec::new();
    transmit_turn(&mut pair.agent, &mut pipe);
    let order = kinds(&pipe);
    let first_data = order.iter().position(|kind| *kind == Kind::Data).unwrap();
    let before = &order[..first_data];
    for kind in [
        Kind::Ping,
        Kind::Pong,
        Kind::Credit,
        Kind::Reset,
        Kind::Response,
        Kind::Message,
    ] {
        let count = before.iter().filter(|sent| **sent == kind).count();
        assert_eq!(count, 1, "{kind:?} in {order:?}");
    }
}

#[test]
fn data_leaves_beside_any_number_of_heads() {
    let mut pair = Pair::new(100);
    let (_, at_agent) = pair.open_with_response(true);
    send(&mut pair.agent, at_agent, &[0; LEAST]);
    for _ in 0..LEAST / DATA_MAX {
        let (_, other) = open_without_a_turn(&mut pair);
        for _ in 0..3 {
            let head = [b'x'; 30_000];
            send_head(&mut pair.agent, other, Kind::Interim, false, &head);
        }
        let mut pipe = Vec::new();
        transmit_turn(&mut pair.agent, &mut pipe);
        let interim = Kind::Interim;
        assert_eq!(kinds(&pipe), [interim, interim, interim, Kind::Data]);
    }
}

/// Opens a stream without a turn of the agent.
fn open_without_a_turn(pair: &mut Pair) -> (StreamKey, StreamKey) {
    let at_gateway = pair.gateway.open(LEAST, true, |_| {}).unwrap();
    transmit_all(&mut pair.gateway, &mut pair.to_agent);
    pair.deliver_to_agent();
    (at_gateway, accept(&mut pair.agent).unwrap())
}

#[test]
fn one_turn_ends_with_the_frame_that_fills_it() {
    let mut pair = Pair::new(100);
    endless_streams(&mut pair, 20);
    let mut pipe = Vec::new();
    transmit_turn(&mut pair.agent, &mut pipe);
    let length = pipe.len();
    assert!(
        (TURN..TURN + HEADER + DATA_MAX).contains(&length),
        "{length}"
    );
}

#[test]
fn every_frame_to_send_wakes_the_driver() {
    type Action = fn(&mut Pair, StreamKey, StreamKey);
    let at_gateway: [(&str, Action); 9] = [
        ("open", |pair, _, _| {
            assert!(pair.gateway.open(LEAST, true, |_| {}).is_ok());
        }),
        ("data", |pair, key, _| {
            assert!(send(&mut pair.gateway, key, b"data") > 0);
        }),
        ("end", |pair, key, _| finish(&mut pair.gateway, key)),
        ("break off", |pair, key, _| {
            pair.gateway.break_off(key, "").unwrap();
        }),
        ("reset", |pair, key, _| pair.gateway.reset(key, "")),
        ("drop", |pair, key, _| pair.gateway.drop_receiver(key)),
        ("ping", |pair, _, _| pair.gateway.ping(1)),
        ("message", |pair, _, _| {
            let message = Bytes::from_static(b"{}");
            pair.gateway.send_message(message, 9).unwrap();
        }),
        ("window", |pair, _, _| pair.gateway.send_window(1)),
    ];
    let received: [(&str, Action); 4] = [
        ("pong", |pair, _, _| pair.agent.ping(1)),
        ("answer to a reset", |pair, _, key| {
            pair.agent.reset(key, "");
        }),
        ("credit", |pair, _, key| {
            assert!(send(&mut pair.agent, key, &[0; LEAST]) > 0);
        }),
        ("response", |pair, _, key| {
            assert!(send(&mut pair.agent, key, b"x") > 0);
        }),
    ];
    for (name, action) in at_gateway {
        let mut pair = Pair::new(4);
        let (key, at_agent) = pair.open_with_response(false);
        let (wakes, waker) = Wakes::new();
        pair.gateway.register_driver(&Context::from_waker(&waker));
        action(&mut pair, key, at_agent);
        assert_eq!(wakes.take(), 1, "{name}");
        transmit_all(&mut pair.gateway, &mut pair.to_agent);
        assert!(!pair.to_agent.is_empty(), "{name}");
    }
    for (name, action) in received {
        let mut pair = Pair::new(4);
        let (key, at_agent) = pair.open_with_response(false);
        action(&mut pair, key, at_agent);
        transmit_all(&mut pair.agent, &mut pair.to_gateway);
        let (wakes, waker) = Wakes::new();
        pair.gateway.register_driver(&Context::from_waker(&waker));
        pair.deliver_to_gateway();
        if name == "credit" {
            pair.gateway.set_credit(LEAST, 0);
            read(&mut pair.gateway, key);
        }
        transmit_all(&mut pair.gateway, &mut pair.to_agent);
        assert_eq!(wakes.take() > 0, !pair.to_agent.is_empty(), "{name}");
        assert_eq!(pair.to_agent.is_empty(), name == "response", "{name}");
    }
}

#[test]
fn every_stream_gets_the_same_share() {
    let mut pair = Pair::new(50);
    let streams = endless_streams(&mut pair, 50);
    let mut sent: BTreeMap<u32, usize> = BTreeMap::new();
    for _ in 0..100 {
        let mut pipe = Vec::new();
        transmit_turn(&mut pair.agent, &mut pipe);
        for (_, _, stream, payload) in frames(&pipe) {
            *sent.entry(stream).or_default() += payload.len();
        }
        pair.gateway.receive(&pipe).unwrap();
        for (at_gateway, at_agent) in &streams {
            read(&mut pair.gateway, *at_gateway);
            transmit_all(&mut pair.gateway, &mut pair.to_agent);
            pair.deliver_to_agent();
            send(&mut pair.agent, *at_agent, &[0; LEAST]);
        }
    }
    assert_eq!(sent.len(), 50);
    let least = sent.values().min().unwrap();
    let most = sent.values().max().unwrap();
    assert!(most - least <= 2 * DATA_MAX, "{least} {most}");
}
