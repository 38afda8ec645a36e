//! PEM files of certificates and keys.

use std::path::Path;

use rustls_pki_types::pem::{self, PemObject};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use zeroize::Zeroizing;

use crate::files;

/// Reads a PEM file with at least one certificate. The error does not name the file.
pub fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    certificates(&read(path)?)
}

/// Parses a PEM text with at least one certificate.
pub fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let found = CertificateDer::pem_slice_iter(without_mark(pem)).collect::<Result<Vec<_>, _>>();
    match found {
        Ok(found) if found.is_empty() => Err(
            "no certificate in it; it must be a PEM file of certificates (`BEGIN CERTIFICATE`)"
                .to_owned(),
        ),
        Ok(found) => Ok(found),
        Err(error) => Err(format!("not PEM: {error}; write the file again")),
    }
}

/// Reads a PEM file with a private key. The error does not name the file.
pub fn read_private_key(path: &Path) -> Result<PrivateKeyDer<'static>, String> {
    private_key(&Zeroizing::new(read(path)?))
}

/// Parses a PEM text with a private key.
pub fn private_key(pem: &[u8]) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_slice(without_mark(pem)).map_err(|error| match error {
        pem::Error::NoItemsFound => {
            "no private key in it; it must be a PEM file with a key that is not encrypted"
                .to_owned()
        }
        error => format!("not PEM: {error}; write the file again"),
    })
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|error| files::unreadable(path, &error))
}

/// The text behind a byte-order mark, which editors write and which hides the first line from
/// parsers.
fn without_mark(text: &[u8]) -> &[u8] {
    text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_order_mark_is_skipped() {
        let pair = rcgen::generate_simple_self_signed(["a.example".to_owned()]).unwrap();
        let marked = |text: String| format!("\u{feff}{text}").into_bytes();
        let found = certificates(&marked(pair.cert.pem())).unwrap();
        assert_eq!(found, [pair.cert.der().clone()]);
        let key = private_key(&marked(pair.signing_key.serialize_pem())).unwrap();
        assert_eq!(key.secret_der(), pair.signing_key.serialize_der());
        let error = certificates(b"\xef\xbb\xbf").unwrap_err();
        assert!(error.starts_with("no certificate in it"), "{error}");
    }
}
