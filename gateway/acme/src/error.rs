//! Reasons why an order does not advance. Each says what failed, why, and what to do.

use std::time::Duration;

use gw_shared::net::tls::Remedies;
use http::{StatusCode, Uri};
use instant_acme::Problem;

use crate::limits::{ERROR_BYTES_MAX, RETRY_AFTER_MAX};

/// Reason why an order does not advance.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct AcmeError {
    /// Kind of the failure, which decides when the next attempt begins.
    pub kind: FailureKind,
    /// Object, cause and remedy.
    pub message: String,
    /// Time after which the authority accepts the next attempt, if it said so.
    pub retry_after: Option<Duration>,
}

/// Kind of a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureKind {
    /// The authority does not answer, or answers that it cannot work now. An attempt costs nothing.
    Unreachable,
    /// The authority refuses more requests for now.
    RateLimited,
    /// The authority refuses the account, the order or a proof.
    Refused,
    /// A proof cannot be published.
    Proof,
}

impl AcmeError {
    /// A failure of this kind. A long text is cut.
    pub fn new(kind: FailureKind, message: impl Into<String>) -> Self {
        let mut message: String = message.into();
        if message.len() > ERROR_BYTES_MAX {
            message.truncate(message.floor_char_boundary(ERROR_BYTES_MAX));
            message.push('…');
        }
        Self {
            kind,
            message,
            retry_after: None,
        }
    }

    pub(crate) fn proof(message: impl Into<String>) -> Self {
        Self::new(FailureKind::Proof, message)
    }

    pub(crate) fn refused(message: impl Into<String>) -> Self {
        Self::new(FailureKind::Refused, message)
    }

    pub(crate) fn unreachable(message: impl Into<String>) -> Self {
        Self::new(FailureKind::Unreachable, message)
    }

    pub(crate) fn with_retry_after(mut self, retry_after: Option<Duration>) -> Self {
        self.retry_after = retry_after.map(|time| time.min(RETRY_AFTER_MAX));
        self
    }
}

/// The authority does not answer, or not in its protocol. The text has the remedy.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoAnswer {
    #[error("{0}: {1}; check that the directory is reachable from this machine")]
    Unreachable(Uri, String),
    #[error("{0}: {explained}", explained = REMEDIES.explain(.1))]
    Tls(Uri, rustls::Error),
    #[error("{0}: its answer broke off: {1}; it is tried again")]
    CutOff(Uri, String),
    #[error(
        "{0}: it answered {1}; check acme.directory, and whether a proxy answers in place of the \
         authority"
    )]
    Status(Uri, StatusCode),
}

/// What to do about errors of TLS with an authority.
const REMEDIES: Remedies = Remedies {
    issuer: "set acme.ca_file to a PEM file of the authority's certificate, or of this certificate \
             itself",
    name: "name it by a name of its certificate in acme.directory, or set acme.ca_file to a PEM \
           file of this certificate",
    certificate: "replace it at the directory, or set the clock of this machine",
    client_certificate: "let the directory take requests without one",
    not_tls: "correct host and port in acme.directory",
    other: "check that acme.directory has its port for https",
    versions: "TLS 1.3 and 1.2",
};

/// The failure of an action on `object`.
pub(crate) fn failure(action: &str, directory: &str, error: &instant_acme::Error) -> AcmeError {
    match error {
        instant_acme::Error::Api(problem) => refusal(action, directory, problem),
        instant_acme::Error::Other(error) if error.is::<NoAnswer>() => {
            AcmeError::unreachable(format!("{action} at {directory}: {error}"))
        }
        // An answer that is not JSON comes from something in front of the authority.
        error => AcmeError::unreachable(format!(
            "{action} at {directory}: the answer is not that of an ACME authority: {}; check \
             acme.directory, and whether a proxy answers in its place",
            innermost(error)
        )),
    }
}

/// The failure that a problem document of the authority describes.
pub(crate) fn refusal(action: &str, directory: &str, problem: &Problem) -> AcmeError {
    let name = short_name(problem);
    let (kind, remedy) = match name {
        "rateLimited" => (
            FailureKind::RateLimited,
            "the next attempt waits as the authority asks",
        ),
        "badNonce" | "serverInternal" => (FailureKind::Unreachable, "it is tried again"),
        "userActionRequired" => (
            FailureKind::Refused,
            "follow the link that the authority names",
        ),
        "externalAccountRequired" => (
            FailureKind::Refused,
            "set acme.eab_key_id and acme.eab_key_file to what the authority gave you",
        ),
        "unauthorized" | "dns" | "connection" | "tls" | "incorrectResponse" => (
            FailureKind::Refused,
            "check that the authority reaches the proof: the TXT record below _acme-challenge, or \
             this gateway on port 443",
        ),
        "caa" => (
            FailureKind::Refused,
            "let the CAA records of the domain name this authority",
        ),
        "invalidContact" | "unsupportedContact" => (FailureKind::Refused, "correct acme.contact"),
        "rejectedIdentifier" => (
            FailureKind::Refused,
            "check that region and domain name a domain that this authority issues for",
        ),
        _ if problem.status.is_some_and(|status| status >= 500) => {
            (FailureKind::Unreachable, "it is tried again")
        }
        _ => (
            FailureKind::Refused,
            "see what the authority says, and correct the configuration",
        ),
    };
    let detail = problem.detail.as_deref().unwrap_or("no detail");
    let parts: Vec<String> = problem
        .subproblems
        .iter()
        .map(ToString::to_string)
        .collect();
    let parts = match parts.is_empty() {
        true => String::new(),
        false => format!(": {}", parts.join(", ")),
    };
    AcmeError::new(
        kind,
        format!("{action} at {directory}: {name}: {detail}{parts}; {remedy}"),
    )
}

/// The name of the kind of problem, without the prefix that all have (RFC 8555 §6.7).
pub(crate) fn short_name(problem: &Problem) -> &str {
    let kind = problem.r#type.as_deref().unwrap_or("about:blank");
    kind.strip_prefix("urn:ietf:params:acme:error:")
        .unwrap_or(kind)
}

/// The name of the problem that the authority answered with, if it did.
pub(crate) fn problem_name(error: &instant_acme::Error) -> Option<&str> {
    match error {
        instant_acme::Error::Api(problem) => Some(short_name(problem)),
        _ => None,
    }
}

/// The cause that an error begins with.
pub(crate) fn innermost(error: &(dyn std::error::Error + 'static)) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests stop at the first surprise")]

    use super::*;

    fn problem(kind: &str, status: u16) -> Problem {
        serde_json::from_str(&format!(
            r#"{{"type":"urn:ietf:params:acme:error:{kind}","detail":"because","status":{status}}}"#
        ))
        .unwrap()
    }

    #[test]
    fn a_problem_of_the_authority_names_object_cause_and_remedy() {
        let rows = [
            ("rateLimited", 429, FailureKind::RateLimited, "waits as"),
            ("badNonce", 400, FailureKind::Unreachable, "tried again"),
            ("serverInternal", 500, FailureKind::Unreachable, "tried"),
            ("anything", 503, FailureKind::Unreachable, "tried again"),
            ("caa", 403, FailureKind::Refused, "CAA"),
            ("dns", 400, FailureKind::Refused, "_acme-challenge"),
            (
                "externalAccountRequired",
                403,
                FailureKind::Refused,
                "eab_key_id",
            ),
            ("invalidContact", 400, FailureKind::Refused, "acme.contact"),
        ];
        for (name, status, kind, remedy) in rows {
            let error = refusal("new order", "https://a/dir", &problem(name, status));
            assert_eq!(error.kind, kind, "{name}");
            let begin = format!("new order at https://a/dir: {name}: because; ");
            assert!(error.message.starts_with(&begin), "{error}");
            assert!(error.message.contains(remedy), "{error}");
        }
    }

    #[test]
    fn a_long_text_is_cut_and_a_long_wait_is_bounded() {
        let error = AcmeError::proof("ä".repeat(ERROR_BYTES_MAX));
        assert!(error.message.len() <= ERROR_BYTES_MAX + '…'.len_utf8());
        let error = error.with_retry_after(Some(RETRY_AFTER_MAX * 5));
        assert_eq!(error.retry_after, Some(RETRY_AFTER_MAX));
    }
}
