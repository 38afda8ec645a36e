//! Proofs in DNS (DNS-01, RFC 8555 §8.4): where the record of a name is, and whether it is visible.

mod exchange;
mod key;
pub(crate) mod update;

use std::net::{IpAddr, SocketAddr};

use hickory_proto::op::{Message, Query, ResponseCode};
use hickory_proto::rr::{Name, RData, RecordType};

use self::exchange::exchange;
use crate::error::AcmeError;
use crate::limits::CNAMES_MAX;
use crate::proof::Proof;

const RESOLVERS: &str = "/etc/resolv.conf";

/// The record of the proof for `name`: below `_acme-challenge`, or where CNAME records lead from there. Blocks.
pub(crate) fn record_name(servers: &[SocketAddr], name: &str) -> Result<Name, AcmeError> {
    let mut record = Name::from_ascii(format!("_acme-challenge.{name}.")).map_err(|error| {
        AcmeError::proof(format!(
            "DNS name of {name}: {error}; check region and domain"
        ))
    })?;
    let system = system_resolvers();
    let servers = if servers.is_empty() { &system } else { servers };
    for _ in 0..CNAMES_MAX {
        match alias(servers, &record)? {
            Some(next) => record = next,
            None => return Ok(record),
        }
    }
    Err(AcmeError::proof(format!(
        "DNS record _acme-challenge.{name}: more than {CNAMES_MAX} CNAME records follow each other; shorten the chain"
    )))
}

/// The name that `record` is an alias of. Asks one server after the other until one answers.
fn alias(servers: &[SocketAddr], record: &Name) -> Result<Option<Name>, AcmeError> {
    let mut reasons = Vec::new();
    for server in servers {
        match query(*server, record, RecordType::CNAME) {
            Ok(answer) => {
                let target = answer.answers.iter().find_map(|found| match &found.data {
                    RData::CNAME(target) if found.name == *record => Some(target.0.clone()),
                    _ => None,
                });
                return Ok(target);
            }
            Err(reason) => reasons.push(reason),
        }
    }
    Err(AcmeError::proof(format!(
        "CNAME record of {record}: {}; set dns_servers to servers that answer for it",
        reasons.join("; ")
    )))
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
            match query(*server, name, RecordType::TXT) {
                Ok(answer) if shows(&answer, value) => answers += 1,
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

fn shows(answer: &Message, value: &str) -> bool {
    answer.answers.iter().any(|record| match &record.data {
        RData::TXT(text) => text.txt_data.concat() == value.as_bytes(),
        _ => false,
    })
}

/// The records of these proofs. Blocks.
pub(crate) fn records(
    servers: &[SocketAddr],
    proofs: &[Proof],
) -> Result<Vec<(Name, String)>, AcmeError> {
    let record = |proof: &Proof| Ok((record_name(servers, &proof.name)?, proof.value.clone()));
    proofs.iter().map(record).collect()
}

/// The answer of one server that says that a record exists or does not.
fn query(server: SocketAddr, name: &Name, kind: RecordType) -> Result<Message, String> {
    let mut message = Message::query();
    message.add_query(Query::query(name.clone(), kind));
    message.metadata.recursion_desired = true;
    let bytes = message
        .to_vec()
        .map_err(|error| format!("question for {name}: {error}"))?;
    let answer = exchange(server, &bytes).map_err(|error| format!("{server}: {error}"))?;
    let answer = Message::from_vec(&answer).map_err(|error| format!("{server}: {error}"))?;
    match answer.metadata.response_code {
        ResponseCode::NoError | ResponseCode::NXDomain => Ok(answer),
        code => Err(format!("{server}: {code}")),
    }
}

/// The resolvers of the system.
fn system_resolvers() -> Vec<SocketAddr> {
    let text = std::fs::read_to_string(RESOLVERS).unwrap_or_default();
    let found: Vec<SocketAddr> = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("nameserver"))
        .filter_map(|address| address.trim().parse::<IpAddr>().ok())
        .map(|address| SocketAddr::new(address, 53))
        .collect();
    // As resolvers do without an entry (resolv.conf(5)).
    match found.is_empty() {
        true => vec![SocketAddr::from(([127, 0, 0, 1], 53))],
        false => found,
    }
}
