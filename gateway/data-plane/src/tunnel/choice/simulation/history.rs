//! Random histories of a service, with checks of every choice.

use super::*;
use gw_shared::tunnel::control::BackendHealth;

/// Random histories of a test run.
const HISTORIES: u64 = 100_000;

/// A service of random agents, to which random things happen.
struct ServiceHistory {
    random: Random,
    start: Instant,
    now: Instant,
    agents: Vec<SimulatedAgent>,
    /// Attempts without an outcome, with the index of their agent and whether they probe it.
    open: Vec<(usize, bool, Request, BegunAttempt)>,
    budget: AttemptBudget,
    requests: usize,
    further_attempts: usize,
}

impl ServiceHistory {
    fn new(seed: u64) -> Self {
        let start = Instant::now();
        let budget = AttemptBudget::new(start);
        Self {
            random: Random::new(seed),
            start,
            now: start,
            agents: Vec::new(),
            open: Vec::new(),
            budget,
            requests: 0,
            further_attempts: 0,
        }
    }

    /// Runs one history. The budget goes on from history to history, so that it is often empty.
    fn run(&mut self) {
        let agents = 1 + self.random.below(4);
        let slots = 1 + self.random.index(3);
        self.agents = (0..agents)
            .map(|key| SimulatedAgent::new(slots, key, self.now))
            .collect();
        for at in 0..self.agents.len() {
            self.agents[at].is_standby = self.random.percent(20);
        }
        for _ in 0..10 + self.random.below(10) {
            self.step();
        }
        for (agent, _, _, attempt) in std::mem::take(&mut self.open) {
            self.agents[agent].in_flight -= 1;
            self.agents[agent]
                .health
                .abandoned(attempt, Duration::ZERO, self.now);
        }
    }

    fn step(&mut self) {
        match self.random.below(100) {
            0..60 => {
                self.requests += 1;
                self.budget.request(self.now);
                let session = self.random.percent(30).then(|| self.random.number());
                let request = Request::new(session, self.random.percent(50));
                self.attempt(request);
            }
            60..75 if !self.open.is_empty() => {
                let (agent, _, request, attempt) =
                    self.open.swap_remove(self.random.index(self.open.len()));
                self.outcome(agent, request, attempt);
            }
            60..85 => self.now += self.random.millis(0, 300),
            85..88 => self.now += self.random.millis(300, 5_000),
            88..96 => {
                let report = [
                    BackendHealth::Unknown,
                    BackendHealth::Healthy,
                    BackendHealth::Unhealthy,
                ];
                let report = report[self.random.index(3)];
                let agent = self.random.index(self.agents.len());
                self.agents[agent].health.reported(report, self.now);
            }
            _ => {
                let agent = self.random.index(self.agents.len());
                let is_suspect = self.random.percent(50);
                self.agents[agent].health.suspect(is_suspect, self.now);
            }
        }
    }

    fn attempt(&mut self, mut request: Request) {
        let chosen = request.choose(&self.agents, self.now, &mut self.random);
        self.check(&request, chosen);
        let Choice::Tunnel(index) = chosen else {
            return;
        };
        let agent = &mut self.agents[index];
        let probes = agent.tier(request.wanted.is_repeatable, self.now) == HealthTier::Probe;
        let is_probed = self
            .open
            .iter()
            .any(|(other, is_probe, ..)| *other == index && *is_probe);
        assert!(!(probes && is_probed), "two probes at once");
        request.tried |= 1 << agent.key;
        agent.in_flight += 1;
        let attempt = agent.health.began(self.now);
        if self.random.percent(40) {
            self.open.push((index, probes, request, attempt));
        } else {
            self.outcome(index, request, attempt);
        }
    }

    fn outcome(&mut self, index: usize, mut request: Request, attempt: BegunAttempt) {
        let failure = match self.random.below(100) {
            0..50 => None,
            50..75 => Some(TunnelFailure::Unreachable),
            75..90 => Some(TunnelFailure::Broken),
            _ => Some(TunnelFailure::NoSlot),
        };
        let took = self.random.millis(0, 100);
        self.agents[index].end(attempt, failure, took, self.now, &mut self.random);
        if let Some(failure) = failure
            && request.goes_on(failure, &mut self.budget, self.now)
        {
            self.further_attempts += 1;
            self.attempt(request);
        }
    }

    /// Checks a choice against the rules.
    fn check(&self, request: &Request, chosen: Choice) {
        let is_untried = |agent: &&SimulatedAgent| request.tried & 1 << agent.key == 0;
        let is_free = |agent: &SimulatedAgent| agent.in_flight < agent.slots;
        let tier = |agent: &SimulatedAgent| agent.tier(request.wanted.is_repeatable, self.now);
        let untried = || self.agents.iter().filter(is_untried);
        let eligible = || untried().filter(|agent| tier(agent) != HealthTier::Impaired);
        assert!(request.tried.count_ones() < 3, "more than three agents");
        match chosen {
            Choice::NoCandidate => assert_eq!(untried().count(), 0),
            Choice::Full => {
                assert!(!eligible().any(is_free), "an eligible agent is free");
                assert!(
                    eligible().next().is_some() || !untried().any(is_free),
                    "an agent is free, and none is better"
                );
            }
            Choice::Tunnel(index) => {
                let agent = &self.agents[index];
                assert!(is_untried(&agent), "two attempts on one agent");
                assert!(is_free(agent), "no free slot");
                assert!(
                    tier(agent) != HealthTier::Impaired || eligible().next().is_none(),
                    "a better one is there"
                );
                let ready = || {
                    eligible().filter(|agent| tier(agent) == HealthTier::Ready && is_free(agent))
                };
                let is_probe = tier(agent) == HealthTier::Probe
                    && request.wanted.is_first
                    && !agent.is_standby;
                if !is_probe && let Some(best) = ready().map(|agent| agent.is_standby).min() {
                    assert_eq!(
                        (tier(agent), agent.is_standby),
                        (HealthTier::Ready, best),
                        "not of the best class"
                    );
                }
            }
        }
    }

    /// Checks that every ready agent of the best tier gets requests: none is forgotten for what it
    /// once did.
    fn check_shares(&mut self) {
        self.now += Duration::from_secs(180);
        let mut served = 0u64;
        for _ in 0..40 * self.agents.len() {
            let mut request = Request::new(None, true);
            let Choice::Tunnel(index) = request.choose(&self.agents, self.now, &mut self.random)
            else {
                return;
            };
            let agent = &mut self.agents[index];
            served |= 1 << agent.key;
            agent.in_flight += 1;
            let attempt = agent.health.began(self.now);
            agent.end(attempt, None, Duration::ZERO, self.now, &mut self.random);
        }
        let best = self
            .agents
            .iter()
            .map(|agent| (agent.tier(true, self.now), agent.is_standby))
            .min();
        for agent in &self.agents {
            let is_best = Some((agent.tier(true, self.now), agent.is_standby)) == best;
            assert!(
                !is_best || served & 1 << agent.key != 0,
                "agent {} gets no request",
                agent.key
            );
        }
    }
}

#[test]
fn random_histories_keep_the_rules() {
    let per_thread = HISTORIES / 2;
    let run = |seed| {
        let mut history = ServiceHistory::new(seed);
        for number in 0..per_thread {
            history.run();
            let tens_of_seconds = (history.now - history.start).as_secs() as usize / 10 + 1;
            assert!(
                history.further_attempts <= history.requests / 5 + 100 * tens_of_seconds,
                "over budget"
            );
            if number % 64 == 0 {
                history.check_shares();
            }
        }
        assert!(
            history.requests > 100_000 && history.further_attempts > 10_000,
            "{}",
            history.further_attempts
        );
    };
    std::thread::scope(|threads| {
        [1, 2]
            .map(|seed| threads.spawn(move || run(seed)))
            .map(|thread| thread.join().unwrap())
    });
}
