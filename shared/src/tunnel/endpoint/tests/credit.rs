//! Credit: exact, bounded, and never lost.

use std::task::{Context, Poll};

use super::util::*;
use crate::tunnel::endpoint::StreamKey;
use crate::tunnel::frame::Kind;
use crate::tunnel::window;

const MIB: usize = 1024 * 1024;

/// Sum of the grants in frames.
fn granted(bytes: &[u8]) -> usize {
    let is_grant = |kind| matches!(kind, Kind::Credit | Kind::Request);
    let frames = frames(bytes).into_iter();
    frames
        .filter(|(kind, ..)| is_grant(*kind))
        .map(|(.., payload)| u32::from_be_bytes(*payload.first_chunk().unwrap()) as usize)
        .sum()
}

#[test]
fn a_sender_stops_after_its_credit_and_goes_on_when_the_reader_does() {
    let mut pair = Pair::new(2);
    let (at_gateway, at_agent) = pair.open_with_response(false);
    let data = vec![1; MIB];
    for round in 0..50 {
        let (wakes, waker) = Wakes::new();
        let sent = send(&mut pair.agent, at_agent, &data);
        assert!(sent > 0, "round {round}");
        pair.run();
        while send(&mut pair.agent, at_agent, &data) > 0 {
            pair.run();
        }
        let cx = &mut Context::from_waker(&waker);
        assert!(pair.agent.poll_capacity(at_agent, cx).is_pending());
        // All of the credit is used.
        assert_eq!(pair.gateway.unread(), pair.gateway.committed());
        let unread = take(&mut pair.gateway, at_gateway).data.len();
        // Grants come with the released bytes, not with the read ones.
        pair.run();
        assert_eq!(wakes.take(), 0);
        pair.gateway.release(at_gateway, unread);
        pair.run();
        assert_eq!(wakes.take(), 1);
        assert_eq!(pair.gateway.unread(), 0);
        assert_eq!(pair.gateway.committed(), window::FIRST as usize);
    }
}

#[test]
fn committed_is_the_sum_of_grants_less_the_relayed_bytes() {
    let mut pair = Pair::new(8);
    pair.gateway.set_credit(MIB, 64 * MIB);
    let mut grants = 0;
    let mut relayed = 0;
    let mut streams: Vec<(StreamKey, StreamKey)> = Vec::new();
    for _ in 0..4 {
        let at_gateway = pair.gateway.open(100_000, true, |_| {}).unwrap();
        pair.transmit();
        grants += granted(&pair.to_agent);
        pair.deliver_to_agent();
        let at_agent = accept(&mut pair.agent).unwrap();
        respond(&mut pair.agent, at_agent, false);
        streams.push((at_gateway, at_agent));
    }
    for round in 0..200usize {
        for (number, (at_gateway, at_agent)) in streams.iter().enumerate() {
            send(&mut pair.agent, *at_agent, &vec![0; 10_000 * (number + 1)]);
            if round % (number + 1) == 0 {
                relayed += read(&mut pair.gateway, *at_gateway).data.len();
            }
        }
        pair.transmit();
        pair.deliver_to_gateway();
        grants += granted(&pair.to_agent);
        assert_eq!(pair.gateway.committed(), grants - relayed);
        pair.deliver_to_agent();
    }
    assert!(relayed > 10 * MIB);
}

#[test]
fn grants_stay_within_the_budget_and_a_least_window_for_each_stream() {
    for (window, budget) in [
        (MIB, 4 * MIB),
        (8 * MIB, 8 * MIB),
        (LEAST, 0),
        (8 * MIB, MIB),
    ] {
        let mut pair = Pair::new(200);
        pair.gateway.set_credit(window, budget);
        let mut streams: Vec<(StreamKey, StreamKey)> = Vec::new();
        for opened in 1..=200 {
            let at_gateway = pair.gateway.open(window, true, |_| {}).unwrap();
            pair.run();
            let at_agent = accept(&mut pair.agent).unwrap();
            respond(&mut pair.agent, at_agent, false);
            streams.push((at_gateway, at_agent));
            let least = opened * LEAST;
            assert!((least..=budget + least).contains(&pair.gateway.committed()));
        }
        // Even while every second reader goes on.
        for _ in 0..20 {
            for (number, (at_gateway, at_agent)) in streams.iter().enumerate() {
                send(&mut pair.agent, *at_agent, &[0; LEAST]);
                if number % 2 == 0 {
                    read(&mut pair.gateway, *at_gateway);
                }
            }
            pair.run();
            assert!(pair.gateway.committed() <= budget + 200 * LEAST);
            assert!(pair.gateway.unread() <= pair.gateway.committed());
        }
        for (at_gateway, at_agent) in streams {
            pair.drop_all(at_gateway, at_agent);
        }
        pair.run();
        pair.assert_idle();
    }
}

#[test]
fn no_mix_of_windows_and_budgets_stops_a_stream() {
    let windows = [LEAST, LEAST + 1, 100_000, MIB + 7];
    for first in windows {
        for then in windows {
            for budget in [0, 1, LEAST - 1, 3 * LEAST + 5, MIB, 64 * MIB] {
                let mut pair = Pair::new(4);
                pair.gateway.set_credit(first, 64 * MIB);
                let at_gateway = pair.gateway.open(first, true, |_| {}).unwrap();
                let other = pair.gateway.open(first, true, |_| {}).unwrap();
                pair.run();
                let at_agent = accept(&mut pair.agent).unwrap();
                let stalled = accept(&mut pair.agent).unwrap();
                respond(&mut pair.agent, at_agent, false);
                respond(&mut pair.agent, stalled, false);
                send(&mut pair.agent, stalled, &[0; LEAST]);
                pair.gateway.set_credit(then, budget);
                let mut received = 0;
                let goal = first.max(then) + 3 * LEAST;
                while received < goal {
                    let sent = send(&mut pair.agent, at_agent, &vec![0; goal - received]);
                    pair.run();
                    let now = read(&mut pair.gateway, at_gateway).data.len();
                    pair.run();
                    assert!(
                        sent > 0 && now > 0,
                        "{first} {then} {budget}: stopped at {received}"
                    );
                    received += now;
                }
                assert!(pair.gateway.unread_by_stream().eq([LEAST]));
                drop_both(&mut pair.gateway, other);
            }
        }
    }
}

#[test]
fn a_reader_that_relays_byte_by_byte_stops_nothing_and_causes_few_grants() {
    let mut pair = Pair::new(1);
    let (at_gateway, at_agent) = pair.open_with_response(false);
    pair.gateway.set_credit(LEAST, 0);
    let mut relayed = 0;
    let mut grants = 0;
    let mut idle = 0;
    while relayed < 4 * LEAST {
        send(&mut pair.agent, at_agent, &[0; LEAST]);
        pair.transmit();
        grants += frames(&pair.to_agent).len();
        pair.deliver_to_agent();
        pair.deliver_to_gateway();
        let unread = take(&mut pair.gateway, at_gateway).data.len();
        for _ in 0..unread {
            pair.gateway.release(at_gateway, 1);
        }
        // A grant takes one round.
        idle = if unread > 0 { 0 } else { idle + 1 };
        assert!(idle <= 1, "stopped at {relayed}");
        relayed += unread;
    }
    assert!(grants <= 4 * 4 + 1, "{grants}");
}

#[test]
fn uploads_begin_with_a_least_window_and_grow() {
    let mut pair = Pair::new(1);
    let (at_gateway, at_agent) = pair.open(false);
    assert_eq!(pair.agent.committed(), LEAST);
    assert_eq!(send(&mut pair.gateway, at_gateway, &[0; MIB]), LEAST);
    pair.run();
    pair.agent.set_credit(4 * MIB, 64 * MIB);
    assert_eq!(read(&mut pair.agent, at_agent).data.len(), LEAST);
    assert_eq!(pair.agent.committed(), 4 * MIB);
    pair.run();
    let mut sent = 0;
    while sent < 4 * MIB {
        sent += send(&mut pair.gateway, at_gateway, &vec![0; MIB]);
        pair.run();
    }
    assert_eq!(pair.agent.unread(), 4 * MIB);
    assert_eq!(send(&mut pair.gateway, at_gateway, b"x"), 0);
}

#[test]
fn the_first_credit_is_kept_within_what_the_agent_accepts() {
    let mut pair = Pair::new(3);
    pair.gateway.open(0, true, |_| {}).unwrap();
    assert_eq!(pair.gateway.committed(), LEAST);
    pair.gateway.open(usize::MAX, true, |_| {}).unwrap();
    assert_eq!(pair.gateway.committed(), LEAST + window::MOST as usize);
    pair.gateway.set_credit(MIB, 9 * MIB);
    pair.gateway.open(2 * MIB, true, |_| {}).unwrap();
    assert_eq!(pair.gateway.committed(), 9 * MIB);
    pair.run();
}

#[test]
fn nothing_is_granted_once_the_peer_has_ended_or_the_stream_is_reset_or_lost() {
    for how in 0..4 {
        let mut pair = Pair::new(1);
        let (at_gateway, at_agent) = pair.open_with_response(false);
        send(&mut pair.agent, at_agent, &[0; LEAST]);
        pair.run();
        let unread = take(&mut pair.gateway, at_gateway).data.len();
        match how {
            0 => finish(&mut pair.agent, at_agent),
            1 => pair.agent.reset(at_agent, ""),
            2 => pair.gateway.break_off(at_gateway, "").unwrap(),
            _ => pair.gateway.lose(),
        }
        pair.transmit();
        pair.to_agent.clear();
        pair.deliver_to_gateway();
        pair.transmit();
        pair.to_agent.clear();
        if how != 2 {
            // Only the unread bytes count.
            assert_eq!(pair.gateway.committed(), unread);
        }
        pair.gateway.release(at_gateway, unread);
        pair.transmit();
        assert!(pair.to_agent.is_empty(), "{how}");
        drop_both(&mut pair.gateway, at_gateway);
        assert_eq!(pair.gateway.committed(), 0);
    }
}

#[test]
fn more_is_never_released_than_was_received() {
    let mut pair = Pair::new(1);
    let (at_gateway, at_agent) = pair.open_with_response(false);
    send(&mut pair.agent, at_agent, b"data");
    pair.run();
    let before = pair.gateway.committed();
    pair.gateway.release(at_gateway, usize::MAX);
    assert!(pair.gateway.committed() >= before - 4);
    assert_eq!(pair.gateway.unread(), 0);
    let capacity = pair.agent.poll_capacity(at_agent, &mut context());
    assert!(matches!(capacity, Poll::Ready(Ok(_))));
}

#[test]
fn the_gateway_learns_how_much_is_taken_behind_the_end_of_a_request() {
    let mut pair = Pair::new(1);
    let (at_gateway, at_agent) = pair.open(false);
    let body = vec![1; 40_000];
    assert_eq!(send(&mut pair.gateway, at_gateway, &body), body.len());
    finish(&mut pair.gateway, at_gateway);
    pair.run();
    assert_eq!(take(&mut pair.agent, at_agent).data.len(), body.len());
    assert_eq!(pair.gateway.granted(at_gateway), 0);
    for (released, taken) in [(16_000, 0), (400, 16_400), (20_000, 36_400)] {
        pair.agent.release(at_agent, released);
        pair.run();
        assert_eq!(pair.gateway.granted(at_gateway), taken);
    }
    // Nothing is to be told behind UPLOADED.
    pair.agent.report_upload(at_agent, Some(40_000));
    pair.agent.release(at_agent, 3_600);
    pair.run();
    assert_eq!(pair.gateway.granted(at_gateway), 36_400);
}
