//! Memory that streams are charged for: before it is granted, within their share, and no longer
//! than they hold it.

use std::rc::Rc;

use super::util::*;
use crate::tunnel::endpoint::stream::Stream;
use crate::tunnel::endpoint::{
    Closed, Endpoint, HEADS_RESERVE, OpenError, QUEUE_RESERVE, STREAM_SEND_BUFFER, StreamKey,
};
use crate::tunnel::frame::{HEADER, Kind, RESPONSE_HEAD};
use crate::tunnel::ledger::Share;
use crate::tunnel::window;

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;
const FIRST: usize = window::FIRST as usize;
/// Bytes of REQUEST as [`Pair::open`] sends it.
const REQUEST: usize = HEADER + 4 + b"request".len();

/// A tunnel whose gateway's streams are charged to `share`.
fn pair(share: &Rc<Share>) -> Pair {
    let gateway = Endpoint::gateway_within(Rc::clone(share));
    Pair::of(gateway, Endpoint::agent(1000))
}

fn write_request(head: &mut Vec<u8>) {
    head.extend_from_slice(b"request");
}

/// Opens streams until there is no memory for another one.
fn open_all(pair: &mut Pair, end: bool) -> Vec<(StreamKey, StreamKey)> {
    let mut opened = Vec::new();
    loop {
        match pair.gateway.open(FIRST, end, write_request) {
            Ok(at_gateway) => {
                pair.run();
                let at_agent = accept(&mut pair.agent).unwrap();
                read(&mut pair.agent, at_agent);
                opened.push((at_gateway, at_agent));
            }
            Err(error) => {
                assert_eq!(error, OpenError::Memory);
                return opened;
            }
        }
    }
}

fn send_head_of(pair: &mut Pair, at_agent: StreamKey, kind: Kind, length: usize) {
    send_head(&mut pair.agent, at_agent, kind, false, &vec![b'x'; length]);
}

#[test]
fn a_stream_is_opened_only_with_room_for_all_that_it_is_granted() {
    let least = Stream::least_memory(true) + REQUEST;
    for (room, granted) in [
        (least - 1, None),
        (least, Some(LEAST)),
        (2 * (least + FIRST - LEAST), Some(FIRST)),
    ] {
        let share = Share::alone(room);
        let mut pair = pair(&share);
        let opened = pair.gateway.open(FIRST, true, write_request);
        let error = granted.is_none().then_some(OpenError::Memory);
        assert_eq!(opened.err(), error, "{room}");
        let charged = granted.map_or(0, |granted| least + granted - LEAST);
        assert_eq!(share.charged(), charged, "{room}");
        pair.run();
        let sent = usize::from(granted.is_some());
        assert_eq!(pair.agent.open_streams(), sent, "{room}");
    }
}

#[test]
fn windows_use_half_of_the_share_and_leave_the_other_half_to_further_streams() {
    let share = Share::alone(16 * MIB);
    let mut pair = pair(&share);
    let streams = open_all(&mut pair, true);
    let large = 8 * MIB / (FIRST + 8 * KIB);
    let small = (8 * MIB - FIRST) / (Stream::least_memory(true) + REQUEST);
    assert!(streams.len() >= large + small, "{}", streams.len());
    assert!(pair.gateway.committed() <= share.charged() && share.charged() <= 16 * MIB);
}

#[test]
fn agents_that_send_all_they_may_on_several_tunnels_fill_no_more_than_the_share() {
    let share = Share::alone(8 * MIB);
    let mut pairs = [pair(&share), pair(&share)];
    let mut streams = [Vec::new(), Vec::new()];
    for (pair, streams) in pairs.iter_mut().zip(&mut streams) {
        let most = window::MOST as usize;
        pair.gateway.set_credit(most, window::TUNNEL_BUDGET);
        *streams = open_all(pair, true);
        streams.truncate(40);
        for (_, at_agent) in &*streams {
            respond(&mut pair.agent, *at_agent, false);
        }
    }
    for round in 0..20 {
        for (pair, streams) in pairs.iter_mut().zip(&streams) {
            for (number, (at_gateway, at_agent)) in streams.iter().enumerate() {
                send(&mut pair.agent, *at_agent, &[0; STREAM_SEND_BUFFER]);
                pair.run();
                // Some readers go on, and their windows want to grow.
                if number % 5 == round % 5 {
                    read(&mut pair.gateway, *at_gateway);
                }
                assert!(share.charged() <= 8 * MIB, "{}", share.charged());
                assert!(pair.gateway.held() <= share.charged());
            }
        }
    }
    drop(pairs);
    assert_eq!(share.charged(), 0);
}

#[test]
fn a_head_without_room_resets_its_own_stream_and_is_discarded_as_it_arrives() {
    let share = Share::alone(4 * MIB);
    let mut pair = pair(&share);
    let streams = open_all(&mut pair, true);
    let [(first, first_agent), (second, second_agent), ..] = streams[..] else {
        panic!("two streams")
    };
    let others = share.left();
    share.charge(0, others);
    let full = share.charged();
    send_head_of(&mut pair, first_agent, Kind::Interim, RESPONSE_HEAD.head);
    pair.transmit();
    let head = std::mem::take(&mut pair.to_gateway);
    let (header, payload) = head.split_at(HEADER);
    pair.gateway.receive(header).unwrap();
    assert!(share.charged() < full, "what the stream held is free");
    assert!(!pair.gateway.is_received(first));
    pair.gateway.receive(&payload[..1000]).unwrap();
    assert_eq!(pair.gateway.input.payload.capacity(), 0);
    pair.gateway.receive(&payload[1000..]).unwrap();
    let parts = read(&mut pair.gateway, first);
    assert_eq!(parts.heads.len(), 0);
    assert_eq!(parts.end, Some(Err(Closed::Here)));
    pair.run();
    assert!(pair.agent.is_reset(first_agent));

    // There is room for it now.
    send_head_of(&mut pair, second_agent, Kind::Interim, RESPONSE_HEAD.head);
    pair.run();
    let head = &read(&mut pair.gateway, second).heads[0].1;
    assert_eq!(head.len(), RESPONSE_HEAD.head);
    assert!(share.charged() <= 4 * MIB);
    for (at_gateway, at_agent) in streams {
        pair.drop_all(at_gateway, at_agent);
    }
    pair.run();
    share.charge(others, 0);
    pair.assert_idle();
}

#[test]
fn ordinary_heads_and_trailers_pass_however_full_the_share_is() {
    let share = Share::alone(2 * MIB);
    let mut pair = pair(&share);
    let streams = open_all(&mut pair, true);
    // Another account takes all that is left.
    share.charge(0, 2 * MIB);
    for (at_gateway, at_agent) in streams {
        send_head_of(&mut pair, at_agent, Kind::Interim, 500);
        send_head_of(&mut pair, at_agent, Kind::Response, 2500);
        send(&mut pair.agent, at_agent, &[0; 2 * LEAST]);
        pair.run();
        let parts = read(&mut pair.gateway, at_gateway);
        assert_eq!((parts.heads.len(), parts.end), (2, None));
        assert!(parts.data.len() >= LEAST);
        pair.run();
        let trailers = vec![b't'; 500];
        let sent = pair.agent.send_trailers(at_agent, trailers.into());
        sent.unwrap();
        pair.run();
        let parts = read(&mut pair.gateway, at_gateway);
        assert_eq!(parts.trailers.unwrap().len(), 500);
        assert_eq!(parts.end, Some(Ok(())));
        drop_both(&mut pair.gateway, at_gateway);
    }
    share.charge(2 * MIB, 0);
    assert_eq!(share.charged(), 0);
}

#[test]
fn a_body_breaks_off_with_its_code_however_full_the_share_is() {
    let mut pair = pair(&Share::alone(MIB));
    let share = Rc::clone(&pair.agent.share);
    let [broken, refused] = [(); 2].map(|()| {
        let (at_gateway, at_agent) = pair.open(true);
        // Small heads are charged later.
        send_head_of(&mut pair, at_agent, Kind::Response, 2500);
        pair.run();
        read_head(&mut pair.gateway, at_gateway);
        (at_gateway, at_agent)
    });
    share.charge(0, share.left());
    pair.agent.break_off(broken.1, "GW_TEST").unwrap();
    // Trailers need memory.
    let trailers = vec![b't'; 8 * KIB];
    let sent = pair.agent.send_trailers(refused.1, trailers.into());
    assert!(sent.is_err());
    pair.run();
    assert_eq!(pair.end(broken.0), Some(Err(reset("GW_TEST"))));
    assert_eq!(pair.end(refused.0), Some(Err(reset(""))));
}

#[test]
fn heads_that_were_read_count_until_their_stream_ends() {
    let share = Share::alone(MIB);
    let mut pair = pair(&share);
    let (at_gateway, at_agent) = pair.open(true);
    let before = share.charged();
    send_head_of(&mut pair, at_agent, Kind::Response, 50 * KIB);
    pair.run();
    assert_eq!(read_head(&mut pair.gateway, at_gateway).1.len(), 50 * KIB);
    assert_eq!(share.charged(), before + 50 * KIB + 64 - HEADS_RESERVE);
    drop_both(&mut pair.gateway, at_gateway);
    assert!(share.charged() < KIB);
}

/// Readers keep fields in lists, whose entries take more than the shortest fields.
#[test]
fn each_field_of_a_head_counts_beside_its_text() {
    const FIELDS: usize = 1000;
    let fields = "a:\r\n".repeat(FIELDS);
    let payload = format!("timing..HTTP/1.1 200 \r\n{fields}\r\n");
    let charged = payload.len() + 64 + (FIELDS + FIELDS - 128) * 64 - HEADS_RESERVE;
    for (lacking, end) in [(0, None), (1, Some(Err(reset(""))))] {
        let share = Share::alone(Stream::least_memory(true) + REQUEST + charged - lacking);
        let mut pair = pair(&share);
        let (at_gateway, at_agent) = pair.open(true);
        let before = share.charged();
        let payload = payload.as_bytes();
        send_head(&mut pair.agent, at_agent, Kind::Response, false, payload);
        pair.run();
        let is_kept = end.is_none();
        assert_eq!(read(&mut pair.gateway, at_gateway).end, end);
        assert_eq!(share.charged() == before + charged, is_kept);
    }
}

#[test]
fn a_queue_beyond_a_frame_needs_room_and_goes_on_as_it_drains() {
    let share = Share::alone(2 * (Stream::least_memory(false) + REQUEST) + 50 * KIB);
    let mut pair = pair(&share);
    let (at_gateway, at_agent) = pair.open(false);
    let most = window::MOST as usize;
    pair.agent.set_credit(most, window::TUNNEL_BUDGET);
    assert_eq!(share.left_beyond_least(), 25 * KIB);
    let queued = send(&mut pair.gateway, at_gateway, &[0; MIB]);
    assert_eq!(queued, QUEUE_RESERVE + 25 * KIB);
    assert_eq!(share.left_beyond_least(), 0);
    share.charge(0, 2 * MIB);
    let mut sent = 0;
    while sent < MIB {
        pair.run();
        read(&mut pair.agent, at_agent);
        pair.run();
        let now = send(&mut pair.gateway, at_gateway, &[0; MIB]);
        assert!(now > 0 && now <= QUEUE_RESERVE, "{now} after {sent}");
        sent += now;
    }
    // Trailers beyond the reserve for heads have no room.
    let trailers = vec![b't'; 30 * KIB];
    let sent = pair.gateway.send_trailers(at_gateway, trailers.into());
    assert!(sent.is_err());
    pair.run();
    // The body broke off.
    assert!(matches!(read(&mut pair.agent, at_agent).end, Some(Err(_))));
}

#[test]
fn a_request_head_without_room_at_the_agent_is_reset_and_others_are_served() {
    let room = 2 * (Stream::least_memory(false) + KIB);
    let share = Share::alone(room);
    let mut agent = Endpoint::agent_within(4, Rc::clone(&share));
    let head = [&[0, 1, 0, 0][..], &[b'x'; 60_000]].concat();
    let fits = &head[..4 + HEADS_RESERVE - 64];
    let requests = [
        frame(Kind::Request, true, 0x0001_0000, b"\0\x01\0\0x"),
        frame(Kind::Request, false, 0x0001_0001, fits),
        frame(Kind::Request, true, 0x0001_0002, &head),
    ];
    agent.receive(&requests.concat()).unwrap();
    let keys = [accept(&mut agent).unwrap(), accept(&mut agent).unwrap()];
    assert!(accept(&mut agent).is_none());
    assert!(share.charged() <= room, "{}", share.charged());
    let mut sent = Vec::new();
    transmit_all(&mut agent, &mut sent);
    let sent_frames = frames(&sent);
    let resets = sent_frames.iter().filter(|frame| frame.0 == Kind::Reset);
    assert!(resets.map(|frame| frame.2).eq([0x0001_0002]));
    assert_eq!(agent.open_streams(), 2);
    keys.into_iter().for_each(|key| drop_both(&mut agent, key));
    transmit_all(&mut agent, &mut sent);
    drop(agent);
    assert_eq!(share.charged(), 0);
}

#[test]
fn response_heads_that_the_gateway_does_not_read_are_charged_at_the_agent() {
    const HEAD: usize = 60 * KIB;
    let share = Share::alone(2 * MIB);
    let mut agent = Endpoint::agent_within(4, Rc::clone(&share));
    let requests: Vec<u8> = (0..4)
        .flat_map(|slot| frame(Kind::Request, true, 0x0001_0000 + slot, b"\0\x01\0\0x"))
        .collect();
    agent.receive(&requests).unwrap();
    let keys: Vec<_> = std::iter::from_fn(|| accept(&mut agent)).collect();
    let large = |agent: &mut Endpoint, key| {
        let write = |out: &mut Vec<u8>| out.resize(out.len() + HEAD, b'x');
        agent.send_head(key, Kind::Interim, false, write)
    };
    let before = share.charged();
    large(&mut agent, keys[0]).unwrap();
    assert_eq!(share.charged(), before + HEADER + HEAD);
    share.charge(0, 2 * MIB);
    large(&mut agent, keys[1]).unwrap_err();
    assert!(agent.urgent.len() < 2 * HEAD);
    share.charge(2 * MIB, 0);
    large(&mut agent, keys[2]).unwrap();
}

#[test]
fn a_stream_moves_to_another_share_with_all_that_it_holds() {
    let first = Share::alone(MIB);
    let second = Share::alone(MIB);
    let mut pair = pair(&first);
    let (at_gateway, _) = pair.open(true);
    let charged = first.charged();
    second.charge(0, MIB);
    assert!(!pair.gateway.charge_to(at_gateway, &second));
    assert_eq!((first.charged(), second.charged()), (charged, MIB));
    second.charge(MIB, 0);
    assert!(pair.gateway.charge_to(at_gateway, &second));
    assert_eq!((first.charged(), second.charged()), (0, charged));
    drop(pair);
    assert_eq!(second.charged(), 0);
}
