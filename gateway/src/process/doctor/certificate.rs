//! Checks of the certificates that the gateway presents.

use std::path::Path;
use std::time::Duration;

use gw_base::clock::Timestamp;
use gw_base::service::hostname::Region;
use gw_base::tls::certificate::{self, ChainValidity, PairKeys};
use gw_shared::doctor::Examination;
use gw_shared::net::tls::{self, pem};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

/// Remaining validity below which a certificate causes a warning.
const EXPIRES_SOON: Duration = Duration::from_hours(14 * 24);

/// Checks the files of a certificate and its key.
pub(super) fn pair_of_files(
    out: &mut Examination,
    check: &str,
    keys: PairKeys,
    certificate: &Path,
    key: &Path,
    region: Option<&Region>,
) {
    match (
        pem::read_certificates(certificate),
        pem::read_private_key(key),
    ) {
        (Ok(chain), Ok(key)) => {
            server_certificate(out, check, keys, &chain, &key, region, Timestamp::now());
        }
        (chain, private_key) => {
            let chain = chain
                .err()
                .map(|error| format!("{}: {error}", certificate.display()));
            let private_key = private_key
                .err()
                .map(|error| format!("{}: {error}", key.display()));
            let errors: Vec<String> = chain.into_iter().chain(private_key).collect();
            let advice = format!(
                "{} and {} name PEM files that the gateway's user can read",
                keys.certificate, keys.key
            );
            out.failed(check, errors.join("; "), advice);
        }
    }
}

/// Checks that clients accept the certificate: key, names of the region if it must have them, order
/// of the chain, and validity at `now`.
fn server_certificate(
    out: &mut Examination,
    check: &str,
    keys: PairKeys,
    chain: &[CertificateDer<'static>],
    key: &PrivateKeyDer<'static>,
    region: Option<&Region>,
    now: Timestamp,
) {
    let part = |part: &str| format!("{check}: {part}");
    match certificate::check_key(chain, key) {
        Ok(()) if !certificate::is_quick(&chain[0]) => {
            let found = "handshakes with it delay other connections";
            out.warning(part("key"), found, certificate::USE_QUICK);
        }
        Ok(()) => out.ok(part("key"), "the key matches the certificate"),
        Err(error) => {
            let advice = format!("set {} to the key of the first certificate", keys.key);
            out.failed(part("key"), error, advice);
        }
    }
    names(out, &part("names"), chain, region);
    order(out, &part("chain"), chain);
    validity(out, &part("time"), keys, chain, now);
}

fn names(
    out: &mut Examination,
    check: &str,
    chain: &[CertificateDer<'static>],
    region: Option<&Region>,
) {
    let Some(region) = region else {
        let names = tls::names(&chain[0]).join(", ");
        return out.ok(check, format!("valid for {names}"));
    };
    let missing = certificate::missing_names(chain, region);
    if missing.is_empty() {
        let names = certificate::wanted_names(region).join(" and ");
        out.ok(check, format!("valid for {names}"));
    } else {
        out.failed(
            check,
            format!("not valid for {}", missing.join(" and ")),
            "have it issued for the apex and the wildcard below it",
        );
    }
}

fn order(out: &mut Examination, check: &str, chain: &[CertificateDer<'static>]) {
    match certificate::first_out_of_order(chain) {
        _ if certificate::is_authority(&chain[0]) => out.failed(
            check,
            certificate::FOUND_AUTHORITY,
            certificate::NO_AUTHORITY,
        ),
        None if chain.len() == 1 => out.warning(
            check,
            "one certificate",
            "enough if callers trust its issuer; otherwise append the intermediate certificates",
        ),
        None => {
            let found = format!("{} certificates, each issued by the next", chain.len());
            out.ok(check, found);
        }
        Some(at) => out.failed(
            check,
            format!("certificate {at} of the file is not issued by the one after it"),
            "order the file: the certificate of the server first, then each issuer; the root may \
             be omitted",
        ),
    }
}

fn validity(
    out: &mut Examination,
    check: &str,
    keys: PairKeys,
    chain: &[CertificateDer<'static>],
    now: Timestamp,
) {
    const RENEW: &str = "renew it, then send SIGHUP (systemctl reload) to the gateway";
    match certificate::validity(chain, now) {
        ChainValidity::Unreadable => {
            let advice = format!("{} must be X.509 in PEM", keys.certificate);
            out.failed(check, "cannot be parsed", advice);
        }
        ChainValidity::Expired { at } => out.failed(check, format!("expired on {at}"), RENEW),
        ChainValidity::NotYet { from } => out.failed(
            check,
            format!("not valid before {from}"),
            "set the clock, or wait until then",
        ),
        ChainValidity::Until(until) if until.since(now) < EXPIRES_SOON => {
            out.warning(check, format!("expires on {until}"), RENEW);
        }
        ChainValidity::Until(until) => out.ok(check, format!("valid until {until}")),
    }
}

#[cfg(test)]
mod tests {
    use gw_shared::doctor::Verdict;
    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};

    use super::super::tests::verdicts;
    use super::*;

    /// A chain of the certificate for `names`, an intermediate and the root; and the key.
    fn chain(names: &[&str]) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        let authority = |name: &str| {
            let mut params = CertificateParams::default();
            params
                .distinguished_name
                .push(rcgen::DnType::CommonName, name);
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params
        };
        let root = authority("root");
        let between = authority("between");
        let root_key = KeyPair::generate().unwrap();
        let between_key = KeyPair::generate().unwrap();
        let key = KeyPair::generate().unwrap();
        let root_der = root.self_signed(&root_key).unwrap().der().clone();
        let between_der = between
            .signed_by(&between_key, &Issuer::new(root, root_key))
            .unwrap()
            .der()
            .clone();
        let mut leaf =
            CertificateParams::new(names.iter().map(ToString::to_string).collect::<Vec<_>>())
                .unwrap();
        leaf.not_after = date_time_ymd(2030, 1, 1);
        let leaf = leaf
            .signed_by(&key, &Issuer::new(between, between_key))
            .unwrap()
            .der()
            .clone();
        (vec![leaf, between_der, root_der], PrivateKeyDer::from(key))
    }

    const NAMES: [&str; 2] = ["eu1.example.com", "*.eu1.example.com"];
    const IN_2029: Timestamp = Timestamp(1_861_920_000);

    #[test]
    fn key_names_order_and_validity_of_a_certificate_are_checked() {
        let (chain, key) = chain(&NAMES);
        let region = Region::new("eu1", "example.com");
        let of = |chain: &[CertificateDer<'static>], region: &Region, now| {
            verdicts(|out| {
                server_certificate(
                    out,
                    "certificate",
                    PairKeys::CALLERS,
                    chain,
                    &key,
                    Some(region),
                    now,
                );
            })
            .into_values()
            .collect::<Vec<_>>()
        };
        use Verdict::{Failed, Ok, Warning};
        // Chain, key, names, time.
        assert_eq!(of(&chain, &region, IN_2029), [Ok, Ok, Ok, Ok]);
        assert_eq!(of(&chain[..1], &region, IN_2029), [Warning, Ok, Ok, Ok]);
        let swapped = [chain[0].clone(), chain[2].clone(), chain[1].clone()];
        assert_eq!(of(&swapped, &region, IN_2029), [Failed, Ok, Ok, Ok]);
        assert_eq!(
            of(&chain, &Region::new("eu2", "example.com"), IN_2029),
            [Ok, Ok, Failed, Ok]
        );
        assert_eq!(
            of(&chain, &region, Timestamp(1_893_456_000 - 86_400)),
            [Ok, Ok, Ok, Warning]
        );
        assert_eq!(
            of(&chain, &region, Timestamp(1_893_456_000)),
            [Ok, Ok, Ok, Failed]
        );
        // Certificates of rcgen are valid from 1975.
        assert_eq!(of(&chain, &region, Timestamp(0)), [Ok, Ok, Ok, Failed]);
        let other = PrivateKeyDer::from(KeyPair::generate().unwrap());
        let found = verdicts(|out| {
            server_certificate(
                out,
                "certificate",
                PairKeys::CALLERS,
                &chain,
                &other,
                Some(&region),
                IN_2029,
            );
        });
        assert_eq!(found["certificate: key"], Failed);
        let found = verdicts(|out| order(out, "chain", &chain[1..]));
        assert_eq!(found["chain"], Failed);
    }

    #[test]
    fn a_key_with_slow_handshakes_causes_a_warning() {
        let key = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P521_SHA512).unwrap();
        let params = CertificateParams::new(NAMES.map(str::to_owned)).unwrap();
        let chain = [params.self_signed(&key).unwrap().der().clone()];
        let region = Region::new("eu1", "example.com");
        let key = PrivateKeyDer::from(key);
        let (keys, now) = (PairKeys::CALLERS, IN_2029);
        let found = verdicts(|out| {
            server_certificate(out, "certificate", keys, &chain, &key, Some(&region), now);
        });
        assert_eq!(found["certificate: key"], Verdict::Warning);
        assert_eq!(found["certificate: names"], Verdict::Ok);
    }

    #[test]
    fn a_certificate_must_be_valid_for_the_apex_and_its_wildcard() {
        let (chain, key) = chain(&NAMES[..1]);
        let mut out = Examination::default();
        let region = Region::new("eu1", "example.com");
        server_certificate(
            &mut out,
            "certificate",
            PairKeys::CALLERS,
            &chain,
            &key,
            Some(&region),
            IN_2029,
        );
        let names = out
            .checks()
            .iter()
            .find(|finding| finding.check == "certificate: names")
            .unwrap();
        assert_eq!(
            (names.verdict, names.found.as_str()),
            (Verdict::Failed, "not valid for *.eu1.example.com")
        );
    }
}
