//! Faults and operations of a random schedule.

use std::time::Duration;

use super::random::Random;

#[derive(Debug, Clone, Copy)]
pub(super) enum Fault {
    Start(usize),
    Crash(usize),
    Pause(usize),
    Resume(usize),
    EngineDown {
        loses_beats: bool,
    },
    EngineHung,
    EngineUp,
    /// Cuts the requests to the engine, or its replies, or both.
    CutEngine {
        host: usize,
        requests: bool,
        replies: bool,
    },
    HealEngine(usize),
    CutPeer {
        from: usize,
        to: usize,
    },
    HealPeer {
        from: usize,
        to: usize,
    },
    /// The host ends its membership itself.
    Leave(usize),
    /// `by` asks that `host` drains.
    Drain {
        by: usize,
        host: usize,
    },
    /// `by` removes a row that is over.
    Remove {
        by: usize,
    },
    /// `by` takes the host for refusing connections, though it lives.
    Refused {
        by: usize,
        host: usize,
    },
    /// Makes the calls of the host slow, but not so slow that they fail.
    Slow {
        host: usize,
        is_slow: bool,
    },
    /// Loses this many percent of all messages and delays as many.
    Loss(u64),
}

/// A schedule: at which times what happens. All faults end at `heal`.
#[derive(Debug)]
pub(super) struct Schedule {
    pub(super) hosts: usize,
    /// Host with the same slot as host 0, which starts later.
    pub(super) has_twin: bool,
    pub(super) faults: Vec<(Duration, Fault)>,
    pub(super) heal: Duration,
}

impl Schedule {
    pub(super) fn of(hosts: usize, faults: impl Iterator<Item = (Duration, Fault)>) -> Self {
        Self { hosts, has_twin: false, faults: faults.collect(), heal: Duration::ZERO }
    }

    pub(super) fn random(random: &mut Random) -> Self {
        let heal = Duration::from_secs(20);
        let hosts = 2 + random.index(4);
        let has_twin = random.percent(10);
        let mut schedule = Self { hosts: hosts + usize::from(has_twin), has_twin, faults: Vec::new(), heal };
        let latest_start = if random.percent(50) { 1 } else { 6_000 };
        for host in 0..hosts {
            let at = random.millis(0, latest_start);
            schedule.faults.push((at, Fault::Start(host)));
        }
        if has_twin {
            schedule.faults.push((random.millis(3_000, 18_000), Fault::Start(hosts)));
        }
        for _ in 0..1 + random.below(6) {
            let at = random.millis(1_500, 19_000);
            schedule.push_random(random, at);
        }
        schedule
    }

    fn push_random(&mut self, random: &mut Random, at: Duration) {
        let host = random.index(self.hosts);
        let other = (host + 1 + random.index(self.hosts - 1)) % self.hosts;
        let longest = if random.percent(30) { 1_500 } else { 12_000 };
        // Every fourth fault ends about when a node is declared dead.
        let end = at + if random.percent(25) { random.millis(4_500, 7_000) } else { random.millis(100, longest) };
        let mut push = |at, fault| self.faults.push((at, fault));
        match random.below(14) {
            0 | 1 => {
                push(at, Fault::Pause(host));
                push(end, Fault::Resume(host));
            }
            2 => {
                push(at, Fault::Crash(host));
                if random.percent(70) {
                    push(end, Fault::Start(host));
                }
            }
            3 => {
                push(at, Fault::EngineDown { loses_beats: random.percent(50) });
                push(end, Fault::EngineUp);
            }
            4 => {
                push(at, Fault::EngineHung);
                push(end, Fault::EngineUp);
            }
            5 | 6 => {
                let (requests, replies) = [(true, true), (true, false), (false, true)][random.index(3)];
                push(at, Fault::CutEngine { host, requests, replies });
                push(end, Fault::HealEngine(host));
            }
            7 => {
                push(at, Fault::CutPeer { from: host, to: other });
                push(end, Fault::HealPeer { from: host, to: other });
                if random.percent(50) {
                    push(at, Fault::CutPeer { from: other, to: host });
                    push(end, Fault::HealPeer { from: other, to: host });
                }
            }
            8 => self.isolate(random, host, at, end),
            9 => {
                let leave = if random.percent(50) { Fault::Leave(host) } else { Fault::Drain { by: other, host } };
                push(at, leave);
                if random.percent(50) {
                    push(end, Fault::Start(host));
                }
            }
            10 => {
                push(at, Fault::Remove { by: host });
                if random.percent(30) {
                    push(end, Fault::Refused { by: host, host: other });
                }
            }
            11 | 12 => {
                push(at, Fault::Slow { host, is_slow: true });
                push(end, Fault::Slow { host, is_slow: false });
            }
            _ => {
                push(at, Fault::Loss(1 + random.below(15)));
                push(end, Fault::Loss(0));
            }
        }
    }

    /// Cuts a host off from the engine and from some or all peers.
    fn isolate(&mut self, random: &mut Random, host: usize, at: Duration, end: Duration) {
        self.faults.push((at, Fault::CutEngine { host, requests: true, replies: true }));
        self.faults.push((end, Fault::HealEngine(host)));
        let share = if random.percent(60) { 100 } else { 50 };
        for peer in (0..self.hosts).filter(|peer| *peer != host) {
            for (from, to) in [(host, peer), (peer, host)] {
                if random.percent(share) {
                    self.faults.push((at, Fault::CutPeer { from, to }));
                    self.faults.push((end, Fault::HealPeer { from, to }));
                }
            }
        }
    }
}
