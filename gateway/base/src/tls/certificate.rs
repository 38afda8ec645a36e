//! Checks of a server certificate: matching key, names of the region, order of the chain, validity
//! period.

use std::fmt;
use std::path::Path;

use gw_shared::net::tls::{TlsFailure, names, pem};
use rustls::client::verify_server_name;
use rustls::crypto::aws_lc_rs;
use rustls::server::ParsedCertificate;
use rustls::sign::CertifiedKey;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use x509_parser::prelude::{FromDer, X509Certificate};
use x509_parser::public_key::PublicKey;

use crate::clock::Timestamp;
use crate::service::hostname::Region;

/// An example of a tenant label.
pub const TENANT: &str = "doctor--doctor";

/// Names of the configuration keys of a certificate and its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PairKeys {
    /// Key that names the file of the certificate.
    pub certificate: &'static str,
    /// Key that names the file of the private key.
    pub key: &'static str,
}

impl PairKeys {
    /// The pair of the listener for callers and agents.
    pub const CALLERS: Self = Self {
        certificate: "tls_certificate",
        key: "tls_key",
    };
    /// The pair of the admin listener.
    pub const ADMIN: Self = Self {
        certificate: "admin_tls_certificate",
        key: "admin_tls_key",
    };
}

/// A certificate chain, the server's certificate first, and its key.
pub struct Pair {
    /// The certificate of the server, then those of its issuers.
    pub chain: Vec<CertificateDer<'static>>,
    /// The private key of the first certificate.
    pub key: PrivateKeyDer<'static>,
}

/// Reasons why a certificate cannot be served. Each begins with the configuration key it concerns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistakes(pub Vec<String>);

impl fmt::Display for Mistakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("; "))
    }
}

impl std::error::Error for Mistakes {}

/// The validity of a chain: the common validity of all of its certificates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChainValidity {
    /// The validity of a certificate cannot be parsed, or the chain is empty.
    Unreadable,
    /// A certificate is not valid yet.
    NotYet {
        /// Time from which all certificates are valid.
        from: Timestamp,
    },
    /// A certificate has expired.
    Expired {
        /// Earliest expiry in the chain.
        at: Timestamp,
    },
    /// All certificates are valid, up to this time.
    Until(Timestamp),
}

/// Reads the files that `keys` name, and checks that a gateway of `region` can serve them. Without
/// a region, does not check names.
pub fn read_pair(
    keys: PairKeys,
    certificate: &Path,
    key: &Path,
    region: Option<&Region>,
) -> Result<Pair, Mistakes> {
    let chain = pem::read_certificates(certificate);
    let private_key = pem::read_private_key(key);
    let mut mistakes = Vec::new();
    if let Err(error) = &chain {
        mistakes.push(format!(
            "{}: {}: {error}",
            keys.certificate,
            certificate.display()
        ));
    }
    if let Err(error) = &private_key {
        mistakes.push(format!("{}: {}: {error}", keys.key, key.display()));
    }
    if let Ok(chain) = &chain {
        let first = ParsedCertificate::try_from(&chain[0]);
        match (&first, &private_key) {
            (Err(_), _) => mistakes.push(format!(
                "{}: {}: the first certificate cannot be read: it must be X.509 in PEM",
                keys.certificate,
                certificate.display()
            )),
            (Ok(_), Ok(private_key)) => {
                if let Err(error) = check_key(chain, private_key) {
                    mistakes.push(format!(
                        "{}: {}: {error}; it must be the key of the first certificate in {}",
                        keys.key,
                        key.display(),
                        certificate.display()
                    ));
                }
            }
            (Ok(_), Err(_)) => {}
        }
        let missing = region
            .map(|region| missing_names(chain, region))
            .unwrap_or_default();
        if !missing.is_empty() && first.is_ok() {
            mistakes.push(format!(
                "{}: {}: valid for {}, but not for {}; it must be valid for the apex of the region \
                 and every name below it",
                keys.certificate,
                certificate.display(),
                names(&chain[0]).join(", "),
                missing.join(" and ")
            ));
        }
    }
    match (chain, private_key) {
        (Ok(chain), Ok(key)) if mistakes.is_empty() => Ok(Pair { chain, key }),
        _ => Err(Mistakes(mistakes)),
    }
}

impl Pair {
    /// Reads a chain and its key from PEM. Checks that they belong together and [are
    /// quick](is_quick). The reason names neither.
    pub fn from_pem(chain: &str, key: &str) -> Result<Self, String> {
        let chain =
            pem::certificates(chain.as_bytes()).map_err(|error| format!("the chain: {error}"))?;
        let key = pem::private_key(key.as_bytes()).map_err(|error| format!("the key: {error}"))?;
        check_key(&chain, &key).map_err(|error| format!("the key {error}"))?;
        if !is_quick(&chain[0]) {
            let slow = "the key is of a kind with which handshakes take too long";
            return Err(format!("{slow}; {USE_QUICK}"));
        }
        Ok(Self { chain, key })
    }

    pub(crate) fn copy(&self) -> Self {
        Self {
            chain: self.chain.clone(),
            key: self.key.clone_key(),
        }
    }

    /// Why clients that call `host` refuse the certificate; `None` if they do not.
    pub fn does_not_serve(&self, host: &str) -> Option<String> {
        let first = self.chain.first()?;
        if is_authority(first) {
            return Some(format!("{FOUND_AUTHORITY}; {NO_AUTHORITY}"));
        }
        (!is_valid_for(first, host)).then(|| {
            format!(
                "the first certificate is for {}, and not for {host}; use one for {host}",
                names(first).join(", ")
            )
        })
    }

    /// The validity of the first certificate: its start, and its end.
    pub fn first_validity(&self) -> Option<(Timestamp, Timestamp)> {
        let (_, first) = X509Certificate::from_der(self.chain.first()?).ok()?;
        let validity = first.validity();
        Some((
            Timestamp(validity.not_before.timestamp()),
            Timestamp(validity.not_after.timestamp()),
        ))
    }

    /// Defects that some clients refuse although the certificate can be served. `certificate` is
    /// its file.
    pub fn warnings(&self, keys: PairKeys, certificate: &Path, now: Timestamp) -> Vec<String> {
        let kind =
            is_authority(&self.chain[0]).then(|| format!("{FOUND_AUTHORITY}; {NO_AUTHORITY}"));
        let order = first_out_of_order(&self.chain)
            .map(|at| format!("certificate {at} of the file is not issued by the one after it"));
        let time = self.untimely(now);
        let warnings = kind.into_iter().chain(order).chain(time);
        warnings
            .map(|warning| format!("{}: {}: {warning}", keys.certificate, certificate.display()))
            .collect()
    }

    /// Why the chain is not valid at `now`, if it is not.
    pub fn untimely(&self, now: Timestamp) -> Option<String> {
        match validity(&self.chain, now) {
            ChainValidity::Until(_) => None,
            ChainValidity::Unreadable => Some("its validity cannot be read".to_owned()),
            ChainValidity::NotYet { from } => Some(format!(
                "not valid before {from}, and the clock says {now}; set the clock if that is \
                 wrong, or wait"
            )),
            ChainValidity::Expired { at } => Some(format!(
                "expired on {at}, and the clock says {now}; renew it, or set the clock if that is \
                 wrong"
            )),
        }
    }
}

/// Checks that `key` belongs to the first certificate.
pub fn check_key(
    chain: &[CertificateDer<'static>],
    key: &PrivateKeyDer<'static>,
) -> Result<(), String> {
    match CertifiedKey::from_der(
        chain.to_vec(),
        key.clone_key(),
        &aws_lc_rs::default_provider(),
    ) {
        Ok(_) => Ok(()),
        Err(rustls::Error::InconsistentKeys(_)) => Err("does not match the certificate".to_owned()),
        Err(error) => Err(format!("cannot be used: {}", TlsFailure(error))),
    }
}

/// What to do about a certificate that is not [quick](is_quick).
pub const USE_QUICK: &str = "use ECDSA P-256 or P-384, Ed25519, or RSA with 2048 to 4096 bits";

/// Whether handshakes with a certificate that passed [`check_key`] take little time.
pub fn is_quick(certificate: &CertificateDer<'_>) -> bool {
    let parsed = X509Certificate::from_der(certificate).ok();
    match parsed.as_ref().map(|(_, it)| it.public_key().parsed()) {
        Some(Ok(PublicKey::RSA(key))) => (2048..=4096).contains(&key.key_size()),
        Some(Ok(PublicKey::EC(point))) => point.key_size() <= 384,
        // Ed25519: rustls has no other kind.
        Some(Ok(PublicKey::Unknown(_))) => true,
        _ => false,
    }
}

/// The names that the certificate of a gateway of `region` must cover.
pub fn wanted_names(region: &Region) -> [String; 2] {
    [region.apex().to_owned(), format!("*.{}", region.apex())]
}

/// Those of [`wanted_names`] that the first certificate does not cover.
pub fn missing_names(chain: &[CertificateDer<'_>], region: &Region) -> Vec<String> {
    let examples = [
        region.apex().to_owned(),
        format!("{TENANT}.{}", region.apex()),
    ];
    let missing = wanted_names(region)
        .into_iter()
        .zip(examples)
        .filter(|(_, example)| !is_valid_for(&chain[0], example));
    missing.map(|(wanted, _)| wanted).collect()
}

/// Whether a certificate is for this host.
pub(crate) fn is_valid_for(certificate: &CertificateDer<'_>, host: &str) -> bool {
    let parsed = ParsedCertificate::try_from(certificate);
    parsed.is_ok_and(|parsed| {
        ServerName::try_from(host).is_ok_and(|name| verify_server_name(&parsed, &name).is_ok())
    })
}

/// Finding of [`is_authority`].
pub const FOUND_AUTHORITY: &str = "the first certificate is that of an authority (CA:TRUE)";
/// What to do about it.
pub const NO_AUTHORITY: &str = "programs of Gw refuse it unless their ca_file has it: make it \
                                again, with `-addext basicConstraints=critical,CA:FALSE` for \
                                `openssl req -x509`";

/// Whether a certificate is that of an authority (RFC 5280 §4.2.1.9), which is none of a server.
pub fn is_authority(certificate: &CertificateDer<'_>) -> bool {
    let parsed = X509Certificate::from_der(certificate);
    parsed.is_ok_and(|(_, certificate)| certificate.is_ca())
}

/// The number, counted from 1, of the first certificate that is not issued by the one after it.
pub fn first_out_of_order(chain: &[CertificateDer<'_>]) -> Option<usize> {
    let is_issued_by = |pair: &[CertificateDer<'_>]| {
        let parsed = (
            X509Certificate::from_der(&pair[0]),
            X509Certificate::from_der(&pair[1]),
        );
        let (Ok((_, certificate)), Ok((_, issuer))) = parsed else {
            return false;
        };
        certificate.issuer().as_raw() == issuer.subject().as_raw()
            && certificate
                .verify_signature(Some(issuer.public_key()))
                .is_ok()
    };
    chain
        .windows(2)
        .position(|pair| !is_issued_by(pair))
        .map(|at| at + 1)
}

/// The validity of `chain` at `now`.
pub fn validity(chain: &[CertificateDer<'_>], now: Timestamp) -> ChainValidity {
    let of = |certificate: &CertificateDer<'_>| {
        let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
        let validity = certificate.validity();
        Some((
            Timestamp(validity.not_before.timestamp()),
            Timestamp(validity.not_after.timestamp()),
        ))
    };
    let Some(times) = chain.iter().map(of).collect::<Option<Vec<_>>>() else {
        return ChainValidity::Unreadable;
    };
    let from = times.iter().map(|(from, _)| *from).max();
    let until = times.iter().map(|(_, until)| *until).min();
    match (from, until) {
        (_, Some(at)) if at <= now => ChainValidity::Expired { at },
        (Some(from), _) if from > now => ChainValidity::NotYet { from },
        (_, Some(until)) => ChainValidity::Until(until),
        (_, None) => ChainValidity::Unreadable,
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    /// The RSA key of the file is not stored: its certificate is enough.
    const RSA_8192: &str = include_str!("../../../tests/it/data/rsa-8192.pem");

    #[test]
    fn keys_with_slow_handshakes_are_refused_and_name_the_others() {
        let read = |algorithm: &'static rcgen::SignatureAlgorithm| {
            let key = KeyPair::generate_for(algorithm).unwrap();
            let params = CertificateParams::new(["api.customer.test".to_owned()]).unwrap();
            let chain = params.self_signed(&key).unwrap();
            Pair::from_pem(&chain.pem(), &key.serialize_pem()).err()
        };
        for quick in [
            &rcgen::PKCS_ECDSA_P256_SHA256,
            &rcgen::PKCS_ECDSA_P384_SHA384,
            &rcgen::PKCS_ED25519,
            // 2048 bits.
            &rcgen::PKCS_RSA_SHA256,
        ] {
            assert_eq!(read(quick), None);
        }
        let refused = read(&rcgen::PKCS_ECDSA_P521_SHA512).unwrap();
        assert!(refused.contains("RSA with 2048 to 4096 bits"), "{refused}");
        let rsa = pem::certificates(RSA_8192.as_bytes()).unwrap().remove(0);
        assert!(!is_quick(&rsa));
    }
}
