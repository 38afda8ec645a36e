//! Opens the control plane: the store, and the secrets in the data folder.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use gw_base::clock::Timestamp;
use gw_base::process::background::Tasks;
use gw_base::process::freeze::AwaitedRead;
use gw_base::process::reserve::Reserve;
use gw_base::tls::admin::AdminTls;
use gw_base::tls::pki::{self, Authority};
use gw_base::tls::{CertificateSource, TlsMaterial};
use gw_interface::config::{Config, StoreSettings};
use gw_region::RegionKeys;
use gw_shared::identity::secret::Secret;
use gw_store::{
    KnownRecords, PostgresInspector, PostgresSettings, PostgresSource, PostgresStore, Records,
    Sealer, Sealing, Snapshot, Store, StoreError, StoreSource,
};
use tokio::sync::{Notify, watch};

use super::changes::feed::{COPY_FILE, EngineHealth, read_copy};
use super::identity::authority::{Authorities, COMMON_NAME};
use super::identity::shared_files::{ADMIN_TOKEN, AGENT_CA, DEVELOPMENT_CA, SharedSecret};
use super::records::certificate::IssuedCertificates;
use super::records::service_counts::ServiceCounts;
use super::{Control, ControlError, ControlState, Journal, Workers, data_folder, new_secret};
use crate::cluster::{LocalNode, NodeClient};

const ADMIN_TOKEN_FILE: &str = "admin.token";
const AGENT_CA_NAME: &str = "agent-ca";
/// Files that are sealed if there is a key. The development authority is for machines that trust it
/// for tests.
const SEALED_FILES: [&str; 2] = ["agent-ca.key", ADMIN_TOKEN_FILE];

/// TLS configurations of the listeners, from the configuration and the records.
fn tls_material(config: &Config, authorities: &Authorities, records: &Records) -> TlsMaterial {
    TlsMaterial::new(
        config.certificate.clone(),
        config.region.clone(),
        config.tls_min_version,
        authorities.trusted.clone(),
        records.usable_ticket_keys(),
        config.agent_mtls,
    )
}

impl Control {
    /// Opens the store and the data folder with authority and admin token, and creates what is
    /// missing. Work that takes long runs in `tasks`.
    pub fn open(
        config: &Config,
        workers: Arc<dyn Workers>,
        tasks: Tasks,
    ) -> Result<Self, ControlError> {
        data_folder::prepare(&config.data_dir)?;
        Self::open_in_folder(config, workers, tasks)
            .map_err(|error| data_folder::explain(&config.data_dir, error))
    }

    fn open_in_folder(
        config: &Config,
        workers: Arc<dyn Workers>,
        tasks: Tasks,
    ) -> Result<Self, ControlError> {
        let store_source = store_source(config)?;
        let reserve = reserve(config);
        // Must come first: it fails if another process uses the folder.
        let mut store = store_source.open()?;
        data_folder::refuse_incomplete_restore(&config.data_dir)?;
        let sealing = store_source.sealing();
        seal_files(&sealing, &config.data_dir)?;
        let snapshot = load(store.as_mut(), &store_source, config)?;
        let first =
            Authority::load_or_create_with(&sealing, &config.data_dir, AGENT_CA_NAME, COMMON_NAME)?;
        let first_authority = Arc::new(first);
        let authorities = Authorities::of(&snapshot.records, &first_authority)?;
        let tls = tls_material(config, &authorities, &snapshot.records);
        let token_file = config.data_dir.join(ADMIN_TOKEN_FILE);
        // A token that was removed is replaced on a full disk, too.
        let admin_token = reserve.lend(|| admin_token(&sealing, &token_file), StoreError::kind)?;
        let journal = journal(config, &store_source, &reserve)?;
        let (applied, _) = watch::channel(snapshot.position.revision);
        let look_for_changes = Arc::<Notify>::default();
        let control = Self {
            store_source,
            region: config.region.clone(),
            default_rate: config.default_rate,
            signing_key_rotation: config.signing_key_rotation,
            certificate_lifetime: config.agent_certificate_lifetime,
            agent_versions: config.agent_releases.served,
            state: Mutex::new(ControlState::new(snapshot, &config.region, workers.count())),
            journal,
            reserve,
            store: Mutex::new(Some(store)),
            first_authority,
            authorities: Mutex::new(Arc::new(authorities)),
            tls,
            issued: IssuedCertificates::of(config),
            domains_changed: watch::Sender::default(),
            findings: Mutex::default(),
            dns_servers: config.dns_servers.clone().into(),
            admin_tls: config
                .admin_certificate
                .clone()
                .map(AdminTls::load)
                .transpose()?
                .map(Arc::new),
            admin_token,
            admin_hosts: config.admin_hosts.clone(),
            certified_node: Mutex::default(),
            node_client: NodeClient::new(LocalNode::new(config.region.clone())),
            service_counts: ServiceCounts::new(tasks),
            engine_health: EngineHealth::default(),
            awaited_read: Arc::new(AwaitedRead::new(
                Arc::clone(&look_for_changes),
                Instant::now(),
            )),
            look_for_changes,
            applied,
            workers,
        };
        control.use_certificates(&control.state().records);
        control.use_domains(&control.state().records, None);
        control.maintain_at_start()?;
        Ok(control)
    }

    /// Maintains the records. Maintenance can wait, for example on a full disk; without any signing
    /// key, however, no token can be issued.
    fn maintain_at_start(&self) -> Result<(), ControlError> {
        match self.maintain(Timestamp::now()) {
            Err(error) if self.state().records.signing_keys.is_empty() => Err(error),
            Err(error) => {
                tracing::error!(%error,
                    "maintenance of the records failed; trying again in a minute");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }
}

/// The journal of a node; `None` with SQLite.
fn journal(
    config: &Config,
    source: &StoreSource,
    reserve: &Reserve,
) -> Result<Option<Journal>, StoreError> {
    let StoreSource::Postgres(source) = source else {
        return Ok(None);
    };
    let sealer = Sealer::new(&source.keys)?;
    Ok(Some(Journal::new(
        &config.data_dir,
        sealer,
        reserve.clone(),
    )))
}

/// The reserve in the data folder, beside the records that are written there.
pub fn reserve(config: &Config) -> Reserve {
    Reserve::beside(match &config.store {
        StoreSettings::Sqlite => StoreSource::sqlite_in(&config.data_dir),
        StoreSettings::Postgres(_) => config.data_dir.join(COPY_FILE),
    })
}

fn store_source(config: &Config) -> Result<StoreSource, ControlError> {
    Ok(match &config.store {
        StoreSettings::Sqlite => StoreSource::Sqlite(
            StoreSource::sqlite_in(&config.data_dir),
            Sealing::load(config.seal_key.as_deref())?,
        ),
        StoreSettings::Postgres(settings) => {
            let keys = config
                .region_keys()
                .map_err(|error| StoreError::Region(error.to_string()))?;
            let keys = keys.ok_or_else(|| StoreError::Region("region_key: missing".to_owned()))?;
            StoreSource::Postgres(postgres_source(config, settings, keys))
        }
    })
}

/// The database of a node with this configuration.
pub fn postgres_source(
    config: &Config,
    settings: &PostgresSettings,
    keys: RegionKeys,
) -> PostgresSource {
    PostgresSource {
        settings: settings.clone(),
        apex: config.region.apex().to_owned(),
        keys,
        node: node_name(),
        lock: config.data_dir.join(data_folder::LOCK_FILE),
        known: KnownRecords::default(),
    }
}

/// Name of this machine.
pub fn node_name() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}

/// Loads the records, and stores the secrets that all nodes share in the data folder. If the
/// primary does not answer, or its records are not authentic, both come from the data folder.
fn load(
    store: &mut dyn Store,
    source: &StoreSource,
    config: &Config,
) -> Result<Snapshot, ControlError> {
    let StoreSource::Postgres(source) = source else {
        return Ok(store.load()?);
    };
    match load_from_postgres(store, source, config) {
        Err(ControlError::Store(
            error @ (StoreError::Unavailable(_)
            | StoreError::SeveralPrimaries(_)
            | StoreError::Forged { .. }),
        )) => {
            let has_secrets = [AGENT_CA, ADMIN_TOKEN]
                .iter()
                .all(|secret| secret.is_in(&config.data_dir));
            // A start from the copy makes no secret of its own, which the other nodes would not
            // know.
            let copy = read_copy(&config.data_dir, source)?.filter(|_| has_secrets);
            let Some(copy) = copy else {
                return Err(error.into());
            };
            tracing::error!(%error, revision = copy.position.revision.0,
                "starting with the copy of the records in the data folder");
            Ok(copy)
        }
        loaded => loaded,
    }
}

fn load_from_postgres(
    store: &mut dyn Store,
    source: &PostgresSource,
    config: &Config,
) -> Result<Snapshot, ControlError> {
    if !PostgresInspector::connect(&source.settings, &source.node)?.is_notified()? {
        return Err(StoreError::Pooled.into());
    }
    let mut secrets = PostgresStore::new(source)?;
    match secrets.check_unmigrated() {
        // The load migrates the tables, and trusts them unless the copy is of tables with tags.
        Err(StoreError::OlderSchema { .. }) => drop(read_copy(&config.data_dir, source)?),
        checked => drop(checked?),
    }
    // Before anything is made that has a time.
    secrets.read_clock()?.follow();
    let snapshot = store.load()?;
    fetch_shared_files(&mut secrets, config)?;
    Ok(snapshot)
}

/// Writes the shared secrets of the region to the data folder; creates those that the region does
/// not have yet.
fn fetch_shared_files(store: &mut PostgresStore, config: &Config) -> Result<(), ControlError> {
    let folder = &config.data_dir;
    fetch(store, folder, &AGENT_CA, || {
        Authority::load_or_create(folder, AGENT_CA_NAME, COMMON_NAME)
            .map(drop)
            .map_err(ControlError::from)
    })?;
    fetch(store, folder, &ADMIN_TOKEN, || {
        Ok(admin_token(&Sealing::default(), &folder.join(ADMIN_TOKEN_FILE)).map(drop)?)
    })?;
    if !matches!(config.certificate, CertificateSource::Files { .. }) {
        fetch(store, folder, &DEVELOPMENT_CA, || {
            pki::development_authority(folder)
                .map(drop)
                .map_err(ControlError::from)
        })?;
    }
    Ok(())
}

/// Fetches a secret into `folder`. `create` makes its files if the region does not have it.
fn fetch(
    store: &mut PostgresStore,
    folder: &Path,
    secret: &SharedSecret,
    create: impl FnOnce() -> Result<(), ControlError>,
) -> Result<(), ControlError> {
    let stored = store.shared_secret(secret.name, || {
        create()?;
        Ok::<_, ControlError>(secret.read(folder)?)
    })?;
    Ok(secret.write(folder, &stored)?)
}

/// Seals the secrets in files that are not sealed yet, if there is a key.
fn seal_files(sealing: &Sealing, folder: &Path) -> Result<(), ControlError> {
    for file in SEALED_FILES {
        if sealing.seal_file(&folder.join(file))? {
            tracing::info!(file, "sealed a file of the data folder with seal_key");
        }
    }
    Ok(())
}

fn admin_token(sealing: &Sealing, path: &Path) -> Result<Secret, StoreError> {
    if !path.exists() {
        sealing.write_file(path, new_secret().reveal())?;
    }
    sealing
        .read_file(path)
        .map(|text| Secret::new(text.trim().to_owned()))
}
