//! Bytes that no peer sends: they cause a violation or are valid by chance, and never a panic or
//! unbounded memory.

use proptest::prelude::*;

use super::util::*;
use crate::tunnel::endpoint::{Endpoint, Role};
use crate::tunnel::frame::Kind;

/// Frames with a plausible header: known types, a few streams, short payloads.
fn plausible() -> impl Strategy<Value = Vec<u8>> {
    let kind = prop_oneof![8 => 1u8..=13, 1 => any::<u8>()];
    let stream = prop_oneof![
        6 => (0u32..3, 0u32..4).prop_map(|(slot, generation)| generation << 16 | slot),
        3 => Just(0),
        1 => any::<u32>(),
    ];
    let payload = prop_oneof![
        4 => prop::collection::vec(any::<u8>(), 0..12),
        2 => Just(vec![0, 1, 0, 0]),
        2 => Just(vec![0; 8]),
        1 => (0usize..16_377).prop_map(|length| vec![b'x'; length]),
        1 => (0usize..70_000).prop_map(|length| vec![b'x'; length]),
    ];
    (kind, any::<bool>(), stream, payload).prop_map(|(kind, end, stream, payload)| {
        let [_, length @ ..] = (payload.len() as u32).to_be_bytes();
        let kind = kind | if end { 0x80 } else { 0 };
        [&[kind][..], &length, &stream.to_be_bytes(), &payload].concat()
    })
}

fn endpoint(role: Role) -> Endpoint {
    match role {
        Role::Gateway => {
            let mut gateway = Endpoint::gateway();
            receive(&mut gateway, frame(Kind::Hello, false, 0, &[0, 0, 0, 4]));
            for end in [true, false, true] {
                gateway.open(LEAST, end, |_| {}).unwrap();
            }
            gateway
        }
        Role::Agent => Endpoint::agent(3),
    }
}

/// Feeds `bytes` in pieces of `step` bytes and uses what arrives, up to the first violation.
fn feed(role: Role, bytes: &[u8], step: usize, reads: bool) {
    let mut endpoint = endpoint(role);
    let mut keys = Vec::new();
    for piece in bytes.chunks(step) {
        if endpoint.receive(piece).is_err() {
            endpoint.lose();
            break;
        }
        while let Some(key) = accept(&mut endpoint) {
            keys.push(key);
        }
        assert!(endpoint.unread() <= endpoint.committed());
        let committed = endpoint.committed();
        let most = keys.len().max(3) * LEAST;
        assert!(reads || committed <= most, "{committed} of {most}");
        if reads {
            for key in &keys {
                read(&mut endpoint, *key);
                send(&mut endpoint, *key, b"answer");
            }
        }
        transmit_all(&mut endpoint, &mut Vec::new());
    }
    for key in keys {
        read(&mut endpoint, key);
        drop_both(&mut endpoint, key);
    }
    transmit_all(&mut endpoint, &mut Vec::new());
}

/// Bytes that a gateway and an agent have sent each other.
fn traffic(streams: usize, body: usize) -> (Vec<u8>, Vec<u8>) {
    let mut pair = Pair::new(4);
    let mut to_gateway = Vec::new();
    let mut to_agent = Vec::new();
    let mut turn = |pair: &mut Pair| {
        pair.transmit();
        to_gateway.extend_from_slice(&pair.to_gateway);
        to_agent.extend_from_slice(&pair.to_agent);
        pair.deliver_to_agent();
        pair.deliver_to_gateway();
    };
    for number in 0..streams {
        let write = |head: &mut Vec<u8>| head.extend_from_slice(b"head");
        let at_gateway = pair.gateway.open(LEAST, false, write).unwrap();
        send(&mut pair.gateway, at_gateway, &vec![1; body]);
        turn(&mut pair);
        let at_agent = accept(&mut pair.agent).unwrap();
        read(&mut pair.agent, at_agent);
        respond(&mut pair.agent, at_agent, false);
        send(&mut pair.agent, at_agent, &vec![2; body]);
        pair.gateway.ping(number as u64);
        turn(&mut pair);
        read(&mut pair.gateway, at_gateway);
        if number % 2 == 0 {
            finish(&mut pair.gateway, at_gateway);
            finish(&mut pair.agent, at_agent);
        }
        pair.drop_all(at_gateway, at_agent);
        turn(&mut pair);
        turn(&mut pair);
    }
    (to_gateway, to_agent)
}

proptest! {
    #[test]
    fn random_bytes_never_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..300),
        step in 1usize..40,
    ) {
        feed(Role::Gateway, &bytes, step, true);
        feed(Role::Agent, &bytes, step, true);
    }

    #[test]
    fn plausible_frames_never_panic(
        frames in prop::collection::vec(plausible(), 0..40),
        step in prop_oneof![1usize..40, Just(usize::MAX)],
        reads: bool,
    ) {
        let bytes = frames.concat();
        // Byte by byte only for short input.
        let step = step.max(bytes.len() / 2000).max(1);
        feed(Role::Gateway, &bytes, step, reads);
        feed(Role::Agent, &bytes, step, reads);
    }

    #[test]
    fn damaged_traffic_never_panics(
        streams in 1usize..4,
        body in 0usize..3000,
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..4), 1..4),
        step in 1usize..2000,
    ) {
        let (to_gateway, to_agent) = traffic(streams, body);
        for (role, mut bytes) in [(Role::Gateway, to_gateway), (Role::Agent, to_agent)] {
            for (at, byte, how) in &damage {
                if bytes.is_empty() {
                    break;
                }
                let at = at.index(bytes.len());
                match how {
                    0 => bytes[at] = *byte,
                    1 => drop(bytes.remove(at)),
                    2 => bytes.insert(at, *byte),
                    _ => bytes.copy_within(at.., at / 2),
                }
            }
            feed(role, &bytes, step, true);
        }
    }
}
