//! Settings of the archive: the table `[archive]` of the configuration.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gw_shared::config::Keys;
use gw_shared::files;
use gw_shared::identity::secret::Secret;
use gw_shared::net::tls::Trusted;
use http::Uri;

const DEFAULT_REGION: &str = "us-east-1";
const DEFAULT_MIB_PER_SECOND: u64 = 16;

/// A bucket with the access to it. `Debug` prints no secret.
#[derive(Debug, Clone)]
pub struct ArchiveSettings {
    /// Name of the bucket.
    pub bucket: String,
    /// Beginning of the names of all objects, without a `/` at its ends. May be empty.
    pub prefix: String,
    /// Base URL of the server; `None` for AWS.
    pub endpoint: Option<String>,
    /// Region of the bucket, which is part of signatures.
    pub region: String,
    /// Id of the access key.
    pub access_key_id: String,
    /// Secret of the access key, which signs requests.
    pub secret_key: Secret,
    /// File that the secret key was read from.
    pub secret_key_file: Option<PathBuf>,
    /// Session token of temporary credentials; `None` for an access key that is permanent.
    pub session_token: Option<Secret>,
    /// Authorities of the server's certificate; `None` for those of the system.
    pub authorities: Option<Arc<Trusted>>,
    /// Whether the bucket is in the path of a URL, not in its host.
    pub path_style: bool,
    /// Most bytes uploaded in a second.
    pub bytes_per_second: u64,
}

/// Values of the keys of `[archive]`; `None` for those that are missing or wrong.
struct Given {
    /// Bucket and prefix.
    url: Option<(String, String)>,
    endpoint: Option<String>,
    region: Option<String>,
    access_key_id: Option<String>,
    secret_key_file: Option<PathBuf>,
    ca: Option<PathBuf>,
    path_style: Option<bool>,
    allow_http: Option<bool>,
    bandwidth: Option<u64>,
}

impl Given {
    fn take(keys: &mut Keys<'_>) -> Self {
        let file = |text: &str| Some(PathBuf::from(text));
        Self {
            url: keys.text(
                "archive.url",
                "a URL such as \"s3://bucket/prefix\" without a key or password",
                parse_url,
            ),
            endpoint: keys.text(
                "archive.endpoint",
                "the URL of a server without a path, such as \"https://s3.example.com:9000\"",
                parse_endpoint,
            ),
            region: keys.text(
                "archive.region",
                "a region such as \"us-east-1\"",
                parse_region,
            ),
            access_key_id: keys.text(
                "archive.access_key_id",
                "the id of an access key",
                parse_access_key_id,
            ),
            secret_key_file: keys.text("archive.secret_key_file", "a file", file),
            ca: keys.text("archive.ca", "a file", file),
            path_style: keys.boolean("archive.path_style"),
            allow_http: keys.boolean("archive.allow_http"),
            bandwidth: keys.integer("archive.bandwidth_mib_per_second", 1..=10_000),
        }
    }

    /// Keys that were given and have no meaning without `archive.url`.
    fn dependent(&self) -> impl Iterator<Item = &'static str> {
        let dependent = [
            ("endpoint", self.endpoint.is_some()),
            ("region", self.region.is_some()),
            ("access_key_id", self.access_key_id.is_some()),
            ("secret_key_file", self.secret_key_file.is_some()),
            ("ca", self.ca.is_some()),
            ("path_style", self.path_style.is_some()),
            ("allow_http", self.allow_http.is_some()),
        ];
        let given = dependent.into_iter().filter(|(_, given)| *given);
        given.map(|(key, _)| key)
    }
}

impl ArchiveSettings {
    /// Takes the keys of `[archive]`. `None` without an archive, or if there are mistakes.
    pub fn take(keys: &mut Keys<'_>) -> Option<Self> {
        keys.open_table("archive");
        let had_errors = keys.errors.len();
        let mut given = Given::take(keys);
        let variable = |name: &str| (keys.environment())(name).filter(|text| !text.is_empty());
        let key_id_variable = variable("AWS_ACCESS_KEY_ID");
        let secret_variable = variable("AWS_SECRET_ACCESS_KEY");
        let session_variable = variable("AWS_SESSION_TOKEN");
        let Some((bucket, prefix)) = given.url.take() else {
            if keys.errors.len() == had_errors {
                let given = given.dependent();
                keys.errors
                    .extend(given.map(|key| format!("archive.{key}: only with archive.url")));
            }
            return None;
        };
        if !given.allow_http.unwrap_or(false) {
            keys.errors
                .extend(given.endpoint.as_deref().and_then(exposed));
        }
        let from_file = given.access_key_id.is_some() || given.secret_key_file.is_some();
        let session_token = session_variable.filter(|_| !from_file).map(Secret::new);
        let access_key_id = given.access_key_id.or(key_id_variable);
        let secret_key = secret_key(keys, given.secret_key_file.as_deref(), secret_variable);
        if access_key_id.is_none() {
            keys.errors
                .push("archive.access_key_id: missing; set it, or AWS_ACCESS_KEY_ID".to_owned());
        }
        let authorities = given.ca.and_then(|file| match Trusted::read(&file) {
            Ok(authorities) => Some(Arc::new(authorities)),
            Err(problem) => {
                keys.errors
                    .push(format!("archive.ca: {}: {problem}", file.display()));
                None
            }
        });
        if cfg!(not(feature = "archive")) {
            keys.errors.push(
                "archive.url: this program was built without the feature `archive`".to_owned(),
            );
        }
        let (access_key_id, secret_key) = access_key_id
            .zip(secret_key)
            .filter(|_| keys.errors.len() == had_errors)?;
        Some(Self {
            bucket,
            prefix,
            path_style: given.path_style.unwrap_or(given.endpoint.is_some()),
            endpoint: given.endpoint,
            region: given.region.unwrap_or_else(|| DEFAULT_REGION.to_owned()),
            access_key_id,
            secret_key,
            secret_key_file: given.secret_key_file,
            session_token,
            authorities,
            bytes_per_second: given.bandwidth.unwrap_or(DEFAULT_MIB_PER_SECOND) << 20,
        })
    }

    /// The server and the bucket, for messages.
    pub fn place(&self) -> String {
        let server = self.endpoint.as_deref().unwrap_or("AWS");
        format!("s3://{}/{} on {server}", self.bucket, self.prefix)
    }
}

/// Remedy of a file that cannot be read.
const CHECK_FILE: &str = "check its path, and that the user of the gateway may read it";

/// Reads the secret key from its file or takes it from the variable. Reports a missing one.
fn secret_key(
    keys: &mut Keys<'_>,
    file: Option<&Path>,
    variable: Option<String>,
) -> Option<Secret> {
    let mistake = match file.map(files::read_text) {
        None => match variable {
            Some(secret) => return Some(Secret::new(secret)),
            None => "missing; set it, or AWS_SECRET_ACCESS_KEY".to_owned(),
        },
        Some(Err(error)) => format!("{error}; {CHECK_FILE}"),
        Some(Ok(text)) => {
            let text = Secret::new(text);
            let secret = text.reveal().trim_end_matches(['\r', '\n']);
            if !secret.is_empty() && secret.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Some(Secret::new(secret.to_owned()));
            }
            let name = file.unwrap_or(Path::new("")).display();
            format!("{name}: must contain a secret access key, one line without spaces")
        }
    };
    keys.errors
        .push(format!("archive.secret_key_file: {mistake}"));
    None
}

/// Parses `s3://bucket/prefix` as bucket and prefix.
fn parse_url(text: &str) -> Option<(String, String)> {
    let rest = text.strip_prefix("s3://")?;
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    let prefix = prefix.trim_end_matches('/');
    // The rules of bucket names that concern URLs.
    let valid_bucket = (3..=63).contains(&bucket.len())
        && bucket.bytes().all(|byte| {
            byte.is_ascii_lowercase() || byte.is_ascii_digit() || b".-".contains(&byte)
        })
        && bucket.starts_with(|char: char| char.is_ascii_alphanumeric())
        && bucket.ends_with(|char: char| char.is_ascii_alphanumeric());
    // Characters that need no escape in a URL.
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let valid_part =
        |part: &str| !part.is_empty() && part != "." && part != ".." && part.bytes().all(plain);
    let valid_prefix =
        prefix.is_empty() || prefix.len() <= 256 && prefix.split('/').all(valid_part);
    (valid_bucket && valid_prefix).then(|| (bucket.to_owned(), prefix.to_owned()))
}

/// Accepts `http://` and `https://` with a host, an optional port and nothing else.
fn parse_endpoint(text: &str) -> Option<String> {
    let uri: Uri = text.parse().ok()?;
    let authority = uri.authority()?;
    let has_port = authority.as_str().len() > authority.host().len();
    let valid = matches!(uri.scheme_str(), Some("http" | "https"))
        && !authority.host().is_empty()
        && !authority.as_str().contains('@')
        && (authority.port_u16().is_some() || !has_port)
        && uri.path_and_query().is_none_or(|path| path == "/");
    valid.then(|| text.trim_end_matches('/').to_owned())
}

/// The mistake of an endpoint to which requests are sent in clear text over a network.
fn exposed(endpoint: &str) -> Option<String> {
    let uri: Uri = endpoint.parse().ok()?;
    let host = uri.host()?.trim_start_matches('[').trim_end_matches(']');
    let is_here = host
        .parse::<IpAddr>()
        .map_or(host.eq_ignore_ascii_case("localhost"), |address| {
            address.is_loopback()
        });
    (uri.scheme_str() == Some("http") && !is_here).then(|| {
        format!(
            "archive.endpoint: {endpoint:?} is not https: session token, signed requests and names \
             of objects would cross the network in clear text; use https, or set \
             archive.allow_http = true if nobody else is on the path"
        )
    })
}

fn parse_region(text: &str) -> Option<String> {
    let valid = (1..=64).contains(&text.len())
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_');
    valid.then(|| text.to_owned())
}

fn parse_access_key_id(text: &str) -> Option<String> {
    let valid = (1..=128).contains(&text.len())
        && text
            .bytes()
            .all(|byte| byte.is_ascii_graphic() && byte != b'/');
    valid.then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(text: &str, variables: &[(&str, &str)]) -> (Option<ArchiveSettings>, Vec<String>) {
        let environment = |name: &str| {
            variables
                .iter()
                .find(|(known, _)| *known == name)
                .map(|(_, value)| (*value).to_owned())
        };
        let mut keys = Keys::parse(text, &environment).unwrap();
        let settings = ArchiveSettings::take(&mut keys);
        keys.refuse_unknown();
        (settings, keys.errors)
    }

    const AWS: [(&str, &str); 3] = [
        ("AWS_ACCESS_KEY_ID", "id"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_SESSION_TOKEN", "token"),
    ];

    #[test]
    fn settings_have_defaults_and_take_credentials_from_file_or_environment() {
        assert!(matches!(take("", &AWS), (None, errors) if errors.is_empty()));
        let (settings, errors) = take("[archive]\nurl = 's3://logs.gw/eu/1/'\n", &AWS);
        let settings = settings.unwrap_or_else(|| panic!("{errors:?}"));
        assert_eq!(
            (settings.bucket.as_str(), settings.prefix.as_str()),
            ("logs.gw", "eu/1")
        );
        assert_eq!(
            (settings.region.as_str(), settings.path_style),
            ("us-east-1", false)
        );
        assert_eq!(
            (
                settings.access_key_id.as_str(),
                settings.secret_key.reveal()
            ),
            ("id", "secret")
        );
        assert_eq!(
            settings.session_token.as_ref().map(Secret::reveal),
            Some("token")
        );
        assert!(
            !format!("{settings:?}").contains("token\"")
                && !format!("{settings:?}").contains("\"secret\"")
        );

        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("secret");
        std::fs::write(&file, "from/file+1\n").unwrap();
        let text = format!(
            "[archive]\nurl = 's3://bucket'\nendpoint = 'https://s3.example.com:9000/'\n\
             access_key_id = 'mine'\nsecret_key_file = '{}'\nbandwidth_mib_per_second = 2\n",
            file.display()
        );
        let (settings, errors) = take(&text, &AWS);
        let settings = settings.unwrap_or_else(|| panic!("{errors:?}"));
        assert_eq!(
            (
                settings.access_key_id.as_str(),
                settings.secret_key.reveal()
            ),
            ("mine", "from/file+1")
        );
        assert!(
            settings.session_token.is_none() && settings.path_style,
            "defaults beside an endpoint and a file"
        );
        assert_eq!(
            (settings.endpoint.as_deref(), settings.prefix.as_str()),
            (Some("https://s3.example.com:9000"), "")
        );
        assert_eq!(settings.bytes_per_second, 2 << 20);
    }

    #[test]
    fn plain_http_is_for_this_machine_unless_allowed() {
        for endpoint in [
            "http://127.0.0.1:9000",
            "http://[::1]:9000",
            "http://localhost:9000",
            "https://s3.example.com",
        ] {
            let (settings, errors) = take(
                &format!("[archive]\nurl = 's3://bucket'\nendpoint = '{endpoint}'\n"),
                &AWS,
            );
            assert_eq!(
                settings
                    .unwrap_or_else(|| panic!("{errors:?}"))
                    .endpoint
                    .as_deref(),
                Some(endpoint)
            );
        }
        let text = "[archive]\nurl = 's3://bucket'\nendpoint = 'http://s3.internal:9000'\n\
                    allow_http = true\n";
        assert!(matches!(take(text, &AWS), (Some(_), errors) if errors.is_empty()));
    }

    #[test]
    fn every_wrong_value_is_reported_with_its_key() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "two words\n").unwrap();
        let file = file.display();
        let with_url = |rest: &str| format!("[archive]\nurl = 's3://bucket'\n{rest}\n");
        let missing = "/no/such/file";
        for (text, expected) in [
            (
                "[archive]\nurl = 'https://bucket'\n".to_owned(),
                "archive.url: \"https://bucket\" is not a URL such as",
            ),
            (
                "[archive]\nurl = 's3://id:secret@bucket'\n".to_owned(),
                "without a key or password",
            ),
            (
                "[archive]\nurl = 's3://Bucket'\n".to_owned(),
                "archive.url: ",
            ),
            (
                "[archive]\nurl = 's3://bucket/a//b'\n".to_owned(),
                "archive.url: ",
            ),
            (
                "[archive]\nurl = 's3://bucket/../b'\n".to_owned(),
                "archive.url: ",
            ),
            ("archive = 1\n".to_owned(), "archive: 1 is not a table"),
            (
                "[archive]\nendpoint = 'http://a'\n".to_owned(),
                "archive.endpoint: only with archive.url",
            ),
            (
                with_url("endpoint = 'a:1'"),
                "archive.endpoint: \"a:1\" is not the URL of a server without a path",
            ),
            (with_url("endpoint = 'http://a/b'"), "archive.endpoint: "),
            (with_url("endpoint = 'http://me@a'"), "archive.endpoint: "),
            (
                with_url("endpoint = 'http://s3.example.com:9000'"),
                "set archive.allow_http = true",
            ),
            (
                with_url("endpoint = 'http://10.0.0.1:9000'\nallow_http = false"),
                "\"http://10.0.0.1:9000\" is not https",
            ),
            (
                with_url("endpoint = 'http://localhost.example.com'"),
                "is not https",
            ),
            (
                "[archive]\nallow_http = true\n".to_owned(),
                "archive.allow_http: only with archive.url",
            ),
            (with_url("region = 'eu west'"), "archive.region: "),
            (with_url("access_key_id = 'a/b'"), "archive.access_key_id: "),
            (
                with_url(&format!("secret_key_file = '{missing}'")),
                "archive.secret_key_file: ",
            ),
            (
                with_url(&format!("secret_key_file = '{file}'")),
                "must contain a secret access key, one line",
            ),
            (
                with_url(&format!("ca = '{missing}'")),
                "archive.ca: /no/such/file: cannot be read: No such file",
            ),
            (with_url(&format!("ca = '{file}'")), "no certificate in it"),
            (
                with_url("path_style = 'perhaps'"),
                "archive.path_style: \"perhaps\" is not true or false",
            ),
            (
                with_url("bandwidth_mib_per_second = 0"),
                "archive.bandwidth_mib_per_second: 0 is not a whole number",
            ),
            (with_url("colour = 1"), "archive.colour: no such key"),
        ] {
            let (settings, errors) = take(&text, &AWS);
            assert!(
                errors.len() == 1 && errors[0].contains(expected),
                "{text}: {errors:?}"
            );
            assert!(
                settings.is_none() || expected.contains("no such key"),
                "{text}"
            );
        }
        let (_, errors) = take(&with_url(""), &[]);
        let expected = [
            "archive.secret_key_file: missing; set it, or AWS_SECRET_ACCESS_KEY",
            "archive.access_key_id: missing; set it, or AWS_ACCESS_KEY_ID",
        ];
        assert_eq!(errors, expected);
    }
}
