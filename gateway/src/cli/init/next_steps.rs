//! What `init` prints at its end: the next commands, and what names and certificate need.

use std::net::SocketAddr;
use std::path::PathBuf;

use gw_base::tls::CertificateSource;
use gw_interface::config::{Challenge, Config};
use gw_shared::command::{quoted, sudo};

use super::answers::Answers;

/// Where the gateway is when the text is printed.
#[derive(Debug, Clone, Copy)]
pub(super) enum SetupStage {
    /// To be started by a command.
    Stopped,
    /// Runs in this process, at these addresses.
    Foreground {
        listen: SocketAddr,
        admin_listen: SocketAddr,
    },
    /// Runs as the service of systemd.
    Service,
    /// To be started as the service of systemd.
    StoppedService,
}

/// The text, with commands that work as they are.
pub(super) fn next_steps(answers: &Answers, config: &Config, stage: SetupStage) -> String {
    let name = std::env::args()
        .next()
        .unwrap_or_else(|| "gw-gateway".to_owned());
    let program = format!("{}{}", sudo(), quoted(&name));
    let file = quoted(&answers.config.display().to_string());
    let start = match stage {
        SetupStage::Stopped => {
            format!(
                "{}Start the gateway:\n\n  {program} serve --config {file}\n\n\
                 Then, in another terminal:\n",
                service_of_root()
            )
        }
        SetupStage::StoppedService => {
            format!(
                "Start the gateway:\n\n  {}systemctl enable --now gw-gateway\n\nThen:\n",
                sudo()
            )
        }
        SetupStage::Foreground { .. } => {
            "The gateway runs until Ctrl-C. In another terminal:\n".to_owned()
        }
        SetupStage::Service => "The gateway runs. Next:\n".to_owned(),
    };
    let (listen, admin_listen) = match stage {
        SetupStage::Foreground {
            listen,
            admin_listen,
        } => (listen, admin_listen),
        _ => (config.listen, config.admin_listen),
    };
    let connection = if config.admin_listen.port() == 0 {
        let token = quoted(&config.data_dir.join("admin.token").display().to_string());
        format!("--admin-url http://{admin_listen} --admin-token-file {token}")
    } else {
        format!("--config {file}")
    };
    let account = &answers.account;
    let port = if listen.port() == 443 {
        String::new()
    } else {
        format!(":{}", listen.port())
    };
    let gateway = format!("https://{}{port}", config.region.apex());
    // Users cannot read the file in `data_dir`.
    let (authority, option) = match development_authority(config) {
        Some(_) => (
            ", the lines that write the certificate of the development CA to gw-ca.crt",
            " --ca-file gw-ca.crt",
        ),
        None => ("", ""),
    };
    format!(
        "{}\n\
         {start}\n  {program} service create {account} api --with-key --with-agent {connection}\n\n\
         It prints a service key{authority}, a token, and the command that reads it for a program \
         on port 3000:\n\n  gw-agent http 3000 --gateway {gateway}{option} --token-file -",
        names_and_certificate(answers, config)
    )
}

/// The certificate of the development CA, if the gateway uses it.
pub(super) fn development_authority(config: &Config) -> Option<PathBuf> {
    matches!(config.certificate, CertificateSource::Development { .. })
        .then(|| config.data_dir.join("dev-ca.crt"))
}

/// Note for a user that has forgotten `sudo`.
fn service_of_root() -> &'static str {
    if rustix::process::geteuid().is_root() {
        ""
    } else {
        "Where systemd runs, `init` of root (sudo) makes a service of it. Without:\n\n"
    }
}

fn names_and_certificate(answers: &Answers, config: &Config) -> String {
    let apex = config.region.apex();
    let mut text = String::new();
    if !answers.is_local() {
        text += &format!(
            "\n\
             DNS records, both with the public address of the gateway:\n\n  {apex}.    A  \
             ADDRESS\n  *.{apex}.  A  ADDRESS\n"
        );
    }
    if let Some(acme) = &config.acme {
        text += &format!(
            "\n\
             Certificate: for {}, ordered now at {}. Until it is there, the gateway answers with \
             one of a development CA; `gw-gateway certificate list` shows its state.\n",
            acme.settings.names.join(" and "),
            acme.settings.directory,
        );
        if matches!(acme.challenge, Some(Challenge::TlsAlpn)) {
            text += &format!(
                "For *.{apex} the authority needs a proof in DNS: set acme.challenge to \
                 \"dns-rfc2136\" or \"dns-hook\" in {}, and restart the gateway.\n",
                answers.config.display()
            );
        }
    }
    if development_authority(config).is_none() {
        return text;
    }
    text += "\nCertificate: of a development CA, which callers and agents have to be given.\n";
    if !answers.is_local() {
        text += &format!(
            "For one of a public CA:\n\n  {}certbot certonly --manual --preferred-challenges dns \
             -d {apex} -d '*.{apex}'\n\n\
             Then set tls_certificate and tls_key in {} to files that the user of the gateway can \
             read, and restart it.\n",
            sudo(),
            answers.config.display()
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use gw_shared::id::AccountId;

    use super::*;
    use crate::cli::arguments::Arguments;

    fn text(domain: &str, admin_listen: &str, stage: SetupStage) -> String {
        let answers = Answers {
            domain: domain.to_owned(),
            region: "eu1".to_owned(),
            account: AccountId::new("acme").unwrap(),
            config: "/etc/gw/gateway.toml".into(),
            data_dir: "/var/lib/gw-gateway".into(),
            listen: SocketAddr::from(([127, 0, 0, 1], 8443)),
            admin_listen: admin_listen.parse().unwrap(),
            tls: None,
            acme: None,
        };
        let toml = format!(
            "region = \"eu1\"\ndomain = \"{domain}\"\ndata_dir = \"/var/lib/gw-gateway\"\n\
             listen = \"127.0.0.1:8443\"\nadmin_listen = \"{admin_listen}\"\n"
        );
        next_steps(&answers, &Config::parse(&toml, |_| None).unwrap(), stage)
    }

    /// The commands of this program, without its name.
    fn commands(text: &str) -> Vec<Vec<&str>> {
        let verbs = ["service", "serve"];
        let lines = text.lines().filter_map(|line| line.strip_prefix("  "));
        let words = lines.map(|line| {
            line.split(' ')
                .skip_while(|word| !verbs.contains(word))
                .collect::<Vec<_>>()
        });
        words.filter(|words| !words.is_empty()).collect()
    }

    #[test]
    fn printed_commands_are_understood() {
        let at = |text: &str| text.parse().unwrap();
        let foreground = SetupStage::Foreground {
            listen: at("127.0.0.1:7777"),
            admin_listen: at("127.0.0.1:8888"),
        };
        for (stage, count) in [
            (SetupStage::Stopped, 2),
            (SetupStage::Service, 1),
            (SetupStage::StoppedService, 1),
            (foreground, 1),
        ] {
            let text = text("gw.localhost", "127.0.0.1:9080", stage);
            let commands = commands(&text);
            assert_eq!(commands.len(), count, "{text}");
            for words in commands {
                let parsed = Arguments::try_parse_from(
                    std::iter::once("gw-gateway").chain(words.iter().copied()),
                );
                assert!(parsed.is_ok(), "{words:?}: {:?}", parsed.err());
                assert!(
                    words.ends_with(&["--config", "/etc/gw/gateway.toml"]),
                    "{words:?}"
                );
            }
        }
        let text = text("gw.localhost", "127.0.0.1:0", foreground);
        let connection = "--admin-url http://127.0.0.1:8888 --admin-token-file \
                          /var/lib/gw-gateway/admin.token\n";
        assert!(
            text.contains(connection) && text.contains("--gateway https://eu1.gw.localhost:7777 "),
            "{text}"
        );
        assert!(
            text.contains("to gw-ca.crt, ")
                && text.ends_with(" --ca-file gw-ca.crt --token-file -")
                && !text.contains("certbot"),
            "{text}"
        );
    }

    #[test]
    fn public_names_need_records_and_a_certificate_for_both() {
        let text = text("example.com", "127.0.0.1:9080", SetupStage::Service);
        for part in [
            "  eu1.example.com.    A",
            "  *.eu1.example.com.  A",
            "-d eu1.example.com -d '*.eu1.example.com'",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
