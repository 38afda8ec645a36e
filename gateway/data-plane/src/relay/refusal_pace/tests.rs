use super::*;

const SECOND: Duration = Duration::from_secs(1);
const PER_SECOND: usize = 2000;

fn account(name: &str) -> AccountId {
    name.parse().unwrap()
}

/// Most of these times within a second.
fn most_in_a_second(times: &[Instant]) -> usize {
    let within = |from: Instant| {
        let is_within = |at: &&Instant| **at >= from && **at < from + SECOND;
        times.iter().filter(is_within).count()
    };
    times.iter().map(|from| within(*from)).max().unwrap_or(0)
}

#[test]
fn callers_that_send_again_at_once_get_two_thousand_refusals_a_second() {
    let mut pace = RefusalPace::default();
    let start = Instant::now();
    let acme = account("acme");
    // Each caller sends its next request when its refusal has left.
    let mut callers = vec![start; 400];
    let mut left = Vec::new();
    while left.len() < 3 * PER_SECOND {
        let caller = callers.iter_mut().min().unwrap();
        *caller += pace.take(&acme, *caller);
        left.push(*caller);
    }
    assert!(left.is_sorted(), "in order");
    let most = most_in_a_second(&left);
    assert!((PER_SECOND * 9 / 10..=PER_SECOND).contains(&most), "{most}");
}

#[test]
fn a_refusal_waits_a_second_at_most() {
    let mut pace = RefusalPace::default();
    let now = Instant::now();
    let acme = account("acme");
    let waits: Vec<Duration> = (0..2 * PER_SECOND).map(|_| pace.take(&acme, now)).collect();
    assert!(waits.is_sorted());
    let at_once = waits.iter().filter(|wait| wait.is_zero()).count();
    assert_eq!(at_once, limits::REFUSALS_AT_ONCE as usize + 1);
    assert_eq!(waits.last(), Some(&limits::REFUSAL_WAIT));
    // The flood is forgotten a second after its end.
    assert_eq!(pace.take(&acme, now + 2 * SECOND), Duration::ZERO);
}

#[test]
fn accounts_wait_for_their_own_refusals_and_are_forgotten() {
    let mut pace = RefusalPace::default();
    let now = Instant::now();
    for _ in 0..PER_SECOND {
        pace.take(&account("flood"), now);
    }
    assert_eq!(pace.take(&account("other"), now), Duration::ZERO);
    for number in 0..1000 {
        let at = now + number * SECOND;
        pace.take(&account(&format!("acme{number}")), at);
    }
    assert!(pace.next.len() <= 64, "{}", pace.next.len());
}
