//! Memory that streams are charged for: before it is granted, within their share, and no longer
//! than they hold it.

use std::rc::Rc;

use super::util::*;
use crate::tunnel::endpoint::stream::Stream;
use crate::tunnel::endpoint::{
    Endpoint, HEADS_RESERVE, OpenError, QUEUE_RESERVE, STREAM_SEND_BUFFER, StreamKey,
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
    let agent = Endpoint::agent(1000);
    let mut pair = Pair {
        gateway,
        agent,
        to_gateway: Vec::new(),
        to_agent: Vec::new(),
    };
    pair.run();
    pair
}

/// Opens streams until there is no memory for another one.
fn open_all(pair: &mut Pair, end: bool) -> Vec<(StreamKey, StreamKey)> {
    let mut opened = Vec::new();
    loop {
        match pair
            .gateway
            .open(FIRST, end, |head| head.extend_from_slice(b"request"))
        {
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
    pair.agent
        .send_head(at_agent, kind, false, |out| {
            out.resize(out.len() + length, b'x');
        })
        .unwrap();
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
        let opened = pair
            .gateway
            .open(FIRST, true, |head| head.extend_from_slice(b"request"));
        assert_eq!(
            opened.err(),
            granted.is_none().then_some(OpenError::Memory),
            "{room}"
        );
        assert_eq!(
            share.charged(),
            granted.map_or(0, |granted| least + granted - LEAST),
            "{room}"
        );
        pair.run();
        assert_eq!(
            pair.agent.open_streams(),
            usize::from(granted.is_some()),
            "nothing was sent: {room}"
        );
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
        pair.gateway
            .set_credit(window::MOST as usize, window::TUNNEL_BUDGET);
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
    assert_eq!(
        (parts.heads.len(), parts.end),
        (0, Some(Err(crate::tunnel::endpoint::Closed::Here)))
    );
    pair.run();
    assert!(pair.agent.is_reset(first_agent));

    // There is room for it now.
    send_head_of(&mut pair, second_agent, Kind::Interim, RESPONSE_HEAD.head);
    pair.run();
    assert_eq!(
        read(&mut pair.gateway, second).heads[0].1.len(),
        RESPONSE_HEAD.head
    );
    assert!(share.charged() <= 4 * MIB);
    for (at_gateway, at_agent) in streams {
        drop_both(&mut pair.gateway, at_gateway);
        drop_both(&mut pair.agent, at_agent);
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
        pair.agent
            .send_trailers(at_agent, vec![b't'; 500].into())
            .unwrap();
        pair.run();
        let parts = read(&mut pair.gateway, at_gateway);
        assert_eq!(
            (parts.trailers.map(|trailers| trailers.len()), parts.end),
            (Some(500), Some(Ok(())))
        );
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
    assert!(
        pair.agent
            .send_trailers(refused.1, vec![b't'; 8 * KIB].into())
            .is_err()
    );
    pair.run();
    assert_eq!(
        read(&mut pair.gateway, broken.0).end,
        Some(Err(reset("GW_TEST")))
    );
    assert_eq!(read(&mut pair.gateway, refused.0).end, Some(Err(reset(""))));
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
        let write = |out: &mut Vec<u8>| out.extend_from_slice(payload.as_bytes());
        pair.agent
            .send_head(at_agent, Kind::Response, false, write)
            .unwrap();
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
    pair.agent
        .set_credit(window::MOST as usize, window::TUNNEL_BUDGET);
    assert_eq!(share.left_beyond_least(), 25 * KIB);
    assert_eq!(
        send(&mut pair.gateway, at_gateway, &[0; MIB]),
        QUEUE_RESERVE + 25 * KIB
    );
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
    assert!(
        pair.gateway
            .send_trailers(at_gateway, vec![b't'; 30 * KIB].into())
            .is_err()
    );
    pair.run();
    assert!(
        matches!(read(&mut pair.agent, at_agent).end, Some(Err(_))),
        "the body broke off"
    );
}

#[test]
fn a_request_head_without_room_at_the_agent_is_reset_and_others_are_served() {
    let share = Share::alone(2 * (Stream::least_memory(false) + KIB));
    let mut agent = Endpoint::agent_within(4, Rc::clone(&share));
    let head = [&[0, 1, 0, 0][..], &[b'x'; 60_000]].concat();
    let requests = [
        frame(Kind::Request, true, 0x0001_0000, b"\0\x01\0\0x"),
        frame(
            Kind::Request,
            false,
            0x0001_0001,
            &head[..4 + HEADS_RESERVE - 64],
        ),
        frame(Kind::Request, true, 0x0001_0002, &head),
    ];
    agent.receive(&requests.concat()).unwrap();
    let keys = [accept(&mut agent).unwrap(), accept(&mut agent).unwrap()];
    assert!(accept(&mut agent).is_none() && share.charged() <= share.left() + share.charged());
    let mut sent = Vec::new();
    transmit_all(&mut agent, &mut sent);
    let resets: Vec<u32> = frames(&sent)
        .iter()
        .filter(|frame| frame.0 == Kind::Reset)
        .map(|frame| frame.2)
        .collect();
    assert_eq!((resets, agent.open_streams()), (vec![0x0001_0002], 2));
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
        agent.send_head(key, Kind::Interim, false, |out| {
            out.resize(out.len() + HEAD, b'x');
        })
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
