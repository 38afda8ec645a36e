use super::*;

const TOOK: Duration = Duration::from_millis(10);
const REFUSED_IN: Duration = Duration::from_millis(1);

struct Tunnel {
    health: TunnelHealth,
    start: Instant,
    now: Instant,
    /// Random number of the next opening: 0.5 opens for exactly the time without the spread.
    random: f64,
}

impl Tunnel {
    fn new() -> Self {
        let start = Instant::now();
        Self {
            health: TunnelHealth::new(Some(TOOK), start),
            start,
            now: start,
            random: 0.5,
        }
    }

    fn pass(&mut self, millis: u64) {
        self.now += Duration::from_millis(millis);
    }

    fn fail(&mut self, failures: &[TunnelFailure]) {
        for failure in failures {
            let attempt = self.health.began(self.now);
            self.end(attempt, Some(*failure));
        }
    }

    fn succeed(&mut self) {
        let attempt = self.health.began(self.now);
        self.end(attempt, None);
    }

    fn end(&mut self, attempt: BegunAttempt, failure: Option<TunnelFailure>) {
        match failure {
            None => self.health.succeeded(attempt, TOOK, self.now),
            Some(failure) => {
                self.health
                    .failed(attempt, failure, REFUSED_IN, self.now, &mut || self.random);
            }
        }
    }

    fn tier(&self) -> HealthTier {
        self.health.tier(false, self.now)
    }

    fn state(&self) -> (&'static str, u128) {
        let condition = self.health.condition(self.now);
        assert_eq!(
            condition.why.is_empty(),
            condition.state == TunnelState::Ready
        );
        (
            condition.state.as_str(),
            (condition.since - self.start).as_millis(),
        )
    }

    fn latency_millis(&self) -> u128 {
        self.health.latency(self.now).as_millis()
    }
}

use TunnelFailure::{Broken, NoSlot, Unreachable};

#[test]
fn an_agent_that_recovers_by_its_report_gets_its_share_at_once() {
    let start = Instant::now();
    let millis = |health: &TunnelHealth, at| health.latency(at).as_millis();
    for failures in [1, 3] {
        let mut health = TunnelHealth::new(Some(Duration::from_millis(4)), start);
        for _ in 0..failures {
            let attempt = health.began(start);
            health.failed(
                attempt,
                Unreachable,
                Duration::from_millis(1),
                start,
                &mut || 0.5,
            );
        }
        health.reported(BackendHealth::Unhealthy, start);
        assert_eq!(millis(&health, start), 5000, "{failures} failures");
        health.reported(BackendHealth::Healthy, start);
        assert_eq!(
            (millis(&health, start), health.tier(true, start)),
            (4, HealthTier::Ready),
            "{failures} failures"
        );
    }
}

#[test]
fn the_breaker_opens_after_failures_in_a_row() {
    for (row, opens) in [
        (&[Unreachable; 3][..], true),
        (&[Unreachable; 2][..], false),
        (&[Broken; 5][..], true),
        (&[Broken; 4][..], false),
        (&[NoSlot; 100][..], false),
        (&[Unreachable, Broken, Unreachable, Broken][..], false),
        (
            &[Unreachable, Broken, Unreachable, Broken, Broken][..],
            true,
        ),
        (
            &[Unreachable, Broken, NoSlot, Unreachable, Unreachable][..],
            true,
        ),
    ] {
        let mut tunnel = Tunnel::new();
        tunnel.fail(row);
        assert_eq!(tunnel.tier() == HealthTier::Impaired, opens, "{row:?}");
        let mut tunnel = Tunnel::new();
        let (last, first) = row.split_last().unwrap();
        tunnel.fail(first);
        tunnel.succeed();
        tunnel.fail(&[*last]);
        assert_eq!(
            tunnel.tier(),
            HealthTier::Ready,
            "a success ends the row: {row:?}"
        );
    }
}

#[test]
fn it_opens_for_longer_each_time_until_a_probe_succeeds() {
    let mut tunnel = Tunnel::new();
    tunnel.fail(&[Unreachable; 3]);
    for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
        let opened = tunnel.now;
        tunnel.pass(seconds * 1000 - 1);
        assert_eq!(
            (tunnel.tier(), tunnel.state().0),
            (HealthTier::Impaired, "breaker_open"),
            "{seconds}"
        );
        tunnel.pass(1);
        assert_eq!(tunnel.tier(), HealthTier::Probe, "{seconds}");
        assert_eq!(
            tunnel.state(),
            (
                "probing",
                (opened - tunnel.start).as_millis() + u128::from(seconds) * 1000
            )
        );
        tunnel.fail(&[Unreachable]);
    }
    tunnel.pass(60_000);
    tunnel.succeed();
    assert_eq!(
        (tunnel.tier(), tunnel.state().0),
        (HealthTier::Ready, "ready")
    );
    tunnel.fail(&[Unreachable; 3]);
    tunnel.pass(1000);
    assert_eq!(
        tunnel.tier(),
        HealthTier::Probe,
        "a success begins again with the shortest opening"
    );
}

#[test]
fn openings_are_spread_by_half() {
    for (random, millis) in [(0.0, 500), (0.999, 1499)] {
        let mut tunnel = Tunnel::new();
        tunnel.random = random;
        tunnel.fail(&[Unreachable; 3]);
        tunnel.pass(millis - 1);
        assert_eq!(tunnel.tier(), HealthTier::Impaired);
        tunnel.pass(1);
        assert_eq!(tunnel.tier(), HealthTier::Probe);
    }
}

#[test]
fn one_request_at_a_time_probes() {
    let mut tunnel = Tunnel::new();
    tunnel.fail(&[Unreachable; 3]);
    tunnel.pass(1000);
    let probe = tunnel.health.began(tunnel.now);
    assert_eq!(
        (tunnel.tier(), tunnel.state()),
        (HealthTier::Impaired, ("probing", 1000))
    );
    tunnel.pass(5000);
    assert_eq!(
        tunnel.tier(),
        HealthTier::Impaired,
        "the probe has no answer yet"
    );
    tunnel.health.abandoned(probe, TOOK, tunnel.now);
    assert_eq!(tunnel.tier(), HealthTier::Impaired);
    tunnel.pass(1000);
    assert_eq!(
        tunnel.tier(),
        HealthTier::Probe,
        "a second after the caller left"
    );

    let probe = tunnel.health.began(tunnel.now);
    tunnel.end(probe, Some(NoSlot));
    tunnel.pass(1000);
    assert_eq!(tunnel.tier(), HealthTier::Probe, "no verdict either");

    let _unanswered = tunnel.health.began(tunnel.now);
    tunnel.pass(59_999);
    assert_eq!(tunnel.tier(), HealthTier::Impaired);
    tunnel.pass(1);
    assert_eq!(
        tunnel.tier(),
        HealthTier::Probe,
        "a probe without an answer does not keep the tunnel closed for ever"
    );
    tunnel.succeed();
    assert_eq!(tunnel.tier(), HealthTier::Ready);
}

#[test]
fn a_request_that_cannot_be_repeated_probes_only_where_it_cannot_be_lost() {
    for (failures, waits) in [(&[Unreachable; 3][..], false), (&[Broken; 5][..], true)] {
        let mut tunnel = Tunnel::new();
        tunnel.fail(failures);
        tunnel.pass(1000);
        assert_eq!(tunnel.health.tier(true, tunnel.now), HealthTier::Probe);
        assert_eq!(
            tunnel.health.tier(false, tunnel.now) == HealthTier::Impaired,
            waits
        );
        tunnel.pass(60_000);
        assert_eq!(
            tunnel.health.tier(false, tunnel.now),
            HealthTier::Probe,
            "no repeatable request has come for a minute"
        );
    }
}

#[test]
fn outcomes_of_attempts_before_an_opening_do_not_count_after_it() {
    let mut tunnel = Tunnel::new();
    let mut earlier: Vec<BegunAttempt> = (0..10).map(|_| tunnel.health.began(tunnel.now)).collect();
    tunnel.fail(&[Unreachable; 3]);
    let late_success = earlier.pop().unwrap();
    let late_failure = earlier.pop().unwrap();
    tunnel.end(late_success, None);
    tunnel.end(late_failure, Some(Unreachable));
    assert_eq!(tunnel.tier(), HealthTier::Impaired);
    tunnel.pass(1000);
    assert_eq!(
        tunnel.tier(),
        HealthTier::Probe,
        "the opening is not longer"
    );
    tunnel.succeed();
    for attempt in earlier {
        tunnel.end(attempt, Some(Unreachable));
    }
    assert_eq!(tunnel.tier(), HealthTier::Ready);
}

#[test]
fn without_another_tunnel_requests_go_on_and_an_answer_closes_the_breaker() {
    let mut tunnel = Tunnel::new();
    tunnel.fail(&[Unreachable; 3]);
    tunnel.fail(&[Unreachable; 20]);
    tunnel.pass(999);
    assert_eq!(tunnel.tier(), HealthTier::Impaired);
    tunnel.succeed();
    assert_eq!(tunnel.tier(), HealthTier::Ready);
}

#[test]
fn the_agents_report_decides() {
    use BackendHealth::{Healthy, Unhealthy, Unknown};
    let mut tunnel = Tunnel::new();
    for (report, tier) in [
        (Healthy, HealthTier::Ready),
        (Unhealthy, HealthTier::Impaired),
        (Unknown, HealthTier::Ready),
        (Unhealthy, HealthTier::Impaired),
    ] {
        tunnel.health.reported(report, tunnel.now);
        assert_eq!(tunnel.tier(), tier);
    }
    tunnel.pass(500);
    tunnel.health.reported(Unhealthy, tunnel.now);
    assert_eq!(
        tunnel.state(),
        ("unhealthy", 0),
        "a repeated report changes no time"
    );
    tunnel.health.reported(Healthy, tunnel.now);
    assert_eq!(tunnel.state(), ("ready", 500));

    tunnel.fail(&[Unreachable; 3]);
    tunnel.health.reported(Healthy, tunnel.now);
    assert_eq!(
        tunnel.tier(),
        HealthTier::Impaired,
        "a repeated report says nothing of the failures"
    );
    tunnel.health.reported(Unhealthy, tunnel.now);
    tunnel.pass(100);
    tunnel.health.reported(Healthy, tunnel.now);
    assert_eq!(
        (tunnel.tier(), tunnel.state()),
        (HealthTier::Ready, ("ready", 600))
    );
    assert!(tunnel.latency_millis() <= 10, "it gets its share at once");

    tunnel.fail(&[Unreachable; 3]);
    tunnel.pass(1999);
    assert_eq!(
        tunnel.tier(),
        HealthTier::Impaired,
        "reports alone do not shorten the openings"
    );
    tunnel.health.reported(Unknown, tunnel.now);
    tunnel.pass(1);
    assert_eq!(tunnel.tier(), HealthTier::Probe);
}

#[test]
fn a_suspect_tunnel_is_impaired_until_its_ping_is_answered() {
    let mut tunnel = Tunnel::new();
    tunnel.pass(2000);
    tunnel.health.suspect(true, tunnel.now);
    tunnel.pass(1000);
    tunnel.health.suspect(true, tunnel.now);
    assert_eq!(
        (tunnel.tier(), tunnel.state()),
        (HealthTier::Impaired, ("suspect", 2000))
    );
    tunnel.health.suspect(false, tunnel.now);
    assert_eq!(
        (tunnel.tier(), tunnel.state()),
        (HealthTier::Ready, ("ready", 3000))
    );
}

#[test]
fn a_failure_counts_as_a_long_latency() {
    let mut tunnel = Tunnel::new();
    tunnel.fail(&[Unreachable]);
    assert_eq!(tunnel.latency_millis(), 5000);
    let attempt = tunnel.health.began(tunnel.now);
    tunnel.health.failed(
        attempt,
        Broken,
        Duration::from_secs(7),
        tunnel.now,
        &mut || 0.5,
    );
    assert_eq!(tunnel.latency_millis(), 7000);
    tunnel.fail(&[Unreachable; 2]);
    tunnel.pass(1000);
    tunnel.succeed();
    assert_eq!(tunnel.latency_millis(), 10, "the probe measured it");

    tunnel.fail(&[NoSlot]);
    assert_eq!(tunnel.latency_millis(), 20);
    tunnel.fail(&[NoSlot; 2]);
    assert_eq!(tunnel.latency_millis(), 80);
    tunnel.fail(&[NoSlot; 20]);
    assert_eq!(tunnel.latency_millis(), 5000);

    let attempt = tunnel.health.began(tunnel.now);
    tunnel
        .health
        .abandoned(attempt, Duration::from_secs(30), tunnel.now);
    assert_eq!(
        (tunnel.latency_millis(), tunnel.tier()),
        (30_000, HealthTier::Ready)
    );
}

#[test]
fn a_new_tunnel_begins_with_the_median_of_the_others() {
    let median = |millis: &[u64]| median_latency(millis.iter().copied().map(Duration::from_millis));
    assert_eq!(median(&[]), None);
    assert_eq!(median(&[7]), Some(Duration::from_millis(7)));
    assert_eq!(median(&[30, 10]), Some(Duration::from_millis(10)));
    assert_eq!(median(&[90, 10, 20]), Some(Duration::from_millis(20)));
    let now = Instant::now();
    assert_eq!(
        TunnelHealth::new(None, now).latency(now),
        Duration::from_millis(10)
    );
    assert_eq!(
        TunnelHealth::new(Some(Duration::from_secs(1)), now).latency(now),
        Duration::from_secs(1)
    );
}

#[test]
fn names_of_states_are_distinct() {
    let names: std::collections::BTreeSet<_> = TunnelState::ALL
        .into_iter()
        .map(TunnelState::as_str)
        .collect();
    assert_eq!(names.len(), TunnelState::ALL.len());
}
