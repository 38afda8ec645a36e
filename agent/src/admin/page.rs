//! Contents of `/metrics` and `/readyz`.

use std::time::{SystemTime, UNIX_EPOCH};

use gw_shared::telemetry::logging;
use gw_shared::telemetry::metrics::{Exposition, Kind, process};
use gw_shared::version;

use crate::backend::BackendState;
use crate::identity::renewal::CertificateManager;
use crate::telemetry::counts::Counts;
use crate::tunnel::AgentContext;
use crate::tunnel::registry::RegisteredService;

/// Writes the agent's metrics as Prometheus text.
pub(super) fn metrics(agent: &AgentContext) -> String {
    let mut out = Exposition::default();
    out.family(
        "gw_agent_build_info",
        Kind::Gauge,
        "Version of the program; the value is 1.",
    )
    .sample(&[("version", version::VERSION)], 1);
    let services = agent.registry.services();
    let services: Vec<(&str, &RegisteredService)> = services
        .iter()
        .map(|(name, it)| (name.as_str(), &**it))
        .collect();
    tunnels(&mut out, agent, &services);
    requests(&mut out, &services);
    backends(&mut out, &services);
    certificate(&mut out, &agent.certificates);
    let help = "Log lines suppressed because similar lines were too frequent.";
    out.single(
        "gw_agent_log_lines_suppressed_total",
        Kind::Counter,
        help,
        logging::suppressed(),
    );
    process::write(&mut out);
    out.into_text()
}

fn tunnels(out: &mut Exposition, agent: &AgentContext, services: &[(&str, &RegisteredService)]) {
    let mut family = out.family(
        "gw_agent_tunnel_up",
        Kind::Gauge,
        "1 while the service has a tunnel, else 0.",
    );
    for hostname in agent.services.subscribe().borrow().iter() {
        let is_up = services
            .iter()
            .any(|(name, service)| name == hostname && service.is_up());
        family.sample(&[("service", hostname)], u8::from(is_up));
    }
    let mut each = |name, kind, help, value: fn(&RegisteredService) -> u64| {
        let mut family = out.family(name, kind, help);
        services
            .iter()
            .for_each(|(name, service)| family.sample(&[("service", name)], value(service)));
    };
    each(
        "gw_agent_tunnels_opened_total",
        Kind::Counter,
        "Opened tunnels.",
        |service| service.tunnels_opened.get(),
    );
    each(
        "gw_agent_tunnel_failures_total",
        Kind::Counter,
        "Failed attempts to open a tunnel.",
        |service| service.failed_attempts.get(),
    );
    each(
        "gw_agent_slots",
        Kind::Gauge,
        "Concurrent requests that the service's tunnels accept.",
        |service| {
            service
                .sessions()
                .iter()
                .map(|session| u64::from(session.slots.total()))
                .sum()
        },
    );
    each(
        "gw_agent_slots_in_use",
        Kind::Gauge,
        "Requests in progress at a backend.",
        |service| {
            service
                .sessions()
                .iter()
                .map(|session| u64::from(session.slots.in_use()))
                .sum()
        },
    );
}

fn requests(out: &mut Exposition, services: &[(&str, &RegisteredService)]) {
    let mut each = |name, help, value: fn(&Counts) -> u64| {
        let mut family = out.family(name, Kind::Counter, help);
        services.iter().for_each(|(name, service)| {
            family.sample(&[("service", name)], value(&service.counts));
        });
    };
    each(
        "gw_agent_requests_total",
        "Requests received from the gateway.",
        Counts::requests,
    );
    each(
        "gw_agent_request_bytes_total",
        "Bytes of request bodies.",
        Counts::request_bytes,
    );
    each(
        "gw_agent_response_bytes_total",
        "Bytes of response bodies.",
        Counts::response_bytes,
    );
    let help = "Requests without a complete response of the backend, by error code.";
    let mut family = out.family("gw_agent_request_failures_total", Kind::Counter, help);
    for (name, service) in services {
        for (code, count) in service.counts.failures() {
            family.sample(&[("service", name), ("code", code)], count);
        }
    }
    let help = "Time from a connection to the backend to the head of its response.";
    let mut family = out.family("gw_agent_backend_first_byte_seconds", Kind::Histogram, help);
    services.iter().for_each(|(name, service)| {
        family.histogram(&[("service", name)], &service.counts.first_byte());
    });
}

fn backends(out: &mut Exposition, services: &[(&str, &RegisteredService)]) {
    let states: Vec<(&str, BackendState)> = services
        .iter()
        .flat_map(|(name, service)| service.pool.states().map(move |state| (*name, state)))
        .collect();
    let help =
        "0 if the last attempt to connect to the backend failed or its health checks do, else 1.";
    let mut family = out.family("gw_agent_backend_up", Kind::Gauge, help);
    for (service, state) in &states {
        family.sample(
            &[("service", service), ("backend", &state.name)],
            u8::from(state.is_good),
        );
    }
    let mut family = out.family(
        "gw_agent_backend_connections",
        Kind::Gauge,
        "Open connections to the backend, by state.",
    );
    for (service, state) in &states {
        let labels = |kind| {
            [
                ("service", *service),
                ("backend", state.name.as_str()),
                ("state", kind),
            ]
        };
        family.sample(&labels("in_use"), state.in_use);
        family.sample(&labels("idle"), state.idle);
    }
    let mut each = |name, help, value: fn(&BackendState) -> u64| {
        let mut family = out.family(name, Kind::Counter, help);
        for (service, state) in &states {
            family.sample(
                &[("service", service), ("backend", &state.name)],
                value(state),
            );
        }
    };
    each(
        "gw_agent_backend_connects_total",
        "Attempts to connect to the backend.",
        |state| state.connects,
    );
    each(
        "gw_agent_backend_connect_failures_total",
        "Failed attempts to connect to the backend.",
        |state| state.failures,
    );
}

fn certificate(out: &mut Exposition, certificates: &CertificateManager) {
    if let Some(expiry) = certificates.expiry.get() {
        let help = "Expiry of the agent's certificate, since the Unix epoch.";
        let seconds = expiry
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_secs();
        out.single(
            "gw_agent_certificate_expiry_timestamp_seconds",
            Kind::Gauge,
            help,
            seconds,
        );
    }
    let help = "Attempts to renew the agent's certificate, by result.";
    let mut family = out.family("gw_agent_certificate_renewals_total", Kind::Counter, help);
    family.sample(&[("result", "renewed")], certificates.renewals.get());
    family.sample(&[("result", "failed")], certificates.failed_renewals.get());
}

/// Checks that every service has a tunnel and a backend that is not known to be down. The error
/// names the reason, or the services and backends.
pub(super) fn readiness(agent: &AgentContext, now: SystemTime) -> Result<(), String> {
    if agent.registry.stopping.get() {
        return Err("stopping".to_owned());
    }
    if agent
        .certificates
        .expiry
        .get()
        .is_some_and(|expiry| expiry <= now)
    {
        return Err("the agent's certificate has expired".to_owned());
    }
    let services = agent.registry.services();
    let without_tunnel: Vec<String> = agent
        .services
        .subscribe()
        .borrow()
        .iter()
        .filter_map(|hostname| match services.get(hostname) {
            Some(service) if service.is_up() => None,
            Some(_) => Some(hostname.clone()),
            None => Some(format!("{hostname} (it has no backend)")),
        })
        .collect();
    let without_backend = services
        .iter()
        .filter(|(_, service)| service.pool.is_down())
        .map(|(hostname, service)| {
            let backends: Vec<String> = service.pool.states().map(|backend| backend.name).collect();
            format!("{hostname} ({})", backends.join(", "))
        });
    let lists = [
        ("no tunnel", without_tunnel),
        ("all backends down", without_backend.collect()),
    ];
    let reasons: Vec<String> = lists
        .iter()
        .filter(|(_, names)| !names.is_empty())
        .map(|(reason, names)| format!("{reason}: {}", names.join(", ")))
        .collect();
    if reasons.is_empty() {
        Ok(())
    } else {
        Err(reasons.join("; "))
    }
}
