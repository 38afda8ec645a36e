//! The control plane: the records, the certificate authority, and what they tell the workers. Ordinary blocking code,
//! off the cores.
//!
//! Every change goes one way: `Control::change` plans it on the records in memory, commits it to the store together
//! with its entry in the audit log, and only then has the workers act on it and answers.

mod access;
mod account;
mod agent;
mod enrollment;
mod executor;
mod grant;
mod inventory;
mod name;
mod page;
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
#[cfg(any(test, feature = "fuzz_support"))]
pub(crate) use enrollment::parse_token;
pub use enrollment::{EnrollmentTokenView, NewEnrollmentToken, NewEnrollmentTokenView, Proof};
pub(crate) use executor::{Desk, Errands, desk};
pub use grant::{CredentialView, GrantChanges, Grants, NewCredentialView, NewGrant, NewServiceKeyView, ServiceKeyView};
pub use inventory::Inventory;
use name::checked_name;
pub(crate) use page::{LIMIT_DEFAULT, LIMIT_MAX};
pub use page::{Page, PageQuery};
pub(crate) use replay::{REPLAY_FRAMING, Replay, not_captured};
pub use replay::{ReplayEdits, ReplayField};
pub use service::{Mode, NewService, ServiceChanges, ServiceView};
pub use signing_key::{Rotation, SigningKeyStatus, SigningKeyView};
pub(crate) use workers::Workers;

use crate::clock::Timestamp;
use crate::config::Config;
use crate::hostname::Region;
use crate::limit::{Bucket, Rate};
use crate::store::{
    AuditEntry, AuditQuery, Directory, NumberedEntry, Record, Records, SqliteStore, Step, Store, StoreError,
};
use crate::telemetry::counters::WorkerReport;
use crate::telemetry::request_log::LogError;
use crate::tls::pki::{Authority, PkiError};
use crate::tls::{ServerConfigs, TlsError, TlsMaterial};

/// 43 of base62 hold 256 bits: the length of every secret we make.
pub(crate) const SECRET_LENGTH: usize = 43;

/// Administration of one gateway process.
pub struct Control {
    store_path: PathBuf,
    region: Region,
    default_rate: Rate,
    signing_key_rotation: Option<Duration>,
    certificate_lifetime: Duration,
    state: Mutex<State>,
    agents: Authority,
    tls: TlsMaterial,
    admin_token: Secret,
    admin_hosts: Vec<String>,
    workers: Arc<dyn Workers>,
}

/// The records, and where they are kept: always the same.
struct State {
    records: Records,
    /// `None` while another process has it.
    store: Option<Box<dyn Store>>,
    /// Certificates that each agent may still have: each costs a write to the disk, which is everybody's.
    issuance: HashMap<AgentId, Bucket>,
    /// The last snapshots that workers were given: held on to, so that freeing a whole one falls to none of them that keeps up.
    published: [Arc<Directory>; 2],
    /// Told that the records have changed.
    watcher: Option<Sender<()>>,
}

/// In whose name something changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Actor {
    /// Who holds the admin token.
    Admin,
    /// The gateway itself: rotation by age, what has expired.
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
    /// What is wrong with a value, by the name of its field.
    #[error("{field}: {message}")]
    Invalid { field: &'static str, message: String },
    #[error("{0}")]
    Conflict(String),
    #[error("another process is taking over from this one; try again")]
    HandedOver,
    #[error("the gateway stopped before the replay ended")]
    Stopping,
    /// An agent asked for what it may not have.
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

impl From<LogError> for ControlError {
    fn from(error: LogError) -> Self {
        match error {
            LogError::Invalid { field, message } => Self::Invalid { field, message },
            error => Self::RequestLog(error),
        }
    }
}

/// A change that was decided on and not made yet.
struct Plan<T> {
    /// None: everything is as wanted already.
    steps: Vec<Step>,
    action: &'static str,
    account: Option<AccountId>,
    target: String,
    detail: serde_json::Value,
    /// What whoever asked gets once it is made.
    output: T,
}

impl<T> Plan<T> {
    /// Nothing to do.
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
    /// Opens the data folder: records, authority, admin token; makes what is not there.
    pub(crate) fn open(config: &Config, workers: Arc<dyn Workers>) -> Result<Self, ControlError> {
        files::create_private_dir(&config.data_dir)?;
        // First: it says whether another process uses the folder.
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
            state: Mutex::new(State {
                records: store.load()?,
                store: Some(Box::new(store)),
                issuance: HashMap::new(),
                published: Default::default(),
                watcher: None,
            }),
            agents,
            tls,
            admin_token: admin_token(&config.data_dir.join("admin.token"))?,
            admin_hosts: config.admin_hosts.clone(),
            workers,
        };
        if let Err(error) = control.maintain(Timestamp::now()) {
            // What is due can wait, as on a full disk; without any key there would be no tokens at all.
            if control.state().records.signing_keys.is_empty() {
                return Err(error);
            }
            tracing::error!(%error, "maintenance of the records failed; trying again in a minute");
        }
        Ok(control)
    }

    /// What workers start with.
    pub(crate) fn initial_state(&self) -> Result<(Arc<Directory>, Arc<ServerConfigs>), ControlError> {
        Ok((Arc::new(self.directory(&self.state().records)), Arc::new(self.tls.load()?)))
    }

    pub fn region(&self) -> &Region {
        &self.region
    }

    pub fn admin_token(&self) -> &Secret {
        &self.admin_token
    }

    /// Names, besides those of this machine, by which browsers reach the console.
    pub(crate) fn admin_hosts(&self) -> &[String] {
        &self.admin_hosts
    }

    /// The certificate that callers and agents have to trust, if it is not of a public authority.
    pub(crate) fn development_ca(&self) -> Option<PathBuf> {
        self.tls.development_ca()
    }

    /// A copy of all records.
    pub fn records(&self) -> Records {
        self.state().records.clone()
    }

    /// Looks at the records where they are. Nothing changes meanwhile: look, and go.
    pub(crate) fn look_at<T>(&self, look: impl FnOnce(&Records) -> T) -> T {
        look(&self.state().records)
    }

    pub fn audit_log(&self, query: &AuditQuery) -> Result<Vec<NumberedEntry>, ControlError> {
        Ok(self.state().store.as_ref().ok_or(ControlError::HandedOver)?.audit_log(query)?)
    }

    /// Puts a record in place as it is, without the rules that the other methods keep. For tests.
    #[doc(hidden)]
    pub fn put(&self, record: Record) -> Result<(), ControlError> {
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

    /// What is due by `now` without anybody asking: a new signing key, records whose time is over.
    pub(crate) fn maintain(&self, now: Timestamp) -> Result<(), ControlError> {
        self.rotate_signing_key_by_age(now)?;
        self.forget_old_signing_keys(now)?;
        self.forget_old_enrollments(now)
    }

    /// Makes a change: plans it, stores it with its audit entry, has every worker act on it. When this returns it is
    /// durable, and workers follow at once; on an error nothing has changed.
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
            action: plan.action,
            account: plan.account,
            target: plan.target,
            detail: plan.detail,
        };
        state.store.as_mut().ok_or(ControlError::HandedOver)?.commit(&plan.steps, &entry)?;
        tracing::info!(actor = entry.actor, action = entry.action, target = entry.target, "changed");
        for step in plan.steps {
            state.records.apply(step);
        }
        self.publish(&mut state);
        Ok(plan.output)
    }

    /// Has every worker act on the records. Takes them locked, so that of two changes the later snapshot arrives later.
    fn publish(&self, state: &mut State) {
        let directory = Arc::new(self.directory(&state.records));
        state.published.rotate_right(1);
        state.published[0] = Arc::clone(&directory);
        self.workers.publish_directory(&directory);
        if let Some(watcher) = &state.watcher {
            // Full: told already. Disconnected: not wanted any more.
            let _ = watcher.try_send(());
        }
    }

    /// A channel that has a message whenever the records have changed since the last one. There is one at a time.
    pub(crate) fn watch_changes(&self) -> Receiver<()> {
        let (watcher, changes) = crossbeam_channel::bounded(1);
        self.state().watcher = Some(watcher);
        changes
    }

    /// Ends the channel of [`Self::watch_changes`]: changes are not known here any more.
    pub(crate) fn end_watch(&self) {
        self.state().watcher = None;
    }

    /// Has workers act on the records of the process that has the store now.
    pub(crate) fn follow(&self, records: Vec<Record>) {
        let mut state = self.state();
        if state.store.is_none() {
            state.records = records.into_iter().collect();
            self.publish(&mut state);
        }
    }

    /// Closes the store, for another process to open. Until it is opened again, nothing can be changed here.
    pub(crate) fn close_store(&self) {
        self.state().store = None;
    }

    /// Opens the store again and takes over what another process may have changed.
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

    /// Reads the server certificate again. On failure the old one stays in use.
    pub fn reload_certificates(&self) -> Result<(), ControlError> {
        let certificates = Arc::new(self.tls.reload()?);
        self.workers.publish_certificates(&certificates);
        Ok(())
    }

    /// Asks every worker for its counters and tunnels; those that do not answer in time are missing.
    pub fn reports(&self) -> Vec<WorkerReport> {
        self.scrape(false)
    }

    /// The same, with the counts of every service.
    pub fn reports_with_services(&self) -> Vec<WorkerReport> {
        self.scrape(true)
    }

    fn scrape(&self, with_services: bool) -> Vec<WorkerReport> {
        let mut received = self.workers.reports(with_services);
        received.sort_by_key(|report: &WorkerReport| report.worker);
        received
    }

    /// Number of workers.
    pub fn workers(&self) -> usize {
        self.workers.count()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic while it was held left the store as SQLite's transactions leave it, whole; records are applied after.
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
