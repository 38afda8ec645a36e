//! Changes of the records: planned in memory, committed to the store, then published to the
//! workers.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use crate::limits;
use gw_base::clock::Timestamp;
use gw_base::process::reserve::is_full;
use gw_base::service::hostname::Region;
use gw_base::tls::ServerConfigs;
use gw_interface::rate_limit::ClientLimits;
use gw_shared::id::{AccountId, AgentId, DomainName, EnrollmentTokenId};
use gw_store::{
    AcmeFailures, AuditEntry, Directory, History, Position, RecordId, Records, Snapshot, Step,
    Store, StoreError,
};
use serde::Serialize;
use serde_json::{Value, json};

use super::takeover::UnsentChanges;
use crate::control::{Control, ControlError};

/// How often a change is planned again after changes of other nodes, before it is refused.
pub(crate) const COMMIT_ATTEMPTS: usize = 32;

/// The originator of a change, as the audit log names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Actor {
    /// The holder of the admin token.
    Admin,
    /// The holder of the admin token, with a document.
    Document(AppliedDocument),
    /// The gateway itself: key rotation by age, deletion of expired records.
    Gateway,
    /// An agent, at the issuance of its certificate.
    Agent(AgentId),
    /// An enrollment token, at the enrollment of an agent with it.
    EnrollmentToken(EnrollmentTokenId),
}

/// The document that a change applies, as the client names it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AppliedDocument {
    /// Path of the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Revision of the file, such as a commit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
}

impl Actor {
    /// The detail of an entry in the audit log, with the document that the change applies.
    fn noted_in(&self, mut detail: Value) -> Value {
        if let (Self::Document(document), Some(members)) = (self, detail.as_object_mut()) {
            members.insert("applied".to_owned(), json!(document));
        }
        detail
    }
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Admin | Self::Document(_) => f.write_str("admin"),
            Self::Gateway => f.write_str("gateway"),
            Self::Agent(id) => write!(f, "agent {id}"),
            Self::EnrollmentToken(id) => write!(f, "enrollment-token {id}"),
        }
    }
}

/// A planned change that is not made yet.
pub(crate) struct Plan<T> {
    /// Empty if nothing needs to change.
    pub(crate) steps: Vec<Step>,
    pub(crate) action: &'static str,
    pub(crate) account: Option<AccountId>,
    pub(crate) target: String,
    pub(crate) detail: Value,
    /// The result for the caller once the change is made.
    pub(crate) output: T,
}

impl<T> Plan<T> {
    /// A plan without any change.
    pub(crate) fn already(output: T) -> Self {
        Self {
            steps: Vec::new(),
            action: "",
            account: None,
            target: String::new(),
            detail: Value::Null,
            output,
        }
    }
}

/// The records as of one position of the store.
pub(crate) struct ControlState {
    pub(crate) position: Position,
    /// The last positions of the history, up to `position`.
    recent: VecDeque<Position>,
    pub(crate) records: Records,
    /// Indexes `records`.
    pub(crate) directory: Directory,
    /// Certificates that each agent may still request. Limited because each one costs a synced
    /// write to the disk.
    pub(crate) issuance: ClientLimits<AgentId>,
    /// Failed orders of domains that were removed: a name that is added again goes on with them.
    pub(crate) removed_failures: BTreeMap<DomainName, AcmeFailures>,
    /// The last snapshots published to the workers. Kept alive here so that a worker that keeps up
    /// never frees a whole snapshot.
    pub(crate) published: [Arc<Directory>; 2],
    /// Changes for a process that follows; `None` if there is none.
    pub(crate) unsent: Option<UnsentChanges>,
}

impl ControlState {
    pub(crate) fn new(snapshot: Snapshot, region: &Region, workers: usize) -> Self {
        let mut state = Self {
            position: Position::default(),
            recent: VecDeque::new(),
            records: Records::default(),
            directory: Directory::default(),
            issuance: ClientLimits::new(limits::CERTIFICATES),
            removed_failures: BTreeMap::new(),
            published: Default::default(),
            unsent: None,
        };
        let directory = Directory::new(&snapshot.records, region, workers);
        state.replace(snapshot, directory);
        state.unsent = Some(UnsentChanges::after(state.position.clone()));
        state
    }

    /// `directory` is of the records in `snapshot`.
    fn replace(&mut self, snapshot: Snapshot, directory: Directory) {
        self.directory = directory;
        self.records = snapshot.records;
        self.recent = snapshot.recent.into();
        self.reach(snapshot.position);
        if let Some(unsent) = &mut self.unsent {
            unsent.break_off();
        }
    }

    fn apply(&mut self, position: Position, steps: Vec<Step>, region: &Region, workers: usize) {
        for step in &steps {
            if let Step::Delete(RecordId::Domain(name)) = step {
                self.keep_failures(name);
            }
            self.records.apply(step.clone());
        }
        self.directory.apply(&steps, &self.records, region, workers);
        self.reach(position.clone());
        if let Some(unsent) = &mut self.unsent {
            unsent.push(position, steps);
        }
    }

    fn reach(&mut self, position: Position) {
        if self.recent.back() != Some(&position) {
            self.recent.push_back(position.clone());
        }
        while self.recent.len() > limits::RECENT_CHANGES {
            self.recent.pop_front();
        }
        self.position = position;
    }

    /// Keeps the failed orders of a domain that is removed.
    fn keep_failures(&mut self, name: &DomainName) {
        let removed = self.records.domains.get(name);
        match removed.and_then(|it| it.failures.clone()) {
            Some(failures) => self.removed_failures.insert(name.clone(), failures),
            None => self.removed_failures.remove(name),
        };
        if self.removed_failures.len() > limits::REMOVED_FAILURES {
            self.removed_failures.pop_first();
        }
    }

    /// Whether the records include the change that made `position`. A change of another history
    /// with the same revision is not included, nor is one that is too old to be known.
    pub(crate) fn includes(&self, position: &Position) -> bool {
        self.recent.iter().rev().any(|recent| recent == position)
    }
}

impl Control {
    /// Makes a change: plans it, stores it with its audit entry, publishes it to every worker. On
    /// success the change is durable and the workers apply it at once; on an error nothing has
    /// changed. `plan` runs again if another node has changed the records meanwhile. Only other
    /// changes wait for the store.
    pub(crate) fn change<T>(
        &self,
        actor: &Actor,
        plan: impl Fn(&Records, Timestamp) -> Result<Plan<T>, ControlError>,
    ) -> Result<T, ControlError> {
        let now = Timestamp::now();
        let mut store = self.store();
        for _ in 0..COMMIT_ATTEMPTS {
            let (plan, after) = {
                let state = self.state();
                (plan(&state.records, now)?, state.position.clone())
            };
            if plan.steps.is_empty() {
                return Ok(plan.output);
            }
            let entry = AuditEntry {
                at: now,
                actor: actor.to_string(),
                action: plan.action.into(),
                account: plan.account,
                target: plan.target,
                detail: actor.noted_in(plan.detail),
            };
            if let Some(position) = self.commit(&mut store, &after, &plan.steps, &entry)? {
                tracing::info!(
                    actor = entry.actor,
                    action = plan.action,
                    object = entry.target,
                    "changed"
                );
                self.apply(&after, vec![(position, plan.steps)]);
                return Ok(plan.output);
            }
        }
        Err(StoreError::Stale.into())
    }

    /// Commits steps that were planned on revision `after`. `None` if another node has committed a
    /// change since: its change is applied here, and the caller has to plan again.
    pub(crate) fn commit(
        &self,
        store: &mut Option<Box<dyn Store>>,
        after: &Position,
        steps: &[Step],
        entry: &AuditEntry,
    ) -> Result<Option<Position>, ControlError> {
        let store = store.as_mut().ok_or(ControlError::HandedOver)?;
        // What the gateway deletes by itself, such as expired records, leaves the reserve to
        // administrators.
        let is_revocation = !steps.is_empty()
            && entry.actor != Actor::Gateway.to_string()
            && self.state().records.are_revoked_by(steps);
        // With PostgreSQL, this disk has the journal only.
        let is_on_disk = self.journal.is_none();
        let no_room = || StoreError::NoRoom(self.reserve.path().to_owned());
        if is_on_disk
            && !is_revocation
            && self
                .reserve
                .fill()
                .is_err_and(|error| is_full(error.kind()))
        {
            return Err(no_room().into());
        }
        let commit = || store.commit(after, steps, entry);
        let kind = |error: &StoreError| error.kind().filter(|_| is_on_disk && is_revocation);
        match self.reserve.lend(commit, kind) {
            Ok(position) => Ok(Some(position)),
            Err(StoreError::Stale) => {
                self.follow_changes(store.as_mut())?;
                Ok(None)
            }
            Err(StoreError::Full) if is_on_disk => Err(no_room().into()),
            Err(error) => Err(error.into()),
        }
    }

    /// Applies changes that other nodes have committed. Returns whether there were any.
    pub(crate) fn follow_changes(&self, store: &mut dyn Store) -> Result<bool, StoreError> {
        let position = self.position();
        match store.changes_after(&position)? {
            History::Changes(changes) if changes.is_empty() => return Ok(false),
            History::Changes(changes) => self.apply(&position, changes),
            History::Forgotten => {
                let snapshot = store.load()?;
                if snapshot.position.revision > position.revision {
                    self.replace(&position, snapshot);
                }
            }
            History::Replaced => {
                let snapshot = store.load()?;
                tracing::error!(
                    before = position.revision.0,
                    now = snapshot.position.revision.0,
                    "the database was replaced or restored from a backup: using its records"
                );
                self.replace(&position, snapshot);
            }
        }
        Ok(true)
    }

    /// Applies committed changes that follow `before`, and publishes them. Skips those that were
    /// applied before, and all of them if the history was replaced meanwhile by one without
    /// `before`.
    pub(crate) fn apply(&self, before: &Position, changes: Vec<(Position, Vec<Step>)>) {
        let mut state = self.state();
        if !state.includes(before) {
            return;
        }
        let mut has_steps = false;
        let mut has_authorities = false;
        let mut has_ticket_keys = false;
        let mut has_certificates = false;
        let mut domains = Vec::new();
        for (position, steps) in changes {
            if position.revision > state.position.revision {
                has_steps |= !steps.is_empty();
                if let Some(journal) = &self.journal {
                    let is_revocation = state.records.are_revoked_by(&steps);
                    journal.push(&state.position, &position, &steps, is_revocation);
                }
                self.service_counts
                    .note(&steps, &state.records, &self.region);
                has_authorities |= steps.iter().any(Step::is_of_authority);
                has_ticket_keys |= steps.iter().any(Step::is_of_ticket_key);
                has_certificates |= steps.iter().any(Step::is_of_acme);
                domains.extend(steps.iter().filter_map(Step::domain).cloned());
                state.apply(position, steps, &self.region, self.workers.count());
            }
        }
        if has_authorities {
            self.use_authorities(&state.records);
        }
        if has_ticket_keys {
            self.use_ticket_keys(&state.records);
        }
        if has_certificates {
            self.use_certificates(&state.records);
        }
        if !domains.is_empty() {
            // The stored findings are newer.
            if let Ok(mut findings) = self.findings.lock() {
                findings.retain(|name, _| !domains.contains(name));
            }
            self.use_domains(&state.records, Some(&domains));
        }
        if has_steps {
            self.publish(&mut state);
        }
        self.applied.send_replace(state.position.revision);
    }

    /// Replaces all records and publishes them, unless the position is not `before` any more: what
    /// another thread has applied meanwhile can be newer than the snapshot.
    pub(crate) fn replace(&self, before: &Position, snapshot: Snapshot) {
        // Before the lock, because it takes seconds with a million services.
        let directory = Directory::new(&snapshot.records, &self.region, self.workers.count());
        let mut state = self.state();
        if state.position != *before {
            return;
        }
        state.replace(snapshot, directory);
        if let Some(journal) = &self.journal {
            journal.break_off();
        }
        self.service_counts.begin_again(&state.directory);
        self.use_authorities(&state.records);
        self.use_ticket_keys(&state.records);
        self.use_certificates(&state.records);
        self.use_domains(&state.records, None);
        self.publish(&mut state);
        self.applied.send_replace(state.position.revision);
    }

    /// Seals session tickets with the keys in `records` from now on.
    fn use_ticket_keys(&self, records: &Records) {
        let keys = records.usable_ticket_keys();
        let publish = |configs: &Arc<ServerConfigs>| self.workers.publish_certificates(configs);
        if let Err(error) = self.tls.seal_tickets(keys, publish) {
            tracing::error!(%error,
                "the stored keys of session tickets cannot be used: the ones before stay in use");
        }
    }

    /// Publishes the records to every worker. Requires the lock, so that snapshots arrive in the
    /// order of their changes.
    fn publish(&self, state: &mut ControlState) {
        let directory = Arc::new(state.directory.clone());
        state.published.rotate_right(1);
        state.published[0] = Arc::clone(&directory);
        self.workers.publish_directory(&directory);
    }
}
