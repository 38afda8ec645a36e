//! `gw-agent doctor`: would this agent serve, and if not, what keeps it from that. Changes nothing, and takes nothing
//! over from an agent that runs.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use bytes::BytesMut;
use gw_shared::doctor::{Examination, machine};
use gw_shared::http::{Connection, Framing, head};
use gw_shared::net::resolve;
use gw_shared::runtime::{self, Driver};
use http::Method;
use http::header::{self, HeaderMap};
use http::uri::PathAndQuery;
use rcgen::PublicKeyData;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::apex_client::connection::{self, GatewayError};
use crate::clock::GatewayClock;
use crate::config::{Config, ConfigError};
use crate::identity::state::{self, Enrollment, Identity, StateDir};
use crate::tunnel::dial;

/// Open files of a busy agent: its tunnels' slots, and as many connections to backends.
const OPEN_FILES: u64 = 4096;
/// For each thing that is on the network.
const TIME_LIMIT: Duration = Duration::from_secs(10);
/// How far the clocks of agent and gateway may be apart: certificates are valid from five minutes before they are made.
const OFFSET_WARNING: Duration = Duration::from_secs(30);
const OFFSET_FAILED: Duration = Duration::from_secs(300);
/// For so long an expired certificate can be replaced without anybody's help.
const RECOVERY: Duration = Duration::from_hours(30 * 24);

/// What is looked at.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// `agent.toml`
    pub config: Option<PathBuf>,
    pub state_dir: Option<PathBuf>,
    pub backends: Vec<String>,
}

/// Looks at everything there is to look at.
pub fn examine(options: &Options, environment: impl Fn(&str) -> Option<String>) -> Examination {
    let mut out = Examination::default();
    machine::examine(&mut out, OPEN_FILES);
    let config = Config::load(options.config.as_deref(), options.state_dir.clone(), &options.backends, &environment);
    let state = match &config {
        Ok(config) => config.state.clone(),
        Err(_) => {
            let from_environment = environment(state::VARIABLE).map(PathBuf::from);
            StateDir::new(options.state_dir.clone().or(from_environment).unwrap_or_else(|| state::DEFAULT.into()))
        }
    };
    machine::folder(&mut out, "state folder", state.path());
    let config = match config {
        Ok(config) => {
            out.ok("configuration", options.config.as_deref().map_or("options alone".into(), Path::to_string_lossy));
            config
        }
        Err(error @ ConfigError::State(_)) => {
            out.failed(
                "enrollment",
                error.to_string(),
                "`gw-agent enroll` with a token of the gateway's administrator",
            );
            return out;
        }
        Err(error) => {
            out.failed("configuration", error.to_string(), "the README lists what can be set");
            return out;
        }
    };
    if let Some(address) = config.metrics_listen {
        match TcpListener::bind(address) {
            Ok(_) => out.ok("metrics_listen", format!("{address} is free")),
            Err(error) => {
                out.warning("metrics_listen", format!("{address}: {error}"), "fine if the agent runs already");
            }
        }
    }
    let identity = match state.identity() {
        Ok(identity) => identity,
        Err(error) => {
            out.failed("identity", error.to_string(), "enroll anew: `gw-agent enroll --force`");
            return out;
        }
    };
    certificate(&mut out, &identity, SystemTime::now());
    let driver = match Driver::choose() {
        Ok(driver) => driver,
        // Said above.
        Err(_) => return out,
    };
    if let Err(error) = driver.block_on(network(&mut out, &config, &identity)) {
        out.failed("reactor", error.to_string(), "see above");
    }
    out
}

/// The agent's certificate, at `now`.
fn certificate(out: &mut Examination, identity: &Identity, now: SystemTime) {
    const CHECK: &str = "certificate";
    const ENROLL: &str = "enroll anew: `gw-agent enroll --force`";
    let validity = match identity.validity() {
        Ok(validity) => validity,
        Err(error) => return out.failed(CHECK, error.to_string(), ENROLL),
    };
    let parsed = X509Certificate::from_der(&identity.certificate);
    let is_of_key = identity.key_pair().is_ok_and(|key| {
        parsed.is_ok_and(|(_, certificate)| certificate.public_key().raw == key.subject_public_key_info())
    });
    if !is_of_key {
        return out.failed(CHECK, "it is for another key than the one beside it", ENROLL);
    }
    match (validity.not_after.duration_since(now), now.duration_since(validity.not_after)) {
        (_, Ok(expired)) if expired < RECOVERY => out.warning(
            CHECK,
            format!("expired {} ago", in_words(expired)),
            "`gw-agent run` replaces it by itself, for 30 days after its end",
        ),
        (_, Ok(expired)) => out.failed(CHECK, format!("expired {} ago", in_words(expired)), ENROLL),
        (Ok(_), _) if now < validity.not_before => {
            out.warning(CHECK, "not valid yet, by this machine's clock", "set the clock");
        }
        (Ok(left), _) => out.ok(CHECK, format!("good for {} more", in_words(left))),
        (Err(_), Err(_)) => {}
    }
}

fn in_words(duration: Duration) -> String {
    let hours = duration.as_secs() / 3600;
    if hours >= 48 { format!("{} days", hours / 24) } else { format!("{hours} hours") }
}

async fn network(out: &mut Examination, config: &Config, identity: &Identity) {
    let Enrollment { gateway_name, gateway_host, gateway_port, services, .. } = &config.enrollment;
    match within(async { resolve::resolve(gateway_host, *gateway_port).await.map_err(GatewayError::Connect) }).await {
        Ok(addresses) => {
            let addresses: Vec<String> = addresses.iter().map(|address| address.ip().to_string()).collect();
            out.ok("gateway's name", format!("{gateway_host} is {}", addresses.join(", ")));
        }
        Err(error) => {
            let advice = "look at this machine's DNS; agent.json in the state folder says where the gateway is";
            return out.failed("gateway's name", format!("{gateway_host}: {error}"), advice);
        }
    }
    match date(config, gateway_name).await {
        Ok(theirs) => {
            out.ok("gateway", format!("{gateway_name} answers, and its certificate is trusted"));
            clock_offset(out, theirs, SystemTime::now());
        }
        Err(error) => {
            let advice = "look at firewalls and proxies on the way; the agent needs one outbound port, and nobody may \
                          open its TLS";
            out.failed("gateway", error.to_string(), advice);
        }
    }
    for hostname in services {
        tunnel(out, config, identity, hostname).await;
    }
    for hostname in services {
        let Some(backends) = config.backends.of(hostname) else {
            out.failed(format!("backend of {hostname}"), "none", Config::HOW_TO_SET_A_BACKEND);
            continue;
        };
        for (name, connected) in backends.try_each(TIME_LIMIT).await {
            let check = format!("backend of {hostname}");
            match connected {
                Ok(speaks) => out.ok(check, format!("{name} speaks {speaks}")),
                Err(error) => out.failed(check, format!("{name}: {error}"), "start it, or say where else it is"),
            }
        }
    }
}

/// What the gateway's clock says.
async fn date(config: &Config, name: &str) -> Result<Option<SystemTime>, GatewayError> {
    let Enrollment { gateway_host, gateway_port, .. } = &config.enrollment;
    let authorities =
        config.state.gateway_authorities().map_err(|error| GatewayError::Certificates(error.to_string()))?;
    let tls = connection::client_config(authorities, None, b"http/1.1")?;
    let mut request = Vec::new();
    let (headers, target) = (HeaderMap::new(), PathAndQuery::from_static("/.well-known/jwks.json"));
    let (host, framing) = (name.as_bytes(), Framing::None);
    head::write_request(&mut request, &Method::GET, &target, host, &headers, framing, Connection::Close);
    within(async {
        let stream = connection::open(gateway_host, *gateway_port, name, tls).await?;
        let reply = connection::exchange(&stream, &request, &mut BytesMut::new()).await?;
        drop(stream.close().await);
        let date = reply.headers.get(header::DATE).and_then(|date| date.to_str().ok());
        Ok(date.and_then(|date| httpdate::parse_http_date(date).ok()))
    })
    .await
}

fn clock_offset(out: &mut Examination, theirs: Option<SystemTime>, ours: SystemTime) {
    const CHECK: &str = "clock of the gateway";
    const ADVICE: &str = "keep the clocks right with NTP: certificates are checked by them";
    let Some(theirs) = theirs else {
        return out.warning(CHECK, "it does not say", "is a proxy between here and the gateway?");
    };
    let offset = ours.duration_since(theirs).unwrap_or_else(|error| error.duration());
    let found = format!("{} seconds from ours", offset.as_secs());
    match offset {
        _ if offset >= OFFSET_FAILED => out.failed(CHECK, found, ADVICE),
        _ if offset >= OFFSET_WARNING => out.warning(CHECK, found, ADVICE),
        _ => out.ok(CHECK, found),
    }
}

/// Asks for a tunnel as `run` does, up to the gateway's answer, and closes it. The gateway registers a tunnel only once
/// the agent has answered on its control stream, which this one never does: an agent that runs keeps its own.
async fn tunnel(out: &mut Examination, config: &Config, identity: &Identity, hostname: &str) {
    let check = format!("tunnel of {hostname}");
    match within(async { Ok(dial::open(config, hostname, identity, &GatewayClock::default()).await) }).await {
        Ok(Ok(stream)) => {
            drop(stream.close().await);
            out.ok(check, "the gateway would take it");
        }
        Ok(Err(error)) if error.says_certificate_expired() => {
            out.warning(check, error.to_string(), "`gw-agent run` gets another certificate by itself");
        }
        Ok(Err(error)) => {
            out.failed(check, error.to_string(), "`gw-gateway agent show` says what this agent may serve");
        }
        Err(error) => out.failed(check, error.to_string(), "look at firewalls and proxies on the way"),
    }
}

async fn within<T>(future: impl Future<Output = Result<T, GatewayError>>) -> Result<T, GatewayError> {
    runtime::timeout(TIME_LIMIT, future).await.unwrap_or(Err(GatewayError::TimedOut(TIME_LIMIT)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs::Permissions;
    use std::net::SocketAddr;
    use std::os::unix::fs::PermissionsExt;

    use gw_shared::doctor::Verdict;
    use rustix::net::{AddressFamily, SocketType};

    use super::*;
    use crate::fake_gateway::{self, Authority, HOSTNAME, LONG_AGO, NOW, refusal};

    const ACCEPTED: &str = "HTTP/1.1 101 X\r\nconnection: upgrade\r\nupgrade: gw-tunnel\r\n\r\n";

    /// What is found out about an agent whose gateway answers like this.
    fn findings(
        years: std::ops::Range<i32>,
        backend: &str,
        mut tunnel: impl FnMut() -> String + Send + 'static,
    ) -> BTreeMap<String, (Verdict, String)> {
        let (authority, directory) = (Authority::new(), tempfile::tempdir().unwrap());
        std::fs::set_permissions(directory.path(), Permissions::from_mode(0o700)).unwrap();
        let port = fake_gateway::serve(&authority, move |request| {
            if request.head.starts_with("GET /tunnel ") {
                return tunnel();
            }
            let date = httpdate::fmt_http_date(SystemTime::now() - Duration::from_secs(60));
            format!("HTTP/1.1 200 OK\r\ndate: {date}\r\ncontent-length: 2\r\n\r\n{{}}")
        });
        drop(fake_gateway::agent(directory.path(), &authority, &authority.identity_pem(years), port));
        // A running agent holds the lock; doctor does not need it.
        let _running = StateDir::new(directory.path()).lock().unwrap();
        let options =
            Options { config: None, state_dir: Some(directory.path().to_owned()), backends: vec![backend.to_owned()] };
        let checks = examine(&options, |_| None);
        let found = checks.checks().iter().cloned().map(|it| (it.check, (it.verdict, it.found)));
        found.collect()
    }

    #[test]
    fn an_agent_that_would_serve_has_nothing_wrong() {
        let backend = TcpListener::bind("127.0.0.1:0").unwrap();
        let found = findings(NOW, &format!("http://{}", backend.local_addr().unwrap()), || ACCEPTED.to_owned());
        let verdict = |check: &str| found.get(check).unwrap_or_else(|| panic!("{check}: {found:?}")).0;
        for check in ["state folder", "configuration", "certificate", "gateway's name", "gateway"] {
            assert_eq!(verdict(check), Verdict::Ok, "{found:?}");
        }
        assert_eq!(verdict("clock of the gateway"), Verdict::Warning);
        assert_eq!(found[&format!("tunnel of {HOSTNAME}")], (Verdict::Ok, "the gateway would take it".to_owned()));
        assert_eq!(verdict(&format!("backend of {HOSTNAME}")), Verdict::Ok);
    }

    #[test]
    fn what_keeps_an_agent_from_serving_is_found() {
        // Bound and not listening: connections are refused, and no other program gets the port.
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let closed = SocketAddr::try_from(rustix::net::getsockname(&socket).unwrap()).unwrap();
        let found = findings(LONG_AGO, &format!("http://{closed}"), || refusal(403, "", "GW_AGENT_NOT_ALLOWED"));
        let (verdict, says) = &found[&format!("tunnel of {HOSTNAME}")];
        assert!(*verdict == Verdict::Failed && says.contains("GW_AGENT_NOT_ALLOWED"), "{says}");
        assert_eq!(found["certificate"].0, Verdict::Failed);
        assert_eq!(found[&format!("backend of {HOSTNAME}")].0, Verdict::Failed);
    }

    #[test]
    fn a_machine_without_an_agent_is_told_to_enroll() {
        let directory = tempfile::tempdir().unwrap();
        let options = Options { state_dir: Some(directory.path().to_owned()), ..Options::default() };
        let found = examine(&options, |_| None);
        let last = found.checks().last().unwrap();
        assert_eq!((last.check.as_str(), last.verdict), ("enrollment", Verdict::Failed));
        assert!(last.advice.as_ref().unwrap().contains("gw-agent enroll"));
    }

    #[test]
    fn clocks_that_are_apart_are_seen_either_way() {
        let now = SystemTime::now();
        for (theirs, verdict) in [
            (Some(now), Verdict::Ok),
            (Some(now + Duration::from_secs(40)), Verdict::Warning),
            (Some(now - Duration::from_secs(400)), Verdict::Failed),
            (None, Verdict::Warning),
        ] {
            let mut out = Examination::default();
            clock_offset(&mut out, theirs, now);
            assert_eq!(out.checks()[0].verdict, verdict, "{theirs:?}");
        }
    }

    #[test]
    fn certificates_are_judged_by_what_run_would_do_with_them() {
        let authority = Authority::new();
        let identity = Identity::from_pem(authority.identity_pem(LONG_AGO).as_bytes()).unwrap();
        let end = identity.validity().unwrap().not_after;
        for (now, verdict) in [
            (end - Duration::from_secs(60), Verdict::Ok),
            (end + Duration::from_secs(60), Verdict::Warning),
            (end + RECOVERY, Verdict::Failed),
            (SystemTime::UNIX_EPOCH, Verdict::Warning),
        ] {
            let mut out = Examination::default();
            certificate(&mut out, &identity, now);
            assert_eq!(out.checks()[0].verdict, verdict, "{now:?}");
        }
    }
}
