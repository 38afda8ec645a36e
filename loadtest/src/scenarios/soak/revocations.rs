//! Keys that are revoked during a fault: a node that the reply did not name never accepts the key
//! afterwards.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::json;

use super::NODES;
use super::site::Site;
use super::world::Machine;
use crate::admin_api::ServiceKey;
use crate::client::Target;
use crate::failure::Failure;
use crate::report::Row;

/// Failed authentications of one address are limited.
const ADDRESSES: usize = 250;

pub(super) struct Revocations {
    /// A service of each node, whose agent connects to it: it serves them when it reaches no other
    /// machine.
    local: [usize; NODES],
    keys: Vec<ServiceKey>,
    /// Nodes that the reply has named, of the keys that are revoked.
    named: Vec<Vec<usize>>,
    running: Vec<JoinHandle<Vec<Check>>>,
    /// Changes that were refused.
    refused: usize,
    slowest: Duration,
    addresses: usize,
}

/// A request with a revoked key.
struct Check {
    node: usize,
    key: usize,
    verdict: Verdict,
    is_last: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Refused,
    Accepted,
    /// Neither: the node does not answer, or fails for another reason.
    Other,
}

impl Revocations {
    /// Makes `count` keys, while the region is well.
    pub(super) fn new(site: &Site, local: [usize; NODES], count: usize) -> Result<Self, Failure> {
        let keys: Result<_, _> = (0..count).map(|_| site.new_key()).collect();
        Ok(Self {
            local,
            keys: keys?,
            named: Vec::new(),
            running: Vec::new(),
            refused: 0,
            slowest: Duration::ZERO,
            addresses: 0,
        })
    }

    /// Revokes the next key at a node other than `victim`, and tries it at all nodes once the
    /// change is answered.
    pub(super) fn revoke(&mut self, site: &Site, victim: usize) -> Result<(), Failure> {
        let before = self.named.len();
        self.revoke_quietly(site, victim);
        let revoked = before..self.named.len();
        (0..NODES).try_for_each(|node| self.try_keys(site, node, revoked.clone(), false))
    }

    /// Revokes the next key, and does not try it yet.
    pub(super) fn revoke_quietly(&mut self, site: &Site, victim: usize) {
        let key = self.named.len();
        let Some(ServiceKey { id, .. }) = self.keys.get(key) else {
            return;
        };
        let node = (victim + 1 + (key + self.refused) % (NODES - 1)) % NODES;
        let path = format!("/accounts/demo/service-keys/{id}");
        let change = json!({ "enabled": false });
        let asked = Instant::now();
        let reply = site.administer(node, |api| api.exchange("PATCH", &path, &change));
        self.slowest = self.slowest.max(asked.elapsed());
        match reply {
            Ok(reply) if reply.status == 200 => self.named.push(reply.pending),
            _ => self.refused += 1,
        }
    }

    /// Tries all revoked keys again at all nodes. `is_last` if the region is well again.
    pub(super) fn try_all(&mut self, site: &Site, is_last: bool) -> Result<(), Failure> {
        let all = 0..self.named.len();
        (0..NODES).try_for_each(|node| self.try_keys(site, node, all.clone(), is_last))
    }

    fn try_keys(
        &mut self,
        site: &Site,
        node: usize,
        keys: std::ops::Range<usize>,
        is_last: bool,
    ) -> Result<(), Failure> {
        let target = site.target(self.local[node])?;
        let first = self.addresses;
        self.addresses += keys.len();
        let with_key = |key: usize| (key, target.with_key(self.keys[key].secret.clone()));
        let tries: Vec<(usize, Target)> = keys.map(with_key).collect();
        let check = move |(number, (key, target)): (usize, (usize, Target))| Check {
            node,
            key,
            verdict: verdict(&target, first + number),
            is_last,
        };
        let checks = move || tries.into_iter().enumerate().map(check).collect();
        let machine = Machine::Node(node);
        let thread = site.world.on(machine, || Ok(std::thread::spawn(checks)))?;
        self.running.push(thread);
        Ok(())
    }

    /// Waits for the answers of all tries, and adds the figures to a row.
    pub(super) fn conclude(self, row: Row) -> Result<Row, Failure> {
        let mut checks: Vec<Check> = Vec::new();
        for thread in self.running {
            checks.extend(
                thread
                    .join()
                    .map_err(|_| Failure::new("a check panicked"))?,
            );
        }
        let count =
            |is_meant: &dyn Fn(&Check) -> bool| checks.iter().filter(|it| is_meant(it)).count();
        let accepted = |check: &Check| check.verdict == Verdict::Accepted;
        let is_named = |check: &Check| self.named[check.key].contains(&check.node);
        let not_named = count(&|check| accepted(check) && !is_named(check));
        let late = count(&|check| accepted(check) && check.is_last);
        let in_time = count(&|check| accepted(check) && is_named(check) && !check.is_last);
        let refused = count(&|check| check.verdict == Verdict::Refused);
        let other = count(&|check| check.verdict == Verdict::Other);
        let revoked = self.named.len();
        let row = row
            .check(
                not_named == 0 && late == 0,
                format!(
                    "{revoked} keys revoked, accepted {not_named} times at a node that was not \
                     named, {late} times afterwards ({in_time} times at a named one)"
                ),
            )
            .check(
                refused >= NODES * revoked,
                format!("{refused} tries refused, {other} without an answer of either kind"),
            );
        Ok(row.note(format!(
            "{} changes refused, the slowest answer after {:.1} s",
            self.refused,
            self.slowest.as_secs_f64()
        )))
    }
}

/// What a node says to a key.
fn verdict(target: &Target, address: usize) -> Verdict {
    let asked = target
        .connect_from(1 + address % ADDRESSES)
        .and_then(|mut connection| connection.ask("/hello"));
    let Ok(answer) = asked else {
        return Verdict::Other;
    };
    if answer.head.status == 200 {
        return Verdict::Accepted;
    }
    match answer.error_code().as_deref() {
        Some("GW_AUTH_RATE_LIMITED") => Verdict::Other,
        Some(code) if code.starts_with("GW_AUTH") || code.starts_with("GW_SERVICE_KEY") => {
            Verdict::Refused
        }
        _ => Verdict::Other,
    }
}
