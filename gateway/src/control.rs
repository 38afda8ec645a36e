//! The control plane: the store, the certificate authority, and what they tell the workers. Ordinary blocking code,
//! off the cores.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gw_shared::id::{AccountId, AgentId, ServiceId, random_base62};
use gw_shared::secret::Secret;

use crate::auth::NewServiceKey;
use crate::config::Config;
use crate::counters::WorkerReport;
use crate::files;
use crate::hostname::Region;
use crate::limit::Rate;
use crate::mailbox::Message;
use crate::pki::{Authority, PkiError};
use crate::store::{AgentRecord, Directory, Modes, Record, ServiceRecord, SqliteStore, Store, StoreError};
use crate::tls::{ServerConfigs, TlsError, TlsMaterial};
use crate::worker::Peers;

/// How long a worker may take to report.
const REPORT_WITHIN: Duration = Duration::from_secs(2);
/// 43 of base62 hold 256 bits.
const ADMIN_TOKEN_LENGTH: usize = 43;

/// Administration of one gateway process.
pub struct Control {
    region: Region,
    default_rate: Rate,
    store: Mutex<Box<dyn Store>>,
    agents: Authority,
    tls: TlsMaterial,
    admin_token: Secret,
    peers: Arc<Peers>,
}

#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Pki(#[from] PkiError),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("the hostname of {0}--{1} would be longer than DNS allows (63 characters before the first dot)")]
    HostnameTooLong(AccountId, ServiceId),
}

impl Control {
    /// Opens the data folder: store, authority, admin token; makes what is not there.
    pub(crate) fn open(config: &Config, peers: Arc<Peers>) -> Result<Self, ControlError> {
        files::create_private_dir(&config.data_dir)?;
        let agents = Authority::load_or_create(&config.data_dir, "agent-ca", "Gw agents")?;
        let tls = TlsMaterial::new(config.certificate.clone(), config.region.clone(), agents.certificate_pem())?;
        Ok(Self {
            region: config.region.clone(),
            default_rate: config.default_rate,
            store: Mutex::new(Box::new(SqliteStore::open(&config.data_dir.join("gw.sqlite"))?)),
            agents,
            tls,
            admin_token: admin_token(&config.data_dir.join("admin.token"))?,
            peers,
        })
    }

    /// What workers start with.
    pub(crate) fn initial_state(&self) -> Result<(Arc<Directory>, Arc<ServerConfigs>), ControlError> {
        Ok((Arc::new(self.directory(&**self.store())?), Arc::new(self.tls.load()?)))
    }

    pub fn region(&self) -> &Region {
        &self.region
    }

    pub fn admin_token(&self) -> &Secret {
        &self.admin_token
    }

    pub fn create_account(&self, account: &AccountId) -> Result<(), ControlError> {
        self.put(Record::Account(account.clone()))
    }

    /// Creates a service that is enabled and accepts both modes; its bucket is the configured default unless given.
    /// Returns its hostname.
    pub fn create_service(
        &self,
        account: &AccountId,
        id: &ServiceId,
        rate: Option<Rate>,
    ) -> Result<String, ControlError> {
        let hostname = self
            .region
            .tenant_hostname(account, id)
            .ok_or_else(|| ControlError::HostnameTooLong(account.clone(), id.clone()))?;
        self.put(Record::Service(ServiceRecord {
            account: account.clone(),
            id: id.clone(),
            modes: Modes { jwt: true, service_key: true },
            enabled: true,
            rate: rate.unwrap_or(self.default_rate),
        }))?;
        Ok(hostname)
    }

    /// Creates a service key; its text is in the result and nowhere else.
    pub fn create_service_key(
        &self,
        account: &AccountId,
        allowed_services: &[ServiceId],
    ) -> Result<NewServiceKey, ControlError> {
        let key = NewServiceKey::generate(account.clone(), allowed_services.to_vec());
        self.put(Record::ServiceKey(key.record.clone()))?;
        Ok(key)
    }

    /// Creates an agent and writes the state folder that its `gw-agent run` needs: identity, gateway, services.
    ///
    /// `gateway` is where the agent connects to; `gateway_ca_pem` what it trusts there instead of the system's roots.
    pub fn create_agent(
        &self,
        account: &AccountId,
        name: &str,
        services: &[ServiceId],
        gateway: (&str, u16),
        gateway_ca_pem: Option<&str>,
        state_dir: &Path,
    ) -> Result<AgentId, ControlError> {
        let id = AgentId::random();
        let hostnames = services.iter().map(|service| {
            let hostname = self.region.tenant_hostname(account, service);
            hostname.ok_or_else(|| ControlError::HostnameTooLong(account.clone(), service.clone()))
        });
        let enrollment = gw_agent::state::Enrollment {
            gateway_host: gateway.0.to_owned(),
            gateway_port: gateway.1,
            services: hostnames.collect::<Result<_, _>>()?,
        };
        self.put(Record::Agent(AgentRecord {
            id: id.clone(),
            account: account.clone(),
            name: name.to_owned(),
            services: services.to_vec(),
            revoked: false,
        }))?;
        let issued = self.agents.issue_agent(&self.region, account, &id)?;
        let state = gw_agent::state::StateDir::new(state_dir);
        state.write(&enrollment, &issued.certificate_pem, &issued.key_pem, gateway_ca_pem)?;
        Ok(id)
    }

    /// Stores a record and has every worker act on it. The reply comes when it is stored; workers follow at once.
    pub fn put(&self, record: Record) -> Result<(), ControlError> {
        let mut store = self.store();
        store.put(record)?;
        let directory = Arc::new(self.directory(&**store)?);
        // Under the lock, so that of two changes the later snapshot arrives later.
        self.tell_workers(|| Message::Directory(Arc::clone(&directory)));
        Ok(())
    }

    /// Reads the records of one kind of question: everything.
    pub fn records(&self) -> Result<crate::store::Records, ControlError> {
        Ok(self.store().load()?)
    }

    /// Reads the server certificate again. On failure the old one stays in use.
    pub fn reload_certificates(&self) -> Result<(), ControlError> {
        let certificates = Arc::new(self.tls.load()?);
        self.tell_workers(|| Message::Certificates(Arc::clone(&certificates)));
        Ok(())
    }

    /// Asks every worker for its counters and tunnels; those that do not answer in time are missing.
    pub fn reports(&self) -> Vec<WorkerReport> {
        let (reply, reports) = crossbeam_channel::bounded(self.peers.mailboxes.len());
        self.tell_workers(|| Message::Scrape(reply.clone()));
        drop(reply);
        let mut received: Vec<WorkerReport> = std::iter::from_fn(|| reports.recv_timeout(REPORT_WITHIN).ok()).collect();
        received.sort_by_key(|report| report.worker);
        received
    }

    pub(crate) fn workers(&self) -> usize {
        self.peers.mailboxes.len()
    }

    pub(crate) fn tell_workers(&self, message: impl Fn() -> Message) {
        for mailbox in &self.peers.mailboxes {
            // Fails only for a worker that has ended.
            let _ = mailbox.post_blocking(message());
        }
    }

    fn store(&self) -> MutexGuard<'_, Box<dyn Store>> {
        // A panic while it was held left the store as SQLite's transactions leave it: whole.
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn directory(&self, store: &dyn Store) -> Result<Directory, StoreError> {
        Ok(Directory::new(store.load()?, &self.region, self.peers.mailboxes.len()))
    }
}

fn admin_token(path: &Path) -> io::Result<Secret> {
    if !path.exists() {
        let token = Secret::new(random_base62(ADMIN_TOKEN_LENGTH));
        files::write_private(path, token.reveal().as_bytes())?;
    }
    files::read_text(path).map(|text| Secret::new(text.trim().to_owned()))
}
