//! The configuration file: parsed and checked as a whole. All mistakes are reported together, each
//! with its key.

mod acme;
mod nodes;
mod proxies;

use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::limits;
use gw_base::agent_releases::ReleaseSettings;
use gw_base::clock::Timestamp;
use gw_base::process::memory_limit;
use gw_base::service::hostname::Region;
use gw_base::service::rate::Rate;
use gw_base::service::service_settings::ServiceSettings;
use gw_base::tls::certificate::{self, PairKeys};
use gw_base::tls::{CertificateFiles, CertificateSource, OldestTls};
use gw_region::Isolation;
use gw_shared::config::{ConfigErrors, Keys};
use gw_shared::process::core_dump;
use gw_shared::telemetry::logging::LogFormat;
use gw_shared::telemetry::trace;
use gw_store::PostgresSettings;
use gw_telemetry::request_log::AccessLogTarget;
use gw_telemetry::request_log::archive::ArchiveSettings;

pub use self::acme::{AcmeConfig, Challenge, TLS_KEY as TLS, parse_contact, parse_dns_server};
use self::nodes::REGION_KEY_PREVIOUS;
pub use self::nodes::{REGION_KEY, REGION_KEY_NEXT};
pub use gw_base::client_address::{ProxyProtocol, TrustedProxies};

gw_shared::configuration! {
    /// The checked configuration of a gateway.
    #[derive(Debug, Clone)]
    pub struct Config |config, keys|
    given {
        /// Host names of the region, from `region` and `domain`.
        pub region: Region,
        /// Folder for the state of this gateway.
        pub data_dir: PathBuf,
    }
    keys {
        /// Where the records are stored.
        pub store: StoreSettings = StoreSettings::Sqlite, nodes::store_settings(keys);
        /// File with the secret of the region. Present if the store is PostgreSQL, or if the
        /// request log is archived.
        pub region_key: Option<PathBuf> = None, keys.path(REGION_KEY, "a file").map(Some);
        /// File with the next key of the region, while the key is replaced.
        pub region_key_next: Option<PathBuf> = None, keys.path(REGION_KEY_NEXT, "a file").map(Some);
        /// File with the key before the last replacement, for the archive.
        pub region_key_previous: Option<PathBuf> = None,
            keys.path(REGION_KEY_PREVIOUS, "a file").map(Some);
        /// File with the key that seals secrets in the data folder; `None` with PostgreSQL, or if
        /// they are not sealed.
        pub seal_key: Option<PathBuf> = None,
            nodes::seal_key(keys, config.store.is_postgres()).map(Some);
        /// Listener for callers and agents.
        pub listen: SocketAddr = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 443)),
            keys.text("listen", "ADDRESS:PORT such as \"0.0.0.0:443\"", |text| text.parse().ok());
        /// Listener in plain HTTP that redirects to https; `None` without one.
        pub listen_http: Option<SocketAddr> = None,
            keys.text(
                "listen_http",
                "ADDRESS:PORT such as \"0.0.0.0:80\"",
                |text| text.parse().ok(),
            )
            .map(Some);
        /// Listener for administrators: the API, the console and the metrics.
        pub admin_listen: SocketAddr = SocketAddr::from((Ipv4Addr::LOCALHOST, 9080)),
            keys.text(
                "admin_listen",
                "ADDRESS:PORT such as \"127.0.0.1:9080\"",
                |text| text.parse().ok(),
            );
        /// Listener for other nodes of the region; `None` if this gateway is the only active node.
        pub peer_listen: Option<SocketAddr> = None,
            keys.text(
                "peer_listen",
                "ADDRESS:PORT such as \"10.0.0.1:9443\"",
                |text| text.parse().ok(),
            )
            .map(Some);
        /// Where other nodes connect, if that is not the address of the listener.
        pub peer_address: Option<SocketAddr> = None,
            keys.text(
                "peer_address",
                "ADDRESS:PORT such as \"10.0.0.1:9443\"",
                nodes::parse_reachable,
            )
            .map(Some);
        /// What this node does while it reaches neither PostgreSQL nor its peers.
        pub isolation: Isolation = Isolation::default(), Some(nodes::isolation(config, keys));
        /// Host names by which browsers reach the console, in addition to those of this machine and
        /// of the region.
        pub admin_hosts: Vec<String> = Vec::new(),
            keys.list("admin_hosts", "a host name such as \"gw-admin.example.com\"", parse_domain);
        /// Certificate of the listener for callers and agents.
        pub certificate: CertificateSource =
            CertificateSource::Development { data_dir: data_dir.clone() },
            certificate_files(keys, PairKeys::CALLERS).map(CertificateSource::from);
        /// Oldest version of TLS of callers.
        pub tls_min_version: OldestTls = OldestTls::default(),
            keys.text("tls_min_version", "\"1.2\" or \"1.3\"", OldestTls::parse);
        /// DNS servers that are asked about certificates and own domains; those of the system if
        /// there are none.
        pub dns_servers: Vec<SocketAddr> = Vec::new(), acme::dns_servers(keys);
        /// Authority that issues certificates; `None` if none does.
        pub acme: Option<AcmeConfig> = None, Some(acme::take(keys, &config.dns_servers));
        /// Certificate of the admin listener; `None` if it speaks plain HTTP.
        pub admin_certificate: Option<CertificateFiles> = None,
            certificate_files(keys, PairKeys::ADMIN).map(Some);
        /// When a connection moves to the worker that owns its service.
        pub hand_over: HandOver = HandOver::Auto,
            keys.text("hand_over", "\"auto\", \"always\" or \"never\"", parse_hand_over);
        /// Proxies whose PROXY header and `X-Forwarded-For` are trusted.
        pub trusted_proxies: TrustedProxies = TrustedProxies::default(),
            proxies::trusted_proxies(keys);
        /// Format of the log of the process.
        pub log_format: LogFormat = LogFormat::default(),
            keys.text("log_format", "\"text\" or \"json\"", |text| text.parse().ok());
        /// Whether the process may leave core dumps, which have its secrets.
        pub core_dumps: bool = false, Some(core_dump::take(keys));
        /// At least 1.
        pub workers: usize = workers_or_cores(0),
            keys.integer("workers", 0..=1024).map(workers_or_cores);
        /// Default rate of services.
        pub default_rate: Rate = ServiceSettings::RATE, default_rate(keys, config.default_rate);
        /// Requests of one client address for access tokens.
        pub token_requests: Rate = per_minute(60),
            keys.integer("token_requests_per_minute", 1..=1_000_000).map(per_minute);
        /// Requests of one client address to the enrollment endpoints.
        pub enrollment_requests: Rate = per_minute(60),
            keys.integer("enrollment_requests_per_minute", 1..=1_000_000).map(per_minute);
        /// Failed attempts of one client address to authenticate, on each worker.
        pub auth_failures: Rate = per_minute(600),
            keys.integer("auth_failures_per_minute", 1..=1_000_000).map(per_minute);
        /// New connections of one client address, on each worker.
        pub new_connections: Rate = per_minute(60_000),
            keys.integer("new_connections_per_minute", 1..=100_000_000).map(per_minute);
        /// Per worker; at least 1.
        pub connections_per_address: usize = limits::CONNECTIONS_PER_ADDRESS,
            keys.integer("connections_per_address", 1..=limits::CONNECTIONS_PER_WORKER);
        /// Whether agents authenticate tunnels with a client certificate.
        pub agent_mtls: bool = true, keys.boolean("agent_mtls");
        /// Lifetime of the certificates that agents get.
        pub agent_certificate_lifetime: Duration = 24 * HOUR,
            keys.integer("agent_certificate_hours", 1..=720).map(|hours: u32| HOUR * hours);
        /// Versions of agents that are served, and programs that are offered to them.
        pub agent_releases: ReleaseSettings = ReleaseSettings::default(),
            Some(ReleaseSettings::take(keys));
        /// Lifetime of access tokens.
        pub token_lifetime: Duration = HOUR,
            keys.integer("token_lifetime_seconds", 60..=86_400).map(Duration::from_secs);
        /// Age at which a new signing key replaces the old one; `None` disables automatic rotation.
        pub signing_key_rotation: Option<Duration> = Some(30 * DAY),
            keys.integer("signing_key_days", 0..=3650)
                .map(|days: u32| (days > 0).then(|| DAY * days));
        /// Limit of the memory that relayed requests hold, in bytes, for all workers together.
        pub relay_memory: usize = memory_limit::default_relay_memory(),
            keys.integer("relay_memory_mib", 16..=16_777_216).map(|mib: usize| mib << 20);
        /// Longest time that a drain waits for running requests.
        pub drain: Duration = limits::DRAIN,
            keys.integer("drain_seconds", 0..=86_400).map(Duration::from_secs);
        /// Bound on the files of the request log; `None` for a quarter of the disk.
        pub request_log_max_bytes: Option<u64> = None,
            keys.integer("request_log_max_bytes", 1 << 26..=1 << 50).map(Some);
        /// Where every request is written as a line of JSON; `None` without an access log.
        pub access_log: Option<AccessLogTarget> = None, Some(AccessLogTarget::take(keys));
        /// Where the request log is copied to; `None` if it is kept on this node only.
        pub archive: Option<ArchiveSettings> = None, Some(ArchiveSettings::take(keys));
        /// `None` without a collector of spans.
        pub traces: Option<trace::CollectorSettings> = None,
            Some(trace::CollectorSettings::take(keys));
    }
}

/// Where the records are stored.
#[derive(Debug, Clone)]
pub enum StoreSettings {
    /// A file in the data folder, for a single node.
    Sqlite,
    /// A database for all nodes of the region.
    Postgres(PostgresSettings),
}

impl StoreSettings {
    fn is_postgres(&self) -> bool {
        matches!(self, Self::Postgres(_))
    }
}

/// When a connection moves to the worker that owns its service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandOver {
    /// Unless that worker is clearly busier.
    Auto,
    /// Also if that worker is busier.
    Always,
    /// Single requests are sent to the owner instead.
    Never,
}

const HOUR: Duration = Duration::from_secs(60 * 60);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

impl Config {
    /// The configuration with only the required keys.
    pub fn new(region: Region, data_dir: PathBuf) -> Self {
        Self::with_defaults(region, data_dir)
    }

    /// Parses TOML `text`. The environment variable `GW_` + key in capitals, with `_` for the dot
    /// of a nested key, overrides a key.
    pub fn parse(
        text: &str,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, ConfigErrors> {
        Self::parse_with(text, environment, |_, _, _, _| Vec::new())
    }

    /// As [`Self::parse`], and also checks the certificates; reports all mistakes together. Also
    /// returns warnings: about properties that some clients refuse, about an admin listener without
    /// TLS that other machines can reach, and about trusted proxies without `proxy_protocol`.
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
        config
            .region_keys()
            .map_err(|error| ConfigErrors(vec![error.to_string()]))?;
        warnings.extend(config.open_admin_listener(config.admin_listen));
        warnings.extend(
            config
                .guessed_proxies()
                .map(|(found, remedy)| format!("trusted_proxies: {found}; {remedy}")),
        );
        Ok((config, warnings))
    }

    /// Finding about trusted proxies without `proxy_protocol`, and its remedy.
    pub fn guessed_proxies(&self) -> Option<(String, String)> {
        let blocks: Vec<String> = self
            .trusted_proxies
            .guessed()
            .map(|block| block.to_string())
            .collect();
        let first = blocks.first()?;
        let remedy = format!(
            "write {{ address = \"{first}\", proxy_protocol = \"required\" }} for a proxy that \
             announces its clients by the PROXY protocol, and \"off\" for one that does not (in \
             GW_TRUSTED_PROXIES: {first}=required)"
        );
        let found = format!(
            "{}: no proxy_protocol; through a proxy that sends no PROXY header, a client can send \
             one and choose its address",
            blocks.join(", ")
        );
        Some((found, remedy))
    }

    /// Warning about an admin listener at `address` that other machines can reach, and that has no
    /// TLS.
    pub fn open_admin_listener(&self, address: SocketAddr) -> Option<String> {
        (self.admin_certificate.is_none() && !address.ip().to_canonical().is_loopback()).then(
            || {
                format!(
                    "admin_listen: other machines can reach {address}, which has no TLS: the admin \
                 token and new secrets cross the network in plain text; set admin_tls_certificate \
                 and admin_tls_key, or listen on loopback"
                )
            },
        )
    }

    /// Listeners that cannot have their address because another one has it.
    fn same_ports(&self) -> impl Iterator<Item = String> {
        let mut listeners = vec![("listen", self.listen), ("admin_listen", self.admin_listen)];
        listeners.extend(self.listen_http.map(|address| ("listen_http", address)));
        listeners.extend(self.peer_listen.map(|address| ("peer_listen", address)));
        let pairs = (0..listeners.len())
            .flat_map(|first| (first + 1..listeners.len()).map(move |second| (first, second)));
        let same: Vec<_> = pairs
            .map(|(first, second)| (listeners[first], listeners[second]))
            .filter(|((_, one), (_, other))| overlap(*one, *other))
            .collect();
        same.into_iter().map(|((key, address), (other, taken))| {
            format!("{other}: {taken} is taken by {key} ({address}); give it another port")
        })
    }

    /// `check_certificate` gets the names of both keys, both files, and the region if the
    /// certificate has to be valid for it and it is valid; it returns the mistakes.
    fn parse_with(
        text: &str,
        environment: impl Fn(&str) -> Option<String>,
        mut check_certificate: impl FnMut(PairKeys, &Path, &Path, Option<&Region>) -> Vec<String>,
    ) -> Result<Self, ConfigErrors> {
        let mut keys = Keys::parse(text, &environment)?;
        let label = keys.required("region", "a label such as \"eu1\"", parse_label);
        let domain = keys.required("domain", "a domain such as \"example.com\"", parse_domain);
        let data_dir = keys.required("data_dir", "a folder", |text| Some(PathBuf::from(text)));
        let region = label
            .zip(domain)
            .map(|(label, domain)| Region::new(&label, &domain));
        // Without a region or a folder the other keys are checked all the same.
        let mut config = Self::new(
            region.clone().unwrap_or_else(|| Region::new("", "")),
            data_dir.unwrap_or_default(),
        );
        config.read(&mut keys);
        config.check_region_keys(&mut keys);
        config.use_acme(&mut keys);
        keys.errors.extend(config.same_ports());
        if let CertificateSource::Files { certificate, key } = &config.certificate {
            let mistakes = check_certificate(PairKeys::CALLERS, certificate, key, region.as_ref());
            keys.errors.extend(mistakes);
        }
        if let Some(CertificateFiles { certificate, key }) = &config.admin_certificate {
            let mistakes = check_certificate(PairKeys::ADMIN, certificate, key, None);
            keys.errors.extend(mistakes);
        }
        keys.refuse_unknown();
        if keys.errors.is_empty() {
            Ok(config)
        } else {
            Err(ConfigErrors(keys.errors))
        }
    }
}

/// Whether a socket at `one` keeps another from `other`. The kernel chooses a free port for port 0.
fn overlap(one: SocketAddr, other: SocketAddr) -> bool {
    // `[::]` also has the addresses of IPv4.
    let covers = |any: SocketAddr, other: SocketAddr| {
        any.ip().is_unspecified() && (any.is_ipv6() || other.is_ipv4())
    };
    one.port() != 0
        && one.port() == other.port()
        && (one.ip() == other.ip() || covers(one, other) || covers(other, one))
}

/// The files of a certificate and its key: both, or neither.
fn certificate_files(keys: &mut Keys<'_>, names: PairKeys) -> Option<CertificateFiles> {
    let certificate = keys.path(names.certificate, "a file");
    let key = keys.path(names.key, "a file");
    let missing = match (&certificate, &key) {
        (Some(_), None) => Some((names.key, names.certificate)),
        (None, Some(_)) => Some((names.certificate, names.key)),
        _ => None,
    };
    if let Some((missing, given)) = missing {
        keys.errors.push(format!(
            "{missing}: missing; {given} needs it: name both files, or neither"
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

/// Takes the rate of services; values that are not given come from `default`.
fn default_rate(keys: &mut Keys<'_>, default: Rate) -> Option<Rate> {
    let burst = keys.integer("burst", 1..=u32::MAX);
    let refill = keys.integer("refill_per_minute", 1..=u32::MAX);
    Rate::new(
        burst.unwrap_or(default.burst()),
        refill.unwrap_or(default.refill_per_minute()),
    )
}

/// The rate of `requests` each minute, which may come at once; at least 1.
fn per_minute(requests: u32) -> Rate {
    let requests = NonZeroU32::new(requests).unwrap_or(NonZeroU32::MIN);
    Rate {
        burst: requests,
        refill_per_minute: requests,
        is_hourly: false,
    }
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
