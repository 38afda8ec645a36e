//! The control plane: the records and the certificate authority, and the messages that update the
//! workers. Ordinary blocking code that runs outside the worker threads.
//!
//! Every change takes the same path: `Control::change` plans it on the records in memory, commits
//! it to the store together with its audit entry, then publishes the new directory to the workers
//! and returns.

pub mod backup;
pub mod changes;
mod data_folder;
mod error;
mod executor;
mod gateway_address;
pub mod identity;
mod open;
pub mod records;
pub(crate) mod replay;
#[cfg(test)]
pub(crate) mod tests;
pub mod usage;
pub(crate) mod warnings;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gw_base::clock::Timestamp;
use gw_base::process::freeze::AwaitedRead;
use gw_base::process::reserve::Reserve;
use gw_base::service::hostname::Region;
use gw_base::service::rate::Rate;
use gw_base::tls::admin::AdminTls;
use gw_base::tls::certificate::Mistakes;
use gw_base::tls::pki::{Authority, NodeIdentity};
use gw_base::tls::{ServerConfigs, TlsMaterial};
use gw_interface::rate_limit::Level;
use gw_interface::workers::{LostNode, ViewApplied, Workers};
use gw_region::View;
use gw_shared::id::{DomainName, SECRET_LENGTH, random_base62};
use gw_shared::identity::secret::Secret;
use gw_shared::version::AgentVersions;
use gw_store::{
    Directory, PostgresSource, Records, Revision, Step, Store, StoreSource, StoredRecord,
};
use gw_telemetry::counters::WorkerReport;
#[cfg(debug_assertions)]
use tokio::runtime::Handle;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{Notify, watch};

pub use changes::audit::{AuditEntryView, AuditProblemView, AuditVerificationView};
pub use changes::change::{Actor, AppliedDocument};
use changes::change::{ControlState, Plan};
use changes::feed::EngineHealth;
pub(crate) use changes::feed::StoreStatus;
pub use changes::feed::{follow, read_copy};
use changes::journal::Journal;
pub use changes::takeover::{ForFollower, MissingChanges};
pub(crate) use data_folder::INCOMPLETE_RESTORE;
pub use error::ControlError;
pub use executor::{JobQueue, maintain};
pub use gateway_address::{BACKEND_PORT, GatewayAddress};
pub use gw_base::service::service_settings::{Mode, NewService, ServiceChanges, ServiceView};
pub use gw_interface::control_plane::AgentProof;
use identity::authority::Authorities;
pub use identity::authority::{
    AgentCaView, AuthorityEnd, AuthorityReplacement, AuthorityView, LeftAgent,
};
pub use identity::shared_files::{ADMIN_TOKEN, AGENT_CA, SHARED_SECRETS};
pub use open::{node_name, postgres_source, reserve};
pub use records::account::{
    AccountChanges, AccountContents, AccountView, NamedRecords, NewAccount,
};
pub use records::agent::{AgentChanges, AgentView, LiveAgents};
pub use records::caller_secret::{
    CallerSecretChanges, CredentialView, NewCallerSecret, NewCredentialView, NewServiceKeyView,
    SecretKind, ServiceKeyView,
};
use records::certificate::IssuedCertificates;
pub use records::certificate::{CertificateStatus, CertificateView};
pub use records::domain::{
    DnsRecordView, DomainCertificateView, DomainView, NewDomain, NewDomainCertificate,
};
pub use records::enrollment_token::{
    EnrollmentTokenView, NewEnrollmentToken, NewEnrollmentTokenView,
};
pub use records::inventory::Inventory;
pub use records::name::checked_name;
use records::service_counts::ServiceCounts;
pub use records::signing_key::{Rotation, SigningKeyStatus, SigningKeyView};
pub(crate) use replay::not_captured;
pub use replay::{ReplayEdits, ReplayField};
pub use warnings::{WarningView, WarningsView};

use crate::cluster::{LocalNode, NodeClient};

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
    /// Changes for a start without PostgreSQL; `None` with SQLite.
    journal: Option<Journal>,
    /// Room on the disk for changes that take access away.
    reserve: Reserve,
    /// The authority of the data folder, which counts until it is replaced for the first time.
    first_authority: Arc<Authority>,
    authorities: Mutex<Arc<Authorities>>,
    tls: TlsMaterial,
    /// Certificates of an ACME authority; `None` without one.
    issued: Option<IssuedCertificates>,
    /// Sent when own domains have changed.
    domains_changed: watch::Sender<()>,
    /// Latest findings about own domains. Their texts may differ from those in the records.
    findings: Mutex<BTreeMap<DomainName, String>>,
    /// DNS servers that are asked about own domains.
    dns_servers: Arc<[SocketAddr]>,
    /// TLS of the admin listener; `None` if it speaks plain HTTP.
    admin_tls: Option<Arc<AdminTls>>,
    /// Node that has a certificate for links to other nodes.
    certified_node: Mutex<Option<NodeIdentity>>,
    /// Calls the control planes of other nodes.
    node_client: NodeClient,
    admin_token: Secret,
    admin_hosts: Vec<String>,
    service_counts: ServiceCounts,
    engine_health: EngineHealth,
    /// Ends the wait of the feed for the next change.
    look_for_changes: Arc<Notify>,
    /// Read of the records that the workers wait for.
    awaited_read: Arc<AwaitedRead>,
    /// The revision that the workers use. Also sent when a copy of the records was written.
    applied: watch::Sender<Revision>,
    workers: Arc<dyn Workers>,
}

impl Control {
    /// The directory and TLS configurations that workers start with.
    pub fn initial_state(&self) -> Result<(Arc<Directory>, Arc<ServerConfigs>), ControlError> {
        Ok((Arc::new(self.state().directory.clone()), self.tls.load()?))
    }

    /// The database that the nodes of the region share; `None` with SQLite.
    pub fn postgres_source(&self) -> Option<&PostgresSource> {
        match &self.store_source {
            StoreSource::Sqlite(..) => None,
            StoreSource::Postgres(source) => Some(source),
        }
    }

    /// Host names of the region.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Calls the control planes of other nodes.
    pub fn node_client(&self) -> &NodeClient {
        &self.node_client
    }

    /// This process as a node of the region: its newest placement and TLS configurations.
    pub fn local_node(&self) -> &Arc<LocalNode> {
        self.node_client.local_node()
    }

    /// Token that authenticates the administrator.
    pub fn admin_token(&self) -> &Secret {
        &self.admin_token
    }

    /// TLS of the admin listener; `None` if it speaks plain HTTP.
    pub fn admin_tls(&self) -> Option<&Arc<AdminTls>> {
        self.admin_tls.as_ref()
    }

    /// Additional host names by which clients reach the admin listener.
    pub fn admin_hosts(&self) -> &[String] {
        &self.admin_hosts
    }

    /// The CA certificate that callers and agents must trust; `None` if the server certificate
    /// comes from a file or from an ACME authority.
    pub fn development_ca(&self) -> Option<PathBuf> {
        self.tls.development_ca()
    }

    /// A copy of all records.
    pub fn records(&self) -> Records {
        self.state().records.clone()
    }

    /// The directory. Shares its contents with later ones.
    pub fn directory(&self) -> Directory {
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

    /// Runs the maintenance that is due at `now`: rotates the signing key, deletes expired records,
    /// and makes the reserve on the disk whole.
    pub fn maintain(&self, now: Timestamp) -> Result<(), ControlError> {
        if let Err(error) = self.reserve.fill() {
            let path = self.reserve.path().display();
            tracing::warn!(%path, %error,
                "the reserve for revocations is not whole: free space on this disk");
        }
        records::signing_key::rotate_by_age(self, now)?;
        records::signing_key::forget_old(self, now)?;
        records::ticket_key::rotate_by_age(self, now)?;
        identity::enrollment::forget_old(self, now)
    }

    /// Closes the store, so that another process can open it. Until it is reopened, no change is
    /// possible here.
    pub fn close_store(&self) {
        // First, while no other process uses the data folder.
        if let Some(journal) = &self.journal {
            journal.hand_over();
        }
        *self.store() = None;
    }

    /// Reopens the store and loads changes made by another process.
    pub fn reopen_store(&self) -> Result<(), ControlError> {
        let mut reopened = self.store_source.open()?;
        if let Some(journal) = &self.journal {
            journal.take_back();
        }
        let mut store = self.store();
        self.follow_changes(reopened.as_mut())?;
        *store = Some(reopened);
        Ok(())
    }

    /// Whether the store is open in this process, so that changes are possible.
    pub fn has_store(&self) -> bool {
        // Tasks ask, too, and do not wait for a change, which holds the lock of a store that is
        // open.
        self.store.try_lock().map_or(true, |store| store.is_some())
    }

    /// Reloads the server certificate and that of the admin listener. One that cannot be used stays
    /// as it was, and the other is replaced all the same.
    pub fn reload_certificates(&self) -> Result<(), ControlError> {
        let server = self
            .tls
            .reload(|certificates| self.workers.publish_certificates(certificates));
        let admin = self.admin_tls.as_ref().map_or(Ok(()), |tls| tls.reload());
        Ok(match (server, admin) {
            (Err(server), Err(admin)) => {
                Err(Mistakes(vec![server.to_string(), admin.to_string()]).into())
            }
            (server, admin) => server.and(admin),
        }?)
    }

    /// Makes every worker use this view of the region from now on. Issues a certificate for this
    /// node first if its slot or session is new. `number` and `applied` as in
    /// [`Workers::publish_view`].
    pub fn publish_view(
        &self,
        number: u64,
        view: &Arc<View>,
        session: u128,
        applied: &UnboundedSender<ViewApplied>,
    ) -> Result<(), ControlError> {
        // First, because it locks the state, which is locked before `certified_node` elsewhere.
        self.count_services_by(view.placement());
        let node = NodeIdentity {
            slot: view.placement().here(),
            session,
        };
        let mut certified = self
            .certified_node
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if *certified != Some(node) {
            self.certify(&self.authorities(), node)?;
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

    /// Makes every worker end its connections with a lost node.
    pub(crate) fn end_connections(&self, lost: LostNode) {
        self.workers.end_connections(lost);
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
        // Panics on a thread that runs tasks, which this may block. PostgreSQL panics there in all
        // builds.
        #[cfg(debug_assertions)]
        let _ = Handle::try_current().map(|runtime| runtime.block_on(async {}));
        // A panic that poisons the lock leaves the store consistent, because changes are
        // transactions.
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
