//! Kills of the gateway while it orders certificates of own domains.

use std::io::{self, Write};

use super::setup::Setup;
use crate::support::eventually;

/// Kills, unless `GW_TEST_KILLS` has another number.
const KILLS: usize = 5;
/// Kills at least, if `GW_TEST_KILLS` is set.
const KILLS_MIN: usize = 20;
/// Steps of an order that are stored before a kill, at most.
const STEPS_MAX: usize = 3;
/// Actions of the audit log that end a step of an order.
const STEPS: [&str; 3] = ["domain.order", "domain.issue", "domain.failure"];

/// Orders of one domain.
struct Ordered<'a> {
    setup: &'a mut Setup,
    domain: String,
    /// Orders that the authority has refused, because no gateway answered its connection.
    refused: usize,
    /// Whether a step of the latest order is stored.
    is_stored: bool,
}

impl<'a> Ordered<'a> {
    fn begin(setup: &'a mut Setup, domain: String) -> Self {
        setup.lead_here(&domain);
        setup.add(&domain).unwrap();
        let ordered = Self {
            setup,
            domain,
            refused: 0,
            is_stored: false,
        };
        ordered.next_action(&["domain.add"]);
        ordered
    }

    /// The next entry of the audit log with one of these actions.
    fn next_action(&self, actions: &[&str]) -> String {
        self.setup.served.log.find(|line| {
            let action = line["action"].as_str()?;
            actions.contains(&action).then(|| action.to_owned())
        })
    }

    /// Waits until this number of steps are stored, or the certificate.
    fn await_steps(&mut self, steps: usize) {
        for _ in 0..steps {
            match self.next_action(&STEPS).as_str() {
                "domain.issue" => return,
                "domain.failure" => drop(self.look()),
                _ => self.is_stored = true,
            }
        }
    }

    /// Whether there is a certificate. The wait after an order that was refused is ended.
    fn look(&mut self) -> bool {
        let shown = self.setup.show(&self.domain);
        let failures = usize::try_from(shown["failures"].as_u64().unwrap()).unwrap();
        if failures > self.refused {
            assert_eq!(failures, self.refused + 1, "{shown}");
            let reason = shown["last_failure"].as_str().unwrap();
            assert!(reason.contains("for the tls-alpn-01 challenge"), "{reason}");
            self.refused = failures;
            self.is_stored = false;
            self.setup.check(&self.domain);
        }
        shown["certificate"].is_object()
    }
}

/// Kills so far, and the orders that they interrupted.
#[derive(Default)]
struct Kills {
    killed: usize,
    /// Kills while no step of the order was stored.
    before_first_step: usize,
    domains: usize,
    refused: usize,
    /// Orders beyond one for each certificate and refusal.
    duplicates: usize,
}

impl Kills {
    /// Kills the gateway at random steps until a domain has a certificate.
    fn run(&mut self, setup: &mut Setup, random: &mut fastrand::Rng, kills: usize) {
        let domain = format!("d{}.customer.test", self.domains);
        let mut ordered = Ordered::begin(setup, domain);
        let mut is_issued = false;
        while self.killed < kills && !is_issued {
            ordered.await_steps(random.usize(0..=STEPS_MAX));
            ordered.setup.restart("KILL", |_| {});
            self.killed += 1;
            self.before_first_step += usize::from(!ordered.is_stored);
            is_issued = ordered.look();
        }
        eventually("the certificate of the domain", || {
            ordered.look().then_some(())
        });
        let (refused, domain) = (ordered.refused, ordered.domain);
        setup.await_certificate(&domain);
        assert_eq!(setup.show(&domain)["failures"], 0);
        // A service may have twenty domains.
        setup.remove(&domain);
        self.domains += 1;
        self.refused += refused;
        self.duplicates += setup.front.orders_of(&domain).len() - refused - 1;
    }
}

#[test]
fn kills_at_any_step_lose_no_order_of_a_domain_and_no_account() {
    // A step takes seconds, so there are fewer of these kills than of those without a wait.
    let some = |kills: String| KILLS_MIN.max(kills.parse::<usize>().unwrap() / 25);
    let wanted = std::env::var("GW_TEST_KILLS").map_or(KILLS, some);
    let seed = fastrand::u64(..);
    let mut random = fastrand::Rng::with_seed(seed);
    let Some(mut setup) = Setup::new() else {
        return;
    };
    let mut kills = Kills::default();
    while kills.killed < wanted {
        kills.run(&mut setup, &mut random, wanted);
    }
    let Kills {
        killed,
        before_first_step,
        domains,
        refused,
        duplicates,
    } = kills;
    let figures = format!(
        "{killed} kills, {before_first_step} of them before the first step: {domains} \
         certificates, {refused} orders refused while no gateway ran, {duplicates} duplicates; \
         seed {seed}"
    );
    writeln!(io::stdout(), "{figures}").unwrap();
    // Only a kill between the answer of the authority and its storage makes a second order.
    assert!(duplicates <= before_first_step, "{figures}");
    let orders = domains + refused + duplicates;
    assert_eq!(setup.pebble.count("orders in the db"), orders, "{figures}");
    assert_eq!(setup.pebble.count("accounts in memory"), 1, "{figures}");
}
