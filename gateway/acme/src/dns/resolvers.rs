//! Questions to the first of several DNS servers that answers, and the records of an answer that
//! count.

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use hickory_proto::op::{Message, Query, ResponseCode};
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};

use super::exchange::{Match, exchange};
use crate::error::AcmeError;
use crate::limits::CNAMES_MAX;

const RESOLVERS: &str = "/etc/resolv.conf";

/// DNS servers that are asked one after the other until one answers.
pub(crate) struct Resolvers {
    /// The next one to ask is first.
    servers: Vec<SocketAddr>,
    /// End of all questions together.
    deadline: Instant,
}

impl Resolvers {
    /// These servers, or those of the system if there are none.
    pub(crate) fn new(servers: &[SocketAddr], deadline: Instant) -> Self {
        Self {
            servers: match servers.is_empty() {
                true => system_resolvers(),
                false => servers.to_vec(),
            },
            deadline,
        }
    }

    /// The answer of the first server that can say whether these records exist. Blocks.
    pub(crate) fn ask(&mut self, name: &Name, kind: RecordType) -> Result<Message, AcmeError> {
        let mut reasons = Vec::new();
        for _ in 0..self.servers.len() {
            let answer = query(self.servers[0], name, kind, self.deadline);
            match answer {
                Ok(answer) if !is_referral(&answer) => return Ok(answer),
                Ok(_) => reasons.push(format!("{}: it is not a resolver", self.servers[0])),
                Err(reason) => reasons.push(reason),
            }
            // The next question begins with a server that answered.
            self.servers.rotate_left(1);
        }
        Err(AcmeError::proof(format!(
            "{kind} record of {name}: {}; set dns_servers to servers that answer for it",
            reasons.join("; ")
        )))
    }

    /// Names that CNAME records lead to from `name`, in their order. Ends with `last`, or after one
    /// more than `CNAMES_MAX`. Blocks.
    pub(crate) fn aliases(
        &mut self,
        name: &Name,
        last: Option<&Name>,
    ) -> Result<Vec<Name>, AcmeError> {
        let mut names: Vec<Name> = Vec::new();
        while names.len() <= CNAMES_MAX {
            let record = names.last().unwrap_or(name);
            let answer = self.ask(record, RecordType::CNAME)?;
            let Some(target) = target(&answer, record) else {
                break;
            };
            let is_last = last == Some(target);
            names.push(target.clone());
            if is_last {
                break;
            }
        }
        Ok(names)
    }
}

/// The answer of one server that says that a record exists or does not.
pub(crate) fn query(
    server: SocketAddr,
    name: &Name,
    kind: RecordType,
    deadline: Instant,
) -> Result<Message, String> {
    // The id is from the generator of the thread, ChaCha with a seed of the system.
    let mut message = Message::query();
    message.add_query(Query::query(name.clone(), kind));
    message.metadata.recursion_desired = true;
    let bytes = message
        .to_vec()
        .map_err(|error| format!("question for {name}: {error}"))?;
    let answer = exchange(server, &bytes, Match::Question, deadline)
        .map_err(|error| format!("{server}: {error}"))?;
    let answer = Message::from_vec(&answer).map_err(|error| format!("{server}: {error}"))?;
    match answer.metadata.response_code {
        ResponseCode::NoError | ResponseCode::NXDomain => Ok(answer),
        code => Err(format!("{server}: {code}")),
    }
}

/// Values of the TXT records at the end of the chain of CNAME records that begins at `name` (RFC
/// 1034 §4.3.2). Records of other names do not count: a server may add any.
pub(crate) fn texts(answer: &Message, name: &Name) -> Vec<Vec<u8>> {
    let mut owner = name;
    for _ in 0..CNAMES_MAX {
        match target(answer, owner) {
            Some(next) => owner = next,
            None => break,
        }
    }
    let text = |record: &Record| match &record.data {
        RData::TXT(text) if is_of(record, owner) => Some(text.txt_data.concat()),
        _ => None,
    };
    answer.answers.iter().filter_map(text).collect()
}

/// The name that `name` is an alias of in this answer.
fn target<'a>(answer: &'a Message, name: &Name) -> Option<&'a Name> {
    answer.answers.iter().find_map(|record| match &record.data {
        RData::CNAME(target) if is_of(record, name) => Some(&target.0),
        _ => None,
    })
}

fn is_of(record: &Record, name: &Name) -> bool {
    record.name == *name && record.dns_class == DNSClass::IN
}

/// Whether the server names other servers instead of an answer (RFC 2308 §2.2), which says nothing
/// about the records.
fn is_referral(answer: &Message) -> bool {
    let has = |kind| {
        let mut kinds = answer.authorities.iter().map(Record::record_type);
        kinds.any(|found| found == kind)
    };
    answer.metadata.response_code == ResponseCode::NoError
        && answer.answers.is_empty()
        && has(RecordType::NS)
        && !has(RecordType::SOA)
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
