//! Settings of certificates that an ACME authority issues: `tls`, and the tables `[acme]`.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use gw_acme::{ExternalAccount, HookSettings, LETS_ENCRYPT, Rfc2136Settings, Settings};
use gw_base::tls::CertificateSource;
use gw_shared::config::Keys;
use gw_shared::files;
use gw_shared::identity::secret::Secret;
use gw_shared::net::tls::Trusted;
use http::Uri;

use super::Config;

/// Key that chooses where the certificate comes from.
pub const TLS_KEY: &str = "tls";

/// Port of a DNS server without one.
const DNS_PORT: u16 = 53;
const ADDRESS: &str = "ADDRESS or ADDRESS:PORT of a DNS server such as \"192.0.2.53\"";

/// Settings of the authority.
#[derive(Debug, Clone)]
pub struct AcmeConfig {
    /// The authority and the account. The names follow from the region.
    pub settings: Settings,
    /// Proof of control over the names of the region; `None` if the certificate of the region comes
    /// from files.
    pub challenge: Option<Challenge>,
}

/// Proof of control over the names.
#[derive(Debug, Clone)]
pub enum Challenge {
    /// DNS updates.
    Rfc2136(Rfc2136Settings),
    /// A program.
    Hook(HookSettings),
    /// The handshake of the listener.
    TlsAlpn,
}

/// The keys that are given.
struct Given {
    directory: Option<String>,
    contact: Option<Vec<String>>,
    terms_accepted: Option<bool>,
    eab_key_id: Option<String>,
    eab_key_file: Option<PathBuf>,
    ca_file: Option<PathBuf>,
    challenge: Option<&'static str>,
    server: Option<SocketAddr>,
    key_name: Option<String>,
    key_file: Option<PathBuf>,
    zone: Option<String>,
    program: Option<PathBuf>,
}

/// Takes `dns_servers`.
pub(super) fn dns_servers(keys: &mut Keys<'_>) -> Option<Vec<SocketAddr>> {
    keys.list("dns_servers", ADDRESS, parse_dns_server)
}

/// Takes `tls` and the keys of `[acme]`. `None` without an authority, or if there are mistakes.
pub(super) fn take(keys: &mut Keys<'_>, dns_servers: &[SocketAddr]) -> Option<AcmeConfig> {
    let is_acme = keys
        .text(TLS_KEY, "\"acme\"", |text| (text == "acme").then_some(()))
        .is_some();
    let had_errors = keys.errors.len();
    let given = Given::take(keys);
    if !is_acme && keys.errors.len() == had_errors {
        let given = given.dependent();
        keys.errors
            .extend(given.map(|key| format!("acme.{key}: only with tls = \"acme\"")));
    }
    // Without tls, the authority issues the certificates of own domains alone.
    if !is_acme && given.terms_accepted != Some(true) {
        return None;
    }
    let challenge = is_acme.then(|| challenge(keys, &given, dns_servers));
    let external_account = external_account(keys, &given);
    let authorities = given.ca_file.as_deref().and_then(|file| {
        let read = Trusted::read(file).map(Arc::new).map_err(|problem| {
            let problem = format!("acme.ca_file: {}: {problem}", file.display());
            keys.errors.push(problem);
        });
        read.ok()
    });
    if given.terms_accepted != Some(true) {
        keys.errors.push(
            "acme.terms_accepted: must be true; read the terms of service of the authority, and \
             set it"
                .to_owned(),
        );
    }
    if keys.errors.len() > had_errors {
        return None;
    }
    Some(AcmeConfig {
        settings: Settings {
            directory: given.directory.unwrap_or_else(|| LETS_ENCRYPT.to_owned()),
            contacts: given.contact.unwrap_or_default(),
            terms_accepted: true,
            external_account,
            authorities,
            names: Vec::new(),
        },
        challenge: match challenge {
            Some(challenge) => Some(challenge?),
            None => None,
        },
    })
}

impl Given {
    fn take(keys: &mut Keys<'_>) -> Self {
        keys.open_table("acme");
        keys.open_table("acme.rfc2136");
        keys.open_table("acme.hook");
        Self {
            directory: keys.text(
                "acme.directory",
                "the https URL of a directory such as \
                 \"https://acme-v02.api.letsencrypt.org/directory\"",
                parse_directory,
            ),
            contact: keys.list(
                "acme.contact",
                "a mail address such as \"admin@example.com\"",
                parse_contact,
            ),
            terms_accepted: keys.boolean("acme.terms_accepted"),
            eab_key_id: keys.text("acme.eab_key_id", "a key identifier", parse_word),
            eab_key_file: keys.path("acme.eab_key_file", "a file"),
            ca_file: keys.path("acme.ca_file", "a file"),
            challenge: keys.text(
                "acme.challenge",
                "\"dns-rfc2136\", \"dns-hook\" or \"tls-alpn\"",
                parse_challenge,
            ),
            server: keys.text("acme.rfc2136.server", ADDRESS, parse_dns_server),
            key_name: keys.text("acme.rfc2136.key_name", "the name of a key", parse_word),
            key_file: keys.path("acme.rfc2136.key_file", "a file"),
            zone: keys.text("acme.rfc2136.zone", "the name of a zone", parse_word),
            program: keys.path("acme.hook.program", "a file"),
        }
    }

    /// Keys without a default that have no meaning without `tls`.
    fn dependent(&self) -> impl Iterator<Item = &'static str> {
        let is_used = self.terms_accepted == Some(true);
        let given = [
            ("eab_key_id", self.eab_key_id.is_some() && !is_used),
            ("eab_key_file", self.eab_key_file.is_some() && !is_used),
            ("ca_file", self.ca_file.is_some() && !is_used),
            ("challenge", self.challenge.is_some()),
            ("rfc2136.server", self.server.is_some()),
            ("rfc2136.key_name", self.key_name.is_some()),
            ("rfc2136.key_file", self.key_file.is_some()),
            ("rfc2136.zone", self.zone.is_some()),
            ("hook.program", self.program.is_some()),
        ];
        let given = given.into_iter().filter(|(_, given)| *given);
        given.map(|(key, _)| key)
    }
}

impl Config {
    /// Serves the certificate of the authority, if there is one, and names what it is for.
    pub(super) fn use_acme(&mut self, keys: &mut Keys<'_>) {
        let Some(acme) = &mut self.acme else {
            return;
        };
        let Some(challenge) = &acme.challenge else {
            return;
        };
        if matches!(self.certificate, CertificateSource::Files { .. }) {
            keys.errors.push(
                "tls: \"acme\" and tls_certificate exclude each other; remove one of them"
                    .to_owned(),
            );
        }
        let apex = self.region.apex().to_owned();
        acme.settings.names = match challenge {
            // A wildcard needs DNS (RFC 8555 §7.1.3).
            Challenge::TlsAlpn => vec![apex],
            Challenge::Rfc2136(_) | Challenge::Hook(_) => vec![apex.clone(), format!("*.{apex}")],
        };
        self.certificate = CertificateSource::Acme {
            data_dir: self.data_dir.clone(),
        };
    }
}

fn challenge(keys: &mut Keys<'_>, given: &Given, dns_servers: &[SocketAddr]) -> Option<Challenge> {
    let dns_servers = dns_servers.to_vec();
    let mut errors = keys.errors.iter();
    let is_refused = errors.any(|error| error.starts_with("acme.challenge:"));
    let mut missing = |key: &str, why: &str| {
        keys.errors.push(format!("acme.{key}: missing; {why}"));
    };
    match given.challenge {
        Some("dns-rfc2136") => {
            let why = "acme.challenge = \"dns-rfc2136\" needs it";
            for (key, given) in [
                ("rfc2136.server", given.server.is_some()),
                ("rfc2136.key_name", given.key_name.is_some()),
                ("rfc2136.key_file", given.key_file.is_some()),
            ] {
                if !given {
                    missing(key, why);
                }
            }
            Some(Challenge::Rfc2136(Rfc2136Settings {
                server: given.server?,
                key_name: given.key_name.clone()?,
                key_file: given.key_file.clone()?,
                zone: given.zone.clone(),
                dns_servers,
            }))
        }
        Some("dns-hook") => {
            if given.program.is_none() {
                missing("hook.program", "acme.challenge = \"dns-hook\" needs it");
            }
            Some(Challenge::Hook(HookSettings {
                program: given.program.clone()?,
                dns_servers,
            }))
        }
        Some(_) => Some(Challenge::TlsAlpn),
        None if is_refused => None,
        None => {
            missing(
                "challenge",
                "choose \"dns-rfc2136\", \"dns-hook\", or \"tls-alpn\" for the apex alone",
            );
            None
        }
    }
}

/// Both keys of an external account, or neither.
fn external_account(keys: &mut Keys<'_>, given: &Given) -> Option<ExternalAccount> {
    let (key_id, file) = match (&given.eab_key_id, &given.eab_key_file) {
        (None, None) => return None,
        (Some(key_id), Some(file)) => (key_id.clone(), file),
        (given, _) => {
            let (missing, given) = match given {
                Some(_) => ("eab_key_file", "eab_key_id"),
                None => ("eab_key_id", "eab_key_file"),
            };
            keys.errors.push(format!(
                "acme.{missing}: missing; acme.{given} needs it: set both, or neither"
            ));
            return None;
        }
    };
    match files::read_text(file) {
        Ok(text) => Some(ExternalAccount {
            key_id,
            key: Secret::new(text.trim().to_owned()),
        }),
        Err(error) => {
            keys.errors.push(format!(
                "acme.eab_key_file: {error}; check its path, and that the user of the gateway may \
                 read it"
            ));
            None
        }
    }
}

fn parse_directory(text: &str) -> Option<String> {
    let uri: Uri = text.parse().ok()?;
    let authority = uri.authority()?;
    let valid = uri.scheme_str() == Some("https")
        && !authority.host().is_empty()
        && !authority.as_str().contains('@');
    valid.then(|| text.to_owned())
}

/// Reads a mail address. `None` if the text is none.
pub fn parse_contact(text: &str) -> Option<String> {
    let (local, domain) = text.split_once('@')?;
    let valid = text.len() <= 254
        && !local.is_empty()
        && domain.contains('.')
        && text
            .bytes()
            .all(|byte| byte.is_ascii_graphic() && !b",?:\"<>".contains(&byte));
    valid.then(|| text.to_owned())
}

fn parse_challenge(text: &str) -> Option<&'static str> {
    ["dns-rfc2136", "dns-hook", "tls-alpn"]
        .into_iter()
        .find(|known| *known == text)
}

/// Reads the address of a DNS server, with or without its port. `None` if the text is none.
pub fn parse_dns_server(text: &str) -> Option<SocketAddr> {
    let with_port = text.parse::<SocketAddr>().ok();
    with_port.or_else(|| Some(SocketAddr::new(text.parse::<IpAddr>().ok()?, DNS_PORT)))
}

fn parse_word(text: &str) -> Option<String> {
    let valid = (1..=255).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic());
    valid.then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = "region = 'eu1'\ndomain = 'example.com'\ndata_dir = 'd'\n";
    const ACME: &str = "tls = 'acme'\n[acme]\nterms_accepted = true\n";

    fn parse(text: &str) -> Result<Config, Vec<String>> {
        Config::parse(&format!("{MINIMAL}{text}"), |_| None).map_err(|errors| errors.0)
    }

    #[test]
    fn a_challenge_decides_the_names_and_settings_have_defaults() {
        let config = parse(&format!("{ACME}challenge = 'tls-alpn'\n")).unwrap();
        let acme = config.acme.unwrap();
        assert_eq!(acme.settings.directory, LETS_ENCRYPT);
        assert_eq!(acme.settings.names, ["eu1.example.com"]);
        let data_dir = "d".into();
        assert_eq!(config.certificate, CertificateSource::Acme { data_dir });

        let servers = "dns_servers = ['192.0.2.1:5353']\n";
        let updates = "challenge = 'dns-rfc2136'\n[acme.rfc2136]\nserver = '2001:db8::1'\n\
                       key_name = 'acme'\nkey_file = 'k'\n";
        let acme = parse(&format!("{servers}{ACME}{updates}"))
            .unwrap()
            .acme
            .unwrap();
        assert_eq!(
            acme.settings.names,
            ["eu1.example.com", "*.eu1.example.com"]
        );
        let Some(Challenge::Rfc2136(settings)) = acme.challenge else {
            panic!("{:?}", acme.challenge);
        };
        assert_eq!(settings.server.to_string(), "[2001:db8::1]:53");
        assert_eq!(settings.dns_servers[0].port(), 5353);

        let hook = "challenge = 'dns-hook'\n[acme.hook]\nprogram = 'p'\n";
        let acme = parse(&format!("{ACME}{hook}")).unwrap().acme.unwrap();
        assert!(matches!(acme.challenge, Some(Challenge::Hook(_))));
        let own_domains = parse("[acme]\nterms_accepted = true\n").unwrap();
        let acme = own_domains.acme.unwrap();
        assert!(acme.challenge.is_none() && acme.settings.names.is_empty());
        assert!(matches!(
            own_domains.certificate,
            CertificateSource::Development { .. }
        ));
        assert!(parse("").unwrap().acme.is_none());
    }

    #[test]
    fn every_mistake_names_its_key_and_what_to_do() {
        let rows = [
            ("tls = 'files'", "tls: \"files\" is not \"acme\""),
            ("tls = 'acme'", "acme.terms_accepted: must be true; read"),
            ("tls = 'acme'", "acme.challenge: missing; choose"),
            (
                "[acme]\nca_file = 'c'",
                "acme.ca_file: only with tls = \"acme\"",
            ),
            (
                "tls = 'acme'\n[acme]\ndirectory = 'http://a/dir'",
                "acme.directory: \"http://a/dir\" is not the https URL",
            ),
            (
                "tls = 'acme'\n[acme]\ncontact = ['mailto:a']",
                "acme.contact: \"mailto:a\" is not a mail address",
            ),
            (
                "tls = 'acme'\n[acme]\nchallenge = 'dns-rfc2136'",
                "acme.rfc2136.key_file: missing; acme.challenge = \"dns-rfc2136\" needs it",
            ),
            (
                "tls = 'acme'\n[acme]\nchallenge = 'dns-hook'",
                "acme.hook.program: missing; acme.challenge",
            ),
            (
                "tls = 'acme'\n[acme]\neab_key_id = 'k'",
                "acme.eab_key_file: missing; acme.eab_key_id needs it: set both, or neither",
            ),
            (
                "tls = 'acme'\n[acme]\nca_file = '/nonexistent'",
                "acme.ca_file: /nonexistent: cannot be read: No such file",
            ),
            (
                "tls = 'acme'\ntls_certificate = 'c'\ntls_key = 'k'\n[acme]\n\
                 terms_accepted = true\nchallenge = 'tls-alpn'",
                "tls: \"acme\" and tls_certificate exclude each other; remove one of them",
            ),
        ];
        for (text, mistake) in rows {
            let mistakes = parse(text).unwrap_err();
            assert!(
                mistakes.iter().any(|found| found.starts_with(mistake)),
                "{text}: {mistakes:#?}"
            );
        }
    }
}
