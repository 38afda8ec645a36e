//! The end of an order: the request of the certificate, and its download.

use gw_base::tls::certificate::Pair;
use gw_shared::identity::secret::Secret;
use instant_acme::Order;
use rcgen::{CertificateParams, DistinguishedName, KeyPair, PKCS_ECDSA_P256_SHA256};

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
            let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(|error| {
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
        match check(&chain, stored.key.as_ref(), &stored.names) {
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

/// Checks that the chain is for the key and the names.
fn check(chain: &str, key: Option<&Secret>, names: &[String]) -> Result<(), String> {
    let key = key.ok_or("its key is not stored")?;
    let pair = Pair::from_pem(chain, key.reveal())?;
    // A wildcard is valid for each label in its place.
    let mut called = names.iter().map(|name| name.replace('*', "any"));
    match called.find_map(|name| pair.does_not_serve(&name)) {
        Some(problem) => Err(problem),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_for_another_key_or_without_a_name_is_refused() {
        let names = ["eu1.example.test", "*.eu1.example.test"].map(str::to_owned);
        let new_key = || KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
        let key = new_key();
        let chain = |names: &[String]| {
            let parameters = CertificateParams::new(names).unwrap();
            parameters.self_signed(&key).unwrap().pem()
        };
        let stored = Secret::new(key.serialize_pem());
        let checked = |chain: &str, key: &Secret| check(chain, Some(key), &names);
        assert_eq!(checked(&chain(&names), &stored), Ok(()));
        let other = Secret::new(new_key().serialize_pem());
        assert!(checked(&chain(&names), &other).is_err());
        for missing in [&names[..1], &names[1..], &["other.test".to_owned()]] {
            let refused = checked(&chain(missing), &stored).unwrap_err();
            assert!(refused.contains("and not for"), "{refused}");
        }
    }
}
