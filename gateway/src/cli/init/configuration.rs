//! The configuration file that `init` writes: the commented example, with the answers in it.

use std::fmt;
use std::fs::{self, Permissions};
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use gw_interface::config::{Challenge, Config};
use gw_shared::command::{self, Failure};
use gw_shared::files;

use super::answers::Answers;

/// Also what the Debian package installs as `/etc/gw/gateway.toml`.
const EXAMPLE: &str = include_str!("../../../../packaging/examples/gateway.toml");
const EXAMPLE_PATH: &str = "gw-gateway serve --config gateway.toml";

/// What happened to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Written {
    Created,
    Replaced,
    /// It was the example of the Debian package.
    ExampleReplaced,
    /// It has the same settings.
    Unchanged,
}

impl Written {
    pub(super) fn is_change(self) -> bool {
        self != Self::Unchanged
    }
}

impl fmt::Display for Written {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Created => "created",
            Self::Replaced => "replaced",
            Self::ExampleReplaced => "written, in place of the example of the package",
            Self::Unchanged => "exists with these settings, unchanged",
        })
    }
}

/// Writes the configuration file. A file with other settings is replaced only with `force`, or if
/// it is the example of the Debian package. Returns the configuration that is in force.
pub(super) fn write(answers: &Answers, force: bool) -> Result<(Config, Written), Failure> {
    let path = answers.config.as_path();
    let text = text(answers);
    let checked =
        Config::check(&text, |_| None).map_err(|errors| Failure::Usage(format!("init: {errors}")));
    let (config, warnings) = checked?;
    for warning in warnings {
        command::note("gw-gateway", format_args!("warning: {warning}"));
    }
    let (config, written) = match fs::read_to_string(path) {
        Ok(existing) => match Config::parse(&existing, |_| None) {
            Ok(existing) if has_answers(&existing, &config) => (existing, Written::Unchanged),
            _ if existing == EXAMPLE => (config, Written::ExampleReplaced),
            _ if force => (config, Written::Replaced),
            _ => {
                return Err(Failure::Usage(format!(
                    "init: {} exists with other settings; --force replaces it, --config names \
                     another file",
                    path.display()
                )));
            }
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => (config, Written::Created),
        Err(error) => {
            let found = files::cannot_read(path, &error);
            let message = format!("init: {found}, or name another file with --config");
            return Err(Failure::Run(message));
        }
    };
    if written.is_change() {
        put(path, &text)?;
    }
    Ok((config, written))
}

/// Whether a configuration has what `answered` has; it may have more.
fn has_answers(config: &Config, answered: &Config) -> bool {
    config.region == answered.region
        && config.data_dir == answered.data_dir
        && config.listen == answered.listen
        && config.admin_listen == answered.admin_listen
        && config.certificate == answered.certificate
        && authority(config) == authority(answered)
        && updates(answered).is_none_or(|answered| updates(config) == Some(answered))
}

/// Directory and contacts of the ACME authority.
fn authority(config: &Config) -> Option<(&String, &Vec<String>)> {
    let settings = &config.acme.as_ref()?.settings;
    Some((&settings.directory, &settings.contacts))
}

/// Server and key of the DNS updates.
fn updates(config: &Config) -> Option<(SocketAddr, &str, &Path)> {
    match config.acme.as_ref()?.challenge.as_ref()? {
        Challenge::Rfc2136(it) => Some((it.server, &it.key_name, &it.key_file)),
        Challenge::Hook(_) | Challenge::TlsAlpn => None,
    }
}

/// Writes a file that all users may read, and its folder if that is missing.
pub(super) fn put(path: &Path, text: &str) -> Result<(), Failure> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    let written = fs::create_dir_all(folder)
        .and_then(|()| files::write_private(path, text.as_bytes()))
        .and_then(|()| fs::set_permissions(path, Permissions::from_mode(0o644)));
    written.map_err(|error| {
        Failure::Run(format!(
            "{}: cannot be written: {error}; run the command as a user that may write there, or \
             name another path",
            path.display()
        ))
    })
}

fn text(answers: &Answers) -> String {
    let Answers {
        domain,
        region,
        config,
        data_dir,
        listen,
        admin_listen,
        tls,
        acme,
        ..
    } = answers;
    let about = "# Configuration of gw-gateway, written by `gw-gateway init`. Keys behind a `#` \
                 are shown with their defaults, or with\n\
                 # an example where they have none. gateway.toml(5) describes them all; packages \
                 install docs/ as\n# /usr/share/doc/gw-gateway.\n";
    let rest = EXAMPLE
        .split_once("\n#\n")
        .map_or(EXAMPLE, |(_, rest)| rest);
    let rest = rest.replacen(
        EXAMPLE_PATH,
        &format!("gw-gateway serve --config {}", config.display()),
        1,
    );
    let mut text = format!("{about}#\n{rest}");
    set(&mut text, "region", region.as_str());
    set(&mut text, "domain", domain.as_str());
    set(&mut text, "data_dir", data_dir.display().to_string());
    set(&mut text, "listen", listen.to_string());
    set(&mut text, "admin_listen", admin_listen.to_string());
    if let Some((certificate, key)) = tls {
        set(
            &mut text,
            "tls_certificate",
            certificate.display().to_string(),
        );
        set(&mut text, "tls_key", key.display().to_string());
    }
    if let Some(acme) = acme {
        set(&mut text, "tls", "acme");
        set(&mut text, "contact", vec![acme.contact.clone()]);
        set(&mut text, "terms_accepted", true);
        match &acme.updates {
            Some(updates) => {
                set(&mut text, "challenge", "dns-rfc2136");
                set(&mut text, "server", updates.server.to_string());
                set(&mut text, "key_name", updates.key_name.as_str());
                set(
                    &mut text,
                    "key_file",
                    updates.key_file.display().to_string(),
                );
            }
            None => set(&mut text, "challenge", "tls-alpn"),
        }
        if let Some(directory) = &acme.directory {
            set(&mut text, "directory", directory.as_str());
        }
    }
    text
}

/// Sets a key of the example, in the line where the example has it.
fn set(text: &mut String, key: &str, value: impl Into<toml::Value>) {
    let value = value.into();
    let has_key = |line: &str| {
        line.trim_start_matches('#')
            .strip_prefix(key)
            .is_some_and(|rest| rest.starts_with(" = "))
    };
    let mut is_set = false;
    let lines = text.lines().map(|line| {
        let is_line = !is_set && has_key(line);
        is_set |= is_line;
        if is_line {
            format!("{key} = {value}\n")
        } else {
            format!("{line}\n")
        }
    });
    *text = lines.collect();
}

#[cfg(test)]
mod tests {

    use gw_shared::id::AccountId;

    use super::super::authority::{AcmeAnswers, DnsUpdates};
    use super::*;

    fn answers(folder: &Path) -> Answers {
        Answers {
            domain: "gw.localhost".to_owned(),
            region: "us1".to_owned(),
            account: AccountId::new("acme").unwrap(),
            config: folder.join("etc/gateway.toml"),
            data_dir: folder.join("with \"quotes\""),
            listen: SocketAddr::from(([127, 0, 0, 1], 8443)),
            admin_listen: SocketAddr::from(([127, 0, 0, 1], 9999)),
            tls: None,
            acme: None,
        }
    }

    #[test]
    fn an_authority_with_proofs_in_dns_issues_for_all_names() {
        let folder = tempfile::tempdir().unwrap();
        let acme = |updates| AcmeAnswers {
            contact: "admin@example.com".to_owned(),
            directory: None,
            updates,
        };
        let names = |acme| {
            let answers = Answers {
                acme: Some(acme),
                ..answers(folder.path())
            };
            let (config, _) = write(&answers, true).unwrap();
            config.acme.unwrap().settings.names
        };
        assert_eq!(names(acme(None)), ["us1.gw.localhost"]);
        let updates = DnsUpdates {
            server: "192.0.2.53:53".parse().unwrap(),
            key_name: "acme".to_owned(),
            key_file: folder.path().join("acme.key"),
        };
        assert_eq!(
            names(acme(Some(updates))),
            ["us1.gw.localhost", "*.us1.gw.localhost"]
        );
    }

    #[test]
    fn every_answer_is_in_the_commented_file() {
        let folder = tempfile::tempdir().unwrap();
        let answers = answers(folder.path());
        let (config, written) = write(&answers, false).unwrap();
        assert_eq!(written, Written::Created);
        assert_eq!(config.region.apex(), "us1.gw.localhost");
        assert_eq!(
            (config.listen, config.admin_listen),
            (answers.listen, answers.admin_listen)
        );
        assert_eq!(config.data_dir, answers.data_dir);
        let text = fs::read_to_string(&answers.config).unwrap();
        assert_eq!(
            fs::metadata(&answers.config).unwrap().permissions().mode() & 0o777,
            0o644
        );
        assert!(
            text.starts_with("# Configuration of gw-gateway, written by `gw-gateway init`."),
            "{text}"
        );
        assert!(
            text.contains(&format!(
                "gw-gateway serve --config {} --check",
                answers.config.display()
            )),
            "{text}"
        );
        // The keys of the example that are not answered stay as they are, also those of the same
        // name in a table.
        for line in [
            "#workers = 0",
            "#region = \"us-east-1\"",
            "[archive]",
            "#tls_key = \"/etc/gw/privkey.pem\"",
        ] {
            assert!(text.lines().any(|it| it == line), "{line}: {text}");
        }

        let with_files = text_with_certificate(&answers);
        assert!(
            with_files.contains("\ntls_certificate = \"/c.pem\"\ntls_key = \"/k.pem\"\n"),
            "{with_files}"
        );
    }

    fn text_with_certificate(answers: &Answers) -> String {
        text(&Answers {
            tls: Some(("/c.pem".into(), "/k.pem".into())),
            ..answers.clone()
        })
    }

    #[test]
    fn only_a_file_with_the_same_answers_or_the_example_is_accepted() {
        let folder = tempfile::tempdir().unwrap();
        let answers = answers(folder.path());
        put(&answers.config, EXAMPLE).unwrap();
        assert_eq!(write(&answers, false).unwrap().1, Written::ExampleReplaced);

        // A setting of the administrator stays.
        let edited = format!(
            "burst = 7\n{}",
            fs::read_to_string(&answers.config).unwrap()
        );
        fs::write(&answers.config, &edited).unwrap();
        let (config, written) = write(&answers, false).unwrap();
        assert_eq!(
            (config.default_rate.burst(), written),
            (7, Written::Unchanged)
        );
        assert_eq!(fs::read_to_string(&answers.config).unwrap(), edited);

        let other = Answers {
            domain: "example.com".to_owned(),
            ..answers
        };
        let message = write(&other, false).unwrap_err().message().to_owned();
        assert!(
            message.contains(other.config.to_str().unwrap()) && message.contains("--force"),
            "{message}"
        );
        assert_eq!(fs::read_to_string(&other.config).unwrap(), edited);
        assert_eq!(write(&other, true).unwrap().1, Written::Replaced);
    }

    #[test]
    fn a_certificate_that_cannot_be_used_is_refused_before_the_file_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let tls = Some((
            folder.path().join("none.pem"),
            folder.path().join("none.key"),
        ));
        let answers = Answers {
            tls,
            ..answers(folder.path())
        };
        let Failure::Usage(message) = write(&answers, false).unwrap_err() else {
            panic!()
        };
        assert!(
            message.contains("none.pem") && !answers.config.exists(),
            "{message}"
        );
    }
}
