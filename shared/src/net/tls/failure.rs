//! Errors of TLS in words: what the peer did, and what to do about it. The texts of rustls are
//! names of its enumerations.

use std::time::{Duration, UNIX_EPOCH};
use std::{fmt, io};

use rustls::{AlertDescription, CertificateError, Error, InvalidMessage, PeerIncompatible};
use rustls_pki_types::UnixTime;

use super::trust::{PROVIDER, Untrusted};
use crate::text::error_line;

/// An error of TLS. Its text is the cause, without a remedy. "It" in the text is the peer.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{}", cause(.0))]
pub struct TlsFailure(pub Error);

impl From<TlsFailure> for io::Error {
    fn from(failure: TlsFailure) -> Self {
        Self::new(io::ErrorKind::InvalidData, failure)
    }
}

/// The error of TLS in an I/O error, if that is its cause.
pub fn rustls_error(error: &io::Error) -> Option<&Error> {
    let cause = error.get_ref()?;
    let failure = cause.downcast_ref().map(|TlsFailure(error)| error);
    failure.or_else(|| cause.downcast_ref())
}

/// Replaces the text of an error of TLS by a plain one; returns other errors unchanged.
pub fn in_words(error: io::Error) -> io::Error {
    match rustls_error(&error) {
        Some(failure) => TlsFailure(failure.clone()).into(),
        None => error,
    }
}

/// What an error of TLS is about, as far as remedies differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsProblem {
    /// The peer does not speak TLS.
    NotTls,
    /// The peer's certificate was issued by an authority that is not trusted.
    Issuer,
    /// The peer's certificate, or its site, is for another name.
    Name,
    /// The peer's certificate is not valid at this time.
    Time,
    /// The peer's certificate is refused for another reason.
    Certificate,
    /// The peer wants a client certificate, or refuses the one presented.
    ClientCertificate,
    /// The peer speaks none of the offered application protocols.
    Protocol,
    /// The peer has no TLS version in common.
    Version,
    /// The peer refuses the cipher suites, groups or signatures offered, or for another reason that
    /// it does not tell.
    Ciphers,
    /// All others.
    Other,
}

impl TlsProblem {
    /// Sorts an error.
    pub fn of(error: &Error) -> Self {
        use AlertDescription as Alert;
        use CertificateError as Certificate;
        match error {
            Error::InvalidMessage(InvalidMessage::InvalidContentType) => Self::NotTls,
            Error::InvalidCertificate(reason) => match reason {
                Certificate::UnknownIssuer => Self::Issuer,
                Certificate::Other(other) if other.0.is::<Untrusted>() => Self::Issuer,
                Certificate::NotValidForName | Certificate::NotValidForNameContext { .. } => {
                    Self::Name
                }
                Certificate::Expired
                | Certificate::ExpiredContext { .. }
                | Certificate::NotValidYet
                | Certificate::NotValidYetContext { .. } => Self::Time,
                _ => Self::Certificate,
            },
            Error::AlertReceived(alert) => match alert {
                Alert::UnrecognisedName => Self::Name,
                Alert::ProtocolVersion => Self::Version,
                Alert::HandshakeFailure | Alert::InsufficientSecurity => Self::Ciphers,
                Alert::NoApplicationProtocol => Self::Protocol,
                Alert::CertificateRequired
                | Alert::NoCertificate
                | Alert::BadCertificate
                | Alert::UnsupportedCertificate
                | Alert::CertificateRevoked
                | Alert::CertificateExpired
                | Alert::CertificateUnknown
                | Alert::UnknownCA
                | Alert::AccessDenied => Self::ClientCertificate,
                _ => Self::Other,
            },
            Error::PeerIncompatible(
                PeerIncompatible::ServerDoesNotSupportTls12Or13
                | PeerIncompatible::ServerTlsVersionIsDisabledByOurConfig
                | PeerIncompatible::SupportedVersionsExtensionRequired
                | PeerIncompatible::Tls12NotOffered
                | PeerIncompatible::Tls12NotOfferedOrEnabled,
            ) => Self::Version,
            Error::PeerIncompatible(_) => Self::Ciphers,
            Error::NoApplicationProtocol => Self::Protocol,
            _ => Self::Other,
        }
    }
}

/// What to do about errors of one kind of connection, as clauses that follow the cause.
#[derive(Debug, Clone, Copy)]
pub struct Remedies {
    /// A certificate whose issuer is not trusted.
    pub issuer: &'static str,
    /// A certificate or site of another name.
    pub name: &'static str,
    /// A certificate that is not valid now, or not usable.
    pub certificate: &'static str,
    /// A client certificate that is missing or refused.
    pub client_certificate: &'static str,
    /// A port without TLS.
    pub not_tls: &'static str,
    /// Another protocol, and all that is left.
    pub other: &'static str,
    /// The versions offered.
    pub versions: &'static str,
}

impl Remedies {
    /// Cause and remedy of `error`.
    pub fn explain(&self, error: &Error) -> String {
        let cause = cause(error);
        let versions = self.versions;
        let remedy = match TlsProblem::of(error) {
            TlsProblem::NotTls => self.not_tls,
            TlsProblem::Issuer => self.issuer,
            TlsProblem::Name => self.name,
            TlsProblem::Time | TlsProblem::Certificate => self.certificate,
            TlsProblem::ClientCertificate => self.client_certificate,
            TlsProblem::Protocol | TlsProblem::Other => self.other,
            TlsProblem::Version => {
                return format!("{cause}; allow one there: {versions} are offered");
            }
            TlsProblem::Ciphers => {
                return format!(
                    "{cause}; allow one of these there: {versions} are offered with {}; if it \
                     wants a client certificate, {}",
                    offered(),
                    self.client_certificate
                );
            }
        };
        format!("{cause}; {remedy}")
    }
}

/// The cipher suites and groups of clients.
fn offered() -> String {
    let suites = PROVIDER.cipher_suites.iter();
    let suites = suites.filter_map(|suite| suite.suite().as_str());
    // The names of IANA.
    let mut names: Vec<String> = suites.map(|name| name.replace("TLS13_", "TLS_")).collect();
    let groups = PROVIDER.kx_groups.iter();
    names.extend(groups.filter_map(|group| group.name().as_str().map(str::to_owned)));
    names.join(", ")
}

/// The cause of an error, which may quote the peer: a short line without hidden characters.
fn cause(error: &Error) -> String {
    error_line(&Cause(error))
}

/// The cause of a refused certificate, as [`TlsFailure`] tells it.
pub fn refused_certificate(reason: &CertificateError) -> String {
    cause(&Error::InvalidCertificate(reason.clone()))
}

struct Cause<'a>(&'a Error);

impl fmt::Display for Cause<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Error::InvalidMessage(InvalidMessage::InvalidContentType) => "it does not speak TLS",
            Error::InvalidCertificate(reason) => return certificate(reason, f),
            Error::AlertReceived(received) => return alert(*received, f),
            error if TlsProblem::of(error) == TlsProblem::Version => {
                "it supports none of the TLS versions offered"
            }
            Error::PeerIncompatible(_) => {
                "it supports none of the cipher suites, groups or signatures offered"
            }
            Error::NoApplicationProtocol => "it speaks none of the application protocols offered",
            Error::NoCertificatesPresented => "it has shown no certificate",
            Error::DecryptError | Error::PeerSentOversizedRecord => {
                "a record of it arrived damaged"
            }
            Error::InvalidMessage(_)
            | Error::InappropriateMessage { .. }
            | Error::InappropriateHandshakeMessage { .. }
            | Error::PeerMisbehaved(_) => "what it sent breaks the rules of TLS",
            Error::InconsistentKeys(_) => "the private key is not that of the certificate",
            Error::General(text) => text,
            Error::Other(other) => return fmt::Display::fmt(&other.0, f),
            _ => "TLS cannot work in this process",
        })
    }
}

fn certificate(reason: &CertificateError, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    use CertificateError as Reason;
    f.write_str(match reason {
        Reason::Other(other) if other.0.is::<Untrusted>() => {
            return fmt::Display::fmt(&other.0, f);
        }
        Reason::UnknownIssuer => "its certificate was issued by an authority that is not trusted",
        Reason::NotValidForNameContext {
            expected,
            presented,
        } => {
            let names: Vec<&str> = presented.iter().map(|name| bare(name)).collect();
            let names = match names.is_empty() {
                true => "no name (subjectAltName)".to_owned(),
                false => names.join(", "),
            };
            let expected = expected.to_str();
            return write!(f, "its certificate is for {names}, not for {expected}");
        }
        Reason::NotValidForName => "its certificate is for another name",
        Reason::ExpiredContext { time, not_after } => {
            let (time, not_after) = (date(*time), date(*not_after));
            return write!(
                f,
                "its certificate expired on {not_after}, and the clock of this machine says {time}"
            );
        }
        Reason::NotValidYetContext { time, not_before } => {
            let (time, not_before) = (date(*time), date(*not_before));
            return write!(
                f,
                "its certificate is valid from {not_before} on, and the clock of this machine says \
                 {time}"
            );
        }
        Reason::Expired => "its certificate has expired",
        Reason::NotValidYet => "its certificate is not valid yet",
        Reason::Revoked => "its certificate is revoked",
        Reason::BadSignature => {
            "the signature of its handshake is not by the key of its certificate"
        }
        Reason::InvalidPurpose | Reason::InvalidPurposeContext { .. } => {
            "its certificate is not for servers (extended key usage)"
        }
        Reason::UnsupportedSignatureAlgorithmContext { .. }
        | Reason::UnsupportedSignatureAlgorithmForPublicKeyContext { .. } => {
            "its certificate has a key or signature that is not accepted, such as SHA-1 or RSA of \
             1024 bits"
        }
        Reason::UnhandledCriticalExtension => {
            "its certificate has a critical extension that is not known here"
        }
        Reason::BadEncoding => "its certificate is not X.509 of version 3",
        _ => "its certificate does not follow the rules of X.509",
    })
}

/// The name in a description such as `DnsName("gw.example.com")`.
fn bare(name: &str) -> &str {
    let inner = name
        .split_once('(')
        .map_or(name, |(_, rest)| rest.trim_end_matches(')'));
    inner.trim_matches('"')
}

fn date(time: UnixTime) -> String {
    // Certificates end in 9999 at the latest, as dates of HTTP do.
    httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs(time.as_secs().min(253_402_300_799)))
}

fn alert(received: AlertDescription, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    use AlertDescription as Alert;
    let cause = match received {
        Alert::ProtocolVersion => "it supports none of the TLS versions offered",
        Alert::HandshakeFailure | Alert::InsufficientSecurity => {
            "it accepts nothing of what the handshake offered"
        }
        Alert::UnrecognisedName => "it has no site of the name that was asked for",
        Alert::NoApplicationProtocol => "it speaks none of the application protocols offered",
        Alert::CertificateRequired | Alert::NoCertificate => "it requires a client certificate",
        Alert::CertificateExpired => "it refuses the certificate presented to it as expired",
        Alert::CertificateRevoked => "it refuses the certificate presented to it as revoked",
        Alert::UnknownCA => {
            "it refuses the certificate presented to it, whose issuer it does not trust"
        }
        Alert::BadCertificate
        | Alert::UnsupportedCertificate
        | Alert::CertificateUnknown
        | Alert::AccessDenied => "it refuses the certificate presented to it",
        Alert::InternalError => "it reports an error of its own",
        _ => "it ended TLS",
    };
    write!(f, "{cause} (alert {} of TLS)", u8::from(received))
}

#[cfg(test)]
mod tests {
    use super::*;

    const REMEDIES: Remedies = Remedies {
        issuer: "<issuer>",
        name: "<name>",
        certificate: "<certificate>",
        client_certificate: "<client certificate>",
        not_tls: "<not tls>",
        other: "<other>",
        versions: "TLS 1.3 and 1.2",
    };

    #[test]
    fn an_alert_is_told_by_its_cause_and_number_with_a_remedy() {
        for number in 0..=u8::MAX {
            let alert = AlertDescription::from(number);
            let text = REMEDIES.explain(&Error::AlertReceived(alert));
            assert!(
                text.contains(&format!("(alert {number} of TLS); ")),
                "{text}"
            );
            let name = format!("{alert:?}");
            assert!(!text.contains(&name), "{name}: {text}");
        }
        for (number, remedy) in [
            (40, "TLS 1.3 and 1.2 are offered with TLS_AES_"),
            (40, "if it wants a client certificate, <client certificate>"),
            (40, ", X25519"),
            (48, "<client certificate>"),
            (70, "allow one there: TLS 1.3 and 1.2 are offered"),
            (112, "<name>"),
            (116, "<client certificate>"),
            (120, "<other>"),
        ] {
            let error = Error::AlertReceived(AlertDescription::from(number));
            let text = REMEDIES.explain(&error);
            assert!(text.contains(remedy), "{number}: {text}");
        }
    }

    #[test]
    fn an_error_of_a_certificate_has_its_names_and_dates() {
        let at = |seconds| UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        let name = |presented: &[&str]| CertificateError::NotValidForNameContext {
            expected: "a.example".try_into().unwrap(),
            presented: presented.iter().map(|name| (*name).to_owned()).collect(),
        };
        for (reason, text) in [
            (
                name(&["DnsName(\"b.example\")", "IpAddress(127.0.0.1)"]),
                "its certificate is for b.example, 127.0.0.1, not for a.example; <name>",
            ),
            (
                name(&[]),
                "its certificate is for no name (subjectAltName), not for a.example; <name>",
            ),
            (
                CertificateError::ExpiredContext {
                    time: at(86_400),
                    not_after: at(0),
                },
                "its certificate expired on Thu, 01 Jan 1970 00:00:00 GMT, and the clock of this \
                 machine says Fri, 02 Jan 1970 00:00:00 GMT; <certificate>",
            ),
            (
                CertificateError::BadSignature,
                "the signature of its handshake is not by the key of its certificate; \
                 <certificate>",
            ),
        ] {
            assert_eq!(REMEDIES.explain(&reason.into()), text);
        }
    }

    #[test]
    fn the_cause_of_an_io_error_is_found() {
        let failure = io::Error::from(TlsFailure(Error::DecryptError));
        assert_eq!(rustls_error(&failure), Some(&Error::DecryptError));
        assert_eq!(failure.to_string(), "a record of it arrived damaged");
        let of_rustls = io::Error::other(Error::DecryptError);
        assert_eq!(rustls_error(&of_rustls), Some(&Error::DecryptError));
        assert_eq!(rustls_error(&io::Error::other("reset")), None);
    }
}
