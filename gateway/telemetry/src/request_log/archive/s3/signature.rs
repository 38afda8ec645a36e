//! Signatures of requests to S3: AWS Signature Version 4 in the header `Authorization`.
//!
//! Written here because the libraries that sign take long to build or sign less: `rusty-s3` 0.11
//! brings `url` and `jiff` (22 s of one core), signs no content, and puts the session token in
//! URLs.

use std::collections::BTreeMap;

use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::hmac;
use gw_shared::identity::secret::Secret;
use gw_shared::text::hexadecimal;
use http::Method;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use time::OffsetDateTime;

const ALGORITHM: &str = "AWS4-HMAC-SHA256";
/// Bytes that are escaped in a value of a query: all but those that RFC 3986 calls unreserved.
const ESCAPED: AsciiSet = NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');
const ESCAPED_IN_PATH: AsciiSet = ESCAPED.remove(b'/');

#[derive(Clone)]
pub(super) struct Credentials {
    pub(super) access_key_id: String,
    pub(super) secret_key: Secret,
    pub(super) session_token: Option<Secret>,
    /// Region of the bucket.
    pub(super) region: String,
}

/// Request to sign.
pub(super) struct Request<'a> {
    pub(super) method: Method,
    /// Escaped, with the `/` at its beginning.
    pub(super) path: String,
    /// Parameters, not escaped.
    pub(super) query: BTreeMap<&'static str, &'a str>,
    /// Fields with lower-case names, `host` among them.
    pub(super) headers: BTreeMap<&'static str, String>,
    pub(super) content: &'a [u8],
}

impl Request<'_> {
    /// Path and query, as they are sent.
    pub(super) fn target(&self) -> String {
        match self.query.is_empty() {
            true => self.path.clone(),
            false => format!("{}?{}", self.path, self.escaped_query()),
        }
    }

    fn escaped_query(&self) -> String {
        let parameters = self.query.iter().map(|(name, value)| {
            let [name, value] = [name, value].map(|text| utf8_percent_encode(text, &ESCAPED));
            format!("{name}={value}")
        });
        parameters.collect::<Vec<_>>().join("&")
    }

    fn canonical(&self, content_hash: &str) -> String {
        let Self { method, path, .. } = self;
        let mut text = format!("{method}\n{path}\n{}\n", self.escaped_query());
        for (name, value) in &self.headers {
            text += &format!("{name}:{}\n", value.trim());
        }
        text + &format!("\n{}\n{content_hash}", self.signed_headers())
    }

    fn signed_headers(&self) -> String {
        let names: Vec<&str> = self.headers.keys().copied().collect();
        names.join(";")
    }
}

impl Credentials {
    /// Adds the fields of the signature, which covers method, target, content and all fields.
    pub(super) fn sign(&self, request: &mut Request<'_>, at: OffsetDateTime) {
        let day = format!("{:04}{:02}{:02}", at.year(), u8::from(at.month()), at.day());
        let second = format!(
            "{day}T{:02}{:02}{:02}Z",
            at.hour(),
            at.minute(),
            at.second()
        );
        let content_hash = hash(request.content);
        let headers = &mut request.headers;
        headers.insert("x-amz-content-sha256", content_hash.clone());
        headers.insert("x-amz-date", second.clone());
        if let Some(token) = &self.session_token {
            headers.insert("x-amz-security-token", token.reveal().to_owned());
        }
        let scope = format!("{day}/{}/s3/aws4_request", self.region);
        let canonical = hash(request.canonical(&content_hash).as_bytes());
        let text = format!("{ALGORITHM}\n{second}\n{scope}\n{canonical}");
        let signature = hexadecimal(hmac::sign(&self.key(&day), text.as_bytes()).as_ref());
        let authorization = format!(
            "{ALGORITHM} Credential={}/{scope}, SignedHeaders={}, Signature={signature}",
            self.access_key_id,
            request.signed_headers()
        );
        request.headers.insert("authorization", authorization);
    }

    /// Derives the key of a day.
    fn key(&self, day: &str) -> hmac::Key {
        let secret = Secret::new(format!("AWS4{}", self.secret_key.reveal()));
        let key = |bytes: &[u8]| hmac::Key::new(hmac::HMAC_SHA256, bytes);
        let parts = [day, &self.region, "s3", "aws4_request"];
        let first = key(secret.reveal().as_bytes());
        parts.iter().fold(first, |above, part| {
            key(hmac::sign(&above, part.as_bytes()).as_ref())
        })
    }
}

/// Escapes the name of an object for the path of a URL.
pub(super) fn escaped(name: &str) -> String {
    utf8_percent_encode(name, &ESCAPED_IN_PATH).to_string()
}

fn hash(bytes: &[u8]) -> String {
    hexadecimal(digest(&SHA256, bytes).as_ref())
}

#[cfg(test)]
mod tests {
    use time::macros::datetime;

    use super::*;

    /// Signs as the examples of "Signature calculations for the authorization header" of Amazon S3
    /// do.
    fn signature(
        method: Method,
        name: &str,
        query: &[(&'static str, &'static str)],
        headers: &[(&'static str, &str)],
        content: &[u8],
    ) -> String {
        let headers = [&[("host", "examplebucket.s3.amazonaws.com")], headers].concat();
        let mut request = Request {
            method,
            path: escaped(name),
            query: query.iter().copied().collect(),
            headers: headers
                .into_iter()
                .map(|(name, value)| (name, value.to_owned()))
                .collect(),
            content,
        };
        credentials(None).sign(&mut request, datetime!(2013-05-24 00:00 UTC));
        let authorization = &request.headers["authorization"];
        let start = "AWS4-HMAC-SHA256 \
                     Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, \
                     SignedHeaders=";
        assert!(authorization.starts_with(start), "{authorization}");
        authorization
            .rsplit_once("Signature=")
            .unwrap()
            .1
            .to_owned()
    }

    fn credentials(session_token: Option<&str>) -> Credentials {
        Credentials {
            access_key_id: "AKIAIOSFODNN7EXAMPLE".to_owned(),
            secret_key: Secret::new("wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY".to_owned()),
            session_token: session_token.map(|token| Secret::new(token.to_owned())),
            region: "us-east-1".to_owned(),
        }
    }

    #[test]
    fn signatures_are_those_of_the_examples_of_aws() {
        let range = [("range", "bytes=0-9")];
        assert_eq!(
            signature(Method::GET, "/test.txt", &[], &range, b""),
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
        );
        let put = [
            ("date", "Fri, 24 May 2013 00:00:00 GMT"),
            ("x-amz-storage-class", "REDUCED_REDUNDANCY"),
        ];
        assert_eq!(
            signature(
                Method::PUT,
                "/test$file.text",
                &[],
                &put,
                b"Welcome to Amazon S3."
            ),
            "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd"
        );
        assert_eq!(
            signature(Method::GET, "/", &[("lifecycle", "")], &[], b""),
            "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"
        );
        let list = [("prefix", "J"), ("max-keys", "2")];
        assert_eq!(
            signature(Method::GET, "/", &list, &[], b""),
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"
        );
    }

    #[test]
    fn the_session_token_is_a_signed_field() {
        let mut request = Request {
            method: Method::GET,
            path: "/".to_owned(),
            query: BTreeMap::from([("prefix", "a b/+ü"), ("list-type", "2")]),
            headers: BTreeMap::from([("host", "localhost:9000".to_owned())]),
            content: b"",
        };
        credentials(Some("token/of=a session")).sign(&mut request, datetime!(2013-05-24 00:00 UTC));
        assert_eq!(
            request.headers["x-amz-security-token"],
            "token/of=a session"
        );
        assert!(request.headers["authorization"].contains("x-amz-date;x-amz-security-token,"));
        assert_eq!(request.target(), "/?list-type=2&prefix=a%20b%2F%2B%C3%BC");
    }
}
