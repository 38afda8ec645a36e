//! Options of a demo of several nodes, and their checks.

use std::path::PathBuf;

use super::NodesError;
use crate::config::{Config, workers_or_cores};
use crate::memory::process;
use crate::rate::Rate;
use crate::store::PostgresSettings;

#[derive(Debug, Clone)]
pub struct NodesOptions {
    pub nodes: usize,
    /// URL of the database; a PostgreSQL server of the demo's own if `None`.
    pub store: Option<String>,
    /// Port for callers and agents of the first node; the others take the following ports. 0 means free ports.
    pub port: u16,
    /// The same for administration.
    pub admin_port: u16,
    /// The built-in echo backend if `None`.
    pub backend: Option<String>,
    /// A new temporary folder if `None`.
    pub data_dir: Option<PathBuf>,
    /// Worker threads of each node; 0 for its share of the cores.
    pub workers: usize,
    pub rate: Rate,
}

impl Default for NodesOptions {
    fn default() -> Self {
        Self {
            nodes: 3,
            store: None,
            port: 0,
            admin_port: 0,
            backend: None,
            data_dir: None,
            workers: 0,
            rate: Config::DEFAULT_RATE,
        }
    }
}

impl NodesOptions {
    /// Fails with the options that do not fit together.
    pub(super) fn check(&self) -> Result<(), NodesError> {
        let refused = |message: String| Err(NodesError::Usage(message));
        let Self {
            nodes,
            port,
            admin_port,
            ..
        } = self;
        for (option, first) in [("--port", *port), ("--admin-port", *admin_port)] {
            let last = usize::from(first) + nodes - 1;
            if first != 0 && last > usize::from(u16::MAX) {
                return refused(format!(
                    "{option} {first} and --nodes {nodes}: the nodes take consecutive ports up to {last}, and the last \
                     port is 65535"
                ));
            }
        }
        if *port != 0 && *admin_port != 0 && usize::from(port.abs_diff(*admin_port)) < *nodes {
            return refused(format!(
                "--port {port} and --admin-port {admin_port}: with --nodes {nodes} each of them is the first of {nodes} \
                 ports; keep them at least {nodes} apart"
            ));
        }
        let Some(store) = &self.store else {
            return Ok(());
        };
        if !["postgres://", "postgresql://"]
            .iter()
            .any(|scheme| store.starts_with(scheme))
        {
            // The value is not shown: it may contain a password in another form.
            let message = "--store: it is not a URL such as postgres://gw@db1/gw; the nodes of --nodes share a \
                           PostgreSQL database";
            return refused(message.to_owned());
        }
        match PostgresSettings::new(store, None, None) {
            Ok(_) => Ok(()),
            Err(error) => refused(format!("--store {}: {error}", without_password(store))),
        }
    }

    pub(super) fn workers_of_each(&self) -> usize {
        if self.workers > 0 {
            self.workers
        } else {
            (workers_or_cores(0) / self.nodes).max(1)
        }
    }

    /// The nodes together relay as much as one gateway.
    pub(super) fn relay_memory_mib_of_each(&self) -> usize {
        const LEAST: usize = 16;
        ((process::default_relay_memory() >> 20) / self.nodes).max(LEAST)
    }
}

/// The URL without the password of its user, and without its parameters, which can hold one. Nothing of a text that is
/// not a URL.
pub(super) fn without_password(url: &str) -> String {
    let url = url.split('?').next().unwrap_or_default();
    let Some((scheme, rest)) = url.split_once("://") else {
        return String::new();
    };
    match rest.rsplit_once('@') {
        Some((user, rest)) => format!(
            "{scheme}://{}@{rest}",
            user.split(':').next().unwrap_or_default()
        ),
        None => url.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_do_not_fit_together_are_refused_with_both_names() {
        let check = |change: fn(&mut NodesOptions)| {
            let mut options = NodesOptions::default();
            change(&mut options);
            options.check().map_err(|error| error.to_string())
        };
        assert_eq!(check(|_| ()), Ok(()));
        assert_eq!(
            check(|it| (it.port, it.admin_port, it.nodes) = (65_527, 65_518, 9)),
            Ok(())
        );
        let refused = |change, parts: [&str; 2]| {
            let error = check(change).unwrap_err();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        };
        refused(|it| it.port = 65_534, ["--port 65534", "--nodes 3"]);
        refused(
            |it| (it.admin_port, it.nodes) = (65_530, 9),
            ["--admin-port 65530", "--nodes 9"],
        );
        refused(
            |it| (it.port, it.admin_port) = (8000, 8002),
            ["--port 8000 and --admin-port 8002", "--nodes 3"],
        );
        refused(
            |it| it.store = Some("sqlite".to_owned()),
            ["--store: it is not a URL", "--nodes"],
        );
        let error =
            check(|it| it.store = Some("postgres://:secret@/gw?password=secret".to_owned()))
                .unwrap_err();
        assert!(
            error.starts_with("--store postgres://@/gw: ") && !error.contains("secret"),
            "{error}"
        );
    }

    #[test]
    fn passwords_are_left_out_of_urls() {
        for (url, expected) in [
            (
                "postgres://gw:secret@db1:5433,db2/gw",
                "postgres://gw@db1:5433,db2/gw",
            ),
            (
                "postgres://gw:a@b@db1/gw?password=secret",
                "postgres://gw@db1/gw",
            ),
            ("postgresql://db1/gw", "postgresql://db1/gw"),
            ("host=db1 password=secret", ""),
        ] {
            assert_eq!(without_password(url), expected);
        }
    }
}
