//! Answers to the questions of `init`: from options, from a terminal, or defaults.

use std::io::{self, BufRead, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf, absolute};

use gw_interface::config::{parse_domain, parse_label};
use gw_shared::command::Failure;
use gw_shared::id::AccountId;

use super::InitArguments;
use super::authority::AcmeAnswers;

/// Everything that `init` has to know. Paths are absolute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Answers {
    pub(super) domain: String,
    pub(super) region: String,
    pub(super) account: AccountId,
    pub(super) config: PathBuf,
    pub(super) data_dir: PathBuf,
    pub(super) listen: SocketAddr,
    pub(super) admin_listen: SocketAddr,
    /// Certificate and key; the development CA without.
    pub(super) tls: Option<(PathBuf, PathBuf)>,
    pub(super) acme: Option<AcmeAnswers>,
}

const DOMAIN: &str = "gw.localhost";
const REGION: &str = "eu1";
pub(super) const CONFIG_OF_ROOT: &str = "/etc/gw/gateway.toml";
pub(super) const DATA_DIR_OF_ROOT: &str = "/var/lib/gw-gateway";

pub(super) fn domain(text: &str) -> Result<String, String> {
    parse_domain(text)
        .ok_or_else(|| "it must be a domain in lower case, such as example.com".to_owned())
}

pub(super) fn region(text: &str) -> Result<String, String> {
    parse_label(text).ok_or_else(|| "it must be a label in lower case, such as eu1".to_owned())
}

fn account(text: &str) -> Result<AccountId, String> {
    AccountId::new(text).map_err(|_| "it must be 3 to 15 characters of a-z and 0-9".to_owned())
}

fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse()
        .map_err(|_| "it must be ADDRESS:PORT, such as 0.0.0.0:443".to_owned())
}

impl Answers {
    /// Takes the options, and asks for the rest if there is a dialogue and domain or account are
    /// missing.
    pub(super) fn collect(
        given: InitArguments,
        is_root: bool,
        dialogue: Option<&mut Dialogue<'_>>,
    ) -> Result<Self, Failure> {
        let mut dialogue = dialogue.filter(|_| given.domain.is_none() || given.account.is_none());
        let domain = answer(given.domain, &mut dialogue, &Question::DOMAIN, domain)?;
        let region = answer(given.region, &mut dialogue, &Question::REGION, region)?;
        let account = answer(given.account, &mut dialogue, &Question::ACCOUNT, account)?;
        let listen = default_listen(is_root, is_local(&domain)).to_string();
        let listen = answer(
            given.listen,
            &mut dialogue,
            &Question {
                option: "--listen",
                text: "Listener for callers and agents",
                default: Some(&listen),
            },
            address,
        )?;
        let default_config = if is_root {
            CONFIG_OF_ROOT
        } else {
            "gateway.toml"
        };
        let config = given.config.unwrap_or_else(|| default_config.into());
        let config = full_path("--config", &config)?;
        let data_dir = match given.data_dir {
            Some(folder) => full_path("--data-dir", &folder)?,
            None if is_root => DATA_DIR_OF_ROOT.into(),
            None => config.with_file_name("gw-data"),
        };
        let files = given.tls_certificate.zip(given.tls_key);
        let mut dialogue = dialogue.filter(|_| files.is_none() && !is_local(&domain));
        let acme = AcmeAnswers::collect(given.acme_contact, given.acme_directory, &mut dialogue)?;
        let files = match dialogue.filter(|_| acme.is_none()) {
            Some(dialogue) => dialogue.certificate()?,
            None => files,
        };
        let tls = files.map(|(certificate, key)| {
            Ok::<_, Failure>((
                full_path("--tls-certificate", &certificate)?,
                full_path("--tls-key", &key)?,
            ))
        });
        let admin_listen = given
            .admin_listen
            .unwrap_or(SocketAddr::from((Ipv4Addr::LOCALHOST, 9080)));
        Ok(Self {
            domain,
            region,
            account,
            config,
            data_dir,
            listen,
            admin_listen,
            tls: tls.transpose()?,
            acme,
        })
    }

    /// Whether all names lead to this machine without DNS (RFC 6761 §6.3).
    pub(super) fn is_local(&self) -> bool {
        is_local(&self.domain)
    }
}

fn is_local(domain: &str) -> bool {
    domain.rsplit('.').next() == Some("localhost")
}

fn default_listen(is_root: bool, is_local: bool) -> SocketAddr {
    match (is_root, is_local) {
        (true, _) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 443)),
        (false, true) => SocketAddr::from((Ipv4Addr::LOCALHOST, 8443)),
        (false, false) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 8443)),
    }
}

pub(super) fn full_path(option: &str, path: &Path) -> Result<PathBuf, Failure> {
    absolute(path).map_err(|error| Failure::Usage(format!("{option}: {}: {error}", path.display())))
}

/// A question, and the option that answers it too.
pub(super) struct Question<'a> {
    pub(super) option: &'a str,
    pub(super) text: &'a str,
    pub(super) default: Option<&'a str>,
}

impl Question<'static> {
    const DOMAIN: Self = Self {
        option: "--domain",
        text: "Domain (all names are below REGION.DOMAIN)",
        default: Some(DOMAIN),
    };
    const REGION: Self = Self {
        option: "--region",
        text: "Region",
        default: Some(REGION),
    };
    const ACCOUNT: Self = Self {
        option: "--account",
        text: "Account, to which services belong",
        default: None,
    };
}

/// The value of an option, else the answer on a terminal, else the default.
fn answer<T>(
    given: Option<T>,
    dialogue: &mut Option<&mut Dialogue<'_>>,
    question: &Question<'_>,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<T, Failure> {
    let Question {
        option, default, ..
    } = question;
    match (given, dialogue, default) {
        (Some(given), ..) => Ok(given),
        (None, Some(dialogue), _) => dialogue.ask(question, parse),
        (None, None, Some(default)) => parse(default).map_err(Failure::Usage),
        (None, None, None) => Err(Failure::Usage(format!(
            "init: {option}: missing; give it, such as `{option} acme`: it is asked for only on a \
             terminal"
        ))),
    }
}

/// Asks questions, a line each.
pub(super) struct Dialogue<'a> {
    pub(super) input: &'a mut dyn BufRead,
    pub(super) out: &'a mut dyn Write,
}

impl Dialogue<'_> {
    /// Asks until `parse` accepts the answer. An empty line is the default.
    pub(super) fn ask<T>(
        &mut self,
        question: &Question<'_>,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Result<T, Failure> {
        let Question {
            option,
            text,
            default,
        } = question;
        let prompt = default.map_or_else(
            || format!("{text}: "),
            |default| format!("{text} [{default}]: "),
        );
        loop {
            let line = self.line(option, &prompt)?;
            let given = if line.is_empty() {
                default.unwrap_or_default()
            } else {
                line.as_str()
            };
            match parse(given) {
                Ok(answer) => return Ok(answer),
                Err(error) => self.write(&format!("  {given:?}: {error}\n"))?,
            }
        }
    }

    /// Asks for the files of a certificate, which may be missing.
    fn certificate(&mut self) -> Result<Option<(PathBuf, PathBuf)>, Failure> {
        let prompt = "PEM file of the certificate (empty: a development CA, for now): ";
        let certificate = self.line("--tls-certificate", prompt)?;
        if certificate.is_empty() {
            return Ok(None);
        }
        let key = self.line("--tls-key", "PEM file of its key: ")?;
        Ok(Some((certificate.into(), key.into())))
    }

    fn line(&mut self, option: &str, prompt: &str) -> Result<String, Failure> {
        self.write(prompt)?;
        let mut line = String::new();
        let read = io::Read::take(&mut *self.input, LINE_MAX).read_line(&mut line);
        match read {
            Ok(0) => Err(Failure::Usage(format!(
                "init: {option}: no answer, because the input has ended"
            ))),
            Ok(_) => Ok(line.trim().to_owned()),
            Err(error) => Err(Failure::Run(format!("standard input: {error}"))),
        }
    }

    fn write(&mut self, text: &str) -> Result<(), Failure> {
        let written = self
            .out
            .write_all(text.as_bytes())
            .and_then(|()| self.out.flush());
        written.map_err(|error| Failure::Run(format!("standard output: {error}")))
    }
}

/// Longest line that is read, in bytes.
const LINE_MAX: u64 = 8192;

#[cfg(test)]
mod tests {
    use super::*;

    fn collect(
        given: InitArguments,
        is_root: bool,
        lines: Option<&str>,
    ) -> (Result<Answers, String>, String) {
        let mut input = lines.unwrap_or_default().as_bytes();
        let mut out = Vec::new();
        let mut dialogue = Dialogue {
            input: &mut input,
            out: &mut out,
        };
        let answers = Answers::collect(given, is_root, lines.map(|_| &mut dialogue));
        let answers = answers.map_err(|failure| failure.message().to_owned());
        (answers, String::from_utf8(out).unwrap())
    }

    fn account() -> Option<AccountId> {
        Some(AccountId::new("acme").unwrap())
    }

    #[test]
    fn without_a_terminal_the_account_is_the_only_answer_without_a_default() {
        let (answers, asked) = collect(InitArguments::default(), false, None);
        assert!(answers.unwrap_err().contains("--account: missing") && asked.is_empty());

        let given = InitArguments {
            account: account(),
            ..InitArguments::default()
        };
        let answers = collect(given, false, None).0.unwrap();
        assert_eq!(
            (answers.domain.as_str(), answers.region.as_str()),
            ("gw.localhost", "eu1")
        );
        assert_eq!(
            (answers.listen, answers.tls.clone()),
            (SocketAddr::from(([127, 0, 0, 1], 8443)), None)
        );
        assert_eq!(
            answers.config,
            std::env::current_dir().unwrap().join("gateway.toml")
        );
        assert_eq!(answers.data_dir, answers.config.with_file_name("gw-data"));

        let given = InitArguments {
            account: account(),
            domain: Some("example.com".into()),
            ..Default::default()
        };
        assert_eq!(
            collect(given, false, None).0.unwrap().listen,
            SocketAddr::from(([0, 0, 0, 0], 8443))
        );
        let given = InitArguments {
            account: account(),
            ..InitArguments::default()
        };
        let answers = collect(given, true, None).0.unwrap();
        assert_eq!(answers.listen, SocketAddr::from(([0, 0, 0, 0], 443)));
        assert_eq!(answers.config, Path::new(CONFIG_OF_ROOT));
        assert_eq!(answers.data_dir, Path::new(DATA_DIR_OF_ROOT));
    }

    #[test]
    fn a_terminal_is_asked_for_what_the_options_do_not_give() {
        let lines = "EXAMPLE\nexample.com\n\nno\nacme\n\n\n/c.pem\n/k.pem\n";
        let (answers, asked) = collect(InitArguments::default(), true, Some(lines));
        let answers = answers.unwrap();
        assert_eq!(
            (answers.domain.as_str(), answers.region.as_str()),
            ("example.com", "eu1")
        );
        assert_eq!(
            (answers.account.to_string().as_str(), answers.listen.port()),
            ("acme", 443)
        );
        assert_eq!(answers.tls, Some(("/c.pem".into(), "/k.pem".into())));
        assert!(
            asked.starts_with("Domain (all names are below REGION.DOMAIN) [gw.localhost]: "),
            "{asked}"
        );
        for refused in ["\"EXAMPLE\": it must be a domain", "\"no\": "] {
            assert!(asked.contains(refused), "{refused}: {asked}");
        }

        let given = InitArguments {
            region: Some("us1".into()),
            domain: Some("gw.localhost".into()),
            ..Default::default()
        };
        let (answers, asked) = collect(given, false, Some("acme\n\n"));
        assert_eq!(
            (
                answers.unwrap().region.as_str(),
                asked.matches(": ").count()
            ),
            ("us1", 2),
            "{asked}"
        );

        let given = InitArguments {
            domain: Some("example.com".into()),
            account: account(),
            ..Default::default()
        };
        let (answers, asked) = collect(given, false, Some(""));
        assert_eq!((answers.unwrap().tls, asked.as_str()), (None, ""));

        let (answers, _) = collect(InitArguments::default(), false, Some("example.com\n"));
        assert!(answers.unwrap_err().contains("--region: no answer"));
    }

    #[test]
    fn a_terminal_is_asked_for_an_authority_and_its_proofs() {
        let begin = "example.com\n\nacme\n\n";
        let acme = |rest: &str| {
            let lines = format!("{begin}{rest}");
            let (answers, asked) = collect(InitArguments::default(), true, Some(&lines));
            let answers = answers.unwrap();
            assert_eq!(answers.tls, None, "{asked}");
            (answers.acme.unwrap(), asked)
        };
        let (answers, asked) = acme("nobody\nadmin@example.com\n\n");
        assert_eq!(answers.contact, "admin@example.com");
        assert_eq!((answers.directory, answers.updates), (None, None));
        assert!(
            asked.contains("\"nobody\": it must be a mail address"),
            "{asked}"
        );

        let (answers, asked) = acme("admin@example.com\nhost\n192.0.2.53\n\nacme\n/acme.key\n");
        let updates = answers.updates.unwrap();
        assert_eq!(updates.server.to_string(), "192.0.2.53:53");
        assert_eq!(updates.key_name, "acme");
        assert_eq!(updates.key_file, Path::new("/acme.key"));
        for refused in ["\"host\": it must be ADDRESS", "\"\": it must not be empty"] {
            assert!(asked.contains(refused), "{refused}: {asked}");
        }

        let given = InitArguments {
            acme_contact: Some("admin@example.com".into()),
            acme_directory: Some("https://ca.test/dir".into()),
            ..Default::default()
        };
        let (answers, _) = collect(given, true, Some(&format!("{begin}\n")));
        let acme = answers.unwrap().acme.unwrap();
        assert_eq!(acme.directory.as_deref(), Some("https://ca.test/dir"));
        assert_eq!(acme.updates, None);
    }
}
