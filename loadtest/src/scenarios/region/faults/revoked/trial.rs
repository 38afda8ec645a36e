//! Keys that are revoked and then tried at all nodes.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::client::Target;
use crate::failure::{Failure, ensure};
use crate::scenarios::region::faults::site::Site;
use crate::scenarios::region::faults::table::Row;
use crate::scenarios::region::faults::world::Machine;
use crate::scenarios::region::nodes::NODES;

const KEYS: &str = "/accounts/demo/service-keys";
/// Failed authentications of one address are limited.
const ADDRESSES: usize = 250;
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_secs(60);
const AGAIN_AFTER: Duration = Duration::from_millis(200);

/// Revocations of one kind of fault.
pub(super) struct Trial<'a> {
    pub(super) site: &'a mut Site,
    /// The node with the fault.
    pub(super) victim: usize,
    /// A service that each node owns.
    pub(super) local: [usize; NODES],
    keys: Vec<(String, String)>,
    /// Nodes that the reply has named, of the keys that are revoked.
    named: Vec<Vec<usize>>,
    running: Vec<JoinHandle<Vec<Check>>>,
    checks: Vec<Check>,
    /// Answers to changes that were no success.
    refused_changes: usize,
    addresses: usize,
}

/// A request with a revoked key.
struct Check {
    node: usize,
    key: usize,
    verdict: Verdict,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Refused,
    Accepted,
    /// Neither: the node does not answer, or fails for another reason.
    Other,
}

impl<'a> Trial<'a> {
    /// Makes `count` keys, while the region is well.
    pub(super) fn new(
        site: &'a mut Site,
        local: [usize; NODES],
        count: usize,
    ) -> Result<Self, Failure> {
        let keys = (0..count)
            .map(|_| site.new_key())
            .collect::<Result<_, _>>()?;
        let (running, checks, named) = Default::default();
        Ok(Self {
            site,
            victim: NODES - 1,
            local,
            keys,
            named,
            running,
            checks,
            refused_changes: 0,
            addresses: 0,
        })
    }

    /// Keys that are not revoked yet.
    pub(super) fn left(&self) -> usize {
        self.keys.len() - self.named.len()
    }

    pub(super) fn others(&self) -> [usize; 2] {
        [(self.victim + 1) % NODES, (self.victim + 2) % NODES]
    }

    /// Revokes keys at the other nodes in turns, and tries each at all nodes once the change is
    /// answered.
    pub(super) fn revoke(&mut self, count: usize) -> Result<(), Failure> {
        for _ in 0..count.min(self.left()) {
            self.revoke_quietly(1)?;
            let key = self.named.len() - 1;
            for node in 0..NODES {
                self.try_keys(node, key..key + 1)?;
            }
        }
        Ok(())
    }

    /// Revokes keys and does not try them.
    pub(super) fn revoke_quietly(&mut self, count: usize) -> Result<(), Failure> {
        for _ in 0..count.min(self.left()) {
            let key = self.named.len();
            let path = format!("{KEYS}/{}", self.keys[key].0);
            let deadline = Instant::now() + ACKNOWLEDGED_WITHIN;
            let node = self.others()[key % 2];
            loop {
                match self
                    .site
                    .administer(node, "PATCH", &path, &json!({ "enabled": false }))
                {
                    Ok(reply) if reply.status == 200 => {
                        self.named.push(reply.pending);
                        break;
                    }
                    Ok(reply) => {
                        ensure(Instant::now() < deadline, || {
                            format!("revoking a key: {} {}", reply.status, reply.body)
                        })?;
                    }
                    Err(failure) => ensure(Instant::now() < deadline, || {
                        format!("revoking a key: {failure}")
                    })?,
                }
                self.refused_changes += 1;
                std::thread::sleep(AGAIN_AFTER);
            }
        }
        Ok(())
    }

    /// Tries all revoked keys again at a node.
    pub(super) fn try_all(&mut self, node: usize) -> Result<(), Failure> {
        self.try_keys(node, 0..self.named.len())
    }

    pub(super) fn try_all_everywhere(&mut self) -> Result<(), Failure> {
        (0..NODES).try_for_each(|node| self.try_all(node))
    }

    fn try_keys(&mut self, node: usize, keys: std::ops::Range<usize>) -> Result<(), Failure> {
        let target = self.site.target(self.local[node])?;
        let first = self.addresses;
        self.addresses += keys.len();
        let tries: Vec<(usize, Target)> = keys
            .map(|key| (key, target.with_key(self.keys[key].1.clone())))
            .collect();
        let checks = move || {
            let mut checks = Vec::new();
            for (number, (key, target)) in tries.into_iter().enumerate() {
                let Some(verdict) = verdict(&target, first + number) else {
                    break;
                };
                checks.push(Check { node, key, verdict });
            }
            checks
        };
        self.running.push(
            self.site
                .world
                .on(Machine::Node(node), || Ok(std::thread::spawn(checks)))?,
        );
        Ok(())
    }

    /// Waits for the answers of all tries.
    pub(super) fn finish(&mut self) -> Result<(), Failure> {
        for thread in self.running.drain(..) {
            self.checks.extend(
                thread
                    .join()
                    .map_err(|_| Failure::new("a check panicked"))?,
            );
        }
        Ok(())
    }

    pub(super) fn row(mut self, name: String) -> Result<Row, Failure> {
        self.finish()?;
        let of = |verdict: Verdict| {
            self.checks
                .iter()
                .filter(move |check| check.verdict == verdict)
        };
        let is_named = |check: &&Check| self.named[check.key].contains(&check.node);
        let (named, not_named): (Vec<&Check>, Vec<&Check>) =
            of(Verdict::Accepted).partition(is_named);
        let mut keys: Vec<usize> = not_named.iter().map(|check| check.key).collect();
        keys.sort_unstable();
        keys.dedup();
        let revoked = self.named.len();
        ensure(of(Verdict::Refused).count() >= revoked, || {
            "too few tries reached a node".to_owned()
        })?;
        Ok(Row::new(name)
            .check(
                keys.is_empty(),
                format!(
                    "{} of {revoked} keys accepted ({} times) at a node that was not named",
                    keys.len(),
                    not_named.len()
                ),
            )
            .note(format!(
                "{} replies named nodes, which accepted keys {} times",
                self.named.iter().filter(|it| !it.is_empty()).count(),
                named.len()
            ))
            .note(format!(
                "{} tries refused, {} without an answer of either kind",
                of(Verdict::Refused).count(),
                of(Verdict::Other).count()
            ))
            .note(format!(
                "{} changes had to be repeated",
                self.refused_changes
            )))
    }
}

/// What a node says to a key; `None` if no program listens.
fn verdict(target: &Target, address: usize) -> Option<Verdict> {
    let asked = target
        .connect_from(1 + address % ADDRESSES)
        .and_then(|mut connection| connection.ask("/hello"));
    match asked {
        Ok(answer) if answer.head.status == 200 => Some(Verdict::Accepted),
        Ok(answer) => match answer.error_code().as_deref() {
            Some("GW_AUTH_RATE_LIMITED") | None => Some(Verdict::Other),
            Some(code) if code.starts_with("GW_AUTH") || code.starts_with("GW_SERVICE_KEY") => {
                Some(Verdict::Refused)
            }
            Some(_) => Some(Verdict::Other),
        },
        Err(failure) if failure.kind() == Some(std::io::ErrorKind::ConnectionRefused) => None,
        Err(_) => Some(Verdict::Other),
    }
}
