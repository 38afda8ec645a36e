//! The key `trusted_proxies`: tables, or strings.

use std::net::IpAddr;

use gw_base::client_address::{ProxyProtocol, TrustedProxies};
use gw_shared::config::Keys;
use ipnet::IpNet;

const BLOCK: &str = "an address or a block such as \"10.0.0.0/8\"";

pub(super) fn trusted_proxies(keys: &mut Keys<'_>) -> Option<TrustedProxies> {
    let (name, elements) = keys.elements("trusted_proxies")?;
    let mut proxies = TrustedProxies::default();
    for (index, element) in elements.into_iter().enumerate() {
        let entry = match element {
            toml::Value::Table(table) => {
                entry(&format!("{name}[{index}]"), table, &mut keys.errors)
            }
            element => {
                let parsed = element.as_str().map_or(Err(BLOCK), parse_text);
                parsed
                    .map_err(|expected| {
                        keys.errors
                            .push(format!("{name}: {element} is not {expected}"));
                    })
                    .ok()
            }
        };
        if let Some((block, setting)) = entry
            && !proxies.add(block, setting)
        {
            keys.errors.push(format!(
                "{name}: {block} is listed twice; keep one of the entries"
            ));
        }
    }
    Some(proxies)
}

/// Parses the table of a proxy, which `name` denotes in errors.
fn entry(
    name: &str,
    table: toml::Table,
    errors: &mut Vec<String>,
) -> Option<(IpNet, ProxyProtocol)> {
    let no_variables = |_: &str| None;
    let mut keys = Keys::new(table, &no_variables);
    let block = keys.required("address", BLOCK, parse_block);
    let setting = keys.required("proxy_protocol", "\"required\" or \"off\"", parse_setting);
    keys.refuse_unknown();
    errors.extend(
        keys.errors
            .into_iter()
            .map(|error| format!("{name}.{error}")),
    );
    block.zip(setting)
}

/// Parses `BLOCK` or `BLOCK=SETTING`. The error describes the expected text.
fn parse_text(text: &str) -> Result<(IpNet, ProxyProtocol), &'static str> {
    match text.split_once('=') {
        None => Some((parse_block(text).ok_or(BLOCK)?, ProxyProtocol::Guessed)),
        Some((block, setting)) => parse_block(block.trim()).zip(parse_setting(setting.trim())),
    }
    .ok_or("a block and its setting, such as \"10.0.0.0/8=required\" or \"10.0.0.0/8=off\"")
}

/// Parses a block, or an address as a block of one.
fn parse_block(text: &str) -> Option<IpNet> {
    text.parse()
        .or_else(|_| text.parse::<IpAddr>().map(IpNet::from))
        .ok()
}

fn parse_setting(text: &str) -> Option<ProxyProtocol> {
    match text {
        "required" => Some(ProxyProtocol::Required),
        "off" => Some(ProxyProtocol::Off),
        _ => None,
    }
}
