//! A gateway with many own domains: start, memory, and CPU time per handshake.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use gw_base::clock::Timestamp;
use gw_control_plane::control::records::service;
use gw_control_plane::control::{Actor, NewService};
use gw_shared::id::{AccountId, DomainName, ServiceId};
use gw_shared::identity::secret::Secret;
use gw_shared::version::later_members::LaterMembers;
use gw_store::{
    DomainCertificate, DomainCertificateSource, DomainMaterial, DomainRecord, DomainState,
    ServedPair, StoredRecord,
};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use tempfile::TempDir;

use super::many::{Started, create_account, start_on};
use crate::client::Target;
use crate::demo::Demo;
use crate::failure::{Failure, ensure};
use crate::machine::procfs;

/// Rounds of handshakes with few and with many domains, in turns, so that noise of the machine
/// affects both.
const ROUNDS: usize = 15;
const HANDSHAKES_PER_ROUND: usize = 1_000;
/// Beginning of the names of the threads that do handshakes.
const WORKERS: &str = "gw-worker-";
/// Domains whose callers connect.
const CALLED: usize = 200;
const START_MORE_MAX: Duration = Duration::from_secs(2);
/// Largest allowed difference of the CPU time per handshake.
const MORE_MAX: f64 = 0.03;
/// Records of one change.
const BATCH: usize = 1_000;
const ACCOUNT: &str = "demo";
const SERVICE: &str = "echo";

#[derive(Args)]
pub(crate) struct Options {
    #[arg(long, default_value_t = 100_000)]
    domains: usize,
}

/// An authority that issues the certificates of the domains.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    key: KeyPair,
}

pub(crate) fn run(gateway: &Path, options: &Options) -> Result<(), Failure> {
    let authority = Authority::new()?;
    let roots = tempfile::NamedTempFile::new()?;
    fs::write(roots.path(), authority.issuer.pem())?;
    let start = |domains| Started::new(fill(&authority, domains)?, gateway, domains);
    let few = start(CALLED)?;
    let many = start(options.domains.max(CALLED))?;
    let more = many.compare(&few, "domains", ROUNDS, |demo| {
        handshakes(demo, roots.path())
    })?;
    let longer = many.took.saturating_sub(few.took);
    few.demo.stop()?;
    many.demo.stop()?;
    ensure(longer <= START_MORE_MAX, || {
        format!("a start takes {longer:?} more, and may take {START_MORE_MAX:?}")
    })?;
    ensure(more <= MORE_MAX, || {
        format!("a handshake costs more than {} % more", MORE_MAX * 100.0)
    })
}

impl Authority {
    fn new() -> Result<Self, Failure> {
        let failed = |error| Failure::during("a certificate", error);
        let mut parameters = CertificateParams::default();
        parameters
            .distinguished_name
            .push(DnType::CommonName, "authority of own domains");
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().map_err(failed)?;
        let issuer = CertifiedIssuer::self_signed(parameters, key).map_err(failed)?;
        let key = KeyPair::generate().map_err(failed)?;
        Ok(Self { issuer, key })
    }

    /// A domain of the demo's service, with a chain of two certificates.
    fn domain(&self, number: usize) -> Result<DomainRecord, Failure> {
        let failed = |error| Failure::during("a certificate", error);
        let name = name_of(number);
        let leaf = CertificateParams::new([name.clone()]).map_err(failed)?;
        let leaf = leaf.signed_by(&self.key, &self.issuer).map_err(failed)?;
        let material = DomainMaterial {
            served: Some(ServedPair {
                chain: format!("{}{}", leaf.pem(), self.issuer.pem()),
                key: Secret::new(self.key.serialize_pem()),
            }),
            ..DomainMaterial::default()
        };
        let now = Timestamp::now();
        let bad = |error| Failure::during("an id", error);
        Ok(DomainRecord {
            id: DomainName::new(&name).map_err(bad)?,
            account: AccountId::new(ACCOUNT).map_err(bad)?,
            service: ServiceId::new(SERVICE).map_err(bad)?,
            state: DomainState::Active,
            since: now,
            finding: None,
            certificate: Some(DomainCertificate {
                not_before: now,
                not_after: now.after(Duration::from_secs(90 * 24 * 3600)),
                source: DomainCertificateSource::Uploaded,
            }),
            order: None,
            failures: None,
            renewal_requested: None,
            created_at: now,
            managed_by: None,
            material: Arc::new(Secret::new(serde_json::to_string(&material)?)),
            later: LaterMembers::default(),
        })
    }
}

fn name_of(number: usize) -> String {
    format!("service{number}.customer{}.example.org", number % 5_000)
}

/// A data folder with `domains` own domains.
fn fill(authority: &Authority, domains: usize) -> Result<TempDir, Failure> {
    let folder = tempfile::Builder::new().prefix("gw-loadtest-").tempdir()?;
    let gateway = start_on(folder.path())?;
    let made = |error| Failure::during("a change", error);
    create_account(&gateway, ACCOUNT.to_owned())?;
    let new = NewService {
        id: SERVICE.to_owned(),
        ..NewService::default()
    };
    service::create(gateway.control(), &Actor::Admin, ACCOUNT, &new).map_err(made)?;
    for begin in (0..domains).step_by(BATCH) {
        let records: Vec<_> = (begin..domains.min(begin + BATCH))
            .map(|number| authority.domain(number).map(StoredRecord::Domain))
            .collect::<Result<_, _>>()?;
        gateway.control().put_all(&records).map_err(made)?;
    }
    gateway.drain();
    Ok(folder)
}

/// CPU time of the workers per handshake in microseconds.
fn handshakes(demo: &Demo, roots: &Path) -> Result<f64, Failure> {
    let port = demo.target.port;
    let target = |number| Target::new(&format!("https://{}:{port}", name_of(number)), roots, "");
    let targets: Vec<Target> = (0..CALLED).map(target).collect::<Result<_, _>>()?;
    let spent = || procfs::cpu_of_threads(demo.pid(), WORKERS);
    let before = spent();
    for number in 0..HANDSHAKES_PER_ROUND {
        drop(targets[number % CALLED].open(&[b"http/1.1"])?);
    }
    let cpu = spent().saturating_sub(before);
    Ok(cpu.as_secs_f64() * 1e6 / HANDSHAKES_PER_ROUND as f64)
}
