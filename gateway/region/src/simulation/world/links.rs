//! Connections between the control planes of hosts, which are kept for later messages, and the
//! certificates that they show.

use std::collections::BTreeMap;
use std::time::Duration;

use super::super::super::membership::NodeMessage;
use super::World;

/// Longest time for which a host refuses the messages of another one that runs.
const REFUSAL_MAX: Duration = Duration::from_secs(2);
/// Seconds by which a clock may be wrong when a node goes live.
const CLOCK_MAX: i64 = 60;
/// Seconds before the time of issue at which a certificate begins, with a flaw.
const BEFORE_ISSUE: i64 = 300;

/// Certificate of a process, as a connection shows it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Certificate {
    pub(super) session: u128,
    /// Seconds after the authority was made. Certificates begin with the authority, so they are
    /// valid whatever a clock says.
    not_before: i64,
}

/// Connections of one host, and what it makes of those of others.
#[derive(Debug, Default)]
pub(in super::super) struct Links {
    certificate: Option<Certificate>,
    /// The clock was wrong when the process was about to go live.
    pub(in super::super) began_with_wrong_clock: bool,
    /// Kept connections by the sessions of receiver and sender.
    kept: BTreeMap<(u128, Option<u128>), Certificate>,
    /// Hosts whose messages this one refuses, since when.
    refuses: BTreeMap<usize, Duration>,
}

impl World {
    /// Seconds on the wall clock of a host.
    fn wall_clock(&self, host: usize) -> i64 {
        self.now.as_secs() as i64 + self.hosts[host].clock_error
    }

    pub(super) fn clock_is_wrong(&self, host: usize) -> bool {
        self.hosts[host].clock_error.abs() > CLOCK_MAX
    }

    /// Issues a certificate if the session of the process has none.
    pub(super) fn certify(&mut self, host: usize) {
        let Some(process) = &self.hosts[host].process else {
            return;
        };
        let session = process.machine.session();
        if self.hosts[host]
            .links
            .certificate
            .is_none_or(|certificate| certificate.session != session)
        {
            let begins_with_authority = !self.flaws.certifies_by_own_clock;
            let not_before = if begins_with_authority {
                i64::MIN
            } else {
                self.wall_clock(host) - BEFORE_ISSUE
            };
            self.hosts[host].links.certificate = Some(Certificate {
                session,
                not_before,
            });
        }
    }

    /// What the connection shows on which a message goes to the process with session `to`.
    pub(super) fn shown_to(&mut self, host: usize, to: u128) -> Option<Certificate> {
        let is_kept_for_peer = self.flaws.keeps_connections;
        let Links {
            certificate, kept, ..
        } = &mut self.hosts[host].links;
        let certificate = (*certificate)?;
        let own = (!is_kept_for_peer).then_some(certificate.session);
        Some(*kept.entry((to, own)).or_insert(certificate))
    }

    /// Whether a host refuses a message of another one: the connection shows the certificate of
    /// another session.
    pub(super) fn is_refused(
        &mut self,
        host: usize,
        from: usize,
        shown: Certificate,
        state: &NodeMessage,
    ) -> bool {
        let is_valid = shown.session == state.session && shown.not_before <= self.wall_clock(host);
        if is_valid {
            self.hosts[host].links.refuses.remove(&from);
            return false;
        }
        let now = self.now;
        let since = *self.hosts[host].links.refuses.entry(from).or_insert(now);
        if !self.flaws.keeps_connections {
            // The answer says so: the sender keeps no refused connection.
            self.hosts[from]
                .links
                .kept
                .retain(|_, kept| kept.session != shown.session);
        }
        if now - since > REFUSAL_MAX {
            self.fail(&format!(
                "host {host} refuses the messages of host {from} since {:.3} s",
                since.as_secs_f64()
            ));
        }
        true
    }

    /// A process of the host starts or ends: its connections are gone.
    pub(super) fn drop_links(&mut self, host: usize) {
        self.hosts[host].links = Links::default();
        self.hosts
            .iter_mut()
            .for_each(|other| other.links.refuses.retain(|from, _| *from != host));
    }
}
