//! The control plane: the records and the certificate authority, and the messages that update the workers. Ordinary
//! blocking code that runs outside the worker threads.
//!
//! Every change takes the same path: `Control::change` plans it on the records in memory, commits it to the store
//! together with its audit entry, then publishes the new directory to the workers and returns.

mod account;
mod agent;
mod audit;
mod backup;
mod caller_secret;
mod certificate;
mod data_folder;
mod enrollment;
mod enrollment_token;
mod ephemeral_agents;
mod executor;
mod feed;
mod gateway_address;
mod inventory;
mod name;
mod open;
mod replay;
mod service;
mod shared_files;
mod signing_key;
mod takeover;
mod warnings;
mod workers;

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gw_shared::id::{AccountId, AgentId, EnrollmentTokenId, InvalidId, random_base62};
use gw_shared::identity::secret::Secret;
use gw_shared::version::AgentVersions;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{Notify, watch};

pub use account::{AccountChanges, AccountView, NewAccount};
pub use agent::{AgentChanges, AgentView, LiveAgents};
pub use audit::AuditEntryView;
pub use caller_secret::{
    CallerSecretChanges, CredentialView, NewCallerSecret, NewCredentialView, NewServiceKeyView, SecretKind,
    ServiceKeyView,
};
pub use certificate::AgentProof;
pub(crate) use data_folder::INCOMPLETE_RESTORE;
#[cfg(any(test, feature = "fuzz_support"))]
pub(crate) use enrollment_token::parse_token;
pub use enrollment_token::{EnrollmentTokenView, NewEnrollmentToken, NewEnrollmentTokenView};
pub(crate) use executor::{Executor, JobQueue, executor};
use feed::EngineHealth;
pub(crate) use feed::{Feed, StoreStatus, read_copy};
pub use gateway_address::{BACKEND_PORT, GatewayAddress};
pub use inventory::Inventory;
use name::checked_name;
pub(crate) use open::{node_name, postgres_source};
pub(crate) use replay::{REPLAY_FRAMING, Replay, not_captured};
pub use replay::{ReplayEdits, ReplayField};
pub use service::{Mode, NewService, ServiceChanges, ServiceView};
pub(crate) use shared_files::{ADMIN_TOKEN, AGENT_CA, SHARED_SECRETS};
pub use signing_key::{Rotation, SigningKeyStatus, SigningKeyView};
pub use takeover::MissingChanges;
use takeover::UnsentChanges;
pub use warnings::{WarningView, WarningsView};
pub(crate) use workers::{ViewApplied, Workers};

use crate::clock::Timestamp;
use crate::cluster::{LocalNode, NodeClient, UnavailableNode};
use crate::hostname::Region;
use crate::limits;
use crate::page::InvalidLimit;
use crate::rate::Rate;
use crate::rate_limit::{ClientLimits, Level};
use crate::region::View;
use crate::store::{
    AuditEntry, Directory, History, Position, PostgresSource, Records, Revision, Snapshot, Step, Store, StoreError,
    StoreSource, StoredRecord,
};
use crate::telemetry::counters::WorkerReport;
use crate::telemetry::request_log::LogError;
use crate::tls::admin::AdminTls;
use crate::tls::certificate::Mistakes;
use crate::tls::node::NodeTls;
use crate::tls::pki::{Authority, NodeIdentity, PkiError};
use crate::tls::{ServerConfigs, TlsError, TlsMaterial};

/// Length of every generated secret: 43 base62 characters hold 256 bits.
pub(crate) const SECRET_LENGTH: usize = 43;

/// How often a change is planned again after changes of other nodes, before it is refused.
const COMMIT_ATTEMPTS: usize = 32;

/// Administration of one gateway process.
pub struct Control {
    store_source: StoreSource,
    region: Region,
    default_rate: Rate,
    signing_key_rotation: Option<Duration>,
    certificate_lifetime: Duration,
    /// Agents that may enroll.
    agent_versions: AgentVersions,
    /// Makes the changes of this process one at a time. Locked before `state`, never after it.
    store: Mutex<Option<Box<dyn Store>>>,
    state: Mutex<ControlState>,
    agents: Authority,
    tls: TlsMaterial,
    /// TLS of the admin listener; `None` if it speaks plain HTTP.
    admin_tls: Option<Arc<AdminTls>>,
    /// Node that has a certificate for links to other nodes.
    certified_node: Mutex<Option<NodeIdentity>>,
    /// Calls the control planes of other nodes.
    node_client: NodeClient,
    admin_token: Secret,
    admin_hosts: Vec<String>,
    engine_health: EngineHealth,
    /// Ends the wait of the feed for the next change.
    look_for_changes: Arc<Notify>,
    /// The revision that the workers use.
    applied: watch::Sender<Revision>,
    workers: Arc<dyn Workers>,
}

/// The records as of one position of the store.
struct ControlState {
    position: Position,
    records: Records,
    /// Indexes `records`.
    directory: Directory,
    /// Certificates that each agent may still request. Limited because each one costs a synced write to the disk.
    issuance: ClientLimits<AgentId>,
    /// The last snapshots published to the workers. Kept alive here so that a worker that keeps up never frees a whole
    /// snapshot.
    published: [Arc<Directory>; 2],
    /// Changes for a process that follows; `None` if there is none.
    unsent: Option<UnsentChanges>,
}

/// The originator of a change, as the audit log names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Actor {
    /// The holder of the admin token.
    Admin,
    /// The gateway itself: key rotation by age, deletion of expired records.
    Gateway,
    Agent(AgentId),
    EnrollmentToken(EnrollmentTokenId),
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Admin => f.write_str("admin"),
            Self::Gateway => f.write_str("gateway"),
            Self::Agent(id) => write!(f, "agent {id}"),
            Self::EnrollmentToken(id) => write!(f, "enrollment-token {id}"),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    #[error("no {kind} {id}")]
    NotFound { kind: &'static str, id: String },
    /// An invalid value, with the name of its field.
    #[error("{field}: {message}")]
    Invalid { field: &'static str, message: String },
    #[error("{0}")]
    Conflict(String),
    #[error("another process is taking over from this one; try again")]
    HandedOver,
    #[error("the gateway stopped before the replay ended")]
    Stopping,
    /// Nodes of the region that are needed for an answer.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    NodesUnavailable(Vec<UnavailableNode>),
    /// The request of an agent was refused.
    #[error("{0}")]
    Refused(crate::error::Error),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Pki(#[from] PkiError),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error(transparent)]
    RequestLog(LogError),
    /// The data folder cannot be used.
    #[error("data_dir {}: {reason}", path.display())]
    DataFolder { path: PathBuf, reason: String },
    /// Another process uses the data folder.
    #[error("data_dir {}: {reason}", path.display())]
    DataFolderInUse { path: PathBuf, reason: String },
    #[error("cryptography: {0}")]
    Crypto(#[from] aws_lc_rs::error::Unspecified),
}

impl ControlError {
    fn not_found(kind: &'static str, id: impl fmt::Display) -> Self {
        Self::NotFound { kind, id: id.to_string() }
    }

    pub(crate) fn invalid(field: &'static str, message: impl Into<String>) -> Self {
        Self::Invalid { field, message: message.into() }
    }

    pub(crate) fn bad_id(field: &'static str) -> impl Fn(InvalidId) -> Self {
        move |error| Self::invalid(field, error.to_string())
    }
}

impl From<InvalidLimit> for ControlError {
    fn from(error: InvalidLimit) -> Self {
        Self::invalid("limit", error.to_string())
    }
}

impl From<LogError> for ControlError {
    fn from(error: LogError) -> Self {
        match error {
            LogError::Invalid { field, message } => Self::Invalid { field, message },
            error => Self::RequestLog(error),
        }
    }
}

/// A planned change that is not made yet.
struct Plan<T> {
    /// Empty if nothing needs to change.
    steps: Vec<Step>,
    action: &'static str,
    account: Option<AccountId>,
    target: String,
    detail: serde_json::Value,
    /// The result for the caller once the change is made.
    output: T,
}

impl<T> Plan<T> {
    /// A plan without any change.
    fn already(output: T) -> Self {
        Self {
            steps: Vec::new(),
            action: "",
            account: None,
            target: String::new(),
            detail: serde_json::Value::Null,
            output,
        }
    }
}

impl ControlState {
    fn new(snapshot: Snapshot, region: &Region, workers: usize) -> Self {
        let mut state = Self {
            position: Position::default(),
            records: Records::default(),
            directory: Directory::default(),
            issuance: ClientLimits::new(limits::CERTIFICATES),
            published: Default::default(),
            unsent: None,
        };
        state.replace(snapshot, region, workers);
        state.unsent = Some(UnsentChanges::after(state.position.clone()));
        state
    }

    fn replace(&mut self, snapshot: Snapshot, region: &Region, workers: usize) {
        self.directory = Directory::new(&snapshot.records, region, workers);
        self.records = snapshot.records;
        self.position = snapshot.position;
        if let Some(unsent) = &mut self.unsent {
            unsent.break_off();
        }
    }

    fn apply(&mut self, position: Position, steps: Vec<Step>, region: &Region, workers: usize) {
        for step in &steps {
            self.records.apply(step.clone());
        }
        self.directory.apply(&steps, &self.records, region, workers);
        self.position = position.clone();
        if let Some(unsent) = &mut self.unsent {
            unsent.push(position, steps);
        }
    }
}

impl Control {
    /// The directory and TLS configurations that workers start with.
    pub(crate) fn initial_state(&self) -> Result<(Arc<Directory>, Arc<ServerConfigs>), ControlError> {
        Ok((Arc::new(self.state().directory.clone()), Arc::new(self.tls.load()?)))
    }

    /// The database that the nodes of the region share; `None` with SQLite.
    pub(crate) fn postgres_source(&self) -> Option<&PostgresSource> {
        match &self.store_source {
            StoreSource::Sqlite(..) => None,
            StoreSource::Postgres(source) => Some(source),
        }
    }

    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Calls the control planes of other nodes.
    pub(crate) fn node_client(&self) -> &NodeClient {
        &self.node_client
    }

    /// This process as a node of the region: its newest placement and TLS configurations.
    pub(crate) fn local_node(&self) -> &Arc<LocalNode> {
        self.node_client.local_node()
    }

    pub fn admin_token(&self) -> &Secret {
        &self.admin_token
    }

    pub(crate) fn admin_tls(&self) -> Option<&Arc<AdminTls>> {
        self.admin_tls.as_ref()
    }

    /// Additional host names by which clients reach the admin listener.
    pub(crate) fn admin_hosts(&self) -> &[String] {
        &self.admin_hosts
    }

    /// The CA certificate that callers and agents must trust; `None` if the server certificate comes from a file.
    pub(crate) fn development_ca(&self) -> Option<PathBuf> {
        self.tls.development_ca()
    }

    /// A copy of all records.
    pub fn records(&self) -> Records {
        self.state().records.clone()
    }

    /// The directory. Shares its contents with later ones.
    pub(crate) fn directory(&self) -> Directory {
        self.state().directory.clone()
    }

    /// Reads the records in place. Holds the lock meanwhile, so `look` must be short.
    pub(crate) fn look_at<T>(&self, look: impl FnOnce(&Records) -> T) -> T {
        look(&self.state().records)
    }

    /// Stores a record as it is, without the checks of the other methods. For tests.
    #[doc(hidden)]
    pub fn put(&self, record: &StoredRecord) -> Result<(), ControlError> {
        self.put_all(std::slice::from_ref(record))
    }

    /// As [`Self::put`], with all records in one change.
    #[doc(hidden)]
    pub fn put_all(&self, records: &[StoredRecord]) -> Result<(), ControlError> {
        self.change(&Actor::Admin, |_, _| {
            Ok(Plan {
                target: format!("{} records", records.len()),
                steps: records.iter().cloned().map(Step::Put).collect(),
                action: "put",
                account: None,
                detail: serde_json::Value::Null,
                output: (),
            })
        })
    }

    /// Runs the maintenance that is due at `now`: rotates the signing key and deletes expired records.
    pub(crate) fn maintain(&self, now: Timestamp) -> Result<(), ControlError> {
        self.rotate_signing_key_by_age(now)?;
        self.forget_old_signing_keys(now)?;
        self.forget_old_enrollments(now)
    }

    /// Makes a change: plans it, stores it with its audit entry, publishes it to every worker. On success the change is
    /// durable and the workers apply it at once; on an error nothing has changed. `plan` runs again if another node has
    /// changed the records meanwhile. Only other changes wait for the store.
    fn change<T>(
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
                detail: plan.detail,
            };
            if let Some(position) = self.commit(&mut store, &after, &plan.steps, &entry)? {
                tracing::info!(actor = entry.actor, action = plan.action, target = entry.target, "changed");
                self.apply(vec![(position, plan.steps)]);
                return Ok(plan.output);
            }
        }
        Err(StoreError::Stale.into())
    }

    /// Commits steps that were planned on revision `after`. `None` if another node has committed a change since: its
    /// change is applied here, and the caller has to plan again.
    fn commit(
        &self,
        store: &mut Option<Box<dyn Store>>,
        after: &Position,
        steps: &[Step],
        entry: &AuditEntry,
    ) -> Result<Option<Position>, ControlError> {
        let store = store.as_mut().ok_or(ControlError::HandedOver)?;
        match store.commit(after, steps, entry) {
            Ok(position) => Ok(Some(position)),
            Err(StoreError::Stale) => {
                self.follow_changes(store.as_mut())?;
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Applies changes that other nodes have committed. Returns whether there were any.
    fn follow_changes(&self, store: &mut dyn Store) -> Result<bool, StoreError> {
        let position = self.position();
        match store.changes_after(&position)? {
            History::Changes(changes) if changes.is_empty() => return Ok(false),
            History::Changes(changes) => self.apply(changes),
            History::Forgotten => {
                let snapshot = store.load()?;
                if snapshot.position.revision > self.position().revision {
                    self.replace(snapshot);
                }
            }
            History::Replaced => {
                let snapshot = store.load()?;
                tracing::error!(
                    before = position.revision.0,
                    now = snapshot.position.revision.0,
                    "the database was replaced or restored from a backup: using its records"
                );
                self.replace(snapshot);
            }
        }
        Ok(true)
    }

    /// Applies committed changes and publishes them. Skips those that were applied before.
    fn apply(&self, changes: Vec<(Position, Vec<Step>)>) {
        let mut state = self.state();
        let mut has_steps = false;
        for (position, steps) in changes {
            if position.revision > state.position.revision {
                has_steps |= !steps.is_empty();
                state.apply(position, steps, &self.region, self.workers.count());
            }
        }
        if has_steps {
            self.publish(&mut state);
        }
        self.applied.send_replace(state.position.revision);
    }

    /// Replaces all records and publishes them.
    fn replace(&self, snapshot: Snapshot) {
        let mut state = self.state();
        state.replace(snapshot, &self.region, self.workers.count());
        self.publish(&mut state);
        self.applied.send_replace(state.position.revision);
    }

    /// Publishes the records to every worker. Requires the lock, so that snapshots arrive in the order of their
    /// changes.
    fn publish(&self, state: &mut ControlState) {
        let directory = Arc::new(state.directory.clone());
        state.published.rotate_right(1);
        state.published[0] = Arc::clone(&directory);
        self.workers.publish_directory(&directory);
    }

    /// Closes the store, so that another process can open it. Until it is reopened, no change is possible here.
    pub(crate) fn close_store(&self) {
        *self.store() = None;
    }

    /// Reopens the store and loads changes made by another process.
    pub(crate) fn reopen_store(&self) -> Result<(), ControlError> {
        let mut reopened = self.store_source.open()?;
        let mut store = self.store();
        self.follow_changes(reopened.as_mut())?;
        *store = Some(reopened);
        Ok(())
    }

    pub(crate) fn has_store(&self) -> bool {
        self.store().is_some()
    }

    /// Reloads the server certificate and that of the admin listener. One that cannot be used stays as it was, and the
    /// other is replaced all the same.
    pub fn reload_certificates(&self) -> Result<(), ControlError> {
        let server = self.tls.reload().map(|certificates| self.workers.publish_certificates(&Arc::new(certificates)));
        let admin = self.admin_tls.as_ref().map_or(Ok(()), |tls| tls.reload());
        Ok(match (server, admin) {
            (Err(server), Err(admin)) => Err(Mistakes(vec![server.to_string(), admin.to_string()]).into()),
            (server, admin) => server.and(admin),
        }?)
    }

    /// Makes every worker use this view of the region from now on. Issues a certificate for this node first if its slot
    /// or session is new. `number` and `applied` as in [`Workers::publish_view`].
    pub(crate) fn publish_view(
        &self,
        number: u64,
        view: &Arc<View>,
        session: u128,
        applied: &UnboundedSender<ViewApplied>,
    ) -> Result<(), ControlError> {
        let node = NodeIdentity { slot: view.placement().here(), session };
        let mut certified = self.certified_node.lock().unwrap_or_else(PoisonError::into_inner);
        if *certified != Some(node) {
            let tls = NodeTls::new(self.agents.certificate_pem(), &self.agents.issue_node(&self.region, node)?)?;
            let tls = Arc::new(tls);
            self.local_node().use_tls(Arc::clone(&tls));
            self.workers.publish_node_tls(&tls);
            *certified = Some(node);
        }
        // Under the lock, so that views arrive in order.
        self.local_node().use_view(Arc::clone(view));
        self.workers.publish_view(number, view, applied);
        Ok(())
    }

    /// Makes every worker continue the buckets of services that come to this node at these levels.
    pub(crate) fn publish_levels(&self, levels: &Arc<Vec<Level>>) {
        self.workers.publish_levels(levels);
    }

    /// Requests the counters and tunnels of every worker; omits workers that do not answer in time.
    pub fn reports(&self) -> Vec<WorkerReport> {
        self.scrape(false)
    }

    /// As [`Self::reports`], with the counters of every service.
    pub fn reports_with_services(&self) -> Vec<WorkerReport> {
        self.scrape(true)
    }

    fn scrape(&self, with_services: bool) -> Vec<WorkerReport> {
        let mut received = self.workers.reports(with_services);
        received.sort_by_key(|report: &WorkerReport| report.worker);
        if let Some(placement) = self.local_node().placement() {
            let tunnels = received.iter_mut().flat_map(|report| &mut report.tunnels);
            tunnels.for_each(|tunnel| tunnel.node = Some(placement.here().get()));
        }
        received
    }

    /// The number of workers.
    pub fn workers(&self) -> usize {
        self.workers.count()
    }

    fn store(&self) -> MutexGuard<'_, Option<Box<dyn Store>>> {
        // A panic that poisons the lock leaves the store consistent, because changes are transactions.
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, ControlState> {
        // A panic under this lock can only occur between whole changes.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A new secret of 256 bits.
fn new_secret() -> Secret {
    Secret::new(random_base62(SECRET_LENGTH))
}
