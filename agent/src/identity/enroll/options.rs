//! Options of an enrollment, all checked before anything is sent.

use std::fmt::Display;
use std::fs;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};

use gw_shared::files::cannot_read;
use gw_shared::id::EnrollmentTokenId;
use gw_shared::identity::secret::Secret;
use gw_shared::net::tls::pem;
use http::Uri;
use http::uri::Scheme;
use rustls_pki_types::ServerName;

use super::EnrollError;
use crate::identity::state::{PendingEnrollment, StateDir, StateLock};
use crate::proxy::ProxySettings;
use crate::tls::DEVELOPMENT_CA;

/// Options of an enrollment. To resume one, the state folder is enough.
#[derive(Debug, Clone, Default)]
pub struct EnrollmentOptions {
    pub state_dir: PathBuf,
    /// The region's apex: `https://HOST` or `https://HOST:PORT`.
    pub gateway: Option<String>,
    pub token: Option<TokenSource>,
    /// Display name of the agent, 1 to 100 characters. Default: the machine's host name.
    pub name: Option<String>,
    /// PEM file of the authorities to trust for the gateway, instead of those of the system.
    pub ca_file: Option<PathBuf>,
    /// Host and port to connect to instead of those in `gateway`, for enrollment and tunnels.
    pub connect_to: Option<(String, u16)>,
    /// Replace an agent that is enrolled in the state folder.
    pub force: bool,
}

/// Source of the enrollment token.
#[derive(Debug, Clone)]
pub enum TokenSource {
    Text(Secret),
    File(PathBuf),
    /// The first line.
    StandardInput,
}

/// The step to start with.
pub(super) enum Start {
    New(Box<NewEnrollment>),
    Resume(Box<PendingEnrollment>),
}

/// Checked options of a new enrollment.
pub(super) struct NewEnrollment {
    pub(super) gateway_name: String,
    pub(super) gateway_host: String,
    pub(super) gateway_port: u16,
    pub(super) gateway_ca_pem: Option<String>,
    pub(super) proxies: ProxySettings,
    pub(super) token: Secret,
    pub(super) token_id: EnrollmentTokenId,
    pub(super) name: String,
}

/// Longest name of an agent, in characters.
const NAME_MAX: usize = 100;

impl EnrollmentOptions {
    /// Locks the state folder and decides where to start, or reports all mistakes.
    pub(super) fn check(
        self,
        proxies: &ProxySettings,
    ) -> Result<(StateDir, StateLock, Start), EnrollError> {
        let mut mistakes = OptionMistakes::default();
        let state = StateDir::new(self.state_dir.clone());
        let token = self.token.clone();
        let token = token.map(|source| {
            let option = match source {
                TokenSource::Text(_) => "--token",
                TokenSource::File(_) | TokenSource::StandardInput => "--token-file",
            };
            mistakes.unless(option, read_token(source))
        });
        let gateway = self.gateway.as_deref();
        let gateway = gateway.map(|url| mistakes.unless("--gateway", parse_gateway(url)));
        let pending = mistakes.unless("--state-dir", state.pending()).flatten();
        // Without a token, or with the token that it began with, the pending enrollment is resumed.
        let resumes = |pending: &PendingEnrollment| match &token {
            None => true,
            Some(token) => token
                .as_ref()
                .is_some_and(|(id, _)| *id == pending.token_id),
        };
        let (lock, start) = match pending.filter(resumes) {
            Some(pending) => {
                if let Some(Some((name, _))) = &gateway
                    && *name != pending.gateway_name
                {
                    let other = &pending.gateway_name;
                    let mistake = format!(
                        "an enrollment at {other} is unfinished; pass a new --token to start \
                         another one"
                    );
                    mistakes.note("--gateway", mistake);
                }
                let lock = mistakes.unless("--state-dir", state.lock());
                (lock, Some(Start::Resume(Box::new(pending))))
            }
            None => {
                let lock = self.lock(&state, &mut mistakes);
                let new = self.start(&state, gateway, token, proxies, &mut mistakes);
                (lock, new.map(|new| Start::New(Box::new(new))))
            }
        };
        mistakes.check()?;
        // A missing value has been reported as a mistake.
        match (lock, start) {
            (Some(lock), Some(start)) => Ok((state, lock, start)),
            _ => Err(EnrollError::Usage(Vec::new())),
        }
    }

    /// Creates and locks the state folder of a new enrollment.
    fn lock(&self, state: &StateDir, mistakes: &mut OptionMistakes) -> Option<StateLock> {
        if state.is_enrolled() && !self.force {
            let folder = state.path().display();
            let mistake = format!("{folder} contains an enrolled agent; use --force to replace it");
            mistakes.note("--state-dir", mistake);
            return None;
        }
        mistakes.unless("--state-dir", state.create().and_then(|()| state.lock()))
    }

    /// Checks the options of a new enrollment. Those that are `Some(None)` are noted as mistakes
    /// already.
    fn start(
        self,
        state: &StateDir,
        gateway: Option<Option<(String, u16)>>,
        token: Option<Option<(EnrollmentTokenId, Secret)>>,
        proxies: &ProxySettings,
        mistakes: &mut OptionMistakes,
    ) -> Option<NewEnrollment> {
        if gateway.is_none() {
            mistakes.note(
                "--gateway",
                "missing; use https://HOST or https://HOST:PORT",
            );
        }
        if token.is_none() {
            let folder = state.path().display();
            let mistake = format!(
                "missing, and {folder} contains no unfinished enrollment; an administrator makes a \
                 token with `gw-gateway enrollment-token create ACCOUNT --service SERVICE`"
            );
            mistakes.note("--token", mistake);
        }
        let gateway_ca_pem = self
            .ca_file
            .and_then(|file| mistakes.unless("--ca-file", read_authorities(&file)));
        let name = self.name.unwrap_or_else(machine_name);
        if !(1..=NAME_MAX).contains(&name.chars().count()) {
            let mistake = format!("{name:?} does not have 1 to {NAME_MAX} characters");
            mistakes.note("--name", mistake);
        }
        let (gateway_name, port) = gateway.flatten()?;
        let (token_id, token) = token.flatten()?;
        let connect_to = self.connect_to;
        let (gateway_host, gateway_port) =
            connect_to.unwrap_or_else(|| (gateway_name.clone(), port));
        Some(NewEnrollment {
            proxies: proxies.clone(),
            gateway_name,
            gateway_host,
            gateway_port,
            gateway_ca_pem,
            token,
            token_id,
            name,
        })
    }
}

/// All mistakes, each prefixed with its option.
#[derive(Default)]
struct OptionMistakes(Vec<String>);

impl OptionMistakes {
    fn note(&mut self, option: &str, mistake: impl Display) {
        self.0.push(format!("{option}: {mistake}"));
    }

    /// Returns the value, or notes the mistake.
    fn unless<T>(&mut self, option: &str, result: Result<T, impl Display>) -> Option<T> {
        result.map_err(|mistake| self.note(option, mistake)).ok()
    }

    fn check(&mut self) -> Result<(), EnrollError> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(EnrollError::Usage(std::mem::take(&mut self.0)))
        }
    }
}

/// Reads a token `gw_et_{id}.{secret}` and returns its id and the whole token.
fn read_token(source: TokenSource) -> Result<(EnrollmentTokenId, Secret), String> {
    let token = match source {
        TokenSource::Text(token) => token,
        TokenSource::File(path) => {
            Secret::new(fs::read_to_string(&path).map_err(|error| cannot_read(&path, &error))?)
        }
        TokenSource::StandardInput => {
            let input = io::stdin();
            if input.is_terminal() {
                eprint!("Enrollment token: ");
            }
            let mut line = String::new();
            let read = input.read_line(&mut line);
            read.map_err(|error| format!("standard input cannot be read: {error}"))?;
            Secret::new(line)
        }
    };
    let token = Secret::new(token.reveal().trim().to_owned());
    let id = token
        .reveal()
        .strip_prefix("gw_et_")
        .and_then(|rest| rest.split_once('.'));
    // The error does not quote the text, which may be another secret.
    match id.map(|(id, _)| EnrollmentTokenId::new(id)) {
        Some(Ok(id)) => Ok((id, token)),
        _ if token.reveal().starts_with("gw_sk_") => Err(
            "this is a service key, which callers send; `gw-gateway enrollment-token create \
             ACCOUNT --service SERVICE` makes a token for an agent"
                .to_owned(),
        ),
        _ => Err(
            "not a whole enrollment token: `gw_et_`, 16 characters, a dot, and the secret; copy \
             all of it from the output of `gw-gateway enrollment-token create`"
                .to_owned(),
        ),
    }
}

/// Parses `https://HOST[:PORT]` into host name and port.
pub(super) fn parse_gateway(url: &str) -> Result<(String, u16), String> {
    const FORM: &str = "is not the URL of a gateway; use https://HOST or https://HOST:PORT";
    let uri: Uri = url.parse().map_err(|_| format!("{url:?} {FORM}"))?;
    let authority = uri
        .authority()
        .filter(|authority| !authority.as_str().contains('@'))
        .ok_or_else(|| format!("{url:?} {FORM}"))?;
    let invalid = || format!("{url:?} {FORM}, such as https://{authority}");
    let name = authority.host().to_ascii_lowercase();
    let is_origin = uri.scheme() == Some(&Scheme::HTTPS)
        && matches!(uri.path(), "" | "/")
        && uri.query().is_none();
    // `port()` is also `None` for a port that is not a number up to 65535.
    let port = match authority.port() {
        Some(port) => port.as_u16(),
        None if authority.as_str().len() == authority.host().len() => 443,
        None => return Err(format!("{url:?} {FORM}")),
    };
    if is_origin && ServerName::try_from(name.as_str()).is_ok() {
        Ok((name, port))
    } else {
        Err(invalid())
    }
}

/// Reads a PEM file of at least one certificate.
fn read_authorities(file: &Path) -> Result<String, String> {
    let pem = fs::read_to_string(file).map_err(|error| cannot_read(file, &error))?;
    pem::certificates(pem.as_bytes()).map_err(|error| {
        format!(
            "{}: {error}; name the certificate of the authority: {DEVELOPMENT_CA}, or that of your \
             own authority",
            file.display()
        )
    })?;
    Ok(pem)
}

fn machine_name() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .chars()
        .take(NAME_MAX)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &str = "gw_et_0123456789abcdef.secret";

    fn options(state_dir: &Path) -> EnrollmentOptions {
        EnrollmentOptions {
            state_dir: state_dir.into(),
            gateway: Some("https://EU1.example.com".into()),
            token: Some(TokenSource::Text(Secret::new(format!("{TOKEN}\n")))),
            ..EnrollmentOptions::default()
        }
    }

    fn mistakes(options: EnrollmentOptions) -> Vec<String> {
        match options.check(&ProxySettings::default()) {
            Err(EnrollError::Usage(mistakes)) => mistakes,
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("no mistake found"),
        }
    }

    #[test]
    fn gateway_is_an_https_origin() {
        for (url, host, port) in [
            ("https://EU1.example.com/", "eu1.example.com", 443),
            ("https://eu1.gw.localhost:8443", "eu1.gw.localhost", 8443),
        ] {
            assert_eq!(parse_gateway(url), Ok((host.into(), port)));
        }
        for meant in [
            "eu1.example.com:8443",
            "http://eu1.example.com:8443",
            "https://eu1.example.com:8443/enroll",
        ] {
            let mistake = parse_gateway(meant).unwrap_err();
            let hint = "such as https://eu1.example.com:8443";
            assert!(mistake.ends_with(hint), "{mistake}");
        }
        for bad in [
            "",
            "eu1.example.com",
            "http://h",
            "https://h/enroll",
            "https://u@h",
            "https://h:99999",
            "https://h?q",
        ] {
            assert!(parse_gateway(bad).is_err(), "{bad}");
        }
    }

    fn check(options: EnrollmentOptions) -> Box<NewEnrollment> {
        match options.check(&ProxySettings::default()).unwrap() {
            (_, _, Start::New(new)) => new,
            _ => panic!("nothing to resume"),
        }
    }

    #[test]
    fn new_enrollment_is_checked_and_completed_with_defaults() {
        let directory = tempfile::tempdir().unwrap();
        let new = check(options(&directory.path().join("new")));
        assert_eq!(new.gateway_name, "eu1.example.com");
        assert_eq!(
            (new.gateway_host.as_str(), new.gateway_port),
            ("eu1.example.com", 443)
        );
        assert_eq!(new.token.reveal(), TOKEN);
        assert!(!new.name.is_empty());
    }

    #[test]
    fn the_gateway_can_be_at_another_address_than_that_of_its_name() {
        let directory = tempfile::tempdir().unwrap();
        let new = check(EnrollmentOptions {
            connect_to: Some(("127.0.0.1".into(), 1)),
            ..options(directory.path())
        });
        assert_eq!(new.gateway_name, "eu1.example.com");
        assert_eq!(new.gateway_host, "127.0.0.1");
    }

    #[test]
    fn all_mistakes_are_reported_without_secrets() {
        let directory = tempfile::tempdir().unwrap();
        let wrong = EnrollmentOptions {
            gateway: Some("http://eu1.example.com".into()),
            token: Some(TokenSource::Text(Secret::new("hunter2".into()))),
            name: Some(String::new()),
            ca_file: Some(directory.path().join("none.pem")),
            ..options(directory.path())
        };
        let found = mistakes(wrong);
        let named = ["--token", "--gateway", "--ca-file", "--name"]
            .map(|key| found.iter().any(|it| it.starts_with(key)));
        assert!(
            found.len() == 4 && named == [true; 4] && !found.concat().contains("hunter2"),
            "{found:?}"
        );
        let missing = EnrollmentOptions {
            gateway: None,
            token: None,
            ..options(directory.path())
        };
        assert_eq!(mistakes(missing).len(), 2);
    }

    #[test]
    fn an_enrolled_agent_is_replaced_by_force_unless_it_runs() {
        let directory = tempfile::tempdir().unwrap();
        let forced = || EnrollmentOptions {
            force: true,
            ..options(directory.path())
        };
        fs::write(directory.path().join("agent.json"), "{}").unwrap();
        assert!(mistakes(options(directory.path()))[0].contains("--force"));
        assert!(forced().check(&ProxySettings::default()).is_ok());
        let _running = StateDir::new(directory.path()).lock().unwrap();
        let found = mistakes(forced());
        assert!(
            found.len() == 1 && found[0].contains("in use by another gw-agent process"),
            "{found:?}"
        );
    }
}
