//! Proofs by DNS updates (RFC 2136), signed with TSIG (RFC 8945).

use std::sync::Arc;
use std::time::{Instant, SystemTime};

use async_trait::async_trait;
use hickory_proto::op::{Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::TXT;
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType, TSigner};

use super::exchange::{Match, exchange};
use super::resolvers::query;
use super::{are_visible, key, records};
use crate::error::AcmeError;
use crate::limits::{DNS_WITHIN, TXT_TTL_SECONDS};
use crate::proof::{ChallengeKind, Proof, Publisher};
use crate::settings::Rfc2136Settings;

/// Publishes proofs by DNS updates.
pub struct Rfc2136 {
    settings: Arc<Rfc2136Settings>,
}

#[derive(Clone, Copy)]
enum Action {
    Add,
    Remove,
}

impl Rfc2136 {
    /// A publisher with these settings. Reads the key at each use, so that a changed file needs no
    /// restart.
    pub fn new(settings: Rfc2136Settings) -> Self {
        Self {
            settings: Arc::new(settings),
        }
    }

    async fn update(&self, proofs: &[Proof], action: Action) -> Result<(), AcmeError> {
        let settings = Arc::clone(&self.settings);
        let proofs = proofs.to_vec();
        blocking(move || {
            let signer = key::read(&settings.key_file, &settings.key_name)?;
            for (name, value) in records(&settings.dns_servers, &proofs)? {
                update(&settings, &signer, &name, &value, action)?;
            }
            Ok(())
        })
        .await
    }
}

#[async_trait]
impl Publisher for Rfc2136 {
    fn kind(&self) -> ChallengeKind {
        ChallengeKind::Dns01
    }

    async fn publish(&self, proofs: &[Proof]) -> Result<(), AcmeError> {
        self.update(proofs, Action::Add).await
    }

    async fn is_visible(&self, proofs: &[Proof]) -> Result<bool, AcmeError> {
        let settings = Arc::clone(&self.settings);
        let proofs = proofs.to_vec();
        blocking(move || {
            let records = records(&settings.dns_servers, &proofs)?;
            let primary = [settings.server];
            let servers = match settings.dns_servers.is_empty() {
                true => &primary[..],
                false => &settings.dns_servers,
            };
            are_visible(servers, &records)
        })
        .await
    }

    async fn withdraw(&self, proofs: &[Proof]) -> Result<(), AcmeError> {
        self.update(proofs, Action::Remove).await
    }
}

/// Runs `work` on a thread that may block.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, AcmeError> + Send + 'static,
) -> Result<T, AcmeError> {
    tokio::task::spawn_blocking(work).await.map_err(|error| {
        AcmeError::proof(format!(
            "publication of a proof: {error}; it is tried again"
        ))
    })?
}

fn update(
    settings: &Rfc2136Settings,
    signer: &TSigner,
    name: &Name,
    value: &str,
    action: Action,
) -> Result<(), AcmeError> {
    let server = settings.server;
    let failed = |reason: String| {
        AcmeError::proof(format!(
            "update of the TXT record of {name} at {server}: {reason}"
        ))
    };
    let zone = match &settings.zone {
        Some(zone) => Name::from_ascii(zone)
            .map(|mut zone| {
                zone.set_fqdn(true);
                zone
            })
            .map_err(|error| {
                AcmeError::proof(format!(
                    "acme.rfc2136.zone: {zone}: {error}; write the name of the zone"
                ))
            })?,
        None => zone_of(server, name).map_err(failed)?,
    };
    if !zone.zone_of(name) {
        return Err(failed(format!(
            "it is not in the zone {zone}; correct acme.rfc2136.zone, or delegate it with a CNAME \
             record to a name in that zone"
        )));
    }
    let mut message = message(zone.clone(), name.clone(), value, action);
    let seconds = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let verifier = message
        .finalize(signer, seconds.unwrap_or_default().as_secs())
        .map_err(|error| {
            failed(format!(
                "it cannot be signed: {error}; check acme.rfc2136.key_file"
            ))
        })?;
    let bytes = message
        .to_vec()
        .map_err(|error| failed(error.to_string()))?;
    let answer =
        exchange(server, &bytes, Match::Id, Instant::now() + DNS_WITHIN).map_err(|error| {
            failed(format!(
                "{error}; check acme.rfc2136.server, and that UDP and TCP reach it"
            ))
        })?;
    let parsed = Message::from_vec(&answer).map_err(|error| failed(error.to_string()))?;
    // A refusal may be unsigned, when the server does not know the key.
    match parsed.metadata.response_code {
        ResponseCode::NoError => {}
        code => return Err(failed(format!("{code}{}", remedy(code, &zone, signer)))),
    }
    let Some(mut verifier) = verifier else {
        return Ok(());
    };
    verifier.verify(&answer).map(drop).map_err(|error| {
        failed(format!(
            "the answer is not signed with the key: {error}; check that the key is that \
                        of the server"
        ))
    })
}

/// The update: the zone in place of the question, the change in place of the authorities (RFC 2136
/// §2).
fn message(zone: Name, name: Name, value: &str, action: Action) -> Message {
    let mut message = Message::query();
    message.metadata.message_type = MessageType::Query;
    message.metadata.op_code = OpCode::Update;
    message.metadata.recursion_desired = false;
    message.add_query(Query::query(zone, RecordType::SOA));
    let text = RData::TXT(TXT::new(vec![value.to_owned()]));
    let mut record = Record::from_rdata(name, TXT_TTL_SECONDS, text);
    if matches!(action, Action::Remove) {
        // Removes this one record of several (RFC 2136 §2.5.4).
        record.dns_class = DNSClass::NONE;
        record.ttl = 0;
    }
    message.add_authority(record);
    message
}

/// The zone of `name` at its primary server, from the SOA record that any answer has.
fn zone_of(server: std::net::SocketAddr, name: &Name) -> Result<Name, String> {
    let answer = query(server, name, RecordType::SOA, Instant::now() + DNS_WITHIN)?;
    let found = answer
        .answers
        .iter()
        .chain(&answer.authorities)
        .find(|record| matches!(record.data, RData::SOA(_)));
    found.map(|record| record.name.clone()).ok_or_else(|| {
        "the server does not say in which zone it is; set acme.rfc2136.zone".to_owned()
    })
}

fn remedy(code: ResponseCode, zone: &Name, signer: &TSigner) -> String {
    let key = signer.signer_name();
    match code {
        ResponseCode::NotAuth => format!(
            "; check that the server has the zone {zone}, knows the key {key} with the same \
             algorithm and secret, and that both clocks are right"
        ),
        ResponseCode::Refused => {
            format!("; allow the key {key} to update it (update-policy of the zone {zone})")
        }
        ResponseCode::NotZone => format!("; correct acme.rfc2136.zone, which is {zone}"),
        _ => "; see the log of the DNS server".to_owned(),
    }
}
