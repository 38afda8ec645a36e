//! Frames of a tunnel, as either end receives them.

use std::task::{Context, Poll, Waker};

use gw_bed::agent::sent;
use gw_shared::tunnel::endpoint::{Closed, Endpoint, ReceivedPart, StreamKey, Violation};
use gw_shared::tunnel::frame::Kind;
use gw_shared::tunnel::window;

/// Streams that the gateway has opened before it receives, and streams that the agent serves.
const STREAMS: usize = 3;

/// Bytes from the peer of one end. The lowest bit of the first byte selects the end, the others are
/// the length of the pieces.
pub fn tunnel_frames(data: &[u8]) {
    let Some((first, frames)) = data.split_first() else {
        return;
    };
    let step = usize::from(*first >> 1).max(1);
    let is_gateway = first & 1 == 1;
    let whole = receive(is_gateway, [frames]);
    assert_eq!(
        receive(is_gateway, frames.chunks(step)),
        whole,
        "the result depends on how the bytes are split"
    );
}

/// Result of one end: received parts of each stream, sent bytes, and its error.
#[derive(Debug, PartialEq, Eq)]
struct EndResult {
    violation: Option<Violation>,
    streams: Vec<Received>,
    answers: Vec<u8>,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Received {
    heads: Vec<Vec<u8>>,
    body: Vec<u8>,
    trailers: Vec<u8>,
    end: Option<Result<(), Closed>>,
}

fn receive<'a>(is_gateway: bool, pieces: impl IntoIterator<Item = &'a [u8]>) -> EndResult {
    let mut endpoint = if is_gateway {
        Endpoint::gateway()
    } else {
        Endpoint::agent(STREAMS)
    };
    let mut streams = Vec::new();
    if is_gateway {
        endpoint
            .receive(&[1, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, STREAMS as u8])
            .expect("a valid HELLO");
        let open = |_| {
            endpoint
                .open(0, false, |head| head.extend_from_slice(b"head"))
                .expect("a free slot")
        };
        streams.extend((0..STREAMS).map(open));
    }
    let violation = pieces
        .into_iter()
        .find_map(|piece| endpoint.receive(piece).err());
    assert!(endpoint.unread() <= endpoint.committed());
    let committed_max = (STREAMS + endpoint.open_streams()) * window::LEAST as usize;
    assert!(!is_gateway || endpoint.committed() <= committed_max);
    let cx = &mut Context::from_waker(Waker::noop());
    while let Poll::Ready(Some(key)) = endpoint.poll_accept(cx) {
        streams.push(key);
    }
    let received: Vec<_> = streams
        .iter()
        .map(|key| read(&mut endpoint, *key))
        .collect();
    let mut answers = sent(&mut endpoint);
    for key in streams {
        endpoint.drop_sender(key);
        endpoint.drop_receiver(key);
    }
    assert_eq!((endpoint.committed(), endpoint.unread()), (0, 0));
    answers.extend(sent(&mut endpoint));
    EndResult {
        violation,
        streams: received,
        answers,
    }
}

fn read(endpoint: &mut Endpoint, key: StreamKey) -> Received {
    let mut received = Received::default();
    while let Poll::Ready(part) =
        endpoint.poll_receive(key, &mut Context::from_waker(Waker::noop()))
    {
        match part {
            Ok(ReceivedPart::Head(Kind::Trailers, lines)) => {
                received.trailers.extend_from_slice(&lines);
            }
            Ok(ReceivedPart::Head(_, head)) => received.heads.push(head.to_vec()),
            Ok(ReceivedPart::Data(data)) => received.body.extend_from_slice(&data),
            Ok(ReceivedPart::End) => received.end = Some(Ok(())),
            Err(closed) => received.end = Some(Err(closed)),
        }
        if received.end.is_some() {
            break;
        }
    }
    endpoint.release(key, received.body.len());
    received
}
