//! The configuration file: parsed and checked as a whole. All mistakes are reported together, each with its key.

mod nodes;
mod proxies;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use gw_shared::config::{ConfigErrors, Keys};
use gw_shared::core_dump;
use gw_shared::telemetry::logging::LogFormat;
use gw_shared::telemetry::trace;

use self::nodes::RegionKeyFiles;
pub(crate) use self::nodes::{REGION_KEY, REGION_KEY_NEXT};
use crate::agent_releases::ReleaseSettings;
pub use crate::client_address::{ProxyProtocol, TrustedProxies};
use crate::clock::Timestamp;
use crate::hostname::Region;
use crate::limits;
use crate::memory::process;
use crate::rate::Rate;
use crate::region::Isolation;
use crate::service_settings::ServiceSettings;
use crate::store::PostgresSettings;
use crate::telemetry::request_log::AccessLogTarget;
use crate::telemetry::request_log::archive::ArchiveSettings;
use crate::tls::certificate::{self, PairKeys};
use crate::tls::{CertificateFiles, CertificateSource};

/// The checked configuration of a gateway.
#[derive(Debug, Clone)]
pub struct Config {
    pub region: Region,
    pub data_dir: PathBuf,
    pub store: StoreSettings,
    /// File with the secret of the region. Present if the store is PostgreSQL, or if the request log is archived.
    pub region_key: Option<PathBuf>,
    /// File with the next key of the region, while the key is replaced.
    pub region_key_next: Option<PathBuf>,
    /// File with the key before the last replacement, for the archive.
    pub region_key_previous: Option<PathBuf>,
    /// File with the key that seals secrets in the data folder; `None` with PostgreSQL, or if they are not sealed.
    pub seal_key: Option<PathBuf>,
    pub listen: SocketAddr,
    pub admin_listen: SocketAddr,
    /// Certificate of the admin listener; `None` if it speaks plain HTTP.
    pub admin_certificate: Option<CertificateFiles>,
    /// Host names by which browsers reach the console, in addition to those of this machine and of the region.
    pub admin_hosts: Vec<String>,
    /// Listener for other nodes of the region; `None` if this gateway is the only active node.
    pub peer_listen: Option<SocketAddr>,
    /// Where other nodes connect, if that is not the address of the listener.
    pub peer_address: Option<SocketAddr>,
    /// What this node does while it reaches neither PostgreSQL nor its peers.
    pub isolation: Isolation,
    /// At least 1.
    pub workers: usize,
    pub certificate: CertificateSource,
    pub hand_over: HandOver,
    /// Proxies whose PROXY header and `X-Forwarded-For` are trusted.
    pub trusted_proxies: TrustedProxies,
    /// Default rate of services.
    pub default_rate: Rate,
    /// These rates apply to each client address.
    pub token_requests: Rate,
    pub enrollment_requests: Rate,
    pub auth_failures: Rate,
    pub new_connections: Rate,
    /// Per worker; at least 1.
    pub connections_per_address: usize,
    /// Whether agents authenticate tunnels with a client certificate.
    pub agent_mtls: bool,
    pub agent_certificate_lifetime: Duration,
    /// Versions of agents that are served, and programs that are offered to them.
    pub agent_releases: ReleaseSettings,
    pub token_lifetime: Duration,
    /// Age at which a new signing key replaces the old one; `None` disables automatic rotation.
    pub signing_key_rotation: Option<Duration>,
    /// Limit of the memory that relayed requests hold, in bytes, for all workers together.
    pub relay_memory: usize,
    pub drain: Duration,
    pub log_format: LogFormat,
    /// Whether the process may leave core dumps, which have its secrets.
    pub core_dumps: bool,
    /// Where every request is written as a line of JSON; `None` without an access log.
    pub access_log: Option<AccessLogTarget>,
    /// Where the request log is copied to; `None` if it is kept on this node only.
    pub archive: Option<ArchiveSettings>,
    /// `None` without a collector of spans.
    pub traces: Option<trace::CollectorSettings>,
}

/// Where the records are stored.
#[derive(Debug, Clone)]
pub enum StoreSettings {
    /// A file in the data folder, for a single node.
    Sqlite,
    /// A database for all nodes of the region.
    Postgres(PostgresSettings),
}

/// When a connection moves to the worker that owns its service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandOver {
    /// Unless that worker is clearly busier.
    Auto,
    Always,
    /// Single requests are sent to the owner instead.
    Never,
}

const HOUR: Duration = Duration::from_secs(60 * 60);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

impl Config {
    /// The configuration with only the required keys.
    pub fn new(region: Region, data_dir: PathBuf) -> Self {
        const PER_ADDRESS: Rate = Rate::new(60, 60).unwrap();
        const FAILURES_PER_ADDRESS: Rate = Rate::new(600, 600).unwrap();
        const CONNECTIONS_PER_ADDRESS: Rate = Rate::new(60_000, 60_000).unwrap();
        Self {
            region,
            certificate: CertificateSource::Development {
                data_dir: data_dir.clone(),
            },
            data_dir,
            store: StoreSettings::Sqlite,
            region_key: None,
            region_key_next: None,
            region_key_previous: None,
            seal_key: None,
            listen: SocketAddr::from((Ipv4Addr::UNSPECIFIED, 443)),
            admin_listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 9080)),
            admin_certificate: None,
            admin_hosts: Vec::new(),
            peer_listen: None,
            peer_address: None,
            isolation: Isolation::default(),
            workers: workers_or_cores(0),
            hand_over: HandOver::Auto,
            trusted_proxies: TrustedProxies::default(),
            default_rate: ServiceSettings::RATE,
            token_requests: PER_ADDRESS,
            enrollment_requests: PER_ADDRESS,
            auth_failures: FAILURES_PER_ADDRESS,
            new_connections: CONNECTIONS_PER_ADDRESS,
            connections_per_address: limits::CONNECTIONS_PER_ADDRESS,
            agent_mtls: true,
            agent_certificate_lifetime: 24 * HOUR,
            agent_releases: ReleaseSettings::default(),
            token_lifetime: HOUR,
            signing_key_rotation: Some(30 * DAY),
            relay_memory: process::default_relay_memory(),
            drain: limits::DRAIN,
            log_format: LogFormat::default(),
            core_dumps: false,
            access_log: None,
            archive: None,
            traces: None,
        }
    }

    /// Parses TOML `text`. The environment variable `GW_` + key in capitals, with `_` for the dot of a nested key,
    /// overrides a key.
    pub fn parse(
        text: &str,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, ConfigErrors> {
        Self::parse_with(text, environment, |_, _, _, _| Vec::new())
    }

    /// As [`Self::parse`], and also checks the certificates; reports all mistakes together. Also returns warnings: about
    /// properties that some clients refuse, about an admin listener without TLS that other machines can reach, and about
    /// trusted proxies without `proxy_protocol`.
    pub fn check(
        text: &str,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<(Self, Vec<String>), ConfigErrors> {
        let mut warnings = Vec::new();
        let config = Self::parse_with(text, environment, |keys, file, key, region| {
            match certificate::read_pair(keys, file, key, region) {
                Ok(pair) => {
                    warnings.extend(pair.warnings(keys, file, Timestamp::now()));
                    Vec::new()
                }
                Err(mistakes) => mistakes.0,
            }
        })?;
        warnings.extend(config.open_admin_listener(config.admin_listen));
        warnings.extend(
            config
                .guessed_proxies()
                .map(|(found, remedy)| format!("trusted_proxies: {found}; {remedy}")),
        );
        Ok((config, warnings))
    }

    /// Finding about trusted proxies without `proxy_protocol`, and its remedy.
    pub(crate) fn guessed_proxies(&self) -> Option<(String, String)> {
        let blocks: Vec<String> = self
            .trusted_proxies
            .guessed()
            .map(|block| block.to_string())
            .collect();
        let first = blocks.first()?;
        let remedy = format!(
            "write {{ address = \"{first}\", proxy_protocol = \"required\" }} for a proxy that announces its clients by the PROXY \
             protocol, and \"off\" for one that does not (in GW_TRUSTED_PROXIES: {first}=required)"
        );
        let found = format!(
            "{}: no proxy_protocol; through a proxy that sends no PROXY header, a client can send one and choose its address",
            blocks.join(", ")
        );
        Some((found, remedy))
    }

    /// Warning about an admin listener at `address` that other machines can reach, and that has no TLS.
    pub(crate) fn open_admin_listener(&self, address: SocketAddr) -> Option<String> {
        (self.admin_certificate.is_none() && !address.ip().to_canonical().is_loopback()).then(|| {
            format!(
                "admin_listen: other machines can reach {address}, which has no TLS: the admin token and new secrets cross \
                 the network in plain text; set admin_tls_certificate and admin_tls_key, or listen on loopback"
            )
        })
    }

    /// `check_certificate` gets the names of both keys, both files, and the region if the certificate has to be valid for
    /// it and it is valid; it returns the mistakes.
    fn parse_with(
        text: &str,
        environment: impl Fn(&str) -> Option<String>,
        mut check_certificate: impl FnMut(PairKeys, &Path, &Path, Option<&Region>) -> Vec<String>,
    ) -> Result<Self, ConfigErrors> {
        let mut keys = Keys::parse(text, &environment)?;

        let region = keys.required("region", "a label such as \"eu1\"", parse_label);
        let domain = keys.required("domain", "a domain such as \"example.com\"", parse_domain);
        let data_dir = keys.required("data_dir", "a folder", |text| Some(PathBuf::from(text)));
        let store = nodes::store_settings(&mut keys);
        let region_keys = RegionKeyFiles::take(&mut keys);
        let seal_key =
            nodes::seal_key(&mut keys, matches!(store, Some(StoreSettings::Postgres(_))));
        let listen = keys.text("listen", "ADDRESS:PORT", |text| text.parse().ok());
        let admin_listen = keys.text("admin_listen", "ADDRESS:PORT", |text| text.parse().ok());
        let peers =
            nodes::peer_settings(&mut keys, matches!(store, Some(StoreSettings::Postgres(_))));
        let admin_hosts = keys.list(
            "admin_hosts",
            "a host name such as \"gw-admin.example.com\"",
            parse_domain,
        );
        let certificate = certificate_files(&mut keys, PairKeys::CALLERS);
        let admin_certificate = certificate_files(&mut keys, PairKeys::ADMIN);
        let hand_over = keys.text(
            "hand_over",
            "\"auto\", \"always\" or \"never\"",
            parse_hand_over,
        );
        let trusted_proxies = proxies::trusted_proxies(&mut keys);
        let log_format = keys.text("log_format", "\"text\" or \"json\"", |text| {
            text.parse().ok()
        });
        let core_dumps = core_dump::take(&mut keys);
        let workers = keys.integer("workers", 0..=1024);
        let burst = keys.integer("burst", 1..=u32::MAX);
        let refill = keys.integer("refill_per_minute", 1..=u32::MAX);
        let token_requests = keys.integer("token_requests_per_minute", 1..=1_000_000);
        let enrollment_requests = keys.integer("enrollment_requests_per_minute", 1..=1_000_000);
        let auth_failures = keys.integer("auth_failures_per_minute", 1..=1_000_000);
        let new_connections = keys.integer("new_connections_per_minute", 1..=100_000_000);
        let connections_per_address = keys.integer(
            "connections_per_address",
            1..=limits::CONNECTIONS_PER_WORKER,
        );
        let agent_mtls = keys.boolean("agent_mtls");
        let agent_certificate_hours = keys.integer("agent_certificate_hours", 1..=720);
        let agent_releases = ReleaseSettings::take(&mut keys);
        let token_lifetime = keys.integer("token_lifetime_seconds", 60..=86_400);
        let signing_key_days = keys.integer("signing_key_days", 0..=3650);
        let relay_memory = keys.integer("relay_memory_mib", 16..=16_777_216);
        let drain = keys.integer("drain_seconds", 0..=86_400);
        let access_log = AccessLogTarget::take(&mut keys);
        let archive = ArchiveSettings::take(&mut keys);
        let traces = trace::CollectorSettings::take(&mut keys);
        region_keys.check(
            &mut keys,
            matches!(store, Some(StoreSettings::Postgres(_))),
            archive.is_some(),
        );
        if let Some(CertificateFiles { certificate, key }) = &certificate {
            let region = region
                .as_deref()
                .zip(domain.as_deref())
                .map(|(region, domain)| Region::new(region, domain));
            keys.errors.extend(check_certificate(
                PairKeys::CALLERS,
                certificate,
                key,
                region.as_ref(),
            ));
        }
        if let Some(CertificateFiles { certificate, key }) = &admin_certificate {
            keys.errors
                .extend(check_certificate(PairKeys::ADMIN, certificate, key, None));
        }
        keys.refuse_unknown();

        let (Some(region), Some(domain), Some(data_dir), true) =
            (region, domain, data_dir, keys.errors.is_empty())
        else {
            return Err(ConfigErrors(keys.errors));
        };
        let defaults = Self::new(Region::new(&region, &domain), data_dir);
        Ok(Self {
            store: store.unwrap_or(defaults.store),
            region_key: region_keys.in_use,
            region_key_next: region_keys.next,
            region_key_previous: region_keys.previous,
            seal_key,
            listen: listen.unwrap_or(defaults.listen),
            admin_listen: admin_listen.unwrap_or(defaults.admin_listen),
            admin_hosts: admin_hosts.unwrap_or(defaults.admin_hosts),
            peer_listen: peers.listen,
            peer_address: peers.address,
            isolation: peers.isolation,
            workers: workers.map_or(defaults.workers, workers_or_cores),
            certificate: certificate.map_or(
                defaults.certificate,
                |CertificateFiles { certificate, key }| CertificateSource::Files {
                    certificate,
                    key,
                },
            ),
            admin_certificate,
            hand_over: hand_over.unwrap_or(defaults.hand_over),
            trusted_proxies: trusted_proxies.unwrap_or(defaults.trusted_proxies),
            default_rate: rate(burst, refill, defaults.default_rate),
            token_requests: rate(token_requests, token_requests, defaults.token_requests),
            enrollment_requests: rate(
                enrollment_requests,
                enrollment_requests,
                defaults.enrollment_requests,
            ),
            auth_failures: rate(auth_failures, auth_failures, defaults.auth_failures),
            new_connections: rate(new_connections, new_connections, defaults.new_connections),
            connections_per_address: connections_per_address
                .unwrap_or(defaults.connections_per_address),
            agent_mtls: agent_mtls.unwrap_or(defaults.agent_mtls),
            agent_certificate_lifetime: agent_certificate_hours
                .map_or(defaults.agent_certificate_lifetime, |hours| HOUR * hours),
            agent_releases,
            token_lifetime: token_lifetime.map_or(defaults.token_lifetime, Duration::from_secs),
            signing_key_rotation: signing_key_days.map_or(defaults.signing_key_rotation, |days| {
                (days > 0).then(|| DAY * days)
            }),
            relay_memory: relay_memory.map_or(defaults.relay_memory, |mib: usize| mib << 20),
            drain: drain.map_or(defaults.drain, Duration::from_secs),
            log_format: log_format.unwrap_or(defaults.log_format),
            core_dumps,
            access_log,
            archive,
            traces,
            ..defaults
        })
    }
}

/// The files of a certificate and its key: both, or neither.
fn certificate_files(keys: &mut Keys<'_>, names: PairKeys) -> Option<CertificateFiles> {
    let certificate = keys.text(names.certificate, "a file", |text| {
        Some(PathBuf::from(text))
    });
    let key = keys.text(names.key, "a file", |text| Some(PathBuf::from(text)));
    if certificate.is_some() != key.is_some() {
        keys.errors.push(format!(
            "{}, {}: give both or neither",
            names.certificate, names.key
        ));
    }
    Some(CertificateFiles {
        certificate: certificate?,
        key: key?,
    })
}

/// The number of worker threads; 0 means one for each core that this process may use.
pub fn workers_or_cores(workers: usize) -> usize {
    if workers > 0 {
        workers
    } else {
        std::thread::available_parallelism().map_or(1, usize::from)
    }
}

/// Arguments are not zero.
fn rate(burst: Option<u32>, refill_per_minute: Option<u32>, default: Rate) -> Rate {
    let refill_per_minute = refill_per_minute.unwrap_or(default.refill_per_minute());
    Rate::new(burst.unwrap_or(default.burst()), refill_per_minute).unwrap_or(default)
}

/// Parses one label of a domain, in lower case.
pub fn parse_label(text: &str) -> Option<String> {
    let valid = !text.is_empty()
        && text.len() <= 63
        && !text.starts_with('-')
        && !text.ends_with('-')
        && text
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    valid.then(|| text.to_owned())
}

/// Parses a domain in lower case.
pub fn parse_domain(text: &str) -> Option<String> {
    (text.len() <= 180 && text.split('.').all(|label| parse_label(label).is_some()))
        .then(|| text.to_owned())
}

fn parse_hand_over(text: &str) -> Option<HandOver> {
    match text {
        "auto" => Some(HandOver::Auto),
        "always" => Some(HandOver::Always),
        "never" => Some(HandOver::Never),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
