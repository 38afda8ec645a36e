//! The control plane: the records and the certificate authority, and the messages that update the workers. Ordinary
//! blocking code that runs outside the worker threads.
//!
//! Every change takes the same path: `Control::change` plans it on the records in memory, commits it to the store
//! together with its audit entry, then publishes the new directory to the workers and returns.

mod account;
mod agent;
mod audit;
mod caller_secret;
mod certificate;
mod enrollment;
mod executor;
mod inventory;
mod name;
mod replay;
mod service;
mod signing_key;
mod workers;

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};
use gw_shared::files;
use gw_shared::id::{AccountId, AgentId, EnrollmentTokenId, InvalidId, random_base62};
use gw_shared::identity::secret::Secret;

pub use account::{AccountChanges, AccountView, NewAccount};
pub use agent::{AgentChanges, AgentView};
pub use audit::AuditEntryView;
pub use caller_secret::{
    CallerSecretChanges, CredentialView, NewCallerSecret, NewCredentialView, NewServiceKeyView, SecretKind,
    ServiceKeyView,
};
pub use certificate::AgentProof;
#[cfg(any(test, feature = "fuzz_support"))]
pub(crate) use enrollment::parse_token;
pub use enrollment::{EnrollmentTokenView, NewEnrollmentToken, NewEnrollmentTokenView};
pub(crate) use executor::{Executor, JobQueue, executor};
pub use inventory::Inventory;
use name::checked_name;
pub(crate) use replay::{REPLAY_FRAMING, Replay, not_captured};
pub use replay::{ReplayEdits, ReplayField};
pub use service::{Mode, NewService, ServiceChanges, ServiceView};
pub use signing_key::{Rotation, SigningKeyStatus, SigningKeyView};
pub(crate) use workers::Workers;

use crate::clock::Timestamp;
use crate::config::Config;
use crate::hostname::Region;
use crate::page::InvalidLimit;
use crate::rate::Rate;
use crate::rate_limit::Bucket;
use crate::region::Placement;
use crate::store::{AuditEntry, Directory, Records, SqliteStore, Step, Store, StoreError, StoredRecord};
use crate::telemetry::counters::WorkerReport;
use crate::telemetry::request_log::LogError;
use crate::tls::node::NodeTls;
use crate::tls::pki::{Authority, NodeIdentity, PkiError};
use crate::tls::{ServerConfigs, TlsError, TlsMaterial};

/// Length of every generated secret: 43 base62 characters hold 256 bits.
pub(crate) const SECRET_LENGTH: usize = 43;

/// Administration of one gateway process.
pub struct Control {
    store_path: PathBuf,
    region: Region,
    default_rate: Rate,
    signing_key_rotation: Option<Duration>,
    certificate_lifetime: Duration,
    state: Mutex<ControlState>,
    agents: Authority,
    tls: TlsMaterial,
    /// Node that has a certificate for links to other nodes.
    certified_node: Mutex<Option<NodeIdentity>>,
    admin_token: Secret,
    admin_hosts: Vec<String>,
    workers: Arc<dyn Workers>,
}

/// The records and the store. Both always hold the same data.
struct ControlState {
    records: Records,
    /// `None` while another process has the store open.
    store: Option<Box<dyn Store>>,
    /// Certificates that each agent may still request. Limited because each one costs a synced write to the disk.
    issuance: HashMap<AgentId, Bucket>,
    /// The last snapshots published to the workers. Kept alive here so that a worker that keeps up never frees a whole
    /// snapshot.
    published: [Arc<Directory>; 2],
    /// Receives a message after each change of the records.
    watcher: Option<Sender<()>>,
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

impl Control {
    /// Opens the data folder with records, authority and admin token, and creates what is missing.
    pub(crate) fn open(config: &Config, workers: Arc<dyn Workers>) -> Result<Self, ControlError> {
        files::create_private_dir(&config.data_dir)?;
        // Must come first: it fails if another process uses the folder.
        let store_path = config.data_dir.join("gw.sqlite");
        let store = SqliteStore::open(&store_path)?;
        let agents = Authority::load_or_create(&config.data_dir, "agent-ca", "Gw agents")?;
        let tls = TlsMaterial::new(
            config.certificate.clone(),
            config.region.clone(),
            agents.certificate_pem(),
            config.agent_mtls,
        )?;
        let control = Self {
            store_path,
            region: config.region.clone(),
            default_rate: config.default_rate,
            signing_key_rotation: config.signing_key_rotation,
            certificate_lifetime: config.agent_certificate_lifetime,
            state: Mutex::new(ControlState {
                records: store.load()?,
                store: Some(Box::new(store)),
                issuance: HashMap::new(),
                published: Default::default(),
                watcher: None,
            }),
            agents,
            tls,
            certified_node: Mutex::default(),
            admin_token: admin_token(&config.data_dir.join("admin.token"))?,
            admin_hosts: config.admin_hosts.clone(),
            workers,
        };
        if let Err(error) = control.maintain(Timestamp::now()) {
            // Maintenance can wait, for example on a full disk. Without any signing key, however, no token can be
            // issued.
            if control.state().records.signing_keys.is_empty() {
                return Err(error);
            }
            tracing::error!(%error, "maintenance of the records failed; trying again in a minute");
        }
        Ok(control)
    }

    /// The directory and TLS configurations that workers start with.
    pub(crate) fn initial_state(&self) -> Result<(Arc<Directory>, Arc<ServerConfigs>), ControlError> {
        Ok((Arc::new(self.directory(&self.state().records)), Arc::new(self.tls.load()?)))
    }

    pub fn region(&self) -> &Region {
        &self.region
    }

    pub fn admin_token(&self) -> &Secret {
        &self.admin_token
    }

    /// Additional host names by which browsers reach the console.
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

    /// Reads the records in place. Holds the lock meanwhile, so `look` must be short.
    pub(crate) fn look_at<T>(&self, look: impl FnOnce(&Records) -> T) -> T {
        look(&self.state().records)
    }

    /// Stores a record as it is, without the checks of the other methods. For tests.
    #[doc(hidden)]
    pub fn put(&self, record: StoredRecord) -> Result<(), ControlError> {
        self.change(&Actor::Admin, |_, _| {
            Ok(Plan {
                target: format!("{:?}", record.id()),
                steps: vec![Step::Put(record)],
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
    /// durable and the workers apply it at once; on an error nothing has changed.
    fn change<T>(
        &self,
        actor: &Actor,
        plan: impl FnOnce(&Records, Timestamp) -> Result<Plan<T>, ControlError>,
    ) -> Result<T, ControlError> {
        let now = Timestamp::now();
        let mut state = self.state();
        let plan = plan(&state.records, now)?;
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
        state.store.as_mut().ok_or(ControlError::HandedOver)?.commit(&plan.steps, &entry)?;
        tracing::info!(actor = entry.actor, action = plan.action, target = entry.target, "changed");
        for step in plan.steps {
            state.records.apply(step);
        }
        self.publish(&mut state);
        Ok(plan.output)
    }

    /// Publishes the records to every worker. Requires the lock, so that snapshots arrive in the order of their
    /// changes.
    fn publish(&self, state: &mut ControlState) {
        let directory = Arc::new(self.directory(&state.records));
        state.published.rotate_right(1);
        state.published[0] = Arc::clone(&directory);
        self.workers.publish_directory(&directory);
        if let Some(watcher) = &state.watcher {
            // Full: a message is already waiting. Disconnected: the watch has ended.
            let _ = watcher.try_send(());
        }
    }

    /// A channel with one message if the records have changed since the last message was received. Only one watch
    /// exists at a time.
    pub(crate) fn watch_changes(&self) -> Receiver<()> {
        let (watcher, changes) = crossbeam_channel::bounded(1);
        self.state().watcher = Some(watcher);
        changes
    }

    /// Closes the channel of [`Self::watch_changes`], because changes are no longer made in this process.
    pub(crate) fn end_watch(&self) {
        self.state().watcher = None;
    }

    /// Publishes the records received from the process that now has the store.
    pub(crate) fn follow(&self, records: Vec<StoredRecord>) {
        let mut state = self.state();
        if state.store.is_none() {
            state.records = records.into_iter().collect();
            self.publish(&mut state);
        }
    }

    /// Closes the store, so that another process can open it. Until it is reopened, no change is possible here.
    pub(crate) fn close_store(&self) {
        self.state().store = None;
    }

    /// Reopens the store and loads changes made by another process.
    pub(crate) fn reopen_store(&self) -> Result<(), ControlError> {
        let store = SqliteStore::open(&self.store_path)?;
        let mut state = self.state();
        state.records = store.load()?;
        state.store = Some(Box::new(store));
        self.publish(&mut state);
        Ok(())
    }

    pub(crate) fn has_store(&self) -> bool {
        self.state().store.is_some()
    }

    /// Reloads the server certificate. On failure the old one stays in use.
    pub fn reload_certificates(&self) -> Result<(), ControlError> {
        let certificates = Arc::new(self.tls.reload()?);
        self.workers.publish_certificates(&certificates);
        Ok(())
    }

    /// Makes every worker use this placement of services on nodes from now on. Issues a certificate for this node first if
    /// its slot or session is new.
    pub(crate) fn publish_placement(&self, placement: Placement) -> Result<(), ControlError> {
        let slot = placement.here();
        let node = NodeIdentity { slot, session: placement.member(slot).map_or(0, |member| member.session) };
        let mut certified = self.certified_node.lock().unwrap_or_else(PoisonError::into_inner);
        if *certified != Some(node) {
            let tls = NodeTls::new(self.agents.certificate_pem(), &self.agents.issue_node(&self.region, node)?)?;
            self.workers.publish_node_tls(&Arc::new(tls));
            *certified = Some(node);
        }
        // Under the lock, so that placements arrive in order.
        self.workers.publish_placement(&Arc::new(placement));
        Ok(())
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
        received
    }

    /// The number of workers.
    pub fn workers(&self) -> usize {
        self.workers.count()
    }

    fn state(&self) -> MutexGuard<'_, ControlState> {
        // A panic that poisons the lock leaves the store consistent (SQLite transactions); records are applied after
        // the commit.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn directory(&self, records: &Records) -> Directory {
        Directory::new(records, &self.region, self.workers.count())
    }
}

/// A new secret of 256 bits.
fn new_secret() -> Secret {
    Secret::new(random_base62(SECRET_LENGTH))
}

fn admin_token(path: &Path) -> io::Result<Secret> {
    if !path.exists() {
        files::write_private(path, new_secret().reveal().as_bytes())?;
    }
    files::read_text(path).map(|text| Secret::new(text.trim().to_owned()))
}
