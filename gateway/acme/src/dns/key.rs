//! Key of DNS updates (TSIG, RFC 8945), as `tsig-keygen` writes it or in base64.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use hickory_proto::rr::rdata::tsig::TsigAlgorithm;
use hickory_proto::rr::{Name, TSigner};
use zeroize::Zeroizing;

use crate::error::AcmeError;
use crate::limits::KEY_FILE_BYTES_MAX;

/// Longest difference between the clocks of server and gateway, in seconds (RFC 8945 §10).
const FUDGE_SECONDS: u16 = 300;

/// Reads the key that `path` contains.
pub(crate) fn read(path: &Path, key_name: &str) -> Result<TSigner, AcmeError> {
    let failed = |reason: String| {
        AcmeError::proof(format!(
            "acme.rfc2136.key_file: {}: {reason}",
            path.display()
        ))
    };
    let mut text = Zeroizing::new(String::new());
    File::open(path)
        .and_then(|file| file.take(KEY_FILE_BYTES_MAX).read_to_string(&mut text))
        .map_err(|error| {
            failed(format!(
                "cannot be read: {error}; check path and permissions"
            ))
        })?;
    let (algorithm, secret) = parsed(&text, key_name).map_err(failed)?;
    let name = Name::from_ascii(key_name).map_err(|error| {
        AcmeError::proof(format!(
            "acme.rfc2136.key_name: {key_name}: {error}; write the name as in \
                                  the configuration of the DNS server"
        ))
    })?;
    TSigner::new(secret.to_vec(), algorithm, name, FUDGE_SECONDS).map_err(|error| {
        AcmeError::proof(format!(
            "acme.rfc2136.key_file: {}: {error}; use hmac-sha256, hmac-sha384 or hmac-sha512",
            path.display()
        ))
    })
}

/// Algorithm and secret of a file.
fn parsed(text: &str, key_name: &str) -> Result<(TsigAlgorithm, Zeroizing<Vec<u8>>), String> {
    let is_statement = text.contains('{');
    let (algorithm, secret) = if is_statement {
        let name = after(text, "key").ok_or("no `key` in it; write the output of tsig-keygen")?;
        if !name
            .trim_end_matches('.')
            .eq_ignore_ascii_case(key_name.trim_end_matches('.'))
        {
            return Err(format!(
                "it has the key {name}, and acme.rfc2136.key_name is {key_name}; name the same key \
                 in both"
            ));
        }
        let algorithm = after(text, "algorithm").unwrap_or("hmac-sha256");
        let secret =
            after(text, "secret").ok_or("no `secret` in it; write the output of tsig-keygen")?;
        (algorithm, secret)
    } else {
        ("hmac-sha256", text.trim())
    };
    let name = Name::from_ascii(algorithm.to_ascii_lowercase())
        .map_err(|error| format!("algorithm {algorithm}: {error}"))?;
    let secret = BASE64_STANDARD.decode(secret).map_err(|error| {
        format!(
            "its secret is not base64: {error}; write the output of \
                                  tsig-keygen, or the secret alone"
        )
    })?;
    if secret.is_empty() {
        return Err("it is empty; write the output of tsig-keygen, or the secret alone".to_owned());
    }
    Ok((TsigAlgorithm::from_name(name), Zeroizing::new(secret)))
}

/// The word behind `keyword`, without quotation marks.
fn after<'a>(text: &'a str, keyword: &str) -> Option<&'a str> {
    let mut words = text
        .split(|char: char| char.is_whitespace() || "{};\"".contains(char))
        .filter(|word| !word.is_empty());
    words.find(|word| *word == keyword)?;
    words.next()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests stop at the first surprise")]

    use super::*;

    #[test]
    fn a_key_is_read_from_the_output_of_tsig_keygen_or_from_base64() {
        let text = "key \"acme\" {\n\talgorithm hmac-sha512;\n\tsecret \"c2VjcmV0\";\n};\n";
        let (algorithm, secret) = parsed(text, "acme.").unwrap();
        assert_eq!(algorithm, TsigAlgorithm::HmacSha512);
        assert_eq!(*secret, b"secret");
        let (algorithm, secret) = parsed("c2VjcmV0\n", "acme").unwrap();
        assert_eq!(algorithm, TsigAlgorithm::HmacSha256);
        assert_eq!(*secret, b"secret");
    }

    #[test]
    fn a_wrong_file_is_refused_with_a_remedy() {
        let other = parsed("key other { secret c2VjcmV0; };", "acme").unwrap_err();
        assert!(other.contains("name the same key"), "{other}");
        for text in ["", "key acme { algorithm hmac-sha256; };", "not base64!"] {
            let reason = parsed(text, "acme").unwrap_err();
            assert!(reason.contains("tsig-keygen"), "{reason}");
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(
            file.path(),
            "key acme { algorithm hmac-md5; secret c2VjcmV0; };",
        )
        .unwrap();
        let error = read(file.path(), "acme").err().unwrap().to_string();
        assert!(error.contains("use hmac-sha256"), "{error}");
        let error = read(Path::new("/nonexistent"), "acme").err().unwrap();
        assert!(error.message.contains("check path"), "{error}");
    }
}
