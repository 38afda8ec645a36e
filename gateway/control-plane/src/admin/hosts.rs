//! Checks of Host and Origin. They prevent DNS rebinding: a foreign page whose name resolves to
//! this listener is same-origin for the browser, and only its name reveals it.

use std::net::IpAddr;

use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use gw_base::service::hostname::{Destination, Region};
use gw_shared::text::printable;

use super::Admin;
use super::problem::Problem;
use crate::control::Control;

/// Most bytes of a foreign host that are shown.
const SHOWN: usize = 100;

/// Refuses requests for other hosts. A request without `Host`, as probes over HTTP/1.0 are, is of
/// no browser.
pub(super) async fn own_host(State(admin): State<Admin>, request: Request, next: Next) -> Response {
    let mut hosts = request.headers().get_all(header::HOST).into_iter();
    let Some(foreign) = hosts.find(|host| !is_of_listener(host, &admin.control)) else {
        return next.run(request).await;
    };
    let host = printable(foreign.as_bytes(), SHOWN);
    tracing::warn!(
        host,
        "request to the admin listener refused: its Host is not a name of the listener; to allow \
         the name, add it to admin_hosts"
    );
    let detail = if is_of_service(&host, admin.control.region()) {
        format!(
            "{host:?} is the name of a service, and this is the admin listener; send requests of \
             the service to the port of `listen`, over https"
        )
    } else {
        format!(
            "the admin listener is not served under the name {host:?}; use its IP address, or add \
             the name to admin_hosts in the gateway's configuration"
        )
    };
    Problem::new(StatusCode::MISDIRECTED_REQUEST, detail).into_response()
}

fn is_of_listener(host: &HeaderValue, control: &Control) -> bool {
    let certified = |name: &str| {
        control
            .admin_tls()
            .is_some_and(|tls| tls.is_valid_for(name))
    };
    host.to_str()
        .is_ok_and(|host| is_ours(host, control.region(), control.admin_hosts(), certified))
}

/// Whether `host` names the listener: an IP address, localhost, the apex of the region, a
/// configured host, or a name for which the listener is `certified`, other than that of a service.
fn is_ours(
    host: &str,
    region: &Region,
    configured: &[String],
    certified: impl Fn(&str) -> bool,
) -> bool {
    let Ok(authority) = host.parse::<Authority>() else {
        return false;
    };
    let name = authority.host().trim_end_matches('.').to_ascii_lowercase();
    let of = |domain: &str| {
        name == domain
            || name
                .strip_suffix(domain)
                .is_some_and(|rest| rest.ends_with('.'))
    };
    let address = name.trim_start_matches('[').trim_end_matches(']');
    address.parse::<IpAddr>().is_ok()
        || name == region.apex()
        || configured.contains(&name)
        || ((of("localhost") || certified(&name)) && !is_of_service(&name, region))
}

/// Whether `host` is the name of a service, which may not exist.
fn is_of_service(host: &str, region: &Region) -> bool {
    matches!(region.destination(host), Destination::Tenant(_))
}

/// Whether `Origin` matches `Host`, with either scheme, because a proxy may terminate TLS.
pub(crate) fn is_same(origin: &str, host: &str) -> bool {
    let authority = origin
        .strip_prefix("https://")
        .or_else(|| origin.strip_prefix("http://"));
    authority.is_some_and(|authority| authority.eq_ignore_ascii_case(host))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_host_names_are_refused() {
        let region = Region::new("eu1", "example.com");
        let certified =
            |name: &str| name == "tls.example.org" || name.ends_with(".eu1.example.com");
        let ours = |host| is_ours(host, &region, &["admin.example.org".to_owned()], certified);
        for host in [
            "127.0.0.1:9080",
            "[::1]:9080",
            "localhost",
            "LocalHost:1",
            "gw.localhost:9080",
            "eu1.example.com",
            "admin.example.org:443",
            "10.0.0.7",
            "tls.example.org:9080",
            "TLS.example.org.",
        ] {
            assert!(ours(host), "{host}");
        }
        let local = Region::new("eu1", "gw.localhost");
        let ours_here = |host| is_ours(host, &local, &[], |_| false);
        assert!(ours_here("console.gw.localhost:9080") && ours_here("eu1.gw.localhost"));
        assert!(!ours_here("acme--api.eu1.gw.localhost:9080"));
        for host in [
            "",
            "evil.example",
            "notlocalhost",
            "localhost.evil.example",
            "eu1.example.com.evil.example",
            "x--y.eu1.example.com",
            "127.0.0.1.evil.example",
            "admin.example.org.evil",
            "a b",
        ] {
            assert!(!ours(host), "{host}");
        }
    }

    #[test]
    fn an_origin_is_compared_with_its_port() {
        assert!(
            is_same("http://127.0.0.1:9080", "127.0.0.1:9080")
                && is_same("https://a.example", "A.example")
        );
        for origin in [
            "null",
            "",
            "http://127.0.0.1",
            "http://127.0.0.1:9081",
            "http://127.0.0.1:9080.evil.example",
        ] {
            assert!(!is_same(origin, "127.0.0.1:9080"), "{origin}");
        }
    }
}
