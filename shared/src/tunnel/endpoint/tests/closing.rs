//! Streams that end before their end, and the use of their slots.

use std::task::{Context, Poll};

use bytes::Bytes;

use super::util::*;
use crate::tunnel::endpoint::{Closed, OpenError, StreamKey};
use crate::tunnel::frame::{Kind, StreamId};

/// How far a direction of a stream has got when the stream is reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    Open,
    /// Ended, and the peer knows.
    Ended,
    /// Ended, and the last frame is still under way.
    Ending,
}

const ALL: [Progress; 3] = [Progress::Open, Progress::Ended, Progress::Ending];

/// A stream with data in both directions that have got this far, each end with unread data.
fn stream(pair: &mut Pair, up: Progress, down: Progress) -> (StreamKey, StreamKey) {
    let (at_gateway, at_agent) = pair.open_with_response(false);
    send(&mut pair.gateway, at_gateway, b"up");
    send(&mut pair.agent, at_agent, b"down");
    for wanted in [Progress::Ended, Progress::Ending] {
        pair.run();
        if up == wanted {
            finish(&mut pair.gateway, at_gateway);
        }
        if down == wanted {
            finish(&mut pair.agent, at_agent);
        }
        pair.transmit();
    }
    (at_gateway, at_agent)
}

#[test]
fn a_stream_can_be_reset_at_any_point_by_either_end_or_both() {
    for up in ALL {
        for down in ALL {
            for (by_gateway, by_agent) in [(true, false), (false, true), (true, true)] {
                let case = format!("{up:?} {down:?} {by_gateway} {by_agent}");
                let mut pair = Pair::new(1);
                let (at_gateway, at_agent) = stream(&mut pair, up, down);
                if by_gateway {
                    pair.gateway.reset(at_gateway, "");
                    assert_eq!(pair.gateway.committed(), 0, "{case}");
                }
                if by_agent {
                    pair.agent.reset(at_agent, "GW_CODE");
                    assert_eq!(pair.agent.committed(), 0, "{case}");
                }
                pair.run();
                assert_eq!(pair.open_streams(), (0, 0), "{case}");
                let gateway = (
                    &mut pair.gateway,
                    at_gateway,
                    &b"down"[..],
                    down,
                    by_gateway,
                );
                let agent = (&mut pair.agent, at_agent, &b"up"[..], up, by_agent);
                for (endpoint, key, own, peers, by_self) in [gateway, agent] {
                    let parts = read(endpoint, key);
                    if by_self {
                        // Nothing of what was discarded counts as complete.
                        assert!(matches!(parts.end, Some(Err(_))), "{case}: {parts:?}");
                        assert!(!endpoint.is_received(key), "{case}");
                    } else {
                        // What was sent before the RESET arrives, and an END makes it complete.
                        assert_eq!(parts.data, own, "{case}");
                        let is_complete = peers != Progress::Open;
                        assert_eq!(parts.end.unwrap().is_ok(), is_complete, "{case}");
                        assert_eq!(endpoint.is_received(key), is_complete, "{case}");
                    }
                    let capacity = endpoint.poll_capacity(key, &mut context());
                    assert!(capacity.is_ready(), "{case}");
                    drop_both(endpoint, key);
                }
                pair.assert_idle();
                pair.open(true);
            }
        }
    }
}

#[test]
fn the_code_of_a_reset_arrives_behind_the_data() {
    let mut pair = Pair::new(1);
    let (at_gateway, at_agent) = pair.open_with_response(false);
    let body = vec![7; 50_000];
    send(&mut pair.agent, at_agent, &body);
    let code = "GW_BACKEND_ABORTED";
    pair.agent.break_off(at_agent, code).unwrap();
    let ended = pair.agent.send_data(at_agent, Bytes::new(), true);
    assert_eq!(ended, Err(Closed::Here));
    pair.run();
    let parts = read(&mut pair.gateway, at_gateway);
    assert!(parts.data == body);
    assert_eq!(parts.end, Some(Err(reset(code))));
    let ended = pair.gateway.send_data(at_gateway, Bytes::new(), true);
    assert_eq!(ended, Err(reset(code)));
    let reset = pair.gateway.poll_reset(at_gateway, &mut context());
    assert!(reset.is_ready());
    pair.close(at_gateway, at_agent);
}

#[test]
fn a_reset_before_the_response_head_reaches_the_agent() {
    let mut pair = Pair::new(1);
    let (wakes, waker) = Wakes::new();
    let (at_gateway, at_agent) = pair.open(false);
    let cx = &mut Context::from_waker(&waker);
    assert!(pair.agent.poll_reset(at_agent, cx).is_pending());
    drop_both(&mut pair.gateway, at_gateway);
    pair.run();
    assert_eq!(wakes.take(), 1);
    assert!(pair.agent.is_reset(at_agent));
    let sent = pair.agent.send_head(at_agent, Kind::Response, true, |_| {});
    assert!(sent.is_err());
}

#[test]
fn a_reset_before_the_response_head_reaches_the_gateway() {
    let mut pair = Pair::new(1);
    let (at_gateway, at_agent) = pair.open(false);
    drop_both(&mut pair.agent, at_agent);
    pair.run();
    assert_eq!(pair.end(at_gateway), Some(Err(reset(""))));
}

#[test]
fn a_slot_is_used_again_only_after_both_ends_have_sent_their_last_frame() {
    let mut pair = Pair::new(1);
    let (at_gateway, at_agent) = pair.open_with_response(true);
    pair.gateway.reset(at_gateway, "");
    drop_both(&mut pair.gateway, at_gateway);
    let refused = |pair: &mut Pair| pair.gateway.open(LEAST, true, |_| {}).unwrap_err();
    assert_eq!(refused(&mut pair), OpenError::StreamLimit);
    pair.transmit();
    assert_eq!(refused(&mut pair), OpenError::StreamLimit);
    // Data and END of the agent cross the RESET.
    send(&mut pair.agent, at_agent, b"late");
    pair.transmit();
    pair.deliver_to_gateway();
    assert_eq!(refused(&mut pair), OpenError::StreamLimit);
    pair.deliver_to_agent();
    assert_eq!(refused(&mut pair), OpenError::StreamLimit);
    pair.transmit();
    pair.deliver_to_gateway();
    drop_both(&mut pair.agent, at_agent);
    pair.assert_idle();
    pair.gateway.open(LEAST, true, |_| {}).unwrap();
    pair.transmit();
    // The same slot in its next generation.
    assert_eq!(frames(&pair.to_agent)[0].2, 0x0002_0000);
}

#[test]
fn generations_wrap_around_and_skip_0() {
    let mut pair = Pair::new(1);
    let (at_gateway, at_agent) = pair.open(true);
    respond(&mut pair.agent, at_agent, true);
    pair.run();
    pair.drop_all(at_gateway, at_agent);
    pair.gateway.slots[0].generation = u16::MAX - 1;
    for generation in [u16::MAX, 1, 2] {
        let (at_gateway, at_agent) = pair.open(true);
        let id = pair.agent.streams[at_agent.0].id;
        assert_eq!(id, StreamId::new(0, generation));
        respond(&mut pair.agent, at_agent, true);
        pair.run();
        pair.close(at_gateway, at_agent);
    }
}

#[test]
fn a_reset_behind_a_complete_response_leaves_it_complete() {
    let mut pair = Pair::new(1);
    let (at_gateway, at_agent) = pair.open_with_response(false);
    send(&mut pair.agent, at_agent, b"whole response");
    finish(&mut pair.agent, at_agent);
    // The backend did not read the rest of the upload.
    drop_both(&mut pair.agent, at_agent);
    pair.transmit();
    assert_eq!(kinds(&pair.to_gateway), [Kind::Data, Kind::Reset]);
    pair.run();
    assert_eq!(
        read(&mut pair.gateway, at_gateway).whole(),
        b"whole response"
    );
    assert_eq!(pair.capacity(at_gateway), Poll::Ready(Err(reset(""))));
    drop_both(&mut pair.gateway, at_gateway);
    pair.assert_idle();
}

#[test]
fn a_complete_response_stays_readable_when_the_sending_half_is_dropped() {
    let mut pair = Pair::new(1);
    let (at_gateway, at_agent) = pair.open_with_response(false);
    send(&mut pair.agent, at_agent, b"whole response");
    finish(&mut pair.agent, at_agent);
    pair.run();
    pair.gateway.drop_sender(at_gateway);
    pair.run();
    assert!(pair.agent.is_reset(at_agent));
    assert_eq!(
        read(&mut pair.gateway, at_gateway).whole(),
        b"whole response"
    );
    pair.gateway.drop_receiver(at_gateway);
    drop_both(&mut pair.agent, at_agent);
    pair.assert_idle();
}

#[test]
fn dropping_the_sending_half_of_an_incomplete_exchange_resets_it() {
    let mut pair = Pair::new(1);
    let (at_gateway, at_agent) = pair.open_with_response(false);
    send(&mut pair.agent, at_agent, b"part");
    pair.run();
    pair.gateway.drop_sender(at_gateway);
    assert_eq!(pair.end(at_gateway), Some(Err(Closed::Here)));
    // The END of the agent crosses the RESET.
    finish(&mut pair.agent, at_agent);
    pair.run();
    assert_eq!(pair.end(at_gateway), Some(Err(Closed::Here)));
    pair.gateway.drop_receiver(at_gateway);
    drop_both(&mut pair.agent, at_agent);
    pair.assert_idle();
}

#[test]
fn halves_that_have_ended_can_be_dropped_in_any_order() {
    for sender_first in [true, false] {
        let mut pair = Pair::new(1);
        let (at_gateway, at_agent) = pair.open_with_response(false);
        for (endpoint, key) in [(&mut pair.gateway, at_gateway), (&mut pair.agent, at_agent)] {
            send(endpoint, key, b"data");
            finish(endpoint, key);
        }
        pair.agent.report_upload(at_agent, Some(4));
        for (endpoint, key) in [(&mut pair.gateway, at_gateway), (&mut pair.agent, at_agent)] {
            // The queue is sent although the half is gone.
            endpoint.drop_sender(key);
        }
        pair.run();
        if sender_first {
            assert_eq!(read(&mut pair.gateway, at_gateway).data, b"data");
        }
        for (endpoint, key) in [(&mut pair.gateway, at_gateway), (&mut pair.agent, at_agent)] {
            endpoint.drop_receiver(key);
        }
        pair.assert_idle();
    }
}

#[test]
fn an_agent_that_does_not_read_the_upload_resets_the_stream_after_its_response() {
    let mut pair = Pair::new(1);
    let (at_gateway, at_agent) = pair.open_with_response(false);
    pair.agent.drop_receiver(at_agent);
    assert_eq!(pair.agent.committed(), 0);
    assert_eq!(send(&mut pair.gateway, at_gateway, &[0; 2 * LEAST]), LEAST);
    pair.run();
    assert_eq!((pair.agent.committed(), pair.agent.unread()), (0, 0));
    assert!(!pair.gateway.is_reset(at_gateway));
    finish(&mut pair.agent, at_agent);
    pair.agent.drop_sender(at_agent);
    pair.run();
    assert!(pair.gateway.is_reset(at_gateway));
    assert_eq!(pair.end(at_gateway), Some(Ok(())));
    drop_both(&mut pair.gateway, at_gateway);
    pair.assert_idle();
}

#[test]
fn the_report_of_an_upload_ends_the_body_and_leaves_the_response() {
    let mut pair = Pair::new(1);
    let (at_gateway, at_agent) = pair.open_with_response(false);
    assert_eq!(send(&mut pair.gateway, at_gateway, &[0; 2 * LEAST]), LEAST);
    assert!(pair.uploaded(at_gateway).is_pending());
    pair.agent.report_upload(at_agent, Some(5));
    pair.agent.report_upload(at_agent, Some(6));
    assert_eq!((pair.agent.committed(), pair.agent.unread()), (0, 0));
    pair.transmit();
    assert_eq!(kinds(&pair.to_gateway), [Kind::Uploaded]);
    pair.run();
    assert_eq!(pair.uploaded(at_gateway), Poll::Ready(Ok(Some(5))));
    assert_eq!(pair.capacity(at_gateway), Poll::Ready(Err(Closed::Here)));
    send(&mut pair.agent, at_agent, b"response");
    finish(&mut pair.agent, at_agent);
    pair.run();
    assert_eq!(read(&mut pair.gateway, at_gateway).whole(), b"response");
    pair.close(at_gateway, at_agent);
}

#[test]
fn a_body_goes_on_after_the_response_until_the_report() {
    for ends_by_reset in [false, true] {
        let mut pair = Pair::new(1);
        let (at_gateway, at_agent) = pair.open_with_response(false);
        finish(&mut pair.agent, at_agent);
        pair.run();
        assert_eq!(pair.end(at_gateway), Some(Ok(())));
        send(&mut pair.gateway, at_gateway, b"rest");
        pair.run();
        assert_eq!(read(&mut pair.agent, at_agent).data, b"rest");
        assert_eq!(pair.open_streams(), (1, 1));
        if ends_by_reset {
            // The caller has left. The report crosses the RESET.
            pair.gateway.drop_receiver(at_gateway);
            pair.agent.report_upload(at_agent, Some(4));
            pair.run();
            assert!(pair.agent.is_reset(at_agent));
            pair.gateway.drop_sender(at_gateway);
        } else {
            finish(&mut pair.gateway, at_gateway);
            pair.run();
            assert_eq!(pair.open_streams(), (1, 1));
            pair.agent.report_upload(at_agent, Some(4));
            pair.run();
            assert_eq!(pair.uploaded(at_gateway), Poll::Ready(Ok(Some(4))));
            drop_both(&mut pair.gateway, at_gateway);
        }
        drop_both(&mut pair.agent, at_agent);
        pair.assert_idle();
    }
}

#[test]
fn an_agent_without_reports_has_taken_the_body_when_it_ends_or_is_reset() {
    for resets in [false, true] {
        let mut pair = Pair::new(1);
        pair.gateway.reports_uploads = false;
        pair.agent.reports_uploads = false;
        let (at_gateway, at_agent) = pair.open_with_response(false);
        finish(&mut pair.agent, at_agent);
        pair.run();
        let (wakes, waker) = Wakes::new();
        let cx = &mut Context::from_waker(&waker);
        assert!(pair.gateway.poll_uploaded(at_gateway, cx).is_pending());
        if resets {
            drop_both(&mut pair.agent, at_agent);
        } else {
            finish(&mut pair.gateway, at_gateway);
        }
        pair.run();
        assert_eq!(wakes.take(), 1);
        assert_eq!(pair.uploaded(at_gateway), Poll::Ready(Ok(None)));
        assert_eq!(pair.gateway.open_streams(), 0);
    }
}

#[test]
fn an_agent_that_drops_an_ended_exchange_without_a_report_resets_it_once() {
    let mut pair = Pair::new(1);
    let (at_gateway, at_agent) = pair.open_with_response(false);
    finish(&mut pair.gateway, at_gateway);
    pair.run();
    send(&mut pair.agent, at_agent, b"data");
    finish(&mut pair.agent, at_agent);
    // The end of the response is still queued.
    drop_both(&mut pair.agent, at_agent);
    pair.run();
    assert_eq!(pair.uploaded(at_gateway), Poll::Ready(Err(reset(""))));
    drop_both(&mut pair.gateway, at_gateway);
    pair.assert_idle();
}

#[test]
fn a_lost_tunnel_closes_its_streams_after_the_received_data() {
    let mut pair = Pair::new(3);
    let (complete, first) = pair.open_with_response(false);
    let (partial, second) = pair.open_with_response(false);
    let (unread, third) = pair.open_with_response(false);
    for key in [first, second, third] {
        send(&mut pair.agent, key, b"data");
    }
    finish(&mut pair.agent, first);
    pair.run();
    let (wakes, waker) = Wakes::new();
    let cx = &mut Context::from_waker(&waker);
    assert!(pair.gateway.poll_reset(partial, cx).is_pending());
    assert!(pair.gateway.poll_message(cx).is_pending());
    send(&mut pair.gateway, partial, &[0; LEAST]);
    pair.gateway.lose();
    assert_eq!(wakes.take(), 2);
    assert_eq!(pair.gateway.committed(), 3 * b"data".len());
    pair.gateway.drop_sender(complete);
    assert_eq!(read(&mut pair.gateway, complete).whole(), b"data");
    let parts = read(&mut pair.gateway, partial);
    assert_eq!(parts.data, b"data");
    assert_eq!(parts.end, Some(Err(Closed::Lost)));
    assert_eq!(pair.capacity(partial), Poll::Ready(Err(Closed::Lost)));
    let refused = pair.gateway.open(LEAST, true, |_| {});
    assert_eq!(refused.unwrap_err(), OpenError::Lost);
    pair.gateway.drop_receiver(complete);
    drop_both(&mut pair.gateway, partial);
    drop_both(&mut pair.gateway, unread);
    assert_eq!(pair.gateway.streams.len(), 0);
    assert_eq!(pair.gateway.committed(), 0);
    assert_eq!(pair.gateway.open_streams(), 0);
}

#[test]
fn streams_that_were_opened_before_the_tunnel_was_lost_are_accepted_as_lost() {
    let mut pair = Pair::new(3);
    pair.gateway.open(LEAST, false, |_| {}).unwrap();
    pair.run();
    pair.agent.lose();
    let key = accept(&mut pair.agent).unwrap();
    assert_eq!(read(&mut pair.agent, key).end, Some(Err(Closed::Lost)));
    assert_eq!(pair.agent.poll_accept(&mut context()), Poll::Ready(None));
    drop_both(&mut pair.agent, key);
    assert_eq!((pair.agent.streams.len(), pair.agent.committed()), (0, 0));
}
