//! A gateway with many own domains: start, memory, and CPU time per handshake.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use gw_base::clock::Timestamp;
use gw_control_plane::control::records::{account, service};
use gw_control_plane::control::{Actor, NewAccount, NewService};
use gw_shared::id::{AccountId, DomainName, ServiceId};
use gw_shared::identity::secret::Secret;
use gw_shared::version::later_members::LaterMembers;
use gw_store::{
    DomainCertificate, DomainCertificateSource, DomainMaterial, DomainRecord, DomainState,
    ServedPair, StoredRecord,
};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use tempfile::TempDir;

use crate::client::Target;
use crate::demo::{Demo, Options as DemoOptions};
use crate::failure::{Failure, ensure};
use crate::machine::procfs;
use crate::report::{mebibytes, median, say};
use crate::scenarios::services::start_on;

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
    key_pem: String,
}

/// A demo with domains.
struct Started {
    demo: Demo,
    root: PathBuf,
    took: Duration,
    /// Proportional set size, in bytes.
    memory: u64,
}

pub(crate) fn run(gateway: &Path, options: &Options) -> Result<(), Failure> {
    let many = options.domains.max(CALLED);
    let authority = Authority::new()?;
    let few = start(gateway, &authority, CALLED)?;
    let many_started = start(gateway, &authority, many)?;
    let bytes =
        many_started.memory.saturating_sub(few.memory) as f64 / (many - CALLED).max(1) as f64;
    say(format_args!(
        "domains: start {:.2} s with {CALLED} domains, {:.2} s with {many}; memory {:.0} and {:.0} \
         MiB, {bytes:.0} bytes a domain",
        few.took.as_secs_f64(),
        many_started.took.as_secs_f64(),
        mebibytes(few.memory),
        mebibytes(many_started.memory)
    ));
    let (mut with_few, mut with_many, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let (few, many) = (few.round()?, many_started.round()?);
        ratios.push(many / few);
        with_few.push(few);
        with_many.push(many);
    }
    let (with_few, with_many) = (median(with_few), median(with_many));
    let more = median(ratios) - 1.0;
    say(format_args!(
        "domains: {with_few:.0} µs of CPU of the workers per handshake with {CALLED} domains, \
         {with_many:.0} with {many}; medians of {ROUNDS} rounds, {:+.1} % in a round",
        more * 100.0
    ));
    let longer = many_started.took.saturating_sub(few.took);
    few.demo.stop()?;
    many_started.demo.stop()?;
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
        let key_pem = key.serialize_pem();
        Ok(Self {
            issuer,
            key,
            key_pem,
        })
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
                key: Secret::new(self.key_pem.clone()),
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

/// Starts the product on a data folder with `domains` own domains.
fn start(gateway: &Path, authority: &Authority, domains: usize) -> Result<Started, Failure> {
    let folder = tempfile::Builder::new().prefix("gw-loadtest-").tempdir()?;
    fill(&folder, authority, domains)?;
    let root = folder.path().join("own-domains.pem");
    fs::write(&root, authority.issuer.pem())?;
    let began = Instant::now();
    let demo = Demo::start_in(folder, gateway, &DemoOptions::default())?;
    let took = began.elapsed();
    let memory = procfs::proportional_memory(demo.pid())?;
    let started = Started {
        demo,
        root,
        took,
        memory,
    };
    // Warm-up.
    started.round()?;
    Ok(started)
}

fn fill(folder: &TempDir, authority: &Authority, domains: usize) -> Result<(), Failure> {
    let gateway = start_on(folder.path())?;
    let control = gateway.control();
    let made = |error| Failure::during("a change", error);
    let new = NewAccount {
        id: ACCOUNT.to_owned(),
        capture_allowed: None,
        domains_max: None,
        managed_by: None,
    };
    account::create(control, &Actor::Admin, &new).map_err(made)?;
    let new = NewService {
        id: SERVICE.to_owned(),
        ..NewService::default()
    };
    service::create(control, &Actor::Admin, ACCOUNT, &new).map_err(made)?;
    for begin in (0..domains).step_by(BATCH) {
        let records: Vec<_> = (begin..domains.min(begin + BATCH))
            .map(|number| authority.domain(number).map(StoredRecord::Domain))
            .collect::<Result<_, _>>()?;
        control.put_all(&records).map_err(made)?;
    }
    gateway.drain();
    Ok(())
}

impl Started {
    /// CPU time of the gateway per handshake in microseconds.
    fn round(&self) -> Result<f64, Failure> {
        let port = self.demo.base_url.rsplit(':').next().unwrap_or_default();
        let targets: Vec<_> = (0..CALLED)
            .map(|number| {
                let url = format!("https://{}:{port}", name_of(number));
                Target::new(&url, &self.root, "")
            })
            .collect::<Result<_, _>>()?;
        let pid = self.demo.pid();
        let before = procfs::cpu_of_threads(pid, WORKERS)?;
        for number in 0..HANDSHAKES_PER_ROUND {
            drop(targets[number % CALLED].open(&[b"http/1.1"])?);
        }
        let spent = procfs::cpu_of_threads(pid, WORKERS)?.saturating_sub(before);
        Ok(spent.as_secs_f64() * 1e6 / HANDSHAKES_PER_ROUND as f64)
    }
}
