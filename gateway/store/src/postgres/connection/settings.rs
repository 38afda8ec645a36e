//! Settings of a connection to PostgreSQL.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use gw_base::clock::ProcessClock;
use gw_shared::files;
use gw_shared::identity::secret::Secret;
use gw_shared::net::tls::{TlsFailure, Trusted, client_config, rustls_error};
use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode, TargetSessionAttrs};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::primaries::Primaries;

/// Longest wait for a new connection, for each host and address.
pub(super) const CONNECT_WITHIN: Duration = Duration::from_secs(1);

/// A parsed `postgres://` URL with its password and TLS roots. `Display` and `Debug` omit the
/// password.
#[derive(Clone)]
pub struct PostgresSettings {
    config: Box<Config>,
    tls: MakeRustlsConnect,
    password_file: Option<PathBuf>,
    /// Shared by clones.
    pub(super) primaries: Primaries,
}

/// Reason why a URL cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PostgresUrlError {
    /// The text is not a `postgres://` URL that can be parsed.
    #[error("it must be \"sqlite\" or a URL such as \"postgres://gw@db1,db2/gw\": {0}")]
    Url(String),
    /// The URL is of another database; the text is its scheme.
    #[error(
        "{0}:// is the URL of another database, and records are kept in SQLite or PostgreSQL: \
         write \"sqlite\", or a URL such as \"postgres://gw@db1,db2/gw\""
    )]
    Scheme(String),
    /// The URL has no host or no user.
    #[error("it names no {0}; write a URL such as \"postgres://gw@db1,db2/gw\"")]
    Missing(&'static str),
    /// The file of the password cannot be read.
    #[error("{0}")]
    Password(String),
    /// The file of the certificate authorities cannot be read, or has no valid certificate.
    #[error("{0}")]
    Authorities(String),
}

impl PostgresSettings {
    /// Parses a URL as of libpq (PostgreSQL 15, §34.1.1.2), with several hosts separated by commas.
    /// The file of the password takes precedence over a password in the URL. `authorities` is a PEM
    /// file with the certificate authorities of the servers; those of the system apply without it.
    ///
    /// TLS is required unless every host is this machine or the URL sets `sslmode`; certificates
    /// are always verified.
    pub fn new(
        url: &str,
        password_file: Option<&Path>,
        authorities: Option<&Path>,
    ) -> Result<Self, PostgresUrlError> {
        if let Some((scheme, _)) = url.split_once("://")
            && !["postgres", "postgresql"].contains(&scheme)
        {
            return Err(PostgresUrlError::Scheme(scheme.to_owned()));
        }
        // libpq's modes with verification: here every TLS connection verifies.
        let required = url
            .replace("sslmode=verify-full", "sslmode=require")
            .replace("sslmode=verify-ca", "sslmode=require");
        let mut config = Config::from_str(&required)
            .map_err(|error| PostgresUrlError::Url(with_cause(&error)))?;
        if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
            return Err(PostgresUrlError::Missing("host"));
        }
        if config.get_user().is_none() {
            return Err(PostgresUrlError::Missing("user"));
        }
        if let Some(file) = password_file {
            let password = files::read_text(file)
                .map_err(|error| PostgresUrlError::Password(format!("{error}; {CHECK_FILE}")))?;
            config.password(
                Secret::new(password)
                    .reveal()
                    .trim_end_matches(['\r', '\n']),
            );
        }
        if !url.contains("sslmode=") {
            config.ssl_mode(if is_local(&config) {
                SslMode::Disable
            } else {
                SslMode::Require
            });
        }
        if !url.contains("target_session_attrs=") {
            config.target_session_attrs(TargetSessionAttrs::ReadWrite);
        }
        config.connect_timeout(CONNECT_WITHIN);
        let unusable = |file: &Path, problem| {
            PostgresUrlError::Authorities(format!("{}: {problem}", file.display()))
        };
        let trusted = authorities.map_or_else(
            || Ok(Trusted::system()),
            |file| Trusted::read(file).map_err(|problem| unusable(file, problem)),
        )?;
        let mut tls = client_config(rustls::DEFAULT_VERSIONS, Arc::new(trusted), Vec::new())
            .map_err(|error| PostgresUrlError::Authorities(TlsFailure(error).to_string()))?
            .with_no_client_auth();
        tls.time_provider = Arc::new(ProcessClock);
        Ok(Self {
            config: Box::new(config),
            tls: MakeRustlsConnect::new(tls),
            password_file: password_file.map(Path::to_owned),
            primaries: Primaries::default(),
        })
    }

    /// The same database, also on a host that is a standby.
    pub(crate) fn with_standbys(&self) -> Self {
        let mut settings = self.clone();
        settings
            .config
            .target_session_attrs(TargetSessionAttrs::Any);
        settings
    }

    /// The file that the password was read from.
    pub fn password_file(&self) -> Option<&Path> {
        self.password_file.as_deref()
    }

    /// Each host with its port, and the configuration of a connection to it alone by this program.
    pub(super) fn each_host(&self, program: &str) -> Vec<(String, Config)> {
        let all = &*self.config;
        let (hosts, addresses) = (all.get_hosts(), all.get_hostaddrs());
        let names: Vec<String> = self.hosts().split(',').map(str::to_owned).collect();
        let each = (0..hosts.len().max(addresses.len())).map(|at| {
            // A single port is that of all hosts.
            let port = all.get_ports().get(at).or(all.get_ports().first());
            let port = *port.unwrap_or(&PORT_DEFAULT);
            let mut config = Config::new();
            hosts.get(at).map(|_| config.host(&names[at]));
            addresses.get(at).map(|address| config.hostaddr(*address));
            all.get_user().map(|user| config.user(user));
            all.get_password().map(|password| config.password(password));
            all.get_dbname().map(|database| config.dbname(database));
            all.get_options().map(|options| config.options(options));
            config.port(port).connect_timeout(CONNECT_WITHIN);
            config.keepalives(all.get_keepalives());
            config.keepalives_idle(all.get_keepalives_idle());
            all.get_keepalives_interval()
                .map(|interval| config.keepalives_interval(interval));
            all.get_keepalives_retries()
                .map(|retries| config.keepalives_retries(retries));
            all.get_tcp_user_timeout()
                .map(|timeout| config.tcp_user_timeout(*timeout));
            config.application_name(program);
            config.ssl_mode(all.get_ssl_mode());
            config.ssl_negotiation(all.get_ssl_negotiation());
            config.channel_binding(all.get_channel_binding());
            config.target_session_attrs(all.get_target_session_attrs());
            (format!("{}:{port}", names[at]), config)
        });
        each.collect()
    }

    pub(super) fn tls(&self) -> MakeRustlsConnect {
        self.tls.clone()
    }

    /// The hosts, separated by commas.
    pub fn hosts(&self) -> String {
        let names = self.config.get_hosts().iter().map(|host| match host {
            Host::Tcp(name) => name.clone(),
            Host::Unix(path) => path.display().to_string(),
        });
        let addresses = self.config.get_hostaddrs().iter().map(ToString::to_string);
        names.chain(addresses).collect::<Vec<_>>().join(",")
    }

    /// The hosts with their ports.
    pub(super) fn servers(&self) -> String {
        let hosts = self.each_host("").into_iter().map(|(host, _)| host);
        hosts.collect::<Vec<_>>().join(",")
    }
}

impl fmt::Display for PostgresSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let database = self
            .config
            .get_dbname()
            .or(self.config.get_user())
            .unwrap_or_default();
        write!(
            f,
            "postgres://{}@{}/{database}",
            self.config.get_user().unwrap_or_default(),
            self.hosts()
        )
    }
}

impl fmt::Debug for PostgresSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// An error of tokio-postgres with its cause, which its own text omits.
pub(crate) fn with_cause(error: &tokio_postgres::Error) -> String {
    use std::error::Error;
    match (error.as_db_error(), error.source()) {
        (Some(error), _) => error.to_string(),
        (None, Some(cause)) => match cause.downcast_ref().and_then(rustls_error) {
            Some(failure) => format!("{error}: {}", TlsFailure(failure.clone())),
            None => format!("{error}: {cause}"),
        },
        (None, None) => error.to_string(),
    }
}

fn is_local(config: &Config) -> bool {
    let local_name = |name: &str| {
        name == "localhost"
            || name
                .parse()
                .is_ok_and(|ip: std::net::IpAddr| ip.is_loopback())
    };
    config.get_hosts().iter().all(|host| match host {
        Host::Tcp(name) => local_name(name),
        Host::Unix(_) => true,
    }) && config
        .get_hostaddrs()
        .iter()
        .all(std::net::IpAddr::is_loopback)
}

const PORT_DEFAULT: u16 = 5432;

/// Remedy of a file that cannot be read.
const CHECK_FILE: &str = "check its path, and that the user of the gateway may read it";

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(url: &str) -> Result<PostgresSettings, PostgresUrlError> {
        PostgresSettings::new(url, None, None)
    }

    fn mode(url: &str) -> SslMode {
        settings(url).unwrap().config.get_ssl_mode()
    }

    #[test]
    fn tls_is_required_except_on_this_machine() {
        for (url, expected) in [
            ("postgres://gw@db1.example.com/gw", SslMode::Require),
            ("postgres://gw@localhost,db1/gw", SslMode::Require),
            ("postgres://gw@localhost,127.0.0.1/gw", SslMode::Disable),
            ("postgres://gw@%2Frun%2Fpostgresql/gw", SslMode::Disable),
            ("postgres://gw@db1/gw?sslmode=disable", SslMode::Disable),
            (
                "postgres://gw@localhost/gw?sslmode=verify-full",
                SslMode::Require,
            ),
        ] {
            assert_eq!(mode(url), expected, "{url}");
        }
    }

    #[test]
    fn the_primary_is_sought_among_all_hosts() {
        let settings = settings("postgres://gw:secret@db1:5433,db2/gw").unwrap();
        assert_eq!(
            settings.config.get_target_session_attrs(),
            TargetSessionAttrs::ReadWrite
        );
        assert_eq!(settings.hosts(), "db1,db2");
        assert_eq!(settings.servers(), "db1:5433,db2:5432");
        assert_eq!(
            format!("{settings:?}"),
            "postgres://gw@db1,db2/gw",
            "without the password"
        );
    }

    #[test]
    fn a_password_comes_from_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("password");
        std::fs::write(&file, "it's\n").unwrap();
        let settings = PostgresSettings::new("postgres://gw@db/gw", Some(&file), None).unwrap();
        assert_eq!(settings.config.get_password(), Some(&b"it's"[..]));
        let missing = PostgresSettings::new(
            "postgres://gw@db/gw",
            Some(&folder.path().join("none")),
            None,
        );
        assert!(matches!(missing, Err(PostgresUrlError::Password(text)) if text.contains("none")));
    }

    #[test]
    fn mistakes_are_named() {
        for (url, expected) in [
            ("postgres://", "it names no host"),
            ("postgres://db/gw", "it names no user"),
            (
                "mysql://gw@db/gw",
                "mysql:// is the URL of another database",
            ),
            ("gw@db/gw", "it must be \"sqlite\" or a URL such as"),
            (
                "postgres://gw@db:port/gw",
                "invalid value for option `port`",
            ),
            ("postgres://gw@db/gw?sslmode=maybe", "sslmode"),
        ] {
            let error = settings(url).unwrap_err().to_string();
            assert!(error.contains(expected), "{url}: {error}");
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ca.pem");
        std::fs::write(&file, "nothing").unwrap();
        let error = PostgresSettings::new("postgres://gw@db/gw", None, Some(&file))
            .unwrap_err()
            .to_string();
        assert!(error.contains("ca.pem: no certificate in it"), "{error}");
    }
}
