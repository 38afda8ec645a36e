//! Memory that a peer can make an end use, and memory of an idle tunnel.

use bytes::Bytes;

use super::util::*;
use crate::tunnel::endpoint::Endpoint;
use crate::tunnel::frame::{HEADER, Kind};

#[test]
fn an_idle_tunnel_returns_its_memory() {
    let mut pair = Pair::new(2000);
    let streams: Vec<_> = (0..2000)
        .map(|_| {
            let write = |head: &mut Vec<u8>| head.resize(head.len() + 1000, b'x');
            let at_gateway = pair.gateway.open(LEAST, true, write).unwrap();
            if pair.gateway.urgent.len() > 100_000 {
                pair.run();
            }
            at_gateway
        })
        .collect();
    pair.run();
    while let Some(at_agent) = accept(&mut pair.agent) {
        respond(&mut pair.agent, at_agent, false);
        send(&mut pair.agent, at_agent, &[0; 5000]);
        finish(&mut pair.agent, at_agent);
        drop_both(&mut pair.agent, at_agent);
        pair.agent.ping(1);
    }
    pair.run();
    for at_gateway in streams {
        assert_eq!(read(&mut pair.gateway, at_gateway).data.len(), 5000);
        drop_both(&mut pair.gateway, at_gateway);
    }
    pair.run();
    pair.assert_idle();
    for endpoint in [&pair.gateway, &pair.agent] {
        assert!(endpoint.streams.capacity() <= 16);
        assert!(endpoint.ready.capacity() <= 64 && endpoint.opened.capacity() <= 64);
        let urgent = endpoint.urgent.frames_capacity();
        assert!(urgent <= 4096, "{urgent}");
    }
}

#[test]
fn small_received_frames_share_buffers() {
    let (mut agent, key) = agent_with_a_stream(false);
    let stream = 0x0001_0000;
    let data = frame(Kind::Data, false, stream, b"x").repeat(LEAST);
    receive(&mut agent, data);
    assert!(agent.streams[key.0].received_items() <= 1 + LEAST / (16 * 1024));
    assert_eq!(take(&mut agent, key).data.len(), LEAST);
}

#[test]
fn small_pieces_that_wait_are_merged_into_full_frames() {
    let mut pair = Pair::new(1);
    let (at_gateway, at_agent) = pair.open_with_response(true);
    let body: Vec<u8> = (0..LEAST as u32).map(|n| (n % 251) as u8).collect();
    let shared = Bytes::from(body.clone());
    // Pieces of one shared buffer, as an HTTP/2 caller sends them.
    for at in 0..LEAST {
        let piece = shared.slice(at..at + 1);
        pair.agent.send_data(at_agent, piece, false).unwrap();
    }
    let pieces = pair.agent.streams[at_agent.0].queued_pieces();
    assert_eq!(pieces, LEAST.div_ceil(16 * 1024 - HEADER));
    pair.run();
    assert!(read(&mut pair.gateway, at_gateway).data == body);
}

#[test]
fn large_pieces_are_not_copied() {
    let mut pair = Pair::new(1);
    let (_, at_agent) = pair.open_with_response(true);
    let shared = Bytes::from(vec![7; 10_000]);
    for piece in [
        shared.slice(..5000),
        shared.slice(5000..5001),
        shared.slice(5001..),
    ] {
        pair.agent.send_data(at_agent, piece, false).unwrap();
    }
    assert_eq!(pair.agent.streams[at_agent.0].queued_pieces(), 3);
}

#[test]
fn a_gateway_that_does_not_read_stops_the_agent_from_receiving() {
    let mut agent = Endpoint::agent(1);
    let mut received = 0;
    for generation in 1..10_000u32 {
        if agent.is_congested() {
            break;
        }
        let stream = generation << 16;
        receive(
            &mut agent,
            frame(Kind::Request, true, stream, &[0, 1, 0, 0]),
        );
        let key = accept(&mut agent).unwrap();
        let head = response(&[b'x'; 50_000]);
        send_head(&mut agent, key, Kind::Response, false, &head);
        receive(&mut agent, frame(Kind::Reset, false, stream, b""));
        drop_both(&mut agent, key);
        received += 1;
    }
    assert!((5..20).contains(&received), "{received}");
    assert_eq!(agent.streams.len(), 0);
    transmit_all(&mut agent, &mut Vec::new());
    assert!(!agent.is_congested());
}

#[test]
fn floods_of_control_frames_take_no_memory() {
    let (mut gateway, _) = gateway_with_a_stream(false);
    let stream = 0x0001_0000;
    let flood = [
        frame(Kind::Ping, false, 0, &[0; 8]),
        frame(Kind::Pong, false, 0, &[0; 8]),
        frame(Kind::Credit, false, stream, &[0; 4]),
        frame(Kind::Reset, false, stream, &[b'x'; 64]),
    ];
    for frame in flood {
        gateway.receive(&frame.repeat(1000)).unwrap();
    }
    assert!(gateway.take_overhead() >= 3999);
    let mut answers = Vec::new();
    transmit_all(&mut gateway, &mut answers);
    assert_eq!(kinds(&answers), [Kind::Pong, Kind::Reset]);
}
