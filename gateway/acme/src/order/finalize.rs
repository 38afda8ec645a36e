//! The end of an order: the request of the certificate, and its download.

use gw_base::tls::certificate::Pair;
use gw_shared::identity::secret::Secret;
use instant_acme::Order;
use rcgen::{CertificateParams, DistinguishedName, KeyPair};

use super::{Orders, Progress};
use crate::error::AcmeError;
use crate::state::{GivenUp, OrderState};

impl Orders {
    /// Requests the certificate, with a key that is stored before.
    pub(crate) async fn finalize(
        &self,
        stored: &mut OrderState,
        order: &mut Order,
    ) -> Result<Progress, AcmeError> {
        let Some(key) = &stored.key else {
            let key = KeyPair::generate().map_err(|error| {
                AcmeError::refused(format!(
                    "key of the certificate: {error}; the kernel has to offer random numbers"
                ))
            })?;
            stored.key = Some(Secret::new(key.serialize_pem()));
            return Ok(Progress::Changed);
        };
        let request = signing_request(key, &stored.names).map_err(|error| {
            AcmeError::refused(format!(
                "request of the certificate for {}: {error}; check region and domain",
                stored.names.join(", ")
            ))
        })?;
        order
            .finalize_csr(&request)
            .await
            .map_err(|error| self.failed("request of the certificate", &error))?;
        Ok(self.wait())
    }

    pub(crate) async fn download(
        &self,
        stored: &mut OrderState,
        order: &mut Order,
    ) -> Result<Progress, AcmeError> {
        let chain = order
            .certificate()
            .await
            .map_err(|error| self.failed("the certificate", &error))?;
        let Some(chain) = chain else {
            return Ok(self.wait());
        };
        match check(&chain, stored.key.as_ref()) {
            Ok(()) => stored.chain = Some(chain),
            Err(reason) => {
                stored.given_up = Some(GivenUp {
                    reason: format!(
                        "the certificate at {}: {reason}; it is ordered again",
                        self.settings.directory
                    ),
                    is_refusal: false,
                });
            }
        }
        Ok(Progress::Changed)
    }
}

/// The signing request of a certificate, DER.
fn signing_request(key: &Secret, names: &[String]) -> Result<Vec<u8>, rcgen::Error> {
    let key = KeyPair::from_pem(key.reveal())?;
    let mut parameters = CertificateParams::new(names)?;
    parameters.distinguished_name = DistinguishedName::new();
    Ok(parameters.serialize_request(&key)?.der().to_vec())
}

/// Checks that the chain is for the key.
fn check(chain: &str, key: Option<&Secret>) -> Result<(), String> {
    let key = key.ok_or("its key is not stored")?;
    Pair::from_pem(chain, key.reveal()).map(drop)
}
