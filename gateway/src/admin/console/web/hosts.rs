//! Checks of Host and Origin. They prevent DNS rebinding: a foreign page whose name resolves to this listener is
//! same-origin for the browser, and only its name reveals it.

use std::net::IpAddr;

use axum::http::uri::Authority;

use crate::hostname::Region;

/// Whether `Host` names the console: an IP address, localhost, the apex of the region or a configured host.
pub(crate) fn is_ours(host: &str, region: &Region, configured: &[String]) -> bool {
    let Ok(authority) = host.parse::<Authority>() else { return false };
    let name = authority.host().trim_end_matches('.').to_ascii_lowercase();
    let of = |domain: &str| name == domain || name.strip_suffix(domain).is_some_and(|rest| rest.ends_with('.'));
    let address = name.trim_start_matches('[').trim_end_matches(']');
    address.parse::<IpAddr>().is_ok() || of("localhost") || name == region.apex() || configured.contains(&name)
}

/// Whether `Origin` matches `Host`, with either scheme, because a proxy may terminate TLS.
pub(crate) fn is_same(origin: &str, host: &str) -> bool {
    let authority = origin.strip_prefix("https://").or_else(|| origin.strip_prefix("http://"));
    authority.is_some_and(|authority| authority.eq_ignore_ascii_case(host))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_host_names_are_refused() {
        let region = Region::new("eu1", "example.com");
        let ours = |host| is_ours(host, &region, &["admin.example.org".to_owned()]);
        for host in [
            "127.0.0.1:9080",
            "[::1]:9080",
            "localhost",
            "LocalHost:1",
            "gw.localhost:9080",
            "eu1.example.com",
            "admin.example.org:443",
            "10.0.0.7",
        ] {
            assert!(ours(host), "{host}");
        }
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
        assert!(is_same("http://127.0.0.1:9080", "127.0.0.1:9080") && is_same("https://a.example", "A.example"));
        for origin in ["null", "", "http://127.0.0.1", "http://127.0.0.1:9081", "http://127.0.0.1:9080.evil.example"] {
            assert!(!is_same(origin, "127.0.0.1:9080"), "{origin}");
        }
    }
}
