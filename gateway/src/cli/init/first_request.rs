//! The first request, which `init` sends itself as a caller would: by name, over TLS, without a
//! key.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use gw_control_plane::admin_client::client_of;
use gw_gateway::process::doctor::resolve;
use gw_interface::config::Config;
use gw_shared::http::fields::X_GW_REQUEST_ID;
use gw_shared::net::https;
use gw_shared::net::tls::Remedies;
use gw_shared::text::escaped;
use serde_json::Value;

use super::answers::Answers;
use super::next_steps::development_authority;

/// Longest wait for the answer.
const WITHIN: Duration = Duration::from_secs(5);
/// Bytes of the answer that are read.
const ANSWER_MAX: u64 = 64 << 10;

/// Sends the request to the service of the next steps; returns the answer or the cause of its
/// failure, and what to do.
pub(super) fn send(answers: &Answers, config: &Config, listen: SocketAddr) -> String {
    if config.acme.is_some() {
        return "\nNo first request is sent: it would come before the certificate.".to_owned();
    }
    let host = format!("{}--api.{}", answers.account, config.region.apex());
    let port = listen.port();
    let url = match port {
        443 => format!("https://{host}/"),
        port => format!("https://{host}:{port}/"),
    };
    let answer = address(answers, &host, listen).and_then(|address| request(config, &url, address));
    match answer {
        Ok(answer) => {
            let next = match answer.ends_with("GW_SERVICE_NOT_FOUND") {
                true => " The command above creates the service.",
                false => "",
            };
            format!(
                "\nThe first request, GET {url}, is answered: {answer}\n\
                 Name, port and certificate work for callers on this machine.{next}"
            )
        }
        Err(cause) => {
            format!("\nThe first request, GET {url}, fails as it would for a caller:\n  {cause}")
        }
    }
}

/// Where a caller connects.
fn address(answers: &Answers, host: &str, listen: SocketAddr) -> Result<SocketAddr, String> {
    if answers.is_local() {
        return Ok(SocketAddr::new(reachable(listen.ip()), listen.port()));
    }
    resolve(host, listen.port())
        .map(|addresses| addresses[0])
        .map_err(|error| {
            format!(
                "{host} does not resolve: {error}; add the DNS records above, and wait until \
                     they are served"
            )
        })
}

/// An address of this machine at which a listener is reached.
fn reachable(listen: IpAddr) -> IpAddr {
    match listen {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    }
}

fn request(config: &Config, url: &str, address: SocketAddr) -> Result<String, String> {
    let settings = ureq::Agent::config_builder()
        .timeout_global(Some(WITHIN))
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false);
    let authority = development_authority(config);
    let client = client_of(address, authority.as_deref(), settings)?;
    let mut answer = client
        .get(url)
        .call()
        .map_err(|error| cause(config, address, &error))?;
    let status = answer.status();
    if !answer.headers().contains_key(X_GW_REQUEST_ID) {
        return Err(format!(
            "{address} answers with {status}, but it is not a gateway: point the names and the \
             port at this one"
        ));
    }
    let body = answer
        .body_mut()
        .with_config()
        .limit(ANSWER_MAX)
        .read_to_vec()
        .map_err(|error| cause(config, address, &error))?;
    let error: Value = serde_json::from_slice(&body).unwrap_or_default();
    let code = error["error"]["code"].as_str().unwrap_or_default();
    Ok(format!("{status} {}", escaped(code)).trim_end().to_owned())
}

/// Why the request failed, and what to do.
fn cause(config: &Config, address: SocketAddr, error: &ureq::Error) -> String {
    let apex = config.region.apex();
    let Some(failure) = https::failure(error) else {
        return match error {
            ureq::Error::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused => format!(
                "{address} refuses the connection: point the name at this gateway, and its port at \
                 `listen`"
            ),
            ureq::Error::Timeout(_) => format!(
                "no answer from {address} within {WITHIN:?}: open the port in firewalls between \
                 callers and this gateway"
            ),
            error => format!(
                "{address}: {error}; `gw-gateway doctor` checks the machine and the configuration"
            ),
        };
    };
    const REMEDIES: Remedies = Remedies {
        issuer: "tls_certificate must hold all issuers behind the server's certificate; of a \
                 private authority, callers and agents must be given the root",
        name: "have one issued for the apex of the region and all names below it",
        certificate: "replace tls_certificate",
        client_certificate: "point the name at this gateway, which asks for none",
        not_tls: "point the name and the port at `listen` of this gateway",
        other: "point the name and the port at `listen` of this gateway",
        versions: "TLS 1.3 and 1.2",
    };
    format!(
        "{}; check that {address} is this gateway, whose names are {apex} and *.{apex}",
        REMEDIES.explain(failure)
    )
}
