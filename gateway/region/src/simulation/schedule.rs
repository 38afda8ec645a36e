//! Faults and operations of a random schedule.

use std::time::Duration;

use crate::random::Random;

#[derive(Debug, Clone, Copy)]
pub(super) enum Fault {
    Start(usize),
    /// As `Start`, without waiting for the engine: the process continues the membership of the last
    /// one.
    StartAlone(usize),
    /// Sets the wall clock of a host this many seconds ahead.
    Clock {
        host: usize,
        error: i64,
    },
    /// An asynchronous failover loses the last changes of the records.
    LoseChanges(usize),
    Crash(usize),
    Pause(usize),
    Resume(usize),
    EngineDown {
        loses_beats: bool,
    },
    EngineHung,
    EngineUp,
    /// A standby is promoted while the primary goes on. Hosts with a bit in `older` go on there,
    /// and those with one in `reach` could use either.
    Promote {
        older: u8,
        reach: u8,
    },
    /// The older of two primaries stops.
    Demote,
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
    /// Changes of the records: when, and by which host.
    pub(super) revocations: Vec<(Duration, usize)>,
}

impl Schedule {
    pub(super) fn of(hosts: usize, faults: impl Iterator<Item = (Duration, Fault)>) -> Self {
        Self {
            hosts,
            has_twin: false,
            faults: faults.collect(),
            heal: Duration::ZERO,
            revocations: Vec::new(),
        }
    }

    pub(super) fn random(random: &mut Random) -> Self {
        let heal = Duration::from_secs(20);
        let hosts = 2 + random.index(4);
        let has_twin = random.percent(10);
        let hosts_in_all = hosts + usize::from(has_twin);
        let faults = Vec::new();
        let revocations = Vec::new();
        let mut schedule = Self {
            hosts: hosts_in_all,
            has_twin,
            faults,
            heal,
            revocations,
        };
        let latest_start = if random.percent(50) { 1 } else { 6_000 };
        for host in 0..hosts {
            let at = random.millis(0, latest_start);
            schedule.faults.push((at, Fault::Start(host)));
        }
        if has_twin {
            schedule
                .faults
                .push((random.millis(3_000, 18_000), Fault::Start(hosts)));
        }
        for _ in 0..1 + random.below(6) {
            let at = random.millis(1_500, 19_000);
            schedule.push_random(random, at);
        }
        schedule.push_failover(random);
        if random.percent(25) {
            let host = random.index(hosts);
            let at = random.millis(0, 12_000);
            let error = random.below(4 * 86_400) as i64 - 2 * 86_400;
            let at = if random.percent(50) {
                Duration::ZERO
            } else {
                at
            };
            // Before the host starts.
            schedule
                .faults
                .insert(0, (at, Fault::Clock { host, error }));
            schedule.faults.push((
                at + random.millis(500, 8_000),
                Fault::Clock { host, error: 0 },
            ));
        }
        for _ in 0..random.below(12) {
            schedule
                .revocations
                .push((random.millis(1_000, 21_000), random.index(hosts)));
        }
        if random.percent(20) {
            let at = random.millis(1_500, 15_000);
            let [older, reach] = [0; 2].map(|_| random.below(256) as u8);
            schedule.faults.push((at, Fault::Promote { older, reach }));
            let end = at + random.millis(1_000, 18_000);
            schedule.faults.push((end, Fault::Demote));
        }
        schedule
    }

    /// Outages of the engine may end with an asynchronous failover, and crashed hosts may start
    /// before the engine is back.
    fn push_failover(&mut self, random: &mut Random) {
        let outages = self
            .faults
            .iter()
            .filter(|(_, fault)| matches!(fault, Fault::EngineDown { .. }));
        let outages: Vec<_> = outages.map(|(at, _)| *at).collect();
        for at in outages {
            if random.percent(50) {
                self.faults
                    .push((at, Fault::LoseChanges(1 + random.index(4))));
                // A host that knows the lost changes, and reads no later ones.
                let host = random.index(self.hosts);
                let cut = at.saturating_sub(random.millis(10, 500));
                self.faults.push((
                    cut,
                    Fault::CutEngine {
                        host,
                        requests: true,
                        replies: true,
                    },
                ));
                self.faults
                    .push((cut + random.millis(1_000, 12_000), Fault::HealEngine(host)));
                for _ in 0..4 {
                    self.revocations
                        .push((at + random.millis(0, 10_000), random.index(self.hosts)));
                }
            }
            if random.percent(50) {
                let host = random.index(self.hosts);
                self.faults
                    .push((at + random.millis(0, 300), Fault::Crash(host)));
                self.faults
                    .push((at + random.millis(350, 1_000), Fault::StartAlone(host)));
            }
        }
    }

    fn push_random(&mut self, random: &mut Random, at: Duration) {
        let host = random.index(self.hosts);
        let other = (host + 1 + random.index(self.hosts - 1)) % self.hosts;
        let longest = if random.percent(30) { 1_500 } else { 12_000 };
        // Every fourth fault ends about when a node is declared dead.
        let end = at
            + if random.percent(25) {
                random.millis(4_500, 7_000)
            } else {
                random.millis(100, longest)
            };
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
                push(
                    at,
                    Fault::EngineDown {
                        loses_beats: random.percent(50),
                    },
                );
                push(end, Fault::EngineUp);
            }
            4 => {
                push(at, Fault::EngineHung);
                push(end, Fault::EngineUp);
            }
            5 | 6 => {
                let (requests, replies) =
                    [(true, true), (true, false), (false, true)][random.index(3)];
                push(
                    at,
                    Fault::CutEngine {
                        host,
                        requests,
                        replies,
                    },
                );
                push(end, Fault::HealEngine(host));
            }
            7 => {
                push(
                    at,
                    Fault::CutPeer {
                        from: host,
                        to: other,
                    },
                );
                push(
                    end,
                    Fault::HealPeer {
                        from: host,
                        to: other,
                    },
                );
                if random.percent(50) {
                    push(
                        at,
                        Fault::CutPeer {
                            from: other,
                            to: host,
                        },
                    );
                    push(
                        end,
                        Fault::HealPeer {
                            from: other,
                            to: host,
                        },
                    );
                }
            }
            8 => self.isolate(random, host, at, end),
            9 => {
                let leave = if random.percent(50) {
                    Fault::Leave(host)
                } else {
                    Fault::Drain { by: other, host }
                };
                push(at, leave);
                if random.percent(50) {
                    push(end, Fault::Start(host));
                }
            }
            10 => {
                push(at, Fault::Remove { by: host });
                if random.percent(30) {
                    push(
                        end,
                        Fault::Refused {
                            by: host,
                            host: other,
                        },
                    );
                }
            }
            11 | 12 => {
                push(
                    at,
                    Fault::Slow {
                        host,
                        is_slow: true,
                    },
                );
                push(
                    end,
                    Fault::Slow {
                        host,
                        is_slow: false,
                    },
                );
            }
            _ => {
                push(at, Fault::Loss(1 + random.below(15)));
                push(end, Fault::Loss(0));
            }
        }
    }

    /// Cuts a host off from the engine and from some or all other nodes.
    fn isolate(&mut self, random: &mut Random, host: usize, at: Duration, end: Duration) {
        self.faults.push((
            at,
            Fault::CutEngine {
                host,
                requests: true,
                replies: true,
            },
        ));
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
