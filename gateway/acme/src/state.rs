//! What is stored of an account, its order and its certificate. The caller stores it sealed after
//! each change.

use gw_base::clock::Timestamp;
use gw_shared::identity::secret::{Secret, revealed, revealed_if_present};
use gw_shared::version::later_members::LaterMembers;
use instant_acme::CertificateIdentifier;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use serde::{Deserialize, Serialize};

use crate::proof::Proof;

/// The stored state: all that a process needs to go on where another one stopped.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct State {
    /// The account, from the moment in which its key exists.
    #[serde(default)]
    pub account: Option<AccountState>,
    /// The order that is under way.
    #[serde(default)]
    pub order: Option<OrderState>,
    /// The certificate that was issued last.
    #[serde(default)]
    pub certificate: Option<Certificate>,
    /// Proofs of earlier orders that could not be withdrawn.
    #[serde(default)]
    pub leftovers: Vec<Proof>,
    /// Members that a later version has added.
    #[serde(flatten)]
    pub later: LaterMembers,
}

/// An account at an authority.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AccountState {
    /// The directory of the authority.
    pub directory: String,
    /// The private key, PKCS#8 in base64. It is stored before the authority learns of it.
    #[serde(with = "revealed")]
    pub key: Secret,
    /// URL of the account. Missing until the authority has registered it.
    #[serde(default)]
    pub url: Option<String>,
}

/// An order that is under way.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct OrderState {
    /// Names of the certificate.
    pub names: Vec<String>,
    /// Start of the order.
    pub began: Timestamp,
    /// URL of the order.
    pub url: String,
    /// The directory of the authority. Empty in states of earlier versions.
    #[serde(default)]
    pub directory: String,
    /// Proofs that are, or may be, published.
    #[serde(default)]
    pub proofs: Vec<Proof>,
    /// Time of the publication.
    #[serde(default)]
    pub published: Option<Timestamp>,
    /// Whether the proofs were seen, so that the authority may look.
    #[serde(default)]
    pub is_visible: bool,
    /// The private key of the certificate, PEM. It is stored before the authority gets the request.
    #[serde(default, with = "revealed_if_present")]
    pub key: Option<Secret>,
    /// The chain that the authority issued, PEM.
    #[serde(default)]
    pub chain: Option<String>,
    /// Reason why the order is given up. Its proofs are withdrawn next.
    #[serde(default)]
    pub given_up: Option<GivenUp>,
}

/// Reason why an order is given up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GivenUp {
    /// Object, cause and remedy.
    pub reason: String,
    /// Whether it is the failure of a proof or of the authority's check of it.
    pub is_refusal: bool,
}

/// An issued certificate.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Certificate {
    /// Names that were ordered.
    pub names: Vec<String>,
    /// The chain, PEM, the certificate of the server first.
    pub chain: String,
    /// The private key, PEM.
    #[serde(with = "revealed")]
    pub key: Secret,
    /// Time at which it was received.
    pub received: Timestamp,
}

impl Certificate {
    /// What names it to the authority (RFC 9773 §4.1). `None` if it does not say by which key it is
    /// signed.
    pub(crate) fn id(&self) -> Option<CertificateIdentifier<'static>> {
        let mut chain = CertificateDer::pem_slice_iter(self.chain.as_bytes());
        let first = chain.next()?.ok()?;
        let id = CertificateIdentifier::try_from(&first).ok()?;
        Some(id.into_owned())
    }
}
