//! Proof in DNS that a customer controls a name: it is an alias of the service, or it has a TXT
//! record with the token of the account.

use std::net::SocketAddr;
use std::time::Instant;

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::{Name, RecordType};

use super::resolvers::{Resolvers, texts};
use crate::error::AcmeError;
use crate::limits::{CNAMES_MAX, DNS_WITHIN, FOUND_TEXT_BYTES_MAX, FOUND_TEXTS_MAX};

/// First label of the name of the TXT record. The domain follows.
pub const TXT_LABEL: &str = "_gw-domain";

/// Result of a look-up that got answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ownership {
    /// The domain is an alias of the service.
    Cname,
    /// The TXT record has the token.
    Txt,
    /// There is neither record: object, cause and remedy.
    NotProved(String),
}

/// Asks `servers`, or the resolvers of the system if there are none, whether the owner of `domain`
/// lets it lead to `alias_of`, by a CNAME record, or knows `token`, by a TXT record. Without
/// `alias_of` only the token is a proof. An error says nothing about the owner: no server answers.
/// Blocks for at most [`DNS_WITHIN`](crate::limits::DNS_WITHIN).
pub fn look_up(
    servers: &[SocketAddr],
    domain: &str,
    alias_of: Option<&str>,
    token: &str,
) -> Result<Ownership, AcmeError> {
    let resolvers = Resolvers::new(servers, Instant::now() + DNS_WITHIN);
    look_up_at(resolvers, domain, alias_of, token)
}

fn look_up_at(
    mut resolvers: Resolvers,
    domain: &str,
    alias_of: Option<&str>,
    token: &str,
) -> Result<Ownership, AcmeError> {
    let service = alias_of.map(name_of).transpose()?;
    let alias = name_of(domain)?;
    let aliases = service
        .as_ref()
        .map(|service| resolvers.aliases(&alias, Some(service)));
    if let (Some(Ok(names)), Some(service)) = (&aliases, &service)
        && names.len() <= CNAMES_MAX
        && names.last() == Some(service)
    {
        return Ok(Ownership::Cname);
    }
    let record = name_of(&format!("{TXT_LABEL}.{domain}"))?;
    let answer = resolvers.ask(&record, RecordType::TXT)?;
    let found = texts(&answer, &record);
    if found.iter().any(|text| text == token.as_bytes()) {
        return Ok(Ownership::Txt);
    }
    let txt = match answer.metadata.response_code {
        ResponseCode::NXDomain => "it does not exist".to_owned(),
        _ => describe_texts(&found),
    };
    let (Some(aliases), Some(service)) = (aliases, service) else {
        return Ok(Ownership::NotProved(format!(
            "{domain}: DNS does not show that it belongs to the account: the TXT record {record} \
             does not have the token ({txt}), and a CNAME record is no proof, because an earlier \
             account had the same id; set this record and wait until the old one's TTL has passed: \
             `{record} TXT \"{token}\"`"
        )));
    };
    // Without an answer about the alias it is unknown whether the name is proved.
    let cname = describe_aliases(&aliases?);
    Ok(Ownership::NotProved(format!(
        "{domain}: DNS does not show that it belongs to the account: {alias} has no CNAME record \
         to {service} ({cname}), and the TXT record {record} does not have the token ({txt}); set \
         one of these records and wait until the old one's TTL has passed: `{alias} CNAME \
         {service}` or `{record} TXT \"{token}\"`"
    )))
}

fn name_of(text: &str) -> Result<Name, AcmeError> {
    let failed = |reason: String| {
        AcmeError::proof(format!(
            "DNS name \"{text}\": {reason}; use a name of at most 63 bytes a label and 253 in all"
        ))
    };
    let mut name = Name::from_ascii(text).map_err(|error| failed(error.to_string()))?;
    name.set_fqdn(true);
    if name.is_root() {
        return Err(failed("it has no label".to_owned()));
    }
    Ok(name)
}

fn describe_aliases(names: &[Name]) -> String {
    match names {
        [] => "there is no CNAME record".to_owned(),
        names if names.len() > CNAMES_MAX => {
            format!("more than {CNAMES_MAX} CNAME records follow each other, or form a circle")
        }
        [.., last] => format!("it leads to {last}"),
    }
}

fn describe_texts(found: &[Vec<u8>]) -> String {
    let shown: Vec<String> = found
        .iter()
        .take(FOUND_TEXTS_MAX)
        .map(|text| {
            let cut = &text[..text.len().min(FOUND_TEXT_BYTES_MAX)];
            let end = if cut.len() < text.len() { "…" } else { "" };
            format!("\"{}{end}\"", cut.escape_ascii())
        })
        .collect();
    match found.len() {
        0 => "there is no TXT record".to_owned(),
        count if count > shown.len() => format!("{count} records, such as {}", shown.join(", ")),
        _ => format!("it has {}", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests;
