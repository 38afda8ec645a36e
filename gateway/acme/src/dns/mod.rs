//! Proofs in DNS (DNS-01, RFC 8555 §8.4): where the record of a name is, and whether it is visible.
//! Proofs that a name belongs to an account: `ownership`.

mod exchange;
mod key;
pub mod ownership;
mod resolvers;
pub(crate) mod update;

use std::net::SocketAddr;
use std::time::Instant;

use hickory_proto::rr::{Name, RecordType};

use self::resolvers::{Resolvers, query, texts};
use crate::error::AcmeError;
use crate::limits::{CNAMES_MAX, DNS_WITHIN};
use crate::proof::Proof;

/// The record of the proof for `name`: below `_acme-challenge`, or where CNAME records lead from
/// there. Blocks.
pub(crate) fn record_name(servers: &[SocketAddr], name: &str) -> Result<Name, AcmeError> {
    let record = Name::from_ascii(format!("_acme-challenge.{name}.")).map_err(|error| {
        AcmeError::proof(format!(
            "DNS name of {name}: {error}; check region and domain"
        ))
    })?;
    let mut resolvers = Resolvers::new(servers, Instant::now() + DNS_WITHIN);
    let mut names = resolvers.aliases(&record, None)?;
    if names.len() > CNAMES_MAX {
        return Err(AcmeError::proof(format!(
            "DNS record _acme-challenge.{name}: more than {CNAMES_MAX} CNAME records follow each \
             other; shorten the chain"
        )));
    }
    Ok(names.pop().unwrap_or(record))
}

/// Whether all `servers` that answer for these records show them. Blocks.
pub(crate) fn are_visible(
    servers: &[SocketAddr],
    records: &[(Name, String)],
) -> Result<bool, AcmeError> {
    for (name, value) in records {
        let mut answers = 0;
        let mut reasons = Vec::new();
        for server in servers {
            let deadline = Instant::now() + DNS_WITHIN;
            match query(*server, name, RecordType::TXT, deadline) {
                Ok(answer) if texts(&answer, name).contains(&value.clone().into_bytes()) => {
                    answers += 1;
                }
                Ok(_) => return Ok(false),
                Err(reason) => reasons.push(reason),
            }
        }
        if answers == 0 && !reasons.is_empty() {
            return Err(AcmeError::proof(format!(
                "TXT record of {name}: {}; check dns_servers",
                reasons.join("; ")
            )));
        }
    }
    Ok(true)
}

/// The records of these proofs. Blocks.
pub(crate) fn records(
    servers: &[SocketAddr],
    proofs: &[Proof],
) -> Result<Vec<(Name, String)>, AcmeError> {
    let record = |proof: &Proof| Ok((record_name(servers, &proof.name)?, proof.value.clone()));
    proofs.iter().map(record).collect()
}
