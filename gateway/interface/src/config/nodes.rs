//! Settings of a region of several nodes: their common store, and their listeners for each other.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::limits;
use gw_region::{Isolation, RegionKey, RegionKeyError, RegionKeys};
use gw_shared::config::Keys;
use gw_store::{PostgresSettings, PostgresUrlError, SEAL_KEY_CREDENTIAL};

use super::{Config, StoreSettings};

/// Setting that names the file of the region key.
pub const REGION_KEY: &str = "region_key";
/// Setting that names the file of the next region key, while the key is replaced.
pub const REGION_KEY_NEXT: &str = "region_key_next";
pub(super) const REGION_KEY_PREVIOUS: &str = "region_key_previous";

/// Takes `seal_key`: by default the credential that systemd has handed over, if there is one.
pub(super) fn seal_key(keys: &mut Keys<'_>, is_postgres: bool) -> Option<PathBuf> {
    let given = keys.path("seal_key", "a file");
    if is_postgres {
        if given.is_some() {
            keys.errors.push(
                "seal_key: only for SQLite; in PostgreSQL, region_key seals the secrets".to_owned(),
            );
        }
        return None;
    }
    given.or_else(|| {
        let credential =
            PathBuf::from(keys.environment()("CREDENTIALS_DIRECTORY")?).join(SEAL_KEY_CREDENTIAL);
        credential.exists().then_some(credential)
    })
}

impl Config {
    /// Reports files with keys of the region that are missing or have no use.
    pub(super) fn check_region_keys(&self, keys: &mut Keys<'_>) {
        let is_postgres = self.store.is_postgres();
        let has_archive = self.archive.is_some();
        let mut refuse = |problem: &str| keys.errors.push(problem.to_owned());
        if is_postgres && self.region_key.is_none() {
            refuse(
                "region_key: missing; a region on PostgreSQL needs the file of its key, which \
                 `gw-gateway region init` makes",
            );
        }
        if has_archive && self.region_key.is_none() {
            refuse(
                "region_key: missing; the archive is encrypted with a key derived from it: \
                 `openssl rand -hex 32` makes one",
            );
        }
        if self.region_key_next.is_some() && !is_postgres {
            refuse("region_key_next: only for a store on PostgreSQL, whose key it replaces");
        }
        if self.region_key_previous.is_some() && !has_archive {
            refuse("region_key_previous: only with [archive], whose earlier objects it opens");
        }
    }

    /// Reads the files with the keys of the region; `None` without `region_key`.
    pub fn region_keys(&self) -> Result<Option<RegionKeys>, RegionKeyError> {
        let Some(key) = &self.region_key else {
            return Ok(None);
        };
        let load = |setting: &'static str, path: &Option<PathBuf>| {
            path.as_deref()
                .map(|path| RegionKey::load_from(setting, path))
                .transpose()
        };
        let next = load(REGION_KEY_NEXT, &self.region_key_next)?;
        let previous = load(REGION_KEY_PREVIOUS, &self.region_key_previous)?;
        Ok(Some(RegionKeys::new(RegionKey::load(key)?, next, previous)))
    }
}

/// Takes `isolation` and `max_staleness_seconds`, and checks the keys about other nodes together.
pub(super) fn isolation(config: &Config, keys: &mut Keys<'_>) -> Isolation {
    let has_region = config.store.is_postgres();
    let listen = config.peer_listen;
    let address = config.peer_address;
    let isolation = keys.text("isolation", "\"serve\" or \"refuse\"", |text| match text {
        "serve" => Some(false),
        "refuse" => Some(true),
        _ => None,
    });
    let staleness = keys.integer("max_staleness_seconds", 10..=86_400);
    let given = [
        ("peer_listen", listen.is_some()),
        ("peer_address", address.is_some()),
        ("isolation", isolation == Some(true)),
        ("max_staleness_seconds", staleness.is_some()),
    ];
    for (key, _) in given
        .iter()
        .filter(|(_, is_given)| *is_given && !has_region)
    {
        keys.errors.push(format!(
            "{key}: only for a store on PostgreSQL, which the nodes of a region share"
        ));
    }
    for (key, _) in given[1..]
        .iter()
        .filter(|(_, is_given)| *is_given && has_region && listen.is_none())
    {
        keys.errors.push(format!(
            "{key}: needs peer_listen, without which this node works alone"
        ));
    }
    if listen.is_some_and(|listen| listen.ip().is_unspecified()) && address.is_none() {
        keys.errors.push(
            "peer_address: missing; peer_listen does not say at which address other nodes connect: \
             set it to one of this machine, with the port"
                .into(),
        );
    }
    if staleness.is_some() && isolation != Some(true) {
        keys.errors
            .push("max_staleness_seconds: only with isolation = \"refuse\"".to_owned());
    }
    let max_staleness = staleness.map_or(limits::STALENESS, Duration::from_secs);
    if isolation == Some(true) {
        Isolation::Refuse { max_staleness }
    } else {
        Isolation::Serve
    }
}

/// Parses an address that other machines can connect to.
pub(super) fn parse_reachable(text: &str) -> Option<SocketAddr> {
    text.parse()
        .ok()
        .filter(|address: &SocketAddr| !address.ip().is_unspecified() && address.port() != 0)
}

pub(super) fn store_settings(keys: &mut Keys<'_>) -> Option<StoreSettings> {
    let url = keys.text(
        "store",
        "\"sqlite\" or a URL such as \"postgres://gw@db1,db2/gw\"",
        |text| Some(text.to_owned()),
    );
    let password = keys.path("store_password_file", "a file");
    let authorities = keys.path("store_ca", "a file");
    let url = url.filter(|url| url != "sqlite");
    let Some(url) = url else {
        for (key, given) in [
            ("store_password_file", &password),
            ("store_ca", &authorities),
        ] {
            if given.is_some() {
                keys.errors
                    .push(format!("{key}: only for a store on PostgreSQL"));
            }
        }
        return None;
    };
    match PostgresSettings::new(&url, password.as_deref(), authorities.as_deref()) {
        Ok(settings) => Some(StoreSettings::Postgres(settings)),
        Err(
            error @ (PostgresUrlError::Url(_)
            | PostgresUrlError::Scheme(_)
            | PostgresUrlError::Missing(_)),
        ) => {
            keys.errors.push(format!("store: {error}"));
            None
        }
        Err(error @ PostgresUrlError::Password(_)) => {
            keys.errors.push(format!("store_password_file: {error}"));
            None
        }
        Err(error @ PostgresUrlError::Authorities(_)) => {
            keys.errors.push(format!("store_ca: {error}"));
            None
        }
    }
}
