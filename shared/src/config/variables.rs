//! Environment variables of gateway and agent, to find misspelt ones.

use super::suggestion::suggestion;
use crate::text::documentation::located;

/// Prefix of the variables of both programs.
const PREFIX: &str = "GW_";

/// Every variable of both programs, their units and containers. Either program may find those of
/// the other in its environment.
pub const VARIABLES: &[&str] = &[
    "GW_ACCESS_LOG",
    "GW_ACME_CA_FILE",
    "GW_ACME_CHALLENGE",
    "GW_ACME_CONTACT",
    "GW_ACME_DIRECTORY",
    "GW_ACME_EAB_KEY_FILE",
    "GW_ACME_EAB_KEY_ID",
    "GW_ACME_HOOK_PROGRAM",
    "GW_ACME_RFC2136_KEY_FILE",
    "GW_ACME_RFC2136_KEY_NAME",
    "GW_ACME_RFC2136_SERVER",
    "GW_ACME_RFC2136_ZONE",
    "GW_ACME_TERMS_ACCEPTED",
    "GW_ADMIN_CA",
    "GW_ADMIN_HOSTS",
    "GW_ADMIN_LISTEN",
    "GW_ADMIN_TLS_CERTIFICATE",
    "GW_ADMIN_TLS_KEY",
    "GW_ADMIN_TOKEN",
    "GW_ADMIN_TOKEN_FILE",
    "GW_ADMIN_URL",
    "GW_AGENT_CERTIFICATE_HOURS",
    "GW_AGENT_MAX_CONCURRENT_BACKEND_REQUESTS",
    "GW_AGENT_METRICS_LISTEN",
    "GW_AGENT_MTLS",
    "GW_AGENT_PROGRAMS",
    "GW_AGENT_UPDATE_PERCENT",
    "GW_AGENT_VERSIONS",
    "GW_ARCHIVE_ACCESS_KEY_ID",
    "GW_ARCHIVE_ALLOW_HTTP",
    "GW_ARCHIVE_BANDWIDTH_MIB_PER_SECOND",
    "GW_ARCHIVE_CA",
    "GW_ARCHIVE_ENDPOINT",
    "GW_ARCHIVE_PATH_STYLE",
    "GW_ARCHIVE_REGION",
    "GW_ARCHIVE_SECRET_KEY_FILE",
    "GW_ARCHIVE_URL",
    "GW_AUTH_FAILURES_PER_MINUTE",
    "GW_BACKEND",
    "GW_BURST",
    "GW_CONNECTIONS_PER_ADDRESS",
    "GW_CORE_DUMPS",
    "GW_DATA_DIR",
    "GW_DNS_SERVERS",
    "GW_DOMAIN",
    "GW_DRAIN_SECONDS",
    "GW_DRIVER",
    "GW_ENROLLMENT_REQUESTS_PER_MINUTE",
    "GW_ENROLLMENT_TOKEN",
    // Read by gw-agent-enroll.service, like GW_GATEWAY.
    "GW_ENROLL_OPTIONS",
    "GW_GATEWAY",
    "GW_HAND_OVER",
    "GW_HEALTH_CHECK",
    "GW_HOST_HEADER",
    "GW_ISOLATION",
    "GW_LISTEN",
    "GW_LISTEN_HTTP",
    "GW_LOG",
    "GW_LOG_FORMAT",
    "GW_MAX_STALENESS_SECONDS",
    "GW_NEW_CONNECTIONS_PER_MINUTE",
    "GW_PEER_ADDRESS",
    "GW_PEER_LISTEN",
    "GW_PROXY",
    "GW_PROXY_PASSWORD_FILE",
    "GW_REFILL_PER_MINUTE",
    "GW_REGION",
    "GW_REGION_KEY",
    "GW_REGION_KEY_NEXT",
    "GW_REGION_KEY_PREVIOUS",
    "GW_RELAY_MEMORY_MIB",
    "GW_REQUEST_LOG_MAX_BYTES",
    "GW_SEAL_KEY",
    "GW_SIGNING_KEY_DAYS",
    "GW_STANDBY",
    "GW_STATE_DIR",
    "GW_STORE",
    "GW_STORE_CA",
    "GW_STORE_PASSWORD_FILE",
    "GW_TLS",
    "GW_TLS_CERTIFICATE",
    "GW_TLS_KEY",
    "GW_TLS_MIN_VERSION",
    "GW_TOKEN_LIFETIME_SECONDS",
    "GW_TOKEN_REQUESTS_PER_MINUTE",
    "GW_TRACES_ENDPOINT",
    "GW_TRACES_SAMPLE_RATIO",
    "GW_TRUSTED_PROXIES",
    "GW_UPDATE",
    "GW_UPDATE_KEY",
    "GW_WORKERS",
];

/// Variables of the programs' own processes and of their tests, or the beginnings of such.
const INTERNAL: [&str; 11] = [
    "GW_PREDECESSOR",
    "GW_PROBE_",
    "GW_REGION_FIRST",
    "GW_REGION_LOAD_ROUNDS",
    "GW_REGION_REQUESTS",
    "GW_REGION_SCHEDULES",
    "GW_REGION_SEED",
    "GW_REQUIRE_",
    "GW_SOCKETS",
    "GW_STORE_KILLS",
    "GW_TEST_",
];

/// A variable of the environment that neither program knows.
#[derive(Debug, PartialEq, Eq)]
pub struct UnknownVariable {
    pub name: String,
    /// The variable that was probably meant.
    pub suggestion: Option<&'static str>,
}

/// [`unknown_variables`] of this process.
pub fn unknown_in_environment() -> Vec<UnknownVariable> {
    unknown_variables(std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()))
}

/// Finds the `GW_` variables among `names` that neither program knows.
pub fn unknown_variables(names: impl IntoIterator<Item = String>) -> Vec<UnknownVariable> {
    let names: Vec<String> = names
        .into_iter()
        .filter(|name| name.starts_with(PREFIX))
        .collect();
    // Kubernetes sets variables for each Service, such as GW_GATEWAY_SERVICE_HOST and
    // GW_GATEWAY_PORT_443_TCP.
    let services: Vec<&str> = names
        .iter()
        .filter_map(|name| name.strip_suffix("SERVICE_HOST"))
        .collect();
    let is_of_a_service = |name: &str| services.iter().any(|service| name.starts_with(service));
    let is_known = |name: &str| {
        VARIABLES.contains(&name)
            || INTERNAL.iter().any(|it| name.starts_with(it))
            || is_of_a_service(name)
    };
    let unknown = names.iter().filter(|name| !is_known(name));
    let mut unknown: Vec<UnknownVariable> = unknown
        .map(|name| UnknownVariable {
            name: name.clone(),
            suggestion: suggestion(name, VARIABLES.iter().copied()),
        })
        .collect();
    unknown.sort_by(|one, other| one.name.cmp(&other.name));
    unknown
}

impl std::fmt::Display for UnknownVariable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: no such variable", self.name)?;
        match self.suggestion {
            Some(suggestion) => write!(f, "; did you mean `{suggestion}`?"),
            None => write!(
                f,
                "; it has no effect, and {} lists those that have",
                located("docs/configuration.md")
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unknown(names: &[&str]) -> Vec<String> {
        let unknown = unknown_variables(names.iter().map(|name| (*name).to_owned()));
        unknown.iter().map(UnknownVariable::to_string).collect()
    }

    #[test]
    fn misspelt_variables_are_found_with_a_suggestion() {
        let misspelt = ["GW_STATEDIR", "GW_BAKEND", "GW_COLOUR"];
        let others = ["PATH", "GW_BACKEND", "gw_x"];
        assert_eq!(
            unknown(&[misspelt, others].concat()),
            [
                "GW_BAKEND: no such variable; did you mean `GW_BACKEND`?",
                "GW_COLOUR: no such variable; it has no effect, and docs/configuration.md lists \
                 those that have",
                "GW_STATEDIR: no such variable; did you mean `GW_STATE_DIR`?",
            ]
        );
    }

    #[test]
    fn variables_of_both_programs_of_tests_and_of_kubernetes_are_known() {
        let of_programs = ["GW_LISTEN", "GW_ADMIN_TOKEN_FILE"];
        let of_tests = ["GW_TEST_KILLS", "GW_REGION_SEED"];
        let service = [
            "GW_GATEWAY_SERVICE_HOST",
            "GW_GATEWAY_SERVICE_PORT_HTTPS",
            "GW_GATEWAY_PORT_443_TCP_ADDR",
        ];
        assert!(unknown(&[&of_programs[..], &of_tests, &service].concat()).is_empty());
        // Without the Service, such a name is one of the user.
        assert_eq!(unknown(&service[2..]).len(), 1);
        assert!(VARIABLES.is_sorted());
    }
}
