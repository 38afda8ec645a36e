//! Hostnames, and addresses of clients behind proxies.

use std::net::IpAddr;

use ::http::header::HeaderValue;
use gw_base::client_address::{ProxyProtocol, TrustedProxies, client_address as client_of};
use gw_base::service::hostname::{Destination, split_tenant_label, tenant_label};
use gw_shared::http::fields::X_FORWARDED_FOR;
use gw_shared::id::{AccountId, ServiceId};

use super::region;

/// A value of `Host`; or two lines, an account and a service.
pub fn hostname(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let region = region();
    if let Some((account, service)) = text.split_once('\n') {
        let (Ok(account), Ok(service)) = (AccountId::new(account), ServiceId::new(service)) else {
            return;
        };
        if let Some(label) = tenant_label(&account, &service) {
            assert_eq!(split_tenant_label(&label), Some((account, service)));
        }
        return;
    }

    let destination = region.destination(text);
    assert_eq!(
        region.destination(&text.to_ascii_uppercase()),
        destination,
        "case"
    );
    if !text.contains(':') {
        assert_eq!(
            region.destination(&format!("{text}:8443")),
            destination,
            "port"
        );
        assert!(
            text.ends_with('.') || region.destination(&format!("{text}.")) == destination,
            "final dot"
        );
    }
    if let Destination::Tenant(label) = &destination {
        assert!(
            !label.is_empty()
                && !label.contains('.')
                && !label.bytes().any(|byte| byte.is_ascii_uppercase())
        );
        assert_eq!(
            region.destination(&format!("{label}.{}", region.apex())),
            destination
        );
    }

    let label = if let Destination::Tenant(label) = &destination {
        label
    } else {
        text
    };
    if let Some((account, service)) = split_tenant_label(label) {
        assert_eq!(tenant_label(&account, &service).as_deref(), Some(label));
        let hostname = region
            .tenant_hostname(&account, &service)
            .expect("the hostname has room for the label that it was split from");
        assert_eq!(
            region.destination(&hostname),
            Destination::Tenant(label.into())
        );
    }
}

/// Lines: address of the peer, then field lines of `X-Forwarded-For`. The trusted proxies are
/// 10.0.0.0/8 and fd00::/8.
pub fn client_address(data: &[u8]) {
    let mut lines = data.split(|byte| *byte == b'\n');
    let peer = lines
        .next()
        .and_then(|peer| std::str::from_utf8(peer).ok()?.parse::<IpAddr>().ok());
    let (Some(peer), Ok(lines)) = (
        peer,
        lines
            .map(HeaderValue::from_bytes)
            .collect::<Result<Vec<_>, _>>(),
    ) else {
        return;
    };
    let trusted: TrustedProxies = ["10.0.0.0/8", "fd00::/8"]
        .map(|block| (block.parse().expect("a block"), ProxyProtocol::Off))
        .into_iter()
        .collect();
    let client = |lines: &[&[HeaderValue]]| {
        let lines = lines
            .concat()
            .into_iter()
            .map(|line| (X_FORWARDED_FOR, line));
        client_of(peer, &lines.collect(), &trusted)
    };

    let found = client(&[&lines]);
    assert_eq!(found, found.to_canonical(), "no IPv4-mapped IPv6 address");
    let peer = peer.to_canonical();
    if !trusted.contains(peer) {
        assert_eq!(found, peer, "an untrusted peer is the client");
        return;
    }
    let forged = HeaderValue::from_static("6.6.6.6");
    if !trusted.contains(found) {
        let found_then = client(&[std::slice::from_ref(&forged), &lines]);
        assert_eq!(
            found_then, found,
            "elements left of the client do not count"
        );
    }
    assert_eq!(
        client(&[&lines, &[forged]]).to_string(),
        "6.6.6.6",
        "the last element of a trusted proxy counts"
    );
    assert!(
        found == peer || lines.iter().any(|line| names(line, found)),
        "{found} is neither the peer nor in the list"
    );
}

/// Whether an element of the list has this address, in any notation, with or without a zone (RFC
/// 4007 §11) and a port.
fn names(line: &HeaderValue, address: IpAddr) -> bool {
    String::from_utf8_lossy(line.as_bytes())
        .split(',')
        .map(str::trim)
        .any(|element| {
            let without_port = element
                .rsplit_once(':')
                .map_or(element, |(address, _)| address);
            [element, without_port].iter().any(|text| {
                let text = text.trim_start_matches('[').trim_end_matches(']');
                let text = text
                    .split_once('%')
                    .map_or(text, |(address, _zone)| address);
                text.parse::<IpAddr>()
                    .is_ok_and(|found| found.to_canonical() == address)
            })
        })
}
