//! Options of a demo of several nodes, and their checks.

use gw_base::process::memory_limit;
use gw_base::service::rate::Rate;
use gw_interface::config::workers_or_cores;
use gw_local_region::without_password;
use gw_store::PostgresSettings;

use super::NodesError;

#[derive(Debug, Clone)]
pub struct NodesOptions {
    /// How the processes are started.
    pub parts: gw_local_region::Options,
    /// The built-in echo backend if `None`.
    pub backend: Option<String>,
    /// `Host` that `backend` gets: `preserve`, the default, or `rewrite`.
    pub host_header: Option<String>,
    /// Worker threads of each node; 0 for its share of the cores.
    pub workers: usize,
    pub rate: Rate,
}

impl NodesOptions {
    /// Fails with the options that do not fit together.
    pub(super) fn check(&self) -> Result<(), NodesError> {
        self.parts.check()?;
        let refused = |message: String| Err(NodesError::Usage(message));
        let Some(store) = &self.parts.store else {
            return Ok(());
        };
        if !["postgres://", "postgresql://"]
            .iter()
            .any(|scheme| store.starts_with(scheme))
        {
            // The value is not shown: it may contain a password in another form.
            let message = "--store: it is not a URL such as postgres://gw@db1/gw; the nodes of \
                           --nodes share a PostgreSQL database";
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
            (workers_or_cores(0) / self.parts.nodes).max(1)
        }
    }

    /// The nodes together relay as much as one gateway.
    pub(super) fn relay_memory_mib_of_each(&self) -> usize {
        const LEAST: usize = 16;
        ((memory_limit::default_relay_memory() >> 20) / self.parts.nodes).max(LEAST)
    }
}

#[cfg(test)]
mod tests {
    use gw_base::service::service_settings::ServiceSettings;

    use super::*;

    #[test]
    fn options_that_do_not_fit_together_are_refused_with_both_names() {
        let check = |port, store: &str| {
            let options = NodesOptions {
                parts: gw_local_region::Options {
                    nodes: 3,
                    store: Some(store.to_owned()),
                    port,
                    admin_port: 0,
                    data_dir: None,
                },
                backend: None,
                host_header: None,
                workers: 0,
                rate: ServiceSettings::RATE,
            };
            options.check().map_err(|error| error.to_string())
        };
        assert_eq!(check(65_533, "postgres://gw@db1/gw"), Ok(()));
        let error = check(65_534, "postgres://gw@db1/gw").unwrap_err();
        assert!(error.contains("--port 65534 and --nodes 3"), "{error}");
        let error = check(0, "sqlite").unwrap_err();
        assert!(
            error.contains("--store: it is not a URL") && error.contains("--nodes"),
            "{error}"
        );
        let error = check(0, "postgres://:secret@/gw?password=secret").unwrap_err();
        assert!(
            error.starts_with("--store postgres://@/gw: ") && !error.contains("secret"),
            "{error}"
        );
    }
}
